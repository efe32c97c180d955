"""Rows in memory for kernels that solve classes, parameters without their bounds, and what tests of these vary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from xmc_stream.ppdsparse.parameters import PPDSparseParameters

LOSSES = ("squared_hinge", "hinge")
losses = pytest.mark.parametrize("loss", LOSSES)
biases = pytest.mark.parametrize("bias", [True, False])
lams = pytest.mark.parametrize("lam", [0.0, 0.3])


@dataclass
class Rows:
    """Rows in memory."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """A copy of some of them."""
        spans = [slice(self.indptr[row], self.indptr[row + 1]) for row in rows]
        indptr = np.cumsum([0, *(span.stop - span.start for span in spans)])
        nothing = np.empty(0)
        indices = np.concatenate([nothing, *(self.indices[span] for span in spans)])
        values = np.concatenate([nothing, *(self.values[span] for span in spans)])
        return Rows(indptr.astype(np.int64), indices.astype(np.int32), values.astype(np.float32))


def random_rows(rng: np.random.Generator, n: int, d: int, share: float = 0.4) -> NDArray[np.float64]:
    """Values that are float32, a row and a column of nothing among them."""
    X = (rng.normal(size=(n, d)) * (rng.random((n, d)) < share)).astype(np.float32)
    X[n // 2], X[:, d // 2] = 0, 0
    return X.astype(np.float64)


def sparse(X: NDArray[np.float64], ascending: bool = False) -> Rows:
    """Rows with their features in no order: only dense rows rely on it."""
    rows, columns = np.nonzero(X)
    indptr = np.searchsorted(rows, np.arange(len(X) + 1)).astype(np.int64)
    for begin, end in () if ascending else itertools.pairwise(indptr):
        columns[begin:end] = columns[begin:end][::-1]
    return Rows(indptr, columns.astype(np.int32), X[rows, columns].astype(np.float32))


class Parameters(PPDSparseParameters):
    """Parameters without a smallest tol, which is there for float32 scores."""

    def __post_init__(self) -> None:
        pass
