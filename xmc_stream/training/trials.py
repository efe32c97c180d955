"""The settings that `tune` compares: each is trained on one part of the rows and evaluated on the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from xmc_stream.datasets.split import split_once
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.evaluation.evaluate import evaluate_with
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Method, Step, Task, state_of_trial
from xmc_stream.methods.parameters import Parameters, spelled
from xmc_stream.models import Execution, load_model, planned
from xmc_stream.models.execution import Part, shared
from xmc_stream.runtime.ledger import Ledger, environment
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.places import LEDGER, remove, remove_work, writing
from xmc_stream.system.progress import LOG, current
from xmc_stream.system.stop import wanted_while
from xmc_stream.training.train import train

_LEAST_ROWS = 100
_SPLIT = 0.02  # of the whole, that splitting the rows takes
_LEARNED = 0.9  # of a setting, that training takes; the rest compares it


@dataclass(frozen=True)
class Trials:
    """What is compared, on which rows, and how the work is done.

    values: of the grid's parameters in each setting; settings: all parameters of each, checked.
    """

    values: list[dict[str, Any]]
    settings: list[Parameters]
    dataset: Dataset
    seed: int
    held_out: float
    ks: tuple[int, ...]
    execution: Execution
    force: bool
    check: bool

    @property
    def method(self) -> Method:
        """Of all settings."""
        return registry.method_of(self.settings[0])

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on. The metric is not in it."""
        return {
            "solver": self.method.name,
            "settings": [setting.to_dict() for setting in self.settings],
            "seed": self.seed,
            "held_out": self.held_out,
            "data": self.dataset.fingerprint,
            "ks": list(self.ks),
            "environment": environment(),
        }

    def refuse_unfit(self) -> None:
        """Raise InputError for what would fail later, or tell nothing."""
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must be between 0 and 1. Got {self.held_out}.")
        self._refuse_few(int(self.held_out * self.dataset.n_samples))
        for setting in self.settings:
            self.method.check(Task(self.dataset, setting, self.seed))
            if self.method.reads_mask(setting):
                raise InputError(
                    "tuning needs all labels of the rows held out, and with observed=given some are not known"
                )

    def _refuse_few(self, n_rows: int) -> None:
        if n_rows < _LEAST_ROWS:
            raise InputError(
                f"{n_rows} rows of {self.dataset.path} would be held out, and fewer than {_LEAST_ROWS} tell nothing: hold "
                "out a larger share, or tune on a larger set"
            )

    def run(self, work: Path, overwrite: bool) -> tuple[dict[str, Any], bool]:
        """Train and evaluate what is not done yet: what was found, and whether an earlier session had begun."""
        if overwrite:
            remove_work(work / LEDGER)
        with (
            writing(work, "give the same command again, it goes on"),
            Ledger(work / LEDGER, self.identity, self.force) as ledger,
        ):
            with current().part(0.0, _SPLIT):
                rows, others = split_once(
                    self.dataset, work, self.held_out, self.seed, self.execution.memory_limit, self.check
                )
            self._refuse_few(others.n_samples)
            with current().part(_SPLIT, 1.0):
                self._try(self.method.path(self.settings), ledger, rows, others, work)
            settings = [ledger.get(f"setting/{i}") for i in range(len(self.settings))]
            return {"n_train": rows.n_samples, "n_held_out": others.n_samples, "settings": settings}, ledger.resumed

    def _try(self, steps: Sequence[Step], ledger: Ledger, rows: Dataset, others: Dataset, work: Path) -> None:
        """Train and compare all settings that the ledger has no figures of."""
        todo = [step for step in steps if ledger.get(_key(step)) is None]
        beside = self._train_beside(todo, len(steps), rows, work)
        low, took = (0.0, {}) if beside is None else (_LEARNED, beside)
        for step in todo:
            number, about = _place(step, todo, len(steps))
            start = None if step.start is None else load_model(_model(work, step.start))
            if step.setting not in took:
                LOG.info("setting %d of %d: %s", number, len(steps), self._words(step))
            begin, end = (low + (1 - low) * done / len(steps) for done in (number - 1, number))
            with current().part(begin, end, about):
                check = self.check and (beside is not None or step is todo[0])
                found = self._learn(step, rows, others, work, start, check, took.get(step.setting, 0.0))
            ledger.add(_key(step), found)
            later = todo[todo.index(step) + 1 :]
            needed = {of for one in later for of in (one.setting, one.start)}
            for old in {before.setting for before in steps} - needed:
                remove(_model(work, old))
                remove(state_of_trial(_model(work, old)))

    def _train_beside(self, todo: Sequence[Step], n: int, rows: Dataset, work: Path) -> dict[int, float] | None:
        """Train settings beside each other, as many as threads or workers and the memory limit allow; seconds of each.

        Those that come to need more memory than they have beside others are left out. None: only one at a time is possible.
        """
        if not self.method.one_by_one or len(todo) < 2 or any(step.start is not None for step in todo):
            return None
        bar, stop, took = current(), Event(), dict[int, float]()
        with shared(self.execution) as execution:
            at_once, execution = self._parts([self.settings[step.setting] for step in todo], execution, rows, work)
            if at_once < 2:
                return None

            def learn(step: Step) -> float:
                number, about = _place(step, todo, n)
                with wanted_while(lambda: not stop.is_set()), bar.beside(1 / len(todo), about):
                    LOG.info("setting %d of %d: %s", number, n, self._words(step))
                    began, path = time.perf_counter(), _model(work, step.setting)
                    setting = self.settings[step.setting]
                    task = Task(rows, setting, self.seed, trial=True)
                    train(task, path, execution, force=self.force, check=self.check)
                    remove(state_of_trial(path))
                    return time.perf_counter() - began

            with bar.part(0.0, _LEARNED), ThreadPoolExecutor(at_once, "xmc-stream-setting") as threads:
                bar.phase(f"training {at_once} settings beside each other", (1 - len(todo) / n, 1.0))
                running = {threads.submit(learn, step): step for step in todo}
                try:
                    for future in as_completed(running):
                        step = running[future]
                        try:
                            took[step.setting] = future.result()
                        except MemoryLimitError:
                            if execution.part is None or execution.part.of == 1:
                                raise
                            number, _ = _place(step, todo, n)
                            LOG.info(
                                "setting %d of %d needs more memory: it goes on by itself, when others have ended",
                                number,
                                n,
                            )
                finally:
                    stop.set()
        return took

    def _parts(
        self, settings: Sequence[Parameters], execution: Execution, rows: Dataset, work: Path
    ) -> tuple[int, Execution]:
        """How many settings can be trained at once, and how each of them is then."""
        limit, method = execution.limit([rows.path], [work]), self.method
        tasks = [Task(rows, setting, self.seed, trial=True) for setting in settings]
        with planned(execution, limit, *(method.warm_up(task) for task in tasks)) as (engine, whole):
            try:
                forecasters = [method.forecaster(task, whole, engine.once) for task in tasks]
            except MemoryLimitError:  # not even one does
                return 1, execution
            for at_once in range(min(len(tasks), engine.threads * engine.processes), 1, -1):
                of = min(at_once, engine.threads)  # a worker may get the jobs of so many
                mine = engine.threads // at_once if engine.in_process else engine.threads
                plan = replace(whole, budget=whole.budget // of, parts=of, threads=mine)
                try:
                    for forecaster in forecasters:
                        forecaster.check(plan)
                except MemoryLimitError:
                    continue
                return at_once, replace(execution, memory_limit=limit.limit, threads=mine, part=Part(of, whole.process))
        return 1, execution

    def _words(self, step: Step) -> str:
        mine = " ".join(f"{name}={spelled(value)}" for name, value in self.values[step.setting].items())
        if step.start is None:
            return mine
        start = " ".join(f"{name}={spelled(value)}" for name, value in self.values[step.start].items())
        return f"{mine}, from {start}"

    def _learn(
        self, step: Step, rows: Dataset, others: Dataset, work: Path, start: Any, check: bool, took: float
    ) -> dict[str, Any]:
        """One setting: a model of the rows, and its figures on the others. took: seconds, if it is trained."""
        began, execution, bar = time.perf_counter(), self.execution, current()
        path = _model(work, step.setting)
        with bar.part(0.0, _LEARNED):
            task = Task(rows, self.settings[step.setting], self.seed, start, trial=True)
            model, about = train(task, path, execution, force=self.force, check=check)
        with bar.part(_LEARNED, 1.0):
            figures = evaluate_with(model.path, others, rows, self.ks, "default", execution, check=check)
        figures.pop("n_samples")
        return {
            "parameters": self.values[step.setting],
            "figures": figures,
            **{name: about[name] for name in ("nnz", "model_bytes", "passes", "bytes_streamed", "bytes_gathered")},
            "seconds": round(took + time.perf_counter() - began, 3),
            "start": step.start,
        }


def _key(step: Step) -> str:
    return f"setting/{step.setting}"


def _place(step: Step, todo: Sequence[Step], n: int) -> tuple[int, str]:
    """The number of a step of n, from 1, of which `todo` are left; and words for it."""
    number = n - len(todo) + todo.index(step) + 1
    return number, f"setting {number} of {n}, "


def _model(work: Path, setting: int) -> Path:
    return work / f"{setting}.model"
