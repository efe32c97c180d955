"""One file a format: whether a file is of it, and the set that files of it hold; `registry` chooses among them."""
