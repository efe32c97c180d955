"""Solving many large classes while rows stream by: steps of all of them on the rows at hand (`kernels.order`).

Threads share the classes of a part of the rows: each takes its steps for classes [first, last).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.bits import place_of
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.order import GROUP_BITS, order_of, place_in_group
from xmc_stream.linear.kernels.dcd import Penalty, Ramp, Times, alpha_of, descend, of_class, times, violation
from xmc_stream.linear.kernels.rows import add_rows


class ActiveRows(NamedTuple):
    """Active rows of some classes, ragged: class c has the entries [ptr[c], ptr[c + 1]), its rows ascending.

    sign: +1 positive, -1 negative; alpha >= 0; asleep: not visited before it is woken. starts (n, strips + 1): how many of a
    class's rows come before each strip of X; (0, 0) where the active rows are those of the strips at hand alone.
    """

    ptr: NDArray[np.int64]
    rows: NDArray[Any]
    sign: NDArray[np.int8]
    alpha: NDArray[np.float64]
    asleep: NDArray[np.bool_]
    starts: NDArray[np.int32]


class Group(NamedTuple):
    """The places [low, high) of a group of strips in an epoch's order: its strips, ascending, their slots, the epoch's key."""

    strips: NDArray[np.int64]
    slots: NDArray[np.int64]
    strip_bits: int
    key: np.uint64
    low: int
    high: int


class RowsAtHand(NamedTuple):
    """Rows in memory: their numbers in the block (local_of, by their place in the group), the block, their squared norms.

    times: of all classes, and of the rows of the block.
    """

    local_of: NDArray[np.int32]
    x: CSR
    squares: NDArray[np.float64]
    times: Times


class Epoch(NamedTuple):
    """Of each class in an epoch: whether it takes part (going), the bar of `dcd.descend`, the largest violation met."""

    going: NDArray[np.bool_]
    bar: NDArray[np.float64]
    worst: NDArray[np.float64]


class GroupScratch(NamedTuple):
    """Of one thread, as long as a group has rows each."""

    places: NDArray[np.int64]
    active: NDArray[np.int64]
    visit: NDArray[np.int64]
    local: NDArray[np.int64]


@kernel
def _bounds(rows: NDArray[Any], begin: int, end: int, low: int, high: int) -> tuple[int, int]:
    """The entries of [begin, end) whose rows are in [low, high)."""
    first = place_of(rows, begin, end, low)
    return first, place_of(rows, first, end, high)


@kernel
def _fetch(v: NDArray[np.float64], n_rows: int, indptr: NDArray[np.int64]) -> float:
    """Bring a class's v into the cache by reading it in order, if n_rows rows of the block touch a good part of it.

    Their features come in no order, and to wait for each of them takes about as long as all their arithmetic (see
    benchmarks/README.md). Returns a sum that means nothing, so that the reading is not left out as idle.
    """
    total = 0.0
    if n_rows * indptr[-1] * 16 >= len(v) * (len(indptr) - 1):
        for j in range(0, len(v), 8):
            total += v[j]
    return total


@kernel
def _strip_bounds(
    c: int,
    strip: int,
    before: int,
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    starts: NDArray[np.int32],
    strip_bits: int,
) -> tuple[int, int]:
    """The entries of class c in a strip. before: where those of the last strip at hand ended."""
    if len(starts):
        return int(ptr[c] + starts[c, strip]), int(ptr[c] + starts[c, strip + 1])
    end = before
    while end < ptr[c + 1] and np.int64(rows[end]) >> strip_bits == strip:
        end += 1
    return before, end


@kernel
def mark_group(going: NDArray[np.bool_], active: ActiveRows, group: Group, needed: NDArray[np.bool_]) -> None:
    """Mark the rows of a group that some class visits at its places.

    going (n,): classes that take part. needed: a range of places for each strip.
    """
    ptr, rows, _, _, asleep, starts = active
    strips, slots, strip_bits, key, low, high = group
    whole = low == 0 and high == len(needed)
    for c in range(len(going)):
        if not going[c]:
            continue
        end = int(ptr[c])
        for j in range(len(strips)):
            first = strips[j] << strip_bits
            begin, end = _strip_bounds(c, strips[j], end, ptr, rows, starts, strip_bits)
            for q in range(begin, end):
                if asleep[q]:
                    continue
                offset = np.int64(rows[q]) - first
                if whole or low <= place_in_group(slots[j], offset, strip_bits, key) < high:
                    needed[(j << strip_bits) | offset] = True


@kernel
def mark_range(
    ptr: NDArray[np.int64], rows: NDArray[Any], alpha: NDArray[np.float64], all_: bool, first: int,
    needed: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Mark the active rows in [first, first + len(needed)): all of them, or those with alpha > 0."""
    for c in range(len(ptr) - 1):
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], first, first + len(needed))
        for q in range(begin, end):
            if all_ or alpha[q] != 0.0:
                needed[np.int64(rows[q]) - first] = True


@kernel
def descend_group(
    first: int,
    last: int,
    active: ActiveRows,
    group: Group,
    at_hand: RowsAtHand,
    epoch: Epoch,
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    penalty: Penalty,
    scratch: GroupScratch,
) -> float:
    """Classes [first, last) take their steps on the rows of a group that come at its places. v (n, D), v0 (n,).

    Returns what `_fetch` does.
    """
    ptr, rows, sign, alpha, asleep, starts = active
    strips, slots, strip_bits, key, low, high = group
    local_of, x, squares, weights = at_hand
    going, bar, worst = epoch
    places, of_place, visit, local = scratch
    fetched = 0.0
    for c in range(first, last):
        if not going[c]:
            continue
        n, end = 0, int(ptr[c])
        for j in range(len(strips)):
            start = strips[j] << strip_bits
            begin, end = _strip_bounds(c, strips[j], end, ptr, rows, starts, strip_bits)
            for q in range(begin, end):
                if asleep[q]:
                    continue
                place = place_in_group(slots[j], np.int64(rows[q]) - start, strip_bits, key)
                if low <= place < high:
                    places[n], of_place[n] = place, q
                    local[n] = local_of[(j << strip_bits) | (np.int64(rows[q]) - start)]
                    n += 1
        order = visit[:n]
        order_of(places[:n], strip_bits + GROUP_BITS, order)
        for i in range(n):
            places[i] = local[order[i]]
            visit[i] = of_place[order[i]]
        fetched += _fetch(v[c], n, x.indptr)
        v0[c], met = descend(
            visit[:n], places[:n], x, squares, sign, alpha, asleep, bar[c], v[c], v0[c],
            of_class(c, weights.classes, penalty), weights.rows,
        )  # fmt: skip
        worst[c] = max(worst[c], met)
    return fetched


@kernel
def add_range(
    first: int,
    last: int,
    active: ActiveRows,
    start: int,
    stop: int,
    at_hand: RowsAtHand,
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    local: NDArray[np.int64],
) -> float:
    """Classes [first, last): v += sum_i a_i y_i x_i over the rows in [start, stop), ascending; v0 likewise.

    Returns what `_fetch` does.
    """
    ptr, rows, sign, alpha, _, _ = active
    local_of, x, _, _ = at_hand
    fetched = 0.0
    for c in range(first, last):
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            local[q - begin] = local_of[np.int64(rows[q]) - start]
        fetched += _fetch(v[c], end - begin, x.indptr)
        v0[c] = add_rows(local[: end - begin], x, sign[begin:end], alpha[begin:end], v[c], v0[c])
    return fetched


@kernel
def start_range(
    first: int,
    last: int,
    active: ActiveRows,
    start: int,
    stop: int,
    at_hand: RowsAtHand,
    w: NDArray[np.float64],
    bias: NDArray[np.float64],
    ramp: Ramp,
) -> None:
    """Classes [first, last): alpha of the rows in [start, stop) from weights w (n, D): `active.start_alpha`, no shift.

    bias (n,): NaN for a class that has no weights; its alpha stay as they are.
    """
    ptr, rows, sign, alpha, _, _ = active
    local_of, x, _, weights = at_hand
    indptr, indices, data = x
    for c in range(first, last):
        if np.isnan(bias[c]):
            continue
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            i = local_of[np.int64(rows[q]) - start]
            z = bias[c]
            for p in range(indptr[i], indptr[i + 1]):
                z += np.float64(data[p]) * w[c, indices[p]]
            alpha[q] = times(c, sign[q], i, weights) * alpha_of(sign[q], z, ramp)


@kernel
def violation_range(
    first: int,
    last: int,
    active: ActiveRows,
    start: int,
    stop: int,
    at_hand: RowsAtHand,
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    inside: NDArray[np.float64],
    penalty: Penalty,
    enough: float,
    local: NDArray[np.int64],
) -> float:
    """Classes [first, last): inside = the larger of itself and the largest violation in the rows in [start, stop).

    Ranges come ascending. A class whose `inside` is above `enough` is left alone.

    Returns what `_fetch` does.
    """
    ptr, rows, sign, alpha, _, _ = active
    local_of, x, _, weights = at_hand
    fetched = 0.0
    for c in range(first, last):
        if inside[c] > enough:
            continue
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            local[q - begin] = local_of[np.int64(rows[q]) - start]
        fetched += _fetch(v[c], end - begin, x.indptr)
        own = of_class(c, weights.classes, penalty)
        met = violation(
            local[: end - begin], x, sign[begin:end], alpha[begin:end], v[c], v0[c], own, weights.rows, enough
        )
        inside[c] = max(inside[c], met)
    return fetched
