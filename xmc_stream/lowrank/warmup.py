"""Loading the kernels of a training by LEML or CPLST."""

from __future__ import annotations

from dataclasses import dataclass

from xmc_stream.factors.products import most_whole
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.runtime.plan import MIB
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few
from xmc_stream.store.dataset import write_observed


@dataclass(frozen=True)
class LEMLWarmUp(WarmUp):
    """Train by LEML on a few rows, over all pairs and over given ones; and over rows that are sorted by ranges of features."""

    @property
    def loads(self) -> str:
        return "leml, also by ranges"

    def load(self) -> None:
        given = LEMLParameters(rank=2, alternations=2, observed="given", loss="logistic", held_out=0.3)
        with a_few_rows() as dataset:
            write_observed(dataset, dataset.Y_rows().blocks(MIB))
            train_a_few(LEMLRun, dataset, "full", LEMLParameters(rank=2, alternations=2))
            train_a_few(LEMLRun, dataset, "given", given)
        with a_few_rows(d=most_whole() + 1) as dataset:
            train_a_few(LEMLRun, dataset, "wide", LEMLParameters(rank=2, alternations=1))
