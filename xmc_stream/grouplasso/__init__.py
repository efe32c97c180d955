"""The group lasso: rows of W that are zero for all classes together."""
