"""FISTA, SpaRSA and FOBOS: steps along the whole gradient of the losses, for a stage of a training.

    W' = prox(V - g(V) / L, P / L)

FISTA (Beck, Teboulle 2009): V = W + beta (W - W of before); L falls a little, then doubles until the losses are below their
quadratic bound, or is the constant; V begins anew at W where it points away from the step. SpaRSA (Wright et al. 2009): V = W;
L is that of Barzilai and Borwein, doubled until F falls enough below the largest of the last few. FOBOS (Duchi, Singer 2009):
1/L = eta / sqrt(t).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.grouplasso.arrays import InFile
from xmc_stream.grouplasso.descent import Segment
from xmc_stream.grouplasso.gradient import (
    ChangeJob,
    GradientJob,
    MomentumJob,
    ScoresJob,
    StepJob,
    losses_of,
    total_of,
)
from xmc_stream.grouplasso.kernels.descent import BACK, KEPT, LARGEST, LINEAR, PENALTY, SQUARE, VIOLATION
from xmc_stream.grouplasso.plan import GradientPlan, feature_run, is_small, step_work, width_of
from xmc_stream.grouplasso.solver import problem_of
from xmc_stream.grouplasso.state import State, write_state
from xmc_stream.runtime.job import Job, Notes, Phase, Receipt, run_here
from xmc_stream.store.dataset import Dataset

STEPS_WORK = 1 << 32  # entries times lines' width of a segment's steps, about: a few seconds; a step at least
_EASED = 0.9  # of FISTA: what L falls by between steps, as the curvature does where rows are past their margins
_MEMORY = 5  # of SpaRSA: values of F that the next one may lie between
_FALL = 1e-4  # of SpaRSA: what F must fall by, in L/2 ||W' - W||^2
_ROUNDING = 1e-7  # of F, as float32 arrays have it: below it nothing is compared
_MOST_TRIES = 60

Phases = Generator[Phase, list[Receipt], Any]


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

    As one job, it does the jobs of all phases itself; else `loop` yields them and `StoreJob` ends it.
    """

    sizes: GradientPlan
    constant: float

    @property
    def small(self) -> bool:
        """Whether it is one job."""
        return is_small(Dataset(self.data.path))

    def run(self) -> Receipt:
        """All phases, one after another."""
        receipt: Receipt = run_here(self.loop(), Notes())
        return StoreJob(self, receipt).run() | {name: receipt[name] for name in ("passes", "bytes_read")}

    def loop(self) -> Phases:
        """Phases of jobs, none of them kept; returns a receipt without what is stored."""
        steps = max(1, STEPS_WORK // (3 * step_work(Dataset(self.data.path))))
        return (yield from _Steps(self).loop(steps))


@dataclass(frozen=True)
class StoreJob:
    """Store what steps left in files of the scratch."""

    of: StepsJob
    receipt: Receipt

    @property
    def key(self) -> str:
        """That of the steps."""
        return self.of.key

    def run(self) -> Receipt:
        """Write W, and the point where the next gradient is taken."""
        data, going = self.of.data, self.receipt["going"]
        dataset = Dataset(data.path)
        d, width, run = dataset.n_features, width_of(dataset.n_labels), feature_run(dataset)
        parts = {}
        for name in ("w", "v"):
            matrix = InFile(data.scratch(self.receipt["files"][name]), d, width, fresh=False)
            kept = [low + np.flatnonzero(matrix.read(low, min(low + run, d)).any(axis=1)) for low in range(0, d, run)]
            parts[name] = matrix, np.concatenate(kept)
        write_state(self.of.out, parts, dataset.n_labels, np.zeros(d, np.uint8), going)
        beside = ("going", "files", "passes", "bytes_read")  # what was read is counted with the jobs that did
        said = {key: value for key, value in self.receipt.items() if key not in beside}
        return {**said, "n_selected": len(parts["w"][1])}


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
        self._w, self._v, self._next, self._g, self._old_g = "w", "v", "next", "g", "old-g"
        if self._p.algorithm != "fista":
            self._v = self._w
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
            self._array_of, self._losses = name, losses_of(receipts)
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
        sums = total_of(receipts, "sums")
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
        self._advance()
        return sums

    def _advance(self) -> None:
        """The next W is W."""
        self._w, self._next = self._next, self._w
        if self._p.algorithm != "fista":
            self._v = self._w

    def _sparsa(self) -> Phases:
        going = self._going
        loss = yield from self._scores(self._w)
        self._g, self._old_g = self._old_g, self._g
        yield from self._gradient()
        if self._fresh:
            names = (self._w, self._next, self._g, self._old_g)
            square, along = total_of((yield from self._do(self._parts(ChangeJob, False, names))), "sums")
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
        self._advance()
        return sums

    def _fobos(self) -> Phases:
        going = self._going
        yield from self._scores(self._w)
        yield from self._gradient()
        eta = self._p.eta or 4.0 / self._job.constant
        sums = yield from self._step(math.sqrt(going.step + 1.0) / eta)
        self._advance()
        return sums
