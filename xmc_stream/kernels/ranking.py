"""The best labels of a row so far, and how scores of more classes are folded into them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import inner_kernel, kernel


class Ranking(NamedTuple):
    """The k best labels of each row and their scores (n, k), from best to worst, ties to the lower label.

    -1 and -inf where there is none yet.
    """

    labels: NDArray[np.int64]
    scores: NDArray[np.float32]


@inner_kernel
def insert(label: int, score: np.float32, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
    """Put a label that is none of the k best yet among them, if it is: ties go to the lower label."""
    q = len(scores) - 1
    if score < scores[q] or (score == scores[q] and label > labels[q]):
        return
    while q > 0 and (scores[q - 1] < score or (scores[q - 1] == score and labels[q - 1] > label)):
        scores[q], labels[q] = scores[q - 1], labels[q - 1]
        q -= 1
    scores[q], labels[q] = score, label


@kernel
def insert_all(
    scores: NDArray[np.float32],
    first_class: int,
    n_classes: int,
    best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:
    """Fold the scores of classes first_class, first_class + 1, ... into one row's k best; see `top_k`."""
    n_lanes = len(scores) // LANES
    by_lane = scores[: n_lanes * LANES].reshape(n_lanes, LANES)
    k = len(best_scores)
    worst = best_scores[k - 1]
    for lane in range(-(-n_classes // LANES)):
        hits = np.int32(lane == n_lanes)  # the rest, which is no whole lane
        if not hits:
            for c in range(LANES):
                hits += np.int32(by_lane[lane, c] > worst)
        if not hits:
            continue
        for c in range(lane * LANES, min((lane + 1) * LANES, n_classes)):
            if scores[c] > worst:
                insert(first_class + c, scores[c], best_labels, best_scores)
                worst = best_scores[k - 1]


@kernel
def bar(
    i: int,
    first_class: int,
    n_classes: int,
    barred: Labels,
    scores: NDArray[np.float32],
) -> None:
    """-inf for the labels of row i that are barred, if there are any such pairs."""
    barred_indptr, barred_indices = barred
    if len(barred_indptr):
        for p in range(barred_indptr[i], barred_indptr[i + 1]):
            if first_class <= barred_indices[p] < first_class + n_classes:
                scores[barred_indices[p] - first_class] = -np.inf


LANES = 32  # a tile's width is a multiple of it: classes whose scores are compared in one go


@kernel
def fold_top_k(
    scores: NDArray[np.float32], first_class: int, barred: Labels, best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:  # fmt: skip
    """Fold scores (n x c) of classes first_class, first_class + 1, ... into each row's best k."""
    n, c = scores.shape
    for i in range(n):
        bar(i, first_class, c, barred, scores[i])
        insert_all(scores[i], first_class, c, best_labels[i], best_scores[i])
