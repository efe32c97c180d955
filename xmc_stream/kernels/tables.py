"""Sparse vectors over the labels, one for each feature and part of the labels: v by label, and w = soft(v, lam) as a list.

Table t of v holds labels 0 .. n_labels - 1 in a region of an arena: a place has a label (n_labels where it is empty), its
value, and where its w stands in the list, -1 where w is 0. A label stands at the first place, from that of its hash on, that
was free when it came. Parts are runs of labels, which should be numbers of a random permutation (Yen et al. 2016, section
4.2). A region is at most 4/5 full; a table that outgrows its region moves to a longer one, lengths being powers of two and
three halves of them, and regions left are used again. List t of w is as long as there are
weights, in no order, in a region of another arena: it is all that a search reads. A list that has a weight for one label
in WIDE of its part becomes wide: the weights of all labels of the part, in order, which are faster to add.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel

V_BYTES, W_BYTES = 16, 8  # of a place in either arena
WIDE = 8
_LEAST_SIZE = 2
_SIZES = 92
_A = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


class Arena(NamedTuple):
    """Regions of an arena. begin, size (-1: none yet, see `length`), n (labels): of each table or list; labels: of places.

    free[s]: the first free region of size s, -1 for none; the labels of its first two places tell the next one.
    used (1,): places that were ever given away.
    """

    begin: NDArray[np.int64]
    size: NDArray[np.int8]
    n: NDArray[np.int32]
    labels: NDArray[np.int32]
    free: NDArray[np.int64]
    used: NDArray[np.int64]


class Tables(NamedTuple):
    """Hash tables of v and lists of w, at most most_bytes together; or, where `dense`, v of n_labels values a feature.

    w.n: weights of each list that are not 0, also where it is wide or the tables are dense. wide: whether it has all
    labels of its part.
    """

    n_labels: int
    n_parts: int
    lam: float
    most_bytes: int
    dense: bool
    v: Arena
    values: NDArray[np.float64]
    positions: NDArray[np.int32]
    w: Arena
    weights: NDArray[np.float32]
    wide: NDArray[np.bool_]


def _arena(n: int, n_places: int) -> Arena:
    return Arena(
        np.zeros(n, np.int64), np.full(n, -1, np.int8), np.zeros(n, np.int32), np.empty(n_places, np.int32),
        np.full(_SIZES, -1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


def hash_tables(n_features: int, n_labels: int, n_parts: int, lam: float, most_bytes: int) -> Tables:
    """Empty tables; memory becomes resident as its places are given away."""
    n, n_v, n_w = n_features * n_parts, most_bytes // V_BYTES, most_bytes // W_BYTES
    return Tables(
        n_labels, n_parts, lam, most_bytes, False, _arena(n, n_v), np.empty(n_v), np.empty(n_v, np.int32), _arena(n, n_w),
        np.empty(n_w, np.float32), np.zeros(n, np.bool_),
    )  # fmt: skip


def dense_tables(n_features: int, n_labels: int, n_parts: int, lam: float) -> Tables:
    """Zeros for every feature and label."""
    none, n = np.empty(0, np.int32), n_features * n_parts
    return Tables(
        n_labels, n_parts, lam, 0, True, _arena(0, 0), np.zeros(n_features * n_labels), none, _arena(n, 0),
        np.empty(0, np.float32), np.empty(0, np.bool_),
    )  # fmt: skip


@kernel
def soft(v: float, lam: float) -> float:
    """sign(v) max(|v| - lam, 0)."""
    return v - min(max(v, -lam), lam)


@kernel
def part_bounds(part: int, n_labels: int, n_parts: int) -> tuple[int, int]:
    """The labels of a part."""
    return (n_labels * part + n_parts - 1) // n_parts, (n_labels * (part + 1) + n_parts - 1) // n_parts


@kernel
def table_of(feature: int, label: int, tables: Tables) -> int:
    """The table of a feature that has a label."""
    if tables.n_parts == 1:  # the usual case, without a division
        return feature
    return feature * tables.n_parts + label * tables.n_parts // tables.n_labels


@kernel
def length(size: int) -> int:
    """Places of a region of a size: 2, 3, 4, 6, 8, 12, 16, ... for 0, 1, 2, ..."""
    return (2 + (size & 1)) << (size >> 1)


@kernel
def _slot(label: int, places: int) -> int:
    """Where the search for a label begins in a region."""
    h = (np.uint64(label) * _A) >> _32
    return int(np.int64((h * np.uint64(places)) >> _32))


@kernel
def find(feature: int, label: int, tables: Tables) -> int:
    """The place of a label's v for a feature, -1 if it has none."""
    if tables.dense:
        return feature * tables.n_labels + label
    t, v = table_of(feature, label, tables), tables.v
    if v.size[t] < 0:
        return -1
    begin, places = v.begin[t], length(int(v.size[t]))
    slot = _slot(label, places)
    while True:
        at = begin + slot
        if v.labels[at] == label:
            return int(at)
        if v.labels[at] == tables.n_labels:
            return -1
        slot += 1
        if slot == places:
            slot = 0


@kernel
def _v_size(count: int) -> int:
    """The least size of a region for v of so many labels."""
    size = _LEAST_SIZE
    while count * 5 > 4 * length(size):
        size += 1
    return size


@kernel
def _w_size(count: int, part: int, tables: Tables) -> tuple[int, bool]:
    """The least size of a region for so many weights of a part, and whether they are a wide list's."""
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    size, wide = _LEAST_SIZE, WIDE * count > high - low
    while (high - low if wide else count) > length(size):
        size += 1
    return size, wide


@kernel
def bytes_needed(feature: int, more: int, tables: Tables) -> int:
    """Bytes that so many labels, all new to each table of a feature, may take; free regions are not counted on."""
    needed = 0
    if not tables.dense:
        for t in range(feature * tables.n_parts, (feature + 1) * tables.n_parts):
            size = _v_size(tables.v.n[t] + more)
            if size > tables.v.size[t]:
                needed += V_BYTES * length(size)
            # labels that are there already may come to have a weight
            size, _ = _w_size(tables.w.n[t] + more, t - feature * tables.n_parts, tables)
            if not tables.wide[t] and size > tables.w.size[t]:
                needed += W_BYTES * length(size)
    return needed


@kernel
def bytes_used(tables: Tables) -> int:
    """Bytes of both arenas that were ever given away."""
    return int(V_BYTES * tables.v.used[0] + W_BYTES * tables.w.used[0])


@kernel
def _new_region(arena: Arena, size: int) -> int:
    first = arena.free[size]
    if first >= 0:
        high, low = np.int64(arena.labels[first]), np.int64(arena.labels[first + 1])
        arena.free[size] = (high << 31) | low if high >= 0 else -1
    else:
        first = arena.used[0]
        arena.used[0] += length(size)
    return int(first)


@kernel
def _leave_region(arena: Arena, t: int) -> None:
    first, then = arena.begin[t], arena.free[arena.size[t]]
    arena.labels[first] = -1 if then < 0 else then >> 31
    arena.labels[first + 1] = 0 if then < 0 else then & 0x7FFFFFFF
    arena.free[arena.size[t]] = first


@kernel
def _empty_place(label: int, begin: int, places: int, labels: NDArray[np.int32], n_labels: int) -> int:
    """The place that a label takes in a region that does not have it."""
    slot = _slot(label, places)
    while labels[begin + slot] != n_labels:
        slot += 1
        if slot == places:
            slot = 0
    return int(begin + slot)


@kernel
def _grow_v(t: int, size: int, tables: Tables) -> None:
    """Move a table of v to a region of another size."""
    v, places = tables.v, length(size)
    to = _new_region(v, size)
    v.labels[to : to + places] = tables.n_labels
    if v.size[t] >= 0:
        for at in range(v.begin[t], v.begin[t] + length(int(v.size[t]))):
            if v.labels[at] != tables.n_labels:
                there = _empty_place(v.labels[at], to, places, v.labels, tables.n_labels)
                v.labels[there], tables.values[there] = v.labels[at], tables.values[at]
                tables.positions[there] = tables.positions[at]
        _leave_region(v, t)
    v.begin[t], v.size[t] = to, size


@kernel
def place(feature: int, label: int, tables: Tables) -> int:
    """The place of a label's v for a feature; 0 where there was none. Other places of its table may move then."""
    at = find(feature, label, tables)
    if at >= 0:
        return at
    t, v = table_of(feature, label, tables), tables.v
    size = _v_size(v.n[t] + 1)
    if size > v.size[t]:
        _grow_v(t, size, tables)
    at = _empty_place(label, v.begin[t], length(int(v.size[t])), v.labels, tables.n_labels)
    v.labels[at], tables.values[at], tables.positions[at] = label, 0.0, -1
    v.n[t] += 1
    return int(at)


@kernel
def _grow_w(t: int, part: int, size: int, wide: bool, tables: Tables) -> None:
    """Move a list of w to a region of another size, where it may become wide."""
    w, weights = tables.w, tables.weights
    to = _new_region(w, size)
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    if wide:
        weights[to : to + high - low] = 0.0
    if w.size[t] >= 0:
        first, n = w.begin[t], w.n[t]
        if wide:
            for at in range(first, first + n):
                weights[to + w.labels[at] - low] = weights[at]
        else:
            w.labels[to : to + n] = w.labels[first : first + n]
            weights[to : to + n] = weights[first : first + n]
        _leave_region(w, t)
    w.begin[t], w.size[t], tables.wide[t] = to, size, wide


@kernel
def set_weight(feature: int, label: int, at: int, weight: np.float32, tables: Tables) -> None:
    """Enter w of a label, whose v is at a place, in the list: anew, changed, or taken out where it is 0."""
    w, weights, t = tables.w, tables.weights, table_of(feature, label, tables)
    part = t - feature * tables.n_parts
    low, _ = part_bounds(part, tables.n_labels, tables.n_parts)
    if tables.wide[t]:
        position = w.begin[t] + label - low
        w.n[t] += np.int32(weight != 0.0) - np.int32(weights[position] != 0.0)
        weights[position] = weight
        return
    position = np.int64(tables.positions[at])
    if weight != 0.0:
        if position < 0:
            position = np.int64(w.n[t])
            size, wide = _w_size(int(position) + 1, part, tables)
            if size > w.size[t] or wide:
                _grow_w(t, part, size, wide, tables)
                position = np.int64(label - low) if wide else position
            w.n[t] += 1
            if not wide:
                tables.positions[at] = position
                w.labels[w.begin[t] + position] = label
        weights[w.begin[t] + position] = weight
    elif position >= 0:  # the last one takes its place
        w.n[t] -= 1
        last = w.begin[t] + w.n[t]
        if position != w.n[t]:
            other = w.labels[last]
            w.labels[w.begin[t] + position] = other
            weights[w.begin[t] + position] = weights[last]
            tables.positions[find(feature, other, tables)] = position
        tables.positions[at] = -1


@kernel
def list_entries(
    first: int,
    last: int,
    tables: Tables,
    counts: NDArray[np.int32],
    labels: NDArray[np.int32],
    values: NDArray[np.float64],
) -> int:
    """What features [first, last) have: how many labels each, their numbers in no order, their v; returns how many.

    Of dense vectors what is not 0.
    """
    n, v = 0, tables.v
    for j in range(first, last):
        before = n
        if tables.dense:
            for k in range(tables.n_labels):
                if tables.values[j * tables.n_labels + k] != 0.0:
                    labels[n], values[n] = k, tables.values[j * tables.n_labels + k]
                    n += 1
        else:
            for t in range(j * tables.n_parts, (j + 1) * tables.n_parts):
                if v.size[t] >= 0:
                    for at in range(v.begin[t], v.begin[t] + length(int(v.size[t]))):
                        if v.labels[at] != tables.n_labels:
                            labels[n], values[n] = v.labels[at], tables.values[at]
                            n += 1
        counts[j - first] = n - before
    return n


@kernel
def enter(
    first: int, tables: Tables, counts: NDArray[np.int32], labels: NDArray[np.int32], values: NDArray[np.float64]
) -> bool:
    """Put all entries of features first, first + 1, ... into tables that have none of them; False where there is no room."""
    n, v, w, lam = 0, tables.v, tables.w, tables.lam
    v_labels, v_values, positions = v.labels, tables.values, tables.positions
    w_labels, weights = w.labels, tables.weights
    for j in range(first, first + len(counts)):
        end = n + counts[j - first]
        for part in range(tables.n_parts):
            t, n_v, n_w = j * tables.n_parts + part, 0, 0
            for q in range(n, end):
                if table_of(j, labels[q], tables) == t:
                    n_v += 1
                    n_w += 1 if np.float32(soft(values[q], lam)) != 0.0 else 0
            w.n[t] = n_w
            if tables.dense:
                for q in range(n, end):
                    if table_of(j, labels[q], tables) == t:
                        v_values[j * tables.n_labels + labels[q]] = values[q]
                continue
            if n_v == 0:
                continue
            low, _ = part_bounds(part, tables.n_labels, tables.n_parts)
            v_size, (w_size, wide) = _v_size(n_v), _w_size(n_w, part, tables)
            if bytes_used(tables) + V_BYTES * length(v_size) + W_BYTES * length(w_size) > tables.most_bytes:
                return False
            _grow_v(t, v_size, tables)
            v.n[t], w.n[t] = n_v, 0
            if n_w:
                _grow_w(t, part, w_size, wide, tables)
            begin, places, list_ = v.begin[t], length(v_size), w.begin[t]
            for q in range(n, end):
                if table_of(j, labels[q], tables) != t:
                    continue
                at = _empty_place(labels[q], begin, places, v_labels, tables.n_labels)
                v_labels[at], v_values[at], positions[at] = labels[q], values[q], -1
                weight = np.float32(soft(values[q], lam))
                if weight != 0.0 and wide:
                    weights[list_ + labels[q] - low] = weight
                elif weight != 0.0:
                    w_labels[list_ + w.n[t]], weights[list_ + w.n[t]], positions[at] = labels[q], weight, w.n[t]
                w.n[t] += 1 if weight != 0.0 else 0
        n = end
    return True


@kernel
def norms(tables: Tables) -> tuple[float, float, int]:
    """||w||^2, ||w||_1 and how many |w| > 1e-8, of all labels; summed in the order of the places."""
    square, total, n = 0.0, 0.0, 0
    if tables.dense:
        for v in tables.values:
            w = abs(soft(v, tables.lam))
            square, total = square + w * w, total + w
            n += 1 if w > 1e-8 else 0
        return square, total, n
    size, begin, labels = tables.v.size, tables.v.begin, tables.v.labels
    for t in range(len(size)):
        if size[t] >= 0:
            for at in range(begin[t], begin[t] + length(int(size[t]))):
                if labels[at] != tables.n_labels:
                    w = abs(soft(tables.values[at], tables.lam))
                    square, total = square + w * w, total + w
                    n += 1 if w > 1e-8 else 0
    return square, total, n
