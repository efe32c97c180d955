"""The shape of a tree: the order of its labels, and the nodes of each level as ranges of that order.

The labels of a node stand beside each other. Level 0 has the children of the root; the last level has the labels, whose
parents are the leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import index_dtype, new_store, write_arrays
from xmc_stream.store.model import CHUNK_BYTES

ORDER = "order"
NODE_BYTES = 24  # of a node of a level in memory: where it begins, in two levels, and its children


def depth_of(n_labels: int, max_leaf: int) -> int:
    """Splits of all labels in halves until a leaf has at most max_leaf, or one label."""
    wanted = max(0, (-(-n_labels // max_leaf) - 1).bit_length())
    return min(wanted, max(n_labels.bit_length() - 1, 0))


def depths_of(n_labels: int, max_leaf: int, root: int, branching: int) -> list[int]:
    """How many splits lie above the nodes of each level but the last: none where there is one leaf.

    The root has at most `root` children, other nodes at most `branching`; there are as few levels as that takes, and the
    nodes near the leaves are full.
    """
    depth, most, step = depth_of(n_labels, max_leaf), root.bit_length() - 1, branching.bit_length() - 1
    below = max(0, -(-(depth - most) // step))
    return [max(1, depth - step * level) for level in range(below, -1, -1)] if depth else []


@dataclass(frozen=True)
class Level:
    """Children of one level, by parent.

    number: of the level. parents (n + 1,), children (m + 1,): where the labels of each begin in the order; last: the
    children are labels.
    """

    number: int
    parents: NDArray[np.int64]
    children: NDArray[np.int64]
    last: bool

    @property
    def n_parents(self) -> int:
        """Nodes whose children these are."""
        return len(self.parents) - 1

    @property
    def n_children(self) -> int:
        """Of all parents."""
        return len(self.children) - 1

    @cached_property
    def ptr(self) -> NDArray[np.int64]:
        """Where the children of each parent begin, (n + 1,)."""
        return np.searchsorted(self.children, self.parents).astype(np.int64)

    @cached_property
    def alone(self) -> NDArray[np.bool_]:
        """Parents whose only child is a node: it has their rows, and no classifier (n,)."""
        return np.asarray((np.diff(self.ptr) == 1) & (not self.last))


@dataclass(frozen=True)
class Structure:
    """One tree. order (K,): its labels; bounds: of the nodes of each level but the last."""

    order: NDArray[np.int64]
    bounds: Sequence[NDArray[np.int64]]

    @property
    def n_labels(self) -> int:
        """K."""
        return len(self.order)

    @cached_property
    def levels(self) -> list[Level]:
        """From the root down."""
        k = self.n_labels
        all_bounds = [np.array([0, k]), *self.bounds, np.arange(k + 1)]
        pairs = enumerate(itertools.pairwise(all_bounds))
        return [Level(i, above, below, i == len(self.bounds)) for i, (above, below) in pairs]

    def nodes_of_labels(self, level: int) -> NDArray[np.int32]:
        """The node of a level that each label lies below (K,)."""
        nodes = np.empty(self.n_labels, np.int32)
        sizes = np.diff(self.levels[level].children)
        nodes[self.order] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return nodes

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """All of it, by name."""
        return {ORDER: self.order, **{f"bounds-{i}": bounds for i, bounds in enumerate(self.bounds)}}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Structure:
        """What `arrays` returned."""
        return cls(arrays[ORDER].astype(np.int64), [arrays[f"bounds-{i}"] for i in range(len(arrays) - 1)])

    def write(self, path: Path) -> None:
        """Into a store of its own."""
        with new_store(path, {}) as group:
            arrays = self.arrays()
            arrays[ORDER] = arrays[ORDER].astype(index_dtype(self.n_labels))
            write_arrays(group, arrays, CHUNK_BYTES)

    @classmethod
    def read(cls, path: Path, n_labels: int, checked: bool = True) -> Structure:
        """Of a store. Raises StoreError where it is no tree of so many labels.

        checked: whether each label is looked for. It is known to be there where a job of this run wrote the store.
        """
        arrays, level = {ORDER: path / ORDER}, 0
        while (bounds := path / f"bounds-{level}").exists():
            arrays[f"bounds-{level}"], level = bounds, level + 1
        order, *levels = (open_array(place).read_checked(0, open_array(place).size) for place in arrays.values())
        made = cls(order.astype(np.int64), levels)
        whole = len(order) == n_labels and bool((order >= 0).all() and (order < n_labels).all())
        if whole and checked:
            found = np.zeros(n_labels, np.bool_)
            found[order] = True
            whole = bool(found.all())
        for above, below in itertools.pairwise([np.array([0, n_labels]), *levels]):
            whole = whole and len(below) > 1 and bool((np.diff(below) > 0).all())
            whole = whole and bool((below[np.minimum(np.searchsorted(below, above), len(below) - 1)] == above).all())
        if levels:  # which the labels divide
            whole = whole and levels[-1][0] == 0 and levels[-1][-1] == n_labels
        if not whole:
            raise StoreError(f"{path} is no tree of {n_labels} labels: it is damaged; train the model again")
        return made
