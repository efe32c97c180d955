"""What evaluating a model of any kind counts: positives of labels in parts, and the metrics made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.metrics import fold_counts, sort_rows, take_positives
from xmc_stream.kernels.ranking import Ranking, fold_top_k
from xmc_stream.metrics import LabelMetrics, among, auc_units, average_auc, leave_out_labels
from xmc_stream.models.decisions import Decision
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.matrix import Block
from xmc_stream.system.stop import work_name

_LABELS = 1 << 16  # labels whose counts are written, and summed, at a time
COUNT_BYTES = 3 * 4  # of a label, in each thread
_LINE = np.dtype([("label", np.int64), ("counts", np.int32, 3)])  # of a file of counts
HITS, PREDICTED, TRUE = range(3)  # rows of a job's counts over labels
Tiles = Callable[[], Iterable[tuple[int, NDArray[np.float32]]]]


def fold_metrics(
    tiles: Tiles, y: Block, pairs: Labels, decision: Decision, best: Ranking, counts: NDArray[np.int32]
) -> int:
    """Fold the scores of a row block into predictions and counts; returns the sum of its rows' AUC.

    tiles: makes the scores of all rows of the block by ranges of classes (first class, rows x classes), ascending; it is
    called twice: for the scores of true labels, and for how many exceed them. pairs: are not true and score -inf.
    """
    y_indptr, y_indices = y.indptr, y.indices
    if len(pairs.indptr):
        y_indptr, y_indices = leave_out_labels(y_indptr, y_indices, *pairs)
    positives = np.empty(len(y_indices), np.float32)
    for low, tile in tiles():
        take_positives(tile, low, y_indptr, y_indices, positives)
    count_indices(y_indices, counts[TRUE])
    count_indices(y_indices[positives > decision.above], counts[HITS])
    sort_rows(y_indptr, positives)
    above = np.zeros(y.n, np.int64)
    for low, tile in tiles():
        fold_top_k(tile, low, pairs, *best)  # which bars pairs in the tile
        fold_counts(tile, low, y_indptr, positives, decision.above, counts[PREDICTED], above)
    count_best(decision, best, (y_indptr, y_indices), counts)
    return auc_units(above, np.diff(y_indptr), counts.shape[1])


def count_best(
    decision: Decision, best: Ranking, y: tuple[NDArray[np.int64], NDArray[Any]], counts: NDArray[np.int32]
) -> None:
    """Count the best label of each row where it is predicted though it does not exceed the threshold."""
    if decision.best:
        labels, scores = best.labels[:, 0], best.scores[:, 0]
        low = (labels >= 0) & (scores <= decision.above)
        count_indices(labels[low], counts[PREDICTED])
        right = among(np.arange(len(labels)), labels, *y)
        count_indices(labels[low & right], counts[HITS])


def write_counts(path: Path, counts: NDArray[np.int32]) -> None:
    """Write the labels that some row of a job has or is predicted, ascending, each with its counts.

    Other labels are left out: a job meets few of many.
    """
    work = work_name(path)
    with open(work, "wb") as file:
        for first in range(0, counts.shape[1], _LABELS):
            part = counts[:, first : first + _LABELS]
            some = np.flatnonzero(part.any(axis=0))
            lines = np.empty(len(some), _LINE)
            lines["label"], lines["counts"] = first + some, part[:, some].T
            file.write(lines.data)
    work.replace(path)


def read_counts(path: Path, first: int, total: NDArray[np.int64]) -> None:
    """Add what a job wrote of labels first, first + 1, ... to total (3, n).

    Row HITS counts the rows in which a label is predicted and true, PREDICTED those in which it is predicted, TRUE those that
    have it.
    """
    if not path.stat().st_size:  # no file of nothing can be mapped
        return
    lines = np.memmap(path, _LINE, "r")
    low, high = (bisect_left(lines["label"], label) for label in (first, first + total.shape[1]))
    total[:, lines["label"][low:high] - first] += lines["counts"][low:high].T


def metrics_of(receipts: list[Receipt], counts: list[Path], n_samples: int, n_labels: int) -> Receipt:
    """The metrics of all jobs together, from their receipts and files of counts."""
    metrics = LabelMetrics()
    for first in range(0, n_labels, _LABELS):
        total = np.zeros((3, min(_LABELS, n_labels - first)), np.int64)
        for path in counts:
            read_counts(path, first, total)
        metrics.update(*total)
    auc = average_auc(sum(receipt["auc"] for receipt in receipts), n_samples)
    return {"average_auc": auc, **metrics.result(n_samples)}
