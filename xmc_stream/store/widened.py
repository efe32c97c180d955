"""Arrays whose items take two bytes on disk and four in memory: indices below 65,536, and weights of 16 bits.

Kernels are compiled for one type of indices and one of values. What is narrower is widened as it is read, piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.store.chunks import ChunkedArray
from xmc_stream.store.nodes import PlainArray

if TYPE_CHECKING:
    import zarr

NARROW_BOUND = 1 << 16  # indices below it fit into two bytes
_WIDE: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.float16): np.dtype(np.float32),
}
_PIECE = 1 << 16  # items that are widened at a time


class WidenedArray(ChunkedArray):
    """A narrow array of a store. dtype: what it is read as. bytes_read, chunk_bytes: of the disk."""

    def __init__(self, array: zarr.Array[Any] | PlainArray) -> None:
        super().__init__(array)
        self._stored = np.dtype(self.dtype)
        self.dtype = _WIDE[self._stored]

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Items [start, stop) in a private array, or in `out[: stop - start]`."""
        n = self._count(start, stop, out)
        out = np.empty(n, self.dtype) if out is None else out[:n]
        piece = np.empty(min(n, _PIECE), self._stored)
        for low in range(start, stop, _PIECE):
            high = min(low + _PIECE, stop)
            out[low - start : high - start] = super().read(low, high, piece)
        return out

    def read_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Items [first, first + count) of each range: see `ChunkedArray.read_ranges`. They are held in both types."""
        narrow = np.empty(len(out), self._stored)
        super().read_ranges(firsts, counts, narrow)
        out[:] = narrow

    def map(self) -> NDArray[Any]:
        """The whole array, read-only, in memory: a map would show it as it is on disk."""
        values = self.read(0, self.size)
        values.flags.writeable = False
        return values


def widened(array: zarr.Array[Any] | PlainArray) -> ChunkedArray:
    """An array to be read, widened where it is narrow."""
    return WidenedArray(array) if array.dtype in _WIDE else ChunkedArray(array)
