"""Matrices on disk or in memory, read by ranges of rows: what the formats of matrices share."""
