"""What a prediction, or an evaluation, by weights of classes would do under a memory plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.guide import Guide
from xmc_stream.linear.kernels.topk import top_k
from xmc_stream.linear.predict import PredictPlan, classes_of, plan_predict, takes_bounds, tile_of
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.runs import RESULT_BYTES, RankingForecaster, filter_pairs, least_block, no_predictions
from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import stream_bytes

_PROBE_ROWS = 1024


@dataclass(frozen=True)
class PredictProbe:
    """Make a few tiles and rank a few rows: seconds for a weight (`make`), a row and class (`score`), a byte (`read`).

    bounded: whether tiles have bounds, where they may.
    """

    model: str
    data: str
    sizes: PredictPlan
    k: int
    bounded: bool

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "probe"

    def run(self) -> Receipt:
        """Make and score."""
        model, X = LinearWeights(self.model), Dataset(self.data).X_rows()
        guide = Guide.of(model)
        began = time.perf_counter()
        block = X.block(0, min(_PROBE_ROWS, X.n_lines))
        read = time.perf_counter() - began
        labels, scores = no_predictions(block.n, self.k)
        chosen = sorted(self.sizes.tiles, key=lambda span: span.weights)[:: max(1, len(self.sizes.tiles) // 3)][:3]
        rate = {"make": 0.0, "score": 0.0}
        for span in chosen:
            began = time.perf_counter()
            tile = tile_of(model, span, self.bounded)
            made = time.perf_counter()
            terms = guide.terms(block, self.sizes.cache_bytes)
            top_k(CSR.of(block), [classes_of(guide, span, tile)], terms, Ranking(labels, scores), filter_pairs([]))
            rate["make"] += (made - began) / max(span.weights, 1) / len(chosen)
            rate["score"] += (time.perf_counter() - made) / max(block.n, 1) / (span.last - span.first) / len(chosen)
        drop_tiles()
        return {**rate, "read": read / max(X.bytes_read, 1)}


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

    def _needs(self, plan: MemoryPlan, sizes: PredictPlan) -> dict[str, int]:
        """Bytes by component that a prediction comes to hold; what is planned and stays untouched left out."""
        t, n, X = plan.threads, self.dataset.n_samples, self.dataset.X_rows()
        rows = min(sizes.rows_per_job, n)
        of_rows = (X.nnz * X.entry_bytes / max(n, 1) + 8) * rows
        return {
            "results": min(t * rows, n) * (self.k * RESULT_BYTES + Guide.of(self.model).row_bytes),
            "tiles": min(sizes.cache_bytes, sum(span.tile for span in sizes.tiles) + sizes.beside_bytes),
            "making tiles": t * (8 * max(span.weights for span in sizes.tiles) + 4 * self.model.n_features),
            "row blocks": t * (min(sizes.row_bytes, int(of_rows * 1.2)) + 2 * MIB),
            **({"counts of labels": t * self.of_labels} if self.evaluate else {}),
        }

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """By a probe of a few tiles and rows."""
        dataset, model, sizes = self.dataset, self.model, self.sizes(plan)
        bounded = takes_bounds(model) and not self.evaluate
        probe = self.once(PredictProbe(str(model.path), str(dataset.path), sizes, self.k, bounded))
        matrices = [dataset.X_rows(), *([dataset.Y_rows()] if self.evaluate else [])]
        n_bytes = stream_bytes(matrices, sizes.ranges(dataset.n_samples))
        times = sizes.times_made(dataset)
        work = probe["score"] * dataset.n_samples * model.n_labels + probe["make"] * times * model.nnz
        work *= 1 + self.evaluate
        seconds = work / (plan.threads * plan.processes) + probe["read"] * n_bytes
        foreseen = self.foreseen(sizes.row_blocks(dataset), n_bytes, self._needs(plan, sizes), seconds)
        return {**foreseen, "tiles_made": times}
