"""What the dual problems of `linear.kernels.dcd` weigh: the terms of the penalty, positives and negatives, classes and rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel, kernel


class Penalty(NamedTuple):
    """The inner problem's numbers: weights of the terms, h2 and upper of negatives and of positives, whether there is a bias.

    lanes: whether margins are sums by feature, as those of rows with all features are (`linear.kernels.rows`).
    """

    lam: float
    tau: float
    h2: float
    upper: float
    h2_positive: float
    upper_positive: float
    bias: bool
    lanes: bool = False


class Times(NamedTuple):
    """How many times C counts, as finite numbers; arrays of no length where it counts once.

    classes (n, 2): of each class, for its negatives and for its positives, above 0. rows: of each row at hand, 0 or more; a
    row of 0 has a_i = 0 and violates nothing.
    """

    classes: NDArray[np.float64]
    rows: NDArray[np.float64]


ONCE = Times(np.empty((0, 2)), np.empty(0))


class Ramp(NamedTuple):
    """A warm start's alpha: min(slope max(0, 1 - y z), upper), of negatives and of positives."""

    slope: float
    upper: float
    slope_positive: float
    upper_positive: float


@inner_kernel
def times(c: int, sign: int, r: int, weights: Times) -> float:
    """How many times C counts for row r of those at hand in class c."""
    classes, rows = weights
    of_class = classes[c, int(sign > 0)] if len(classes) else 1.0
    return of_class * rows[r] if len(rows) else of_class


@inner_kernel
def alpha_of(sign: int, z: float, ramp: Ramp) -> float:
    """A warm start's alpha of a row that scores z."""
    if sign > 0:
        return min(ramp.slope_positive * max(1.0 - z, 0.0), ramp.upper_positive)
    return min(ramp.slope * max(1.0 + z, 0.0), ramp.upper)


@inner_kernel
def of_sign(sign: int, penalty: Penalty) -> tuple[float, float]:
    """h2_i and upper_i of a row."""
    if sign > 0:
        return penalty.h2_positive, penalty.upper_positive
    return penalty.h2, penalty.upper


@kernel
def of_class(c: int, classes: NDArray[np.float64], penalty: Penalty) -> Penalty:
    """The numbers of class c, by `Times.classes`."""
    lam, tau, h2, upper, h2_positive, upper_positive, bias, lanes = penalty
    if len(classes):
        h2, upper = h2 / classes[c, 0], upper * classes[c, 0]
        h2_positive, upper_positive = h2_positive / classes[c, 1], upper_positive * classes[c, 1]
    return Penalty(lam, tau, h2, upper, h2_positive, upper_positive, bias, lanes)


@inner_kernel
def of_row(sign: int, r: int, rows: NDArray[np.float64], penalty: Penalty) -> tuple[float, float]:
    """h2_i and upper_i of row r of those at hand, by `Times.rows`. One of weight 0 can only have a_i = 0."""
    h2, upper = of_sign(sign, penalty)
    if len(rows):
        if rows[r] <= 0.0:
            return 0.0, 0.0
        return h2 / rows[r], upper * rows[r]
    return h2, upper


@kernel
def of_lines(at: NDArray[np.int64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """`Times.rows` of some rows of a block."""
    if not len(rows):
        return rows
    taken = np.empty(len(at))
    for i in range(len(at)):
        taken[i] = rows[at[i]]
    return taken
