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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
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
from xmc_stream.lowrank.kept import (
    begun_at,
    number_begun,
    pieces_of,
    read_begun,
    sparse_work,
    steps_within,
    write_begun,
)
from xmc_stream.lowrank.solver import Array, Descent, Progress, solve_columns
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

    @cached_property
    def _work(self) -> int:
        """Of a product with the Hessians of all columns."""
        return 2 * sparse_work(self.learned.dataset().X_rows().nnz, self.labels.columns)

    @property
    def every(self) -> int:
        """Products from one that is kept to the next."""
        return steps_within(self._work)

    @property
    def pieces(self) -> int:
        """Of each part of the rows in a product, of which a stop may lose one of all parts."""
        return pieces_of(self._work)

    def piece(self, part: int, piece: int) -> Rows:
        """Rows of a piece."""
        first, last = self.parts[part]
        begin, end = ((last - first) * of // self.pieces for of in (piece, piece + 1))
        return first + begin, first + end

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

    @property
    def begun(self) -> Path:
        """A pack of what it has come to, if that is worth it."""
        return Path(f"{self.out}.begun")

    def share(self) -> float:
        """Of it, that is done."""
        return max(0, number_begun(self.begun, "numbers")) / self.cg

    def run(self) -> Receipt:
        """Solve; the receipt has steps and passes over X."""
        return _Solving(self).run()


class _Solving:
    """A `RidgeJob` at work. place: pieces of the rows that are done of the sum which is under way."""

    def __init__(self, job: RidgeJob) -> None:
        self._job, self._ridges, dataset = job, job.ridges, job.ridges.learned.dataset()
        self._X, self._Y = dataset.X_rows(), dataset.Y_rows()
        self._h = self._ridges.labels.take(self._ridges.cols)
        self._columns: Descent | None = None
        self._image = self._other = _NOTHING
        if begun_at(job.begun):
            self._go_on()
        else:
            self._steps, self._place = -1, 0
            self._w = self._ridges.start(self._h.shape[1])
            self._residual = aligned_zeros(self._w.shape)
            np.multiply(self._w, np.float32(-self._ridges.lam), out=self._residual)
        self._rooms = self._ridges.room(self._w), self._ridges.room(self._w)

    def _go_on(self) -> None:
        """From what was kept."""
        pack = self._job.begun
        self._steps, self._place = (int(number) for number in read_begun(pack, "numbers"))
        self._w, self._residual = self._lines("w"), self._lines("residual")
        if self._steps >= 0:
            progress = Progress(read_begun(pack, "square"), read_begun(pack, "enough"))
            self._columns = Descent(self._w, self._residual, self._lines("direction"), progress)
        if self._place and self._steps >= 0:
            self._image = self._lines("image")
        if self._place > self._ridges.pieces and self._place % self._ridges.pieces:
            self._other = self._lines("other")

    def run(self) -> Receipt:
        """Solve and store."""
        job, width = self._job, self._ridges.width
        if self._columns is None:
            self._sum(self._add_residual, self._residual)
            self._steps, self._columns = 0, Descent.begin(self._w, self._residual, job.cg_tol)
        if not len(self._image):
            self._image = aligned_zeros(self._w.shape)
        steps = solve_columns(self._columns, self._product, job.cg, self._steps, self._stepped)
        with new_factors(Path(job.out), {"W": width}) as writers:
            for first in range(0, len(self._w), BLOCK):
                writers["W"].append(self._w[first : first + BLOCK, :width].ravel())
        job.begun.unlink(missing_ok=True)
        passes = (1 + steps) * width / self._ridges.labels.columns
        return {"steps": steps, "passes": passes, "bytes_read": self._X.bytes_read + self._Y.bytes_read}

    def _product(self, direction: Array) -> Array:
        if not self._place:
            np.multiply(direction, np.float32(self._ridges.lam), out=self._image)

        def add(rows: Rows, out: Array) -> None:
            for x, _ in self._ridges.blocks(self._X, self._Y, rows):
                self._ridges.add_product(x, direction, self._rooms[0], out)

        self._sum(add, self._image)
        return self._image

    def _sum(self, add: Callable[[Rows, Array], None], out: Array) -> None:
        """out += the sum over all rows: the first part row after row, each other one as a whole."""
        ridges = self._ridges
        for place in range(self._place, len(ridges.parts) * ridges.pieces):
            part, piece = divmod(place, ridges.pieces)
            if part and not piece:
                self._other = aligned_zeros(out.shape)
            add(ridges.piece(part, piece), self._other if part else out)
            if part and piece + 1 == ridges.pieces:
                out += self._other
                self._other = _NOTHING
            self._place = place + 1
            if ridges.pieces > 1 and self._place % len(ridges.parts) == 0:
                self._keep()
        self._place = 0

    def _add_residual(self, rows: Rows, out: Array) -> None:
        for pair in self._ridges.blocks(self._X, self._Y, rows):
            self._ridges.add_residual(pair, self._Y, self._h, self._w, self._rooms, out)

    def _stepped(self, steps: int) -> None:
        self._steps = steps
        if steps % self._ridges.every == 0 and steps < self._job.cg:
            self._keep()

    def _keep(self) -> None:
        """Into the pack: all that it goes on from."""
        width, columns = self._ridges.width, self._columns
        lines = {"w": self._w, "residual": self._residual}
        if columns is not None:
            lines["direction"] = columns.direction
        if self._place:
            lines |= {"image": self._image, "other": self._other}
        arrays = {name: array[:, :width] for name, array in lines.items() if len(array)}
        if columns is not None:
            arrays |= {"square": columns.progress.square, "enough": columns.progress.enough}
        write_begun(self._job.begun, {**arrays, "numbers": np.array([self._steps, self._place])})

    def _lines(self, name: str) -> Array:
        """One of the matrices that were kept, as the kernels have it."""
        width = self._ridges.width
        return Factor(f"{self._job.begun}/{name}", width, self._ridges.learned.n_inputs()).take((0, width))


_NOTHING: Array = np.empty((0, 0), np.float32)
