"""What a prediction, or an evaluation, by weights of classes would do under a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xmc_stream.linear.predict import (
    PredictPlan,
    PredictProbe,
    plan_predict,
    predict_bytes,
    predict_needs,
    takes_bounds,
)
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.models.runs import RankingForecaster, least_block
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import MemoryPlan


@dataclass(frozen=True)
class PredictForecaster(RankingForecaster):
    """See `Model.forecaster`."""

    model: LinearWeights
    filtered: bool
    once: Callable[[Job], Receipt]

    def sizes(self, plan: MemoryPlan) -> PredictPlan:
        """See `RankingForecaster`."""
        pairs, least = self.filtered or self.evaluate, least_block(self.dataset, self.evaluate)
        return plan_predict(plan, self.model, self.dataset.n_samples, self.k, pairs, self.of_labels, least)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether every tile is made once."""
        return self.sizes(plan).keeps_tiles

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """By a probe of a few tiles and rows."""
        dataset, model, sizes = self.dataset, self.model, self.sizes(plan)
        parts = predict_needs(plan, model, dataset, self.k, sizes)
        if self.evaluate:
            parts["counts of labels"] = plan.threads * self.of_labels
        bounded = takes_bounds(model) and not self.evaluate
        probe = self.once(PredictProbe(str(model.path), str(dataset.path), sizes, self.k, bounded))
        n_bytes = predict_bytes(dataset, sizes, self.evaluate)
        times = sizes.times_made(dataset)
        work = probe["score"] * dataset.n_samples * model.n_labels + probe["make"] * times * model.nnz
        work *= 1 + self.evaluate
        return {
            "passes": 1,
            "row_blocks": sizes.row_blocks(dataset),
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "tiles_made": times,
            "peak_parts": parts,
            "seconds": round(work / (plan.threads * plan.processes) + probe["read"] * n_bytes + 0.5, 1),
        }
