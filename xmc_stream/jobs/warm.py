"""Loading every kernel a command needs, by doing its work once on a few made-up rows.

Kernels are compiled on first use (seconds, once a machine) or loaded from the cache. A plan can only count what is
left of the limit when that is over.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from xmc_stream.jobs.job import Notes, Receipt, run_here
from xmc_stream.jobs.plan import MIB, Cuts, MemoryPlan
from xmc_stream.kernels.cache import compiled_before, note_compiled
from xmc_stream.methods.lowrank.leml import LEMLRun
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.pdsparse.run import PDSparseRun
from xmc_stream.methods.ppdsparse.active_rows import disk_pairs
from xmc_stream.methods.ppdsparse.large_classes import LargeClasses
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.methods.ppdsparse.plan import StreamRoom
from xmc_stream.methods.ppdsparse.run import PPDSparseRun
from xmc_stream.methods.ppdsparse.solver import ActiveSets, RowOrder
from xmc_stream.methods.ppdsparse.spill import SlabPairs
from xmc_stream.methods.ppdsparse.state import new_unit_state
from xmc_stream.models.linear.evaluate import FigureRun
from xmc_stream.models.linear.predict import PredictRun
from xmc_stream.models.lowrank.predict import ScoreRun
from xmc_stream.store.dataset import Dataset, new_dataset, write_observed
from xmc_stream.store.model import StoredModel, begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import begin_predictions

_loaded: set[tuple[bool, ...] | str] = set()  # what this process has loaded: `WarmUp.kernels` of those that ran


def warm_up(
    dataset: Dataset, parameters: PPDSparseParameters | PDSparseParameters | LEMLParameters | CPLSTParameters, again: bool
) -> WarmUp | PassWarmUp | LowRankWarmUp:  # fmt: skip
    """What loads the kernels of training on a dataset; again: from a warm start."""
    if isinstance(parameters, PDSparseParameters):
        return PassWarmUp()
    if isinstance(parameters, LEMLParameters | CPLSTParameters):
        return LowRankWarmUp()
    return WarmUp.for_training(dataset, parameters, again)


def warm_up_prediction(model: StoredModel, evaluate: bool = False) -> WarmUp | LowRankWarmUp:
    """What loads the kernels of predicting with a model, or of evaluating it."""
    return LowRankWarmUp() if model.rank else WarmUp(predict=True, evaluate=evaluate)


def _compile_first(job: WarmUp | PassWarmUp | LowRankWarmUp, name: str) -> None:
    """Have a process of its own compile what the job calls, once a machine: a compiler leaves 200 MB behind.

    Where that fails, this process compiles, and says what is wrong.
    """
    if compiled_before(name):
        return
    code = "import pickle, sys; pickle.load(sys.stdin.buffer).load()"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not subprocess.run([sys.executable, "-c", code], input=pickle.dumps(job), check=False, **quiet).returncode:  # type: ignore[call-overload]
        note_compiled(name)


def _write_rows(path: Path, n: int, d: int) -> None:
    """A dataset of n rows, d features and three labels, of which a row has one."""
    rng = np.random.default_rng(0)
    with new_dataset(path, d, 3, {}) as writer:
        x = np.sort(rng.permuted(np.tile(np.arange(d, dtype=np.int32), (n, 1)), axis=1)[:, :4], axis=1)
        every = np.arange(n + 1, dtype=np.int64)
        values = rng.random(4 * n, np.float32)
        writer.append(4 * every, x.ravel(), values, every, (np.arange(n) < 3).astype(np.int32))


@dataclass(frozen=True)
class PassWarmUp:
    """Train by PD-Sparse on a few rows."""

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    def run(self) -> Receipt:
        """Compile, if that was never done, and load, once in a process."""
        if "pdsparse" not in _loaded:
            _compile_first(self, "pdsparse")
            self.load()
            _loaded.add("pdsparse")
        return {}

    def load(self) -> None:
        """Do it in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
            path = Path(folder)
            _write_rows(path / "warm.xmc", 40, 12)
            begin_model(path / "model.partial")
            p = PDSparseParameters(max_passes=2, held_out=0.3, post_solve=True)
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1), Notes()
            run_here(PDSparseRun(Dataset(path / "warm.xmc"), path / "model.partial", p, 0, plan, notes).loop(), notes)


@dataclass(frozen=True)
class LowRankWarmUp:
    """Train by LEML on a few rows, over all pairs and over given ones; predict and evaluate."""

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    def run(self) -> Receipt:
        """Compile, if that was never done, and load, once in a process."""
        if "leml" not in _loaded:
            _compile_first(self, "leml")
            self.load()
            _loaded.add("leml")
        return {}

    def load(self) -> None:
        """Do it in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
            path = Path(folder)
            _write_rows(path / "warm.xmc", 40, 12)
            dataset, plan = Dataset(path / "warm.xmc"), MemoryPlan(2**40, 256 * MIB, 1)
            write_observed(dataset, dataset.Y_rows().blocks(MIB))
            for name, options in (("full", {}), ("given", {"observed": "given", "loss": "logistic", "held_out": 0.3})):
                p = LEMLParameters(rank=2, alternations=2, **options)  # type: ignore[arg-type]
                begin_model(path / f"{name}.partial")
                notes = Notes()
                result = run_here(LEMLRun(dataset, path / f"{name}.partial", p, 0, plan, notes).loop(), notes)
                finish_model(
                    path / f"{name}.partial", path / name, model_attributes(dataset, p.solver, p.to_dict(), 0, result)
                )
            for folder_of_counts in (None, path):
                out = begin_predictions(path / f"predictions-{folder_of_counts is None}", 40, 3, 2)
                run = ScoreRun(StoredModel(path / "full"), dataset, 2, out, plan, folder=folder_of_counts)
                run_here(run.loop(), Notes())


@dataclass(frozen=True)
class WarmUp:
    """Train on a few rows and, if asked, predict them, or evaluate the model on them, which predicts them too.

    parameters: whose options are used; again: with a warm start too; large: with a class whose rows stream by.
    """

    predict: bool = False
    evaluate: bool = False
    parameters: PPDSparseParameters = field(default_factory=PPDSparseParameters)
    again: bool = False
    large: bool = False

    @classmethod
    def for_training(cls, dataset: Dataset, parameters: PPDSparseParameters, again: bool) -> WarmUp:
        """What training on a dataset will use."""
        order = RowOrder.of(dataset.n_samples, dataset.X_rows().nnz)
        return cls(parameters=parameters, again=again, large=dataset.n_samples > order.large)

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    @property
    def kernels(self) -> tuple[bool, ...]:
        """What decides which kernels are loaded."""
        p = self.parameters
        return self.predict, self.evaluate, self.again, self.large, p.delta > 0, p.min_value > 0

    def run(self) -> Receipt:
        """Compile, if that was never done, and load, once in a process."""
        if self.kernels not in _loaded:
            _compile_first(self, repr(self.kernels))
            self.load()
            _loaded.add(self.kernels)
        return {}

    def load(self) -> None:
        """Do it in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
            path = Path(folder)
            n, d = 40, 12
            _write_rows(path / "warm.xmc", n, d)
            dataset, work = Dataset(path / "warm.xmc"), path / "model.partial"
            begin_model(work)
            # class 0 has more active rows than a batch may have, class 1 fewer: both ways of solving are loaded;
            # and it wants more rows than a leg has
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(solve_rows=8, leg=16)), Notes()
            p = replace(PPDSparseParameters(), delta=self.parameters.delta, min_value=self.parameters.min_value)
            result = run_here(PPDSparseRun(dataset, work, p, 0, plan, notes).loop(), notes)
            if self.large:
                self._stream(dataset, p, path)
            if self.predict or self.again:
                finish_model(work, path / "model", model_attributes(dataset, p.solver, p.to_dict(), 0, result))
            if self.again:
                begin_model(work)
                notes = Notes()
                run_here(PPDSparseRun(dataset, work, p, 0, plan, notes, str(path / "model")).loop(), notes)
            if self.predict:
                out = begin_predictions(path / "predictions", n, 3, 2)
                model = StoredModel(path / "model")
                run = PredictRun(model, dataset, 2, out, plan)
                if self.evaluate:
                    run = FigureRun(model, dataset, 2, out, plan, folder=path)
                run_here(run.loop(), Notes())

    def _stream(self, dataset: Dataset, parameters: PPDSparseParameters, path: Path) -> None:
        """Solve class 0 with all rows streaming by."""
        n, d = dataset.n_samples, dataset.n_features
        sign = np.where(np.arange(n) < 3, 1, -1).astype(np.int8)
        active = ActiveSets(0, np.array([0, n]), np.arange(n), sign, np.zeros(n))
        solver = LargeClasses(
            parameters, 0, 0, RowOrder(n, 0, 1), dataset.X_rows(), StreamRoom(64, MIB, 1, d, 1.0, n), False, lambda c: active,
            lambda c, folder: disk_pairs(
                folder, np.zeros(1, np.uint64), np.empty(1, np.int32), n, 0, 0, dataset.Y_columns(), n, None, iter(()), False
            ),
            (lambda classes: iter([(np.arange(1), np.ones(1, np.float32), 0.0)])) if self.again else None, 1.0,
            path / "pairs",
        )  # fmt: skip
        slabs = SlabPairs(path / "slabs", 1, n, 1)
        slabs.put(0, active, False)
        slabs.arrange()
        slabs.give_back(slabs.take([(0, n)]))
        slabs.wake(np.ones(1, np.bool_))
        slabs.close()
        for name, size in (("memory", n), ("disk", MIB)):  # the second is said to be too large for memory
            with new_unit_state(path / name, 1, n, d) as writer:
                solver.solve(np.zeros(1, np.int64), np.array([size]), np.zeros(1, np.int64), writer)
