"""Weights of a panel from its records, see `tree.kernels.records`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.tree.kernels.records import FULL, Panels


@kernel
def unpack_panel(
    panel: int, of: Panels, inverse: int, features: NDArray[np.int64], children: NDArray[np.int64],
    values: NDArray[np.float32],
) -> int:  # fmt: skip
    """Enter features, children (numbers in the panel) and weights, in the order of the records; returns how many there are.

    inverse: of ODD, modulo 2^word. There are no more weights than bytes of records.
    """
    weights, n = of.records.view(np.int8), 0
    m, local = of.children[panel + 1] - of.children[panel], of.children[panel] - of.children[0]
    bits, start = np.int64(of.bits[panel]), of.starts[panel]
    shift, mask = of.word - bits, (1 << of.word) - 1
    for bucket in range(1 << bits):
        place = of.buckets[panel] + bucket
        p, end = start + np.int64(of.offsets[place]), start + np.int64(of.offsets[place + 1])
        while p < end:
            rest = np.int64(of.records[p]) | (np.int64(of.records[p + 1]) << 8)
            feature = (((bucket << shift) | rest) * inverse) & mask
            full = of.records[p + 2] == FULL
            count, p = m if full else np.int64(of.records[p + 2]) + 1, p + 3
            for t in range(count):
                child = t if full else np.int64(of.records[p + 2 * t])
                whole = weights[p + t] if full else weights[p + 2 * t + 1]
                if whole != 0:
                    features[n], children[n] = feature, child
                    values[n] = np.float32(whole) * of.scale[local + child]
                    n += 1
            p += count if full else 2 * count
    return n
