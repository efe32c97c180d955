"""Least squares with few features, by the normal equations: X^T X in memory, in float64, as conjugate gradients stop early.

    (X^T X + lam I) w_c = X^T Y h_c / v_c

Where singular values of X lie ten thousand times apart, conjugate gradients in float32 do not come to the end of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.begun import Begun
from xmc_stream.factors.factors import ColumnRange, Dense, Factor, copy_factors, take
from xmc_stream.factors.products import Learned, blocks, csr, times
from xmc_stream.lowrank.solver import solve_gram
from xmc_stream.lowrank.steps import read_sum, write_sum
from xmc_stream.runtime.job import Receipt
from xmc_stream.system.blas import one_blas_thread

# is added to the diagonal of X^T X, which is scaled to ones: features may be the same, or sums of others
_LEAST = 1e-12
COLUMNS = 256  # of X^T X in a job, at most


def normal_bytes(n_inputs: int, columns: int) -> int:
    """What solving takes, of so many columns: X^T X, its factor, and what is added; right sides and solutions."""
    return 8 * (4 * n_inputs**2 + 3 * n_inputs * columns)


@dataclass(frozen=True)
class NormalJob:
    """Columns of X^T X; or, with labels, of X^T Y H. Row after row, in float64, into a pack."""

    learned: Learned
    name: str
    cols: ColumnRange
    labels: Dense | None
    folder: Path

    @property
    def key(self) -> str:
        """What for, and columns."""
        return f"{self.name}/{self.cols[0]}-{self.cols[1]}"

    @property
    def out(self) -> str:
        """The pack."""
        return str(self.folder / f"{self.cols[0]}-{self.cols[1]}")

    def run(self) -> Receipt:
        """Sum and write."""
        learned, dataset, width = self.learned, self.learned.dataset(), self.cols[1] - self.cols[0]
        X, Y, begun, first = dataset.X_rows(), dataset.Y_rows(), Begun(Path(f"{self.out}.kept")), 0
        total = np.zeros((learned.n_inputs(), width))
        if begun.found:
            total, first = begun.read("sum").reshape(total.shape), int(begun.read("rows")[0])
        h = None if self.labels is None else take(self.labels, self.cols)[:, :width].astype(np.float64)
        for x, *ys in blocks(X, *([] if h is None else [Y]), rows=(first, X.n_lines)):
            right = self._columns(*csr(x)) if h is None else times(ys[0], h)
            learned.add_transposed(x, right, total)
            begun.keep({"sum": total, "rows": np.array([x.start + x.n])})
        write_sum(Path(self.out), total, durable=True)
        share = width / (total.shape[0] if self.labels is None else self.labels.columns)
        return {"passes": share, "bytes_read": X.bytes_read}

    def _columns(
        self, indptr: NDArray[np.int64], indices: NDArray[np.int64], values: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """These columns of a block of X, the bias among them."""
        import scipy.sparse

        n, inputs = len(indptr) - 1, self.learned.n_inputs()
        x = scipy.sparse.csr_matrix((values, indices, indptr), (n, inputs))[:, self.cols[0] : self.cols[1]]
        dense = np.ascontiguousarray(x.toarray(), np.float64)
        if self.learned.bias and self.cols[1] == inputs:
            dense[:, -1] = 1
        return dense


@dataclass(frozen=True)
class NormalSolveJob:
    """W of the normal equations. grams, right: what `NormalJob` wrote, in the order of columns; values: v_c."""

    name: str
    n_inputs: int
    lam: float
    grams: tuple[str, ...]
    right: tuple[str, ...]
    values: tuple[float, ...]
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return self.name

    def run(self) -> Receipt:
        """Solve and write."""
        values = np.array(self.values)
        gram, right = (self._side_by_side(files) for files in (self.grams, self.right))
        right *= np.where(values > 0, 1 / np.where(values > 0, values, 1.0), 0.0)
        gram[np.diag_indices_from(gram)] += self.lam
        scale = 1 / np.sqrt(gram.diagonal())
        gram *= scale[:, None]
        gram *= scale
        right *= scale[:, None]
        with one_blas_thread():
            w = solve_gram(gram, np.ascontiguousarray(right.T), _LEAST).T * scale[:, None]
        copy_factors(Path(self.out), {"W": w.astype(np.float32)}, (0, len(values)))
        return {"steps": 1}

    def _side_by_side(self, files: tuple[str, ...]) -> NDArray[np.float64]:
        return np.concatenate([read_sum(file, self.n_inputs) for file in files], axis=1)

    @property
    def found(self) -> Factor:
        """W."""
        return Factor(f"{self.out}/W", len(self.values), self.n_inputs)
