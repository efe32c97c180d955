"""Raw text to tf-idf: records with a text and labels, the vocabulary of all of them, and the weights."""
