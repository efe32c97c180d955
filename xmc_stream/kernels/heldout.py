"""Which rows are held out: a draw by seed and row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import HELD_OUT_ROWS
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, mix

_A = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)
HELD_OUT = 50_000  # rows, about, that are held out at most, so that looking at them takes little beside a pass


@kernel
def held_out(rows: NDArray[np.int64], seed: int, share: float, out: NDArray[np.bool_]) -> None:
    """out[i] = whether row rows[i] is held out: a share of all rows, drawn by seed and row."""
    key = key_of(seed, HELD_OUT_ROWS, 0, 0)
    for i in range(len(rows)):
        out[i] = np.float64(mix(key ^ (np.uint64(rows[i]) * _A)) >> _11) < share * 9007199254740992.0
