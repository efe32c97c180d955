"""Dense class vectors and their codes: signs of projections, Hamming distances, and candidates scored exactly.

Neyshabur and Srebro 2015: P(w) = [w / m; sqrt(1 - ||w||^2 / m^2)] and Q(x) = [x; 0] have inner products that go with w.x.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.instructions import LANES, WORD, at_most, popcount, prefetch, product
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.mips.kernels.innerproducts import Best, offer

_AHEAD, _LINE = 4, 16  # candidates that vectors are fetched ahead of, floats of a cache line
_FAR = 255
_MOST = 254  # greater distances, of 256 bits, count as this one
TOGETHER = 8  # queries that share a look at the codes
_PORTION = 1024  # codes that they look at in turn


class Codes(NamedTuple):
    """Dense vectors (K, r), their codes (words, K) and which of them are zero (K,)."""

    vectors: NDArray[np.float32]
    codes: NDArray[np.uint64]
    zero: NDArray[np.bool_]


@kernel
def add_dense(
    classes: NDArray[np.int32], lines: NDArray[np.int32], steps: NDArray[np.float32], rows: NDArray[np.float32],
    vectors: NDArray[np.float32],
) -> None:  # fmt: skip
    """w_c += a x_i for each (c, i, a), in their order."""
    for t in range(len(classes)):
        c, i, a = classes[t], lines[t], steps[t]
        for j in range(vectors.shape[1]):
            vectors[c, j] += a * rows[i, j]


@kernel
def sum_squares(classes: NDArray[np.int32], vectors: NDArray[np.float32], squares: NDArray[np.float64]) -> None:
    """||w_c||^2 in float64, in the order of the coordinates."""
    for c in classes:
        total = 0.0
        for j in range(vectors.shape[1]):
            total += np.float64(vectors[c, j]) * np.float64(vectors[c, j])
        squares[c] = total


@kernel
def encode(
    lines: NDArray[np.int32],
    vectors: NDArray[np.float32],
    scale: np.float32,
    last: NDArray[np.float32],
    projections: NDArray[np.float32],
    sums: NDArray[np.float32],
    codes: NDArray[np.uint64],
) -> None:
    """codes[:, l]: bit b is the sign of projections[:, b] . [scale v_l; last_l], for the lines l of vectors (n, r).

    codes (words, n); projections (r + 1, bits); sums (bits,): room. Sums in float32, in the order of the coordinates.
    """
    r, bits = projections.shape[0] - 1, projections.shape[1]
    for i in range(len(lines)):
        line = lines[i]
        sums[:] = 0.0
        for j in range(r):
            x = scale * vectors[line, j]
            for b in range(bits):
                sums[b] += x * projections[j, b]
        for b in range(bits):
            sums[b] += last[i] * projections[r, b]
        for word in range(len(codes)):
            code = np.uint64(0)
            for b in range(min(64, bits - 64 * word)):
                if sums[64 * word + b] >= 0.0:
                    code |= np.uint64(1) << np.uint64(b)
            codes[word, line] = code


@inner_kernel
def _measure(first: int, last: int, queries: NDArray[np.uint64], of: Codes, out: NDArray[np.uint8]) -> None:
    """out: the Hamming distances of some queries to each class, 254 at most; zero vectors are far."""
    codes, n = of.codes, len(of.zero)
    for begin in range(0, n, _PORTION):  # its codes stay in the first-level cache
        end = min(begin + _PORTION, n)
        zero = of.zero[begin:end]
        for i in range(first, last):
            distances = out[i - first, begin:end]
            for word in range(len(codes)):
                some, query = codes[word, begin:end], queries[word, i]
                for c in range(len(distances)):
                    distance = np.uint8(popcount(some[c] ^ query))
                    distances[c] = (
                        distance if word == 0 else distances[c] + min(distance, np.uint8(_MOST - distances[c]))
                    )
            for c in range(len(distances)):
                distances[c] = _FAR if zero[c] else distances[c]


@inner_kernel
def _within(limit: int, distances: NDArray[np.uint8]) -> int:
    """How many classes are no farther."""
    n = 0
    for at in range(0, len(distances), WORD):
        n += popcount(at_most(distances, at, np.uint8(limit)))
    return n


@inner_kernel
def _nearest(n: int, most: int, distances: NDArray[np.uint8], candidates: NDArray[np.int32]) -> int:
    """Up to n classes of the least distance, of equals the lower ones; returns how many.

    The distance that they end at is found by bisection: counting takes 64 classes at a time, a table of counts would not.
    """
    far, end = 0, most + 1  # the least distance that takes more than n
    while far < end:
        middle = (far + end) // 2
        if _within(middle, distances) <= n:
            far = middle + 1
        else:
            end = middle
    found, rest = 0, n - _within(far - 1, distances) if far else n
    for at in range(0, len(distances), WORD):
        near = at_most(distances, at, np.uint8(min(far, most)))
        while near:
            c = at + popcount(~near & (near - np.uint64(1)))
            near &= near - np.uint64(1)
            if distances[c] == far:
                rest -= 1
                if rest < 0:
                    continue
            candidates[found] = c
            found += 1
    return found


@kernel
def nearest_scored(
    first: int,
    last: int,
    rows: NDArray[np.float32],
    queries: NDArray[np.uint64],
    n: int,
    hubs: NDArray[np.int32],
    of: Codes,
    excluded: Labels,
    best: Best,
) -> None:
    """The best of the n classes nearest by code and of the hubs, beside those excluded, for the rows [first, last).

    Codes that differ in 254 bits or more are equally far. A score is the sum of `vectors.product`, then what the last
    coordinates add, in float32. Of equals the lower class. It holds TOGETHER + 4 bytes for each class.
    """
    vectors, queried, r, n_classes = of.vectors.ravel(), rows.ravel(), rows.shape[1], len(of.zero)
    in_lanes, candidates = r - r % LANES, np.empty(n_classes, np.int32)
    distances = np.full((TOGETHER, -(-n_classes // WORD) * WORD), np.uint8(_FAR))  # some more, which are far
    for i in range(first, last):
        n_excluded, at = excluded.indptr[i + 1] - excluded.indptr[i], (i - first) % TOGETHER
        if at == 0:
            _measure(i, min(i + TOGETHER, last), queries, of, distances)
        found = _nearest(n + n_excluded, min(WORD * len(queries), _MOST), distances[at], candidates)
        for q in range(-len(hubs), found):
            c = np.int64(candidates[q] if q >= 0 else hubs[q])
            for ahead in range(0, r if 0 <= q + _AHEAD < found else 0, _LINE):
                prefetch(vectors, candidates[q + _AHEAD] * r + ahead)
            score = product(vectors, c * r, queried, i * r, in_lanes)
            for j in range(in_lanes, r):
                score += vectors[c * r + j] * queried[i * r + j]
            offer(c, score, i, excluded, best)
