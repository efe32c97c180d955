"""Keyed random orders without tables: item t of a permutation of n, from a Feistel network with cycle walking. Keyed draws.

Draws depend on their key alone (seed, class, round or epoch), never on time, thread or memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import HELD_OUT_ROWS
from xmc_stream.kernels.jit import inner_kernel, kernel

_A = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_B = np.uint64(0xBF58476D1CE4E5B9)  # the two multipliers of the splitmix64 finaliser
_C = np.uint64(0x94D049BB133111EB)
_TOGETHER = 512  # items
_11, _30, _27, _31, _32 = np.uint64(11), np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
HELD_OUT = 50_000  # rows, about, that are held out at most, so that looking at them takes little beside a pass


@kernel
def mix(x: np.uint64) -> np.uint64:
    """The splitmix64 finaliser: every bit of x moves every bit of the result."""
    x = (x ^ (x >> _30)) * _B
    x = (x ^ (x >> _27)) * _C
    return x ^ (x >> _31)


@kernel
def key_of(seed: int, label: int, round_: int, epoch: int) -> np.uint64:
    """One key of four numbers."""
    key = mix(np.uint64(seed) + _A)
    key = mix(key ^ (np.uint64(label) * _A))
    key = mix(key ^ (np.uint64(round_) * _B))
    return mix(key ^ (np.uint64(epoch) * _C))


@inner_kernel
def uniform(key: np.uint64, n: int) -> float:
    """Draw n of a key, in [0, 1)."""
    return np.float64(mix(key + np.uint64(n) * _A) >> _11) * 2.0**-53


@kernel
def word_bits(n: int) -> int:
    """Bits of the smallest word that holds 0 .. n - 1, two at least."""
    bits = 2
    while (1 << bits) < n:
        bits += 1
    return bits


@inner_kernel
def _scrambled(x: np.uint64, bits: int, key: np.uint64) -> np.uint64:
    """One pass through the network: a permutation of the words of so many bits."""
    right_bits = np.uint64(bits - bits // 2)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left_mask = (np.uint64(1) << np.uint64(bits // 2)) - np.uint64(1)
    left, right = x >> right_bits, x & right_mask
    k = np.uint64(key)
    for _ in range(2):
        h = (right + k) * _B
        left ^= ((h ^ (h >> _32)) * _A >> _32) & left_mask
        k += _C
        h = (left + k) * _B
        right ^= ((h ^ (h >> _32)) * _A >> _32) & right_mask
        k += _C
    return (left << right_bits) | right


@kernel
def permuted(t: int, n: int, bits: int, key: np.uint64) -> int:
    """Item t of the key's permutation of 0 .. n - 1, for bits = word_bits(n)."""
    x = _scrambled(np.uint64(t), bits, key)
    while x >= np.uint64(n):
        x = _scrambled(x, bits, key)
    return int(np.int64(x))


@kernel
def visiting_order(begin: int, n: int, key: np.uint64, out: NDArray[np.int64]) -> None:
    """out[t - begin] = item t of the key's permutation of n, for len(out) items from t = begin on.

    Some items go through the network together, and those that fall outside go through it again: no branch is guessed.
    """
    bits = word_bits(n)
    outside = np.empty(_TOGETHER, np.int32)
    for first in range(0, len(out), _TOGETHER):
        some = out[first : first + _TOGETHER]
        for t in range(len(some)):
            some[t] = np.int64(_scrambled(np.uint64(begin + first + t), bits, key))
        n_outside = 0
        for t in range(len(some)):
            outside[n_outside] = t
            n_outside += int(some[t] >= n)
        while n_outside:
            still = 0
            for q in range(n_outside):
                t = outside[q]
                item = np.int64(_scrambled(np.uint64(some[t]), bits, key))
                some[t] = item
                outside[still] = t
                still += int(item >= n)
            n_outside = still


@kernel
def held_out(rows: NDArray[np.int64], seed: int, share: float, out: NDArray[np.bool_]) -> None:
    """out[i] = whether row rows[i] is held out: a share of all rows, drawn by seed and row."""
    key = key_of(seed, HELD_OUT_ROWS, 0, 0)
    for i in range(len(rows)):
        out[i] = np.float64(mix(key ^ (np.uint64(rows[i]) * _A)) >> _11) < share * 9007199254740992.0
