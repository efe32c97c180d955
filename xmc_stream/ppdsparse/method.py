"""PPDSparse as a method, see `methods.contract`, and the loading of its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.linear.guide import GUIDE
from xmc_stream.linear.implied import IMPLIED, implied_of
from xmc_stream.linear.kernels.scores import in_fours
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.weights import cut_units, finalise_key
from xmc_stream.methods.contract import Forecast, Method, Redo, Step, Task
from xmc_stream.methods.start import STARTED, check_start
from xmc_stream.methods.weights import refuse_tree
from xmc_stream.ppdsparse.forecast import PPDSparseForecaster, refuse_too_many_classes
from xmc_stream.ppdsparse.parameters import PATIENCE, PPDSparseParameters
from xmc_stream.ppdsparse.plan import longest_of, solve_plan
from xmc_stream.ppdsparse.probe import ProbeJob
from xmc_stream.ppdsparse.problem import (
    LossWeights,
    Problem,
    check_weights,
    guide_weight,
    implied_margin,
    settled,
    takes_all_rows,
)
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.search import search_in_fours
from xmc_stream.ppdsparse.solver import has_dense_rows, row_order
from xmc_stream.ppdsparse.start import last_solve, path_of
from xmc_stream.ppdsparse.streaming import stream_a_few
from xmc_stream.runtime.job import Job, Ledger, Notes, Receipt, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.matrix import Block
from xmc_stream.store.model import begin_model, finish_model, model_attributes

_NEAR = 0.05  # a mean gap over the objective from which on a default run has not gone as far as it should


class PPDSparseMethod(Method):
    """Class-separable primal-dual sparse learning (Yen et al. 2017)."""

    parameters = PPDSparseParameters
    reported = ("duality_gap_mean", "violation", "n_open", "n_empty", "rounds", "C", "positive_weight", STARTED)

    def check(self, task: Task) -> None:
        """A warm start needs weights by class, of the same features; `class_weight` what it speaks of."""
        refuse_tree(task.given, self.name)
        check_weights(task.parameters, task.dataset, task.given)
        start = task.warm_start
        if start is None:
            return
        if start.kind != self.kind:
            raise InputError(f"{start.path} is a {start.kind} model, which has no weights by class to begin from")
        check_start(cast("LinearModel", start), task.dataset)

    def path(self, settings: Sequence[PPDSparseParameters]) -> list[Step]:
        """Warm starts between neighbours."""
        return path_of(settings)

    def warm_up(self, task: Task) -> Job:
        """Train on a few rows, with a large class where there may be one, and what else the training has."""
        of_rounds = PPDSparseWarmUp.of(task)
        begins = task.warm_start is None or task.start_state is not None
        if not begins or not takes_all_rows(task.parameters, task.dataset):
            return of_rounds
        # groups of labels are solved by themselves
        return replace(of_rounds, large=False, dense=of_rounds.dense and of_rounds.guided, fours=False, all_rows=True)

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> PPDSparseForecaster:
        """Solve some classes and score some rows within the plan, and spread what was seen over all classes."""
        dataset, start = task.dataset, cast("LinearModel | None", task.warm_start)
        refuse_too_many_classes(plan, dataset)
        plan = replace(plan, longest=longest_of(dataset))
        parameters = settled(task.parameters, dataset)
        if task.start_state is not None:
            start, parameters = None, parameters.carried()
        if start is not None:
            parameters = replace(parameters, all_rows=False)
        weights = LossWeights.of(parameters.class_weight, dataset.n_samples, task.given, Path())
        _, sizes = solve_plan(dataset, plan, parameters, start is not None, cut_units(dataset), weights.of_samples)
        probe = once(ProbeJob(Problem(str(dataset.path), parameters, task.seed, plan, weights), sizes))
        return PPDSparseForecaster(dataset, parameters, probe, start, task.start_state is not None, task.given)

    def run(self, task: Task, work: Path, plan: MemoryPlan, ledger: Ledger, foreseen: Forecast) -> PPDSparseRun:
        """As many class blocks as were foreseen, or more."""
        start = "" if task.warm_start is None else str(task.warm_start.path.absolute())
        carried = ""
        if task.start_state is not None:
            start, carried = "", str(last_solve(task.start_state).absolute())
        blocks = tuple(foreseen["class_blocks"])
        return PPDSparseRun(
            task.dataset,
            work,
            task.parameters,
            task.seed,
            plan,
            ledger,
            start,
            blocks,
            carried,
            foreseen["phase_seconds"],
            task.given,
            replace(PPDSparseWarmUp.of(task), guided=False, lifts=False),
        )

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Units by finalise, groups of labels by a job of their own, state by searches and solves."""
        kind, name = folder.parts[-2:]
        if name in (GUIDE, IMPLIED):
            return name
        if kind == "units":
            return finalise_key(name)
        if kind == "match":
            return kind
        found = re.fullmatch(r"(search|solve)-(-?\d+)", kind)
        if found is None:
            return None
        what, round_ = found[1], int(found[2])
        if what == "search":
            return f"search/{round_}/{name.replace('.', '/')}"
        if round_ == -1:
            return f"start/{name}"
        unit = name.partition(".")[0]  # of a share, or its own
        before = work / "state" / f"solve-{round_ - 1}" / unit
        joined = name != unit and (folder.parent / unit).exists()  # nobody needs the state of this share any more
        return f"solve/{round_}/{name}" if before.exists() or joined or (round_ == 0 and not warm_start) else None

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """A unit that was joined is solved again in all its shares: their states went when they were joined."""
        keys = list(keys)
        found: list[Redo | str] = []
        for one in super().redo(work, damaged, keys, warm_start):
            if isinstance(one, Redo) and one.key.startswith("solve/"):
                one = replace(one, undo=[*one.undo, *(key for key in keys if key.startswith(f"{one.key}."))])
            found.append(one)
        return found

    def totals(self, receipts: Iterable[tuple[str, Receipt]], parameters: PPDSparseParameters) -> dict[str, int]:
        """Blocks of a search; passes of solves; multiply-adds of all searches, and of as many exact ones, if approximate."""
        blocks: dict[str, int] = {}
        solve_passes = class_blocks = 0
        work = {"search": 0, "solve": 0}
        for key, receipt in receipts:
            kind = key.partition("/")[0]
            solve_passes += receipt.get("solve_passes", 0)
            class_blocks = max(class_blocks, receipt.get("class_blocks", 0))
            if kind == "search":
                searched = key.rsplit("/", 1)[0]
                blocks[searched] = blocks.get(searched, 0) + receipt["row_blocks"]
            if kind in work and not key.startswith("search/0/"):  # which a warm start begins with
                work[kind] += receipt.get("work", 0)
        sums = {
            "solve_passes": solve_passes,
            "class_blocks": class_blocks,
            "row_blocks": max(blocks.values(), default=0),
        }
        if parameters.approximate:
            sums |= {"search_work": work["search"], "search_work_exact": work["solve"]}
        return sums

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """How near to the optimum the classes are, and what to do to come nearer."""
        lines = [
            f"objective {report['objective']:.6g}: within {_percent(report['duality_gap_mean'])} of its optimum on average, "
            f"{_percent(report['duality_gap'])} for the worst class",
            _advice(report),
        ]
        work, exact = report.get("search_work"), report.get("search_work_exact")
        return [*lines, *([f"searches did {work / exact:.0%} of the exact multiply-adds"] if work and exact else [])]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _advice(report: Mapping[str, Any]) -> str:
    """Whether the classes are trained far enough, and what to set if not."""
    n_open, tol = report["n_open"], report["params"]["tol"]
    if not n_open:
        return f"every class is within tol ({tol:g}): there is nothing to gain from more rounds"
    if report["params"]["max_rounds"] is None:
        most = PPDSparseParameters.of(report["params"]).epochs_of(report["rounds"])
        return (
            f"{n_open:,} classes are not within tol ({tol:g}) and came no nearer: their gap did not halve in {PATIENCE} "
            f"rounds of {most:,} epochs; if that is too far, scale the rows (xmc-stream convert --normalize l2), or take a "
            "smaller C"
        )
    if report["duality_gap_mean"] <= _NEAR:
        return "trained as far as it pays; " + flags.SET + "max_rounds=none goes on until every class is within tol"
    return (
        f"that is farther than usual after {report['rounds']} rounds: " + flags.SET + "max_rounds=none goes on, "
        "and rows of length one (xmc-stream convert --normalize l2) or a smaller C need fewer"
    )


@dataclass(frozen=True)
class PPDSparseWarmUp(WarmUp):
    """Train on a few rows.

    parameters: whose options are used; again: with a warm start too; large: with a class whose rows stream by; guided: with
    groups of labels; dense: for rows that have most features, and fours: which are scored four at a time; lifts: with implied
    labels; all_rows: of classes that begin with all rows, one round and no more (which takes a third of the time to compile).
    """

    parameters: PPDSparseParameters = field(default_factory=PPDSparseParameters)
    again: bool = False
    large: bool = False
    guided: bool = False
    dense: bool = False
    fours: bool = False
    lifts: bool = False
    all_rows: bool = False

    @classmethod
    def of(cls, task: Task) -> PPDSparseWarmUp:
        """Of a training whose classes have active sets."""
        p, d = task.parameters, task.dataset
        shape, nnz = (d.n_samples, d.n_features), d.X_rows().nnz
        return cls(
            p,
            again=task.warm_start is not None and task.start_state is None,
            large=d.n_samples > row_order(d.n_samples, nnz).large,
            guided=guide_weight(p, d) > 0,
            dense=has_dense_rows(*shape, nnz),
            fours=in_fours(*shape, nnz),
            lifts=implied_margin(p, d) is not None,
        )

    @property
    def seconds(self) -> float:
        """Searches and active sets have the largest kernels."""
        return 6.0 if self.all_rows else 25.0

    @property
    def loads(self) -> str:
        p, own = (
            self.parameters,
            (self.again, self.large, self.guided, self.dense, self.fours, self.lifts, self.all_rows),
        )
        return f"ppdsparse {own, p.cut > 0, p.delta > 0, p.min_value > 0}"

    def load(self) -> None:
        with a_few_rows(d=6 if self.dense else 12) as dataset:  # of which a row has four
            path = Path(dataset.path).parent
            work = path / "model.partial"
            begin_model(work)
            # class 0 has more active rows than a batch may have, class 1 fewer: both ways of solving are loaded;
            # and it wants more rows than an interval has
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(solve_rows=8, interval=16)), Notes()
            of = self.parameters
            p = PPDSparseParameters(
                C=1.0, positive_weight=1.0, cut=of.cut, delta=of.delta, min_value=of.min_value, guide=float(self.guided),
                implied=1.0 if self.lifts else None, all_rows=self.all_rows, max_rounds=1 if self.all_rows else 6,
            )  # fmt: skip
            result = run_here(PPDSparseRun(dataset, work, p, 0, plan, notes).loop(), notes)
            if self.fours and not self.dense:
                search_in_fours(p)
            if self.large:
                stream_a_few(dataset, p, self.again)
            if self.lifts:  # a row of these has one label, which implies none
                two = Block(0, np.array([0, 2]), np.arange(2, dtype=np.int32), None)
                implied_of(lambda: [two], 0, np.ones(2, np.int64))
            if self.again:
                finish_model(work, path / "model", model_attributes(dataset, p.solver, p.to_dict(), 0, result))
                begin_model(work)
                notes = Notes()
                run_here(PPDSparseRun(dataset, work, p, 0, plan, notes, str(path / "model")).loop(), notes)
