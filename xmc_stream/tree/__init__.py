"""The label tree: classifiers of nodes and labels, trained on the rows that reach them."""
