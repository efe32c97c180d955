"""MEMOIR as a method: see `methods.contract`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.errors import InputError
from xmc_stream.factors.factors import FACTORS
from xmc_stream.factors.products import Learned
from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.linear.weights import finalise_key
from xmc_stream.memoir.learners import state_path
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.plan import most_vectors, plan_steps, resolved, shares, steps_needs
from xmc_stream.memoir.reduction import Reduction, vectors_path
from xmc_stream.memoir.run import SEGMENTS, MEMOIRRun
from xmc_stream.methods.contract import Forecast, Method, Redo, Task
from xmc_stream.models.runs import filter_pairs, no_predictions
from xmc_stream.runtime.job import Job, Notes, Receipt
from xmc_stream.runtime.plan import Forecaster, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few

# nanoseconds of a draw, and more for each class (`benchmarks/memoir.py growth`)
_SEARCH_NS = {"exact": (70e3, 2.0), "sw-graph": (200e3, 1.0), "simple-lsh": (15e3, 0.6)}
_DENSE_NS, _SCORE_NS = (5e3, 5.0), 5.0


@dataclass(frozen=True)
class MEMOIRForecaster(Forecaster):
    """At most so many steps. The vectors of classes grow as they are needed."""

    task: Task

    def check(self, plan: MemoryPlan) -> None:
        """Whether a batch fits, beside some vectors, and a column of the SVD."""
        p = resolved(self.task.parameters, self.task.dataset)
        plan_steps(plan, self.task.dataset, p)
        if p.variant == "lsh":
            self._svd(plan, p).foreseen()

    def _svd(self, plan: MemoryPlan, p: MEMOIRParameters) -> Reduction:
        learned = Learned.of(self.task.dataset, 0.0, self.task.seed, p.bias)
        return Reduction(learned, p.rank, Path(), plan, Notes())

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Without a probe."""
        dataset, p = self.task.dataset, resolved(self.task.parameters, self.task.dataset)
        X, Y = dataset.X_rows(), dataset.Y_rows()
        steps, draws = p.most_steps, p.draws
        sizes = plan_steps(plan, dataset, p)
        passes = steps * draws / max(dataset.n_samples, 1)
        needs = steps_needs(dataset, p, plan.threads)
        grown = min(sizes.vectors, most_vectors(dataset, p)) if p.variant != "lsh" else 0
        draw, each = _DENSE_NS if (p.variant, p.oracle) == ("lsh", "exact") else _SEARCH_NS[p.oracle]
        held_out = SEGMENTS * shares(dataset, p) * dataset.n_samples * dataset.n_labels * _SCORE_NS
        parts = {**needs, **({"vectors of classes, at most": grown} if grown else {})}
        phase, n_bytes = "steps", int(passes * (X.nnz * X.entry_bytes + 4 * Y.nnz))
        if p.variant == "lsh":
            more, read, held = self._svd(plan, p).foreseen()
            passes, n_bytes = passes + more, int(passes * 4 * (p.rank * dataset.n_samples + Y.nnz)) + read
            if held > sum(parts.values()):
                phase, parts = "truncated SVD", {"columns of V": held}
        return {
            "passes": round(passes, 2),
            "at_most": True,
            "bytes_read": n_bytes,
            "bytes_streamed": 0,
            "bytes_gathered": n_bytes,
            "peak_phase": phase,
            "peak_parts": parts,
            "seconds": round(1e-9 * (steps * draws * (draw + each * dataset.n_labels) + held_out), 1),
        }


@dataclass(frozen=True)
class MEMOIRWarmUp(WarmUp):
    """Train on a few rows, as the run will."""

    variant: str
    oracle: str

    def load(self) -> None:
        p = MEMOIRParameters(variant=self.variant, oracle=self.oracle, steps=2, batch=8, rank=4, truncate=1e-3)
        with a_few_rows() as dataset:
            # where rows have several labels
            fold_top_k(np.zeros((1, 1), np.float32), 0, filter_pairs(), *no_predictions(1, 1))
            train_a_few(MEMOIRRun, dataset, "memoir", p)


class MEMOIRMethod(Method):
    """Multi-class SVM with inexact margins (MEMOIR 2018)."""

    parameters = MEMOIRParameters
    runs = MEMOIRRun
    reported = ("steps", "best_step", "held_out_accuracy", "held_out_macro_F1", "held_out_n_held_out", "history")
    one_by_one = True

    def has_zero(self, parameters: Any) -> bool:
        """No: losses compare the labels of a row."""
        return False

    def decides(self, parameters: Any) -> bool:
        """By the rows that say when to stop."""
        return bool(parameters.held_out > 0)

    def kind_of(self, parameters: Any) -> str:
        """Low-rank for lsh."""
        return "low-rank" if parameters.variant == "lsh" else "linear"

    def check(self, task: Task) -> None:
        """There are two classes at least."""
        super().check(task)
        if task.dataset.n_labels < 2:
            raise InputError(f"{task.dataset.path} has one label: MEMOIR learns labels against each other")

    def warm_up(self, task: Task) -> Job:
        """Train on a few rows."""
        return MEMOIRWarmUp(task.parameters.variant, resolved(task.parameters, task.dataset).oracle)

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> MEMOIRForecaster:
        """From sizes alone."""
        return MEMOIRForecaster(task)

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Units and factors by finalise; for steps and the SVD see `redo`."""
        if folder == work / FACTORS:
            return "finalise"
        return finalise_key(folder.name) if folder.parent.name == "units" else None

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """Where W or the SVD is damaged, all steps, or these and the SVD, are done again."""
        keys, state = list(keys), work / "state"
        damage = {folder: said for folder, said in damaged.items() if state in folder.parents}
        found = super().redo(work, {f: said for f, said in damaged.items() if f not in damage}, keys, warm_start)
        for folder in needed(work, keys):
            if not folder.exists():
                damage.setdefault(folder, f"{folder} is missing")
        if damage:
            reduced = any(folder.relative_to(state).parts[0] != "steps" for folder in damage)
            undone = [key for key in keys if key.startswith(("steps/", "reduce/") if reduced else "steps/")]
            key = "reduce/start" if reduced else "steps/0/0"
            folders = [state] if reduced else [state / "steps"]
            found.append(Redo(next(iter(damage.values())), key, undo=undone, remove=folders))
        return found

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """Which step is the best."""
        f1 = report.get("held_out_macro_F1")
        said = "" if f1 is None else f": macro-F1 {f1:.2f}, accuracy {report['held_out_accuracy']:.2f} on rows held out"
        return [f"{report['steps']} steps, the best is number {report['best_step']}{said}"]


def needed(work: Path, keys: Iterable[str]) -> list[Path]:
    """What the last steps that are done left, and the last V of the SVD."""
    steps: list[tuple[int, int]] = []
    turns: list[int] = []
    for key in keys:
        kind, *place = key.split("/")
        if kind == "steps":
            steps.append((int(place[0]), int(place[1])))
        elif kind == "reduce" and place[-1] == "turn":
            turns.append(int(place[0]))
    last = [state_path(work, *max(steps))] if steps else []
    return last + ([vectors_path(work, max(turns))] if turns else [])
