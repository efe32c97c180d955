"""Models with a vector of weights for each class."""
