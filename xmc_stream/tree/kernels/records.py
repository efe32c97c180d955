"""Weights of the children of nodes, as rows look them up: node by node, feature by feature, a byte a weight.

The children of a node are cut into panels of at most PANEL. A panel has buckets of features by hash, and in a bucket a record
a feature: what of the hash the bucket does not say (2 bytes), how many of the children have a weight for it, less one (1
byte), and of each its number in the panel and the weight (1 byte each). A weight is scale_k times a whole number from -127 to
127. The hash of feature j is j times an odd number, modulo the power of two above D: no two features have the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import order_of

PANEL = 256
MOST = 127  # of a weight, in units of its scale
ODD = 2654435769  # 2^32 / golden ratio
REST_BITS = 16


class Panels(NamedTuple):
    """Some parents of a level, and the weights of their children.

    first: the first parent. panels (parents + 1,): the panels of each. children (panels + 1,): the children of each panel, as
    numbers of the level. bits (panels,): log2 of the buckets; buckets (panels + 1,): where its places in `offsets` begin, one more than it
    has buckets; offsets: where the records of a bucket begin, counted from starts (panels,), its place in records. bias, scale
    (children,). word: bits of a hash.
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


def hash_bits(n_features: int) -> int:
    """Bits of a hash of so many features."""
    return max(1, (n_features - 1).bit_length())


@inner_kernel
def hash_of(feature: int, word: int) -> int:
    """The hash of a feature."""
    return (feature * ODD) & ((1 << word) - 1)


@kernel
def scales_of(children: NDArray[np.int64], weights: NDArray[np.float32], scale: NDArray[np.float32]) -> None:
    """scale[k] = the largest |weight| of child k over MOST; 1 where it has none."""
    scale[:] = np.float32(0.0)
    for p in range(len(weights)):
        scale[children[p]] = max(scale[children[p]], abs(weights[p]))
    for k in range(len(scale)):
        scale[k] = scale[k] / np.float32(MOST) if scale[k] > np.float32(0.0) else np.float32(1.0)


@kernel
def bucket_bits(n_features: int, word: int) -> int:
    """log2 of the buckets of a panel with so many features: two a bucket, about, and no more of the hash than fits."""
    bits = 0
    while (2 << bits) < n_features:
        bits += 1
    return min(max(bits, word - REST_BITS), word)


@kernel
def pack_panel(
    word: int, features: NDArray[np.int32], children: NDArray[np.int64], weights: NDArray[np.float32],
    scale: NDArray[np.float32], offsets: NDArray[np.uint32], records: NDArray[np.uint8],
) -> tuple[int, int, int]:  # fmt: skip
    """Put the weights of a panel into records; returns log2 of the buckets, bytes, and the weights that are not 0.

    children: numbers in the panel, of each feature ascending; scale: by child. offsets, records: with room enough, which is
    2 n + 2 + 2^(word - REST_BITS), and 5 n bytes for n weights. A weight that rounds to 0 is left out.
    """
    n = len(features)
    keys, order = np.empty(n, np.int64), np.empty(n, np.int64)
    for p in range(n):
        keys[p] = hash_of(np.int64(features[p]), word)
    order_of(keys, word, order)
    n_features, before = 0, -1
    for q in range(n):
        h = hash_of(np.int64(features[order[q]]), word)
        n_features += int(h != before)
        before = h
    bits = bucket_bits(n_features, word)
    shift = word - bits
    at, bucket, before, head, kept = 0, 0, -1, 0, 0
    offsets[0] = 0
    for q in range(n):
        p = order[q]
        h = hash_of(np.int64(features[p]), word)
        whole = np.int64(np.rint(weights[p] / scale[children[p]]))
        if whole == 0:
            continue
        if h != before:
            while bucket < h >> shift:
                bucket += 1
                offsets[bucket] = at
            rest = h & ((1 << shift) - 1)
            head, before = at + 2, h
            records[at], records[at + 1], records[head] = rest & 255, rest >> 8, 0
            at += 3
        else:
            records[head] += 1
        records[at], records[at + 1] = children[p], np.uint8(whole & 255)
        at += 2
        kept += 1
    while bucket < 1 << bits:
        bucket += 1
        offsets[bucket] = at
    return bits, at, kept


@kernel
def unpack_panel(
    panel: int, of: Panels, inverse: int, features: NDArray[np.int64], children: NDArray[np.int64], weights: NDArray[np.float32]
) -> int:  # fmt: skip
    """The weights of a panel, bucket after bucket; returns how many there are. children: numbers of the level.

    inverse: of the odd number of hashes, modulo 2^word.
    """
    shift, low = of.word - np.int64(of.bits[panel]), of.children[panel]
    filled = 0
    for bucket in range(1 << np.int64(of.bits[panel])):
        place = of.buckets[panel] + bucket
        p, end = of.starts[panel] + np.int64(of.offsets[place]), of.starts[panel] + np.int64(of.offsets[place + 1])
        while p < end:
            rest = np.int64(of.records[p]) | (np.int64(of.records[p + 1]) << 8)
            feature = (((bucket << shift) | rest) * inverse) & ((1 << of.word) - 1)
            n = np.int64(of.records[p + 2]) + 1
            p += 3
            for _ in range(n):
                child = low + np.int64(of.records[p])
                features[filled], children[filled] = feature, child
                weights[filled] = np.float32(np.int8(of.records[p + 1])) * of.scale[child - of.children[0]]
                filled += 1
                p += 2
    return filled
