"""Loading the kernels of a training by LEML or CPLST."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmc_stream.jobs.job import Notes, Receipt, run_here
from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.jobs.warm import a_few_rows, load_once
from xmc_stream.methods.lowrank.leml import LEMLRun
from xmc_stream.methods.lowrank.parameters import LEMLParameters
from xmc_stream.store.dataset import write_observed
from xmc_stream.store.model import begin_model


@dataclass(frozen=True)
class WarmUp:
    """Train by LEML on a few rows, over all pairs and over given ones."""

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "warm"

    def run(self) -> Receipt:
        """Compile, if that was never done, and load, once in a process."""
        load_once(self, "leml")
        return {}

    def load(self) -> None:
        """Do it in a temporary folder."""
        with a_few_rows() as dataset:
            path, plan = Path(dataset.path).parent, MemoryPlan(2**40, 256 * MIB, 1)
            write_observed(dataset, dataset.Y_rows().blocks(MIB))
            for name, options in (("full", {}), ("given", {"observed": "given", "loss": "logistic", "held_out": 0.3})):
                p = LEMLParameters(rank=2, alternations=2, **options)  # type: ignore[arg-type]
                begin_model(path / f"{name}.partial")
                notes = Notes()
                run_here(LEMLRun(dataset, path / f"{name}.partial", p, 0, plan, notes).loop(), notes)
