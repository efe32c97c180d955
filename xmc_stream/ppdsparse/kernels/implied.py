"""Which labels every row of a label has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import kernel


@kernel
def first_others(y: Labels, others: NDArray[np.int64]) -> None:
    """others[j]: how many labels the first row of label j has beside it. It is -1 before that row is seen."""
    indptr, indices = y
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            if others[indices[p]] < 0:
                others[indices[p]] = indptr[i + 1] - indptr[i] - 1


@kernel
def intersect(
    y: Labels, first: int, ptr: NDArray[np.int64], sizes: NDArray[np.int64], labels: NDArray[np.int32]
) -> None:
    """Keep of each label's list what the rows of a block have too.

    ptr (n + 1,): label first + c has room for labels[ptr[c] : ptr[c + 1]], as many as its first row has beside it, or none
    where it is not asked about. sizes (n,): of the list so far, -1 before its first row is seen.
    """
    indptr, indices = y
    n = len(sizes)
    for i in range(len(indptr) - 1):
        begin, end = indptr[i], indptr[i + 1]
        for p in range(begin, end):
            c = indices[p] - first
            if not 0 <= c < n or ptr[c] == ptr[c + 1] or sizes[c] == 0:
                continue
            at, kept = ptr[c], 0
            if sizes[c] < 0:
                for q in range(begin, end):
                    if q != p:
                        labels[at + kept] = indices[q]
                        kept += 1
            else:
                q = begin
                for t in range(at, at + sizes[c]):  # both ascend
                    while q < end and indices[q] < labels[t]:
                        q += 1
                    if q < end and indices[q] == labels[t]:
                        labels[at + kept] = labels[t]
                        kept += 1
            sizes[c] = kept
