"""Calibrated scores one by one, in float32; and what a calibration says of a label, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def calibrated(scores: NDArray[np.float32], by: NDArray[np.float32]) -> NDArray[np.float32]:
    """scores (n, K); by (4, K): slope, shift, cap and top of each label, or (4, 0)."""
    out = scores.copy()
    for i in range(len(scores)):
        for c in range(by.shape[1]):
            slope, shift, cap, top = by[:, c]
            z = np.float32(np.float32(slope * scores[i, c]) + shift)
            out[i, c] = z if z <= cap else top + np.float32(np.float32(0.01) * np.float32(z - cap))
    return out


def score(about: dict[str, Any], n: int, raw: float) -> float:
    """The formula of `solvers.calibration` for a label with n training rows."""
    if not n:
        return float(np.finfo(np.float32).min)
    log = math.log(max(n, about["fewest"]) + 1)
    z = max(about["slope"][0] + about["slope"][1] * log, about["least"]) * raw
    z += about["shift"][0] + about["shift"][1] * log
    cap = math.inf if about["cap"] is None else about["cap"]
    return z if z <= cap else cap + math.log(n + 1) + (z - cap) / 100
