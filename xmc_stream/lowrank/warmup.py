"""Loading the kernels of a training by LEML or CPLST."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmc_stream.factors.products import most_whole
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import write_observed
from xmc_stream.store.model import begin_model


@dataclass(frozen=True)
class LEMLWarmUp(WarmUp):
    """Train by LEML on a few rows, over all pairs and over given ones; and over rows that are sorted by ranges of features."""

    @property
    def loads(self) -> str:
        return "leml, also by ranges"

    def load(self) -> None:
        with a_few_rows() as dataset:
            path, plan = Path(dataset.path).parent, MemoryPlan(2**40, 256 * MIB, 1)
            write_observed(dataset, dataset.Y_rows().blocks(MIB))
            for name, options in (("full", {}), ("given", {"observed": "given", "loss": "logistic", "held_out": 0.3})):
                p = LEMLParameters(rank=2, alternations=2, **options)  # type: ignore[arg-type]
                begin_model(path / f"{name}.partial")
                notes = Notes()
                run_here(LEMLRun(dataset, path / f"{name}.partial", p, 0, plan, notes).loop(), notes)
        with a_few_rows(d=most_whole() + 1) as dataset:
            work = Path(dataset.path).parent / "wide.partial"
            begin_model(work)
            notes = Notes()
            run_here(LEMLRun(dataset, work, LEMLParameters(rank=2, alternations=1), 0, plan, notes).loop(), notes)
