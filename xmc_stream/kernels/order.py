"""The order in which large classes visit their rows: the same for all of them, made of strips of rows.

Rows lie in strips of 2^strip_bits. An epoch takes the strips in a keyed order, GROUP of them at a time, and visits the rows of
such a group in a keyed order. The order does not depend on the class, so all classes can take their steps on a group
while it is in memory; nor on how much memory there is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.domains import SHARED_ORDER
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, mix, permuted, word_bits

GROUP_BITS = 7
GROUP = 1 << GROUP_BITS  # strips of a group
_A = np.uint64(0x9E3779B97F4A7C15)
_DIGIT_BITS = 10  # of what is sorted by, at a time: counters that stay in the first cache


class RowOrder(NamedTuple):
    """Which classes are large, and the strips of rows that their visiting orders are made of: a matter of the data alone.

    A class of more than `large` active rows visits them in an order that all such classes share: the 2^strip_bits rows of
    a strip close together, so that rows can stream by (`ppdsparse.kernels.stream`). A smaller one has an order of its own.
    """

    n_samples: int
    large: int
    strip_bits: int

    @property
    def n_strips(self) -> int:
        """Runs of all rows."""
        return -(-self.n_samples >> self.strip_bits)


def strip_bits(n_samples: int, nnz: int, strip_bytes: int, most: int) -> int:
    """log2 of the rows of a strip: so many bytes on average, where rows have nnz entries together; 2^most rows at most."""
    row_bytes = 8 * nnz // max(n_samples, 1)
    return min(max(0, (strip_bytes // max(row_bytes, 1)).bit_length() - 1), most)


@kernel
def epoch_key(seed: int, round_: int, epoch: int) -> np.uint64:
    """The key of an epoch's order, the same for all classes."""
    return key_of(seed, SHARED_ORDER, round_, epoch)


@kernel
def strip_slots(n_strips: int, key: np.uint64, out: NDArray[np.int64]) -> None:
    """out[r] = the slot of strip r: slots 0 .. GROUP - 1 are the first group, and so on."""
    bits = word_bits(n_strips)
    for strip in range(n_strips):
        out[strip] = permuted(strip, n_strips, bits, key)


@kernel
def place_in_group(slot: int, offset: int, strip_bits: int, key: np.uint64) -> int:
    """When a row of a group comes, within the group. slot: of its strip; offset: its number in the strip."""
    bits = strip_bits + GROUP_BITS
    group = np.uint64(slot >> GROUP_BITS)
    local = ((slot & (GROUP - 1)) << strip_bits) | offset
    return permuted(local, 1 << bits, bits, mix(key ^ (group * _A)))


@kernel
def order_of(keys: NDArray[np.int64], key_bits: int, out: NDArray[np.int64]) -> None:
    """out = the numbers 0 .. n - 1 by ascending key; keys is lost.

    Sorted by digits, the lowest ones first: to compare keys takes seven times as long. Key and number share a word of 64
    bits: keys are places among samples, numbers those of some of them in memory.
    """
    n = len(keys)
    number_bits = word_bits(n)
    n_passes = -(-key_bits // _DIGIT_BITS)
    bits = -(-key_bits // n_passes)
    mask, ends = (1 << bits) - 1, np.empty((1 << bits) + 1, np.int64)
    items, other = keys, np.empty(n, np.int64)
    for i in range(n):
        items[i] = (keys[i] << number_bits) | i
    for digit in range(n_passes):
        shift = number_bits + digit * bits
        ends[:] = 0
        for i in range(n):
            ends[((items[i] >> shift) & mask) + 1] += 1
        for d in range(1 << bits):
            ends[d + 1] += ends[d]
        for i in range(n):
            d = (items[i] >> shift) & mask
            other[ends[d]] = items[i]
            ends[d] += 1
        items, other = other, items
    for i in range(n):
        out[i] = items[i] & ((1 << number_bits) - 1)


@kernel
def stream_order(
    rows: NDArray[Any], n_samples: int, strip_bits: int, seed: int, round_: int, epoch: int, out: NDArray[np.int64]
) -> None:
    """out = the numbers 0 .. n - 1 of some ascending rows in the order in which the epoch visits them."""
    key = epoch_key(seed, round_, epoch)
    n_strips = ((n_samples - 1) >> strip_bits) + 1
    bits = word_bits(n_strips)
    places = np.empty(len(rows), np.int64)
    last, slot = -1, 0
    for i in range(len(rows)):
        row = int(rows[i])
        strip, offset = row >> strip_bits, row & ((1 << strip_bits) - 1)
        if strip != last:
            last, slot = strip, permuted(strip, n_strips, bits, key)
        place = place_in_group(slot, offset, strip_bits, key)
        places[i] = ((slot >> GROUP_BITS) << (strip_bits + GROUP_BITS)) | place
    n_groups = ((n_strips - 1) >> GROUP_BITS) + 1
    order_of(places, strip_bits + GROUP_BITS + word_bits(n_groups), out)
