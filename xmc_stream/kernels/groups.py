"""Groups of labels: sums over the rows of labels and over the labels of rows, by which labels are clustered.

A label l is the vector m_l = s_l sum_{i: y_il = 1} x_i, which is never formed: u = X d gives m_l.d = s_l sum_i u_i. All sums
are float64, in the order of the rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.jit import kernel


@kernel
def project(x: CSR, directions: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """out[i, m] = x_i . directions[:, m]."""
    indptr, indices, data = x
    out[:] = 0.0
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            value = np.float64(data[p])
            for m in range(out.shape[1]):
                out[i, m] += value * directions[indices[p], m]


@kernel
def add_to_labels(y: Labels, projected: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
    """sums[l, m] += projected[i, m] for every row i and each of its labels l."""
    indptr, indices = y
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            for m in range(projected.shape[1]):
                sums[indices[p], m] += projected[i, m]


@kernel
def add_sides(x: CSR, y: Labels, side: NDArray[np.int8], scale: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
    """sums[:, b, m] += sum of m_l over the labels of side b of split m, for b = 0 and 1.

    side (K, M): 0, 1, or -1 for neither; sums (D, 2, M).
    """
    indptr, indices, data = x
    y_indptr, y_indices = y
    n = side.shape[1]
    both = np.empty((2, n))
    for i in range(len(indptr) - 1):
        both[:] = 0.0
        for p in range(y_indptr[i], y_indptr[i + 1]):
            label = y_indices[p]
            share = scale[label]
            for m in range(n):
                both[0, m] += share if side[label, m] == 0 else 0.0
                both[1, m] += share if side[label, m] == 1 else 0.0
        for p in range(indptr[i], indptr[i + 1]):
            value = np.float64(data[p])
            of_feature = sums[indices[p]]
            for b in range(2):
                for m in range(n):
                    of_feature[b, m] += value * both[b, m]


@kernel
def signs_of_group(y: Labels, groups: NDArray[np.uint8], group: int, sign: NDArray[np.int8]) -> None:
    """sign[i] = 1 where a label of row i is in the group, else -1. groups (K,): of each label, in one clustering."""
    indptr, indices = y
    for i in range(len(indptr) - 1):
        sign[i] = -1
        for p in range(indptr[i], indptr[i + 1]):
            if groups[indices[p]] == group:
                sign[i] = 1
                break
