"""Inner-product search in plain NumPy: dense class vectors, all scores, and the draw among classes that are zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.permutation import key_of

ZERO_CLASSES = 1 << 44
_LOW = 2**32 - 1


def rank_of(feature: int) -> int:
    """The place of a feature in the order of sums."""
    x = feature * 0x9E3779B1 & _LOW
    return (x ^ x >> 16) * 0x85EBCA6B & _LOW


def score(w: NDArray[np.float32], x: NDArray[np.float32]) -> np.float32:
    """w.x in float32, added in the order of ranks."""
    total = np.float32(0.0)
    for j in sorted(np.flatnonzero(x).tolist(), key=rank_of):
        if w[j] != 0.0:
            total += x[j] * w[j]
    return total


def soft(w: NDArray[np.float32], threshold: float) -> NDArray[np.float32]:
    """sign(w) max(|w| - threshold, 0)."""
    return w - np.clip(w, -np.float32(threshold), np.float32(threshold))


def best(
    W: NDArray[np.float32], X: NDArray[np.float32], excluded: list[list[int]], seed: int, step: int, barred: list[int]
) -> tuple[list[int], list[np.float32]]:
    """For each row the class of the largest score, of equals the lowest; where none is above 0 a zero class, if any."""
    classes, scores = [], []
    zero = [k for k in range(len(W)) if not W[k].any()]
    for i, x in enumerate(X):
        found, top = -1, np.float32(-np.inf)
        for k in range(len(W)):
            if k not in zero and k not in excluded[i] and score(W[k], x) > top:
                found, top = k, score(W[k], x)
        left = [k for k in zero if k not in excluded[i] and k not in barred]
        if top <= 0.0 and left:
            found, top = left[key_of(seed, ZERO_CLASSES, step, i) % len(left)], np.float32(0.0)
        classes.append(found)
        scores.append(top)
    return classes, scores


def smallest(W: NDArray[np.float32], bound: float) -> int:
    """How many of the smallest entries, equal ones together, have an l2 norm of at most `bound`."""
    sizes = np.sort(np.abs(W[W != 0.0]).astype(np.float64))
    n = int(np.count_nonzero(np.cumsum(sizes**2) <= bound**2))
    while 0 < n < len(sizes) and sizes[n] == sizes[n - 1]:
        n -= 1
    return n


def code(v: NDArray[np.float32], last: float, scale: float, projections: NDArray[np.float32]) -> list[bool]:
    """The signs of the projections of [scale v; last], summed in float32 in the order of the coordinates."""
    sums = np.zeros(projections.shape[1], np.float32)
    for j, x in enumerate(v):
        sums += np.float32(scale) * x * projections[j]
    return (sums + np.float32(last) * projections[-1] >= 0.0).tolist()


def nearest(codes: NDArray[np.bool_], query: NDArray[np.bool_], zero: NDArray[np.bool_], n: int) -> list[int]:
    """The n classes, not zero, of the least Hamming distance, 254 at most, of equals the lower ones; ascending."""
    distances = np.minimum((codes != query).sum(axis=1), 254)
    order = [c for c in np.argsort(distances, kind="stable") if not zero[c]]
    return sorted(order[:n])


def product(a: NDArray[np.float32], b: NDArray[np.float32]) -> np.float32:
    """a.b in float32: sixteen sums beside each other, then halves added to halves; what is left over comes after."""
    whole = len(a) - len(a) % 16
    sums = np.zeros(16, np.float32)
    for at in range(0, whole, 16):
        sums += a[at : at + 16] * b[at : at + 16]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    total = sums[0]
    for j in range(whole, len(a)):
        total += a[j] * b[j]
    return total
