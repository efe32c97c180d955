"""Matrices in arrays on disk, in windows: CSR, dense, and class ids; and what a kind of file gives for an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.matrices.sides import BlockSize, Raw, row_ranges
from xmc_stream.errors import InputError


class Stream(Protocol):
    """Items of an array, one after another."""

    def __enter__(self) -> Stream: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def take(self, n: int) -> NDArray[Any]:
        """The next n items, a fresh array. Raises InputError where the file gives less."""

    def finish(self) -> list[int]:
        """Read what is left; returns checksum and size in bytes of all that was read, or nothing."""


class Array(Protocol):
    """A one-dimensional array on disk: picklable."""

    @property
    def n_items(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def stream(self, start: int, stop: int) -> Stream:
        """Items [start, stop)."""


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Put errors of reading a file into words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the name") from None


def check_file(path: Path, folders: bool = False) -> None:
    """Raises InputError for what is there and is no file, or folder where that may be."""
    if path.exists() and not (path.is_file() or (folders and path.is_dir())):
        raise InputError(f"{path} is not a file: arrays are read at several places at once, not from pipes or folders")


@dataclass(frozen=True)
class CSRReader:
    """A compressed sparse matrix of three arrays, by rows. data: None for ones."""

    name: str
    n_rows: int
    indptr: Array
    indices: Array
    data: Array | None

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop). The part with the last row reads all arrays to their ends, for their checksums."""
        last = stop == self.n_rows
        # the item that two ranges share belongs to the first of them
        first = 0 if start == 0 else self._item(start)
        with ExitStack() as opened:
            ends = opened.enter_context(self.indptr.stream(start + 1 if start else 0, stop + 1))
            if start == 0:
                self._check(ends.take(1), 0, 0, 0)
            entries = [
                opened.enter_context(array.stream(first, array.n_items if last else self._item(stop)))
                for array in (self.indices, self.data)
                if array is not None
            ]
            yield from self._blocks(ends, entries, start, stop, first, size)
            sums = [stream.finish() for stream in (ends, *entries)]
            if sums[0]:
                notes["checksums"] = sums

    def _blocks(
        self, ends: Stream, entries: Sequence[Stream], start: int, stop: int, first: int, size: BlockSize
    ) -> Iterator[Raw]:
        at = np.empty(0, np.int64)  # where rows end that are not yet passed on
        while start < stop:
            n = min(size.block, stop - start) - len(at)
            if n > 0:
                more = self._check(ends.take(n), start + len(at), int(at[-1]) if len(at) else first)
                at = np.concatenate([at, more])
            n = max(1, int(np.searchsorted(at, first + size.block, side="right")))
            end = int(at[n - 1])
            if n == 1:
                size.check(end - first, self.name, start)
            indptr = np.zeros(n + 1, np.int64)
            np.subtract(at[:n], first, out=indptr[1:])
            taken = [stream.take(end - first) for stream in entries]
            yield indptr, taken[0], taken[1] if len(taken) == 2 else None
            del taken
            at, first, start = at[n:].copy(), end, start + n

    def _item(self, row: int) -> int:
        """Where a row begins."""
        with self.indptr.stream(row, row + 1) as stream:
            return int(self._check(stream.take(1), row, 0)[0])

    def _check(self, ends: NDArray[Any], row: int, low: int, most: int | None = None) -> NDArray[np.int64]:
        """Items of indptr, which must ascend from `low` to `most`, the number of entries if it is not given."""
        if most is None:
            most = min(array.n_items for array in (self.indices, self.data) if array is not None)
        good = (ends >= low) & (ends <= most)
        good[1:] &= ends[1:] >= ends[:-1]
        if not good.all():
            at = int(np.argmin(good))
            raise InputError(
                f"{self.name}: indptr leads from row {row + at} (from 0) to entry {ends[at]}, and they must ascend "
                f"from {low} to {most} at most: its arrays do not fit its shape, make the matrix again"
            )
        return ends.astype(np.int64)


@dataclass(frozen=True)
class CSRSide:
    """A CSR matrix in arrays on disk. divisible: whether they can be read from anywhere. n_columns: None if unknown."""

    name: str
    kind: str
    files: Sequence[Path]
    n_columns: int | None
    arrays: CSRReader
    divisible: bool = True
    load_bytes: int = 0

    @property
    def n_rows(self) -> int:
        """N."""
        return self.arrays.n_rows

    @property
    def entries(self) -> int:
        """At most."""
        return self.arrays.indices.n_items

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART entries, if they are spread evenly."""
        return row_ranges(self.n_rows, self.entries) if self.divisible else [(0, self.n_rows)]

    def reader(self) -> CSRReader:
        """Reads its rows."""
        return self.arrays

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: .npy files have no checksums."""


def csr_reader(name: str, indptr: Array, indices: Array, data: Array | None, n_rows: int | None) -> CSRReader:
    """The reader of a matrix whose arrays have types that can be one. Raises ValueError where they have not."""
    for array, what in ((indptr, "indptr"), (indices, "indices")):
        if array.dtype.kind not in "iu":
            raise ValueError(f"{what} of type {array.dtype}")
    if indptr.n_items < 1 or (n_rows is not None and indptr.n_items != n_rows + 1):
        raise ValueError(f"{indptr.n_items} items of indptr for {n_rows} rows")
    if data is not None:
        if data.n_items != indices.n_items:
            raise ValueError(f"{indices.n_items} indices and {data.n_items} values")
        check_real(data.dtype, name)
    return CSRReader(name, indptr.n_items - 1, indptr, indices, data)


def check_real(dtype: np.dtype[Any], name: str) -> None:
    """Raises InputError for values that are not real numbers."""
    if dtype.kind not in "biuf":
        raise InputError(f"{name} has values of type {dtype}: they must be real numbers")


@dataclass(frozen=True)
class DenseSide:
    """A dense matrix of real numbers in C order, and its reader."""

    name: str
    kind: str
    files: Sequence[Path]
    n_rows: int
    n_columns: int
    array: Array
    load_bytes: int = 0
    divisible: bool = True

    @property
    def entries(self) -> int:
        """At most: all."""
        return self.n_rows * self.n_columns

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART entries, or all at once."""
        return row_ranges(self.n_rows, self.entries) if self.divisible else [(0, self.n_rows)]

    def reader(self) -> DenseSide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) without their zeros, of either sign, and values that are zero in float32."""
        size.check(2 * self.n_columns, self.name, start)  # finding what is not zero takes as much again
        step = max(1, min(size.block, size.block // 2 // max(self.n_columns, 1)))
        with self.array.stream(start * self.n_columns, stop * self.n_columns) as stream:
            for row in range(start, stop, step):
                n = min(step, stop - row)
                block = stream.take(n * self.n_columns).reshape(n, self.n_columns)
                with np.errstate(over="ignore", invalid="ignore"):
                    there = block.astype(np.float32) != 0
                indptr = np.zeros(n + 1, np.int64)
                np.cumsum(np.count_nonzero(there, axis=1), out=indptr[1:])
                indices = np.nonzero(there)[1]
                yield indptr, indices, block[there]
            _note_sums(stream, notes)


@dataclass(frozen=True)
class ClassSide:
    """The class of each row, and its reader."""

    name: str
    kind: str
    files: Sequence[Path]
    array: Array
    n_columns: int | None = None
    load_bytes: int = 0
    divisible: bool = True

    @property
    def n_rows(self) -> int:
        """N."""
        return self.array.n_items

    @property
    def entries(self) -> int:
        """One a row."""
        return self.array.n_items

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART rows, or all at once."""
        return row_ranges(self.n_rows, self.entries) if self.divisible else [(0, self.n_rows)]

    def reader(self) -> ClassSide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), each with one entry."""
        with self.array.stream(start, stop) as stream:
            for row in range(start, stop, size.block):
                n = min(size.block, stop - row)
                yield np.arange(n + 1), stream.take(n), None
            _note_sums(stream, notes)


def _note_sums(stream: Stream, notes: dict[str, Any]) -> None:
    """Read an array to the end of what was asked for, and note its checksum if one is made."""
    if sums := stream.finish():
        notes["checksums"] = [sums]
