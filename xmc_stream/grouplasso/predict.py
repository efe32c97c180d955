"""Prediction by a row-sparse model: rows of X keep the entries of selected features, and are multiplied by tiles of W.

A tile is some rows of W for some classes. A row block is scored class block by class block, tile by tile in the order of
the features: a score is a sum over the entries of its row in their order, whatever the tiles are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.kernels.rows import add_products
from xmc_stream.grouplasso.rows import ROWS, RowSparseWeights, write_rows
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import calibrate_rows
from xmc_stream.kernels.csr import keep_selected
from xmc_stream.kernels.ranking import Ranking, fold_top_k
from xmc_stream.models.cache import shared_cache
from xmc_stream.models.runs import (
    LEAST_BLOCK,
    RESULT_BYTES,
    RankingJob,
    RankingTask,
    StreamPlan,
    filter_pairs,
    rank_a_few,
    rescaling_of,
)
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, stream_bytes
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import CHUNK_ROWS

MOST_CLASSES = 512  # classes of a tile, at most
_TILE = 8 * MIB
_LEAST_TILE = MIB // 4
BLOCK_ROWS = 1024  # of a row block where no tile is read twice: their scores stay in a cache
_LEAST_ROWS = 64
ROW_BYTES = 40  # bytes of a row in a block beside its entries and scores
# in a second, on one thread: guesses, for a time that is said to be about so long
_MULTIPLY_ADDS = 2e9
_SCORES = 5e8  # that are folded into the best k
_BYTES = 1e9  # of weights that are read


@dataclass(frozen=True)
class RowsPlan(StreamPlan):
    """width: classes of a tile, at most; height: rows of W of a tile.

    cache_bytes: of all tiles in memory; keeps_tiles: whether these are all tiles there are.
    """

    width: int
    height: int
    cache_bytes: int
    keeps_tiles: bool


def plan_rows(
    plan: MemoryPlan, model: RowSparseWeights, n_samples: int, k: int, pairs: bool = False, held: int = 0,
    least: int = LEAST_BLOCK,
) -> RowsPlan:  # fmt: skip
    """Share the budget between rows and tiles. Raises MemoryLimitError where the smallest tile does not fit.

    If all tiles fit, they stay. Else each row block reads them anew: it gets most of what there is, so that this is seldom.
    pairs: rows have pairs beside X. held: bytes that each thread keeps for itself. least: of X in a row block.
    """
    t, n, n_labels = plan.threads, model.n_selected, model.n_labels
    most = min(MOST_CLASSES, plan.cuts.classes or MOST_CLASSES)
    width = max(last - first for first, last in even_ranges(n_labels, -(-n_labels // most)))
    total = 4 * n * n_labels
    shares = 2 if pairs else 1
    fixed = {
        "results": t * CHUNK_ROWS * k * RESULT_BYTES,
        "long rows": t * shares * (least - LEAST_BLOCK),
        "windows": t * 5 * MIB,
        "selected features": t * 10 * n,
        "counts": t * held,
    }
    smallest = {"tiles": min(total, max(_LEAST_TILE, 4 * width)), "scores": t * _LEAST_ROWS * (4 * width + ROW_BYTES)}
    plan.refuse_unless({**fixed, **smallest, "row blocks": t * shares * LEAST_BLOCK}, f"predicting on {t} threads")
    left = plan.budget - sum(fixed.values())
    keeps = total + t * (BLOCK_ROWS * (4 * width + ROW_BYTES) + shares * 2 * MIB) <= left * 3 // 4
    tile = min(total, max(4 * width, min(_TILE, left // 4)))
    cache = total if keeps else max(tile, left // 4)
    share = (left - cache) // t
    rows = min(BLOCK_ROWS, share // 2 // (4 * width + ROW_BYTES)) if keeps else share // 2 // (4 * width + ROW_BYTES)
    row_bytes = max(least, min(64 * MIB, share // (8 if pairs else 4)))
    n_chunks, at_once = -(-n_samples // CHUNK_ROWS), t * plan.processes
    of_results = max(1, share // 5 // (CHUNK_ROWS * k * RESULT_BYTES))
    wanted = n_chunks // (4 * at_once) if keeps else -(-n_chunks // at_once)
    return RowsPlan(
        CHUNK_ROWS * min(of_results, max(1, wanted)), min(max(_LEAST_ROWS, rows), plan.cuts.rows or rows + _LEAST_ROWS),
        row_bytes, width, max(1, tile // (4 * width)), cache, keeps,
    )  # fmt: skip


def rows_needs(
    plan: MemoryPlan, model: RowSparseWeights, dataset: Dataset, k: int, sizes: RowsPlan, held: int
) -> dict[str, int]:
    """Bytes by component that a prediction comes to hold; what is planned and stays untouched left out."""
    t, n, X = plan.threads, dataset.n_samples, dataset.X_rows()
    rows = min(sizes.rows_per_job, n)
    of_block = (X.nnz * X.entry_bytes / max(n, 1) + 8) * min(rows, sizes.rows)
    return {
        "results": min(t * rows, n) * k * RESULT_BYTES,
        "tiles": min(sizes.cache_bytes, 4 * model.n_selected * model.n_labels),
        "selected features": t * 10 * model.n_selected,
        "scores": t * min(rows, sizes.rows) * (4 * sizes.width + ROW_BYTES),
        "row blocks": t * (min(sizes.row_bytes, int(of_block * 1.2)) + 2 * MIB),
        "counts of labels": t * held,
    }


def kept(x: Block, features: NDArray[np.int64]) -> CSR:
    """The entries of a block that count, which take the place of all: indices are places among selected features."""
    ends = np.empty(x.n + 1, np.int64)
    keep_selected(x.indptr, x.indices, x.values, features, ends)
    return CSR(ends, x.indices[: ends[-1]], x.values[: ends[-1]])


def class_blocks(n_labels: int, width: int) -> list[tuple[int, int]]:
    """Ranges of at most `width` classes."""
    return even_ranges(n_labels, -(-n_labels // width)) if n_labels else []


class Scorer:
    """Scores of row blocks by the tiles of a model, in one buffer. raw: before calibration."""

    def __init__(self, model: RowSparseWeights, sizes: RowsPlan, raw: bool) -> None:
        self._model, self._sizes, self._raw = model, sizes, raw
        self.features = model.row_features()
        self._blocks = class_blocks(model.n_labels, sizes.width)
        self._room = np.empty(sizes.rows * sizes.width, np.float32)

    def tiles(self, rows: CSR) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Final scores by ranges of classes: the first class, scores (rows x classes), gone when the next ones come."""
        n, rows_of_w = len(rows.indptr) - 1, len(self.features)
        for low, high in self._blocks:
            scores = self._room[: n * (high - low)].reshape(n, high - low)
            scores[:] = 0
            at = rows.indptr[:-1].copy()
            for first in range(0, rows_of_w, self._sizes.height):
                self._add(rows, first, min(first + self._sizes.height, rows_of_w), low, high, at, scores)
            calibrate_rows(scores, rescaling_of(self._model, low, high, self._raw))
            yield low, scores

    def _add(
        self, rows: CSR, first: int, last: int, low: int, high: int, at: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> None:
        key, size = (str(self._model.path), first, last, low, high), 4 * (last - first) * (high - low)
        read = partial(self._model.rows, first, last, low, high)
        with shared_cache(self._sizes.cache_bytes).use(key, size, read) as tile:
            add_products(rows.indptr, rows.indices, rows.values, first, tile, at, scores)


@dataclass(frozen=True)
class RowsJob(RankingJob):
    """Class block by class block, tile by tile."""

    sizes: RowsPlan

    def opened(self) -> Scorer:
        """See `RankingJob`."""
        return Scorer(RowSparseWeights(self.model), self.sizes, self.wanted.raw)

    def fold(
        self,
        model: Scorer,
        rows: range,
        read: tuple[Block, ...],
        barred: Labels,
        best: Ranking,
        counts: NDArray[np.int32],
    ) -> int:
        """See `RankingJob`."""
        tiles = partial(model.tiles, kept(read[0], model.features))
        return self.fold_tiles(tiles, read[1:], barred, best, counts)


class HeldRows:
    """All rows of W in memory, by ranges of classes, and what goes with these."""

    def __init__(self, model: RowSparseWeights) -> None:
        self._features = model.row_features()
        self._tiles = [
            (low, model.rows(0, model.n_selected, low, high), rescaling_of(model, low, high))
            for low, high in class_blocks(model.n_labels, MOST_CLASSES)
        ]

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        for first in range(0, x.n, BLOCK_ROWS):
            mine = slice(first, min(first + BLOCK_ROWS, x.n))
            rows = kept(x.lines(mine.start, mine.stop), self._features)
            for low, tile, by in self._tiles:
                found = np.zeros((mine.stop - first, tile.shape[1]), np.float32)
                add_products(rows.indptr, rows.indices, rows.values, 0, tile, rows.indptr[:-1].copy(), found)
                calibrate_rows(found, by)
                fold_top_k(found, low, filter_pairs(), labels[mine], scores[mine])


@dataclass(frozen=True)
class RowsTask(RankingTask):
    """A prediction or an evaluation by a row-sparse model."""

    job = RowsJob

    model: RowSparseWeights

    def sizes(self, plan: MemoryPlan) -> RowsPlan:
        """See `RankingTask`."""
        n = self.dataset.n_samples
        return plan_rows(plan, self.model, n, self.k, self.pairs, self.of_labels, self.least_block)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether every tile is read once."""
        return self.sizes(plan).keeps_tiles

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the numbers of multiply-adds and scores, which the counts of the selected features tell exactly."""
        model, dataset, sizes = self.model, self.dataset, self.sizes(plan)
        matrices = (dataset.X_rows(), dataset.Y_rows()) if self.evaluate else (dataset.X_rows(),)
        n_bytes = stream_bytes(matrices, sizes.ranges(dataset.n_samples))
        times = 1 if sizes.keeps_tiles else (1 + self.evaluate) * sizes.row_blocks(dataset)
        entries = int(dataset.feature_counts()[model.row_features()].sum())
        work = (entries / _MULTIPLY_ADDS + dataset.n_samples / _SCORES) * model.n_labels * (1 + self.evaluate)
        work += times * 4 * model.n_selected * model.n_labels / _BYTES
        needs = rows_needs(plan, model, dataset, self.k, sizes, self.of_labels)
        seconds = work / (plan.threads * plan.processes)
        return {**self.foreseen(sizes.row_blocks(dataset), n_bytes, needs, seconds), "tiles_made": times}


@dataclass(frozen=True)
class RowsWarmUp(WarmUp):
    """Predict a few rows, and evaluate a model on them."""

    seconds = 12.0

    def load(self) -> None:
        with a_few_rows() as dataset:
            path = Path(dataset.path).parent
            begin_model(path / "model.partial")
            rows = np.arange(3), np.ones((3, dataset.n_labels), np.float32)
            made = write_rows(path / "model.partial" / ROWS, dataset.n_features, dataset.n_labels, [rows])
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            model = RowSparseWeights(path / "model")
            for evaluate in (False, True):  # cut by classes, so that tiles are gathered
                rank_a_few(RowsTask(model, dataset, 2, evaluate=evaluate), classes=2)
