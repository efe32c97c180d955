"""Compiled loops of the group lasso."""
