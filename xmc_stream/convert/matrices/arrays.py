"""Matrices in arrays, read in windows: CSR, dense, and class ids; and what a kind of file gives for an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side
from xmc_stream.errors import InputError
from xmc_stream.system.files import regular

Take = Callable[[int], NDArray[Any]]  # gives the next n items, a fresh array; raises InputError where there are less


@dataclass(frozen=True)
class Array:
    """A one-dimensional array on disk, picklable, or in memory. stream: opens items [start, stop), to be taken in turn."""

    n_items: int
    dtype: np.dtype[Any]
    stream: Callable[[int, int], AbstractContextManager[Take]]


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


def beginning(path: Path) -> bytes:
    """The first bytes of a file, b"" of a folder. Raises InputError for anything else."""
    check_file(path, folders=True)
    if path.is_dir():
        return b""
    with reading(path), open(path, "rb", opener=regular) as file:
        return file.read(16)


@dataclass(frozen=True)
class CSRSide(Side):
    """A compressed sparse matrix of three arrays, by rows. data: None for ones."""

    indptr: Array
    indices: Array
    data: Array | None

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop)."""
        # the item that two ranges share belongs to the first of them
        first = self._item(start) if start else 0
        end = self.indices.n_items if stop == self.n_rows else self._item(stop)
        with ExitStack() as opened:
            ends = opened.enter_context(self.indptr.stream(start + 1 if start else 0, stop + 1))
            if start == 0:
                self._check(ends(1), 0, 0, 0)
            indices = opened.enter_context(self.indices.stream(first, end))
            data = opened.enter_context(self.data.stream(first, end)) if self.data else None
            at = np.empty(0, np.int64)  # where rows end that are not yet passed on
            while start < stop:
                n = min(size.block, stop - start) - len(at)
                if n > 0:
                    more = self._check(ends(n), start + len(at), int(at[-1]) if len(at) else first)
                    at = np.concatenate([at, more])
                n = max(1, int(np.searchsorted(at, first + size.block, side="right")))
                n_entries = int(at[n - 1]) - first
                if n == 1:
                    size.check(n_entries, self.name, start)
                indptr = np.zeros(n + 1, np.int64)
                np.subtract(at[:n], first, out=indptr[1:])
                yield indptr, indices(n_entries), data(n_entries) if data else None
                at, first, start = at[n:].copy(), first + n_entries, start + n

    def _item(self, row: int) -> int:
        """Where a row begins."""
        with self.indptr.stream(row, row + 1) as take:
            return int(self._check(take(1), row, 0)[0])

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


def csr_side(
    name: str, kind: str, files: Sequence[Path], shape: tuple[int | None, int | None], indptr: Array, indices: Array,
    data: Array | None, **more: Any,
) -> CSRSide:  # fmt: skip
    """A matrix in arrays whose types can be one. Raises ValueError where they cannot."""
    for array, what in ((indptr, "indptr"), (indices, "indices")):
        if array.dtype.kind not in "iu":
            raise ValueError(f"{what} of type {array.dtype}")
    n_rows, n_columns = shape
    if indptr.n_items < 1 or (n_rows is not None and indptr.n_items != n_rows + 1):
        raise ValueError(f"{indptr.n_items} items of indptr for {n_rows} rows")
    if data is not None:
        if data.n_items != indices.n_items:
            raise ValueError(f"{indices.n_items} indices and {data.n_items} values")
        check_real(data.dtype, name)
    return CSRSide(name, kind, files, indptr.n_items - 1, n_columns, indices.n_items, indptr, indices, data, **more)


def check_real(dtype: np.dtype[Any], name: str) -> None:
    """Raises InputError for values that are not real numbers."""
    if dtype.kind not in "biuf":
        raise InputError(f"{name} has values of type {dtype}: they must be real numbers")


@dataclass(frozen=True)
class DenseSide(Side):
    """A dense matrix of real numbers in C order."""

    array: Array

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) without their zeros, of either sign, and values that are zero in float32."""
        width = self.n_columns or 0
        size.check(2 * width, self.name, start)  # finding what is not zero takes as much again
        step = max(1, min(size.block, size.block // 2 // max(width, 1)))
        with self.array.stream(start * width, stop * width) as take:
            for row in range(start, stop, step):
                n = min(step, stop - row)
                block = take(n * width).reshape(n, width)
                with np.errstate(over="ignore", invalid="ignore"):
                    there = block.astype(np.float32) != 0
                indptr = np.zeros(n + 1, np.int64)
                np.cumsum(np.count_nonzero(there, axis=1), out=indptr[1:])
                yield indptr, np.nonzero(there)[1], block[there]


def dense(
    name: str, kind: str, files: Sequence[Path], n_rows: int, n_columns: int, array: Array, **more: Any
) -> DenseSide:
    """A dense matrix of which all may be entries. Raises InputError where its numbers are not real."""
    check_real(array.dtype, name)
    return DenseSide(name, kind, files, n_rows, n_columns, n_rows * n_columns, array, **{"divisible": True, **more})


@dataclass(frozen=True)
class ClassSide(Side):
    """The class of each row."""

    array: Array

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), each with one entry."""
        with self.array.stream(start, stop) as take:
            for row in range(start, stop, size.block):
                n = min(size.block, stop - row)
                yield np.arange(n + 1), take(n), None


def classes(name: str, kind: str, files: Sequence[Path], array: Array, **more: Any) -> ClassSide:
    """Class ids."""
    return ClassSide(name, kind, files, array.n_items, None, array.n_items, array, **{"divisible": True, **more})
