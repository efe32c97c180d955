"""Prediction by a low-rank model: A = X W, onto disk, then the best k of A H^T by row blocks and tiles.

Tiles of A H^T have fixed sizes, so that a score comes out the same wherever it is computed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import FACTORS, ColumnRange, LowRankFactors, Panels, new_factors, take
from xmc_stream.factors.products import BLOCK, Learned, ProjectJob, tiles
from xmc_stream.factors.rowblocks import ROW_BYTES, ROW_LINES
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.calibration import calibrate_rows
from xmc_stream.kernels.lines import lanes
from xmc_stream.kernels.ranking import Ranking, fold_top_k
from xmc_stream.models.runs import (
    RESULT_BYTES,
    RankingJob,
    RankingPlan,
    RankingTask,
    Wanted,
    filter_pairs,
    rank_a_few,
    rescaling_of,
)
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges, jobs_worth
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.store.predictions import CHUNK_ROWS
from xmc_stream.system.blas import one_blas_thread

_PROJECTED = 0.3  # of a prediction, that projecting the samples takes
# in a second, of dense products on one thread: a guess, for a time that is said to be about so long
_MULTIPLY_ADDS = 5e9


@dataclass(frozen=True)
class ScorePlan(RankingPlan):
    """col_ranges: columns of W, and parts: rows of X, a job each pair of them."""

    col_ranges: tuple[ColumnRange, ...]
    parts: tuple[tuple[int, int], ...]

    def blocks(self, matrices: list[SparseMatrix], start: int, stop: int) -> Iterator[tuple[range, tuple[Block, ...]]]:
        """As many rows as a product takes."""
        for first in range(start, stop, BLOCK):
            rows = range(first, min(first + BLOCK, stop))
            yield rows, tuple(matrix.block(rows.start, rows.stop) for matrix in matrices)


def score_needs(
    plan: MemoryPlan,
    model: LowRankFactors,
    k: int,
    width: int,
    rows: int,
    counts: int,
    block_bytes: int,
    jobs: int,
) -> dict[str, int]:
    """Bytes by component: of the phase that needs more, so many columns or rows in a job.

    counts: by each thread for itself. block_bytes: of a row block of X. jobs: for the same columns.
    """
    t, r = plan.threads, model.rank
    beside, width = min(t, jobs * -(-r // width)), lanes(width)
    columns = {
        "columns of W": beside * 4 * (model.n_features + 1) * width,
        "row blocks": beside * (ROW_BYTES + block_bytes + 8 * ROW_LINES * width + 2 * MIB),
    }
    scores = {
        "results": t * rows * k * RESULT_BYTES,
        "scores": t * (8 * BLOCK * BLOCK + 12 * BLOCK * r + 4 * MIB),
        "counts": t * counts,
    }
    return max(columns, scores, key=lambda needs: sum(needs.values()))


def plan_scores(plan: MemoryPlan, model: LowRankFactors, dataset: Dataset, k: int, counts: int) -> ScorePlan:
    """As many columns of W, and rows of results, as there is room for. Raises MemoryLimitError.

    A job has all columns, where they fit, and some rows: then X is read once.
    """
    n, r, X = dataset.n_samples, model.rank, dataset.X_rows()
    block_bytes, at_once = X.block_bytes(ROW_BYTES), plan.threads * plan.processes

    def needs(width: int, rows: int, jobs: int) -> dict[str, int]:
        return score_needs(plan, model, k, width, rows, counts, block_bytes, jobs)

    plan.refuse_unless(needs(1, CHUNK_ROWS, 1), f"predicting on {plan.threads} threads")

    jobs, width = min(-(-n // BLOCK) or 1, jobs_worth(at_once, X.nnz * r, (model.n_features + 1) * r)), r
    while jobs > 1 and sum(needs(width, CHUNK_ROWS, jobs).values()) > plan.budget:
        jobs -= 1
    while width > 1 and sum(needs(width, CHUNK_ROWS, jobs).values()) > plan.budget:
        width -= 1
    chunks = max(1, -(-n // CHUNK_ROWS) // (4 * at_once))
    while chunks > 1 and sum(needs(width, chunks * CHUNK_ROWS, jobs).values()) > plan.budget:
        chunks -= 1
    rows = tuple((a * BLOCK, min(b * BLOCK, n)) for a, b in even_ranges(-(-n // BLOCK), jobs))
    return ScorePlan(chunks * CHUNK_ROWS, tuple(even_ranges(r, -(-r // width))), rows)


@dataclass(frozen=True)
class ScoreJob(RankingJob):
    """Tile by tile of A H^T. scores: A."""

    scores: Panels

    def read(self, dataset: Dataset) -> list[SparseMatrix]:
        """Of the samples A is there: Y alone, for an evaluation."""
        return super().read(dataset)[1:]

    def opened(self) -> LowRankFactors:
        """See `RankingJob`."""
        return LowRankFactors(self.model)

    def fold(
        self, model: LowRankFactors, rows: range, read: tuple[Block, ...], barred: Labels, best: Ranking,
        counts: NDArray[np.int32],
    ) -> int:  # fmt: skip
        """See `RankingJob`."""
        lines = self.scores.read(rows.start, rows.stop)
        return self.fold_tiles(partial(self._tiles, model, lines), read, barred, best, counts)

    def run(self) -> Receipt:
        """As every job, without threads of BLAS."""
        with one_blas_thread():
            return super().run()

    def _tiles(self, model: LowRankFactors, lines: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Final scores by tiles of classes, see `factors.products.tiles`."""
        for low, tile in tiles(lines, model.factor("H")):
            calibrate_rows(tile, rescaling_of(model, low, low + tile.shape[1], self.wanted.raw))
            yield low, tile


class HeldFactors:
    """Both factors in memory."""

    def __init__(self, model: LowRankFactors) -> None:
        self._rank, self._learned = model.rank, Learned("", 0, 0.0, model.bias_row)
        self._w, self._h = take(model.factor("W"), (0, model.rank)), model.factor("H").read(0, model.n_labels)
        starts = range(0, model.n_labels, BLOCK)
        self._by = {low: rescaling_of(model, low, min(low + BLOCK, model.n_labels)) for low in starts}

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        lines = np.ascontiguousarray(self._learned.times(x, self._w)[:, : self._rank])
        with one_blas_thread():
            for first in range(0, x.n, BLOCK):  # tiles as a ScoreJob has them
                mine = slice(first, min(first + BLOCK, x.n))
                for low, tile in tiles(lines[mine], self._h):
                    calibrate_rows(tile, self._by[low])
                    fold_top_k(tile, low, filter_pairs(), labels[mine], scores[mine])


@dataclass(frozen=True)
class ScoreTask(RankingTask):
    """A prediction or an evaluation by a low-rank model."""

    job = ScoreJob

    model: LowRankFactors

    def sizes(self, plan: MemoryPlan) -> ScorePlan:
        """See `RankingTask`."""
        return plan_scores(plan, self.model, self.dataset, self.k, self.of_labels)

    def loop(self, plan: MemoryPlan, wanted: Wanted) -> Loop:
        """As of every task, behind a phase that projects the samples."""
        sizes, model = self.sizes(plan), self.model
        scratch = wanted.out.with_name(wanted.out.name + ".scores")
        scores = Panels(str(scratch), self.dataset.n_samples, sizes.col_ranges)
        learned, w = Learned(str(self.dataset.path), 0, 0.0, model.bias_row), model.factor("W")
        jobs = [
            ProjectJob(learned, "project", cols, w, scores, (rows,))
            for cols in sizes.col_ranges
            for rows in sizes.parts
        ]
        try:
            projected = yield Phase("project", jobs, "projecting the samples", (0.0, _PROJECTED))
            found = yield from self.ranked(sizes, wanted, _PROJECTED, scores)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if not self.evaluate:
            found["bytes_read"] += sum(receipt["bytes_read"] for receipt in projected)
        return found

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the numbers of multiply-adds."""
        model, n, sizes = self.model, self.dataset.n_samples, self.sizes(plan)
        width = max(last - first for first, last in sizes.col_ranges)
        nnz = self.dataset.X_rows().nnz
        n_bytes = len(sizes.col_ranges) * nnz * 8
        work = (nnz + (1 + self.evaluate) * n * model.n_labels) * model.rank
        needs = score_needs(
            plan, model, self.k, width, min(sizes.rows_per_job, n), self.of_labels,
            self.dataset.X_rows().block_bytes(ROW_BYTES), len(sizes.parts),
        )  # fmt: skip
        return self.foreseen(
            len(sizes.ranges(n)), n_bytes, needs, work / _MULTIPLY_ADDS / (plan.threads * plan.processes)
        )


@dataclass(frozen=True)
class ScoreWarmUp(WarmUp):
    """Predict a few rows, and evaluate a model on them."""

    seconds = 12.0

    def load(self) -> None:
        with a_few_rows() as dataset:
            path, rank = Path(dataset.path).parent, 2
            begin_model(path / "model.partial")
            sizes = {"W": dataset.n_features, "H": dataset.n_labels}
            with new_factors(path / "model.partial" / FACTORS, dict.fromkeys(sizes, rank)) as writers:
                for name, n in sizes.items():
                    writers[name].append(np.ones(rank * n, np.float32))
            made = {"rank": rank, "nnz": rank * sum(sizes.values())}
            about = model_attributes(dataset, "", {"bias": False}, 0, made)
            finish_model(path / "model.partial", path / "model", about)
            model = LowRankFactors(path / "model")
            for evaluate in (False, True):
                rank_a_few(ScoreTask(model, dataset, 2, evaluate=evaluate))
