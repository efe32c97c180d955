"""Compiled loops of models of two factors."""
