"""XMLRepo text to compressed sparse rows: lines `l1,l2,... f:v f:v ...`, ids from zero.

What is wrong is returned as a code and a position; the caller words it. Every access is bounded by the text's length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

# what parse_lines returns
DONE = 0  # the whole text is parsed
FULL = 1  # no row left in the arrays: take the rows out, set ROW, X_END and Y_END to zero and call again
SLOW = 2  # text[CULPRIT:POSITION] is a decimal number: store its value in x_data[X_END], add 1 to X_END and call again
BAD_LABEL = 3  # not digits, or nothing after a comma
BAD_FEATURE = 4  # not digits and a colon
BAD_VALUE = 5  # not a decimal number
LABEL_RANGE = 6
FEATURE_RANGE = 7
VALUE_RANGE = 8  # beyond float32
LABEL_TWICE = 9  # CULPRIT is the id
FEATURE_TWICE = 10  # CULPRIT is the id

# what stands where in the state
POSITION = 0  # of the next byte
ROW = 1  # rows filled; while INSIDE, the row being filled
X_END = 2  # entries filled in x_indices and x_data
Y_END = 3  # entries filled in y_indices
INSIDE = 4  # 1 while the labels of a row are read and its features not yet all
CULPRIT = 5  # where the bad or slow token begins
STATE_SIZE = 6

_TAB, _NEWLINE, _RETURN, _SPACE, _PLUS, _COMMA, _MINUS, _DOT, _COLON = 9, 10, 13, 32, 43, 44, 45, 46, 58
_MAX_ID = 10**17  # ids are read up to here; the next digit could leave int64
_MAX_DIGITS = 18  # of a mantissa in int64
_MAX_EXPONENT = 10**15  # further digits of an exponent change nothing
_EXACT_MANTISSA = 2**53
_EXACT_POWER = 22  # 10^22 is the last power of ten that a double holds exactly
_LARGEST_POWER = 70
_POWERS = np.array([float(f"1e{p}") for p in range(_LARGEST_POWER + 1)])
_ROUNDS_TO_INFINITY = float(2**128 - 2**103)  # the least double that float32 cannot hold
_SLACK = 2.0**-50  # more than the relative error of a truncated mantissa, a rounded power and a division
_SHORT_ROW = 16


@kernel
def _is_digit(c: int) -> bool:
    return 48 <= c <= 57


@kernel
def _is_blank(c: int) -> bool:
    return c in (_SPACE, _TAB)


@kernel
def _ends_token(c: int) -> bool:
    return c in (_SPACE, _NEWLINE, _TAB, _RETURN)


@kernel
def _at(text: NDArray[np.uint8], p: int) -> int:
    """The byte at p; behind the text, a newline."""
    return int(text[p]) if p < len(text) else _NEWLINE


@kernel
def _read_id(text: NDArray[np.uint8], p: int) -> tuple[int, int]:
    """The digits from p on as a number, no further than needed to know that it is too large; where they end."""
    number = 0
    c = _at(text, p)
    while _is_digit(c):
        if number < _MAX_ID:
            number = number * 10 + (c - 48)
        p += 1
        c = _at(text, p)
    return number, p


@kernel
def _read_value(text: NDArray[np.uint8], p: int) -> tuple[int, int, float]:
    """The decimal number from p on: (code, where it ends, value), the value such that float32 of it is exact.

    Up to 2^53 and 10^22, one multiplication or division of exact doubles rounds as float() does. Else the result is
    known within _SLACK, and if both bounds round to the same float32, so does float()'s, rounding being monotone.
    """
    negative = False
    c = _at(text, p)
    if c in (_MINUS, _PLUS):
        negative = c == _MINUS
        p += 1
        c = _at(text, p)
    mantissa = 0
    power = 0
    n_digits = 0  # of the mantissa
    some = False
    truncated = False
    while _is_digit(c):
        some = True
        if n_digits < _MAX_DIGITS:
            mantissa = mantissa * 10 + (c - 48)
            n_digits += mantissa != 0
        else:
            power += 1
            truncated = truncated or c != 48
        p += 1
        c = _at(text, p)
    if c == _DOT:
        p += 1
        c = _at(text, p)
        while _is_digit(c):
            some = True
            if n_digits < _MAX_DIGITS:
                mantissa = mantissa * 10 + (c - 48)
                n_digits += mantissa != 0
                power -= 1
            else:
                truncated = truncated or c != 48
            p += 1
            c = _at(text, p)
    if not some:
        return BAD_VALUE, p, 0.0
    if c == 69 or c == 101:  # E e
        p += 1
        c = _at(text, p)
        down = c == _MINUS
        if c in (_MINUS, _PLUS):
            p += 1
            c = _at(text, p)
        if not _is_digit(c):
            return BAD_VALUE, p, 0.0
        exponent = 0
        while _is_digit(c):
            if exponent < _MAX_EXPONENT:
                exponent = exponent * 10 + (c - 48)
            p += 1
            c = _at(text, p)
        power += -exponent if down else exponent
    if not _ends_token(c):
        return BAD_VALUE, p, 0.0

    code = DONE
    value = 0.0
    if mantissa == 0 or power < -_LARGEST_POWER:  # 10^18 * 10^-71 is far below what float32 holds
        value = 0.0
    elif power > 39:
        code = VALUE_RANGE
    else:
        value = np.float64(mantissa) / _POWERS[-power] if power < 0 else np.float64(mantissa) * _POWERS[power]
        exact = not truncated and mantissa <= _EXACT_MANTISSA and -_EXACT_POWER <= power <= _EXACT_POWER
        low = value if exact else value * (1.0 - _SLACK)
        high = value if exact else value * (1.0 + _SLACK)
        if low >= _ROUNDS_TO_INFINITY:
            code = VALUE_RANGE
        elif high >= _ROUNDS_TO_INFINITY or np.float32(low) != np.float32(high):
            code = SLOW
    return code, p, -value if negative else value


@kernel
def _swap(indices: NDArray[Any], data: NDArray[Any], a: int, b: int) -> None:
    indices[a], indices[b] = indices[b], indices[a]
    if len(data):
        data[a], data[b] = data[b], data[a]


@kernel
def _sink(indices: NDArray[Any], data: NDArray[Any], start: int, root: int, size: int) -> None:
    """Restore the heap of `size` entries from `start` on below one of its nodes."""
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size and indices[start + child] < indices[start + child + 1]:
            child += 1
        if indices[start + root] >= indices[start + child]:
            return
        _swap(indices, data, start + root, start + child)
        root = child


@kernel
def _sort(indices: NDArray[Any], data: NDArray[Any], start: int, stop: int) -> int:
    """Sort the entries [start, stop) by index, in place; the place of an index that stands there twice, or -1.

    data: values that move along, or empty. Long rows are sorted as a heap: no buffer, and no order makes it slow.
    """
    ordered = True
    for p in range(start + 1, stop):
        ordered = ordered and indices[p - 1] < indices[p]
    if ordered:
        return -1
    if stop - start <= _SHORT_ROW:
        for p in range(start + 1, stop):
            q = p
            while q > start and indices[q - 1] > indices[q]:
                _swap(indices, data, q - 1, q)
                q -= 1
    else:
        n = stop - start
        for root in range(n // 2 - 1, -1, -1):
            _sink(indices, data, start, root, n)
        for size in range(n - 1, 0, -1):
            _swap(indices, data, start, start + size)
            _sink(indices, data, start, 0, size)
    for p in range(start + 1, stop):
        if indices[p - 1] == indices[p]:
            return p
    return -1


@kernel
def sort_rows(indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]) -> int:
    """Sort each row by index, in place; the first row in which an index stands twice, or -1.

    data: values that move along, or empty.
    """
    for i in range(len(indptr) - 1):
        if _sort(indices, data, indptr[i], indptr[i + 1]) >= 0:
            return i
    return -1


@kernel
def parse_lines(
    text: NDArray[np.uint8],
    state: NDArray[np.int64],
    n_features: int,
    n_labels: int,
    x_indptr: NDArray[np.int64],
    x_indices: NDArray[Any],
    x_data: NDArray[np.float32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[Any],
    no_data: NDArray[np.float32],
) -> int:
    """Parse lines until the text ends, the rows are full or a line is bad; returns one of the codes above.

    text (n,): whole lines; the last may lack its newline. state (STATE_SIZE,): zeros to begin with, moved on.
    x_indptr, y_indptr (rows + 1,), whose [0] is set to 0; x_indices, x_data (n // 4 + 1,) and y_indices (n // 2 + 1,)
    cannot overflow. no_data: empty.
    """
    p, row, nx, ny = state[POSITION], state[ROW], state[X_END], state[Y_END]
    inside = state[INSIDE] != 0
    x_indptr[0] = 0
    y_indptr[0] = 0
    code = DONE
    culprit = p
    while p < len(text) or inside:
        if not inside:
            if row == len(x_indptr) - 1:
                code = FULL
                break
            first = p
            c = _at(text, p)
            more = not _ends_token(c)
            while more:
                culprit = p
                label, p = _read_id(text, p)
                c = _at(text, p)
                if c == _COLON and culprit == first and p > first:  # the line begins with a feature
                    p = first
                    break
                more = c == _COMMA
                if p == culprit or not (more or _ends_token(c)):
                    code = BAD_LABEL
                    break
                if label >= n_labels:
                    code = LABEL_RANGE
                    break
                y_indices[ny] = label
                ny += 1
                if more:
                    p += 1
                    c = _at(text, p)
                    while _is_blank(c):
                        p += 1
                        c = _at(text, p)
            if code != DONE:
                break
            twice = _sort(y_indices, no_data, y_indptr[row], ny)
            if twice >= 0:
                code = LABEL_TWICE
                culprit = int(y_indices[twice])
                break
        inside = True
        while True:
            c = _at(text, p)
            while _is_blank(c):
                p += 1
                c = _at(text, p)
            if c == _RETURN and _at(text, p + 1) == _NEWLINE:
                p += 1
                c = _NEWLINE
            if c == _NEWLINE:
                p += 1
                break
            culprit = p
            feature, p = _read_id(text, p)
            if p == culprit or _at(text, p) != _COLON:
                code = BAD_FEATURE
                break
            if feature >= n_features:
                code = FEATURE_RANGE
                break
            p += 1
            start = p
            code, p, value = _read_value(text, p)
            x_indices[nx] = feature
            if code != DONE:
                culprit = start
                break
            x_data[nx] = value
            nx += 1
        if code != DONE:
            break
        twice = _sort(x_indices, x_data, x_indptr[row], nx)
        if twice >= 0:
            code = FEATURE_TWICE
            culprit = int(x_indices[twice])
            break
        inside = False
        row += 1
        x_indptr[row] = nx
        y_indptr[row] = ny
    state[POSITION] = min(p, len(text))
    state[ROW] = row
    state[X_END] = nx
    state[Y_END] = ny
    state[INSIDE] = 1 if inside else 0
    state[CULPRIT] = culprit
    return code
