"""What a prediction, or an evaluation, by factors would do under a memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xmc_stream.factors.factors import LowRankFactors
from xmc_stream.factors.predict import ScorePlan, plan_scores, score_needs
from xmc_stream.factors.products import ROW_BYTES
from xmc_stream.models.runs import RankingForecaster
from xmc_stream.runtime.plan import MemoryPlan

# in a second, of dense products on one thread: a guess, for a time that is said to be about so long
_MULTIPLY_ADDS = 5e9


@dataclass(frozen=True)
class ScoreForecaster(RankingForecaster):
    """See `Model.forecaster`."""

    model: LowRankFactors

    def sizes(self, plan: MemoryPlan) -> ScorePlan:
        """See `RankingForecaster`."""
        return plan_scores(plan, self.model, self.dataset, self.k, self.of_labels)

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the numbers of multiply-adds."""
        model, n, sizes = self.model, self.dataset.n_samples, self.sizes(plan)
        width = max(last - first for first, last in sizes.col_ranges)
        nnz = self.dataset.X_rows().nnz
        n_bytes = len(sizes.col_ranges) * nnz * 8
        work = (nnz + (1 + self.evaluate) * n * model.n_labels) * model.rank
        needs = score_needs(
            plan, model, self.k, width, min(sizes.rows_per_job, n), self.of_labels,
            self.dataset.X_rows().block_bytes(ROW_BYTES), len(sizes.rows),
        )  # fmt: skip
        return self.foreseen(
            len(sizes.ranges(n)), n_bytes, needs, work / _MULTIPLY_ADDS / (plan.threads * plan.processes)
        )
