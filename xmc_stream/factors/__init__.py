"""Models of two factors of a low rank."""
