"""Conjugate gradients on the columns of a dense matrix, and products of two factors at given pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.products import ahead


@kernel
def pair_dots(
    indptr: NDArray[np.int64], indices: NDArray[Any], left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]
) -> None:
    """out[p] = left[i] . right[k] for each pair (i, k) of a csr pattern: entry p of row i.

    left (n x r), right (K x r). Eight sums beside each other, so that a processor adds them at once.
    """
    r = left.shape[1]
    whole = r - r % 8
    sums, flat, end = np.zeros(8, left.dtype), right.reshape(-1), indptr[-1]
    for i in range(len(indptr) - 1):
        a = left[i]
        for p in range(indptr[i], indptr[i + 1]):
            ahead(indices, p, end, flat, r)
            b = right[indices[p]]
            sums[:] = 0
            for c in range(0, whole, 8):
                for lane in range(8):
                    sums[lane] += a[c + lane] * b[c + lane]
            for c in range(whole, r):
                sums[c - whole] += a[c] * b[c]
            total = sums[0]
            for lane in range(1, 8):
                total += sums[lane]
            out[p] = total


@kernel
def add_column_dots(left: NDArray[Any], right: NDArray[Any], out: NDArray[np.float64]) -> None:
    """out[c] += sum_i left[i, c] right[i, c], row after row."""
    for i in range(len(left)):
        for c in range(len(out)):
            out[c] += np.float64(left[i, c]) * np.float64(right[i, c])


@kernel
def descend(
    w: NDArray[Any], residual: NDArray[Any], direction: NDArray[Any], image: NDArray[Any], alpha: NDArray[Any],
    square: NDArray[np.float64],
) -> None:  # fmt: skip
    """A step in each column c: w += alpha_c direction, residual -= alpha_c image; square += ||residual_c||^2."""
    for i in range(len(w)):
        w_i, r_i, d_i, q_i = w[i], residual[i], direction[i], image[i]
        for c in range(len(alpha)):
            w_i[c] += alpha[c] * d_i[c]
            r = r_i[c] - alpha[c] * q_i[c]
            r_i[c] = r
            square[c] += np.float64(r) * np.float64(r)


@kernel
def turn(direction: NDArray[Any], residual: NDArray[Any], beta: NDArray[Any]) -> None:
    """direction = residual + beta_c direction in each column c."""
    for i in range(len(direction)):
        d_i, r_i = direction[i], residual[i]
        for c in range(len(beta)):
            d_i[c] = r_i[c] + beta[c] * d_i[c]


@kernel
def are_true(
    indptr: NDArray[np.int64], indices: NDArray[Any], y_indptr: NDArray[np.int64], y_indices: NDArray[Any],
    out: NDArray[np.bool_],
) -> None:  # fmt: skip
    """out[p] = whether the pair of entry p is one of Y's; both patterns have sorted, unique indices in a row."""
    for i in range(len(indptr) - 1):
        q = y_indptr[i]
        for p in range(indptr[i], indptr[i + 1]):
            while q < y_indptr[i + 1] and y_indices[q] < indices[p]:
                q += 1
            out[p] = q < y_indptr[i + 1] and y_indices[q] == indices[p]
