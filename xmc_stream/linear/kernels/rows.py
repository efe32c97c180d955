"""Rows of classes in memory, as steps of coordinate descent take them: as lists of entries, or as whole lines.

Entries: a class has copies of its rows, whose features are numbered as they are met. Lines, where rows have most features: the
values of all features, the absent ones being 0, which changes no sum; classes share them. A margin and a step then go over
all features, many at a time, where entries are looked up one by one. A matrix of lines has values and no indices; its indptr
says where the line of each row begins.

A margin of a line is summed by feature (`soft_product`). Where rows are lines in some jobs and entries, features ascending,
in others, those of entries are summed so too (`Penalty.lanes`): they are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.csr import sum_of_squares
from xmc_stream.kernels.instructions import LANES, prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.lines import CACHE_LINE

AHEAD = 4  # rows: memory is asked for so many before it is needed


@kernel
def row_squares(
    indptr: NDArray[np.int64], data: NDArray[np.float32], constant: float, squares: NDArray[np.float64]
) -> None:
    """squares = ||x_i||^2 of each row, `constant` (the bias feature's square) included."""
    for r in range(len(indptr) - 1):
        squares[r] = sum_of_squares(data, indptr[r], indptr[r + 1], constant)


@kernel
def localise(
    at: NDArray[np.int64],
    x: CSR,
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    local_of: NDArray[np.int32],
    features: NDArray[np.int32],
    v: NDArray[np.float64],
    out: CSR,
) -> tuple[int, float]:
    """Copy rows `at` of a block into a compact matrix whose features are numbered as they are met, and `add_rows` to v.

    local_of (D,): number of a feature, -1 before it is met; features (D + 1,): the other way round. Returns how many
    features there are, and v_0, bias feature counted.
    """
    indptr, indices, data = x
    out_indptr, out_indices, out_data = out
    n_local, filled, v0 = 0, np.uint64(0), 0.0
    one = np.uint64(1)
    out_indptr[0] = 0
    for r in range(len(at)):
        fetch_row(at[min(r + AHEAD, len(at) - 1)], indptr, indices, data)
        start = filled
        for p in range(np.uint64(indptr[at[r]]), np.uint64(indptr[at[r] + 1])):
            j = np.uint32(indices[p])
            number = local_of[j]
            fresh = number < 0
            number = n_local if fresh else number
            # written whether new or not: to foresee which is which takes longer than to write
            local_of[j] = number
            features[n_local] = j
            n_local += int(fresh)
            out_indices[filled] = number
            out_data[filled] = data[p]
            filled += one
        out_indptr[r + 1] = np.int64(filled)
        if alpha[r] != 0.0:
            d = alpha[r] * sign[r]
            v0 += d
            for p in range(start, filled):
                v[np.uint32(out_indices[p])] += d * out_data[p]
    return n_local, v0


@kernel
def renumber(
    x: CSR,
    local_of: NDArray[np.int32],
    features: NDArray[np.int32],
    n_local: int,
    constant: float,
    squares: NDArray[np.float64],
) -> int:
    """`localise` for all rows of a block, in place: its indices become local numbers. Returns the new n_local."""
    indptr, indices, data = x
    for r in range(len(indptr) - 1):
        for p in range(indptr[r], indptr[r + 1]):
            j = indices[p]
            if local_of[j] < 0:
                local_of[j] = n_local
                features[n_local] = j
                n_local += 1
            indices[p] = local_of[j]
        squares[r] = sum_of_squares(data, indptr[r], indptr[r + 1], constant)
    return n_local


def padded(n_features: int) -> int:
    """Values of a line with so many features: a multiple of LANES."""
    return -(-n_features // LANES) * LANES


def as_lines(x: CSR, n_features: int, indptr: NDArray[np.int64]) -> CSR:
    """A matrix of the rows of a block as lines, which takes `indptr` for its own."""
    lines = np.zeros((len(x.indptr) - 1) * padded(n_features), np.float32)
    _fill_lines(x, padded(n_features), lines)
    return CSR(indptr, np.empty(0, np.int32), lines)


@kernel
def _fill_lines(x: CSR, width: int, lines: NDArray[np.float32]) -> None:
    indptr, indices, data = x
    for r in range(len(indptr) - 1):
        for p in range(indptr[r], indptr[r + 1]):
            lines[r * width + indices[p]] = data[p]


@kernel
def choose_lines(
    at: NDArray[np.int64],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    local_of: NDArray[np.int32],
    features: NDArray[np.int32],
    v: NDArray[np.float64],
    lines: CSR,
) -> tuple[int, float]:
    """`localise` for rows `at` of a matrix of lines: features keep their numbers, and no row is copied."""
    indptr, _, values = lines
    v0 = 0.0
    for j in range(len(local_of)):
        local_of[j], features[j] = j, j
    for r in range(len(at)):
        begin = at[r] * len(v)
        indptr[r] = begin
        if alpha[r] != 0.0:
            d = alpha[r] * sign[r]
            v0 += d
            add_line(d, begin, values, v)
    return len(local_of), v0


@kernel
def add_rows(
    local: NDArray[np.int64],
    x: CSR,
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    v: NDArray[np.float64],
    v0: float,
) -> float:
    """v += sum_i a_i y_i x_i over rows `local` of a local matrix, in that order; returns v_0, bias feature counted."""
    indptr, indices, data = x
    for i in range(len(alpha)):
        if alpha[i] != 0.0:
            d = alpha[i] * sign[i]
            v0 += d
            for p in range(np.uint64(indptr[local[i]]), np.uint64(indptr[local[i] + 1])):
                v[np.uint32(indices[p])] += d * data[p]
    return v0


@inner_kernel
def fetch_row(row: int, indptr: NDArray[np.int64], indices: NDArray[np.int32], data: NDArray[np.float32]) -> None:
    """Begin to bring a row into the cache: its first and last entry, as most rows lie in two lines of it at most."""
    first, last = indptr[row], indptr[row + 1] - 1
    if first <= last:
        prefetch(indices, first)
        prefetch(indices, last)
        prefetch(data, first)
        prefetch(data, last)


@inner_kernel
def fetch(values: NDArray[Any], begin: int, end: int) -> None:
    """Begin to bring values[begin : end], of four bytes each, into the cache."""
    for p in range(begin, end, CACHE_LINE):
        prefetch(values, p)


@inner_kernel
def add_line(d: float, begin: int, values: NDArray[np.float32], v: NDArray[np.float64]) -> None:
    """v += d times the line that begins there."""
    line = values[begin : begin + len(v)]
    for j in range(len(v)):
        v[j] += d * line[j]


@inner_kernel
def margin(
    begin: np.uint64,
    end: np.uint64,
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: float,
    lam: float,
) -> float:
    """tau w.x of the row with the entries [begin, end): soft() is applied as v is read.

    Every other one goes to a sum of its own: a sum waits for its last addition.
    """
    two, one = np.uint64(2), np.uint64(1)
    z, other = v0, 0.0
    p = begin
    while p + one < end:
        x = v[np.uint32(indices[p])]
        y = v[np.uint32(indices[p + one])]
        z += data[p] * (x - min(max(x, -lam), lam))
        other += data[p + one] * (y - min(max(y, -lam), lam))
        p += two
    if p < end:
        x = v[np.uint32(indices[p])]
        z += data[p] * (x - min(max(x, -lam), lam))
    return z + other


@inner_kernel
def margin_by_lanes(
    begin: np.uint64,
    end: np.uint64,
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: float,
    lam: float,
    sums: NDArray[np.float64],
) -> float:
    """`margin` as `soft_product` has it: feature j in sum j modulo LANES, then halves added to halves. sums: scratch."""
    for lane in range(LANES):
        sums[lane] = 0.0
    for p in range(begin, end):
        j = np.uint32(indices[p])
        x = v[j]
        sums[j % np.uint32(LANES)] += data[p] * (x - min(max(x, -lam), lam))
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            sums[lane] += sums[lane + width]
    return float(v0 + sums[0])
