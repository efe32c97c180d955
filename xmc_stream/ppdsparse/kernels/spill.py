"""Active rows of classes on disk by strips of rows, and by class while classes take their steps (`ppdsparse.spill`).

By strip, a record is a RECORD: class and row count from the first class and the strip's first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

RECORD = np.dtype(
    [("alpha", np.float64), ("label", np.uint16), ("offset", np.uint16), ("flags", np.uint8)], align=True
)  # 16 bytes
POSITIVE, ASLEEP, FRESH = 1, 2, 4  # bits of a record's flags


@kernel
def put_by_strip(
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    alpha: NDArray[np.float64],
    flags: NDArray[np.uint8],
    first_strip: int,
    strip_bits: int,
    places: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Sort records of consecutive strips, which are by class, by strip. places: where the next of each strip goes."""
    for c in range(len(ptr) - 1):
        for q in range(ptr[c], ptr[c + 1]):
            row = int(rows[q])
            strip = (row >> strip_bits) - first_strip
            record = out[places[strip]]
            record["alpha"], record["label"], record["flags"] = alpha[q], c, flags[q]
            record["offset"] = row & ((1 << strip_bits) - 1)
            places[strip] += 1


@kernel
def put_by_class(
    strip_ptr: NDArray[np.int64],
    strips: NDArray[np.int64],
    strip_bits: int,
    records: NDArray[Any],
    ptr: NDArray[np.int64],
    rows: NDArray[Any],
    sign: NDArray[np.int8],
    alpha: NDArray[np.float64],
    asleep: NDArray[np.bool_],
    source: NDArray[np.int64],
) -> None:
    """Sort records of some strips (ascending; those of strips[j] from strip_ptr[j] on) by class, rows ascending.

    ptr (n + 1,) is filled, as rows, sign, alpha, asleep; source: where each of these was among `records`.
    """
    ptr[:] = 0
    for p in range(len(records)):
        ptr[np.int64(records[p]["label"]) + 1] += 1
    for c in range(1, len(ptr)):
        ptr[c] += ptr[c - 1]
    for j in range(len(strips)):
        for p in range(strip_ptr[j], strip_ptr[j + 1]):
            c = int(records[p]["label"])
            q = ptr[c]
            ptr[c] = q + 1
            rows[q] = (strips[j] << strip_bits) | np.int64(records[p]["offset"])
            sign[q] = 1 if records[p]["flags"] & POSITIVE else -1
            alpha[q] = records[p]["alpha"]
            asleep[q] = (records[p]["flags"] & ASLEEP) != 0
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
    records: NDArray[Any],
    sleepers: NDArray[np.int64],
) -> None:
    """alpha and asleep of records by class to where they came from; sleepers[c] counts those asleep, moved by the change."""
    for c in range(len(ptr) - 1):
        for q in range(ptr[c], ptr[c + 1]):
            record = records[source[q]]
            record["alpha"] = alpha[q]
            was = np.int64((record["flags"] & ASLEEP) != 0)
            sleepers[c] += np.int64(asleep[q]) - was
            record["flags"] = (record["flags"] & ~np.uint8(ASLEEP)) | (np.uint8(ASLEEP) if asleep[q] else np.uint8(0))


@kernel
def wake_records(classes: NDArray[np.bool_], records: NDArray[Any]) -> None:
    """No record of these classes is asleep any more."""
    for p in range(len(records)):
        if classes[np.int64(records[p]["label"])]:
            records[p]["flags"] = records[p]["flags"] & ~np.uint8(ASLEEP)
