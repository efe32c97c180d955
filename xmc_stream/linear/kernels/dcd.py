"""Dual coordinate descent for one class after another: PPDSparse's inner problem (Yen et al. 2017, section 4).

    min_a  G(a) = (tau/2) ||w(a)||^2 - sum_i a_i + sum_i (h2_i/2) a_i^2,   0 <= a_i <= upper_i
    v = sum_i a_i y_i x_i,   w_j = soft(v_j, lam) / tau,   w_0 = v_0 / tau   (the bias, where there is one)

with h2_i = 1/C_i and no upper bound for the squared hinge, h2_i = 0 and upper_i = C_i for the hinge. C_i is one number for
positives and one for negatives, times the weights of class and row where there are any (`Times`). All sums in float64, in
an order given by the data and the key: rows ascending, or the epoch's permutation; features in the order of the row, of
margins every other one in a sum of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.bits import sort_numbers
from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.kernels.instructions import LANES, prefetch, soft_product
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import RowOrder, stream_order
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.linear.kernels.rows import (
    AHEAD,
    add_line,
    choose_lines,
    fetch,
    fetch_row,
    localise,
    margin,
    margin_by_lanes,
    padded,
)


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
    h2, upper = penalty.h2, penalty.upper
    if sign > 0:
        h2, upper = penalty.h2_positive, penalty.upper_positive
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


class Steps(NamedTuple):
    """How one round solves.

    seed, round_: of the visiting orders; tol: of the largest violation. enough: a violation above it is as good as the
    largest one (`violation`).
    """

    seed: int
    round_: int
    epochs: int
    tol: float
    enough: float


class Scratch(NamedTuple):
    """Work space of one thread, for one class at a time.

    local_of (D,): number of a feature, -1; features (D + 1,): the other way round. v (`padded`): 0. rows: the class's, with
    such numbers, or all rows as lines. squares, order, asleep: of its rows. w_features, w_values: weights of some classes.
    """

    local_of: NDArray[np.int32]
    features: NDArray[np.int32]
    v: NDArray[np.float64]
    rows: CSR
    squares: NDArray[np.float64]
    order: NDArray[np.int64]
    asleep: NDArray[np.bool_]
    w_features: NDArray[np.int32]
    w_values: NDArray[np.float32]


def new_scratch(n_features: int, max_rows: int, max_nnz: int) -> Scratch:
    """For classes of at most max_rows active rows and max_nnz entries."""
    max_weights = max(n_features, min(max_nnz, 1 << 20))
    return Scratch(
        np.full(n_features, -1, np.int32), np.empty(n_features + 1, np.int32), np.zeros(padded(n_features)),
        CSR(np.empty(max_rows + 1, np.int64), np.empty(max_nnz, np.int32), np.empty(max_nnz, np.float32)),
        np.empty(max_rows), np.empty(max_rows, np.int64), np.empty(max_rows, np.bool_),
        np.empty(max_weights, np.int32), np.empty(max_weights, np.float32),
    )  # fmt: skip


@kernel
def descend(
    visit: NDArray[np.int64],
    local: NDArray[np.int64],
    x: CSR,
    squares: NDArray[np.float64],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    asleep: NDArray[np.bool_],
    bar: float,
    v: NDArray[np.float64],
    v0: float,
    penalty: Penalty,
    rows: NDArray[np.float64],
) -> tuple[float, float]:
    """Visit coordinates `visit` (rows `local` of the local matrix), all awake, in turn; alpha, v and asleep are updated.

    A coordinate at 0 whose gradient is above `bar` (the largest violation of the epoch before) falls asleep: it is not to
    be visited from then on. rows: `Times.rows` of the local matrix. Returns v_0 and the largest projected gradient met.
    """
    indptr, indices, data = x
    lam, tau, use_bias, lanes = penalty.lam, penalty.tau, penalty.bias, penalty.lanes
    sums, lines = np.empty(LANES), len(indices) < len(data)
    worst = 0.0
    for t in range(len(visit)):
        soon = min(t + AHEAD, len(visit) - 1)
        if lines:
            begin_next = indptr[local[min(t + 1, len(visit) - 1)]]
            fetch(data, begin_next, begin_next + len(v))
        else:
            fetch_row(local[soon], indptr, indices, data)
        prefetch(alpha, visit[soon])
        prefetch(sign, visit[soon])
        prefetch(squares, local[soon])
        prefetch(indptr, local[min(t + 2 * AHEAD, len(visit) - 1)])
        i, r = visit[t], local[t]
        begin, end = np.uint64(indptr[r]), np.uint64(indptr[r + 1])
        a = alpha[i]
        h2, upper = of_row(sign[i], r, rows, penalty)
        if lines:
            z = v0 + soft_product(data, indptr[r], v, len(v), lam)
        elif lanes:
            z = margin_by_lanes(begin, end, indices, data, v, v0, lam, sums)
        else:
            z = margin(begin, end, indices, data, v, v0, lam)
        g = sign[i] * (z / tau) - 1.0 + a * h2
        if a <= 0.0 and g >= 0.0:
            asleep[i] = g > bar
            continue
        if a >= upper and g <= 0.0:
            continue
        worst = max(worst, abs(g))
        a_new = min(max(a - g / (squares[r] / tau + h2), 0.0), upper)
        d = (a_new - a) * sign[i]
        if d != 0.0:
            alpha[i] = a_new
            if use_bias:
                v0 += d
            if lines:
                add_line(d, indptr[r], data, v)
            else:  # written out wherever entries are added: a call takes a few per cent of a solve
                for p in range(begin, end):
                    v[np.uint32(indices[p])] += d * data[p]
    return v0, worst


@kernel
def violation(
    local: NDArray[np.int64],
    x: CSR,
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    v: NDArray[np.float64],
    v0: float,
    penalty: Penalty,
    rows: NDArray[np.float64],
    enough: float,
) -> float:
    """The largest |projected gradient| over rows `local` of a local matrix, nothing moving; or the first above `enough`."""
    indptr, indices, data = x
    lam, tau, sums, lines = penalty.lam, penalty.tau, np.empty(LANES), len(indices) < len(data)
    worst = 0.0
    for i in range(len(alpha)):
        begin, end = np.uint64(indptr[local[i]]), np.uint64(indptr[local[i] + 1])
        h2, upper = of_row(sign[i], local[i], rows, penalty)
        if upper <= 0.0:
            continue
        if lines:
            z = v0 + soft_product(data, indptr[local[i]], v, len(v), lam)
        elif penalty.lanes:
            z = margin_by_lanes(begin, end, indices, data, v, v0, lam, sums)
        else:
            z = margin(begin, end, indices, data, v, v0, lam)
        g = sign[i] * (z / tau) - 1.0 + alpha[i] * h2
        if alpha[i] <= 0.0:
            g = min(g, 0.0)
        elif alpha[i] >= upper:
            g = max(g, 0.0)
        worst = max(worst, abs(g))
        if worst > enough:
            break
    return worst


@kernel
def dual_terms(
    sign: NDArray[np.int8], alpha: NDArray[np.float64], penalty: Penalty, rows: NDArray[np.float64], total: float
) -> float:
    """total - sum_i a_i + sum_i (h2_i/2) a_i^2: what G has beside the norm of w. rows: `Times.rows` of these alpha."""
    for r in range(len(alpha)):
        h2, _ = of_row(sign[r], r, rows, penalty)
        total += 0.5 * h2 * alpha[r] * alpha[r] - alpha[r]
    return total


@kernel
def take_weights(
    n_local: int,
    features: NDArray[np.int32],
    local_of: NDArray[np.int32],
    v: NDArray[np.float64],
    v0: float,
    lam: float,
    tau: float,
    out_features: NDArray[np.int32],
    out_weights: NDArray[np.float32],
) -> tuple[int, float, float, float]:
    """w = soft(v, lam) / tau, non-zeros with features ascending; v, local_of are reset for the next class.

    Returns the number of non-zeros, ||w||^2 in float64 and, of the float32 weights that are kept, lam ||w||_1 +
    (tau/2) ||w||^2 (the bias counts in the norms, not in the l1 term) and the bias as kept.
    """
    n = 0
    for j in range(n_local):
        out_features[n] = features[j]
        n += int(abs(v[j]) > lam)
    sort_numbers(out_features[:n], len(local_of))
    w0 = v0 / tau
    kept0 = np.float64(np.float32(w0))
    square, kept = w0 * w0, 0.5 * tau * kept0 * kept0
    filled = 0
    for q in range(n):
        j = out_features[q]
        x = v[local_of[j]]
        w = (x - min(max(x, -lam), lam)) / tau
        square += w * w
        w32 = np.float32(w)
        if w32 != 0.0:
            out_features[filled], out_weights[filled] = j, w32
            filled += 1
            kept += lam * abs(np.float64(w32)) + 0.5 * tau * np.float64(w32) * np.float64(w32)
    for j in range(n_local):
        local_of[features[j]] = -1
        v[j] = 0.0
    return filled, square, kept, kept0


@kernel
def awake_in_order(
    label: int,
    rows: NDArray[np.int64],
    row_order: RowOrder,
    steps: Steps,
    epoch: int,
    asleep: NDArray[np.bool_],
    order: NDArray[np.int64],
) -> int:
    """order[:n] = the numbers of a class's rows that are awake, as an epoch visits them; returns n."""
    if len(rows) > row_order.large:
        stream_order(
            rows, row_order.n_samples, row_order.strip_bits, steps.seed, steps.round_, epoch, order[: len(rows)]
        )
    else:
        visiting_order(0, len(rows), key_of(steps.seed, label, steps.round_, epoch), order[: len(rows)])
    n_awake = 0
    for t in range(len(rows)):
        i = order[t]
        order[n_awake] = i
        n_awake += int(not asleep[i])
    return n_awake


@kernel
def wake(asleep: NDArray[np.bool_], n: int) -> bool:
    """Have the first n rows awake; returns whether one of them was asleep."""
    woken = False
    for q in range(n):
        woken |= asleep[q]
        asleep[q] = False
    return woken


@kernel
def solve_classes(
    first: int,
    sets: ActiveSets,
    at: NDArray[np.int64],
    x: CSR,
    norms: NDArray[np.float64],
    row_order: RowOrder,
    steps: Steps,
    penalty: Penalty,
    weights: Times,
    scratch: Scratch,
    w_counts: NDArray[np.int64],
    statistics: NDArray[np.float64],
) -> tuple[int, int]:
    """Classes first, first + 1, ... of a batch, as many as there is room for the weights of.

    Class c has active rows `at[ptr[c] : ptr[c + 1]]` of the block, `rows` of X. norms: see `row_squares`. One with more than
    `row_order.large` visits them in the order of `stream_order`. weights: of the classes of the batch and the rows of
    the block. statistics (n, 4): bias, G, lam ||w||_1 + (tau/2) ||w||^2, largest violation inside the active set.
    Returns the next class and how many weights were filled in. scratch: what the largest class needs.
    """
    first_label, ptr, rows, sign, alpha = sets
    _, _, epochs, tol, enough = steps
    lam, tau = penalty.lam, penalty.tau
    local_of, features, v, mine, squares, order, asleep, w_features, w_values = scratch
    filled = 0
    for c in range(first, len(ptr) - 1):
        begin, end = ptr[c], ptr[c + 1]
        n = end - begin
        signs, alphas = sign[begin:end], alpha[begin:end]
        own, of_rows = of_class(c, weights.classes, penalty), of_lines(at[begin:end], weights.rows)
        if len(mine.indices) < len(mine.values):
            n_local, v0 = choose_lines(at[begin:end], signs, alphas, local_of, features, v, mine)
        else:
            n_local, v0 = localise(at[begin:end], x, signs, alphas, local_of, features, v, mine)
        if filled + n_local > len(w_values):
            for j in range(n_local):
                local_of[features[j]], v[j] = -1, 0.0
            return c, filled
        if not penalty.bias:
            v0 = 0.0
        for q in range(n):
            squares[q], asleep[q] = norms[at[begin + q]], False
        bar = np.inf
        for epoch in range(epochs):
            n_awake = awake_in_order(first_label + c, rows[begin:end], row_order, steps, epoch, asleep, order)
            visit = order[:n_awake]
            v0, worst = descend(visit, visit, mine, squares, signs, alphas, asleep, bar, v, v0, own, of_rows)
            bar = worst
            if worst <= tol:
                if not wake(asleep, n):
                    break
                bar = np.inf
        for q in range(n):
            order[q] = q
        statistics[c, 3] = violation(order[:n], mine, signs, alphas, v, v0, own, of_rows, enough)
        count, square, kept, bias = take_weights(
            n_local, features, local_of, v, v0, lam, tau, w_features[filled:], w_values[filled:]
        )
        statistics[c, 0] = bias
        statistics[c, 1] = 0.5 * tau * square + dual_terms(signs, alphas, own, of_rows, 0.0)
        statistics[c, 2] = kept
        w_counts[c] = count
        filled += count
    return len(ptr) - 1, filled
