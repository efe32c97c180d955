"""Prediction by a row-sparse model: rows of X keep the entries of selected features, and are multiplied by tiles of W.

A tile is some rows of W for some classes. A row block is scored class block by class block, tile by tile in the order of
the features: a score is a sum over the entries of its row in their order, whatever the tiles are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.kernels.rows import add_products
from xmc_stream.grouplasso.rows import RowSparseWeights
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.calibration import calibrate_rows
from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.kernels.selected import keep_selected
from xmc_stream.models.cache import drop_tiles, shared_cache
from xmc_stream.models.counts import fold_metrics, metrics_of, write_counts
from xmc_stream.models.runs import (
    LEAST_BLOCK,
    PAIRS,
    PREDICTING,
    RESULT_BYTES,
    CountingJob,
    CutIntoJobs,
    RankingJob,
    RankingRun,
    filter_matrix,
    filter_pairs,
    least_block,
    no_predictions,
    rescaling_of,
)
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, stream
from xmc_stream.store.predictions import CHUNK_ROWS, write_predictions

_WIDTH = 512  # classes of a tile, at most
_TILE = 8 * MIB
_LEAST_TILE = MIB // 4
_ROWS = 1024  # of a row block where no tile is read twice: their scores stay in a cache
_LEAST_ROWS = 64
_ROW = 40  # bytes of a row in a block beside its entries and scores


@dataclass(frozen=True)
class RowsPlan(CutIntoJobs):
    """How a prediction is cut.

    width: classes of a tile, at most; height: rows of W of a tile. rows: of a row block, at most; row_bytes: of its part of
    X; pair_bytes: of its part of Y or of a filter. rows_per_job: whole chunks of the predictions. cache_bytes: of all tiles
    in memory; keeps_tiles: whether these are all tiles there are.
    """

    width: int
    height: int
    rows: int
    row_bytes: int
    pair_bytes: int
    rows_per_job: int
    cache_bytes: int
    keeps_tiles: bool

    def row_blocks(self, dataset: Dataset) -> int:
        """How many row blocks there are, about."""
        X = dataset.X_rows()
        of_job: int = min(self.rows_per_job, X.n_lines)
        n_bytes = int((X.nnz * X.entry_bytes / max(X.n_lines, 1) + 8) * of_job)
        return len(self.ranges(X.n_lines)) * max(1, -(-of_job // self.rows), -(-n_bytes // self.row_bytes))


def plan_rows(
    plan: MemoryPlan, model: RowSparseWeights, n_samples: int, k: int, pairs: bool = False, held: int = 0,
    least: int = LEAST_BLOCK,
) -> RowsPlan:  # fmt: skip
    """Share the budget between rows and tiles. Raises MemoryLimitError where the smallest tile does not fit.

    If all tiles fit, they stay. Else each row block reads them anew: it gets most of what there is, so that this is seldom.
    pairs: rows have pairs beside X. held: bytes that each thread keeps for itself. least: of X in a row block.
    """
    t, n, n_labels = plan.threads, model.n_selected, model.n_labels
    most = min(_WIDTH, plan.cuts.classes or _WIDTH)
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
    smallest = {"tiles": min(total, max(_LEAST_TILE, 4 * width)), "scores": t * _LEAST_ROWS * (4 * width + _ROW)}
    plan.refuse_unless({**fixed, **smallest, "row blocks": t * shares * LEAST_BLOCK}, f"predicting on {t} threads")
    left = plan.budget - sum(fixed.values())
    keeps = total + t * (_ROWS * (4 * width + _ROW) + shares * 2 * MIB) <= left * 3 // 4
    tile = min(total, max(4 * width, min(_TILE, left // 4)))
    cache = total if keeps else max(tile, left // 4)
    share = (left - cache) // t
    rows = min(_ROWS, share // 2 // (4 * width + _ROW)) if keeps else share // 2 // (4 * width + _ROW)
    row_bytes = max(least, min(64 * MIB, share // (8 if pairs else 4)))
    n_chunks, at_once = -(-n_samples // CHUNK_ROWS), t * plan.processes
    of_results = max(1, share // 5 // (CHUNK_ROWS * k * RESULT_BYTES))
    wanted = n_chunks // (4 * at_once) if keeps else -(-n_chunks // at_once)
    return RowsPlan(
        width, max(1, tile // (4 * width)), min(max(_LEAST_ROWS, rows), plan.cuts.rows or rows + _LEAST_ROWS), row_bytes,
        row_bytes // PAIRS, CHUNK_ROWS * min(of_results, max(1, wanted)), cache, keeps,
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
        "scores": t * min(rows, sizes.rows) * (4 * sizes.width + _ROW),
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
        self._features = model.rows.features()
        self._blocks = class_blocks(model.n_labels, sizes.width)
        self._room = np.empty(sizes.rows * sizes.width, np.float32)

    def kept(self, x: Block) -> CSR:
        """See `kept`."""
        return kept(x, self._features)

    def tiles(self, rows: CSR) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Final scores by ranges of classes: the first class, scores (rows x classes), gone when the next ones come."""
        n, rows_of_w = len(rows.indptr) - 1, len(self._features)
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
        read = partial(self._model.rows.block, first, last, low, high)
        with shared_cache(self._sizes.cache_bytes).use(key, size, read) as tile:
            add_products(rows.indptr, rows.indices, rows.values, first, tile, at, scores)


@dataclass(frozen=True)
class RowsJob(RankingJob):
    """Row block by row block, class block by class block, tile by tile."""

    sizes: RowsPlan

    def run(self) -> Receipt:
        """Predict."""
        X = Dataset(self.data).X_rows()
        scorer = Scorer(RowSparseWeights(self.model), self.sizes, self.raw)
        labels, best = no_predictions(self.stop - self.start, self.k)
        matrices, n_blocks = [X, *filter_matrix(self.filtered)], 0
        most = [self.sizes.row_bytes] + [self.sizes.pair_bytes] * (len(matrices) - 1)
        for x, *filters in stream(matrices, most, self.start, self.stop, self.sizes.rows):
            mine, pairs = slice(x.start - self.start, x.start - self.start + x.n), filter_pairs(filters)
            for low, tile in scorer.tiles(scorer.kept(x)):
                fold_top_k(tile, low, pairs, labels[mine], best[mine])
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, best)
        return {"bytes_read": X.bytes_read, "row_blocks": n_blocks}


@dataclass(frozen=True)
class EvaluateRowsJob(CountingJob, RowsJob):
    """As a RowsJob, and counts for metrics."""

    def run(self) -> Receipt:
        """Score, predict and count; the receipt has the sum of the rows' AUC, exactly."""
        dataset, model = Dataset(self.data), RowSparseWeights(self.model)
        X, Y, scorer = dataset.X_rows(), dataset.Y_rows(), Scorer(model, self.sizes, self.raw)
        labels, best = no_predictions(self.stop - self.start, self.k)
        counts = np.zeros((3, model.n_labels), np.int32)
        matrices, n_blocks, auc = [X, Y, *filter_matrix(self.filtered)], 0, 0
        most = [self.sizes.row_bytes] + [self.sizes.pair_bytes] * (len(matrices) - 1)
        for x, y, *filters in stream(matrices, most, self.start, self.stop, self.sizes.rows):
            mine = slice(x.start - self.start, x.start - self.start + x.n)
            tiles = partial(scorer.tiles, scorer.kept(x))
            auc += fold_metrics(tiles, y, filter_pairs(filters), self.decision, labels[mine], best[mine], counts)
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, best)
        write_counts(Path(self.counts), counts)
        return {"auc": auc, "bytes_read": X.bytes_read + Y.bytes_read, "row_blocks": n_blocks}


def held_needs(model: RowSparseWeights) -> dict[str, int]:
    """See `Model.held_needs`."""
    return {
        "tiles": 4 * model.n_selected * model.n_labels,
        "classes": 16 * model.n_labels,
        "selected features": 10 * model.n_selected + 5 * MIB,
        "ranking": _ROWS * (4 * min(_WIDTH, model.n_labels) + _ROW),
    }


class HeldRows:
    """All rows of W in memory, by ranges of classes, and what goes with these."""

    def __init__(self, model: RowSparseWeights) -> None:
        self._features = model.rows.features()
        self._tiles = [
            (low, model.rows.block(0, model.n_selected, low, high), rescaling_of(model, low, high))
            for low, high in class_blocks(model.n_labels, _WIDTH)
        ]

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        for first in range(0, x.n, _ROWS):
            mine = slice(first, min(first + _ROWS, x.n))
            rows = kept(x.lines(mine.start, mine.stop), self._features)
            for low, tile, by in self._tiles:
                found = np.zeros((mine.stop - first, tile.shape[1]), np.float32)
                add_products(rows.indptr, rows.indices, rows.values, 0, tile, rows.indptr[:-1].copy(), found)
                calibrate_rows(found, by)
                fold_top_k(found, low, filter_pairs([]), labels[mine], scores[mine])


@dataclass
class RowsRun(RankingRun):
    """The jobs of one prediction by a row-sparse model; with a folder for counts, of an evaluation."""

    model: RowSparseWeights

    def loop(self) -> Loop:
        """One phase; returns bytes and row blocks, or the metrics."""
        drop_tiles()
        n, n_labels, folder = self.dataset.n_samples, self.model.n_labels, self.folder
        least = least_block(self.dataset, labels=folder is not None)
        sizes = plan_rows(self.plan, self.model, n, self.k, bool(self.filtered or folder), self.of_labels, least)
        about = str(self.model.path), str(self.dataset.path)
        jobs: list[RowsJob] = []
        for start, stop in sizes.ranges(n):
            common = (*about, start, stop, self.k, str(self.out), self.filtered, sizes)
            if folder:
                counts = self.counts(start)
                jobs.append(EvaluateRowsJob(*common, decision=self.decision, counts=counts, raw=self.raw))
            else:
                jobs.append(RowsJob(*common, raw=self.raw))
        receipts = yield Phase("evaluate" if folder else "predict", jobs, PREDICTING, (0.0, 1.0), twice=True)
        drop_tiles()
        if folder:
            return metrics_of(receipts, [Path(self.counts(job.start)) for job in jobs], n, n_labels)
        return {name: sum(receipt[name] for receipt in receipts) for name in ("bytes_read", "row_blocks")}
