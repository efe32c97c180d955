"""What compiled loops do not do in vector registers: sums, whose order would not be the one that is written down; masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmc_stream.kernels.jit import instruction

LANES = 16
WORD, HALF_WORD = 64, 32


def _plain_soft_product(row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    """The same in NumPy."""
    terms = row[at : at + n].astype(np.float64) * (v[:n] - np.minimum(np.maximum(v[:n], -lam), lam))
    return _plain_total(terms)


def _plain_above(array: Any, at: Any, bounds: Any) -> Any:
    """The same in NumPy."""
    return np.uint64(sum(1 << b for b in range(HALF_WORD) if array[at + b] > bounds[at + b]))


def _plain_at_most(array: Any, at: Any, limit: Any) -> Any:
    """The same in NumPy."""
    return np.uint64(sum(1 << b for b in range(WORD) if array[at + b] <= limit))


def _plain_product(a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """The same sums in NumPy."""
    return _plain_total(a[at_a : at_a + n] * b[at_b : at_b + n])


def _plain_total(array: Any) -> Any:
    """The same sums in NumPy."""
    sums = np.zeros(LANES, array.dtype)
    for values in array.reshape(-1, LANES):
        sums += values
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def _plain_soft_lines(indices: Any, values: Any, begin: Any, end: Any, v: Any, lam: Any, sums: Any) -> None:
    """The same in NumPy."""
    halves = np.zeros((2, LANES), np.float32)
    for p in range(begin, end):
        x = v[LANES * indices[p] : LANES * (indices[p] + 1)]
        halves[(p - begin) % 2] += values[p] * (x - np.minimum(np.maximum(x, -lam), lam))
    sums[:] = halves[0] + halves[1]


def _plain_add_to_lines(indices: Any, values: Any, begin: Any, end: Any, steps: Any, v: Any) -> None:
    """The same in NumPy."""
    for p in range(begin, end):
        v[LANES * indices[p] : LANES * (indices[p] + 1)] += values[p] * steps


def _plain_lane_step(
    i: Any, awake: Any, square: Any, weight: Any, tau: Any, positive: Any, h2: Any, upper: Any, alpha: Any, sums: Any,
    met: Any,
) -> Any:  # fmt: skip
    """The same in NumPy."""
    may_move, is_positive = ((int(bits) >> np.arange(LANES)) & 1 > 0 for bits in (awake, positive))
    sign = np.where(is_positive, np.float32(1), np.float32(-1))
    own_h2 = np.where(is_positive, h2[LANES:], h2[:LANES]) / weight
    most = np.where(is_positive, upper[LANES:], upper[:LANES]) * weight
    before = alpha[LANES * i : LANES * (i + 1)].copy()
    g = sign * (sums / tau) - np.float32(1) + before * own_h2
    curvature = square / tau + own_h2
    after = np.minimum(np.maximum(before - g / curvature, np.float32(0)), most)
    after = np.where(may_move, after, before)
    moved = after != before
    step = after - before
    met[:LANES] = np.maximum(met[:LANES], np.where(moved, np.abs(g), np.float32(0)))
    met[LANES:] -= step * (g + np.float32(0.5) * (curvature * step))
    alpha[LANES * i : LANES * (i + 1)] = after
    sums[:] = step * sign
    return np.uint16(sum(1 << lane for lane in range(LANES) if moved[lane]))


total: Any = instruction("total", _plain_total)
product: Any = instruction("product", _plain_product)
soft_product: Any = instruction("soft_product", _plain_soft_product)
above: Any = instruction("above", _plain_above)
at_most: Any = instruction("at_most", _plain_at_most)
soft_lines: Any = instruction("soft_lines", _plain_soft_lines)
add_to_lines: Any = instruction("add_to_lines", _plain_add_to_lines)
lane_step: Any = instruction("lane_step", _plain_lane_step)
