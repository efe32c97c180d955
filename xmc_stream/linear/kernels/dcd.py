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
from xmc_stream.kernels.instructions import LANES, prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import RowOrder, stream_order
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.linear.kernels.penalty import Penalty, Times, of_class, of_lines, of_row

_AHEAD = 4  # rows: memory is asked for so many before it is needed


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

    local_of (D,): number of a feature, -1; features (D + 1,): the other way round. v (D,): 0. rows: the class's, with such
    numbers. squares, order, asleep: of its rows. w_features, w_values: weights of some classes.
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
        np.full(n_features, -1, np.int32), np.empty(n_features + 1, np.int32), np.zeros(n_features),
        CSR(np.empty(max_rows + 1, np.int64), np.empty(max_nnz, np.int32), np.empty(max_nnz, np.float32)),
        np.empty(max_rows), np.empty(max_rows, np.int64), np.empty(max_rows, np.bool_),
        np.empty(max_weights, np.int32), np.empty(max_weights, np.float32),
    )  # fmt: skip


@inner_kernel
def _fetch_row(row: int, indptr: NDArray[np.int64], indices: NDArray[np.int32], data: NDArray[np.float32]) -> None:
    """Begin to bring a row into the cache: its first and last entry, as most rows lie in two lines of it at most."""
    first, last = indptr[row], indptr[row + 1] - 1
    if first <= last:
        prefetch(indices, first)
        prefetch(indices, last)
        prefetch(data, first)
        prefetch(data, last)


@kernel
def row_squares(
    indptr: NDArray[np.int64], data: NDArray[np.float32], constant: float, squares: NDArray[np.float64]
) -> None:
    """squares = ||x_i||^2 of each row, `constant` (the bias feature's square) included."""
    for r in range(len(indptr) - 1):
        total = constant
        for p in range(indptr[r], indptr[r + 1]):
            total += np.float64(data[p]) * np.float64(data[p])
        squares[r] = total


@kernel
def localise(
    at: NDArray[np.int64],
    x: CSR,
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    local_of: NDArray[np.int32],
    features: NDArray[np.int32],
    v: NDArray[np.float64],
    out: CSR,
) -> tuple[int, float]:
    """Copy rows `at` of a block into a compact matrix whose features are numbered as they are met, and `add_rows` to v.

    local_of (D,): number of a feature, -1 before it is met; features (D + 1,): the other way round. Returns how many
    features there are, and v_0, bias feature counted.
    """
    indptr, indices, data = x
    out_indptr, out_indices, out_data = out
    n_local, filled, v0 = 0, np.uint64(0), 0.0
    one = np.uint64(1)
    out_indptr[0] = 0
    for r in range(len(at)):
        _fetch_row(at[min(r + _AHEAD, len(at) - 1)], indptr, indices, data)
        start = filled
        for p in range(np.uint64(indptr[at[r]]), np.uint64(indptr[at[r] + 1])):
            j = np.uint32(indices[p])
            number = local_of[j]
            fresh = number < 0
            number = n_local if fresh else number
            # written whether new or not: to foresee which is which takes longer than to write
            local_of[j] = number
            features[n_local] = j
            n_local += int(fresh)
            out_indices[filled] = number
            out_data[filled] = data[p]
            filled += one
        out_indptr[r + 1] = np.int64(filled)
        if alpha[r] != 0.0:
            d = alpha[r] * sign[r]
            v0 += d
            for p in range(start, filled):
                v[np.uint32(out_indices[p])] += d * out_data[p]
    return n_local, v0


@kernel
def renumber(
    x: CSR,
    local_of: NDArray[np.int32],
    features: NDArray[np.int32],
    n_local: int,
    constant: float,
    squares: NDArray[np.float64],
) -> int:
    """`localise` for all rows of a block, in place: its indices become local numbers. Returns the new n_local."""
    indptr, indices, data = x
    for r in range(len(indptr) - 1):
        total = constant
        for p in range(indptr[r], indptr[r + 1]):
            j = indices[p]
            if local_of[j] < 0:
                local_of[j] = n_local
                features[n_local] = j
                n_local += 1
            indices[p] = local_of[j]
            total += np.float64(data[p]) * np.float64(data[p])
        squares[r] = total
    return n_local


@kernel
def add_rows(
    local: NDArray[np.int64],
    x: CSR,
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    v: NDArray[np.float64],
    v0: float,
) -> float:
    """v += sum_i a_i y_i x_i over rows `local` of a local matrix, in that order; returns v_0, bias feature counted."""
    indptr, indices, data = x
    for i in range(len(alpha)):
        if alpha[i] != 0.0:
            d = alpha[i] * sign[i]
            v0 += d
            for p in range(indptr[local[i]], indptr[local[i] + 1]):
                v[indices[p]] += d * data[p]
    return v0


@inner_kernel
def _margin(
    begin: np.uint64,
    end: np.uint64,
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: float,
    lam: float,
) -> float:
    """tau w.x of a row with the entries [begin, end): soft() is applied as v is read.

    Every other entry goes to a sum of its own: a sum waits for its last addition.
    """
    two, one = np.uint64(2), np.uint64(1)
    z, other = v0, 0.0
    p = begin
    while p + one < end:
        x = v[np.uint32(indices[p])]
        y = v[np.uint32(indices[p + one])]
        z += data[p] * (x - min(max(x, -lam), lam))
        other += data[p + one] * (y - min(max(y, -lam), lam))
        p += two
    if p < end:
        x = v[np.uint32(indices[p])]
        z += data[p] * (x - min(max(x, -lam), lam))
    return z + other


@inner_kernel
def _margin_by_lanes(
    begin: np.uint64,
    end: np.uint64,
    indices: NDArray[np.int32],
    data: NDArray[np.float32],
    v: NDArray[np.float64],
    v0: float,
    lam: float,
    sums: NDArray[np.float64],
) -> float:
    """`_margin` as `soft_product` has it: feature j in sum j modulo LANES, then halves added to halves. sums: scratch."""
    for lane in range(LANES):
        sums[lane] = 0.0
    for p in range(begin, end):
        j = np.uint32(indices[p])
        x = v[j]
        sums[j % np.uint32(LANES)] += data[p] * (x - min(max(x, -lam), lam))
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            sums[lane] += sums[lane + width]
    return float(v0 + sums[0])


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
    sums = np.empty(LANES)
    worst = 0.0
    for t in range(len(visit)):
        soon = min(t + _AHEAD, len(visit) - 1)
        _fetch_row(local[soon], indptr, indices, data)
        prefetch(alpha, visit[soon])
        prefetch(sign, visit[soon])
        prefetch(squares, local[soon])
        prefetch(indptr, local[min(t + 2 * _AHEAD, len(visit) - 1)])
        i, r = visit[t], local[t]
        begin, end = np.uint64(indptr[r]), np.uint64(indptr[r + 1])
        a = alpha[i]
        h2, upper = of_row(sign[i], r, rows, penalty)
        if lanes:
            z = _margin_by_lanes(begin, end, indices, data, v, v0, lam, sums)
        else:
            z = _margin(begin, end, indices, data, v, v0, lam)
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
    lam, tau, sums = penalty.lam, penalty.tau, np.empty(LANES)
    worst = 0.0
    for i in range(len(alpha)):
        begin, end = np.uint64(indptr[local[i]]), np.uint64(indptr[local[i] + 1])
        h2, upper = of_row(sign[i], local[i], rows, penalty)
        if upper <= 0.0:
            continue
        if penalty.lanes:
            z = _margin_by_lanes(begin, end, indices, data, v, v0, lam, sums)
        else:
            z = _margin(begin, end, indices, data, v, v0, lam)
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
