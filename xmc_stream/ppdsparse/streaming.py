"""PPDSparse's inner problem for many large classes at once, while the rows of X stream by.

A class is large by the data alone: its active rows, with their own numbers, take more than LARGE_BYTES. Large classes
visit their rows in an order that all of them share (`ppdsparse.kernels.stream`), so one pass over X is an epoch of as many
classes as there is memory for their v. `ppdsparse.solver` takes the same steps in the same order on classes that
it holds whole. Which of the two solves a class is a matter of memory, and no bit of the result depends on it.
"""

from __future__ import annotations

import itertools
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError
from xmc_stream.kernels.blocks import CSR, ActiveSets, CSRBlock
from xmc_stream.kernels.order import GROUP, RowOrder, epoch_key, strip_slots
from xmc_stream.linear.kernels.dcd import Ramp, Times, dual_terms, of_class, take_weights
from xmc_stream.linear.kernels.rows import row_squares
from xmc_stream.linear.weights import Unit
from xmc_stream.methods.weights import RowWeights
from xmc_stream.ppdsparse.active_rows import DiskRows, MemoryRows, Taken, rows_on_disk
from xmc_stream.ppdsparse.candidates import Found
from xmc_stream.ppdsparse.kernels.stream import (
    ActiveRows,
    Epoch,
    Group,
    GroupScratch,
    RowsAtHand,
    add_range,
    descend_group,
    mark_group,
    mark_range,
    start_range,
    violation_range,
)
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import BUFFERS, StreamRoom
from xmc_stream.ppdsparse.problem import LossWeights, Problem, Share
from xmc_stream.ppdsparse.solver import Solver, ramp_of
from xmc_stream.ppdsparse.state import BIAS, DUAL, INSIDE, KEPT, RoundSets, UnitStateWriter, Weights, new_unit_state
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Buffer, SparseMatrix
from xmc_stream.system.stop import stop_if_unwanted

_STEP = MIB // 8  # active rows whose weights are read at a time
_SHARES = 8  # ranges of classes for each thread: some have more to do, and the last one ends soon


# on a portion, for classes [first, last), with a thread's scratch
Act = Callable[["RowPortion", tuple[int, int], GroupScratch], None]


@dataclass
class RowPortion:
    """Rows in memory with the active rows that are theirs: a group's places, or, where that has no strips, rows [low, high)."""

    taken: Taken
    group: Group
    at_hand: RowsAtHand


class StreamedRows:
    """Rows of X, at most max_nnz entries in each of BUFFERS buffers. weights: of rows, for the thread that reads them."""

    def __init__(self, X: SparseMatrix, max_nnz: int, weights: RowWeights) -> None:
        self.X, self.n_features, self.max_nnz, self.weights = X, X.shape[1], max_nnz, weights
        self._buffers = [Buffer(X, min(max_nnz, X.nnz)) for _ in range(BUFFERS)]
        self._lookup = SparseMatrix(X.path)  # looks rows up, in another thread than the one that reads them
        self.beside: Executor | None = None  # reads values where a job has several threads

    @property
    def bytes_read(self) -> int:
        """Beside what was read of X by way of the matrix given."""
        return self._lookup.bytes_read

    def gather(self, lines: NDArray[np.int64], number: int) -> Callable[[], CSRBlock] | None:
        """What will read rows (ascending) into buffer 0 .. BUFFERS - 1; None where they are too many at once.

        This is called in one thread and what it gives in another one, so that both go on beside the steps.
        """
        spans = self._lookup.lengths(lines)
        total = int(spans[1].sum())
        if total <= self.max_nnz:
            return partial(self.X.gather, lines, self._buffers[number], spans, self.beside)
        if len(lines) == 1:
            raise MemoryLimitError(
                f"row {lines[0]} of {self.X.path} has {total} entries, more than the "
                f"{self.max_nnz} planned for: raise " + flags.MEMORY_LIMIT + " or lower " + flags.THREADS
            )
        return None

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ranges of rows most of which will come after those that are gathered next."""
        for start, stop in ranges:
            self._lookup.will_need(start, stop)


class StreamSolver:
    """Solves the classes of a store of active rows; v (n, D) and BUFFERS groups of rows are what it holds.

    solver: of the inner problem. of_classes: see `Times`. threads: that share the classes.
    """

    def __init__(
        self,
        solver: Solver,
        active: MemoryRows | DiskRows,
        x: StreamedRows,
        of_classes: NDArray[np.float64],
        threads: int = 1,
    ) -> None:
        self.solver, self.active, self._x, self._of_classes, self.threads = solver, active, x, of_classes, threads
        self.n_samples, self.strip_bits, self.penalty = solver.order.n_samples, solver.order.strip_bits, solver.penalty
        self.passes = 0  # over the rows
        self.v, self.v0 = np.zeros((active.n_classes, x.n_features)), np.zeros(active.n_classes)
        self._rows = GROUP << self.strip_bits
        self._needed = np.empty(self._rows, np.bool_)  # which places of a group
        # their lines in the rows of a portion
        self._local_of = [np.empty(self._rows, np.int32) for _ in range(BUFFERS)]
        self._free = 0  # the buffer of the next portion
        self._most_needed = False  # of the rows of the portion before
        self._scratch: SimpleQueue[GroupScratch] = SimpleQueue()  # one for each thread
        for _ in range(threads):
            self._scratch.put(GroupScratch(*(np.empty(self._rows, np.int64) for _ in range(4))))

    def solve(self, start: tuple[Iterator[Weights], Ramp] | None = None) -> NDArray[np.float64]:
        """One round of all classes; returns the largest violation inside each active set.

        start: weights of a warm start, a class after the other, and the ramp that gives alpha by them.
        """
        steps, n = self.solver.steps, self.active.n_classes
        with (
            ThreadPoolExecutor(self.threads) as self._pool,
            ThreadPoolExecutor(1) as self._reader,
            ThreadPoolExecutor(1) as self._planner,
        ):
            if start is not None:
                self._start(*start)
            self._work(self._ranges(False), self._add)
            if not self.penalty.bias:
                self.v0[:] = 0.0
            going, bar = np.ones(n, np.bool_), np.full(n, np.inf)
            for epoch in range(steps.epochs):
                worst = np.zeros(n)
                self._epoch(np.uint64(epoch_key(steps.seed, steps.round_, epoch)), Epoch(going, bar, worst))
                bar[going] = worst[going]
                ended, sleeping = going & (worst <= steps.tol), self.active.sleeping()
                going &= ~ended | sleeping
                if not going.any():
                    break
                woken = ended & sleeping
                self.active.wake(woken)
                bar[woken] = np.inf
            inside = np.zeros(n)

            def look(portion: RowPortion, classes: tuple[int, int], scratch: GroupScratch) -> None:
                low, high = portion.group.low, portion.group.high
                violation_range(
                    *classes, portion.taken.active, low, high, portion.at_hand, self.v, self.v0, inside, self.penalty,
                    steps.enough, scratch.local,
                )  # fmt: skip

            self._work(self._ranges(True), look)
        return inside

    def _start(self, weights: Iterator[Weights], ramp: Ramp) -> None:
        """alpha from the margins that given weights leave; they stand in v meanwhile. 0 of a class without weights."""
        bias = np.zeros(self.active.n_classes)
        for c, (features, values, b) in enumerate(weights):
            self.v[c, features], bias[c] = values, b if len(features) else np.nan

        def start_alpha(portion: RowPortion, classes: tuple[int, int], scratch: GroupScratch) -> None:
            low, high = portion.group.low, portion.group.high
            start_range(*classes, portion.taken.active, low, high, portion.at_hand, self.v, bias, ramp)

        self._work(self._ranges(True), start_alpha, change=True)
        self.v[:] = 0.0

    def _add(self, portion: RowPortion, classes: tuple[int, int], scratch: GroupScratch) -> None:
        low, high = portion.group.low, portion.group.high
        add_range(*classes, portion.taken.active, low, high, portion.at_hand, self.v, self.v0, scratch.local)

    def _epoch(self, key: np.uint64, epoch: Epoch) -> None:
        def step(portion: RowPortion, classes: tuple[int, int], scratch: GroupScratch) -> None:
            descend_group(
                *classes, portion.taken.active, portion.group, portion.at_hand, epoch, self.v, self.v0, self.penalty, scratch
            )  # fmt: skip

        self._work(self._groups(key, epoch.going), step, change=True)

    def _work(self, portions: Iterator[Future[RowPortion]], act: Act, change: bool = False) -> None:
        """Act on portion after portion, the next ones being read meanwhile; threads take ranges of classes with equal work.

        change: whether the active rows are given back.
        """
        self.passes += 1
        ahead = deque(self._planner.submit(next, portions, None) for _ in range(BUFFERS - 1))
        while (coming := ahead.popleft().result()) is not None:
            portion = coming.result()
            stop_if_unwanted()
            ahead.append(self._planner.submit(next, portions, None))
            ptr = portion.taken.active.ptr
            n = _SHARES * self.threads if self.threads > 1 else 1
            cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], n + 1)[1:-1])
            ends = [0, *np.maximum.accumulate(cuts).tolist(), self.active.n_classes]
            list(self._pool.map(partial(self._act, act, portion), itertools.pairwise(ends)))
            if change:
                self.active.give_back(portion.taken)

    def _act(self, act: Act, portion: RowPortion, classes: tuple[int, int]) -> None:
        scratch = self._scratch.get()
        try:
            act(portion, classes, scratch)
        finally:
            self._scratch.put(scratch)

    def _ranges(self, all_: bool) -> Iterator[Future[RowPortion]]:
        """Ranges of rows, ascending, with all active rows, or those with alpha > 0."""

        def mark(active: ActiveRows, group: Group, needed: NDArray[np.bool_]) -> None:
            mine = needed[group.low - self._first(group) : group.high - self._first(group)]
            mark_range(active.ptr, active.rows, active.alpha, all_, group.low, mine)

        nothing, strips = np.empty(0, np.int64), np.arange(-(-self.n_samples >> self.strip_bits))
        for start in range(0, self.n_samples, self._rows):
            stop = min(start + self._rows, self.n_samples)
            if self._most_needed and stop < self.n_samples:
                self._x.ahead([(stop, min(stop + self._rows, self.n_samples))])
            first = start >> self.strip_bits
            group = Group(strips[first : first + GROUP], nothing, self.strip_bits, np.uint64(0), start, stop)
            yield from self._portions(self.active.take([(start, stop)]), group, mark)

    def _first(self, group: Group) -> int:
        """The first row of a group of neighbouring strips."""
        return int(group.strips[0]) << self.strip_bits

    def _groups(self, key: np.uint64, going: NDArray[np.bool_]) -> Iterator[Future[RowPortion]]:
        """The groups of an epoch, with the rows that some class visits at their places."""
        n_strips = -(-self.n_samples >> self.strip_bits)
        slots = np.empty(n_strips, np.int64)
        strip_slots(n_strips, key, slots)
        order = np.argsort(slots)
        for first in range(0, n_strips, GROUP):
            strips = np.sort(order[first : first + GROUP])
            if self._most_needed and first + GROUP < n_strips:
                self._x.ahead(self._rows_of(np.sort(order[first + GROUP : first + 2 * GROUP])))
            taken = self.active.take(self._rows_of(strips))
            group = Group(strips, slots[strips], self.strip_bits, key, 0, self._rows)
            yield from self._portions(taken, group, partial(mark_group, going))

    def _rows_of(self, strips: NDArray[np.int64]) -> list[tuple[int, int]]:
        starts = strips << self.strip_bits
        stops = np.minimum(starts + (1 << self.strip_bits), self.n_samples)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _portions(
        self, taken: Taken, group: Group, mark: Callable[[ActiveRows, Group, NDArray[np.bool_]], None]
    ) -> Iterator[Future[RowPortion]]:
        """The rows of a group that `mark` says are needed; one half after the other where they are too many at once."""
        local_of, strips = self._local_of[self._free], group.strips
        self._needed[:] = False
        mark(taken.active, group, self._needed)
        marked = np.flatnonzero(self._needed)
        self._most_needed = 2 * len(marked) > len(strips) << self.strip_bits
        if not len(marked):
            return
        local_of[marked] = np.arange(len(marked), dtype=np.int32)
        # strips ascend, so do the rows
        lines = (strips[marked >> self.strip_bits] << self.strip_bits) | (marked & ((1 << self.strip_bits) - 1))
        read = self._x.gather(lines, self._free)
        if read is None:
            middle = (group.low + group.high) // 2
            yield from self._portions(taken, group._replace(high=middle), mark)
            yield from self._portions(taken, group._replace(low=middle), mark)
            return
        self._free = (self._free + 1) % BUFFERS
        if not len(group.slots):  # numbers of a range begin with its first row
            local_of = local_of[group.low - self._first(group) :]

        def make() -> RowPortion:
            x = CSR.of(read())
            squares = np.empty(len(x.indptr) - 1 if len(group.slots) else 0)
            if len(squares):
                row_squares(x.indptr, x.values, 1.0 if self.penalty.bias else 0.0, squares)
            times = Times(self._of_classes, self._x.weights.of(lines))
            return RowPortion(taken, group, RowsAtHand(local_of, x, squares, times))

        yield self._reader.submit(make)


class LargeClasses:
    """Solves large classes of a share, a range of them at a time, and writes their lines of a unit's state in order.

    sets: active sets of the share's classes. weights: of rows; of_classes: `Times.classes` of the share's. ramp: of a warm
    start's alpha, else None. scratch: a folder for active rows that memory has no room for.
    """

    def __init__(
        self, solver: Solver, sets: RoundSets, X: SparseMatrix, room: StreamRoom, weights: LossWeights,
        of_classes: NDArray[np.float64], ramp: Ramp | None, scratch: Path,
    ) -> None:  # fmt: skip
        self.solver, self.sets, self.X, self.room, self.scratch = solver, sets, X, room, scratch
        self._weights, self._of_classes, self._ramp = weights, of_classes, ramp
        self.rows = StreamedRows(X, room.nnz, weights.of_rows())
        self.fresh = self.used = 0
        self.passes = 0

    def solve(
        self,
        classes: NDArray[np.int64],
        n_active: NDArray[np.int64],
        n_found: NDArray[np.int64],
        writer: UnitStateWriter,
    ) -> NDArray[np.int64]:
        """Solve; class classes[i], with so many active rows and rows found, is line i of the state.

        Returns the sizes of the active sets that are kept.
        """
        kept = np.empty(len(classes), np.int64)
        for (begin, end), n_bytes in self.room.together(n_active, n_found):
            mine = slice(begin, end)
            with ExitStack() as stack:
                self.rows.beside = stack.enter_context(ThreadPoolExecutor(1)) if self.room.threads > 1 else None
                shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
                stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
                active = self._active(classes[mine], n_active[mine], n_bytes <= self.room.classes)
                stack.callback(active.close)
                self._solve(classes[mine], active, begin, writer, kept[mine])
                del active  # or they would stay beside the next ones, uncounted
        return kept

    def _active(self, classes: NDArray[np.int64], n_active: NDArray[np.int64], fits: bool) -> MemoryRows | DiskRows:
        """The active sets of some classes; of one, where they do not fit."""
        if not fits:
            return rows_on_disk(self.scratch, self.sets, int(classes[0]))
        active = MemoryRows(n_active, self.solver.order, self.sets.approximate)
        for i, c in enumerate(classes.tolist()):
            active.put(i, self.sets.of(c, c + 1))
        return active

    def _solve(
        self, classes: NDArray[np.int64], active: MemoryRows | DiskRows, line: int, writer: UnitStateWriter,
        kept: NDArray[np.int64],
    ) -> None:  # fmt: skip
        of_classes = self._of_classes[classes]
        stream = StreamSolver(self.solver, active, self.rows, of_classes, min(self.room.threads, len(classes)))
        inside = stream.solve((self.sets.start_weights(classes), self._ramp) if self._ramp else None)
        self.passes += stream.passes
        p, n_features, of_rows = self.solver.parameters, self.X.shape[1], self._weights.of_rows()
        features, local_of = np.arange(n_features, dtype=np.int32), np.empty(n_features, np.int32)
        w_features, w_values = np.empty(n_features, np.int32), np.empty(n_features, np.float32)
        for i in range(active.n_classes):
            dual, kept[i] = 0.0, 0
            penalty = of_class(i, of_classes, self.solver.penalty)
            for rows, sign, alpha, fresh in active.parts(i):
                self.fresh += int(np.count_nonzero(fresh))
                self.used += int(np.count_nonzero(fresh & (alpha > 0.0)))
                for low in range(0, len(rows), _STEP):
                    part = slice(low, low + _STEP)
                    dual = dual_terms(sign[part], alpha[part], penalty, of_rows.of(rows[part]), dual)
                kept[i] += int(((sign > 0) | (alpha > 0.0)).sum())
            local_of[:] = features
            n, square, objective, bias = take_weights(
                n_features, features, local_of, stream.v[i], stream.v0[i], p.lam, p.tau, w_features, w_values
            )
            writer.weights.append(np.array([n], np.int64), w_features[:n], w_values[:n])
            writer.statistics[line + i, [BIAS, DUAL, KEPT, INSIDE]] = (
                bias, 0.5 * p.tau * square + dual, objective, inside[i],
            )  # fmt: skip
            counts = kept[i : i + 1]
            for rows, sign, alpha, _ in active.parts(i):
                mine = (sign > 0) | (alpha > 0.0)
                writer.active.append(counts, rows[mine], alpha[mine])
                counts = counts[:0]


class _AllRows(RoundSets):
    """All rows are active, and some have alpha > 0."""

    def of(self, low: int, high: int) -> ActiveSets:
        n = self.n_samples
        sign = np.where(np.arange(n) < 3, 1, -1).astype(np.int8)
        return ActiveSets(0, np.array([0, n]), np.arange(n), sign, np.where(sign > 0, 0.5, 0.0))

    def start_weights(self, classes: NDArray[np.int64]) -> Iterator[Weights]:
        yield np.arange(1), np.ones(1, np.float32), 0.0


def stream_a_few(dataset: Dataset, parameters: PPDSparseParameters, starts: bool) -> None:
    """For a warm-up: solve a class of all of a few rows as these stream by. starts: from weights too."""
    n, d, k, path = dataset.n_samples, dataset.n_features, dataset.n_labels, dataset.path.parent
    problem = Problem(str(dataset.path), parameters, 0, MemoryPlan(2**40, 256 * MIB, 1), LossWeights(None, n))
    sets = _AllRows(problem, dataset, 0, Share(0, k, Unit(0, k)), None, Found())
    solver, room = Solver(parameters, 0, RowOrder(n, 0, 1)), StreamRoom(64, MIB, 1, d, n)
    weights, ramp = problem.weights.of_classes(dataset, 0, k), ramp_of(parameters, {}) if starts else None
    large = LargeClasses(solver, sets, dataset.X_rows(), room, problem.weights, weights, ramp, path / "active")
    for name, size in (("memory", n), ("disk", MIB)):  # the second is said to be too large for memory
        with new_unit_state(path / name, 1, n, d) as writer:
            large.solve(np.zeros(1, np.int64), np.array([size]), np.zeros(1, np.int64), writer)
