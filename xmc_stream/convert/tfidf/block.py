"""Rows of text whose fields a kernel found: their texts and labels without a Python object each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.kernels.fields import join_texts, read_label_ids, read_label_names
from xmc_stream.convert.kernels.tokens import DOUBLED, ESCAPED, HARD, KIND, OTHER, PLAIN, SOUND, START, STOP, WHOLE
from xmc_stream.convert.kernels.words import PADDING
from xmc_stream.convert.tfidf.table import Terms, WordTable

# what stands in a line: a record, or in words what is wrong with it; None for a blank line
Record = Mapping[str, Any] | str | None
LINES = 2**13  # of a block at most


@dataclass(frozen=True)
class Block:
    """Lines one after another; gone when the next block comes.

    numbers (n,): of the lines in their part; text: with a newline behind each line; status (n,), places (n, fields, 3): as in
    `convert.kernels.tokens`; blank: whether a blank text of labels is none; record: a line as Python reads it, by its place.
    """

    numbers: NDArray[np.int64]
    text: NDArray[np.uint8]
    status: NDArray[np.uint8]
    places: NDArray[np.int32]
    blank: bool
    record: Callable[[int], Record]

    def require(self, column: int, kinds: Sequence[int]) -> None:
        """Leave lines to Python whose field is of another kind."""
        other = np.ones(OTHER + 1, np.bool_)
        other[list(kinds)] = False
        self.status[other[self.places[:, column, KIND]] & (self.status == SOUND)] = HARD

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Lines of one status that stand together: the status, the first, and the one behind the last."""
        bounds = [0, *(np.flatnonzero(np.diff(self.status)) + 1).tolist(), len(self.status)]
        for start, stop in itertools.pairwise(bounds):
            yield int(self.status[start]), start, stop

    def texts(self, start: int, stop: int, columns: NDArray[np.int64]) -> Terms:
        """The texts of sound lines, of the columns joined by newlines."""
        places = self.places[start:stop]
        taken = places[:, columns, STOP] - places[:, columns, START] + 1
        out = np.empty(int(taken.sum()) + PADDING, np.uint8)
        ends = np.empty(stop - start + 1, np.int64)
        join_texts(self.text, places, columns, out, ends)
        return out, ends

    def values(self, start: int, stop: int, column: int) -> list[bytes]:
        """The values of sound lines as they stand there."""
        places = self.places[start:stop, column]
        return [self.text[a:b].tobytes() for a, b in zip(places[:, START], places[:, STOP], strict=True)]

    def label_ids(self, column: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of labels in [low, high), and where those of each line begin and the last ends; other lines become HARD."""
        ids = np.empty(self._room(column), np.int64)
        indptr = np.empty(len(self.status) + 1, np.int64)
        places = np.ascontiguousarray(self.places[:, column])
        read_label_ids(self.text, places, self.status, low, high, ids, indptr)
        return ids, indptr

    def label_names(self, column: int, delimiter: str | None) -> tuple[Terms, NDArray[np.int64]]:
        """Names of labels, and where those of each line begin and the last ends; lines with others become HARD."""
        room = self._room(column)
        out, ends = np.empty(2 * room + PADDING, np.uint8), np.empty(room + 1, np.int64)
        indptr = np.empty(len(self.status) + 1, np.int64)
        places = np.ascontiguousarray(self.places[:, column])
        parting = np.frombuffer(bytearray((delimiter or "").encode()), np.uint8)
        blank = self.blank or bool(delimiter)
        read_label_names(self.text, places, self.status, parting, blank, out, ends, indptr)
        return (out, ends[: indptr[-1] + 1]), indptr

    def _room(self, column: int) -> int:
        """Labels that there are at most, and half their bytes: each takes two, with what stands behind it."""
        sizes = self.places[:, column, STOP] - self.places[:, column, START]
        return int(sizes[self.status == SOUND].sum()) // 2 + 2 * len(sizes) + 1


STRINGS, IDS = (PLAIN, ESCAPED, DOUBLED), (PLAIN, WHOLE)


def load_kernels() -> None:
    """Compile or load what reads the fields of a block, and the names of labels."""
    text = np.frombuffer(bytearray(b"a few words\n1\na\n"), np.uint8)
    places = np.array([[[PLAIN, 0, 11], [WHOLE, 12, 13], [PLAIN, 14, 15]]], np.int32)
    block = Block(np.ones(1, np.int64), text, np.array([SOUND], np.uint8), places, False, str)
    block.texts(0, 1, np.zeros(1, np.int64))
    block.label_ids(1, 0, 2)
    table = WordTable()
    table.numbers(block.label_names(2, None)[0])
    table.gather(table.order())
