"""What metrics need of every score of a tile, while the best labels are found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import calibrate_row, calibrated
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.ranking import Ranking, bar, insert_all
from xmc_stream.linear.kernels.guide import guide_row, guided
from xmc_stream.linear.kernels.scores import TileClasses, score_all


class TrueScores(NamedTuple):
    """The scores of the true labels of row i: scores[indptr[i] : indptr[i + 1]], ascending."""

    indptr: NDArray[np.int64]
    scores: NDArray[np.float32]


@kernel
def score_positives(
    x: CSR, y: Labels, classes: TileClasses, terms: NDArray[np.float32], positives: NDArray[np.float32]
) -> None:
    """The scores of the true labels that one tile holds: positives[p] is that of y.indices[p].

    Rows without true labels in the tile are not scored. terms: as `top_k` has them.
    """
    indptr, indices, data = x
    y_indptr, y_indices = y
    first_class, n_classes, tile, by, groups, _, scores = classes
    start, slots, weights, bias = tile
    for i in range(len(indptr) - 1):
        p, end = y_indptr[i], y_indptr[i + 1]
        while p < end and y_indices[p] < first_class:
            p += 1
        if p == end or y_indices[p] >= first_class + n_classes:
            continue
        score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        while p < end and y_indices[p] < first_class + n_classes:
            c = y_indices[p] - first_class
            score = guided(scores[c], c, i, terms, groups) if groups.shape[0] else scores[c]
            positives[p] = calibrated(score, c, by) if by.shape[1] else score
            p += 1


@kernel
def count_above(
    x: CSR,
    classes: TileClasses,
    terms: NDArray[np.float32],
    best: Ranking,
    barred: Labels,
    true: TrueScores,
    threshold: np.float32,
    predicted: NDArray[Any],
    above: NDArray[np.int64],
) -> None:
    """Do what `top_k` does; predicted[label] += rows in which it scores above the threshold; and for each row

    above[i] += 2 #{(z, s): z > s} + #{(z, s): z = s}, z the score of any class of the tile, s of any true label of the
    row.
    """
    indptr, indices, data = x
    first_class, n_classes, tile, by, groups, _, scores = classes
    start, slots, weights, bias = tile
    best_labels, best_scores = best
    y_indptr, positives = true
    for i in range(len(indptr) - 1):
        score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        guide_row(scores, i, terms, groups)
        calibrate_row(scores, by)
        bar(i, first_class, n_classes, barred, scores)
        insert_all(scores, first_class, n_classes, best_labels[i], best_scores[i])
        row = scores[:n_classes]
        counts = predicted[first_class : first_class + n_classes]
        for c in range(n_classes):
            counts[c] += np.int32(row[c] > threshold)
        for p in range(y_indptr[i], y_indptr[i + 1]):
            over, level = np.int32(0), np.int32(0)
            for c in range(n_classes):
                over += np.int32(row[c] > positives[p])
                level += np.int32(row[c] >= positives[p])
            if level == 0:  # nor does any reach the higher ones
                break
            above[i] += over + level
