"""Prediction jobs: the exact top k of a range of rows, over all classes, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.errors import InputError
from xmc_stream.jobs.job import Loop, Phase, Receipt
from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.jobs.tiles import Tile, drop_tiles, make_tile, shared_cache
from xmc_stream.kernels.scores import top_k
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix
from xmc_stream.store.model import StoredModel, unit_range
from xmc_stream.store.predictions import CHUNK_ROWS, write_predictions

_RESULT_BYTES = 28  # of a row and rank: label and score, as they are found and as they are written


@dataclass(frozen=True)
class PredictPlan:
    """row_bytes: of X in memory per thread; rows_per_job: whole chunks of the predictions; cache_bytes: for tiles."""

    row_bytes: int
    rows_per_job: int
    cache_bytes: int


def plan_predict(plan: MemoryPlan, model: StoredModel, n_samples: int, k: int) -> PredictPlan:
    """Share the budget between rows and tiles. Raises MemoryLimitError where the largest tile does not fit.

    If all tiles fit, they stay; else every row block loads each tile anew, and gets half of what there is, so that it
    does so seldom.
    """
    tiles = [int(n) for n in model.attributes["tile_bytes"]]
    t = plan.threads
    fixed = {
        "making tiles": t * (8 * max(model.attributes["unit_nnz"]) + 4 * model.n_features),
        "results": t * CHUNK_ROWS * k * _RESULT_BYTES,
        "windows": t * 4 * MIB,
    }
    need = {**fixed, "tiles": max(tiles), "row blocks": t * MIB}
    plan.refuse_unless(need, f"predicting on {t} threads")
    left = plan.budget - sum(fixed.values())
    cache = min(sum(tiles), max(max(tiles), left * 3 // 4 if sum(tiles) <= left * 3 // 4 else left // 2))
    row_bytes = min(64 * MIB, (left - cache) // t // 2)
    at_once = t * plan.processes
    # results of a job stay in memory until it ends
    most = max(1, (left - cache) // t // 2 // (CHUNK_ROWS * k * _RESULT_BYTES))
    n_chunks = -(-n_samples // CHUNK_ROWS)
    return PredictPlan(row_bytes, CHUNK_ROWS * min(most, max(1, n_chunks // (4 * at_once))), cache)


@dataclass(frozen=True)
class PredictJob:
    """Rows [start, stop): their k best classes, written to the predictions under construction at `out`."""

    model: str
    data: str
    start: int
    stop: int
    k: int
    out: str
    sizes: PredictPlan
    max_rows: int = 0

    @property
    def key(self) -> str:
        """The rows."""
        return f"predict/{self.start}-{self.stop}"

    def run(self) -> Receipt:
        """Predict."""
        model, dataset = StoredModel(self.model), Dataset(self.data)
        X = dataset.X_rows()
        labels = np.full((self.stop - self.start, self.k), -1, np.int64)
        scores = np.full((self.stop - self.start, self.k), -np.inf, np.float32)
        buffer = Buffer(X, min(X.nnz, self.sizes.row_bytes // X.entry_bytes))
        n_blocks = 0
        for start, stop in self._cuts(X):
            mine = slice(start - self.start, stop - self.start)
            _fold(model, X.block(start, stop, buffer), labels[mine], scores[mine], self.sizes.cache_bytes)
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, scores)
        return {"bytes_read": X.bytes_read, "row_blocks": n_blocks}

    def _cuts(self, X: SparseMatrix) -> Iterator[tuple[int, int]]:
        for first, last, _ in X.cuts(self.sizes.row_bytes, self.start, self.stop):
            step = self.max_rows or last - first
            yield from ((a, min(a + step, last)) for a in range(first, last, step))


def _fold(
    model: StoredModel, block: Block, labels: np.ndarray, scores: np.ndarray, cache_bytes: int
) -> None:
    """Fold all units' scores of a row block into its rows' best labels and scores, units in ascending order."""
    cache = shared_cache(cache_bytes)
    for unit, size in enumerate(model.attributes["tile_bytes"]):
        first, last = unit_range(unit, model.n_labels)
        with cache.use((str(model.path), unit), size, lambda u=unit: _make_tile(model, u)) as tile:
            top_k(
                block.indptr, block.indices, block.values, first, last - first, tile.start, tile.slots, tile.weights,
                tile.bias, np.empty(len(tile.bias), np.float32), labels, scores,
            )  # fmt: skip


def _make_tile(model: StoredModel, unit: int) -> Tile:
    matrix = model.unit_weights(unit)
    block = matrix.block(0, matrix.n_lines)
    return make_tile(block.indptr, block.indices, block.values, model.unit_array(unit), model.n_features)


@dataclass
class PredictRun:
    """The jobs of one prediction."""

    model: StoredModel
    dataset: Dataset
    k: int
    out: Path
    plan: MemoryPlan

    def __post_init__(self) -> None:
        if self.dataset.n_features != self.model.n_features:
            raise InputError(
                f"{self.dataset.path} has {self.dataset.n_features} features and the model {self.model.path} has "
                f"{self.model.n_features}: convert the data again with --like and the training set"
            )

    def loop(self) -> Loop:
        """One phase; returns bytes and row blocks."""
        drop_tiles()
        sizes = plan_predict(self.plan, self.model, self.dataset.n_samples, self.k)
        n = self.dataset.n_samples
        jobs = [
            PredictJob(
                str(self.model.path), str(self.dataset.path), start, min(start + sizes.rows_per_job, n), self.k,
                str(self.out), sizes, self.plan.cuts.rows,
            )
            for start in range(0, n, sizes.rows_per_job)
        ]  # fmt: skip
        receipts = yield Phase("predict", jobs)
        drop_tiles()
        return {name: sum(receipt[name] for receipt in receipts) for name in ("bytes_read", "row_blocks")}
