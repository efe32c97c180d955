"""Loading the kernels of a training by MEMOIR."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.run import MEMOIRRun
from xmc_stream.models.runs import filter_pairs, no_predictions
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few


@dataclass(frozen=True)
class MEMOIRWarmUp(WarmUp):
    """Train on a few rows, as the run will."""

    variant: str
    oracle: str

    @property
    def loads(self) -> str:
        return f"MEMOIR-{self.variant}, {self.oracle}"

    def load(self) -> None:
        p = MEMOIRParameters(variant=self.variant, oracle=self.oracle, steps=2, batch=8, rank=4, truncate=1e-3)
        with a_few_rows() as dataset:
            # where rows have several labels
            fold_top_k(np.zeros((1, 1), np.float32), 0, filter_pairs([]), *no_predictions(1, 1))
            train_a_few(MEMOIRRun, dataset, "memoir", p)
