"""Checking sparse lines: order and range of indices, finite values, and sums that do not depend on the order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import mix

# what `check_entries` carries from one piece of a window to the next, each from -1
LINE, INDEX, DISORDER, OUTSIDE, NOT_FINITE, N_STATE = range(6)


@kernel
def check_entries(
    ends: NDArray[np.int64],
    begin: int,
    first_line: int,
    indices: NDArray[Any],
    values: NDArray[np.float32],
    bits: NDArray[np.uint32],
    bound: int,
    by_columns: bool,
    key: np.uint64,
    state: NDArray[np.int64],
    sums: NDArray[np.uint64],
    squares: NDArray[np.float64],
) -> None:
    """Check the entries [begin, begin + len(indices)) of a window of lines, which goes on where the last piece ended.

    ends (n,): where each line of the window ends; values, bits: the same floats, twice, or empty for a matrix of ones.
    bound: indices are below. state (N_STATE,): line of the window and last index in it; the first line that is out of
    order, has an index out of range, or a value that is not finite. sums += the sum over all entries of a hash of (row,
    column, value), and of one of the index alone. squares (n,) += the squares of each line's values, in their order.
    """
    line, previous = state[LINE], state[INDEX]
    line = max(line, 0)
    for p in range(len(indices)):
        while begin + p >= ends[line]:
            line += 1
            previous = -1
        j = np.int64(indices[p])
        if j <= previous and state[DISORDER] < 0:
            state[DISORDER] = first_line + line
        if (j < 0 or j >= bound) and state[OUTSIDE] < 0:
            state[OUTSIDE] = first_line + line
        previous = j
        row, column = first_line + line, j
        if by_columns:
            row, column = column, row
        entry = mix(mix(np.uint64(row) ^ key) + np.uint64(column))
        if len(values):
            square = np.float64(values[p]) * np.float64(values[p])
            if not np.isfinite(square) and state[NOT_FINITE] < 0:
                state[NOT_FINITE] = first_line + line
            squares[line] += square
            entry = mix(entry ^ np.uint64(bits[p]))
        sums[0] += entry
        sums[1] += mix(np.uint64(j) + key)
    state[LINE], state[INDEX] = line, previous


@kernel
def sum_of_counts(first: int, counts: NDArray[np.int64], key: np.uint64) -> np.uint64:
    """What `check_entries` adds up of indices alone, from how often first, first + 1, ... occur."""
    total = np.uint64(0)
    for j in range(len(counts)):
        total += np.uint64(counts[j]) * mix(np.uint64(first + j) + key)
    return total
