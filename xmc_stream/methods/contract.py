"""What a method of learning is: what training, planning, estimators and commands ask of it, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from xmc_stream.arguments import seed_of
from xmc_stream.errors import InputError
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.weights import Given, refuse_tree
from xmc_stream.models.model import Model
from xmc_stream.runtime.job import Job, Ledger, Loop, Receipt
from xmc_stream.runtime.plan import Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset

Forecast = dict[str, Any]
WEIGHTS = "weights"  # in the folder of an unfinished model: what `Given.write` wrote
WRITING = "writing the model"  # the last phase of every method, in words


def state_of_trial(model: Path) -> Path:
    """Where the state of a trial lies when it has ended: beside its model."""
    return model.with_name(f"{model.name}.state")


@dataclass(frozen=True)
class Task:
    """What is to be learned.

    warm_start: the model to begin from, if there is one. trial: the model is compared with others on held-out rows and
    not kept: a method may leave out what its figures do not need, and so the report may lack what it else has. given: weights
    of samples and labels and a tree, which a run finds at WEIGHTS in its work folder too. Raises InputError for a seed that is
    none.
    """

    dataset: Dataset
    parameters: Any
    seed: int
    warm_start: Model | None = None
    trial: bool = False
    given: Given | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", seed_of(self.seed, self.parameters.label))

    @property
    def start_state(self) -> Path | None:
        """Of a trial, the state that the run of its warm start, a trial too, left; None where there is none."""
        if not self.trial or self.warm_start is None:
            return None
        state = state_of_trial(self.warm_start.path)
        return state if state.exists() else None


@dataclass(frozen=True)
class Step:
    """One training of several whose models are compared: of which setting, and the one whose model it begins from."""

    setting: int
    start: int | None = None


class Run(Protocol):
    """One training: `loop` yields phases of jobs, is sent their receipts, and returns attributes of the model."""

    def loop(self) -> Loop: ...


@dataclass
class TrainingRun:
    """What most runs are made of: what to learn from, where to (the folder of an unfinished model), within which memory.

    One that has a `__post_init__` is a dataclass too.
    """

    dataset: Dataset
    work: Path
    parameters: Any
    seed: int
    plan: MemoryPlan
    ledger: Ledger


@dataclass(frozen=True)
class Redo:
    """What is done again as a folder of state is damaged.

    damage: for the message; key: the job that it says so of. undo: keys of finished jobs that are taken out of the ledger, and
    done again. remove: folders.
    """

    damage: str
    key: str
    undo: Sequence[str] = ()
    remove: Sequence[Path] = field(default=())


class Method(ABC):
    """A method of learning. It has no state: all that a training is lies in its run and on disk.

    parameters: what they are, which says its name too. runs: makes a run of what a `TrainingRun` has. kind: of its models,
    see `models.model`. reported: names of attributes of a model that the report of a training shows. one_by_one: its jobs go
    one after another, so several trainings beside each other take less time than in turn. `MemoryPlan.parts` of them share a
    process then.
    """

    parameters: ClassVar[type[Parameters]]
    runs: ClassVar[Callable[..., Run]]
    kind: ClassVar[str] = "linear"
    reported: ClassVar[Sequence[str]] = ()
    one_by_one: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Behind `--solver`, and in models."""
        return self.parameters.solver

    def check(self, task: Task) -> None:
        """Raise InputError for a task that this method cannot learn."""
        if task.warm_start is not None:
            raise InputError(f"{self.name} takes no warm start: leave it out")
        refuse_tree(task.given, self.name)
        if task.given is not None:
            raise InputError(f"{self.name} takes no weights of samples or labels: leave them out, or use ppdsparse")

    def kind_of(self, parameters: Any) -> str:
        """The kind of model that a training makes, where that depends on its parameters."""
        return self.kind

    def has_zero(self, parameters: Any) -> bool:
        """Whether a score says by itself that a label is right, by 0 or another threshold that the model's attributes name.

        Else it only says how the labels of one row compare.
        """
        return True

    def decides(self, parameters: Any) -> bool:
        """Of a method without a zero: whether a training holds rows out, and its result says what they say of decisions.

        That is what `models.decisions.learn` returns, as DECISION, where rows have several labels.
        """
        return False

    def reads_mask(self, parameters: Any) -> bool:
        """Whether a training reads the mask of known pairs."""
        return False

    def path(self, settings: Sequence[Any]) -> list[Step]:
        """The order in which settings are tried, on the same rows, and which model each begins from.

        Each setting comes once, after the one that it begins from. Every one by itself, unless a method knows better.
        """
        return [Step(i) for i in range(len(settings))]

    @abstractmethod
    def warm_up(self, task: Task) -> Job:
        """A job that loads the kernels of a training."""

    @abstractmethod
    def forecaster(self, task: Task, plan: MemoryPlan, once: Callable[[Job], Receipt]) -> Forecaster:
        """Foresees a training. once: runs a probe, within the plan. Raises MemoryLimitError where the probe does not fit."""

    def run(self, task: Task, work: Path, plan: MemoryPlan, ledger: Ledger, foreseen: Forecast) -> Run:
        """A training into the folder of an unfinished model. foreseen: by the forecaster, for the same plan."""
        return self.runs(task.dataset, work, task.parameters, task.seed, plan, ledger)

    @abstractmethod
    def made_by(self, work: Path, folder: Path, warm_start: bool) -> str | None:
        """The key of the job that made a folder of state, or a part of the model; None where it cannot be done again."""

    def sealed(self, folder: Path) -> bool:
        """Whether a folder of state has a seal."""
        return False

    def redo(self, work: Path, damaged: Mapping[Path, str], keys: Iterable[str], warm_start: bool) -> list[Redo | str]:
        """What to do about damaged folders, or of one that nothing can be done about, the damage.

        damaged: what is wrong with each; keys: of all jobs that are done.
        """
        found: list[Redo | str] = []
        for folder, damage in damaged.items():
            key = self.made_by(work, folder, warm_start)
            found.append(damage if key is None else Redo(damage, key, undo=[key]))
        return found

    def totals(self, receipts: Iterable[tuple[str, Receipt]], parameters: Any) -> dict[str, int]:
        """Sums over the receipts of a run, by key, beside those that every run has."""
        return {}

    def summary(self, report: Mapping[str, Any]) -> list[str]:
        """Lines about a finished training, for people. report: as `info` shows it."""
        return [f"objective {report['objective']:.6g}"]
