"""Matrices that are in memory, or are loaded whole as they do not lie by rows; scipy makes CSR of them.

A matrix that scipy would read wrongly or crash on (indices out of range) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.matrices.arrays import check_real
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side
from xmc_stream.errors import InputError

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
