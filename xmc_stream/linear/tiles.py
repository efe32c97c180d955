"""Tiles of weights: the ranges of classes that may be one, their exact sizes, how they are laid out, and their bounds.

Bounds on the scores of a tile's classes let prediction leave out those that cannot be among the best. For each row x,
w_k . x + b_k <= ||w_k|| ||x|| + b_k (Cauchy-Schwarz). Classes are put in the order of this bound for ||x|| = 1, so that
those that may be among the best stand in front. That pays where rows and weights are dense: there the front of a tile can
be scored alone. Rounding is allowed for: the best k are the very ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.ranking import LANES
from xmc_stream.linear.kernels.scores import DENSE_SHARE, MOST_FEATURES, NO_BOUNDS, Bounds, Tile, fill, lay_out, narrow
from xmc_stream.linear.kernels.topk import LEAD
from xmc_stream.store.model import UNIT

EIGHTH = UNIT // 8  # of a unit's classes
_FEW = 16  # one in so many features, counted through, is listed
ENTRY_BYTES = 6  # a weight and its slot
_MOST_PLACES = np.iinfo(np.int32).max  # that are numbered in four bytes
_ROUNDED = 2e-3  # of what is bounded: a sum of MOST_FEATURES products is rounded by less
_CLASS_BYTES = 10  # of bounds
_NEVER_APART = 128  # slots: features whose weights begin a multiple of 512 bytes apart share a few sets of a cache


def tile_width(n_classes: int) -> int:
    """Slots of a tile: the classes rounded up to full lanes."""
    return -(-n_classes // LANES) * LANES


def tile_bytes(feature_counts: NDArray[Any], n_classes: int, n_features: int) -> int:
    """Exact bytes of a tile whose features occur in so many of its classes; those that do not may be left out."""
    width = tile_width(n_classes)
    dense = feature_counts[feature_counts >= -(-width // DENSE_SHARE)]
    n_entries = feature_counts.sum(dtype=np.int64) - dense.sum(dtype=np.int64) + width * len(dense)
    return _bytes(int(n_entries), width, n_features)


def _bytes(n_entries: int, width: int, n_features: int, of_entry: int = ENTRY_BYTES) -> int:
    return n_entries * of_entry + _place_type(n_entries).itemsize * (n_features + 1) + 4 * width


def full_bytes(width: int, n_features: int) -> int:
    """Bytes of a tile that has a weight for each class and feature, and no slots.

    Where that is no more than with the slots of those that are not zero, a tile is made so.
    """
    return _bytes(width * n_features, width, n_features, 4)


def _place_type(n_entries: int) -> np.dtype[np.signedinteger[Any]]:
    """Of the places in a tile with so many entries; a compiled search knows both."""
    return np.dtype(np.int32 if n_entries <= _MOST_PLACES else np.int64)


def make_tile(
    indptr: NDArray[np.int64],
    features: NDArray[Any],
    values: NDArray[np.float32],
    bias: NDArray[np.float32],
    n_features: int,
    narrowed: bool = False,
    order: NDArray[Any] | None = None,
    spare: int = 0,
) -> Tile:
    """A tile of the classes of a CSC triple (indptr from 0), in that order; or a full one, whose slot s has class order[s].

    narrowed: with weights of 16 bits; `values` are overwritten then. spare: slots beyond whole lanes.
    """
    width = tile_width(len(bias)) + spare
    slot_of = np.arange(len(bias), dtype=np.uint16)
    if order is not None:
        slot_of[order] = slot_of.copy()
    start: NDArray[Any] = np.empty(n_features + 1, np.int32)
    total = n_slots = lay_out(features, width, start)
    if order is not None or full_bytes(width, n_features) <= _bytes(total, width, n_features):
        total, n_slots = width * n_features, 0
        start = width * np.arange(n_features + 1, dtype=_place_type(total))
    elif _place_type(total) != start.dtype:
        start = np.empty(n_features + 1, np.int64)
        lay_out(features, width, start)
    slots = np.zeros(n_slots, np.uint16)
    of_type: NDArray[Any] = narrow(values) if narrowed else values
    weights = np.zeros(total, of_type.dtype)
    fill(indptr, features, of_type, width, start, np.empty(n_features, np.int32), slot_of, slots, weights)
    padded = np.full(width, -np.inf, np.float32)
    padded[slot_of] = bias
    return Tile(start, slots, weights, padded)


@dataclass(frozen=True)
class TileRange:
    """Classes [first, last) of one unit that a tile may hold, the bytes of their tile and their weights."""

    first: int
    last: int
    tile: int
    weights: int


class BoundedTile(NamedTuple):
    """A tile, and what its slots score at most."""

    tile: Tile
    bounds: Bounds

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.tile.nbytes + sum(array.nbytes for array in self.bounds)


def has_bounds(span: TileRange, n_features: int) -> bool:
    """Whether the tile of a range has some: one that takes no more room with all weights, and is made so."""
    n = span.last - span.first
    return n > LEAD and n_features <= MOST_FEATURES and full_bytes(tile_width(n), n_features) <= span.tile


def bounds_bytes(spans: Iterable[TileRange], n_features: int) -> int:
    """Of the bounds of the tiles of some ranges."""
    of_spare = 4 * (n_features + 1)
    return sum(
        _CLASS_BYTES * (span.last - span.first) + of_spare * _spare(span)
        for span in spans
        if has_bounds(span, n_features)
    )


def _spare(span: TileRange) -> int:
    """Slots that keep the weights of a feature from falling into the lines of the cache that those of the next need."""
    return LANES if tile_width(span.last - span.first) % _NEVER_APART == 0 else 0


def bounds_of(indptr: NDArray[np.int64], values: NDArray[np.float32], bias: NDArray[np.float32]) -> Bounds:
    """Of classes whose weights are values[indptr[c] : indptr[c + 1]]."""
    of_classes = (values[low:high].astype(np.float64) for low, high in itertools.pairwise(indptr))
    lengths = np.sqrt([np.dot(w, w) for w in of_classes]) * (1.0 + _ROUNDED)
    highest = bias + lengths + _ROUNDED * (1.0 + np.abs(bias, where=np.isfinite(bias), out=np.zeros(len(bias))))
    order = np.argsort(-highest, kind="stable")
    longest = np.maximum.accumulate(lengths[order][::-1])[::-1]
    up = np.float32(1.0 + _ROUNDED)  # ||x|| - 1 is rounded, too
    return Bounds(order.astype(np.uint16), highest[order].astype(np.float32), longest.astype(np.float32) * up)


def make_bounded(
    span: TileRange,
    indptr: NDArray[np.int64],
    features: NDArray[np.int32],
    values: NDArray[np.float32],
    bias: NDArray[np.float32],
    n_features: int,
) -> BoundedTile:
    """The tile of a range from its classes (CSC, indptr from 0), with bounds where it has some."""
    if not has_bounds(span, n_features):
        return BoundedTile(make_tile(indptr, features, values, bias, n_features), NO_BOUNDS)
    bounds = bounds_of(indptr, values, bias)
    tile = make_tile(indptr, features, values, bias, n_features, order=bounds.order, spare=_spare(span))
    return BoundedTile(tile, bounds)


class _FeatureCounts:
    """How often each feature occurs: while few have come, they are listed, so that what is done does not grow with D."""

    def __init__(self, n_features: int) -> None:
        self._n_features = n_features
        self._few: list[NDArray[Any]] = []
        self._room = n_features // _FEW
        self._all: NDArray[np.int32] | None = None

    def add(self, features: NDArray[Any]) -> None:
        """Features that occur, each as often as it does."""
        self._room -= len(features)
        if self._room >= 0:
            self._few.append(features.copy())
        else:
            count_indices(features, self._every())

    def merge(self, other: _FeatureCounts) -> None:
        """Add what another one has counted."""
        for features in other._few:
            self.add(features)
        if other._all is not None:
            self._room = -1
            self._every()[:] += other._all

    def _every(self) -> NDArray[np.int32]:
        if self._all is None:
            self._all = np.zeros(self._n_features, np.int32)
        for features in self._few:
            count_indices(features, self._all)
        self._few.clear()
        return self._all

    def counted(self) -> tuple[NDArray[Any] | slice, NDArray[Any]]:
        """Some features, all that occur among them, and how often each of them does."""
        if self._all is not None:
            return slice(None), self._all
        return np.unique(np.concatenate([np.zeros(0, np.int32), *self._few]), return_counts=True)


class TileSizes:
    """Exact sizes of the tiles of a unit and of its halves, quarters and eighths, counted as weights come by class.

    Of several units in turn, where there are more classes.

    step: classes of an eighth. in_tiles: of each class of the unit, whether a tile holds it; to be filled in before its
    weights come. occurrences (D,): entries of each feature in X; work is then the multiply-adds of scoring all of them.
    """

    def __init__(
        self, first: int, last: int, n_features: int, occurrences: NDArray[np.int64] | None = None, step: int = EIGHTH
    ) -> None:
        self._step = step
        self._occurrences = occurrences
        self.work = 0
        self._first, self._last, self.next = first, last, first
        self.in_tiles = np.ones(last - first, np.bool_)
        self._n_features = n_features
        self._counts = [_FeatureCounts(n_features) for _ in range(4)]  # in the present range of each size
        self._classes = [0, 0, 0, 0]
        self.ranges: list[TileRange] = []  # those that hold any class, the smaller ones first

    def add(self, lengths: NDArray[np.int64], features: NDArray[Any]) -> None:
        """The next classes, all in tiles or none, but for such without weights: how many each has, and their features."""
        ends = np.concatenate([[0], np.cumsum(lengths)])
        done = 0
        while done < len(lengths):
            at = self.next - self._first
            n = min(len(lengths) - done, self._step - at % self._step)
            mine = self.in_tiles[at : at + n]
            if mine.any():
                self._counts[0].add(features[ends[done] : ends[done + n]])
                self._classes[0] += int(mine.sum())
            done, self.next = done + n, self.next + n
            self._close_ranges()

    def _close_ranges(self) -> None:
        for level in range(4):
            size = self._step << level
            behind = self.next - self._first
            if behind % size and self.next != self._last:
                return
            counted, classes = self._counts[level], self._classes[level]
            if classes:
                features, counts = counted.counted()
                weights = int(counts.sum(dtype=np.int64))
                first = self._first + (behind - 1) // size * size
                self.ranges.append(TileRange(first, self.next, tile_bytes(counts, classes, self._n_features), weights))
                if level == 3 and self._occurrences is not None:
                    self.work += int(counts @ self._occurrences[features])
            if level < 3:
                self._counts[level + 1].merge(counted)
                self._classes[level + 1] += classes
            self._counts[level] = _FeatureCounts(self._n_features)
            self._classes[level] = 0


def widest(ranges: Iterable[TileRange], fits: Callable[[TileRange], bool]) -> list[TileRange]:
    """Ranges that hold every class once, in order, each as wide as fits; the narrowest where nothing fits."""
    chosen: list[TileRange] = []
    ordered = sorted(set(ranges), key=lambda span: (span.first - span.last, span.first))  # the widest first
    for span in ordered:
        if not any(_within(span, other) for other in chosen):
            narrowest = not any(other != span and _within(other, span) for other in ordered)
            if narrowest or fits(span):
                chosen.append(span)
    return sorted(chosen, key=lambda span: span.first)


def _within(span: TileRange, other: TileRange) -> bool:
    return other.first <= span.first and span.last <= other.last
