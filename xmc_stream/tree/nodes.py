"""Weights of the children of some neighbouring parents, as they lie on disk: a unit. See `tree.kernels.records`.

Which parents are a unit is a matter of the tree alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError, StoreError
from xmc_stream.models.cache import TileCache, shared_cache
from xmc_stream.runtime.plan import fitting_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import ArrayWriter, new_store, write_arrays
from xmc_stream.store.model import CHUNK_BYTES
from xmc_stream.tree.kernels.records import (
    MOST,
    PANEL,
    REST_BITS,
    Panels,
    Slice,
    Weights,
    are_records,
    hash_bits,
    pack_slice,
    sort_by_hash,
    survey,
    take_slice,
)
from xmc_stream.tree.structure import Level

GUIDE = -1  # in the place of a tree's number
WEIGHT_BYTES = 7  # of a weight that is put into a record
FEATURE_BYTES, SEEN_BYTES = 4, 48  # of a feature meanwhile, and of one that has weights
LEAST_WEIGHTS = 1 << 16  # that are put into records at a time, at least
CHILDREN, NODES = 1 << 13, 1 << 7  # of a unit, about: labels, or nodes, which have many more weights
_MANY = 8  # one parent in so many is few
OPEN_CHILD, OPEN_PARENT, OPEN_UNIT = 9, 128, 1 << 14  # bytes of an `OpenUnit`, with what Python has of it, at most
# of a parent in memory, and of a panel, beside 8 a child, places and records
PARENT_BYTES, PANEL_BYTES = 1 << 11, 40
_ARRAYS = {
    "bits": np.uint8, "offsets": np.uint32, "starts": np.int64, "records": np.uint8, "bias": np.float32,
    "scale": np.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """Parents [first, last) of a level of a tree."""

    tree: int
    level: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """In keys of jobs, and of its folder."""
        return "guide-0-0" if self.tree == GUIDE else f"{self.tree}-{self.level}-{self.first}"

    @property
    def key(self) -> str:
        """Of the job that writes it."""
        return f"finalise/{self.name}"

    def path(self, model: Path) -> Path:
        """Where it lies."""
        return model / "units" / self.name

    def panels(self, level: Level) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The panels of each parent, and the children of each panel, see `Panels`."""
        ptr = level.ptr[self.first : self.last + 1]
        sizes = -(-np.diff(ptr) // PANEL)
        panels = np.concatenate([[0], np.cumsum(sizes)])
        first = np.repeat(ptr[:-1], sizes) + PANEL * (np.arange(panels[-1]) - np.repeat(panels[:-1], sizes))
        return panels, np.append(first, ptr[-1])


def structure_path(model: Path, tree: int) -> Path:
    """Where the shape of a tree lies."""
    return model / "units" / f"tree-{tree}"


def units_of(tree: int, level: Level) -> list[Unit]:
    """All parents of a level in units."""
    most = CHILDREN if level.last else NODES
    return [Unit(tree, level.number, *span) for span in fitting_ranges(np.diff(level.ptr), most)]


@dataclass(frozen=True)
class Source:
    """The weights of the children of a parent: how many, and windows of them, each time that they are asked for.

    Children are counted from the first of the parent; those of a feature come ascending.
    """

    n: int
    windows: Callable[[], Iterator[Weights]]


def write_unit(
    path: Path, unit: Unit, level: Level, n_features: int, bias: NDArray[np.float32], parents: Iterable[Source], most: int
) -> dict[str, int]:  # fmt: skip
    """Write a unit, `most` weights at a time, or those of one feature. bias: of its children. Returns weights and bytes."""
    panels, children = unit.panels(level)
    bits, starts = np.empty(len(children) - 1, np.uint8), np.zeros(len(children), np.int64)
    scale, n_bytes, nnz = np.zeros(len(bias), np.float32), 0, 0
    with new_store(path, {}) as group:
        writers = {name: ArrayWriter(group, name, _ARRAYS[name], CHUNK_BYTES) for name in ("offsets", "records")}
        packer = _Packer(hash_bits(n_features), np.zeros(n_features, np.int32), most, writers)
        for parent, source in enumerate(parents):
            base = children[panels[parent]]
            for panel in range(panels[parent], panels[parent + 1]):
                low, high = children[panel : panel + 2]
                of_panel = scale[low - children[0] : high - children[0]]
                bits[panel], size, kept = packer.write(source, int(low - base), int(high - base), of_panel)
                if size >= 1 << 32:
                    raise InputError(f"the weights of {high - low} nodes take {size:,} bytes: raise prune")
                starts[panel + 1], nnz, n_bytes = starts[panel] + size, nnz + kept, n_bytes + size
        for writer in writers.values():
            writer.close()
        write_arrays(group, {"bits": bits, "starts": starts, "bias": bias, "scale": scale}, CHUNK_BYTES)
    n_places = int(((1 << bits.astype(np.int64)) + 1).sum())
    return {"nnz": nnz, "bytes": n_bytes + 4 * n_places + 8 * len(bias) + 40 * len(children)}


@dataclass(frozen=True)
class _Packer:
    """Puts the weights of panels into records. counts (D,): 0 in between."""

    word: int
    counts: NDArray[np.int32]
    most: int
    writers: dict[str, ArrayWriter]

    def write(self, source: Source, low: int, high: int, scale: NDArray[np.float32]) -> tuple[int, int, int]:
        """Children [low, high) of a parent, some features at a time, by ascending hash.

        Sets their scales, which are 0. Returns log2 of the buckets, bytes of records, and the weights that are not 0.
        """
        word, size, nnz, n_features = self.word, 0, 0, 0
        features = np.empty(min(len(self.counts), source.n), np.int32)
        for some in source.windows():
            n_features = survey(low, high, some, scale, self.counts, features, n_features)
        features, ends = features[:n_features], np.empty(n_features + 1, np.int64)
        sort_by_hash(word, features, self.counts, ends)
        scale[:] = np.where(scale > 0, scale / np.float32(MOST), np.float32(1))
        bits = min(max((n_features - 1).bit_length() - 1, word - REST_BITS, 0), word)  # two features a bucket, about
        offsets = np.zeros((1 << bits) + 1, np.uint32)
        for first, last in fitting_ranges(np.diff(ends), self.most):
            n, of_slice = int(ends[last] - ends[first]), features[first:last]
            part = Slice(of_slice, ends[first : last + 1] - ends[first], np.empty(n, np.uint8), np.empty(n, np.int8))
            self.counts[of_slice] = part.ends[:-1] + 1
            for some in source.windows():
                take_slice(low, high, some, scale, self.counts, part)
            self.counts[of_slice] = 0
            records = np.empty(5 * n, np.uint8)
            n_bytes, kept = pack_slice(word, bits, high - low, part, size, offsets, records)
            self.writers["records"].append(records[:n_bytes])
            size, nnz = size + n_bytes, nnz + kept
        self.writers["offsets"].append(np.maximum.accumulate(offsets, out=offsets))
        return bits, size, nnz


class OpenUnit:
    """A unit on disk, whose parents are read as they are asked for. What is small is in memory.

    Threads may share it. Raises StoreError where it cannot be one of the level, here or as it is read.
    """

    def __init__(self, model: Path, unit: Unit, level: Level, n_features: int) -> None:
        self._path, self._unit, self._word = unit.path(model), unit, hash_bits(n_features)
        self._panels, self._children = unit.panels(level)
        n_children, n_panels = int(self._children[-1] - self._children[0]), len(self._children) - 1
        self._large = {name: open_array(self._path / name) for name in ("offsets", "records")}
        self._lock = threading.Lock()
        sizes = {"bits": n_panels, "starts": n_panels + 1, "bias": n_children, "scale": n_children}
        arrays = {name: open_array(self._path / name) for name in sizes}
        whole = all(array.size == sizes[name] for name, array in arrays.items())
        whole = whole and all(array.dtype == _ARRAYS[name] for name, array in self._large.items())
        if not whole or any(array.dtype != _ARRAYS[name] for name, array in arrays.items()):
            raise self._damaged()
        self._bits, self._starts, self._bias, self._scale = (array.read(0, array.size) for array in arrays.values())
        self._buckets = np.concatenate([[0], np.cumsum((1 << self._bits.astype(np.int64)) + 1)])
        ends = tuple(array.size for array in self._large.values())
        in_order = self._starts[0] == 0 and (np.diff(self._starts) >= 0).all() and (self._bits <= self._word).all()
        if not in_order or ends != (self._buckets[-1], self._starts[-1]):
            raise self._damaged()
        n_bytes = 4 * self._buckets + self._starts + 8 * self._children + PANEL_BYTES * np.arange(n_panels + 1)
        self._sizes = PARENT_BYTES + np.diff(n_bytes[self._panels])

    def _damaged(self) -> StoreError:
        return StoreError(f"{self._path} is no unit of the tree: it is damaged; train the model again")

    def read(self, first: int, last: int) -> Panels:
        """Parents [first, last) of the level, in memory."""
        low, high = (int(self._panels[parent - self._unit.first]) for parent in (first, last))
        panels = self._panels[first - self._unit.first : last - self._unit.first + 1] - low
        children, bits = self._children[low : high + 1], self._bits[low:high]
        buckets, starts = self._buckets[low : high + 1], self._starts[low : high + 1]
        with self._lock:  # the files are closed again: a process may have few open, and a level has many units
            offsets, records = (
                array.read(int(ends[0]), int(ends[-1]))
                for array, ends in zip(self._large.values(), (buckets, starts), strict=True)
            )
            for array in self._large.values():
                array.close_files()
        buckets, starts = buckets - buckets[0], starts - starts[0]
        if not are_records(np.diff(children), buckets, offsets, starts, records):
            raise self._damaged()
        mine = slice(int(children[0] - self._children[0]), int(children[-1] - self._children[0]))
        of_children = self._bias[mine], self._scale[mine]
        return Panels(first, self._word, panels, children, bits, buckets, offsets, starts, records, *of_children)

    def kept(self, cache: TileCache, parents: NDArray[np.int64]) -> Iterator[Panels]:
        """Those of some parents that it has, one by one: they stay in memory as far as the cache has room."""
        for parent in self._mine(parents).tolist():
            read = partial(self.read, parent, parent + 1)
            with cache.use((self._unit, parent), self.size(parent), lambda read=read: Tile(read())) as tile:  # type: ignore[misc]
                yield tile.panels

    def _mine(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those, of some that ascend, that the unit has."""
        return parents[slice(*np.searchsorted(parents, (self._unit.first, self._unit.last)))]

    def size(self, parent: int) -> int:
        """Bytes of a parent in memory, at most."""
        return int(self._sizes[parent - self._unit.first])

    def met(self, parents: NDArray[np.int64]) -> Iterator[Panels]:
        """Those of some parents that it has, such as stand beside each other together."""
        some = self._mine(parents)
        for beside in np.split(some, np.flatnonzero(np.diff(some) != 1) + 1):
            if len(beside):
                yield self.read(int(beside[0]), int(beside[-1]) + 1)


def read_unit(model: Path, unit: Unit, level: Level, n_features: int) -> Panels:
    """A unit in memory. Raises StoreError where it cannot be one of the level."""
    return OpenUnit(model, unit, level, n_features).read(unit.first, unit.last)


UnitTiles = Sequence[tuple[Unit, int]]  # units of a level, and their bytes in memory


@dataclass(frozen=True)
class Tile:
    """A unit in memory."""

    panels: Panels

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(part.nbytes for part in self.panels if isinstance(part, np.ndarray))


def edges_of(tiles: UnitTiles) -> NDArray[np.int64]:
    """Where the units of a level begin, and the last one ends: numbers of parents."""
    return np.array([unit.first for unit, _ in tiles] + [unit.last for unit, _ in tiles[-1:]])


def met(edges: NDArray[np.int64], parents: NDArray[np.int64]) -> list[int]:
    """Which units have some of the parents, which ascend."""
    found: list[int] = np.unique(np.searchsorted(edges, parents, side="right") - 1).tolist()
    return found


def shared_units(
    model: Path, level: Level, n_features: int, tiles: UnitTiles, parents: NDArray[np.int64], cache_bytes: int
) -> Iterator[Panels]:
    """Units of a level in turn, of those that have some of the parents, which the threads of a process share in memory.

    Of a unit that has few of them these are read alone.
    """
    cache, edges = shared_cache(cache_bytes), edges_of(tiles)
    counts = np.diff(np.searchsorted(parents, edges))
    for number in met(edges, parents):
        unit, size = tiles[number]
        if _MANY * counts[number] <= unit.last - unit.first:
            yield from OpenUnit(model, unit, level, n_features).met(parents)
            continue
        read = partial(read_unit, model, unit, level, n_features)
        with cache.use((str(model), unit), size, lambda read=read: Tile(read())) as tile:  # type: ignore[misc]
            yield tile.panels


def hash_unit(update: Callable[[Any], None], panels: Panels) -> None:
    """Hash what scores depend on."""
    for values in (panels.bits, panels.offsets, panels.records, panels.bias, panels.scale):
        update(values.data)
