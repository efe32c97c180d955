"""PPDSparse's inner problem for many large classes at once, while the rows of X stream by.

A class is large by the data alone: its active rows, with their own numbers, take more than LARGE_BYTES. Large classes
visit their rows in an order that all of them share (`kernels.stream`), so one pass over X is an epoch of as many classes
as there is memory for their v. `solvers.ppdsparse` takes the same steps in the same order on classes that it holds whole:
which of the two solves a class is a matter of memory, and no bit of the result depends on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.order import GROUP, epoch_key, run_slots
from xmc_stream.kernels.stream import (
    add_range,
    descend_group,
    list_needed,
    mark_group,
    mark_range,
    row_squares,
    start_range,
    violation_range,
)
from xmc_stream.solvers.ppdsparse import CSRBlock, PPDSparseParameters


@dataclass
class Pairs:
    """Active rows of some classes, ragged: class c has the entries [ptr[c], ptr[c + 1]), its rows ascending.

    sign int8 (+1 positive, -1 negative); alpha float64 >= 0; asleep: not visited before it is woken.
    """

    ptr: NDArray[np.int64]
    rows: NDArray[Any]
    sign: NDArray[np.int8]
    alpha: NDArray[np.float64]
    asleep: NDArray[np.bool_]


class PairStore(Protocol):
    """Where the pairs of some classes are: in memory, or on disk."""

    n_classes: int

    def take(self, ranges: Sequence[tuple[int, int]]) -> Pairs:
        """The pairs with rows in some ranges (ascending); there may be others among them."""
        ...

    def give_back(self) -> None:
        """What was taken has been changed."""
        ...

    def sleeping(self) -> NDArray[np.bool_]:
        """For each class, whether some of its rows are asleep."""
        ...

    def wake(self, classes: NDArray[np.bool_]) -> None:
        """Wake all rows of these classes."""
        ...


Gather = Callable[[NDArray[np.int64]], "CSRBlock | None"]
Weights = tuple[NDArray[Any], NDArray[np.float32], float]  # features, values, bias


class StreamSolver:
    """Solves the classes of a pair store; v (n, D) and a group of rows are what it holds.

    gather: rows (ascending) of X in memory, or None where they are too many at once. ahead: called with a range of rows
    that will be needed soon. threads: that share the classes. run_bits: rows of a run, log2.
    """

    def __init__(
        self,
        parameters: PPDSparseParameters,
        seed: int,
        n_samples: int,
        n_features: int,
        run_bits: int,
        pairs: PairStore,
        gather: Gather,
        ahead: Callable[[int, int], None],
        threads: int = 1,
    ) -> None:
        self.parameters, self.seed, self.n_samples, self.run_bits = parameters, seed, n_samples, run_bits
        self.pairs, self._gather, self._ahead, self.threads = pairs, gather, ahead, threads
        self.passes = 0  # over the rows
        self.v, self.v0 = np.zeros((pairs.n_classes, n_features)), np.zeros(pairs.n_classes)
        rows = GROUP << run_bits
        self._needed, self._local_of = np.zeros(rows, np.bool_), np.empty(rows, np.int32)
        self._lines = np.empty(rows, np.int64)
        self._scratch = [tuple(np.empty(rows, np.int64) for _ in range(4)) for _ in range(threads)]

    def solve(self, round_: int, weights: Iterator[Weights] | None = None) -> NDArray[np.float64]:
        """One round of all classes; returns the largest violation inside each active set.

        weights: of a warm start, a class after the other (features, values, bias), which give alpha.
        """
        p, n = self.parameters, self.pairs.n_classes
        with ThreadPoolExecutor(self.threads) as self._pool:
            if weights is not None:
                self._start(weights)
            self._ascend(self._add, False)
            if not p.bias:
                self.v0[:] = 0.0
            going, bar = np.ones(n, np.bool_), np.full(n, np.inf)
            for epoch in range(p.epochs_of(round_)):
                worst = np.zeros(n)
                self._epoch(np.uint64(epoch_key(self.seed, round_, epoch)), going, bar, worst)
                bar[going] = worst[going]
                settled, sleeping = going & (worst <= p.tol), self.pairs.sleeping()
                going &= ~settled | sleeping
                if not going.any():
                    break
                woken = settled & sleeping
                self.pairs.wake(woken)
                bar[woken] = np.inf
            inside = np.zeros(n)

            def look(pairs: Pairs, block: CSRBlock, start: int, stop: int, part: tuple[int, int], scratch: Any) -> None:
                violation_range(
                    *part, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, start, stop, self._local_of, block.indptr,
                    block.indices, block.values, self.v, self.v0, inside, p.lam, p.tau, p.h2, p.upper, scratch[0],
                )  # fmt: skip

            self._ascend(look, True)
        return inside

    def _start(self, weights: Iterator[Weights]) -> None:
        """alpha from the margins that given weights leave; they stand in v meanwhile."""
        p = self.parameters
        bias = np.zeros(self.pairs.n_classes)
        for c, (features, values, b) in enumerate(weights):
            self.v[c, features], bias[c] = values, b

        def start_alpha(
            pairs: Pairs, block: CSRBlock, start: int, stop: int, part: tuple[int, int], scratch: Any
        ) -> None:
            start_range(
                *part, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, start, stop, self._local_of, block.indptr,
                block.indices, block.values, self.v, bias, p.start_slope, p.upper,
            )  # fmt: skip

        self._ascend(start_alpha, True, change=True)
        self.v[:] = 0.0

    def _add(self, pairs: Pairs, block: CSRBlock, start: int, stop: int, part: tuple[int, int], scratch: Any) -> None:
        add_range(
            *part, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, start, stop, self._local_of, block.indptr,
            block.indices, block.values, self.v, self.v0, scratch[0],
        )  # fmt: skip

    def _share(self, pairs: Pairs, work: Callable[[tuple[int, int], Any], None]) -> None:
        """Split the classes into parts with as many pairs each, a thread a part."""
        if self.threads == 1:
            work((0, self.pairs.n_classes), self._scratch[0])
            return
        cuts = np.searchsorted(pairs.ptr, np.linspace(0, pairs.ptr[-1], self.threads + 1)[1:-1])
        ends = [0, *np.maximum.accumulate(cuts).tolist(), self.pairs.n_classes]
        list(self._pool.map(work, itertools.pairwise(ends), self._scratch))

    def _ascend(self, act: Callable[..., None], all_: bool, change: bool = False) -> None:
        """Act on all classes, range of rows after range: with all active rows, or those with alpha > 0."""
        step = len(self._needed)
        self.passes += 1
        for start in range(0, self.n_samples, step):
            stop = min(start + step, self.n_samples)
            self._ahead(stop, min(stop + step, self.n_samples))
            pairs = self.pairs.take([(start, stop)])
            self._in_range(act, pairs, all_, start, stop)
            if change:
                self.pairs.give_back()

    def _in_range(self, act: Callable[..., None], pairs: Pairs, all_: bool, start: int, stop: int) -> None:
        needed = self._needed[: stop - start]
        needed[:] = False
        mark_range(pairs.ptr, pairs.rows, pairs.alpha, all_, start, needed)
        marked = np.flatnonzero(needed)
        if not len(marked):
            return
        self._local_of[marked] = np.arange(len(marked), dtype=np.int32)
        block = self._gather(marked + start)
        if block is None:
            middle = (start + stop) // 2
            self._in_range(act, pairs, all_, start, middle)
            self._in_range(act, pairs, all_, middle, stop)
            return
        self._share(pairs, lambda part, scratch: act(pairs, block, start, stop, part, scratch))

    def _epoch(
        self, key: np.uint64, going: NDArray[np.bool_], bar: NDArray[np.float64], worst: NDArray[np.float64]
    ) -> None:
        self.passes += 1
        n_runs = -(-self.n_samples >> self.run_bits)
        slots = np.empty(n_runs, np.int64)
        run_slots(n_runs, key, slots)
        order = np.argsort(slots)
        groups = [np.sort(order[first : first + GROUP]) for first in range(0, n_runs, GROUP)]
        for i, runs in enumerate(groups):
            for run in groups[i + 1] if i + 1 < len(groups) else ():
                self._ahead(*self._rows_of(int(run)))
            pairs = self.pairs.take([self._rows_of(int(run)) for run in runs])
            self._visit(pairs, runs, slots[runs], key, going, bar, worst, 0, len(self._needed))
            self.pairs.give_back()

    def _rows_of(self, run: int) -> tuple[int, int]:
        return run << self.run_bits, min((run + 1) << self.run_bits, self.n_samples)

    def _visit(
        self, pairs: Pairs, runs: NDArray[np.int64], slots: NDArray[np.int64], key: np.uint64, going: NDArray[np.bool_],
        bar: NDArray[np.float64], worst: NDArray[np.float64], low: int, high: int,
    ) -> None:  # fmt: skip
        """The steps on the rows of a group that come at the places [low, high) of the group."""
        p = self.parameters
        self._needed[:] = False
        mark_group(going, pairs.ptr, pairs.rows, pairs.asleep, runs, slots, self.run_bits, key, low, high, self._needed)
        n = list_needed(self._needed, runs, self.run_bits, self._lines, self._local_of)
        if not n:
            return
        block = self._gather(self._lines[:n])
        if block is None:
            middle = (low + high) // 2
            self._visit(pairs, runs, slots, key, going, bar, worst, low, middle)
            self._visit(pairs, runs, slots, key, going, bar, worst, middle, high)
            return
        squares = np.empty(n)
        row_squares(block.indptr, block.values, 1.0 if p.bias else 0.0, squares)
        self._share(
            pairs,
            lambda part, scratch: descend_group(
                *part, going, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, pairs.asleep, runs, slots, self.run_bits,
                key, low, high, self._local_of, block.indptr, block.indices, block.values, squares, bar, self.v, self.v0,
                worst, p.lam, p.tau, p.h2, p.upper, p.bias, *scratch,
            ),
        )  # fmt: skip
