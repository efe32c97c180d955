"""Texts to rows of words: a table that numbers different words, what a word is, and how often each stands in a row.

Texts come in an array of UTF-8, each ended by a NUL character. Arrays of text have PADDING bytes behind their end, so that
eight bytes may be read wherever a word begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.tokens import same
from xmc_stream.kernels.jit import inner_kernel, kernel

PADDING = 8
DONE, FULL, CASE = range(
    3
)  # what ends a count: all rows, no room for another word, a row that Python must put in lower case
WORD, SPECIAL = np.uint32(2**31), np.uint32(2**30)  # of a character, beside its lower case
ROWS, TIMES, PLACE, FIRST = range(4)  # columns of `Words.counts`
_LOWER = np.uint32(2**21 - 1)
_BLANK = 32
_NUMBER = np.uint64(2**32 - 1)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF, _EIGHT = np.uint64(32), np.uint64(8)


class Words(NamedTuple):
    """Different words, numbered by their first appearance.

    slots (a power of two,): the number from 1, above it 32 bits of the hash; 0 is free; text: the words in turn, in UTF-8;
    ends (room + 1,): where each word begins and the last one ends; counts (room, 4): rows with the word, times it occurs,
    its place in the rows at hand, the number of its first row; n (1,): how many words.
    """

    slots: NDArray[np.uint64]
    text: NDArray[np.uint8]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    n: NDArray[np.int64]


class Room(NamedTuple):
    """Room for the longest row: its words in lower case, a blank between two; where each begins and ends; numbers."""

    text: NDArray[np.uint8]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    numbers: NDArray[np.int32]


class Counted(NamedTuple):
    """Rows of different numbers and how often each, in the order of appearance: indptr (rows + 1,), the others (nnz,)."""

    indptr: NDArray[np.int64]
    numbers: NDArray[np.int32]
    counts: NDArray[np.float32]


@inner_kernel
def _eight(text: NDArray[np.uint8], p: int) -> int:
    """The bytes p to p + 7 as one word, the first one lowest (one load)."""
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(text[np.uint64(p + i)]) << np.uint64(8 * i)
    return word  # type: ignore[return-value]


@inner_kernel
def _hash(text: NDArray[np.uint8], start: int, stop: int) -> int:
    value = np.uint64(stop - start) * _MULTIPLIER
    while stop - start >= 8:
        value = (value ^ np.uint64(_eight(text, start))) * _MULTIPLIER
        value ^= value >> _HALF
        start += 8
    if stop > start:
        rest = np.uint64(_eight(text, start)) << np.uint64(8 * (8 - (stop - start)))
        value = (value ^ rest) * _MULTIPLIER
        value ^= value >> _HALF
    return value * _MULTIPLIER  # type: ignore[return-value]


@inner_kernel
def _find(words: Words, text: NDArray[np.uint8], start: int, stop: int) -> tuple[int, int]:
    """The slot of text[start:stop], or the free one it would have; its hash."""
    value = np.uint64(_hash(text, start, stop))
    mask = np.uint64(len(words.slots) - 1)
    tag = value >> _HALF
    i = value & mask
    while words.slots[i]:
        if words.slots[i] >> _HALF == tag:
            number = np.int64(words.slots[i] & _NUMBER) - 1
            begin = words.ends[number]
            if words.ends[number + 1] - begin == stop - start and same(text, start, words.text, begin, stop - start):
                break
        i = (i + np.uint64(1)) & mask
    return np.int64(i), value  # type: ignore[return-value]


@inner_kernel
def _number(words: Words, text: NDArray[np.uint8], start: int, stop: int) -> int:
    """The number of the word text[start:stop], which is taken up if it is new; -1 if there is no room for it."""
    i, value = _find(words, text, start, stop)
    if words.slots[i]:
        return np.int64(words.slots[i] & _NUMBER) - 1  # type: ignore[return-value]
    number, begin = words.n[0], words.ends[words.n[0]]
    if (
        2 * (number + 1) > len(words.slots)
        or number == len(words.counts)
        or begin + stop - start + PADDING > len(words.text)
    ):
        return -1
    for k in range(stop - start):
        words.text[begin + k] = text[start + k]
    words.ends[number + 1] = begin + stop - start
    for k in range(4):
        words.counts[number, k] = 0
    words.slots[i] = (np.uint64(value) >> _HALF << _HALF) | np.uint64(number + 1)
    words.n[0] = number + 1
    return number  # type: ignore[no-any-return]


@kernel
def fill_slots(words: Words) -> None:
    """Enter all words into slots that are empty."""
    for number in range(words.n[0]):
        i, value = _find(words, words.text, words.ends[number], words.ends[number + 1])
        words.slots[i] = (np.uint64(value) >> _HALF << _HALF) | np.uint64(number + 1)


@inner_kernel
def _take(words: Words, numbers: NDArray[np.int32], n: int, row: int, first: int, counted: Counted) -> None:
    """Count the numbers of a row, whose own number is `first`. A place of an earlier row, or take, shows another word."""
    begin = at = counted.indptr[row]
    for j in range(n):
        number = numbers[j]
        place = words.counts[number, PLACE]
        if begin <= place < at and counted.numbers[place] == number:
            counted.counts[place] += np.float32(1)
        else:
            if words.counts[number, TIMES] == 0:
                words.counts[number, FIRST] = first
            words.counts[number, PLACE] = at
            words.counts[number, ROWS] += 1
            counted.numbers[at] = number
            counted.counts[at] = np.float32(1)
            at += 1
        words.counts[number, TIMES] += 1
    counted.indptr[row + 1] = at


@kernel
def count_terms(
    words: Words, text: NDArray[np.uint8], ends: NDArray[np.int64], between: int, lengths: NDArray[np.int64],
    firsts: NDArray[np.int64], row: int, term: int, numbers: NDArray[np.int32], counted: Counted,
) -> tuple[int, int, int]:  # fmt: skip
    """Rows from `row` on, of terms from `term` on that are cut already: (DONE or FULL, row and term to go on from).

    ends (terms + 1,): where each begins and the last ends; between: bytes that end a term; lengths, firsts (rows,): terms of
    each row, and its number.
    """
    while row < len(lengths):
        n = lengths[row]
        for j in range(n):
            numbers[j] = _number(words, text, ends[term + j], ends[term + j + 1] - between)
            if numbers[j] < 0:
                return FULL, row, term
        _take(words, numbers, n, row, firsts[row], counted)
        row, term = row + 1, term + n
    return DONE, row, term


@inner_kernel
def _decoded(text: NDArray[np.uint8], p: int) -> tuple[int, int]:
    """The character at p, which is none of ASCII, and how many bytes it has."""
    c = np.int64(text[p])
    n = 2 if c < 0xE0 else 3 if c < 0xF0 else 4
    c &= 0x7F >> n
    for i in range(1, n):
        c = c << 6 | np.int64(text[p + i] & 0x3F)
    return c, n  # type: ignore[return-value]


@inner_kernel
def put_character(c: int, text: NDArray[np.uint8], p: int) -> int:
    """Write a character in UTF-8 at p; where it ends."""
    if c < 0x80:
        text[p] = c
        return p + 1
    n = 2 if c < 0x800 else 3 if c < 0x10000 else 4
    text[p] = 0xFF00 >> n & 0xFF | c >> 6 * (n - 1)
    for i in range(1, n):
        text[p + i] = 0x80 | c >> 6 * (n - 1 - i) & 0x3F
    return p + n


@inner_kernel
def _tokens(
    text: NDArray[np.uint8], p: int, stop: int, characters: NDArray[np.uint32], stops: Words, room: Room
) -> int:  # fmt: skip
    """Write the words of text[p:stop], of two characters and more, into the room; how many, or -1 for CASE."""
    n = n_characters = begin = at = 0
    while p <= stop:
        character = np.uint32(0)  # ends the last word
        n_bytes = 1
        if p < stop:
            c: Any = np.int64(text[p])
            if c >= 0x80:
                c, n_bytes = _decoded(text, p)
            character = characters[c]
            if character & SPECIAL:
                return -1
        p += n_bytes
        if character & WORD:
            lower: Any = np.int64(character & _LOWER)
            if lower < 0x80:
                room.text[at] = lower
                at += 1
            else:
                at = put_character(lower, room.text, at)
            n_characters += 1
            continue
        if n_characters >= 2 and not (stops.n[0] and stops.slots[_find(stops, room.text, begin, at)[0]]):
            room.begins[n], room.ends[n] = begin, at
            room.text[at] = _BLANK
            at += 1
            n += 1
            begin = at
        at, n_characters = begin, 0
    return n


@kernel
def count_texts(
    words: Words, stops: Words, characters: NDArray[np.uint32], text: NDArray[np.uint8], ends: NDArray[np.int64],
    ngrams: tuple[int, int], row: int, room: Room, counted: Counted,
) -> tuple[int, int]:  # fmt: skip
    """Rows from `row` on, of texts in sound UTF-8: (DONE, FULL or CASE, the row to go on from).

    A word is two and more characters that have WORD, in lower case; its terms are words, or so many neighbours with blanks
    between, of which those in `stops` are left out before. ends (rows + 1,): where each text begins and the last ends.
    """
    while row < len(ends) - 1:
        n_tokens = _tokens(text, ends[row], ends[row + 1] - 1, characters, stops, room)
        if n_tokens < 0:
            return CASE, row
        n = 0
        for size in range(ngrams[0], ngrams[1] + 1):
            for i in range(n_tokens - size + 1):
                number = _number(words, room.text, room.begins[i], room.ends[i + size - 1])
                if number < 0:
                    return FULL, row
                room.numbers[n] = number
                n += 1
        _take(words, room.numbers, n, row, 0, counted)
        row += 1
    return DONE, row


@kernel
def first_bytes(text: NDArray[np.uint8], ends: NDArray[np.int64], n: int, out: NDArray[np.uint64]) -> None:
    """The first eight bytes of each of n words, zeros behind its end, as numbers in the order of the words."""
    for i in range(n):
        key = np.uint64(0)
        for p in range(ends[i], ends[i] + 8):
            key <<= _EIGHT
            if p < ends[i + 1]:
                key |= np.uint64(text[p])
        out[i] = key


@inner_kernel
def _precedes(text: NDArray[np.uint8], ends: NDArray[np.int64], a: int, b: int) -> bool:
    p, q = ends[a], ends[b]
    while p < ends[a + 1] and q < ends[b + 1]:
        if text[p] != text[q]:
            return bool(text[p] < text[q])
        p, q = p + 1, q + 1
    return bool(ends[a + 1] - ends[a] < ends[b + 1] - ends[b])


@kernel
def sort_equals(
    text: NDArray[np.uint8], ends: NDArray[np.int64], keys: NDArray[np.uint64], order: NDArray[np.int64],
    room: NDArray[np.int64],
) -> None:  # fmt: skip
    """Sort words whose first bytes are the same, by merges. order (n,): by first bytes; room (n,): is overwritten."""
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and keys[order[stop]] == keys[order[start]]:
            stop += 1
        width = 1
        while width < stop - start:
            for low in range(start, stop, 2 * width):
                middle, high = min(low + width, stop), min(low + 2 * width, stop)
                i, j = low, middle
                for k in range(low, high):
                    if j == high or (i < middle and not _precedes(text, ends, order[j], order[i])):
                        room[k] = order[i]
                        i += 1
                    else:
                        room[k] = order[j]
                        j += 1
            for k in range(start, stop):
                order[k] = room[k]
            width *= 2
        start = stop


@kernel
def gather_words(
    text: NDArray[np.uint8], ends: NDArray[np.int64], order: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Words in an order, in turn."""
    at = 0
    for number in order:
        for p in range(ends[number], ends[number + 1]):
            out[at] = text[p]
            at += 1
