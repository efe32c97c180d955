"""What lam is measured by where it is not given: how far chance alone makes X and Y go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.products import Learned
from xmc_stream.factors.rowblocks import ROW_BYTES, ROW_LINES, Array, blocks, csr
from xmc_stream.kernels.products import add_lines, add_transposed, multiply
from xmc_stream.lowrank.kernels.steps import add_column_dots
from xmc_stream.lowrank.known_pairs import positives_of
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.system.blas import one_blas_thread

_STEPS = 30  # of the power method, at most
_ENOUGH = 1e-3  # relative change at which it ends


@dataclass(frozen=True)
class ScaleJob:
    """sqrt(mean_i ||x_i - m||^2) ||Y - M||_2, of the rows that are learned from; m, M: their mean, and each label's.

    With labels that have nothing to do with X, the largest singular value of X^T (Y - M) is about so large. Of given pairs,
    Y - M is 0 elsewhere, and a label's mean is that of its own pairs.
    """

    learned: Learned
    given: bool

    @property
    def key(self) -> str:
        """There is one."""
        return "scale"

    def run(self) -> Receipt:
        """Pass over X once, and over Y some times."""
        dataset = self.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        mask = dataset.observed_rows() if self.given else None
        with one_blas_thread():
            spread, value = self._spread(X), 0.0
            means, v = self._start(Y, mask)
            for _ in range(_STEPS):
                v, before = self._product(Y, mask, means, v), value
                value = math.sqrt(float(np.square(v).sum()))
                if abs(value - before) <= _ENOUGH * value:
                    break
        scale = math.sqrt(spread) * math.sqrt(value)
        read = X.bytes_read + Y.bytes_read + (mask.bytes_read if mask else 0)
        return {"scale": scale, "passes": 1.0, "bytes_read": read}

    def _counted(self, first: int, n: int) -> NDArray[np.bool_]:
        """Which rows are learned from."""
        held_out = self.learned.kept_out(first, n)
        return np.ones(n, np.bool_) if held_out is None else ~held_out

    def _spread(self, X: SparseMatrix) -> float:
        """The mean of ||x_i - m||^2. Sums go row after row, as blocks may be cut elsewhere."""
        total, square, n = np.zeros((X.shape[1], 1)), np.zeros(1), 0
        for (x,) in blocks(X):
            counted = self._counted(x.start, x.n)
            n += int(counted.sum())
            indptr, indices, values = csr(x)
            add_transposed(indptr, indices, values, counted[:, None].astype(np.float64), total)
            values = values[np.repeat(counted, np.diff(indptr)), None]
            add_column_dots(values, values, square)
        return max(0.0, float(square[0]) / n - float(np.square(total / n).sum())) if n else 0.0

    def _start(self, Y: SparseMatrix, mask: SparseMatrix | None) -> tuple[Array, Array]:
        """M, and the vector from which the power method comes to ||Y - M||_2."""
        positives, known = np.zeros(Y.shape[1]), np.zeros(Y.shape[1])
        for counted, indptr, labels, true in self._pairs(Y, mask):
            of_pairs = np.repeat(counted, np.diff(indptr))
            positives += np.bincount(labels[of_pairs & (true > 0)], minlength=len(known))
            known += int(counted.sum()) if mask is None else np.bincount(labels[of_pairs], minlength=len(known))
        means = positives / np.maximum(known, 1)
        return means, np.random.default_rng(0).standard_normal(len(means))

    def _product(self, Y: SparseMatrix, mask: SparseMatrix | None, means: Array, v: Array) -> NDArray[np.float64]:
        """(Y - M)^T (Y - M) v, of v scaled to length one."""
        length = math.sqrt(float(np.square(v).sum()))
        if length == 0:
            return np.zeros_like(v)
        v = v / length
        out, total = np.zeros((len(v), 1)), np.zeros(1)
        offset = float((means * v).sum()) if mask is None else 0.0
        for counted, indptr, labels, true in self._pairs(Y, mask):
            weights = true if mask is None else true - means[labels]
            lines = np.empty((len(counted), 1))
            multiply(indptr, labels, weights, v[:, None], lines)
            lines -= offset
            lines[~counted] = 0
            add_transposed(indptr, labels, weights, lines, out)
            add_lines(lines, total)
        return np.asarray(out[:, 0] - (means * total[0] if mask is None else 0.0))

    def _pairs(
        self, Y: SparseMatrix, mask: SparseMatrix | None
    ) -> Iterator[tuple[NDArray[np.bool_], Array, Array, Array]]:
        """By row blocks: which rows count; labels, of the mask if there is one, and whether they are theirs (1) or not (0)."""
        for y, *known in stream((Y,) if mask is None else (Y, mask), ROW_BYTES, 0, Y.n_lines, ROW_LINES):
            counted = self._counted(y.start, y.n)
            if known:
                yield counted, known[0].indptr, known[0].indices, positives_of(known[0], y).astype(np.float32)
            else:
                yield counted, *csr(y)
