"""Loading the kernels of a training by PD-Sparse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.run import PDSparseRun
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.model import begin_model


@dataclass(frozen=True)
class PDSparseWarmUp(WarmUp):
    """Train by PD-Sparse on a few rows."""

    @property
    def loads(self) -> str:
        return "pdsparse"

    def load(self) -> None:
        with a_few_rows() as dataset:
            path = Path(dataset.path).parent
            begin_model(path / "model.partial")
            p = PDSparseParameters(max_passes=2, held_out=0.3, post_solve=True)
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1), Notes()
            run_here(PDSparseRun(dataset, path / "model.partial", p, 0, plan, notes).loop(), notes)
