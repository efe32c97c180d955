"""Matrices that are loaded whole, as they do not lie by rows, and made CSR by scipy.

A matrix that scipy would read wrongly or crash on (indices out of range) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.matrices.sides import BlockSize, Raw
from xmc_stream.errors import InputError

_WINDOW = 2**18  # items of an array checked at a time


@dataclass(frozen=True)
class WholeSide:
    """A matrix that is loaded when its rows are asked for, and its reader.

    entries: at most; load: gives the matrix in any folder, picklable; load_bytes: what that adds to the process.
    """

    name: str
    kind: str
    files: Sequence[Path]
    n_rows: int
    n_columns: int
    entries: int
    load_bytes: int
    load: Callable[[], Any]

    def ranges(self) -> list[tuple[int, int]]:
        """All rows at once."""
        return [(0, self.n_rows)]

    def reader(self) -> WholeSide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop)."""
        matrix = as_csr(self.load(), self.name)
        if matrix.shape != (self.n_rows, self.n_columns):
            raise InputError(f"{self.name} was changed meanwhile: convert again")
        yield from csr_blocks(matrix, self.name, start, stop, size)


def csr_blocks(matrix: Any, name: str, start: int, stop: int, size: BlockSize) -> Iterator[Raw]:
    """Copies of rows [start, stop), block by block."""
    while start < stop:
        at = matrix.indptr[start : min(start + size.block, stop) + 1].astype(np.int64)
        n = max(1, int(np.searchsorted(at, at[0] + size.block, side="right")) - 1)
        first, end = int(at[0]), int(at[n])
        if n == 1:
            size.check(end - first, name, start)
        yield at[: n + 1] - first, matrix.indices[first:end].copy(), matrix.data[first:end]
        start += n


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
