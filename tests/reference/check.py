"""Sums over the entries of a sparse matrix that do not depend on their order, in plain integers."""

from __future__ import annotations

from collections.abc import Iterable

from reference.permutation import mix

_WORD = (1 << 64) - 1


def entry_sum(entries: Iterable[tuple[int, int, int | None]], key: int) -> int:
    """Sum of a hash of (row, column, bits of the value or None)."""
    total = 0
    for row, column, bits in entries:
        entry = mix(mix(row ^ key) + column & _WORD)
        total += entry if bits is None else mix(entry ^ bits)
    return total & _WORD


def index_sum(indices: Iterable[int], key: int) -> int:
    """Sum of a hash of each index."""
    return sum(mix(j + key & _WORD) for j in indices) & _WORD
