"""The rows that steps draw, planned from the seed alone, and read ahead.

A row with several labels stands for as many copies, one for each label; none is written. A draw is a copy: its row, and
the label that the row counts for. Draws of a step are a function of seed and step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import STEPS
from xmc_stream.kernels.dual import held_out
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block

AHEAD = 2  # steps whose rows are read while one is computed


class Copies:
    """The copies that are learned from, class by class: rows[indptr[c] : indptr[c + 1]] are those of class c."""

    def __init__(self, dataset: Dataset, seed: int, share: float) -> None:
        counts, parts = np.zeros(dataset.n_labels, np.int64), [np.empty(0, np.int32)]
        for block in dataset.Y_columns().blocks(_BLOCK):
            keep = ~held_out_of(block.indices.astype(np.int64), seed, share)
            labels = np.repeat(np.arange(block.start, block.start + block.n), np.diff(block.indptr))
            counts += np.bincount(labels[keep], minlength=len(counts))
            parts.append(block.indices[keep].astype(np.int32))
        self.indptr, self.rows = np.concatenate([[0], np.cumsum(counts)]), np.concatenate(parts)
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


_BLOCK = 1 << 22  # bytes of Y that are read at a time


def held_out_of(rows: NDArray[np.int64], seed: int, share: float) -> NDArray[np.bool_]:
    """Which of some rows are held out."""
    out = np.zeros(len(rows), np.bool_)
    if share:
        held_out(rows, seed, share, out)
    return out


@dataclass(frozen=True)
class Drawn:
    """The draws of a step. numbers: of its rows, each once, ascending; rows: these of X; own: all their labels; places (n,):
    of each draw among them; labels (n,): that it counts for.
    """

    numbers: NDArray[np.int64]
    rows: Block
    own: Block
    places: NDArray[np.int64]
    labels: NDArray[np.int64]


class Steps:
    """Draws of n copies a step. Rows of the next steps are read by another thread while one is worked on."""

    def __init__(self, dataset: Dataset, copies: Copies, n: int, seed: int, by_class: bool) -> None:
        self._X, self._Y = dataset.X_rows(), dataset.Y_rows()
        self._copies, self._n, self._seed, self._by_class = copies, n, seed, by_class

    @property
    def bytes_read(self) -> int:
        """Of X and Y, so far."""
        return self._X.bytes_read + self._Y.bytes_read

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
        return Drawn(numbers, self._X.gather(numbers), self._Y.gather(numbers), places, labels[order])
