"""PD-Sparse as a method: see `methods.contract`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.linear.weights import finalise_key
from xmc_stream.methods.contract import Forecast, Method, Redo, Task
from xmc_stream.pdsparse.jobs import PassProbe
from xmc_stream.pdsparse.memory import MOST_FORESEEN, Data, PassPlan, most_tables, pass_needs, plan_pass
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.run import PDSparseRun, most_passes
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few


@dataclass
class PassForecaster(Forecaster):
    """At most so many passes; its tables grow as they are needed."""

    task: Task
    once: Callable[[Job], Receipt]
    _known: Receipt | None = None

    def check(self, plan: MemoryPlan) -> None:
        """Whether a group of rows fits, and tables as large as a probe says, as far as it can say that."""
        dataset, parameters = self.task.dataset, self.task.parameters
        sizes = self._sizes(plan)
        if not sizes.dense:
            probe = self._probe(sizes)
            tables = max(probe["tables"], 2 * sizes.tables * probe["full"])
            tables = min(tables, most_tables(dataset, parameters), MOST_FORESEEN)
            needs = {**pass_needs(dataset, parameters), "dual variables": sizes.dual, "tables": tables}
            if sizes.tables < tables:
                plan.refuse_unless(needs, "PD-Sparse")

    def _sizes(self, plan: MemoryPlan) -> PassPlan:
        """What a segment may hold; a post-solve has tables in any case."""
        sizes, parameters = plan_pass(plan, self.task.dataset, self.task.parameters), self.task.parameters
        return replace(sizes, dense=sizes.dense and not parameters.post_solve)

    def _probe(self, sizes: PassPlan) -> Receipt:
        """What a probe says. Of tables it says the same within every plan that has room for them."""
        if self._known is None or sizes.dense:
            data = Data(str(self.task.dataset.path), "", self.task.parameters, self.task.seed, sizes)
            receipt = self.once(PassProbe(data))
            if sizes.dense or receipt["full"]:
                return receipt
            self._known = receipt
        return self._known

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """By a probe of the first rows."""
        self.check(plan)
        dataset, parameters, sizes = self.task.dataset, self.task.parameters, self._sizes(plan)
        probe = self._probe(sizes)
        tables = 8 * dataset.n_features * dataset.n_labels if sizes.dense else min(sizes.tables, probe["tables"])
        passes = most_passes(parameters, dataset.n_samples)
        n_bytes = passes * (dataset.X_rows().nnz * 8 + dataset.Y_rows().nnz * 4)
        return {
            "passes": passes,
            "at_most": True,
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "peak_phase": "pass",
            "peak_parts": {**pass_needs(dataset, parameters), "tables, about": tables},
            "seconds": round(passes * probe["seconds"] * dataset.n_samples, 1),
            "threads": 1,
        }


@dataclass(frozen=True)
class PDSparseWarmUp(WarmUp):
    """Foresee a training by PD-Sparse on a few rows, and train."""

    def load(self) -> None:
        with a_few_rows() as dataset:
            p = PDSparseParameters(max_passes=2, held_out=0.3, post_solve=True)
            PassForecaster(Task(dataset, p, 0), lambda job: job.run()).forecast(MemoryPlan(2**40, 256 * MIB, 1))
            train_a_few(PDSparseRun, dataset, "model", p)


class PDSparseMethod(Method):
    """Max-margin learning of all classes at once (Yen et al. 2016)."""

    parameters = PDSparseParameters
    runs = PDSparseRun
    reported = (
        "rounds", "lam", "best_pass", "held_out_P@1", "held_out_P@3", "held_out_P@5", "n_learned", "n_held_out", "n_skipped",
        "history",
    )  # fmt: skip
    one_by_one = True

    def has_zero(self, parameters: Any) -> bool:
        """No: losses compare the labels of a row."""
        return False

    def decides(self, parameters: Any) -> bool:
        """By the rows that say when to stop."""
        return bool(parameters.held_out > 0)

    def warm_up(self, task: Task) -> Job:
        """Train on a few rows."""
        return PDSparseWarmUp()

    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> PassForecaster:
        """It probes when it is asked for a forecast."""
        return PassForecaster(task, once)

    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """Units by finalise, the weights of all by a job of its own; for passes see `redo`."""
        kind, name = folder.parts[-2:]
        if kind == "units":
            return finalise_key(name)
        return "weights" if kind == "weights" else None

    def sealed(self, folder: Path) -> bool:
        """Passes are."""
        return pass_of(folder.parent.name) is not None

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """Where passes are damaged, all from the first of them on is done again."""
        passes = {of: damage for folder, damage in damaged.items() if (of := pass_of(folder.parent.name)) is not None}
        others = {folder: damage for folder, damage in damaged.items() if pass_of(folder.parent.name) is None}
        found = super().redo(work, others, keys, warm_start)
        if passes:
            (stage, number), segments, folders = segments_again(work, passes, keys)
            found.append(Redo(passes[min(passes)], f"pass/{stage}/{number}", undo=segments, remove=folders))
        return found

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """Which pass is the best, and how near to the optimum it is."""
        held_out = report.get("held_out_P@1")
        said = "" if held_out is None else f", P@1 {held_out:.2f} on {report['n_held_out']:,} rows held out"
        skipped = f"; {report['n_skipped']:,} rows without labels, or with all, left out" if report["n_skipped"] else ""
        return [
            f"lam {report['lam']:g}, the best of {report['rounds']} passes is number {report['best_pass']}{said}{skipped}",
            f"objective {report['objective']:.6g}, within {100 * report['duality_gap']:.2g} % of its optimum",
        ]


def pass_of(kind: str) -> tuple[int, int] | None:
    """Stage and pass of PD-Sparse that a folder of state has its name from, if so."""
    found = re.fullmatch(r"(?:dual|tables)-(\d+)-(\d+)", kind)
    return None if found is None else (int(found[1]), int(found[2]))


def segments_again(
    work: Path, damaged: Iterable[tuple[int, int]], keys: Iterable[str]
) -> tuple[tuple[int, int], list[str], list[Path]]:
    """Where some passes are damaged: stage and pass that PD-Sparse goes back to the beginning of, segments to undo, folders
    to remove.

    That is behind the last pass before all damage, of its stage, whose files are all there (some are gone: what none goes
    on from is not kept), or else the stage's beginning: it begins from nothing, or from a pass of an earlier one.
    keys: of all jobs that are done.
    """
    done: dict[tuple[int, int], list[str]] = {}
    for key in keys:
        if found := re.fullmatch(r"(?:pass|look)/(\d+)/(\d+)/\d+", key):
            done.setdefault((int(found[1]), int(found[2])), []).append(key)
    stage, number = min(damaged)
    while number and not _is_there(work, done.get((stage, number - 1), [])):
        number -= 1
    to = stage, number
    undone = [key for of, some in done.items() if of >= to for key in some]
    folders = [f for f in work.glob("state/*") if (of := pass_of(f.name)) is not None and of >= to]
    return to, undone, folders


def _is_there(work: Path, keys: Iterable[str]) -> bool:
    """Whether the files are all there that the jobs of a pass left, the tables being those of its last segment."""
    parts = [key.split("/") for key in keys if key.startswith("pass/")]
    segments = sorted((int(first), f"{stage}-{number}") for _, stage, number, first in parts)
    needed = [work / "state" / f"dual-{of}" / f"{first:06d}" for first, of in segments]
    needed += [work / "state" / f"tables-{of}" / f"{first:06d}" for first, of in segments[-1:]]
    return bool(segments) and all(folder.exists() for folder in needed)
