"""The best labels of each row by weights of classes, tile after tile, and what metrics need of every score meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN, calibrate_row, calibrated
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.ranking import LANES, Ranking, bar, insert, insert_all
from xmc_stream.linear.kernels.guide import guide_row, guided, least_score, sureness
from xmc_stream.linear.kernels.scores import (
    FEW,
    TOGETHER,
    TileClasses,
    chunks,
    in_fours,
    met,
    score_all,
    score_few,
    score_fours,
)

LEAD = 128  # slots of an ordered tile that are scored first: they say what the others must exceed


_SURELY = np.float32(0.05)  # of guided scores: rounding hides less


_TINY = np.float32(1e-30)


_HIGHEST = np.finfo(np.float32).max


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


@inner_kernel
def _must_exceed(worst: np.float32, i: int, terms: NDArray[np.float32], n_clusterings: int) -> np.float32:
    """A number that z exceeds for every class whose score for row i is `worst` or more, also where scores were rounded."""
    if worst == np.inf:
        return np.float32(_HIGHEST)
    if worst <= UNSEEN:  # where labels that are not seen are ranked, all are looked at: they are equal
        return np.float32(-np.inf)
    if n_clusterings == 0:
        return np.float32(worst - np.float32(1e-6) * abs(worst) - _TINY)
    return np.float32(least_score(worst, i, terms, n_clusterings) - _SURELY)


@inner_kernel
def _insert_slots(
    scores: NDArray[np.float32],
    low: int,
    high: int,
    i: int,
    classes: TileClasses,
    terms: NDArray[np.float32],
    best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:
    """Fold the scores of slots [low, high), whole lanes of an ordered tile, into row i's k best."""
    order, groups, k = classes.bounds.order, classes.groups, len(best_scores)
    n_clusterings = groups.shape[0]
    least = _must_exceed(best_scores[k - 1], i, terms, n_clusterings)
    for first in range(low, high, LANES):
        hits = np.int32(0)
        for s in range(first, first + LANES):
            hits += np.int32(scores[s] > least)
        if not hits:
            continue
        for s in range(first, first + LANES):
            if scores[s] > least:
                c = int(order[s])
                score = guided(scores[s], c, i, terms, groups) if n_clusterings else scores[s]
                insert(classes.first + c, score, best_labels, best_scores)
                least = _must_exceed(best_scores[k - 1], i, terms, n_clusterings)


@kernel
def _slots(order: NDArray[np.uint16], barred: Labels) -> NDArray[np.int64]:
    """The slot of each class of an ordered tile, if any pairs are barred."""
    slot_of = np.empty(len(order) if len(barred.indptr) else 0, np.int64)
    for s in range(len(slot_of)):
        slot_of[order[s]] = s
    return slot_of


@inner_kernel
def _bar_slots(
    i: int, first_class: int, slot_of: NDArray[np.int64], barred: Labels, scores: NDArray[np.float32]
) -> None:
    """`bar` for an ordered tile; slot_of: see `_slots`."""
    if len(slot_of):
        for p in range(barred.indptr[i], barred.indptr[i + 1]):
            c = barred.indices[p] - first_class
            if 0 <= c < len(slot_of):
                scores[slot_of[c]] = -np.inf


@kernel
def _fold_ordered(
    classes: TileClasses,
    terms: NDArray[np.float32],
    best: Ranking,
    barred: Labels,
    scores: NDArray[np.float32],
    low: int,
    ends: NDArray[np.int64],
) -> None:
    """Fold the scores of rows in fours for slots from `low` to ends[q] of an ordered tile into each row's k best."""
    slot_of = _slots(classes.bounds.order, barred)
    for i in range(len(scores)):
        _bar_slots(i, classes.first, slot_of, barred, scores[i])
        _insert_slots(scores[i], low, ends[i // TOGETHER], i, classes, terms, best.labels[i], best.scores[i])


@kernel
def _fold_fours(
    classes: TileClasses, terms: NDArray[np.float32], best: Ranking, barred: Labels, scores: NDArray[np.float32]
) -> None:
    """Fold the scores of rows for all classes of a tile that is not ordered into each row's k best."""
    first_class, n_classes, _, by, groups, _, _ = classes
    for i in range(len(scores)):
        _fold(scores[i], first_class, n_classes, i, by, terms, groups, barred, best.labels[i], best.scores[i])


@kernel
def _lengths(lines: NDArray[np.float32], lengths: NDArray[np.float32]) -> None:
    """lengths (n / 4,): the longest of each four rows of `lines`, see `scores.chunks`."""
    squares = np.empty(TOGETHER)
    for q in range(len(lines)):
        squares[:] = 0.0
        for j in range(lines.shape[1]):
            for r in range(TOGETHER):
                squares[r] += np.float64(lines[q, j, r]) * np.float64(lines[q, j, r])
        lengths[q] = np.sqrt(squares.max())


@kernel
def _reach(
    classes: TileClasses,
    terms: NDArray[np.float32],
    best: Ranking,
    lengths: NDArray[np.float32],
    most: int,
    ends: NDArray[np.int64],
) -> None:
    """ends[q] = slots of an ordered tile that may score among the k best of any of four rows, in whole lanes, `most` at most.

    lengths: the longest of each four rows.
    """
    _, highest, longest = classes.bounds
    n_clusterings, k = classes.groups.shape[0], best.scores.shape[1]
    for q in range(len(ends)):
        least, excess = np.float32(np.inf), max(lengths[q] - np.float32(1.0), np.float32(0.0))
        for i in range(TOGETHER * q, TOGETHER * (q + 1)):
            least = min(least, _must_exceed(best.scores[i, k - 1], i, terms, n_clusterings))
        low, high = 0, len(highest)
        while low < high:  # slots before `low` may, those from `high` on do not
            s = (low + high) // 2
            if highest[s] + longest[s] * excess <= least:
                high = s
            else:  # or it is no number
                low = s + 1
        ends[q] = min(-(-low // LANES) * LANES, most)


def top_k(x: CSR, tiles: Sequence[TileClasses], terms: NDArray[np.float32], best: Ranking, barred: Labels) -> None:
    """Fold the scores of some tiles into each row's best k.

    Tiles must come in ascending order of classes: a later label then loses every tie. terms: what groups of labels say of
    each row, see `linear.kernels.guide`. barred: labels of each row that score -inf, if there are any.

    Of ordered tiles what stands in front is scored first: from the best of that it is known how far to go in each of them.
    """
    n, n_features = len(x.indptr) - 1, len(tiles[0].tile.start) - 1
    if n < TOGETHER or not in_fours(n, n_features, int(x.indptr[n] - x.indptr[0])):
        for one in tiles:
            _top_k(x, one, terms, best, barred)
        return
    widest = max(len(one.tile.bias) for one in tiles)
    for low, high, lines, scores in chunks(x, n_features, widest, True):
        of_rows = terms[low:high], Ranking(best.labels[low:high], best.scores[low:high])
        barred_ = Labels(barred.indptr[low : high + 1], barred.indices)
        if not len(lines):
            for one in tiles:
                _top_k(CSR(x.indptr[low : high + 1], x.indices, x.values), one, *of_rows, barred_)
            continue
        ends, lengths = np.empty(len(lines), np.int64), np.empty(len(lines), np.float32)
        _lengths(lines, lengths)
        for front in (True, False):
            for one in tiles:
                width = len(one.tile.bias)
                if len(one.bounds.order):
                    _reach(one, *of_rows, lengths, LEAD if front else width, ends)
                    score_fours(lines, one.tile, 0 if front else LEAD, ends, scores)
                    _fold_ordered(one, *of_rows, barred_, scores, 0 if front else LEAD, ends)
                elif front:
                    ends[:] = width
                    score_fours(lines, one.tile, 0, ends, scores)
                    _fold_fours(one, *of_rows, barred_, scores)


@kernel
def _top_k(x: CSR, classes: TileClasses, terms: NDArray[np.float32], best: Ranking, barred: Labels) -> None:
    """`top_k` for rows that are scored one by one."""
    indptr, indices, data = x
    first_class, n_classes, tile, by, groups, bounds, scores = classes
    order, slot_of = bounds.order, _slots(bounds.order, barred)
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
    for i in range(len(indptr) - 1):
        labels_i, scores_i = best_labels[i], best_scores[i]
        # a class that is not met comes after the k best of the tiles before
        if highest <= scores_i[k - 1] and met(indptr[i], indptr[i + 1], indices, start, most) <= most:
            n = score_few(
                indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores, i + 1, marks, touched
            )
            for t in range(n):
                s = int(touched[t])
                c = int(order[s]) if len(order) else s
                score = guided(scores[s], c, i, terms, groups) if is_guided else scores[s]
                if by.shape[1]:
                    score = calibrated(score, c, by)
                insert(first_class + c, score, labels_i, scores_i)
            continue
        score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        if len(order):
            _bar_slots(i, first_class, slot_of, barred, scores)
            _insert_slots(scores, 0, width, i, classes, terms, labels_i, scores_i)
        else:
            _fold(scores, first_class, n_classes, i, by, terms, groups, barred, labels_i, scores_i)


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
