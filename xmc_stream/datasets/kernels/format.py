"""Writing rows as text: the shortest decimals that read back as the same float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

VALUE_BYTES = 16  # the longest value: -0.0000123456789
_TENS = np.array([float(f"1e{k}") for k in range(56)])
_WHOLE_TENS = np.array([10**k for k in range(10)])
_MARGIN = 1e-15  # the relative error of a double that stands for a decimal here is less than half of this
_SMALLEST_NORMAL = 2.0**-126
_COLON, _COMMA, _SPACE, _NEWLINE, _POINT, _MINUS, _PLUS, _E, _ZERO = 58, 44, 32, 10, 46, 45, 43, 101, 48


@kernel
def write_integer(number: Any, out: NDArray[np.uint8], at: int) -> int:
    """Write a number >= 0 in decimal; returns where it ends."""
    end = at + 1
    rest = number // 10
    while rest:
        end += 1
        rest //= 10
    for place in range(end - 1, at - 1, -1):
        out[place] = _ZERO + number % 10
        number //= 10
    return end


@kernel
def write_value(value: np.float32, out: NDArray[np.uint8], at: int) -> int:
    """Write a finite float32 with as few digits as read back as the same; returns where it ends.

    Tried are the nearest decimals of 6 to 9 digits (six digits always survive a float32, so that they end in zeros where
    fewer are enough; subnormal numbers are tried from one digit on), in doubles, with a margin for their rounding.
    """
    if np.signbit(value):
        out[at] = _MINUS
        at += 1
        value = -value
    v = np.float64(value)
    if v == 0.0:
        out[at] = _ZERO
        return at + 1
    exponent = np.int64(np.floor(np.log10(v)))
    digits: Any = np.int64(0)
    scale: Any = np.int64(0)
    for n in range(6 if v >= _SMALLEST_NORMAL else 1, 10):
        scale = n - 1 - exponent
        scaled = np.rint(v * _TENS[scale] if scale >= 0 else v / _TENS[-scale])
        near = scaled / _TENS[scale] if scale >= 0 else scaled * _TENS[-scale]
        digits = np.int64(scaled)
        if np.float32(near * (1 - _MARGIN)) == value and np.float32(near * (1 + _MARGIN)) == value:
            break
    while digits % 10 == 0:
        digits //= 10
        scale -= 1
    # the value is digits / 10^scale
    n = 0
    rest = digits
    while rest:
        n += 1
        rest //= 10
    exponent = n - 1 - scale
    far = exponent < -5 or exponent > 9
    if far:
        scale = n - 1  # one digit before the point
    for power in range(max(n - 1 - scale, 0), min(-scale, 0) - 1, -1):  # of ten, which a digit counts
        if power == -1:
            out[at] = _POINT
            at += 1
        place = power + scale
        out[at] = _ZERO + (digits // _WHOLE_TENS[place] % 10 if 0 <= place < n else 0)
        at += 1
    if far:
        out[at] = _E
        out[at + 1] = _MINUS if exponent < 0 else _PLUS
        at = write_integer(abs(exponent), out, at + 2)
    return at


@kernel
def write_rows(
    x_indptr: NDArray[np.int64],
    x_indices: NDArray[Any],
    x_data: NDArray[np.float32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[Any],
    base: int,
    out: NDArray[np.uint8],
) -> int:
    """Write rows as lines `label,label feature:value feature:value`; returns the bytes written.

    base: added to features and labels. out: holds a byte a row, the digits of its id and one more a label, and for a value the
    digits of its id and VALUE_BYTES + 2.
    """
    at = 0
    for i in range(len(x_indptr) - 1):
        for p in range(y_indptr[i], y_indptr[i + 1]):
            if p > y_indptr[i]:
                out[at] = _COMMA
                at += 1
            at = write_integer(np.int64(y_indices[p]) + base, out, at)
        for p in range(x_indptr[i], x_indptr[i + 1]):
            out[at] = _SPACE
            at = write_integer(np.int64(x_indices[p]) + base, out, at + 1)
            out[at] = _COLON
            at = write_value(x_data[p], out, at + 1)
        out[at] = _NEWLINE
        at += 1
    return at
