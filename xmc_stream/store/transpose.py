"""Rows to columns in bounded memory: as many passes over the rows as the columns are larger than the budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.memory import format_size
from xmc_stream.store.encoding import MatrixWriter, index_dtype
from xmc_stream.store.matrix import SparseMatrix


def transpose(rows: SparseMatrix, counts: NDArray[np.int64], group: zarr.Group, max_bytes: int) -> MatrixWriter:
    """Write a CSR matrix as CSC into an empty group.

    counts: entries of each column. max_bytes: of the buffers, the writer's own chunks apart; a column must fit in
    three quarters of it, else MemoryLimitError is raised.
    """
    from xmc_stream.kernels.csr import scatter_lines

    data_dtype = None if rows.data is None else rows.data.dtype
    writer = MatrixWriter(group, "csc_matrix", rows.shape, data_dtype)
    row_index = index_dtype(rows.shape[0])
    entry_bytes = row_index.itemsize + (0 if data_dtype is None else data_dtype.itemsize)
    for low, high in _ranges(counts, max_bytes * 3 // 4 // entry_bytes, f"a column of {rows.path}", entry_bytes):
        starts = np.zeros(high - low + 1, np.int64)
        np.cumsum(counts[low:high], out=starts[1:])
        indices = np.empty(starts[-1], row_index)
        data: NDArray[Any] = np.empty(0 if data_dtype is None else starts[-1], data_dtype or np.float32)
        ends = starts[:-1].copy()
        for block in rows.blocks(max_bytes // 4):
            values = np.empty(0, np.float32) if block.data is None else block.data
            scatter_lines(block.indptr, block.indices, values, block.start, low, high, ends, indices, data)
        writer.append(counts[low:high], indices, data)
    writer.close()
    return writer


def _ranges(counts: NDArray[np.int64], capacity: int, what: str, entry_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of columns with at most `capacity` entries together."""
    ends = np.cumsum(counts)
    low = 0
    while low < len(counts):
        before = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, before + capacity, side="right"))
        if high == low:
            need = format_size(int(counts[low]) * entry_bytes)
            raise MemoryLimitError(f"{what} takes {need}, more than is planned for it: raise --memory-limit")
        yield low, high
        low = high
