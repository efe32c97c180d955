"""Sparse vectors over the labels, one for each feature and part of the labels, in one arena: dense, or hash tables.

Table t of labels 0 .. n_labels - 1 is the region of 2^bits[t] places from begin[t] on (bits -1: none yet): a place has a
label, n_labels where it is empty, and a value. Label l stands at the first place from l modulo the region's length on that
was free when it came. The labels must be numbers of a random permutation: it is the hash, taken once for all tables (Yen et
al. 2016, section 4.2), and parts are runs of such numbers. A region is at most 3/4 full; a table that outgrows its region
moves to one twice as long, and regions left are used again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

_LEAST_BITS = 2
_SIZES = 48  # of regions


class Tables(NamedTuple):
    """The arena. Dense where `labels` is empty: n_labels values a feature, and a place is always there.

    count: labels of each table. free[b]: the first free region of 2^b places, -1 for none; its value tells the next one.
    used (1,): places that were ever given away.
    """

    n_labels: int
    n_parts: int
    begin: NDArray[np.int64]
    bits: NDArray[np.int8]
    count: NDArray[np.int32]
    labels: NDArray[np.int32]
    values: NDArray[np.float64]
    free: NDArray[np.int64]
    used: NDArray[np.int64]


def hash_tables(n_features: int, n_labels: int, n_parts: int, n_places: int) -> Tables:
    """Empty hash tables in an arena of so many places, which become resident as they are given away."""
    n = n_features * n_parts
    return Tables(
        n_labels, n_parts, np.zeros(n, np.int64), np.full(n, -1, np.int8), np.zeros(n, np.int32),
        np.empty(n_places, np.int32), np.empty(n_places), np.full(_SIZES, -1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


def dense_tables(n_features: int, n_labels: int, n_parts: int) -> Tables:
    """Zeros for every feature and label."""
    nothing = np.empty(0, np.int64)
    return Tables(
        n_labels, n_parts, nothing, np.empty(0, np.int8), np.empty(0, np.int32), np.empty(0, np.int32),
        np.zeros(n_features * n_labels), nothing, np.zeros(1, np.int64),
    )  # fmt: skip


@kernel
def part_bounds(part: int, n_labels: int, n_parts: int) -> tuple[int, int]:
    """The labels of a part."""
    return (n_labels * part + n_parts - 1) // n_parts, (n_labels * (part + 1) + n_parts - 1) // n_parts


@kernel
def table_of(feature: int, label: int, tables: Tables) -> int:
    """The table of a feature that has a label."""
    return feature * tables.n_parts + label * tables.n_parts // tables.n_labels


@kernel
def find(feature: int, label: int, tables: Tables) -> int:
    """The place of a label for a feature, -1 if it has none."""
    if len(tables.labels) == 0:
        return feature * tables.n_labels + label
    t = table_of(feature, label, tables)
    if tables.bits[t] < 0:
        return -1
    mask = (np.int64(1) << tables.bits[t]) - 1
    slot = np.int64(label) & mask
    while True:
        at = tables.begin[t] + slot
        if tables.labels[at] == label:
            return int(at)
        if tables.labels[at] == tables.n_labels:
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
def places_needed(feature: int, more: int, tables: Tables) -> int:
    """Places that must be left before so many labels come to each table of a feature; free regions are not counted on."""
    needed = 0
    if len(tables.labels):
        for t in range(feature * tables.n_parts, (feature + 1) * tables.n_parts):
            wanted = _bits_for(tables.count[t] + more)
            if wanted > tables.bits[t]:
                needed += 1 << wanted
    return needed


@kernel
def _grow(t: int, wanted: int, tables: Tables) -> None:
    """Move table t to a region of 2^wanted places."""
    n_labels, labels, values, free = tables.n_labels, tables.labels, tables.values, tables.free
    to = free[wanted]
    if to >= 0:
        free[wanted] = np.int64(values[to])
    else:
        to = tables.used[0]
        tables.used[0] += np.int64(1) << wanted
    labels[to : to + (np.int64(1) << wanted)] = n_labels
    mask = (np.int64(1) << wanted) - 1
    if tables.bits[t] >= 0:
        old, length = tables.begin[t], np.int64(1) << tables.bits[t]
        for at in range(old, old + length):
            if labels[at] != n_labels:
                slot = np.int64(labels[at]) & mask
                while labels[to + slot] != n_labels:
                    slot = (slot + 1) & mask
                labels[to + slot], values[to + slot] = labels[at], values[at]
        values[old] = free[tables.bits[t]]
        free[tables.bits[t]] = old
    tables.begin[t], tables.bits[t] = to, wanted


@kernel
def place(feature: int, label: int, tables: Tables) -> int:
    """The place of a label for a feature, with value 0 where it had none; other places of its table may move then."""
    at = find(feature, label, tables)
    if at >= 0:
        return at
    t = table_of(feature, label, tables)
    wanted = _bits_for(tables.count[t] + 1)
    if wanted > tables.bits[t]:
        _grow(t, wanted, tables)
    mask = (np.int64(1) << tables.bits[t]) - 1
    slot = np.int64(label) & mask
    while tables.labels[tables.begin[t] + slot] != tables.n_labels:
        slot = (slot + 1) & mask
    at = tables.begin[t] + slot
    tables.labels[at], tables.values[at] = label, 0.0
    tables.count[t] += 1
    return int(at)
