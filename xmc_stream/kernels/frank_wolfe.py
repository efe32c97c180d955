"""Fully-corrective block-coordinate Frank-Wolfe steps, sample after sample (Yen et al. 2016, PD-Sparse, Algorithm 1).

    v_k = sum_i a_ik x_i,   w_k = soft(v_k, lam),   a_ik >= 0 on positives, <= 0 on negatives, both sums t in [0, C]

v lies in `kernels.tables`, table j nu + q for feature j and part q of the labels (dense: feature j alone); labels are numbers
of a random permutation of them, so that parts are runs of numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import mix
from xmc_stream.kernels.simplex import project
from xmc_stream.kernels.tables import find, place, places_needed

_A = np.uint64(0x9E3779B97F4A7C15)
_TRIES = 8  # draws of a label that no weight touches
_53 = np.uint64(11)


@kernel
def _uniform(key: np.uint64, n: int) -> float:
    """Draw n of a key, in [0, 1)."""
    return np.float64(mix(key + np.uint64(n) * _A) >> _53) / 9007199254740992.0


@kernel
def _soft(v: float, lam: float) -> float:
    return v - min(max(v, -lam), lam)


@kernel
def _insert(label: int, score: float, n: int, labels: NDArray[np.int64], scores: NDArray[np.float64]) -> int:
    """Put a label among the best found so far (higher scores first, then lower labels); returns how many there are.

    As many as there are places; n of them are taken.
    """
    q = n
    if n == len(scores):
        q = n - 1
        if score < scores[q] or (score == scores[q] and label > labels[q]):
            return n
    while q > 0 and (scores[q - 1] < score or (scores[q - 1] == score and labels[q - 1] > label)):
        scores[q], labels[q] = scores[q - 1], labels[q - 1]
        q -= 1
    scores[q], labels[q] = score, label
    return min(n + 1, len(scores))


@kernel
def search_row(
    features: NDArray[Any], x: NDArray[np.float64], part: int, nu: int, n_labels: int,
    begin: NDArray[np.int64], bits: NDArray[np.int8], labels: NDArray[np.int32], values: NDArray[np.float64],
    lam: float, barred: NDArray[np.int64], mark: int, z: NDArray[np.float64],
    best: NDArray[np.int64], best_z: NDArray[np.float64],
) -> tuple[int, int]:  # fmt: skip
    """The labels of a part that score highest, and above 0, for the entries of a row; labels with barred[l] = mark are not.

    z (n_labels + 1,): zero before and, but for its last place, after. best, best_z: places for as many labels as are
    wanted, from best to worst. Returns how many were found, and the weights looked at.
    """
    low, high = n_labels * part // nu, n_labels * (part + 1) // nu
    met = 0
    for p in range(len(features)):
        if len(labels) == 0:
            run = values[features[p] * n_labels : (features[p] + 1) * n_labels]
            for k in range(low, high):
                z[k] += x[p] * _soft(run[k], lam)
            met += high - low
        elif bits[features[p] * nu + part] >= 0:
            t = features[p] * nu + part
            length = np.int64(1) << bits[t]
            for at in range(begin[t], begin[t] + length):
                z[labels[at]] += x[p] * _soft(values[at], lam)
            met += length
    n = 0
    if len(labels) == 0 or 8 * met > high - low:
        for k in range(low, high):
            if z[k] > 0.0 and barred[k] != mark:
                n = _insert(k, z[k], n, best, best_z)
        z[low:high] = 0.0
    else:
        for p in range(len(features)):
            t = features[p] * nu + part
            if bits[t] >= 0:
                for at in range(begin[t], begin[t] + (np.int64(1) << bits[t])):
                    k = labels[at]
                    score = z[k]
                    z[k] = 0.0  # so that it comes once
                    if score > 0.0 and k != n_labels and barred[k] != mark:
                        n = _insert(k, score, n, best, best_z)
    return n, met


@kernel
def _draw_label(
    features: NDArray[Any], part: int, nu: int, n_labels: int, begin: NDArray[np.int64], bits: NDArray[np.int8],
    labels: NDArray[np.int32], values: NDArray[np.float64], lam: float, barred: NDArray[np.int64], mark: int,
    key: np.uint64,
) -> int:  # fmt: skip
    """A label of a part that no weight of a row's features touches, if one is soon found, else any; -1 for none."""
    low, high = n_labels * part // nu, n_labels * (part + 1) // nu
    any_ = -1
    for n in range(_TRIES):
        k = low + int(_uniform(key, n) * (high - low))
        if barred[k] == mark:
            continue
        any_ = k
        touched = False
        for p in range(len(features)):
            t = features[p] if len(labels) == 0 else features[p] * nu + part
            at = find(t, k, n_labels, begin, bits, labels)
            touched = touched or (at >= 0 and abs(values[at]) > lam)
        if not touched:
            break
    return any_


@kernel
def sample_row(
    features: NDArray[Any], data: NDArray[np.float32], n: int, key: np.uint64,
    out_features: NDArray[np.int64], out_x: NDArray[np.float64],
) -> None:  # fmt: skip
    """n draws of a row's entries with probability |x_j| / ||x||_1 and value sign(x_j) ||x||_1 / n: w.x on average.

    One from each of n equal parts of the line of all |x_j|, which has less variance than draws from all of it.
    """
    norm = 0.0
    for p in range(len(features)):
        norm += abs(np.float64(data[p]))
    p, upto = 0, abs(np.float64(data[0]))
    for i in range(n):
        at = (i + _uniform(key, i)) * norm / n
        while at >= upto and p + 1 < len(features):
            p += 1
            upto += abs(np.float64(data[p]))
        out_features[i] = features[p]
        out_x[i] = np.sign(data[p]) * norm / n
