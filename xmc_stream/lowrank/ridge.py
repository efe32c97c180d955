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

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import (
    LINES,
    Begun,
    ColumnRange,
    Dense,
    Factor,
    Panels,
    copy_factors,
    read_columns,
    take,
)
from xmc_stream.factors.products import Learned, times
from xmc_stream.factors.rowblocks import NO_HOLDING, ROW_BYTES, Array, Holding, Part, Parts, held_or_read, lines_of
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.lowrank.kernels.steps import add_column_dots, descend, turn
from xmc_stream.lowrank.solver import VECTORS, Descent, Progress
from xmc_stream.runtime.job import Ledger, Phase, Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.store.places import remove

_LARGE = 1 << 24  # entries of X, from which on its sums are taken in parts
_PART = 128  # entries of a part for each feature, at least: to add its D x c sum takes a fiftieth of making it
_PARTS = 8  # at most


def row_parts(dataset: Dataset) -> Parts:
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
    parts: Parts
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
        while steps < self.cg and columns.progress.going.any():
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


_STEPPING = 0.1  # of the time of a product and its step, that the step takes


@dataclass(frozen=True)
class PartJob:
    """The sum of a part of the rows, of a product with the Hessians, lam S included in the first part.

    number: of the product, from 1 on; 0: of X^T (Y H - X W v) - lam W, W being the one to begin from. source: S, None for 0.
    """

    ridges: Ridges
    name: str
    number: int
    part: int
    source: Dense | None
    out: Panels

    @property
    def key(self) -> str:
        """Alternation, product, part and columns."""
        return f"{self.name}/{self.number}/{self.part}-{self.ridges.cols[0]}"

    def run(self) -> Receipt:
        """Write."""
        ridges, dataset = self.ridges, self.ridges.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        lines = ridges.start() if self.source is None else take(self.source, ridges.cols)
        total = aligned_zeros(lines.shape)
        (ridges.residual if self.source is None else ridges.product)(self.part, X, Y, lines, total)
        begin, end = ridges.cols
        for cols in self.out.col_ranges:
            if begin <= cols[0] and cols[1] <= end:
                self.out.write(cols, 0, total[:, cols[0] - begin : cols[1] - begin])
        share = ridges.width / ridges.labels.columns / len(ridges.parts)
        return {"passes": share, "bytes_read": X.bytes_read + Y.bytes_read}


@dataclass(frozen=True)
class StepJob:
    """A step of conjugate gradients of a range of columns, from the sums of all parts.

    number: of the step; 0: the residual is the sum. square, enough: of the columns, see `Progress`. before, after: the vectors.
    A job that runs twice reads what no job changes.
    """

    ridges: Ridges
    name: str
    number: int
    tol: float
    sums: tuple[Panels, ...]
    square: tuple[float, ...]
    enough: tuple[float, ...]
    before: Mapping[str, Dense]
    after: Mapping[str, Panels]

    @property
    def key(self) -> str:
        """Alternation, step and columns."""
        return f"{self.name}/{self.number}/step-{self.ridges.cols[0]}"

    def run(self) -> Receipt:
        """Write, some lines at a time; the receipt has what the next step needs to know."""
        progress = self._step() if self.number else self._begin()
        square, enough = progress.square.tolist(), progress.enough.tolist()
        return {"square": square, "enough": enough, "going": bool(progress.going.any())}

    def _begin(self) -> Progress:
        """From the W to begin from."""
        square, w = np.zeros(self.ridges.width), self.ridges.before
        for first, last in self._lines():
            total = self._total(first, last)
            add_column_dots(total, total, square)
            self._write("w", first, np.zeros_like(total) if w is None else self._read(w, first, last))
            self._write("residual", first, total)
            self._write("direction", first, total)
        return Progress.begin(square, self.tol, np.float32)

    def _step(self) -> Progress:
        """A step: the curvature, w and the residual, the direction, as `Descent` has them."""
        progress = Progress(np.array(self.square), np.array(self.enough))
        curvature, square = np.zeros(self.ridges.width), np.zeros(self.ridges.width)
        for first, last in self._lines():
            direction = self._read(self.before["direction"], first, last)
            add_column_dots(direction, self._total(first, last), curvature)
        alpha = progress.alpha(curvature).astype(np.float32)
        for first, last in self._lines():
            w, residual, direction = (self._read(self.before[name], first, last) for name in VECTORS)
            descend(w, residual, direction, self._total(first, last), alpha, square)
            self._write("w", first, w)
            self._write("residual", first, residual)
        beta = progress.beta(square).astype(np.float32)
        for first, last in self._lines():
            direction = self._read(self.before["direction"], first, last)
            turn(direction, self._read(self.after["residual"], first, last), beta)
            self._write("direction", first, direction)
        return progress.stepped(square)

    def _lines(self) -> Iterator[Part]:
        n = self.ridges.learned.n_inputs()
        return ((first, min(first + LINES, n)) for first in range(0, n, LINES))

    def _read(self, source: Dense, first: int, last: int) -> Array:
        return read_columns(source, self.ridges.cols, first, last)

    def _write(self, name: str, first: int, lines: Array) -> None:
        self.after[name].write(self.ridges.cols, first, lines)

    def _total(self, first: int, last: int) -> Array:
        """Lines of the sums of the parts, added in their order."""
        total, *others = (self._read(panels, first, last) for panels in self.sums)
        for other in others:
            total += other
        return total


@dataclass(frozen=True)
class StoreJob:
    """Store the columns of W that the steps came to, as their `RidgeJob` would have."""

    job: RidgeJob
    w: Dense
    steps: int

    @property
    def key(self) -> str:
        """That of the job."""
        return self.job.key

    def run(self) -> Receipt:
        """Copy; what was read is counted with the jobs that read."""
        copy_factors(Path(self.job.out), {"W": self.w}, self.job.ridges.cols)
        return {"steps": self.steps}


@dataclass(frozen=True)
class _ByRows:
    """Phases of a W step by rows. jobs: what it does in the place of; products: see `solve_ridges`; folder: for scratch.

    What a phase writes has names of its own, so that a job that runs once more, late, harms nothing.
    """

    jobs: Sequence[RidgeJob]
    products: Sequence[ColumnRange]
    folder: Path

    def vectors(self, number: int) -> dict[str, Panels]:
        """After so many steps."""
        return {name: self._panels(f"vectors-{number}/{name}") for name in VECTORS}

    def sums(self, number: int) -> tuple[Panels, ...]:
        """Of the parts, for a step."""
        return tuple(self._panels(f"sums-{number}/{part}") for part in range(len(self.jobs[0].ridges.parts)))

    def _panels(self, name: str) -> Panels:
        col_ranges = tuple(job.ridges.cols for job in self.jobs)
        return Panels(str(self.folder / name), self.jobs[0].ridges.learned.n_inputs(), col_ranges)

    def parts(self, number: int, source: Dense | None) -> list[PartJob]:
        """Jobs of a product."""
        out = []
        for cols in self.products:
            values = tuple(v for job in self.jobs if cols[0] <= job.ridges.cols[0] < cols[1] for v in job.ridges.values)
            ridges = replace(self.jobs[0].ridges, cols=cols, values=values)
            for part, sums in enumerate(self.sums(number)):
                out.append(PartJob(ridges, self.jobs[0].name, number, part, source, sums))
        return out

    def steps(self, number: int, before: Mapping[str, Dense], receipts: Sequence[Receipt]) -> list[StepJob]:
        """Jobs of the step behind it. before, receipts: of the step before."""
        return [
            StepJob(
                job.ridges, job.name, number, job.cg_tol, self.sums(number), tuple(receipt.get("square", ())),
                tuple(receipt.get("enough", ())), before, self.vectors(number),
            )
            for job, receipt in zip(self.jobs, receipts, strict=True)
        ]  # fmt: skip

    def forget(self, number: int) -> None:
        """Remove what no later step is made from."""
        remove(self.folder / f"sums-{number}")
        remove(self.folder / f"vectors-{number - 1}")


def solve_ridges(
    jobs: Sequence[RidgeJob], products: Sequence[ColumnRange], phase: Phase, ledger: Ledger, scratch: Path
) -> Generator[Phase, list[Receipt], list[Receipt]]:
    """Run the jobs of a W step or, by rows, do what they do.

    products: columns of a job of a product by rows, each a run of the jobs' columns; none: by columns. phase: what is said
    of all phases. What those by rows leave is scratch, but for what is kept now and then, and W at last, which is kept as
    that of the jobs is.
    """
    if not products or all(ledger.get(job.key) is not None for job in jobs):
        return (yield replace(phase, jobs=jobs))
    # a folder of this W step: a job of an earlier one may come late
    by_rows, most = _ByRows(jobs, products, scratch / "ridges" / jobs[0].name.replace("/", "-")), jobs[0].cg
    begun = Begun(Path(jobs[0].out).parent / "all.kept")
    number, vectors, receipts = -1, dict[str, Dense](), [{"going": True}] * len(jobs)
    if begun.found:
        number, vectors, receipts = _go_on(begun, jobs)
    first = number + 1
    while number < most and any(receipt["going"] for receipt in receipts):
        number += 1
        ends = [(number + of) / (most + 1) for of in (0.0, 1 - _STEPPING, 1.0)]
        parts = by_rows.parts(number, vectors.get("direction"))
        yield replace(phase, jobs=parts, kept=False, at_home=True, span=phase.part(ends[0], ends[1]))
        steps = by_rows.steps(number, vectors, receipts)
        receipts = yield replace(phase, jobs=steps, kept=False, span=phase.part(ends[1], ends[2]))
        by_rows.forget(number)
        vectors = dict(by_rows.vectors(number))
        of_all = {name: np.concatenate([receipt[name] for receipt in receipts]) for name in ("square", "enough")}
        if number > first:  # a job that comes late may read what the first step has from the pack
            begun.keep({**vectors, **of_all, "steps": np.array([number])})
    stores = [StoreJob(job, vectors["w"], number) for job in jobs]
    solved = yield replace(phase, jobs=stores, span=None)
    remove(scratch / "ridges")
    return solved


def _go_on(begun: Begun, jobs: Sequence[RidgeJob]) -> tuple[int, dict[str, Dense], list[Receipt]]:
    """The step that was kept, its vectors and receipts, whatever the columns of jobs were then."""
    n, r = jobs[0].ridges.learned.n_inputs(), jobs[-1].ridges.cols[1]
    square, enough, receipts = begun.read("square"), begun.read("enough"), list[Receipt]()
    for job in jobs:
        mine = slice(*job.ridges.cols)
        going = Progress(square[mine], enough[mine]).going.any()
        receipts.append({"square": square[mine].tolist(), "enough": enough[mine].tolist(), "going": bool(going)})
    return int(begun.read("steps")[0]), {name: begun.factor(name, r, n) for name in VECTORS}, receipts
