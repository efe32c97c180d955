"""PPDSparse's inner problem for many large classes at once, while the rows of X stream by.

A class is large by the data alone: its active rows, with their own numbers, take more than LARGE_BYTES. Large classes
visit their rows in an order that all of them share (`kernels.stream`), so one pass over X is an epoch of as many classes
as there is memory for their v. `methods.ppdsparse.solver` takes the same steps in the same order on classes that
it holds whole. Which of the two solves a class is a matter of memory, and no bit of the result depends on it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
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
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.methods.ppdsparse.solver import CSRBlock
from xmc_stream.stop import stop_if_unwanted

DESKS = 3  # parts in memory: one is worked on, one is read, and of one it is found what must be read
_SHARES = 8  # runs of classes for each thread: some have more to do, and the last one ends soon


@dataclass
class Pairs:
    """Active rows of some classes, ragged: class c has the entries [ptr[c], ptr[c + 1]), its rows ascending.

    sign int8 (+1 positive, -1 negative); alpha float64 >= 0; asleep: not visited before it is woken. starts (n, runs + 1):
    how many of a class's rows come before each run of X; (0, 0) where the pairs are of the ranges asked for alone.
    """

    ptr: NDArray[np.int64]
    rows: NDArray[Any]
    sign: NDArray[np.int8]
    alpha: NDArray[np.float64]
    asleep: NDArray[np.bool_]
    starts: NDArray[np.int32]


class PairStore(Protocol):
    """Where the pairs of some classes are: in memory, or on disk. A part is taken while another one is worked on."""

    n_classes: int

    def take(self, ranges: Sequence[tuple[int, int]]) -> Pairs:
        """The pairs with rows in some ranges (ascending), or all with their `starts`."""
        ...

    def give_back(self, pairs: Pairs) -> None:
        """What was taken has been changed."""
        ...

    def sleeping(self) -> NDArray[np.bool_]:
        """For each class, whether some of its rows are asleep."""
        ...

    def wake(self, classes: NDArray[np.bool_]) -> None:
        """Wake all rows of these classes."""
        ...


Gather = Callable[[NDArray[np.int64], int], "Callable[[], CSRBlock] | None"]
Ahead = Callable[[Sequence[tuple[int, int]]], None]
Weights = tuple[NDArray[Any], NDArray[np.float32], float]  # features, values, bias
Act = Callable[["Part", tuple[int, int], Any], None]  # on a part, for classes [first, last), with a thread's scratch


@dataclass
class Part:
    """Rows in memory with the pairs that are theirs: places [low, high) of a group of runs, or rows [low, high).

    local_of: numbers of the rows in the block; squares: their ||x_i||^2, the bias counted.
    """

    pairs: Pairs
    low: int
    high: int
    local_of: NDArray[np.int32]
    block: CSRBlock
    runs: NDArray[np.int64]
    slots: NDArray[np.int64]
    squares: NDArray[np.float64]


class _Desk:
    """What one part is put together on."""

    def __init__(self, number: int, rows: int) -> None:
        self.number = number  # for `gather`
        self.needed, self.local_of = np.zeros(rows, np.bool_), np.empty(rows, np.int32)
        self.lines = np.empty(rows, np.int64)


class StreamSolver:
    """Solves the classes of a pair store; v (n, D) and DESKS groups of rows are what it holds.

    gather: gives what will read rows (ascending) of X into buffer 0 .. DESKS - 1, or None where they are too many at
    once. It is called in one thread and what it gives in another one, so that both go on beside the steps. ahead: is
    told, before that, of ranges of rows most of which will come after these. threads: that share the classes. run_bits:
    rows of a run, log2.
    """

    def __init__(
        self, parameters: PPDSparseParameters, seed: int, n_samples: int, n_features: int, run_bits: int, pairs: PairStore,
        gather: Gather, ahead: Ahead, threads: int = 1,
    ) -> None:  # fmt: skip
        self.parameters, self.seed, self.n_samples, self.run_bits = parameters, seed, n_samples, run_bits
        self.pairs, self._gather, self._ahead, self.threads = pairs, gather, ahead, threads
        self.passes = 0  # over the rows
        self.v, self.v0 = np.zeros((pairs.n_classes, n_features)), np.zeros(pairs.n_classes)
        self._rows = GROUP << run_bits
        self._desks, self._free = [_Desk(number, self._rows) for number in range(DESKS)], 0
        self._most_needed = False  # of the rows of the part before
        self._scratch: SimpleQueue[tuple[NDArray[np.int64], ...]] = SimpleQueue()  # one for each thread
        for _ in range(threads):
            self._scratch.put(tuple(np.empty(self._rows, np.int64) for _ in range(4)))

    def solve(
        self, round_: int, weights: Iterator[Weights] | None = None, start_slope: float = 0.0
    ) -> NDArray[np.float64]:
        """One round of all classes; returns the largest violation inside each active set.

        weights: of a warm start, a class after the other (features, values, bias), which give alpha with start_slope.
        """
        p, n = self.parameters, self.pairs.n_classes
        with (
            ThreadPoolExecutor(self.threads) as self._pool,
            ThreadPoolExecutor(1) as self._reader,
            ThreadPoolExecutor(1) as self._planner,
        ):
            if weights is not None:
                self._start(weights, start_slope)
            self._work(self._ranges(False), self._add)
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

            def look(part: Part, classes: tuple[int, int], scratch: Any) -> None:
                pairs, block = part.pairs, part.block
                violation_range(
                    *classes, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, part.low, part.high, part.local_of,
                    block.indptr, block.indices, block.values, self.v, self.v0, inside, p.lam, p.tau, p.h2, p.upper,
                    scratch[0],
                )  # fmt: skip

            self._work(self._ranges(True), look)
        return inside

    def _start(self, weights: Iterator[Weights], slope: float) -> None:
        """alpha from the margins that given weights leave; they stand in v meanwhile."""
        p = self.parameters
        bias = np.zeros(self.pairs.n_classes)
        for c, (features, values, b) in enumerate(weights):
            self.v[c, features], bias[c] = values, b

        def start_alpha(part: Part, classes: tuple[int, int], scratch: Any) -> None:
            pairs, block = part.pairs, part.block
            start_range(
                *classes, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, part.low, part.high, part.local_of,
                block.indptr, block.indices, block.values, self.v, bias, slope, p.upper,
            )  # fmt: skip

        self._work(self._ranges(True), start_alpha, change=True)
        self.v[:] = 0.0

    def _add(self, part: Part, classes: tuple[int, int], scratch: Any) -> None:
        pairs, block = part.pairs, part.block
        add_range(
            *classes, pairs.ptr, pairs.rows, pairs.sign, pairs.alpha, part.low, part.high, part.local_of, block.indptr,
            block.indices, block.values, self.v, self.v0, scratch[0],
        )  # fmt: skip

    def _epoch(
        self, key: np.uint64, going: NDArray[np.bool_], bar: NDArray[np.float64], worst: NDArray[np.float64]
    ) -> None:
        p = self.parameters

        def step(part: Part, classes: tuple[int, int], scratch: Any) -> None:
            pairs, block = part.pairs, part.block
            descend_group(
                *classes, going, pairs.ptr, pairs.rows, pairs.starts, pairs.sign, pairs.alpha, pairs.asleep, part.runs,
                part.slots, self.run_bits, key, part.low, part.high, part.local_of, block.indptr, block.indices,
                block.values, part.squares, bar, self.v, self.v0, worst, p.lam, p.tau, p.h2, p.upper, p.bias, *scratch,
            )  # fmt: skip

        self._work(self._groups(key, going), step, change=True)

    def _work(self, parts: Iterator[Future[Part]], act: Act, change: bool = False) -> None:
        """Act on part after part, the next ones being read meanwhile; threads take runs of classes with as many pairs.

        change: whether the pairs are given back.
        """
        self.passes += 1
        ahead = deque(self._planner.submit(next, parts, None) for _ in self._desks[1:])
        while (coming := ahead.popleft().result()) is not None:
            part = coming.result()
            stop_if_unwanted()
            ahead.append(self._planner.submit(next, parts, None))
            ptr = part.pairs.ptr
            n = _SHARES * self.threads if self.threads > 1 else 1
            cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], n + 1)[1:-1])
            ends = [0, *np.maximum.accumulate(cuts).tolist(), self.pairs.n_classes]
            list(self._pool.map(partial(self._act, act, part), itertools.pairwise(ends)))
            if change:
                self.pairs.give_back(part.pairs)

    def _act(self, act: Act, part: Part, classes: tuple[int, int]) -> None:
        scratch = self._scratch.get()
        try:
            act(part, classes, scratch)
        finally:
            self._scratch.put(scratch)

    def _ranges(self, all_: bool) -> Iterator[Future[Part]]:
        """Ranges of rows, ascending, with all active rows, or those with alpha > 0."""
        for start in range(0, self.n_samples, self._rows):
            stop = min(start + self._rows, self.n_samples)
            if self._most_needed and stop < self.n_samples:
                self._ahead([(stop, min(stop + self._rows, self.n_samples))])
            yield from self._of_range(self.pairs.take([(start, stop)]), all_, start, stop)

    def _of_range(self, pairs: Pairs, all_: bool, start: int, stop: int) -> Iterator[Future[Part]]:
        desk = self._desks[self._free]
        needed = desk.needed[: stop - start]
        needed[:] = False
        mark_range(pairs.ptr, pairs.rows, pairs.alpha, all_, start, needed)
        marked = np.flatnonzero(needed)
        self._most_needed = 2 * len(marked) > stop - start
        if not len(marked):
            return
        desk.local_of[marked] = np.arange(len(marked), dtype=np.int32)
        read = self._gather(marked + start, desk.number)
        if read is None:
            middle = (start + stop) // 2
            yield from self._of_range(pairs, all_, start, middle)
            yield from self._of_range(pairs, all_, middle, stop)
            return
        nothing = np.empty(0, np.int64)
        yield self._reading(read, pairs, start, stop, nothing, nothing)

    def _groups(self, key: np.uint64, going: NDArray[np.bool_]) -> Iterator[Future[Part]]:
        """The groups of an epoch, with the rows that some class visits."""
        n_runs = -(-self.n_samples >> self.run_bits)
        slots = np.empty(n_runs, np.int64)
        run_slots(n_runs, key, slots)
        order = np.argsort(slots)
        for first in range(0, n_runs, GROUP):
            runs = np.sort(order[first : first + GROUP])
            if self._most_needed and first + GROUP < n_runs:
                self._ahead(self._rows_of(np.sort(order[first + GROUP : first + 2 * GROUP])))
            pairs = self.pairs.take(self._rows_of(runs))
            yield from self._of_group(pairs, runs, slots[runs], key, going, 0, self._rows)

    def _rows_of(self, runs: NDArray[np.int64]) -> list[tuple[int, int]]:
        starts = runs << self.run_bits
        stops = np.minimum(starts + (1 << self.run_bits), self.n_samples)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _of_group(
        self, pairs: Pairs, runs: NDArray[np.int64], slots: NDArray[np.int64], key: np.uint64,
        going: NDArray[np.bool_], low: int, high: int,
    ) -> Iterator[Future[Part]]:  # fmt: skip
        """The rows of a group that come at its places [low, high)."""
        desk = self._desks[self._free]
        desk.needed[:] = False
        mark_group(
            going, pairs.ptr, pairs.rows, pairs.starts, pairs.asleep, runs, slots, self.run_bits, key, low, high, desk.needed
        )  # fmt: skip
        n = list_needed(desk.needed, runs, self.run_bits, desk.lines, desk.local_of)
        self._most_needed = 2 * n > len(runs) << self.run_bits
        if not n:
            return
        read = self._gather(desk.lines[:n], desk.number)
        if read is None:
            middle = (low + high) // 2
            yield from self._of_group(pairs, runs, slots, key, going, low, middle)
            yield from self._of_group(pairs, runs, slots, key, going, middle, high)
            return
        yield self._reading(read, pairs, low, high, runs, slots)

    def _reading(
        self, read: Callable[[], CSRBlock], pairs: Pairs, low: int, high: int, runs: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> Future[Part]:  # fmt: skip
        """The part on the free desk, as soon as it is read."""
        desk = self._desks[self._free]
        self._free = (self._free + 1) % DESKS

        def part() -> Part:
            block = read()
            squares = np.empty(len(block.indptr) - 1 if len(runs) else 0)
            if len(runs):
                row_squares(block.indptr, block.values, 1.0 if self.parameters.bias else 0.0, squares)
            return Part(pairs, low, high, desk.local_of, block, runs, slots, squares)

        return self._reader.submit(part)
