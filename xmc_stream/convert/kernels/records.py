"""Records of delimited text: lines, but for those that end within quotes; where they begin, and their fields."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.tokens import (
    BLANK,
    DOUBLED,
    HARD,
    KIND,
    MISSING,
    PLAIN,
    SOUND,
    START,
    STOP,
    byte_at,
    character_bytes,
)
from xmc_stream.kernels.jit import inner_kernel, kernel

# of a field: its start, without quotes, within, behind one; a line to skip
BEGIN, PLAIN_TEXT, QUOTED, QUOTE, REST = range(5)
_NEWLINE, _RETURN = 10, 13


@kernel
def next_record(text: NDArray[Any], state: int, delimiter: int, quote: int, first: int) -> tuple[int, int]:
    """The first record that begins at or behind `first` in the text, and the state there; (-1, state) where none does.

    The rules are those of Python's csv.reader(strict=True). Quotes count at the start of a field. Two of them within
    quotes are one character. What is wrong (text behind a closing quote, a carriage return within a line) ends with
    its line.

    text (n,): bytes, the first of which is in `state` (BEGIN where a record begins); quote: -1 for none.
    """
    for i in range(len(text)):
        byte = text[i]
        if state == QUOTED:
            if byte == quote:
                state = QUOTE
        elif byte == _NEWLINE:
            state = BEGIN
            if i + 1 >= first:
                return i + 1, state
        elif state == REST:
            continue
        elif byte == delimiter:
            state = BEGIN
        elif byte == _RETURN:
            state = REST
        elif state == BEGIN:
            state = QUOTED if byte == quote else PLAIN_TEXT
        elif state == QUOTE:
            state = QUOTED if byte == quote else REST
    return -1, state


@inner_kernel
def _record(
    text: NDArray[np.uint8], p: int, delimiter: int, quote: int, columns: NDArray[np.int64], places: NDArray[np.int32],
    row: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Where the record at p ends (-1: not in this text), SOUND, BLANK or HARD, and its newlines."""
    for f in range(places.shape[1]):
        places[row, f, 0], places[row, f, 1], places[row, f, 2] = MISSING, 0, 0
    begin = start = p
    state, column, newlines = BEGIN, 0, 0
    quoted = doubled = returned = False
    status = SOUND
    while p < len(text):
        c = byte_at(text, p)
        n = 1
        if c >= 0x80:
            n = character_bytes(text, p)
        if c == 0 or n == 0:
            status, n = HARD, 1
        newlines += c == _NEWLINE
        if state == QUOTED:
            if c == quote:
                state = QUOTE
        elif state == REST and c != _NEWLINE:
            pass
        elif c in (delimiter, _NEWLINE):
            if state != REST and column < len(columns) and columns[column] >= 0:
                f = columns[column]
                places[row, f, KIND] = DOUBLED if doubled else PLAIN
                places[row, f, START], places[row, f, STOP] = start, p - quoted - returned
            if c == _NEWLINE:
                if status == SOUND and p - returned == begin:
                    status = BLANK
                elif column + 1 != len(columns):
                    status = HARD
                return p + 1, status, newlines
            column += 1
            state, start = BEGIN, p + 1
            quoted = doubled = False
        elif c == _RETURN:
            returned = byte_at(text, p + 1) == _NEWLINE
            if not returned:
                status, state = HARD, REST
        elif state == BEGIN:
            state = PLAIN_TEXT
            if c == quote:
                state, start, quoted = QUOTED, p + 1, True
        elif state == QUOTE:
            state, doubled = QUOTED, True
            if c != quote:
                status, state = HARD, REST
        p += n
    return -1, status, newlines


@kernel
def read_records(
    text: NDArray[np.uint8], p: int, delimiter: int, quote: int, columns: NDArray[np.int64], begins: NDArray[np.int64],
    lines: NDArray[np.int64], status: NDArray[np.uint8], places: NDArray[np.int32],
) -> int:  # fmt: skip
    """Read records from p on that end in this text, as many as there is room for; returns how many.

    text: ends in a newline; columns (n,): which of the places each column has, -1 for none; begins (room + 1,): where each
    record begins and the last ends; lines (room + 1,): the line that it begins in, of which the first is given; status
    (room,): SOUND, BLANK or HARD, that is bad, of other columns or no UTF-8; places (room, fields, 3): see `tokens`.
    """
    n = 0
    begins[0] = p
    while p < len(text) and n < len(status):
        p, status[n], newlines = _record(text, p, delimiter, quote, columns, places, n)
        if p < 0:
            break
        n += 1
        begins[n] = p
        lines[n] = lines[n - 1] + newlines
    return n
