"""What runs of LEML and CPLST have in common: their state, W by conjugate gradients, and A = X W with sums over its rows."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.factors.factors import Dense, Factor, Panels, SideBySide
from xmc_stream.factors.products import Learned, ProjectJob
from xmc_stream.factors.rowblocks import Holding
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.plan import plan_lowrank
from xmc_stream.lowrank.ridge import Ridges, solve_ridges
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset


@dataclass
class LowRankRun(ABC):
    """A training run: what to learn from, where to, and within which memory; see `ppdsparse.run.PPDSparseRun`.

    What a half-step leaves is durable and in the ledger, and of a long one what it comes to on the way (see `Begun`). What
    lies in `scratch` is not: a session that goes on makes it again.
    """

    dataset: Dataset
    work: Path
    parameters: Any
    seed: int
    plan: MemoryPlan
    ledger: Ledger

    def __post_init__(self) -> None:
        self._steps: LEMLParameters = self.parameters.steps(self.dataset.n_features, self.dataset.n_labels)
        self._sizes = plan_lowrank(self.plan, self.dataset, self._steps)
        self._scratch = self.work / "scratch"
        self._holding = Holding(uuid.uuid4().hex, *self._sizes.held)

    def _state(self, kind: str, number: int) -> Path:
        return self.work / "state" / f"{kind}-{number}"

    def _factor(self, number: int, name: str) -> Factor:
        n = self.dataset.n_features + self._steps.bias if name == "W" else self.dataset.n_labels
        return Factor(str(self._state("factors", number) / "all" / name), self._steps.rank, n)

    def _panels(self, name: str, n: int, whole: bool = False) -> Panels:
        return Panels(str(self._scratch / name), n, ((0, self._steps.rank),) if whole else self._sizes.col_ranges)

    def _ridges(
        self, learned: Learned, number: int, start: int, lam: float, values: tuple[float, ...], phase: Phase
    ) -> Generator[Phase, list[Receipt], tuple[SideBySide, int]]:
        """W of a half-step by conjugate gradients, from the factors number `start`; and the steps that it took."""
        previous = self._factor(start, "W") if start else None
        whole = Ridges(
            learned, lam, (0, self._steps.rank), values, self._factor(start, "H"), previous, self._sizes.parts,
            self._sizes.row_bytes, self._holding,
        )  # fmt: skip
        jobs = self._sizes.ridges(whole, f"w/{number}", self._steps, self._state("w", number))
        solved = yield from solve_ridges(jobs, self._sizes.products, phase, self.ledger, self._scratch)
        return SideBySide(tuple(job.found for job in jobs)), max(receipt["steps"] for receipt in solved)

    def _project(
        self, learned: Learned, number: int, w: Dense, sums: Panels | None, phase: Phase
    ) -> Generator[Phase, list[Receipt], tuple[Panels, int]]:
        """Make A = X W, and Y^T A, if `sums` are given; returns A, and the positives of rows that are learned from."""
        scores, parts = self._panels("a", self.dataset.n_samples), self._sizes.parts
        jobs = [
            ProjectJob(learned, f"a/{number}", cols, w, scores, parts, self._holding, sums)
            for cols in scores.col_ranges
        ]
        return scores, int((yield replace(phase, jobs=jobs, kept=False))[0]["positives"])

    @abstractmethod
    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
