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


total: Any = instruction("total", _plain_total)
product: Any = instruction("product", _plain_product)
soft_product: Any = instruction("soft_product", _plain_soft_product)
above: Any = instruction("above", _plain_above)
at_most: Any = instruction("at_most", _plain_at_most)
