"""Copying and counting in compressed sparse rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel


@kernel
def end_of_span(
    firsts: NDArray[np.int64], counts: NDArray[np.int64], begin: int, hole: int, capacity: int
) -> tuple[int, bool]:
    """The run of ranges, from number `begin` on, that one read should fetch.

    Holes of at most `hole` items are read over, unless the span would outgrow `capacity`; a run without any hole may.
    Returns the end of the run and whether it has no hole.
    """
    start = firsts[begin]
    stop = start + counts[begin]
    end = begin + 1
    while end < len(firsts) and firsts[end] == stop:
        stop += counts[end]
        end += 1
    if stop - start >= capacity:
        return end, True
    dense = True
    while end < len(firsts) and firsts[end] - stop <= hole and firsts[end] + counts[end] - start <= capacity:
        dense = dense and firsts[end] == stop
        stop = firsts[end] + counts[end]
        end += 1
    return end, dense


@kernel
def copy_ranges(
    source: NDArray[Any], starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any], filled: int
) -> int:
    """Copy source[start : start + count] of each range to out[filled:], one after another; returns the new `filled`."""
    for r in range(len(starts)):
        for p in range(starts[r], starts[r] + counts[r]):
            out[filled] = source[p]
            filled += 1
    return filled


@kernel
def count_indices(indices: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """counts[j] += how often j occurs."""
    for p in range(len(indices)):
        counts[indices[p]] += 1


@kernel
def row_norms(indptr: NDArray[np.int64], data: NDArray[Any], out: NDArray[np.float32]) -> None:
    """The l2 norm of each row, summed in float64 in the order of the row: out (n,)."""
    for i in range(len(indptr) - 1):
        total = 0.0
        for p in range(indptr[i], indptr[i + 1]):
            total += np.float64(data[p]) * np.float64(data[p])
        out[i] = np.sqrt(total)


@kernel
def scale_rows_l2(indptr: NDArray[np.int64], data: NDArray[np.float32]) -> None:
    """Divide each row by its l2 norm, in place; rows without values, or of zeros, stay as they are."""
    for i in range(len(indptr) - 1):
        total = 0.0
        for p in range(indptr[i], indptr[i + 1]):
            total += np.float64(data[p]) * np.float64(data[p])
        if total > 0.0:
            norm = np.sqrt(total)
            for p in range(indptr[i], indptr[i + 1]):
                data[p] = np.float32(np.float64(data[p]) / norm)


@kernel
def scatter_lines(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[Any],
    first_line: int,
    low: int,
    high: int,
    ends: NDArray[np.int64],
    out_indices: NDArray[Any],
    out_data: NDArray[Any],
) -> None:
    """Transposition: put the entries with index in [low, high) into their columns.

    ends (high - low,): where the next entry of each column goes, moved on. data, out_data: empty for a matrix of ones.
    """
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            if low <= j < high:
                q = ends[j - low]
                ends[j - low] = q + 1
                out_indices[q] = first_line + i
                if len(data):
                    out_data[q] = data[p]
