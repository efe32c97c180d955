"""Lines of JSON objects: where the values of some fields stand, and their texts and labels.

What is not plainly sound is HARD: Python's json reads that line, and says what is wrong with it if anything is. So these
kernels accept less than json does, never more, and never another value. A text ends in a newline, where each scan stops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.tokens import (
    BLANK,
    ESCAPED,
    HARD,
    KIND,
    LIST,
    MISSING,
    OTHER,
    PLAIN,
    SOUND,
    START,
    STOP,
    WHOLE,
    byte_at,
    character_bytes,
    same,
)  # fmt: skip
from xmc_stream.kernels.jit import inner_kernel, kernel

_TAB, _NEWLINE, _RETURN, _SPACE, _QUOTE, _COMMA, _MINUS, _POINT, _COLON = 9, 10, 13, 32, 34, 44, 45, 46, 58
_OPEN, _BACKSLASH, _CLOSE, _BEGIN, _END = 91, 92, 93, 123, 125
_LITERALS = np.frombuffer(b"truefalsenull", np.uint8)
_MOST_DEPTH = 60  # of lists and objects in each other
_MOST_DIGITS = 1000  # of a number; Python refuses to read some thousands


@inner_kernel
def skip_space(text: NDArray[np.uint8], p: int) -> int:
    """Behind white space."""
    while byte_at(text, p) in (_SPACE, _TAB, _RETURN):
        p += 1
    return p


@inner_kernel
def read_hex(text: NDArray[np.uint8], p: int) -> int:
    """The number that four hexadecimal digits write, -1 where they do not."""
    number = 0
    for i in range(4):
        c = byte_at(text, p + i)
        digit = c - 48
        if not 0 <= digit <= 9:
            digit = (c | 32) - 87
            if not 10 <= digit <= 15:
                return -1
        number = number << 4 | digit
    return number


@inner_kernel
def _escape(text: NDArray[np.uint8], p: int) -> int:
    """How many bytes the escape at p has; 0 where it is none, or half a pair of surrogates."""
    c = byte_at(text, p + 1)
    if c in (_QUOTE, _BACKSLASH, 47, 98, 102, 110, 114, 116):  # "\/bfnrt
        return 2
    if c != 117:  # u
        return 0
    code = read_hex(text, p + 2)
    if code < 0 or 0xDC00 <= code < 0xE000:
        return 0
    if code & 0xFC00 != 0xD800:
        return 6
    if byte_at(text, p + 6) != _BACKSLASH or byte_at(text, p + 7) != 117 or read_hex(text, p + 8) & ~0x3FF != 0xDC00:
        return 0
    return 12


@inner_kernel
def end_of_string(text: NDArray[np.uint8], p: int) -> tuple[int, bool]:
    """Where the string that begins behind the quote before p has its closing one (-1: nowhere), and whether it has escapes."""
    escaped = False
    while True:
        c = byte_at(text, p)
        if c == _QUOTE:
            return p, escaped
        if c < _SPACE:
            return -1, escaped
        n = 1
        if c == _BACKSLASH:
            escaped = True
            n = _escape(text, p)
        elif c >= 0x80:
            n = character_bytes(text, p)
        if n == 0:
            return -1, escaped
        p += n


@inner_kernel
def skip_digits(text: NDArray[np.uint8], p: int) -> int:
    """Behind the digits."""
    while 48 <= byte_at(text, p) <= 57:
        p += 1
    return p


@inner_kernel
def _number(text: NDArray[np.uint8], p: int) -> tuple[int, bool]:
    """Where a number ends (-1: it is none), and whether it is whole."""
    start = p
    if byte_at(text, p) == _MINUS:
        p += 1
    end = p + 1 if byte_at(text, p) == 48 else skip_digits(text, p)
    if end == p:
        return -1, False
    p = end
    whole = True
    if byte_at(text, p) == _POINT:
        whole = False
        end = skip_digits(text, p + 1)
        if end == p + 1:
            return -1, False
        p = end
    if byte_at(text, p) | 32 == 101:  # e
        whole = False
        p += 1
        if byte_at(text, p) in (43, _MINUS):
            p += 1
        end = skip_digits(text, p)
        if end == p:
            return -1, False
        p = end
    return p if p - start <= _MOST_DIGITS else -1, whole


@inner_kernel
def _literal(text: NDArray[np.uint8], p: int) -> int:
    """Behind true, false or null; -1 for anything else."""
    c = byte_at(text, p)
    start, n = (0, 4) if c == 116 else (4, 5) if c == 102 else (9, 4)
    return p + n if same(text, p, _LITERALS, start, n) else -1


@inner_kernel
def _key(text: NDArray[np.uint8], p: int) -> tuple[int, int, bool]:
    """The field that begins at p: (where its value begins, -1 if it is none; where its name ends; whether that has escapes)."""
    if byte_at(text, p) != _QUOTE:
        return -1, p, False
    end, escaped = end_of_string(text, p + 1)
    if end < 0:
        return -1, p, escaped
    colon = skip_space(text, end + 1)
    if byte_at(text, colon) != _COLON:
        return -1, p, escaped
    return skip_space(text, colon + 1), end, escaped


@inner_kernel
def _value(text: NDArray[np.uint8], p: int) -> tuple[int, int]:
    """Where the value at p ends (-1: it is none, or deep), and its kind."""
    kind = -1
    depth = 0
    objects = np.uint64(0)  # a bit for each list or object that is open, the innermost lowest
    one = np.uint64(1)
    while True:
        c = byte_at(text, p)
        now = OTHER
        opened = False
        if c == _QUOTE:
            p, escaped = end_of_string(text, p + 1)
            now = ESCAPED if escaped else PLAIN
            p = p + 1 if p >= 0 else -1
        elif c in (_OPEN, _BEGIN):
            now = LIST if c == _OPEN else OTHER
            p = skip_space(text, p + 1)
            if byte_at(text, p) == c + 2:  # closes it
                p += 1
            else:
                opened = True
                if depth == _MOST_DEPTH:
                    return -1, OTHER
                depth += 1
                objects = objects << one | np.uint64(c == _BEGIN)
                if c == _BEGIN:
                    p, _, _ = _key(text, p)
        elif c == _MINUS or 48 <= c <= 57:
            p, whole = _number(text, p)
            now = WHOLE if whole else OTHER
        else:
            p = _literal(text, p)
        if p < 0:
            return -1, OTHER
        if kind < 0:
            kind = now
        while not opened:  # what follows a value
            if depth == 0:
                return p, kind
            p = skip_space(text, p)
            c = byte_at(text, p)
            if c == _COMMA:
                p = skip_space(text, p + 1)
                if objects & one:
                    p, _, _ = _key(text, p)
                    if p < 0:
                        return -1, OTHER
                opened = True  # another value
            elif c == (_END if objects & one else _CLOSE):
                p += 1
                depth -= 1
                objects >>= one
            else:
                return -1, OTHER


@inner_kernel
def _field(
    text: NDArray[np.uint8], start: int, stop: int, names: NDArray[np.uint8], ends: NDArray[np.int64]
) -> int:  # fmt: skip
    """Which of the names text[start:stop] is, -1 for none."""
    for f in range(len(ends) - 1):
        if ends[f + 1] - ends[f] == stop - start and same(text, start, names, ends[f], stop - start):
            return f
    return -1


@inner_kernel
def _object(
    text: NDArray[np.uint8], p: int, names: NDArray[np.uint8], ends: NDArray[np.int64], places: NDArray[np.int32],
    row: int,
) -> int:  # fmt: skip
    """Whether the line at p is SOUND, BLANK or HARD; places[row]: of the last value of each field."""
    for f in range(places.shape[1]):
        places[row, f, 0], places[row, f, 1], places[row, f, 2] = MISSING, 0, 0
    p = skip_space(text, p)
    if byte_at(text, p) == _NEWLINE:
        return BLANK
    if byte_at(text, p) != _BEGIN:
        return HARD
    p = skip_space(text, p + 1)
    closed = byte_at(text, p) == _END
    while not closed:
        value, name_end, escaped = _key(text, p)
        if value < 0 or escaped:
            return HARD
        f = _field(text, p + 1, name_end, names, ends)
        end, kind = _value(text, value)
        if end < 0:
            return HARD
        if f >= 0:
            inner = kind in (PLAIN, ESCAPED, LIST)
            places[row, f, KIND] = kind
            places[row, f, START], places[row, f, STOP] = value + inner, end - inner
        p = skip_space(text, end)
        closed = byte_at(text, p) == _END
        if not closed:
            if byte_at(text, p) != _COMMA:
                return HARD
            p = skip_space(text, p + 1)
    return SOUND if byte_at(text, skip_space(text, p + 1)) == _NEWLINE else HARD


@kernel
def read_objects(
    text: NDArray[np.uint8], p: int, names: NDArray[np.uint8], ends: NDArray[np.int64], begins: NDArray[np.int64],
    status: NDArray[np.uint8], places: NDArray[np.int32],
) -> int:  # fmt: skip
    """Read lines from p on, as many as there are or as there is room for; returns how many.

    names: of fields, field f being names[ends[f]:ends[f + 1]]; begins (room + 1,): where each line begins and the last ends;
    status (room,): SOUND, BLANK or HARD; places (room, fields, 3): the KIND of each value, where it begins and ends, without
    the quotes or brackets around it.
    """
    n = 0
    begins[0] = p
    while p < len(text) and n < len(status):
        status[n] = _object(text, p, names, ends, places, n)
        while byte_at(text, p) != _NEWLINE:
            p += 1
        p += 1
        n += 1
        begins[n] = p
    return n
