"""Choosing rows for validation so that labels keep their shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of

_11 = np.uint64(11)


@kernel
def choose_rows(
    indptr: NDArray[np.int64],
    labels: NDArray[Any],
    counts: NDArray[np.int64],
    left: NDArray[np.int64],
    seen: NDArray[np.int64],
    taken: NDArray[np.int64],
    fraction: float,
    seed: int,
    chosen: NDArray[np.bool_],
) -> None:
    """Choose rows of a block, for blocks in the order of the rows.

    A row belongs to its rarest label (ties to the lower id), one without labels to the group K. When t rows of a group
    have been seen, floor(t fraction + u) of them are due, u in [0, 1) by seed and group. A row that would leave one of
    its labels without a positive is not taken; another of its group is, later.

    indptr (n + 1,) from 0; counts (K,): positives of each label; left (K,): counts less those chosen; seen, taken
    (K + 1,): rows of each group so far; chosen (n,): the result.
    """
    n_labels = len(counts)
    for i in range(len(indptr) - 1):
        group = n_labels
        spare = True
        for p in range(indptr[i], indptr[i + 1]):
            label = int(labels[p])
            if group == n_labels or counts[label] < counts[group]:
                group = label
            spare = spare and left[label] > 1
        seen[group] += 1
        phase = np.float64(key_of(seed, group, 0, 0) >> _11) * 2.0**-53
        chosen[i] = spare and taken[group] < np.int64(np.floor(seen[group] * fraction + phase))
        if chosen[i]:
            taken[group] += 1
            for p in range(indptr[i], indptr[i + 1]):
                left[labels[p]] -= 1
