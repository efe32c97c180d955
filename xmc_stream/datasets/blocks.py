"""How large the blocks of rows are in which a dataset is read from its beginning to its end."""

from __future__ import annotations

from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import SparseMatrix

_BLOCK = 16 * MIB  # of X, where the limit allows


def block_bytes(room: int, X: SparseMatrix, *Y: SparseMatrix) -> list[int]:
    """Bytes of X, and of Y, in a block where there is room for so many of X; Y gets a quarter as many."""
    most = max(MIB, min(_BLOCK, room))
    return [X.block_bytes(most), *(matrix.block_bytes(most // 4) for matrix in Y)]
