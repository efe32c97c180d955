"""Products of sparse rows with a matrix that has few rows: entries of other features are left out first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel


@kernel
def keep_selected(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], features: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:  # fmt: skip
    """Move the entries of some features (ascending) to the front of a csr triple, in place; the others are lost.

    indices become places in `features`; row i has the entries [ends[i], ends[i + 1]) then.
    """
    kept = 0
    ends[0] = 0
    for i in range(len(indptr) - 1):
        place = 0
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            after = len(features)
            while place < after:  # the first place whose feature is j or above
                middle = (place + after) // 2
                if features[middle] < j:
                    place = middle + 1
                else:
                    after = middle
            if place == len(features):
                break
            if features[place] == j:
                indices[kept], data[kept] = place, data[p]
                kept, place = kept + 1, place + 1
        ends[i + 1] = kept


@kernel
def add_products(
    indptr: NDArray[np.int64], places: NDArray[Any], data: NDArray[Any], first: int, dense: NDArray[Any],
    at: NDArray[np.int64], out: NDArray[Any],
) -> None:  # fmt: skip
    """out (n x c) += the rows (n x d, csr) times rows [first, first + m) of a d x c matrix, which are `dense` (m x c).

    at (n,): the next entry of each row, moved on. Called for all of the matrix, in ascending order, it sums the entries of
    a row in their order, however the matrix is cut.
    """
    last = first + len(dense)
    for i in range(len(at)):
        row = out[i]
        p, end = at[i], indptr[i + 1]
        while p < end and places[p] < last:
            x, other = data[p], dense[places[p] - first]
            for c in range(len(row)):
                row[c] += x * other[c]
            p += 1
        at[i] = p
