"""Plain twins of groups of labels: clustering in dense matrices, and what groups do to scores, in float32 steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F = np.float32


def guided(z: float, terms: NDArray[np.float32], groups: NDArray[np.uint8]) -> np.float32:
    """The score of one class for one row. terms (groups,): of the row; groups (R,): of the class."""
    z, one = F(z), F(1)
    doubt = one - z
    total = one + F(0.01) * (z - one) if z >= one else one - doubt * doubt * doubt
    for g in groups:
        total = F(total + terms[g])
    return F(total)


def guided_scores(Z: NDArray[np.float32], terms: NDArray[np.float32], groups: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of all rows and classes."""
    with np.errstate(over="ignore", invalid="ignore"):
        of = [[guided(z, terms[i], groups[:, c]) for c, z in enumerate(row)] for i, row in enumerate(Z)]
    return np.array(of, np.float32).reshape(Z.shape)


def terms_of(Z: NDArray[np.float32], weight: float) -> NDArray[np.float32]:
    """What groups that score Z say."""
    doubt = np.clip(F(1) - Z, F(0), F(1.15))
    return np.asarray(-F(weight) * (doubt * doubt * doubt), np.float32)


def split(
    M: NDArray[np.float64], labels: list[int], first: int, second: int, steps: int
) -> tuple[NDArray[np.float64], list[int], list[int]]:
    """Balanced 2-means of some rows of M (K x D), begun from two of them."""

    def unit(v: NDArray[np.float64]) -> NDArray[np.float64]:
        length = np.linalg.norm(v)
        return v / length if length else v

    halves = [[first], [second]]
    d = unit(M[first]) - unit(M[second])
    for _ in range(steps):
        along = {label: float(M[label] @ d) for label in labels}
        order = sorted(labels, key=lambda label: (-round(along[label], 9), label))
        middle = -(-len(labels) // 2)
        new = [sorted(order[:middle]), sorted(order[middle:])]
        if new == halves:
            break
        halves = new
        d = unit(M[halves[0]].sum(axis=0)) - unit(M[halves[1]].sum(axis=0))
    return d, halves[0], halves[1]
