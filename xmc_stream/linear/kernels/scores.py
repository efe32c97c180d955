"""Scores of samples for up to 1,024 classes at once.

A tile holds the weights of its classes by feature: for feature j the entries [start[j], start[j + 1]) of `slots`
(which class) and `weights`. Where the run is as long as the tile is wide, it is a dense row: one weight a class, zeros
included. A row's scores (4 kB) stay in the first-level cache. Weights are float32, or of 16 bits (`linear.kernels.narrow`).

Every score is bias + x_1 w_1 + x_2 w_2 + ... in float32, multiplied and added in the order of the row's features. A zero
weight of a dense row adds nothing, so dense and sparse rows give the same bits.

A row whose features few classes of the tile have is scored for these alone; all others score their bias, and what that
means is known beforehand. With 10^6 classes nearly all rows are so for nearly all tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import prefetch, widen
from xmc_stream.kernels.jit import inner_kernel, kernel

DENSE_SHARE = 4  # a feature is stored dense when at least 1/4 of the tile's classes have it: see docs/architecture.md

FEW = 4  # a row is scored for the classes that its features meet where they meet at most 1/4 of the tile, see `met`

_AHEAD = 256  # weights of the next feature that are fetched while those of one are added
_LINE = 64  # bytes of a cache line


class Tile(NamedTuple):
    """Weights of up to 1,024 classes by feature, as above; bias (width,), -inf beyond the classes."""

    start: NDArray[Any]
    slots: NDArray[np.uint16]
    weights: NDArray[Any]
    bias: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.start.nbytes + self.slots.nbytes + self.weights.nbytes + self.bias.nbytes


class Bounds(NamedTuple):
    """What no score of a tile's slots exceeds: of slot s, highest[s] + longest[s] (||x|| - 1)_+ for a row x.

    Neither rises from slot to slot. order: slot s has class first + order[s] of the tile. All are of no length where slots
    have their classes in turn and nothing is known of them, as of calibrated scores.
    """

    order: NDArray[np.uint16]
    highest: NDArray[np.float32]
    longest: NDArray[np.float32]


NO_BOUNDS = Bounds(np.empty(0, np.uint16), np.empty(0, np.float32), np.empty(0, np.float32))


class TileClasses(NamedTuple):
    """The classes first, first + 1, ... first + n - 1 of a tile, and what scoring them needs.

    by: what the scores are calibrated by, see `kernels.calibration`. groups (R, n): of each class, by clustering; (0, 0)
    where no groups of labels are asked, see `linear.kernels.guide`. bounds: on the scores, where the slots are in their order.
    scores (width,): scratch.
    """

    first: int
    n: int
    tile: Tile
    by: NDArray[np.float32]
    groups: NDArray[np.uint8]
    bounds: Bounds
    scores: NDArray[np.float32]


@kernel
def lay_out(features: NDArray[Any], width: int, start: NDArray[Any]) -> int:
    """Where each feature's weights begin, from the features of all weights; returns how many places all of them take.

    start (D + 1,) int32 or int64 is overwritten; where the length does not fit its type, with nonsense.
    """
    start[:] = 0
    for p in range(len(features)):
        start[features[p] + 1] += 1
    total = np.int64(0)
    for j in range(1, len(start)):
        count = np.int64(start[j])
        total += width if count * DENSE_SHARE >= width else count
        start[j] = total
    return int(total)


@kernel
def fill(
    indptr: NDArray[np.int64],
    features: NDArray[Any],
    values: NDArray[Any],
    width: int,
    start: NDArray[Any],
    cursor: NDArray[np.int32],
    slot_of: NDArray[np.uint16],
    slots: NDArray[np.uint16],
    weights: NDArray[Any],
) -> None:
    """Put the weights of the classes (CSC: class c has entries [indptr[c], indptr[c + 1])) into the places laid out.

    slot_of (classes,): their slots. cursor (D,) int32 is scratch; weights must be zero.
    """
    cursor[:] = 0
    for c in range(len(indptr) - 1):
        s = slot_of[c]
        for p in range(indptr[c], indptr[c + 1]):
            j = features[p]
            if start[j + 1] - start[j] == width:
                weights[start[j] + s] = values[p]
            else:
                q = start[j] + cursor[j]
                cursor[j] += 1
                slots[q] = s
                weights[q] = values[p]


@inner_kernel
def met(first: int, last: int, indices: NDArray[Any], start: NDArray[Any], most: int) -> int:
    """Weights that the entries [first, last) of a row meet in a tile, if they are at most so many; else more than that."""
    total = 0
    for p in range(first, last):
        j = indices[p]
        total += int(start[j + 1]) - int(start[j])
        if total > most:
            break
    return total


@inner_kernel
def score_few(
    first: int,
    last: int,
    indices: NDArray[Any],
    data: NDArray[np.float32],
    start: NDArray[Any],
    slots: NDArray[np.uint16],
    weights: NDArray[Any],
    bias: NDArray[np.float32],
    scores: NDArray[np.float32],
    mark: int,
    marks: NDArray[np.int32],
    touched: NDArray[np.uint16],
) -> int:
    """scores of the slots that a row's entries meet, none of them in a dense row; returns how many.

    They are put into `touched`, and their marks made `mark`.
    """
    n = 0
    for p in range(first, last):
        j = indices[p]
        x = data[p]
        for q in range(start[j], start[j + 1]):
            s = slots[q]
            if marks[s] != mark:
                marks[s] = mark
                scores[s] = bias[s]
                touched[n] = s
                n += 1
            scores[s] += x * widen(weights[q])
    return n


@inner_kernel
def score_all(
    first: int,
    last: int,
    indices: NDArray[Any],
    data: NDArray[np.float32],
    start: NDArray[Any],
    slots: NDArray[np.uint16],
    weights: NDArray[Any],
    bias: NDArray[np.float32],
    scores: NDArray[np.float32],
) -> None:
    """scores (width,) of the row with entries [first, last). The next run is fetched while one is added."""
    width = len(scores)
    for c in range(width):
        scores[c] = bias[c]
    for p in range(first, last):
        j = indices[p]
        x = data[p]
        begin = start[j]
        n = start[j + 1] - begin
        if p + 1 < last:  # the next run's begin: within a run the processor sees by itself what comes
            following = int(start[indices[p + 1]])
            length = int(start[indices[p + 1] + 1]) - following
            count = min(length, _AHEAD)
            for q in range(following, following + count, _LINE // weights.itemsize):
                prefetch(weights, q)
            if length < width:
                for q in range(following, following + count, _LINE // slots.itemsize):
                    prefetch(slots, q)
        run = weights[begin : begin + n]
        if n == width:
            for c in range(width):
                scores[c] += x * widen(run[c])
        else:
            where = slots[begin : begin + n]
            for q in range(n):
                scores[where[q]] += x * widen(run[q])
