"""Bytes of text: characters, blanks, ends of lines, ids, decimal numbers; and how kernels tell each other where fields stand.

A text ends in a newline, which every scan stops at: no access is beyond it. comment: the byte that begins a comment, or
NO_COMMENT.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel, kernel

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


# what ends a scan, or is wrong in a line. DONE: all is read; FULL: no row is left in the arrays; SLOW: a number that only
# float() can tell; BAD_LABEL: not digits, or nothing after a comma; BAD_FEATURE: not digits and a colon; BAD_VALUE: not a
# decimal number; _RANGE: an id beyond the last, a value beyond float32; _TWICE: an id that stands twice in a row; SUM_RANGE:
# its values add up beyond float32; _BELOW: an id below the first
(
    DONE, FULL, SLOW, BAD_LABEL, BAD_FEATURE, BAD_VALUE, LABEL_RANGE, FEATURE_RANGE, VALUE_RANGE, LABEL_TWICE,
    FEATURE_TWICE, SUM_RANGE, LABEL_BELOW, FEATURE_BELOW,
) = range(14)  # fmt: skip

COMMA, COLON, HASH = 44, 58, 35
NO_COMMENT = -1  # in place of the byte that begins one

_TAB, _NEWLINE, _RETURN, _SPACE, _PLUS, _MINUS, _DOT, _ZERO = 9, 10, 13, 32, 43, 45, 46, 48
_MAX_ID = 10**17  # ids are read up to here; the next digit could leave int64
_MAX_DIGITS = 18  # of a mantissa in int64
_MAX_EXPONENT = 10**15  # further digits of an exponent change nothing
_EXACT_MANTISSA = 2**53
_EXACT_POWER = 22  # 10^22 is the last power of ten that a double holds exactly
_LARGEST_POWER = 70
_POWERS = np.array([float(f"1e{p}") for p in range(_LARGEST_POWER + 1)])
_ROUNDS_TO_INFINITY = float(2**128 - 2**103)  # the least double that float32 cannot hold
_TENS = np.array([10**p for p in range(17)])
_ONE = np.uint64(1)
_HIGH_BITS, _LOW_BITS = np.uint64(0x8080808080808080), np.uint64(0x0101010101010101)
_SLACK = 2.0**-50  # more than the relative error of a truncated mantissa, a rounded power and a division


@kernel
def _is_digit(c: int) -> bool:
    return 48 <= c <= 57


@kernel
def ends_token(c: int, comment: int) -> bool:
    return c in (_SPACE, _NEWLINE, _TAB, _RETURN, comment)


@kernel
def skip_blanks(text: NDArray[np.uint8], p: int) -> int:
    while byte_at(text, p) in (_SPACE, _TAB):
        p += 1
    return p


@kernel
def next_line(text: NDArray[np.uint8], p: int) -> int:
    while byte_at(text, p) != _NEWLINE:
        p += 1
    return p + 1


@kernel
def ends_line(text: NDArray[np.uint8], p: int, comment: int) -> bool:
    """Whether a newline, CRLF or a comment is at p."""
    c = byte_at(text, p)
    return c in (_NEWLINE, comment) or (c == _RETURN and byte_at(text, p + 1) == _NEWLINE)


@kernel
def _digits(text: NDArray[np.uint8], p: int) -> tuple[int, int]:
    """How many of the bytes p to p + 7 are digits before the first that is none, and the number they write.

    The bytes are one word (compiled to one load), the first one lowest, all compared at once; neighbouring digits are
    joined to pairs, these to fours, these to eight: no branch depends on how many there are.
    """
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(text[np.uint64(p + i)]) << np.uint64(8 * i)
    word ^= np.uint64(0x3030303030303030)  # digits are 0 to 9 now
    others = (((word & np.uint64(0x7F7F7F7F7F7F7F7F)) + np.uint64(0x7676767676767676)) | word) & _HIGH_BITS
    n = 8
    if others:
        ones = ((others - _ONE) & ~others) >> np.uint64(7) & _LOW_BITS  # one in each byte before the first high bit
        ones += ones >> np.uint64(32)
        ones += ones >> np.uint64(16)
        n = np.int64((ones + (ones >> np.uint64(8))) & np.uint64(15))  # type: ignore[assignment]
    if n == 0:
        return 0, 0
    word <<= np.uint64(64 - 8 * n)  # zeros before the digits
    word = (word * np.uint64(10) + (word >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word * np.uint64(100) + (word >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return n, np.int64((word * np.uint64(10000) + (word >> np.uint64(32))) & np.uint64(0xFFFFFFFF))  # type: ignore[return-value]


@kernel
def read_id(text: NDArray[np.uint8], p: int) -> tuple[int, int]:
    """The digits from p on as a number, no further than needed to know that it is too large; where they end."""
    if p + 8 <= len(text):
        n, number = _digits(text, p)
        if n < 8:
            return number, p + n
    number = 0
    c = byte_at(text, p)
    while _is_digit(c):
        if number < _MAX_ID:
            number = number * 10 + (c - _ZERO)
        p += 1
        c = byte_at(text, p)
    return number, p


@kernel
def read_plain(text: NDArray[np.uint8], p: int, comment: int) -> tuple[bool, int, float]:
    """The number from p on if it is of 18 digits at most, without an exponent: (is it, where it ends, value as below)."""
    negative = byte_at(text, p) == _MINUS
    if negative:
        p += 1
    n_digits = 0
    n_behind = 0
    mantissa = 0
    c = byte_at(text, p)
    while _is_digit(c) and n_digits < _MAX_DIGITS:
        mantissa = mantissa * 10 + (c - _ZERO)
        n_digits += 1
        p += 1
        c = byte_at(text, p)
    if c == _DOT:
        p += 1
        if p + 16 <= len(text) and n_digits <= _MAX_DIGITS - 16:
            n_behind, behind = _digits(text, p)
            if n_behind == 8:
                n, last = _digits(text, p + 8)
                behind = behind * _TENS[np.uint64(n)] + last
                n_behind += n
            mantissa = mantissa * _TENS[np.uint64(n_behind)] + behind
            p += n_behind
        n_digits += n_behind
        c = byte_at(text, p)
        while _is_digit(c) and n_digits < _MAX_DIGITS:
            mantissa = mantissa * 10 + (c - _ZERO)
            n_digits += 1
            n_behind += 1
            p += 1
            c = byte_at(text, p)
    plain = n_digits > 0 and ends_token(c, comment)
    value = np.float64(mantissa) / _POWERS[np.uint64(n_behind)] if plain else 0.0
    if mantissa > _EXACT_MANTISSA and np.float32(value * (1.0 - _SLACK)) != np.float32(value * (1.0 + _SLACK)):
        plain = False  # as below
    return plain, p, -value if negative else value


@kernel
def _read_exponent(text: NDArray[np.uint8], p: int) -> tuple[bool, int, int]:
    """The whole number from p on, which may have a sign: (is there one, where it ends, the number or a larger one)."""
    c = byte_at(text, p)
    down = c == _MINUS
    if c in (_MINUS, _PLUS):
        p += 1
        c = byte_at(text, p)
    some, exponent = _is_digit(c), 0
    while _is_digit(c):
        if exponent < _MAX_EXPONENT:
            exponent = exponent * 10 + (c - 48)
        p += 1
        c = byte_at(text, p)
    return some, p, -exponent if down else exponent


@kernel
def _rounded(mantissa: int, power: int, truncated: bool) -> tuple[int, float]:
    """mantissa 10^power, as a code and a value such that float32 of it is exact; see `read_value`."""
    if mantissa == 0 or power < -_LARGEST_POWER:  # 10^18 * 10^-71 is far below what float32 holds
        return DONE, 0.0
    if power > 39:
        return VALUE_RANGE, 0.0
    value = np.float64(mantissa) / _POWERS[-power] if power < 0 else np.float64(mantissa) * _POWERS[power]
    exact = not truncated and mantissa <= _EXACT_MANTISSA and -_EXACT_POWER <= power <= _EXACT_POWER
    low = value if exact else value * (1.0 - _SLACK)
    high = value if exact else value * (1.0 + _SLACK)
    if low >= _ROUNDS_TO_INFINITY:
        return VALUE_RANGE, value
    if high >= _ROUNDS_TO_INFINITY or np.float32(low) != np.float32(high):
        return SLOW, value
    return DONE, value


@kernel
def read_value(text: NDArray[np.uint8], p: int, comment: int) -> tuple[int, int, float]:
    """The decimal number from p on: (code, where it ends, value), the value such that float32 of it is exact.

    Up to 2^53 and 10^22, one multiplication or division of exact doubles rounds as float() does. Else the result is
    known within _SLACK, and if both bounds round to the same float32, so does float()'s, rounding being monotone.
    """
    c = byte_at(text, p)
    negative = c == _MINUS
    if c in (_MINUS, _PLUS):
        p += 1
        c = byte_at(text, p)
    mantissa = 0
    power = 0
    n_digits = 0  # of the mantissa
    some, truncated, behind = False, False, False  # behind: the point
    while _is_digit(c) or (c == _DOT and not behind):
        if c == _DOT:
            behind = True
        else:
            some = True
            if n_digits < _MAX_DIGITS:
                mantissa = mantissa * 10 + (c - 48)
                n_digits += mantissa != 0
                power -= behind
            else:
                power += not behind
                truncated = truncated or c != 48
        p += 1
        c = byte_at(text, p)
    if some and (c == 69 or c == 101):  # E e
        some, p, exponent = _read_exponent(text, p + 1)
        power += exponent
    if not some or not ends_token(byte_at(text, p), comment):
        return BAD_VALUE, p, 0.0
    code, value = _rounded(mantissa, power, truncated)
    return code, p, -value if negative else value


@kernel
def read_label(text: NDArray[np.uint8], p: int, comment: int) -> tuple[bool, int, int]:
    """The label from p on: (whether there are digits, id, where it ends); with comments, also `+1` and `1.0`."""
    if comment == HASH and byte_at(text, p) == _PLUS:
        p += 1
    start = p
    label, p = read_id(text, p)
    some = p > start
    if comment == HASH and some and byte_at(text, p) == _DOT:
        p += 1
        while byte_at(text, p) == _ZERO:
            p += 1
    return some, label, p
