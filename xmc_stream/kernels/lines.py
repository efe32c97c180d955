"""Where the lines of dense matrices lie, that kernels gather and scatter: in whole cache lines. It needs no compiler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 16  # float32


def lanes(columns: int) -> int:
    """Columns that a line has in memory: it fills cache lines, and a loop over it whole vectors."""
    return 1 << (columns - 1).bit_length() if columns < CACHE_LINE else -(-columns // CACHE_LINE) * CACHE_LINE


def aligned_zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """Zeros that begin where a cache line does."""
    size = math.prod(shape)
    room = np.zeros(size + CACHE_LINE, dtype)
    first = -(room.ctypes.data // room.itemsize) % CACHE_LINE
    return room[first : first + size].reshape(shape)
