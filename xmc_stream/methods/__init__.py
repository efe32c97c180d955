"""Methods of learning: one folder each. `contract` says what a method is, `registry` which there are."""
