"""Raw scores into calibrated ones, class by class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel, kernel

SLOPE, SHIFT, CAP, TOP = range(
    4
)  # rows of what scores are calibrated by: float32 (4, classes), or (4, 0) for not at all
NOT_CALIBRATED: NDArray[np.float32] = np.empty((4, 0), np.float32)
UNSEEN = np.finfo(np.float32).min  # the score of a label without training rows, whatever the row: below every other
BEYOND = np.float32(0.01)  # slope beyond the cap: enough to order the scores of one class


@inner_kernel
def calibrated(score: np.float32, c: int, by: NDArray[np.float32]) -> np.float32:
    """z = slope_c score + shift_c up to the cap; beyond it top_c + 0.01 (z - cap)."""
    z = by[SLOPE, c] * score + by[SHIFT, c]
    if z > by[CAP, c]:
        z = by[TOP, c] + BEYOND * (z - by[CAP, c])
    return np.float32(z)


@kernel
def calibrate_row(scores: NDArray[np.float32], by: NDArray[np.float32]) -> None:
    """Calibrate a row's scores of a tile's classes, as many as `by` has, in place."""
    for c in range(by.shape[1]):
        scores[c] = calibrated(scores[c], c, by)


@kernel
def calibrate_rows(scores: NDArray[np.float32], by: NDArray[np.float32]) -> None:
    """The same for scores (n x classes)."""
    for i in range(len(scores)):
        calibrate_row(scores[i], by)
