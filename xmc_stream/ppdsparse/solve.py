"""Solve jobs: the classes of a unit or a share, from last round's state and what the search found, to the next state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.kernels.penalty import Times
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.all_rows import solve_on_all_rows
from xmc_stream.ppdsparse.batches import Batches
from xmc_stream.ppdsparse.parameters import EXACT
from xmc_stream.ppdsparse.plan import SolvePlan, choose_streamed, next_search
from xmc_stream.ppdsparse.problem import Found, Problem, Share
from xmc_stream.ppdsparse.sets import RoundSets
from xmc_stream.ppdsparse.solver import Solver, added_sizes, has_dense_rows, ramp_of, row_order, start_sizes
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
    SURE,
    UnitState,
    UnitStateWriter,
    close_classes,
    new_unit_state,
    set_known,
    update_statistics,
)
from xmc_stream.ppdsparse.streaming import LargeClasses
from xmc_stream.ppdsparse.weights import ShareWeights
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset
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
        self.weights = ShareWeights(problem.weights, d, share.first, share.last)
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
            statistics, sets.found, sets.first, job.problem.parameters, job.round, job.found.kind == EXACT,
            self.weights.of_classes,
        )  # fmt: skip
        self.n_active = np.diff(sets.previous.active.ends(sets.line, sets.line + n)) + np.minimum(sets.room, n_found)
        return n_found

    def _solve_on_all_rows(self, out: UnitStateWriter) -> None:
        """Solve every class of which there is something to learn, with all rows in its active set."""
        p, seed, n_samples = self.job.problem.parameters, self.job.problem.seed, self.dataset.n_samples
        learned = np.flatnonzero(out.statistics[:, STATUS] == OPEN)
        weights = Times(self.weights.of(learned), self.weights.of_rows.of_range(0, n_samples))
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
        batches = Batches(self.solver, sets, self.X, self.job.sizes, self.weights, self.job.start, out)
        # a row that was found takes a quarter of an active one while they are merged
        for low, high in self._cut(kind, self.n_active + n_found // 4):
            if kind[low] == _STREAMED and large is not None:
                line = int(np.searchsorted(streamed, low))
                out.copy(large, line, line + high - low)
            elif (known[low:high, STATUS] == OPEN).any():
                solved = kind[low:high] == _SOLVED
                self.kept[low:high] = np.where(solved, batches.solve(low, high, solved), 0)
            elif sets.previous is not None:
                out.copy(sets.previous, sets.line + low, sets.line + high)
            else:
                out.add_empty(high - low)
        if large is not None:
            large.path.unlink()
        self.fresh, self.used = self.fresh + batches.fresh, self.used + batches.used

    def _stream(
        self, n_found: NDArray[np.int64], known: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], UnitState | None]:
        """Solve large classes as X streams by, where that is the way; returns which, and a state that has them in turn."""
        job, room, solver = self.job, self.job.sizes.room, self.solver
        classes = np.flatnonzero((self.n_active > solver.order.large) & (known[:, STATUS] == OPEN))
        if len(classes):
            chosen = choose_streamed(
                self.n_active[classes], solver.steps.epochs, job.sizes, self.X.nnz, self.dataset.n_samples
            )
            classes = classes[chosen]
        if not len(classes) or room is None:
            return classes, None
        path, ramp = self._scratch("large"), None if job.start is None else ramp_of(solver.parameters, job.start)
        with new_unit_state(path, len(classes), *self.shape, durable=False) as lines:
            large = LargeClasses(solver, self.sets, self.X, room, self.weights, ramp, self._scratch("active"))
            self.kept[classes] = large.solve(classes, self.n_active[classes], n_found[classes], lines)
        self.fresh, self.used, self.passes, self.looked_up = (
            large.fresh,
            large.used,
            large.passes,
            large.rows.bytes_read,
        )
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
