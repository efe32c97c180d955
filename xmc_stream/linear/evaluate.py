"""Metrics that need every score: the top k and counts over all classes, by ranges of rows.

A row block is scored twice. The first time, only rows with a true label in a tile are scored for it, for the scores of
true labels; the second time all are, for the top k and for how many classes exceed each true label.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.metrics import sort_rows
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.guide import Guide, terms_of
from xmc_stream.linear.implied import ImpliedLabels, lift_implied
from xmc_stream.linear.kernels.evaluate import TrueScores, count_above, score_positives
from xmc_stream.linear.predict import PredictPlan, PredictRun, classes_of, plan_predict, use_tile
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.metrics import auc_units, leave_out_labels
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.counts import HITS, PREDICTED, TRUE, count_best, metrics_of, write_counts
from xmc_stream.models.runs import PREDICTING, CountingJob, filter_matrix, filter_pairs, least_block, no_predictions
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, stream
from xmc_stream.store.predictions import write_predictions


@dataclass(frozen=True)
class EvaluateJob(CountingJob):
    """Predictions as a PredictJob's, and counts."""

    sizes: PredictPlan
    max_rows: int

    def run(self) -> Receipt:
        """Score, predict and count; the receipt has the sum of the rows' AUC, exactly."""
        model, dataset = LinearWeights(self.model), Dataset(self.data)
        X, Y = dataset.X_rows(), dataset.Y_rows()
        labels, scores = no_predictions(self.stop - self.start, self.k)
        counts = np.zeros((3, dataset.n_labels), np.int32)
        n_blocks = auc = 0
        matrices = [X, Y, *filter_matrix(self.filtered)]
        most = [self.sizes.row_bytes] + [self.sizes.pair_bytes] * (len(matrices) - 1)
        for x, y, *filters in stream(matrices, most, self.start, self.stop, self.max_rows):
            mine = slice(x.start - self.start, x.start - self.start + x.n)
            auc += self._count(model, x, y, filters, labels[mine], scores[mine], counts)
            n_blocks += 1
        write_predictions(Path(self.out), self.start, labels, scores)
        write_counts(Path(self.counts), counts)
        return {"auc": auc, "bytes_read": X.bytes_read + Y.bytes_read, "row_blocks": n_blocks}

    def _count(
        self, model: LinearWeights, x: Block, y: Block, filters: list[Block], labels: NDArray[np.int64],
        scores: NDArray[np.float32], counts: NDArray[np.int32],
    ) -> int:  # fmt: skip
        """Fold a row block into predictions and counts; returns the sum of its rows' AUC."""
        y_indptr, y_indices = y.indptr, y.indices
        if filters:
            y_indptr, y_indices = leave_out_labels(y_indptr, y_indices, *filter_pairs(filters))
        rows = CSR.of(x)
        guide = Guide.of(model)
        terms = terms_of(guide, x, self.sizes.cache_bytes)
        positives = np.empty(len(y_indices), np.float32)
        for run in reversed(self.sizes.tiles):  # so that a cache that is too small holds what comes first below
            with use_tile(model, run, self.sizes) as tile:
                score_positives(
                    rows, Labels(y_indptr, y_indices), classes_of(model, run, tile, guide), terms, positives
                )
            del tile  # or it would stay beside the next one, uncounted
        threshold = self.decision.above
        count_indices(y_indices, counts[TRUE])
        count_indices(y_indices[positives > threshold], counts[HITS])
        sort_rows(y_indptr, positives)
        above = np.zeros(x.n, np.int64)
        for run in self.sizes.tiles:
            with use_tile(model, run, self.sizes) as tile:
                count_above(
                    rows, classes_of(model, run, tile, guide), terms, Ranking(labels, scores), filter_pairs(filters),
                    TrueScores(y_indptr, positives), threshold, counts[PREDICTED], above,
                )  # fmt: skip
            del tile
        count_best(self.decision, labels, scores, (y_indptr, y_indices), counts)
        best, pairs = Ranking(labels, scores), filter_pairs(filters)
        lift_implied(ImpliedLabels.of(model), best, pairs, self.sizes.cache_bytes)
        return auc_units(above, np.diff(y_indptr), counts.shape[1])


@dataclass
class EvaluateRun(PredictRun):
    """The jobs of one evaluation."""

    def loop(self) -> Loop:
        """One phase; returns the metrics."""
        drop_tiles()
        n, n_labels = self.dataset.n_samples, self.model.n_labels
        least = least_block(self.dataset, labels=True)
        sizes = plan_predict(self.plan, self.model, n, self.k, True, self.of_labels, least)
        jobs = [
            EvaluateJob(
                str(self.model.path), str(self.dataset.path), start, stop, self.k, str(self.out),
                self.filtered, sizes, self.plan.cuts.rows, decision=self.decision, counts=self.counts(start),
            )
            for start, stop in sizes.ranges(n)
        ]  # fmt: skip
        receipts = yield Phase("evaluate", jobs, PREDICTING, (0.0, 1.0), twice=True)
        drop_tiles()
        return metrics_of(receipts, [Path(job.counts) for job in jobs], n, n_labels)
