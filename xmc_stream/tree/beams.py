"""Rows go down a level: where each row goes on, and which rows a node gets that have no label below it.

A beam is kept for a range of rows in a pack: nodes and paths (rows x beam), and `rows` and `keys` of the pairs of a node and
a row without a label below it, node after node (`ptr`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.domains import TREE_ROWS
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import index_dtype, new_pack
from xmc_stream.store.matrix import stream
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.kernels.beam import Beams, go_down, pairs_by_node
from xmc_stream.tree.kernels.records import Panels
from xmc_stream.tree.kernels.rows import draw_others
from xmc_stream.tree.nodes import UnitTiles, shared_units, structure_path
from xmc_stream.tree.structure import Level, Structure

_RANGES, _LEAST, _MOST = 64, 1 << 13, 1 << 17  # of rows, where there are that many; rows of one
BLOCK_ROWS = 1 << 14  # that go down together: a node's weights are read once for them
ROW_BYTES = 24  # of a row and node of its beam


def no_beams(n: int, beam: int) -> Beams:
    """Of n rows, before any node is seen."""
    return Beams(np.full((n, beam), -1, np.int32), np.full((n, beam), -np.inf, np.float32))


def at_root(n: int) -> Beams:
    """Of n rows, above the first level."""
    return Beams(np.zeros((n, 1), np.int32), np.zeros((n, 1), np.float32))


def descended(level: Level, units: Iterable[Panels], x: CSR, above: Beams, beam: int) -> Beams:
    """The beams of some rows on a level, from those above. units: of the level, in any order."""
    below = no_beams(len(x.indptr) - 1, beam)
    places, ptr = pairs_by_node(above.nodes, level.n_parents)
    for panels in units:
        go_down(x, places, ptr, above, panels, below)
    return below


def row_ranges(n_samples: int) -> list[tuple[int, int]]:
    """The rows of each job, by the data alone."""
    step = max(_LEAST, min(_MOST, -(-n_samples // _RANGES)))
    return [(first, min(first + step, n_samples)) for first in range(0, n_samples, step)]


@dataclass(frozen=True)
class BeamJob:
    """Rows [start, stop) go down a level of a tree. before: the pack of their beams above, "" below the root."""

    data: str
    model: str
    seed: int
    beam: int
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
        dataset, n = Dataset(self.data), self.stop - self.start
        X, Y = dataset.X_rows(), dataset.Y_rows()
        structure = Structure.read(structure_path(Path(self.model), self.tree), dataset.n_labels)
        level, nodes = structure.levels[self.level], structure.nodes_of_labels(self.level)
        before = read_beams(Path(self.before), n) if self.before else at_root(n)
        after, others, keys = (
            no_beams(n, self.beam),
            np.empty((n, self.beam), np.int32),
            np.zeros((n, self.beam), np.float32),
        )
        domain = TREE_ROWS + (self.tree << 8) + self.level
        for x, y in stream((X, Y), self.block_bytes, self.start, self.stop, BLOCK_ROWS):
            stop_if_unwanted()
            mine = slice(x.start - self.start, x.start - self.start + x.n)
            above = Beams(before.nodes[mine], before.paths[mine])
            units = shared_units(Path(self.model), level, dataset.n_features, self.tiles, self.cache_bytes)
            below = descended(level, units, CSR.of(x), above, self.beam)
            after.nodes[mine], after.paths[mine] = below
            draw_others(x.start, below, Labels.of(y), nodes, self.seed, domain, others[mine], keys[mine])
        places, ptr = pairs_by_node(others, level.n_children)
        with new_pack(Path(self.out)) as pack:
            pack.write("nodes", after.nodes.ravel())
            pack.write("paths", after.paths.ravel())
            pack.write("ptr", ptr)
            pack.write("rows", (self.start + places // self.beam).astype(index_dtype(dataset.n_samples)))
            pack.write("keys", keys.ravel()[places])
        return {"passes": n / max(dataset.n_samples, 1), "bytes_read": X.bytes_read + Y.bytes_read}


def read_beams(pack: Path, n: int) -> Beams:
    """The beams of n rows."""
    nodes, paths = (open_array(pack / name) for name in ("nodes", "paths"))
    return Beams(nodes.read(0, nodes.size).reshape(n, -1), paths.read(0, paths.size).reshape(n, -1))


def paths_at(packs: Sequence[str], rows: NDArray[np.int64], node: int, n_samples: int) -> NDArray[np.float32]:
    """Of some rows (ascending) the path of a node, -inf where it is not in their beam; 0 for the root, where there are no packs."""
    paths = np.full(len(rows), -np.inf if packs else 0.0, np.float32)
    edges = np.searchsorted(rows, [start for start, _ in row_ranges(n_samples)] + [n_samples])
    for number, pack in enumerate(map(Path, packs)):
        mine = slice(edges[number], edges[number + 1])
        some = rows[mine] - row_ranges(n_samples)[number][0]
        if not len(some):
            continue
        arrays = [open_array(pack / name) for name in ("nodes", "paths")]
        width = arrays[0].size // (row_ranges(n_samples)[number][1] - row_ranges(n_samples)[number][0])
        lines = [np.empty(len(some) * width, kind) for kind in (np.int32, np.float32)]
        for array, out in zip(arrays, lines, strict=True):
            array.read_ranges(some * width, np.full(len(some), width), out)
        nodes, of_nodes = (line.reshape(-1, width) for line in lines)
        paths[mine] = np.where(nodes == node, of_nodes, -np.inf).max(axis=1)
    return paths


class Others:
    """Rows without a label below a node, of all ranges of rows. packs: in the order of the rows; nodes [first, last)."""

    def __init__(self, packs: Sequence[str], first: int, last: int) -> None:
        rows, keys, counts = [], [], []
        for pack in map(Path, packs):
            ptr = open_array(pack / "ptr").read(first, last + 1)
            rows.append(open_array(pack / "rows").read(int(ptr[0]), int(ptr[-1])).astype(np.int64))
            keys.append(open_array(pack / "keys").read(int(ptr[0]), int(ptr[-1])))
            counts.append(np.diff(ptr))
        nodes = np.concatenate([np.repeat(np.arange(last - first), count) for count in counts])
        by_node = np.argsort(nodes, kind="stable")
        self._rows, self._keys = np.concatenate(rows)[by_node], np.concatenate(keys)[by_node]
        self._ptr = np.searchsorted(nodes[by_node], np.arange(last - first + 1))

    def drawn(self, node: int, most: int) -> NDArray[np.int64]:
        """Of a node, counted from the first, the rows of the largest keys, `most` at most, ascending."""
        mine = slice(self._ptr[node], self._ptr[node + 1])
        rows, keys = self._rows[mine], self._keys[mine]
        if len(rows) <= most:
            return rows
        return np.sort(rows[np.lexsort((rows, -keys))[:most]])
