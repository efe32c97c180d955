"""Lines of text to compressed sparse rows: `l1,l2,... f:v f:v ...`, in XMLRepo's dialect or libsvm's.

XMLRepo: every line is a row, also an empty one. libsvm: `#` begins a comment, lines without anything else are no rows,
blanks may precede the labels, a label may be written `+1` or `1.0`.

What is wrong is returned as a code and a position; the caller words it. A text ends in a newline, which every scan stops
at: no access is beyond it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.tokens import (
    COLON,
    COMMA,
    DONE,
    HASH,
    NO_COMMENT,
    SLOW,
    at,
    ends_line,
    ends_token,
    next_line,
    read_id,
    read_label,
    read_plain,
    read_value,
    skip_blanks,
)
from xmc_stream.kernels.jit import kernel

# what parse_lines returns
# DONE: the whole text is parsed; BAD_VALUE, VALUE_RANGE: of ID; SLOW: text[CULPRIT:POSITION] is a decimal number: store
# its value in x_data[X_END] and add 1 to X_END, or, where ID is beyond the last feature, to X_DROPPED; and call again
FULL = 1  # no row left in the arrays: take the rows out, call start_block and call again
BAD_LABEL = 3  # not digits, or nothing after a comma
BAD_FEATURE = 4  # not digits and a colon
LABEL_RANGE = 6
FEATURE_RANGE = 7
LABEL_TWICE = 9
FEATURE_TWICE = 10
SUM_RANGE = 11  # the values of ID add up beyond float32
LABEL_BELOW = 12  # ID is below the first one
FEATURE_BELOW = 13

# what stands where in the state
POSITION = 0  # of the next byte
ROW = 1  # rows filled; while INSIDE, the row being filled
X_END = 2  # entries filled in x_indices and x_data
Y_END = 3  # entries filled in y_indices
WHERE = 4  # in a line: one of the three below
CULPRIT = 5  # where the bad or slow token begins
ID = 6  # of the feature whose value is bad or slow; the one twice in the row or below the first
X_DROPPED = 7  # of the row being filled, as the next two
Y_DROPPED = 8
ROW_SUMMED = 9
# counters, which go on from text to text
LINES = 10  # behind us
BLANK_LINES = 11
SKIPPED = 12  # rows left out without a word
DROPPED_FEATURES = 13
DROPPED_LABELS = 14
SUMMED = 15  # entries that another one of the same id took in
X_LEAST, X_MOST, Y_LEAST, Y_MOST = 16, 17, 18, 19  # ids in the rows
STATE_SIZE = 20

BEGIN, INSIDE, LEAVE = 0, 1, 2  # its begin; its features; anywhere: it is bad and is to be left out

# flags
LIBSVM = 1
SKIP = 2  # leave out bad rows without a word
SUM = 4  # add up values of a feature that stands twice in a row, count a label that does once
DROP = 8  # leave out features and labels beyond the last

_SHORT_ROW = 16


def new_state() -> NDArray[np.int64]:
    """The state before the first text."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[[X_LEAST, Y_LEAST]] = 2**62
    state[[X_MOST, Y_MOST]] = -1
    return state


def start_text(state: NDArray[np.int64]) -> None:
    """Before each text."""
    state[:LINES] = 0


def start_block(state: NDArray[np.int64]) -> None:
    """When the rows were taken out."""
    state[[ROW, X_END, Y_END]] = 0


@kernel
def _before(indices: NDArray[Any], data: NDArray[Any], a: int, b: int) -> bool:
    """The order of entries: by index, then by value, so that equal ones are the same."""
    return indices[a] < indices[b] or (indices[a] == indices[b] and len(data) > 0 and data[a] < data[b])


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
        if child + 1 < size and _before(indices, data, start + child, start + child + 1):
            child += 1
        if not _before(indices, data, start + root, start + child):
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
            while q > start and _before(indices, data, q, q - 1):
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
def _sum_up(indices: NDArray[Any], data: NDArray[Any], start: int, stop: int) -> int:
    """Add up sorted entries of the same index, in their order; returns where they end then."""
    end = start
    for p in range(start + 1, stop):
        if indices[p] == indices[end]:
            if len(data):
                data[end] += data[p]
        else:
            end += 1
            indices[end] = indices[p]
            if len(data):
                data[end] = data[p]
    return end + 1


@kernel
def _infinite(data: NDArray[Any], start: int, stop: int) -> int:
    """The first place in [start, stop) of what is no finite value, or -1."""
    for p in range(start, stop):
        if not np.isfinite(data[p]):
            return p
    return -1


@kernel
def parse_lines(
    text: NDArray[np.uint8],
    state: NDArray[np.int64],
    flags: int,
    bounds: NDArray[np.int64],
    x_indptr: NDArray[np.int64],
    x_indices: NDArray[Any],
    x_data: NDArray[np.float32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[Any],
    no_data: NDArray[np.float32],
) -> int:
    """Parse lines until the text ends, the rows are full or a line is bad; returns one of the codes above.

    text (n,): whole lines, the last with its newline too. state (STATE_SIZE,): of `new_state`, moved on; after a bad line
    it can be left out by WHERE = LEAVE. bounds (4,): the first feature id and the one behind the last, the same of
    labels; no labels are read if the last is -1. x_indptr, y_indptr (rows + 1,), whose [0] is set to 0; x_indices, x_data
    (n // 4 + 1,) and y_indices (n // 2 + 1,) cannot overflow. no_data: empty.
    """
    p, row, nx, ny = state[POSITION], state[ROW], state[X_END], state[Y_END]
    where, culprit, number = state[WHERE], state[CULPRIT], state[ID]
    x_dropped, y_dropped, summed = state[X_DROPPED], state[Y_DROPPED], state[ROW_SUMMED]
    x_first, x_stop, y_first, y_stop = bounds[0], bounds[1], bounds[2], bounds[3]
    drop = flags & DROP != 0
    comment = HASH if flags & LIBSVM else NO_COMMENT
    x_indptr[0] = 0
    y_indptr[0] = 0
    code = DONE
    while True:
        if where == LEAVE:
            nx, ny = x_indptr[row], y_indptr[row]
            p = next_line(text, p)
            state[LINES] += 1
            where = BEGIN
        if where == BEGIN:
            if p == len(text):
                break
            if row == len(x_indptr) - 1:
                code = FULL
                break
            if comment == HASH:
                p = skip_blanks(text, p)
                if ends_line(text, p, comment):
                    p = next_line(text, p)
                    state[LINES] += 1
                    state[BLANK_LINES] += 1
                    continue
            where = INSIDE
            x_dropped = y_dropped = summed = 0
            first = p
            more = not ends_token(at(text, p), comment)
            while more:
                culprit = p
                some, number, p = read_label(text, p, comment)
                c = at(text, p)
                if c == COLON and culprit == first and p > first:  # the line begins with a feature
                    p = first
                    break
                more = c == COMMA
                if y_stop < 0 or not some or not (more or ends_token(c, comment)):
                    code = BAD_LABEL
                    break
                if number < y_stop:
                    y_indices[ny] = number
                    ny += 1
                elif drop:
                    y_dropped += 1
                else:
                    code = LABEL_RANGE
                    break
                if more:
                    p = skip_blanks(text, p + 1)
            if code == DONE and ny > y_indptr[row]:
                twice = _sort(y_indices, no_data, y_indptr[row], ny)
                number = y_indices[y_indptr[row]]
                if number < y_first:
                    code = LABEL_BELOW
                elif twice >= 0 and flags & SUM:
                    end = _sum_up(y_indices, no_data, y_indptr[row], ny)
                    summed += ny - end
                    ny = end
                elif twice >= 0:
                    number = y_indices[twice]
                    code = LABEL_TWICE
        while code == DONE:
            p = skip_blanks(text, p)
            culprit = p
            number, p = read_id(text, p)
            if p == culprit and ends_line(text, p, comment):
                break
            if p == culprit or at(text, p) != COLON:
                code = BAD_FEATURE
                break
            if number >= x_stop and not drop:
                code = FEATURE_RANGE
                break
            start = p + 1
            plain, p, value = read_plain(text, start, comment)
            if not plain:
                code, p, value = read_value(text, start, comment)
            if number < x_stop:
                x_indices[nx] = number
                if code == DONE:
                    x_data[nx] = value
                    nx += 1
            else:
                x_dropped += code == DONE
            if code != DONE:
                culprit = start
        if code == DONE and nx > x_indptr[row]:
            twice = _sort(x_indices, x_data, x_indptr[row], nx)
            number = x_indices[x_indptr[row]]
            if number < x_first:
                code = FEATURE_BELOW
            elif twice >= 0 and flags & SUM:
                end = _sum_up(x_indices, x_data, x_indptr[row], nx)
                summed += nx - end
                nx = end
                infinite = _infinite(x_data, x_indptr[row], nx)
                if infinite >= 0:
                    number = x_indices[infinite]
                    code = SUM_RANGE
            elif twice >= 0:
                number = x_indices[twice]
                code = FEATURE_TWICE
        if code == SLOW:
            break
        if code != DONE:
            if not flags & SKIP:
                break
            code = DONE
            state[SKIPPED] += 1
            where = LEAVE
            continue
        p = next_line(text, p)
        where = BEGIN
        if nx > x_indptr[row]:
            state[X_LEAST] = min(state[X_LEAST], x_indices[x_indptr[row]])
            state[X_MOST] = max(state[X_MOST], x_indices[nx - 1])
        if ny > y_indptr[row]:
            state[Y_LEAST] = min(state[Y_LEAST], y_indices[y_indptr[row]])
            state[Y_MOST] = max(state[Y_MOST], y_indices[ny - 1])
        state[LINES] += 1
        state[DROPPED_FEATURES] += x_dropped
        state[DROPPED_LABELS] += y_dropped
        state[SUMMED] += summed
        row += 1
        x_indptr[row] = nx
        y_indptr[row] = ny
    state[POSITION], state[ROW], state[X_END], state[Y_END] = p, row, nx, ny
    state[WHERE], state[CULPRIT], state[ID] = where, culprit, number
    state[X_DROPPED], state[Y_DROPPED], state[ROW_SUMMED] = x_dropped, y_dropped, summed
    return code
