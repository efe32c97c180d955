"""Measuring predictions: metrics of a model or of files of predictions, and probabilities instead of scores."""
