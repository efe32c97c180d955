"""Compiled loops of the label tree."""
