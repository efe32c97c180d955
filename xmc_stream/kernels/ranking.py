"""The best labels of each row, tile after tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import calibrate_row, calibrated
from xmc_stream.kernels.denserows import TOGETHER, dense_rows, score_four, scratch_for
from xmc_stream.kernels.guide import guide_row, guided, least_score, sureness
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.scores import FEW, LANES, TileClasses, met, score_all, score_few


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
def insert_guided(
    scores: NDArray[np.float32],
    first_class: int,
    i: int,
    terms: NDArray[np.float32],
    groups: NDArray[np.uint8],
    best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:
    """`insert_all` for the guided scores of row i; only classes whose own scores let them be among the best are looked at."""
    k, n_classes = len(best_scores), groups.shape[1]
    n_lanes = len(scores) // LANES
    by_lane = scores[: n_lanes * LANES].reshape(n_lanes, LANES)
    least = least_score(best_scores[k - 1], i, terms, groups.shape[0])
    for lane in range(-(-n_classes // LANES)):
        hits = np.int32(0)
        for c in range(LANES):
            hits += np.int32(by_lane[lane, c] > least)
        if not hits:
            continue
        for c in range(lane * LANES, min((lane + 1) * LANES, n_classes)):
            if scores[c] > least:
                score = guided(scores[c], c, i, terms, groups)
                if score > best_scores[k - 1]:
                    insert(first_class + c, score, best_labels, best_scores)
                    least = least_score(best_scores[k - 1], i, terms, groups.shape[0])


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


@inner_kernel
def _fold(
    scores: NDArray[np.float32],
    first_class: int,
    n_classes: int,
    i: int,
    by: NDArray[np.float32],
    terms: NDArray[np.float32],
    groups: NDArray[np.uint8],
    barred: Labels,
    best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:
    """Fold row i's scores of all classes of a tile into its k best; see `top_k`."""
    if groups.shape[0] and not by.shape[1]:
        bar(i, first_class, n_classes, barred, scores)
        insert_guided(scores, first_class, i, terms, groups, best_labels, best_scores)
        return
    guide_row(scores, i, terms, groups)
    calibrate_row(scores, by)
    bar(i, first_class, n_classes, barred, scores)
    insert_all(scores, first_class, n_classes, best_labels, best_scores)


@kernel
def _top_k_dense(
    n: int, x: CSR, classes: TileClasses, terms: NDArray[np.float32], best: Ranking, barred: Labels
) -> None:
    """`top_k` for the first n rows, which have most features."""
    first_class, n_classes, tile, by, groups, scores = classes
    n_features = len(tile.start) - 1
    four, of_four = scratch_for(n_features), np.empty((TOGETHER, len(scores)), np.float32)
    for first in range(0, n, TOGETHER):
        score_four(x, first, tile, four, of_four)
        for i in range(first, first + TOGETHER):
            _fold(
                of_four[i - first], first_class, n_classes, i, by, terms, groups, barred, best.labels[i], best.scores[i]
            )


@kernel
def top_k(x: CSR, classes: TileClasses, terms: NDArray[np.float32], best: Ranking, barred: Labels) -> None:
    """Fold the scores of one tile into each row's best k.

    Tiles must come in ascending order of classes: a later label then loses every tie. terms: what groups of labels say of
    each row, see `kernels.guide`. barred: labels of each row that score -inf, if there are any.
    """
    indptr, indices, data = x
    first_class, n_classes, tile, by, groups, scores = classes
    start, slots, weights, bias = tile
    best_labels, best_scores = best
    width, k = len(scores), best_scores.shape[1]
    most = width // FEW if len(barred.indptr) == 0 else -1
    marks, touched = np.zeros(width, np.int32), np.empty(width, np.uint16)
    is_guided = groups.shape[0] > 0
    unmet = bias.copy()  # what a class scores at most that is not met
    if is_guided:  # groups add nothing that is above 0
        for c in range(width):
            unmet[c] = sureness(unmet[c])
    calibrate_row(unmet, by)
    highest = unmet[0] if width else np.float32(0.0)
    for c in range(1, width):
        highest = max(highest, unmet[c])
    n_dense = dense_rows(indptr, len(start) - 1)
    if n_dense:
        _top_k_dense(n_dense, x, classes, terms, best, barred)
    for i in range(n_dense, len(indptr) - 1):
        labels_i, scores_i = best_labels[i], best_scores[i]
        # a class that is not met comes after the k best of the tiles before
        if highest <= scores_i[k - 1] and met(indptr[i], indptr[i + 1], indices, start, most) <= most:
            n = score_few(
                indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores, i + 1, marks, touched
            )
            for t in range(n):
                s = int(touched[t])
                score = guided(scores[s], s, i, terms, groups) if is_guided else scores[s]
                if by.shape[1]:
                    score = calibrated(score, s, by)
                insert(first_class + s, score, labels_i, scores_i)
            continue
        score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        _fold(scores, first_class, n_classes, i, by, terms, groups, barred, labels_i, scores_i)
