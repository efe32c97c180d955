"""Dense float32 matrices with a line for each row or feature: in memory, or in a file that is never trusted after a kill.

A file is read and written by calls, not through a map: the memory that it takes is the buffers of the caller, and what the
system keeps of it is the page cache.
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
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.stop import stop_if_unwanted

_WINDOW = 1 << 20  # bytes of a file read at a time where many of its lines are wanted
_DENSE = 8  # a window is read whole where one in so many of its lines is wanted
Lines = NDArray[np.float32]


class InMemory:
    """n lines of `width` values, zeros at first."""

    def __init__(self, n: int, width: int) -> None:
        self.n, self.width = n, width
        self.whole: Lines | None = aligned_zeros((n, width))

    def take(self, lines: NDArray[np.int64]) -> Lines:
        """Copies of some lines."""
        return self._values[lines]

    def put(self, lines: NDArray[np.int64], values: Lines) -> None:
        """Replace some lines."""
        self._values[lines] = values

    def clear(self) -> None:
        """Make all of it zeros."""
        self._values[:] = 0

    @property
    def _values(self) -> Lines:
        if self.whole is None:
            raise StoreError("a matrix that was let go of is asked for")
        return self.whole


class InFile:
    """The same in a file, zeros where nothing was written."""

    whole: Lines | None = None

    def __init__(self, path: Path, n: int, width: int, fresh: bool = True) -> None:
        self.n, self.width, self._path = n, width, path
        self._line = 4 * width
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        self._fd = os.open(path, flags, 0o666)
        weakref.finalize(self, os.close, self._fd)
        if fresh:
            os.truncate(self._fd, n * self._line)

    def read(self, first: int, last: int, out: Lines | None = None) -> Lines:
        """Lines [first, last)."""
        out = np.empty((last - first, self.width), np.float32) if out is None else out[: last - first]
        view, at = out.reshape(-1).view(np.uint8).data, first * self._line
        while view.nbytes:
            got = os.preadv(self._fd, [view], at)
            if not got:
                raise StoreError(f"{self._path} ends early: run the same command again, it goes on")
            view, at = view[got:], at + got
        return out

    def write(self, first: int, lines: Lines) -> None:
        """Lines from `first` on."""
        view, at = lines.reshape(-1).view(np.uint8).data, first * self._line
        while view.nbytes:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def _windows(self, lines: NDArray[np.int64]) -> Iterator[tuple[slice, int, int, bool]]:
        """Parts of ascending lines: which, the first and last + 1 of the file's lines there, whether all these are read."""
        step = max(1, _WINDOW // self._line)
        at = 0
        while at < len(lines):
            stop_if_unwanted()
            first = int(lines[at])
            end = int(np.searchsorted(lines, first + step))
            last = int(lines[end - 1]) + 1
            yield slice(at, end), first, last, _DENSE * (end - at) >= last - first
            at = end

    def take(self, lines: NDArray[np.int64]) -> Lines:
        """Copies of some lines, which ascend."""
        out = np.empty((len(lines), self.width), np.float32)
        for part, first, last, dense in self._windows(lines):
            if dense:
                out[part] = self.read(first, last)[lines[part] - first]
            else:
                for place in range(part.start, part.stop):
                    line = int(lines[place])
                    self.read(line, line + 1, out[place : place + 1])
        return out

    def put(self, lines: NDArray[np.int64], values: Lines) -> None:
        """Replace some lines, which ascend."""
        for part, first, last, dense in self._windows(lines):
            if last - first == part.stop - part.start:
                self.write(first, values[part])
            elif dense:
                window = self.read(first, last)
                window[lines[part] - first] = values[part]
                self.write(first, window)
            else:
                for place in range(part.start, part.stop):
                    self.write(int(lines[place]), values[place : place + 1])

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
        elif isinstance(matrix, InFile):
            window = matrix.read(first, last)
            yield first, window
            matrix.write(first, window)
