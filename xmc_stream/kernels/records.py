"""Where records of delimited text begin: lines, but for those that end within quotes."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

START, PLAIN, QUOTED, QUOTE, REST = range(
    5
)  # of a field: its start, without quotes, within, behind one; a line to skip
_NEWLINE, _RETURN = 10, 13


@kernel
def next_record(text: NDArray[Any], state: int, delimiter: int, quote: int, first: int) -> tuple[int, int]:
    """The first record that begins at or behind `first` in the text, and the state there; (-1, state) where none does.

    The rules are those of Python's csv.reader(strict=True). Quotes count at the start of a field. Two of them within
    quotes are one character. What is wrong (text behind a closing quote, a carriage return within a line) ends with
    its line.

    text (n,): bytes, the first of which is in `state` (START where a record begins); quote: -1 for none.
    """
    for i in range(len(text)):
        byte = text[i]
        if state == QUOTED:
            if byte == quote:
                state = QUOTE
        elif byte == _NEWLINE:
            state = START
            if i + 1 >= first:
                return i + 1, state
        elif state == REST:
            continue
        elif byte == delimiter:
            state = START
        elif byte == _RETURN:
            state = REST
        elif state == START:
            state = QUOTED if byte == quote else PLAIN
        elif state == QUOTE:
            state = QUOTED if byte == quote else REST
    return -1, state
