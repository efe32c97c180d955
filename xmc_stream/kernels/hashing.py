"""Dense class vectors and their codes: signs of projections, Hamming distances, and candidates scored exactly.

Neyshabur and Srebro 2015: P(w) = [w / m; sqrt(1 - ||w||^2 / m^2)] and Q(x) = [x; 0] have inner products that go with w.x.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.innerproducts import Best
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.popcount import popcount
from xmc_stream.kernels.prefetch import prefetch
from xmc_stream.kernels.vectors import LANES, product

_AHEAD, _LINE = 4, 16  # candidates that vectors are fetched ahead of, floats of a cache line
_FAR = 65535


class Codes(NamedTuple):
    """Dense vectors (K, r), their codes (words, K) and which of them are zero (K,)."""

    vectors: NDArray[np.float32]
    codes: NDArray[np.uint64]
    zero: NDArray[np.bool_]


class HashRoom(NamedTuple):
    """Room of one thread: distances (K,), counts (bits + 1,), candidates."""

    distances: NDArray[np.uint16]
    counts: NDArray[np.int64]
    candidates: NDArray[np.int32]


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
def _measure(i: int, queries: NDArray[np.uint64], of: Codes, room: HashRoom) -> None:
    """The Hamming distance of a query to each class; zero vectors are far."""
    codes, distances = of.codes, room.distances
    for word in range(len(codes)):
        query = queries[word, i]
        for c in range(len(distances)):
            distance = np.uint16(popcount(codes[word, c] ^ query))
            distances[c] = distance if word == 0 else distances[c] + distance
    for c in range(len(distances)):
        distances[c] = _FAR if of.zero[c] else distances[c]


@inner_kernel
def _nearest(n: int, room: HashRoom) -> int:
    """Up to n classes of the least distance, of equals the lower ones; returns how many."""
    distances, counts, candidates = room.distances, room.counts, room.candidates
    counts[:] = 0
    for c in range(len(distances)):
        if distances[c] != _FAR:
            counts[distances[c]] += 1
    far, rest = 0, n
    while far < len(counts) and counts[far] <= rest:
        rest -= counts[far]
        far += 1
    found = 0
    for c in range(len(distances)):
        if distances[c] < far:
            candidates[found] = c
            found += 1
        elif distances[c] == far and rest > 0:
            candidates[found] = c
            found, rest = found + 1, rest - 1
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
    room: HashRoom,
    best: Best,
) -> None:
    """The best of the n classes nearest by code and of the hubs, beside those excluded, for the rows [first, last).

    A score is the sum of `vectors.product`, then what the last coordinates add, in float32. Of equals the lower class.
    """
    candidates, vectors, queried, r = room.candidates, of.vectors.ravel(), rows.ravel(), rows.shape[1]
    in_lanes = r - r % LANES
    for i in range(first, last):
        low, high = excluded.indptr[i], excluded.indptr[i + 1]
        _measure(i, queries, of, room)
        found = _nearest(min(n + high - low, len(of.zero)), room)
        for q in range(-len(hubs), found):
            c = np.int64(candidates[q] if q >= 0 else hubs[q])
            for ahead in range(0, r if 0 <= q + _AHEAD < found else 0, _LINE):
                prefetch(vectors, candidates[q + _AHEAD] * r + ahead)
            score = product(vectors, c * r, queried, i * r, in_lanes)
            for j in range(in_lanes, r):
                score += vectors[c * r + j] * queried[i * r + j]
            if score > best.scores[i] or (score == best.scores[i] and c < best.classes[i]):
                own = False
                for e in range(low, high):
                    own = own or excluded.indices[e] == c
                if not own:
                    best.classes[i], best.scores[i] = c, score
