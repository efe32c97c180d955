"""What jobs of the label tree may hold, and how a training is cut into jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.order import GROUP
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges, fitting_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import StoredModel
from xmc_stream.tree.beams import BLOCK_ROWS, ROW_BYTES, row_ranges
from xmc_stream.tree.clustering import DIMENSIONS, LABEL_BYTES, READ_BYTES, WINDOW
from xmc_stream.tree.nodes import FEATURE_BYTES, LEAST_WEIGHTS, SEEN_BYTES, WEIGHT_BYTES, Unit
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.shuffle import range_bytes
from xmc_stream.tree.solve import ENTRY_BYTES, LANE_BYTES, TAKEN_BYTES, parent_needs
from xmc_stream.tree.solve import ROW_BYTES as SOLVED_ROW_BYTES
from xmc_stream.tree.start import kept_nodes, start_needs
from xmc_stream.tree.streaming import COPY_BYTES, LISTED_BYTES, OWN_ENTRY_BYTES, bits_of_strips
from xmc_stream.tree.streaming import ROW_BYTES as STREAMED_ROW_BYTES
from xmc_stream.tree.structure import NODE_BYTES, Level, Structure, depths_of
from xmc_stream.tree.units import READ_WEIGHTS

JOB_ENTRIES = 1 << 24  # of rows times groups of LANES children, of a job: a second, about
LARGE = 1 << 23  # entries of X, of a parent whose rows stream by, at least: by the data alone
_VECTOR = 4 * DIMENSIONS
_DIRECTIONS = 5 * _VECTOR  # of a node that is split, half of them at a time
_STRUCTURE = 40  # of a label: the order, nodes of labels
_EACH = 1 << 14  # labels of a job, where there are more jobs than memory asks for
_FIXED = 8 * MIB
_PACKED = 1 << 27  # weights that are put into records at a time, at most
# of the memory limit: an X of so many bytes is read here and there, as the page cache can be trusted to hold it
_CACHED = 1.0


@dataclass(frozen=True)
class TreePlan:
    """labels: of a job of vectors; depth: from which on nodes are split by jobs of their own; held: labels whose vectors fit.

    entries: of X, that a job of solving may hold; root: its children; spare: bytes of a thread that solves children whose rows
    stream by, beside the least that one group of them takes; weights: that are put into records at a time; cache_bytes: of
    weights in memory while rows go down. shuffles: the rows of the jobs of a level are brought side by side on disk.
    """

    labels: int
    depth: int
    held: int
    entries: int
    root: int
    spare: int
    weights: int
    cache_bytes: int
    block_bytes: int
    shuffles: bool


@dataclass(frozen=True)
class Shape:
    """Of the trees of a training, before there is any. nodes: of each level but the last.

    splits: how many lie above these, where trees are made of splits, else none; given: the tree that is; start: the model whose
    trees are kept.
    """

    nodes: Sequence[int]
    splits: Sequence[int] = ()
    given: Structure | None = None
    start: StoredModel | None = None


def shape_of(p: TreeParameters, n_labels: int, given: Structure | None, start: StoredModel | None) -> Shape:
    """Of trees of so many labels. start: the model of a warm start."""
    if given is not None:
        return Shape([len(bounds) - 1 for bounds in given.bounds], given=given)
    if start is not None:
        return Shape(kept_nodes(start), start=start)
    splits = depths_of(n_labels, p.max_leaf, p.root, p.branching)
    return Shape([1 << depth for depth in splits], splits)


def rows_of_parents(
    counts: NDArray[np.int64], order: NDArray[np.int64], level: Level, p: TreeParameters, n: int
) -> NDArray[np.int64]:
    """Rows of each parent of a level that its children are solved on, at most. counts: of each label."""
    ends = np.concatenate([[0], np.cumsum(counts[order])])[level.parents]
    rows = np.minimum(np.ceil((1.0 + p.negatives) * np.diff(ends)).astype(np.int64), n)
    return np.where(level.alone, 0, rows)


def cut_parents(rows: NDArray[np.int64], level: Level, unit: Unit, row_entries: float) -> list[tuple[int, int, bool]]:
    """The parents of a unit in jobs, by the data alone, and whether rows stream by: then it is one."""
    groups = -(-np.diff(level.ptr[unit.first : unit.last + 1]) // LANES)
    entries = rows[unit.first : unit.last] * max(row_entries, 1.0)
    work, large = (entries * groups).astype(np.int64), entries > LARGE
    if not unit.level:
        large[:] = True
    work[large] = JOB_ENTRIES
    ranges = fitting_ranges(np.maximum(work, 1), JOB_ENTRIES)  # none stands beside a large one
    return [(unit.first + low, unit.first + high, bool(large[low])) for low, high in ranges]


def cut_children(
    n_children: int, rows: int | None, dataset: Dataset, sizes: TreePlan, at_once: int
) -> tuple[list[tuple[int, int]], int]:
    """Children of a parent in jobs that rows stream by for, and the bytes that each has for alpha and rows.

    rows: of the parent, at most; None for all, which are not copied. at_once: jobs.
    """
    n = dataset.n_samples if rows is None else rows
    entries = int(dataset.X_rows().nnz * (n / max(dataset.n_samples, 1)))
    of_file, alpha, copied = _of_file(n, dataset), LANE_BYTES * n, 0 if rows is None else OWN_ENTRY_BYTES * entries
    groups = 1 + sizes.spare // of_file
    if sizes.spare >= copied + alpha:
        groups = 1 + (sizes.spare - copied - alpha) // (of_file + alpha)
    shared = -(-(n_children if rows is not None else sizes.root) // (LANES * at_once))  # the guide is cut as the root
    n_groups = max(1, min(groups, shared, 8))
    step, spare = LANES * n_groups, sizes.spare - (n_groups - 1) * of_file
    return [(first, min(first + step, n_children)) for first in range(0, n_children, step)], spare


def _of_file(rows: int, dataset: Dataset) -> int:
    """Bytes of LANES children in memory whose alpha is in a file."""
    return STREAMED_ROW_BYTES * rows + LANE_BYTES * max(dataset.n_features, 1)


def least_needs(plan: MemoryPlan, dataset: Dataset, p: TreeParameters, shape: Shape) -> dict[str, dict[str, int]]:
    """Bytes by component of each phase, at least."""
    t, n, d, k = plan.threads, dataset.n_samples, dataset.n_features, dataset.n_labels
    X = dataset.X_rows()
    row_entries, block = X.nnz / max(n, 1), plan.row_block_bytes
    beams = max((high - low for low, high in row_ranges(n)), default=1)
    largest = _largest_parent(dataset, p, shape)
    of_group = min(n, GROUP << bits_of_strips(X))
    strips = of_group * int(1.5 * ENTRY_BYTES * row_entries + SOLVED_ROW_BYTES)
    structure = t * (_STRUCTURE * k + NODE_BYTES * sum(shape.nodes))
    streamed = largest if largest * row_entries > LARGE else 0
    listed = _of_file(streamed, dataset) + LISTED_BYTES * streamed + 8 * d + COPY_BYTES if streamed else 0
    held = min(largest, int(LARGE / max(row_entries, 1.0)) + 1)
    row = p.leaf_beam * ROW_BYTES
    down = {"beams": t * row * beams, "row blocks": t * (3 * block + BLOCK_ROWS * row)}
    return {
        "vectors of labels": {"vectors": t * min(k, WINDOW) * _VECTOR, "row blocks": t * 3 * block},
        "splitting": {
            "vectors": t * 2 * min(k, WINDOW) * _VECTOR, "labels": t * LABEL_BYTES * k,
            "directions": t * _DIRECTIONS * min(k, 1 << max(shape.splits, default=0)),
        },
        **({} if shape.start is None else {"keeping the trees": start_needs(shape.start, dataset, t)}),
        "children whose rows stream by": {
            "rows and features": t * (max(_of_file(n, dataset), listed) + TAKEN_BYTES),
            "strips": t * strips, "labels": structure,
        },
        "rows on their way down": {**down, "labels": structure, "weights": t * _FIXED},
        "children of nodes": {
            **parent_needs(t, held, int(1.5 * held * row_entries), d),
            "labels": structure, "windows": t * 2 * _FIXED,
        },
        **({"rows side by side": {"rows": t * range_bytes(X)}} if _shuffles(X, plan) else {}),
        "writing nodes": {
            "records": t * LEAST_WEIGHTS * WEIGHT_BYTES, "windows": t * 2 * READ_WEIGHTS * 12,
            "features": t * (FEATURE_BYTES * d + SEEN_BYTES * min(d, X.nnz)), "labels": structure,
        },
    }  # fmt: skip


def _largest_parent(dataset: Dataset, p: TreeParameters, shape: Shape) -> int:
    """Rows of a parent below the root, about, at most: as if labels were alike; of a tree that is given, at most."""
    if (given := shape.given) is not None:
        ends = np.concatenate([[0], np.cumsum(dataset.label_counts()[given.order])])
        most = max((int((np.diff(ends[of.parents]) * ~of.alone).max()) for of in given.levels[1:]), default=0)
        return int(min(dataset.n_samples, np.ceil((1.0 + p.negatives) * most)))
    if not shape.nodes:
        return 0
    positives = dataset.Y_rows().nnz / shape.nodes[0]
    return int(min(dataset.n_samples, (1.0 + p.negatives) * max(2.0 * positives, dataset.most_positives())))


def plan_tree(plan: MemoryPlan, dataset: Dataset, p: TreeParameters, shape: Shape) -> TreePlan:
    """Share the budget. Raises MemoryLimitError where the smallest pieces do not fit."""
    needs = least_needs(plan, dataset, p, shape)
    for what, parts in needs.items():
        plan.refuse_unless(parts, f"the label tree: {what}")
    k, each, at_once = dataset.n_labels, plan.per_thread, plan.threads * plan.processes
    X, n = dataset.X_rows(), max(dataset.n_samples, 1)
    room = max(min(k, WINDOW), (each - 3 * plan.row_block_bytes) // _VECTOR)
    labels = (
        max(last - first for first, last in even_ranges(k, max(-(-k // room), min(at_once, k // _EACH)))) if k else 1
    )
    deepest, depth = max(shape.splits, default=0), 0
    fixed_of_split = (LABEL_BYTES + READ_BYTES) * k + _DIRECTIONS * min(k, 1 << deepest)
    room = (each - fixed_of_split) * 7 // 8 // _VECTOR
    while depth < deepest and ((k >> depth) > room or (1 << depth < at_once and k >> depth > _EACH)):
        depth += 1
    weights = plan.budget - sum(needs["rows on their way down"].values())
    fixed = needs["children of nodes"]
    left = (plan.budget - sum(fixed.values())) // plan.threads
    entries = max(1, left // 2 // ENTRY_BYTES) + min(int(_largest_parent(dataset, p, shape) * X.nnz / n), LARGE)
    spare = (plan.budget - sum(needs["children whose rows stream by"].values())) // plan.threads
    packed = (plan.budget - sum(needs["writing nodes"].values())) // plan.threads // WEIGHT_BYTES
    packed = LEAST_WEIGHTS + min(packed, _PACKED)
    cache = plan.threads * _FIXED + max(0, weights)
    root = shape.nodes[0] if shape.nodes else k
    return TreePlan(labels, depth, room, entries, root, spare, packed, cache, plan.row_block_bytes, _shuffles(X, plan))


def _shuffles(X: SparseMatrix, plan: MemoryPlan) -> bool:
    """Whether X is larger than what may be trusted to stay in memory, so that to read it here and there is slow."""
    return stored_bytes(X) > _CACHED * plan.limit


def stored_bytes(matrix: SparseMatrix) -> int:
    """Of a matrix on disk."""
    return sum(array.size * (array.chunk_bytes // array.chunk) for array in matrix.arrays())
