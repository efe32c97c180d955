"""Scores of rows that have most features, four rows at a time: each weight is fetched once for four rows.

A tile is larger than the second-level cache, and a row that has every feature reads all of it: the sums wait for memory.
Four features are added in one loop, so that a score is fetched once for these. Each score is the sum that `score_all` has,
in its order: a feature that a row does not have adds zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.instructions import widen
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.linear.kernels.scores import Tile

TOGETHER = 4  # rows, and features
MOST_FEATURES = 1 << 14
_SHARE = 2  # rows are dense where they have one feature in so many, on average
_CHUNK = 128  # rows that are scored at a time, at most: their scores stay in the second-level cache
_LINES = 1 << 17  # their values, which stay there too
_WIDEST = 1024 + 32  # slots of a tile
_APART = 32  # places between the scores of one row and the next: rows 4 KiB apart would share a few lines of the cache


def in_fours(n_rows: int, n_features: int, nnz: int) -> bool:
    """Whether rows with nnz entries together are scored four at a time."""
    return n_features <= MOST_FEATURES and nnz * _SHARE >= n_rows * n_features


def _chunk_rows(n_features: int) -> int:
    return max(TOGETHER, min(_CHUNK, _LINES // max(n_features, 1) // TOGETHER * TOGETHER))


def chunk_bytes(n_features: int) -> int:
    """What scoring rows of so many features takes, if they may be scored four at a time."""
    return 4 * _chunk_rows(n_features) * (_WIDEST + _APART + n_features) if n_features <= MOST_FEATURES else 0


def chunks(
    x: CSR, n_features: int, width: int, fours: bool
) -> Iterator[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]]:
    """Rows [low, high) at a time, their lines, and room for their scores for a tile (rows, width or more).

    lines (n / 4, D, 4): value j of row low + 4 q + r is [q, j, r]. Of rows that are not scored four at a time (what is left
    over, or all) there are no lines, and there is no room.
    """
    n_rows = len(x.indptr) - 1
    in_lines = n_rows // TOGETHER * TOGETHER if fours else 0
    step = _chunk_rows(n_features)
    n = min(step, in_lines)
    lines, scores = (
        np.empty((n // TOGETHER, n_features, TOGETHER), np.float32),
        np.empty((n, width + _APART), np.float32),
    )
    for low in range(0, in_lines, step):
        high = min(low + step, in_lines)
        mine = lines[: (high - low) // TOGETHER]
        _unpack(CSR(x.indptr[low : high + 1], x.indices, x.values), mine)
        yield low, high, mine, scores[: high - low]
    if in_lines < n_rows:
        yield in_lines, n_rows, lines[:0], scores[:0]


@kernel
def _unpack(x: CSR, lines: NDArray[np.float32]) -> None:
    """Values of rows by line, see `chunks`."""
    indptr, indices, values = x
    lines[:] = 0.0
    for i in range(len(indptr) - 1):
        line, r = lines[i // TOGETHER], i % TOGETHER
        for p in range(indptr[i], indptr[i + 1]):
            line[indices[p], r] = values[p]


@inner_kernel
def _add_four(
    weights: NDArray[Any],
    start: NDArray[Any],
    low: int,
    features: NDArray[np.int64],
    line: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    d: NDArray[np.float32],
) -> None:
    """Scores a, b, c, d of four rows, slots from `low` on, += their values times weights, of four features in turn."""
    n = len(a)
    j0, j1, j2, j3 = features[0], features[1], features[2], features[3]
    at0, at1, at2, at3 = start[j0] + low, start[j1] + low, start[j2] + low, start[j3] + low
    v0, v1, v2, v3 = weights[at0 : at0 + n], weights[at1 : at1 + n], weights[at2 : at2 + n], weights[at3 : at3 + n]
    a0, b0, c0, d0 = line[j0, 0], line[j0, 1], line[j0, 2], line[j0, 3]
    a1, b1, c1, d1 = line[j1, 0], line[j1, 1], line[j1, 2], line[j1, 3]
    a2, b2, c2, d2 = line[j2, 0], line[j2, 1], line[j2, 2], line[j2, 3]
    a3, b3, c3, d3 = line[j3, 0], line[j3, 1], line[j3, 2], line[j3, 3]
    for s in range(n):
        w0, w1, w2, w3 = widen(v0[s]), widen(v1[s]), widen(v2[s]), widen(v3[s])
        a[s] = (((a[s] + a0 * w0) + a1 * w1) + a2 * w2) + a3 * w3
        b[s] = (((b[s] + b0 * w0) + b1 * w1) + b2 * w2) + b3 * w3
        c[s] = (((c[s] + c0 * w0) + c1 * w1) + c2 * w2) + c3 * w3
        d[s] = (((d[s] + d0 * w0) + d1 * w1) + d2 * w2) + d3 * w3


@kernel
def _add_waiting(
    weights: NDArray[Any],
    start: NDArray[Any],
    low: int,
    features: NDArray[np.int64],
    line: NDArray[np.float32],
    of_four: NDArray[np.float32],
    high: int,
) -> None:
    """The same for fewer than four features."""
    for j in features:
        run = weights[start[j] + low : start[j] + high]
        for r in range(TOGETHER):
            x, scores = line[j, r], of_four[r, low:high]
            for s in range(len(scores)):
                scores[s] += x * widen(run[s])


@kernel
def score_fours(
    lines: NDArray[np.float32], tile: Tile, low: int, ends: NDArray[np.int64], scores: NDArray[np.float32]
) -> None:
    """scores[4 q + r, s] of the rows of `lines`, see `chunks`, for the slots s from `low` to ends[q]."""
    start, slots, weights, bias = tile
    width, features = len(bias), np.zeros(TOGETHER, np.int64)
    for q in range(len(lines)):
        line, high = lines[q], ends[q]
        if high <= low:
            continue
        of_four = scores[TOGETHER * q : TOGETHER * (q + 1)]
        a, b, c, d = of_four[0, low:high], of_four[1, low:high], of_four[2, low:high], of_four[3, low:high]
        for r in range(TOGETHER):
            of_four[r, low:high] = bias[low:high]
        waiting = 0  # features whose weights are a dense row that is not added yet
        for j in range(len(line)):
            begin, n = start[j], start[j + 1] - start[j]
            if n == width:
                features[waiting] = j
                waiting += 1
                if waiting == TOGETHER:
                    _add_four(weights, start, low, features, line, a, b, c, d)
                    waiting = 0
            elif n:  # what comes before is added before
                _add_waiting(weights, start, low, features[:waiting], line, of_four, high)
                waiting = 0
                for p in range(begin, begin + n):
                    if low <= slots[p] < high:
                        for r in range(TOGETHER):
                            of_four[r, slots[p]] += line[j, r] * widen(weights[p])
        _add_waiting(weights, start, low, features[:waiting], line, of_four, high)
