"""W of a run in memory: a scale times vectors of classes, sparse over the features, or dense over the coordinates of an SVD."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.mips.vectors import ClassVectors, DenseVectors

_LEAST_SCALE = 1e-3  # below it the scale goes into the vectors


class Weights:
    """W = scale * vectors. What multiplies all of W touches the scale alone."""

    def __init__(self, vectors: ClassVectors | DenseVectors) -> None:
        self.vectors, self.scale = vectors, 1.0

    @property
    def norm(self) -> float:
        """||W||_F."""
        return self.scale * math.sqrt(float(self.vectors.squares.sum()))

    def times(self, factor: float) -> None:
        """W *= factor; W = 0 where that is not above 0."""
        if factor <= 0.0:
            self.vectors.clear(np.arange(self.vectors.n_classes))
            self.scale = 1.0
        else:
            self.scale *= factor
            if self.scale < _LEAST_SCALE:
                self.fold()

    def fold(self) -> None:
        """Put the scale into the vectors."""
        if self.scale == 1.0:
            return
        if isinstance(self.vectors, ClassVectors):
            self.vectors.shrink(scale=self.scale)
        else:
            self.vectors.scale(self.scale)
        self.scale = 1.0

    def add(self, classes: NDArray[np.int64], lines: NDArray[np.int64], steps: NDArray[np.float64], rows: Any) -> None:
        """w_c += a x_i for each (c, i, a), in turn."""
        self.vectors.add(classes, lines, steps / self.scale, rows)

    def soften(self, classes: NDArray[np.int64], threshold: float) -> None:
        """Soft-threshold some classes of sparse vectors."""
        if isinstance(self.vectors, ClassVectors):
            self.vectors.shrink(classes, threshold=threshold / self.scale)

    def truncate(self, share: float) -> None:
        """Leave out the smallest weights of sparse vectors, whose norm is below a share of that of W (equation 13)."""
        if isinstance(self.vectors, ClassVectors):
            self.vectors.shrink(cut=self.vectors.smallest(share * math.sqrt(float(self.vectors.squares.sum()))))
