"""The W step of the squared loss and full labels by rows: products with the Hessians, and steps, are phases of jobs.

Each product is a phase of jobs that have a part of the rows and all columns, or a range of them, and each step a phase of
jobs that have a range of columns. See `ridge`, which has the same step by columns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import LINES, ColumnRange, Panels, new_factors
from xmc_stream.factors.products import BLOCK
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.kept import KeepJob, RestoreJob, share_begun, within
from xmc_stream.lowrank.kernels.steps import add_column_dots, descend, turn
from xmc_stream.lowrank.ridge import RidgeJob, Ridges, Rows
from xmc_stream.lowrank.solver import Array, Progress
from xmc_stream.runtime.job import Ledger, Phase, Receipt
from xmc_stream.store.encoding import remove
from xmc_stream.store.matrix import SparseMatrix

_STEPPING = 0.1  # of the time of a product and its step, that the step takes


@dataclass(frozen=True)
class PartJob:
    """The sum of a part of the rows, of a product with the Hessians, lam S included in the first part.

    number: of the product, from 1 on; 0: of X^T (Y H - X W v) - lam W, W being the one to begin from. rows: a piece of
    the part, whose sum goes on from that of the piece before, `begun`, None for the first. source: S. old: sums to remove.
    """

    ridges: Ridges
    name: str
    number: int
    part: int
    rows: Rows
    source: Panels
    begun: Panels | None
    old: tuple[Panels, ...]
    out: Panels

    @property
    def key(self) -> str:
        """Alternation, product, part, columns and rows."""
        return f"{self.name}/{self.number}/{self.part}-{self.ridges.cols[0]}-{self.rows[0]}"

    def run(self) -> Receipt:
        """Write."""
        ridges, dataset = self.ridges, self.ridges.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        total = self._sum(X, Y)
        for sums in self.old:
            sums.forget(ridges.cols)
        first_column, last_column = ridges.cols
        for first, last in self.out.col_ranges:
            if first_column <= first and last <= last_column:
                mine = slice(first - first_column, last - first_column)
                for line in range(0, len(total), LINES):
                    self.out.write((first, last), line, total[line : line + LINES, mine])
        first, last = ridges.parts[self.part]
        share = (
            ridges.width / ridges.labels.columns / len(ridges.parts) * (self.rows[1] - self.rows[0]) / (last - first)
        )
        return {"passes": share, "bytes_read": X.bytes_read + Y.bytes_read}

    def _sum(self, X: SparseMatrix, Y: SparseMatrix) -> Array:
        ridges, rows = self.ridges, self.rows
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
        if self.begun is not None:
            return self.begun.take(self.ridges.cols)
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

    @property
    def ridges(self) -> Ridges:
        """Of the first job: what all have in common."""
        return self.jobs[0].ridges

    def vector(self, number: int, name: str) -> Panels:
        """A vector after so many steps."""
        return self._panels(self.folder / f"vectors-{number}" / name)

    def _panels(self, folder: Path) -> Panels:
        col_ranges = tuple(job.ridges.cols for job in self.jobs)
        return Panels(str(folder), self.ridges.learned.n_inputs(), col_ranges)

    def _sums(self, number: int, part: int, piece: int) -> Panels:
        return self._panels(self.folder / f"sums-{number}-{piece}" / str(part))

    def _kept(self, number: int, piece: int | None) -> tuple[str, Path]:
        """Key and pack of what is kept of a step or, of a product before its step, of the sums behind a piece."""
        name = f"at-{number}" if piece is None else f"at-{number}-{piece}"
        return f"{self.jobs[0].name}/{name}", Path(self.jobs[0].out).parent / name

    def _vectors(self, number: int, piece: int | None) -> dict[str, Panels]:
        if piece is None:
            return {name: self.vector(number, name) for name in _VECTORS}
        return {str(part): self._sums(number, part, piece) for part in range(len(self.ridges.parts))}

    def last_kept(self, ledger: Ledger) -> tuple[int, list[Receipt]]:
        """The last step that an earlier session kept, and receipts of it; -1 where there is none."""
        for number in range(self.jobs[0].cg, -1, -1):
            key, pack = self._kept(number, None)
            receipt = ledger.get(key)
            if receipt is not None and pack.exists():
                return number, [self._part(receipt, job.ridges.cols) for job in self.jobs]
        return -1, [{"going": True}] * len(self.jobs)

    def last_piece(self, ledger: Ledger, number: int) -> int | None:
        """The last piece of a product whose sums an earlier session kept."""
        for piece in range(self.ridges.pieces - 2, -1, -1):
            key, pack = self._kept(number, piece)
            if ledger.get(key) is not None and pack.exists():
                return piece
        return None

    @staticmethod
    def _part(receipt: Receipt, cols: ColumnRange) -> Receipt:
        square, enough = (receipt[name][slice(*cols)] for name in ("square", "enough"))
        going = Progress(np.array(square), np.array(enough)).going
        return {"square": square, "enough": enough, "going": bool(going.any())}

    def keep(self, number: int, piece: int | None, receipts: Sequence[Receipt] = ()) -> KeepJob:
        """The job that keeps a step, or sums, whatever the columns of jobs. receipts: of the step."""
        key, pack = self._kept(number, piece)
        of_all = {name: [value for receipt in receipts for value in receipt[name]] for name in ("square", "enough")}
        return KeepJob(key, self._vectors(number, piece), of_all, str(pack))

    def restore(self, number: int, piece: int | None) -> RestoreJob:
        """The job that puts back what was kept."""
        key, pack = self._kept(number, piece)
        vectors = {name: (panels, (0, panels.n)) for name, panels in self._vectors(number, piece).items()}
        return RestoreJob(key, str(pack), vectors)

    def forget(self, number: int, piece: int | None) -> None:
        """Remove what was kept."""
        self._kept(number, piece)[1].unlink(missing_ok=True)

    def parts(self, number: int, piece: int) -> list[PartJob]:
        """Jobs of a product, with a piece of each part of the rows."""
        source, last, out = self.vector(number - 1, "direction"), self.ridges.pieces - 1, []
        for cols in self.products:
            values = tuple(v for job in self.jobs if cols[0] <= job.ridges.cols[0] < cols[1] for v in job.ridges.values)
            ridges = replace(self.ridges, cols=cols, values=values)
            for part in range(len(ridges.parts)):
                rows = self.ridges.piece(part, piece)
                begun = self._sums(number, part, piece - 1) if piece else None
                of_old = ((number, piece - 2),) if piece else ((number - 1, last), (number - 1, last - 1))
                old = tuple(self._sums(at, part, of) for at, of in of_old)
                to = self._sums(number, part, piece)
                out.append(PartJob(ridges, self.jobs[0].name, number, part, rows, source, begun, old, to))
        return out

    def multiply(self, number: int, done: int | None, phase: Phase) -> Generator[Phase, list[Receipt], None]:
        """Phases of a product. done: the last piece that is done, if one is."""
        for piece in range(0 if done is None else done + 1, self.ridges.pieces):
            yield replace(phase, jobs=self.parts(number, piece), kept=False, at_home=True)
            if piece + 1 < self.ridges.pieces:
                yield replace(phase, jobs=[self.keep(number, piece)])
                self.forget(number, piece - 1)

    def steps(self, number: int, before: Sequence[Receipt]) -> list[StepJob]:
        """Jobs of the step behind it. before: receipts of the step before."""
        sums = tuple(self._vectors(number, self.ridges.pieces - 1).values())
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
    of all phases. What those by rows leave is scratch, but for what is kept now and then, and W at last, which is kept as
    that of the jobs is.
    """
    if not products or all(ledger.get(job.key) is not None for job in jobs):
        return (yield replace(phase, jobs=jobs, span=within(phase.span, share_begun(jobs), 1.0)))
    folder = (
        scratch / "ridges" / jobs[0].name.replace("/", "-")
    )  # of this W step: a job of an earlier one may come late
    by_rows, most = _ByRows(jobs, products, folder), jobs[0].cg
    number, receipts = by_rows.last_kept(ledger)
    kept, piece = number, by_rows.last_piece(ledger, number + 1)
    again = [by_rows.restore(number, None)] * (number >= 0)
    again += [by_rows.restore(number + 1, piece)] * (piece is not None)
    if again:
        yield replace(phase, jobs=again, kept=False, span=None)
    while number < most and any(receipt["going"] for receipt in receipts):
        number += 1
        ends = [(number + of) / (most + 1) for of in (0.0, 1 - _STEPPING, 1.0)]
        yield from by_rows.multiply(number, piece, replace(phase, span=within(phase.span, ends[0], ends[1])))
        piece = None
        steps, span = by_rows.steps(number, receipts), within(phase.span, ends[1], ends[2])
        receipts = yield replace(phase, jobs=steps, kept=False, span=span)
        if (number + 1) % by_rows.ridges.every == 0 and number < most:
            yield replace(phase, jobs=[by_rows.keep(number, None, receipts)], span=span)
            by_rows.forget(kept, None)
            by_rows.forget(number, by_rows.ridges.pieces - 2)
            kept = number
    stores = [
        StoreJob(job, replace(by_rows.vector(number, "w"), col_ranges=(job.ridges.cols,)), number) for job in jobs
    ]
    solved = yield replace(phase, jobs=stores, span=None)
    by_rows.forget(kept, None)
    by_rows.forget(number, by_rows.ridges.pieces - 2)
    remove(scratch / "ridges")
    return solved
