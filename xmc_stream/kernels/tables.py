"""Sparse vectors over the labels, one for each feature and part of the labels, in one arena: dense, or hash tables.

Table t of labels 0 .. n_labels - 1 is the region of 2^bits[t] places from begin[t] on (bits -1: none yet): a place has a
label, n_labels where it is empty, and a value. Label l stands at the first place from l modulo the region's length on that
was free when it came. The labels must be numbers of a random permutation: it is the hash, taken once for all tables (Yen et
al. 2016, section 4.2). A region is at most 3/4 full; a table that outgrows its region moves to one twice as long, and
regions left are used again. free[b] is the first free region of 2^b places, -1 for none; its value tells the next one.

Without labels (an empty array) the vectors are dense: n_labels values a table, and a place is always there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

_LEAST_BITS = 2


@kernel
def find(
    t: int, label: int, n_labels: int, begin: NDArray[np.int64], bits: NDArray[np.int8], labels: NDArray[np.int32]
) -> int:
    """The place of a label in table t, -1 if it has none."""
    if len(labels) == 0:
        return t * n_labels + label
    if bits[t] < 0:
        return -1
    mask = (np.int64(1) << bits[t]) - 1
    slot = label & mask
    while True:
        at = begin[t] + slot
        if labels[at] == label:
            return int(at)
        if labels[at] == n_labels:
            return -1
        slot = (slot + 1) & mask


@kernel
def _bits_for(count: int) -> int:
    """Bits of the shortest region for so many labels."""
    bits = _LEAST_BITS
    while count * 4 > 3 << bits:
        bits += 1
    return bits


@kernel
def places_needed(
    t: int, more: int, bits: NDArray[np.int8], count: NDArray[np.int32], labels: NDArray[np.int32]
) -> int:
    """Places that the arena must have left before so many labels come to table t, free regions not counted on."""
    if len(labels) == 0:
        return 0
    wanted = _bits_for(count[t] + more)
    return 0 if wanted <= bits[t] else 1 << wanted


@kernel
def _new_region(
    wanted: int, n_labels: int, free: NDArray[np.int64], used: NDArray[np.int64], labels: NDArray[np.int32],
    values: NDArray[np.float64],
) -> int:  # fmt: skip
    """An empty region of 2^wanted places."""
    first = free[wanted]
    if first >= 0:
        free[wanted] = np.int64(values[first])
    else:
        first = used[0]
        used[0] += np.int64(1) << wanted
    labels[first : first + (1 << wanted)] = n_labels
    return int(first)


@kernel
def _grow(
    t: int, wanted: int, n_labels: int, begin: NDArray[np.int64], bits: NDArray[np.int8], labels: NDArray[np.int32],
    values: NDArray[np.float64], free: NDArray[np.int64], used: NDArray[np.int64],
) -> None:  # fmt: skip
    """Move table t to a region of 2^wanted places."""
    to = _new_region(wanted, n_labels, free, used, labels, values)
    mask = (np.int64(1) << wanted) - 1
    if bits[t] >= 0:
        old, length = begin[t], np.int64(1) << bits[t]
        for at in range(old, old + length):
            if labels[at] != n_labels:
                slot = np.int64(labels[at]) & mask
                while labels[to + slot] != n_labels:
                    slot = (slot + 1) & mask
                labels[to + slot], values[to + slot] = labels[at], values[at]
        values[old] = free[bits[t]]
        free[bits[t]] = old
    begin[t], bits[t] = to, wanted


@kernel
def place(
    t: int, label: int, n_labels: int, begin: NDArray[np.int64], bits: NDArray[np.int8], count: NDArray[np.int32],
    labels: NDArray[np.int32], values: NDArray[np.float64], free: NDArray[np.int64], used: NDArray[np.int64],
) -> int:  # fmt: skip
    """The place of a label in table t; one with value 0 where it had none. See `places_needed`."""
    at = find(t, label, n_labels, begin, bits, labels)
    if at >= 0:
        return at
    wanted = _bits_for(count[t] + 1)
    if wanted > bits[t]:
        _grow(t, wanted, n_labels, begin, bits, labels, values, free, used)
    mask = (np.int64(1) << bits[t]) - 1
    slot = label & mask
    while labels[begin[t] + slot] != n_labels:
        slot = (slot + 1) & mask
    at = begin[t] + slot
    labels[at], values[at] = label, 0.0
    count[t] += 1
    return int(at)
