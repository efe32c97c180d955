"""A sparse matrix on disk, read by ranges of lines (rows of CSR, columns of CSC) and by lists of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, are_apart, described, open_array
from xmc_stream.store.nodes import PlainArray, attributes_of, is_whole

if TYPE_CHECKING:
    import zarr

_WINDOW = 1 << 16  # lines whose indptr is read at a time: 512 KiB
_CHECKED = 1 << 19  # entries that are looked at at a time: each takes the interpreter's lock some four times


# kernels are compiled for one type of indices and one of values: what is narrower on disk is widened as it is read
_WIDE: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.float16): np.dtype(np.float32),
}
_WIDENED = 1 << 16  # items that are widened at a time


class WidenedArray(ChunkedArray):
    """An array whose items take two bytes on disk and four in memory: indices below 65,536, or weights of 16 bits.

    dtype: what it is read as. bytes_read, chunk_bytes: of the disk.
    """

    def __init__(self, array: zarr.Array[Any] | PlainArray) -> None:
        super().__init__(array)
        self._stored = np.dtype(self.dtype)
        self.dtype = _WIDE[self._stored]

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Items [start, stop) in a private array, or in `out[: stop - start]`."""
        n = self._count(start, stop, out)
        out = np.empty(n, self.dtype) if out is None else out[:n]
        piece = np.empty(min(n, _WIDENED), self._stored)
        for low in range(start, stop, _WIDENED):
            high = min(low + _WIDENED, stop)
            out[low - start : high - start] = super().read(low, high, piece)
        return out

    def read_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Items [first, first + count) of each range: see `ChunkedArray.read_ranges`. They are held in both types."""
        narrow = np.empty(len(out), self._stored)
        super().read_ranges(firsts, counts, narrow)
        out[:] = narrow


def widened(array: zarr.Array[Any] | PlainArray) -> ChunkedArray:
    """An array to be read, widened where it is narrow."""
    return WidenedArray(array) if array.dtype in _WIDE else ChunkedArray(array)


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

    def lines(self, first: int, last: int) -> Block:
        """Lines [first, last) of the block, in the same memory but for indptr."""
        a, b = int(self.indptr[first]), int(self.indptr[last])
        data = None if self.data is None else self.data[a:b]
        return Block(self.start + first, self.indptr[first : last + 1] - a, self.indices[a:b], data)


class Buffer:
    """Arrays that `block` and `gather` fill again and again, so that a stream allocates once.

    nnz: entries they hold. They become resident as they are filled.
    """

    def __init__(self, matrix: SparseMatrix, nnz: int) -> None:
        self.indices = np.empty(nnz, matrix.indices.dtype)
        self.data = None if matrix.data is None else np.empty(nnz, matrix.data.dtype)


class SparseMatrix:
    """One matrix of a store. Not shared between threads: every job opens its own.

    Kernels trust what it gives, whatever the files hold: lines begin and end within the entries, and indices are below the
    bound and ascend in a line, each once; with ordered=False they are below the bound. finite: so are the values.
    What is otherwise raises StoreError as it is read.
    """

    def __init__(self, path: Path | str, ordered: bool = True, finite: bool = False) -> None:
        self.path = Path(path)
        self._ordered, self._finite = ordered, finite
        try:
            attributes = attributes_of(self.path)
            self.encoding = str(attributes["encoding-type"])
            shape = attributes["shape"]
        except StoreError:
            raise
        except (KeyError, FileNotFoundError, ValueError) as error:
            raise StoreError(f"{self.path} is not a sparse matrix in anndata's encoding ({error!r})") from None
        if self.encoding not in ("csr_matrix", "csc_matrix"):
            raise StoreError(f"{self.path} is encoded as {self.encoding!r}, not as csr_matrix or csc_matrix")
        if not (isinstance(shape, list) and len(shape) == 2 and all(is_whole(n, 0) for n in shape)):
            raise StoreError(f"{self.path}: its shape {shape!r} is no pair of sizes: the store is damaged")
        self.attributes = attributes
        self.shape = (shape[0], shape[1])
        self.n_lines, self.bound = self.shape if self.encoding == "csr_matrix" else self.shape[::-1]
        self.indptr, self.indices = open_array(self.path / "indptr"), widened(described(self.path / "indices"))
        self.data = _data_or_ones(described(self.path / "data"))
        self.nnz = self.indices.size
        if self.indptr.size != self.n_lines + 1 or (self.data is not None and self.data.size != self.nnz):
            raise StoreError(f"{self.path}: its arrays do not fit its shape {self.shape}: the store is damaged")
        kinds = (
            self.indptr.dtype.kind,
            self.indices.dtype,
            np.dtype(np.float32) if self.data is None else self.data.dtype,
        )
        if kinds[0] not in "iu" or kinds[1] not in (np.int32, np.int64) or kinds[2] not in (np.float32, np.float64):
            raise StoreError(f"{self.path}: its arrays are of types that no matrix has: the store is damaged")

    def expect(self, shape: tuple[int | None, int | None], encoding: str, dtype: DTypeLike | None) -> SparseMatrix:
        """This matrix. Raises StoreError where it is not of a shape, an encoding and a type of values; None: of any."""
        fits = all(want in (None, n) for want, n in zip(shape, self.shape, strict=True)) and self.encoding == encoding
        # kernels are compiled for one type of indices
        fits = fits and self.indices.dtype == (np.int32 if self.bound <= np.iinfo(np.int32).max else np.int64)
        if not fits or (dtype is not None and (self.data is None or self.data.dtype != dtype)):
            values = "ones" if self.data is None else self.data.dtype
            wanted = "" if dtype is None else f" and {np.dtype(dtype)}"
            raise StoreError(
                f"{self.path} is a {self.encoding} of shape {self.shape}, {self.indices.dtype} and {values} where a {encoding} "
                f"of shape {shape}{wanted} belongs: the store is damaged; make it again"
            )
        return self

    def close_files(self) -> None:
        """Close the files that reading opened; see `ChunkedArray.close_files`."""
        for array in self.arrays():
            array.close_files()

    @property
    def fingerprint(self) -> str:
        """What "the same matrix" means: a hash of shape and values."""
        fingerprint = self.attributes.get("fingerprint")
        if not isinstance(fingerprint, str):
            raise StoreError(f"{self.path / 'zarr.json'} has no fingerprint: the store is damaged; make it again")
        return fingerprint

    @property
    def entry_bytes(self) -> int:
        """Bytes of an index and its value in memory."""
        return int(self.indices.dtype.itemsize) + (0 if self.data is None else int(self.data.dtype.itemsize))

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return sum(array.bytes_read for array in self.arrays())

    def arrays(self) -> list[ChunkedArray]:
        """The arrays that hold bytes."""
        return [self.indptr, self.indices] + ([] if self.data is None else [self.data])

    def check_sizes(self) -> None:
        """Look at all chunk files. Raises StoreError for one that is missing or not of its full size."""
        for array in self.arrays():
            array.check_sizes()

    def block(self, start: int, stop: int, buffer: Buffer | None = None) -> Block:
        """Lines [start, stop), in private arrays or in a buffer's."""
        return self._fill(start, self.ends(start, stop), buffer)

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read lines [start, stop) into the page cache while the caller does something else.

        Reads two items of indptr itself. Does nothing for compressed and remote arrays.
        """
        if self.indptr.path is not None:
            first, last = self.entries(start, stop)
            self.indptr.will_need(start, stop + 1)
            self._entries_needed(first, last)

    def entries(self, start: int, stop: int) -> tuple[int, int]:
        """Where the entries of lines [start, stop) begin and end. Reads two items of indptr."""
        first, last = (int(self.indptr.read(line, line + 1)[0]) for line in (start, stop))
        if not 0 <= first <= last <= self.nnz:
            raise self._damaged(f"lines {start} to {stop} begin and end")
        return first, last

    def _entries_needed(self, first: int, last: int) -> None:
        self.indices.will_need(first, last)
        if self.data is not None:
            self.data.will_need(first, last)

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the entries of each of lines [start, stop) begin, and where the last one's end."""
        ends = self.indptr.read(start, stop + 1).astype(np.int64, copy=False)  # others may have it narrower
        whole = (start or not ends[0]) and (stop < self.n_lines or ends[-1] == self.nnz)
        if not whole or ends[0] < 0 or ends[-1] > self.nnz or (ends[1:] < ends[:-1]).any():
            raise self._damaged(f"lines {start} to {stop} begin and end")
        return ends

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self.path}: {what} where they cannot: the store is damaged; make it again")

    def _fill(self, start: int, indptr: NDArray[np.int64], buffer: Buffer | None) -> Block:
        first, last = int(indptr[0]), int(indptr[-1])
        indices = self.indices.read(first, last, None if buffer is None else buffer.indices)
        data = None
        if self.data is not None:
            data = self.data.read(first, last, None if buffer is None else buffer.data)
        return self._checked(Block(start, indptr - first, indices, data))

    def _checked(self, block: Block) -> Block:
        """A block that was read, whose indptr is known to be right."""
        self._check(block.start, block.indptr, block.indices, block.data)
        return block

    def _check(
        self, line: int, starts: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any] | None, before: int = -1
    ) -> None:
        """Look at the entries of lines from `line` on, which begin at `starts`, if not earlier. before: the index ahead."""
        falls = np.empty(min(_CHECKED, len(indices)), np.bool_)
        unsigned = indices.view(f"u{indices.itemsize}")  # in which what is below zero is far above the bound
        for low in range(0, len(indices), _CHECKED):
            high = min(low + _CHECKED, len(indices))
            some = indices[low:high]
            sound = unsigned[low:high].max() < self.bound
            if self._ordered and sound:
                # all but the first of a line are above the one before
                fell = falls[: high - low]
                fell[0] = some[0] <= before
                np.less_equal(some[1:], some[:-1], out=fell[1:])
                a, b = np.searchsorted(starts, (low, high))
                fell[starts[a:b] - low] = False
                sound, before = not fell.any(), int(some[-1])
            if not sound:
                raise self._damaged(f"indices of lines from {line} on stand")
            if self._finite and data is not None and not np.isfinite(data[low:high]).all():
                raise StoreError(f"{self.path} has values that are not finite: the store is damaged; make it again")

    def index_windows(self, start: int, stop: int, size: int) -> Iterator[NDArray[Any]]:
        """Indices alone of lines [start, stop), so many at a time."""
        return (indices for indices, _ in self.windows(start, stop, size, False))

    def windows(
        self, start: int, stop: int, size: int, values: bool = True
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any] | None]]:
        """Indices and values (None: ones, or not wanted) of lines [start, stop), one after another, so many at a time."""
        for low in range(start, stop, _WINDOW):
            ends, before = self.ends(low, min(low + _WINDOW, stop)), -1
            for first in range(int(ends[0]), int(ends[-1]), size):
                last = min(first + size, int(ends[-1]))
                indices = self.indices.read(first, last)
                data = self.data.read(first, last) if values and self.data is not None else None
                self._check(low, ends[slice(*np.searchsorted(ends, (first, last)))] - first, indices, data, before)
                before = int(indices[-1])
                yield indices, data

    def parts(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Indices, in whatever order, and values of ranges of entries; see `ChunkedArray.read_ranges`."""
        n = int(counts.sum())
        indices, data = np.empty(n, self.indices.dtype), None if self.data is None else np.empty(n, self.data.dtype)
        self.indices.read_ranges(firsts, counts, indices)
        if self.data is not None and data is not None:
            self.data.read_ranges(firsts, counts, data)
        if n and not 0 <= indices.min() <= indices.max() < self.bound:
            raise self._damaged("some indices stand")
        return indices, data

    def blocks(self, max_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[Block]:
        """Consecutive blocks of max_bytes (entries and 8 bytes a line) over lines [start, stop): see `stream`."""
        for (block,) in stream((self,), max_bytes, start, self.n_lines if stop is None else stop):
            yield block

    def block_bytes(self, max_bytes: int, start: int = 0, stop: int | None = None) -> int:
        """Bytes of a block of lines [start, stop) that should have at most max_bytes: of the longest, where that has more."""
        most = min(self.nnz, self.bound) if self._ordered else self.nnz
        if 8 + most * self.entry_bytes <= max_bytes:
            return max_bytes
        lines = start, self.n_lines if stop is None else stop
        longest = _longest(self.path, str(self.attributes.get("fingerprint")), self.nnz, *lines)
        return max(max_bytes, 8 + longest * self.entry_bytes)

    def beyond(self, max_bytes: int) -> int:
        """Bytes by which the longest line makes a block larger."""
        return self.block_bytes(max_bytes) - max_bytes

    def _fitting(self, ends: NDArray[np.int64], at: int, max_bytes: int, line: int) -> int:
        """How many lines behind place `at` of a window of indptr fit into max_bytes. line: number of that line."""
        window = ends[at:]
        cost = window * self.entry_bytes
        cost += 8 * np.arange(len(window)) - cost[0]
        n = int(np.searchsorted(cost, max_bytes, side="right")) - 1
        if n == 0:
            raise StoreError(
                f"line {line} of {self.path} has {window[1] - window[0]} entries, and it has {self.bound} places: the store is "
                "damaged; make it again"
            )
        return n

    def lengths(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First entry and number of entries of each of the lines (sorted ascending, unique); only their own ends are read."""
        firsts = np.empty(len(lines), np.int64)
        counts = np.empty(len(lines), np.int64)
        for start in range(0, len(lines), _WINDOW):
            some = slice(start, start + _WINDOW)
            mine = lines[some]
            steps = np.diff(mine)
            jumps = np.flatnonzero(steps > 2)  # lines after which ends are left out
            begins = mine[np.concatenate([[0], jumps + 1])]
            sizes = mine[np.concatenate([jumps, [-1]])] + 2 - begins
            ends = np.empty(int(sizes.sum()), self.indptr.dtype)
            self.indptr.read_ranges(begins, sizes, ends)
            at = np.concatenate([[0], np.cumsum(np.minimum(steps, 2))])
            firsts[some] = ends[at]
            counts[some] = ends[at + 1] - ends[at]
        if not are_apart(firsts, counts, self.nnz):
            raise self._damaged("some lines begin and end")
        return firsts, counts

    def gather(
        self,
        lines: NDArray[np.int64],
        buffer: Buffer | None = None,
        lengths: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
        beside: Executor | None = None,
    ) -> Block:
        """The lines (sorted ascending, unique) in one sweep, read into private arrays and never through a map.

        buffer: what they are read into, if not new arrays. lengths: what `lengths(lines)` gave, if it is known. beside:
        reads the values while this thread reads the indices.
        """
        firsts, counts = self.lengths(lines) if lengths is None else lengths
        indptr = np.zeros(len(lines) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        nnz = int(indptr[-1])
        if buffer is None:
            buffer = Buffer(self, nnz)
        indices, data = buffer.indices[:nnz], None if buffer.data is None else buffer.data[:nnz]
        if self.data is None or data is None:
            self.indices.read_ranges(firsts, counts, indices)
        elif beside is None:
            self.indices.read_ranges(firsts, counts, indices)
            self.data.read_ranges(firsts, counts, data)
        else:
            values = beside.submit(self.data.read_ranges, firsts, counts, data)
            try:
                self.indices.read_ranges(firsts, counts, indices)
            finally:
                values.result()
        return self._checked(Block(0, indptr, indices, data))


@lru_cache(64)  # a plan is made for many limits, and each job streams
def _longest(path: Path, fingerprint: str, nnz: int, first: int, last: int) -> int:
    """Entries of the line of a matrix that has most, of lines [first, last)."""
    matrix = SparseMatrix(path)
    windows = (matrix.ends(start, min(start + _WINDOW, last)) for start in range(first, last, _WINDOW))
    return max((int(np.diff(ends).max()) for ends in windows), default=0)


def stream(
    matrices: Sequence[SparseMatrix], max_bytes: int | Sequence[int], start: int, stop: int, max_lines: int = 0
) -> Iterator[tuple[Block, ...]]:
    """Blocks of the same lines of some matrices, at most max_bytes of each (or so many of each), over [start, stop).

    They are larger where a line is: see `SparseMatrix.block_bytes`, by which they are planned. All share one buffer a matrix:
    a block is gone when the next one comes. Every entry is read once. max_lines: of a block, 0 for any number. While a block
    is worked on, the kernel reads the next one into the page cache.
    """
    bounds = [max_bytes] * len(matrices) if isinstance(max_bytes, int) else max_bytes
    most = [matrix.block_bytes(bound, start, stop) for matrix, bound in zip(matrices, bounds, strict=True)]
    buffers = [
        Buffer(matrix, min(matrix.nnz, m // matrix.entry_bytes)) for matrix, m in zip(matrices, most, strict=True)
    ]
    cuts = _cuts(matrices, most, start, stop, max_lines)
    following = next(cuts, None)
    while following is not None:
        line, ends = following
        parts = zip(matrices, ends, buffers, strict=True)
        blocks = tuple(matrix._fill(line, of_matrix, buffer) for matrix, of_matrix, buffer in parts)
        following = next(cuts, None)
        if following is not None:
            for matrix, of_matrix in zip(matrices, following[1], strict=True):
                matrix._entries_needed(int(of_matrix[0]), int(of_matrix[-1]))
        yield blocks


def _cuts(
    matrices: Sequence[SparseMatrix], most: Sequence[int], start: int, stop: int, max_lines: int
) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
    """The first line of each block of a stream, and what indptr says of its lines in each matrix."""
    for low in range(start, stop, _WINDOW):
        high = min(low + _WINDOW, stop)
        windows = [matrix.ends(low, high) for matrix in matrices]
        for matrix in matrices:
            matrix.indptr.will_need(high, min(high + _WINDOW, stop) + 1)
        at = 0
        while at < high - low:
            n = max_lines or high - low
            for matrix, ends, m in zip(matrices, windows, most, strict=True):
                n = min(n, matrix._fitting(ends, at, m, low + at))
            yield low + at, [ends[at : at + n + 1] for ends in windows]
            at += n


def stream_bytes(matrices: Sequence[SparseMatrix], ranges: Sequence[tuple[int, int]]) -> int:
    """Bytes that `stream` reads over ranges of lines which together are all lines."""
    windows = sum(-(-(stop - start) // _WINDOW) for start, stop in ranges)
    return sum(
        (matrix.n_lines + windows) * matrix.indptr.dtype.itemsize + matrix.nnz * matrix.entry_bytes
        for matrix in matrices
    )


def _data_or_ones(array: zarr.Array[Any] | PlainArray) -> ChunkedArray | None:
    """The values, or None for a matrix of ones: fill value one and not a single chunk written."""
    values = widened(array)
    if array.fill_value == 1 and array.nchunks_initialized == 0:
        return None
    if isinstance(array, PlainArray) and array.crcs == "" and array.size:
        raise StoreError(f"{array.path} has chunk files, and had none when it was written: make the store again")
    return values


def clip_ranges(
    firsts: NDArray[np.int64], counts: NDArray[np.int64], low: int, high: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items [low, high) of all items of some ranges, counted through, as ranges again: see `ChunkedArray.read_ranges`."""
    begins = np.cumsum(counts) - counts
    skipped = np.clip(low - begins, 0, counts)
    return firsts + skipped, np.clip(high - begins, 0, counts) - skipped
