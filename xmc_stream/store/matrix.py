"""A sparse matrix on disk, read by runs of lines (rows of CSR, columns of CSC) and by lists of lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.memory import format_size
from xmc_stream.store.chunks import ChunkedArray

_WINDOW = 1 << 17  # entries of indptr read at a time: 1 MiB


@dataclass(frozen=True)
class Block:
    """Lines [start, start + n) of a matrix, or n gathered lines: a CSR triple in memory.

    indptr (n + 1,) int64 from 0; indices (nnz,); data (nnz,), or None where every value is one.
    """

    start: int
    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    data: NDArray[Any] | None

    @property
    def n(self) -> int:
        """Lines in the block."""
        return len(self.indptr) - 1

    @property
    def values(self) -> NDArray[Any]:
        """The data of a matrix that has some."""
        if self.data is None:
            raise StoreError("a matrix of ones was opened where values are needed: X and Y are mixed up")
        return self.data


class Buffer:
    """Arrays that `block` and `gather` fill again and again, so that a stream allocates once.

    nnz: entries they hold. They become resident as they are filled.
    """

    def __init__(self, matrix: SparseMatrix, nnz: int) -> None:
        self.indices = np.empty(nnz, matrix.indices.dtype)
        self.data = None if matrix.data is None else np.empty(nnz, matrix.data.dtype)


class SparseMatrix:
    """One matrix of a store. Not shared between threads: every job opens its own."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            group = zarr.open_group(self.path, mode="r")
            attributes = dict(group.attrs)
            self.encoding = str(attributes["encoding-type"])
            shape = attributes["shape"]
            arrays = {name: group[name] for name in ("indptr", "indices", "data")}
        except (KeyError, FileNotFoundError, ValueError) as error:
            raise StoreError(f"{self.path} is not a sparse matrix in anndata's encoding ({error!r})") from None
        if self.encoding not in ("csr_matrix", "csc_matrix"):
            raise StoreError(f"{self.path} is encoded as {self.encoding!r}, not as csr_matrix or csc_matrix")
        self.attributes = attributes
        self.shape = (int(shape[0]), int(shape[1]))  # type: ignore[index, arg-type]
        self.n_lines = self.shape[0] if self.encoding == "csr_matrix" else self.shape[1]
        self.indptr = ChunkedArray(arrays["indptr"])  # type: ignore[arg-type]
        self.indices = ChunkedArray(arrays["indices"])  # type: ignore[arg-type]
        self.data = _data_or_ones(self.path, arrays["data"])  # type: ignore[arg-type]
        self.nnz = self.indices.size
        if self.indptr.size != self.n_lines + 1 or (self.data is not None and self.data.size != self.nnz):
            raise StoreError(f"{self.path}: its arrays do not fit its shape {self.shape}: the store is damaged")

    @property
    def entry_bytes(self) -> int:
        """Bytes of an index and its value."""
        return int(self.indices.dtype.itemsize) + (0 if self.data is None else int(self.data.dtype.itemsize))

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return self.indptr.bytes_read + self.indices.bytes_read + (0 if self.data is None else self.data.bytes_read)

    def arrays(self) -> list[ChunkedArray]:
        """The arrays that hold bytes."""
        return [self.indptr, self.indices] + ([] if self.data is None else [self.data])

    def block(self, start: int, stop: int, buffer: Buffer | None = None) -> Block:
        """Lines [start, stop), in private arrays or in a buffer's."""
        indptr = self._ends(start, stop + 1)
        return self._fill(start, indptr, buffer)

    def _ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Items [start, stop) of indptr; stores of other writers may have it narrower."""
        return self.indptr.read(start, stop).astype(np.int64, copy=False)

    def _fill(self, start: int, indptr: NDArray[np.int64], buffer: Buffer | None) -> Block:
        first, last = int(indptr[0]), int(indptr[-1])
        indices = self.indices.read(first, last, None if buffer is None else buffer.indices)
        data = None
        if self.data is not None:
            data = self.data.read(first, last, None if buffer is None else buffer.data)
        return Block(start, indptr - first, indices, data)

    def blocks(self, max_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[Block]:
        """Consecutive blocks of at most max_bytes (entries and 8 bytes a line) over lines [start, stop).

        All share one buffer: a block is gone when the next one comes. Raises MemoryLimitError for a line that is larger.
        """
        buffer = None
        for first, last, nnz in self.cuts(max_bytes, start, stop):
            if buffer is None or nnz > len(buffer.indices):
                buffer = Buffer(self, max(nnz, min(max_bytes // self.entry_bytes, self.nnz)))
            yield self.block(first, last, buffer)

    def cuts(self, max_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(first line, last line + 1, entries) of blocks of at most max_bytes over lines [start, stop)."""
        stop = self.n_lines if stop is None else stop
        while start < stop:
            end = min(start + max(1, min(_WINDOW, max_bytes // 8)), stop)
            indptr = self._ends(start, end + 1)
            cost = (indptr[1:] - indptr[0]) * self.entry_bytes + 8 * np.arange(1, end - start + 1)
            n = int(np.searchsorted(cost, max_bytes, side="right"))
            if n == 0:
                raise MemoryLimitError(
                    f"line {start} of {self.path} takes {format_size(int(cost[0]))}, over the {format_size(max_bytes)} "
                    "planned for a block: raise --memory-limit or lower --threads"
                )
            yield start, start + n, int(indptr[n] - indptr[0])
            start += n

    def lengths(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First entry and number of entries of each of the lines (sorted ascending), by windows of indptr."""
        firsts = np.empty(len(lines), np.int64)
        counts = np.empty(len(lines), np.int64)
        done = 0
        while done < len(lines):
            low = int(lines[done])
            end = int(np.searchsorted(lines, low + _WINDOW))
            window = self._ends(low, int(lines[end - 1]) + 2)
            local = lines[done:end] - low
            firsts[done:end] = window[local]
            counts[done:end] = window[local + 1] - window[local]
            done = end
        return firsts, counts

    def gather(
        self,
        lines: NDArray[np.int64],
        buffer: Buffer | None = None,
        lengths: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> Block:
        """The lines (sorted ascending, unique) in one sweep, read into private arrays and never through a map.

        buffer: what they are read into, if not new arrays. lengths: what `lengths(lines)` gave, if it is known.
        """
        firsts, counts = self.lengths(lines) if lengths is None else lengths
        indptr = np.zeros(len(lines) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        nnz = int(indptr[-1])
        if buffer is None:
            buffer = Buffer(self, nnz)
        self.indices.read_ranges(firsts, counts, buffer.indices[:nnz])
        if self.data is not None and buffer.data is not None:
            self.data.read_ranges(firsts, counts, buffer.data[:nnz])
        data = None if buffer.data is None else buffer.data[:nnz]
        return Block(0, indptr, buffer.indices[:nnz], data)


def row_blocks(
    matrices: Mapping[SparseMatrix, int], start: int, stop: int, max_rows: int = 0
) -> Iterator[tuple[Block, ...]]:
    """Consecutive rows of several matrices, at most so many bytes of each, in buffers used again for every block."""
    ends = {last for matrix, max_bytes in matrices.items() for _, last, _ in matrix.cuts(max_bytes, start, stop)}
    if max_rows:
        ends |= set(range(start + max_rows, stop, max_rows))
    buffers = {matrix: Buffer(matrix, min(matrix.nnz, most // matrix.entry_bytes)) for matrix, most in matrices.items()}
    for end in sorted(ends):
        yield tuple(matrix.block(start, end, buffer) for matrix, buffer in buffers.items())
        start = end


def _data_or_ones(path: Path, array: zarr.Array[Any]) -> ChunkedArray | None:
    """The values, or None for a matrix of ones: fill value one and not a single chunk written."""
    if array.fill_value == 1 and array.nchunks_initialized == 0:
        return None
    return ChunkedArray(array)
