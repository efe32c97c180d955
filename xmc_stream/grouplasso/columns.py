"""X by columns, some at a time, for one job; and the labels of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.arrays import InMemory, Matrix
from xmc_stream.grouplasso.kernels.margins import Lines
from xmc_stream.kernels.blocks import CSR
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Buffer


class Columns:
    """Columns of X, gathered. most: entries that may be in memory; a column with more is read in pieces of so many."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.X = dataset.X_columns()
        self.counts = dataset.feature_counts()
        self.most = most
        self._buffer = Buffer(self.X, min(most, self.X.nnz))
        self._held: tuple[NDArray[np.int64], CSR] | None = None

    def batches(self, order: NDArray[np.int64], columns: int) -> Iterator[tuple[int, int]]:
        """Runs [first, last) of an order, of so many columns at most, whose entries may be in memory together.

        A column that has more entries is a run by itself.
        """
        first = 0
        while first < len(order):
            ends = np.cumsum(self.counts[order[first : first + columns]])
            last = first + max(int(np.searchsorted(ends, self.most, side="right")), 1)
            yield first, last
            first = last

    def gather(self, features: NDArray[np.int64]) -> CSR:
        """Some columns, which ascend. The arrays are the buffer's: those of before are gone."""
        if self._held is None or not np.array_equal(self._held[0], features):
            block = self.X.gather(features, self._buffer)
            self._held = features.copy(), CSR(block.indptr, block.indices, block.values)
        return self._held[1]

    def pieces(self, feature: int) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """A column in pieces: where each begins in it, rows and values."""
        at = 0
        for rows, values in self.X.windows(feature, feature + 1, self.most):
            if values is not None:
                yield at, rows, values
            at += len(rows)


class Targets:
    """The labels of all rows, in memory, and what else a loss keeps for each of them."""

    def __init__(self, dataset: Dataset) -> None:
        block = dataset.Y_rows().block(0, dataset.n_samples)
        self.indptr, self.indices = block.indptr, block.indices
        self.active = np.zeros(dataset.n_samples, np.float32)
        self._number = np.empty(0, np.int32)

    def all(self, values: NDArray[np.float32]) -> Lines:
        """With the lines of all rows."""
        return Lines(values, self.active, self.indptr, self.indices)

    def range(self, first: int, values: NDArray[np.float32]) -> Lines:
        """With the lines of the rows from `first` on. `active` is written through."""
        last = first + len(values)
        return Lines(values, self.active[first:last], self.indptr[first : last + 1], self.indices)

    def numbered(self, indices: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The rows that some entries are of, ascending, and the number of each entry's among them."""
        if not len(self._number):
            self._number = np.empty(len(self.active), np.int32)
        met = np.zeros(len(self.active), np.bool_)
        met[indices] = True
        rows = np.flatnonzero(met)
        self._number[rows] = np.arange(len(rows), dtype=np.int32)
        return rows, self._number[indices]


class Some:
    """The lines of the array that entries of X are of, and the number of each entry's among them.

    Of an array in memory they are all lines, in place; of one in a file copies in `room`, which `put` takes back.
    """

    def __init__(self, targets: Targets, array: Matrix, indices: NDArray[Any], room: NDArray[np.float32]) -> None:
        self._targets, self._array = targets, array
        if isinstance(array, InMemory):
            self.lines, self.numbers = targets.all(array.whole), indices
            return
        rows, self.numbers = targets.numbered(indices)
        self._rows = rows
        begins = targets.indptr[rows]
        counts = targets.indptr[rows + 1] - begins
        ends = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], counts)
        self.lines = Lines(array.take(rows, room), targets.active[rows], ends, targets.indices[at])

    def put(self, changed: NDArray[np.bool_] | None = None) -> None:
        """Write copies back. changed: whether each was changed; all of them, if not said."""
        if isinstance(self._array, InMemory):
            return
        places = None if changed is None else np.flatnonzero(changed)
        self._array.put(self._rows if places is None else self._rows[places], self.lines.values, places)
        self._targets.active[self._rows] = self.lines.active
