"""Compiled loops of models with a vector of weights for each class: coordinate descent."""
