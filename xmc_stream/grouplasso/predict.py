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
    RankingForecaster,
    RankingRun,
    filter_matrix,
    filter_pairs,
    least_block,
    no_predictions,
    rescaling_of,
)
from xmc_stream.runtime.job import Loop, Notes, Phase, Receipt, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan, even_ranges
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, stream, stream_bytes
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import CHUNK_ROWS, begin_predictions, write_predictions

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
class RowsJob(CountingJob):
    """Row block by row block, class block by class block, tile by tile; with a file for counts, an evaluation."""

    sizes: RowsPlan

    @property
    def key(self) -> str:
        """The rows."""
        return f"{'metrics' if self.counts else 'predict'}/{self.start}-{self.stop}"

    def run(self) -> Receipt:
        """Score, predict and count; the receipt of an evaluation has the sum of the rows' AUC, exactly."""
        dataset, model = Dataset(self.data), RowSparseWeights(self.model)
        scorer, read = Scorer(model, self.sizes, self.raw), [dataset.X_rows()]
        labels, best = no_predictions(self.stop - self.start, self.k)
        if self.counts:
            read.append(dataset.Y_rows())
            counts = np.zeros((3, model.n_labels), np.int32)
        matrices, n_blocks, auc = [*read, *filter_matrix(self.filtered)], 0, 0
        most = [self.sizes.row_bytes] + [self.sizes.pair_bytes] * (len(matrices) - 1)
        for x, *others in stream(matrices, most, self.start, self.stop, self.sizes.rows):
            mine, pairs = slice(x.start - self.start, x.start - self.start + x.n), filter_pairs(others[len(read) - 1 :])
            tiles = partial(scorer.tiles, kept(x, scorer.features))
            if self.counts:
                auc += fold_metrics(tiles, others[0], pairs, self.decision, labels[mine], best[mine], counts)
            else:
                for low, tile in tiles():
                    fold_top_k(tile, low, pairs, labels[mine], best[mine])
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, best)
        if self.counts:
            write_counts(Path(self.counts), counts)
        return {"auc": auc, "bytes_read": sum(matrix.bytes_read for matrix in read), "row_blocks": n_blocks}


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
        jobs = [
            RowsJob(
                *about, start, stop, self.k, str(self.out), self.filtered, sizes, raw=self.raw, decision=self.decision,
                counts=self.counts(start) if folder else "",
            )
            for start, stop in sizes.ranges(n)
        ]  # fmt: skip
        receipts = yield Phase("evaluate" if folder else "predict", jobs, PREDICTING, (0.0, 1.0), twice=True)
        drop_tiles()
        if folder:
            return metrics_of(receipts, [Path(job.counts) for job in jobs], n, n_labels)
        return {name: sum(receipt[name] for receipt in receipts) for name in ("bytes_read", "row_blocks")}


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

    @property
    def loads(self) -> str:
        return "row-sparse prediction"

    def load(self) -> None:
        with a_few_rows() as dataset:
            path = Path(dataset.path).parent
            begin_model(path / "model.partial")
            rows = np.arange(3), np.ones((3, dataset.n_labels), np.float32)
            made = write_rows(path / "model.partial" / ROWS, dataset.n_features, dataset.n_labels, [rows])
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            # cut by classes, so that tiles are gathered
            model, plan = RowSparseWeights(path / "model"), MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(classes=2))
            for folder in (None, path):
                out = begin_predictions(path / f"predictions-{folder is None}", dataset.n_samples, dataset.n_labels, 2)
                run_here(RowsRun(model, dataset, 2, out, plan, folder=folder).loop(), Notes())
