"""Scores of rows that have most features, four rows at a time: each weight is fetched once for four rows.

A tile is larger than the second-level cache, and a row that has every feature reads all of it: the sums wait for memory.
Four features are added in one loop, so that a score is fetched once for these. Each score is the sum that `score_all` has,
in its order: a feature that a row does not have adds zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.narrow import widen
from xmc_stream.kernels.scores import Tile

TOGETHER = 4  # rows, and features
_SHARE = 2  # rows are dense where they have one feature in so many, on average
_MOST_FEATURES = 1 << 14  # or four rows of them do not stay in a cache


class FourRows(NamedTuple):
    """Scratch. values (4, D), zero; present (D,), zero; x (4, 4): of some features; begins (4,): of their weights."""

    values: NDArray[np.float32]
    present: NDArray[np.uint8]
    x: NDArray[np.float32]
    begins: NDArray[np.int64]


@kernel
def dense_rows(indptr: NDArray[np.int64], n_features: int) -> int:
    """How many of the first rows of a block are scored four at a time: all but up to three, or none."""
    n = len(indptr) - 1
    dense = n_features <= _MOST_FEATURES and (indptr[n] - indptr[0]) * _SHARE >= n * n_features
    return n // TOGETHER * TOGETHER if dense else 0


@kernel
def scratch_for(n_features: int) -> FourRows:
    """Scratch for so many features, none where no rows are scored four at a time."""
    return FourRows(
        np.zeros((TOGETHER, n_features), np.float32),
        np.zeros(n_features, np.uint8),
        np.zeros((TOGETHER, TOGETHER), np.float32),
        np.zeros(TOGETHER, np.int64),
    )


@inner_kernel
def _add_four(
    weights: NDArray[Any],
    begins: NDArray[np.int64],
    x: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    d: NDArray[np.float32],
) -> None:
    """Scores a, b, c, d of four rows += x[row, f] times the dense rows of four features f, one feature after another."""
    n = len(a)
    v0, v1, v2, v3 = (
        weights[begins[0] : begins[0] + n],
        weights[begins[1] : begins[1] + n],
        weights[begins[2] : begins[2] + n],
        weights[begins[3] : begins[3] + n],
    )
    a0, a1, a2, a3 = x[0, 0], x[0, 1], x[0, 2], x[0, 3]
    b0, b1, b2, b3 = x[1, 0], x[1, 1], x[1, 2], x[1, 3]
    c0, c1, c2, c3 = x[2, 0], x[2, 1], x[2, 2], x[2, 3]
    d0, d1, d2, d3 = x[3, 0], x[3, 1], x[3, 2], x[3, 3]
    for s in range(n):
        w0, w1, w2, w3 = widen(v0[s]), widen(v1[s]), widen(v2[s]), widen(v3[s])
        a[s] = (((a[s] + a0 * w0) + a1 * w1) + a2 * w2) + a3 * w3
        b[s] = (((b[s] + b0 * w0) + b1 * w1) + b2 * w2) + b3 * w3
        c[s] = (((c[s] + c0 * w0) + c1 * w1) + c2 * w2) + c3 * w3
        d[s] = (((d[s] + d0 * w0) + d1 * w1) + d2 * w2) + d3 * w3


@inner_kernel
def _add_one(run: NDArray[Any], x: np.float32, scores: NDArray[np.float32]) -> None:
    for s in range(len(scores)):
        scores[s] += x * widen(run[s])


@kernel
def score_four(rows: CSR, first: int, tile: Tile, four: FourRows, scores: NDArray[np.float32]) -> None:
    """scores (4, width) of rows first, ..., first + 3."""
    indptr, indices, data = rows
    start, slots, weights, bias = tile
    values, present, x, begins = four
    width = len(bias)
    for r in range(TOGETHER):
        scores[r, :] = bias
        for p in range(indptr[first + r], indptr[first + r + 1]):
            values[r, indices[p]] = data[p]
            present[indices[p]] = 1
    waiting = 0  # dense rows that are not added yet
    for j in range(len(present)):
        if not present[j]:
            continue
        present[j] = 0
        begin, n = start[j], start[j + 1] - start[j]
        if n == width:
            begins[waiting] = begin
            for r in range(TOGETHER):
                x[r, waiting] = values[r, j]
            waiting += 1
            if waiting == TOGETHER:
                _add_four(weights, begins, x, scores[0], scores[1], scores[2], scores[3])
                waiting = 0
        elif n:  # what comes before is added before
            _add_waiting(waiting, weights, begins, x, scores)
            waiting = 0
            for r in range(TOGETHER):
                for q in range(begin, begin + n):
                    scores[r, slots[q]] += values[r, j] * widen(weights[q])
        for r in range(TOGETHER):
            values[r, j] = 0.0
    _add_waiting(waiting, weights, begins, x, scores)


@kernel
def _add_waiting(
    waiting: int, weights: NDArray[Any], begins: NDArray[np.int64], x: NDArray[np.float32], scores: NDArray[Any]
) -> None:
    for f in range(waiting):
        for r in range(TOGETHER):
            _add_one(weights[begins[f] : begins[f] + scores.shape[1]], x[r, f], scores[r])
