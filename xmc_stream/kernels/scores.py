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

SQUARED_HINGE, HINGE, NO_LOSS = 0, 1, 2


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
def _sift_down(scores: NDArray[np.float32], rows: NDArray[np.int32], size: int) -> None:
    """Restore the heap whose root was replaced; the root is the worst: lowest score, then highest row."""
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            return
        other = child + 1
        if other < size and (
            scores[other] < scores[child] or (scores[other] == scores[child] and rows[other] > rows[child])
        ):
            child = other
        if scores[i] < scores[child] or (scores[i] == scores[child] and rows[i] > rows[child]):
            return
        scores[i], scores[child] = scores[child], scores[i]
        rows[i], rows[child] = rows[child], rows[i]
        i = child


@kernel
def _push(scores: NDArray[np.float32], rows: NDArray[np.int32], size: int, score: np.float32, row: int) -> None:
    """Add to a heap of `size` items with room for one more."""
    i = size
    while i > 0:
        parent = (i - 1) // 2
        if scores[parent] < score or (scores[parent] == score and rows[parent] > row):
            break
        scores[i], rows[i] = scores[parent], rows[parent]
        i = parent
    scores[i], rows[i] = score, row


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
    heap_start: NDArray[np.int64],
    heap_size: NDArray[np.int64],
    heap_scores: NDArray[np.float32],
    heap_rows: NDArray[np.int32],
    threshold: NDArray[np.float32],
    loss: int,
    losses: NDArray[np.float64],
    scores: NDArray[np.float32],
) -> None:
    """Score a block of rows for one tile; keep the best-scoring rows outside the active sets; sum the losses.

    indptr (n + 1,), indices, data: X; y_indptr, y_indices: Y, labels ascending in a row. first_row: number of the
    block's first row in the job's range. slot_of: the slot of class first_class + c, or -1. Per slot: the rows of the
    active set still ahead, active[active_next : active_end]; a heap of heap_start[s + 1] - heap_start[s] places,
    heap_size used; the score a row must exceed to enter; and the loss summed over all rows, C left out (NO_LOSS: not).
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
                begin = heap_start[c]
                capacity = heap_start[c + 1] - begin
                size = heap_size[c]
                scores_c = heap_scores[begin : begin + capacity]
                rows_c = heap_rows[begin : begin + capacity]
                if size < capacity:
                    _push(scores_c, rows_c, size, scores[c], row)
                    heap_size[c] = size + 1
                    if size + 1 == capacity:
                        threshold[c] = scores_c[0]
                else:
                    scores_c[0], rows_c[0] = scores[c], row
                    _sift_down(scores_c, rows_c, size)
                    threshold[c] = scores_c[0]


@kernel
def sort_heaps(
    heap_start: NDArray[np.int64],
    heap_size: NDArray[np.int64],
    heap_scores: NDArray[np.float32],
    heap_rows: NDArray[np.int32],
) -> int:
    """Turn each heap into its items from best to worst and close the gaps between them; returns how many remain."""
    filled = 0
    for s in range(len(heap_size)):
        begin = heap_start[s]
        scores, rows = heap_scores[begin:], heap_rows[begin:]
        for last in range(heap_size[s] - 1, 0, -1):
            scores[0], scores[last] = scores[last], scores[0]
            rows[0], rows[last] = rows[last], rows[0]
            _sift_down(scores, rows, last)
        for q in range(heap_size[s]):
            heap_scores[filled], heap_rows[filled] = scores[q], rows[q]
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
) -> None:
    """Fold the scores of one tile (its slots are classes first_class, first_class + 1, ...) into each row's best k.

    best_labels, best_scores (n, k): from best to worst, ties to the lower label; -1 and -inf where there is none yet.
    Tiles must come in ascending order of classes: a later label then loses every tie.
    """
    width = len(scores)
    by_lane = scores.reshape(width // LANES, LANES)
    k = best_scores.shape[1]
    for i in range(len(indptr) - 1):
        _score(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
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
