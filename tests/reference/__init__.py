"""Plain, slow twins of what the library computes, written to be read and believed."""
