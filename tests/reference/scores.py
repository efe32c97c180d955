"""Scores in a float32 loop, and what a search and a ranking make of them, by sorting everything.

Rows are lists of (feature, value); weights a dense array (D, K) float32, where zero is no weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Row = Sequence[tuple[int, float]]


def scores(rows: Sequence[Row], weights: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """bias + x_1 w_1 + x_2 w_2 + ..., rounded to float32 after every product and every sum: (n, K)."""
    out = np.empty((len(rows), len(bias)), np.float32)
    for i, row in enumerate(rows):
        total = bias
        for j, x in row:
            product = np.float32(x) * weights[j]
            total = np.where(weights[j] != 0, total + product, total)
        out[i] = total
    return out


def narrow(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest float32 whose lower 16 bits are zero, of two the one whose next bit is zero too; finite."""
    below = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).astype(np.uint32)  # towards zero
    beyond = below + np.uint32(0x10000)
    sizes = [np.abs(bits.view(np.float32).astype(np.float64)) for bits in (below, beyond)]
    size = np.abs(weights.astype(np.float64))
    odd = below & np.uint32(0x10000) != 0
    down, up = size - sizes[0], sizes[1] - size
    return np.where((down < up) | ((down == up) & ~odd), below, beyond).astype(np.uint32).view(np.float32)


def run_lengths(weights: NDArray[np.float32], width: int) -> list[int]:
    """Places that the features' runs take in a tile: all classes where a quarter of them or more has the feature.

    Of every feature where 4 bytes for each class are no more than 6 bytes for each of these places.
    """
    counts = [int(np.count_nonzero(of_feature)) for of_feature in weights]
    lengths = [width if count >= width / 4 else count for count in counts]
    return [width] * len(weights) if 4 * width * len(weights) <= 6 * sum(lengths) else lengths


def violators(
    scores_of_class: NDArray[np.float32], active: Collection[int], capacity: int, threshold: float
) -> list[tuple[int, float]]:
    """The best (row, score) above the threshold outside the active set: higher scores first, then lower rows."""
    found = [
        (row, float(score)) for row, score in enumerate(scores_of_class) if score > threshold and row not in active
    ]
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:capacity]


def loss(
    scores_of_class: NDArray[np.float32], positives: Collection[int], name: str, weight: float = 1.0,
    rows: NDArray[np.float64] | None = None,
) -> float:  # fmt: skip
    """The loss of one class over all rows; that of positives counts `weight` times, that of a row as often as `rows` says."""
    total = 0.0
    for row, score in enumerate(scores_of_class):
        y = 1.0 if row in positives else -1.0
        hinge = max(0.0, 1.0 - y * float(score))
        of_row = {"squared_hinge": 0.5 * hinge * hinge, "hinge": hinge, "none": 0.0}[name]
        of_row *= 1.0 if rows is None else rows[row]
        total += weight * of_row if y > 0 else of_row
    return total


def top_k(scores_of_row: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
    """The k best (label, score): higher scores first, then lower labels; (-1, -inf) where there are fewer."""
    ranking = sorted(enumerate(scores_of_row.tolist()), key=lambda pair: (-pair[1], pair[0]))[:k]
    return ranking + [(-1, -np.inf)] * (k - len(ranking))
