"""Prediction and evaluation: the exact top k of all rows, over all classes, tile by tile; counts over all classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.metrics import sort_rows
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.guide import GUIDE, Guide, write_guide
from xmc_stream.linear.implied import IMPLIED, ImpliedLabels
from xmc_stream.linear.kernels.implied import lift
from xmc_stream.linear.kernels.scores import NO_BOUNDS, TileClasses, chunk_bytes
from xmc_stream.linear.kernels.topk import TrueScores, count_above, score_positives, top_k
from xmc_stream.linear.tiles import BoundedTile, TileRange, TileSizes, bounds_bytes, make_bounded, make_tile, widest
from xmc_stream.linear.weights import LinearWeights, new_unit, plain_units, tiles_of, unit_of, unit_path
from xmc_stream.metrics import auc_units, leave_out_labels
from xmc_stream.models.cache import drop_tiles, shared_cache
from xmc_stream.models.calibration import Calibration
from xmc_stream.models.runs import (
    HELD_ROWS,
    HITS,
    LEAST_BLOCK,
    PREDICTED,
    RESULT_BYTES,
    TRUE,
    RankingJob,
    RankingTask,
    StreamPlan,
    calibration_of,
    count_best,
    filter_pairs,
    no_predictions,
    rank_a_few,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Block, stream_bytes
from xmc_stream.store.model import UNIT, begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import CHUNK_ROWS

_PROBE_ROWS = 1024
_MOST_BOUNDED = 100.0  # weight of groups of labels, which is 2 by default


@dataclass(frozen=True)
class PredictPlan(StreamPlan):
    """tiles; bytes of what is asked beside them (groups of labels, implied labels, bounds); bytes for all of it."""

    tiles: tuple[TileRange, ...]
    beside_bytes: int
    cache_bytes: int

    @property
    def keeps_tiles(self) -> bool:
        """Whether every tile is made once; else once for each row block."""
        return sum(span.tile for span in self.tiles) + self.beside_bytes <= self.cache_bytes


def plan_predict(
    plan: MemoryPlan, model: LinearWeights, n_samples: int, k: int, pairs: bool, counts: int,
    least: int,
) -> PredictPlan:  # fmt: skip
    """Share the budget between rows and tiles. Raises MemoryLimitError where the narrowest tile does not fit.

    If all tiles fit, they stay; else every row block makes each tile anew: it gets half of what there is, and there are
    no more jobs than threads, so that this is seldom. Threads that come to a tile together share it. pairs: rows have
    pairs beside X. counts: bytes that each thread keeps for itself. least: of X in a row block.
    """
    t = plan.threads
    guide = Guide.of(model)
    of_row = k * RESULT_BYTES + guide.row_bytes
    shares = 4 if pairs else 2  # X, what is made of pairs, results
    fixed = {
        "results": t * CHUNK_ROWS * of_row,
        "long rows": t * shares * (least - LEAST_BLOCK),
        "windows": t * (4 * MIB + 4 * model.n_features + chunk_bytes(model.n_features)),
        "counts": t * counts,
    }
    left = plan.budget - sum(fixed.values())
    units = [[TileRange(*span) for span in ranges] for ranges in model.tiles]
    # a thread makes a tile while others use theirs; a tile may be half of the room
    tiles = [
        span for ranges in units for span in widest(ranges, lambda span: span.tile + t * 8 * span.weights <= left // 2)
    ]
    making = t * 8 * max(guide.nnz, *(span.weights for span in tiles))
    beside = guide.tile + ImpliedLabels.of(model).nbytes
    largest = beside + max(span.tile + bounds_bytes([span], model.n_features) for span in tiles)
    beside += bounds_bytes(tiles, model.n_features)
    total = beside + sum(span.tile for span in tiles)
    need = {**fixed, "making tiles": making, "tiles": largest, "row blocks": t * shares * LEAST_BLOCK}
    plan.refuse_unless(need, f"predicting on {t} threads")
    left -= making
    cache = total if total <= left * 3 // 4 else max(largest, left // 2)
    row_bytes = max(least, min(64 * MIB, (left - cache) // t // shares))
    # results of a job stay in memory until it ends
    most = max(1, (left - cache) // t // 2 // (CHUNK_ROWS * of_row))
    n_chunks = -(-n_samples // CHUNK_ROWS)
    at_once = t * plan.processes
    wanted = n_chunks // (4 * at_once) if total <= cache else -(-n_chunks // at_once)
    rows_per_job = CHUNK_ROWS * min(most, max(1, wanted))
    return PredictPlan(rows_per_job, plan.cuts.rows, row_bytes, tuple(tiles), beside, cache)


@dataclass(frozen=True)
class PredictJob(RankingJob):
    """Tile by tile."""

    sizes: PredictPlan

    def opened(self) -> LinearWeights:
        """See `RankingJob`."""
        return LinearWeights(self.model)

    def fold(
        self, model: LinearWeights, rows: range, read: tuple[Block, ...], barred: Labels, best: Ranking,
        counts: NDArray[np.int32],
    ) -> int:  # fmt: skip
        """See `RankingJob`."""
        guide, (x, *y), auc = Guide.of(model), read, 0
        if y:
            auc = self._count(guide, x, y[0], barred, best, counts)
        else:
            self._rank(guide, x, barred, best)
        if not self.wanted.raw:
            ImpliedLabels.of(model).lift(best, barred, self.sizes.cache_bytes)
        return auc

    def _rank(self, guide: Guide, x: Block, barred: Labels, best: Ranking) -> None:
        """Fold a row block into predictions."""
        terms, bounded = guide.terms(x, self.sizes.cache_bytes), takes_bounds(guide.model, self.wanted.raw)
        for span in self.sizes.tiles:  # in ascending order of classes
            with use_classes(guide, span, self.sizes, bounded, self.wanted.raw) as classes:
                top_k(CSR.of(x), [classes], terms, best, barred)
            del classes  # or the tile would stay beside the next one, uncounted

    def _count(self, guide: Guide, x: Block, y: Block, barred: Labels, best: Ranking, counts: NDArray[np.int32]) -> int:
        """Fold a row block into predictions and counts; returns the sum of its rows' AUC.

        It is scored twice. The first time, only rows with a true label in a tile are scored for it, for the scores of true
        labels; the second time all are, for the top k and for how many classes exceed each true label.
        """
        true = Labels.of(y)
        if len(barred.indptr):
            true = Labels(*leave_out_labels(*true, *barred))
        rows, terms = CSR.of(x), guide.terms(x, self.sizes.cache_bytes)
        positives = np.empty(len(true.indices), np.float32)
        for span in reversed(self.sizes.tiles):  # so that a cache that is too small holds what comes first below
            with use_classes(guide, span, self.sizes) as classes:
                score_positives(rows, true, classes, terms, positives)
            del classes
        threshold = self.wanted.decision.above
        count_indices(true.indices, counts[TRUE])
        count_indices(true.indices[positives > threshold], counts[HITS])
        sort_rows(true.indptr, positives)
        of_true, above = TrueScores(true.indptr, positives), np.zeros(x.n, np.int64)
        for span in self.sizes.tiles:
            with use_classes(guide, span, self.sizes) as classes:
                count_above(rows, classes, terms, best, barred, of_true, threshold, counts[PREDICTED], above)
            del classes
        count_best(self.wanted.decision, best, true, counts)
        return auc_units(above, np.diff(true.indptr), counts.shape[1])


@contextmanager
def use_classes(
    guide: Guide, span: TileRange, sizes: PredictPlan, bounded: bool = False, raw: bool = False
) -> Iterator[TileClasses]:
    """The classes of a range, their tile from the cache or made.

    bounded: with bounds, if it is dense enough; raw: without calibration.
    """
    size = span.tile + bounds_bytes([span], guide.model.n_features)
    key = (str(guide.model.path), span, bounded)
    with shared_cache(sizes.cache_bytes).use(key, size, partial(tile_of, guide.model, span, bounded)) as tile:
        yield classes_of(guide, span, tile, raw)


def takes_bounds(model: LinearWeights, raw: bool = False) -> bool:
    """Whether tiles may have bounds. raw: scores are not calibrated.

    Bounds know nothing of calibrated scores, and too little of what rounding does to groups of very large weight.
    """
    return Guide.of(model).weight <= _MOST_BOUNDED and (raw or Calibration.of(model.path, model.attributes) is None)


def classes_of(guide: Guide, span: TileRange, made: BoundedTile, raw: bool = False) -> TileClasses:
    """The classes of a range, as kernels score them; raw: without calibration."""
    by = calibration_of(guide.model, span.first, span.last, raw)
    groups = guide.groups_of(span.first, span.last)
    scores = np.empty(len(made.tile.bias), np.float32)
    return TileClasses(span.first, span.last - span.first, made.tile, by, groups, made.bounds, scores)


def tile_of(model: LinearWeights, span: TileRange, bounded: bool) -> BoundedTile:
    """The tile of a range. bounded: with bounds, if it is dense enough."""
    unit = unit_of(model.units, span.first)
    mine = slice(span.first - unit.first, span.last - unit.first)
    weights = model.unit_weights(unit)
    if (nnz := int(np.ptp(weights.ends(mine.start, mine.stop)))) != span.weights:
        raise StoreError(
            f"{weights.path}: classes {span.first} to {span.last} have {nnz} weights, and {span.weights} by the model's tiles: "
            "it is damaged; train it again"
        )
    block = weights.block(mine.start, mine.stop)
    bias = np.maximum(model.unit_array(unit)[mine], UNSEEN)  # it is -inf for labels without training rows
    csc = block.indptr, block.indices, block.values, bias, model.n_features
    return make_bounded(span, *csc) if bounded else BoundedTile(make_tile(*csc), NO_BOUNDS)


def held_spans(model: LinearWeights) -> list[TileRange]:
    """The widest tiles."""
    return [span for ranges in model.tiles for span in widest([TileRange(*s) for s in ranges], lambda _: True)]


def held_needs(model: LinearWeights) -> dict[str, int]:
    """See `Model.held_needs`."""
    guide, spans, d = Guide.of(model), held_spans(model), model.n_features
    return {
        "tiles": sum(span.tile for span in spans) + guide.tile + bounds_bytes(spans, d),
        "implied labels": ImpliedLabels.of(model).nbytes,
        "making tiles": 8 * max(guide.nnz, *(span.weights for span in spans)) + 4 * d,
        "classes": (20 + guide.clusterings) * model.n_labels,
        "ranking": MIB + chunk_bytes(d) + HELD_ROWS * guide.row_bytes,
    }


class HeldTiles:
    """All tiles of a model in memory, and what goes with their classes."""

    def __init__(self, model: LinearWeights) -> None:
        self._guide, bounded, implied = Guide.of(model), takes_bounds(model), ImpliedLabels.of(model)
        self._groups = self._guide.make_tile() if self._guide.clusterings else None
        self._classes = [classes_of(self._guide, span, tile_of(model, span, bounded)) for span in held_spans(model)]
        self._implied = implied.read() if implied.pairs else None

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        # other threads rank too
        own = [classes._replace(scores=np.empty_like(classes.scores)) for classes in self._classes]
        best, barred = Ranking(labels, scores), filter_pairs()
        top_k(CSR.of(x), own, self._guide.terms_by(self._groups, x), best, barred)
        if self._implied is not None:
            lift(self._implied, best, barred)


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
            top_k(CSR.of(block), [classes_of(guide, span, tile)], terms, Ranking(labels, scores), filter_pairs())
            rate["make"] += (made - began) / max(span.weights, 1) / len(chosen)
            rate["score"] += (time.perf_counter() - made) / max(block.n, 1) / (span.last - span.first) / len(chosen)
        drop_tiles()
        return {**rate, "read": read / max(X.bytes_read, 1)}


@dataclass(frozen=True)
class LinearTask(RankingTask):
    """A prediction or an evaluation by a model with weights by class."""

    job = PredictJob

    model: LinearWeights

    def sizes(self, plan: MemoryPlan) -> PredictPlan:
        """See `RankingTask`."""
        n = self.dataset.n_samples
        return plan_predict(plan, self.model, n, self.k, self.pairs, self.of_labels, self.least_block)

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
        times = 1 if sizes.keeps_tiles else sizes.row_blocks(dataset)
        work = probe["score"] * dataset.n_samples * model.n_labels + probe["make"] * times * model.nnz
        work *= 1 + self.evaluate
        seconds = work / (plan.threads * plan.processes) + probe["read"] * n_bytes
        foreseen = self.foreseen(sizes.row_blocks(dataset), n_bytes, self._needs(plan, sizes), seconds)
        return {**foreseen, "tiles_made": times}


@dataclass(frozen=True)
class LinearWarmUp(WarmUp):
    """Predict a few rows, or evaluate a model on them, which predicts them too.

    guided: by a model with groups of labels; lifts: with implied labels; fours: rows may have most features, and so may
    classes.
    """

    seconds = 12.0

    evaluate: bool
    guided: bool = False
    lifts: bool = False
    fours: bool = False

    def load(self) -> None:
        # rows in fours and one by one, tiles with bounds and without
        of_each_kind: dict[str, Any] = {"n": 42, "d": 6, "k": UNIT + 3}
        with a_few_rows(**of_each_kind if self.fours else {}) as dataset:
            path, d = Path(dataset.path).parent, dataset.n_features
            begin_model(path / "model.partial")
            of_units = []
            for unit in plain_units(dataset.n_labels):
                n, sizes = unit.last - unit.first, TileSizes(*unit, d)
                with new_unit(unit_path(path / "model.partial", unit), d, n) as writer:
                    counts, features = np.full(n, d), np.tile(np.arange(d, dtype=np.int32), n)
                    writer.weights.append(counts, features, np.ones(n * d, np.float32))
                    sizes.add(counts, features)
                of_units.append({"tile_ranges": [astuple(span) for span in sizes.ranges]})
            made: dict[str, Any] = {"nnz": d * dataset.n_labels, "tiles": tiles_of(of_units)}
            if self.guided:
                none = Block(0, np.zeros(2, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))
                groups = np.zeros((1, dataset.n_labels), np.uint8)
                write_guide(path / "model.partial" / GUIDE, d, [none], np.ones(1, np.float32), groups)
                made[GUIDE] = {"weight": 1.0, "clusterings": 1, "groups": 1, "tile": MIB, "weights": 0}
            if self.lifts:
                k = dataset.n_labels
                with new_matrix(path / "model.partial" / IMPLIED, "csr_matrix", (k, k), None) as implied:
                    implied.append(np.arange(k) < 1, np.array([k - 1], np.int32))  # the first implies the last
                made[IMPLIED] = {"margin": 0.01, "pairs": 1}
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            model = LinearWeights(path / "model")
            rank_a_few(LinearTask(model, dataset, 2, evaluate=self.evaluate))
