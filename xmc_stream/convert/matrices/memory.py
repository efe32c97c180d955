"""Arrays of NumPy in memory, or mapped from files, read as arrays on disk are: some rows at a time, each a copy.

What was read of a mapped file leaves the memory of the process again: the file may be larger than that.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from xmc_stream.convert.matrices.arrays import DenseSide, Stream, check_real


class RowStream:
    """Items of what is read by whole rows. rows: gives those of [start, stop), a fresh array; width: items of each."""

    def __init__(self, rows: Callable[[int, int], NDArray[Any]], start: int, width: int) -> None:
        self._rows, self._row, self._width = rows, start // width, width

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def take(self, n: int) -> NDArray[Any]:
        """The next n items."""
        begin = self._row
        self._row += n // self._width
        return self._rows(begin, self._row).reshape(-1)

    def finish(self) -> list[int]:
        """There are no checksums."""
        return []


@dataclass(frozen=True)
class MemoryArray:
    """The items of an array by rows (N,) or (N, D), in whatever order it lies."""

    array: NDArray[Any]

    @property
    def n_items(self) -> int:
        """Of all rows."""
        return self.array.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an item."""
        return self.array.dtype

    def stream(self, start: int, stop: int) -> Stream:
        """Items [start, stop), which are whole rows."""
        return RowStream(self._rows, start, max(int(np.prod(self.array.shape[1:])), 1))

    def _rows(self, start: int, stop: int) -> NDArray[Any]:
        rows = self.array[start:stop]
        items = np.array(rows, order="C")
        if rows.size and (file := _mapped(self.array)) is not None:
            _let_go(file, rows)
        return items


def dense_side(array: NDArray[Any], name: str) -> DenseSide:
    """An array of two dimensions as a side. Raises InputError where its numbers are not real."""
    check_real(array.dtype, name)
    return DenseSide(name, "array", (), array.shape[0], array.shape[1], MemoryArray(array))


def _mapped(array: Any) -> mmap.mmap | None:
    """The file that an array is mapped from; None where there is none, or where changes would be lost with the memory."""
    shared = False
    while isinstance(array, np.ndarray):
        shared = shared or (isinstance(array, np.memmap) and array.mode != "c")
        array = array.base
    return array if shared and isinstance(array, mmap.mmap) else None


def _let_go(file: mmap.mmap, rows: NDArray[Any]) -> None:
    begin = np.frombuffer(file, np.uint8).__array_interface__["data"][0]
    low, high = (int(place) - begin for place in byte_bounds(rows))
    low -= low % mmap.PAGESIZE
    file.madvise(mmap.MADV_DONTNEED, low, min(high, len(file)) - low)
