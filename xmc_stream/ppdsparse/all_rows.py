"""Classes whose first active set is all rows: solved LANES at a time, see `linear.kernels.lanecd`.

Where active sets become a large part of the rows, it takes less time to look at every row for many classes at once than
at some rows for one class after the other; and nothing is left to search for. What does so is a matter of data and
parameters, never of the memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, CSRBlock, Labels, PatternBlock
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.kernels.dcd import Steps, row_squares
from xmc_stream.linear.kernels.lanecd import (
    begin_lanes,
    descend_lanes,
    lanes_bytes,
    measure_lanes,
    new_lanes,
    sum_lanes,
    take_rows,
    take_weights,
)
from xmc_stream.linear.kernels.penalty import Times
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.solver import has_dense_rows, penalty_of, start_sizes
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset

_LEAST = 1 << 17  # pairs of a row and a class: with fewer, a training is little but its start
_SHARE = 25  # the first active sets have one in so many of these pairs, or more; they grow to several times as many
_MOST_BYTES = 128 * MIB  # of what a job holds
_MOST_LABELS = 1 << 17  # more of them have fewer rows than that


def takes_all_rows(parameters: PPDSparseParameters, dataset: Dataset) -> bool:
    """What `all_rows` says; where it says nothing, whether data and parameters are such that it pays."""
    if parameters.all_rows is not None:
        return parameters.all_rows
    n = dataset.n_samples
    if (
        parameters.max_rounds is None
        or parameters.approximate
        or dataset.n_labels > _MOST_LABELS
        or all_rows_bytes(dataset) > _MOST_BYTES
    ):
        return False
    counts = dataset.label_counts()
    counts = counts[(counts > 0) & (counts < n)]
    pairs, started = n * len(counts), int((counts + start_sizes(counts, n)).sum())
    return (
        pairs >= _LEAST
        and started * _SHARE >= pairs
        and not has_dense_rows(n, dataset.n_features, dataset.X_rows().nnz)
    )


def all_rows_bytes(dataset: Dataset) -> int:
    """What a job holds to solve LANES classes at a time: X, Y, the lanes, their weights and active rows, sizes of tiles."""
    n, d = dataset.n_samples, dataset.n_features
    taken = LANES * (8 * d + 12 * n)
    held = 8 * dataset.X_rows().nnz + 4 * dataset.Y_columns().nnz + 40 * n + 24 * d
    return held + lanes_bytes(n, d) + taken + max(8 * d, 12 * n)


class Solved(NamedTuple):
    """Some classes: of each in turn its statistics (n, 4), its weights, the rows it keeps; see `linear.kernels.dcd`.

    losses (n,): C times the loss, summed over all rows. weights, active: counts of each class, then of all together features
    and values, rows and alpha. They are overwritten when the next classes come.
    """

    statistics: NDArray[np.float64]
    losses: NDArray[np.float64]
    weights: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
    active: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]


def solve_on_all_rows(
    parameters: PPDSparseParameters,
    seed: int,
    x: CSRBlock,
    y: PatternBlock,
    n_features: int,
    weights: Times,
    epochs: int,
) -> Iterator[Solved]:
    """Solve the classes whose rows are y, LANES at a time, on all rows x, from alpha = 0.

    weights: of these classes and of all rows.
    """
    rows, labels, n = CSR.of(x), Labels.of(y), len(y.indptr) - 1
    penalty = penalty_of(parameters)
    steps = Steps(seed, 0, epochs, float(parameters.tol), 0.0)
    squares = np.empty(len(x.indptr) - 1)
    row_squares(rows.indptr, rows.values, 1.0 if parameters.bias else 0.0, squares)
    n_rows = len(squares)
    lanes = new_lanes(n_rows, n_features)
    of_features, of_rows = np.empty(LANES * n_features, np.int32), np.empty(LANES * n_rows, np.int32)
    values, alphas = np.empty(LANES * n_features, np.float32), np.empty(LANES * n_rows)
    n_weights, n_active = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for first in range(0, n, LANES):
        statistics, losses, mine = np.empty((LANES, 4)), np.empty(LANES), min(LANES, n - first)
        awake = begin_lanes(first, labels, weights.classes, penalty, lanes)
        descend_lanes(rows, squares, weights.rows, steps, penalty, awake, lanes, parameters.least_gain)
        sum_lanes(rows, parameters.bias, lanes)
        measure_lanes(rows, squares, weights.rows, penalty, lanes, losses)
        take_weights(penalty, lanes, n_weights, of_features, values, statistics)
        take_rows(weights.rows, lanes, n_active, of_rows, alphas, statistics)
        yield Solved(
            statistics[:mine],
            losses[:mine],
            _closed_up(n_weights[:mine], n_features, of_features, values),
            _closed_up(n_active[:mine], n_rows, of_rows, alphas),
        )


def _closed_up(
    counts: NDArray[np.int64], width: int, numbers: NDArray[np.int32], values: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Move the first counts[l] of each `width` places of two arrays together; they stand behind the counts, as views."""
    filled = 0
    for start, count in zip(range(0, width * len(counts), width), counts.tolist(), strict=True):
        for array in (numbers, values):
            array[filled : filled + count] = array[start : start + count]
        filled += count
    return counts, numbers[:filled], values[:filled]
