"""What commands share that read a dataset once: how large blocks of rows are, and files that list rows or features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.files import regular

_BLOCK = 16 * MIB  # of X, where the limit allows


def block_bytes(room: int, X: SparseMatrix, *Y: SparseMatrix) -> list[int]:
    """Bytes of X, and of Y, in a block where there is room for so many of X; Y gets a quarter as many."""
    most = max(MIB, min(_BLOCK, room))
    return [X.block_bytes(most), *(matrix.block_bytes(most // 4) for matrix in Y)]


def listed(path: Path, n: int, what: str) -> NDArray[np.bool_]:
    """Which of n rows, or features, a file lists. Raises InputError for a line that is not the number of another one."""
    chosen = np.zeros(n, np.bool_)
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(iter(lambda: file.readline(64), b""), 1):
                text = line.strip()
                if not text:
                    continue
                one = int(text) if text.isdigit() else n
                if one >= n or chosen[one]:
                    why = "listed twice" if one < n else f"no {what} number from 0 to {n - 1}"
                    shown = text[:30].decode(errors="replace")
                    raise InputError(f"{path}:{number}: {shown!r} is {why}: write each {what} once, one a line")
                chosen[one] = True
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the name") from None
    return chosen
