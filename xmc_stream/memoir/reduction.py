"""The truncated SVD of X, by a randomised method out of core: the coordinates of the lsh variant (Halko et al. 2011).

    P = X^T (X V),   V = an orthonormal base of the columns of P,   again and again from a random V

V comes to span the leading right singular vectors of X. In the end the eigenvectors of V^T P = (X V)^T (X V) turn V into them.
A row's coordinates are x V. V has a few columns more than are kept, which makes the kept ones right.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import (
    LINES,
    Begun,
    ColumnRange,
    Dense,
    Factor,
    Panels,
    SideBySide,
    by_lines,
    copy_factors,
    new_factors,
    take,
)
from xmc_stream.factors.products import LEAST_COLUMNS, Learned, ProjectJob, column_ranges, job_width
from xmc_stream.factors.rowblocks import NO_HOLDING, ROW_BYTES, ROW_LINES, Holding, entries_bytes, row_blocks
from xmc_stream.kernels.domains import FIRST_FACTORS
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.places import make_folder, remove
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
    """P = X^T (X V) of a range of columns, row after row. folder: where it is left, and what it has come to."""

    learned: Learned
    number: int
    cols: ColumnRange
    before: Dense
    folder: str
    holding: Holding

    @property
    def key(self) -> str:
        """Iteration and columns."""
        return f"reduce/{self.number}/{self.cols[0]}-{self.cols[1]}"

    @property
    def out(self) -> Path:
        """A store of the sums."""
        return Path(self.folder) / f"{self.cols[0]}-{self.cols[1]}"

    @property
    def sums(self) -> Factor:
        """What is in it."""
        return Factor(str(self.out / "P"), self.cols[1] - self.cols[0], self.learned.n_inputs())

    def run(self) -> Receipt:
        """Multiply and write."""
        X, first, begun = self.learned.dataset().X_rows(), 0, Begun(Path(f"{self.out}.kept"))
        v, width = take(self.before, self.cols), self.cols[1] - self.cols[0]
        total = aligned_zeros(v.shape)
        if begun.found:
            total, first = take(begun.factor("P", width, len(v)), (0, width)), int(begun.read("rows")[0])
        # blocks that stay in memory are those of all rows
        for x, _ in row_blocks(X, None, ((0 if self.holding.room else first, X.n_lines),), self.holding):
            if x.start >= first:
                self.learned.add_transposed(x, self.learned.times(x, v), total)
                begun.keep({"P": total[:, :width], "rows": np.array([x.start + x.n])})
        copy_factors(self.out, {"P": total}, (0, width))
        return {"passes": width / self.before.columns, "bytes_read": X.bytes_read}


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
        return f"reduce/{self.number}/turn"

    def run(self) -> Receipt:
        """Turn and write."""
        gram = np.zeros((self.before.columns,) * 2)
        source: Dense = self.before if self.last else self.sums
        with one_blas_thread():
            for before, lines in zip(by_lines(self.before), by_lines(self.sums), strict=True):
                sums = lines.astype(np.float64)
                gram += (before.T.astype(np.float64) if self.last else sums.T) @ sums
            values, vectors = np.linalg.eigh((gram + gram.T) / 2)
            values, vectors = values[::-1], vectors[:, ::-1]
            if self.last:
                turn = vectors[:, : self.rank]
            else:
                some = values > _NOTHING * max(float(values[0]), 1e-300)
                turn = vectors * np.where(some, 1 / np.sqrt(np.where(some, values, 1.0)), 0.0)
            turn = np.ascontiguousarray(turn)
            with new_factors(Path(self.out), {"V": turn.shape[1]}) as writers:
                for lines in by_lines(source):
                    writers["V"].append((lines @ turn).astype(np.float32).ravel())
        return {"singular_values": np.sqrt(np.maximum(values[: self.rank], 0.0)).tolist() if self.last else []}


def width_bytes(learned: Learned, width: int) -> int:
    """That some columns of V take in a `GramJob`: themselves, their sums, and what is multiplied and written at a time."""
    return lanes(width) * _ITEM * (
        2 * learned.n_inputs() + 2 * ROW_LINES + LINES
    ) + 4 * learned.dataset().X_rows().block_bytes(ROW_BYTES)


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

    def _sizes(self, columns: int) -> tuple[tuple[ColumnRange, ...], Holding]:
        """Ranges of columns that fit into memory, a job each, and what stays there for all of them: X or nothing.

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
                return column_ranges(columns, job_width(columns, parts)), Holding(self.name, kept, kept)
        parts = next(parts for parts in range(few, columns + 1) if taken(parts) <= plan.budget)
        return column_ranges(columns, job_width(columns, parts)), NO_HOLDING

    def foreseen(self) -> tuple[int, int, int]:
        """Passes, as a run counts them; bytes read from X; bytes held at most. Raises MemoryLimitError where no column fits."""
        (col_ranges, stays), (kept, stays_then) = self._sizes(self.columns), self._sizes(self.kept)
        X = self.learned.dataset().X_rows()
        widest = max(last - first for first, last in (*col_ranges, *kept))
        read = (1 if stays.room else len(col_ranges) * ITERATIONS) + (0 if stays_then.room else len(kept))
        held = min(self.plan.threads, max(len(col_ranges), len(kept))) * width_bytes(self.learned, widest) + stays.room
        turned = 8 * self.columns * (4 * self.columns + 3 * LINES)
        return ITERATIONS + 1, read * X.nnz * X.entry_bytes, max(held, turned)

    def vectors(self) -> Factor:
        """Where V is in the end."""
        return Factor(str(vectors_path(self.work, ITERATIONS) / "V"), self.kept, self.learned.n_inputs())

    def loop(self) -> Loop:
        """Make V; returns its singular values."""
        d, columns, state = self.learned.n_inputs(), self.columns, self.work / "state"
        make_folder(vectors_path(self.work, 0).parent)
        yield Phase(
            "truncated SVD", [DrawJob(self.learned, columns, str(vectors_path(self.work, 0)))], "drawing directions"
        )
        receipt: Receipt = {}
        for number in range(1, ITERATIONS + 1):
            before = Factor(str(vectors_path(self.work, number - 1) / "V"), columns, d)
            sums, out = state / f"sums-{number}", vectors_path(self.work, number)
            done = self.ledger.get(f"reduce/{number}/turn")
            if done is None:
                make_folder(sums)
                make_folder(out.parent)
                words = f"reducing the features, pass {number} of {ITERATIONS}"
                begin, end = (REDUCED * of / ITERATIONS for of in (number - 1, number))
                cuts, holding = self._sizes(columns)
                jobs = [GramJob(self.learned, number, cols, before, str(sums), holding) for cols in cuts]
                yield Phase("truncated SVD", jobs, words, (begin, end), unit="pass", number=number)
                parts = SideBySide(tuple(job.sums for job in jobs))
                turn = TurnJob(number, parts, before, self.kept, number == ITERATIONS, str(out))
                (done,) = yield Phase("truncated SVD", [turn], words, (end, end), unit="pass", number=number)
            receipt = done
            remove(sums)
            remove(vectors_path(self.work, number - 1).parent)
        return receipt

    def project(self) -> Generator[Phase, list[Receipt], Panels]:
        """Make X V, in files of the scratch, which every session makes anew."""
        n, (col_ranges, holding) = self.learned.dataset().n_samples, self._sizes(self.kept)
        out = Panels(str(self.work / "scratch" / "coordinates"), n, col_ranges)
        jobs = [
            ProjectJob(self.learned, "coordinates", cols, self.vectors(), out, ((0, n),), holding)
            for cols in col_ranges
        ]
        yield Phase("coordinates of the rows", jobs, "reducing the rows", (REDUCED, REDUCED), kept=False)
        return out
