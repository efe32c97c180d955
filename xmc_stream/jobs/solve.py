"""Solve jobs: the classes of a unit, from last round's state and what the search found, to the next state."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import ROW_BYTES, MemoryPlan, SolvePlan
from xmc_stream.jobs.tiles import TileSizes, drop_tiles
from xmc_stream.kernels.active import (
    count_before,
    drop_idle,
    mark,
    marked_rows,
    merge_found,
    rank,
    set_signs,
    start_sets,
)
from xmc_stream.memory import format_size
from xmc_stream.solvers.ppdsparse import (
    ActiveSets,
    PPDSparseParameters,
    Scratch,
    Sink,
    Solver,
    added_sizes,
    start_sizes,
)
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer
from xmc_stream.store.model import unit_range
from xmc_stream.store.state import (
    BIAS,
    DONE,
    DUAL,
    EMPTY,
    INSIDE,
    KEPT,
    LOSS,
    N_FIGURES,
    OPEN,
    OUTSIDE,
    STATUS,
    Found,
    UnitState,
    UnitStateWriter,
    new_unit_state,
)

_EMPTY_FIGURES = np.zeros(N_FIGURES)  # of a class without positives: w_0 = -1, rest 0; see docs/architecture.md
_EMPTY_FIGURES[[BIAS, STATUS]] = -1.0, EMPTY


@dataclass(frozen=True)
class FoundFile:
    """What one search job found for classes [first, last)."""

    first: int
    last: int
    path: str


def read_found(files: tuple[FoundFile, ...], first: int, last: int) -> list[Block]:
    """What the search jobs found for classes [first, last): a block for each file that holds some of them.

    A block's lines are the classes [first, last), empty where the file does not hold them.
    """
    blocks = []
    for file in files:
        low, high = max(first, file.first), min(last, file.last)
        if low < high:
            block = Found(Path(file.path)).rows.block(low - file.first, high - file.first)
            before, after = np.zeros(low - first, np.int64), np.full(last - high, block.indptr[-1])
            blocks.append(Block(first, np.concatenate([before, block.indptr, after]), block.indices, block.data))
    return blocks


def update_figures(
    figures: NDArray[np.float64], files: tuple[FoundFile, ...], first: int, tol: float
) -> NDArray[np.int64]:
    """Enter what a search saw of the classes first, first + 1, ...: losses, violations outside; who is done.

    figures (n, N_FIGURES) is changed in the rows of open classes. Losses are added in the order of the files. Returns
    how many rows were found for each class: those that violate by more than tol.
    """
    n = len(figures)
    n_found, losses, best = np.zeros(n, np.int64), np.zeros(n), np.full(n, -np.inf)
    for file in files:
        low, high = max(first, file.first), min(first + n, file.last)
        if low < high:
            found = Found(Path(file.path))
            mine, theirs = slice(low - first, high - first), slice(low - file.first, high - file.first)
            n_found[mine] += np.diff(found.rows.indptr.read(theirs.start, theirs.stop + 1))
            losses[mine] += found.losses[theirs]
            best[mine] = np.maximum(best[mine], found.best[theirs])
    open_ = figures[:, STATUS] == OPEN
    figures[open_, LOSS] = losses[open_]
    figures[open_, OUTSIDE] = np.maximum(best[open_] + 1.0, 0.0)
    figures[open_ & (n_found == 0) & (figures[:, INSIDE] <= tol), STATUS] = DONE
    return n_found


@dataclass(frozen=True)
class SolveJob:
    """One round of one unit. previous: the unit's state after the round before, "" in round 0."""

    data: str
    parameters: PPDSparseParameters
    seed: int
    round: int
    unit: int
    previous: str
    found: tuple[FoundFile, ...]
    out: str
    plan: MemoryPlan
    sizes: SolvePlan

    @property
    def key(self) -> str:
        """Round and unit."""
        return f"solve/{self.round}/{self.unit}"

    def run(self) -> Receipt:
        """Solve; the receipt has the sizes that the next search is planned from."""
        drop_tiles()
        return _UnitSolve(self).run()


class _UnitSolve:
    """The work of one solve job."""

    def __init__(self, job: SolveJob) -> None:
        self.job = job
        self.dataset = Dataset(job.data)
        self.n_samples = self.dataset.n_samples
        self.first, self.last = unit_range(job.unit, self.dataset.n_labels)
        self.X = self.dataset.X_rows()
        self.Y = self.dataset.Y_columns()
        self.previous = UnitState(Path(job.previous)) if job.previous else None
        self.solver = Solver(job.parameters, job.seed)
        rows, nnz = min(job.sizes.max_rows, self.n_samples), min(job.sizes.max_class_nnz, self.X.nnz)
        self.scratch = Scratch(self.dataset.n_features, rows, nnz)
        self.buffer = Buffer(self.X, min(job.sizes.max_nnz, self.X.nnz))
        self.words = np.zeros(-(-self.n_samples // 64), np.uint64)
        self.before = np.empty(len(self.words), np.int32)
        self.tiles = TileSizes(self.first, self.last, self.dataset.n_features)  # of open classes
        self.sizes = np.zeros(self.last - self.first, np.int64)  # |A| of open classes

    def run(self) -> Receipt:
        job, n = self.job, self.last - self.first
        with new_unit_state(Path(job.out), n, self.n_samples, self.dataset.n_features) as writer:
            if self.previous is None:
                positives = self.Y.indptr.read(self.first, self.last + 1)
                counts = np.diff(positives)
                tau = job.parameters.tau
                writer.figures[counts == 0] = _EMPTY_FIGURES
                writer.figures[counts == 0, KEPT], writer.figures[counts == 0, DUAL] = tau / 2, -tau / 2
                bound = counts + start_sizes(counts, self.n_samples)
            else:
                writer.figures[:] = self.previous.figures
                n_found = update_figures(writer.figures, job.found, self.first, job.parameters.tol)
                sizes = np.diff(self.previous.active.indptr.read(0, n + 1))
                bound = sizes + np.minimum(added_sizes(sizes, job.parameters.added, self.n_samples), n_found)
                bound += n_found // 4  # a row that was found takes a quarter of an active one while they are merged
            self.tiles.in_tiles[:] = writer.figures[:, STATUS] == OPEN
            for low, high in self._batches(writer.figures[:, STATUS] == DONE, bound):
                if (writer.figures[low:high, STATUS] == OPEN).any():
                    self._solve_batch(low, high, writer)
                else:
                    self._copy(low, high, writer)
        open_ = writer.figures[:, STATUS] == OPEN
        heaps = np.where(open_, added_sizes(self.sizes, job.parameters.added, self.n_samples), 0)
        runs = []
        for run in self.tiles.runs:
            mine = slice(run.first - self.first, run.last - self.first)
            runs.append([*astuple(run), int(heaps[mine].sum()), int(self.sizes[mine].sum())])
        return {
            "unit": job.unit,
            "open": int(open_.sum()),
            "runs": runs,
            "nnz": writer.weights.nnz,
            "inside": float(writer.figures[open_, INSIDE].max(initial=0.0)),
            "bytes_read": self.X.bytes_read + self.Y.bytes_read,
        }

    def _batches(self, done: NDArray[np.bool_], bound: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Runs of classes that are all done or all not, with at most max_rows active rows, or of one larger class.

        Classes without positives stand in either: they have no rows.
        """
        batches: list[tuple[int, int]] = []
        total = 0
        for c in range(len(done)):
            total += int(bound[c])
            low = batches[-1][0] if batches else 0
            full = total > self.job.sizes.max_rows or c - low >= (self.job.plan.cuts.classes or len(done))
            if not batches or full or done[c] != done[c - 1]:
                batches.append((c, c + 1))
                total = int(bound[c])
            else:
                batches[-1] = (low, c + 1)
        return batches

    def _copy(self, low: int, high: int, writer: UnitStateWriter) -> None:
        """Carry classes that are not solved any more over from the last state."""
        if self.previous is None:
            nothing = np.zeros(0, np.int32)
            writer.active.append(np.zeros(high - low, np.int64), nothing, np.zeros(0))
            writer.weights.append(np.zeros(high - low, np.int64), nothing, np.zeros(0, np.float32))
            self.tiles.add(np.zeros(high - low, np.int64), nothing)
            return
        for c in range(low, high):
            active, weights = self.previous.active.block(c, c + 1), self.previous.weights.block(c, c + 1)
            writer.active.append(np.diff(active.indptr), active.indices, active.data)
            writer.weights.append(np.diff(weights.indptr), weights.indices, weights.data)
            self.tiles.add(np.diff(weights.indptr), weights.indices)

    def _active_sets(self, low: int, high: int) -> ActiveSets:
        """Active sets of a batch: drawn in round 0, else what was left of the last round and what was found."""
        job, n = self.job, high - low
        first = self.first + low
        positives = self.Y.block(first, first + n)
        ptr = np.zeros(n + 1, np.int64)
        if self.previous is None:
            counts = np.diff(positives.indptr)
            sizes = start_sizes(counts, self.n_samples)
            rows = np.empty(int((counts + sizes).sum()), np.int64)
            start_sets(positives.indptr, positives.indices, sizes, first, self.n_samples, job.seed, ptr, rows)
            alpha = np.zeros(len(rows))
        else:
            old = self.previous.active.block(low, high)
            blocks = read_found(job.found, first, first + n)
            sizes = np.diff(old.indptr)
            room = added_sizes(sizes, job.parameters.added, self.n_samples)
            f_ptr, f_rows, f_scores = _join(blocks, n)
            found = sum(np.diff(block.indptr) for block in blocks) if blocks else np.zeros(n, np.int64)
            rows = np.empty(int((sizes + np.minimum(room, found)).sum()), np.int64)
            alpha = np.empty(len(rows))
            merge_found(
                old.indptr, old.indices, old.values, f_ptr, f_rows, f_scores, room, np.empty(len(f_ptr), np.int64),
                ptr, rows, alpha,
            )  # fmt: skip
        sign = np.empty(len(rows), np.int8)
        set_signs(positives.indptr, positives.indices, ptr, rows, sign)
        return ActiveSets(first, ptr, rows, sign, alpha)

    def _solve_batch(self, low: int, high: int, writer: UnitStateWriter) -> None:
        sets = self._active_sets(low, high)
        figures = np.empty((high - low, 4))
        self._solve_part(sets, figures, writer)
        mine = np.flatnonzero(writer.figures[low:high, STATUS] == OPEN)
        writer.figures[(low + mine)[:, None], [BIAS, DUAL, KEPT, INSIDE]] = figures[mine]
        counts = np.empty(high - low, np.int64)
        filled = drop_idle(sets.ptr, sets.rows, sets.sign, sets.alpha, counts)
        writer.active.append(counts, sets.rows[:filled], sets.alpha[:filled])
        self.sizes[low:high] = counts

    def _solve_part(self, sets: ActiveSets, figures: NDArray[np.float64], writer: UnitStateWriter) -> None:
        """Gather the rows of all classes at once if they fit, else of one half after the other; a large class by itself."""
        job, sizes, n = self.job, self.job.sizes, len(sets.ptr) - 1

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32]) -> None:
            writer.weights.append(counts, features, data)
            self.tiles.add(counts, features)

        if not len(sets.rows):  # classes without positives
            sink(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
            return
        if n == 1:
            self._check_size(sets)
            lengths = self.X.lengths(sets.rows)[1]
            self.solver.solve_large(
                sets, lengths, lambda rows: self.X.gather(rows, self.buffer), sizes.max_nnz, job.round, self.scratch,
                figures[0], sink,
            )  # fmt: skip
            return
        if not self._solve_together(sets, figures, sink):
            for a, b in ((0, n // 2), (n // 2, n)):
                self._solve_part(_part(sets, a, b), figures[a:b], writer)

    def _solve_together(self, sets: ActiveSets, figures: NDArray[np.float64], sink: Sink) -> bool:
        """Solve some classes if their rows fit at once; else say so, nothing held any more."""
        sizes = self.job.sizes
        if len(sets.rows) > sizes.max_rows:
            return False
        self.words[:] = 0
        mark(sets.rows, self.words)
        union = np.empty(count_before(self.words, self.before), np.int64)
        marked_rows(self.words, union)
        spans = self.X.lengths(union)
        if int(spans[1].sum()) > sizes.max_nnz:
            return False
        at = np.empty(len(sets.rows), np.int64)
        rank(sets.rows, self.words, self.before, at)
        nnz = np.diff(np.concatenate([[0], np.cumsum(spans[1][at])])[sets.ptr])  # of each class
        if int(nnz.max()) > sizes.max_class_nnz:
            return False
        block = self.X.gather(union, self.buffer, spans)
        self.solver.solve(sets, at, block, self.job.round, self.scratch, figures, sink)
        return True

    def _check_size(self, sets: ActiveSets) -> None:
        """Refuse a class whose rows' own numbers, not to speak of the rows, do not fit."""
        if len(sets.rows) > self.job.sizes.max_class_rows:
            need = format_size(ROW_BYTES * len(sets.rows))
            raise MemoryLimitError(
                f"class {sets.first_label} has {len(sets.rows)} active rows, whose numbers take {need} a thread: "
                "raise --memory-limit or lower --threads; the run can be resumed"
            )


def _part(sets: ActiveSets, a: int, b: int) -> ActiveSets:
    """Classes a .. b - 1 of some active sets: views, so that alpha is shared."""
    mine = slice(int(sets.ptr[a]), int(sets.ptr[b]))
    ptr = sets.ptr[a : b + 1] - sets.ptr[a]
    return ActiveSets(sets.first_label + a, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])


def _join(blocks: list[Block], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Blocks of the same classes, one after another in shared arrays; the places of each block's classes in them."""
    ptr = np.zeros((len(blocks), n + 1), np.int64)
    filled = 0
    for j, block in enumerate(blocks):
        ptr[j] = filled + block.indptr
        filled += len(block.indices)
    rows = np.concatenate([np.zeros(0, np.int64), *(block.indices for block in blocks)]).astype(np.int64, copy=False)
    return ptr, rows, np.concatenate([np.zeros(0, np.float32), *(block.values for block in blocks)])
