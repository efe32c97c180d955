"""Methods: one folder each."""
