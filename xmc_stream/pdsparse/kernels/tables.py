"""Sparse vectors over the labels, one for each feature and part of the labels: v by label, and w = soft(v, lam) as a list.

Table t of v holds labels 0 .. n_labels - 1 in a region of an arena: a place has a label (n_labels where it is empty), where
its w stands in the list, -1 where w is 0, and its value, side by side so that one look brings all. A label stands at the
first place, from that of its hash on, that was free when it came. Parts are ranges of labels, which should be numbers of a
random permutation (Yen et al. 2016, section 4.2). A region is at most 4/5 full; a table that outgrows its region moves to a
longer one, lengths being powers of two and three halves of them, and regions left are used again. List t of w is as long
as there are weights, in no order, in a region of another arena: it is all that a search reads. A list that has a weight
for one label in WIDE of its part becomes wide: the weights of all labels of the part, in order, which are faster to add.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel

V_BYTES, W_BYTES = 16, 8  # of a place in either arena
V_WIDTH = 4  # words of a place of v: label, position, and two that are its value
WIDE = 8
_LEAST_SIZE = 2
_SIZES = 92
_A = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


class Arena(NamedTuple):
    """Regions of an arena. begin, size (-1: none yet, see `length`), n (labels): of each table or list.

    words: of places, so many (width) each, the first of them the label. free[s]: the first free region of size s, -1 for
    none; the labels of its first two places tell the next one.
    used (1,): places that were ever given away.
    """

    begin: NDArray[np.int64]
    size: NDArray[np.int8]
    n: NDArray[np.int32]
    words: NDArray[np.int32]
    width: int
    free: NDArray[np.int64]
    used: NDArray[np.int64]


class Tables(NamedTuple):
    """Hash tables of v and lists of w, at most most_bytes together; or, where `dense`, v of n_labels values a feature.

    values: at index `at` a value, of which v.words has the label at 2 at - 2 and the position in the list at 2 at - 1.
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
    w: Arena
    weights: NDArray[np.float32]
    wide: NDArray[np.bool_]


def _arena(n: int, words: NDArray[np.int32], width: int) -> Arena:
    return Arena(
        np.zeros(n, np.int64), np.full(n, -1, np.int8), np.zeros(n, np.int32), words, width, np.full(_SIZES, -1, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip


def new_tables(n_features: int, n_labels: int, n_parts: int, lam: float, most_bytes: int) -> Tables:
    """Empty tables, whose memory becomes resident as its places are given away; most_bytes = 0: vectors of zeros instead."""
    n, dense, n_weights = n_features * n_parts, most_bytes == 0, most_bytes // W_BYTES
    values = np.zeros(n_features * n_labels) if dense else np.empty(most_bytes // V_BYTES * 2)
    words = np.empty(0, np.int32) if dense else values.view(np.int32)
    return Tables(
        n_labels, n_parts, lam, most_bytes, dense, _arena(0 if dense else n, words, V_WIDTH), values,
        _arena(n, np.empty(n_weights, np.int32), 1), np.empty(n_weights, np.float32), np.zeros(n, np.bool_),
    )  # fmt: skip


@inner_kernel
def soft(v: float, lam: float) -> float:
    """sign(v) max(|v| - lam, 0)."""
    return v - min(max(v, -lam), lam)


@inner_kernel
def part_bounds(part: int, n_labels: int, n_parts: int) -> tuple[int, int]:
    """The labels of a part."""
    return (n_labels * part + n_parts - 1) // n_parts, (n_labels * (part + 1) + n_parts - 1) // n_parts


@inner_kernel
def table_of(feature: int, label: int, tables: Tables) -> int:
    """The table of a feature that has a label."""
    if tables.n_parts == 1:  # the usual case, without a division
        return feature
    return feature * tables.n_parts + label * tables.n_parts // tables.n_labels


@inner_kernel
def length(size: int) -> int:
    """Places of a region of a size: 2, 3, 4, 6, 8, 12, 16, ... for 0, 1, 2, ..."""
    return (2 + (size & 1)) << (size >> 1)


@inner_kernel
def _slot(label: int, places: int) -> int:
    """Where the search for a label begins in a region."""
    h = (np.uint64(label) * _A) >> _32
    return int(np.int64((h * np.uint64(places)) >> _32))


@inner_kernel
def _value(place: int) -> int:
    """Where the value of a place of v is."""
    return 2 * place + 1


@inner_kernel
def first_place(feature: int, label: int, tables: Tables) -> int:
    """The place of v at which the search for a label begins, -1 where it has none; of dense vectors that of its value."""
    if tables.dense:
        return feature * tables.n_labels + label
    t = table_of(feature, label, tables)
    if tables.v.size[t] < 0:
        return -1
    return int(tables.v.begin[t]) + _slot(label, length(int(tables.v.size[t])))


@inner_kernel
def find(feature: int, label: int, tables: Tables) -> int:
    """Where a label's v for a feature is in `values`, -1 if it has none."""
    place = first_place(feature, label, tables)
    if tables.dense or place < 0:
        return place
    v, words = tables.v, tables.v.words
    if words[V_WIDTH * place] == label:
        return _value(place)
    t = table_of(feature, label, tables)
    end = v.begin[t] + length(int(v.size[t]))
    while words[V_WIDTH * place] != tables.n_labels:
        place += 1
        if place == end:
            place = v.begin[t]
        if words[V_WIDTH * place] == label:
            return _value(place)
    return -1


@inner_kernel
def fetch(features: NDArray[Any], labels: NDArray[np.int32], tables: Tables) -> None:
    """Begin to bring v of all of these labels and features into the processor's cache: steps wait for memory most of all."""
    values = tables.values
    for p in range(len(features)):
        for k in range(len(labels)):
            place = first_place(features[p], labels[k], tables)
            if place >= 0:
                prefetch(values, place if tables.dense else 2 * place)


@inner_kernel
def _v_size(count: int) -> int:
    """The least size of a region for v of so many labels."""
    size = _LEAST_SIZE
    while count * 5 > 4 * length(size):
        size += 1
    return size


@inner_kernel
def _w_size(count: int, part: int, tables: Tables) -> tuple[int, bool]:
    """The least size of a region for so many weights of a part, and whether they are a wide list's."""
    low, high = part_bounds(part, tables.n_labels, tables.n_parts)
    size, wide = _LEAST_SIZE, WIDE * count > high - low
    while (high - low if wide else count) > length(size):
        size += 1
    return size, wide


@inner_kernel
def _places(above: int, size: int) -> int:
    """Places of a region of each size from above to `size`: a table that grows leaves one after another."""
    total = 0
    for s in range(max(above + 1, _LEAST_SIZE), size + 1):
        total += length(s)
    return total


@inner_kernel
def bytes_needed(feature: int, more: int, tables: Tables) -> int:
    """Bytes that so many labels, all new to each table of a feature, may take; free regions are not counted on."""
    needed = 0
    if not tables.dense:
        for t in range(feature * tables.n_parts, (feature + 1) * tables.n_parts):
            part = t - feature * tables.n_parts
            low, high = part_bounds(part, tables.n_labels, tables.n_parts)
            needed += V_BYTES * _places(int(tables.v.size[t]), _v_size(min(tables.v.n[t] + more, high - low)))
            # labels that are there already may come to have a weight
            size, _ = _w_size(min(tables.w.n[t] + more, high - low), part, tables)
            if not tables.wide[t]:
                needed += W_BYTES * _places(int(tables.w.size[t]), size)
    return needed


def most_bytes_of(n_features: int, n_labels: int, n_parts: int) -> int:
    """Bytes beyond which such tables cannot grow, with every region that they may leave behind."""
    most = -(-n_labels // n_parts)  # labels of a part
    size = _LEAST_SIZE
    while length(size) < most:
        size += 1
    return n_features * n_parts * (V_BYTES * _places(-1, _v_size(most)) + W_BYTES * _places(-1, size))


@inner_kernel
def bytes_used(tables: Tables) -> int:
    """Bytes of both arenas that were ever given away."""
    return int(V_BYTES * tables.v.used[0] + W_BYTES * tables.w.used[0])


@inner_kernel
def _new_region(arena: Arena, size: int) -> int:
    first = arena.free[size]
    if first >= 0:
        high, low = np.int64(arena.words[arena.width * first]), np.int64(arena.words[arena.width * (first + 1)])
        arena.free[size] = (high << 31) | low if high >= 0 else -1
    else:
        first = arena.used[0]
        arena.used[0] += length(size)
    return int(first)


@inner_kernel
def _leave_region(arena: Arena, t: int) -> None:
    first, then = arena.begin[t], arena.free[arena.size[t]]
    arena.words[arena.width * first] = -1 if then < 0 else then >> 31
    arena.words[arena.width * (first + 1)] = 0 if then < 0 else then & 0x7FFFFFFF
    arena.free[arena.size[t]] = first


@inner_kernel
def _empty_place(label: int, begin: int, places: int, words: NDArray[np.int32], n_labels: int) -> int:
    """The place of v that a label takes in a region that does not have it."""
    slot = _slot(label, places)
    while words[V_WIDTH * (begin + slot)] != n_labels:
        slot += 1
        if slot == places:
            slot = 0
    return int(begin + slot)


@kernel
def _grow_v(t: int, size: int, tables: Tables) -> None:
    """Move a table of v to a region of another size."""
    v, places, words, values = tables.v, length(size), tables.v.words, tables.values
    to = _new_region(v, size)
    words[V_WIDTH * to : V_WIDTH * (to + places) : V_WIDTH] = tables.n_labels
    if v.size[t] >= 0:
        for old in range(v.begin[t], v.begin[t] + length(int(v.size[t]))):
            label = words[V_WIDTH * old]
            if label != tables.n_labels:
                new = _empty_place(label, to, places, words, tables.n_labels)
                words[V_WIDTH * new], words[V_WIDTH * new + 1] = label, words[V_WIDTH * old + 1]
                values[_value(new)] = values[_value(old)]
        _leave_region(v, t)
    v.begin[t], v.size[t] = to, size


@inner_kernel
def place(feature: int, label: int, tables: Tables) -> int:
    """Where a label's v for a feature is in `values`; 0 where there was none. Others of its table may move then."""
    at = find(feature, label, tables)
    if at >= 0:
        return at
    t, v = table_of(feature, label, tables), tables.v
    size = _v_size(v.n[t] + 1)
    if size > v.size[t]:
        _grow_v(t, size, tables)
    empty = _empty_place(label, v.begin[t], length(int(v.size[t])), v.words, tables.n_labels)
    v.words[V_WIDTH * empty], v.words[V_WIDTH * empty + 1], tables.values[_value(empty)] = label, -1, 0.0
    v.n[t] += 1
    return _value(empty)


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
                weights[to + w.words[at] - low] = weights[at]
        else:
            w.words[to : to + n] = w.words[first : first + n]
            weights[to : to + n] = weights[first : first + n]
        _leave_region(w, t)
    w.begin[t], w.size[t], tables.wide[t] = to, size, wide


@inner_kernel
def set_weight(feature: int, label: int, at: int, weight: np.float32, tables: Tables) -> None:
    """Enter w of a label, whose v is at `at`, in the list: anew, changed, or taken out where it is 0."""
    w, weights, words, t = tables.w, tables.weights, tables.v.words, table_of(feature, label, tables)
    part = t - feature * tables.n_parts
    low, _ = part_bounds(part, tables.n_labels, tables.n_parts)
    if tables.wide[t]:
        position = w.begin[t] + label - low
        w.n[t] += np.int32(weight != 0.0) - np.int32(weights[position] != 0.0)
        weights[position] = weight
        return
    position = np.int64(words[2 * at - 1])
    if weight != 0.0:
        if position < 0:
            position = np.int64(w.n[t])
            size, wide = _w_size(int(position) + 1, part, tables)
            if size > w.size[t] or wide:
                _grow_w(t, part, size, wide, tables)
                position = np.int64(label - low) if wide else position
            w.n[t] += 1
            if not wide:
                words[2 * at - 1] = position
                w.words[w.begin[t] + position] = label
        weights[w.begin[t] + position] = weight
    elif position >= 0:  # the last one takes its place
        w.n[t] -= 1
        last = w.begin[t] + w.n[t]
        if position != w.n[t]:
            other = w.words[last]
            w.words[w.begin[t] + position] = other
            weights[w.begin[t] + position] = weights[last]
            words[2 * find(feature, other, tables) - 1] = position
        words[2 * at - 1] = -1


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
                    for place in range(v.begin[t], v.begin[t] + length(int(v.size[t]))):
                        if v.words[V_WIDTH * place] != tables.n_labels:
                            labels[n], values[n] = v.words[V_WIDTH * place], tables.values[_value(place)]
                            n += 1
        counts[j - first] = n - before
    return n


@kernel
def enter(
    first: int, tables: Tables, counts: NDArray[np.int32], labels: NDArray[np.int32], values: NDArray[np.float64]
) -> bool:
    """Put all entries of features first, first + 1, ... into tables that have none of them; False where there is no room."""
    n = 0
    for j in range(first, first + len(counts)):
        end = n + counts[j - first]
        for part in range(tables.n_parts):
            t, n_v, n_w = j * tables.n_parts + part, 0, 0
            for q in range(n, end):
                if table_of(j, labels[q], tables) == t:
                    n_v += 1
                    n_w += 1 if np.float32(soft(values[q], tables.lam)) != 0.0 else 0
            if tables.dense:
                tables.w.n[t] = n_w
            elif n_v > 0:  # regions of the right size at once: none is left
                v_size, (w_size, wide) = _v_size(n_v), _w_size(n_w, part, tables)
                if bytes_used(tables) + V_BYTES * length(v_size) + W_BYTES * length(w_size) > tables.most_bytes:
                    return False
                _grow_v(t, v_size, tables)
                if n_w:
                    _grow_w(t, part, w_size, wide, tables)
        for q in range(n, end):
            at, weight = place(j, labels[q], tables), np.float32(soft(values[q], tables.lam))
            tables.values[at] = values[q]
            if weight != 0.0 and not tables.dense:
                set_weight(j, labels[q], at, weight, tables)
        n = end
    return True


@kernel
def purge(above: float, tables: Tables) -> None:
    """Take out every v with |v| <= above; the others stay in their regions."""
    v, words, values, n_labels = tables.v, tables.v.words, tables.values, tables.n_labels
    if tables.dense:
        for at in range(len(values)):
            if values[at] != 0.0 and abs(values[at]) <= above:
                t = table_of(at // n_labels, at % n_labels, tables)
                tables.w.n[t] -= np.int32(np.float32(soft(values[at], tables.lam)) != 0.0)
                values[at] = 0.0
        return
    labels, positions, kept = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0)
    for t in range(len(v.size)):
        places, n = 0 if v.size[t] < 0 else length(int(v.size[t])), 0
        if places > len(kept):
            labels, positions, kept = np.empty(places, np.int32), np.empty(places, np.int32), np.empty(places)
        for spot in range(v.begin[t], v.begin[t] + places):
            label, value = words[V_WIDTH * spot], values[_value(spot)]
            if label != n_labels and abs(value) > above:
                n += 1
            elif label != n_labels and abs(value) > tables.lam:
                set_weight(t // tables.n_parts, label, _value(spot), np.float32(0.0), tables)
        if n == v.n[t]:
            continue
        n = 0
        for spot in range(v.begin[t], v.begin[t] + places):
            label, value = words[V_WIDTH * spot], values[_value(spot)]
            if label != n_labels and abs(value) > above:
                labels[n], positions[n], kept[n] = label, words[V_WIDTH * spot + 1], value
                n += 1
            words[V_WIDTH * spot] = n_labels
        v.n[t] = 0
        for q in range(n):
            at = place(t // tables.n_parts, labels[q], tables)
            words[2 * at - 1], values[at] = positions[q], kept[q]


def clear(tables: Tables) -> None:
    """Take out everything; the memory stays."""
    for arena in (tables.v, tables.w):
        arena.size[:], arena.free[:] = -1, -1
        arena.n[:], arena.used[:] = 0, 0
    tables.wide[:] = False
    if tables.dense:
        tables.values[:] = 0.0


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
    size, begin, words = tables.v.size, tables.v.begin, tables.v.words
    for t in range(len(size)):
        if size[t] >= 0:
            for place in range(begin[t], begin[t] + length(int(size[t]))):
                if words[V_WIDTH * place] != tables.n_labels:
                    w = abs(soft(tables.values[_value(place)], tables.lam))
                    square, total = square + w * w, total + w
                    n += 1 if w > 1e-8 else 0
    return square, total, n
