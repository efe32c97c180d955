"""Sparse vectors of classes, in memory: hash tables whose entries lie in an order of their own, whatever was done before.

A feature has a rank: a bijection of 32 bits that scatters features all over. A class has a region of 2^bits places and a few
more. An entry with rank r lies at place r >> (32 - bits) of it or, where that is taken, after it, so that all entries are
in the order of their ranks (Amble and Knuth 1974). A search ends at the first place whose rank is no less; empty places
have the greatest rank there is, and the last place is always empty. So every sum over a vector goes in the order of ranks,
and is the same bit for bit however large the region is and in whatever order its entries came.

A region is at most 3/4 full. A vector that outgrows its region moves to one twice as long; what is left is used again.
A row's entries come by ascending rank. Where a region has fewer places than a long row needs, they would pile up at its
beginning while it grows, so a region of the final size is taken first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel

Int = Any  # of Python or NumPy: compiled code makes no difference
PLACE_BYTES = 8
MOST_FEATURES = 2**31 - 1  # beyond it a feature could have the rank of an empty place
EMPTY = 0xFFFFFFFF
_LEAST_BITS, _MOST_BITS = 2, 31
_CANCELLED = 1e-6  # of its largest: what is left of a square that was kept by differences is summed anew
_A, _B = np.uint64(0x9E3779B1), np.uint64(0x85EBCA6B)
_A_INVERSE, _B_INVERSE = np.uint64(pow(0x9E3779B1, -1, 2**32)), np.uint64(pow(0x85EBCA6B, -1, 2**32))
_LOW, _16 = np.uint64(0xFFFFFFFF), np.uint64(16)


class ClassTables(NamedTuple):
    """Vectors of K classes in one arena.

    begin (K,): the first place of a class's region; bits (K,): its size, -1 for none; n (K,): entries, none of them 0;
    square (K,): ||w_c||^2. words: at 2 p the rank of place p; values: the same memory, at 2 p + 1 its value. free[b]: the
    first region of size b that was left, -1 for none; its first two words tell the next. used (1,): places ever given away.
    """

    begin: NDArray[np.int64]
    bits: NDArray[np.int8]
    n: NDArray[np.int32]
    square: NDArray[np.float64]
    words: NDArray[np.uint32]
    values: NDArray[np.float32]
    free: NDArray[np.int64]
    used: NDArray[np.int64]


class RankedRows(NamedTuple):
    """Sparse rows, each in the order of ranks: row i has the entries [indptr[i], indptr[i + 1]).

    features: the same entries' features.
    """

    indptr: NDArray[np.int64]
    ranks: NDArray[np.uint32]
    features: NDArray[np.int32]
    values: NDArray[np.float32]


def class_tables(n_classes: int, most_bytes: int) -> ClassTables:
    """Zero vectors; memory becomes resident as places are given away."""
    words = np.empty(most_bytes // PLACE_BYTES * 2, np.uint32)
    return ClassTables(
        np.zeros(n_classes, np.int64), np.full(n_classes, -1, np.int8), np.zeros(n_classes, np.int32), np.zeros(n_classes),
        words, words.view(np.float32), np.full(_MOST_BITS + 1, -1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


@inner_kernel
def rank_of(feature: Int) -> int:
    """A number below 2^32 - 1 for each feature, no two alike."""
    x = np.uint64(feature) * _A & _LOW
    x = (x ^ (x >> _16)) * _B & _LOW
    return int(np.int64(x))


@inner_kernel
def feature_of(rank: Int) -> int:
    """The feature of a rank."""
    x = np.uint64(rank) * _B_INVERSE & _LOW
    x = (x ^ (x >> _16)) * _A_INVERSE & _LOW
    return int(np.int64(x))


@inner_kernel
def length(bits: Int) -> int:
    """Places of a region: entries that come after the last of the 2^bits have a few places more."""
    return int((1 << bits) + min(16, max(2, (1 << bits) >> 2)))


@kernel
def rank_rows(
    indptr: NDArray[np.int64],
    features: NDArray[np.int32],
    values: NDArray[np.float32],
    ranks: NDArray[np.uint32],
    by_rank: NDArray[np.int32],
    ranked_values: NDArray[np.float32],
) -> None:
    """Fill RankedRows from rows whose entries have any order."""
    for i in range(len(indptr) - 1):
        low, high = indptr[i], indptr[i + 1]
        for p in range(low, high):
            ranks[p] = rank_of(features[p])
        order = np.argsort(ranks[low:high])
        for q in range(high - low):
            by_rank[low + q], ranked_values[low + q] = features[low + order[q]], values[low + order[q]]
            ranks[low + q] = rank_of(by_rank[low + q])


@inner_kernel
def place_of(c: Int, rank: Int, tables: ClassTables) -> int:
    """The place of a rank in a class that has a region, or the one before which it belongs."""
    words = tables.words
    place = tables.begin[c] + (rank >> (32 - np.int64(tables.bits[c])))
    while words[2 * place] < rank:
        place += 1
    return int(place)


@inner_kernel
def fetch(c: Int, begin: Int, end: Int, ranks: NDArray[np.uint32], tables: ClassTables) -> None:
    """Begin to bring what a class has for the ranks [begin, end) into the processor's cache."""
    if tables.bits[c] < 0:
        return
    words, first, shift = tables.words, tables.begin[c], 32 - np.int64(tables.bits[c])
    for p in range(begin, end):
        prefetch(words, 2 * (first + (np.int64(ranks[p]) >> shift)))


@inner_kernel
def dot(
    c: Int, begin: Int, end: Int, ranks: NDArray[np.uint32], values: NDArray[np.float32], tables: ClassTables
) -> np.float32:
    """w_c.x for the entries [begin, end) of ranked rows: in float32, added in the order of ranks."""
    total = np.float32(0.0)
    if tables.bits[c] < 0:
        return total
    words, weights, first, shift = tables.words, tables.values, tables.begin[c], 32 - np.int64(tables.bits[c])
    for p in range(begin, end):
        rank = np.int64(ranks[p])
        place = first + (rank >> shift)
        while words[2 * place] < rank:
            place += 1
        if words[2 * place] == rank:
            total += values[p] * weights[2 * place + 1]
    return total


@inner_kernel
def _take(bits: Int, tables: ClassTables) -> int:
    """A region, with all of its places empty; -1 where the arena has no room."""
    words, first, places = tables.words, tables.free[bits], length(bits)
    if first >= 0:
        high, low = np.int64(words[2 * first]), np.int64(words[2 * first + 1])
        tables.free[bits] = -1 if high == EMPTY else (high << 32) | low
    else:
        first = tables.used[0]
        if 2 * (first + places) > len(words):
            return -1
        tables.used[0] += places
    for place in range(first, first + places):
        words[2 * place] = EMPTY
    return int(first)


@inner_kernel
def _leave(first: Int, bits: Int, tables: ClassTables) -> None:
    """Give a region back."""
    then = tables.free[bits]
    tables.words[2 * first] = EMPTY if then < 0 else then >> 32
    tables.words[2 * first + 1] = 0 if then < 0 else then & EMPTY
    tables.free[bits] = first


@inner_kernel
def _fits(c: Int, bits: Int, more: Int, tables: ClassTables) -> bool:
    """Whether a class finds places in a region of another size, its last one left empty, that so many more entries fit in."""
    if (tables.n[c] + more) * 4 > 3 << bits:
        return False
    words, next_, places = tables.words, np.int64(0), length(bits)
    if tables.bits[c] >= 0:
        for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
            if words[2 * place] != EMPTY:
                next_ = max(next_, np.int64(words[2 * place]) >> (32 - bits)) + 1
    return bool(next_ < places)


@inner_kernel
def _move(c: Int, bits: Int, tables: ClassTables) -> bool:
    """Move a class to a region of another size, or to a first one; False where there is no room."""
    to, words, values = _take(bits, tables), tables.words, tables.values
    if to < 0:
        return False
    if tables.bits[c] >= 0:
        first, old = tables.begin[c], np.int64(tables.bits[c])
        next_ = to
        for place in range(first, first + length(old)):
            if words[2 * place] != EMPTY:
                new = max(next_, to + (np.int64(words[2 * place]) >> (32 - bits)))
                words[2 * new], values[2 * new + 1] = words[2 * place], values[2 * place + 1]
                next_ = new + 1
        _leave(first, old, tables)
    tables.begin[c], tables.bits[c] = to, bits
    return True


@inner_kernel
def _grow(c: Int, more: Int, tables: ClassTables) -> bool:
    """Move a class to a longer region, for so many more entries; False where there is no room."""
    bits: Int = max(_LEAST_BITS, np.int64(tables.bits[c]) + 1)
    while bits < _MOST_BITS and not _fits(c, bits, more, tables):
        bits += 1
    return bool(bits < _MOST_BITS and _move(c, bits, tables))


@inner_kernel
def _take_out(c: Int, place: Int, tables: ClassTables) -> None:
    """Take out the entry at a place: those after it that could lie nearer to their own places do."""
    words, values = tables.words, tables.values
    first, shift = tables.begin[c], 32 - np.int64(tables.bits[c])
    after = place + 1
    while words[2 * after] != EMPTY and first + (np.int64(words[2 * after]) >> shift) < after:
        words[2 * after - 2], values[2 * after - 1] = words[2 * after], values[2 * after + 1]
        after += 1
    words[2 * after - 2] = EMPTY
    tables.n[c] -= 1
    if tables.n[c] == 0:
        _leave(first, np.int64(tables.bits[c]), tables)
        tables.bits[c], tables.square[c] = -1, 0.0


@inner_kernel
def _put_in(c: Int, rank: Int, value: np.float32, tables: ClassTables) -> bool:
    """Put in an entry that a class does not have; False where there is no room."""
    words, values = tables.words, tables.values
    if (tables.bits[c] < 0 or (tables.n[c] + 1) * 4 > 3 << np.int64(tables.bits[c])) and not _grow(c, 1, tables):
        return False
    while True:
        place = place_of(c, rank, tables)
        empty = place
        while words[2 * empty] != EMPTY:
            empty += 1
        if empty + 1 < tables.begin[c] + length(np.int64(tables.bits[c])):
            break
        if not _grow(c, 1, tables):
            return False
    while empty > place:
        words[2 * empty], values[2 * empty + 1] = words[2 * empty - 2], values[2 * empty - 1]
        empty -= 1
    words[2 * place], values[2 * place + 1] = rank, value
    tables.n[c] += 1
    return True


@inner_kernel
def _reserve(c: Int, begin: Int, end: Int, step: np.float32, rows: RankedRows, tables: ClassTables) -> bool:
    """Take a region that the entries [begin, end) of rows fit in, where they could fill it; False where there is no room."""
    bits, words = np.int64(tables.bits[c]), tables.words
    if bits >= 0 and tables.n[c] + end - begin <= 1 << bits:
        return True
    new = 0
    for p in range(begin, end):
        if step * rows.values[p] != 0.0:
            rank = np.int64(rows.ranks[p])
            if bits < 0 or words[2 * place_of(c, rank, tables)] != rank:
                new += 1
    if new == 0 or (bits >= 0 and (tables.n[c] + new) * 4 <= 3 << bits):
        return True
    return bool(_grow(c, new, tables))


@inner_kernel
def _square(c: Int, tables: ClassTables) -> float:
    """||w_c||^2 in float64, in the order of ranks; of a class that has a region."""
    words, values, total = tables.words, tables.values, 0.0
    for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
        if words[2 * place] != EMPTY:
            total += np.float64(values[2 * place + 1]) * np.float64(values[2 * place + 1])
    return total


@kernel
def add_rows(
    classes: NDArray[np.int32],
    lines: NDArray[np.int32],
    steps: NDArray[np.float32],
    rows: RankedRows,
    tables: ClassTables,
    done: NDArray[np.int64],
    largest: NDArray[np.float64],
) -> bool:
    """w_c += a x_i for each (c, i, a) of classes, lines, steps, in their order; False where there is no room.

    done (2,): triples that are done, and entries of the next one; largest (1,): the largest ||w_c||^2 that the next one had:
    what it goes on from. An entry becomes w + (a x) in float32; where that is 0 it leaves. ||w_c||^2 is kept by differences;
    where a triple leaves little of the largest that it had, it is summed anew.
    """
    indptr, ranks, x = rows.indptr, rows.ranks, rows.values
    for t in range(done[0], len(classes)):
        c, begin, end = classes[t], indptr[lines[t]], indptr[lines[t] + 1]
        fetch(c, begin, end, ranks, tables)
        if not _reserve(c, begin + done[1], end, steps[t], rows, tables):
            done[0] = t
            return False
        square = tables.square[c]
        top = square if done[1] == 0 else largest[0]
        for p in range(begin + done[1], end):
            delta = steps[t] * x[p]
            if delta == 0.0:
                continue
            rank = np.int64(ranks[p])
            place = place_of(c, rank, tables) if tables.bits[c] >= 0 else 0
            if tables.bits[c] >= 0 and tables.words[2 * place] == rank:
                old = tables.values[2 * place + 1]
                new = old + delta
                square += np.float64(new) * np.float64(new) - np.float64(old) * np.float64(old)
                tables.values[2 * place + 1] = new
                if new == 0.0:
                    _take_out(c, place, tables)
                    square = 0.0 if tables.n[c] == 0 else square
            elif _put_in(c, rank, delta, tables):
                square += np.float64(delta) * np.float64(delta)
            else:
                tables.square[c], largest[0] = square, top
                done[0], done[1] = t, p - begin
                return False
            top = max(top, square)
        if tables.n[c] > 0 and not square >= _CANCELLED * top:
            square = _square(c, tables)
        tables.square[c] = square
        done[0], done[1] = t + 1, 0
    return True


@kernel
def clear(classes: NDArray[np.int32], tables: ClassTables) -> None:
    """Make vectors zero."""
    for c in classes:
        if tables.bits[c] >= 0:
            _leave(tables.begin[c], np.int64(tables.bits[c]), tables)
        tables.bits[c], tables.n[c], tables.square[c] = -1, 0, 0.0


@kernel
def shrink(
    classes: NDArray[np.int32], scale: np.float32, threshold: np.float32, cut: np.float32, tables: ClassTables
) -> int:
    """w <- soft(scale w, threshold), then 0 where |w| <= cut; entries of 0 leave. Returns how many left.

    Each ||w_c||^2 is summed anew, in float64 and in the order of ranks. A vector that needs a quarter of its region moves.
    """
    words, values, gone = tables.words, tables.values, 0
    for c in classes:
        if tables.bits[c] < 0:
            continue
        first, bits = tables.begin[c], np.int64(tables.bits[c])
        next_, n, square = first, 0, 0.0
        for place in range(first, first + length(bits)):
            rank = np.int64(words[2 * place])
            if rank == EMPTY:
                continue
            w = values[2 * place + 1] * scale
            w = w - min(max(w, -threshold), threshold)
            words[2 * place] = EMPTY
            if abs(w) <= cut:
                continue
            next_ = max(next_, first + (rank >> (32 - bits)))
            words[2 * next_], values[2 * next_ + 1] = rank, w
            next_, n, square = next_ + 1, n + 1, square + np.float64(w) * np.float64(w)
        gone += tables.n[c] - n
        tables.n[c], tables.square[c] = n, square
        if n == 0:
            _leave(first, bits, tables)
            tables.bits[c] = -1
            continue
        least = _LEAST_BITS
        while least < bits and not _fits(c, least, 1, tables):
            least += 1
        if least + 2 <= bits:
            _move(c, least, tables)  # where there is no room it stays
    return gone


@kernel
def slide(order: NDArray[np.int64], tables: ClassTables) -> None:
    """Close the gaps of the arena. order: the classes that have a region, by where it begins."""
    words, to = tables.words, 0
    for c in order:
        first, places = tables.begin[c], length(np.int64(tables.bits[c]))
        if first != to:
            for q in range(2 * places):
                words[2 * to + q] = words[2 * first + q]
        tables.begin[c] = to
        to += places
    tables.used[0] = to
    tables.free[:] = -1


@kernel
def export(
    classes: NDArray[np.int32],
    tables: ClassTables,
    indptr: NDArray[np.int64],
    features: NDArray[np.int32],
    values: NDArray[np.float32],
) -> None:
    """The entries of classes by feature: class classes[i] has [indptr[i], indptr[i + 1]) of features and values."""
    for i in range(len(classes)):
        c, at = classes[i], indptr[i]
        if tables.bits[c] < 0:
            continue
        n = indptr[i + 1] - at
        found, weights = np.empty(n, np.int32), np.empty(n, np.float32)
        q = 0
        for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
            if tables.words[2 * place] != EMPTY:
                found[q] = feature_of(np.int64(tables.words[2 * place]))
                weights[q] = tables.values[2 * place + 1]
                q += 1
        order = np.argsort(found)
        features[at : at + n], values[at : at + n] = found[order], weights[order]


@kernel
def magnitudes(
    tables: ClassTables, low: Int, high: Int, shift: int, counts: NDArray[np.int64], squares: NDArray[np.float64]
) -> None:
    """A histogram of |w|: counts[b], squares[b] += 1, w^2 for bits of |w| in [low, high), b = (bits - low) >> shift.

    Bits of a float32 without its sign, as a number, go up with it. Sums in the order of classes and ranks.
    """
    words, values = tables.words, tables.values
    for c in range(len(tables.bits)):
        if tables.bits[c] < 0:
            continue
        for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
            if words[2 * place] != EMPTY:
                number = np.int64(words[2 * place + 1]) & 0x7FFFFFFF
                if low <= number < high:
                    w = np.float64(values[2 * place + 1])
                    counts[(number - low) >> shift] += 1
                    squares[(number - low) >> shift] += w * w


@kernel
def dots(
    classes: NDArray[np.int32],
    lines: NDArray[np.int32],
    rows: RankedRows,
    tables: ClassTables,
    out: NDArray[np.float32],
) -> None:
    """out[t] = w_c . x_i for the t-th pair of class and row."""
    for t in range(len(classes)):
        i = lines[t]
        out[t] = dot(classes[t], rows.indptr[i], rows.indptr[i + 1], rows.ranks, rows.values, tables)
