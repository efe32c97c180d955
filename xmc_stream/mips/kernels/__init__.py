"""Compiled loops of the search for largest inner products."""
