"""Products of sparse rows with dense matrices, each sum in the order of entries or rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.lines import CACHE_LINE

AHEAD = 24  # entries, by which lines of a dense matrix are asked for before they are used


@inner_kernel
def ahead(indices: NDArray[Any], p: int, end: int, flat: NDArray[Any], c: int) -> None:
    """Begin to bring the line (of c columns) near that entry p + AHEAD of a csr pattern, which ends at `end`, will use."""
    if p + AHEAD < end:
        first = np.int64(indices[p + AHEAD]) * c
        for at in range(first, first + c, CACHE_LINE):
            prefetch(flat, at)


@kernel
def multiply(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any], out: NDArray[Any]
) -> None:
    """out (n x c) = the rows (n x d, csr) times dense (d x c)."""
    flat, end = dense.reshape(-1), indptr[-1]
    for i in range(len(indptr) - 1):
        row = out[i]
        row[:] = 0
        for p in range(indptr[i], indptr[i + 1]):
            ahead(indices, p, end, flat, len(row))
            x, other = data[p], dense[indices[p]]
            for c in range(len(row)):
                row[c] += x * other[c]


@kernel
def add_transposed(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any], out: NDArray[Any]
) -> None:
    """out (d x c) += the transpose of the rows (n x d, csr) times dense (n x c)."""
    flat, end = out.reshape(-1), indptr[-1]
    for i in range(len(indptr) - 1):
        row = dense[i]
        for p in range(indptr[i], indptr[i + 1]):
            ahead(indices, p, end, flat, len(row))
            x, other = data[p], out[indices[p]]
            for c in range(len(row)):
                other[c] += x * row[c]


@kernel
def add_lines(dense: NDArray[Any], out: NDArray[Any]) -> None:
    """out (c) += each line of dense (n x c), in turn."""
    for i in range(len(dense)):
        line = dense[i]
        for c in range(len(out)):
            out[c] += line[c]
