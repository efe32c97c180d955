"""What a prediction, or an evaluation, by a row-sparse model would do under a memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xmc_stream.grouplasso.predict import RowsPlan, plan_rows, rows_needs
from xmc_stream.grouplasso.rows import RowSparseWeights
from xmc_stream.models.runs import RankingForecaster, least_block
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.matrix import stream_bytes

# in a second, on one thread: guesses, for a time that is said to be about so long
_MULTIPLY_ADDS = 2e9
_SCORES = 5e8  # that are folded into the best k
_BYTES = 1e9  # of weights that are read


@dataclass(frozen=True)
class RowsForecaster(RankingForecaster):
    """See `Model.forecaster`."""

    model: RowSparseWeights
    filtered: bool

    def sizes(self, plan: MemoryPlan) -> RowsPlan:
        """See `RankingForecaster`."""
        pairs, least = self.filtered or self.evaluate, least_block(self.dataset, self.evaluate)
        return plan_rows(plan, self.model, self.dataset.n_samples, self.k, pairs, self.of_labels, least)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether every tile is read once."""
        return self.sizes(plan).keeps_tiles

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the numbers of multiply-adds and scores, which the counts of the selected features tell exactly."""
        model, dataset, sizes = self.model, self.dataset, self.sizes(plan)
        matrices = (dataset.X_rows(), dataset.Y_rows()) if self.evaluate else (dataset.X_rows(),)
        n_bytes = stream_bytes(matrices, sizes.ranges(dataset.n_samples))
        times = 1 if sizes.keeps_tiles else (1 + self.evaluate) * sizes.row_blocks(dataset)
        entries = int(dataset.feature_counts()[model.rows.features()].sum())
        work = (entries / _MULTIPLY_ADDS + dataset.n_samples / _SCORES) * model.n_labels * (1 + self.evaluate)
        work += times * 4 * model.n_selected * model.n_labels / _BYTES
        return {
            "passes": 1,
            "row_blocks": sizes.row_blocks(dataset),
            "bytes_read": n_bytes,
            "bytes_streamed": n_bytes,
            "bytes_gathered": 0,
            "tiles_made": times,
            "peak_parts": rows_needs(plan, model, dataset, self.k, sizes, self.of_labels),
            "seconds": round(work / (plan.threads * plan.processes) + 0.5, 1),
        }
