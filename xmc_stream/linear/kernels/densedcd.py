"""Dual coordinate descent on rows that have most features: whole lines of values instead of lists of entries.

The problem and its steps are those of `linear.kernels.dcd`. A margin and a step go over all features, many at a time, where
lists of entries are looked up one by one. Absent features have the value 0, which changes no sum. A margin is summed by
feature (`soft_product`), so that rows that come as entries, features ascending (`Penalty.lanes`), have the same one, bit
for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.kernels.instructions import LANES, prefetch, soft_product
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import RowOrder
from xmc_stream.linear.kernels.dcd import Scratch, Steps, awake_in_order, dual_terms, wake
from xmc_stream.linear.kernels.penalty import Penalty, Times, of_class, of_lines, of_row

_LINE = 16  # values in a cache line


def padded(n_features: int) -> int:
    """Values of a line with so many features: a multiple of LANES."""
    return -(-n_features // LANES) * LANES


@kernel
def fill_lines(x: CSR, width: int, lines: NDArray[np.float32]) -> None:
    """lines (n width,), zero: the rows of a block, `width` values each."""
    indptr, indices, data = x
    for r in range(len(indptr) - 1):
        for p in range(indptr[r], indptr[r + 1]):
            lines[r * width + indices[p]] = data[p]


@inner_kernel
def _add_line(d: float, begin: int, lines: NDArray[np.float32], v: NDArray[np.float64]) -> None:
    """v += d times a line."""
    line = lines[begin : begin + len(v)]
    for j in range(len(v)):
        v[j] += d * line[j]


@kernel
def _descend(
    visit: NDArray[np.int64],
    at: NDArray[np.int64],
    lines: NDArray[np.float32],
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
    """`dcd.descend`; coordinate i has line at[i]."""
    width, tau, worst = len(v), penalty.tau, 0.0
    for t in range(len(visit)):
        soon = at[visit[min(t + 1, len(visit) - 1)]] * width
        for j in range(soon, soon + width, _LINE):
            prefetch(lines, j)
        i = visit[t]
        begin, a = at[i] * width, alpha[i]
        h2, upper = of_row(sign[i], at[i], rows, penalty)
        g = sign[i] * ((v0 + soft_product(lines, begin, v, width, penalty.lam)) / tau) - 1.0 + a * h2
        if a <= 0.0 and g >= 0.0:
            asleep[i] = g > bar
            continue
        if a >= upper and g <= 0.0:
            continue
        worst = max(worst, abs(g))
        a_new = min(max(a - g / (squares[at[i]] / tau + h2), 0.0), upper)
        d = (a_new - a) * sign[i]
        if d != 0.0:
            alpha[i] = a_new
            if penalty.bias:
                v0 += d
            _add_line(d, begin, lines, v)
    return v0, worst


@kernel
def _violation(
    at: NDArray[np.int64],
    lines: NDArray[np.float32],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    v: NDArray[np.float64],
    v0: float,
    penalty: Penalty,
    rows: NDArray[np.float64],
    enough: float,
) -> float:
    """`dcd.violation`."""
    width, worst = len(v), 0.0
    for i in range(len(alpha)):
        h2, upper = of_row(sign[i], at[i], rows, penalty)
        if upper <= 0.0:
            continue
        z = v0 + soft_product(lines, at[i] * width, v, width, penalty.lam)
        g = sign[i] * (z / penalty.tau) - 1.0 + alpha[i] * h2
        if alpha[i] <= 0.0:
            g = min(g, 0.0)
        elif alpha[i] >= upper:
            g = max(g, 0.0)
        worst = max(worst, abs(g))
        if worst > enough:
            break
    return worst


@kernel
def _take_weights(
    n_features: int,
    v: NDArray[np.float64],
    v0: float,
    lam: float,
    tau: float,
    out_features: NDArray[np.int32],
    out_weights: NDArray[np.float32],
) -> tuple[int, float, float, float]:
    """`dcd.take_weights`."""
    w0 = v0 / tau
    kept0 = np.float64(np.float32(w0))
    square, kept = w0 * w0, 0.5 * tau * kept0 * kept0
    filled = 0
    for j in range(n_features):
        x = v[j]
        if abs(x) > lam:
            w = (x - min(max(x, -lam), lam)) / tau
            square += w * w
            w32 = np.float32(w)
            if w32 != 0.0:
                out_features[filled], out_weights[filled] = j, w32
                filled += 1
                kept += lam * abs(np.float64(w32)) + 0.5 * tau * np.float64(w32) * np.float64(w32)
    return filled, square, kept, kept0


@kernel
def solve_dense_classes(
    first: int,
    sets: ActiveSets,
    at: NDArray[np.int64],
    lines: NDArray[np.float32],
    squares: NDArray[np.float64],
    row_order: RowOrder,
    steps: Steps,
    penalty: Penalty,
    weights: Times,
    scratch: Scratch,
    w_counts: NDArray[np.int64],
    statistics: NDArray[np.float64],
) -> tuple[int, int]:
    """`dcd.solve_classes` for the rows of a block as lines (n padded(D),); squares: of these rows."""
    first_label, ptr, rows, sign, alpha = sets
    order, asleep, w_features, w_values = scratch.order, scratch.asleep, scratch.w_features, scratch.w_values
    width, n_features = len(lines) // max(len(squares), 1), len(scratch.local_of)
    v = np.zeros(width)
    filled = 0
    for c in range(first, len(ptr) - 1):
        if filled + n_features > len(w_values):
            return c, filled
        begin, end = ptr[c], ptr[c + 1]
        n, mine, signs, alphas = end - begin, at[begin:end], sign[begin:end], alpha[begin:end]
        own = of_class(c, weights.classes, penalty)
        v[:] = 0.0
        v0 = 0.0
        for q in range(n):
            asleep[q] = False
            if alphas[q] != 0.0:
                v0 += alphas[q] * signs[q]
                _add_line(alphas[q] * signs[q], mine[q] * width, lines, v)
        if not penalty.bias:
            v0 = 0.0
        bar = np.inf
        for epoch in range(steps.epochs):
            n_awake = awake_in_order(first_label + c, rows[begin:end], row_order, steps, epoch, asleep, order)
            v0, bar = _descend(
                order[:n_awake], mine, lines, squares, signs, alphas, asleep, bar, v, v0, own, weights.rows
            )
            if bar <= steps.tol:
                if not wake(asleep, n):
                    break
                bar = np.inf
        statistics[c, 3] = _violation(mine, lines, signs, alphas, v, v0, own, weights.rows, steps.enough)
        count, square, kept, bias = _take_weights(
            n_features, v, v0, penalty.lam, penalty.tau, w_features[filled:], w_values[filled:]
        )
        statistics[c, 0] = bias
        statistics[c, 1] = 0.5 * penalty.tau * square + dual_terms(
            signs, alphas, own, of_lines(mine, weights.rows), 0.0
        )
        statistics[c, 2] = kept
        w_counts[c] = count
        filled += count
    return len(ptr) - 1, filled
