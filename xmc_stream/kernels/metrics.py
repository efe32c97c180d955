"""What metrics need of scores of all classes: those of the true labels, how many exceed them, how many are predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel


@kernel
def sort_rows(indptr: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    """Sort the values of each row, ascending."""
    for i in range(len(indptr) - 1):
        values[indptr[i] : indptr[i + 1]].sort()


@kernel
def take_positives(
    scores: NDArray[np.float32], first_class: int, y_indptr: NDArray[np.int64], y_indices: NDArray[Any],
    positives: NDArray[np.float32],
) -> None:  # fmt: skip
    """positives[p] = the score of the true label y_indices[p], for those among the classes of scores (n x c)."""
    n, c = scores.shape
    for i in range(n):
        for p in range(y_indptr[i], y_indptr[i + 1]):
            if first_class <= y_indices[p] < first_class + c:
                positives[p] = scores[i, y_indices[p] - first_class]


@kernel
def fold_counts(
    scores: NDArray[np.float32], first_class: int, y_indptr: NDArray[np.int64], positives: NDArray[np.float32],
    threshold: np.float32, predicted: NDArray[Any], above: NDArray[np.int64],
) -> None:  # fmt: skip
    """predicted[label] += rows whose score exceeds the threshold; above[i]: see `linear.kernels.topk`.

    scores (n x c): of classes first_class, first_class + 1, ...; positives: of the true labels, ascending in each row.
    """
    n, c = scores.shape
    for i in range(n):
        row = scores[i]
        for k in range(c):
            predicted[first_class + k] += np.int32(row[k] > threshold)
        for p in range(y_indptr[i], y_indptr[i + 1]):
            over, level = np.int32(0), np.int32(0)
            for k in range(c):
                over += np.int32(row[k] > positives[p])
                level += np.int32(row[k] >= positives[p])
            if level == 0:  # nor does any reach the higher ones
                break
            above[i] += over + level
