"""Dual coordinate descent for LANES classes beside each other, each with all rows in its active set.

The problem and its steps are those of `linear.kernels.dcd`. All classes visit the rows in one order, so a row is read once for
all of them, and a feature's values of v are one cache line: lane l of line j is v_j of class l. A class's steps are its
own: they do not depend on which classes stand in the other lanes. v and alpha are float32, and v is summed anew from alpha
before violations are measured: what these lack then is in docs/design/all-rows.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES, add_to_lines, lane_step, prefetch, soft_lines
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.linear.kernels.dcd import Penalty, Steps, of_class
from xmc_stream.linear.kernels.rows import fetch

_AHEAD = 8  # rows: memory is asked for so many before it is needed
_0, _1 = np.float32(0.0), np.float32(1.0)


class Rest(NamedTuple):
    """What is left alone: steps where |gradient| is at most `least`, rows that so many visits did not move (0: none is)."""

    least: float
    visits: int


RESTLESS = Rest(0.0, 0)


class Lanes(NamedTuple):
    """Some classes beside each other, and the work space of one thread.

    v (D LANES,): sum_i alpha_i y_i x_i. v0 (LANES,): the same of the bias feature. alpha (N LANES,). positive (N,): bit l
    is 1 where the row has the label of lane l. h2, upper (2 LANES,): of negatives, then of positives, see `Penalty`; exact:
    upper in float64. order (N,): of an epoch. quiet (N,): visits of a row since it moved. sums (LANES,). met (2 LANES,): the
    largest violation, and what the dual objective gained.
    """

    v: NDArray[np.float32]
    v0: NDArray[np.float32]
    alpha: NDArray[np.float32]
    positive: NDArray[np.uint16]
    h2: NDArray[np.float32]
    upper: NDArray[np.float32]
    exact: NDArray[np.float64]
    order: NDArray[np.int64]
    quiet: NDArray[np.uint8]
    sums: NDArray[np.float32]
    met: NDArray[np.float32]


def new_lanes(n_samples: int, n_features: int) -> Lanes:
    """For so many rows and features."""
    few = [np.zeros(width, np.float32) for width in (LANES, 2 * LANES, 2 * LANES, LANES, 2 * LANES)]
    return Lanes(
        aligned_zeros((n_features * LANES,)), few[0], aligned_zeros((n_samples * LANES,)),
        np.zeros(n_samples, np.uint16), few[1], few[2], np.zeros(2 * LANES), np.empty(n_samples, np.int64),
        np.empty(n_samples, np.uint8), few[3], few[4],
    )  # fmt: skip


def lanes_bytes(n_samples: int, n_features: int) -> int:
    """Of `new_lanes`."""
    return 4 * LANES * (n_samples + n_features) + 11 * n_samples


@kernel
def begin_lanes(first: int, y: Labels, classes: NDArray[np.float64], penalty: Penalty, lanes: Lanes) -> int:
    """Enter the classes first, first + 1, ... of those whose rows are y: alpha = 0. Returns a bit for each lane of a class.

    classes: `Times.classes` of all of y. A class without rows is none.
    """
    v, v0, alpha, positive, h2, upper, exact, _, _, _, _ = lanes
    v[:], v0[:], alpha[:], positive[:] = _0, _0, _0, np.uint16(0)
    indptr, rows = y
    used = 0
    for lane in range(LANES):
        c = first + lane
        of = penalty
        if c < len(indptr) - 1:
            of = of_class(c, classes, penalty)
            used |= int(indptr[c] < indptr[c + 1]) << lane
            for q in range(indptr[c], indptr[c + 1]):
                positive[rows[q]] |= np.uint16(1 << lane)
        h2[lane], h2[LANES + lane] = np.float32(of.h2), np.float32(of.h2_positive)
        exact[lane], exact[LANES + lane] = of.upper, of.upper_positive
        upper[lane], upper[LANES + lane] = np.float32(of.upper), np.float32(of.upper_positive)
    return used


@kernel
def visit_lanes(
    x: CSR, squares: NDArray[np.float64], rows: NDArray[np.float64], at: NDArray[np.int64], penalty: Penalty,
    awake: np.uint16, n: int, rule: Rest, lanes: Lanes,
) -> int:  # fmt: skip
    """Visit rows order[:n] of x in turn; returns how many of them stay awake, with which `order` then begins.

    awake: bits of the lanes that move. squares: `row_squares` of x. rows: `Times.rows`. at: the place of each row in the lanes,
    where x has some of their rows; empty where it has all.
    """
    indptr, indices, values = x
    v, v0, alpha, positive, h2, upper, _, order, quiet, sums, met = lanes
    lam, tau, bias, least = np.float32(penalty.lam), np.float32(penalty.tau), penalty.bias, np.float32(rule.least)
    n_awake = 0
    for t in range(n):
        i = order[t]
        soon = order[min(t + _AHEAD, n - 1)]
        place, place_soon = (at[i], at[soon]) if len(at) else (i, soon)
        prefetch(alpha, place_soon * LANES)
        prefetch(positive, place_soon)
        prefetch(squares, soon)
        prefetch(indptr, order[min(t + 2 * _AHEAD, n - 1)])
        fetch(indices, indptr[soon], indptr[soon + 1])  # what they look up in v follows soon enough by itself
        fetch(values, indptr[soon], indptr[soon + 1])
        weight = np.float32(rows[i]) if len(rows) else _1
        if weight <= _0:
            continue
        # inline: as a function of its own it takes a fifth more of the time
        soft_lines(indices, values, indptr[i], indptr[i + 1], v, lam, sums)
        for lane in range(LANES):
            sums[lane] += v0[lane]
        moved = lane_step(
            place, awake, least, np.float32(squares[i]), weight, tau, positive[place], h2, upper, alpha, sums, met
        )
        if moved:
            if bias:
                for lane in range(LANES):
                    v0[lane] += sums[lane]
            add_to_lines(indices, values, indptr[i], indptr[i + 1], sums, v)
        if rule.visits:
            quiet[place] = 0 if moved else quiet[place] + 1
            order[n_awake] = i
            n_awake += int(quiet[place] < rule.visits)
    return n_awake if rule.visits else n


@kernel
def descend_lanes(
    x: CSR,
    squares: NDArray[np.float64],
    rows: NDArray[np.float64],
    steps: Steps,
    penalty: Penalty,
    awake: int,
    lanes: Lanes,
    least_gain: float,
) -> None:
    """Epochs over all rows. A class moves until an epoch meets no row that violates by more than tol, or gains too little.

    Too little is least_gain of what all epochs gained of the dual objective. squares: `row_squares` of x. rows: `Times.rows`.
    awake: what `begin_lanes` returns. The order of an epoch is drawn by seed, round and epoch.
    """
    met, gained = lanes.met, np.zeros(LANES)
    for epoch in range(steps.epochs):
        if not awake:
            break
        visiting_order(0, len(lanes.order), key_of(steps.seed, 0, steps.round_, epoch), lanes.order)
        met[:] = _0
        visit_lanes(x, squares, rows, lanes.order[:0], penalty, np.uint16(awake), len(lanes.order), RESTLESS, lanes)
        for lane in range(LANES):
            gained[lane] += met[LANES + lane]
            if met[lane] <= steps.tol or met[LANES + lane] <= least_gain * gained[lane]:
                awake &= ~(1 << lane)


@kernel
def shuffle_awake(first: int, n: int, key: np.uint64, lanes: Lanes) -> None:
    """Put order[first : first + n] in the order of a key's permutation."""
    places, before = np.empty(n, np.int64), lanes.order[first : first + n].copy()
    visiting_order(0, n, key, places)
    for t in range(n):
        lanes.order[first + t] = before[places[t]]


@kernel
def settle_lanes(
    x: CSR, squares: NDArray[np.float64], rows: NDArray[np.float64], steps: Steps, penalty: Penalty, awake: int,
    rule: Rest, lanes: Lanes,
) -> int:  # fmt: skip
    """Epochs over the rows that are awake, until none of all rows violates by more than tol; returns how many there were.

    The first epoch visits rows with a label first. A row sleeps when `rule.visits` visits did not move it. Where those that
    are awake violate nothing, all are visited once more. The order of an epoch is drawn by seed, round and epoch.
    """
    order, quiet, met, n = lanes.order, lanes.quiet, lanes.met, len(lanes.order)
    n_positive = 0
    for i in range(n):
        quiet[i] = 0
        if lanes.positive[i]:
            order[n_positive] = i
            n_positive += 1
    n_awake = n_positive
    for i in range(n):
        if not lanes.positive[i]:
            order[n_awake] = i
            n_awake += 1
    whole = True
    for epoch in range(steps.epochs):
        key = key_of(steps.seed, 0, steps.round_, epoch)
        if epoch:
            shuffle_awake(0, n_awake, key, lanes)
        else:
            shuffle_awake(0, n_positive, key, lanes)
            shuffle_awake(n_positive, n - n_positive, key, lanes)
        met[:] = _0
        n_awake = visit_lanes(x, squares, rows, order[:0], penalty, np.uint16(awake), n_awake, rule, lanes)
        if np.max(met[:LANES]) <= steps.tol or not n_awake:
            if whole:
                return epoch + 1
            whole, n_awake = True, n
            for i in range(n):
                order[i], quiet[i] = i, rule.visits - 1
        else:
            whole = n_awake == n
    return steps.epochs


@kernel
def sum_lanes(x: CSR, bias: bool, lanes: Lanes) -> None:
    """v and v0 anew from alpha, rows ascending: many steps have been rounded into them."""
    indptr, indices, values = x
    v, v0, alpha, positive, sums = lanes.v, lanes.v0, lanes.alpha, lanes.positive, lanes.sums
    v[:], v0[:] = _0, _0
    for i in range(len(positive)):
        any_ = False
        for lane in range(LANES):
            a = alpha[i * LANES + lane]
            any_ |= a != _0
            sums[lane] = a if (int(positive[i]) >> lane) & 1 else -a
        if any_:
            add_to_lines(indices, values, indptr[i], indptr[i + 1], sums, v)
            if bias:
                for lane in range(LANES):
                    v0[lane] += sums[lane]


@kernel
def measure_lanes(
    x: CSR,
    squares: NDArray[np.float64],
    rows: NDArray[np.float64],
    penalty: Penalty,
    lanes: Lanes,
    losses: NDArray[np.float64],
) -> None:
    """Of each lane, nothing moving: met has the largest |projected gradient|, losses (LANES,) sum_i C_i loss(1 - y_i z_i).

    The former is of the rows that a step would move.
    """
    indptr, indices, values = x
    v, v0, alpha, positive, h2, upper, exact, order, _, sums, met = lanes
    lam, tau, every = np.float32(penalty.lam), np.float32(penalty.tau), np.uint16((1 << LANES) - 1)
    tau64, squared, copy = np.float64(penalty.tau), penalty.h2 > 0.0, np.empty(LANES, np.float32)
    cost = 0.5 / h2.astype(np.float64) if squared else exact
    met[:], losses[:] = _0, 0.0
    for i in range(len(order)):
        of_row = rows[i] if len(rows) else 1.0
        weight = np.float32(of_row)
        if weight <= _0:
            continue
        soft_lines(indices, values, indptr[i], indptr[i + 1], v, lam, sums)
        for lane in range(LANES):
            sums[lane] += v0[lane]
            copy[lane] = alpha[i * LANES + lane]
            is_positive = (int(positive[i]) >> lane) & 1
            short = max(1.0 - (2 * is_positive - 1) * np.float64(sums[lane]) / tau64, 0.0)
            losses[lane] += cost[is_positive * LANES + lane] * of_row * (short * short if squared else short)
        lane_step(0, every, _0, np.float32(squares[i]), weight, tau, positive[i], h2, upper, copy, sums, met)


@kernel
def take_weights(
    penalty: Penalty, lanes: Lanes, counts: NDArray[np.int64], features: NDArray[np.int32], weights: NDArray[np.float32],
    statistics: NDArray[np.float64],
) -> None:  # fmt: skip
    """Of each lane its weights that are not 0, features ascending: lane l has the places l D ... l D + counts[l] - 1.

    statistics (LANES, 4): as of `dcd.solve_classes`; of G the norm of w, the largest violation from `measure_lanes`.
    """
    v, v0, met = lanes.v, lanes.v0, lanes.met
    lam, tau, n_features = penalty.lam, penalty.tau, len(v) // LANES
    square, kept, place = np.empty(LANES), np.empty(LANES), np.arange(LANES) * n_features
    for lane in range(LANES):
        w0 = np.float64(v0[lane]) / tau
        w0_32 = np.float64(np.float32(w0))
        statistics[lane, 0], statistics[lane, 3] = w0_32, np.float64(met[lane])
        square[lane], kept[lane] = w0 * w0, 0.5 * tau * w0_32 * w0_32
    for j in range(n_features):
        for lane in range(LANES):
            x = np.float64(v[j * LANES + lane])
            w = (x - min(max(x, -lam), lam)) / tau
            w32 = np.float32(w)
            # written whether it counts or not: to foresee which do takes longer than to write
            features[place[lane]], weights[place[lane]] = j, w32
            place[lane] += int(w32 != _0)
            square[lane] += w * w
            kept[lane] += lam * abs(np.float64(w32)) + 0.5 * tau * np.float64(w32) * np.float64(w32)
    for lane in range(LANES):
        counts[lane] = place[lane] - lane * n_features
        statistics[lane, 1], statistics[lane, 2] = 0.5 * tau * square[lane], kept[lane]


@kernel
def take_rows(
    weights: NDArray[np.float64], lanes: Lanes, counts: NDArray[np.int64], rows: NDArray[np.int32],
    alphas: NDArray[np.float64], statistics: NDArray[np.float64],
) -> None:  # fmt: skip
    """Of each lane the rows with its label or with alpha > 0, ascending: lane l has the places l N ... l N + counts[l] - 1.

    weights: `Times.rows`. statistics (LANES, 4): what alpha adds to G is added.
    """
    alpha, positive, h2, upper, exact = lanes.alpha, lanes.positive, lanes.h2, lanes.upper, lanes.exact
    n = len(positive)
    terms, place = np.zeros(LANES), np.arange(LANES) * n
    for i in range(n):
        weight = weights[i] if len(weights) else 1.0
        for lane in range(LANES):
            is_positive = (int(positive[i]) >> lane) & 1
            of = is_positive * LANES + lane
            a = np.float64(alpha[i * LANES + lane])
            if a > 0.0:
                if np.float64(upper[of] * np.float32(weight)) <= a:  # it stands at its bound, which float32 rounds
                    a = exact[of] * weight
                terms[lane] += 0.5 * np.float64(h2[of]) / weight * a * a - a
            rows[place[lane]], alphas[place[lane]] = i, a
            place[lane] += int(a > 0.0) | is_positive
    for lane in range(LANES):
        counts[lane] = place[lane] - lane * n
        statistics[lane, 1] += terms[lane]
