"""What approximate searches score with: large weights, weights drawn (Yen et al. 2017, Algorithm 3), or large entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import WEIGHT_DRAWS
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, uniform

_BINS = 128  # of weights by size: eight of each power of two
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 but the sign: ordered as the absolute values are
_20 = np.uint32(20)  # of these, those that a bin does not look at


@kernel
def sparsify(
    indptr: NDArray[np.int64],
    features: NDArray[Any],
    values: NDArray[np.float32],
    labels: NDArray[np.int64],
    seed: int,
    round_: int,
    delta: float,
) -> int:
    """Replace each class's weights by R = ceil(2 ||w||_1^2 / delta^2) draws of them, in place; returns what remains.

    w~_j = (||w||_1 / R) * signed count of j, so that E w~ = w. Draw r falls on the weight that holds the place
    (r + u_r) ||w||_1 / R on the line of all |w_j| in turn, u_r uniform: one draw from each of R equal parts, which has
    less variance than R draws from the whole and comes out sorted. A class with R >= nnz(w) keeps w itself.

    indptr (n + 1,) from 0, features, values: a CSC triple, all closed up. labels (n,): which classes, for the key.
    """
    filled = 0
    begin = indptr[0]
    for c in range(len(labels)):
        end = indptr[c + 1]
        total = 0.0
        for p in range(begin, end):
            total += abs(np.float64(values[p]))
        draws = np.ceil(2.0 * total * total / (delta * delta))
        if not draws < end - begin:
            for p in range(begin, end):
                features[filled], values[filled] = features[p], values[p]
                filled += 1
        else:
            step = total / draws
            key = key_of(seed, labels[c], round_, WEIGHT_DRAWS)
            r = 0
            place = uniform(key, 0) * step
            reached = 0.0
            for p in range(begin, end):
                reached += abs(np.float64(values[p]))
                count = 0
                # rounding may leave the last place a hair beyond the end
                while r < draws and (place < reached or p == end - 1):
                    count += 1
                    r += 1
                    place = (r + uniform(key, r)) * step
                if count:
                    w = np.float32(count * step)
                    features[filled], values[filled] = features[p], w if values[p] > 0 else -w
                    filled += 1
        begin = end
        indptr[c + 1] = filled
    return filled


@kernel
def cut_small(indptr: NDArray[np.int64], features: NDArray[Any], values: NDArray[np.float32], share: float) -> int:
    """Leave out each class's smallest weights, whose norm is at most share (< 1) times that of all; returns what remains.

    In place. Weights are binned by size, eight bins to a power of two, and the bins of the smallest left out. So a class
    keeps those of its largest bin, and what it keeps depends on its own weights alone.

    indptr (n + 1,) from 0, features, values: a CSC triple, all closed up.
    """
    bits = values.view(np.uint32)
    squares = np.zeros(_BINS)
    filled = 0
    begin = indptr[0]
    for c in range(len(indptr) - 1):
        end = indptr[c + 1]
        top = np.uint32(0)
        for p in range(begin, end):
            top = max(top, bits[p] & _SIZE)
        largest = int(np.int64(top >> _20))
        squares[:] = 0.0
        total = 0.0
        for p in range(begin, end):
            square = np.float64(values[p]) * np.float64(values[p])
            squares[min(largest - int(np.int64((bits[p] & _SIZE) >> _20)), _BINS - 1)] += square
            total += square
        room = share * share * total
        last = _BINS - 1  # of the bins that are kept
        while last > 0 and squares[last] <= room:
            room -= squares[last]
            last -= 1
        least = largest - last if last < _BINS - 1 else 0
        for p in range(begin, end):
            if np.int64((bits[p] & _SIZE) >> _20) >= least:
                features[filled], values[filled] = features[p], values[p]
                filled += 1
        begin = end
        indptr[c + 1] = filled
    return filled


@kernel
def keep_large(indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32], least: float) -> int:
    """Close rows up over their entries of |x| <= least, in place; returns how many entries remain."""
    filled = 0
    begin = indptr[0]
    for i in range(len(indptr) - 1):
        end = indptr[i + 1]
        for p in range(begin, end):
            if abs(np.float64(data[p])) > least:
                indices[filled], data[filled] = indices[p], data[p]
                filled += 1
        begin = end
        indptr[i + 1] = filled
    return filled


@kernel
def count_work(entries: NDArray[np.int32], start: NDArray[np.int32], weights: NDArray[np.float32], width: int) -> int:
    """Multiply-adds of entries[j] entries of each feature j with a tile's non-zero weights (see `linear.kernels.scores`)."""
    total = np.int64(0)
    for j in range(len(entries)):
        if entries[j]:
            begin, end = start[j], start[j + 1]
            n = np.int64(end - begin)
            if n == width:
                n = np.int64(0)
                for q in range(begin, end):
                    n += weights[q] != 0.0
            total += n * entries[j]
    return int(total)
