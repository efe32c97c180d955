"""Pairs (row, class) on disk by runs of rows, and by class while classes take their steps (`jobs.slabs`).

By runs, a pair is a PAIR: class and row count from the first class and the run's first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

PAIR = np.dtype(
    [("alpha", np.float64), ("label", np.uint16), ("offset", np.uint16), ("flags", np.uint8)], align=True
)  # 16 bytes
POSITIVE, ASLEEP, FRESH = 1, 2, 4  # bits of a pair's flags


@kernel
def put_by_run(
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    alpha: NDArray[np.float64],
    flags: NDArray[np.uint8],
    first_run: int,
    run_bits: int,
    places: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Sort pairs of consecutive runs, which are by class, by run. places: where the first of each run goes, moved on."""
    for c in range(len(ptr) - 1):
        for q in range(ptr[c], ptr[c + 1]):
            row = int(rows[q])
            run = (row >> run_bits) - first_run
            pair = out[places[run]]
            pair["alpha"], pair["label"], pair["flags"] = alpha[q], c, flags[q]
            pair["offset"] = row & ((1 << run_bits) - 1)
            places[run] += 1


@kernel
def put_by_class(
    run_ptr: NDArray[np.int64],
    runs: NDArray[np.int64],
    run_bits: int,
    pairs: NDArray[Any],
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    asleep: NDArray[np.bool_],
    source: NDArray[np.int64],
) -> None:
    """Sort pairs of some runs (ascending; those of runs[j] from run_ptr[j] on) by class, rows ascending.

    ptr (n + 1,) is filled, as rows, sign, alpha, asleep; source: where each of these was among `pairs`.
    """
    ptr[:] = 0
    for p in range(len(pairs)):
        ptr[np.int64(pairs[p]["label"]) + 1] += 1
    for c in range(1, len(ptr)):
        ptr[c] += ptr[c - 1]
    for j in range(len(runs)):
        for p in range(run_ptr[j], run_ptr[j + 1]):
            c = int(pairs[p]["label"])
            q = ptr[c]
            ptr[c] = q + 1
            rows[q] = (runs[j] << run_bits) | np.int64(pairs[p]["offset"])
            sign[q] = 1 if pairs[p]["flags"] & POSITIVE else -1
            alpha[q] = pairs[p]["alpha"]
            asleep[q] = (pairs[p]["flags"] & ASLEEP) != 0
            source[q] = p
    for k in range(len(ptr) - 1, 0, -1):  # each has moved to where the next one begins
        ptr[k] = ptr[k - 1]
    ptr[0] = 0


@kernel
def put_back(
    ptr: NDArray[np.int64],
    alpha: NDArray[np.float64],
    asleep: NDArray[np.bool_],
    source: NDArray[np.int64],
    pairs: NDArray[Any],
    sleepers: NDArray[np.int64],
) -> None:
    """alpha and asleep of pairs by class to where they came from; sleepers[c] counts those asleep, moved by the change."""
    for c in range(len(ptr) - 1):
        for q in range(ptr[c], ptr[c + 1]):
            pair = pairs[source[q]]
            pair["alpha"] = alpha[q]
            was = np.int64((pair["flags"] & ASLEEP) != 0)
            sleepers[c] += np.int64(asleep[q]) - was
            pair["flags"] = (pair["flags"] & ~np.uint8(ASLEEP)) | (np.uint8(ASLEEP) if asleep[q] else np.uint8(0))


@kernel
def wake_pairs(classes: NDArray[np.bool_], pairs: NDArray[Any]) -> None:
    """No pair of these classes is asleep any more."""
    for p in range(len(pairs)):
        if classes[np.int64(pairs[p]["label"])]:
            pairs[p]["flags"] = pairs[p]["flags"] & ~np.uint8(ASLEEP)
