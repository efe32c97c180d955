"""Where a row of sweeps is going: Anderson's extrapolation of coordinate descent (Bertrand, Massias 2021).

Sweeps over the same features come to their limit along few directions, if slowly. From W after each of them, w_0 .. w_m,

    w = sum_i c_i w_i   (i = 1 .. m),   c minimises || sum_i c_i (w_i - w_{i-1}) ||  with  sum_i c_i = 1

is often as near to it as many more sweeps would come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_VALUES = 1 << 19  # of W in one sweep: larger ones are not extrapolated, whatever the memory
KEPT = 6  # sweeps
LEAST = 3
BYTES = (KEPT + 2) * 4 * MOST_VALUES + 16 * MOST_VALUES  # of what is kept, and of the sum
_REGULAR = 1e-10
_RUN = 1 << 13  # values that are gone over at a time


class Extrapolation:
    """W of some features after the last sweeps over them."""

    def __init__(self) -> None:
        self.features = np.zeros(0, np.int64)
        self._seen: list[NDArray[np.float32]] = []

    def stored(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The features, and W of them (width values a feature), sweep after sweep: what `go_on` takes."""
        return self.features, np.concatenate([np.zeros((0, width), np.float32), *self._seen])

    def go_on(self, features: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """From what was stored."""
        self.features = features
        self._seen = [rows[low : low + len(features)] for low in range(0, len(rows), max(len(features), 1))]

    def begin(self, features: NDArray[np.int64]) -> None:
        """Sweeps over other features follow."""
        self.features, self._seen = features, []

    def add(self, rows: NDArray[np.float32]) -> None:
        """W of the features after a sweep."""
        self._seen = [*self._seen[-(KEPT - 1) :], rows]

    def __len__(self) -> int:
        return len(self._seen)

    def result(self) -> NDArray[np.float32] | None:
        """Where they are going: rows that are 0 now stay so. None where that is not defined."""
        seen = [rows.reshape(-1) for rows in self._seen]
        m = len(seen) - 1
        gram = np.zeros((m, m))
        for low in range(0, len(seen[0]), _RUN):
            steps = np.diff(np.array([rows[low : low + _RUN] for rows in seen], np.float64), axis=0)
            for a in range(m):  # no BLAS: its sums depend on the number of threads
                for b in range(a + 1):
                    gram[a, b] += float((steps[a] * steps[b]).sum())
        gram = np.tril(gram) + np.tril(gram, -1).T
        scale = float(np.trace(gram))
        if not scale > 0:
            return None
        solved = np.linalg.solve(gram + _REGULAR * scale * np.eye(m), np.ones(m))
        if not np.isfinite(solved).all() or not abs(solved.sum()) > 0:
            return None
        c = solved / solved.sum()
        total = np.zeros(len(seen[0]))
        for factor, rows in zip(c.tolist(), seen[1:], strict=True):
            total += factor * rows
        out = total.astype(np.float32).reshape(self._seen[-1].shape)
        out[~self._seen[-1].any(axis=1)] = 0
        return out if bool(np.isfinite(out).all()) else None
