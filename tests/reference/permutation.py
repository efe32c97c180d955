"""Keyed random orders in plain integers: a Feistel network of four rounds, walked until it lands inside."""

from __future__ import annotations

_WORD = (1 << 64) - 1
_A, _B, _C = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ x >> 30) * _B & _WORD
    x = (x ^ x >> 27) * _C & _WORD
    return x ^ x >> 31


def key_of(seed: int, label: int, round_: int, epoch: int) -> int:
    """One key of four numbers."""
    key = mix(seed + _A & _WORD)
    for number, odd in ((label, _A), (round_, _B), (epoch, _C)):
        key = mix(key ^ number * odd & _WORD)
    return key


def _scrambled(half: int, key: int) -> int:
    h = (half + key) * _B & _WORD
    return ((h ^ h >> 32) * _A & _WORD) >> 32


def _network(x: int, bits: int, key: int) -> int:
    """A bijection of words of so many bits: each half in turn is changed by the other one."""
    low = bits - bits // 2
    left, right = x >> low, x % (1 << low)
    for round_ in range(4):
        k = key + round_ * _C & _WORD
        if round_ % 2 == 0:
            left ^= _scrambled(right, k) % (1 << bits // 2)
        else:
            right ^= _scrambled(left, k) % (1 << low)
    return left << low | right


def permuted(t: int, n: int, key: int) -> int:
    """Item t of the key's permutation of 0 .. n - 1."""
    bits = max(2, (n - 1).bit_length())
    x = _network(t, bits, key)
    while x >= n:
        x = _network(x, bits, key)
    return x


def permutation(n: int, key: int) -> list[int]:
    """All of it."""
    return [permuted(t, n, key) for t in range(n)]
