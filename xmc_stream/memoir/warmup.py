"""Loading the kernels of a training by MEMOIR."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.run import MEMOIRRun
from xmc_stream.models.ranking import filter_pairs, no_predictions
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.model import begin_model


@dataclass(frozen=True)
class MEMOIRWarmUp(WarmUp):
    """Train on a few rows, as the run will."""

    variant: str
    oracle: str

    @property
    def loads(self) -> str:
        return f"MEMOIR-{self.variant}, {self.oracle}"

    def load(self) -> None:
        with a_few_rows() as dataset:
            work = Path(dataset.path).parent / "memoir.partial"
            begin_model(work)
            p = MEMOIRParameters(variant=self.variant, oracle=self.oracle, steps=2, batch=8, rank=4, truncate=1e-3)
            ledger = Notes()
            # where rows have several labels
            fold_top_k(np.zeros((1, 1), np.float32), 0, filter_pairs([]), *no_predictions(1, 1))
            run_here(MEMOIRRun(dataset, work, p, 0, MemoryPlan(2**40, 256 * MIB, 1), ledger).loop(), ledger)
