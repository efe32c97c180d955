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
    BAD_FEATURE,
    BAD_LABEL,
    COLON,
    COMMA,
    DONE,
    FEATURE_BELOW,
    FEATURE_RANGE,
    FEATURE_TWICE,
    FULL,
    HASH,
    LABEL_BELOW,
    LABEL_RANGE,
    LABEL_TWICE,
    NO_COMMENT,
    SLOW,
    SUM_RANGE,
    byte_at,
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

# SLOW of parse_lines: text[CULPRIT:POSITION] is the number: store its value in x_data[X_END] and add 1 to X_END, or, where
# ID is beyond the last feature, to X_DROPPED; and call again. FULL: take the rows out, call start_block and call again.

# What stands where in the state. POSITION: of the next byte; ROW: rows filled, while INSIDE the row being filled; X_END,
# Y_END: entries filled in x_indices and x_data, in y_indices; WHERE: in a line, one of the three below; CULPRIT: where the
# bad or slow token begins; ID: of the feature whose value is bad or slow, or the id that is wrong; what was dropped and
# summed in the row being filled
POSITION, ROW, X_END, Y_END, WHERE, CULPRIT, ID, X_DROPPED, Y_DROPPED, ROW_SUMMED = range(10)
# Counters, which go on from text to text. LINES: behind us; SKIPPED: rows left out without a word; SUMMED: entries that
# another one of the same id took in; and the least and largest ids in the rows
(
    LINES, BLANK_LINES, SKIPPED, DROPPED_FEATURES, DROPPED_LABELS, SUMMED, X_LEAST, X_MOST, Y_LEAST, Y_MOST, STATE_SIZE,
) = range(10, 21)  # fmt: skip

BEGIN, INSIDE, LEAVE = 0, 1, 2  # its begin; its features; anywhere: it is bad and is to be left out

# Flags. SKIP: leave out bad rows without a word; SUM: add up values of a feature that stands twice in a row, count a label
# that does once; DROP: leave out features and labels beyond the last
LIBSVM, SKIP, SUM, DROP = 1, 2, 4, 8


def new_state() -> NDArray[np.int64]:
    """The state before the first text."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[[X_LEAST, Y_LEAST]] = 2**62
    state[[X_MOST, Y_MOST]] = -1
    return state


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
def _sort(indices: NDArray[Any], data: NDArray[Any], start: int, stop: int) -> int:
    """Sort the entries [start, stop) by index, in place; the place of an index that stands there twice, or -1.

    data: values that move along, or empty. Shell's sort: no buffer, and no order makes it slow.
    """
    ordered = True
    for p in range(start + 1, stop):
        ordered = ordered and indices[p - 1] < indices[p]
    if ordered:
        return -1
    gap = stop - start
    while gap > 1:
        gap = max(1, gap * 4 // 9)
        for p in range(start + gap, stop):
            q = p
            while q >= start + gap and _before(indices, data, q, q - gap):
                _swap(indices, data, q - gap, q)
                q -= gap
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


# what is wrong with the entries of a row, and what parse_lines returns of labels and of features then
_FINE, _BELOW, _TWICE, _BEYOND = 0, 1, 2, 3
_OF_LABELS = (DONE, LABEL_BELOW, LABEL_TWICE, DONE)
_OF_FEATURES = (DONE, FEATURE_BELOW, FEATURE_TWICE, SUM_RANGE)


@kernel
def _row_labels(
    text: NDArray[np.uint8], p: int, flags: int, stop: int, comment: int, indices: NDArray[Any], n: int
) -> tuple[int, int, int, int, int, int]:
    """Read the labels that a line begins with, to the n-th entry of `indices` and on.

    Returns a code, where they end, the entries now, how many were dropped, where the last label begins, and its number.
    """
    first = culprit = p
    dropped, number = 0, 0
    more = not ends_token(byte_at(text, p), comment)
    while more:
        culprit = p
        some, number, p = read_label(text, p, comment)
        c = byte_at(text, p)
        if c == COLON and culprit == first and p > first:  # the line begins with a feature
            return DONE, first, n, dropped, culprit, number
        more = c == COMMA
        if stop < 0 or not some or not (more or ends_token(c, comment)):
            return BAD_LABEL, p, n, dropped, culprit, number
        if number < stop:
            indices[n] = number
            n += 1
        elif flags & DROP:
            dropped += 1
        else:
            return LABEL_RANGE, p, n, dropped, culprit, number
        if more:
            p = skip_blanks(text, p + 1)
    return DONE, p, n, dropped, culprit, number


@kernel
def _row_features(
    text: NDArray[np.uint8], p: int, flags: int, stop: int, comment: int, indices: NDArray[Any], data: NDArray[np.float32],
    n: int, dropped: int,
) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """Read features and values to the end of a line; see `_row_labels`. dropped: of the line before p."""
    while True:
        p = skip_blanks(text, p)
        culprit = p
        number, p = read_id(text, p)
        if p == culprit and ends_line(text, p, comment):
            return DONE, p, n, dropped, culprit, number
        if p == culprit or byte_at(text, p) != COLON:
            return BAD_FEATURE, p, n, dropped, culprit, number
        if number >= stop and not flags & DROP:
            return FEATURE_RANGE, p, n, dropped, culprit, number
        start = p + 1
        plain, p, value = read_plain(text, start, comment)
        if plain and number < stop:
            indices[n], data[n] = number, value
            n += 1
            continue
        code = DONE
        if not plain:
            code, p, value = read_value(text, start, comment)
        if number < stop:
            indices[n], data[n] = number, value  # of a value that the caller reads, the index alone counts
        if code != DONE:
            return code, p, n, dropped, start, number
        n += number < stop
        dropped += number >= stop


@kernel
def _close(
    indices: NDArray[Any], data: NDArray[Any], first: int, end: int, least: int, flags: int
) -> tuple[int, int, int, int]:
    """Sort the entries [first, end) of a row, one at least; of equal ones one is left, if they are to be summed.

    Returns what is wrong, where they end now, how many were taken in, and the index that is wrong.
    """
    twice = _sort(indices, data, first, end)
    if indices[first] < least:
        return _BELOW, end, 0, indices[first]
    if twice < 0:
        return _FINE, end, 0, indices[first]
    if not flags & SUM:
        return _TWICE, end, 0, indices[twice]
    left = _sum_up(indices, data, first, end)
    beyond = _infinite(data, first, left) if len(data) else -1
    if beyond >= 0:
        return _BEYOND, left, end - left, indices[beyond]
    return _FINE, left, end - left, indices[first]


@kernel
def _least_and_most(state: NDArray[np.int64], at: int, indices: NDArray[Any], first: int, end: int) -> None:
    """Have the state at `at` and behind it hold the least and the largest index so far."""
    if end > first:
        state[at] = min(state[at], indices[first])
        state[at + 1] = max(state[at + 1], indices[end - 1])


@kernel
def parse_lines(
    text: NDArray[np.uint8], state: NDArray[np.int64], flags: int, bounds: NDArray[np.int64], x_indptr: NDArray[np.int64],
    x_indices: NDArray[Any], x_data: NDArray[np.float32], y_indptr: NDArray[np.int64], y_indices: NDArray[Any],
    no_data: NDArray[np.float32],
) -> int:  # fmt: skip
    """Parse lines until the text ends, the rows are full or a line is bad; returns a code of `tokens`.

    text (n,): whole lines, the last with its newline too. state (STATE_SIZE,): of `new_state`, moved on; after a bad line
    it can be left out by WHERE = LEAVE. bounds (4,): the first feature id and the one behind the last, the same of
    labels; no labels are read if the last is -1. x_indptr, y_indptr (rows + 1,), whose [0] is set to 0; x_indices, x_data
    (n // 4 + 1,) and y_indices (n // 2 + 1,) cannot overflow. no_data: empty.
    """
    p, row, nx, ny = state[POSITION], state[ROW], state[X_END], state[Y_END]
    where, culprit, number = state[WHERE], state[CULPRIT], state[ID]
    x_dropped, y_dropped, summed = state[X_DROPPED], state[Y_DROPPED], state[ROW_SUMMED]
    comment, code = HASH if flags & LIBSVM else NO_COMMENT, DONE
    x_indptr[0] = y_indptr[0] = 0
    while True:
        if where == LEAVE:
            nx, ny, p, where = x_indptr[row], y_indptr[row], next_line(text, p), BEGIN
            state[LINES] += 1
        if where == BEGIN:
            if p == len(text) or row == len(x_indptr) - 1:
                code = DONE if p == len(text) else FULL
                break
            if comment == HASH:
                p = skip_blanks(text, p)
                if ends_line(text, p, comment):
                    p = next_line(text, p)
                    state[LINES] += 1
                    state[BLANK_LINES] += 1
                    continue
            where, x_dropped, summed = INSIDE, 0, 0
            code, p, ny, y_dropped, culprit, number = _row_labels(text, p, flags, bounds[3], comment, y_indices, ny)
            if code == DONE and ny > y_indptr[row]:
                wrong, ny, summed, number = _close(y_indices, no_data, y_indptr[row], ny, bounds[2], flags)
                code = _OF_LABELS[wrong]
        if code == DONE:
            code, p, nx, x_dropped, culprit, number = _row_features(
                text, p, flags, bounds[1], comment, x_indices, x_data, nx, x_dropped
            )
        if code == DONE and nx > x_indptr[row]:
            wrong, nx, more, number = _close(x_indices, x_data, x_indptr[row], nx, bounds[0], flags)
            code, summed = _OF_FEATURES[wrong], summed + more
        if code == SLOW or (code != DONE and not flags & SKIP):
            break
        if code != DONE:
            code, where = DONE, LEAVE
            state[SKIPPED] += 1
            continue
        p, where = next_line(text, p), BEGIN
        _least_and_most(state, X_LEAST, x_indices, x_indptr[row], nx)
        _least_and_most(state, Y_LEAST, y_indices, y_indptr[row], ny)
        state[LINES] += 1
        state[DROPPED_FEATURES] += x_dropped
        state[DROPPED_LABELS] += y_dropped
        state[SUMMED] += summed
        row += 1
        x_indptr[row], y_indptr[row] = nx, ny
    state[POSITION], state[ROW], state[X_END], state[Y_END] = p, row, nx, ny
    state[WHERE], state[CULPRIT], state[ID] = where, culprit, number
    state[X_DROPPED], state[Y_DROPPED], state[ROW_SUMMED] = x_dropped, y_dropped, summed
    return code
