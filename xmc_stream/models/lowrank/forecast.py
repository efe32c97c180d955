"""What a prediction, or an evaluation, by factors would do under a memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xmc_stream.jobs.plan import Forecaster, MemoryPlan
from xmc_stream.models.counts import COUNT_BYTES
from xmc_stream.models.lowrank.factors import LowRankFactors
from xmc_stream.models.lowrank.predict import ScorePlan, plan_scores, score_needs
from xmc_stream.models.ranking import check_features
from xmc_stream.store.dataset import Dataset

# in a second, of dense products on one thread: a guess, for a time that is said to be about so long
_MULTIPLY_ADDS = 5e9


@dataclass(frozen=True)
class ScoreForecaster(Forecaster):
    """See `Model.forecaster`."""

    model: LowRankFactors
    dataset: Dataset
    k: int
    evaluate: bool

    def __post_init__(self) -> None:
        check_features(self.model, self.dataset)

    @property
    def _of_labels(self) -> int:
        return COUNT_BYTES * self.model.n_labels if self.evaluate else 0

    def _sizes(self, plan: MemoryPlan) -> ScorePlan:
        return plan_scores(plan, self.model, self.dataset.n_samples, self.k, self._of_labels)

    def check(self, plan: MemoryPlan) -> None:
        """Whether one column of W and a chunk of results fit."""
        self._sizes(plan)

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the numbers of multiply-adds."""
        model, n, sizes = self.model, self.dataset.n_samples, self._sizes(plan)
        width = max(last - first for first, last in sizes.cuts)
        nnz = self.dataset.X_rows().nnz
        n_bytes = len(sizes.cuts) * nnz * 8
        work = (nnz + (1 + self.evaluate) * n * model.n_labels) * model.rank
        return {
            "passes": 1,
            "row_blocks": len(sizes.ranges(n)),
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "peak_parts": score_needs(plan, model, self.k, width, min(sizes.rows_per_job, n), self._of_labels),
            "seconds": round(work / _MULTIPLY_ADDS / (plan.threads * plan.processes) + 0.5, 1),
        }
