"""Compiled loops of conversion: text and tokens into rows."""
