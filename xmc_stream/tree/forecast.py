"""What a training of a label tree would do: passes, bytes, seconds, disk. From sizes alone.

How many nodes of a level a row has labels below, how often rows are visited until children settle, and how many weights these
keep is not known before. Here are rules that fit what was measured, see benchmarks/README "Large jobs".
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from xmc_stream.kernels.instructions import LANES
from xmc_stream.methods.contract import Forecast, Task
from xmc_stream.runtime.plan import Forecaster, MemoryPlan
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.tree.choice import LEAST, MOST, SHARE
from xmc_stream.tree.clustering import DIMENSIONS
from xmc_stream.tree.given import given_tree
from xmc_stream.tree.guide import N_GROUPS
from xmc_stream.tree.nodes import CHILDREN, NODES
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.plan import JOB_ENTRIES, LARGE, Shape, TreePlan, cut_children, least_needs, plan_tree, shape_of
from xmc_stream.tree.run import units_of_part
from xmc_stream.tree.scoring import score_of
from xmc_stream.tree.solve import GUIDE_EPOCHS

# nanoseconds: of an entry of X and LANES children; of one that is looked up in the weights of a node; of one that is added to
# the vector of a label; of a number of that vector in all splits; of a weight that is written
_STEP, _LOOKED_UP, _ADDED, _SPLIT, _WEIGHT = 12.0, 70.0, 20.0, 80.0, 250.0
_GROUP = 1.2e6  # nanoseconds of LANES children below the root, however few rows they have
_DOUBLED, _CACHE = 7.0, 1 << 23  # nanoseconds more where rows stream by, each time that v has twice so many bytes
_TRIED = 2  # times that rows are read to try some C
_VISITS = 6.0  # of a row of a parent below the root
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

    @cached_property
    def _streamed(self) -> float:
        """As _STEP, where rows stream by: v has a cache line for each feature, and lies in memory if it is large."""
        return _STEP + _DOUBLED * max(0.0, math.log2(4 * LANES * max(self.task.dataset.n_features, 1) / _CACHE))

    def check(self, plan: MemoryPlan) -> None:
        """Whether the smallest pieces fit."""
        plan_tree(plan, self.task.dataset, self.task.parameters, self._shape)

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Without a probe."""
        dataset, p, shape = self.task.dataset, self._p, self._shape
        sizes, needs = plan_tree(plan, dataset, p, shape), least_needs(plan, dataset, p, shape)
        X, Y, at_once = dataset.X_rows(), dataset.Y_rows(), plan.threads * plan.processes
        one, both = _stored(X), _stored(X) + _stored(Y)
        levels, trees = self._levels(), p.n_trees
        k = dataset.n_labels
        vectors = -(-k // sizes.labels) if shape.splits or shape.start or self._guided else 0
        epochs = p.number("epochs")
        epochs = min(epochs, 5.2 + 0.36 * epochs)  # until children of a root settle
        streams = trees * self._streams(levels[0].children, epochs, sizes, at_once)
        work = X.nnz * trees * epochs * levels[0].groups * self._streamed
        if self._guided:
            streams += self._streams(N_GROUPS, GUIDE_EPOCHS, sizes, at_once)
            work += X.nnz * GUIDE_EPOCHS * (N_GROUPS // LANES) * self._streamed
        down = trees * (len(levels) - 1)
        choice = 0.0 if p.C is not None else _TRIED * levels[-1].passes * self._chosen(levels[-1])
        gathered = trees * sum(level.passes for level in levels[1:]) + choice
        for level in levels[1:]:
            large = level.passes * X.nnz / level.parents > LARGE
            visits = _VISITS * level.groups * (trees + (choice / level.passes if level is levels[-1] else 0.0))
            work += X.nnz * level.passes * visits * (self._streamed if large else _STEP)
            work += level.parents * level.groups * _GROUP * trees
        weights = [self._weights(level) for level in levels]
        work += X.nnz * trees * sum(min(p.beam, level.parents) for level in levels[:-1]) * _LOOKED_UP
        work += trees * sum(weights) * _WEIGHT
        if vectors:
            work += (
                X.nnz * Y.nnz / max(dataset.n_samples, 1) * _ADDED + k * DIMENSIONS * (trees + self._guided) * _SPLIT
            )
        bytes_streamed = int(vectors * both + streams * one + down * both)
        bytes_gathered = int(
            one * (choice + trees * sum(self._read(level, level is levels[-1]) for level in levels[1:]))
        )
        phase = max(needs, key=lambda name: sum(needs[name].values()))
        return {
            "passes": round(vectors + streams + down + gathered, 2),
            "at_most": False,
            "bytes_read": bytes_streamed + bytes_gathered,
            "bytes_streamed": bytes_streamed,
            "bytes_gathered": bytes_gathered,
            "disk_bytes": self._disk(levels, weights, vectors > 0),
            "peak_phase": phase,
            "peak_parts": needs[phase],
            "seconds": round(1e-9 * work / at_once + 0.5, 1),
        }

    def _levels(self) -> list[_Level]:
        dataset, shape = self.task.dataset, self._shape
        labels = max(dataset.Y_rows().nnz / max(dataset.n_samples, 1), 1.0)
        passes = (1.0 + self._p.negatives) * labels**_OVERLAP
        below = [_Level(n, m, min(passes, n)) for n, m in itertools.pairwise([*shape.nodes, dataset.n_labels])]
        return [_Level(1, shape.nodes[0] if shape.nodes else dataset.n_labels, 1.0), *below]

    def _streams(self, n_children: int, epochs: float, sizes: TreePlan, at_once: int) -> float:
        """Passes over X for the children of a root, with those that measure gaps."""
        return len(cut_children(n_children, None, self.task.dataset, sizes, at_once)[0]) * epochs + 1.0

    def _chosen(self, leaves: _Level) -> float:
        """The share of leaves that say which C is good."""
        groups = min(max(SHARE * leaves.groups * leaves.parents, LEAST), MOST)
        return min(1.0, groups / leaves.parents)

    def _read(self, level: _Level, last: bool) -> float:
        """Passes over X that jobs read, each of which reads a row of several parents once."""
        work = self.task.dataset.X_rows().nnz * level.passes * level.groups
        jobs = max(work / JOB_ENTRIES, level.children / (CHILDREN if last else NODES), 1.0)
        return jobs * (1.0 - math.exp(-level.passes / jobs))

    def _weights(self, level: _Level) -> float:
        """Of all children of a level."""
        X = self.task.dataset.X_rows()
        of_child = X.nnz * level.passes / max(level.children, 1) * (1 if level.parents > 1 else level.passes)
        return float(level.children * min(X.shape[1], 3.7 * of_child**0.744))

    def _disk(self, levels: list[_Level], weights: list[float], vectors: bool) -> int:
        """The most that is there at a time: vectors, or beams and the weights of the levels so far."""
        p, n = self._p, self.task.dataset.n_samples
        most, kept = 4.0 * (DIMENSIONS + 20) * self.task.dataset.n_labels * vectors, 0.0
        for _ in range(p.n_trees):
            for number, (level, n_weights) in enumerate(zip(levels, weights, strict=True)):
                n_units = -(-level.children // CHILDREN) if level is levels[-1] else 1
                kept += _MODEL_BYTES * n_weights
                most = max(most, kept + _STATE_BYTES * n_weights * min(1.0, units_of_part(n_units) / n_units))
                beam = 0 if number == len(levels) - 1 else p.leaf_beam if number == len(levels) - 2 else p.beam
                kept += 16.0 * n * min(beam, level.children)
        return int(max(most, kept))


def _stored(matrix: SparseMatrix) -> int:
    """Bytes of a matrix on disk."""
    return sum(array.size * (array.chunk_bytes // array.chunk) for array in matrix.arrays())
