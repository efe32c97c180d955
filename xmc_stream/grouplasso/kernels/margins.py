"""Four losses of the scores of all classes, kept as a dense array with a line for each row of X (Blondel et al. 2013).

    multiclass   (1/N) sum_i sum_{r != y_i} max(0, 1 - (z_{i,y_i} - z_ir))^2
    multitask    (1/N) sum_i sum_r max(0, 1 - Y_ir z_ir)^2                      Y_ir = 1 for labels of i, else -1
    logistic     (1/N) sum_i log sum_r exp(z_ir - z_{i,y_i})
    ranking      (1/N) sum_i sum_{y in Y_i} sum_{r not in Y_i} max(0, 1 - (z_iy - z_ir))^2

A line of the array holds what makes gradients cheap:

    multiclass   the margins 1 - (z_{i,y_i} - z_ir); in place y_i minus the sum of the positive ones
    multitask    1 + z_ir
    logistic     the probabilities exp(z_ir) / sum_s exp(z_is)
    ranking      the scores z_ir

It is padded to whole cache lines with PAD, or with 0 for probabilities. For each entry x_ij of a column, a kernel goes over
the K values of line i. That loop does not ask which of them are the row's labels: what it adds wrongly for these is
corrected after it.

`add_entries` gives a row of the gradient and of the curvature (equations 5 and 6). `move_entries` adds a step to the scores
and gives how far the loss has risen above its tangent: with it the line search takes no difference of large numbers.
All values are float32. Sums over entries are added to sums in float64 after every FLUSH entries of a column.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.instructions import prefetch, total
from xmc_stream.kernels.jit import inner_kernel, kernel

MULTICLASS, MULTITASK, LOGISTIC, RANKING = range(4)  # places among `parameters.LOSSES`
PAD = np.float32(-1e15)  # in places of no class: no score changes it, and no hinge sees it
FLUSH = 64
LANES = 16  # float32 in a cache line
_NEAR = np.float32(4)  # changes of a score up to which exp(x) - 1 - x is added up without losing its digits
_AHEAD = 6  # entries, by which lines are asked for before they are used
_0, _1, _2, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)


class Lines(NamedTuple):
    """Rows in memory: values (n x width, see above); labels of row i are y_indices[y_indptr[i] : y_indptr[i + 1]].

    active (n,): of multiclass, how many margins of a line are above 0.
    """

    values: NDArray[np.float32]
    active: NDArray[np.float32]
    y_indptr: NDArray[np.int64]
    y_indices: NDArray[Any]


class Sums(NamedTuple):
    """A row of the gradient and the curvature in the making, all of `width` places.

    near_g, near_h: of the last entries; g, h: of those before; s, t, n: of one entry.
    """

    near_g: NDArray[np.float32]
    near_h: NDArray[np.float32]
    g: NDArray[np.float64]
    h: NDArray[np.float64]
    s: NDArray[np.float32]
    t: NDArray[np.float32]
    n: NDArray[np.float32]


def new_sums(width: int) -> Sums:
    """Of so many places, a multiple of LANES."""
    near = [np.zeros(width, np.float32) for _ in range(5)]
    return Sums(near[0], near[1], np.zeros(width), np.zeros(width), near[2], near[3], near[4])


@inner_kernel
def flush(sums: Sums) -> None:
    """Add the sums of the last entries to those of the entries before."""
    near_g, near_h, g, h = sums.near_g, sums.near_h, sums.g, sums.h
    for r in range(len(g)):
        g[r] += np.float64(near_g[r])
        h[r] += np.float64(near_h[r])
        near_g[r] = _0
        near_h[r] = _0


@inner_kernel
def _ahead(indices: NDArray[Any], p: int, end: int, first: int, flat: NDArray[Any], width: int) -> None:
    """Ask for the line of an entry that will be used soon. first: the row that has the first line."""
    if p + _AHEAD < end:
        begin = (np.int64(indices[p + _AHEAD]) - first) * width
        for at in range(begin, begin + width, LANES):
            prefetch(flat, at)


@inner_kernel
def _hinges(line: NDArray[Any], x: np.float32, near_g: NDArray[Any], near_h: NDArray[Any]) -> None:
    """near_g += x max(line, 0); near_h += x^2 [line > 0]."""
    square = x * x
    for r in range(len(line)):
        a = line[r]
        near_g[r] += x * (a if a > _0 else _0)
        near_h[r] += square if a > _0 else _0


@inner_kernel
def _count(line: NDArray[Any], c: np.float32, t: NDArray[Any], n: NDArray[Any]) -> None:
    """t = max(c + line, 0), n = [c + line > 0]."""
    for r in range(len(line)):
        a = c + line[r]
        t[r] = a if a > _0 else _0
        n[r] = _1 if a > _0 else _0


@inner_kernel
def _add_multitask(
    line: NDArray[Any], x: np.float32, labels: NDArray[Any], first: int, last: int, near_g: NDArray[Any],
    near_h: NDArray[Any],
) -> None:  # fmt: skip
    _hinges(line, x, near_g, near_h)
    square = x * x
    for q in range(first, last):
        y = labels[q]
        near_g[y] -= x * (max(line[y], _0) + max(_2 - line[y], _0))
        near_h[y] += square * ((_1 if line[y] < _2 else _0) - (_1 if line[y] > _0 else _0))


@inner_kernel
def _add_logistic(line: NDArray[Any], x: np.float32, near_g: NDArray[Any], near_h: NDArray[Any]) -> None:
    square = x * x
    for r in range(len(line)):
        near_g[r] += x * line[r]
        near_h[r] += square * (line[r] * (_1 - line[r]))


@inner_kernel
def _add_pairs(
    line: NDArray[Any], x: np.float32, labels: NDArray[Any], first: int, last: int, near_g: NDArray[Any],
    near_h: NDArray[Any], t: NDArray[Any], n: NDArray[Any],
) -> None:  # fmt: skip
    square = x * x
    for q in range(first, last):
        y = labels[q]
        c = _1 - line[y]
        _count(line, c, t, n)
        for other in range(first, last):
            t[labels[other]] = _0
            n[labels[other]] = _0
        for r in range(len(line)):
            near_g[r] += x * t[r]
            near_h[r] += square * n[r]
        near_g[y] -= x * total(t)
        near_h[y] += square * total(n)


@inner_kernel
def add_entries(
    loss: int, begin: int, end: int, column: int, first: int, indices: NDArray[Any], data: NDArray[Any], lines: Lines,
    sums: Sums,
) -> None:  # fmt: skip
    """Add what entries [begin, end) of a column give to its row of gradient and curvature.

    column: its first entry; first: the row that has the first of the lines. Without the factor (2/N, or 1/N); what was added
    since the last flush is in near_g and near_h.
    """
    values, active, y_indptr, labels = lines
    near_g, near_h, t, n = sums.near_g, sums.near_h, sums.t, sums.n
    flat, width = values.reshape(-1), values.shape[1]
    for p in range(begin, end):
        _ahead(indices, p, end, first, flat, width)
        i, x = indices[p] - first, data[p]
        line, q, last = values[i], y_indptr[i], y_indptr[i + 1]
        if loss == MULTITASK:
            _add_multitask(line, x, labels, q, last, near_g, near_h)
        elif q == last:
            pass  # without labels there is no loss
        elif loss == MULTICLASS:
            _hinges(line, x, near_g, near_h)
            near_g[labels[q]] += x * line[labels[q]]
            near_h[labels[q]] += x * x * active[i]
        elif loss == LOGISTIC:
            _add_logistic(line, x, near_g, near_h)
            near_g[labels[q]] -= x
        else:
            _add_pairs(line, x, labels, q, last, near_g, near_h, t, n)
        if (p - column) % FLUSH == FLUSH - 1:
            flush(sums)


@inner_kernel
def _above(a: np.float32, delta: np.float32, after: np.float32) -> np.float32:
    """max(after, 0)^2 - max(a, 0)^2 - 2 max(a, 0) delta, for after = a + delta: no difference of large numbers."""
    whole = delta * delta if a > _0 else _0
    square = after * after
    change = _0
    if a > _0 and after <= _0:
        change = -square
    if a <= _0 and after > _0:
        change = square
    return whole + change


@inner_kernel
def _move_hinges(line: NDArray[Any], x: np.float32, d: NDArray[Any], less: np.float32, t: NDArray[Any]) -> None:
    """line += x (d - less); t = what max(line, 0)^2 gained above its tangent."""
    for r in range(len(line)):
        a = line[r]
        delta = x * (d[r] - less)
        after = a + delta
        t[r] = _above(a, delta, after)
        line[r] = after


@inner_kernel
def _move_margins(
    line: NDArray[Any],
    x: np.float32,
    d: NDArray[Any],
    less: np.float32,
    s: NDArray[Any],
    t: NDArray[Any],
    n: NDArray[Any],
) -> None:
    """`_move_hinges`, and s = max(line, 0), n = [line > 0] after it. In one loop, as two take 5 % longer in a visit."""
    for r in range(len(line)):
        a = line[r]
        delta = x * (d[r] - less)
        after = a + delta
        t[r] = _above(a, delta, after)
        s[r] = after if after > _0 else _0
        n[r] = _1 if after > _0 else _0
        line[r] = after


@inner_kernel
def _quadratic(x: np.float32) -> np.float32:
    """(exp(x) - 1 - x) / x^2 for small x."""
    p = np.float32(1.9841270e-4)
    p = p * x + np.float32(1.3888889e-3)
    p = p * x + np.float32(8.3333333e-3)
    p = p * x + np.float32(4.1666667e-2)
    p = p * x + np.float32(1.6666667e-1)
    return p * x + _HALF


@inner_kernel
def fast_exp(x: np.float32) -> np.float32:
    """exp(x) to about 2e-7, for -80 <= x <= 80; beyond these it is that of the bound."""
    x = min(max(x, np.float32(-80.0)), np.float32(80.0))
    shifted = x * np.float32(1.4426950408889634) + np.float32(
        12582912.0
    )  # 1.5 * 2^23: the sum rounds to a whole number
    k = shifted - np.float32(12582912.0)
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = _quadratic(r)
    p = p * r * r + r + _1
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@inner_kernel
def _beyond(x: np.float32, e: np.float32) -> np.float32:
    """exp(x) - 1 - x, for e = fast_exp(x)."""
    near = _quadratic(x) * x * x
    return near if abs(x) < _HALF else e - _1 - x


@inner_kernel
def _move_logistic(
    line: NDArray[Any], x: np.float32, d: NDArray[Any], s: NDArray[Any], t: NDArray[Any], n: NDArray[Any]
) -> float:
    """Probabilities after scores changed by x d; returns what the loss gained above its tangent."""
    for r in range(len(line)):
        delta = x * d[r]
        p, e = line[r], fast_exp(delta)
        s[r] = p * delta
        t[r] = p * _beyond(delta, e)
        n[r] = p * e
    share = _1 / total(n)
    for r in range(len(line)):
        line[r] = n[r] * share
    beyond = np.float64(total(t))
    grown = np.float64(total(s)) + beyond
    return beyond + (math.log1p(grown) - grown)


@inner_kernel
def _move_logistic_far(line: NDArray[Any], x: np.float32, d: NDArray[Any]) -> float:
    """`_move_logistic` for changes that are large: without float32, whose range and digits they would leave."""
    most = -math.inf
    for r in range(len(line)):
        if line[r] > _0:
            most = max(most, np.float64(x) * np.float64(d[r]))
    whole, slope = 0.0, 0.0
    for r in range(len(line)):
        delta = np.float64(x) * np.float64(d[r])
        slope += np.float64(line[r]) * delta
        whole += np.float64(line[r]) * math.exp(min(delta - most, 0.0))
    for r in range(len(line)):
        delta = np.float64(x) * np.float64(d[r])
        line[r] = np.float32(np.float64(line[r]) * math.exp(min(delta - most, 0.0)) / whole)
    return most + math.log(whole) - slope


@inner_kernel
def _move_multitask(
    line: NDArray[Any], x: np.float32, d: NDArray[Any], labels: NDArray[Any], first: int, last: int, t: NDArray[Any]
) -> float:
    wrong = 0.0
    for q in range(first, last):
        y = labels[q]
        a, delta = line[y], x * d[y]
        b = _2 - a
        wrong += np.float64(_above(b, -delta, b - delta) - _above(a, delta, a + delta))
    _move_hinges(line, x, d, _0, t)
    return np.float64(total(t)) + wrong


@inner_kernel
def _move_pairs(
    line: NDArray[Any], x: np.float32, d: NDArray[Any], labels: NDArray[Any], first: int, last: int, t: NDArray[Any]
) -> float:
    above = 0.0
    for q in range(first, last):
        y = labels[q]
        c, less = _1 - line[y], d[y]
        for r in range(len(line)):
            a = c + line[r]
            delta = x * (d[r] - less)
            t[r] = _above(a, delta, a + delta)
        for other in range(first, last):
            t[labels[other]] = _0
        above += np.float64(total(t))
    for r in range(len(line)):
        line[r] += x * d[r]
    return above


@inner_kernel
def move_entries(
    loss: int, begin: int, end: int, indices: NDArray[Any], data: NDArray[Any], d: NDArray[np.float32], lines: Lines,
    sums: Sums, above: float,
) -> float:  # fmt: skip
    """Add a step d of a row of W to the scores of the rows of entries [begin, end).

    Returns `above` and what the loss gained above its tangent, without the factor 1/N.
    """
    values, active, y_indptr, labels = lines
    s, t, n = sums.s, sums.t, sums.n
    flat, width = values.reshape(-1), values.shape[1]
    largest = _0
    if loss == LOGISTIC:
        for r in range(len(d)):
            largest = max(largest, abs(d[r]))
    for p in range(begin, end):
        _ahead(indices, p, end, 0, flat, width)
        i, x = indices[p], data[p]
        line, q, last = values[i], y_indptr[i], y_indptr[i + 1]
        if loss == MULTITASK:
            above += _move_multitask(line, x, d, labels, q, last, t)
        elif q == last:
            pass  # without labels there is no loss
        elif loss == MULTICLASS:
            line[labels[q]] = _0
            _move_margins(line, x, d, d[labels[q]], s, t, n)
            above += np.float64(total(t))
            line[labels[q]] = -total(s)
            active[i] = total(n)
        elif loss == LOGISTIC and abs(x) * largest <= _NEAR:
            above += _move_logistic(line, x, d, s, t, n)
        elif loss == LOGISTIC:
            above += _move_logistic_far(line, x, d)
        else:
            above += _move_pairs(line, x, d, labels, q, last, t)
    return above


@kernel
def add_scores(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], first: int, weights: NDArray[np.float32],
    scores: NDArray[np.float32],
) -> None:  # fmt: skip
    """scores[i - first] += x_ij weights[j], column after column of a block, for the rows i from `first` on that there are.

    Rows of a column ascend.
    """
    n, width = scores.shape
    flat = scores.reshape(-1)
    for j in range(len(indptr) - 1):
        w, begin, rows = weights[j], indptr[j], indices[indptr[j] : indptr[j + 1]]
        end = begin + np.searchsorted(rows, first + n)
        for p in range(begin + np.searchsorted(rows, first), end):
            _ahead(indices, p, end, first, flat, width)
            x, line = data[p], scores[indices[p] - first]
            for r in range(len(line)):
                line[r] += x * w[r]


@kernel
def add_gradients(
    loss: int, columns: CSR, at: NDArray[np.int64], first: int, lines: Lines, room: Sums, near: NDArray[np.float32],
    wide: NDArray[np.float64],
) -> None:  # fmt: skip
    """Add what rows first .. first + n - 1 give to the gradient of each column of a block, from entry at[j] of it on.

    lines: of these n rows. at (n columns,): moved on behind them. near, wide (n columns x width): what a column's sums hold so
    far, see `add_entries`. room: for the rest.
    """
    indptr, indices, data = columns
    for j in range(len(indptr) - 1):
        begin = at[j]
        at[j] += np.searchsorted(indices[begin : indptr[j + 1]], first + len(lines.values))
        sums = Sums(near[j], room.near_h, wide[j], room.h, room.s, room.t, room.n)
        add_entries(loss, begin, at[j], indptr[j], first, indices, data, lines, sums)
        if at[j] == indptr[j + 1]:
            flush(sums)


@kernel
def settle(loss: int, n_labels: int, lines: Lines) -> float:
    """Make lines that hold scores the array of a loss, see above; returns the sum of the rows' losses, without 1/N."""
    values, active, y_indptr, y_indices = lines
    width, losses = values.shape[1], 0.0
    for i in range(len(values)):
        line, first, last = values[i], y_indptr[i], y_indptr[i + 1]
        for r in range(n_labels, width):
            line[r] = _0 if loss == LOGISTIC else PAD
        if first == last and loss != MULTITASK:
            continue
        if loss == MULTICLASS:
            y = y_indices[first]
            own = line[y]
            line[y] = -np.float32(np.inf)
            of_others, count = 0.0, 0.0
            for r in range(n_labels):
                line[r] = _1 - (own - line[r])
                m = np.float64(max(line[r], _0))
                losses += m * m
                of_others += m
                count += 1.0 if m > 0.0 else 0.0
            line[y], active[i] = np.float32(-of_others), np.float32(count)
        elif loss == MULTITASK:
            for r in range(n_labels):
                line[r] += _1
                losses += np.float64(max(line[r], _0)) ** 2
            for q in range(first, last):
                a = line[y_indices[q]]
                losses += np.float64(max(_2 - a, _0)) ** 2 - np.float64(max(a, _0)) ** 2
        elif loss == LOGISTIC:
            most, whole = line[:n_labels].max(), 0.0
            own = line[y_indices[first]]
            for r in range(n_labels):
                e = math.exp(np.float64(line[r] - most))
                whole += e
                line[r] = np.float32(e)
            for r in range(n_labels):
                line[r] = np.float32(np.float64(line[r]) / whole)
            losses += math.log(whole) + np.float64(most - own)
        else:
            for q in range(first, last):
                c = _1 - line[y_indices[q]]
                for r in range(n_labels):
                    losses += np.float64(max(c + line[r], _0)) ** 2
                for other in range(first, last):
                    losses -= np.float64(max(c + line[y_indices[other]], _0)) ** 2
    return losses
