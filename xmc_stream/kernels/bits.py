"""Sorting small numbers by the bits that they set, and finding one among sorted ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import popcount
from xmc_stream.kernels.jit import inner_kernel, kernel

_WORTH = 64  # words that are looked through in less time than a number is sorted in


@inner_kernel
def _sort_few(numbers: NDArray[Any]) -> None:
    """Shell's sort: numba's own takes a second to compile for each type."""
    gap = len(numbers)
    while gap > 1:
        gap = max(1, gap * 4 // 9)
        for q in range(gap, len(numbers)):
            number, p = numbers[q], q
            while p >= gap and numbers[p - gap] > number:
                numbers[p] = numbers[p - gap]
                p -= gap
            numbers[p] = number


@kernel
def sort_numbers(numbers: NDArray[Any], n_all: int) -> None:
    """Sort different numbers of 0 .. n_all - 1 in place: each sets a bit, which are then read in turn (n_all / 8 bytes).

    Few numbers of very many are sorted by comparing.
    """
    n_words = (n_all >> 6) + 1
    if n_words > _WORTH * len(numbers):
        _sort_few(numbers)
        return
    words = np.zeros(n_words, np.uint64)
    one = np.uint64(1)
    for q in range(len(numbers)):
        words[numbers[q] >> 6] |= one << np.uint64(numbers[q] & 63)
    filled = 0
    for w in range(n_words):
        word = words[w]
        while word:
            rest = word & (word - one)  # but for the lowest bit
            numbers[filled] = w * 64 + popcount((word ^ rest) - one)
            filled += 1
            word = rest


@kernel
def place_of(numbers: NDArray[Any], low: int, high: int, number: int) -> int:
    """The first place in [low, high) of ascending numbers that holds `number` or a larger one; high where none does."""
    while low < high:
        middle = (low + high) >> 1
        if numbers[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low
