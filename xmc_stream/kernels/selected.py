"""Sparse rows that keep the entries of some features."""

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
