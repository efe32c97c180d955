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

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.margins import LOGISTIC, Lines, Sums, add_entries, end_sums, move_entries

SIGMA = 0.01
MOST_TRIES = 30  # of the line search
LEAST_CURVATURE = 1e-12


class Problem(NamedTuple):
    """loss: see `margins`; n_labels: K; n_samples: N. lam1, lam2, ridge: see above. search: line search, else the constant

    step L_j = curvature * sum_i x_ij^2 / N.
    """

    loss: int
    n_labels: int
    n_samples: int
    lam1: float
    lam2: float
    ridge: float
    search: bool
    curvature: float


class Visited(NamedTuple):
    """What is noted of each visit, (n,). violation: equation 9 before the step. norm: ||soft(g, lam1)|| before the step.

    kept: whether W_j is not 0 after it. tries: of the line search, 0 where nothing moved.
    """

    violation: NDArray[np.float64]
    norm: NDArray[np.float64]
    kept: NDArray[np.bool_]
    tries: NDArray[np.int8]


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
def violation(w: NDArray[Any], g: NDArray[np.float64], n: int, lam1: float, lam2: float, ridge: float) -> tuple[float, float]:
    """Equation 9 (for lam1 with soft(g, lam1) in the place of g), and the norm that it compares with lam2."""
    square, kept = 0.0, False
    for r in range(n):
        value = soft(g[r] + ridge * np.float64(w[r]), lam1)
        square += value * value
        kept = kept or w[r] != 0
    norm = math.sqrt(square)
    return (abs(norm - lam2) if kept else max(norm - lam2, 0.0)), norm


@inner_kernel
def curvature_of(h: NDArray[np.float64], n: int) -> float:
    """max_r h_r, at least LEAST_CURVATURE."""
    most = LEAST_CURVATURE
    for r in range(n):
        most = max(most, h[r])
    return most


@inner_kernel
def direction(
    w: NDArray[np.float32], g: NDArray[np.float64], v: NDArray[np.float64], d: NDArray[np.float32], n: int, length: float,
    lam1: float, lam2: float, ridge: float,
) -> float:  # fmt: skip
    """d = W*_j - W_j for L = length; returns g.d + P(W_j + d) - P(W_j), which is 0 only for d = 0. v: work space."""
    for r in range(n):
        v[r] = np.float64(w[r]) - g[r] / length
    prox(v, n, lam1 / length, lam2 / length, ridge / length)
    linear, moved = 0.0, False
    for r in range(n):
        d[r] = np.float32(v[r] - np.float64(w[r]))
        v[r] = np.float64(w[r]) + np.float64(d[r])
        linear += g[r] * np.float64(d[r])
        moved = moved or d[r] != 0
    if not moved:
        return 0.0
    return linear + penalty(v, n, lam1, lam2, ridge) - penalty(w, n, lam1, lam2, ridge)


@kernel
def visit(
    order: NDArray[np.int64], columns: CSR, at: NDArray[np.int64], weights: NDArray[np.float32], problem: Problem,
    lines: Lines, sums: Sums, d: NDArray[np.float32], visited: Visited,
) -> int:  # fmt: skip
    """Visit columns order[0], order[1], ... of a block, whose rows of W are weights[at[column]].

    lines, weights: changed in place. d (width,): zeros behind K. Returns how many entries were read, 0 .. 4 times each.
    """
    loss, n, n_samples, lam1, lam2, ridge, search, curvature = problem
    indptr, indices, data = columns
    of_violation, of_norm, of_kept, of_tries = visited
    g, h = sums.g, sums.h
    v = np.empty(n)
    unit = 1.0 / n_samples
    scale = unit if loss == LOGISTIC else 2.0 * unit
    work = 0
    for t in range(len(order)):
        j = order[t]
        begin, end = indptr[j], indptr[j + 1]
        w = weights[at[j]]
        g[:] = 0.0
        h[:] = 0.0
        add_entries(loss, begin, end, begin, indices, data, lines, sums)
        end_sums(sums)
        work += end - begin
        for r in range(n):
            g[r] *= scale
            h[r] *= scale
        of_violation[t], of_norm[t] = violation(w, g, n, lam1, lam2, ridge)
        if search:
            length = curvature_of(h, n)
        else:
            square = 0.0
            for p in range(begin, end):
                square += np.float64(data[p]) * np.float64(data[p])
            length = max(curvature * square * unit, LEAST_CURVATURE)
        gain = direction(w, g, v, d, n, length, lam1, lam2, ridge)
        tries = 0
        if gain < 0.0:
            linear = 0.0
            for r in range(n):
                linear += g[r] * np.float64(d[r])
            step, before = 1.0, penalty(w, n, lam1, lam2, ridge)
            while True:
                tries += 1
                above = unit * move_entries(loss, begin, end, indices, data, d, lines, sums, 0.0)
                work += end - begin
                for r in range(n):
                    v[r] = np.float64(w[r]) + np.float64(d[r])
                change = step * linear + above + penalty(v, n, lam1, lam2, ridge) - before
                if not search or tries == MOST_TRIES or change <= SIGMA * step * gain:
                    break
                for r in range(n):
                    d[r] = -d[r]
                move_entries(loss, begin, end, indices, data, d, lines, sums, 0.0)
                work += end - begin
                for r in range(n):
                    d[r] *= np.float32(-0.5)
                step *= 0.5
            for r in range(n):
                w[r] += d[r]
        kept = False
        for r in range(n):
            kept = kept or w[r] != 0
        of_kept[t], of_tries[t] = kept, tries
    return work
