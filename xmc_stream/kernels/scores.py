"""Scores of samples for up to 1,024 classes at once, and what is done with them: search for violators, top-k.

A tile holds the weights of its classes by feature: for feature j the entries [start[j], start[j + 1]) of `slots`
(which class) and `weights`. Where the run is as long as the tile is wide, it is a dense row: one weight a class, zeros
included. A row's scores (4 kB) stay in the first-level cache.

Every score is bias + x_1 w_1 + x_2 w_2 + ... in float32, multiplied and added in the order of the row's features. A zero
weight of a dense row adds nothing, so dense and sparse runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

LANES = 32  # a tile's width is a multiple of it: classes whose scores are compared in one go
DENSE_SHARE = 4  # a feature is stored dense when at least 1/4 of the tile's classes have it: see docs/architecture.md

SPARE = 16  # places for more rows than are wanted, at least

SQUARED_HINGE, HINGE, NO_LOSS = 0, 1, 2


def places(capacity: NDArray[np.int64], n_rows: int) -> NDArray[np.int64]:
    """Places for the best `capacity` of n_rows rows: room to take half as many more before they are sifted."""
    with_spare = capacity + np.maximum(capacity // 2, SPARE) * (capacity > 0)
    return np.asarray(np.minimum(with_spare, np.maximum(n_rows, capacity)))


@kernel
def lay_out(features: NDArray[Any], width: int, start: NDArray[np.int32]) -> int:
    """Where each feature's run begins, from the features of all weights; returns the length of all runs together.

    start (D + 1,) int32 is overwritten.
    """
    start[:] = 0
    for p in range(len(features)):
        start[features[p] + 1] += 1
    total = np.int64(0)
    for j in range(1, len(start)):
        count = np.int64(start[j])
        total += width if count * DENSE_SHARE >= width else count
        start[j] = total
    return int(total)


@kernel
def fill(
    indptr: NDArray[np.int64],
    features: NDArray[Any],
    values: NDArray[np.float32],
    width: int,
    start: NDArray[np.int32],
    cursor: NDArray[np.int32],
    slots: NDArray[np.uint16],
    weights: NDArray[np.float32],
) -> None:
    """Put the weights of the classes (CSC: class s has entries [indptr[s], indptr[s + 1])) into the laid-out runs.

    cursor (D,) int32 is scratch; weights must be zero.
    """
    cursor[:] = 0
    for s in range(len(indptr) - 1):
        for p in range(indptr[s], indptr[s + 1]):
            j = features[p]
            if start[j + 1] - start[j] == width:
                weights[start[j] + s] = values[p]
            else:
                q = start[j] + cursor[j]
                cursor[j] += 1
                slots[q] = s
                weights[q] = values[p]


@kernel
def _score(
    first: int,
    last: int,
    indices: NDArray[Any],
    data: NDArray[np.float32],
    start: NDArray[np.int32],
    slots: NDArray[np.uint16],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    scores: NDArray[np.float32],
) -> None:
    """scores (width,) of the row with entries [first, last)."""
    width = len(scores)
    scores[:] = bias
    for p in range(first, last):
        j = indices[p]
        x = data[p]
        begin = start[j]
        n = start[j + 1] - begin
        run = weights[begin : begin + n]
        if n == width:
            for c in range(width):
                scores[c] += x * run[c]
        else:
            where = slots[begin : begin + n]
            for q in range(n):
                scores[where[q]] += x * run[q]


@kernel
def _better(score: np.float32, row: int, other: np.float32, other_row: int) -> bool:
    """The order of what is found: higher scores first, then lower rows."""
    return bool(score > other or (score == other and row < other_row))


@kernel
def _keep_best(scores: NDArray[np.float32], rows: NDArray[np.int32], size: int, capacity: int) -> np.float32:
    """Move the best `capacity` of `size` items to the front, in any order; returns the worst score among them."""
    low, high = 0, size - 1
    while low < high:  # quickselect: between low and high is what may stand on either side
        middle = (low + high) // 2
        score, row = scores[middle], rows[middle]
        i, j = low, high
        while i <= j:
            while _better(scores[i], rows[i], score, row):
                i += 1
            while _better(score, row, scores[j], rows[j]):
                j -= 1
            if i <= j:
                scores[i], scores[j] = scores[j], scores[i]
                rows[i], rows[j] = rows[j], rows[i]
                i += 1
                j -= 1
        if capacity - 1 <= j:
            high = j
        elif capacity - 1 >= i:
            low = i
        else:
            break
    worst: np.float32 = scores[:capacity].min()
    return worst


@kernel
def _sift_down(scores: NDArray[np.float32], rows: NDArray[np.int32], i: int, size: int) -> None:
    """Restore a heap below place i; its root is the worst item."""
    while True:
        child = 2 * i + 1
        if child >= size:
            return
        if child + 1 < size and _better(scores[child], rows[child], scores[child + 1], rows[child + 1]):
            child += 1
        if _better(scores[child], rows[child], scores[i], rows[i]):
            return
        scores[i], scores[child] = scores[child], scores[i]
        rows[i], rows[child] = rows[child], rows[i]
        i = child


@kernel
def search(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[Any],
    first_row: int,
    first_class: int,
    slot_of: NDArray[np.int16],
    start: NDArray[np.int32],
    slots: NDArray[np.uint16],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    active_next: NDArray[np.int64],
    active_end: NDArray[np.int64],
    active: NDArray[np.int32],
    capacity: NDArray[np.int64],
    best_start: NDArray[np.int64],
    best_size: NDArray[np.int64],
    best_scores: NDArray[np.float32],
    best_rows: NDArray[np.int32],
    threshold: NDArray[np.float32],
    loss: int,
    losses: NDArray[np.float64],
    scores: NDArray[np.float32],
) -> None:
    """Score a block of rows for one tile; keep the best-scoring rows outside the active sets; sum the losses.

    indptr (n + 1,), indices, data: X; y_indptr, y_indices: Y, labels ascending in a row. first_row: number of the
    block's first row in the job's range. slot_of: the slot of class first_class + c, or -1. Per slot: the rows of the
    active set still ahead, active[active_next : active_end]; how many rows are wanted (capacity); places
    [best_start[s], best_start[s + 1]) for them, more than that or as many as there are rows, best_size used; the score a
    row must exceed to be taken; and the loss summed over all rows, C left out (NO_LOSS: not).
    """
    width = len(scores)
    one, zero = np.float32(1.0), np.float32(0.0)
    by_lane, bounds = scores.reshape(width // LANES, LANES), threshold.reshape(width // LANES, LANES)
    sums = losses.reshape(width // LANES, LANES)
    for i in range(len(indptr) - 1):
        _score(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        row = first_row + i
        for p in range(y_indptr[i], y_indptr[i + 1] if loss != NO_LOSS else y_indptr[i]):
            c = y_indices[p] - first_class
            if 0 <= c < len(slot_of) and slot_of[c] >= 0:
                s = slot_of[c]
                wrong = np.float64(max(one + scores[s], zero))
                right = np.float64(max(one - scores[s], zero))
                if loss == SQUARED_HINGE:
                    losses[s] += 0.5 * right * right - 0.5 * wrong * wrong
                else:
                    losses[s] += right - wrong
        for lane in range(width // LANES):
            hits = np.int32(0)
            if loss == SQUARED_HINGE:
                for c in range(LANES):
                    score = by_lane[lane, c]
                    m = np.float64(max(one + score, zero))
                    sums[lane, c] += 0.5 * m * m
                    hits += np.int32(score > bounds[lane, c])
            elif loss == NO_LOSS:
                for c in range(LANES):
                    hits += np.int32(by_lane[lane, c] > bounds[lane, c])
            else:
                for c in range(LANES):
                    score = by_lane[lane, c]
                    sums[lane, c] += np.float64(max(one + score, zero))
                    hits += np.int32(score > bounds[lane, c])
            if not hits:
                continue
            for c in range(lane * LANES, (lane + 1) * LANES):
                if not scores[c] > threshold[c]:
                    continue
                while active_next[c] < active_end[c] and active[active_next[c]] < row:
                    active_next[c] += 1
                if active_next[c] < active_end[c] and active[active_next[c]] == row:
                    continue
                begin, end = best_start[c], best_start[c + 1]
                scores_c, rows_c = best_scores[begin:end], best_rows[begin:end]
                size = best_size[c]
                scores_c[size], rows_c[size] = scores[c], row
                size += 1
                if size == end - begin:  # what is too much goes all at once: cheaper than a heap
                    threshold[c] = _keep_best(scores_c, rows_c, size, capacity[c])
                    size = capacity[c]
                best_size[c] = size


@kernel
def sort_best(
    capacity: NDArray[np.int64],
    best_start: NDArray[np.int64],
    best_size: NDArray[np.int64],
    best_scores: NDArray[np.float32],
    best_rows: NDArray[np.int32],
) -> int:
    """Keep at most `capacity` items of each slot, from best to worst, and close the gaps; returns how many remain."""
    filled = 0
    for s in range(len(best_size)):
        begin = best_start[s]
        scores, rows = best_scores[begin:], best_rows[begin:]
        size = best_size[s]
        if size > capacity[s]:
            if capacity[s]:
                _keep_best(scores, rows, size, capacity[s])
            size = best_size[s] = capacity[s]
        for i in range(size // 2 - 1, -1, -1):
            _sift_down(scores, rows, i, size)
        for last in range(size - 1, 0, -1):
            scores[0], scores[last] = scores[last], scores[0]
            rows[0], rows[last] = rows[last], rows[0]
            _sift_down(scores, rows, 0, last)
        for q in range(size):
            best_scores[filled], best_rows[filled] = scores[q], rows[q]
            filled += 1
    return filled


@kernel
def top_k(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    first_class: int,
    n_classes: int,
    start: NDArray[np.int32],
    slots: NDArray[np.uint16],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    scores: NDArray[np.float32],
    best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
    barred_indptr: NDArray[np.int64],
    barred_indices: NDArray[Any],
) -> None:
    """Fold the scores of one tile (its slots are classes first_class, first_class + 1, ...) into each row's best k.

    best_labels, best_scores (n, k): from best to worst, ties to the lower label; -1 and -inf where there is none yet.
    Tiles must come in ascending order of classes: a later label then loses every tie. barred_indptr (n + 1,),
    barred_indices: labels of each row that score -inf, or two empty arrays. Leaves in `scores` those of the last row.
    """
    width = len(scores)
    by_lane = scores.reshape(width // LANES, LANES)
    k = best_scores.shape[1]
    for i in range(len(indptr) - 1):
        _score(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        if len(barred_indptr):
            for p in range(barred_indptr[i], barred_indptr[i + 1]):
                if first_class <= barred_indices[p] < first_class + n_classes:
                    scores[barred_indices[p] - first_class] = -np.inf
        worst = best_scores[i, k - 1]
        for lane in range(width // LANES):
            hits = np.int32(0)
            for c in range(LANES):
                hits += np.int32(by_lane[lane, c] > worst)
            if not hits:
                continue
            for c in range(lane * LANES, min((lane + 1) * LANES, n_classes)):
                score = scores[c]
                if not score > worst:
                    continue
                q = k - 1
                while q > 0 and best_scores[i, q - 1] < score:
                    best_scores[i, q] = best_scores[i, q - 1]
                    best_labels[i, q] = best_labels[i, q - 1]
                    q -= 1
                best_scores[i, q] = score
                best_labels[i, q] = first_class + c
                worst = best_scores[i, k - 1]
