"""Which labels lie together: balanced 2-means of vectors of labels, split by split.

The vector of a label is the sum of its rows, each count-sketched to DIMENSIONS numbers, of length one. A node is split by a
direction, the difference of the unit vectors of its halves' sums: the labels that stand highest along it are one half, until
the halves stay, MOST_STEPS times at most. It begins from two labels that are drawn. Of a node of many labels a sample says the
direction, and all are put on a side once.

Vectors lie on disk by ranges of labels. Nodes near the root are split while vectors stream by; the nodes of some depth are
jobs of their own, which hold their vectors. Sums are made label by label, so that it does not matter which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.domains import TREE_FEATURES, TREE_SPLITS
from xmc_stream.kernels.permutation import key_of, permuted, word_bits
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import ChunkedArray, open_array
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.matrix import stream
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.kernels.vectors import (
    add_rows_to_labels,
    add_to_sides,
    part_nodes,
    project,
    take_sides,
    to_length_one,
)
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.structure import Structure

DIMENSIONS = 512
MOST_STEPS = 4
SAMPLE = 1 << 14  # labels of a node that say how it is split, at least, where there are twice as many
LABEL_BYTES = 64  # of a label in a split, beside its vector
READ_BYTES = 120  # of a label whose vector is read
WINDOW = 1 << 12  # vectors that are in memory at a time where they stream


@dataclass(frozen=True)
class VectorsJob:
    """The vectors of labels [first, last), in one pass over the rows."""

    of: Shared
    first: int
    last: int
    block_bytes: int
    out: str

    @property
    def key(self) -> str:
        """The labels."""
        return f"vectors/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Sum, and write."""
        dataset = self.of.dataset()
        X, Y, of_rows = dataset.X_rows(), dataset.Y_rows(), self.of.row_weights()
        vectors = np.zeros((self.last - self.first, DIMENSIONS), np.float32)
        key = np.uint64(key_of(self.of.seed, TREE_FEATURES, 0, 0))
        for x, y in stream((X, Y), self.block_bytes, 0, dataset.n_samples):
            stop_if_unwanted()
            weights = of_rows.of_range(x.start, x.start + x.n)
            add_rows_to_labels(CSR.of(x), Labels.of(y), weights, self.first, key, vectors)
        to_length_one(vectors)
        with new_pack(Path(self.out)) as pack:
            pack.write("vectors", vectors.ravel())
        return {"passes": 1, "bytes_read": X.bytes_read + Y.bytes_read}


@dataclass(frozen=True)
class Vectors:
    """Of all labels, in packs: each has those of labels `starts[i]` up to the next start."""

    starts: tuple[int, ...]
    packs: tuple[str, ...]

    def opened(self) -> list[ChunkedArray]:
        """The arrays of the packs."""
        return [open_array(Path(pack) / "vectors") for pack in self.packs]

    def of(self, labels: NDArray[np.int64], arrays: list[ChunkedArray]) -> NDArray[np.float32]:
        """Of some labels, ascending. arrays: `opened`."""
        lines = np.empty((len(labels), DIMENSIONS), np.float32)
        edges = np.searchsorted(labels, [*self.starts, np.iinfo(np.int64).max])
        for i, array in enumerate(arrays):
            mine = labels[edges[i] : edges[i + 1]] - self.starts[i]
            begins = np.flatnonzero(np.diff(mine, prepend=-2) != 1)  # labels beside each other are one range
            counts = np.diff(begins, append=len(mine))
            array.read_ranges(
                mine[begins] * DIMENSIONS, counts * DIMENSIONS, lines[edges[i] : edges[i + 1]].reshape(-1)
            )
        return lines


class _Lines:
    """The vectors of some labels, ascending: held, or read a window at a time."""

    def __init__(self, vectors: Vectors, labels: NDArray[np.int64], hold: bool) -> None:
        self._vectors, self._labels, self._arrays = vectors, labels, vectors.opened()
        self._held = self._of(labels) if hold else None

    def _of(self, labels: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._vectors.of(labels, self._arrays)

    def windows(self, nodes: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64] | slice, NDArray[np.float32]]]:
        """Those of labels that are in a node, and some others where they are held; which these are, by number."""
        if self._held is not None:
            yield slice(0, len(self._labels)), self._held
            return
        wanted = np.flatnonzero(nodes >= 0)
        for first in range(0, len(wanted), WINDOW):
            some = wanted[first : first + WINDOW]
            yield some, self._of(self._labels[some])

    def along(self, nodes: NDArray[np.int32], directions: NDArray[np.float32]) -> NDArray[np.float32]:
        """How far each label stands along the direction of its node; 0 where it is in none."""
        found = np.zeros(len(nodes), np.float32)
        for some, vectors in self.windows(nodes):
            part = np.zeros(len(vectors), np.float32)
            project(vectors, nodes[some], directions, part)
            found[some] = part
        return found

    def at(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of some of the labels, in any order."""
        if self._held is not None:
            return self._held[places]
        some, back = np.unique(places, return_inverse=True)
        return self._of(self._labels[some])[back]


def split(
    lines: _Lines, n: int, seed: int, clustering: int, node: int, begin: int, end: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split n labels, of a node at depth `begin`, down to depth `end`.

    Returns the labels by number 0 .. n - 1 in the order of the nodes, and where each node begins.
    """
    order, bounds = np.arange(n), np.array([0, n])
    for depth in range(begin, end):
        numbers = (node << (depth - begin)) + np.arange(len(bounds) - 1)
        larger = numbers % 2 == 0
        sides = _sides(
            lines,
            order,
            bounds,
            larger,
            [np.uint64(key_of(seed, TREE_SPLITS + clustering, depth, int(c))) for c in numbers],
        )
        bounds = part_nodes(bounds, order, larger, sides)
    return order, bounds


def _sides(
    lines: _Lines, order: NDArray[np.int64], bounds: NDArray[np.int64], larger: NDArray[np.bool_], keys: list[np.uint64]
) -> NDArray[np.uint8]:
    """The half of its node that each label belongs to."""
    sample, of_sample = _sample(order, bounds)
    directions = _directions(lines, len(order), sample, of_sample, larger, keys)
    sides, moved = np.zeros(len(order), np.uint8), np.zeros(len(bounds) - 1, np.bool_)
    nodes = _nodes(len(order), order, bounds)
    take_sides(bounds, order, larger, nodes, lines.along(nodes, directions), sides, moved)
    return sides


def _sample(order: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels that say how their node is split, as `order` and `bounds`: fewer than 2 SAMPLE of each, evenly drawn."""
    parts = [order[begin : end : max(1, (end - begin) // SAMPLE)] for begin, end in itertools.pairwise(bounds)]
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)])


def _nodes(n: int, order: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int32]:
    """The node of each of n labels; -1 of those that are in none, or alone in theirs."""
    sizes, nodes = np.diff(bounds), np.full(n, -1, np.int32)
    nodes[order] = np.repeat(np.where(sizes > 1, np.arange(len(sizes), dtype=np.int32), np.int32(-1)), sizes)
    return nodes


def _directions(
    lines: _Lines, n: int, order: NDArray[np.int64], bounds: NDArray[np.int64], larger: NDArray[np.bool_],
    keys: list[np.uint64],
) -> NDArray[np.float32]:  # fmt: skip
    """Of each node, along what it is split, by the labels in `order`."""
    sizes, n_nodes, nodes = np.diff(bounds), len(bounds) - 1, _nodes(n, order, bounds)
    sides, moved = np.zeros(n, np.uint8), np.zeros(n_nodes, np.bool_)
    pairs = [
        [begin + permuted(b, int(n), word_bits(int(n)), key) if n > 1 else 0 for b in (0, 1)]
        for begin, n, key in zip(bounds, sizes, keys, strict=False)
    ]
    of_pairs = lines.at(order[np.array(pairs, np.int64).ravel()]).reshape(n_nodes, 2, DIMENSIONS)
    directions = of_pairs[:, 0] - of_pairs[:, 1]
    going = sizes > 1
    for step in range(MOST_STEPS - 1):
        stop_if_unwanted()
        take_sides(bounds, order, larger, nodes, lines.along(nodes, directions), sides, moved)
        going = moved if step else going
        if not going.any():
            break
        nodes[order] = np.where(np.repeat(going, sizes), nodes[order], -1)
        sums = np.zeros((n_nodes, 2, DIMENSIONS))
        for some, vectors in lines.windows(nodes):
            add_to_sides(vectors, nodes[some], sides[some], sums)
        lengths = np.sqrt((sums * sums).sum(axis=2, keepdims=True))
        sums /= np.where(lengths > 0.0, lengths, 1.0)
        directions[going] = (sums[going, 0] - sums[going, 1]).astype(np.float32)
    return directions


@dataclass(frozen=True)
class SplitJob:
    """Split a node of a clustering, or all labels, down to a depth.

    before: what the job left that split the node above, or all labels, down to depth `begin`, "" where that is 0; node: of that
    depth. held: labels whose vectors may stay in memory.
    """

    vectors: Vectors
    n_labels: int
    seed: int
    clustering: int
    node: int
    begin: int
    end: int
    before: str
    held: int
    out: str

    @property
    def key(self) -> str:
        """The node."""
        return f"split/{self.clustering}/{self.begin}-{self.end}/{self.node}"

    def run(self) -> Receipt:
        """Split, and write labels and bounds."""
        labels = np.arange(self.n_labels)
        if self.before:
            order, bounds = read_split(Path(self.before))
            mine = self.node % (len(bounds) - 1)
            labels = order[bounds[mine] : bounds[mine + 1]]
        lines = _Lines(self.vectors, labels, len(labels) <= self.held)
        order, bounds = split(lines, len(labels), self.seed, self.clustering, self.node, self.begin, self.end)
        with new_pack(Path(self.out)) as pack:
            pack.write("labels", labels[order])
            pack.write("bounds", bounds)
        return {}


def read_split(pack: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The labels in the order of their nodes, and where each node begins."""
    labels, bounds = (open_array(pack / name) for name in ("labels", "bounds"))
    return labels.read(0, labels.size), bounds.read(0, bounds.size)


@dataclass(frozen=True)
class StructureJob:
    """Write the tree that the splits of a clustering make. parts: what they left, in the order of their nodes."""

    tree: int
    depths: tuple[int, ...]
    parts: tuple[str, ...]
    out: str

    @property
    def key(self) -> str:
        """The tree."""
        return f"structure/{self.tree}"

    def run(self) -> Receipt:
        """Read, join, write."""
        orders, leaves = [], [np.zeros(1, np.int64)]
        for part in self.parts:
            labels, bounds = read_split(Path(part))
            leaves.append(leaves[-1][-1] + bounds[1:])
            orders.append(labels)
        order, at = np.concatenate(orders), np.concatenate(leaves)
        depth = (len(at) - 1).bit_length() - 1
        Structure(order, [at[:: 1 << (depth - above)] for above in self.depths]).write(Path(self.out))
        return {}
