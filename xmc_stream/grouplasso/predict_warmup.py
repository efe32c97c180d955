"""Loading the kernels of prediction by rows of W."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.grouplasso.predict import RowsRun
from xmc_stream.grouplasso.rows import ROWS, RowSparseWeights, new_rows
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import begin_predictions


@dataclass(frozen=True)
class RowsWarmUp(WarmUp):
    """Predict a few rows, and evaluate a model on them."""

    seconds = 12.0

    @property
    def loads(self) -> str:
        return "row-sparse prediction"

    def load(self) -> None:
        with a_few_rows() as dataset:
            path = Path(dataset.path).parent
            begin_model(path / "model.partial")
            shape = dataset.n_features, dataset.n_labels
            with new_rows(path / "model.partial" / ROWS, *shape) as writer:
                writer.append(np.arange(3), np.ones((3, dataset.n_labels), np.float32))
            made = {"nnz": writer.nnz, "n_selected": writer.n_selected}
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            # cut by classes, so that tiles are gathered
            model, plan = RowSparseWeights(path / "model"), MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(classes=2))
            for folder in (None, path):
                out = begin_predictions(path / f"predictions-{folder is None}", dataset.n_samples, dataset.n_labels, 2)
                run_here(RowsRun(model, dataset, 2, out, plan, folder=folder).loop(), Notes())
