"""The W step of the squared loss and full labels by rows: products with the Hessians, and steps, are phases of jobs.

Each product is a phase of jobs that have a part of the rows and all columns, or a range of them, and each step a phase of
jobs that have a range of columns. See `ridge`, which has the same step by columns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.factors.begun import Begun
from xmc_stream.factors.factors import LINES, ColumnRange, Dense, Panels, copy_factors, read_columns, take
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.kernels.steps import add_column_dots, descend, turn
from xmc_stream.lowrank.ridge import RidgeJob, Ridges, Rows
from xmc_stream.lowrank.solver import VECTORS, Array, Progress
from xmc_stream.lowrank.steps import within
from xmc_stream.runtime.job import Ledger, Phase, Receipt
from xmc_stream.store.encoding import remove

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

    def _lines(self) -> Iterator[Rows]:
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
        yield replace(phase, jobs=parts, kept=False, at_home=True, span=within(phase.span, ends[0], ends[1]))
        steps = by_rows.steps(number, vectors, receipts)
        receipts = yield replace(phase, jobs=steps, kept=False, span=within(phase.span, ends[1], ends[2]))
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
