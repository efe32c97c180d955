"""Arrays of NumPy in memory, or mapped from files, read as arrays on disk are: some rows at a time, each a copy.

What was read of a mapped file leaves the memory of the process again: the file may be larger than that.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from xmc_stream.convert.matrices.arrays import Array, DenseSide, Take, dense


def row_array(rows: Callable[[int, int], NDArray[Any]], n_rows: int, width: int, dtype: Any) -> Array:
    """Items of what is read by whole rows. rows: gives those of [start, stop), a fresh array; width: items of each."""

    @contextmanager
    def stream(start: int, stop: int) -> Iterator[Take]:
        at = start // max(width, 1)

        def take(n: int) -> NDArray[Any]:
            nonlocal at
            begin, at = at, at + n // max(width, 1)
            return rows(begin, at).reshape(-1)

        yield take

    return Array(n_rows * width, np.dtype(dtype), stream)


def memory_array(array: NDArray[Any]) -> Array:
    """An array (N,) or (N, D), in whatever order it lies."""

    def rows(start: int, stop: int) -> NDArray[Any]:
        some = array[start:stop]
        items = np.array(some, order="C")
        if some.size and (file := _mapped(array)) is not None:
            _let_go(file, some)
        return items

    return row_array(rows, len(array), int(np.prod(array.shape[1:])), array.dtype)


def dense_side(array: NDArray[Any], name: str) -> DenseSide:
    """An array of two dimensions as a side. Raises InputError where its numbers are not real."""
    return dense(name, "array", (), array.shape[0], array.shape[1], memory_array(array))


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
