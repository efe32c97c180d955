"""Weights of 16 bits: the upper half of a float32, rounded to nearest, ties to even (known as bfloat16).

A narrow weight has the range of a float32 and errs by at most 2^-9 of itself. It is widened by a shift, in the loop that
multiplies by it: what is saved is the bytes that the loop waits for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

_INFINITE = np.uint32(0x7F80)  # the upper half of infinity; what is below is finite
_SIGN, _SIZE = np.uint32(0x8000), np.uint32(0x7FFF)


@kernel
def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite weights of 16 bits in the first half of the bytes of `values`, which are overwritten.

    The largest weights become the largest number of 16 bits, not infinity.
    """
    bits, halves = values.view(np.uint32), values.view(np.uint16)
    for p in range(len(values)):
        word = bits[p]
        half = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if half & _SIZE == _INFINITE:
            half = (half & _SIGN) | (_INFINITE - np.uint32(1))
        halves[p] = half
    return halves[: len(values)]
