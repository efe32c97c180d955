"""Groups of labels: sums over the rows of labels and over the labels of rows, by which labels are clustered.

A label l is the vector m_l = s_l sum_{i: y_il = 1} x_i, which is never formed: u = X d gives m_l.d = s_l sum_i u_i. All sums
are float64, in the order of the rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import kernel


@kernel
def add_to_labels(y: Labels, projected: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
    """sums[l, m] += projected[i, m] for every row i and each of its labels l."""
    indptr, indices = y
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            for m in range(projected.shape[1]):
                sums[indices[p], m] += projected[i, m]


@kernel
def shares_of_sides(y: Labels, side: NDArray[np.int8], scale: NDArray[np.float64], shares: NDArray[np.float64]) -> None:
    """shares[i, b, m] = sum of s_l over the labels of row i that are on side b of split m, for b = 0 and 1.

    side (K, M): 0, 1, or -1 for neither; shares (rows, 2, M). The sum of m_l over a side is then sum_i shares[i, b, m] x_i.
    """
    indptr, indices = y
    shares[:] = 0.0
    for i in range(len(indptr) - 1):
        first, second = shares[i, 0], shares[i, 1]
        for p in range(indptr[i], indptr[i + 1]):
            share, sides = scale[indices[p]], side[indices[p]]
            for m in range(len(sides)):
                first[m] += share if sides[m] == 0 else 0.0
                second[m] += share if sides[m] == 1 else 0.0
