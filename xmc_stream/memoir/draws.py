"""The rows that steps draw, planned from the seed alone, and read ahead.

A row with several labels stands for as many copies, one for each label; none is written. A draw is a copy: its row, and
the label that the row counts for. Draws of a step are a function of seed and step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import STEPS
from xmc_stream.kernels.permutation import held_out
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block

AHEAD = 2  # steps whose rows are read while one is computed


class Copies:
    """The copies that are learned from, class by class: rows[indptr[c] : indptr[c + 1]] are those of class c."""

    def __init__(self, dataset: Dataset, seed: int, share: float) -> None:
        Y = dataset.Y_columns()
        self.indptr = np.zeros(dataset.n_labels + 1, np.int64)
        rows, n = np.empty(Y.nnz, row_type(dataset)), 0
        for block in Y.blocks(BLOCK):
            keep = ~held_out_of(block.indices.astype(np.int64), seed, share)
            ends = np.concatenate([[0], np.cumsum(keep)])[block.indptr]
            self.indptr[block.start + 1 : block.start + block.n + 1] = n + ends[1:]
            rows[n : n + ends[-1]] = block.indices[keep]
            n += int(ends[-1])
        self.rows = rows[:n]
        self.classes = np.flatnonzero(np.diff(self.indptr))

    def draw(self, n: int, seed: int, step: int, by_class: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and labels of a step's n draws; none where there are no copies."""
        if not len(self.rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rng = np.random.default_rng([seed, STEPS, step])
        if by_class:
            labels = self.classes[rng.integers(0, len(self.classes), n)]
            first, last = self.indptr[labels], self.indptr[labels + 1]
            return self.rows[rng.integers(first, last)].astype(np.int64), labels
        at = rng.integers(0, len(self.rows), n)
        return self.rows[at].astype(np.int64), np.searchsorted(self.indptr, at, side="right") - 1


BLOCK = 1 << 20  # bytes of Y that are read at a time


def row_type(dataset: Dataset) -> type[np.signedinteger[Any]]:
    """That a number of a row fits in."""
    return np.int32 if dataset.n_samples <= np.iinfo(np.int32).max else np.int64


def held_out_of(rows: NDArray[np.int64], seed: int, share: float) -> NDArray[np.bool_]:
    """Which of some rows are held out."""
    out = np.zeros(len(rows), np.bool_)
    if share:
        held_out(rows, seed, share, out)
    return out


@dataclass(frozen=True)
class Drawn:
    """The draws of a step. numbers: of its rows, each once, ascending; rows: these, as W takes them; own: all their labels;

    places (n,): of each draw among them; labels (n,): that it counts for.
    """

    numbers: NDArray[np.int64]
    rows: Any
    own: Block
    places: NDArray[np.int64]
    labels: NDArray[np.int64]


class Steps:
    """Draws of n copies a step. Another thread reads rows of the next steps while one is worked on. read: gives some rows."""

    def __init__(
        self, dataset: Dataset, copies: Copies, n: int, seed: int, by_class: bool,
        read: Callable[[NDArray[np.int64]], Any],
    ) -> None:  # fmt: skip
        self._Y, self._read_rows = dataset.Y_rows(), read
        self._copies, self._n, self._seed, self._by_class = copies, n, seed, by_class

    @property
    def bytes_read(self) -> int:
        """Of Y, so far."""
        return self._Y.bytes_read

    def of(self, first: int, last: int) -> Iterator[tuple[int, Drawn]]:
        """Steps first .. last - 1, each with its draws, in the order of rows."""
        waiting: deque[Future[Drawn]] = deque()
        with ThreadPoolExecutor(1) as reader:
            try:
                for step in range(first, last):
                    ahead = range(step + len(waiting), min(step + AHEAD + 1, last))
                    waiting.extend(reader.submit(self._read, number) for number in ahead)
                    yield step, waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _read(self, step: int) -> Drawn:
        rows, labels = self._copies.draw(self._n, self._seed, step, self._by_class)
        order = np.lexsort((labels, rows))
        numbers, places = np.unique(rows[order], return_inverse=True)
        return Drawn(numbers, self._read_rows(numbers), self._Y.gather(numbers), places, labels[order])
