"""Draws of weights, entries above a threshold, and counts of multiply-adds, one class or row at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .permutation import key_of, mix

_WORD, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def uniforms(key: int, n: int) -> NDArray[np.float64]:
    """The key's first n numbers in [0, 1)."""
    return np.array([(mix(key + r * _ODD & _WORD) >> 11) * 2.0**-53 for r in range(n)])


def sparsified(w: NDArray[np.float32], delta: float, label: int, seed: int, round_: int) -> NDArray[np.float32]:
    """w~ of one class: R draws, one from each of R equal parts of the line of all |w_j|; w itself where R >= nnz."""
    line = np.cumsum(np.abs(w.astype(np.float64)))
    total = line[-1] if len(w) else 0.0
    draws = math.ceil(2 * total * total / (delta * delta))
    if draws >= len(w):
        return w
    step = total / draws
    places = (np.arange(draws) + uniforms(key_of(seed, label, round_, 1 << 41), draws)) * step
    hits = np.minimum(np.searchsorted(line, places, side="right"), len(w) - 1)
    return (np.sign(w) * np.bincount(hits, minlength=len(w)) * step).astype(np.float32)


def cut(w: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """w of one class without its bins of smallest weights: eight to a power of two, all from the 128th on in one."""
    fraction, exponent = np.frexp(np.abs(w))
    size = 8 * exponent.astype(np.int64) + np.floor(16 * fraction).astype(np.int64)
    nonzero = w != 0
    lowest = size[nonzero].max(initial=-(10**6)) - 127
    size = np.maximum(size, lowest)
    squares = w.astype(np.float64) ** 2
    kept = nonzero
    for bin_ in sorted(set(size[nonzero].tolist()))[:-1]:
        if squares[nonzero & (size <= bin_)].sum() > share**2 * squares.sum():
            break
        kept = nonzero & (size > bin_)
    return np.where(kept, w, np.float32(0))


def large(row: list[tuple[int, float]], least: float) -> list[tuple[int, float]]:
    """Entries above a threshold."""
    return [(j, x) for j, x in row if abs(x) > least]


def work(entries: NDArray[np.int64], weights: NDArray[np.float32]) -> int:
    """Multiply-adds of so many entries of each feature with the non-zeros of dense weights (D, K)."""
    return int(entries @ np.count_nonzero(weights, axis=1))
