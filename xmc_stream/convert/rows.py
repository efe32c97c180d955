"""Rows of X or Y in memory, as parts give them and pieces keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rows of X or Y: indptr from 0, indices sorted and unique in a row, values (None of Y, where each is one).
Rows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]


def positives(
    indptr: NDArray[np.int64], indices: NDArray[Any], positive: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The entries of Y that are not stored zeros. positive (nnz,): one or zero for each, of any type."""
    if positive.all():
        return indptr, indices
    return set_before(positive)[indptr], indices[positive != 0]


def row_with_minus_one(indptr: NDArray[np.int64], values: NDArray[Any]) -> int | None:
    """The first row with a -1 in Y, which beside 1 means that a label is not there; None for none."""
    signs = values == -1
    return int(np.searchsorted(indptr, np.argmax(signs), side="right")) - 1 if signs.any() else None


def set_before(flags: NDArray[Any]) -> NDArray[np.int64]:
    """How many of the flags before each, and of all, are set."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return before
