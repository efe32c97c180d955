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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import ColumnRange, Dense, Factor, new_factors
from xmc_stream.factors.heldrows import NO_HOLDING, Holding, Pair, held_or_read
from xmc_stream.factors.products import (
    BLOCK,
    ROW_BYTES,
    Learned,
    RangedBlock,
    lines_of,
    times,
)
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.solver import Array, solve_columns
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix, stream

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


def add_in_parts(parts: Sequence[Rows], add: Callable[[Rows, Array], None], out: Array) -> None:
    """out += the sum over all rows: the first part row after row, each other one as a whole. add: rows, to what."""
    add(parts[0], out)
    for rows in parts[1:]:
        other = aligned_zeros(out.shape)
        add(rows, other)
        out += other


@dataclass(frozen=True)
class Ridges:
    """Ridge regressions of a range of columns. values: v_c of each; labels: H; before: the W to begin from, None for 0;

    parts: see `row_parts`. row_bytes: of X in a row block. holding: what jobs may leave in memory.
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

    def start(self, columns: int) -> Array:
        """The W to begin from. columns: that a line has in memory."""
        if self.before is None:
            return np.zeros((self.learned.n_inputs(), columns), np.float32)
        return self.before.take(self.cols)

    def room(self, lines: Array) -> Array:
        """For X S of a row block, S having such lines."""
        return aligned_zeros((lines_of(self.row_bytes), lines.shape[1]))

    def _scale(self, lines: Array) -> None:
        values = np.zeros(lines.shape[1], np.float32)
        values[: self.width] = self.values
        lines *= values

    def blocks(self, X: SparseMatrix, Y: SparseMatrix, rows: Rows) -> Iterator[Pair]:
        """Of a part of the rows."""
        return held_or_read(X, Y, rows, self.row_bytes, self.holding)

    def add_residual(
        self, pair: Pair, Y: SparseMatrix, h: Array, w: Array, rooms: tuple[Array, Array], out: Array
    ) -> None:
        """out += X^T (Y H - X W v) of a block of X. rooms: for Y H and X W."""
        x, labels = pair
        targets = rooms[0][: x.n]
        for y in [labels] if labels else (y for (y,) in stream((Y,), ROW_BYTES, x.start, x.start + x.n)):
            times(y, h, targets[y.start - x.start :])
        if self.before is not None:
            scores = self.learned.times(x, w, rooms[1])
            self._scale(scores)
            targets -= scores
        self._leave_out(x, targets)
        self.learned.add_transposed(x, targets, out)

    def add_product(self, x: Block | RangedBlock, direction: Array, room: Array, out: Array) -> None:
        """out += X^T (X S v) of a block of X. room: for X S."""
        scores = self.learned.times(x, direction, room)
        self._scale(scores)
        self._leave_out(x, scores)
        self.learned.add_transposed(x, scores, out)

    def _leave_out(self, x: Block | RangedBlock, lines: Array) -> None:
        held_out = self.learned.kept_out(x.start, x.n)
        if held_out is not None:
            lines[held_out] = 0


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
        ridges, dataset = self.ridges, self.ridges.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        h = ridges.labels.take(ridges.cols)
        w = ridges.start(h.shape[1])
        residual = aligned_zeros(w.shape)
        np.multiply(w, np.float32(-ridges.lam), out=residual)

        room, other = ridges.room(w), ridges.room(w)

        def add_first(rows: Rows, out: Array) -> None:
            for pair in ridges.blocks(X, Y, rows):
                ridges.add_residual(pair, Y, h, w, (room, other), out)

        add_in_parts(ridges.parts, add_first, residual)
        image = aligned_zeros(w.shape)
        passes = 1

        def product(direction: Array) -> Array:
            nonlocal passes

            def add(rows: Rows, out: Array) -> None:
                for x, _ in ridges.blocks(X, Y, rows):
                    ridges.add_product(x, direction, room, out)

            np.multiply(direction, np.float32(ridges.lam), out=image)
            add_in_parts(ridges.parts, add, image)
            passes += 1
            return image

        steps = solve_columns(w, residual, product, self.cg, self.cg_tol)
        with new_factors(Path(self.out), {"W": ridges.width}) as writers:
            for first in range(0, len(w), BLOCK):
                writers["W"].append(w[first : first + BLOCK, : ridges.width].ravel())
        share = ridges.width / ridges.labels.columns
        return {"steps": steps, "passes": passes * share, "bytes_read": X.bytes_read + Y.bytes_read}
