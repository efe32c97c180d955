"""Solve jobs: the classes of a unit or a share, from last round's state and what the search found, to the next state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.linear.kernels.dcd import new_scratch
from xmc_stream.linear.kernels.penalty import Times
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.active_rows import DiskRows, rows_on_disk
from xmc_stream.ppdsparse.all_rows import solve_on_all_rows
from xmc_stream.ppdsparse.candidates import candidate_windows, read_candidates, select_threshold
from xmc_stream.ppdsparse.kernels.active import (
    count_before,
    drop_idle,
    mark,
    marked_rows,
    merge_candidates,
    rank,
    set_signs,
    start_sets,
)
from xmc_stream.ppdsparse.kernels.balance import start_alpha, start_scores
from xmc_stream.ppdsparse.large_classes import LargeClasses
from xmc_stream.ppdsparse.parameters import APPROXIMATE, EXACT
from xmc_stream.ppdsparse.plan import SolvePlan, choose_streamed
from xmc_stream.ppdsparse.problem import Found, Problem, Start
from xmc_stream.ppdsparse.shares import Share
from xmc_stream.ppdsparse.sizes import NextSearch
from xmc_stream.ppdsparse.solver import (
    Sink,
    Solver,
    added_sizes,
    dense_bytes,
    has_dense_rows,
    ramp_of,
    row_order,
    start_sizes,
)
from xmc_stream.ppdsparse.state import (
    BIAS,
    DONE,
    DUAL,
    INSIDE,
    KEPT,
    LOSS,
    OPEN,
    ROOM,
    STATUS,
    UnitState,
    UnitStateWriter,
    new_unit_state,
)
from xmc_stream.ppdsparse.statistics import SURE, close_classes, set_known, update_statistics
from xmc_stream.ppdsparse.streaming import Weights
from xmc_stream.ppdsparse.weights import RowWeights
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer
from xmc_stream.system.stop import work_name

_turn = Lock()  # of a job that is planned to have its process for itself
_SOLVED, _CARRIED, _STREAMED = range(3)  # what is done with a class: solved in a batch, taken over, streamed before


@dataclass(frozen=True)
class SolveJob:
    """One round of one unit, or of a share of it.

    previous: the unit's state after the round before; in round 0 that of a warm start, or "". found: by the search before.
    out: the state of the share. start: of a warm start's first round, else None.
    """

    problem: Problem
    round: int
    share: Share
    previous: str
    found: Found
    out: str
    sizes: SolvePlan
    start: Start | None

    @property
    def key(self) -> str:
        """Round and share."""
        return f"solve/{self.round}/{self.share.name}"

    @property
    def approximate(self) -> bool:
        """Whether an approximate search found the candidates."""
        return self.found.kind == APPROXIMATE

    @property
    def on_all_rows(self) -> bool:
        """Whether classes begin, and with all rows."""
        return bool(self.problem.parameters.all_rows) and not self.previous

    def run(self) -> Receipt:
        """Solve; the receipt has the sizes that the next search is planned from, of a whole unit."""
        drop_tiles()
        # a scheduler may give two shares to one worker, and threads take units that are on all rows one at a time; trainings
        # beside each other in this process do not wait else
        plan = self.problem.plan
        others = plan.processes if not self.on_all_rows else plan.processes * plan.threads
        with _turn if self.sizes.beside == 1 < others else nullcontext():
            return _ShareSolve(self).run()


class _ShareSolve:
    """The work of one solve job. Classes count from the first of the share; `line` is that one's in the unit's state."""

    def __init__(self, job: SolveJob) -> None:
        self.job = job
        self.dataset = Dataset(job.problem.data)
        self.n_samples = self.dataset.n_samples
        self.first, self.last, unit = job.share
        self.line = self.first - unit.first
        self.X = self.dataset.X_rows()
        self.Y = self.dataset.Y_columns()
        shape = unit.last - unit.first, self.n_samples, self.dataset.n_features
        self.previous = UnitState(Path(job.previous), *shape) if job.previous else None
        self.warm = job.start is not None
        self.room = np.zeros(0, np.int64)  # rows that each class may add
        if self.previous is not None:
            self.room = self._known[:, ROOM].astype(np.int64)
            if (
                job.round == job.problem.parameters.common_rounds
            ):  # a check keeps the best row of each job, a matter of the cut
                self.room = np.minimum(self.room, 1)
        self.order = row_order(self.n_samples, self.X.nnz)
        dense = has_dense_rows(self.n_samples, self.dataset.n_features, self.X.nnz)
        self.solver = Solver(job.problem.parameters, job.problem.seed, self.order, dense)
        self.of_classes = job.problem.weights.of_classes(self.dataset, self.first, self.last)
        self.of_rows = RowWeights(job.problem.weights)
        self.words = np.zeros(-(-self.n_samples // 64), np.uint64)
        self.before = np.empty(len(self.words), np.int32)
        # negatives that an approximate search brought in, and those with alpha > 0 in the end
        self.fresh = self.used = 0
        self.next: NextSearch | None = None
        self.passes = 0  # over X, for large classes
        self.looked_up = 0  # bytes of indptr for them
        self.n_active = np.zeros(self.last - self.first, np.int64)  # |A| of each class in this round
        self.sizes = np.zeros(self.last - self.first, np.int64)  # of open classes, what is kept of it
        self.large: UnitState | None = None  # what became of the classes that were streamed; their lines in it
        self.line_of = np.zeros(0, np.int64)

    def run(self) -> Receipt:
        job, n = self.job, self.last - self.first
        p = job.problem.parameters
        with new_unit_state(Path(job.out), n, self.n_samples, self.dataset.n_features) as writer:
            n_found = np.zeros(n, np.int64)
            if self.previous is None:
                counts = np.diff(self.Y.ends(self.first, self.last))
                set_known(writer.statistics, counts, self.n_samples)
                self.n_active = np.where(counts < self.n_samples, counts + start_sizes(counts, self.n_samples), 0)
            else:
                writer.statistics[:] = self._known
                n_found = update_statistics(
                    writer.statistics,
                    job.found.files,
                    self.first,
                    p,
                    self.n_samples,
                    job.round,
                    job.found.kind == EXACT,
                    self.of_classes,
                )
                sizes = np.diff(self.previous.active.ends(self.line, self.line + n))
                self.n_active = sizes + np.minimum(self.room, n_found)
            if job.share.whole:  # else the job that joins the shares counts
                open_ = writer.statistics[:, STATUS] == OPEN
                self.next = NextSearch(self.dataset, job.problem, job.round, job.share.unit, open_)
            if job.on_all_rows:
                self._solve_on_all_rows(writer)
            else:
                self._solve_on_active_sets(n_found, writer)
            open_ = writer.statistics[:, STATUS] == OPEN
            heaps = np.where(open_, added_sizes(self.sizes, p.added, self.n_samples, p.growth_after(job.round)), 0)
            writer.statistics[:, ROOM] = heaps
        return {
            "open": int(open_.sum()),
            "nnz": writer.weights.nnz,
            "inside": float(writer.statistics[open_, INSIDE].max(initial=0.0)),
            "bytes_read": self.X.bytes_read + self.Y.bytes_read + self.looked_up,
            **({"passes": 1.0} if job.on_all_rows else {}),
            **({"solve_passes": self.passes} if self.passes else {}),
            **({"fresh": self.fresh, "used": self.used} if p.approximate else {}),
            **({} if self.next is None else self.next.receipt(heaps, self.sizes)),
        }

    def _solve_on_all_rows(self, writer: UnitStateWriter) -> None:
        """Solve every class of which there is something to learn, with all rows in its active set."""
        job, learned = self.job, np.flatnonzero(writer.statistics[:, STATUS] == OPEN)
        of_classes = self.of_classes[learned] if len(self.of_classes) else self.of_classes
        weights = Times(of_classes, self.of_rows.of_range(0, self.n_samples))
        x, y = self.X.block(0, self.n_samples), self.Y.gather(self.first + learned)
        epochs, n_features, done, begin = job.problem.parameters.epochs_of(job.round), self.dataset.n_features, 0, 0
        for solved in solve_on_all_rows(job.problem.parameters, job.problem.seed, x, y, n_features, weights, epochs):
            mine = learned[done : done + len(solved.statistics)]
            done, end = done + len(mine), int(mine[-1]) + 1
            writer.statistics[mine[:, None], [BIAS, DUAL, KEPT, INSIDE]] = solved.statistics
            writer.statistics[mine, LOSS] = solved.losses / job.problem.parameters.C
            self.sizes[mine] = solved.active[0]
            of_all = np.zeros((2, end - begin), np.int64)  # also of those between them
            of_all[:, mine - begin] = solved.active[0], solved.weights[0]
            writer.active.append(of_all[0], *solved.active[1:])
            writer.weights.append(of_all[1], *solved.weights[1:])
            known = writer.statistics[begin:end]
            close_classes(known, True, job.problem.parameters, job.round + 1)  # every row has been looked at: no check
            if self.next is not None:
                self.next.count_solved(of_all[1], *solved.weights[1:], known[:, STATUS] == OPEN)
            begin = end
        self._copy(None, 0, begin, self.last - self.first, writer)

    def _solve_on_active_sets(self, n_found: NDArray[np.int64], writer: UnitStateWriter) -> None:
        """Solve the open classes: those that stream first, then all in turn, a batch at a time."""
        job = self.job
        streamed = self._stream(n_found, writer)
        rows, nnz = min(job.sizes.max_rows, self.n_samples), min(job.sizes.max_class_nnz, self.X.nnz)
        self.scratch = new_scratch(self.dataset.n_features, rows, nnz)
        self.buffer = Buffer(self.X, min(job.sizes.max_nnz, self.X.nnz))
        kind = np.where(writer.statistics[:, STATUS] == DONE, _CARRIED, _SOLVED)
        kind[streamed] = _STREAMED
        kind[writer.statistics[:, BIAS] == SURE] = _CARRIED
        if self.previous is not None:
            self.room[kind == _CARRIED] = 0
        # a row that was found takes a quarter of an active one while they are merged
        for low, high in self._batches(kind, self.n_active + n_found // 4):
            if kind[low] == _STREAMED:
                self._copy(self.large, self.line_of[low], low, high, writer)
            elif (writer.statistics[low:high, STATUS] == OPEN).any():
                self._solve_batch(low, high, kind[low:high] == _SOLVED, writer)
            else:
                self._copy(self.previous, self.line + low, low, high, writer)
        if self.large is not None:
            self.large.path.unlink()

    def _stream(self, n_found: NDArray[np.int64], writer: UnitStateWriter) -> NDArray[np.int64]:
        """Solve large classes as X streams by, where that is the way; returns which. Their lines are in `large` then."""
        job, n = self.job, self.last - self.first
        large = np.flatnonzero((self.n_active > self.order.large) & (writer.statistics[:, STATUS] == OPEN))
        sizes = self.n_active[large]
        epochs = job.problem.parameters.epochs_of(job.round)
        chosen = choose_streamed(sizes, epochs, job.sizes, self.X.nnz, self.n_samples)
        classes, sizes = large[chosen], sizes[chosen]
        if not len(classes) or job.sizes.room is None:
            return classes
        n_features = self.dataset.n_features
        with new_unit_state(self._large_path, len(classes), self.n_samples, n_features, durable=False) as lines:
            solver = LargeClasses(
                job.problem.parameters, job.problem.seed, job.round, self.order, self.X, job.sizes.room, job.approximate,
                lambda c: self._active_sets(c, c + 1), self._rows_on_disk, self._weights if self.warm else None,
                job.start.slopes if job.start else (0.0, 0.0), self._scratch("active"), job.problem.weights, self.of_classes,
            )  # fmt: skip
            self.sizes[classes] = solver.solve(classes, sizes, n_found[classes], lines)
        self.fresh, self.used, self.passes = solver.fresh, solver.used, solver.passes
        self.looked_up = solver.bytes_read
        writer.statistics[classes[:, None], [BIAS, DUAL, KEPT, INSIDE]] = lines.statistics[
            :, [BIAS, DUAL, KEPT, INSIDE]
        ]
        self.large = UnitState(self._large_path, len(classes), self.n_samples, self.dataset.n_features)
        self.line_of = np.zeros(n, np.int64)
        self.line_of[classes] = np.arange(len(classes))
        return classes

    @property
    def _known(self) -> NDArray[np.float64]:
        """The statistics of the share's classes in the unit's state."""
        if self.previous is None:
            raise ValueError("the first round of a run begins from nothing")
        return self.previous.statistics[self.line : self.line + self.last - self.first]

    def _scratch(self, kind: str) -> Path:
        """What is of no use once the job has ended: apart from the states, which a later session checks."""
        return work_name(Path(self.job.out).parents[2] / "scratch" / f"{self.job.share.name}.{kind}")

    @property
    def _large_path(self) -> Path:
        return self._scratch("large")

    def _rows_on_disk(self, c: int, folder: Path) -> DiskRows:
        """The active set of a class that is larger than memory."""
        job, label = self.job, self.first + c
        return rows_on_disk(
            folder, self.words, self.before, self.n_samples, label, job.problem.seed, self.Y, int(self.n_active[c]),
            None if self.previous is None else (self.previous.active, self.line + c), self._candidates_of(c), job.approximate,
        )  # fmt: skip

    def _candidates_of(self, c: int) -> Iterator[NDArray[np.int64]]:
        """The rows that a class may add, part by part."""
        if self.previous is None:
            return
        files, label = self.job.found.files, self.first + c
        score, last = select_threshold(files, label, int(self.room[c]), self.n_samples)
        for rows, scores in candidate_windows(files, label, self.n_samples):
            yield rows[(scores > score) | ((scores == score) & (rows <= last))]

    def _weights(self, classes: NDArray[np.int64]) -> Iterator[Weights]:
        """Weights and biases of a warm start."""
        if self.previous is not None:
            for line in (self.line + classes).tolist():
                w = self.previous.weights.block(line, line + 1)
                yield w.indices, w.values, float(self.previous.statistics[line, BIAS])

    def _count(self, counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32] | None) -> None:
        """See `NextSearch.count`; of a share its whole unit counts."""
        if self.next is not None:
            self.next.count(counts, features, data)

    def _batches(self, kind: NDArray[np.int64], bound: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Ranges of classes: of streamed ones, and of others with at most max_rows active rows, or of one larger class.

        Classes without positives stand among those to solve: they have no rows. So do carried ones, once a round has been:
        where most classes of a unit are done, those between them would be solved one by one.
        """
        n = len(kind)
        if self.previous is not None:
            kind = np.where(kind == _CARRIED, _SOLVED, kind)
        rows, ends = np.cumsum(bound), np.append(np.flatnonzero(np.diff(kind)) + 1, n)
        batches: list[tuple[int, int]] = []
        low = 0
        while low < n:
            high = min(int(ends[np.searchsorted(ends, low, "right")]), low + (self.job.problem.plan.cuts.classes or n))
            if kind[low] == _SOLVED:
                before = int(rows[low] - bound[low])
                fitting = int(np.searchsorted(rows, before + self.job.sizes.max_rows, "right"))
                high = min(high, max(fitting, low + 1))
            batches.append((low, high))
            low = high
        return batches

    def _copy(self, state: UnitState | None, line: int, low: int, high: int, writer: UnitStateWriter) -> None:
        """Take classes [low, high) over from a state that has them from a line on; without one they are empty."""
        n = high - low
        if state is None:
            nothing = np.zeros(0, np.int32)
            writer.active.append(np.zeros(n, np.int64), nothing, np.zeros(0))
            writer.weights.append(np.zeros(n, np.int64), nothing, np.zeros(0, np.float32))
            self._count(np.zeros(n, np.int64), nothing, None)
            return
        writer.active.copy(state.active, line, line + n)
        self._copy_weights(state, line, n, writer)

    def _copy_weights(self, state: UnitState, line: int, n: int, writer: UnitStateWriter) -> None:
        """Take the weights of n classes over from a state that has them from a line on."""
        for w in state.weights.blocks(max(4 * MIB, 16 * self.dataset.n_features), line, line + n):
            writer.weights.append(np.diff(w.indptr), w.indices, w.values)
            self._count(np.diff(w.indptr), w.indices, w.values if state is self.large else None)

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
            start_sets(positives.indptr, positives.indices, sizes, first, self.n_samples, job.problem.seed, ptr, rows)
            alpha = np.zeros(len(rows))
        else:
            old = self.previous.active.block(self.line + low, self.line + high)
            sizes = np.diff(old.indptr)
            room = self.room[low:high]
            f_ptr, f_rows, f_scores = read_candidates(job.found.files, first, first + n, self.n_samples, room)
            found = np.diff(f_ptr)
            rows = np.empty(int((sizes + np.minimum(room, found)).sum()), np.int64)
            alpha = np.empty(len(rows))
            merge_candidates(old.indptr, old.indices, old.values, f_ptr, f_rows, f_scores, room, ptr, rows, alpha)
        sign = np.empty(len(rows), np.int8)
        set_signs(positives.indptr, positives.indices, ptr, rows, sign)
        return ActiveSets(first, ptr, rows, sign, alpha)

    def _solve_batch(self, low: int, high: int, solved: NDArray[np.bool_], writer: UnitStateWriter) -> None:
        """Classes [low, high): those that are solved, and between them those that are carried over as they are."""
        sets = self._active_sets(low, high)
        statistics = np.empty((high - low, 4))
        # what was kept of the last round has alpha > 0, but for positives
        fresh = (sets.alpha == 0.0) & (sets.sign < 0) if self.job.approximate else np.zeros(0, np.bool_)
        if solved.all():
            self._solve_part(sets, statistics, self._sink(low, solved, writer))
        else:
            mine = np.repeat(solved, np.diff(sets.ptr))
            ptr = np.concatenate([[0], np.cumsum(np.diff(sets.ptr) * solved)])
            part = ActiveSets(sets.first_label, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])
            self._solve_part(part, statistics, self._sink(low, solved, writer))
            sets.alpha[mine] = part.alpha
        if self.job.approximate:
            self.fresh += int(fresh.sum())
            self.used += int((fresh & (sets.alpha > 0.0)).sum())
        open_ = np.flatnonzero(solved & (writer.statistics[low:high, STATUS] == OPEN))
        writer.statistics[(low + open_)[:, None], [BIAS, DUAL, KEPT, INSIDE]] = statistics[open_]
        counts = np.empty(high - low, np.int64)
        filled = drop_idle(sets.ptr, sets.rows, sets.sign, sets.alpha, counts)
        writer.active.append(counts, sets.rows[:filled], sets.alpha[:filled])
        self.sizes[low:high] = np.where(solved, counts, 0)

    def _sink(self, low: int, solved: NDArray[np.bool_], writer: UnitStateWriter) -> Sink:
        """Takes the weights of classes from `low` on as they are solved; of carried ones, the weights that they had."""
        ends = np.append(
            np.flatnonzero(np.diff(solved)) + 1, len(solved)
        )  # of runs of solved classes, and of carried ones
        done = 0

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32]) -> None:
            nonlocal done
            first, filled = done, 0
            while done < first + len(counts):
                begin, done = done, min(int(ends[np.searchsorted(ends, done, "right")]), first + len(counts))
                if solved[begin]:
                    mine = counts[begin - first : done - first]
                    part = slice(filled, filled + int(mine.sum()))
                    writer.weights.append(mine, features[part], data[part])
                    self._count(mine, features[part], data[part])
                    filled = part.stop
                elif self.previous is not None:
                    self._copy_weights(self.previous, self.line + low + begin, done - begin, writer)

        return sink

    def _solve_part(self, sets: ActiveSets, statistics: NDArray[np.float64], sink: Sink) -> None:
        """Gather the rows of all classes at once if they fit, else of one half after the other; a large class by itself."""
        job, sizes, n = self.job, self.job.sizes, len(sets.ptr) - 1
        if not len(sets.rows):  # classes without positives
            sink(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
            return
        if n == 1:
            lengths, times = self.X.lengths(sets.rows)[1], self._times(sets, sets.rows)
            if self.warm:
                ends = np.concatenate([[0], np.cumsum(lengths)])
                begin = 0
                while begin < len(sets.rows):
                    fits = int(np.searchsorted(ends, ends[begin] + sizes.max_nnz, side="right")) - 1
                    end = max(fits, begin + 1)
                    block = self.X.gather(sets.rows[begin:end], self.buffer)
                    self._start_scores(_rows_part(sets, begin, end), np.arange(end - begin), block)
                    begin = end
                self._start_alpha(sets, np.arange(len(sets.rows)), times)
            self.solver.solve_large(
                sets, lengths, lambda rows: self.X.gather(rows, self.buffer), sizes.max_nnz, job.round, self.scratch,
                statistics[0], sink, times,
            )  # fmt: skip
            return
        if not self._solve_together(sets, statistics, sink):
            for a, b in ((0, n // 2), (n // 2, n)):
                self._solve_part(_part(sets, a, b), statistics[a:b], sink)

    def _solve_together(self, sets: ActiveSets, statistics: NDArray[np.float64], sink: Sink) -> bool:
        """Solve some classes if their rows fit at once; else say so, nothing held any more."""
        sizes = self.job.sizes
        if len(sets.rows) > sizes.max_rows:
            return False
        self.words[:] = 0
        mark(sets.rows, self.words)
        union = np.empty(count_before(self.words, self.before), np.int64)
        marked_rows(self.words, union)
        spans = self.X.lengths(union)
        fits = int(spans[1].sum()) <= sizes.max_nnz
        if self.solver.dense:  # as whole lines they are there twice
            half = sizes.max_nnz // 2
            fits = int(spans[1].sum()) <= half and dense_bytes(len(union), self.dataset.n_features) <= 8 * half
        if not fits:
            return False
        at = np.empty(len(sets.rows), np.int64)
        rank(sets.rows, self.words, self.before, at)
        nnz = np.diff(np.concatenate([[0], np.cumsum(spans[1][at])])[sets.ptr])  # of each class
        if int(nnz.max()) > sizes.max_class_nnz:
            return False
        block = self.X.gather(union, self.buffer, spans)
        times = self._times(sets, union)
        if self.warm:
            self._start_scores(sets, at, block)
            self._start_alpha(sets, at, times)
        self.solver.solve(sets, at, block, self.job.round, self.scratch, statistics, sink, times)
        return True

    def _times(self, sets: ActiveSets, rows: NDArray[np.int64]) -> Times:
        """How many times C counts for the classes of some active sets, and for some rows (ascending, unique)."""
        low = sets.first_label - self.first
        return Times(self.of_classes[low : low + len(sets.ptr) - 1], self.of_rows.of(rows))

    def _start_scores(self, sets: ActiveSets, at: NDArray[np.int64], block: Block) -> None:
        """The scores that the weights of the warm start give the active rows (rows `at` of the block), in alpha's place."""
        if self.previous is None:
            return
        low = self.line + sets.first_label - self.first
        biases = self.previous.statistics[:, BIAS].copy()
        dense = np.zeros(self.dataset.n_features, np.float32)
        for w in self.previous.weights.blocks(max(MIB, 16 * len(dense)), low, low + len(sets.ptr) - 1):
            ptr = sets.ptr[w.start - low : w.start - low + w.n + 1]
            mine = slice(int(ptr[0]), int(ptr[-1]))
            start_scores(
                CSR.of(w), biases[w.start : w.start + w.n], ptr, at[mine], CSR.of(block), dense, sets.alpha[mine]
            )

    def _start_alpha(self, sets: ActiveSets, at: NDArray[np.int64], times: Times) -> None:
        """alpha from the scores in its place: it gives each class tau times the bias of its start, 0 to one without weights.

        at: places of the rows in `times`. Large classes stay as they are, also where memory holds them: as X streams by,
        they are too many to look at twice.
        """
        p, n, start = self.job.problem.parameters, len(sets.ptr) - 1, self.job.start
        if self.previous is None or start is None:
            return
        low = self.line + sets.first_label - self.first
        wanted = start.tau * self.previous.statistics[low : low + n, BIAS]
        ends = self.previous.weights.ends(low, low + n)
        wanted[np.diff(ends) == 0] = np.nan
        follows = p.bias and p.loss == "squared_hinge" and start.tau > 0  # the hinge's alpha does not
        unshifted = np.diff(sets.ptr) > self.order.large if follows else np.full(n, True)
        wanted[unshifted & ~np.isnan(wanted)] = np.inf
        start_alpha(sets.ptr, sets.sign, at, wanted, ramp_of(p, start.slopes), times, sets.alpha)


def _part(sets: ActiveSets, a: int, b: int) -> ActiveSets:
    """Classes a .. b - 1 of some active sets: views, so that alpha is shared."""
    mine = slice(int(sets.ptr[a]), int(sets.ptr[b]))
    ptr = sets.ptr[a : b + 1] - sets.ptr[a]
    return ActiveSets(sets.first_label + a, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])


def _rows_part(sets: ActiveSets, begin: int, end: int) -> ActiveSets:
    """Rows [begin, end) of the active set of one class: views."""
    part = slice(begin, end)
    ptr = np.array([0, end - begin], np.int64)
    return ActiveSets(sets.first_label, ptr, sets.rows[part], sets.sign[part], sets.alpha[part])
