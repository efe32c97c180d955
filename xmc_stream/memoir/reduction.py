"""The truncated SVD of X, by a randomised method out of core: the coordinates of the lsh variant (Halko et al. 2011).

    P = X^T (X V),   V = an orthonormal base of the columns of P,   again and again from a random V

V comes to span the leading right singular vectors of X. In the end the eigenvectors of V^T P = (X V)^T (X V) turn V into them.
A row's coordinates are x V. V has a few columns more than are kept, which makes the kept ones right.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xmc_stream.factors.factors import ColumnRange, Dense, Factor, Panels, SideBySide, new_factors
from xmc_stream.factors.heldrows import NO_HOLDING, Holding
from xmc_stream.factors.products import (
    LEAST_COLUMNS,
    LINES,
    ROW_BYTES,
    ROW_LINES,
    Learned,
    column_ranges,
    entries_bytes,
    job_width,
    x_bytes,
)
from xmc_stream.factors.projection import ProjectJob, row_blocks
from xmc_stream.kernels.domains import FIRST_FACTORS
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.runtime.portion import Portion
from xmc_stream.store.encoding import remove
from xmc_stream.store.places import make_folder
from xmc_stream.system.blas import one_blas_thread

ITERATIONS = 3  # passes of the method
OVERSAMPLING = 10  # columns beyond those that are kept
REDUCED = 0.3  # of a run, that the reduction takes
_NOTHING = 1e-12  # of the largest eigenvalue: what rounding leaves of one that is 0
_ITEM = 4


@dataclass(frozen=True)
class DrawJob:
    """Columns of V to begin from: normal draws by seed and row."""

    learned: Learned
    rank: int
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "reduce/start"

    def run(self) -> Receipt:
        """Draw and write."""
        n = self.learned.n_inputs()
        with new_factors(Path(self.out), {"V": self.rank}) as writers:
            for first in range(0, n, LINES):
                rng = np.random.default_rng([self.learned.seed, FIRST_FACTORS, first])
                lines = rng.standard_normal((min(LINES, n - first), self.rank), np.float32)
                writers["V"].append(lines.ravel())
        return {}


@dataclass(frozen=True)
class GramJob:
    """P = X^T (X V) of a range of columns, added up over rows from `first` on, as many as a job should take.

    Sums go row after row. folder: where they are left; begin: those of the rows before. The receipt says before which row they
    end.
    """

    learned: Learned
    number: int
    cols: ColumnRange
    before: Dense
    folder: str
    holding: Holding
    first: int = 0
    begin: Factor | None = None

    @property
    def key(self) -> str:
        """Iteration, columns and first row."""
        return f"reduce/{self.number}/{self.cols[0]}-{self.cols[1]}/{self.first}"

    @property
    def out(self) -> Path:
        """A store of the sums."""
        return Path(self.folder) / f"{self.cols[0]}-{self.cols[1]}.{self.first}"

    @property
    def sums(self) -> Factor:
        """What is in it."""
        return Factor(str(self.out / "P"), self.cols[1] - self.cols[0], self.learned.n_inputs())

    def run(self) -> Receipt:
        """Multiply and write."""
        X, last = self.learned.dataset().X_rows(), self.first
        v, width = self.before.take(self.cols), self.cols[1] - self.cols[0]
        total, portion = aligned_zeros(v.shape), Portion()
        if self.begin is not None:
            for low in range(0, len(total), LINES):
                some = total[low : low + LINES, :width]
                some[:] = self.begin.read(low, low + len(some))
        # blocks that stay in memory are those of all rows
        for x, _ in row_blocks(X, None, ((0 if self.holding.room else self.first, X.n_lines),), self.holding):
            if x.start < self.first:
                continue
            self.learned.add_transposed(x, self.learned.times(x, v), total)
            last = x.start + x.n
            if portion.done():
                break
        with new_factors(self.out, {"P": width}) as writers:
            for low in range(0, len(total), LINES):
                writers["P"].append(np.ascontiguousarray(total[low : low + LINES, :width]).ravel())
        share = (last - self.first) / max(X.n_lines, 1)
        return {"last": last, "passes": share * width / self.before.columns, "bytes_read": X.bytes_read}


@dataclass(frozen=True)
class TurnJob:
    """An orthonormal V that spans the same as P; at last, from P = X^T X V, the leading right singular vectors.

    The receipt has their singular values.
    """

    number: int
    sums: SideBySide
    before: Factor
    rank: int
    last: bool
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return turn_key(self.number)

    def run(self) -> Receipt:
        """Turn and write."""
        q, n = self.before.columns, self.before.n
        gram = np.zeros((q, q))
        source: Dense = self.before if self.last else self.sums
        with one_blas_thread():
            for first in range(0, n, LINES):
                sums = self.sums.read(first, min(first + LINES, n)).astype(np.float64)
                gram += (
                    self.before.read(first, first + len(sums)).T.astype(np.float64) if self.last else sums.T
                ) @ sums
            values, vectors = np.linalg.eigh((gram + gram.T) / 2)
            values, vectors = values[::-1], vectors[:, ::-1]
            if self.last:
                turn = vectors[:, : self.rank]
            else:
                some = values > _NOTHING * max(float(values[0]), 1e-300)
                turn = vectors * np.where(some, 1 / np.sqrt(np.where(some, values, 1.0)), 0.0)
            turn = np.ascontiguousarray(turn)
            with new_factors(Path(self.out), {"V": turn.shape[1]}) as writers:
                for first in range(0, n, LINES):
                    lines = source.read(first, min(first + LINES, n)) @ turn
                    writers["V"].append(lines.astype(np.float32).ravel())
        return {"singular_values": np.sqrt(np.maximum(values[: self.rank], 0.0)).tolist() if self.last else []}


def turn_key(number: int) -> str:
    """Of the job that ends an iteration."""
    return f"reduce/{number}/turn"


def _words(number: int) -> str:
    return f"reducing the features, pass {number} of {ITERATIONS}"


def width_bytes(learned: Learned, width: int) -> int:
    """That some columns of V take in a `GramJob`: themselves, their sums, and what is multiplied and written at a time."""
    return lanes(width) * _ITEM * (
        2 * learned.n_inputs() + 2 * ROW_LINES + LINES
    ) + 4 * learned.dataset().X_rows().block_bytes(ROW_BYTES)


class Foreseen(NamedTuple):
    """Of the SVD. passes: as a run counts them; n_bytes: read from X; held: at most, at a time."""

    passes: int
    n_bytes: int
    held: int


def vectors_path(work: Path, number: int) -> Path:
    """Where V lies after an iteration."""
    return work / "state" / f"reduced-{number}" / "all"


@dataclass(frozen=True)
class Reduction:
    """Phases that make V (D x rank) and project X. work: folder of the run. name: of what they leave in memory."""

    learned: Learned
    rank: int
    work: Path
    plan: MemoryPlan
    ledger: Ledger
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def columns(self) -> int:
        """Columns of V while it is made."""
        return min(self.rank + OVERSAMPLING, self.learned.n_inputs(), self.learned.dataset().n_samples)

    @property
    def kept(self) -> int:
        """Columns of V in the end."""
        return min(self.rank, self.columns)

    def _sizes(self, columns: int) -> tuple[tuple[ColumnRange, ...], int]:
        """Ranges of columns that fit into memory, and bytes of X that stays there for all of them, or 0.

        Where it stays there is a range for each thread, as far as they have LEAST_COLUMNS; else each reads X anew, and there
        are as few as fit, and one a process.
        """
        plan, X = self.plan, self.learned.dataset().X_rows()
        kept = entries_bytes(X, (0, X.n_lines))

        def taken(parts: int) -> int:
            return min(plan.threads, parts) * width_bytes(self.learned, job_width(columns, parts))

        plan.refuse_unless({"a column of V": taken(columns)}, "the truncated SVD")
        most = max(1, min(plan.threads * plan.processes, columns // LEAST_COLUMNS))
        few = min(plan.processes, most)
        for parts in range(most, few - 1, -1):
            if taken(parts) + kept <= plan.budget:
                return column_ranges(columns, job_width(columns, parts)), kept
        parts = next(parts for parts in range(few, columns + 1) if taken(parts) <= plan.budget)
        return column_ranges(columns, job_width(columns, parts)), 0

    def col_ranges(self, columns: int) -> tuple[ColumnRange, ...]:
        """Ranges of columns, a job each."""
        return self._sizes(columns)[0]

    def _holding(self, columns: int) -> Holding:
        kept = self._sizes(columns)[1]
        return Holding(self.name, kept, kept) if kept else NO_HOLDING

    def foreseen(self) -> Foreseen:
        """What it will take. Raises MemoryLimitError where a column does not fit."""
        (col_ranges, stays), (kept, stays_then) = self._sizes(self.columns), self._sizes(self.kept)
        widest = max(last - first for first, last in (*col_ranges, *kept))
        read = (1 if stays else len(col_ranges) * ITERATIONS) + (0 if stays_then else len(kept))
        held = min(self.plan.threads, max(len(col_ranges), len(kept))) * width_bytes(self.learned, widest) + stays
        turned = 8 * self.columns * (4 * self.columns + 3 * LINES)
        return Foreseen(ITERATIONS + 1, read * x_bytes(self.learned.dataset()), max(held, turned))

    def vectors(self) -> Factor:
        """Where V is in the end."""
        return Factor(str(self._folder(ITERATIONS) / "V"), self.kept, self.learned.n_inputs())

    def _folder(self, number: int) -> Path:
        return vectors_path(self.work, number)

    def loop(self) -> Loop:
        """Make V; returns its singular values."""
        d, columns, state = self.learned.n_inputs(), self.columns, self.work / "state"
        make_folder(self._folder(0).parent)
        yield Phase("truncated SVD", [DrawJob(self.learned, columns, str(self._folder(0)))], "drawing directions")
        receipt: Receipt = {}
        for number in range(1, ITERATIONS + 1):
            before = Factor(str(self._folder(number - 1) / "V"), columns, d)
            sums, out = state / f"sums-{number}", self._folder(number)
            done = self.ledger.get(turn_key(number))
            if done is None:
                make_folder(sums)
                make_folder(out.parent)
                parts = yield from self._sums(number, before, str(sums))
                turn = TurnJob(number, parts, before, self.kept, number == ITERATIONS, str(out))
                end = REDUCED * number / ITERATIONS
                (done,) = yield Phase("truncated SVD", [turn], _words(number), (end, end), unit="pass", number=number)
            receipt = done
            remove(sums)
            remove(self._folder(number - 1).parent)
        return receipt

    def _sums(self, number: int, before: Dense, folder: str) -> Generator[Phase, list[Receipt], SideBySide]:
        """P of an iteration: jobs for each range of columns go on until they have gone over all rows."""
        n = self.learned.dataset().n_samples
        cuts, holding = self.col_ranges(self.columns), self._holding(self.columns)
        jobs = {cols: GramJob(self.learned, number, cols, before, folder, holding) for cols in cuts}
        going = list(jobs.values())
        while going:
            done = min(job.first for job in going) / max(n, 1)
            span = REDUCED * (number - 1 + done) / ITERATIONS, REDUCED * number / ITERATIONS
            receipts = yield Phase("truncated SVD", going, _words(number), span, unit="pass", number=number)
            for job in going:
                if job.begin is not None:
                    remove(Path(job.begin.path).parent)
            going = [
                replace(job, first=receipt["last"], begin=job.sums)
                for job, receipt in zip(going, receipts, strict=True)
                if receipt["last"] < n
            ]
            jobs |= {job.cols: job for job in going}
        return SideBySide(tuple(jobs[cols].sums for cols in cuts))

    def projected(self) -> Panels:
        """X V, in files of the scratch, which every session makes anew."""
        n = self.learned.dataset().n_samples
        return Panels(str(self.work / "scratch" / "coordinates"), n, self.col_ranges(self.kept))

    def project(self) -> Loop:
        """Make `projected`."""
        out, holding = self.projected(), self._holding(self.kept)
        jobs = [
            ProjectJob(self.learned, "coordinates", cols, self.vectors(), out, ((0, out.n),), holding)
            for cols in out.col_ranges
        ]
        yield Phase("coordinates of the rows", jobs, "reducing the rows", (REDUCED, REDUCED), kept=False)
        return {}
