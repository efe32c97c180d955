"""The label tree as a method: see `methods.contract`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.errors import InputError
from xmc_stream.linear.implied import IMPLIED
from xmc_stream.methods.contract import Forecast, Method, Redo, Task
from xmc_stream.methods.start import STARTED
from xmc_stream.methods.weights import check_given
from xmc_stream.runtime.job import Job, Ledger, Receipt
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few
from xmc_stream.tree.forecast import TreeForecaster
from xmc_stream.tree.given import check_tree, given_tree
from xmc_stream.tree.guide import groups_path
from xmc_stream.tree.kernels.vectors import nearest
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.run import TreeRun, key_of_state, made_from
from xmc_stream.tree.start import refuse_start


@dataclass(frozen=True)
class TreeWarmUp(WarmUp):
    """Train on a few rows, as the run will."""

    @property
    def loads(self) -> str:
        """Whatever the parameters."""
        return "label tree"

    def load(self) -> None:
        """A tree of two levels of nodes."""
        with a_few_rows(n=120, k=20, several=True) as dataset:
            p = TreeParameters(max_leaf=5, root=2, branching=2)
            train_a_few(TreeRun, dataset, "tree", p)
        nearest(np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32))  # of a warm start


class TreeMethod(Method):
    """The label tree (Parabel 2018, Bonsai 2020, XR-Linear 2022)."""

    parameters = TreeParameters
    runs = TreeRun
    kind = "tree"
    reported = ("C", "C_tried", "gaps", STARTED)

    def check(self, task: Task) -> None:
        """Weights are as many as rows and labels; a tree is there if it is said to be; a warm start has trees to keep."""
        if task.warm_start is not None:
            refuse_start(task.warm_start, self.kind, task.parameters.n_trees, task.dataset)
            if task.parameters.tree is not None:
                raise InputError("a tree is given, and a model whose trees are kept: leave one of them out")
        check_given(task.given, task.dataset, task.parameters.class_weight)
        check_tree(given_tree(task.given), task.parameters, task.dataset)

    def run(self, task: Task, work: Path, plan: MemoryPlan, ledger: Ledger, foreseen: Forecast) -> TreeRun:
        """See `Method`."""
        return TreeRun(task.dataset, work, task.parameters, task.seed, plan, ledger, task.given, task.warm_start)

    def has_zero(self, parameters: Any) -> bool:
        """No: scores compare the labels of a row."""
        return False

    def decides(self, parameters: Any) -> bool:
        """By the rows that C is chosen by."""
        return parameters.C is None

    def warm_up(self, task: Task) -> Job:
        """Train on a few rows."""
        return TreeWarmUp()

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> TreeForecaster:
        """From sizes alone."""
        return TreeForecaster(task)

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Every job leaves one thing, whose name says which."""
        name = folder.name
        if folder == work / IMPLIED:
            return IMPLIED
        if folder == groups_path(work):
            return "groups"
        if folder.parent.name == "units":
            return f"structure/{name.removeprefix('tree-')}" if name.startswith("tree-") else f"finalise/{name}"
        return key_of_state(folder)

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """With a shape or a unit all jobs whose packs it was made from: these are gone when it is written."""
        done, found = [*keys], list[Redo | str]()
        for redo in super().redo(work, damaged, done, warm_start):
            if isinstance(redo, Redo):
                redo = replace(redo, undo=[*redo.undo, *made_from(redo.key, done)])
            found.append(redo)
        return found

    def summary(self, report: Any) -> list[str]:
        """Which C was chosen, and how far from their optimum children were left."""
        gaps = ", ".join(f"{what} {mean:.2%}" for what, (mean, _) in report.get("gaps", {}).items())
        return [
            f"C {report['C']:g}" + (", chosen by rows held out" if report["C_tried"] else ""),
            *([f"mean duality gaps of a sample: {gaps} of the objective"] if gaps else []),
        ]
