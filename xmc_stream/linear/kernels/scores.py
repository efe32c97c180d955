"""Scores of samples for up to 1,024 classes at once.

A tile holds the weights of its classes by feature: for feature j the entries [start[j], start[j + 1]) of `slots`
(which class) and `weights`. Where the run is as long as the tile is wide, it is a dense row: one weight a class, zeros
included. A row's scores (4 kB) stay in the first-level cache. Weights are float32, or of 16 bits (`narrow`).

Every score is bias + x_1 w_1 + x_2 w_2 + ... in float32, multiplied and added in the order of the row's features. A zero
weight of a dense row adds nothing, so dense and sparse rows give the same bits.

A row whose features few classes of the tile have is scored for these alone; all others score their bias, and what that
means is known beforehand. With 10^6 classes nearly all rows are so for nearly all tiles.

Rows that have most features are scored four at a time: a tile is larger than the second-level cache, and a row that has
every feature reads all of it, so that the sums wait for memory. Each weight is fetched once for four rows, and each score
once for four features. Each score is the sum that `score_all` has, in its order: a feature that a row does not have adds
zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.instructions import prefetch, widen
from xmc_stream.kernels.jit import inner_kernel, kernel

DENSE_SHARE = 4  # a feature is stored dense when at least 1/4 of the tile's classes have it: see docs/architecture.md
FEW = 4  # a row is scored for the classes that its features meet where they meet at most 1/4 of the tile, see `met`
_AHEAD = 256  # weights of the next feature that are fetched while those of one are added
_LINE = 64  # bytes of a cache line
TOGETHER = 4  # rows, and features
MOST_FEATURES = 1 << 14
_SHARE = 2  # rows have most features where they have one in so many, on average
_CHUNK = 128  # rows that are scored at a time, at most: their scores stay in the second-level cache
_LINES = 1 << 17  # their values, which stay there too
_WIDEST = 1024 + 32  # slots of a tile
_APART = 32  # places between the scores of one row and the next: rows 4 KiB apart would share a few lines of the cache
_INFINITE = np.uint32(0x7F80)  # the upper half of infinity; what is below is finite
_SIGN, _SIZE = np.uint32(0x8000), np.uint32(0x7FFF)


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


@kernel
def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite weights of 16 bits in the first half of the bytes of `values`, which are overwritten.

    A weight of 16 bits is the upper half of a float32, rounded to nearest, ties to even (known as bfloat16). It has the
    range of a float32 and errs by at most 2^-9 of itself. It is widened by a shift, in the loop that multiplies by it:
    what is saved is the bytes that the loop waits for. The largest weights become the largest number of 16 bits, not
    infinity.
    """
    bits, halves = values.view(np.uint32), values.view(np.uint16)
    for p in range(len(values)):
        word = bits[p]
        half = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if half & _SIZE == _INFINITE:
            half = (half & _SIGN) | (_INFINITE - np.uint32(1))
        halves[p] = half
    return halves[: len(values)]


def in_fours(n_rows: int, n_features: int, nnz: int) -> bool:
    """Whether rows with nnz entries together are scored four at a time."""
    return n_features <= MOST_FEATURES and nnz * _SHARE >= n_rows * n_features


def _chunk_rows(n_features: int) -> int:
    return max(TOGETHER, min(_CHUNK, _LINES // max(n_features, 1) // TOGETHER * TOGETHER))


def chunk_bytes(n_features: int) -> int:
    """What scoring rows of so many features takes, if they may be scored four at a time."""
    return 4 * _chunk_rows(n_features) * (_WIDEST + _APART + n_features) if n_features <= MOST_FEATURES else 0


def chunks(
    x: CSR, n_features: int, width: int, fours: bool
) -> Iterator[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]]:
    """Rows [low, high) at a time, their lines, and room for their scores for a tile (rows, width or more).

    lines (n / 4, D, 4): value j of row low + 4 q + r is [q, j, r]. Of rows that are not scored four at a time (what is left
    over, or all) there are no lines, and there is no room.
    """
    n_rows = len(x.indptr) - 1
    in_lines = n_rows // TOGETHER * TOGETHER if fours else 0
    step = _chunk_rows(n_features)
    n = min(step, in_lines)
    lines, scores = (
        np.empty((n // TOGETHER, n_features, TOGETHER), np.float32),
        np.empty((n, width + _APART), np.float32),
    )
    for low in range(0, in_lines, step):
        high = min(low + step, in_lines)
        mine = lines[: (high - low) // TOGETHER]
        _unpack(CSR(x.indptr[low : high + 1], x.indices, x.values), mine)
        yield low, high, mine, scores[: high - low]
    if in_lines < n_rows:
        yield in_lines, n_rows, lines[:0], scores[:0]


@kernel
def _unpack(x: CSR, lines: NDArray[np.float32]) -> None:
    """Values of rows by line, see `chunks`."""
    indptr, indices, values = x
    lines[:] = 0.0
    for i in range(len(indptr) - 1):
        line, r = lines[i // TOGETHER], i % TOGETHER
        for p in range(indptr[i], indptr[i + 1]):
            line[indices[p], r] = values[p]


@inner_kernel
def _add_four(
    weights: NDArray[Any],
    start: NDArray[Any],
    low: int,
    features: NDArray[np.int64],
    line: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    d: NDArray[np.float32],
) -> None:
    """Scores a, b, c, d of four rows, slots from `low` on, += their values times weights, of four features in turn."""
    n = len(a)
    j0, j1, j2, j3 = features[0], features[1], features[2], features[3]
    at0, at1, at2, at3 = start[j0] + low, start[j1] + low, start[j2] + low, start[j3] + low
    v0, v1, v2, v3 = weights[at0 : at0 + n], weights[at1 : at1 + n], weights[at2 : at2 + n], weights[at3 : at3 + n]
    a0, b0, c0, d0 = line[j0, 0], line[j0, 1], line[j0, 2], line[j0, 3]
    a1, b1, c1, d1 = line[j1, 0], line[j1, 1], line[j1, 2], line[j1, 3]
    a2, b2, c2, d2 = line[j2, 0], line[j2, 1], line[j2, 2], line[j2, 3]
    a3, b3, c3, d3 = line[j3, 0], line[j3, 1], line[j3, 2], line[j3, 3]
    for s in range(n):
        w0, w1, w2, w3 = widen(v0[s]), widen(v1[s]), widen(v2[s]), widen(v3[s])
        a[s] = (((a[s] + a0 * w0) + a1 * w1) + a2 * w2) + a3 * w3
        b[s] = (((b[s] + b0 * w0) + b1 * w1) + b2 * w2) + b3 * w3
        c[s] = (((c[s] + c0 * w0) + c1 * w1) + c2 * w2) + c3 * w3
        d[s] = (((d[s] + d0 * w0) + d1 * w1) + d2 * w2) + d3 * w3


@kernel
def _add_waiting(
    weights: NDArray[Any],
    start: NDArray[Any],
    low: int,
    features: NDArray[np.int64],
    line: NDArray[np.float32],
    of_four: NDArray[np.float32],
    high: int,
) -> None:
    """The same for fewer than four features."""
    for j in features:
        run = weights[start[j] + low : start[j] + high]
        for r in range(TOGETHER):
            x, scores = line[j, r], of_four[r, low:high]
            for s in range(len(scores)):
                scores[s] += x * widen(run[s])


@kernel
def score_fours(
    lines: NDArray[np.float32], tile: Tile, low: int, ends: NDArray[np.int64], scores: NDArray[np.float32]
) -> None:
    """scores[4 q + r, s] of the rows of `lines`, see `chunks`, for the slots s from `low` to ends[q]."""
    start, slots, weights, bias = tile
    width, features = len(bias), np.zeros(TOGETHER, np.int64)
    for q in range(len(lines)):
        line, high = lines[q], ends[q]
        if high <= low:
            continue
        of_four = scores[TOGETHER * q : TOGETHER * (q + 1)]
        a, b, c, d = of_four[0, low:high], of_four[1, low:high], of_four[2, low:high], of_four[3, low:high]
        for r in range(TOGETHER):
            of_four[r, low:high] = bias[low:high]
        waiting = 0  # features whose weights are a dense row that is not added yet
        for j in range(len(line)):
            begin, n = start[j], start[j + 1] - start[j]
            if n == width:
                features[waiting] = j
                waiting += 1
                if waiting == TOGETHER:
                    _add_four(weights, start, low, features, line, a, b, c, d)
                    waiting = 0
            elif n:  # what comes before is added before
                _add_waiting(weights, start, low, features[:waiting], line, of_four, high)
                waiting = 0
                for p in range(begin, begin + n):
                    if low <= slots[p] < high:
                        for r in range(TOGETHER):
                            of_four[r, slots[p]] += line[j, r] * widen(weights[p])
        _add_waiting(weights, start, low, features[:waiting], line, of_four, high)
