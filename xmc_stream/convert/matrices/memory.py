"""Matrices in memory: those of scipy, and arrays of NumPy, which may be mapped from files; and X and Y of them as a dataset.

A matrix that scipy would read wrongly or crash on (indices out of range) is refused. What was read of a mapped file leaves
the memory of the process again: the file may be larger than that.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from xmc_stream.convert.matrices.arrays import Array, DenseSide, Take, dense
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side, block_bytes, check_real, checked_rows, fitted
from xmc_stream.convert.plan import plan_writing
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.names import new_names
from xmc_stream.store.new_dataset import load_kernels, new_dataset
from xmc_stream.store.places import writing
from xmc_stream.system.memory import MemoryLimit

_WINDOW = 2**18  # items of an array checked at a time


@dataclass(frozen=True)
class WholeSide(Side):
    """A matrix of scipy. load: gives it in any folder; what takes no load_bytes is CSR, and was checked."""

    load: Callable[[], Any]

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Copies of rows [start, stop)."""
        matrix = self.load()
        if self.load_bytes:
            matrix = as_csr(matrix, self.name)
        if matrix.shape != (self.n_rows, self.n_columns):
            raise InputError(f"{self.name} was changed meanwhile: convert again")
        while start < stop:
            at = matrix.indptr[start : min(start + size.block, stop) + 1].astype(np.int64)
            n = max(1, int(np.searchsorted(at, at[0] + size.block, side="right")) - 1)
            first, end = int(at[0]), int(at[n])
            if n == 1:
                size.check(end - first, self.name, start)
            yield at[: n + 1] - first, matrix.indices[first:end].copy(), matrix.data[first:end]
            start += n


def in_memory(matrix: Any, name: str) -> WholeSide:
    """A matrix as a side. Raises InputError where it is none, of numbers that are not real, or contradicts its shape."""
    from scipy import sparse

    is_sparse: bool = sparse.issparse(matrix)
    if not is_sparse or matrix.ndim != 2:
        kind = type(matrix).__name__
        raise InputError(f"{name} must be a two-dimensional sparse matrix of scipy, got {kind}: wrap it in csr_array")
    check_real(matrix.dtype, name)
    entries = int(matrix.nnz)
    if matrix.format in ("bsr", "dia"):  # their nnz leaves out what they store besides
        entries = max(entries, matrix.data.size)
    n_rows, n_columns = (int(n) for n in matrix.shape)
    is_csr = matrix.format == "csr"
    if is_csr:
        check_compressed(matrix, name)
    load_bytes = 0 if is_csr else csr_bytes(entries, matrix.dtype, n_rows)
    return WholeSide(
        name, "scipy matrix", (), n_rows, n_columns, entries, lambda: matrix, load_bytes=load_bytes, divisible=is_csr
    )


def csr_bytes(entries: int, dtype: np.dtype[Any], n_rows: int) -> int:
    """What making CSR of another format takes: the result, and the indices once more in its integers."""
    return entries * (2 * 8 + dtype.itemsize) + 8 * (n_rows + 1)


def as_csr(matrix: Any, name: str) -> Any:
    """The matrix as CSR, checked so that no index leads out of it. Its own arrays where it is CSR.

    Entries that stand twice stay apart.
    """
    if matrix.format in ("csr", "csc", "bsr"):
        check_compressed(matrix, name)
    if matrix.format == "coo":
        for axis, indices in enumerate((matrix.row, matrix.col)):
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < matrix.shape[axis]:
                raise InputError(f"{name}: an index is outside of its shape {matrix.shape}: make the matrix again")
        matrix = type(matrix)((matrix.data, (matrix.row, matrix.col)), shape=matrix.shape)
        matrix.has_canonical_format = True  # or scipy adds them up without a word
    return matrix if matrix.format == "csr" else matrix.tocsr()


def check_compressed(matrix: Any, name: str) -> None:
    """Refuse arrays that contradict the shape: scipy takes them as they come."""
    blocked = matrix.blocksize if matrix.format == "bsr" else (1, 1)
    n_major, bound = (size // step for size, step in zip(matrix.shape, blocked, strict=True))
    if matrix.format == "csc":
        n_major, bound = bound, n_major
    indptr, indices = matrix.indptr, matrix.indices
    good = len(indptr) == n_major + 1 and int(indptr[0]) == 0
    for start in range(0, n_major, _WINDOW):
        window: NDArray[Any] = indptr[start : start + _WINDOW + 1]
        good = good and bool((window[1:] >= window[:-1]).all())
    nnz = int(indptr[-1]) if good else 0
    good = good and nnz <= min(len(indices), len(matrix.data))
    if good and nnz:
        good = int(indices[:nnz].min()) >= 0 and int(indices[:nnz].max()) < bound
    if not good:
        raise InputError(f"{name}: its arrays do not fit its shape {matrix.shape}: make the matrix again")


def row_array(rows: Callable[[int, int], NDArray[Any]], n_rows: int, width: int, dtype: Any) -> Array:
    """Items of what is read by whole rows. rows: gives those of [start, stop), a fresh array; width: items of each."""

    @contextmanager
    def stream(start: int, stop: int) -> Iterator[Take]:
        at = start // max(width, 1)

        def take(n: int) -> NDArray[Any]:
            nonlocal at
            begin, at = at, at + n // max(width, 1)
            return rows(begin, at).reshape(-1)

        yield take

    return Array(n_rows * width, np.dtype(dtype), stream)


def memory_array(array: NDArray[Any]) -> Array:
    """An array (N,) or (N, D), in whatever order it lies."""

    def rows(start: int, stop: int) -> NDArray[Any]:
        some = array[start:stop]
        items = np.array(some, order="C")
        if some.size and (file := _mapped(array)) is not None:
            _let_go(file, some)
        return items

    return row_array(rows, len(array), int(np.prod(array.shape[1:])), array.dtype)


def dense_side(array: NDArray[Any], name: str) -> DenseSide:
    """An array of two dimensions as a side. Raises InputError where its numbers are not real."""
    return dense(name, "array", (), array.shape[0], array.shape[1], memory_array(array))


def _mapped(array: Any) -> mmap.mmap | None:
    """The file that an array is mapped from; None where there is none, or where changes would be lost with the memory."""
    shared = False
    while isinstance(array, np.ndarray):
        shared = shared or (isinstance(array, np.memmap) and array.mode != "c")
        array = array.base
    return array if shared and isinstance(array, mmap.mmap) else None


def _let_go(file: mmap.mmap, rows: NDArray[Any]) -> None:
    begin = np.frombuffer(file, np.uint8).__array_interface__["data"][0]
    low, high = (int(place) - begin for place in byte_bounds(rows))
    low -= low % mmap.PAGESIZE
    file.madvise(mmap.MADV_DONTNEED, low, min(high, len(file)) - low)


def stored(
    X: Any, Y: Any, path: Path, memory_limit: str | float | None, normalize: str = "none", names: Sequence[bytes] = ()
) -> Dataset:
    """X, a scipy matrix or an array, and Y, a scipy matrix, as a dataset in a temporary folder of this process.

    normalize: "l2" or "none"; names: of the labels, where they have some. Raises InputError and MemoryLimitError as a
    conversion does, StoreError where there is no room on the disk.
    """
    from xmc_stream.kernels.csr import scale_rows_l2

    x: Side = in_memory(X, "X") if hasattr(X, "tocsr") else dense_side(X, "X")
    y = in_memory(Y, "Y")
    n_features, n_labels = X.shape[1], Y.shape[1]
    load_kernels(x.n_rows, n_features, n_labels)
    plan = partial(
        plan_writing, threads=1, n_features=n_features, n_labels=n_labels, x_entries=x.entries, y_entries=y.entries
    )
    limit = MemoryLimit.kept(memory_limit)
    budget = limit.budget()
    limit.check(lambda budget: {"X as CSR": x.load_bytes, **plan(budget).needs}, "writing X", budget)
    room = budget - x.load_bytes - 8 * (n_features + n_labels)
    x_size, y_size = (fitted(room, block_bytes(False), side.entries, side.n_rows) for side in (x, y))
    about = {"source": "scipy matrices", "source_format": "scipy matrices", "normalize": normalize}
    with (
        writing(path, "try again"),
        new_dataset(path, n_features, n_labels, about, plan(budget).max_bytes) as writer,
    ):
        rows: Any
        for rows in checked_rows(x, x_size):
            if normalize == "l2":
                scale_rows_l2(rows[0], rows[2])
            writer.append_X(*rows)
        for indptr, indices, _ in checked_rows(y, y_size):
            writer.append_Y(indptr, indices)
        if names:
            with new_names(writer.folder / "names" / "labels") as labels:
                labels.append(names)
    return Dataset(path)
