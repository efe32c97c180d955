"""Models with a row of weights for each selected feature: all other rows of W are zero."""
