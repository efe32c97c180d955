"""Writing rows as text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

LABEL_BYTES, FEATURE_BYTES, ROW_BYTES = 20, 40, 2  # of text, at most
_DIGITS = 9  # of a value: the fewest that tell every float32 from its neighbours
_POWERS = 10.0 ** np.arange(-30, 54)  # of 10, from that of the largest float32's last digit to the smallest one's


@kernel
def _put_digits(out: NDArray[np.uint8], at: int, number: int, n: int) -> int:
    """Write a number in n digits; returns where it ends."""
    for p in range(at + n - 1, at - 1, -1):
        out[p] = 48 + number % 10
        number //= 10
    return at + n


@kernel
def _put_index(out: NDArray[np.uint8], at: int, number: int) -> int:
    n = 1
    bound = 10
    while number >= bound and n < 19:
        n += 1
        bound *= 10
    return _put_digits(out, at, number, n)


@kernel
def _put_value(out: NDArray[np.uint8], at: int, value: float) -> int:
    """Write a float32 (finite) with nine digits at most, as %.9g does: it is read back unchanged."""
    if value < 0 or (value == 0 and math.copysign(1.0, value) < 0):
        out[at] = 45
        at += 1
        value = -value
    if value == 0:
        out[at] = 48
        return at + 1
    exponent = math.floor(math.log10(value))
    # the error of the product is 10^-16 of the value, half a step of float32 is 3 10^-8 of it
    number = int(value * _POWERS[38 - exponent] + 0.5)
    if number < 100_000_000 or number >= 1_000_000_000:  # log10 was rounded over a power of 10, or the number was
        exponent += 1 if number >= 1_000_000_000 else -1
        number = int(value * _POWERS[38 - exponent] + 0.5)
    n = _DIGITS
    while number % 10 == 0:
        number //= 10
        n -= 1
    if exponent < -5 or exponent >= _DIGITS:
        before = 1
    elif exponent < 0:
        out[at] = 48
        out[at + 1] = 46
        for p in range(at + 2, at + 1 - exponent):
            out[p] = 48
        return _put_digits(out, at + 1 - exponent, number, n)
    else:
        before = exponent + 1
    if n <= before:
        at = _put_digits(out, at, number, n)
        for _ in range(before - n):
            out[at] = 48
            at += 1
    else:
        unit = 1
        for _ in range(n - before):
            unit *= 10
        at = _put_digits(out, at, number // unit, before)
        out[at] = 46
        at = _put_digits(out, at + 1, number % unit, n - before)
    if before != exponent + 1:
        out[at] = 101
        out[at + 1] = 45 if exponent < 0 else 43
        at = _put_digits(out, at + 2, abs(exponent), 2)
    return at


@kernel
def format_rows(
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[Any],
    x_indptr: NDArray[np.int64],
    x_indices: NDArray[Any],
    x_data: NDArray[np.float32],
    base: int,
    out: NDArray[np.uint8],
) -> int:
    """Write rows as lines "label,label feature:value feature:value"; returns the bytes written.

    base: added to all ids. out: LABEL_BYTES a label, FEATURE_BYTES a feature and ROW_BYTES a row.
    """
    at = 0
    for i in range(len(x_indptr) - 1):
        for p in range(y_indptr[i], y_indptr[i + 1]):
            if p > y_indptr[i]:
                out[at] = 44
                at += 1
            at = _put_index(out, at, y_indices[p] + base)
        for p in range(x_indptr[i], x_indptr[i + 1]):
            out[at] = 32
            at = _put_index(out, at + 1, x_indices[p] + base)
            out[at] = 58
            at = _put_value(out, at + 1, np.float64(x_data[p]))
        out[at] = 10
        at += 1
    return at
