"""Solve jobs: the classes of a unit or a share, from last round's state and what the search found, to the next state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.linear.kernels.dcd import Times, new_scratch
from xmc_stream.linear.kernels.rows import padded
from xmc_stream.linear.weights import SURE
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.candidates import Found
from xmc_stream.ppdsparse.kernels.active import start_alpha, start_scores
from xmc_stream.ppdsparse.parameters import EXACT
from xmc_stream.ppdsparse.plan import SolvePlan, choose_streamed
from xmc_stream.ppdsparse.problem import Problem, Share
from xmc_stream.ppdsparse.solver import (
    Sink,
    Solver,
    added_sizes,
    has_dense_rows,
    ramp_of,
    row_order,
    solve_on_all_rows,
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
    RoundSets,
    UnitState,
    UnitStateWriter,
    close_classes,
    kept_rows,
    new_unit_state,
    next_search,
    set_known,
    update_statistics,
)
from xmc_stream.ppdsparse.streaming import LargeClasses
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
    out: the state of the share. start: what the model of a warm start was trained with, in its first
    round; else None.
    """

    problem: Problem
    round: int
    share: Share
    previous: str
    found: Found
    out: str
    sizes: SolvePlan
    start: Mapping[str, float] | None

    @property
    def key(self) -> str:
        """Round and share."""
        return f"solve/{self.round}/{self.share.name}"

    @property
    def on_all_rows(self) -> bool:
        """Whether classes begin, and with all rows."""
        return bool(self.problem.parameters.all_rows) and not self.previous

    def run(self) -> Receipt:
        """Solve; the receipt has the sizes that the next search is planned from, of a whole unit."""
        drop_tiles()
        # threads of this process take shares beside each other, and a scheduler may give two to one worker
        plan = self.problem.plan
        with _turn if self.sizes.beside == 1 < plan.processes * plan.threads else nullcontext():
            return _ShareSolve(self).run()


class _ShareSolve:
    """The work of one solve job. Classes count from the first of the share."""

    def __init__(self, job: SolveJob) -> None:
        self.job, problem, share = job, job.problem, job.share
        self.dataset = d = Dataset(problem.data)
        self.n, self.X = share.last - share.first, d.X_rows()
        self.shape = d.n_samples, d.n_features
        before = None
        if job.previous:
            before = UnitState(Path(job.previous), share.unit.last - share.unit.first, *self.shape)
        self.sets = RoundSets(problem, d, job.round, share, before, job.found)
        order, dense = row_order(d.n_samples, self.X.nnz), has_dense_rows(*self.shape, self.X.nnz)
        self.solver = Solver(problem.parameters, problem.seed, order, dense, job.round)
        self.of_classes = problem.weights.of_classes(d, share.first, share.last)
        self.of_rows = problem.weights.of_rows()
        self.n_active = np.zeros(self.n, np.int64)  # |A| of each class in this round
        self.kept = np.zeros(self.n, np.int64)  # of open classes, what is kept of it
        self.passes = self.looked_up = 0  # over X, for large classes; bytes of indptr for them
        # negatives that an approximate search brought in, and those with alpha > 0 in the end
        self.fresh = self.used = 0

    def run(self) -> Receipt:
        job, d, share, n_samples = self.job, self.dataset, self.job.share, self.dataset.n_samples
        p = job.problem.parameters
        with new_unit_state(Path(job.out), self.n, *self.shape) as writer:
            n_found = self._begin(writer.statistics)
            if job.on_all_rows:
                self._solve_on_all_rows(writer)
            else:
                self._solve_on_active_sets(n_found, writer)
            open_ = writer.statistics[:, STATUS] == OPEN
            heaps = np.where(open_, added_sizes(self.kept, p.added, n_samples, p.growth_after(job.round)), 0)
            writer.statistics[:, ROOM] = heaps
        return {
            # else the job that joins the shares says so
            **(next_search(Path(job.out), share.unit, d, p) if share.whole else {}),
            "bytes_read": self.X.bytes_read + self.sets.Y.bytes_read + self.looked_up,
            **({"passes": 1.0} if job.on_all_rows else {}),
            **({"solve_passes": self.passes} if self.passes else {}),
            **({"fresh": self.fresh, "used": self.used} if p.approximate else {}),
        }

    def _begin(self, statistics: NDArray[np.float64]) -> NDArray[np.int64]:
        """What is known of the classes before they are solved; returns how many rows were found for each."""
        job, sets, n_samples, n = self.job, self.sets, self.dataset.n_samples, self.n
        if sets.previous is None:
            counts = np.diff(sets.Y.ends(sets.first, sets.first + n))
            set_known(statistics, counts, n_samples)
            self.n_active = np.where(counts < n_samples, counts + start_sizes(counts, n_samples), 0)
            return np.zeros(n, np.int64)
        statistics[:] = sets.previous.statistics[sets.line : sets.line + n]
        n_found = update_statistics(
            statistics, sets.found, sets.first, job.problem.parameters, job.round, self.of_classes,
            job.found.kind == EXACT,
        )  # fmt: skip
        self.n_active = np.diff(sets.previous.active.ends(sets.line, sets.line + n)) + np.minimum(sets.room, n_found)
        return n_found

    def _solve_on_all_rows(self, out: UnitStateWriter) -> None:
        """Solve every class of which there is something to learn, with all rows in its active set."""
        p, seed, n_samples = self.job.problem.parameters, self.job.problem.seed, self.dataset.n_samples
        learned = np.flatnonzero(out.statistics[:, STATUS] == OPEN)
        weights = Times(self.of_classes[learned], self.of_rows.of_range(0, n_samples))
        x, y = self.X.block(0, n_samples), self.sets.Y.gather(self.sets.first + learned)
        epochs, done, begin = self.solver.steps.epochs, 0, 0
        for solved in solve_on_all_rows(p, seed, x, y, self.dataset.n_features, weights, epochs):
            mine = learned[done : done + len(solved.statistics)]
            done, end = done + len(mine), int(mine[-1]) + 1
            out.statistics[mine[:, None], [BIAS, DUAL, KEPT, INSIDE]] = solved.statistics
            out.statistics[mine, LOSS] = solved.losses / p.C
            self.kept[mine] = solved.active[0]
            of_all = np.zeros((2, end - begin), np.int64)  # also of those between them
            of_all[:, mine - begin] = solved.active[0], solved.weights[0]
            out.active.append(of_all[0], *solved.active[1:])
            out.weights.append(of_all[1], *solved.weights[1:])
            # every row has been looked at: no check
            close_classes(out.statistics[begin:end], True, p, self.job.round + 1)
            begin = end
        out.add_empty(self.n - begin)

    def _solve_on_active_sets(self, n_found: NDArray[np.int64], out: UnitStateWriter) -> None:
        """Solve the open classes: those that stream first, then all in turn, a batch at a time."""
        sets, known = self.sets, out.statistics
        streamed, large = self._stream(n_found, known)
        kind = np.where((known[:, STATUS] == DONE) | (known[:, BIAS] == SURE), _CARRIED, _SOLVED)
        kind[streamed] = _STREAMED
        sets.room[kind == _CARRIED] = 0
        sizes, most = self.job.sizes, self.X.nnz
        self.scratch = new_scratch(self.shape[1], min(sizes.max_rows, self.shape[0]), min(sizes.max_class_nnz, most))
        self.buffer = Buffer(self.X, min(sizes.max_nnz, most))
        # a row that was found takes a quarter of an active one while they are merged
        for low, high in self._cut(kind, self.n_active + n_found // 4):
            if kind[low] == _STREAMED and large is not None:
                line = int(np.searchsorted(streamed, low))
                out.copy(large, line, line + high - low)
            elif (known[low:high, STATUS] == OPEN).any():
                solved = kind[low:high] == _SOLVED
                self.kept[low:high] = np.where(solved, self._solve(low, high, solved, out), 0)
            elif sets.previous is not None:
                out.copy(sets.previous, sets.line + low, sets.line + high)
            else:
                out.add_empty(high - low)
        del self.scratch, self.buffer  # or they would stay while the next search is planned, uncounted
        if large is not None:
            large.path.unlink()

    def _stream(
        self, n_found: NDArray[np.int64], known: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], UnitState | None]:
        """Solve large classes as X streams by, where that is the way; returns which, and a state that has them in turn."""
        job, room, solver = self.job, self.job.sizes.room, self.solver
        classes = np.flatnonzero((self.n_active > solver.order.large) & (known[:, STATUS] == OPEN))
        n_active, n_samples = self.n_active[classes], self.dataset.n_samples
        classes = classes[choose_streamed(n_active, solver.steps.epochs, job.sizes, self.X.nnz, n_samples)]
        if not len(classes) or room is None:
            return classes, None
        path, ramp = self._scratch("large"), None if job.start is None else ramp_of(solver.parameters, job.start)
        with new_unit_state(path, len(classes), *self.shape, durable=False) as lines:
            weights, scratch = job.problem.weights, self._scratch("active")
            large = LargeClasses(solver, self.sets, self.X, room, weights, self.of_classes, ramp, scratch)
            self.kept[classes] = large.solve(classes, self.n_active[classes], n_found[classes], lines)
        self.fresh, self.used, self.passes = large.fresh, large.used, large.passes
        self.looked_up = large.rows.bytes_read
        of_round = [BIAS, DUAL, KEPT, INSIDE]
        known[classes[:, None], of_round] = lines.statistics[:, of_round]
        return classes, UnitState(path, len(classes), *self.shape)

    def _scratch(self, kind: str) -> Path:
        """What is of no use once the job has ended: apart from the states, which a later session checks."""
        return work_name(Path(self.job.out).parents[2] / "scratch" / f"{self.job.share.name}.{kind}")

    def _cut(self, kind: NDArray[np.int64], bound: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Ranges of classes: of streamed ones, and of others with at most max_rows active rows, or of one larger class.

        Classes without positives stand among those to solve: they have no rows. So do carried ones, once a round has been:
        where most classes of a unit are done, those between them would be solved one by one.
        """
        n = len(kind)
        if self.sets.previous is not None:
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

    def _solve(self, low: int, high: int, solved: NDArray[np.bool_], out: UnitStateWriter) -> NDArray[np.int64]:
        """A batch, classes [low, high): those that are solved, and between them those that are carried over as they are.

        All together if their rows fit, else one half after the other; a class by itself as it may be. Returns the sizes of the
        active sets that are kept.
        """
        whole, statistics, sink = self.sets.of(low, high), np.empty((high - low, 4)), self._sink(low, solved, out)
        # what was kept of the last round has alpha > 0, but for positives
        fresh = (whole.alpha == 0.0) & (whole.sign < 0) if self.sets.approximate else np.zeros(0, np.bool_)
        sets = whole if solved.all() else _some(whole, solved)
        todo = [(sets, statistics)]
        while todo:
            part, figures = todo.pop()
            n = len(part.ptr) - 1
            if not len(part.rows):  # classes without positives
                sink(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
            elif n == 1:
                self._solve_alone(part, figures[0], sink)
            elif (held := self._gather(part)) is not None:
                at, block, times = held
                self.solver.solve(part, at, block, self.scratch, figures, sink, times)
            else:
                middle = n // 2
                todo += [(_range(part, middle, n), figures[middle:]), (_range(part, 0, middle), figures[:middle])]
        if sets is not whole:
            whole.alpha[np.repeat(solved, np.diff(whole.ptr))] = sets.alpha
        if self.sets.approximate:
            self.fresh += int(fresh.sum())
            self.used += int((fresh & (whole.alpha > 0.0)).sum())
        known = out.statistics[low:high]
        open_ = np.flatnonzero(solved & (known[:, STATUS] == OPEN))
        known[open_[:, None], [BIAS, DUAL, KEPT, INSIDE]] = statistics[open_]
        kept, counts = kept_rows(whole)
        out.active.append(counts, whole.rows[kept], whole.alpha[kept])
        return counts

    def _sink(self, low: int, solved: NDArray[np.bool_], out: UnitStateWriter) -> Sink:
        """Takes the weights of classes from `low` on as they are solved; of carried ones, the weights that they had."""
        # of runs of solved classes, and of carried ones
        ends = np.append(np.flatnonzero(np.diff(solved)) + 1, len(solved))
        done = 0

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], values: NDArray[np.float32]) -> None:
            nonlocal done
            first, filled = done, 0
            while done < first + len(counts):
                begin, done = done, min(int(ends[np.searchsorted(ends, done, "right")]), first + len(counts))
                if solved[begin]:
                    mine = counts[begin - first : done - first]
                    part = slice(filled, filled + int(mine.sum()))
                    out.weights.append(mine, features[part], values[part])
                    filled = part.stop
                elif self.sets.previous is not None:
                    line = self.sets.line + low
                    out.weights.copy(self.sets.previous.weights, line + begin, line + done)

        return sink

    def _gather(self, sets: ActiveSets) -> tuple[NDArray[np.int64], Block, Times] | None:
        """The rows of some classes, if they fit: which of them are each class's, and how many times C counts."""
        sizes = self.job.sizes
        if len(sets.rows) > sizes.max_rows:
            return None
        union = self.sets.bits.set(sets.rows)
        spans = self.X.lengths(union)
        most, total = sizes.max_nnz, int(spans[1].sum())
        if self.solver.dense:  # as whole lines they are there twice
            most //= 2
        if total > most or (self.solver.dense and 4 * len(union) * padded(self.shape[1]) > 8 * most):
            return None
        at = self.sets.bits.places(sets.rows)
        nnz = np.diff(np.concatenate([[0], np.cumsum(spans[1][at])])[sets.ptr])  # of each class
        if int(nnz.max()) > sizes.max_class_nnz:
            return None
        block, times = self.X.gather(union, self.buffer, spans), self._times(sets, union)
        if self.job.start is not None:
            self._start_scores(sets, at, block)
            self._start_alpha(sets, at, times, self.job.start)
        return at, block, times

    def _solve_alone(self, sets: ActiveSets, statistics: NDArray[np.float64], sink: Sink) -> None:
        """One class of any size."""
        lengths, times, most = self.X.lengths(sets.rows)[1], self._times(sets, sets.rows), self.job.sizes.max_nnz
        if self.job.start is not None:
            ends = np.concatenate([[0], np.cumsum(lengths)])
            begin = 0
            while begin < len(sets.rows):
                end = max(int(np.searchsorted(ends, ends[begin] + most, side="right")) - 1, begin + 1)
                block, mine = self.X.gather(sets.rows[begin:end], self.buffer), slice(begin, end)
                part = ActiveSets(
                    sets.first_label, np.array([0, end - begin]), sets.rows[mine], sets.sign[mine], sets.alpha[mine]
                )
                self._start_scores(part, np.arange(end - begin), block)
                begin = end
            self._start_alpha(sets, np.arange(len(sets.rows)), times, self.job.start)
        self.solver.solve_large(
            sets, lengths, lambda rows: self.X.gather(rows, self.buffer), most, self.scratch, statistics, sink, times
        )

    def _times(self, sets: ActiveSets, rows: NDArray[np.int64]) -> Times:
        """How many times C counts for the classes of some active sets, and for some rows (ascending, unique)."""
        low = sets.first_label - self.sets.first
        return Times(self.of_classes[low : low + len(sets.ptr) - 1], self.of_rows.of(rows))

    def _start_scores(self, sets: ActiveSets, at: NDArray[np.int64], block: Block) -> None:
        """The scores that the weights of the warm start give the active rows (rows `at` of the block), in alpha's place."""
        previous = self.sets.previous
        if previous is None:
            return
        low = self.sets.line + sets.first_label - self.sets.first
        biases = previous.statistics[:, BIAS].copy()
        dense = np.zeros(self.shape[1], np.float32)
        for w in previous.weights.blocks(max(MIB, 16 * len(dense)), low, low + len(sets.ptr) - 1):
            ptr = sets.ptr[w.start - low : w.start - low + w.n + 1]
            mine = slice(int(ptr[0]), int(ptr[-1]))
            start_scores(
                CSR.of(w), biases[w.start : w.start + w.n], ptr, at[mine], CSR.of(block), dense, sets.alpha[mine]
            )

    def _start_alpha(self, sets: ActiveSets, at: NDArray[np.int64], times: Times, start: Mapping[str, float]) -> None:
        """alpha from the scores in its place: it gives each class tau times the bias of its start, 0 to one without weights.

        at: places of the rows in `times`. Large classes stay as they are, also where memory holds them: as X streams by,
        they are too many to look at twice.
        """
        p, n, previous = self.solver.parameters, len(sets.ptr) - 1, self.sets.previous
        tau = start.get("tau", 0.0)  # 0 where the model's bias is none of a dual
        if previous is None:
            return
        low = self.sets.line + sets.first_label - self.sets.first
        wanted = tau * previous.statistics[low : low + n, BIAS]
        wanted[np.diff(previous.weights.ends(low, low + n)) == 0] = np.nan
        follows = p.bias and p.loss == "squared_hinge" and tau > 0  # the hinge's alpha does not
        unshifted = np.diff(sets.ptr) > self.solver.order.large if follows else np.full(n, True)
        wanted[unshifted & ~np.isnan(wanted)] = np.inf
        start_alpha(sets.ptr, sets.sign, at, wanted, ramp_of(p, start), times, sets.alpha)


def _range(sets: ActiveSets, a: int, b: int) -> ActiveSets:
    """Classes a .. b - 1 of some active sets: views, so that alpha is shared."""
    mine = slice(int(sets.ptr[a]), int(sets.ptr[b]))
    ptr = sets.ptr[a : b + 1] - sets.ptr[a]
    return ActiveSets(sets.first_label + a, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])


def _some(sets: ActiveSets, chosen: NDArray[np.bool_]) -> ActiveSets:
    """Copies, in which the classes that are not chosen have no rows."""
    sizes = np.diff(sets.ptr)
    mine, ptr = np.repeat(chosen, sizes), np.concatenate([[0], np.cumsum(sizes * chosen)])
    return ActiveSets(sets.first_label, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])
