"""FISTA, SpaRSA and FOBOS: steps along the whole gradient of the losses, for a stage of a training.

    W' = prox(V - g(V) / L, P / L)

FISTA (Beck, Teboulle 2009): V = W + beta (W - W of before); L falls a little, then doubles until the losses are below their
quadratic bound, or is the constant; V begins anew at W where it points away from the step. SpaRSA (Wright et al. 2009): V = W;
L is that of Barzilai and Borwein, doubled until F falls enough below the largest of the last few. FOBOS (Duchi, Singer 2009):
1/L = eta / sqrt(t).

Its jobs make scores by rows of X, gradient and steps by features. What they hand to each other are D x K and N x K matrices in
files of the run's scratch, which each job reads a part of. Sums are made over fixed runs of rows or features, whatever the
jobs, and added exactly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.arrays import Columns, InFile
from xmc_stream.grouplasso.descent import Data, Segment, Stage
from xmc_stream.grouplasso.kernels.descent import (
    BACK,
    KEPT,
    LARGEST,
    LINEAR,
    N_SUMS,
    PENALTY,
    SQUARE,
    VIOLATION,
    Problem,
    step_rows,
)
from xmc_stream.grouplasso.kernels.margins import Lines, add_gradients, add_scores, new_sums, settle
from xmc_stream.grouplasso.plan import GradientPlan, feature_run, row_run, step_work, width_of
from xmc_stream.grouplasso.solver import problem_of
from xmc_stream.grouplasso.state import State, write_state
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.runtime.job import Job, Notes, Phase, Receipt, run_here
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.system.stop import stop_if_unwanted

STEPS_WORK = 1 << 32  # entries times lines' width of a segment's steps, about: a few seconds; a step at least
_EASED = 0.9  # of FISTA: what L falls by between steps, as the curvature does where rows are past their margins
_MEMORY = 5  # of SpaRSA: values of F that the next one may lie between
_FALL = 1e-4  # of SpaRSA: what F must fall by, in L/2 ||W' - W||^2
_ROUNDING = 1e-7  # of F, as float32 arrays have it: below it nothing is compared
_MOST_TRIES = 60

Phases = Generator[Phase, list[Receipt], Any]


@dataclass(frozen=True)
class _Part:
    """A job on a part of the rows or features [first, last). step: which of the stage's steps; its files have names."""

    data: Data
    stage: Stage
    sizes: GradientPlan
    step: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Never in a ledger: kind, stage, step, rows or features."""
        return f"{type(self).__name__}/{self.stage.number}/{self.step}/{self.first}"

    @property
    def _dataset(self) -> Dataset:
        return Dataset(self.data.path)

    def _matrix(self, name: str) -> InFile:
        """D x K, or the N x K array."""
        dataset = self._dataset
        n = dataset.n_samples if name == "array" else dataset.n_features
        return InFile(self.data.scratch(name), n, width_of(dataset.n_labels), fresh=False)

    def _problem(self) -> Problem:
        dataset, p = self._dataset, self.data.parameters
        return problem_of(p, self.stage.lam, self.stage.ridge, dataset.n_samples, dataset.n_labels)


@dataclass(frozen=True)
class ScoresJob(_Part):
    """Make the array's lines of rows [first, last) from a matrix W; the receipt has sums of losses of fixed runs of rows."""

    source: str

    def run(self) -> Receipt:
        """Add up scores, column after column of X; threads share its rows, and what is read."""
        dataset, source = self._dataset, self._matrix(self.source)
        columns = Columns(dataset, self.sizes.entries)
        values = aligned_zeros((self.last - self.first, source.width))
        with ThreadPoolExecutor(self.sizes.team) as team:
            self._add_up(source, columns, values, team)
            losses = self._settle(dataset, values, team)
        self._matrix("array").write(self.first, values)
        share = (self.last - self.first) / dataset.n_samples
        return {"sums": losses, "passes": share, "bytes_read": columns.X.bytes_read}

    def _add_up(self, source: InFile, columns: Columns, values: NDArray[np.float32], team: Executor) -> None:
        shares = even_ranges(len(values), self.sizes.team)
        for low in range(0, source.n, self.sizes.columns):
            rows = source.read(low, min(low + self.sizes.columns, source.n))
            features = np.flatnonzero(rows.any(axis=1) & (columns.counts[low : low + len(rows)] > 0))
            for a, b in columns.batches(features + low, self.sizes.columns):
                stop_if_unwanted()
                add = partial(self._add, columns.gather(features[a:b] + low), rows[features[a:b]], values)
                list(team.map(add, shares))  # which raises what they do

    def _add(
        self, block: CSR, weights: NDArray[np.float32], values: NDArray[np.float32], share: tuple[int, int]
    ) -> None:
        """To the lines of some rows."""
        first, last = share
        add_scores(block.indptr, block.indices, block.values, self.first + first, weights, values[first:last])

    def _settle(self, dataset: Dataset, values: NDArray[np.float32], team: Executor) -> list[list[float]]:
        """Make scores the lines of the array; the losses of fixed runs of rows."""
        Y = dataset.Y_rows().block(self.first, self.last)
        problem, run, active = self._problem(), row_run(dataset), np.zeros(len(values), np.float32)

        def losses(low: int) -> list[float]:
            some = slice(low, min(low + run, len(values)))
            part = Lines(values[some], active[some], Y.indptr[low : some.stop + 1], Y.indices)
            return [float(settle(problem.loss, problem.n_labels, part))]

        return list(team.map(losses, range(0, len(values), run)))


@dataclass(frozen=True)
class GradientJob(_Part):
    """The gradient's rows of features [first, last), from the array."""

    out: str

    def run(self) -> Receipt:
        """Add up, window after window of the array's lines."""
        dataset, problem, out = self._dataset, self._problem(), self._matrix(self.out)
        columns, array = Columns(dataset, self.sizes.entries), self._matrix("array")
        room = new_sums(out.width)
        whole = list(self._windows(dataset, array)) if self.sizes.rows >= dataset.n_samples else None
        for low in range(self.first, self.last, self.sizes.columns):
            features = np.arange(low, min(low + self.sizes.columns, self.last))
            for a, b in columns.batches(features, self.sizes.columns):
                block = columns.gather(features[a:b])
                at = block.indptr[:-1].copy()
                near, wide = np.zeros((b - a, out.width), np.float32), np.zeros((b - a, out.width))
                for first, lines in whole or self._windows(dataset, array):
                    stop_if_unwanted()
                    add_gradients(problem.loss, block, at, first, lines, room, near, wide)
                out.write(int(features[a]), (wide * problem.scale).astype(np.float32))
        share = int(columns.counts[self.first : self.last].sum()) / max(columns.X.nnz, 1)
        return {"passes": share, "bytes_read": columns.X.bytes_read}

    def _windows(self, dataset: Dataset, array: InFile) -> Iterator[tuple[int, Lines]]:
        Y = dataset.Y_rows()
        for first in range(0, array.n, self.sizes.rows):
            last = min(first + self.sizes.rows, array.n)
            labels = Y.block(first, last)
            active = np.zeros(last - first, np.float32)  # of the curvature, which is not asked for
            yield first, Lines(array.read(first, last), active, labels.indptr, labels.indices)


@dataclass(frozen=True)
class StepJob(_Part):
    """Rows [first, last) of out = prox(v - g / length); sums of fixed runs of features, see `step_rows` of the kernels."""

    length: float
    point: str
    gradient: str
    w: str
    out: str

    def run(self) -> Receipt:
        """Step."""
        problem, run = self._problem(), feature_run(self._dataset)
        point, gradient, w, out = map(self._matrix, (self.point, self.gradient, self.w, self.out))
        sums = []
        for low in range(self.first, self.last, run):
            stop_if_unwanted()
            high = min(low + run, self.last)
            rows, mine = aligned_zeros((high - low, out.width)), np.zeros(N_SUMS)
            step_rows(
                point.read(low, high), gradient.read(low, high), w.read(low, high), self.length, problem, rows, mine
            )
            out.write(low, rows)
            sums.append(mine.tolist())
        return {"sums": sums}


@dataclass(frozen=True)
class MomentumJob(_Part):
    """Rows [first, last) of out = w + beta (w - before)."""

    beta: float
    w: str
    before: str
    out: str

    def run(self) -> Receipt:
        """Extrapolate."""
        w, before, out = map(self._matrix, (self.w, self.before, self.out))
        run, beta = feature_run(self._dataset), np.float32(self.beta)
        for low in range(self.first, self.last, run):
            high = min(low + run, self.last)
            rows = w.read(low, high)
            out.write(low, rows + beta * (rows - before.read(low, high)))
        return {}


@dataclass(frozen=True)
class ChangeJob(_Part):
    """||s||^2 and s.y over rows [first, last), for s = w - w_before, y = g - g_before, in fixed runs of features."""

    names: tuple[str, str, str, str]

    def run(self) -> Receipt:
        """Sum."""
        matrices, run, sums = [self._matrix(name) for name in self.names], feature_run(self._dataset), []
        for low in range(self.first, self.last, run):
            w, w_before, g, g_before = (m.read(low, min(low + run, self.last)).astype(np.float64) for m in matrices)
            s = w - w_before
            sums.append([float((s * s).sum()), float((s * (g - g_before)).sum())])
        return {"sums": sums}


def total_of(receipts: list[Receipt]) -> list[float]:
    """The exact sum of each column of the sums that receipts have."""
    return [
        math.fsum(column) for column in zip(*(line for receipt in receipts for line in receipt["sums"]), strict=True)
    ]


@dataclass
class Going:
    """How far a stage is. t: of FISTA; length: L; step: how many were made; last: values of F; passes: readings of X.

    first: the violation that those of later steps are measured by, see `state.Progress`. history: the start, and what is
    after 1, 2, 4, 8, ... steps.
    """

    t: float = 1.0
    length: float = 0.0
    step: int = 0
    last: list[float] = field(default_factory=list)
    passes: int = 0
    first: float = -1.0
    done: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class StepsJob(Segment):
    """Some steps of a stage, from a state to the next. constant: the L that always works.

    As one job, it does the jobs of all phases itself. Else `loop` yields these, and the job that has what it returned as `made`
    stores it.
    """

    sizes: GradientPlan
    constant: float
    made: Receipt | None = None

    def run(self) -> Receipt:
        """All phases, one after another, if they are not done; then W, and the point where the next gradient is taken."""
        made: Receipt = self.made or run_here(self.loop(), Notes())
        dataset = Dataset(self.data.path)
        d, width, run = dataset.n_features, width_of(dataset.n_labels), feature_run(dataset)
        parts = {}
        for name in ("w", "v"):
            matrix = InFile(self.data.scratch(made["files"][name]), d, width, fresh=False)
            kept = [low + np.flatnonzero(matrix.read(low, min(low + run, d)).any(axis=1)) for low in range(0, d, run)]
            parts[name] = matrix, np.concatenate(kept)
        write_state(self.out, parts, dataset.n_labels, np.zeros(d, np.uint8), made["going"])
        counted = ("passes", "bytes_read") if self.made else ()  # with the jobs that did read
        said = {key: value for key, value in made.items() if key not in ("going", "files", *counted)}
        return {**said, "n_selected": len(parts["w"][1])}

    def loop(self) -> Phases:
        """Phases of jobs, none of them kept; returns a receipt without what is stored."""
        steps = max(1, STEPS_WORK // (3 * step_work(Dataset(self.data.path))))
        return (yield from _Steps(self).loop(steps))


class _Steps:
    """Steps at work: names of matrices in scratch files, and sums."""

    def __init__(self, job: StepsJob) -> None:
        self._job, self._p = job, job.data.parameters
        dataset = Dataset(job.data.path)
        self._n, self._dataset = dataset.n_samples, dataset
        self._problem = problem_of(self._p, job.stage.lam, job.stage.ridge, dataset.n_samples, dataset.n_labels)
        searched = self._p.algorithm == "fista" and self._p.line_search
        self._going = Going(first=job.first, length=job.constant / 64.0 if searched else job.constant)
        self._fresh = False  # whether there is a gradient of the step before
        self._w, self._next, self._g, self._old_g = "w", "next", "g", "old-g"
        self._array_of, self._losses = "", 0.0
        self._sums = {"passes": 0.0, "bytes_read": 0}
        d, width = dataset.n_features, width_of(dataset.n_labels)
        InFile(job.data.scratch("array"), dataset.n_samples, width)
        state = State(Path(job.before), d, dataset.n_labels) if job.before else None
        for name in {self._w, self._v, self._next, self._g, self._old_g}:
            matrix = InFile(job.data.scratch(name), d, width)
            if state is not None and name in ("w", "v"):
                part = state if name == "w" or job.begins else State(Path(job.before), d, dataset.n_labels, "v")
                part.fill(matrix)
        if state is not None and not job.begins:
            self._going = Going(**state.progress())

    @property
    def _v(self) -> str:
        """The matrix that the next gradient is taken at."""
        return "v" if self._p.algorithm == "fista" else self._w

    def _do(self, jobs: list[Job]) -> Phases:
        going, job = self._going, self._job
        name = f"lam {job.stage.lam:g}, step {going.step + 1}"
        receipts = yield Phase(name, jobs, f"descending at {name}", kept=False, unit="segment", number=job.number + 1)
        for name in self._sums:
            self._sums[name] += sum(receipt.get(name, 0) for receipt in receipts)
        return receipts

    def _parts(self, kind: Any, rows: bool, *more: Any) -> list[Job]:
        job = self._job
        cuts = job.sizes.row_cuts if rows else job.sizes.feature_cuts
        return [kind(job.data, job.stage, job.sizes, self._going.step, first, last, *more) for first, last in cuts]

    def _scores(self, name: str) -> Phases:
        """The losses at a matrix, without 1/N; the array is then of it."""
        if self._array_of != name:
            receipts = yield from self._do(self._parts(ScoresJob, True, name))
            self._array_of, (self._losses,) = name, total_of(receipts)
            self._going.passes += 1
        return self._losses / self._n

    def _gradient(self) -> Phases:
        yield from self._do(self._parts(GradientJob, False, self._g))
        self._going.passes += 1

    def _step(self, length: float) -> Phases:
        receipts = yield from self._do(self._parts(StepJob, False, length, self._v, self._g, self._w, self._next))
        if self._array_of == self._next:
            self._array_of = ""
        largest = max(line[LARGEST] for receipt in receipts for line in receipt["sums"])
        sums = total_of(receipts)
        sums[LARGEST] = largest
        return sums

    def loop(self, steps: int) -> Phases:
        """So many steps, or until the stage is done."""
        going, p = self._going, self._p
        of = {"fista": self._fista, "sparsa": self._sparsa, "fobos": self._fobos}[p.algorithm]
        end = going.step + steps
        if not self._job.before:
            loss = yield from self._scores(self._v)
            going.history.append({"passes": 0, "objective": loss, "violation": None, "n_selected": 0})
        while not going.done and going.step < end:
            sums = yield from of()
            if not going.step:
                going.first = max(going.first, sums[VIOLATION])
                for entry in going.history:
                    entry["violation"] = sums[VIOLATION]
            going.step += 1
            over = going.passes >= p.max_passes or not math.isfinite(sums[PENALTY])
            going.done = over or sums[VIOLATION] <= p.tol * going.first
            if going.done or going.step == end or going.step & (going.step - 1) == 0:
                loss = yield from self._scores(self._w)
                going.history.append(
                    {
                        "passes": going.passes, "objective": loss + sums[PENALTY], "violation": sums[VIOLATION],
                        "n_selected": int(sums[KEPT]),
                    }
                )  # fmt: skip
        last = going.history[-1]
        return {
            "going": asdict(going), "files": {"w": self._w, "v": self._v}, "done": going.done, "objective": last["objective"],
            "first": going.first, "stage_passes": going.passes, "violation": last["violation"],
            "history": going.history if going.done else [], **self._sums,
        }  # fmt: skip

    def _fista(self) -> Phases:
        going = self._going
        at_v = yield from self._scores(self._v)
        yield from self._gradient()
        if self._p.line_search:
            going.length *= _EASED
        for _ in range(_MOST_TRIES):
            sums = yield from self._step(going.length)
            if not self._p.line_search:
                break
            loss = yield from self._scores(self._next)
            bound = at_v + sums[LINEAR] + 0.5 * going.length * sums[SQUARE]
            if loss <= bound + _ROUNDING * abs(at_v):
                break
            going.length *= 2.0
        t = 1.0 if sums[BACK] > 0 else going.t
        going.t = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * t * t))
        beta = (t - 1.0) / going.t
        yield from self._do(self._parts(MomentumJob, False, beta, self._next, self._w, self._v))
        self._array_of = "" if self._array_of == self._v else self._array_of
        self._w, self._next = self._next, self._w
        return sums

    def _sparsa(self) -> Phases:
        going = self._going
        loss = yield from self._scores(self._w)
        self._g, self._old_g = self._old_g, self._g
        yield from self._gradient()
        if self._fresh:
            names = (self._w, self._next, self._g, self._old_g)
            square, along = total_of((yield from self._do(self._parts(ChangeJob, False, names))))
            if square > 0:
                going.length = min(max(along / square, going.length * 1e-3, 1e-12), 4.0 * self._job.constant)
        self._fresh = True
        length = going.length
        for _ in range(_MOST_TRIES):
            sums = yield from self._step(length)
            after = yield from self._scores(self._next)
            value = after + sums[PENALTY]
            # the first step is by the constant that always works
            if not going.last or value <= max(going.last) - 0.5 * _FALL * length * sums[SQUARE] + _ROUNDING * abs(loss):
                break
            length *= 2.0
        going.length = length
        going.last = [*going.last, value][-_MEMORY:]
        self._w, self._next = self._next, self._w
        return sums

    def _fobos(self) -> Phases:
        going = self._going
        yield from self._scores(self._w)
        yield from self._gradient()
        eta = self._p.eta or 4.0 / self._job.constant
        sums = yield from self._step(math.sqrt(going.step + 1.0) / eta)
        self._w, self._next = self._next, self._w
        return sums
