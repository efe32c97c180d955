"""Vectors of labels: the sum of a label's rows, each count-sketched to a few numbers; and what splits them in two halves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import product
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import mix


@kernel
def add_rows_to_labels(
    x: CSR, y: Labels, weights: NDArray[np.float64], first: int, key: np.uint64, vectors: NDArray[np.float32]
) -> None:
    """Add the rows of a block to those of their labels that are first, first + 1, ..., one for each line of vectors (n, d).

    weights: of the rows, empty where each counts once.

    Feature j counts for number h(j) mod d, with a sign, both drawn by the key; d is a power of two.
    """
    indptr, indices, values = x
    n, d = vectors.shape
    mask, longest = np.uint64(d - 1), 0
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    slots, signed = np.empty(longest, np.int64), np.empty(longest, np.float32)
    for i in range(len(indptr) - 1):
        begin, known = indptr[i], False
        weight = np.float32(weights[i]) if len(weights) else np.float32(1.0)
        for q in range(y.indptr[i], y.indptr[i + 1]):
            label = y.indices[q] - first
            if label < 0 or label >= n:
                continue
            if not known:
                known = True
                for p in range(begin, indptr[i + 1]):
                    drawn = mix(key ^ np.uint64(indices[p]))
                    slots[p - begin] = np.int64(drawn & mask)
                    signed[p - begin] = weight * (values[p] if drawn >> np.uint64(63) else -values[p])
            for p in range(indptr[i + 1] - begin):
                vectors[label, slots[p]] += signed[p]


@kernel
def to_length_one(vectors: NDArray[np.float32]) -> None:
    """Divide each line by its l2 norm, but for lines of zeros."""
    n, d = vectors.shape
    flat = vectors.reshape(n * d)
    for i in range(n):
        square = np.float64(product(flat, i * d, flat, i * d, d))
        if square > 0.0:
            scale = np.float32(1.0 / np.sqrt(square))
            for j in range(d):
                flat[i * d + j] *= scale


@kernel
def project(
    vectors: NDArray[np.float32], nodes: NDArray[np.int32], directions: NDArray[np.float32], along: NDArray[np.float32]
) -> None:
    """along[i] = vectors[i] . directions[nodes[i]]; lines of node -1 are left out."""
    n, d = vectors.shape
    flat, of_nodes = vectors.reshape(n * d), directions.reshape(directions.size)
    for i in range(n):
        if nodes[i] >= 0:
            along[i] = np.float32(product(flat, i * d, of_nodes, nodes[i] * d, d))


@kernel
def add_to_sides(
    vectors: NDArray[np.float32], nodes: NDArray[np.int32], sides: NDArray[np.uint8], sums: NDArray[np.float64]
) -> None:
    """sums[node, side] += vectors[i], lines ascending; lines of node -1 are left out."""
    n, d = vectors.shape
    for i in range(n):
        if nodes[i] >= 0:
            total = sums[nodes[i], sides[i]]
            for j in range(d):
                total[j] += vectors[i, j]


@kernel
def take_sides(
    bounds: NDArray[np.int64], labels: NDArray[np.int64], larger: NDArray[np.bool_], nodes: NDArray[np.int32],
    along: NDArray[np.float32], sides: NDArray[np.uint8], moved: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Of each node, put the labels that stand highest along its direction on side 0: half of them.

    Node c has labels[bounds[c] : bounds[c + 1]], ascending; larger (nodes,): whether side 0 has one more where their number is
    odd. Ties go to the lower label. nodes, along, sides: of each label; nodes of a label that is not split is -1. moved:
    whether a label of the node came to another side.
    """
    for c in range(len(bounds) - 1):
        moved[c] = False
        begin, n = bounds[c], bounds[c + 1] - bounds[c]
        if n < 2 or nodes[labels[begin]] < 0:
            continue
        chosen = (n + 1) // 2 if larger[c] else n // 2
        values = np.empty(n, np.float32)
        for q in range(n):
            values[q] = -along[labels[begin + q]]
        bar = np.partition(values, chosen - 1)[chosen - 1]
        ties = chosen
        for q in range(n):
            ties -= int(values[q] < bar)
        for q in range(n):
            first = values[q] < bar
            if values[q] == bar and ties > 0:
                first, ties = True, ties - 1
            side = np.uint8(0 if first else 1)
            moved[c] |= sides[labels[begin + q]] != side
            sides[labels[begin + q]] = side


@kernel
def part_nodes(
    bounds: NDArray[np.int64], labels: NDArray[np.int64], larger: NDArray[np.bool_], sides: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Have the labels of each node on side 0 stand before those on side 1, both ascending; returns the bounds of the halves."""
    halves = np.empty(2 * len(bounds) - 1, np.int64)
    halves[0] = bounds[0]
    for c in range(len(bounds) - 1):
        begin, end = bounds[c], bounds[c + 1]
        n = end - begin
        middle = begin + ((n + 1) // 2 if larger[c] else n // 2)
        before = labels[begin:end].copy()
        low, high = begin, middle
        for label in before:
            if (sides[label] == 0 and low < middle) or high == end:
                labels[low] = label
                low += 1
            else:
                labels[high] = label
                high += 1
        halves[2 * c + 1], halves[2 * c + 2] = middle, end
    return halves


@kernel
def nearest(vectors: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of each line of vectors, the line of centres that has the largest product with it; the first one of several."""
    (n, d), m = vectors.shape, len(centres)
    flat, of_centres, found = vectors.reshape(n * d), centres.reshape(m * d), np.zeros(n, np.int64)
    for i in range(n):
        largest = np.float32(-np.inf)
        for c in range(m):
            along = np.float32(product(flat, i * d, of_centres, c * d, d))
            if along > largest:
                largest, found[i] = along, c
    return found
