"""Compiled loops of PPDSparse: active sets, searches, large classes."""
