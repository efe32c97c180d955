"""The search for violators: rows are scored for a tile, and what scores highest outside the active sets is kept."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import above, popcount
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.ranking import LANES
from xmc_stream.linear.kernels.scores import FEW, Tile, chunks, met, score_all, score_few, score_fours

SPARE = 16  # places for more rows than are wanted, at least
BINS = 256  # of the scores that were flushed, see begin_anew

SQUARED_HINGE, HINGE, NO_LOSS = 0, 1, 2

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_HIGHEST = np.finfo(np.float32).max
_NO_ROW = np.iinfo(np.int64).max
_SPARE_SHARE = 4  # of the places that a sift frees at most, this part may stay taken


class ActiveAhead(NamedTuple):
    """The active rows of each slot that are still ahead: rows[next : end], ascending."""

    next: NDArray[np.int64]
    end: NDArray[np.int64]
    rows: NDArray[np.int32]


class BestRows(NamedTuple):
    """The best rows of each slot: how many are wanted (capacity), and places [begin, end) of scores and rows for them.

    There are more places than that, or as many as there are rows. size: places used, rows ascending. threshold: the
    score a row must exceed to be taken.
    """

    capacity: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    scores: NDArray[np.float32]
    rows: NDArray[np.int32]
    threshold: NDArray[np.float32]


class LossSums(NamedTuple):
    """Which loss, rounded by what grid (`loss_grid`), and of each slot: how many times it counts for positives,
    `bias_losses`, and the sum over all rows less these.

    rows: how many times each row of the block counts, then `bias_losses` are in the sums; of no length where all count once.
    C is left out. Each loss is rounded: no cut of the rows shows in the sums. NO_LOSS: nothing is summed.
    """

    loss: int
    grid: float
    positive: NDArray[np.float64]
    of_bias: NDArray[np.float64]
    sums: NDArray[np.float64]
    rows: NDArray[np.float64]


def places(capacity: NDArray[np.int64], n_rows: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Places for the best `capacity` of n_rows rows: room to take half as many more before they are sifted."""
    with_spare = capacity + np.maximum(capacity // 2, SPARE) * (capacity > 0)
    return np.asarray(np.minimum(with_spare, np.maximum(n_rows, capacity)))


@inner_kernel
def _above(scores: NDArray[np.float32], begin: int, end: int, bound: np.float32) -> int:
    """How many of scores[begin : end] are above a bound."""
    n = np.int32(0)
    for q in range(begin, end):
        n += np.int32(scores[q] > bound)  # of four bytes, as the scores are
    return int(n)


@inner_kernel
def keep_best(
    scores: NDArray[np.float32], rows: NDArray[Any], begin: int, size: int, capacity: int, most: int, bound: np.float32
) -> tuple[int, np.float32]:
    """Close up the best of the `size` items from `begin` on: at least `capacity` (1 or more) of them, at most `most` (< size).

    Higher scores are better, then lower rows. Rows ascend before and after. bound: a number that no score is below. Returns
    how many are kept, and a higher bound: no score that is kept is below it, and no other one is above it.

    The bound is found by doubling a step, then by halving: a pass each, which compares eight scores at a time. Keeping some
    more than `capacity` saves the last passes.
    """
    end = begin + size
    low, high = bound, np.float32(np.inf)  # above `low` are n, above `high` fewer than wanted
    n = _above(scores, begin, end, low)
    if n < capacity:
        high = low
    step = np.float32(1 / 16) * max(np.float32(1.0), abs(low))
    while n > most:
        if high == np.inf:
            middle = min(low + step, _HIGHEST)
            step += step
        else:
            middle = np.float32(0.5) * low + np.float32(0.5) * high
        if not low < middle < high:  # between them is no number: all that are above one equal the other
            break
        above = _above(scores, begin, end, middle)
        if above >= capacity:
            low, n = middle, above
        else:
            high = middle
    ties = 0
    if n > most or n < capacity:
        low, ties = high, capacity - _above(scores, begin, end, high)
    filled = begin
    for q in range(begin, end):
        score = scores[q]
        tie = int(score == low and ties > 0)
        scores[filled], rows[filled] = score, rows[q]
        ties -= tie
        filled += int(score > low) + tie
    return filled - begin, low


def loss_grid(n_samples: int, mean: float = 1.0) -> float:
    """A number g with which (x + g) - g rounds a loss x so that sums over all rows are exact, in any order.

    mean: of the rows' weights; the next power of two scales what follows.

    x becomes a multiple of 2^-(43 - b), where n_samples <= 2^b: 7e-9 for 76,000 rows. A sum of so many is exact while
    losses are 1,024 on average at most.
    """
    return float(1.5 * 2.0 ** (9 + max(2, (n_samples - 1).bit_length()) + math.ceil(math.log2(mean))))


def bias_losses(bias: NDArray[np.float32], loss: int, grid: float) -> NDArray[np.float64]:
    """Of each slot, what a negative row that meets none of its weights loses, C left out; rounded by the grid."""
    wrong = np.maximum(np.float32(1.0) + bias, np.float32(0.0)).astype(np.float64)
    losses = {SQUARED_HINGE: 0.5 * wrong * wrong, HINGE: wrong, NO_LOSS: 0.0 * wrong}[loss]
    return np.asarray((losses + grid) - grid)


@inner_kernel
def _take(
    hits: NDArray[np.uint16],
    n: int,
    row: int,
    scores: NDArray[np.float32],
    ahead: ActiveAhead,
    next_row: NDArray[np.int64],
    best: BestRows,
    at: NDArray[np.int64],
) -> None:
    """Take a row for the slots hits[:n], unless it is active there.

    next_row: of each slot the first active row that was not behind the last one looked at. at: the place after those used.
    Most hits look at these two and at `best.end` only: a hit costs what it touches.
    """
    active_next, active_end, active = ahead
    capacity, best_begin, best_end, _, best_scores, best_rows, threshold = best
    for t in range(n):
        s = hits[t]
        if next_row[s] <= row:
            q, end = active_next[s], active_end[s]
            while q < end and active[q] < row:
                q += 1
            active_next[s] = q
            next_row[s] = active[q] if q < end else _NO_ROW
            if next_row[s] == row:
                continue
        place = at[s]
        best_scores[place], best_rows[place] = scores[s], row
        place += 1
        at[s] = place
        if place == best_end[s]:
            begin = best_begin[s]
            size = place - begin
            spare = size - capacity[s]
            if spare > 0:  # all that is too much at once: cheaper than a heap
                most = capacity[s] + spare // _SPARE_SHARE
                size, threshold[s] = keep_best(best_scores, best_rows, begin, size, capacity[s], most, threshold[s])
                at[s] = begin + size


def search(
    x: CSR,
    y: Labels,
    first_row: int,
    first_class: int,
    slot_of: NDArray[np.int16],
    tile: Tile,
    ahead: ActiveAhead,
    best: BestRows,
    losses: LossSums,
    fours: bool,
) -> None:
    """Score a block of rows for one tile; keep the best-scoring rows outside the active sets; sum the losses.

    first_row: number of the block's first row in the job's range. slot_of: the slot of class first_class + c, or -1.
    fours: whether rows have most features, see `scores.in_fours`.
    """
    width = len(tile.bias)
    for low, high, lines, scores in chunks(x, len(tile.start) - 1, width, fours):
        if len(lines):
            score_fours(lines, tile, 0, np.full(len(lines), width), scores)
        _search(
            CSR(x.indptr[low : high + 1], x.indices, x.values), Labels(y.indptr[low : high + 1], y.indices), first_row + low,
            first_class, slot_of, tile, ahead, best, losses._replace(rows=losses.rows[low:high]), scores,
        )  # fmt: skip


@inner_kernel
def _lose_of_bias(losses: LossSums, bias: NDArray[np.float32], counts: float, bias_loss: NDArray[np.float64]) -> None:
    """Add what a row that counts `counts` times loses in each slot where it meets no weight, which goes into bias_loss."""
    for c in range(len(bias)):
        m = np.float64(max(_ONE + bias[c], _ZERO))  # rounded once, as where the class is met
        lost = 0.5 * m * m if losses.loss == SQUARED_HINGE else m
        bias_loss[c] = (counts * lost + losses.grid) - losses.grid
        losses.sums[c] += bias_loss[c]


@inner_kernel
def _lose_as_positive(losses: LossSums, s: int, score: np.float32, counts: float) -> None:
    """Take a row for a positive of a slot: what it loses so, in the place of what it loses as a negative."""
    grid = losses.grid
    wrong, right = np.float64(max(_ONE + score, _ZERO)), np.float64(max(_ONE - score, _ZERO))
    if losses.loss == SQUARED_HINGE:
        right, wrong = 0.5 * right * right, 0.5 * wrong * wrong
    losses.sums[s] += ((losses.positive[s] * counts * right + grid) - grid) - ((counts * wrong + grid) - grid)


@inner_kernel
def _hits_of_few(
    touched: NDArray[np.uint16], scores: NDArray[np.float32], threshold: NDArray[np.float32], losses: LossSums, counts: float,
    bias_loss: NDArray[np.float64], hits: NDArray[np.uint16],
) -> int:  # fmt: skip
    """Add what a row loses in the slots that it has touched; those where it scores above the threshold become hits."""
    loss, grid, sums, n_hits = losses.loss, losses.grid, losses.sums, 0
    for t in range(len(touched)):
        s = int(touched[t])
        score = scores[s]
        m = np.float64(max(_ONE + score, _ZERO))
        if loss == SQUARED_HINGE:
            sums[s] += ((counts * (0.5 * m * m) + grid) - grid) - bias_loss[s]
        elif loss == HINGE:
            sums[s] += ((counts * m + grid) - grid) - bias_loss[s]
        hits[n_hits] = s
        n_hits += int(score > threshold[s])
    return n_hits


@inner_kernel
def _hits_of_bias(
    waiting: NDArray[np.uint16], tile: Tile, threshold: NDArray[np.float32], scores: NDArray[np.float32],
    marks: NDArray[np.int32], mark: int, hits: NDArray[np.uint16], n_hits: int,
) -> tuple[int, int]:  # fmt: skip
    """Slots that take any row become hits too, where the row has not touched them.

    waiting: those slots, of which such remain as still do. Returns how many hits there are, and how many wait.
    """
    bias, left = tile.bias, 0
    for t in range(len(waiting)):
        s = int(waiting[t])
        waiting[left] = s
        if bias[s] > threshold[s]:
            left += 1
            if marks[s] != mark:
                scores[s] = bias[s]
                hits[n_hits] = s
                n_hits += 1
    return n_hits, left


@inner_kernel
def _hits_of_all(
    scores: NDArray[np.float32], threshold: NDArray[np.float32], losses: LossSums, counts: float,
    bias_loss: NDArray[np.float64], hits: NDArray[np.uint16],
) -> int:  # fmt: skip
    """As `_hits_of_few`, for all slots."""
    loss, grid, sums, n_hits = losses.loss, losses.grid, losses.sums, 0
    if loss == SQUARED_HINGE:
        for c in range(len(scores)):
            m = np.float64(max(_ONE + scores[c], _ZERO))
            sums[c] += ((counts * (0.5 * m * m) + grid) - grid) - bias_loss[c]
    elif loss == HINGE:
        for c in range(len(scores)):
            m = np.float64(max(_ONE + scores[c], _ZERO))
            sums[c] += ((counts * m + grid) - grid) - bias_loss[c]
    for c in range(0, len(scores), LANES):
        word = above(scores, c, threshold)
        while word:
            rest = word & (word - np.uint64(1))  # but for the lowest bit
            hits[n_hits] = c + popcount((word ^ rest) - np.uint64(1))
            n_hits += 1
            word = rest
    return n_hits


@kernel
def _search(
    x: CSR, y: Labels, first_row: int, first_class: int, slot_of: NDArray[np.int16], tile: Tile, ahead: ActiveAhead,
    best: BestRows, losses: LossSums, scored: NDArray[np.float32],
) -> None:  # fmt: skip
    """See `search`. scored: the scores of the rows, or (0, width) where they are to be scored."""
    (indptr, indices, data), (start, slots, weights, bias), threshold = x, tile, best.threshold
    bias_loss = losses.of_bias.copy()  # of the row at hand, if rows have weights
    width, sums_up = len(bias), losses.loss != NO_LOSS
    scores, at, next_row = np.empty(width, np.float32), np.empty(width, np.int64), np.full(width, _NO_ROW)
    for s in range(width):
        at[s] = best.begin[s] + best.size[s]
        if ahead.next[s] < ahead.end[s]:
            next_row[s] = ahead.rows[ahead.next[s]]
    marks, touched = np.zeros(width, np.int32), np.empty(width, np.uint16)
    hits = np.empty(width + 1, np.uint16)  # slots that a row scores above the threshold of
    waiting, n_waiting = np.empty(width, np.uint16), 0  # slots that take any row
    for c in range(width):
        waiting[n_waiting] = c
        n_waiting += int(bias[c] > threshold[c])
    for i in range(len(indptr) - 1):
        mark, n_touched, counts = i + 1, 0, 1.0
        most = width // FEW - n_waiting
        few = len(scored) == 0 and met(indptr[i], indptr[i + 1], indices, start, most) <= most
        if len(scored):
            for c in range(width):
                scores[c] = scored[i, c]
        elif few:
            n_touched = score_few(
                indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores, mark, marks, touched
            )
        else:
            score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        if len(losses.rows):
            counts = losses.rows[i]
            if counts == 0.0:
                continue
            if sums_up:
                _lose_of_bias(losses, bias, counts, bias_loss)
        for p in range(y.indptr[i], y.indptr[i + 1] if sums_up else y.indptr[i]):
            c = y.indices[p] - first_class
            if 0 <= c < len(slot_of) and slot_of[c] >= 0:
                s = slot_of[c]
                _lose_as_positive(losses, s, bias[s] if few and marks[s] != mark else scores[s], counts)
        if few:
            n_hits = _hits_of_few(touched[:n_touched], scores, threshold, losses, counts, bias_loss, hits)
            n_hits, n_waiting = _hits_of_bias(waiting[:n_waiting], tile, threshold, scores, marks, mark, hits, n_hits)
        else:
            n_hits = _hits_of_all(scores, threshold, losses, counts, bias_loss, hits)
        _take(hits, n_hits, first_row + i, scores, ahead, next_row, best, at)
    for s in range(width):
        best.size[s] = at[s] - best.begin[s]


@kernel
def close_up(slots: NDArray[np.int64], best: BestRows) -> int:
    """Keep at most `capacity` items of each of some slots and close the gaps; returns how many remain.

    The slots' places ascend; what remains stands from the first one's on.
    """
    capacity, best_begin, _, best_size, best_scores, best_rows, threshold = best
    filled = first = best_begin[slots[0]] if len(slots) else 0
    for s in slots:
        begin, size = best_begin[s], best_size[s]
        if size > capacity[s]:
            if capacity[s]:
                keep_best(best_scores, best_rows, begin, size, capacity[s], capacity[s], threshold[s])
            size = best_size[s] = capacity[s]
        for q in range(begin, begin + size):
            best_scores[filled], best_rows[filled] = best_scores[q], best_rows[q]
            filled += 1
    return int(filled - first)


@kernel
def begin_anew(
    slots: NDArray[np.int64],
    wanted: NDArray[np.int64],
    best_size: NDArray[np.int64],
    scores: NDArray[np.float32],
    counts: NDArray[np.int32],
    threshold: NDArray[np.float32],
) -> None:
    """Empty some slots and raise their thresholds to what leaves as many rows as are wanted of those taken so far.

    scores: what the slots held, closed up. wanted (len(slots),): rows. counts (len(slots), BINS): of scores in bins of
    1/64 from -1 on, all above in the last. A later row that only equals a threshold is none of the best: it comes after.
    """
    at = 0
    for i in range(len(slots)):
        s = slots[i]
        for q in range(at, at + best_size[s]):
            score = np.float64(scores[q])
            b = int(min(max((score + 1.0) * 64.0, 0.0), BINS - 1.0))
            b -= int(b > 0 and score < b / 64.0 - 1.0)  # the sum may have been rounded up
            counts[i, b] += 1
        at += best_size[s]
        best_size[s] = 0
        total = 0
        for b in range(BINS - 1, 0, -1):
            total += counts[i, b]
            if total >= wanted[i]:
                threshold[s] = max(threshold[s], np.float32(b / 64.0 - 1.0))
                break
