"""The fields of lines: texts, joined for each line, and labels. What is not plain is left to Python, as a HARD line."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.jsonlines import end_of_string, read_hex, skip_digits, skip_space
from xmc_stream.convert.kernels.tokens import (
    DOUBLED,
    ESCAPED,
    HARD,
    KIND,
    LIST,
    PLAIN,
    SOUND,
    START,
    STOP,
    WHOLE,
    byte_at,
    same,
    whole,
)  # fmt: skip
from xmc_stream.convert.kernels.words import put_character
from xmc_stream.kernels.jit import inner_kernel, kernel

_NEWLINE, _SPACE, _QUOTE, _COMMA, _BACKSLASH = 10, 32, 34, 44, 92
_MEANT = np.arange(128)  # of the character behind a backslash, other than u
_MEANT[[98, 102, 110, 114, 116]] = 8, 12, _NEWLINE, 13, 9  # bfnrt
_MOST_ID_DIGITS = 17
_MOST_IDS, _MOST_NAMES = 1000, 100  # labels of a row; each is compared with all


@inner_kernel
def _unescaped(text: NDArray[np.uint8], p: int, stop: int, out: NDArray[np.uint8], at: int) -> int:
    """Write what a sound string with escapes means; where it ends."""
    while p < stop:
        c = byte_at(text, p)
        if c != _BACKSLASH:
            out[at] = c
            p, at = p + 1, at + 1
            continue
        c = byte_at(text, p + 1)
        if c == 117:
            c = read_hex(text, p + 2)
            if c & 0xFC00 == 0xD800:
                c = 0x10000 + ((c & 0x3FF) << 10 | read_hex(text, p + 8) & 0x3FF)
                p += 6
            p += 4
        else:
            c = _MEANT[c]
        p += 2
        at = put_character(c, out, at)
    return at


@inner_kernel
def _meant(text: NDArray[np.uint8], kind: int, p: int, stop: int, out: NDArray[np.uint8], at: int) -> int:
    """Write the text at a place; where it ends."""
    if kind == ESCAPED:
        return _unescaped(text, p, stop, out, at)
    quote = byte_at(text, p - 1) if kind == DOUBLED else -1
    while p < stop:
        c = byte_at(text, p)
        out[at] = c
        at += 1
        p += 2 if c == quote else 1
    return at


@kernel
def join_texts(
    text: NDArray[np.uint8], places: NDArray[np.int32], fields: NDArray[np.int64], out: NDArray[np.uint8],
    ends: NDArray[np.int64],
) -> None:  # fmt: skip
    """The strings of some fields of each line, joined by newlines; NUL characters become blanks, and one ends each text.

    places (rows, all fields, 3): as above; out: as long as the text; ends (rows + 1,): where each begins, the last ends.
    """
    at = 0
    ends[0] = 0
    for row in range(len(places)):
        begin = at
        for k in range(len(fields)):
            f = fields[k]
            start, stop = whole(places[row, f, START]), whole(places[row, f, STOP])
            if k:
                out[at] = _NEWLINE
                at += 1
            at = _meant(text, places[row, f, KIND], start, stop, out, at)
        for p in range(begin, at):
            if out[p] == 0:
                out[p] = _SPACE
        out[at] = 0
        at += 1
        ends[row + 1] = at


@kernel
def read_label_ids(
    text: NDArray[np.uint8], places: NDArray[np.int32], status: NDArray[np.uint8], low: int, high: int,
    ids: NDArray[np.int64], indptr: NDArray[np.int64],
) -> None:  # fmt: skip
    """Ids of labels of each SOUND line, ascending; a line is made HARD unless they are different whole numbers in [low, high).

    places (rows, 3): of the labels; ids: room for half as many as the text has bytes.
    """
    indptr[0] = 0
    for row in range(len(places)):
        begin = at = indptr[row]
        indptr[row + 1] = begin
        if status[row] != SOUND:
            continue
        kind, p, stop = places[row, KIND], whole(places[row, START]), whole(places[row, STOP])
        fits: Any = kind in (WHOLE, LIST)
        p = skip_space(text, p)
        while fits and p < stop:
            end = skip_digits(text, p)
            fits = 0 < end - p <= _MOST_ID_DIGITS and at - begin < _MOST_IDS
            number = 0
            while fits and p < end:
                number = number * 10 + byte_at(text, p) - 48
                p += 1
            place = at
            while place > begin and ids[place - 1] > number:
                ids[place] = ids[place - 1]
                place -= 1
            ids[place] = number
            fits = fits and low <= number < high and (place == begin or ids[place - 1] != number)
            at += 1
            p = skip_space(text, end)
            if p < stop:
                fits = fits and byte_at(text, p) == _COMMA
                p = skip_space(text, p + 1)
        if fits:
            indptr[row + 1] = at
        else:
            status[row] = HARD


@inner_kernel
def _is_space(text: NDArray[np.uint8], p: int) -> bool:
    """Whether the character at p is white space, as str.strip has it."""
    c = byte_at(text, p)
    if c < 0x80:
        return 9 <= c <= 13 or 28 <= c <= 32
    if c == 0xC2:
        return byte_at(text, p + 1) in (0x85, 0xA0)
    if c < 0xE1 or c > 0xE3:
        return False
    two = byte_at(text, p + 1) << 8 | byte_at(text, p + 2)
    if c == 0xE1:
        return two == 0x9A80
    if c == 0xE3:
        return two == 0x8080
    return 0x8080 <= two <= 0x808A or two in (0x80A8, 0x80A9, 0x80AF, 0x819F)


@inner_kernel
def _stripped(text: NDArray[np.uint8], start: int, stop: int) -> tuple[int, int]:
    """The bounds of text[start:stop] without white space around it."""
    while start < stop and _is_space(text, start):
        start += 1
        while start < stop and byte_at(text, start) & 0xC0 == 0x80:
            start += 1
    while stop > start:
        last = stop - 1
        while byte_at(text, last) & 0xC0 == 0x80:
            last -= 1
        if not _is_space(text, last):
            break
        stop = last
    return start, stop


@inner_kernel
def _fits(out: NDArray[np.uint8], ends: NDArray[np.int64], begin: int, n: int, stop: int) -> bool:
    """Whether the name out[ends[n]:stop] has something in it, no NUL, and is none of the names from `begin` on."""
    size = stop - ends[n]
    if size == 0 or n - begin >= _MOST_NAMES:
        return False
    for p in range(ends[n], stop):
        if out[p] == 0:
            return False
    for other in range(begin, n):
        if ends[other + 1] - ends[other] == size + 1 and same(out, ends[other], out, ends[n], size):
            return False
    return True


@inner_kernel
def _listed(
    text: NDArray[np.uint8], p: int, stop: int, out: NDArray[np.uint8], ends: NDArray[np.int64], n: int
) -> int:  # fmt: skip
    """Take the strings of a list; the number of names then, -1 where one does not fit."""
    begin = n
    p = skip_space(text, p)
    while p < stop:
        if byte_at(text, p) != _QUOTE:
            return -1
        end, _ = end_of_string(text, p + 1)
        at = _unescaped(text, p + 1, end, out, ends[n])
        if not _fits(out, ends, begin, n, at):
            return -1
        out[at] = 0
        n += 1
        ends[n] = at + 1
        p = skip_space(text, end + 1)
        if p < stop:
            p = skip_space(text, p + 1)  # behind the comma
    return n


@inner_kernel
def _parted(
    text: NDArray[np.uint8], stop: int, delimiter: NDArray[np.uint8], out: NDArray[np.uint8], ends: NDArray[np.int64],
    n: int,
) -> int:  # fmt: skip
    """Take the parts of a text that begins at ends[n] of `text`, stripped; the number of names then, -1 where one does not fit.

    `text` may be `out`: what is written is never beyond what is read.
    """
    begin, p, size = n, ends[n], len(delimiter)
    while True:
        end = p
        while end < stop and not (end + size <= stop and same(text, end, delimiter, 0, size)):
            end += 1
        first, last = _stripped(text, p, end)
        for i in range(last - first):
            out[ends[n] + i] = text[first + i]
        at = ends[n] + last - first
        if not _fits(out, ends, begin, n, at):
            return -1
        p = end + size
        out[at] = 0
        n += 1
        ends[n] = at + 1
        if end >= stop:
            return n


@kernel
def read_label_names(
    text: NDArray[np.uint8], places: NDArray[np.int32], status: NDArray[np.uint8], delimiter: NDArray[np.uint8],
    blank: bool, out: NDArray[np.uint8], ends: NDArray[np.int64], indptr: NDArray[np.int64],
) -> None:  # fmt: skip
    """Names of labels of each SOUND line; a line is made HARD unless they are different texts with something in them.

    places (rows, 3): of the labels; delimiter: what parts the names in a text, which are stripped, empty where a text is one
    name; blank: whether a blank text has no names; out: as long as the text and a few bytes more, a NUL character ends each
    name; ends: where each name begins and the last ends; indptr (rows + 1,): where the names of each line begin in `ends`.
    """
    indptr[0] = ends[0] = 0
    for row in range(len(places)):
        n = whole(indptr[row])
        indptr[row + 1] = n
        if status[row] != SOUND:
            continue
        kind, start, stop = places[row, KIND], whole(places[row, START]), whole(places[row, STOP])
        if kind == LIST:
            n = _listed(text, start, stop, out, ends, n)
        elif kind in (PLAIN, ESCAPED, DOUBLED):
            at = _meant(text, kind, start, stop, out, ends[n])
            first, last = _stripped(out, ends[n], at)
            if first == last and blank:
                pass
            elif len(delimiter):
                n = _parted(out, at, delimiter, out, ends, n)
            elif _fits(out, ends, n, n, at):
                out[at] = 0
                n += 1
                ends[n] = at + 1
            else:
                n = -1
        else:
            n = -1
        if n < 0:
            status[row] = HARD
        else:
            indptr[row + 1] = n
