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
from xmc_stream.kernels.csr import pwrite_lines
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.store.chunks import WINDOW, read_lines
from xmc_stream.system.stop import stop_if_unwanted

_HOLE = 1 << 14  # bytes between lines that take less time to write than another call
_MOST = 1 << 24  # bytes of lines between two looks whether to stop
Lines = NDArray[np.float32]


class InMemory:
    """n lines of `width` values, zeros at first."""

    def __init__(self, n: int, width: int) -> None:
        self.n, self.width = n, width
        self.whole: Lines = aligned_zeros((n, width))

    def clear(self) -> None:
        """Make all of it zeros."""
        self.whole[:] = 0

    def take(self, lines: NDArray[np.int64]) -> Lines:
        """Copies of some lines."""
        return self.whole[lines]

    def put(self, lines: NDArray[np.int64], values: Lines) -> None:
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

    def take(self, lines: NDArray[np.int64], out: Lines | None = None) -> Lines:
        """Copies of some lines, which ascend."""
        out = np.empty((len(lines), self.width), np.float32) if out is None else out[: len(lines)]
        read_lines(self._fd, self._path, lines, self._staging, out)
        return out

    def put(self, lines: NDArray[np.int64], values: Lines, places: NDArray[np.int64] | None = None) -> None:
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
