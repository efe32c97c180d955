"""Children are solved, LANES beside each other, on rows of their parent that fit in memory; of more rows: `tree.streaming`.

The problem of child k of parent c, on the rows R(c), with y_i = 1 where row i has a label below k, else -1, and z = w.x + b:

    min  lam ||w||_1 + 1/2 (||w||^2 + b^2) + C sum_{i in R(c)} 1/2 max(0, 1 - y_i z_i)^2

lam is 0 for nodes. R(c) has the rows with a label below c, and of those whose beam has c some others (`Others`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.domains import TREE_ORDERS
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.permutation import key_of
from xmc_stream.linear.kernels.dcd import ONCE, Penalty, Steps, Times, of_lines
from xmc_stream.linear.kernels.lanecd import Lanes, Rest, new_lanes
from xmc_stream.linear.kernels.rows import localise, row_squares
from xmc_stream.linear.weights import SURE
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MemoryPlan, fitting_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedArrayWriter, PackWriter, new_pack
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.beams import beams_above
from xmc_stream.tree.kernels.records import Weights
from xmc_stream.tree.kernels.solve import measure_rows, measure_weights, solve_lanes, take_entries
from xmc_stream.tree.nodes import GUIDE
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.parents import Parent, parents_of, union_of
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.shuffle import Shuffled

_GUIDE_C, GUIDE_EPOCHS = 1.0, 4
QUIET = 2  # visits that do not move a row before it sleeps
LANE_BYTES = 4 * LANES  # of alpha, or v
ROW_BYTES = LANE_BYTES + 80  # of a row in a problem, beside its entries
ENTRY_BYTES = 8 + 8  # of an entry of X as it is gathered, and with local features
FEATURE_BYTES = LANE_BYTES + 8  # of a feature in a problem: v, and what it is called
_TAKEN = 1 << 14  # features whose weights are taken at a time
TAKEN_BYTES = 12 * LANES * _TAKEN


def parent_needs(threads: int, n: int, nnz: int, n_features: int) -> dict[str, int]:
    """Bytes by component that solving the children of one parent takes, of n rows with nnz entries, on each of some threads."""
    return {
        "rows": threads * (n * ROW_BYTES + nnz * ENTRY_BYTES),
        "features": threads * (13 * n_features + FEATURE_BYTES * min(n_features, nnz) + TAKEN_BYTES),
    }


class Problem(NamedTuple):
    """What children of a level are solved by."""

    penalty: Penalty
    rule: Rest
    epochs: int
    prune: float

    @classmethod
    def of(cls, p: TreeParameters, tree: int, last: bool) -> Problem:
        """Of resolved parameters. last: the children are labels."""
        rule, epochs, prune = Rest(p.number("tol"), QUIET), int(p.number("epochs")), p.number("prune")
        if last:
            c, lam = p.chosen_C, p.number("lam")
            penalty = Penalty(lam, 1.0, 1.0 / c, np.inf, 1.0 / (c * p.positive_weight), np.inf, True)
            return cls(penalty, rule, epochs, prune)
        c = p.C_nodes
        if tree == GUIDE:
            c, epochs, prune = _GUIDE_C, GUIDE_EPOCHS, prune / 5.0
        return cls(Penalty(0.0, 1.0, 1.0 / c, np.inf, 1.0 / c, np.inf, True), rule, epochs, prune)

    def steps(self, seed: int, tree: int, level: int, parent: int, first: int) -> Steps:
        """How children first, first + 1, ... of a parent are solved: the seed of their orders is their own.

        parent: the number of its first child.
        """
        own = int(key_of(seed, TREE_ORDERS + (tree << 8) + level, parent + first, 0)) >> 1
        return Steps(own, 0, self.epochs, self.rule.least, 0.0)

    @staticmethod
    def strips_key(seed: int, tree: int, level: int, parent: int, epoch: int) -> np.uint64:
        """Of the order of strips: all children of a parent share it. parent: the number of its first child."""
        return np.uint64(key_of(seed, TREE_ORDERS + (tree << 8) + level, parent, 1 + epoch))


class Solution:
    """Writes children as they are solved: a pack of `counts` of weights by parent, of weights by feature, of `bias`, `gaps`."""

    def __init__(self, pack: PackWriter, n_features: int, n_samples: int) -> None:
        self._pack, self._n_samples = pack, n_samples
        kinds = {
            "counts": np.int64,
            "features": np.int32,
            "children": np.int32,
            "values": np.float32,
            "bias": np.float32,
        }
        self._writers = {name: PackedArrayWriter(pack, name, kind) for name, kind in kinds.items()}
        room = LANES * (min(n_features, _TAKEN) + 1)
        self._entries = Weights(np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32))
        self._bias = list[NDArray[np.float32]]()
        self._filled = self._count = self.nnz = 0

    def take(self, used: int, n: int, first: int, names: NDArray[np.int32], problem: Problem, lanes: Lanes) -> None:
        """The first n lanes, which are children first, first + 1, ... of a parent. names: of the features, see `take_entries`.

        Those that every training row lies below are sure, and need no weights.
        """
        sure = int(np.bitwise_and.reduce(lanes.positive)) if len(lanes.positive) == self._n_samples else 0
        n_features, room = len(lanes.v) // LANES, len(self._entries.values)
        for low in range(0, n_features, _TAKEN):
            high = min(low + _TAKEN, n_features)
            if self._filled + LANES * (high - low + 1) > room:
                self._flush()
            filled = take_entries(
                used & ~sure, problem.penalty.lam, problem.prune, lanes, low, high, names, first, self._filled, self._entries
            )  # fmt: skip
            self._count, self._filled = self._count + filled - self._filled, filled
        lane = np.arange(n)
        learned, known = (used >> lane) & 1 > 0, (sure >> lane) & 1 > 0
        bias = np.where(learned, lanes.v0[:n], np.float32(-np.inf))
        self._bias.append(np.where(known, np.float32(SURE), bias))

    def _flush(self) -> None:
        for name, values in self._entries._asdict().items():
            self._writers[name].append(values[: self._filled])
        self._filled = 0

    def take_alone(self) -> None:
        """The only child of a parent, a node: its z is 1 and so its path is the parent's."""
        self._bias.append(np.ones(1, np.float32))
        self.end_parent()

    def end_parent(self) -> None:
        """All children of a parent were taken."""
        self._writers["counts"].append(np.array([self._count]))
        self._writers["bias"].append(np.concatenate(self._bias))
        self._bias.clear()
        self.nnz, self._count = self.nnz + self._count, 0

    def close(self, gaps: list[float]) -> None:
        """All parents were taken. gaps: relative duality gaps of some children."""
        self._flush()
        self._pack.write("gaps", np.array(gaps, np.float64))
        for writer in self._writers.values():
            writer.close()


@dataclass(frozen=True)
class SolveJob:
    """The children of parents [first, last) of a level below the root.

    max_entries: of rows that are held at a time, or those of one parent, for which the plan must have room. shuffled: rows lie
    side by side on disk.
    """

    of: Shared
    tree: int
    level: int
    first: int
    last: int
    max_entries: int
    plan: MemoryPlan
    out: str
    shuffled: bool = False

    @property
    def key(self) -> str:
        """The parents."""
        return f"solve/{self.tree}/{self.level}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Gather the rows of some parents, solve their children one parent after another, write."""
        dataset, of_rows = self.of.dataset(), self.of.row_weights()
        Y, p = dataset.Y_columns(), self.of.parameters
        structure = self.of.structure(self.tree, dataset.n_labels)
        level = structure.levels[self.level]
        problem = Problem.of(p, self.tree, level.last)
        numbers = np.arange(self.first, self.last)
        before = beams_above(self.of.work, self.tree, self.level, dataset.n_samples)
        parents = list(parents_of(Y, structure, level, numbers, before, p.negatives))
        rows = union_of(parents)
        X = Shuffled(self.of, dataset, self.tree, self.level, self.first, rows) if self.shuffled else dataset.X_rows()
        lengths = X.lengths(rows)[1]
        sizes = [int(lengths[np.searchsorted(rows, parent.rows)].sum()) for parent in parents]
        most = max(len(parent.rows) for parent in parents), max(sizes)
        self.plan.refuse_unless(
            parent_needs(self.plan.threads, *most, dataset.n_features), "the label tree: children of nodes"
        )
        with new_pack(Path(self.out)) as pack:
            solver = _Solver(dataset, parents, sizes, problem, pack)
            for low, high in fitting_ranges(sizes, self.max_entries):
                rows = union_of(parents[low:high])
                x, weights = CSR.of(X.gather(rows)), of_rows.of(rows)
                for number in range(low, high):
                    stop_if_unwanted()
                    if level.alone[self.first + number]:
                        solver.solution.take_alone()
                        continue
                    first, last = (int(child) for child in level.ptr[self.first + number : self.first + number + 2])
                    steps = partial(problem.steps, self.of.seed, self.tree, self.level, first)
                    classes = self.of.label_weights(structure.order[first:last]) if level.last else ONCE.classes
                    at = np.searchsorted(rows, parents[number].rows)
                    solver.solve(x, at, Times(classes, of_lines(at, weights)), parents[number].y, steps)
            solver.solution.close(solver.gaps or [])
        n_rows = sum(len(parent.rows) for parent in parents)
        return {"nnz": solver.solution.nnz, "rows": n_rows, "bytes_read": X.bytes_read + Y.bytes_read,
                "passes": n_rows / max(dataset.n_samples, 1)}  # fmt: skip


def relative_gaps(used: int, figures: NDArray[np.float64]) -> list[float]:
    """Of lanes that have rows, from `measure_rows` and `measure_weights`."""
    return [float(figures[lane, 1] / figures[lane, 0]) for lane in range(LANES) if (used >> lane) & 1]


class _Solver:
    """Solves the children of one parent after another. gaps: relative duality gaps of the first LANES of them."""

    def __init__(
        self, dataset: Dataset, parents: list[Parent], sizes: list[int], problem: Problem, pack: PackWriter
    ) -> None:  # fmt: skip
        n, nnz, n_features = max(len(parent.rows) for parent in parents), max(sizes), dataset.n_features
        most = min(n_features, nnz)
        self._lanes, self._problem, self.solution = new_lanes(n, most), problem, Solution(pack, most, dataset.n_samples)
        self._local_of, self._features = np.full(n_features, -1, np.int32), np.empty(n_features + 1, np.int32)
        self._x = CSR(np.empty(n + 1, np.int64), np.empty(nnz, np.int32), np.empty(nnz, np.float32))
        self._squares, self._alpha, self._sign = np.empty(n), np.zeros(n), np.zeros(n, np.int8)
        self.gaps: list[float] | None = None

    def solve(self, x: CSR, at: NDArray[np.int64], weights: Times, y: Labels, steps: Callable[[int], Steps]) -> None:
        """at: the parent's rows in x; weights: of the children, and of these rows; steps: of children from one on."""
        n = len(at)
        none = np.empty(0)
        n_local, _ = localise(at, x, self._sign[:n], self._alpha[:n], self._local_of, self._features, none, self._x)
        self._local_of[self._features[:n_local]] = -1
        local = CSR(self._x.indptr[: n + 1], self._x.indices, self._x.values)
        row_squares(local.indptr, local.values, 1.0, self._squares)
        lanes = sized(self._lanes, n, n_local)
        for first in range(0, len(y.indptr) - 1, LANES):
            how = weights.classes, self._problem.penalty, steps(first), self._problem.rule, lanes
            used = solve_lanes(first, local, self._squares[:n], weights.rows, y, *how)
            if self.gaps is None:
                figures = np.zeros((LANES, 2))
                measure_rows(local, self._squares[:n], weights.rows, self._problem.penalty, lanes, figures)
                measure_weights(self._problem.penalty.lam, lanes, figures)
                self.gaps = relative_gaps(used, figures)
            mine = min(LANES, len(y.indptr) - 1 - first)
            self.solution.take(used, mine, first, self._features, self._problem, lanes)
        self.solution.end_parent()


def sized(lanes: Lanes, n: int, n_features: int) -> Lanes:
    """A part of the work space, for so many rows and features."""
    return lanes._replace(
        v=lanes.v[: n_features * LANES], alpha=lanes.alpha[: n * LANES], positive=lanes.positive[:n], order=lanes.order[:n],
        quiet=lanes.quiet[:n],
    )  # fmt: skip
