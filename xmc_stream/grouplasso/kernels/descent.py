"""Block coordinate descent for rows of W under a penalty that makes them zero together (Blondel et al. 2013, section 4).

    P(W) = sum_j lam1 ||W_j||_1 + lam2 ||W_j||_2 + (ridge/2) ||W_j||^2

A visit to feature j takes g = the gradient's row and L (by `margins`), and steps towards

    V = soft(W_j - g/L, lam1/L),   W*_j = max(1 - (lam2/L)/||V||, 0) V / (1 + ridge/L),   d = W*_j - W_j

by 1, 1/2, 1/4, ... of d, until F(W + step d) - F(W) <= SIGMA step (g.d + P(W_j + d) - P(W_j)).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.kernels.margins import LOGISTIC, Lines, Sums, add_entries, flush, move_entries
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.permutation import mix

SIGMA = 0.01
LEAST_SIZE = 0.5**29  # of a step of the line search
LOGISTIC_SHARE = 0.25  # of the constant step's L, which that of a line search is at least
LEAST_CURVATURE = 1e-12
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Problem(NamedTuple):
    """What is minimised, and by which steps.

    loss: see `margins`; n_labels: K; n_samples: N. scale: of what entries give to the gradient and the curvature. lam1, lam2,
    ridge: of the penalty, see above. search: whether a line search finds the step; else L is the constant
    curvature * sum_i x_ij^2 / N.
    """

    loss: int
    n_labels: int
    n_samples: int
    scale: float
    lam1: float
    lam2: float
    ridge: float
    search: bool
    curvature: float


class Visited(NamedTuple):
    """What is noted of visits. violation (2,): the sum so far of equation 9 before each step, and the largest.

    active (n,): of each visit, whether W_j is not 0 after it or the feature violated before; kept (n,): whether W_j is not 0.
    """

    violation: NDArray[np.float64]
    active: NDArray[np.bool_]
    kept: NDArray[np.bool_]


class Step(NamedTuple):
    """A step in the making. d (width,): the step, zeros behind K; v (width,): work space; noted (2,): equation 9, g.d + P."""

    d: NDArray[np.float32]
    v: NDArray[np.float64]
    noted: NDArray[np.float64]


def new_step(width: int) -> Step:
    """Of so many places."""
    return Step(np.zeros(width, np.float32), np.zeros(width), np.zeros(2))


@inner_kernel
def soft(v: float, t: float) -> float:
    """sign(v) max(|v| - t, 0)."""
    return max(v - t, 0.0) + min(v + t, 0.0)


@inner_kernel
def penalty(w: NDArray[Any], n: int, lam1: float, lam2: float, ridge: float) -> float:
    """P of one row; n: places that count."""
    total, square = 0.0, 0.0
    for r in range(n):
        value = np.float64(w[r])
        total += abs(value)
        square += value * value
    return lam1 * total + lam2 * math.sqrt(square) + 0.5 * ridge * square


@inner_kernel
def prox(v: NDArray[np.float64], n: int, lam1: float, lam2: float, ridge: float) -> bool:
    """Replace v by argmin_w 1/2 ||w - v||^2 + P(w); returns whether anything is left."""
    square = 0.0
    for r in range(n):
        v[r] = soft(v[r], lam1)
        square += v[r] * v[r]
    norm = math.sqrt(square)
    share = 1.0 / (1.0 + ridge) if lam2 == 0.0 else max(1.0 - lam2 / norm, 0.0) / (1.0 + ridge) if norm > 0.0 else 0.0
    for r in range(n):
        v[r] *= share
    return norm > 0.0 and share > 0.0


@inner_kernel
def violation(w: NDArray[Any], g: NDArray[np.float64], n: int, lam1: float, lam2: float, ridge: float) -> float:
    """Equation 9; for lam1 with soft(g, lam1) in the place of g."""
    square, kept = 0.0, False
    for r in range(n):
        value = soft(g[r] + ridge * np.float64(w[r]), lam1)
        square += value * value
        kept = kept or w[r] != 0
    norm = math.sqrt(square)
    return abs(norm - lam2) if kept else max(norm - lam2, 0.0)


@inner_kernel
def along(
    w: NDArray[np.float32],
    g: NDArray[np.float64],
    d: NDArray[np.float32],
    n: int,
    before: float,
    v: NDArray[np.float64],
) -> float:
    """v = w + d; returns `before` + g.d."""
    for r in range(n):
        v[r] = np.float64(w[r]) + np.float64(d[r])
        before += g[r] * np.float64(d[r])
    return before


@inner_kernel
def direction(
    w: NDArray[np.float32], g: NDArray[np.float64], v: NDArray[np.float64], d: NDArray[np.float32], n: int, length: float,
    lam1: float, lam2: float, ridge: float,
) -> float:  # fmt: skip
    """d = W*_j - W_j for L = length; returns g.d + P(W_j + d) - P(W_j). v: work space."""
    for r in range(n):
        v[r] = np.float64(w[r]) - g[r] / length
    prox(v, n, lam1 / length, lam2 / length, ridge / length)
    for r in range(n):
        d[r] = np.float32(v[r] - np.float64(w[r]))
    return along(w, g, d, n, 0.0, v) + penalty(v, n, lam1, lam2, ridge) - penalty(w, n, lam1, lam2, ridge)


@inner_kernel
def propose(w: NDArray[np.float32], square: float, problem: Problem, sums: Sums, step: Step) -> None:
    """The step of a feature whose entries are summed; square: sum_i x_ij^2."""
    n, lam1, lam2, ridge = problem.n_labels, problem.lam1, problem.lam2, problem.ridge
    flush(sums)
    most = LEAST_CURVATURE
    for r in range(n):
        sums.g[r] *= problem.scale
        sums.h[r] *= problem.scale
        most = max(most, sums.h[r])
    step.noted[0] = violation(w, sums.g, n, lam1, lam2, ridge)
    length = max(problem.curvature * square / problem.n_samples, LEAST_CURVATURE)
    if problem.search:
        # where probabilities are near 0 and 1 the curvature is next to nothing: a step by it would leave float32
        length = max(most, LOGISTIC_SHARE * length if problem.loss == LOGISTIC else 0.0)
    step.noted[1] = direction(w, sums.g, step.v, step.d, n, length, lam1, lam2, ridge)


@inner_kernel
def falls(w: NDArray[np.float32], above: float, size: float, problem: Problem, sums: Sums, step: Step) -> bool:
    """Whether F falls by enough, where the losses rise by `above` over their tangent; size: of the step, 1 at first."""
    n, lam1, lam2, ridge = problem.n_labels, problem.lam1, problem.lam2, problem.ridge
    if not problem.search or size == LEAST_SIZE:
        return True
    change = along(w, sums.g, step.d, n, above / problem.n_samples - penalty(w, n, lam1, lam2, ridge), step.v)
    return bool(change + penalty(step.v, n, lam1, lam2, ridge) <= SIGMA * size * step.noted[1])


@inner_kernel
def scale_step(d: NDArray[np.float32], factor: np.float32) -> None:
    """d *= factor."""
    for r in range(len(d)):
        d[r] *= factor


@inner_kernel
def note(w: NDArray[np.float32], t: int, problem: Problem, step: Step, visited: Visited) -> None:
    """Note visit number t, after its step."""
    kept = False
    for r in range(problem.n_labels):
        kept = kept or w[r] != 0
    of = step.noted[0]
    visited.violation[0] += of
    visited.violation[1] = max(visited.violation[1], of)
    visited.kept[t] = kept
    visited.active[t] = kept or of > 0.0


@inner_kernel
def add_squares(begin: int, end: int, data: NDArray[np.float32], before: float) -> float:
    """`before` and the sum of squares of the entries [begin, end), value after value."""
    for p in range(begin, end):
        before += np.float64(data[p]) * np.float64(data[p])
    return before


@kernel
def visit(
    order: NDArray[np.int64], columns: CSR, weights: NDArray[np.float32], problem: Problem, lines: Lines, sums: Sums,
    step: Step, visited: Visited,
) -> None:  # fmt: skip
    """Visit columns order[0], order[1], ... of a block; each has its row of W. lines, weights: changed in place.

    `solver.Descent` calls the functions above itself, for a column that is read in pieces.
    """
    loss = problem.loss
    indptr, indices, data = columns
    g, h, d = sums.g, sums.h, step.d
    for t in range(len(order)):
        j = order[t]
        begin, end = indptr[j], indptr[j + 1]
        w = weights[j]
        g[:] = 0.0
        h[:] = 0.0
        add_entries(loss, begin, end, begin, 0, indices, data, lines, sums)
        square = 0.0
        if loss == LOGISTIC or not problem.search:
            square = add_squares(begin, end, data, square)
        propose(w, square, problem, sums, step)
        if step.noted[1] < 0.0:
            size = 1.0
            while not falls(
                w, move_entries(loss, begin, end, indices, data, d, lines, sums, 0.0), size, problem, sums, step
            ):
                scale_step(d, np.float32(-1.0))
                move_entries(loss, begin, end, indices, data, d, lines, sums, 0.0)
                scale_step(d, np.float32(-0.5))
                size *= 0.5
            for r in range(problem.n_labels):
                w[r] += d[r]
        note(w, t, problem, step, visited)


@kernel
def penalties(weights: NDArray[np.float32], problem: Problem, out: NDArray[np.float64]) -> None:
    """P of each row of W."""
    for j in range(len(weights)):
        out[j] = penalty(weights[j], problem.n_labels, problem.lam1, problem.lam2, problem.ridge)


@kernel
def draw(n: int, key: np.uint64, out: NDArray[np.int64]) -> None:
    """Numbers 0 .. n - 1, each drawn by itself."""
    for t in range(len(out)):
        out[t] = np.int64(mix(key + np.uint64(t) * _ODD) % np.uint64(n))


# sums over rows of W that `step_rows` makes
LINEAR, SQUARE, PENALTY, BACK, VIOLATION, LARGEST, KEPT, N_SUMS = range(8)


@kernel
def step_rows(
    v: NDArray[np.float32], g: NDArray[np.float32], w: NDArray[np.float32], length: float, problem: Problem,
    out: NDArray[np.float32], sums: NDArray[np.float64],
) -> None:  # fmt: skip
    """out = prox(v - g / length), row by row of W, and sums (N_SUMS,) over the rows.

    LINEAR g.(out - v). SQUARE ||out - v||^2. PENALTY P(out). BACK (v - out).(out - w). VIOLATION, LARGEST: equation 9 at v.
    KEPT: rows of out that are not 0.
    """
    n, lam1, lam2, ridge = problem.n_labels, problem.lam1, problem.lam2, problem.ridge
    x, slope = np.empty(n), np.empty(n)
    for j in range(len(v)):
        for r in range(n):
            slope[r] = np.float64(g[j, r])
            x[r] = np.float64(v[j, r]) - slope[r] / length
        of = violation(v[j], slope, n, lam1, lam2, ridge)
        sums[VIOLATION] += of
        sums[LARGEST] = max(sums[LARGEST], of)
        prox(x, n, lam1 / length, lam2 / length, ridge / length)
        kept = False
        for r in range(n):
            out[j, r] = np.float32(x[r])
            step = np.float64(out[j, r]) - np.float64(v[j, r])
            sums[LINEAR] += slope[r] * step
            sums[SQUARE] += step * step
            sums[BACK] -= step * (np.float64(out[j, r]) - np.float64(w[j, r]))
            kept = kept or out[j, r] != 0
        sums[PENALTY] += penalty(out[j], n, lam1, lam2, ridge)
        sums[KEPT] += kept
