"""A warm start's scores by its weights, and alpha from them, so that it gives each class tau times the bias of the weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import kernel
from xmc_stream.linear.kernels.penalty import Ramp, Times, alpha_of, times

_STEPS = 40


@kernel
def start_scores(
    w: CSR,
    bias: NDArray[np.float64],
    ptr: NDArray[np.int64],
    at: NDArray[np.int64],
    x: CSR,
    dense: NDArray[np.float32],
    scores: NDArray[np.float64],
) -> None:
    """The scores of given weights (class c: line c of w).

    Class c has the rows at[ptr[c] : ptr[c + 1]] of the block; ptr counts from ptr[0], where `at` and `scores` begin.
    dense (D,) is scratch, zero before and after.
    """
    w_indptr, w_features, w_values = w
    indptr, indices, data = x
    for c in range(len(ptr) - 1):
        for p in range(w_indptr[c], w_indptr[c + 1]):
            dense[w_features[p]] = w_values[p]
        for q in range(ptr[c] - ptr[0], ptr[c + 1] - ptr[0]):
            z = bias[c]
            for p in range(indptr[at[q]], indptr[at[q] + 1]):
                z += np.float64(data[p]) * np.float64(dense[indices[p]])
            scores[q] = z
        for p in range(w_indptr[c], w_indptr[c + 1]):
            dense[w_features[p]] = 0.0


@kernel
def start_alpha(
    ptr: NDArray[np.int64],
    sign: NDArray[np.int8],
    at: NDArray[np.int64],
    wanted: NDArray[np.float64],
    ramp: Ramp,
    weights: Times,
    alpha: NDArray[np.float64],
) -> None:
    """alpha_i by the ramp, from the scores z_i that stand in its place.

    All scores of class c are shifted first by the one d_c that makes sum_i y_i alpha_i = wanted[c]. That sum is tau times
    the bias: an error that all scores share, however small, adds up over the active rows there. Newton steps find d_c.
    Class c has the entries ptr[c] .. ptr[c + 1] - 1, counted from ptr[0]; at: of each its row in the weights, which
    alpha_i is multiplied by. wanted (classes,): infinite where nothing is
    shifted, NaN for a class whose alpha all become 0.
    """
    for c in range(len(ptr) - 1):
        begin, end = ptr[c] - ptr[0], ptr[c + 1] - ptr[0]
        if np.isnan(wanted[c]):
            alpha[begin:end] = 0.0
            continue
        d = 0.0
        steps = 0 if np.isinf(wanted[c]) else _STEPS
        for _ in range(steps):
            total = falls = 0.0
            for q in range(begin, end):
                many, a = times(c, sign[q], at[q], weights), alpha_of(sign[q], alpha[q] + d, ramp)
                total += sign[q] * many * a
                if 0.0 < a < (ramp.upper_positive if sign[q] > 0 else ramp.upper):
                    falls += many * (ramp.slope_positive if sign[q] > 0 else ramp.slope)
            left = total - wanted[c]
            if falls == 0.0 or abs(left) <= 1e-9 * (1.0 + abs(wanted[c])):
                break
            d += left / falls
        for q in range(begin, end):
            alpha[q] = times(c, sign[q], at[q], weights) * alpha_of(sign[q], alpha[q] + d, ramp)
