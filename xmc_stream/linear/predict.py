"""Prediction jobs: the exact top k of a range of rows, over all classes, unit by unit; pairs may be filtered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.guide import Guide, GuideSizes, groups_of, terms_of
from xmc_stream.linear.implied import ImpliedLabels, lift_implied
from xmc_stream.linear.kernels.denserows import chunk_bytes
from xmc_stream.linear.kernels.guide import no_terms
from xmc_stream.linear.kernels.implied import lift
from xmc_stream.linear.kernels.scores import NO_BOUNDS, TileClasses
from xmc_stream.linear.kernels.topk import top_k
from xmc_stream.linear.tiles import BoundedTile, TileRange, bounds_bytes, make_bounded, make_tile, widest
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.models.cache import drop_tiles, shared_cache
from xmc_stream.models.calibration import Calibration
from xmc_stream.models.runs import (
    HELD_ROWS,
    LEAST_BLOCK,
    PAIRS,
    PREDICTING,
    RESULT_BYTES,
    CutIntoJobs,
    RankingJob,
    RankingRun,
    calibration_of,
    filter_matrix,
    filter_pairs,
    least_block,
    no_predictions,
)
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, stream, stream_bytes
from xmc_stream.store.predictions import CHUNK_ROWS, write_predictions

_PROBE_ROWS = 1024
_MOST_BOUNDED = 100.0  # weight of groups of labels, which is 2 by default


@dataclass(frozen=True)
class PredictPlan(CutIntoJobs):
    """row_bytes: of X in memory per thread; pair_bytes: of Y or a filter; rows_per_job: whole chunks of the predictions;
    tiles; bytes of what is asked beside them (groups of labels, implied labels, bounds); bytes for all of it.
    """

    row_bytes: int
    pair_bytes: int
    rows_per_job: int
    tiles: tuple[TileRange, ...]
    beside_bytes: int
    cache_bytes: int

    @property
    def keeps_tiles(self) -> bool:
        """Whether every tile is made once; else once for each row block."""
        return sum(span.tile for span in self.tiles) + self.beside_bytes <= self.cache_bytes

    def row_blocks(self, dataset: Dataset) -> int:
        """How many row blocks there are, about."""
        X = dataset.X_rows()
        of_job = (X.nnz * X.entry_bytes / max(X.n_lines, 1) + 8) * min(self.rows_per_job, X.n_lines)
        return len(self.ranges(X.n_lines)) * max(1, -(-int(of_job) // self.row_bytes))

    def times_made(self, dataset: Dataset) -> int:
        """How often each tile is made."""
        return 1 if self.keeps_tiles else self.row_blocks(dataset)


def plan_predict(
    plan: MemoryPlan, model: LinearWeights, n_samples: int, k: int, pairs: bool = False, counts: int = 0,
    least: int = LEAST_BLOCK,
) -> PredictPlan:  # fmt: skip
    """Share the budget between rows and tiles. Raises MemoryLimitError where the narrowest tile does not fit.

    If all tiles fit, they stay; else every row block makes each tile anew: it gets half of what there is, and there are
    no more jobs than threads, so that this is seldom. Threads that come to a tile together share it. pairs: rows have
    pairs beside X. counts: bytes that each thread keeps for itself. least: of X in a row block.
    """
    t = plan.threads
    guide = GuideSizes.of(model)
    of_row = k * RESULT_BYTES + (guide.row_bytes if guide else 0)
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
    making = t * 8 * max(guide.weights if guide else 0, *(span.weights for span in tiles))
    implied = ImpliedLabels.of(model)
    beside = (guide.tile if guide else 0) + (implied.nbytes if implied else 0)
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
    return PredictPlan(row_bytes, row_bytes // PAIRS, rows_per_job, tuple(tiles), beside, cache)


def predict_needs(
    plan: MemoryPlan, model: LinearWeights, dataset: Dataset, k: int, sizes: PredictPlan
) -> dict[str, int]:
    """Bytes by component that a prediction comes to hold; what is planned and stays untouched left out."""
    t, n, X = plan.threads, dataset.n_samples, dataset.X_rows()
    rows = min(sizes.rows_per_job, n)
    of_rows = (X.nnz * X.entry_bytes / max(n, 1) + 8) * rows
    guide = GuideSizes.of(model)
    return {
        "results": min(t * rows, n) * (k * RESULT_BYTES + (guide.row_bytes if guide else 0)),
        "tiles": min(sizes.cache_bytes, sum(span.tile for span in sizes.tiles) + sizes.beside_bytes),
        "making tiles": t * (8 * max(span.weights for span in sizes.tiles) + 4 * model.n_features),
        "row blocks": t * (min(sizes.row_bytes, int(of_rows * 1.2)) + 2 * MIB),
    }


def predict_bytes(dataset: Dataset, sizes: PredictPlan, labels: bool = False) -> int:
    """Bytes of the data that a prediction reads; labels: of Y too, as the metrics of a model need it."""
    matrices = (dataset.X_rows(), dataset.Y_rows()) if labels else (dataset.X_rows(),)
    return stream_bytes(matrices, sizes.ranges(dataset.n_samples))


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
            tile = _make_tile(model, span, self.bounded)
            made = time.perf_counter()
            terms = terms_of(guide, block, self.sizes.cache_bytes)
            top_k(
                CSR.of(block), [classes_of(model, span, tile, guide)], terms, Ranking(labels, scores), filter_pairs([])
            )
            rate["make"] += (made - began) / max(span.weights, 1) / len(chosen)
            rate["score"] += (time.perf_counter() - made) / max(block.n, 1) / (span.last - span.first) / len(chosen)
        drop_tiles()
        return {**rate, "read": read / max(X.bytes_read, 1)}


@dataclass(frozen=True)
class PredictJob(RankingJob):
    """Row block by row block, tile by tile. max_rows: of a row block."""

    sizes: PredictPlan
    max_rows: int

    def run(self) -> Receipt:
        """Predict."""
        model, X = LinearWeights(self.model), Dataset(self.data).X_rows()
        guide, bounded = Guide.of(model), takes_bounds(model, self.raw)
        labels, scores = no_predictions(self.stop - self.start, self.k)
        n_blocks = 0
        matrices = [X, *filter_matrix(self.filtered)]
        most = [self.sizes.row_bytes] + [self.sizes.pair_bytes] * (len(matrices) - 1)
        for x, *filters in stream(matrices, most, self.start, self.stop, self.max_rows):
            mine = slice(x.start - self.start, x.start - self.start + x.n)
            terms = terms_of(guide, x, self.sizes.cache_bytes)
            for span in self.sizes.tiles:  # in ascending order of classes
                with use_tile(model, span, self.sizes, bounded) as tile:
                    top_k(
                        CSR.of(x), [classes_of(model, span, tile, guide, self.raw)], terms,
                        Ranking(labels[mine], scores[mine]), filter_pairs(filters),
                    )  # fmt: skip
                del tile  # or it would stay beside the next one, uncounted
            if not self.raw:
                best = Ranking(labels[mine], scores[mine])
                lift_implied(ImpliedLabels.of(model), best, filter_pairs(filters), self.sizes.cache_bytes)
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, scores)
        return {"bytes_read": X.bytes_read, "row_blocks": n_blocks}


@contextmanager
def use_tile(model: LinearWeights, span: TileRange, sizes: PredictPlan, bounded: bool = False) -> Iterator[BoundedTile]:
    """The tile of a range, from the cache or made. bounded: with bounds, if it is dense enough."""
    cache = shared_cache(sizes.cache_bytes)
    size = span.tile + bounds_bytes([span], model.n_features)
    with cache.use((str(model.path), span, bounded), size, partial(_make_tile, model, span, bounded)) as tile:
        yield tile


def takes_bounds(model: LinearWeights, raw: bool = False) -> bool:
    """Whether tiles may have bounds. raw: scores are not calibrated.

    Bounds know nothing of calibrated scores, and too little of what rounding does to groups of very large weight.
    """
    guide = GuideSizes.of(model)
    light = guide is None or guide.weight <= _MOST_BOUNDED
    return light and (raw or Calibration.of(model.path, model.attributes) is None)


def classes_of(
    model: LinearWeights, span: TileRange, made: BoundedTile, guide: Guide | None, raw: bool = False
) -> TileClasses:
    """The classes of a range, as kernels score them; raw: without calibration."""
    by = calibration_of(model, span.first, span.last, raw)
    groups = groups_of(guide, span.first, span.last)
    scores = np.empty(len(made.tile.bias), np.float32)
    return TileClasses(span.first, span.last - span.first, made.tile, by, groups, made.bounds, scores)


def _make_tile(model: LinearWeights, span: TileRange, bounded: bool) -> BoundedTile:
    unit = model.unit_of(span.first)
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
    guide, implied, spans = GuideSizes.of(model), ImpliedLabels.of(model), held_spans(model)
    return {
        "tiles": sum(span.tile for span in spans)
        + (guide.tile if guide else 0)
        + bounds_bytes(spans, model.n_features),
        "implied labels": implied.nbytes if implied else 0,
        "making tiles": 8 * max(guide.weights if guide else 0, *(span.weights for span in spans))
        + 4 * model.n_features,
        "classes": (20 + (guide.clusterings if guide else 0)) * model.n_labels,
        "ranking": MIB + chunk_bytes(model.n_features) + HELD_ROWS * (guide.row_bytes if guide else 0),
    }


class HeldTiles:
    """All tiles of a model in memory, and what goes with their classes."""

    def __init__(self, model: LinearWeights) -> None:
        guide = Guide.of(model)
        self._groups = None if guide is None else partial(guide.terms_by, guide.make_tile())
        bounded = takes_bounds(model)
        self._classes = [classes_of(model, span, _make_tile(model, span, bounded), guide) for span in held_spans(model)]
        implied = ImpliedLabels.of(model)
        self._implied = None if implied is None else implied.read()

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        terms = no_terms(x.n) if self._groups is None else self._groups(x)
        # other threads rank too
        own = [classes._replace(scores=np.empty_like(classes.scores)) for classes in self._classes]
        top_k(CSR.of(x), own, terms, Ranking(labels, scores), filter_pairs([]))
        if self._implied is not None:
            lift(self._implied, Ranking(labels, scores), filter_pairs([]))


@dataclass
class PredictRun(RankingRun):
    """The jobs of one prediction by a model with weights by class."""

    model: LinearWeights

    def loop(self) -> Loop:
        """One phase; returns bytes and row blocks."""
        drop_tiles()
        n, least = self.dataset.n_samples, least_block(self.dataset, labels=False)
        sizes = plan_predict(self.plan, self.model, n, self.k, bool(self.filtered), least=least)
        jobs = [
            PredictJob(
                str(self.model.path), str(self.dataset.path), start, stop, self.k, str(self.out),
                self.filtered, sizes, self.plan.cuts.rows, raw=self.raw,
            )
            for start, stop in sizes.ranges(n)
        ]  # fmt: skip
        receipts = yield Phase("predict", jobs, PREDICTING, (0.0, 1.0), twice=True)
        drop_tiles()
        return {name: sum(receipt[name] for receipt in receipts) for name in ("bytes_read", "row_blocks")}
