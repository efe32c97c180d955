"""Children of one parent with many rows: solved while these stream by. So are those of the root, and groups of the guide.

LANES of them are solved beside each other. An epoch takes strips of neighbouring rows in an order that is drawn, GROUP at a
time (`kernels.order`), and visits those of their rows that are awake, in an order that is drawn too. All rows are read from X
as they come. Those of a parent below the root are copied first, side by side. Where memory does not hold the copy, and alpha,
LANE_BYTES a row, they lie in files, and are in memory for the strips at hand.

A job that takes long leaves off, with all that the next one needs to go on from there.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.order import GROUP, strip_bits, strip_slots
from xmc_stream.kernels.permutation import key_of
from xmc_stream.linear.kernels.dcd import ONCE, Penalty, Steps
from xmc_stream.linear.kernels.lanecd import Lanes, begin_lanes, new_lanes, shuffle_awake, visit_lanes
from xmc_stream.linear.kernels.rows import renumber, row_squares
from xmc_stream.methods.weights import RowWeights
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import fitting_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedArrayWriter, new_pack
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.files import let_go, nameless_map, will_need
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.beams import beams_above
from xmc_stream.tree.guide import read_groups
from xmc_stream.tree.kernels.solve import mark_rows, measure_rows, measure_weights
from xmc_stream.tree.nodes import GUIDE
from xmc_stream.tree.parents import parents_of
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.shuffle import Shuffled
from xmc_stream.tree.solve import LANE_BYTES, QUIET, Problem, Solution, relative_gaps

STRIP_BYTES, STRIP_BITS = 1 << 18, 9  # of a strip, on average; log2 of its rows, at most
_BLOCK_BYTES = 1 << 20  # of Y that streams by once
_COPIED = 1 << 20  # entries of X that are copied at a time
ROW_BYTES = 3  # of a row and LANES children, beside alpha
OWN_ENTRY_BYTES = 8  # of an entry of X that is copied
LISTED_BYTES = 112  # of a row of a parent below the root: which it is, how that was found, where it begins
COPY_BYTES = 24 * _COPIED
_SECONDS, _LEFT_BYTES = 15.0, 20e6  # a job's processor time before it leaves off: so many, and one for so many bytes
_PIECE = 1 << 22  # numbers of alpha that are left, or taken up, at a time


def bits_of_strips(X: SparseMatrix) -> int:
    """log2 of the rows of a strip."""
    return strip_bits(X.n_lines, X.nnz, STRIP_BYTES, STRIP_BITS)


@dataclass(frozen=True)
class StreamJob:
    """Children [first, last) of a parent, counted from its first one.

    spare: bytes for alpha, and the copy of rows. part: jobs that left off before this one. out: what the first part leaves.
    shuffled: the rows lie side by side on disk.
    """

    of: Shared
    tree: int
    level: int
    parent: int
    first: int
    last: int
    spare: int
    out: str
    part: int = 0
    shuffled: bool = False

    @property
    def key(self) -> str:
        """The parent, its children, the part."""
        children = f"solve/{self.tree}/{self.level}/{self.parent}/{self.first}-{self.last}"
        return f"{children}/{self.part}" if self.part else children

    @property
    def left(self) -> str:
        """The pack that this part leaves: a `Solution`, or where it left off."""
        return f"{self.out}_{self.part}" if self.part else self.out

    def run(self) -> Receipt:
        """Solve, and write. The receipt says whether there is more to do."""
        dataset, folder = self.of.dataset(), Path(self.out).parent
        X, lines, mark, begin, last = dataset.X_rows(), *self._children(dataset)
        problem, firsts = Problem.of(self.of.parameters, self.tree, last), range(self.first, self.last, LANES)
        n = X.n_lines if lines is None else len(lines)
        room = _Room(self.spare - LANE_BYTES * n * len(firsts), folder)
        of_rows = self.of.row_weights()
        source: SparseMatrix | Shuffled = X
        if self.shuffled and lines is not None:
            source = Shuffled(self.of, dataset, self.tree, self.level, self.parent, lines)
        rows = _AllRows(X, of_rows) if lines is None else _OwnRows(source, of_rows, lines, room)
        groups = []
        for first in firsts:
            lanes = new_lanes(0, rows.n_features)._replace(
                alpha=room.array(LANES * n, np.float32), positive=np.zeros(n, np.uint16), quiet=np.empty(n, np.uint8)
            )
            steps = problem.steps(self.of.seed, self.tree, self.level, begin, first)
            used = mark(first, problem.penalty, lanes)
            groups.append(_Group(first, min(LANES, self.last - first), lanes, used, steps))
        key = partial(problem.strips_key, self.of.seed, self.tree, self.level, begin)
        strips, place = _Strips(rows, n, bits_of_strips(X), room), (0, 0)
        if self.part:
            place = _take_up(Path(replace(self, part=self.part - 1).left), groups, room)
        ended = strips.settle(groups, problem, key, place, _Enough(groups))
        receipt = {"bytes_read": source.bytes_read, "nnz": 0, "open": ended is not None}
        if ended is not None:
            _leave_off(Path(self.left), groups, ended, room)
            return {**receipt, "passes": 0.0 if lines is not None else strips.n_read / max(dataset.n_samples, 1)}
        gaps = [] if self.first else strips.gaps(groups[0], problem)  # the same whatever else this job has
        with new_pack(Path(self.left)) as pack:
            solution = Solution(pack, dataset.n_features, dataset.n_samples)
            for group in groups:
                solution.take(group.used, group.n, group.first, rows.features, problem, group.lanes)
            solution.end_parent()
            solution.close(gaps)
        read = n if lines is not None else strips.n_read
        passes = read / max(dataset.n_samples, 1)
        return {**receipt, "nnz": solution.nnz, "bytes_read": source.bytes_read, "passes": passes}

    def _children(self, dataset: Dataset) -> tuple[NDArray[np.int64] | None, _Mark, int, bool]:
        """The rows of the parent, None for all; what enters children; the first of them, in its level; are they labels?"""
        of, Y = self.of, dataset.Y_rows()
        if self.tree == GUIDE:
            nodes = read_groups(of.model, dataset.n_labels).astype(np.int32)
            return None, partial(_mark_all, Y, nodes, ONCE.classes), 0, False
        structure = of.structure(self.tree, dataset.n_labels)
        level = structure.levels[self.level]
        begin, end = (int(child) for child in level.ptr[self.parent : self.parent + 2])
        classes = of.label_weights(structure.order[begin:end]) if level.last else ONCE.classes
        if not self.level:
            return None, partial(_mark_all, Y, structure.nodes_of_labels(0)[:, None], classes), 0, level.last
        numbers, negatives = np.array([self.parent]), of.parameters.negatives
        before = beams_above(of.work, self.tree, self.level, dataset.n_samples)
        (parent,) = parents_of(dataset.Y_columns(), structure, level, numbers, before, negatives)
        return parent.rows, partial(_mark_some, parent.y, classes), begin, level.last


class _Room:
    """Arrays in memory, or in files where they do not fit. spare: bytes that are left when alpha is in memory."""

    def __init__(self, spare: int, folder: Path) -> None:
        self._spare, self._folder, self._files = spare, folder, list[tuple[NDArray[Any], mmap.mmap]]()

    def takes(self, n_bytes: int) -> None:
        """So many bytes are wanted beside alpha: they decide where all arrays lie."""
        self._spare -= n_bytes

    def array(self, n: int, dtype: DTypeLike) -> NDArray[Any]:
        """Zeros."""
        if self._spare >= 0:
            return aligned_zeros((n,), dtype)
        file = nameless_map(max(n * np.dtype(dtype).itemsize, 1), self._folder)
        values = np.frombuffer(file, dtype, n)
        self._files.append((values, file))
        return values

    def will_need(self, array: NDArray[Any], first: int, last: int) -> None:
        """Have the disk read items [first, last) of an array, where it lies in a file."""
        for values, file in self._files:
            if values is array:
                will_need(file, first * array.itemsize, (last - first) * array.itemsize)

    def let_go(self) -> None:
        """Of what lies in files."""
        for _, file in self._files:
            let_go(file)


_Mark = Callable[[int, Penalty, Lanes], int]
_Read = tuple[CSR, NDArray[np.float64], NDArray[np.float64]]  # rows, their `row_squares` and weights
_HERE = np.empty(0, np.int64)
_LEFT = ("v", "v0", "quiet", "met")  # of lanes, beside alpha


class _AllRows:
    """All rows, read from X as they come."""

    features = np.empty(0, np.int32)  # not numbered anew

    def __init__(self, X: SparseMatrix, of_rows: RowWeights) -> None:
        self._X, self._of_rows, self.n_features = X, of_rows, X.shape[1]

    def will_need(self, first: int, last: int) -> None:
        """Have the disk read rows [first, last)."""
        self._X.will_need(first, last)

    def read(self, places: NDArray[np.int64]) -> _Read:
        """Some rows, ascending."""
        x, squares = CSR.of(self._X.gather(places)), np.empty(len(places))
        row_squares(x.indptr, x.values, 1.0, squares)
        return x, squares, self._of_rows.of(places)

    def at_hand(self, places: NDArray[np.int64]) -> tuple[_Read, NDArray[np.int64]]:
        """Some rows, and the place of each that is read."""
        return self.read(places), places


class _OwnRows:
    """Some rows of X, ascending, copied side by side, whose features are numbered as they are met (`features`)."""

    def __init__(self, X: SparseMatrix | Shuffled, of_rows: RowWeights, lines: NDArray[np.int64], room: _Room) -> None:
        counts = X.lengths(lines)[1]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        room.takes(OWN_ENTRY_BYTES * int(indptr[-1]))
        self._x = CSR(indptr, room.array(int(indptr[-1]), np.int32), room.array(int(indptr[-1]), np.float32))
        self._squares, self._weights, self._room = np.empty(len(lines)), of_rows.of(lines), room
        local_of, features = np.full(X.shape[1], -1, np.int32), np.empty(X.shape[1] + 1, np.int32)
        self.n_features = 0
        for low, high in fitting_ranges(counts, _COPIED):
            x, mine = CSR.of(X.gather(lines[low:high])), slice(int(indptr[low]), int(indptr[high]))
            self.n_features = renumber(x, local_of, features, self.n_features, 1.0, self._squares[low:high])
            self._x.indices[mine], self._x.values[mine] = x.indices, x.values
            room.let_go()
        self.features = features[: self.n_features].copy()

    def will_need(self, first: int, last: int) -> None:
        """Have the disk read rows [first, last), where they lie in files."""
        low, high = int(self._x.indptr[first]), int(self._x.indptr[last])
        self._room.will_need(self._x.indices, low, high)
        self._room.will_need(self._x.values, low, high)

    def read(self, places: NDArray[np.int64]) -> _Read:
        """Rows beside each other."""
        first, last = int(places[0]), int(places[-1]) + 1
        mine, ends = slice(first, last), self._x.indptr[first : last + 1]
        some = slice(int(ends[0]), int(ends[-1]))
        x = CSR(ends - ends[0], self._x.indices[some], self._x.values[some])
        return x, self._squares[mine], self._weights[mine] if len(self._weights) else self._weights

    def at_hand(self, places: NDArray[np.int64]) -> tuple[_Read, NDArray[np.int64]]:
        """All rows are."""
        return (self._x, self._squares, self._weights), _HERE


def _mark_all(
    Y: SparseMatrix, nodes: NDArray[np.int32], classes: NDArray[np.float64], first: int, penalty: Penalty, lanes: Lanes
) -> int:  # fmt: skip
    """Enter children first, first + 1, ... as `begin_lanes` does, from Y by rows; returns bits of those that have rows.

    nodes: see `mark_rows`; classes: `Times.classes` of all children.
    """
    some = classes[first : first + LANES]
    no_rows = np.zeros(len(some) + 1, np.int64) if len(some) else np.zeros(1, np.int64)
    _begin(0, Labels(no_rows, np.empty(0, np.int32)), some, penalty, lanes)
    used = 0
    for y in Y.blocks(_BLOCK_BYTES):
        marked = lanes.positive[y.start : y.start + y.n]
        mark_rows(Labels.of(y), nodes, first, marked)
        used |= int(np.bitwise_or.reduce(marked, initial=0))
    return used


def _mark_some(y: Labels, classes: NDArray[np.float64], first: int, penalty: Penalty, lanes: Lanes) -> int:
    """The same from the rows of each child."""
    return _begin(first, Labels(y.indptr, y.indices.astype(np.int32)), classes, penalty, lanes)


def _begin(first: int, y: Labels, classes: NDArray[np.float64], penalty: Penalty, lanes: Lanes) -> int:
    """`begin_lanes`, but for alpha, which is 0 and may be in a file."""
    return begin_lanes(first, y, classes, penalty, lanes._replace(alpha=lanes.alpha[:0]))


@dataclass
class _Group:
    """Children first, first + 1, ... beside each other. going: they have not settled; whole: all rows are visited."""

    first: int
    n: int
    lanes: Lanes
    used: int
    steps: Steps
    going: bool = True
    whole: bool = True
    n_awake: int = 0

    def visit(
        self, read: _Read, at: NDArray[np.int64], places: NDArray[np.int64], problem: Problem, number: int, epoch: int
    ) -> None:
        """Visit those of some rows that are awake. at: see `visit_lanes`; number: which strips of the epoch they are."""
        awake = np.flatnonzero(self.lanes.quiet[places] < QUIET)
        order = awake if len(at) else places[awake]
        mine, n, (x, squares, weights) = self.lanes._replace(order=order), len(order), read
        shuffle_awake(0, n, np.uint64(key_of(self.steps.seed, 1, number, epoch)), mine)
        self.n_awake += visit_lanes(
            x, squares, weights, at, problem.penalty, np.uint16(self.used), n, problem.rule, mine
        )

    def end_epoch(self, n: int) -> None:
        """Settled, or all n rows once more, or those that are awake."""
        if self.lanes.met[:LANES].max() <= self.steps.tol or not self.n_awake:
            self.going, self.whole = not self.whole, True
            self.lanes.quiet[:] = QUIET - 1
        else:
            self.whole = self.n_awake == n


_Place = tuple[int, int]  # an epoch, and how often GROUP of its strips were visited


class _Enough:
    """Whether a job should leave off: a kill loses no more of it; what is written is in proportion."""

    def __init__(self, groups: list[_Group]) -> None:
        self._began, left = time.thread_time(), sum(group.lanes.v.nbytes + group.lanes.alpha.nbytes for group in groups)
        self._seconds = max(_SECONDS, left / _LEFT_BYTES)

    def __call__(self) -> bool:
        return time.thread_time() - self._began > self._seconds


def _leave_off(path: Path, groups: list[_Group], place: _Place, room: _Room) -> None:
    """Write what `_take_up` reads."""
    with new_pack(path) as pack:
        pack.write("place", np.array(place))
        pack.write("groups", np.array([[g.going, g.whole, g.n_awake] for g in groups], np.int64).ravel())
        for i, group in enumerate(groups):
            for name in _LEFT:
                pack.write(f"{name}-{i}", getattr(group.lanes, name))
            alpha = PackedArrayWriter(pack, f"alpha-{i}", np.float32)
            for low in range(0, len(group.lanes.alpha), _PIECE):
                room.will_need(group.lanes.alpha, low, low + _PIECE)
                alpha.append(group.lanes.alpha[low : low + _PIECE])
                room.let_go()
            alpha.close()


def _take_up(path: Path, groups: list[_Group], room: _Room) -> _Place:
    """Go on from what another job left: returns the place."""

    def read(name: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        array = open_array(path / name)
        return array.read(0, array.size, out)

    for i, (group, state) in enumerate(zip(groups, read("groups").reshape(-1, 3).tolist(), strict=True)):
        group.going, group.whole, group.n_awake = bool(state[0]), bool(state[1]), state[2]
        for name in _LEFT:
            read(f"{name}-{i}", getattr(group.lanes, name))
        array, alpha = open_array(path / f"alpha-{i}"), group.lanes.alpha
        for low in range(0, len(alpha), _PIECE):
            room.will_need(alpha, low, low + _PIECE)
            array.read(low, min(low + _PIECE, len(alpha)), alpha[low : low + _PIECE])
            room.let_go()
    epoch, number = read("place").tolist()
    return epoch, number


class _Strips:
    """n rows in strips of 2^bits. n_read: how many were read so far."""

    def __init__(self, rows: _AllRows | _OwnRows, n: int, bits: int, room: _Room) -> None:
        self._rows, self._n, self._bits, self._room = rows, n, bits, room
        self.n_read = 0

    def settle(
        self, groups: list[_Group], problem: Problem, key: Callable[[int], np.uint64], place: _Place, enough: _Enough
    ) -> _Place | None:
        """As `settle_lanes`, of each group, from a place on; returns where it ended before all had settled, else None.

        key: of the strips of an epoch.
        """
        n_strips = -(-self._n >> self._bits)
        slots = np.empty(n_strips, np.int64)
        begin, first = place
        for group in groups if place == (0, 0) else ():
            group.lanes.quiet[:], group.going = 0, group.used > 0
        for epoch in range(begin, problem.epochs):
            going = [group for group in groups if group.going]
            if not going:
                break
            strip_slots(n_strips, key(epoch), slots)
            for group in going if not first else ():
                group.lanes.met[:], group.n_awake = 0, 0
            by_slot, numbers = np.argsort(slots), -(-n_strips // GROUP)
            following = self._asked_for(by_slot, first, going)
            for number in range(first, numbers):
                places, following = following, self._asked_for(by_slot, number + 1, going)
                self._visit(places, going, problem, number, epoch)
                if number + 1 < numbers and enough():
                    return epoch, number + 1
            first = 0
            for group in going:
                group.end_epoch(self._n)
            if any(group.going for group in groups) and epoch + 1 < problem.epochs and enough():
                return epoch + 1, 0
        return None

    def _asked_for(self, by_slot: NDArray[np.int64], number: int, going: list[_Group]) -> NDArray[np.int64]:
        """The rows to visit of a group of strips, ascending, which the disk begins to read: while others are visited."""
        strips = np.sort(by_slot[number * GROUP : (number + 1) * GROUP])
        places = ((strips << self._bits)[:, None] + np.arange(1 << self._bits)).ravel()
        places = places[places < self._n]
        places = places[np.logical_or.reduce([group.lanes.quiet[places] < QUIET for group in going])]
        ends = np.searchsorted(places >> self._bits, [strips, strips + 1])
        for low, high in ends.T.tolist():
            if low < high:
                first, last = int(places[low]), int(places[high - 1]) + 1
                self._rows.will_need(first, last)
                for group in going:
                    self._room.will_need(group.lanes.alpha, LANES * first, LANES * last)
        return places

    def _visit(self, places: NDArray[np.int64], going: list[_Group], problem: Problem, number: int, epoch: int) -> None:
        """Visit some rows, ascending."""
        stop_if_unwanted()
        self.n_read += len(places)
        if len(places):
            read, at = self._rows.at_hand(places)
            for group in going:
                group.visit(read, at, places, problem, number, epoch)
            self._room.let_go()

    def gaps(self, group: _Group, problem: Problem) -> list[float]:
        """Relative duality gaps of a group's children, by one more pass."""
        figures, lanes = np.zeros((LANES, 2)), group.lanes
        in_order = np.arange(-(-self._n >> self._bits))
        group.lanes.quiet[:] = 0
        following = self._asked_for(in_order, 0, [group])
        for number in range(-(-len(in_order) // GROUP)):
            stop_if_unwanted()
            places, following = following, self._asked_for(in_order, number + 1, [group])
            mine = slice(int(places[0]) * LANES, (int(places[-1]) + 1) * LANES)
            some = lanes._replace(alpha=lanes.alpha[mine], positive=lanes.positive[places], order=places)
            measure_rows(*self._rows.read(places), problem.penalty, some, figures)
            self._room.let_go()
        self.n_read += self._n
        measure_weights(problem.penalty.lam, lanes, figures)
        return relative_gaps(group.used, figures)
