"""PPDSparse: one class at a time, by dual coordinate descent on an active set that a search over all rows extends.

Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. Per class, with y_i in {-1, +1} and a bias feature
x_i0 = 1 that the l1 term leaves alone,

    F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + sum_i C_i loss(w.x_i, y_i)
    squared hinge  loss = 1/2 max(0, 1 - y z)^2        hinge  loss = max(0, 1 - y z)

C_i is C for negatives and positive_weight C for positives, times what `ppdsparse.weights` says. This module covers
the inner problem. Parameters, rounds, files and memory are in `ppdsparse.parameters` and `ppdsparse.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets, CSRBlock
from xmc_stream.kernels.order import RowOrder, stream_order
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.linear.kernels.dcd import (
    Scratch,
    Steps,
    add_rows,
    descend,
    dual_terms,
    renumber,
    row_squares,
    solve_classes,
    take_weights,
    violation,
)
from xmc_stream.linear.kernels.densedcd import fill_lines, padded, solve_dense_classes
from xmc_stream.linear.kernels.penalty import ONCE, Penalty, Ramp, Times, of_class, of_lines
from xmc_stream.ppdsparse.parameters import PPDSparseParameters

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
    """Whether rows have most features, and are solved as whole lines (`linear.kernels.densedcd`): by the data alone."""
    return n_features <= _MOST_FEATURES and nnz * _DENSE_SHARE >= n_samples * n_features


def dense_bytes(n_rows: int, n_features: int) -> int:
    """Of so many rows as whole lines."""
    return 4 * n_rows * padded(n_features)


def penalty_of(parameters: PPDSparseParameters, dense: bool = False) -> Penalty:
    """The numbers of the inner problem. dense: rows are, see `has_dense_rows`."""
    p = parameters
    (h2, upper), (h2_positive, upper_positive) = p.bounds(1.0), p.bounds(p.positive_weight)
    return Penalty(float(p.lam), float(p.tau), h2, upper, h2_positive, upper_positive, p.bias, dense)


def ramp_of(parameters: PPDSparseParameters, slopes: tuple[float, float]) -> Ramp:
    """A warm start's alpha, by `PPDSparseParameters.start_slopes`."""
    penalty = penalty_of(parameters)
    return Ramp(slopes[0], penalty.upper, slopes[1], penalty.upper_positive)


Sink = Callable[[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]], None]
Gather = Callable[[NDArray[np.int64]], CSRBlock]


@dataclass(frozen=True)
class Solver:
    """The inner problem for given parameters: gives every class of some active sets its weights.

    seed: of the visiting orders, with class, round and epoch. order: what large classes are, and their visiting order.
    dense: see `has_dense_rows`.
    """

    parameters: PPDSparseParameters
    seed: int
    order: RowOrder
    dense: bool = False

    def solve(
        self,
        sets: ActiveSets,
        at: NDArray[np.int64],
        block: CSRBlock,
        round_: int,
        scratch: Scratch,
        statistics: NDArray[np.float64],
        sink: Sink,
        weights: Times = ONCE,
    ) -> None:
        """Solve all classes, their active rows being rows `at` of the block; sets.alpha is moved on.

        weights: of these classes and the rows of the block.
        statistics (n, 4): per class the bias, G, lam ||w||_1 + (tau/2) ||w||^2 and the largest violation in the active
        set. sink takes weights: counts of some classes in turn, and their features (ascending) and values.
        """
        p = self.parameters
        n = len(sets.ptr) - 1
        x, penalty, n_features = CSR.of(block), penalty_of(p, self.dense), len(scratch.local_of)
        steps = Steps(self.seed, round_, p.epochs_of(round_), float(p.tol), float(p.enough(round_)))
        norms = np.empty(len(x.indptr) - 1)
        row_squares(x.indptr, x.values, 1.0 if p.bias else 0.0, norms)
        lines = np.zeros(0, np.float32)
        if self.dense:
            lines = np.zeros(len(norms) * padded(n_features), np.float32)
            fill_lines(x, padded(n_features), lines)
        counts = np.zeros(n, np.int64)
        done = 0
        while done < n:
            if self.dense:
                end, filled = solve_dense_classes(
                    done, sets, at, lines, norms, self.order, steps, penalty, weights, scratch, counts, statistics
                )  # fmt: skip
            else:
                end, filled = solve_classes(
                    done, sets, at, x, norms, self.order, steps, penalty, weights, scratch, counts, statistics
                )  # fmt: skip
            sink(counts[done:end], scratch.w_features[:filled], scratch.w_values[:filled])
            done = end

    def solve_large(
        self,
        sets: ActiveSets,
        lengths: NDArray[np.int64],
        gather: Gather,
        max_nnz: int,
        round_: int,
        scratch: Scratch,
        statistics: NDArray[np.float64],
        sink: Sink,
        weights: Times = ONCE,
    ) -> None:
        """The same for one class of any size: rows are gathered as they are needed, at most max_nnz entries at a time.

        lengths: entries of each active row. weights: of the class, and of each active row. gather: its block is renumbered
        in place. statistics (4,). What does not fit at once is gathered anew in every epoch, a stretch of the
        visiting order after the other. Same arithmetic in the same order as `solve`, hence the same bits.
        """
        p = self.parameters
        n = len(sets.rows)
        penalty = of_class(0, weights.classes, penalty_of(p, self.dense))
        block: tuple[NDArray[np.int64], CSR, NDArray[np.float64], NDArray[np.float64]] | None = None
        n_local = 0
        if self.dense:  # margins are sums by feature, so features keep their numbers
            n_local = len(scratch.local_of)
            scratch.local_of[:] = scratch.features[:n_local] = np.arange(n_local)
        asleep = np.zeros(n, np.bool_)

        def stretches(
            order: NDArray[np.int64],
        ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], CSR, NDArray[np.float64], NDArray[np.float64]]]:
            """Stretches of an order that fit: members as ordered, their places in the block, the block, its rows' squared
            norms and weights.
            """
            nonlocal n_local, block
            ends = np.cumsum(lengths[order])
            begin = 0
            while begin < len(order):
                before = int(ends[begin - 1]) if begin else 0
                end = max(int(np.searchsorted(ends, before + max_nnz, side="right")), begin + 1)
                visit = order[begin:end]
                if block is None or len(block[0]) < n:  # what it has is not all of them
                    block = None
                    members = np.sort(visit)
                    x, squares = CSR.of(gather(sets.rows[members])), np.empty(len(members))
                    n_local = renumber(
                        x, scratch.local_of, scratch.features, n_local, 1.0 if p.bias else 0.0, squares
                    )  # fmt: skip
                    block = members, x, squares, of_lines(members, weights.rows)
                yield visit, np.searchsorted(block[0], visit), *block[1:]
                begin = end

        v0 = 0.0
        for visit, at, x, _, _ in stretches(np.flatnonzero(sets.alpha)):
            v0 = add_rows(at, x, sets.sign[visit], sets.alpha[visit], scratch.v, v0)
        if not p.bias:
            v0 = 0.0
        bar = math.inf
        order = np.empty(n, np.int64)
        for epoch in range(p.epochs_of(round_)):
            if n > self.order.large:
                stream_order(
                    sets.rows, self.order.n_samples, self.order.strip_bits, self.seed, round_, epoch, order
                )  # fmt: skip
            else:
                visiting_order(0, n, np.uint64(key_of(self.seed, sets.first_label, round_, epoch)), order)
            worst = 0.0
            for visit, at, x, squares, of_rows in stretches(order[~asleep[order]]):
                v0, met = descend(
                    visit, at, x, squares, sets.sign, sets.alpha, asleep, bar, scratch.v, v0, penalty, of_rows
                )  # fmt: skip
                worst = max(worst, met)
            bar = worst
            if worst <= p.tol:
                if not asleep.any():
                    break
                asleep[:] = False
                bar = math.inf
        inside = 0.0
        enough = float(p.enough(round_))
        for visit, at, x, _, of_rows in stretches(np.arange(n)):
            found = violation(at, x, sets.sign[visit], sets.alpha[visit], scratch.v, v0, penalty, of_rows, enough)
            inside = max(inside, found)
            if inside > enough:
                break
        count, square, kept, bias = take_weights(
            n_local,
            scratch.features,
            scratch.local_of,
            scratch.v,
            v0,
            p.lam,
            p.tau,
            scratch.w_features,
            scratch.w_values,
        )
        dual = dual_terms(sets.sign, sets.alpha, penalty, weights.rows, 0.0)
        statistics[:] = bias, 0.5 * p.tau * square + dual, kept, inside
        sink(np.array([count], np.int64), scratch.w_features[:count], scratch.w_values[:count])
