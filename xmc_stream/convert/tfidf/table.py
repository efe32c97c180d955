"""A dictionary of words that kernels fill: words of texts by scikit-learn's rules, and rows of how often each occurs.

Texts, and terms that are cut already, come in arrays of UTF-8, each ended by a NUL character, with PADDING bytes behind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.words import (
    CASE,
    FULL,
    PADDING,
    SPECIAL,
    WORD,
    Counted,
    Room,
    Words,
    count_terms,
    count_texts,
    fill_slots,
    first_bytes,
    gather_words,
    sort_equals,
)
from xmc_stream.convert.pieces import Rows

_ENTRY = 4 * 8 + 8 + 32 + 8  # bytes of a word beside its text: four slots, its end, counts
_PAGE = 2**10  # characters looked at together
_OF_WORDS = re.compile(r"\w")

# rows as `Rows` has them, with values
Counts = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
NO_COUNTS: Counts = (np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
_Kind = TypeVar("_Kind", bound=Rows)
# an array as above, and where each text begins and the last one ends
Terms = tuple[NDArray[np.uint8], NDArray[np.int64]]


def terms_of(texts: Iterable[str]) -> Terms:
    """Texts without NUL characters as an array."""
    return _ended("".join([text + "\0" for text in texts]))


def _ended(text: str) -> Terms:
    blob = np.frombuffer(bytearray(text.encode() + bytes(PADDING)), np.uint8)
    ends = np.flatnonzero(blob[: len(blob) - PADDING] == 0) + 1
    return blob, np.concatenate([np.zeros(1, np.int64), ends])


def texts_of(terms: Terms) -> list[str]:
    """The texts of an array."""
    blob, ends = terms
    return blob[ends[0] : ends[-1]].tobytes().decode().split("\0")[:-1]


@functools.lru_cache(maxsize=2)
def characters(lowercase: bool) -> NDArray[np.uint32]:
    """Of each character its lower case, with WORD where that is of a word (`\\w`), or SPECIAL where Python must tell.

    That is where lower case is several characters, or depends on the neighbours: a Greek sigma that ends a word.
    """
    table = np.arange(0x110000, dtype="<u4")
    for start in range(0, len(table), _PAGE):
        here = table[start : start + _PAGE]
        page = here.tobytes().decode("utf-32-le", "surrogatepass")
        if page.isalnum() and page.lower() == page:
            here |= WORD
        elif _OF_WORDS.search(page):
            here[:] = [_looked_up(c, lowercase) for c in page]
    return table


def _looked_up(character: str, lowercase: bool) -> int:
    lower = character.lower() if lowercase else character
    if len(lower) > 1 or (lowercase and character == "\u03a3"):
        return int(SPECIAL)
    return ord(lower) | (int(WORD) if _OF_WORDS.match(lower) else 0)


@dataclass(frozen=True)
class Rule:
    """What the terms of a text are. stops: words that are left out."""

    characters: NDArray[np.uint32]
    stops: Words
    ngrams: tuple[int, int]


class WordTable:
    """Different words, numbered by their first appearance, in how many rows each occurs, and how often.

    n_words, n_bytes: that there is room for at first.
    """

    def __init__(self, n_words: int = 2**10, n_bytes: int = 2**14) -> None:
        self.words = _room(n_words, n_bytes)

    def __len__(self) -> int:
        return int(self.words.n[0])

    @property
    def size(self) -> int:
        """Bytes of memory, at most."""
        return 3 * (_ENTRY * len(self) + int(self.words.ends[len(self)]))  # where it grows: itself, and twice as much

    def count_texts(self, texts: Terms, rule: Rule) -> Counts:
        """Rows of the terms of texts."""
        text, ends = texts
        orders = rule.ngrams[1] - rule.ngrams[0] + 1
        lengths = np.diff(ends)
        longest = int(lengths.max(initial=0))
        n_words = longest // 3 + 1  # of two characters and a blank
        room = Room(
            np.empty(2 * longest + PADDING, np.uint8), np.empty(n_words, np.int32), np.empty(n_words, np.int32),
            np.empty(orders * n_words, np.int32),
        )  # fmt: skip
        counted = _counted(len(lengths), orders * (int(lengths.sum()) // 3))
        row = 0
        while True:
            code, row = count_texts(
                self.words, rule.stops, rule.characters, text, ends, rule.ngrams, row, room, counted
            )
            if code == FULL:
                self._grow(2 * longest)
            elif code == CASE:
                lower = _ended(text[ends[row] : ends[-1]].tobytes().decode().lower())  # a NUL parts rows here too
                return joined([_taken(counted, row), self.count_texts(lower, rule)], NO_COUNTS)
            else:
                return _taken(counted, row)

    def count_terms(
        self, terms: Terms, lengths: NDArray[np.int64], firsts: NDArray[np.int64], between: int = 1
    ) -> Counts:  # fmt: skip
        """Rows of so many terms each; firsts: the number of each row, kept for words that appear in it first; between: 1 where
        terms are ended by NUL characters, 0 where nothing stands between them."""
        counted = _counted(len(lengths), int(lengths.sum()))
        numbers = np.empty(int(lengths.max(initial=0)), np.int32)
        row = term = 0
        while True:
            code, row, term = count_terms(self.words, *terms, between, lengths, firsts, row, term, numbers, counted)
            if code != FULL:
                return _taken(counted, row)
            self._grow(int(np.diff(terms[1]).max()))

    def numbers(self, terms: Terms, between: int = 1) -> NDArray[np.int64]:
        """The number of each term."""
        n = len(terms[1]) - 1
        return self.count_terms(terms, np.ones(n, np.int64), np.zeros(n, np.int64), between)[1].astype(np.int64)

    def order(self) -> NDArray[np.int64]:
        """The numbers of the words, sorted by code points."""
        text, ends, n = self.words.text, self.words.ends, len(self)
        keys = np.empty(n, np.uint64)
        first_bytes(text, ends, n, keys)
        order = np.argsort(keys)
        sort_equals(text, ends, keys, order, np.empty(n, np.int64))
        return order

    def gather(self, order: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The bytes of some words in turn, and how many each has."""
        lengths = self.words.ends[order + 1] - self.words.ends[order]
        out = np.empty(int(lengths.sum()), np.uint8)
        gather_words(self.words.text, self.words.ends, order, out)
        return out, lengths

    def _grow(self, n_bytes: int) -> None:
        """Make room for words of n_bytes in sum, and for twice as many words as there are."""
        old, n = self.words, len(self)
        self.words = _room(2 * n + n_bytes // 2 + 1, 2 * (int(old.ends[n]) + n_bytes))
        self.words.text[: old.ends[n]] = old.text[: old.ends[n]]
        self.words.ends[: n + 1] = old.ends[: n + 1]
        self.words.counts[:n] = old.counts[:n]
        self.words.n[0] = n
        fill_slots(self.words)


def _room(n_words: int, n_bytes: int) -> Words:
    slots = 1 << (2 * n_words - 1).bit_length()
    return Words(
        np.zeros(slots, np.uint64), np.zeros(n_bytes + PADDING, np.uint8), np.zeros(n_words + 1, np.int64),
        np.zeros((n_words, 4), np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


def _counted(n_rows: int, n: int) -> Counted:
    return Counted(np.zeros(n_rows + 1, np.int64), np.empty(n, np.int32), np.empty(n, np.float32))


def _taken(counted: Counted, n_rows: int) -> Counts:
    n = int(counted.indptr[n_rows])
    return counted.indptr[: n_rows + 1], counted.numbers[:n], counted.counts[:n]


def joined(parts: Sequence[_Kind], nothing: _Kind) -> _Kind:
    """Rows in turn. nothing: no row, of the types that they have."""
    every = [nothing, *parts]
    lengths = [np.zeros(1, np.int64), *(np.diff(indptr) for indptr, _, _ in every)]
    values = [data for _, _, data in every if data is not None]
    return (  # type: ignore[return-value]
        np.cumsum(np.concatenate(lengths)),
        np.concatenate([indices for _, indices, _ in every]),
        np.concatenate(values) if values else None,
    )
