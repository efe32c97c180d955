"""Reading lines that lie apart in a plain file of lines of one length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.csr import pread_ranges
from xmc_stream.system.stop import stop_if_unwanted

WINDOW = 1 << 18  # bytes of a file that are read at once
_HOLE = 1 << 13  # bytes between lines that take less time than another call
_MOST = 1 << 24  # bytes of lines between two looks whether to stop


def read_lines(fd: int, path: Path, lines: NDArray[np.int64], staging: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Fill `out` (n x values) with the lines of a file, which ascend. staging: WINDOW bytes, or a line if that is longer.

    Raises StoreError where the file ends early or cannot be read.
    """
    data, length = out.reshape(-1).view(np.uint8), out.itemsize * out.shape[1]
    step = max(1, _MOST // length)
    for low in range(0, len(lines), step):
        stop_if_unwanted()
        some = lines[low : low + step].astype(np.int64, copy=False)
        room = data[low * length : (low + len(some)) * length]
        if not pread_ranges(fd, some, np.ones(len(some), np.int64), length, _HOLE // length, 0, WINDOW, staging, room):
            raise StoreError(f"{path} ends early or cannot be read: run the same command again, it goes on")
