"""Where the fields of lines stand, as kernels that read lines tell those that read fields, and what characters are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel

HARD, SOUND, BLANK, HEADER = range(4)  # lines: HARD ones are left to Python
# PLAIN: a text as it stands; ESCAPED: with escapes; DOUBLED: with quotes written twice
MISSING, PLAIN, ESCAPED, DOUBLED, WHOLE, LIST, OTHER = range(7)
KIND, START, STOP = range(3)  # of a place: the bytes are [START, STOP), without the quotes or brackets around them


@inner_kernel
def byte_at(text: NDArray[np.uint8], p: int) -> int:
    """The byte at p (an unsigned place is spared the question whether it counts from the end)."""
    return np.int64(text[np.uint64(p)])  # type: ignore[return-value]


@inner_kernel
def whole(number: Any) -> int:
    """An element of an array as a number to reckon with."""
    return np.int64(number)  # type: ignore[return-value]


@inner_kernel
def character_bytes(text: NDArray[np.uint8], p: int) -> int:
    """How many bytes the character at p has, which is none of ASCII; 0 where it is not sound UTF-8."""
    c = byte_at(text, p)
    if c < 0xC2 or c > 0xF4:
        return 0
    low, high = 0x80, 0xBF
    if c == 0xE0:
        low = 0xA0
    elif c == 0xED:
        high = 0x9F
    elif c == 0xF0:
        low = 0x90
    elif c == 0xF4:
        high = 0x8F
    if not low <= byte_at(text, p + 1) <= high:
        return 0
    n = 2 if c < 0xE0 else 3 if c < 0xF0 else 4
    for i in range(2, n):
        if byte_at(text, p + i) & 0xC0 != 0x80:
            return 0
    return n


@inner_kernel
def same(a: NDArray[np.uint8], p: int, b: NDArray[np.uint8], q: int, n: int) -> bool:
    """Whether the n bytes of `a` from p on are those of `b` from q on."""
    i = 0
    while i < n and a[np.uint64(p + i)] == b[np.uint64(q + i)]:
        i += 1
    return i == n
