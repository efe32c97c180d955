"""The domains of keyed draws: numbers that keep draws of different kinds apart. Models depend on them: none may change.

`permutation.key_of` makes a key of seed, label, round and epoch. A draw for one class has the label of that class, which is
below 2^40. A draw for one epoch has the epoch's number, which is below 2^40 too. Any other draw has a number from here in
the place of the label or of the epoch, so that its key is none of theirs.

FIRST_NEGATIVES equals SHARED_ORDER, and WEIGHT_DRAWS equals HELD_OUT_ROWS. They do not meet: the first of each stands in the
place of the epoch, the second in that of the label.

SHARED_ORDER and LABEL_NUMBERS are equal and stand in the same place. They do not meet either: only PPDSparse draws orders
that classes share, only PD-Sparse numbers labels, and one training is by one method. What is new gets a new number.

`datasets.kernels.split` has no domain. It draws with label, round 0 and epoch 0, as a class's first visiting order does. It
does so when a dataset is split, and a training never sees that draw.
"""

from __future__ import annotations

# in the place of the epoch
FIRST_NEGATIVES = 1 << 40  # PPDSparse: the negatives that a class starts with
WEIGHT_DRAWS = 1 << 41  # PPDSparse: weights that an approximate search scores with

# in the place of the label
SHARED_ORDER = 1 << 40  # PPDSparse: orders of rows that all large classes share
LABEL_NUMBERS = 1 << 40  # PD-Sparse: the permutation of labels
HELD_OUT_ROWS = 1 << 41  # PD-Sparse: the rows that are held out
PASSES = 1 << 42  # PD-Sparse: orders and draws of passes
FEATURE_ORDER = 1 << 43  # group lasso: orders and draws of features
ZERO_CLASSES = 1 << 44  # inner-product search: the zero class that answers a row
LABEL_GROUPS = 1 << 45  # PPDSparse: rows and labels that a clustering of the labels begins from
TREE_FEATURES = 1 << 46  # label tree: where features stand in the vectors of labels
TREE_SPLITS = 1 << 47  # label tree: the two labels that a split begins from
TREE_ROWS = 1 << 48  # label tree: which rows of a beam a node is trained on
TREE_ORDERS = 1 << 49  # label tree: the seed of the visiting orders of some children of a node
TREE_CHOICE = 1 << 50  # label tree: the labels that C is chosen by

# in a list that seeds numpy's generator: seed, this, the first label of a unit
STEPS = 0x3E01  # MEMOIR: the draws of a step, whose number stands in the place of the label
FIRST_FACTORS = (
    0x1E31  # LEML: the factors of labels that a training begins from; MEMOIR: the V that its SVD begins from
)
