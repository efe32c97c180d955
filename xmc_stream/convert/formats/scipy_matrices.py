"""scipy.sparse matrices in memory.

What is CSR is read where it is, block by block; anything else is made CSR first. One whose arrays contradict its shape is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream.convert.matrices.arrays import check_real
from xmc_stream.convert.matrices.rules import checked_rows
from xmc_stream.convert.matrices.sides import BlockSize, Raw, block_bytes, row_ranges
from xmc_stream.convert.matrices.whole import as_csr, check_compressed, csr_blocks, csr_bytes
from xmc_stream.convert.rows import Rows
from xmc_stream.errors import InputError


@dataclass(frozen=True)
class MemorySide:
    """A matrix in memory, and its reader."""

    name: str
    matrix: Any
    n_rows: int
    n_columns: int
    entries: int
    load_bytes: int
    kind: str = "scipy matrix"
    files: Sequence[Path] = ()

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART entries; what is made CSR first, is made so once."""
        return [(0, self.n_rows)] if self.load_bytes else row_ranges(self.n_rows, self.entries)

    def reader(self) -> MemorySide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop)."""
        matrix = as_csr(self.matrix, self.name) if self.load_bytes else self.matrix  # checked when it was taken
        return csr_blocks(matrix, self.name, start, stop, size)

    @property
    def whole_bytes(self) -> int:
        """What `whole` takes at most."""
        return self.load_bytes + self.entries * block_bytes(False) + 24 * (self.n_rows + 1)

    def whole(self) -> Rows:
        """X as a dataset of it would have it, without one. Raises InputError as a conversion does."""
        (rows,) = checked_rows(self, BlockSize(self.n_rows + self.entries, self.entries))
        return rows


def in_memory(matrix: Any, name: str) -> MemorySide:
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
    if matrix.format == "csr":
        check_compressed(matrix, name)
    load_bytes = 0 if matrix.format == "csr" else csr_bytes(entries, matrix.dtype, n_rows)
    return MemorySide(name, matrix, n_rows, n_columns, entries, load_bytes)
