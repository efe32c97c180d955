"""Products of a block of sparse rows with dense factors, one range of features after another.

A factor is larger than the caches, and each entry of a row needs another line of it: most of the time goes into waiting for
memory. Where the entries of many rows stand by ranges of features, lines are asked for in a part of memory at a time, which
caches and the processor's tables of pages hold, and neighbouring rows find lines that are there. In a range entries stand row
after row, and ranges ascend: every sum has the order, and the bits, that `kernels.products` gives it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.lines import CACHE_LINE
from xmc_stream.kernels.products import AHEAD


class Ranges(NamedTuple):
    """Entries of a block of rows. bits: 2^bits features are a range; starts (ranges + 1,): where each one's entries begin;

    places (nnz,): row << bits | feature in its range; values (nnz,).
    """

    bits: int
    starts: NDArray[np.int64]
    places: NDArray[np.uint32]
    values: NDArray[np.float32]


@kernel
def into_ranges(indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], out: Ranges) -> None:
    """Fill out with the entries of rows (csr). A row's number and a feature's in its range have 32 bits together."""
    bits, starts, places, values = out
    starts[:] = 0
    n, n_ranges, low = len(indptr) - 1, len(starts) - 1, (1 << bits) - 1
    for p in range(indptr[n]):
        starts[(indices[p] >> bits) + 1] += 1
    for t in range(n_ranges):
        starts[t + 1] += starts[t]
    for i in range(n):
        for p in range(indptr[i], indptr[i + 1]):
            t = indices[p] >> bits
            q = starts[t]
            starts[t] = q + 1
            places[q] = np.uint32((i << bits) | (indices[p] & low))
            values[q] = data[p]
    for t in range(n_ranges, 0, -1):  # each is where its range ends by now
        starts[t] = starts[t - 1]
    starts[0] = 0


@inner_kernel
def _ahead(
    place: np.int64, bits: int, first: np.int64, of_features: NDArray[Any], of_rows: NDArray[Any], c: int
) -> None:
    """Begin to bring both lines (of c columns) of an entry near. first: feature of the range."""
    feature, row = first + (place & ((1 << bits) - 1)), place >> bits
    for at in range(0, c, CACHE_LINE):
        prefetch(of_features, feature * c + at)
        prefetch(of_rows, row * c + at)


@kernel
def multiply_ranges(entries: Ranges, dense: NDArray[Any], out: NDArray[Any]) -> None:
    """out (n x c) = the rows (n x d) times dense (d x c)."""
    bits, starts, places, values = entries
    flat, rows, c, low = dense.reshape(-1), out.reshape(-1), out.shape[1], (1 << bits) - 1
    out[:] = 0
    for t in range(len(starts) - 1):
        first, end = np.int64(t) << bits, starts[t + 1]
        for p in range(starts[t], end):
            if p + AHEAD < end:
                _ahead(np.int64(places[p + AHEAD]), bits, first, flat, rows, c)
            place, x = np.int64(places[p]), values[p]
            row, other = out[place >> bits], dense[first + (place & low)]
            for j in range(c):
                row[j] += x * other[j]


@kernel
def add_transposed_ranges(entries: Ranges, dense: NDArray[Any], out: NDArray[Any]) -> None:
    """out (d x c) += the transpose of the rows (n x d) times dense (n x c)."""
    bits, starts, places, values = entries
    flat, rows, c, low = out.reshape(-1), dense.reshape(-1), out.shape[1], (1 << bits) - 1
    for t in range(len(starts) - 1):
        first, end = np.int64(t) << bits, starts[t + 1]
        for p in range(starts[t], end):
            if p + AHEAD < end:
                _ahead(np.int64(places[p + AHEAD]), bits, first, flat, rows, c)
            place, x = np.int64(places[p]), values[p]
            row, other = dense[place >> bits], out[first + (place & low)]
            for j in range(c):
                other[j] += x * row[j]
