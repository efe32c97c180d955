"""Loading the kernels of prediction by factors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import FACTORS, LowRankFactors, new_factors
from xmc_stream.factors.predict import ScoreRun
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import begin_predictions

_RANK = 2


@dataclass(frozen=True)
class ScoreWarmUp(WarmUp):
    """Predict a few rows, and evaluate a model on them."""

    seconds = 12.0

    @property
    def loads(self) -> str:
        return "low-rank prediction"

    def load(self) -> None:
        with a_few_rows() as dataset:
            path = Path(dataset.path).parent
            begin_model(path / "model.partial")
            sizes = {"W": dataset.n_features, "H": dataset.n_labels}
            with new_factors(path / "model.partial" / FACTORS, dict.fromkeys(sizes, _RANK)) as writers:
                for name, n in sizes.items():
                    writers[name].append(np.ones(_RANK * n, np.float32))
            made = {"rank": _RANK, "nnz": _RANK * sum(sizes.values())}
            about = model_attributes(dataset, "", {"bias": False}, 0, made)
            finish_model(path / "model.partial", path / "model", about)
            model, plan = LowRankFactors(path / "model"), MemoryPlan(2**40, 256 * MIB, 1)
            for folder in (None, path):
                out = begin_predictions(path / f"predictions-{folder is None}", dataset.n_samples, dataset.n_labels, 2)
                run_here(ScoreRun(model, dataset, 2, out, plan, folder=folder).loop(), Notes())
