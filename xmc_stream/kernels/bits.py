"""Sets of small numbers as bits: counting them, and sorting by them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

_WORTH = 64  # words that are looked through in less time than a number is sorted in


@kernel
def count_bits(word: np.uint64) -> int:
    """How many bits of a word are set."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int(np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56)))


@kernel
def sort_numbers(numbers: NDArray[Any], n_all: int) -> None:
    """Sort different numbers of 0 .. n_all - 1 in place: each sets a bit, which are then read in turn (n_all / 8 bytes).

    Few numbers of very many are sorted by comparing.
    """
    n_words = (n_all >> 6) + 1
    if n_words > _WORTH * len(numbers):
        numbers.sort()
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
            numbers[filled] = w * 64 + count_bits((word ^ rest) - one)
            filled += 1
            word = rest
