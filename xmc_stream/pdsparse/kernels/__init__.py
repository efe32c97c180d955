"""Compiled loops of PD-Sparse: dual steps, tables of v and w by feature."""
