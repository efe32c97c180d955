"""Rows to columns in bounded memory: one pass when the columns fit the buffers, else two, whatever the size.

The first of two passes reads the rows, sorts each block's entries by bucket (a range of columns that fits the buffers) and
spills them to disk; the second takes bucket by bucket, its segment of every block in turn.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.encoding import MatrixWriter, index_dtype
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.store.nodes import Group

_SHORT = 2**16  # lines of a block and columns of a bucket that are spilled: counted from the first, two bytes each


def transpose(rows: SparseMatrix, counts: NDArray[np.int64], group: Group, max_bytes: int) -> MatrixWriter:
    """Write a CSR matrix as CSC into an empty local group.

    counts (n_columns,): entries of each column. max_bytes: of the buffers; beside them stand the writer's own chunks
    and three int64 arrays of n_columns. Two passes need disk under the group, given back at the end: an entry's value
    and four bytes (X 8, Y 4). A row that is longer than a quarter of max_bytes is read beyond them. Raises StoreError where
    counts and rows disagree.
    """
    ends = np.zeros(len(counts) + 1, np.int64)  # where each column begins, and the end of the last
    np.cumsum(counts, out=ends[1:])
    if ends[-1] != rows.nnz or len(counts) != rows.bound or (ends[1:] < ends[:-1]).any():
        raise StoreError(
            f"{rows.path} has {rows.nnz} entries, {ends[-1]} by their counts: it is damaged; make it again"
        )
    data_dtype = None if rows.data is None else rows.data.dtype
    writer = MatrixWriter(group, "csc_matrix", rows.shape, data_dtype)
    entry_bytes = index_dtype(rows.shape[0]).itemsize + (0 if data_dtype is None else data_dtype.itemsize)
    capacity = max_bytes * 3 // 4 // entry_bytes
    if rows.nnz <= capacity:
        _in_memory(rows, counts, ends, writer, max_bytes // 4)
    else:
        folder = group.path / "spill"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed process
        folder.mkdir()
        try:
            buckets = _buckets(ends, capacity)
            spill = _Spill(folder, rows)
            spill.fill(rows, buckets, max_bytes)
            _from_spill(spill, rows, counts, ends, buckets, writer, capacity, max_bytes)
        finally:
            shutil.rmtree(folder)
    writer.close()
    return writer


def _buckets(ends: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Bounds of ranges of columns with at most `capacity` entries together; a larger column is a run by itself."""
    bounds = [0]
    while bounds[-1] < len(ends) - 1:
        low = bounds[-1]
        fitting = int(np.searchsorted(ends, ends[low] + capacity, side="right")) - 1
        bounds.append(max(low + 1, min(fitting, low + _SHORT)))
    return np.array(bounds)


def _or_none(data: NDArray[Any] | None) -> NDArray[Any]:
    """Values as kernels take them: an empty array for a matrix of ones."""
    return np.empty(0, np.float32) if data is None else data


def _in_memory(
    rows: SparseMatrix, counts: NDArray[np.int64], ends: NDArray[np.int64], writer: MatrixWriter, block_bytes: int
) -> None:
    from xmc_stream.kernels.csr import scatter_lines

    indices = np.empty(rows.nnz, index_dtype(rows.shape[0]))
    data = None if rows.data is None else np.empty(rows.nnz, rows.data.dtype)
    places = ends[:-1].copy()
    for block in rows.blocks(block_bytes):
        values = _or_none(block.data)
        if not scatter_lines(block.indptr, block.indices, values, block.start, places, indices, _or_none(data)):
            raise _damaged(rows)
    _expect_full(rows, places, ends)
    del places
    writer.append(counts, indices, data)


def _damaged(rows: SparseMatrix) -> StoreError:
    return StoreError(f"{rows.path} has other entries than its counts say: the store is damaged; make it again")


def _expect_full(rows: SparseMatrix, places: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Raise StoreError where a column has more or fewer entries than counted. places: behind the last ones, overwritten."""
    places -= ends[1:]
    places += ends[0]
    if places.any():
        raise _damaged(rows)


class _Spill:
    """Entries on disk between the passes: a file each of columns (from the bucket's first), lines (from the block's
    first) and values.

    A block's entries lie together, sorted by bucket; a line of the file `segments` says where each bucket begins.
    """

    def __init__(self, folder: Path, rows: SparseMatrix) -> None:
        self._folder = folder
        self._firsts: list[int] = []  # rows that blocks begin with
        self._n_buckets = 0
        self.dtypes: dict[str, np.dtype[Any]] = {"columns": np.dtype(np.uint16), "lines": np.dtype(np.uint16)}
        if rows.data is not None:
            self.dtypes["values"] = rows.data.dtype
        self.entry_bytes = sum(dtype.itemsize for dtype in self.dtypes.values())

    def fill(self, rows: SparseMatrix, buckets: NDArray[np.int64], max_bytes: int) -> None:
        """Write all entries, block by block."""
        from xmc_stream.kernels.csr import sort_by_bucket

        self._n_buckets = len(buckets) - 1
        bucket_of = np.repeat(np.arange(self._n_buckets, dtype=np.int32), np.diff(buckets))
        # a block is sorted from one buffer into another, while what the last one was sorted into is being written
        block_bytes = rows.block_bytes(max_bytes * rows.entry_bytes // (rows.entry_bytes + 2 * self.entry_bytes))
        room = min(rows.nnz, block_bytes // rows.entry_bytes)
        pair = [{name: np.empty(room, dtype) for name, dtype in self.dtypes.items()} for _ in range(2)]
        starts = np.zeros(len(buckets), np.int64)
        written = 0
        with ExitStack() as stack:
            segments = stack.enter_context(open(self._folder / "segments", "wb"))
            files = {name: stack.enter_context(open(self._folder / name, "wb")) for name in self.dtypes}

            def write(arrays: dict[str, NDArray[Any]], n: int) -> None:
                for name, array in arrays.items():
                    files[name].write(array[:n].data)

            writing = (pool := stack.enter_context(ThreadPoolExecutor(1))).submit(write, {}, 0)
            for (block,) in stream((rows,), block_bytes, 0, rows.n_lines, _SHORT):
                arrays = pair[len(self._firsts) % 2]
                if not sort_by_bucket(
                    block.indptr,
                    block.indices,
                    _or_none(block.data),
                    bucket_of,
                    buckets,
                    starts,
                    arrays["columns"],
                    arrays["lines"],
                    _or_none(arrays.get("values")),
                ):
                    raise _damaged(rows)
                writing.result()
                writing = pool.submit(write, arrays, len(block.indices))
                segments.write((starts + written).data)
                self._firsts.append(block.start)
                written += len(block.indices)
            writing.result()

    def read(self, bucket: int, buffers: dict[str, NDArray[Any]]) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """A bucket's entries in the order of rows, as many as the buffers hold at a time: first row, columns, lines, ..."""
        room = len(buffers["lines"])
        line_bytes = 8 * (self._n_buckets + 1)
        with ExitStack() as stack:
            segments = stack.enter_context(open(self._folder / "segments", "rb"))
            files = {name: stack.enter_context(open(self._folder / name, "rb", buffering=0)) for name in buffers}
            for number, first in enumerate(self._firsts):
                bounds = os.pread(segments.fileno(), 16, number * line_bytes + 8 * bucket)
                at, end = np.frombuffer(bounds, np.int64).tolist()
                while at < end:
                    n = min(end - at, room)
                    parts = {name: buffer[:n] for name, buffer in buffers.items()}
                    for name, part in parts.items():
                        files[name].seek(at * part.itemsize)
                        if files[name].readinto(part.data.cast("B")) != part.nbytes:
                            raise StoreError(f"{files[name].name} ends early: it was changed by others; run again")
                    yield first, parts
                    at += n


def _from_spill(
    spill: _Spill,
    rows: SparseMatrix,
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    buckets: NDArray[np.int64],
    writer: MatrixWriter,
    capacity: int,
    max_bytes: int,
) -> None:
    from xmc_stream.kernels.csr import scatter_entries

    row_index = index_dtype(rows.shape[0])
    sizes = np.diff(ends[buckets])
    room = max(1, max_bytes // 4 // (spill.entry_bytes + row_index.itemsize))
    buffers = {name: np.empty(room, dtype) for name, dtype in spill.dtypes.items()}
    largest = int(sizes[sizes <= capacity].max(initial=0))
    indices = np.empty(largest, row_index)
    data = None if rows.data is None else np.empty(largest, rows.data.dtype)
    for bucket, (low, high, size) in enumerate(zip(buckets[:-1], buckets[1:], sizes, strict=True)):
        parts = spill.read(bucket, buffers)
        if size > capacity:  # a column: its entries come in the order of rows
            writer.append(counts[low:high], indices[:0], None if data is None else data[:0])
            begin = writer.nnz
            for first, part in parts:
                writer.append(counts[:0], np.add(part["lines"], first, dtype=row_index), part.get("values"))
            if writer.nnz - begin != size:
                raise _damaged(rows)
            continue
        places = ends[low:high] - ends[low]
        for first, part in parts:
            values = _or_none(part.get("values"))
            if not scatter_entries(part["columns"], part["lines"], values, first, places, indices, _or_none(data)):
                raise _damaged(rows)
        _expect_full(rows, places, ends[low : high + 1])
        del places
        writer.append(counts[low:high], indices[:size], None if data is None else data[:size])
