"""What evaluating a model of any kind counts: positives of labels in parts, and the metrics made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.jobs.job import Receipt
from xmc_stream.metrics import LabelMetrics, average_auc

_LABELS = 1 << 16  # labels whose counts are written, and summed, at a time
COUNT_BYTES = 3 * 4  # of a label, in each thread


def write_counts(path: Path, counts: NDArray[np.int32]) -> None:
    """The labels that some row of a job has or gets, in ascending order, and a file of their counts beside: few of many."""
    with open(path, "wb") as labels, open(f"{path}.n", "wb") as numbers:
        for first in range(0, counts.shape[1], _LABELS):
            part = counts[:, first : first + _LABELS]
            some = np.flatnonzero(part.any(axis=0))
            labels.write((first + some).astype(np.int64).data)
            numbers.write(np.ascontiguousarray(part[:, some].T).data)


def read_counts(path: Path, first: int, total: NDArray[np.int64]) -> None:
    """Add what a job wrote of labels first, first + 1, ... to total (3, n): rows in which each is predicted (scores above

    the threshold) and true, predicted, true.
    """
    if not path.stat().st_size:  # no file of nothing can be mapped
        return
    labels = np.memmap(path, np.int64, "r")
    low, high = np.searchsorted(labels, [first, first + total.shape[1]]).tolist()
    mine = np.asarray(labels[low:high]) - first
    item = 3 * 4
    numbers = np.fromfile(f"{path}.n", np.int32, 3 * (high - low), offset=item * low).reshape(-1, 3)
    total[:, mine] += numbers.T


def float32_below(threshold: float) -> np.float32:
    """The largest float32 up to the threshold: the same scores exceed both."""
    with np.errstate(over="ignore"):
        nearest = np.float32(threshold)
    return nearest if float(nearest) <= threshold else np.nextafter(nearest, np.float32(-np.inf))


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
