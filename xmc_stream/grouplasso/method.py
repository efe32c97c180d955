"""The group lasso as a method: see `methods.contract`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.errors import InputError
from xmc_stream.grouplasso.descent import Data, SegmentJob, Stage
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.plan import DescentPlan, gradient_parts, parts_of, plan_descent, plan_gradient, width_of
from xmc_stream.grouplasso.run import GroupLassoRun, stages_of
from xmc_stream.grouplasso.solver import order_of
from xmc_stream.grouplasso.state import state_path
from xmc_stream.methods.contract import Forecast, Method, Redo, Task
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import Forecaster, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few
from xmc_stream.store.dataset import Dataset

_ROWS = 1 << 16  # whose labels are counted at a time
_ENTRY_NS, _VALUE_NS = 30.0, 1.0  # of a visit to an entry, and to a value of its line, about


@dataclass(frozen=True)
class GroupLassoForecaster(Forecaster):
    """At most so many passes for each value of lam."""

    task: Task

    def check(self, plan: MemoryPlan) -> None:
        """Whether windows fit."""
        self._parts(plan)

    def _parts(self, plan: MemoryPlan) -> tuple[dict[str, int], bool]:
        """Bytes by component, and whether the array is read in windows."""
        dataset, p = self.task.dataset, self.task.parameters
        parts: dict[str, int] = {}
        windows = False
        if p.descends or p.debias is not None:
            sizes = plan_descent(plan, dataset, p)
            parts, windows = parts_of(dataset, p, sizes), sizes.window > 0
        if not p.descends:
            steps = plan_gradient(plan, dataset)
            mine = gradient_parts(dataset, steps, plan.threads)
            parts = max(parts, mine, key=lambda some: sum(some.values()))
        return parts, windows

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Without a probe."""
        dataset, p = self.task.dataset, self.task.parameters
        X, (parts, windows) = dataset.X_rows(), self._parts(plan)
        passes = len(stages_of(p)) * p.max_passes
        n_bytes = passes * X.nnz * X.entry_bytes
        threads = 1 if p.descends else plan.threads * plan.processes
        seconds = passes * X.nnz * (_ENTRY_NS + _VALUE_NS * width_of(dataset.n_labels)) * 1e-9
        return {
            "passes": passes,
            "at_most": True,
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "peak_phase": "sweep" if p.descends else "step",
            "peak_parts": parts,
            "seconds": round(seconds * (4 if windows else 1) / threads, 1),
            **({"threads": 1} if p.descends else {}),
        }


@dataclass(frozen=True)
class GroupLassoWarmUp(WarmUp):
    """Train on a few rows: in memory, with columns in pieces and the array in a file, along the gradient."""

    def load(self) -> None:
        with a_few_rows() as dataset:
            for algorithm in ("bcd-ls", "bcd-cst", "fista"):
                p = GroupLassoParameters(algorithm=algorithm, max_passes=2)
                train_a_few(GroupLassoRun, dataset, algorithm, p)
                order_of(np.arange(3), p.draws, 0, 0, 0)
                data = Data(str(dataset.path), str(dataset.path.with_name(f"{algorithm}.partial")), p, 0)
                for entries, window in ((8, 0), (60, 60), (8, 8)) if p.descends else ():
                    SegmentJob(data, Stage(0, 1e-3), 0, "", True, -1.0, DescentPlan(entries, window, False)).run()


class GroupLassoMethod(Method):
    """Features that all classes share (Blondel et al. 2013)."""

    parameters = GroupLassoParameters
    runs = GroupLassoRun
    kind = "row-sparse"
    reported = ("lam", "n_selected", "path", "history")

    def has_zero(self, parameters: Any) -> bool:
        """Of the loss of each label by itself."""
        return bool(parameters.loss == "multitask")

    def check(self, task: Task) -> None:
        """Rows have one label where the loss needs that."""
        super().check(task)
        if task.parameters.one_label:
            refuse_two_labels(task.dataset, task.parameters.loss)

    def warm_up(self, task: Task) -> Job:
        """Train on a few rows."""
        return GroupLassoWarmUp()

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> GroupLassoForecaster:
        """From sizes alone."""
        return GroupLassoForecaster(task)

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """The model's rows by finalise; for stages see `redo`."""
        return "finalise" if folder.parent.name == "units" else None

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """Where what a segment left is damaged or gone, its stage begins again, and those after it."""
        keys = list(keys)
        stages: dict[int, str] = {}
        others = {}
        for folder, damage in damaged.items():
            if (of := re.fullmatch(r"stage-(\d+)", folder.parent.name)) is not None:
                stages[int(of[1])] = damage
            else:
                others[folder] = damage
        segments = sorted(tuple(map(int, key.split("/")[1:])) for key in keys if key.startswith("segment/"))
        for number, left in {stage: state_path(work, stage, last) for stage, last in segments}.items():
            if not left.exists():
                stages.setdefault(number, f"{left} is missing")
        found = super().redo(work, others, keys, warm_start)
        if stages:
            first = min(stages)
            undone = [key for key in keys if key.startswith("segment/") and int(key.split("/")[1]) >= first]
            undone += [key for key in keys if key.startswith("sigma/") and not first]  # what these left lies in stage 0
            folders = [f for f in work.glob("state/stage-*") if int(f.name.partition("-")[2]) >= first]
            found.append(Redo(stages[first], f"segment/{first}/0", undo=undone, remove=folders))
        return found

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """How many features are left, and the objective."""
        passes = sum(stage["passes"] for stage in report["path"])
        return [
            f"lam {report['lam']:g}, {report['n_selected']:,} features selected",
            f"objective {report['objective']:.6g} after {passes:.3g} passes over X",
        ]


def refuse_two_labels(dataset: Dataset, loss: str) -> None:
    """Raise InputError for a row of several labels."""
    Y = dataset.Y_rows()
    for first in range(0, dataset.n_samples, _ROWS):
        counts = np.diff(Y.ends(first, min(first + _ROWS, dataset.n_samples)))
        if len(counts) and counts.max() > 1:
            at = int(np.argmax(counts > 1))
            raise InputError(
                f"row {first + at} of {dataset.path} has {counts[at]} labels, and the {loss} loss is for rows of one: "
                "set loss=label-ranking or loss=multitask"
            )
