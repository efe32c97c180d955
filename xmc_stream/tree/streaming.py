"""Children of one parent with many rows: solved while these stream by. So are those of the root, and groups of the guide.

LANES of them are solved beside each other. An epoch takes strips of neighbouring rows in an order that is drawn, GROUP at a
time (`kernels.order`), and visits those of their rows that are awake, in an order that is drawn too. Where memory does not
hold alpha, LANE_BYTES a row, it lies in a file, and is in memory for the strips at hand.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.order import GROUP, strip_bits, strip_slots
from xmc_stream.kernels.permutation import key_of
from xmc_stream.linear.kernels.dcd import ONCE, Penalty, Steps
from xmc_stream.linear.kernels.lanecd import Lanes, begin_lanes, new_lanes, shuffle_awake, visit_lanes
from xmc_stream.linear.kernels.rows import row_squares
from xmc_stream.methods.weights import RowWeights
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.files import let_go, nameless_map
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.guide import read_groups
from xmc_stream.tree.kernels.solve import mark_rows, measure_rows, measure_weights
from xmc_stream.tree.nodes import GUIDE
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.solve import LANE_BYTES, QUIET, Problem, Solution, parents_of, relative_gaps

STRIP_BYTES, STRIP_BITS = 1 << 18, 9  # of a strip, on average; log2 of its rows, at most
_BLOCK_BYTES = 1 << 20  # of Y that streams by once
ROW_BYTES = 3  # of a row and LANES children, beside alpha
LISTED_BYTES = 96  # of a row of a parent below the root: which it is, and how that was found


def bits_of_strips(X: SparseMatrix) -> int:
    """log2 of the rows of a strip."""
    return strip_bits(X.n_lines, X.nnz, STRIP_BYTES, STRIP_BITS)


@dataclass(frozen=True)
class StreamJob:
    """Children [first, last) of a parent, counted from its first one.

    before: packs of the beams of all rows, none where the parent has all rows. held: whether alpha is in memory.
    """

    of: Shared
    tree: int
    level: int
    parent: int
    first: int
    last: int
    before: tuple[str, ...]
    held: bool
    out: str

    @property
    def key(self) -> str:
        """The parent and its children."""
        return f"solve/{self.tree}/{self.level}/{self.parent}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Solve, and write."""
        dataset = self.of.dataset()
        rows, mark, begin, last = self._children(dataset)
        problem = Problem.of(self.of.parameters, self.tree, last)
        strips = _Strips(dataset.X_rows(), self.of.row_weights(), rows)
        groups = []
        for first in range(self.first, self.last, LANES):
            lanes, file = self._lanes(strips.n, dataset.n_features)
            steps = problem.steps(self.of.seed, self.tree, self.level, begin, first)
            used = mark(first, problem.penalty, lanes)
            groups.append(_Group(first, min(LANES, self.last - first), lanes, used, steps, file))
        key = partial(problem.strips_key, self.of.seed, self.tree, self.level, begin)
        n_read = strips.settle(groups, problem, key)
        gaps = [] if self.first else strips.gaps(groups[0], problem)  # the same whatever else this job has
        with new_pack(Path(self.out)) as pack:
            solution = Solution(pack, dataset.n_features, dataset.n_samples)
            for group in groups:
                solution.take(group.used, group.n, group.first, None, problem, group.lanes)
            solution.end_parent()
            solution.close(gaps)
        passes = (n_read + strips.n * (not self.first)) / max(dataset.n_samples, 1)
        return {"nnz": solution.nnz, "bytes_read": strips.bytes_read, "passes": passes}

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
        (parent,) = parents_of(dataset.Y_columns(), structure, level, numbers, self.before, negatives)
        return parent.rows, partial(_mark_some, parent.y, classes), begin, level.last

    def _lanes(self, n: int, n_features: int) -> tuple[Lanes, mmap.mmap | None]:
        """Of so many rows and features; where alpha is in a file, that too."""
        if self.held:
            return new_lanes(n, n_features), None
        file = nameless_map(max(LANE_BYTES * n, 1), Path(self.out).parent)
        lanes = new_lanes(0, n_features)._replace(
            alpha=np.frombuffer(file, np.float32, LANES * n),
            positive=np.zeros(n, np.uint16),
            quiet=np.empty(n, np.uint8),
        )
        return lanes, file


_Mark = Callable[[int, Penalty, Lanes], int]


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
    """Children first, first + 1, ... beside each other. going: they have not settled; whole: all rows are visited.

    file: that has alpha, if one does.
    """

    first: int
    n: int
    lanes: Lanes
    used: int
    steps: Steps
    file: mmap.mmap | None
    going: bool = True
    whole: bool = True
    n_awake: int = 0

    def visit(
        self, x: CSR, squares: NDArray[np.float64], weights: NDArray[np.float64], rows: NDArray[np.int64], problem: Problem,
        number: int, epoch: int,
    ) -> None:  # fmt: skip
        """Visit those of some rows that are awake. rows: their places; number: which strips of the epoch they are."""
        order = np.flatnonzero(self.lanes.quiet[rows] < QUIET)
        mine, n = self.lanes._replace(order=order), len(order)
        shuffle_awake(0, n, np.uint64(key_of(self.steps.seed, 1, number, epoch)), mine)
        how = problem.penalty, np.uint16(self.used), n, problem.rule, mine
        self.n_awake += visit_lanes(x, squares, weights, rows, *how)
        self.let_go()

    def let_go(self) -> None:
        """Of alpha, where it is in a file."""
        if self.file is not None:
            let_go(self.file)

    def end_epoch(self, n: int) -> None:
        """Settled, or all n rows once more, or those that are awake."""
        if self.lanes.met[:LANES].max() <= self.steps.tol or not self.n_awake:
            self.going, self.whole = not self.whole, True
            self.lanes.quiet[:] = QUIET - 1
        else:
            self.whole = self.n_awake == n


class _Strips:
    """Rows in strips: all of X, or some, ascending."""

    def __init__(self, X: SparseMatrix, of_rows: RowWeights, rows: NDArray[np.int64] | None) -> None:
        self._X, self._of_rows, self._rows = X, of_rows, rows
        self.n, self._bits = X.n_lines if rows is None else len(rows), bits_of_strips(X)

    @property
    def bytes_read(self) -> int:
        """Of X."""
        return self._X.bytes_read

    def settle(self, groups: list[_Group], problem: Problem, key: Callable[[int], np.uint64]) -> int:
        """As `settle_lanes`, of each group; returns how many rows were read. key: of the strips of an epoch."""
        n_strips, n_read = -(-self.n >> self._bits), 0
        slots = np.empty(n_strips, np.int64)
        for group in groups:
            group.lanes.quiet[:], group.going = 0, group.used > 0
        for epoch in range(problem.epochs):
            going = [group for group in groups if group.going]
            if not going:
                break
            strip_slots(n_strips, key(epoch), slots)
            for group in going:
                group.lanes.met[:], group.n_awake = 0, 0
            by_slot = np.argsort(slots)
            for number, first in enumerate(range(0, n_strips, GROUP)):
                n_read += self._visit(np.sort(by_slot[first : first + GROUP]), going, problem, number, epoch)
            for group in going:
                group.end_epoch(self.n)
        return n_read

    def _visit(self, strips: NDArray[np.int64], going: list[_Group], problem: Problem, number: int, epoch: int) -> int:
        """Visit the rows of some strips; returns how many were read."""
        stop_if_unwanted()
        places = ((strips << self._bits)[:, None] + np.arange(1 << self._bits)).ravel()
        places = places[places < self.n]
        places = places[np.logical_or.reduce([group.lanes.quiet[places] < QUIET for group in going])]
        if len(places):
            x, squares, weights = self._read(places)
            for group in going:
                group.visit(x, squares, weights, places, problem, number, epoch)
        return len(places)

    def _read(self, places: NDArray[np.int64]) -> tuple[CSR, NDArray[np.float64], NDArray[np.float64]]:
        """Some of the rows, their `row_squares` and weights."""
        lines = places if self._rows is None else self._rows[places]
        x, squares = CSR.of(self._X.gather(lines)), np.empty(len(lines))
        row_squares(x.indptr, x.values, 1.0, squares)
        return x, squares, self._of_rows.of(lines)

    def gaps(self, group: _Group, problem: Problem) -> list[float]:
        """Relative duality gaps of a group's children, by one more pass."""
        figures, lanes, step = np.zeros((LANES, 2)), group.lanes, 1 << self._bits
        for first in range(0, self.n, step):
            stop_if_unwanted()
            places = np.arange(first, min(first + step, self.n))
            mine = slice(first, first + len(places))
            some = lanes._replace(
                alpha=lanes.alpha[mine.start * LANES : mine.stop * LANES], positive=lanes.positive[mine], order=places
            )
            measure_rows(*self._read(places), problem.penalty, some, figures)
            group.let_go()
        measure_weights(problem.penalty.lam, lanes, figures)
        return relative_gaps(group.used, figures)
