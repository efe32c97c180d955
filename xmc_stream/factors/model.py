"""Models of two factors: scores are x W H^T."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.factors.factors import FACTORS, LINES, LowRankFactors, by_lines
from xmc_stream.factors.predict import HeldFactors, ScoreTask, ScoreWarmUp
from xmc_stream.factors.products import BLOCK
from xmc_stream.kernels.lines import lanes
from xmc_stream.models.kind import Checker, WeightArrays
from xmc_stream.models.model import Model
from xmc_stream.models.runs import HELD_ROWS
from xmc_stream.runtime.check import array_jobs, checked_reading, common_model_jobs
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.dataset import Dataset


class LowRankModel(LowRankFactors, Model):
    """A model of factors W and H."""

    kind = "low-rank"

    def _more(self) -> str:
        return f", rank {self.rank}"

    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        for factor in (self.factor("W"), self.factor("H")):
            for lines in by_lines(factor):
                update(lines.data)

    def factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both factors in memory, float32 arrays: W (D x rank) and H (K x rank). The scores of x are x W H^T.

        W has a last row for the bias, if there is one.
        """
        with checked_reading(self.path):
            w, h = self.factor("W"), self.factor("H")
            return w.read(0, w.n), h.read(0, h.n)

    def warm_up(self, evaluate: bool = False) -> Job:
        """Predict, and evaluate, a few rows by small factors."""
        return ScoreWarmUp()

    def held_needs(self, room: int) -> dict[str, int]:
        """Both factors."""
        width = lanes(self.rank)
        return {
            "factors": 4 * (self.n_features + 1) * width + 4 * LINES * self.rank + 4 * self.n_labels * self.rank,
            "classes": 16 * self.n_labels,
            "ranking": 4 * HELD_ROWS * (width + self.rank) + 8 * BLOCK * BLOCK,
        }

    def hold(self, room: int) -> HeldFactors:
        """Both factors."""
        return HeldFactors(self)

    def ranking(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> ScoreTask:
        """What it takes is foreseen without a probe."""
        return ScoreTask(self, dataset, k, filtered, evaluate)

    def check_jobs(self) -> Sequence[Job]:
        """Seal, names, factors."""
        return [*common_model_jobs(self), *array_jobs(self.path, plain_arrays(self.path / FACTORS))]

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Sizes of W and H, and that all of them is finite."""
        for name in ("W", "H"):
            n = self.factor(name).n
            folder = self.path / FACTORS / name
            if not folder.exists():
                checker.damage.append(f"{folder} is missing")
            elif checker.whole(folder):
                checker.expect_size(folder, n * self.rank, f"{FACTORS}/{name}")
                checker.finite(folder)
        yield from checker.lines({})

    def weight_arrays(self) -> WeightArrays:
        """Raises InputError: there are none."""
        raise InputError(
            f"{self.path} is a low-rank model, which has no sparse weights to export: take Model.factors()"
        )
