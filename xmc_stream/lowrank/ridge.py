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

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import LINES, ColumnRange, Dense, Factor, Panels, new_factors
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
from xmc_stream.lowrank.kernels.steps import add_column_dots, descend, turn
from xmc_stream.lowrank.solver import Array, Progress, solve_columns
from xmc_stream.runtime.job import Ledger, Phase, Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import remove
from xmc_stream.store.matrix import Block, SparseMatrix, stream

_LARGE = 1 << 24  # entries of X, from which on its sums are taken in parts
_PART = 128  # entries of a part for each feature, at least: to add its D x c sum takes a fiftieth of making it
_PARTS = 8  # at most
_STEPPING = 0.1  # of the time of a product and its step, that the step takes

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


@dataclass(frozen=True)
class PartJob:
    """The sum of a part of the rows, of a product with the Hessians, lam S included in the first part.

    number: of the product, from 1 on; 0: of X^T (Y H - X W v) - lam W, W being the one to begin from. source: S. old: the
    sum of the product before, whose place it takes.
    """

    ridges: Ridges
    name: str
    number: int
    part: int
    source: Panels
    old: Panels
    out: Panels

    @property
    def key(self) -> str:
        """Alternation, product, part and columns."""
        return f"{self.name}/{self.number}/{self.part}-{self.ridges.cols[0]}"

    def run(self) -> Receipt:
        """Write."""
        ridges, dataset = self.ridges, self.ridges.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        total = self._sum(X, Y)
        self.old.forget(ridges.cols)
        first_column, last_column = ridges.cols
        for first, last in self.out.col_ranges:
            if first_column <= first and last <= last_column:
                mine = slice(first - first_column, last - first_column)
                for line in range(0, len(total), LINES):
                    self.out.write((first, last), line, total[line : line + LINES, mine])
        share = ridges.width / ridges.labels.columns / len(ridges.parts)
        return {"passes": share, "bytes_read": X.bytes_read + Y.bytes_read}

    def _sum(self, X: SparseMatrix, Y: SparseMatrix) -> Array:
        ridges, rows = self.ridges, self.ridges.parts[self.part]
        if self.number:
            direction = self.source.take(ridges.cols)
            total, room = self._begun(direction, ridges.lam), ridges.room(direction)
            for x, _ in ridges.blocks(X, Y, rows):
                ridges.add_product(x, direction, room, total)
            return total
        h = ridges.labels.take(ridges.cols)
        w = ridges.start(h.shape[1])
        total, rooms = self._begun(w, -ridges.lam), (ridges.room(w), ridges.room(w))
        for pair in ridges.blocks(X, Y, rows):
            ridges.add_residual(pair, Y, h, w, rooms, total)
        return total

    def _begun(self, lines: Array, lam: float) -> Array:
        total = aligned_zeros(lines.shape)
        if self.part == 0:
            np.multiply(lines, np.float32(lam), out=total)
        return total


_VECTORS = ("w", "residual", "direction")


@dataclass(frozen=True)
class StepJob:
    """A step of conjugate gradients of a range of columns, from the sums of all parts.

    number: of the step; 0: the residual is the sum. square, enough: of the columns, see `Progress`. old, before, after: folders
    of vectors; nothing is made from those of `old` any more. A job that runs twice reads what no job changes.
    """

    ridges: Ridges
    name: str
    number: int
    tol: float
    sums: tuple[Panels, ...]
    square: tuple[float, ...]
    enough: tuple[float, ...]
    old: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """Alternation, step and columns."""
        return f"{self.name}/{self.number}/step-{self.ridges.cols[0]}"

    def run(self) -> Receipt:
        """Write, some lines at a time; the receipt has what the next step needs to know."""
        for name in _VECTORS:  # now: its memory goes to what is written next
            self._vector(self.old, name).forget(self.ridges.cols)
        progress = self._step() if self.number else self._begin()
        square, enough = progress.square.tolist(), progress.enough.tolist()
        return {"square": square, "enough": enough, "going": bool(progress.going.any())}

    def _begin(self) -> Progress:
        """From the W to begin from."""
        ridges, cols = self.ridges, self.ridges.cols
        w, residual, direction = (self._vector(self.after, name) for name in _VECTORS)
        square = np.zeros(ridges.width)
        for first, last in self._lines():
            total = self._total(first, last)
            add_column_dots(total, total, square)
            before = np.zeros(total.shape, np.float32) if ridges.before is None else ridges.before.read(first, last)
            w.write(cols, first, before if before.shape == total.shape else before[:, slice(*cols)])
            residual.write(cols, first, total)
            direction.write(cols, first, total)
        return Progress.begin(square, self.tol, np.float32)

    def _step(self) -> Progress:
        """A step: the curvature, w and the residual, the direction, as `Descent` has them."""
        cols, progress = self.ridges.cols, Progress(np.array(self.square), np.array(self.enough))
        before, after = (tuple(self._vector(folder, name) for name in _VECTORS) for folder in (self.before, self.after))
        curvature, square = np.zeros(self.ridges.width), np.zeros(self.ridges.width)
        for first, last in self._lines():
            add_column_dots(before[2].read(first, last), self._total(first, last), curvature)
        alpha = progress.alpha(curvature).astype(np.float32)
        for first, last in self._lines():
            w, residual, direction = (vector.read(first, last) for vector in before)
            descend(w, residual, direction, self._total(first, last), alpha, square)
            after[0].write(cols, first, w)
            after[1].write(cols, first, residual)
        beta = progress.beta(square).astype(np.float32)
        for first, last in self._lines():
            direction = before[2].read(first, last)
            turn(direction, after[1].read(first, last), beta)
            after[2].write(cols, first, direction)
        return progress.stepped(square)

    def _lines(self) -> Iterator[Rows]:
        n = self.ridges.learned.n_inputs()
        return ((first, min(first + LINES, n)) for first in range(0, n, LINES))

    def _vector(self, folder: str, name: str) -> Panels:
        return Panels(f"{folder}/{name}", self.ridges.learned.n_inputs(), (self.ridges.cols,))

    def _total(self, first: int, last: int) -> Array:
        """Lines of the sums of the parts, added in their order."""
        total, *others = (replace(panels, col_ranges=(self.ridges.cols,)).read(first, last) for panels in self.sums)
        for other in others:
            total += other
        return total


@dataclass(frozen=True)
class StoreJob:
    """Store the columns of W that the steps came to, as their `RidgeJob` would have."""

    job: RidgeJob
    w: Panels
    steps: int

    @property
    def key(self) -> str:
        """That of the job."""
        return self.job.key

    def run(self) -> Receipt:
        """Copy; what was read is counted with the jobs that read."""
        with new_factors(Path(self.job.out), {"W": self.job.ridges.width}) as writers:
            for first in range(0, self.w.n, BLOCK):
                writers["W"].append(self.w.read(first, min(first + BLOCK, self.w.n)).ravel())
        return {"steps": self.steps}


@dataclass(frozen=True)
class _ByRows:
    """Phases of a W step by rows. jobs: what it does in the place of; products: see `solve_ridges`; folder: for scratch.

    What a phase writes has names of its own, so that a job that runs once more, late, harms nothing.
    """

    jobs: Sequence[RidgeJob]
    products: Sequence[ColumnRange]
    folder: Path

    def vector(self, number: int, name: str) -> Panels:
        """A vector after so many steps."""
        return self._panels(self.folder / f"vectors-{number}" / name)

    def _panels(self, folder: Path) -> Panels:
        col_ranges = tuple(job.ridges.cols for job in self.jobs)
        return Panels(str(folder), self.jobs[0].ridges.learned.n_inputs(), col_ranges)

    def _sums(self, number: int, part: int) -> Panels:
        return self._panels(self.folder / f"sums-{number}" / str(part))

    def parts(self, number: int) -> list[PartJob]:
        """Jobs of a product."""
        source, out = self.vector(number - 1, "direction"), []
        for cols in self.products:
            values = tuple(v for job in self.jobs if cols[0] <= job.ridges.cols[0] < cols[1] for v in job.ridges.values)
            ridges = replace(self.jobs[0].ridges, cols=cols, values=values)
            out += [
                PartJob(
                    ridges,
                    self.jobs[0].name,
                    number,
                    part,
                    source,
                    self._sums(number - 1, part),
                    self._sums(number, part),
                )
                for part in range(len(ridges.parts))
            ]
        return out

    def steps(self, number: int, before: Sequence[Receipt]) -> list[StepJob]:
        """Jobs of the step behind it. before: receipts of the step before."""
        sums = tuple(self._sums(number, part) for part in range(len(self.jobs[0].ridges.parts)))
        folders = tuple(str(self.folder / f"vectors-{of}") for of in (number - 2, number - 1, number))
        return [
            StepJob(
                job.ridges, job.name, number, job.cg_tol, sums, tuple(receipt.get("square", ())),
                tuple(receipt.get("enough", ())), *folders,
            )
            for job, receipt in zip(self.jobs, before, strict=True)
        ]  # fmt: skip


def solve_ridges(
    jobs: Sequence[RidgeJob], products: Sequence[ColumnRange], phase: Phase, ledger: Ledger, scratch: Path
) -> Generator[Phase, list[Receipt], list[Receipt]]:
    """Run the jobs of a W step or, by rows, do what they do.

    products: columns of a job of a product by rows, each a run of the jobs' columns; none: by columns. phase: what is said
    of all phases. What those by rows leave is scratch, but for W at last, which is kept as that of the jobs is.
    """
    if not products or all(ledger.get(job.key) is not None for job in jobs):
        return (yield replace(phase, jobs=jobs))
    folder = (
        scratch / "ridges" / jobs[0].name.replace("/", "-")
    )  # of this W step: a job of an earlier one may come late
    by_rows, most, number = _ByRows(jobs, products, folder), jobs[0].cg, 0
    receipts: list[Receipt] = [{"going": True}] * len(jobs)
    while number <= most and any(receipt["going"] for receipt in receipts):
        ends = [(number + of) / (most + 1) for of in (0.0, 1 - _STEPPING, 1.0)]
        span = _within(phase.span, ends[0], ends[1])
        yield replace(phase, jobs=by_rows.parts(number), kept=False, at_home=True, span=span)
        steps = by_rows.steps(number, receipts)
        receipts = yield replace(phase, jobs=steps, kept=False, span=_within(phase.span, ends[1], ends[2]))
        number += 1
    stores = [
        StoreJob(job, replace(by_rows.vector(number - 1, "w"), col_ranges=(job.ridges.cols,)), number - 1)
        for job in jobs
    ]
    solved = yield replace(phase, jobs=stores, span=None)
    remove(scratch / "ridges")
    return solved


def _within(span: tuple[float, float] | None, begin: float, end: float) -> tuple[float, float] | None:
    """A part of a span."""
    return None if span is None else (span[0] + begin * (span[1] - span[0]), span[0] + end * (span[1] - span[0]))
