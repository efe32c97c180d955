"""Bounds on the scores of a tile's classes, by which prediction leaves out classes that cannot be among the best.

For each row x, w_k . x + b_k <= ||w_k|| ||x|| + b_k (Cauchy-Schwarz). Classes are put in the order of this bound for
||x|| = 1, so that those that may be among the best stand in front. That pays where rows and weights are dense: there the
front of a tile can be scored alone. Rounding is allowed for: the best k are the very ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.ranking import LANES
from xmc_stream.linear.kernels.denserows import MOST_FEATURES
from xmc_stream.linear.kernels.scores import NO_BOUNDS, Bounds, Tile
from xmc_stream.linear.kernels.topk import LEAD
from xmc_stream.linear.tiles import TileRange, full_bytes, make_tile, tile_width

_ROUNDED = 2e-3  # of what is bounded: a sum of MOST_FEATURES products is rounded by less
_CLASS_BYTES = 10
_NEVER_APART = 128  # slots: features whose weights begin a multiple of 512 bytes apart share a few sets of a cache


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
