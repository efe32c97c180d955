"""Classes whose vector is zero: they score 0, and are drawn where nothing better was found."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of
from xmc_stream.mips.kernels.innerproducts import Best


@kernel
def draw_zero_classes(zero: NDArray[np.int32], excluded: Labels, seed: int, domain: int, step: int, best: Best) -> None:
    """Where a row's best score is 0 or less: one of the zero classes (ascending) that it does not exclude, if any, with 0."""
    for i in range(len(best.classes)):
        if best.classes[i] >= 0 and best.scores[i] > 0.0:
            continue
        low, high = excluded.indptr[i], excluded.indptr[i + 1]
        barred = np.sort(excluded.indices[low:high])
        left = np.int64(len(zero))
        for e in range(len(barred)):
            at = np.searchsorted(zero, barred[e])
            if at < len(zero) and zero[at] == barred[e] and (e == 0 or barred[e] != barred[e - 1]):
                left -= 1
        if left == 0:
            continue
        drawn = np.int64(key_of(seed, domain, step, i) % np.uint64(left))
        for e in range(len(barred)):  # the drawn one of those that are left
            at = np.searchsorted(zero, barred[e])
            if at <= drawn and at < len(zero) and zero[at] == barred[e] and (e == 0 or barred[e] != barred[e - 1]):
                drawn += 1
        best.classes[i], best.scores[i] = zero[drawn], 0.0
