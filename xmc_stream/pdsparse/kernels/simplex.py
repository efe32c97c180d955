"""Projection onto the two simplices that a sample's dual variables live in (Yen et al. 2016, PD-Sparse, Algorithm 2).

    min ||p - b||^2 + ||q - c||^2   over   p, q >= 0,  sum p = sum q = t,  0 <= t <= C

For a given t both are projections onto a simplex, p = max(b - mu, 0) and q = max(c - nu, 0), and the objective's slope in t
is -2 (mu + nu): so t is 0, C, or where mu + nu = 0, which with m and n entries above 0 is (n S_b + m S_c) / (m + n), S the
sum of the m, n largest entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

_FEW = 32  # values are sorted by insertion


@kernel
def _descending(values: NDArray[np.float64], n: int, scratch: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first n values, largest first, in scratch."""
    ordered = scratch[:n]
    ordered[:] = values[:n]
    if n > _FEW:
        ordered.sort()
        for i in range(n // 2):
            ordered[i], ordered[n - 1 - i] = ordered[n - 1 - i], ordered[i]
        return ordered
    for i in range(1, n):
        x, j = ordered[i], i
        while j > 0 and ordered[j - 1] < x:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = x
    return ordered


@kernel
def _entry(ordered: NDArray[np.float64], n: int, total: float) -> float:
    """The t above which entry n joins the n larger ones, whose sum is total; infinite if there is none."""
    return total - n * ordered[n] if n < len(ordered) else np.inf


@kernel
def project(
    b: NDArray[np.float64],
    m: int,
    c: NDArray[np.float64],
    n: int,
    most: float,
    scratch_b: NDArray[np.float64],
    scratch_c: NDArray[np.float64],
) -> float:
    """Project the first m >= 1 entries of b and n >= 1 of c, in place; returns t. most: C > 0. scratch: m and n places."""
    bs, cs = _descending(b, m, scratch_b), _descending(c, n, scratch_c)
    t = 0.0
    if bs[0] + cs[0] > 0.0:
        m_in, n_in, sum_b, sum_c = 1, 1, bs[0], cs[0]
        while True:
            t = min((n_in * sum_b + m_in * sum_c) / (m_in + n_in), most)
            next_b, next_c = _entry(bs, m_in, sum_b), _entry(cs, n_in, sum_c)
            if min(next_b, next_c) >= t:
                break
            if next_b <= next_c:
                sum_b += bs[m_in]
                m_in += 1
            else:
                sum_c += cs[n_in]
                n_in += 1
        mu, nu = (sum_b - t) / m_in, (sum_c - t) / n_in
        for i in range(m):
            b[i] = max(b[i] - mu, 0.0)
        for i in range(n):
            c[i] = max(c[i] - nu, 0.0)
    else:
        b[:m] = 0.0
        c[:n] = 0.0
    return t
