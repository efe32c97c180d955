"""What a training of a label tree would do: passes, bytes, seconds, disk. From sizes alone.

How many nodes of a level a row has labels below, how often rows are visited until children settle, and how many weights these
keep is not known before. Here are rules that fit what was measured, see benchmarks/README "Large jobs".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from xmc_stream.kernels.instructions import LANES
from xmc_stream.methods.contract import Forecast, Task
from xmc_stream.runtime.plan import Forecaster, MemoryPlan
from xmc_stream.tree.beams import row_ranges
from xmc_stream.tree.choice import LEAST, MOST, SHARE
from xmc_stream.tree.clustering import DIMENSIONS
from xmc_stream.tree.given import given_tree
from xmc_stream.tree.guide import N_GROUPS
from xmc_stream.tree.nodes import CHILDREN, NODES
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.plan import (
    JOB_ENTRIES,
    Shape,
    TreePlan,
    cut_children,
    least_needs,
    plan_tree,
    shape_of,
    stored_bytes,
)
from xmc_stream.tree.run import units_of_part
from xmc_stream.tree.scoring import score_of
from xmc_stream.tree.solve import GUIDE_EPOCHS, LANE_BYTES

# nanoseconds: of an entry of X and LANES children; of one that is looked up in the weights of a node; of one that is added to
# the vector of a label; of a number of that vector in all splits; of a weight that is written
_STEP, _LOOKED_UP, _ADDED, _SPLIT, _WEIGHT = 12.0, 45.0, 20.0, 80.0, 150.0
_PAIR = 1.5e3  # nanoseconds of a row that goes down from a node, beside its entries
_PACK = 2.5e6  # nanoseconds of a range of rows whose beams a job looks at
_ROW = 170.0  # nanoseconds of a row and LANES children, beside its entries
_GROUP = 1.2e6  # nanoseconds of LANES children below the root, however few rows they have
_DOUBLED, _CACHE = 4.0, 1 << 23  # nanoseconds more, each time that v has twice so many bytes
_MOVED = 50.0  # nanoseconds of an entry that is read, or written, where rows are brought side by side
_TRIED = 3  # times that rows are read to try some C
_VISITS = 9.0  # of a row of a parent below the root
_OVERLAP = 0.55  # a row with y labels has them below y ** _OVERLAP nodes of a level
_MODEL_BYTES, _STATE_BYTES = 5.0, 12.0  # of a weight, in the model and before


@dataclass(frozen=True)
class _Level:
    """Of a level: parents, children, and passes over X that the rows of all parents are."""

    parents: int
    children: int
    passes: float

    @property
    def groups(self) -> int:
        """Of LANES children, of a parent."""
        return -(-self.children // (LANES * self.parents))


@dataclass(frozen=True)
class _Part:
    """Of a training. passes: over X; streamed, gathered: bytes of whole passes, of rows here and there; work: nanoseconds."""

    passes: float = 0.0
    streamed: float = 0.0
    gathered: float = 0.0
    work: float = 0.0


@dataclass(frozen=True)
class TreeForecaster(Forecaster):
    """From sizes alone."""

    task: Task

    @cached_property
    def _shape(self) -> Shape:
        task = self.task
        return shape_of(task.parameters, task.dataset.n_labels, given_tree(task.given), task.warm_start)

    @cached_property
    def _p(self) -> TreeParameters:
        p: TreeParameters = self.task.parameters
        return p.resolved(self.task.dataset.n_samples)

    @cached_property
    def _guided(self) -> bool:
        return bool(score_of(self.task.dataset, self._p.guide)["guide"] > 0)

    def _step(self, entries: float) -> float:
        """Nanoseconds of an entry: v has a cache line for each feature of the rows, and lies in memory if these are many."""
        X, features = self.task.dataset.X_rows(), max(1.0, min(self.task.dataset.n_features, entries))
        of_row = float(_ROW * X.shape[0] / max(X.nnz, 1))
        return _STEP + of_row + _DOUBLED * max(0.0, math.log2(4 * LANES * features / _CACHE))

    def check(self, plan: MemoryPlan) -> None:
        """Whether the smallest pieces fit."""
        plan_tree(plan, self.task.dataset, self.task.parameters, self._shape)

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Without a probe."""
        dataset, p, shape = self.task.dataset, self._p, self._shape
        needs = least_needs(plan, dataset, p, shape)
        sizes, levels = plan_tree(plan, dataset, p, shape), self._levels()
        held = self._held(levels[0], sizes, plan)
        needs["children whose rows stream by"] |= {"alpha, and groups of children that share a pass": held}
        weights = [self._weights(level) for level in levels]
        vectors = shape.splits or shape.start or self._guided
        parts = [
            *([self._vectors(sizes.labels)] if vectors else []),
            *self._all_rows(levels[0], sizes, plan.threads * plan.processes),
            *([self._choice(levels[-1], sizes.shuffles)] if p.C is None else []),
            *(self._below(level, level is levels[-1], sizes.shuffles) for level in levels[1:]),
            self._down(levels[:-1]),
            _Part(work=p.n_trees * sum(weights) * _WEIGHT),
        ]
        streamed, gathered = int(sum(part.streamed for part in parts)), int(sum(part.gathered for part in parts))
        phase = max(needs, key=lambda name: sum(needs[name].values()))
        return {
            "passes": round(sum(part.passes for part in parts), 2),
            "at_most": False,
            "bytes_read": streamed + gathered,
            "bytes_streamed": streamed,
            "bytes_gathered": gathered,
            "disk_bytes": self._disk(levels, weights, bool(vectors), sizes.shuffles),
            "peak_phase": phase,
            "peak_parts": needs[phase],
            "seconds": round(1e-9 * sum(part.work for part in parts) / (plan.threads * plan.processes) + 0.5, 1),
        }

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        """Of X on disk, and of X and Y."""
        x = stored_bytes(self.task.dataset.X_rows())
        return x, x + stored_bytes(self.task.dataset.Y_rows())

    def _vectors(self, at_a_time: int) -> _Part:
        """Vectors of labels, so many at a time, and all splits of them."""
        X, Y, k = self.task.dataset.X_rows(), self.task.dataset.Y_rows(), self.task.dataset.n_labels
        passes = -(-k // at_a_time)
        added = X.nnz * Y.nnz / max(X.shape[0], 1) * _ADDED
        return _Part(
            passes, passes * self._bytes[1], 0, added + k * DIMENSIONS * (self._p.n_trees + self._guided) * _SPLIT
        )

    def _all_rows(self, root: _Level, sizes: TreePlan, at_once: int) -> Iterator[_Part]:
        """The children of the root of each tree, and the guide; one pass of each measures gaps."""
        epochs = self._p.number("epochs")
        settled = min(epochs, 5.2 + 0.36 * epochs)  # about when children of a root have
        wanted = [(root.children, settled)] * self._p.n_trees
        if self._guided:
            wanted.append((N_GROUPS, GUIDE_EPOCHS))
        X = self.task.dataset.X_rows()
        for n, visits in wanted:
            passes = len(cut_children(n, None, self.task.dataset, sizes, at_once)[0]) * visits + 1.0
            yield _Part(passes, passes * self._bytes[0], 0, X.nnz * visits * -(-n // LANES) * self._step(X.nnz))

    def _held(self, root: _Level, sizes: TreePlan, plan: MemoryPlan) -> int:
        """Bytes that jobs for the children of the root take beside the least, as far as memory goes."""
        dataset = self.task.dataset
        spans, spare = cut_children(root.children, None, dataset, sizes, plan.threads * plan.processes)
        children = max((last - first for first, last in spans), default=0)
        alpha = LANE_BYTES * dataset.n_samples * -(-children // LANES)
        return min(plan.threads, len(spans)) * (sizes.spare - spare + alpha * (spare >= alpha))

    def _choice(self, leaves: _Level, shuffles: bool) -> _Part:
        """C, by some leaves of the first tree."""
        groups = min(max(SHARE * leaves.groups * leaves.parents, LEAST), MOST)
        passes = _TRIED * leaves.passes * min(1.0, groups / leaves.parents)
        read = passes * self._bytes[0]
        return _Part(passes, read * shuffles, read * (not shuffles), passes * self._visits(leaves))

    def _visits(self, level: _Level) -> float:
        """Nanoseconds of a pass over X while the children of a level are solved."""
        X = self.task.dataset.X_rows()
        return X.nnz * _VISITS * level.groups * self._step(level.passes * X.nnz / level.parents)

    def _below(self, level: _Level, last: bool, shuffles: bool) -> _Part:
        """The children of a level below the first, of all trees. Jobs read rows of several parents once."""
        passes = level.passes * self._p.n_trees
        entries = self.task.dataset.X_rows().nnz * level.passes * level.groups
        jobs = max(entries / JOB_ENTRIES, level.children / (CHILDREN if last else NODES), 1.0)
        read = self._p.n_trees * jobs * (1.0 - math.exp(-level.passes / jobs)) * self._bytes[0]
        work = passes * self._visits(level) + self._p.n_trees * level.parents * level.groups * _GROUP
        work += self._p.n_trees * jobs * len(row_ranges(self.task.dataset.n_samples)) * _PACK
        if not shuffles:
            return _Part(passes, 0, read, work)
        passed = self._p.n_trees * self._bytes[0]
        moved = (passed + read) / self._bytes[0] * self.task.dataset.X_rows().nnz
        return _Part(passes + self._p.n_trees, passed + read, 0, work + moved * _MOVED)

    def _down(self, levels: list[_Level]) -> _Part:
        """All rows on their way down."""
        passes = self._p.n_trees * len(levels)
        nodes = self._p.n_trees * sum(min(self._p.beam, level.parents) for level in levels)
        X = self.task.dataset.X_rows()
        return _Part(passes, passes * self._bytes[1], 0, nodes * (X.nnz * _LOOKED_UP + X.shape[0] * _PAIR))

    def _levels(self) -> list[_Level]:
        dataset, shape = self.task.dataset, self._shape
        labels = max(dataset.Y_rows().nnz / max(dataset.n_samples, 1), 1.0)
        passes = (1.0 + self._p.negatives) * labels**_OVERLAP
        below = [_Level(n, m, min(passes, n)) for n, m in itertools.pairwise([*shape.nodes, dataset.n_labels])]
        return [_Level(1, shape.nodes[0] if shape.nodes else dataset.n_labels, 1.0), *below]

    def _weights(self, level: _Level) -> float:
        """Of all children of a level."""
        X = self.task.dataset.X_rows()
        of_child = X.nnz * level.passes / max(level.children, 1) * (1 if level.parents > 1 else level.passes)
        return float(level.children * min(X.shape[1], 3.7 * of_child**0.744))

    def _disk(self, levels: list[_Level], weights: list[float], vectors: bool, shuffles: bool) -> int:
        """The most that is there at a time: vectors, or beams, the weights of the levels so far and the rows of one."""
        p, n = self._p, self.task.dataset.n_samples
        most, kept = 4.0 * (DIMENSIONS + 20) * self.task.dataset.n_labels * vectors, 0.0
        guide = _STATE_BYTES * self._weights(_Level(1, N_GROUPS, 1.0)) * self._guided
        for tree in range(p.n_trees):
            waits = guide * (tree == 0)  # the guide is written beside the first tree's labels
            for number, (level, n_weights) in enumerate(zip(levels, weights, strict=True)):
                n_units = -(-level.children // CHILDREN) if level is levels[-1] else 1
                kept += _MODEL_BYTES * n_weights
                rows = level.passes * self._bytes[0] if shuffles and number else 0
                most = max(
                    most, kept + waits + rows + _STATE_BYTES * n_weights * min(1.0, units_of_part(n_units) / n_units)
                )
                beam = 0 if number == len(levels) - 1 else p.leaf_beam if number == len(levels) - 2 else p.beam
                kept += 16.0 * n * min(beam, level.children)
        return int(max(most, kept))
