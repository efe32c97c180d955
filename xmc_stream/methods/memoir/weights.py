"""W of a run in memory, as a scale times vectors of classes: sparse over the features, or dense over the coordinates of an SVD."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.mips.vectors import ClassVectors, ranked

_LEAST_SCALE = 1e-3  # below it the scale is folded into the vectors


class Weights(ABC):
    """W = scale * vectors. What multiplies all of W touches the scale alone."""

    scale: float

    @property
    @abstractmethod
    def squares(self) -> NDArray[np.float64]:
        """||w_c||^2 of each vector, without the scale."""

    @property
    def norm(self) -> float:
        """||W||_F."""
        return self.scale * math.sqrt(float(self.squares.sum()))

    @abstractmethod
    def _rescale(self, factor: float) -> None:
        """Multiply the vectors; by 0 they are zero."""

    def times(self, factor: float) -> None:
        """W *= factor."""
        if factor <= 0.0:
            self._rescale(0.0)
            self.scale = 1.0
            return
        self.scale *= factor
        if self.scale < _LEAST_SCALE:
            self.fold()

    def fold(self) -> None:
        """Put the scale into the vectors."""
        self._rescale(self.scale)
        self.scale = 1.0


class SparseWeights(Weights):
    """Vectors over the features."""

    def __init__(self, vectors: ClassVectors) -> None:
        self.vectors, self.scale = vectors, 1.0

    @property
    def squares(self) -> NDArray[np.float64]:
        return self.vectors.squares

    def _rescale(self, factor: float) -> None:
        if factor:
            self.vectors.shrink(scale=factor)
        else:
            self.vectors.clear(np.arange(self.vectors.n_classes))

    def add(self, classes: NDArray[np.int64], lines: NDArray[np.int64], steps: NDArray[np.float64], rows: CSR) -> None:
        """w_c += a x_i for each (c, i, a), in turn."""
        self.vectors.add(classes, lines, steps / self.scale, ranked(rows))

    def soften(self, classes: NDArray[np.int64], threshold: float) -> None:
        """Soft-threshold some classes."""
        self.vectors.shrink(classes, threshold=threshold / self.scale)

    def truncate(self, share: float) -> None:
        """Leave out the smallest weights, whose norm is below a share of that of W (equation 13)."""
        bound = share * math.sqrt(float(self.squares.sum()))
        self.vectors.shrink(cut=self.vectors.smallest(bound))


class DenseWeights(Weights):
    """Vectors over the coordinates: values (K x r)."""

    def __init__(self, n_classes: int, rank: int) -> None:
        self.values, self.scale = np.zeros((n_classes, rank), np.float32), 1.0
        self._squares = np.zeros(n_classes)

    @property
    def squares(self) -> NDArray[np.float64]:
        return self._squares

    def _rescale(self, factor: float) -> None:
        self.values *= np.float32(factor)
        self._squares *= factor * factor

    def add(
        self, classes: NDArray[np.int64], lines: NDArray[np.int64], steps: NDArray[np.float64],
        rows: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """w_c += a x_i for each (c, i, a), in turn."""
        touched, places = np.unique(classes, return_inverse=True)
        order = np.argsort(places, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=len(touched)))])
        values = (steps / self.scale).astype(np.float32)[order]
        by_class = scipy.sparse.csr_matrix((values, lines[order], indptr), (len(touched), len(rows)))
        self.values[touched] += by_class @ rows
        self._squares[touched] = np.square(self.values[touched], dtype=np.float64).sum(axis=1)
