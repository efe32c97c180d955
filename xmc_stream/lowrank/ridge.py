"""The W step of the squared loss and full labels: a ridge regression for each column of W, by conjugate gradients.

Where H^T H is diagonal, with values v_c, column c of W is by itself a ridge regression,
    (v_c X^T X + lam I) w_c = X^T Y h_c.
There are two ways to the same bits. By columns: a job (`RidgeJob`) solves for its columns to the end, over all rows. By rows
(`solve_ridges`): each product with the Hessians is two phases, of jobs that have a part of the rows and all columns, and of
jobs that have a range of columns and make a step. The first reads X once for each range of columns; the second reads it once,
however many jobs there are, and writes a D x r sum for each part.
Sums over rows are taken in parts that the data decide (`row_parts`) and added in their order, in both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.factors.begun import Begun
from xmc_stream.factors.factors import ColumnRange, Dense, Factor, copy_factors, take
from xmc_stream.factors.heldrows import NO_HOLDING, Holding, held_or_read
from xmc_stream.factors.products import ROW_BYTES, Learned, lines_of, times
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.lowrank.solver import VECTORS, Array, Descent, Progress
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix, stream

_LARGE = 1 << 24  # entries of X, from which on its sums are taken in parts
_PART = 128  # entries of a part for each feature, at least: to add its D x c sum takes a fiftieth of making it
_PARTS = 8  # at most

Rows = tuple[int, int]


def row_parts(dataset: Dataset) -> tuple[Rows, ...]:
    """The parts that sums over rows are taken in: the data alone decide, as these decide how the sums round."""
    X = dataset.X_rows()
    most = min(_PARTS, X.nnz // (_PART * max(dataset.n_features, 1)))
    parts = 1 << (most.bit_length() - 1) if most and X.nnz >= _LARGE else 1
    return tuple(even_ranges(X.n_lines, parts))


@dataclass(frozen=True)
class Ridges:
    """Ridge regressions of a range of columns.

    values: v_c of each; labels: H; before: the W to begin from, None for 0; parts: see `row_parts`. row_bytes: of X in
    a row block. holding: what jobs may leave in memory.
    """

    learned: Learned
    lam: float
    cols: ColumnRange
    values: tuple[float, ...]
    labels: Factor
    before: Dense | None
    parts: tuple[Rows, ...]
    row_bytes: int = ROW_BYTES
    holding: Holding = NO_HOLDING

    @property
    def width(self) -> int:
        """Columns."""
        return self.cols[1] - self.cols[0]

    def start(self) -> Array:
        """The W to begin from."""
        if self.before is None:
            return np.zeros((self.learned.n_inputs(), lanes(self.width)), np.float32)
        return take(self.before, self.cols)

    def residual(self, part: int, X: SparseMatrix, Y: SparseMatrix, w: Array, out: Array) -> None:
        """out = X^T (Y H - X W v) of a part of the rows; of the first one also - lam W."""
        self._begin(part, w, -self.lam, out)
        h, of_labels, of_scores = take(self.labels, self.cols), self._room(w), self._room(w)
        for x, labels in held_or_read(X, Y, self.parts[part], self.row_bytes, self.holding):
            targets = of_labels[: x.n]
            for y in [labels] if labels else (y for (y,) in stream((Y,), ROW_BYTES, x.start, x.start + x.n)):
                times(y, h, targets[y.start - x.start :])
            if self.before is not None:
                scores = self.learned.times(x, w, of_scores)
                self._scale(scores)
                targets -= scores
            self.learned.leave_out(x.start, targets)
            self.learned.add_transposed(x, targets, out)

    def product(self, part: int, X: SparseMatrix, Y: SparseMatrix, direction: Array, out: Array) -> None:
        """out = X^T (X S v) of a part of the rows; of the first one also + lam S."""
        self._begin(part, direction, self.lam, out)
        room = self._room(direction)
        for x, _ in held_or_read(X, Y, self.parts[part], self.row_bytes, self.holding):
            scores = self.learned.times(x, direction, room)
            self._scale(scores)
            self.learned.leave_out(x.start, scores)
            self.learned.add_transposed(x, scores, out)

    @staticmethod
    def _begin(part: int, lines: Array, lam: float, out: Array) -> None:
        if part:
            out[:] = 0
        else:
            np.multiply(lines, np.float32(lam), out=out)

    def _room(self, lines: Array) -> Array:
        """For X S of a row block, S having such lines."""
        return aligned_zeros((lines_of(self.row_bytes), lines.shape[1]))

    def _scale(self, lines: Array) -> None:
        values = np.zeros(lines.shape[1], np.float32)
        values[: self.width] = self.values
        lines *= values


@dataclass(frozen=True)
class RidgeJob:
    """Solve the ridge regressions of a range of columns, over all rows, and write these columns of W."""

    ridges: Ridges
    name: str
    cg: int
    cg_tol: float
    out: str

    @property
    def key(self) -> str:
        """Alternation and columns."""
        first, last = self.ridges.cols
        return f"{self.name}/{first}-{last}"

    @property
    def found(self) -> Factor:
        """The columns of W that it writes."""
        return Factor(f"{self.out}/W", self.ridges.width, self.ridges.learned.n_inputs())

    def run(self) -> Receipt:
        """Solve; the receipt has steps and passes over X."""
        ridges, width, dataset = self.ridges, self.ridges.width, self.ridges.learned.dataset()
        X, Y, begun = dataset.X_rows(), dataset.Y_rows(), Begun(Path(f"{self.out}.kept"))
        image = aligned_zeros((ridges.learned.n_inputs(), lanes(width)))
        if begun.found:
            steps, columns = self._go_on(begun)
        else:
            w, residual = ridges.start(), aligned_zeros(image.shape)
            self._sum(lambda part, out: ridges.residual(part, X, Y, w, out), residual)
            steps, columns = 0, Descent.begin(w, residual, self.cg_tol)
        while steps < self.cg and columns.going.any():
            self._sum(lambda part, out: ridges.product(part, X, Y, columns.direction, out), image)
            columns.step(image)
            steps += 1
            begun.keep({**columns.state(width), "steps": np.array([steps])})
        copy_factors(Path(self.out), {"W": columns.w}, (0, width))
        passes = (1 + steps) * width / ridges.labels.columns
        return {"steps": steps, "passes": passes, "bytes_read": X.bytes_read + Y.bytes_read}

    def _sum(self, fill: Callable[[int, Array], None], out: Array) -> None:
        """out = the sum over all rows: of the first part, to which the other ones are added."""
        fill(0, out)
        other = aligned_zeros(out.shape) if len(self.ridges.parts) > 1 else out
        for part in range(1, len(self.ridges.parts)):
            fill(part, other)
            out += other

    def _go_on(self, begun: Begun) -> tuple[int, Descent]:
        """From what was kept, as the kernels have it."""
        width, n = self.ridges.width, self.ridges.learned.n_inputs()
        w, residual, direction = (take(begun.factor(name, width, n), (0, width)) for name in VECTORS)
        progress = Progress(begun.read("square"), begun.read("enough"))
        return int(begun.read("steps")[0]), Descent(w, residual, direction, progress)
