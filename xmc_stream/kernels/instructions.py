"""What processors do in one instruction and Python does not, in plain Python: compiled kernels have `intrinsics` for it.

Sums in vector registers, whose order would not be the one that is written down; masks; prefetching; and functions of the C
library on addresses.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

LANES = 16
WORD, HALF_WORD = 64, 32


def prefetch(array: Any, index: Any) -> None:
    """Begin to bring array[index] into the processor's cache and wait for nothing; here, an index out of range raises."""
    array.item(index)


def popcount(word: Any) -> Any:
    """How many bits of a uint64 are 1."""
    return int(word).bit_count()


def widen(weight: Any) -> Any:
    """A weight as float32: of 32 bits as it is, of 16 bits (uint16, see `linear.kernels.scores`) widened."""
    if isinstance(weight, np.uint16):
        weight = np.array([int(weight) << 16], np.uint32).view(np.float32)[0]
    return np.float32(weight)


def soft_product(row: Any, at: Any, v: Any, n: Any, lam: Any) -> Any:
    """The sum of row[at + j] soft(v[j], lam), j = 0 .. n - 1, for float32 and float64 arrays, in float64, as `total` sums."""
    terms = row[at : at + n].astype(np.float64) * (v[:n] - np.minimum(np.maximum(v[:n], -lam), lam))
    return total(terms)


def above(array: Any, at: Any, bounds: Any) -> Any:
    """A word whose bit b is 1 where array[at + b] > bounds[at + b], b = 0 .. 31, for float32 arrays."""
    return np.uint64(sum(1 << b for b in range(HALF_WORD) if array[at + b] > bounds[at + b]))


def at_most(array: Any, at: Any, limit: Any) -> Any:
    """A word whose bit b is 1 where array[at + b] <= limit, b = 0 .. 63, for a uint8 array."""
    return np.uint64(sum(1 << b for b in range(WORD) if array[at + b] <= limit))


def product(a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """The sum of a[at_a + j] b[at_b + j], j = 0 .. n - 1, for float32 arrays, n a multiple of LANES: summed as `total` does."""
    return total(a[at_a : at_a + n] * b[at_b : at_b + n])


def total(array: Any) -> Any:
    """The sum of an array of LANES, 2 LANES, ... values: LANES sums beside each other, then halves added to halves."""
    sums = np.zeros(LANES, array.dtype)
    for values in array.reshape(-1, LANES):
        sums += values
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def soft_lines(indices: Any, values: Any, begin: Any, end: Any, v: Any, lam: Any, sums: Any) -> None:
    """sums[l] = sum over entries p of values[p] soft(v[LANES indices[p] + l], lam), begin <= p < end, for float32 arrays.

    Every other entry goes to sums of its own, which are added in the end: a sum waits for its last addition.
    """
    halves = np.zeros((2, LANES), np.float32)
    for p in range(begin, end):
        x = v[LANES * indices[p] : LANES * (indices[p] + 1)]
        halves[(p - begin) % 2] += values[p] * (x - np.minimum(np.maximum(x, -lam), lam))
    sums[:] = halves[0] + halves[1]


def add_to_lines(indices: Any, values: Any, begin: Any, end: Any, steps: Any, v: Any) -> None:
    """v[LANES indices[p] + l] += values[p] steps[l] for entries p in turn, begin <= p < end, and each lane l."""
    for p in range(begin, end):
        v[LANES * indices[p] : LANES * (indices[p] + 1)] += values[p] * steps


def lane_step(
    i: Any, awake: Any, least: Any, square: Any, weight: Any, tau: Any, positive: Any, h2: Any, upper: Any, alpha: Any,
    sums: Any, met: Any,
) -> Any:  # fmt: skip
    """A coordinate step of row i in each lane, see `lanecd.Lanes`; returns a bit for each lane whose alpha moved.

    awake: bits of the lanes that may move, where |gradient| is above `least`. sums: the margins times tau; then what alpha
    moved by, times y. met: the largest |gradient| of a coordinate that moved, and what the dual objective gained, at least.
    """
    may_move, is_positive = ((int(bits) >> np.arange(LANES)) & 1 > 0 for bits in (awake, positive))
    sign = np.where(is_positive, np.float32(1), np.float32(-1))
    own_h2 = np.where(is_positive, h2[LANES:], h2[:LANES]) / weight
    most = np.where(is_positive, upper[LANES:], upper[:LANES]) * weight
    before = alpha[LANES * i : LANES * (i + 1)].copy()
    g = sign * (sums / tau) - np.float32(1) + before * own_h2
    curvature = square / tau + own_h2
    after = np.minimum(np.maximum(before - g / curvature, np.float32(0)), most)
    after = np.where(may_move & (np.abs(g) > least), after, before)
    moved = after != before
    step = after - before
    met[:LANES] = np.maximum(met[:LANES], np.where(moved, np.abs(g), np.float32(0)))
    met[LANES:] -= step * (g + np.float32(0.5) * (curvature * step))
    alpha[LANES * i : LANES * (i + 1)] = after
    sums[:] = step * sign
    return np.uint16(sum(1 << lane for lane in range(LANES) if moved[lane]))


def pread(fd: Any, address: Any, size: Any, offset: Any) -> int:
    """Read `size` bytes of a file from `offset` to an address; returns how many there were."""
    data = os.pread(fd, size, offset)
    ctypes.memmove(int(address), data, len(data))
    return len(data)


def pwrite(fd: Any, address: Any, size: Any, offset: Any) -> int:
    """Write `size` bytes at an address into a file; returns how many it took."""
    return os.pwrite(fd, ctypes.string_at(int(address), size), offset)


def memcpy(to: Any, address: Any, size: Any) -> None:
    """Copy `size` bytes from an address to another."""
    ctypes.memmove(int(to), int(address), size)


def fadvise(fd: Any, offset: Any, size: Any, advice: Any) -> None:
    """Tell the system how a part of a file will be used, where it listens."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, advice)
