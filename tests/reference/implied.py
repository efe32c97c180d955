"""Plain twins of implied labels: which there are, by dense matrices, and what they do to the scores of all labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def implied(Y: NDArray[np.bool_], fewest: int) -> list[list[int]]:
    """Of each label, those that all its rows have beside it; none of labels with fewer rows. Y (rows, labels)."""
    together = Y.T.astype(int) @ Y.astype(int)
    counts = np.diag(together)
    return [
        [m for m in range(len(counts)) if m != j and together[j, m] == counts[j]] if counts[j] >= fewest else []
        for j in range(len(counts))
    ]


def lifted(S: NDArray[np.float32], of_labels: list[list[int]], margin: float) -> NDArray[np.float32]:
    """s'_l = max(s_l, max_{j implies l} s_j - margin) of all rows and labels, in float32."""
    found = S.copy()
    for j, labels in enumerate(of_labels):
        for m in labels:
            found[:, m] = np.maximum(found[:, m], S[:, j] - np.float32(margin))
    return found


def best(S: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best labels of each row, ties to the lower one, and their scores."""
    labels = np.argsort(-S, axis=1, kind="stable")[:, :k]
    return labels, np.take_along_axis(S, labels, axis=1)
