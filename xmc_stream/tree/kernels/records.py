"""Weights of the children of nodes, as rows look them up: node by node, feature by feature, a byte a weight.

The children of a node are cut into panels of at most PANEL. A panel has buckets of features by hash, and in a bucket a record
a feature: what of the hash the bucket does not say (2 bytes), how many of the children have a weight for it, less one (1
byte), and of each its number in the panel and the weight (1 byte each). Where a quarter of many children have one, there are
the weights of all children in turn, and FULL in the place of their number. A weight is scale_k times a whole number from -127
to 127. The hash of feature j is j times an odd number, modulo the power of two above D: no two features have the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.instructions import prefetch
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import order_of

PANEL = 256
_FAR, _NEAR = np.uint64(8), np.uint64(4)  # values of a row ahead
_AHEAD = 32  # weights ahead, of which what is kept of a feature is asked for
MOST = 127  # of a weight, in units of its scale
ODD = 2654435769  # 2^32 / golden ratio
REST_BITS = 16
FULL, LEAST_FULL = 255, 16  # children of a panel, at least, where a record may have the weights of all
_0, _1, _2, _3, _8 = (np.uint64(n) for n in (0, 1, 2, 3, 8))


class Panels(NamedTuple):
    """Some parents of a level, and the weights of their children, in memory.

    first: the first parent. panels (parents + 1,): the panels of each. children (panels + 1,): the children of each panel, as
    numbers of the level. bits (panels,): log2 of the buckets; buckets (panels + 1,): where its places in `offsets` begin, of
    which it has one more than buckets; offsets: where the records of a bucket begin, counted from starts (panels + 1,), the
    panel's place in records. bias, scale (children,). word: bits of a hash.
    """

    first: int
    word: int
    panels: NDArray[np.int64]
    children: NDArray[np.int64]
    bits: NDArray[np.uint8]
    buckets: NDArray[np.int64]
    offsets: NDArray[np.uint32]
    starts: NDArray[np.int64]
    records: NDArray[np.uint8]
    bias: NDArray[np.float32]
    scale: NDArray[np.float32]


class Weights(NamedTuple):
    """Weights of children of a parent: features, numbers of the children, values (n,)."""

    features: NDArray[np.int32]
    children: NDArray[Any]
    values: NDArray[np.float32]


class Slice(NamedTuple):
    """Weights of a panel's children, feature by feature, of some features by ascending hash.

    ends (features + 1,): where those of each begin and end. children: numbers in the panel, of each feature ascending; whole:
    the weights, in units of the scales.
    """

    features: NDArray[np.int32]
    ends: NDArray[np.int64]
    children: NDArray[np.uint8]
    whole: NDArray[np.int8]


def hash_bits(n_features: int) -> int:
    """Bits of a hash of so many features."""
    return max(1, (n_features - 1).bit_length())


@inner_kernel
def hash_of(feature: int, word: int) -> int:
    """The hash of a feature."""
    return (feature * ODD) & ((1 << word) - 1)


@kernel
def survey(
    low: int, high: int, some: Weights, largest: NDArray[np.float32], counts: NDArray[np.int32],
    features: NDArray[np.int32], n_features: int,
) -> int:  # fmt: skip
    """Look at weights of children [low, high) of a parent, in a first reading; returns how many features there are so far.

    largest[k - low] = the largest |weight| of child k so far; features: as they are met; counts (D,): of weights, by feature.
    """
    n = len(some.values)
    for p in range(n):
        prefetch(counts, np.int64(some.features[min(p + _AHEAD, n - 1)]))
        k = some.children[p] - low
        if 0 <= k < high - low:
            j = some.features[p]
            largest[k] = max(largest[k], abs(some.values[p]))
            if not counts[j]:
                features[n_features] = j
                n_features += 1
            counts[j] += 1
    return n_features


@kernel
def sort_by_hash(word: int, features: NDArray[np.int32], counts: NDArray[np.int32], ends: NDArray[np.int64]) -> None:
    """Sort features by their hashes. ends[t] = weights of the first t features (features + 1,). Their counts are 0 again."""
    n = len(features)
    hashes, order, met = np.empty(n, np.int64), np.empty(n, np.int64), features.copy()
    for t in range(n):
        hashes[t] = hash_of(int(features[t]), word)
    order_of(hashes, word, order)
    ends[0] = 0
    for t in range(n):
        j = met[order[t]]
        features[t], ends[t + 1] = j, ends[t] + counts[j]
        counts[j] = 0


@kernel
def take_slice(
    low: int, high: int, some: Weights, scale: NDArray[np.float32], places: NDArray[np.int32], slice_: Slice
) -> None:
    """Put weights of children [low, high) of a parent where they belong in a slice, as whole numbers.

    scale: of these children. places (D,): one more than where the next weight of a feature belongs; 0 of those not in it.
    """
    n = len(some.values)
    for p in range(n):
        prefetch(places, np.int64(some.features[min(p + _AHEAD, n - 1)]))
        j, k = some.features[p], some.children[p] - low
        if 0 <= k < high - low and places[j]:
            at = places[j] - 1
            slice_.children[at], slice_.whole[at] = k, np.int8(np.rint(some.values[p] / scale[k]))
            places[j] += 1


@kernel
def pack_slice(
    word: int, bits: int, n_children: int, some: Slice, at: int, offsets: NDArray[np.uint32], records: NDArray[np.uint8]
) -> tuple[int, int]:
    """Put the weights of a slice of a panel's features into records; returns bytes, and the weights that are not 0.

    at: bytes of the slices before. records: 5 bytes a weight. offsets[b + 1] = where the records of bucket b end, of buckets
    that have some. A weight that is 0 is left out.
    """
    shift, size, kept = word - bits, 0, 0
    for t in range(len(some.features)):
        first, last, count = some.ends[t], some.ends[t + 1], 0
        for p in range(first, last):
            count += int(some.whole[p] != 0)
        if not count:
            continue
        h = hash_of(int(some.features[t]), word)
        rest = h & ((1 << shift) - 1)
        full = n_children >= LEAST_FULL and 4 * count >= n_children
        records[size], records[size + 1], records[size + 2] = rest & 255, rest >> 8, FULL if full else count - 1
        size += 3
        if full:
            records[size : size + n_children] = 0
            for p in range(first, last):
                records[size + some.children[p]] = np.uint8(int(some.whole[p]) & 255)
            size += n_children
        else:
            for p in range(first, last):
                if some.whole[p]:
                    records[size], records[size + 1] = some.children[p], np.uint8(int(some.whole[p]) & 255)
                    size += 2
        kept += count
        offsets[(h >> shift) + 1] = at + size
    return size, kept


@kernel
def are_records(
    sizes: NDArray[np.int64], buckets: NDArray[np.int64], offsets: NDArray[np.uint32], starts: NDArray[np.int64],
    records: NDArray[np.uint8],
) -> bool:  # fmt: skip
    """Whether buckets follow each other, and their records end where they do and name children that there are.

    sizes: of panels, whose records lie one after another (starts).
    """
    for panel in range(len(sizes)):
        first, last, size = buckets[panel], buckets[panel + 1] - 1, starts[panel + 1] - starts[panel]
        if offsets[first] != 0 or np.int64(offsets[last]) != size:
            return False
        for place in range(first, last):
            low, high = np.int64(offsets[place]), np.int64(offsets[place + 1])
            if high < low or high > size:
                return False
            p, end = starts[panel] + low, starts[panel] + high
            while p < end:
                if p + 3 > end:
                    return False
                n = np.int64(records[p + 2]) + 1
                full = n == FULL + 1
                length = sizes[panel] if full else 2 * n
                p += 3
                if p + length > end:
                    return False
                for t in range(0 if full else n):
                    if records[p + 2 * t] >= sizes[panel]:
                        return False
                p += length
    return True


@inner_kernel
def margins(i: int, x: CSR, panel: int, of: Panels, weights: NDArray[np.int8], z: NDArray[np.float32]) -> int:
    """z[t] = the margin of child t of a panel for row i; returns how many children it has. weights: the records, signed."""
    indptr, indices, values = x
    low = of.children[panel]
    m, local = of.children[panel + 1] - low, low - of.children[0]
    word, records, offsets = np.uint64(of.word), of.records, of.offsets
    shift, start, first = word - np.uint64(of.bits[panel]), np.uint64(of.starts[panel]), np.uint64(of.buckets[panel])
    mask, whole = (_1 << shift) - _1, (_1 << word) - _1
    for t in range(m):
        z[t] = np.float32(0.0)
    last = np.uint64(indptr[i + 1] - 1)
    for q in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
        # what is soon looked up is asked for: where a bucket begins, then its records
        h = (np.uint64(indices[min(q + _FAR, last)]) * np.uint64(ODD)) & whole
        prefetch(offsets, np.int64(first + (h >> shift)))
        h = (np.uint64(indices[min(q + _NEAR, last)]) * np.uint64(ODD)) & whole
        prefetch(records, np.int64(start + np.uint64(offsets[first + (h >> shift)])))
        h = (np.uint64(indices[q]) * np.uint64(ODD)) & whole
        rest, place = h & mask, first + (h >> shift)
        p, end = start + np.uint64(offsets[place]), start + np.uint64(offsets[place + _1])
        while p < end:
            n = np.uint64(records[p + _2])
            found = np.uint64(records[p]) | (np.uint64(records[p + _1]) << _8) == rest
            p += _3
            if found:
                value = values[q]
                if n == np.uint64(FULL):
                    of_all = weights[np.int64(p) : np.int64(p) + m]  # as a slice: eight at a time
                    for t in range(m):
                        z[t] += value * np.float32(of_all[t])
                else:
                    for _ in range(n + _1):
                        z[np.uint64(records[p])] += value * np.float32(weights[p + _1])
                        p += _2
                break
            p += np.uint64(m) if n == np.uint64(FULL) else _2 * (n + _1)
    for t in range(m):
        z[t] = z[t] * of.scale[local + t] + of.bias[local + t]
    return int(m)
