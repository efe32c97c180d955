"""Loading every kernel a command needs, by doing its work once on a few made-up rows.

Kernels are compiled on first use (seconds, once a machine) or loaded from the cache. A plan can only count what is
left of the limit when that is over.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from xmc_stream.jobs.figures import FigureRun
from xmc_stream.jobs.job import Notes, Receipt, run_here
from xmc_stream.jobs.plan import MIB, Cuts, MemoryPlan
from xmc_stream.jobs.ppdsparse import PPDSparseRun, model_attributes
from xmc_stream.jobs.predict import PredictRun
from xmc_stream.solvers.ppdsparse import PPDSparseParameters
from xmc_stream.store.dataset import Dataset, new_dataset
from xmc_stream.store.model import StoredModel, begin_model, finish_model
from xmc_stream.store.predictions import begin_predictions

_loaded: set[tuple[bool, ...]] = set()  # what this process has loaded: `WarmUp.kernels` of those that ran


@dataclass(frozen=True)
class WarmUp:
    """Train on a few rows and, if asked, predict them, or evaluate the model on them, which predicts them too.

    parameters: whose options are used; again: with a warm start too.
    """

    predict: bool = False
    evaluate: bool = False
    parameters: PPDSparseParameters = field(default_factory=PPDSparseParameters)
    again: bool = False

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    @property
    def kernels(self) -> tuple[bool, ...]:
        """What decides which kernels are loaded."""
        p = self.parameters
        return self.predict, self.evaluate, self.again, p.delta > 0, p.min_value > 0

    def run(self) -> Receipt:
        """Do it in a temporary folder, once in a process."""
        if self.kernels in _loaded:
            return {}
        with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
            path = Path(folder)
            rng = np.random.default_rng(0)
            n, d = 40, 12
            with new_dataset(path / "warm.xmc", d, 3, {}) as writer:
                x = np.sort(rng.permuted(np.tile(np.arange(d, dtype=np.int32), (n, 1)), axis=1)[:, :4], axis=1)
                every = np.arange(n + 1, dtype=np.int64)
                values = rng.random(4 * n, np.float32)
                writer.append(4 * every, x.ravel(), values, every, (np.arange(n) < 3).astype(np.int32))
            dataset, work = Dataset(path / "warm.xmc"), path / "model.partial"
            begin_model(work)
            # class 0 has more active rows than a batch may have, class 1 fewer: both ways of solving are loaded
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(solve_rows=8)), Notes()
            p = replace(PPDSparseParameters(), delta=self.parameters.delta, min_value=self.parameters.min_value)
            result = run_here(PPDSparseRun(dataset, work, p, 0, plan, notes).loop(), notes)
            if self.predict or self.again:
                finish_model(work, path / "model", model_attributes(dataset, p, 0, result))
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
        _loaded.add(self.kernels)
        return {}
