"""PPDSparse: one class at a time, by dual coordinate descent on an active set that a search over all rows extends.

Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. Per class, with y_i in {-1, +1} and a bias feature
x_i0 = 1 that the l1 term leaves alone,

    F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + sum_i C_i loss(w.x_i, y_i)
    squared hinge  loss = 1/2 max(0, 1 - y z)^2        hinge  loss = max(0, 1 - y z)

C_i is C for negatives and positive_weight C for positives, times what `ppdsparse.problem.LossWeights` says. This module covers
the inner problem. Parameters, rounds, files and memory are in `ppdsparse.parameters` and `ppdsparse.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets, CSRBlock, Labels, PatternBlock
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.order import RowOrder
from xmc_stream.linear.kernels.dcd import (
    ONCE,
    Penalty,
    Ramp,
    Scratch,
    Steps,
    Times,
    awake_in_order,
    descend,
    dual_terms,
    of_class,
    of_lines,
    solve_classes,
    take_weights,
    violation,
    wake,
)
from xmc_stream.linear.kernels.lanecd import (
    begin_lanes,
    descend_lanes,
    lanes_bytes,
    measure_lanes,
    new_lanes,
    sum_lanes,
    take_rows,
)
from xmc_stream.linear.kernels.lanecd import take_weights as take_lane_weights
from xmc_stream.linear.kernels.rows import add_rows, as_lines, renumber, row_squares
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.store.dataset import Dataset

ROW_BYTES = 80  # of an active row in a solve: its number, place, sign, alpha before and after, score, order, square
LARGE_BYTES = 4 << 20  # a class whose active rows take more, on average, is large
# Rows are dense where they have one feature in so many on average, and not very many features: v stays in a cache.
_DENSE_SHARE, _MOST_FEATURES = 2, 1 << 12
STRIP_BYTES, STRIP_BITS = 1 << 18, 9  # of a strip of rows, on average, and rows at most (log2)
# A warm start brings as many rows at once as a cold one does in its rounds, and solves them in one.
_WARM_GROWTH = 4


def start_sizes(n_positives: NDArray[np.int64], n_samples: int) -> NDArray[np.int64]:
    """Negatives drawn at first: min(10 n_pos, N / 10), one at least, as far as there are any; none without positives."""
    wanted = np.maximum(1, np.minimum(10 * n_positives, n_samples // 10))
    return np.where(n_positives > 0, np.minimum(wanted, n_samples - n_positives), 0)


def added_sizes(
    n_active: NDArray[np.int64], added: int, n_samples: int, growth: float | NDArray[np.float64] = 1
) -> NDArray[np.int64]:
    """Rows that a search may bring: growth max(|A|, added), as far as there are rows outside A."""
    wanted = (growth * np.maximum(n_active, added)).astype(np.int64)
    return np.asarray(np.minimum(wanted, n_samples - n_active))


def warm_sizes(n_positives: NDArray[np.int64], added: int, n_samples: int) -> NDArray[np.int64]:
    """Negatives that the search of a warm start may bring: what a cold start has after three rounds, about."""
    wanted = _WARM_GROWTH * np.maximum(start_sizes(n_positives, n_samples), added)
    return np.where(n_positives > 0, np.minimum(wanted, n_samples - n_positives), 0)


def row_order(n_samples: int, nnz: int) -> RowOrder:
    """For n_samples rows with nnz entries together."""
    row_bytes = 8 * nnz // max(n_samples, 1)
    strip_bits = max(0, (STRIP_BYTES // max(row_bytes, 1)).bit_length() - 1)
    return RowOrder(n_samples, LARGE_BYTES // (row_bytes + ROW_BYTES), min(strip_bits, STRIP_BITS))


def has_dense_rows(n_samples: int, n_features: int, nnz: int) -> bool:
    """Whether rows have most features, and are solved as whole lines (`linear.kernels.rows`): by the data alone."""
    return n_features <= _MOST_FEATURES and nnz * _DENSE_SHARE >= n_samples * n_features


def penalty_of(parameters: PPDSparseParameters, dense: bool = False) -> Penalty:
    """The numbers of the inner problem. dense: rows are, see `has_dense_rows`."""
    p = parameters
    (h2, upper), (h2_positive, upper_positive) = p.bounds(1.0), p.bounds(p.positive_weight)
    return Penalty(float(p.lam), float(p.tau), h2, upper, h2_positive, upper_positive, p.bias, dense)


def ramp_of(parameters: PPDSparseParameters, of_model: Mapping[str, float]) -> Ramp:
    """A warm start's alpha: how much a margin that falls short of 1 by one gives a negative, and a positive.

    of_model: as of `PPDSparseParameters.warm_near`.

    Of the squared hinge it is the solution's, at the smaller C of both: at the larger one all alpha are too large
    at once where C has grown, and w with them, which takes many epochs to undo. The hinge's is C wherever the
    margin falls short, and anything in [0, C] where it is 1: a steep ramp, as many stand there and rounding throws
    them to either side.
    """
    p, penalty = parameters, penalty_of(parameters)
    before, steep = {**asdict(p), **of_model}, 1.0 if p.loss == "squared_hinge" else 10.0
    positive = min(before["C"] * before["positive_weight"], p.C * p.positive_weight)
    return Ramp(min(before["C"], p.C) * steep, penalty.upper, positive * steep, penalty.upper_positive)


Sink = Callable[[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]], None]
Gather = Callable[[NDArray[np.int64]], CSRBlock]


@dataclass(frozen=True)
class Solver:
    """The inner problem of a round: gives every class of some active sets its weights.

    seed: of the visiting orders, with class, round and epoch. order: what large classes are, and their visiting order.
    dense: see `has_dense_rows`.

    statistics (n, 4): per class the bias, G, lam ||w||_1 + (tau/2) ||w||^2 and the largest violation in the active
    set. sink takes weights: counts of some classes in turn, and their features (ascending) and values.
    """

    parameters: PPDSparseParameters
    seed: int
    order: RowOrder
    dense: bool = False
    round: int = 0

    @cached_property
    def penalty(self) -> Penalty:
        """The numbers of the inner problem."""
        return penalty_of(self.parameters, self.dense)

    @cached_property
    def steps(self) -> Steps:
        """How the round solves."""
        p = self.parameters
        return Steps(self.seed, self.round, p.epochs_of(self.round), float(p.tol), float(p.enough(self.round)))

    def solve(
        self,
        sets: ActiveSets,
        at: NDArray[np.int64],
        block: CSRBlock,
        scratch: Scratch,
        statistics: NDArray[np.float64],
        sink: Sink,
        weights: Times = ONCE,
    ) -> None:
        """Solve all classes, their active rows being rows `at` of the block; sets.alpha is moved on.

        weights: of these classes and the rows of the block.
        """
        n, x = len(sets.ptr) - 1, CSR.of(block)
        norms = np.empty(len(x.indptr) - 1)
        row_squares(x.indptr, x.values, 1.0 if self.parameters.bias else 0.0, norms)
        if self.dense:
            scratch = scratch._replace(rows=as_lines(x, len(scratch.local_of), scratch.rows.indptr))
        counts, done = np.zeros(n, np.int64), 0
        how = self.order, self.steps, self.penalty, weights, scratch, counts, statistics
        while done < n:
            end, filled = solve_classes(done, sets, at, x, norms, *how)
            sink(counts[done:end], scratch.w_features[:filled], scratch.w_values[:filled])
            done = end

    def solve_large(
        self,
        sets: ActiveSets,
        lengths: NDArray[np.int64],
        gather: Gather,
        max_nnz: int,
        scratch: Scratch,
        statistics: NDArray[np.float64],
        sink: Sink,
        weights: Times = ONCE,
    ) -> None:
        """The same for one class of any size: rows are gathered as they are needed, at most max_nnz entries at a time.

        lengths: entries of each active row. weights: of the class, and of each active row. gather: its block is renumbered
        in place. statistics (4,). Same arithmetic in the same order as `solve`, hence the same bits.
        """
        p, steps, n = self.parameters, self.steps, len(sets.rows)
        penalty = of_class(0, weights.classes, self.penalty)
        rows = _Gathered(sets.rows, lengths, gather, max_nnz, scratch, weights.rows, p.bias, self.dense)
        v, v0 = scratch.v, 0.0
        for visit, at, held in rows.stretches(np.flatnonzero(sets.alpha)):
            v0 = add_rows(at, held.x, sets.sign[visit], sets.alpha[visit], v, v0)
        if not p.bias:
            v0 = 0.0
        asleep, order, bar = np.zeros(n, np.bool_), np.empty(n, np.int64), math.inf
        for epoch in range(steps.epochs):
            n_awake = awake_in_order(sets.first_label, sets.rows, self.order, steps, epoch, asleep, order)
            worst = 0.0
            for visit, at, held in rows.stretches(order[:n_awake]):
                v0, met = descend(
                    visit, at, held.x, held.squares, sets.sign, sets.alpha, asleep, bar, v, v0, penalty, held.weights
                )  # fmt: skip
                worst = max(worst, met)
            bar = worst
            if worst <= steps.tol:
                if not wake(asleep, n):
                    break
                bar = math.inf
        inside = 0.0
        for visit, at, held in rows.stretches(np.arange(n)):
            found = violation(
                at, held.x, sets.sign[visit], sets.alpha[visit], v, v0, penalty, held.weights, steps.enough
            )  # fmt: skip
            inside = max(inside, found)
            if inside > steps.enough:
                break
        count, square, kept, bias = take_weights(
            rows.n_local, scratch.features, scratch.local_of, v, v0, p.lam, p.tau, scratch.w_features, scratch.w_values
        )
        dual = dual_terms(sets.sign, sets.alpha, penalty, weights.rows, 0.0)
        statistics[:] = bias, 0.5 * p.tau * square + dual, kept, inside
        sink(np.array([count], np.int64), scratch.w_features[:count], scratch.w_values[:count])


class _Held(NamedTuple):
    """Rows in memory: which of the class's (ascending), with local features, their squared norms and weights."""

    members: NDArray[np.int64]
    x: CSR
    squares: NDArray[np.float64]
    weights: NDArray[np.float64]


class _Gathered:
    """The active rows of a class, gathered as they are needed; features are numbered as they are met, n_local so far.

    What does not fit at once is gathered anew in every epoch, a stretch of the visiting order after the other.
    """

    def __init__(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], gather: Gather, max_nnz: int, scratch: Scratch,
        weights: NDArray[np.float64], bias: bool, dense: bool,
    ) -> None:  # fmt: skip
        self._rows, self._lengths, self._gather, self._max_nnz = rows, lengths, gather, max_nnz
        self._scratch, self._weights, self._constant = scratch, weights, 1.0 if bias else 0.0
        self._held: _Held | None = None
        self.n_local = 0
        if dense:  # margins are sums by feature, so features keep their numbers
            self.n_local = len(scratch.local_of)
            scratch.local_of[:] = scratch.features[: self.n_local] = np.arange(self.n_local)

    def stretches(self, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], _Held]]:
        """Stretches of an order that fit: members as ordered, their places among the rows held, these rows."""
        ends = np.cumsum(self._lengths[order])
        begin = 0
        while begin < len(order):
            before = int(ends[begin - 1]) if begin else 0
            end = max(int(np.searchsorted(ends, before + self._max_nnz, side="right")), begin + 1)
            visit = order[begin:end]
            held = self._held
            if held is None or len(held.members) < len(self._rows):  # what it has is not all of them
                self._held = held = None
                self._held = held = self._hold(np.sort(visit))
            yield visit, np.searchsorted(held.members, visit), held
            begin = end

    def _hold(self, members: NDArray[np.int64]) -> _Held:
        x, squares, scratch = CSR.of(self._gather(self._rows[members])), np.empty(len(members)), self._scratch
        self.n_local = renumber(x, scratch.local_of, scratch.features, self.n_local, self._constant, squares)
        return _Held(members, x, squares, of_lines(members, self._weights))


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
        take_lane_weights(penalty, lanes, n_weights, of_features, values, statistics)
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
