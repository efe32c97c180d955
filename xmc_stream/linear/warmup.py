"""Loading the kernels of prediction by weights of classes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.linear.guide import GUIDE, write_guide
from xmc_stream.linear.implied import IMPLIED
from xmc_stream.linear.predict import LinearTask
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import LinearWeights, new_unit, plain_units, tiles_of, unit_path
from xmc_stream.models.runs import Wanted
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Block
from xmc_stream.store.model import UNIT, begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import begin_predictions


@dataclass(frozen=True)
class LinearWarmUp(WarmUp):
    """Predict a few rows, or evaluate a model on them, which predicts them too.

    guided: by a model with groups of labels; lifts: with implied labels; fours: rows may have most features, and so may
    classes.
    """

    seconds = 12.0

    evaluate: bool
    guided: bool = False
    lifts: bool = False
    fours: bool = False

    @property
    def loads(self) -> str:
        return f"linear prediction {self.evaluate, self.guided, self.lifts, self.fours}"

    def load(self) -> None:
        of_each_kind = {"n": 42, "d": 6, "k": UNIT + 3}  # rows in fours and one by one, tiles with bounds and without
        with a_few_rows(**of_each_kind if self.fours else {}) as dataset:
            path, d = Path(dataset.path).parent, dataset.n_features
            begin_model(path / "model.partial")
            of_units = []
            for unit in plain_units(dataset.n_labels):
                n, sizes = unit.last - unit.first, TileSizes(*unit, d)
                with new_unit(unit_path(path / "model.partial", unit), d, n) as writer:
                    counts, features = np.full(n, d), np.tile(np.arange(d, dtype=np.int32), n)
                    writer.weights.append(counts, features, np.ones(n * d, np.float32))
                    sizes.add(counts, features)
                of_units.append({"tile_ranges": [astuple(span) for span in sizes.ranges]})
            made: dict[str, Any] = {"nnz": d * dataset.n_labels, "tiles": tiles_of(of_units)}
            if self.guided:
                none = Block(0, np.zeros(2, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))
                groups = np.zeros((1, dataset.n_labels), np.uint8)
                write_guide(path / "model.partial" / GUIDE, d, [none], np.ones(1, np.float32), groups)
                made[GUIDE] = {"weight": 1.0, "clusterings": 1, "groups": 1, "tile": MIB, "weights": 0}
            if self.lifts:
                k = dataset.n_labels
                with new_matrix(path / "model.partial" / IMPLIED, "csr_matrix", (k, k), None) as implied:
                    implied.append(np.arange(k) < 1, np.array([k - 1], np.int32))  # the first implies the last
                made[IMPLIED] = {"margin": 0.01, "pairs": 1}
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            model, plan = LinearWeights(path / "model"), MemoryPlan(2**40, 256 * MIB, 1)
            out = begin_predictions(path / "predictions", dataset.n_samples, dataset.n_labels, 2)
            task = LinearTask(model, dataset, 2, evaluate=self.evaluate)
            run_here(task.loop(plan, Wanted(out, folder=path if self.evaluate else None)), Notes())
