"""Loading the kernels of a training by PD-Sparse."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.run import PDSparseRun
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few


@dataclass(frozen=True)
class PDSparseWarmUp(WarmUp):
    """Train by PD-Sparse on a few rows."""

    @property
    def loads(self) -> str:
        return "pdsparse"

    def load(self) -> None:
        with a_few_rows() as dataset:
            p = PDSparseParameters(max_passes=2, held_out=0.3, post_solve=True)
            train_a_few(PDSparseRun, dataset, "model", p)
