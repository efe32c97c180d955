"""Jobs of block coordinate descent: X by columns, a segment of a stage, the model.

A segment begins from W on disk, makes the array of the losses (N x K) from it, visits so many entries of X, and leaves
W. The array is scratch: what a kill leaves of it is not looked at. Where a segment ends depends on the data alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.arrays import Columns, InFile, InMemory, Matrix, Targets
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.plan import DescentPlan, width_of
from xmc_stream.grouplasso.rows import ROWS, write_rows
from xmc_stream.grouplasso.solver import LEAST_SWEEPS, Descent, Extrapolation, order_of, problem_of
from xmc_stream.grouplasso.state import (
    ACTIVE,
    LISTED,
    Progress,
    State,
    state_path,
    write_state,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset

SEGMENT_WORK = 1 << 33  # of a segment, about, in nanoseconds, about: what a kill loses
_VISIT = 48  # of visiting an entry, beside one for each value of its line
MOST_INNER = 10  # sweeps over active features between two over all
_ENOUGH = 0.1  # these end when one violates so much less than the first of them
_LONGER, _CLOSER = 20, 10.0  # of debiasing: passes, which are over few features, and what `tol` is divided by
_BELOW = 0.3  # or by this share of what ends the stage


@dataclass(frozen=True)
class Data:
    """What is learned from, and how; the same for all jobs of a run. work: folder of the run."""

    path: str
    work: str
    parameters: GroupLassoParameters
    seed: int

    def scratch(self, name: str) -> Path:
        """A file that is never trusted."""
        return Path(self.work) / "scratch" / name


@dataclass(frozen=True)
class Stage:
    """Solving with one lam. number: of the stage; debias: for the features that are selected already, without the penalty."""

    number: int
    lam: float
    debias: bool = False
    ridge: float = 0.0


@dataclass(frozen=True)
class ColumnsJob:
    """Make X by columns, where it is not there."""

    path: str
    max_bytes: int

    @property
    def key(self) -> str:
        """There is one."""
        return "columns"

    def run(self) -> Receipt:
        """Transpose."""
        dataset = Dataset(self.path)
        there = (dataset.path / "X" / "columns").exists()
        dataset.X_columns(self.max_bytes)
        X = dataset.X_rows()
        return {"passes": 0.0 if there else 1.0, "bytes_read": 0 if there else X.nnz * X.entry_bytes}


@dataclass(frozen=True)
class Segment:
    """A segment of a stage, by whichever algorithm.

    before: the state that it begins from, "" for W = 0. begins: whether the stage begins with it. first: the violation that
    the stages before were measured by, -1 if there is none.
    """

    data: Data
    stage: Stage
    number: int
    before: str
    begins: bool
    first: float

    @property
    def key(self) -> str:
        """Stage and segment."""
        return f"segment/{self.stage.number}/{self.number}"

    @property
    def out(self) -> Path:
        """The state that it leaves."""
        return state_path(Path(self.data.work), self.stage.number, self.number)


@dataclass(frozen=True)
class SegmentJob(Segment):
    """A segment of block coordinate descent. sizes: what may be in memory."""

    sizes: DescentPlan

    def run(self) -> Receipt:
        """Sweep; the receipt has sums of the segment and how far the stage is."""
        return _Sweeps(self).run()


class _Sweeps:
    """A segment at work."""

    def __init__(self, job: SegmentJob) -> None:
        p = job.data.parameters
        self._job, self._p = job, p
        dataset = Dataset(job.data.path)
        self._dataset, n, d, k = dataset, dataset.n_samples, dataset.n_features, dataset.n_labels
        self._columns, self._targets = Columns(dataset, job.sizes.batch), Targets(dataset)
        width = width_of(k)
        weights: Matrix = InMemory(d, width) if job.sizes.weights else InFile(job.data.scratch("weights"), d, width)
        array: Matrix = InFile(job.data.scratch("array"), n, width) if job.sizes.window else InMemory(n, width)
        stage = job.stage
        problem = problem_of(p, stage.lam, stage.ridge, n, k)
        nonzero, self._flags = np.zeros(d, np.bool_), np.zeros(d, np.uint8)
        self._progress = Progress(first=job.first)
        self._sweeps = Extrapolation()
        if job.before:
            state = State(Path(job.before), d, k)
            state.fill(weights)
            nonzero[state.features] = True
            if not job.begins:
                self._progress, self._flags = Progress(**state.progress()), state.flags
                if p.extrapolates:
                    self._sweeps.go_on(*state.swept(width))
        listed = nonzero if stage.debias else self._columns.counts > 0
        if job.begins:
            self._flags = listed.astype(np.uint8) * (ACTIVE | LISTED)
        elif stage.debias:
            listed = (self._flags & LISTED) > 0
        active = (self._flags & ACTIVE) > 0
        self._descent = Descent(
            problem, self._columns, self._targets, weights, array, max(1, job.sizes.window), nonzero, active
        )
        self._longer, self._closer = (_LONGER, _CLOSER) if stage.debias else (1, 1.0)
        self._all = np.flatnonzero(listed)
        self._nnz = max(1, int(self._columns.counts[self._all].sum()))

    def run(self) -> Receipt:
        """Visit features until the segment's work is done, or the stage is."""
        job, progress, descent = self._job, self._progress, self._descent
        budget, before = max(1, SEGMENT_WORK // (_VISIT + descent.array.width)), progress.entries
        objective, fresh = descent.refresh(), True
        while not progress.done and progress.entries - before < budget:
            if not progress.at and progress.full:
                if not fresh:
                    objective, fresh = self._extrapolated(descent.refresh()), True
                self._tell(objective)
            order = self._order()
            ends = np.cumsum(self._columns.counts[order[progress.at :]])
            n = min(len(ends), 1 + int(np.searchsorted(ends, budget - (progress.entries - before))))
            violation = np.array([progress.sum, progress.largest])
            descent.visit(order[progress.at : progress.at + n], violation)
            fresh = False
            progress.sum, progress.largest = map(float, violation)
            progress.at += n
            progress.entries += int(ends[n - 1]) if n else 0
            if progress.at == len(order):
                self._end_sweep()
        if progress.done:
            objective = descent.refresh()
        flags = descent.active.astype(np.uint8) * ACTIVE | (self._flags & LISTED)
        parts = {"w": (descent.weights, np.flatnonzero(descent.nonzero))}
        swept = self._sweeps.stored(descent.weights.width) if self._p.extrapolates else None
        write_state(job.out, parts, self._dataset.n_labels, flags, asdict(progress), swept)
        for name in ("weights", "array"):
            job.data.scratch(name).unlink(missing_ok=True)
        n_selected = int(np.count_nonzero(descent.nonzero))
        return {
            "done": progress.done, "objective": objective, "n_selected": n_selected, "first": progress.first,
            "stage_passes": progress.entries / self._nnz, "history": progress.history if progress.done else [],
            "passes": (progress.entries - before) / max(self._columns.X.nnz, 1),
            "bytes_read": self._columns.X.bytes_read, "n_features": len(self._all),
            "violation": progress.history[-1]["violation"] if progress.history else None,
        }  # fmt: skip

    def _tell(self, objective: float) -> None:
        """Note how things are before a sweep over all features."""
        progress = self._progress
        progress.history.append(
            {
                "passes": round(progress.entries / self._nnz, 3), "objective": objective, "violation": None,
                "n_selected": int(np.count_nonzero(self._descent.nonzero)),
            }
        )  # fmt: skip

    def _order(self) -> NDArray[np.int64]:
        """The features of the sweep under way. Over all, they come as they are stored, unless they are drawn.

        Sweeps over active features between two over all have one order: else there is nothing to extrapolate.
        """
        progress, job = self._progress, self._job
        features = self._all if progress.full else np.flatnonzero(self._flags & LISTED)
        if progress.full and not self._p.draws:
            return features
        number = progress.sweep if self._p.draws else progress.sweep - progress.inner
        return order_of(features, self._p.draws, job.data.seed, job.stage.number, number)

    def _extrapolated(self, objective: float) -> float:
        """Go where the last sweeps were going, if that lowers the objective; returns what it is then."""
        sweeps, descent = self._sweeps, self._descent
        if len(sweeps) < LEAST_SWEEPS:
            return objective
        features, rows = sweeps.features, sweeps.result()
        sweeps.begin(features[:0], 0)
        if rows is None:
            return objective
        now = descent.weights.take(features)
        descent.weights.put(features, rows)
        there = descent.refresh()
        if there < objective:
            descent.nonzero[features] = rows.any(axis=1)
            return there
        descent.weights.put(features, now)
        return descent.refresh()

    def _end_sweep(self) -> None:
        """Decide what comes next: the stage ends only after a sweep over all features."""
        progress, p, sweeps, weights = self._progress, self._p, self._sweeps, self._descent.weights
        violation = progress.largest if p.draws else progress.sum
        over = progress.entries >= p.max_passes * self._longer * self._nnz
        if progress.full:
            if not progress.sweep:
                progress.first = max(progress.first, violation)
            progress.history[-1]["violation"] = violation
            progress.done = over or violation <= p.tol / self._closer * progress.first
            if p.shrink and not progress.done:
                listed = self._descent.active
                self._flags = listed.astype(np.uint8) * LISTED
                progress.full, progress.inner = not listed.any(), 0
                if p.extrapolates:
                    sweeps.begin(np.flatnonzero(listed), weights.width)
        else:
            progress.inner += 1
            if len(sweeps.features):
                sweeps.add(weights.take(sweeps.features))
            if progress.inner == 1:
                progress.inner_first = violation
            enough = max(_ENOUGH * progress.inner_first, _BELOW * p.tol / self._closer * progress.first)
            progress.full = over or violation <= enough or progress.inner == MOST_INNER
        progress.sweep += 1
        progress.at, progress.sum, progress.largest = 0, 0.0, 0.0


@dataclass(frozen=True)
class ModelJob:
    """Write the model's rows from a state."""

    data: Data
    state: str

    @property
    def key(self) -> str:
        """There is one."""
        return "finalise"

    def run(self) -> Receipt:
        """Copy."""
        dataset = Dataset(self.data.path)
        state = State(Path(self.state), dataset.n_features, dataset.n_labels)
        return write_rows(Path(self.data.work) / ROWS, dataset.n_features, dataset.n_labels, state.rows())
