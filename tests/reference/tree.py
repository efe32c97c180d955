"""The label tree in plain NumPy: vectors of labels, splits, rounded weights, who trains a node, the way down, scores.

Numbers that decide an order are float32, and are added up in the order that the kernels state: ties are ties in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .permutation import key_of, mix, permuted

FEATURES, SPLITS, ROWS, HELD_OUT_ROWS = 1 << 46, 1 << 47, 1 << 48, 1 << 41  # domains of draws
STEPS, SAMPLE, LANES, MOST = 4, 16384, 16, 127
F = np.float32
Row = Sequence[tuple[int, float]]  # features and values, in their order
_WORD, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def sketched(
    rows: Sequence[Row], labels: Sequence[Iterable[int]], weights: Sequence[float], n_labels: int, d: int, seed: int
) -> NDArray[np.float32]:
    """Vectors of labels (n_labels, d): each row's count sketch is added to its labels, then each has length one."""
    key, vectors = key_of(seed, FEATURES, 0, 0), np.zeros((n_labels, d), F)
    for row, of_row, weight in zip(rows, labels, weights, strict=True):
        for label in of_row:
            for j, x in row:
                drawn = mix(key ^ j)
                vectors[label, drawn % d] += F(weight) * (F(x) if drawn >> 63 else -F(x))
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), F)


def along(vectors: NDArray[np.float32], direction: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inner products: LANES sums beside each other, then halves added to halves."""
    sums = np.zeros((len(vectors), LANES), F)
    for at in range(0, len(direction), LANES):
        sums += vectors[:, at : at + LANES] * direction[at : at + LANES]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def halves(vectors: NDArray[np.float32], labels: list[int], node: int, key: int) -> list[list[int]]:
    """The labels of a node (ascending) in two: balanced 2-means, the first half one larger where the node's number is even."""
    n = len(labels)
    chosen = -(-n // 2) if node % 2 == 0 else n // 2
    if n < 2:
        return [labels[:chosen], labels[chosen:]]
    some = labels[:: max(1, n // SAMPLE)]
    first, second = (vectors[some[permuted(t, len(some), key)]] for t in (0, 1))
    direction, before = first - second, None
    for _ in range(STEPS - 1):
        sides = by_direction(vectors, some, direction, -(-len(some) // 2) if node % 2 == 0 else len(some) // 2)
        if sides == before:
            break
        before = sides
        sums = [np.sum([vectors[label].astype(np.float64) for label in side], axis=0) for side in sides]
        units = [total / (np.linalg.norm(total) or 1.0) for total in sums]
        direction = (units[0] - units[1]).astype(F)
    return by_direction(vectors, labels, direction, chosen)


def by_direction(
    vectors: NDArray[np.float32], labels: list[int], direction: NDArray[np.float32], chosen: int
) -> list[list[int]]:
    """The labels that stand highest along a direction, so many, and the others."""
    values = along(vectors[labels], direction)
    order = sorted(range(len(labels)), key=lambda q: (-values[q], labels[q]))
    return [sorted(labels[q] for q in some) for some in (order[:chosen], order[chosen:])]


def split(vectors: NDArray[np.float32], seed: int, clustering: int, node: int, begin: int, end: int) -> list[list[int]]:
    """All labels, which are those of a node at depth `begin`, in the nodes at depth `end`."""
    nodes = [list(range(len(vectors)))]
    for depth in range(begin, end):
        first = node << (depth - begin)
        nodes = [
            half
            for number, labels in enumerate(nodes, first)
            for half in halves(vectors, labels, number, key_of(seed, SPLITS + clustering, depth, number))
        ]
    return nodes


def rounded(weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights (D, n) as whole numbers from -127 to 127, and what each child's are multiples of."""
    largest = np.abs(weights).max(axis=0, initial=0)
    scale = np.where(largest > 0, largest / F(MOST), F(1)).astype(F)
    return np.rint(weights / scale).astype(F), scale


def gumbel(seed: int, tree: int, level: int, node: int, row: int) -> float:
    """The noise of a node and a row whose beam has it."""
    u = (mix(key_of(seed, ROWS + (tree << 8) + level, node, row)) >> 11) * 2.0**-53
    return -math.log(-math.log(u + 2.0**-60))


def rows_of_parent(
    positive: Sequence[int], beams: dict[int, float], negatives: float, noise: Callable[[int], float]
) -> list[int]:
    """R(c). positive: rows with a label below c; beams: the paths of c by the rows whose beam has it."""
    most, keys = math.ceil(negatives * len(set(positive))), {}
    for row, path in beams.items():
        if row not in set(positive):
            keys[row] = F(F(0.5) * F(path) + noise(row))
    others = sorted(keys, key=lambda row: (-keys[row], row))[:most]
    return sorted({*positive, *others})


def held_out(rows: Sequence[int], seed: int, share: float) -> list[bool]:
    """Whether each row is held out."""
    key = key_of(seed, HELD_OUT_ROWS, 0, 0)
    return [mix(key ^ (row * _ODD & _WORD)) >> 11 < share * 2.0**53 for row in rows]


@dataclass
class LevelTwin:
    """Children by parent: where those of each begin; whole (D, m), scale and bias (m,) of all of them."""

    ptr: Sequence[int]
    whole: NDArray[np.float32]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]

    def margins(self, row: Row) -> NDArray[np.float32]:
        """Of all children."""
        z = np.zeros(len(self.bias), F)
        for j, x in row:
            z += F(x) * self.whole[j]
        return np.asarray(z * self.scale + self.bias, F)


def cube(short: Any) -> Any:
    """max(0, short)^3."""
    short = np.maximum(F(0), short)
    return short * short * short


def down(level: LevelTwin, row: Row, above: list[tuple[int, np.float32]], beam: int) -> list[tuple[int, np.float32]]:
    """Nodes and paths of a row's beam on a level, best first, from those above."""
    z, found = level.margins(row), []
    for parent, path in above:
        for child in range(level.ptr[parent], level.ptr[parent + 1]):
            found.append((child, F(path) - cube(F(1) - z[child])))
    return sorted((one for one in found if one[1] > -np.inf), key=lambda one: (-one[1], one[0]))[:beam]


def hints(guide: LevelTwin, row: Row, weight: float) -> NDArray[np.float32]:
    """What each group of the guide says of a row. weight: of one group."""
    short = np.maximum(F(0), F(1) - guide.margins(row))
    return np.asarray(-F(weight) * short * short * short, F)


@dataclass
class TreeTwin:
    """Levels from the root down; order: the labels that the children of the last one are."""

    levels: Sequence[LevelTwin]
    order: Sequence[int]

    def best(
        self, row: Row, beam: int, k: int, rule: tuple[float, float], groups: Any, says: Any, barred: Iterable[int] = ()
    ) -> list[tuple[int, np.float32, np.float32]]:
        """The k best labels that the beam reaches, scores, margins. rule: short, path; groups (K, r); says: of each group."""
        beams: list[tuple[int, np.float32]] = [(0, F(0))]
        for level in self.levels[:-1]:
            beams = down(level, row, beams, beam)
        last, found = self.levels[-1], []
        z = last.margins(row)
        for leaf, path in beams:
            for child in range(last.ptr[leaf], last.ptr[leaf + 1]):
                label = int(self.order[child])
                score = F(rule[1]) * path - cube(F(rule[0]) - z[child])
                for group in groups[label] if len(groups) else ():
                    score = score + says[group]
                if label not in barred and score > -np.inf:
                    found.append((label, F(score), z[child]))
        return sorted(found, key=lambda one: (-one[1], -one[2], one[0]))[:k]


def average(
    lists: Sequence[Sequence[tuple[int, float, float]]], by_score: bool, k: int
) -> list[tuple[int, float, float]]:
    """The mean of trees: labels, scores, margins of each, best first."""
    means = []
    for label in sorted({one[0] for of_tree in lists for one in of_tree}):
        found = [{one[0]: one[1:] for one in of_tree}.get(label) for of_tree in lists]
        last = [float(of_tree[-1][1]) if of_tree else 0.0 for of_tree in lists]
        z = [float(one[1]) for one in found if one is not None]
        if by_score:
            scores = [last[t] if one is None else float(one[0]) for t, one in enumerate(found)]
            score = sum(scores) / len(lists)
        else:
            score = math.log(max(sum(math.exp(float(one[0])) for one in found if one is not None) / len(lists), 1e-300))
        means.append((label, float(F(score)), float(F(sum(z) / len(z)))))
    return sorted(means, key=lambda one: (-one[1], -one[2], one[0]))[:k]
