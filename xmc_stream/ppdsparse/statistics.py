"""Statistics of classes, a line each as `state` names the columns: of what is known, of what a search saw; which are done."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.kernels.penalty import ONCE
from xmc_stream.ppdsparse.candidates import CandidateFile
from xmc_stream.ppdsparse.parameters import DOUBLINGS, FAR, PATIENCE, ROUNDING, PPDSparseParameters
from xmc_stream.ppdsparse.state import (
    BIAS,
    DONE,
    DUAL,
    EMPTY,
    FRESH,
    INSIDE,
    KEPT,
    LOSS,
    MARK,
    OPEN,
    OUTSIDE,
    STATUS,
)

SURE = 1e6  # the score of a class that every training row is positive for


def set_known(statistics: NDArray[np.float64], counts: NDArray[np.int64], n_samples: int) -> None:
    """The statistics of classes of which nothing is to be learned: without positives they score -inf, with every row SURE."""
    for known, score in ((counts == 0, -np.inf), (counts == n_samples, SURE)):
        statistics[known] = 0.0
        statistics[known, STATUS], statistics[known, BIAS] = EMPTY, score


def update_statistics(
    statistics: NDArray[np.float64],
    files: tuple[CandidateFile, ...],
    first: int,
    parameters: PPDSparseParameters,
    n_samples: int,
    round_: int,
    exact: bool = True,
    of_classes: NDArray[np.float64] = ONCE.classes,
) -> NDArray[np.int64]:
    """Enter what the search of a round saw of the classes first, first + 1, ...: losses, violations outside; who is done.

    statistics (n, N_STATISTICS) is changed in the rows of open classes. Losses are whole multiples of a power of two
    (`kernels.search.loss_grid`), so that neither sums nor what is decided by them depend on the cut into files. Returns
    how many rows were found for each class. A search that is not exact enters nothing. of_classes: `Times.classes`,
    whose first column losses count.
    """
    n = len(statistics)
    n_found, losses, best = np.zeros(n, np.int64), np.zeros(n), np.full(n, -np.inf)
    for file in files:
        low, high = max(first, file.first), min(first + n, file.last)
        if low < high:
            found = file.open(n_samples)
            mine, theirs = slice(low - first, high - first), (low - file.first, high - file.first)
            n_found[mine] += found.of_classes("counts", *theirs)
            losses[mine] += found.of_classes("losses", *theirs)
            best[mine] = np.maximum(best[mine], found.of_classes("best", *theirs))
    if not exact:
        return n_found
    open_ = statistics[:, STATUS] == OPEN
    if len(of_classes):  # searches count positives as many times more than negatives
        losses *= of_classes[:, 0]
    statistics[open_, LOSS] = losses[open_]
    statistics[open_, OUTSIDE] = np.maximum(best[open_] + 1.0, 0.0)
    close_classes(statistics, ~parameters.violates(best), parameters, round_)
    return n_found


def close_classes(
    statistics: NDArray[np.float64], complete: NDArray[np.bool_] | bool, parameters: PPDSparseParameters, round_: int
) -> None:
    """Say of open classes whether they are done, after so many rounds; losses are known.

    complete: whether no row outside the active set violates.
    """
    done = complete & (statistics[:, INSIDE] <= parameters.tol)
    objective = statistics[:, KEPT] + parameters.C * statistics[:, LOSS]
    gap = objective + statistics[:, DUAL]
    if parameters.common_rounds is not None:
        done |= (gap <= FAR * objective) & (round_ >= parameters.own_rounds(statistics[:, FRESH] > 0))
    elif round_ and round_ % PATIENCE == 0:
        if round_ > PATIENCE * DOUBLINGS:  # epochs are as many as they will be
            done |= gap > statistics[:, MARK] / 2
        # scores are float32: a gap that rounding hides, or turns below zero, cannot be seen to halve
        done |= (round_ > PATIENCE) & (gap <= ROUNDING * objective)
        statistics[:, MARK] = gap
    statistics[(statistics[:, STATUS] == OPEN) & done, STATUS] = DONE


def open_gap(statistics: NDArray[np.float64], C: float) -> tuple[float, float]:
    """The gaps of the classes that are open, summed, and the objective of all; statistics that a search was entered in."""
    objective = statistics[:, KEPT] + C * statistics[:, LOSS]
    gap = (objective + statistics[:, DUAL])[statistics[:, STATUS] == OPEN]
    return math.fsum(gap), math.fsum(objective)
