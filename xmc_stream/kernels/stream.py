"""Solving many large classes while rows stream by: steps of all of them on the rows at hand (`kernels.order`).

Pairs (row, class) are ragged: class c has the entries [ptr[c], ptr[c + 1]) of `rows` (ascending), `sign`, `alpha`, `asleep`.
Run r of it begins at entry ptr[c] + starts[c, r]; where `starts` has no classes, the pairs are those of the runs at hand alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.dcd import add_rows, descend, violation
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.order import place_in_group


@kernel
def _bounds(rows: NDArray[Any], begin: int, end: int, low: int, high: int) -> tuple[int, int]:
    """The entries of [begin, end) whose rows are in [low, high)."""
    mine = rows[begin:end]
    return begin + int(np.searchsorted(mine, low)), begin + int(np.searchsorted(mine, high))


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
def run_starts(rows: NDArray[Any], run_bits: int, out: NDArray[np.int32]) -> None:
    """out[r] = how many of a class's rows come before run r."""
    q = 0
    for r in range(len(out)):
        while q < len(rows) and np.int64(rows[q]) >> run_bits < r:
            q += 1
        out[r] = q


@kernel
def _run_bounds(
    c: int, run: int, before: int, ptr: NDArray[np.int64], rows: NDArray[Any], starts: NDArray[np.int32], run_bits: int
) -> tuple[int, int]:
    """The entries of class c in a run. before: where those of the last run at hand ended."""
    if len(starts):
        return int(ptr[c] + starts[c, run]), int(ptr[c] + starts[c, run + 1])
    end = before
    while end < ptr[c + 1] and np.int64(rows[end]) >> run_bits == run:
        end += 1
    return before, end


@kernel
def mark_group(
    going: NDArray[np.bool_],
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    starts: NDArray[np.int32],
    asleep: NDArray[np.bool_],
    runs: NDArray[np.int64],
    slots: NDArray[np.int64],
    run_bits: int,
    key: np.uint64,
    low: int,
    high: int,
    needed: NDArray[np.bool_],
) -> None:
    """Mark the rows of a group that some class visits at the places [low, high) of the group.

    going (n,): classes that take part. runs: of the group, ascending; slots: theirs. needed: a run of places for each run.
    """
    whole = low == 0 and high == len(needed)
    for c in range(len(going)):
        if not going[c]:
            continue
        end = int(ptr[c])
        for j in range(len(runs)):
            first = runs[j] << run_bits
            begin, end = _run_bounds(c, runs[j], end, ptr, rows, starts, run_bits)
            for q in range(begin, end):
                if asleep[q]:
                    continue
                offset = np.int64(rows[q]) - first
                if whole or low <= place_in_group(slots[j], offset, run_bits, key) < high:
                    needed[(j << run_bits) | offset] = True


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
def list_needed(
    needed: NDArray[np.bool_], runs: NDArray[np.int64], run_bits: int, lines: NDArray[np.int64],
    local_of: NDArray[np.int32],
) -> int:  # fmt: skip
    """lines = the marked rows, ascending; local_of = their numbers in it. Returns how many."""
    n = 0
    for j in range(len(runs)):
        for offset in range(1 << run_bits):
            at = (j << run_bits) | offset
            if needed[at]:
                lines[n] = (runs[j] << run_bits) | offset
                local_of[at] = n
                n += 1
    return n


@kernel
def row_squares(
    indptr: NDArray[np.int64], data: NDArray[np.float32], constant: float, squares: NDArray[np.float64]
) -> None:
    """squares = ||x_i||^2 of each row, `constant` (the bias feature's square) included, summed as `dcd.localise` does."""
    for r in range(len(indptr) - 1):
        total = constant
        for p in range(indptr[r], indptr[r + 1]):
            total += np.float64(data[p]) * np.float64(data[p])
        squares[r] = total


@kernel
def descend_group(
    first: int,
    last: int,
    going: NDArray[np.bool_],
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    starts: NDArray[np.int32],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    asleep: NDArray[np.bool_],
    runs: NDArray[np.int64],
    slots: NDArray[np.int64],
    run_bits: int,
    key: np.uint64,
    low: int,
    high: int,
    local_of: NDArray[np.int32],
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    squares: NDArray[np.float64],
    bar: NDArray[np.float64],
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    worst: NDArray[np.float64],
    lam: float,
    tau: float,
    h2: float,
    upper: float,
    use_bias: bool,
    places: NDArray[np.int64],
    pairs: NDArray[np.int64],
    visit: NDArray[np.int64],
    local: NDArray[np.int64],
) -> float:
    """Classes [first, last) take their steps on the rows of a group that come at the places [low, high).

    The rows are those of the block, row numbers by `local_of` as `list_needed` filled it. Per class: bar and the largest
    violation met so far (worst) of the epoch, v (n, D), v0. places, pairs, visit, local: scratch, a group's rows each.
    Returns what `_fetch` does.
    """
    fetched = 0.0
    for c in range(first, last):
        if not going[c]:
            continue
        n, end = 0, int(ptr[c])
        for j in range(len(runs)):
            start = runs[j] << run_bits
            begin, end = _run_bounds(c, runs[j], end, ptr, rows, starts, run_bits)
            for q in range(begin, end):
                if asleep[q]:
                    continue
                place = place_in_group(slots[j], np.int64(rows[q]) - start, run_bits, key)
                if low <= place < high:
                    places[n], pairs[n] = place, q
                    local[n] = local_of[(j << run_bits) | (np.int64(rows[q]) - start)]
                    n += 1
        order = np.argsort(places[:n])
        for i in range(n):
            visit[i] = pairs[order[i]]
            places[i] = local[order[i]]
        fetched += _fetch(v[c], n, indptr)
        v0[c], met = descend(
            visit[:n], places[:n], indptr, indices, data, squares, sign, alpha, asleep, bar[c], v[c], v0[c],
            lam, tau, h2, upper, use_bias,
        )  # fmt: skip
        worst[c] = max(worst[c], met)
    return fetched


@kernel
def add_range(
    first: int,
    last: int,
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    start: int,
    stop: int,
    local_of: NDArray[np.int32],
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    local: NDArray[np.int64],
) -> float:
    """Classes [first, last): v += sum_i a_i y_i x_i over the rows in [start, stop), ascending; v0 likewise.

    Returns what `_fetch` does.
    """
    fetched = 0.0
    for c in range(first, last):
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            local[q - begin] = local_of[np.int64(rows[q]) - start]
        fetched += _fetch(v[c], end - begin, indptr)
        v0[c] = add_rows(
            local[: end - begin], indptr, indices, data, sign[begin:end], alpha[begin:end], v[c], v0[c]
        )  # fmt: skip
    return fetched


@kernel
def start_range(
    first: int,
    last: int,
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    start: int,
    stop: int,
    local_of: NDArray[np.int32],
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    w: NDArray[np.float64],
    bias: NDArray[np.float64],
    slope: float,
    upper: float,
) -> None:
    """Classes [first, last): alpha of the rows in [start, stop) from weights w (n, D), as `dcd.start_alpha` does."""
    for c in range(first, last):
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            i = local_of[np.int64(rows[q]) - start]
            z = bias[c]
            for p in range(indptr[i], indptr[i + 1]):
                z += np.float64(data[p]) * w[c, indices[p]]
            alpha[q] = min(slope * max(1.0 - sign[q] * z, 0.0), upper)


@kernel
def violation_range(
    first: int,
    last: int,
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    start: int,
    stop: int,
    local_of: NDArray[np.int32],
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: NDArray[np.float64],
    inside: NDArray[np.float64],
    lam: float,
    tau: float,
    h2: float,
    upper: float,
    local: NDArray[np.int64],
) -> float:
    """Classes [first, last): inside = the larger of itself and the largest violation in the rows in [start, stop).

    Returns what `_fetch` does.
    """
    fetched = 0.0
    for c in range(first, last):
        begin, end = _bounds(rows, ptr[c], ptr[c + 1], start, stop)
        for q in range(begin, end):
            local[q - begin] = local_of[np.int64(rows[q]) - start]
        fetched += _fetch(v[c], end - begin, indptr)
        met = violation(
            local[: end - begin], indptr, indices, data, sign[begin:end], alpha[begin:end], v[c], v0[c], lam, tau, h2, upper
        )  # fmt: skip
        inside[c] = max(inside[c], met)
    return fetched
