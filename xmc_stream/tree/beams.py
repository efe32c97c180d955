"""Rows go down a level: where each row goes on, and which rows a node gets that have no label below it.

A beam is kept for a range of rows in a pack: nodes and paths (rows x beam), and `rows` and `keys` of the pairs of a node and
a row without a label below it, node after node (`ptr`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.domains import TREE_ROWS
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import index_dtype, new_pack
from xmc_stream.store.matrix import stream
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.kernels.beam import Beams, go_down, pairs_by_node
from xmc_stream.tree.kernels.records import Panels
from xmc_stream.tree.kernels.rows import draw_others
from xmc_stream.tree.kernels.whole import go_down_to_all
from xmc_stream.tree.nodes import UnitTiles, shared_units
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.structure import Level

_RANGES, _LEAST, _MOST = 64, 1 << 13, 1 << 17  # of rows, where there are that many; rows of one
BLOCK_ROWS = 1 << 14  # that go down together: a node's weights are read once for them
ROW_BYTES = 24  # of a row and node of its beam


def no_beams(n: int, beam: int) -> Beams:
    """Of n rows, before any node is seen."""
    return Beams(np.full((n, beam), -1, np.int32), np.full((n, beam), -np.inf, np.float32))


def at_root(n: int) -> Beams:
    """Of n rows, above the first level."""
    return Beams(np.zeros((n, 1), np.int32), np.zeros((n, 1), np.float32))


Units = Callable[[NDArray[np.int64]], Iterable[Panels]]  # of a level, in any order: those that have some of the parents


def descended(level: Level, units: Units, x: CSR, above: Beams, beam: int) -> Beams:
    """The beams of some rows on a level, from those above."""
    below = no_beams(len(x.indptr) - 1, beam)
    pairs = pairs_by_node(above.nodes, level.n_parents)
    for panels in units(pairs.nodes):
        go_down(x, pairs, above, panels, below)
    return below


def descended_to_all(level: Level, units: Units, x: CSR, above: Beams) -> Beams:
    """As `descended` by a beam as wide as the level, whose nodes stand in their own order."""
    below = no_beams(len(x.indptr) - 1, level.n_children)
    pairs = pairs_by_node(above.nodes, level.n_parents)
    for panels in units(pairs.nodes):
        go_down_to_all(x, pairs, above, panels, below)
    return below


def row_ranges(n_samples: int) -> list[tuple[int, int]]:
    """The rows of each job, by the data alone."""
    step = max(_LEAST, min(_MOST, -(-n_samples // _RANGES)))
    return [(first, min(first + step, n_samples)) for first in range(0, n_samples, step)]


def beam_path(work: str, tree: int, level: int, start: int) -> str:
    """The pack of the beams of a range of rows on a level, by its first row."""
    return str(Path(work) / "state" / "beam" / f"{tree}_{level}_{start}")


def beams_above(work: str, tree: int, level: int, n_samples: int) -> list[str]:
    """The packs of the beams of all rows on the level above one; none where that is the root."""
    return [beam_path(work, tree, level - 1, start) for start, _ in row_ranges(n_samples)] if level else []


@dataclass(frozen=True)
class BeamJob:
    """Rows [start, stop) go down a level of a tree. before: the pack of their beams above, "" below the root."""

    of: Shared
    tree: int
    level: int
    start: int
    stop: int
    tiles: UnitTiles
    cache_bytes: int
    block_bytes: int
    before: str
    out: str

    @property
    def key(self) -> str:
        """Level and rows."""
        return f"beam/{self.tree}/{self.level}/{self.start}"

    def run(self) -> Receipt:
        """Go down, draw, write."""
        dataset, n, p = self.of.dataset(), self.stop - self.start, self.of.parameters
        X, Y = dataset.X_rows(), dataset.Y_rows()
        structure = self.of.structure(self.tree, dataset.n_labels)
        level, nodes = structure.levels[self.level], structure.nodes_of_labels(self.level)
        beam = p.leaf_beam if structure.levels[self.level + 1].last else p.beam
        before = read_beams(Path(self.before), n) if self.before else at_root(n)
        after, others, keys = (
            no_beams(n, beam),
            np.empty((n, beam), np.int32),
            np.zeros((n, beam), np.float32),
        )
        domain = TREE_ROWS + (self.tree << 8) + self.level

        def units(parents: NDArray[np.int64]) -> Iterable[Panels]:
            return shared_units(self.of.model, level, dataset.n_features, self.tiles, parents, self.cache_bytes)

        for x, y in stream((X, Y), self.block_bytes, self.start, self.stop, BLOCK_ROWS):
            stop_if_unwanted()
            mine = slice(x.start - self.start, x.start - self.start + x.n)
            above = Beams(before.nodes[mine], before.paths[mine])
            below = descended(level, units, CSR.of(x), above, beam)
            after.nodes[mine], after.paths[mine] = below
            draw_others(x.start, below, Labels.of(y), nodes, self.of.seed, domain, others[mine], keys[mine])
        pairs = pairs_by_node(others, level.n_children)
        ptr = np.zeros(level.n_children + 1, np.int64)
        ptr[1 + pairs.nodes] = np.diff(pairs.ptr)
        with new_pack(Path(self.out)) as pack:
            pack.write("nodes", after.nodes.ravel())
            pack.write("paths", after.paths.ravel())
            pack.write("ptr", np.cumsum(ptr))
            pack.write("rows", (self.start + pairs.places // beam).astype(index_dtype(dataset.n_samples)))
            pack.write("keys", keys.ravel()[pairs.places])
        return {"passes": n / max(dataset.n_samples, 1), "bytes_read": X.bytes_read + Y.bytes_read}


def read_beams(pack: Path, n: int) -> Beams:
    """The beams of n rows."""
    nodes, paths = (open_array(pack / name) for name in ("nodes", "paths"))
    return Beams(nodes.read(0, nodes.size).reshape(n, -1), paths.read(0, paths.size).reshape(n, -1))


class Paths:
    """The paths of the nodes in the beams of some rows, ascending. Without packs that is the root, whose path is 0."""

    def __init__(self, packs: Sequence[str], rows: NDArray[np.int64], n_samples: int) -> None:
        self._rows = rows
        self._beams = None
        if not packs:
            return
        spans = row_ranges(n_samples)
        nodes: list[NDArray[Any]] = []
        paths: list[NDArray[Any]] = []
        edges = np.searchsorted(rows, [start for start, _ in spans] + [n_samples])
        for (start, stop), pack, low, high in zip(spans, map(Path, packs), edges[:-1], edges[1:], strict=True):
            some = rows[low:high] - start
            arrays = open_array(pack / "nodes"), open_array(pack / "paths")
            width = arrays[0].size // (stop - start)
            for array, parts, kind in zip(arrays, (nodes, paths), (np.int32, np.float32), strict=True):
                parts.append(np.empty(len(some) * width, kind))
                array.read_ranges(some * width, np.full(len(some), width), parts[-1])
        self._beams = Beams(*(np.concatenate(parts).reshape(len(rows), width) for parts in (nodes, paths)))

    def of(self, rows: NDArray[np.int64], node: int) -> NDArray[np.float32]:
        """Of a node, in some of the rows; -inf where their beam does not have it."""
        if self._beams is None:
            return np.zeros(len(rows), np.float32)
        at = np.searchsorted(self._rows, rows)
        there = self._beams.nodes[at] == node
        return np.asarray(np.where(there, self._beams.paths[at], -np.inf).max(axis=1), np.float32)


class Others:
    """Rows without a label below some nodes (ascending), of all ranges of rows. packs: in the order of the rows."""

    def __init__(self, packs: Sequence[str], nodes: NDArray[np.int64]) -> None:
        rows: list[NDArray[Any]] = []
        keys: list[NDArray[Any]] = []
        counts: list[NDArray[np.int64]] = []
        ends = np.unique(np.concatenate([nodes, nodes + 1]))
        for pack in map(Path, packs):
            ptr = np.empty(len(ends), np.int64)
            open_array(pack / "ptr").read_ranges(ends, np.ones(len(ends), np.int64), ptr)
            firsts, lasts = (ptr[np.searchsorted(ends, nodes + step)] for step in (0, 1))
            counts.append(lasts - firsts)
            for name, parts in (("rows", rows), ("keys", keys)):
                array = open_array(pack / name)
                parts.append(np.empty(int(counts[-1].sum()), array.dtype))
                array.read_ranges(firsts, counts[-1], parts[-1])
        of_nodes = np.concatenate([np.repeat(np.arange(len(nodes)), count) for count in counts])
        by_node = np.argsort(of_nodes, kind="stable")
        self._rows, self._keys = np.concatenate(rows)[by_node].astype(np.int64), np.concatenate(keys)[by_node]
        self._ptr = np.searchsorted(of_nodes[by_node], np.arange(len(nodes) + 1))

    def drawn(self, number: int, most: int) -> NDArray[np.int64]:
        """Of one of the nodes, by its place, the rows of the largest keys, `most` at most, ascending."""
        mine = slice(self._ptr[number], self._ptr[number + 1])
        rows, keys = self._rows[mine], self._keys[mine]
        if len(rows) <= most or not most:
            return rows[:most]
        last = np.partition(keys, len(keys) - most)[len(keys) - most]
        above, equal = rows[keys > last], rows[keys == last]
        return np.sort(np.concatenate([above, np.sort(equal)[: most - len(above)]]))
