"""Compiled loops of what is done to finished datasets."""
