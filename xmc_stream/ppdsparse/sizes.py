"""What the next search needs of a unit: exact sizes of the tiles of its open classes, counted as weights come by class."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.tiles import EIGHTH, TileRange, TileSizes
from xmc_stream.linear.weights import Unit
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.search import fewer_weights
from xmc_stream.ppdsparse.state import UnitState, UnitStateWriter
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset

# rows of an interval of a search job, if it is not all of its rows
INTERVALS = tuple(4096 << k for k in range(0, 10, 2))


def held_rows(sizes: NDArray[Any]) -> list[int]:
    """How many rows some classes with so many rows hold at a time: for each of INTERVALS, and where an interval is all rows."""
    return [*(int(np.minimum(sizes, interval).sum()) for interval in INTERVALS), int(sizes.sum())]


@dataclass(frozen=True)
class SearchSize:
    """What a search needs for some classes of a unit: their tile; rows wanted, and of active sets, as `held_rows`."""

    span: TileRange
    wanted: Sequence[int]
    active: Sequence[int]


def search_tiles(unit: Unit, n_features: int, occurrences: NDArray[np.int64] | None = None) -> TileSizes:
    """Sizes of a unit's tiles for searches, which hold open classes alone: one tile is enough for a wide unit too."""
    return TileSizes(*unit, n_features, occurrences, EIGHTH * len(unit.numbers))


def search_sizes(
    spans: list[TileRange], first: int, heaps: NDArray[np.int64], sizes: NDArray[np.int64]
) -> list[list[Any]]:
    """For a receipt: what a search needs for each range of classes. heaps, sizes: of first, first + 1, ..."""
    needs = []
    for span in spans:
        mine = slice(span.first - first, span.last - first)
        needs.append([*astuple(span), held_rows(heaps[mine]), held_rows(sizes[mine])])
    return needs


def runs(values: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours that have the same value."""
    ends = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from itertools.pairwise(ends)


class NextSearch:
    """Counts the tiles of the search after a round, exact ones and those of the weights that an approximate search keeps.

    unit: whose classes come, all of them in turn. open_: which are open: those have a place in tiles.
    """

    def __init__(
        self, dataset: Dataset, problem: Problem, round_: int, unit: Unit, open_: NDArray[np.bool_]
    ) -> None:  # fmt: skip
        self._parameters, self._seed, self._round, self._first = problem.parameters, problem.seed, round_, unit.first
        p, d = problem.parameters, dataset.n_features
        self._tiles = search_tiles(unit, d, dataset.feature_counts() if p.approximate else None)
        self._tiles.in_tiles[:] = open_
        self._approximate: TileSizes | None = None
        if p.fewer_weights and (p.common_rounds is None or round_ + 1 < p.common_rounds):
            self._approximate = search_tiles(unit, d)
            self._approximate.in_tiles[:] = open_

    def count(self, counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32] | None) -> None:
        """The next classes: how many weights each has, their features and values; of classes that are done data is None.

        features and data are overwritten.
        """
        first = self._tiles.next
        self._tiles.add(counts, features)
        if self._approximate is None:
            return
        if data is not None:
            indptr = np.concatenate([[0], np.cumsum(counts)])
            labels = np.arange(first, first + len(counts))
            n = fewer_weights(indptr, features, data, labels, self._parameters, self._seed, self._round + 1)
            counts, features = np.diff(indptr), features[:n]
        self._approximate.add(counts, features)

    def count_solved(
        self, counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32], open_: NDArray[np.bool_]
    ) -> None:  # fmt: skip
        """The same, of which only now is said which are open."""
        at, ends = self._tiles.next - self._first, np.concatenate([[0], np.cumsum(counts)])
        for tiles in (self._tiles, self._approximate):
            if tiles is not None:
                tiles.in_tiles[at : at + len(open_)] = open_
        for low, high in runs(open_):
            mine = slice(ends[low], ends[high])
            self.count(counts[low:high], features[mine], data[mine] if open_[low] else None)

    def receipt(self, heaps: NDArray[np.int64], sizes: NDArray[np.int64]) -> Receipt:
        """For the receipt of a round: heaps, rows that the search may bring to each class; sizes, those of its active set."""
        told: Receipt = {"tile_ranges": search_sizes(self._tiles.ranges, self._first, heaps, sizes)}
        if self._parameters.approximate:
            told["work"] = self._tiles.work
        if self._approximate is not None:
            # fewer weights make the tile, but all of them are read for it
            pairs = zip(self._approximate.ranges, self._tiles.ranges, strict=True)
            spans = [replace(few, weights=of_all.weights) for few, of_all in pairs]
            told["approximate_ranges"] = search_sizes(spans, self._first, heaps, sizes)
        return told


class CountedWriter:
    """Writes the classes of a share into a state, in turn, and counts what the next search needs of them.

    search: None for a part of a unit: the job that joins the shares counts.
    """

    def __init__(self, writer: UnitStateWriter, search: NextSearch | None) -> None:
        self.writer, self.search, self.statistics = writer, search, writer.statistics

    def add_weights(
        self, counts: NDArray[np.int64], features: NDArray[np.int32], values: NDArray[np.float32], done: bool = False
    ) -> None:
        """The next classes: how many weights each has, their features and values. done: whether they are searched no more."""
        self.writer.weights.append(counts, features, values)
        if self.search is not None:
            self.search.count(counts, features, None if done else values)

    def copy_weights(self, state: UnitState, low: int, high: int, done: bool) -> None:
        """The weights of lines [low, high) of a state."""
        for w in state.weights.blocks(max(4 * MIB, 16 * state.weights.shape[0]), low, high):
            self.add_weights(np.diff(w.indptr), w.indices, w.values, done)

    def copy(self, state: UnitState, low: int, high: int, done: bool) -> None:
        """Lines [low, high) of a state: active sets and weights."""
        self.writer.active.copy(state.active, low, high)
        self.copy_weights(state, low, high, done)

    def add_empty(self, n: int) -> None:
        """Classes of which nothing is to be learned."""
        self.writer.active.append(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0))
        self.add_weights(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), done=True)
