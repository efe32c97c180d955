"""A step of MEMOIR: stochastic subgradients of the Crammer-Singer hinge, whose best wrong class an oracle finds.

    loss_i = max(0, 1 - (w_y.x_i - w_r.x_i)),   r the best class but y that the oracle finds

A step takes k draws (x_i, y), asks for r of each with W as it is, and for those of a margin below 1

    w_y += (eta/k) x_i,   w_r -= (eta/k) x_i

l2 (algorithm 1): W *= 1 - eta lam before, and W *= min(1, 1 / (sqrt(lam) ||W||_F)) after it. l1 (algorithm 2): after it the
classes that it touched are soft-thresholded by gamma lam eta K / |touched|, and the smallest weights are cut (equation 13).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.memoir.parameters import MEMOIRParameters

_LEAST_SCALE = 1e-3  # below it the scale goes into the vectors


class Weights:
    """W in memory: a scale times vectors of classes, sparse or dense. What multiplies all of W touches the scale alone."""

    def __init__(self, vectors: Any) -> None:
        self.vectors, self.scale = vectors, 1.0

    @property
    def norm(self) -> float:
        """||W||_F."""
        return self.scale * math.sqrt(float(self.vectors.squares.sum()))

    def times(self, factor: float) -> None:
        """W *= factor; W = 0 where that is not above 0."""
        if factor <= 0.0:
            self.vectors.clear(np.arange(self.vectors.n_classes))
            self.scale = 1.0
        else:
            self.scale *= factor
            if self.scale < _LEAST_SCALE:
                self.fold()

    def fold(self) -> None:
        """Put the scale into the vectors."""
        if self.scale != 1.0:
            self.vectors.scale(self.scale)
            self.scale = 1.0


class Found(NamedTuple):
    """Of each draw: the label it counts for and its score, the best other class and its score (-1 and -inf: there is none).

    Scores are those of the vectors, without the scale of W.
    """

    labels: NDArray[np.int64]
    own: NDArray[Any]
    others: NDArray[np.int64]
    best: NDArray[Any]


class StepSums(NamedTuple):
    """Of the draws of a step: the losses' sum, and how many have a margin below 1. touched: classes that it moved.

    loss is not a number where a score is not finite.
    """

    loss: float
    violators: int
    touched: NDArray[np.int64]


def take_step(
    w: Weights, rows: Any, lines: NDArray[np.int64], found: Found, step: int, p: MEMOIRParameters
) -> StepSums:
    """Move W by the draws of a step. rows: those drawn, as W takes them; lines: of each draw."""
    eta, n_classes = p.rate(step), w.vectors.n_classes
    margin = w.scale * np.subtract(found.own, found.best, dtype=np.float64)
    wrong = (margin < 1.0) & (found.others >= 0)
    finite = np.isfinite(found.own).all() and np.isfinite(found.best[found.others >= 0]).all()
    losses = np.where(wrong, 1.0 - margin, 0.0)
    taken = np.flatnonzero(wrong if p.update == "violators" else found.others >= 0)
    classes = np.stack([found.labels[taken], found.others[taken]], axis=1).ravel()
    touched = np.unique(classes)
    if p.variant != "l1":
        w.times(1.0 - eta * p.penalty)
    each = eta / max(len(lines), 1)
    steps = np.tile([each, -each], len(taken))
    w.vectors.add(classes, np.repeat(lines[taken], 2), steps / w.scale, rows)
    if p.variant == "l1":
        if len(touched):
            threshold = p.gamma * p.penalty * eta * n_classes / len(touched)
            w.vectors.shrink(touched, threshold=threshold / w.scale)
        if p.truncate:
            w.vectors.shrink(cut=w.vectors.smallest(p.truncate * math.sqrt(float(w.vectors.squares.sum()))))
    else:
        norm = w.norm
        if norm * math.sqrt(p.penalty) > 1.0:
            w.times(1.0 / (norm * math.sqrt(p.penalty)))
    return StepSums(float(losses.sum()) if finite else math.nan, int(np.count_nonzero(wrong)), touched)


def macro_f1(labels: NDArray[np.int64], predicted: NDArray[np.int64], n_classes: int) -> tuple[float, float]:
    """Accuracy, and the mean F1 of the classes that occur among the labels, in per cent. predicted: -1 for none."""
    if not len(labels):
        return 0.0, 0.0
    hits = np.bincount(labels[labels == predicted], minlength=n_classes)
    true = np.bincount(labels, minlength=n_classes)
    said = np.bincount(predicted[predicted >= 0], minlength=n_classes)
    there = true > 0
    return 100.0 * float(hits.sum()) / len(labels), 100.0 * float(
        (2.0 * hits / np.maximum(true + said, 1))[there].mean()
    )
