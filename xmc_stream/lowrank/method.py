"""LEML and CPLST as methods: see `methods.contract`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream.factors.rowblocks import held_bytes, most_whole
from xmc_stream.lowrank.cplst import CPLSTRun
from xmc_stream.lowrank.leml import LEMLRun, most_passes
from xmc_stream.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.lowrank.plan import lowrank_needs, plan_lowrank
from xmc_stream.methods.contract import Forecast, Method, Task
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few
from xmc_stream.store.dataset import write_observed

# of a sparse product in a second, on one thread; columns that take as long as an entry itself: guesses, for a time that is
# said to be about so long
_MULTIPLY_ADDS, _ENTRY = 1e10, 32


@dataclass(frozen=True)
class AlternationForecaster(Forecaster):
    """At most so many passes over X, each over as many columns as there are.

    steps: parameters of the W steps.
    """

    task: Task
    steps: LEMLParameters

    def check(self, plan: MemoryPlan) -> None:
        """Whether single columns fit."""
        plan_lowrank(plan, self.task.dataset, self.steps)

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Without a probe."""
        dataset, sizes = self.task.dataset, plan_lowrank(plan, self.task.dataset, self.steps)
        passes, ranges = most_passes(self.steps), len(sizes.products or sizes.col_ranges)
        work = dataset.X_rows().nnz * (self.steps.rank + _ENTRY)
        scaled, parts = int(self.steps.lam is None), lowrank_needs(plan, dataset, self.steps, *sizes.widest)
        read = (passes - scaled) * ranges * (1 - parts["rows"] / held_bytes(dataset))  # of the rows that do not stay
        n_bytes = int((1 + scaled + read) * 8 * dataset.X_rows().nnz)
        return {
            "passes": passes,
            "at_most": True,
            "column_blocks": ranges,
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "peak_phase": "W step",
            "peak_parts": parts,
            "seconds": round(passes * work / _MULTIPLY_ADDS / (plan.threads * plan.processes), 1),
        }


@dataclass(frozen=True)
class LEMLWarmUp(WarmUp):
    """Train by LEML on a few rows, over all pairs and over given ones; and over rows that are sorted by ranges of features."""

    def load(self) -> None:
        given = LEMLParameters(rank=2, alternations=2, observed="given", loss="logistic", held_out=0.3)
        with a_few_rows() as dataset:
            write_observed(dataset, dataset.Y_rows().blocks(MIB))
            # by auc, whose kernels are those of precision and more
            full = LEMLParameters(rank=2, alternations=2, held_out=0.3, criterion="auc")
            train_a_few(LEMLRun, dataset, "full", full)
            train_a_few(LEMLRun, dataset, "given", given)
        with a_few_rows(d=most_whole() + 1) as dataset:
            train_a_few(LEMLRun, dataset, "wide", LEMLParameters(rank=2, alternations=1))


class _LowRankMethod(Method):
    """What both share: state, and how a training is said of."""

    kind = "low-rank"
    reported = (
        "rounds", "lam", "best_pass", "held_out_P@1", "held_out_P@3", "held_out_P@5", "held_out_auc", "rank", "n_learned",
        "n_held_out", "history",
    )  # fmt: skip

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> AlternationForecaster:
        """From sizes alone."""
        return AlternationForecaster(task, task.parameters.steps(task.dataset.n_features, task.dataset.n_labels))

    def warm_up(self, task: Task) -> Job:
        """Train by LEML on a few rows."""
        return LEMLWarmUp()

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Of factors only those that a run begins from can be made again; all else can."""
        kind, name = folder.parts[-2:]
        what, _, number = kind.partition("-")
        if what == "factors" or not number.isdecimal():
            return "start" if kind == "factors-0" else None
        return f"{what}/{number}" if name == "all" else f"{what}/{number}/{name.replace('.', '/')}"

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """Rank, lam, the best round, metrics of held-out rows."""
        held_out = [
            f"{name} {report[f'held_out_{name}']:.4g}" for name in ("P@1", "auc") if f"held_out_{name}" in report
        ]
        said = f", {', '.join(held_out)} on {report['n_held_out']:,} rows held out" if held_out else ""
        best, rounds = report.get("best_pass", report["rounds"]), report["rounds"]
        lam = f", lam {report['lam']:.3g}" if "lam" in report else ""
        return [
            f"rank {report['rank']}{lam}, objective {report['objective']:.6g} after {best} of {rounds} rounds{said}"
        ]


class LEMLMethod(_LowRankMethod):
    """Low-rank learning of all labels at once (Yu et al. 2014)."""

    parameters = LEMLParameters
    runs = LEMLRun

    def reads_mask(self, parameters: LEMLParameters) -> bool:
        """Where only given pairs count."""
        return parameters.observed == "given"


class CPLSTMethod(_LowRankMethod):
    """The closed form of LEML's squared loss without lam (Chen, Lin 2012)."""

    parameters = CPLSTParameters
    runs = CPLSTRun
