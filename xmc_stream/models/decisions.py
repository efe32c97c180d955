"""Which labels of a row are predicted: one rule, which evaluation, tuning and the estimators share; and how it is learned."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.store.dataset import Dataset

LEARNED_BYTES = 6 * 2**20  # that learning takes
_PAIRS = 2**17  # of a row and a label that it looks at, at most
_LEAST_K, _TIMES, _MOST_K = 20, 4, 200  # labels of a row that it looks at: so many times those of a row on average
LEAST_ROWS = 20  # of fewer rows it says nothing


class Decision(NamedTuple):
    """The labels of a row that score above the threshold are predicted; with `best`, its best label in any case."""

    threshold: float
    best: bool = False

    @property
    def above(self) -> np.float32:
        """The largest float32 up to the threshold: the same scores exceed both."""
        with np.errstate(over="ignore"):
            nearest = np.float32(self.threshold)
        return nearest if float(nearest) <= self.threshold else np.nextafter(nearest, np.float32(-np.inf))


BEST_LABEL = Decision(math.inf, True)
JUST_THE_BEST: dict[str, Any] = {"threshold": None, "best": True}  # the same, as a model keeps what is learned


def learn(scores: NDArray[np.float32], true: NDArray[np.bool_], n_true: int) -> dict[str, Any]:
    """The decision with the highest micro-F1 on rows that were held out, as a model keeps it.

    Tried are the best label of each row alone, and one threshold for all labels, between any two scores: with and without
    the best label in any case.

    Parameters
    ----------
    scores : float32 array (n, k)
        Of the best labels of each row, in any order.
    true : bool array (n, k)
        Whether these labels are right.
    n_true : int
        Right labels of all rows, also those that are not among the best.

    Returns
    -------
    dict
        threshold (None: no label exceeds it), best, rows, and micro_F1 on these, in per cent.
    """
    n, top = len(scores), (np.arange(len(scores)), scores.argmax(axis=1))
    highest, threshold, with_best = 2.0 * int(true[top].sum()) / max(n + n_true, 1), np.float32(np.inf), True
    for best in (False, True):
        z = scores.copy()
        if best:
            z[top] = np.inf
        z = z.ravel()
        order = np.argsort(-z, kind="stable")
        z = z[order]
        ends = np.flatnonzero((z[1:] < z[:-1]) & (z[1:] > UNSEEN))
        f1 = 2.0 * np.cumsum(true.ravel()[order])[ends] / (ends + 1 + n_true)
        if len(f1) and f1.max() > highest:
            at = int(f1.argmax())
            above, below = z[ends[at]], z[ends[at] + 1]
            middle = np.float32((float(above) + float(below)) / 2)
            highest, threshold, with_best = float(f1[at]), middle if middle < above else below, best
    cut = float(threshold) if np.isfinite(threshold) else None
    return {"threshold": cut, "best": with_best, "rows": n, "micro_F1": round(100 * highest, 4)}


def labels_ranked(dataset: Dataset) -> int:
    """How many of the best labels of a row are looked at."""
    mean = dataset.Y_rows().nnz / max(dataset.n_samples, 1)
    return min(dataset.n_labels, max(_LEAST_K, min(math.ceil(_TIMES * mean), _MOST_K)))


class HeldOut:
    """Rows that no model has seen, as they come: what `learn` needs of evenly spaced ones.

    n_rows: how many come, about; k: labels of each that are looked at.
    """

    def __init__(self, n_rows: int, dataset: Dataset) -> None:
        self.k = labels_ranked(dataset)
        self._every = -(-n_rows * self.k // _PAIRS) or 1
        self._seen = self._n_true = 0
        self._parts: list[tuple[NDArray[np.float32], NDArray[np.bool_]]] = []

    def wanted(self, n: int) -> NDArray[np.int64]:
        """Of the next n rows, those that it learns from; `take` gets these."""
        some = np.arange(-self._seen % self._every, n, self._every)
        self._seen += n
        return some

    def take(self, scores: NDArray[np.float32], true: NDArray[np.bool_], n_true: NDArray[np.int64]) -> None:
        """Rows: scores and truth (n, k) of their best labels, see `learn`; the right labels of each, in all."""
        self._parts.append((scores, true))
        self._n_true += int(n_true.sum())

    def add(self, scores: NDArray[np.float32], true: NDArray[np.bool_], n_true: NDArray[np.int64]) -> None:
        """As `take`, of all rows that come next."""
        some = self.wanted(len(scores))
        self.take(scores[some], true[some], n_true[some])

    def decision(self) -> dict[str, Any]:
        """What a model keeps; the best label alone where the rows are too few."""
        if sum(len(scores) for scores, _ in self._parts) < LEAST_ROWS:
            return JUST_THE_BEST
        scores, true = (np.concatenate([part[i] for part in self._parts]) for i in (0, 1))
        return learn(scores, true, self._n_true)
