"""Arrays that belong together, given to kernels as one argument each.

A kernel takes such a tuple apart once, at its top: what runs for every entry is given plain arrays, as each look at a
member may count a reference. Two members of one type cannot be swapped at a call without naming them wrongly.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class PatternBlock(Protocol):
    """Lines in memory: where each begins, and the indices of its entries."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[Any]: ...


class CSRBlock(PatternBlock, Protocol):
    """Rows in memory with their values, float32."""

    @property
    def values(self) -> NDArray[np.float32]: ...


class CSR(NamedTuple):
    """Rows: row i has the entries [indptr[i], indptr[i + 1]) of indices and values. Or classes, by features."""

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, block: CSRBlock) -> CSR:
        """The arrays of a block."""
        return cls(block.indptr, block.indices, block.values)


class Labels(NamedTuple):
    """Labels of rows: row i has indices[indptr[i] : indptr[i + 1]], ascending. Two empty arrays where there are none."""

    indptr: NDArray[np.int64]
    indices: NDArray[Any]

    @classmethod
    def of(cls, block: PatternBlock) -> Labels:
        """The arrays of a block."""
        return cls(block.indptr, block.indices)


class ActiveSets(NamedTuple):
    """Active sets of a range of classes, ragged: class c has the entries [ptr[c], ptr[c + 1]).

    first_label: of class 0. rows: ascending in a class; sign: +1 positive, -1 negative; alpha >= 0.
    """

    first_label: int
    ptr: NDArray[np.int64]
    rows: NDArray[np.int64]
    sign: NDArray[np.int8]
    alpha: NDArray[np.float64]
