"""PD-Sparse."""
