"""What a job has of data that memory may not hold: columns of X, the labels of rows, and lines of dense float32 matrices.

A dense matrix has a line for each row or feature: in memory, or in a file that is never trusted after a kill. A file is read
and written by calls, not through a map: the memory that it takes is the buffers of the caller, and what the system keeps of
it is the page cache.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.grouplasso.kernels.margins import Lines
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.csr import pwrite_lines
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.store.chunks import WINDOW, read_lines
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Buffer
from xmc_stream.system.stop import stop_if_unwanted

_HOLE = 1 << 14  # bytes between lines that take less time to write than another call
_MOST = 1 << 24  # bytes of lines between two looks whether to stop
Values = NDArray[np.float32]


class InMemory:
    """n lines of `width` values, zeros at first."""

    def __init__(self, n: int, width: int) -> None:
        self.n, self.width = n, width
        self.whole: Values = aligned_zeros((n, width))

    def clear(self) -> None:
        """Make all of it zeros."""
        self.whole[:] = 0

    def take(self, lines: NDArray[np.int64]) -> Values:
        """Copies of some lines."""
        return self.whole[lines]

    def put(self, lines: NDArray[np.int64], values: Values) -> None:
        """Replace some lines, each once. Those that stay zeros are not written: their memory stays untouched."""
        some = values.any(axis=1) | self.whole[lines].any(axis=1)
        self.whole[lines[some]] = values[some]


class InFile:
    """The same in a file, zeros where nothing was written."""

    whole = None

    def __init__(self, path: Path, n: int, width: int, fresh: bool = True) -> None:
        self.n, self.width, self._path = n, width, path
        self._line = 4 * width
        self._staging = np.empty(max(WINDOW, self._line), np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._fd)
        if fresh:
            self.clear()

    def read(self, first: int, last: int) -> Values:
        """Lines [first, last)."""
        size = (last - first) * self.width
        out = np.fromfile(self._path, np.float32, size, offset=first * self._line)
        if out.size < size:
            raise StoreError(f"{self._path} ends early: run the same command again, it goes on")
        return out.reshape(-1, self.width)

    def write(self, first: int, lines: Values) -> None:
        """Lines from `first` on."""
        view, at = lines.reshape(-1).view(np.uint8).data, first * self._line
        while view.nbytes:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def take(self, lines: NDArray[np.int64], out: Values | None = None) -> Values:
        """Copies of some lines, which ascend."""
        out = np.empty((len(lines), self.width), np.float32) if out is None else out[: len(lines)]
        read_lines(self._fd, self._path, lines, self._staging, out)
        return out

    def put(self, lines: NDArray[np.int64], values: Values, places: NDArray[np.int64] | None = None) -> None:
        """Replace some lines, which ascend. places: of them among the values, if not all of these in turn."""
        places = np.arange(len(lines)) if places is None else places
        step, hole = max(1, _MOST // self._line), _HOLE // self._line
        for low in range(0, len(lines), step):
            stop_if_unwanted()
            some, at = (numbers[low : low + step].astype(np.int64, copy=False) for numbers in (lines, places))
            if not pwrite_lines(self._fd, some, hole, self._staging, at, values):
                raise StoreError(f"{self._path} cannot be written: look at the disk and run the same command again")

    def clear(self) -> None:
        """Make all of it zeros."""
        os.truncate(self._fd, 0)
        os.truncate(self._fd, self.n * self._line)


Matrix = InMemory | InFile


def rows_of(matrix: Matrix, step: int) -> Iterator[tuple[int, Any]]:
    """Windows of so many lines: the first line's number, and the lines, which are kept as the caller leaves them."""
    for first in range(0, matrix.n, step):
        stop_if_unwanted()
        last = min(first + step, matrix.n)
        if matrix.whole is not None:
            yield first, matrix.whole[first:last]
        else:
            window = matrix.read(first, last)
            yield first, window
            matrix.write(first, window)


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
            self._held = features.copy(), CSR.of(block)
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
        self.numbers = np.empty(dataset.n_samples, np.int32)  # room for `Some`

    def lines(self, first: int, values: Values) -> Lines:
        """With the values of the rows from `first` on. `active` is written through."""
        last = first + len(values)
        return Lines(values, self.active[first:last], self.indptr[first : last + 1], self.indices)


class Some:
    """The lines of the array that entries of X are of, and the number of each entry's among them.

    Of an array in memory they are all lines, in place; of one in a file copies in `room`, which `put` takes back.
    """

    def __init__(self, targets: Targets, array: Matrix, indices: NDArray[Any], room: Values) -> None:
        self._targets, self._array = targets, array
        if isinstance(array, InMemory):
            self.lines, self.numbers = targets.lines(0, array.whole), indices
            return
        met = np.zeros(len(targets.active), np.bool_)
        met[indices] = True
        self._rows = rows = np.flatnonzero(met)
        targets.numbers[rows] = np.arange(len(rows), dtype=np.int32)
        self.numbers = targets.numbers[indices]
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
