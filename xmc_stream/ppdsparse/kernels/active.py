"""Active sets of many classes at once: how they start, grow by what the search found, and shrink.

And what a warm start has on them: scores by its weights, and alpha from these, so that it gives each class tau times the bias
of the weights.

Ragged arrays: class c has the entries [ptr[c], ptr[c + 1]) of an array; rows ascend within a class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.bits import place_of, sort_numbers
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.domains import FIRST_NEGATIVES
from xmc_stream.kernels.instructions import popcount
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, permuted, word_bits
from xmc_stream.linear.kernels.dcd import Ramp, Times, alpha_of, times
from xmc_stream.ppdsparse.kernels.search import keep_best

_STEPS = 40  # of Newton's method, at most
_BELOW = np.float32(-2.0)  # rows that are found score above: they violate, or nearly


@kernel
def start_sets(
    p_ptr: NDArray[np.int64],
    positives: NDArray[Any],
    sizes: NDArray[np.int64],
    first_label: int,
    n_samples: int,
    seed: int,
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Active sets of round 0: the positives and sizes[c] keyed random negatives; ptr and rows are filled."""
    ptr[0] = 0
    bits = word_bits(n_samples)
    for c in range(len(p_ptr) - 1):
        mine = positives[p_ptr[c] : p_ptr[c + 1]]
        filled = ptr[c]
        for p in range(len(mine)):
            rows[filled] = mine[p]
            filled += 1
        wanted = filled + sizes[c]
        key = key_of(seed, first_label + c, 0, FIRST_NEGATIVES)
        t = 0
        while filled < wanted:
            row = permuted(t, n_samples, bits, key)
            t += 1
            q = place_of(mine, 0, len(mine), row)
            if q == len(mine) or mine[q] != row:
                rows[filled] = row
                filled += 1
        sort_numbers(rows[ptr[c] : filled], n_samples)
        ptr[c + 1] = filled


@kernel
def draw_negatives(n: int, label: int, n_samples: int, seed: int, words: NDArray[np.uint64]) -> None:
    """`start_sets` for one class whose positives are marked: mark n keyed random negatives."""
    bits = word_bits(n_samples)
    key = key_of(seed, label, 0, FIRST_NEGATIVES)
    t = 0
    while n:
        row = permuted(t, n_samples, bits, key)
        t += 1
        bit = np.uint64(1) << np.uint64(row & 63)
        if not words[row >> 6] & bit:
            words[row >> 6] |= bit
            n -= 1


@kernel
def append_lines(
    indptr: NDArray[np.int64],
    rows: NDArray[Any],
    scores: NDArray[np.float32],
    classes: NDArray[np.int64],
    place: NDArray[np.int64],
    out_rows: NDArray[Any],
    out_scores: NDArray[np.float32],
) -> None:
    """Copy the entries of each line to the place of its class, which moves on."""
    for i in range(len(classes)):
        q = place[classes[i]]
        for p in range(indptr[i], indptr[i + 1]):
            out_rows[q], out_scores[q] = rows[p], scores[p]
            q += 1
        place[classes[i]] = q


@kernel
def merge_candidates(
    a_ptr: NDArray[np.int64],
    a_rows: NDArray[Any],
    a_alpha: NDArray[np.float64],
    f_ptr: NDArray[np.int64],
    f_rows: NDArray[Any],
    f_scores: NDArray[np.float32],
    room: NDArray[np.int64],
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
    alpha: NDArray[np.float64],
) -> None:
    """Active sets of the next round: A and the best of what was found outside it, with their alpha (0 if new).

    f_ptr, f_rows, f_scores: what was found, rows ascending in a class; overwritten. room (n,): how many may be added at
    most.
    """
    ptr[0] = 0
    for c in range(len(a_ptr) - 1):
        f, n_new = f_ptr[c], f_ptr[c + 1] - f_ptr[c]
        if n_new > room[c]:
            if room[c]:
                keep_best(f_scores, f_rows, f, n_new, room[c], room[c], _BELOW)
            n_new = room[c]
        a, place = a_ptr[c], ptr[c]
        ptr[c + 1] = place + n_new + a_ptr[c + 1] - a
        for q in range(f, f + n_new):
            while a < a_ptr[c + 1] and a_rows[a] < f_rows[q]:
                rows[place], alpha[place] = a_rows[a], a_alpha[a]
                a, place = a + 1, place + 1
            rows[place], alpha[place] = f_rows[q], 0.0
            place += 1
        while a < a_ptr[c + 1]:
            rows[place], alpha[place] = a_rows[a], a_alpha[a]
            a, place = a + 1, place + 1


@kernel
def set_signs(
    p_ptr: NDArray[np.int64],
    positives: NDArray[Any],
    ptr: NDArray[np.int64],
    rows: NDArray[np.int64],
    sign: NDArray[np.int8],
) -> None:
    """sign = +1 where the row is a positive of its class, else -1."""
    for c in range(len(ptr) - 1):
        p = p_ptr[c]
        for q in range(ptr[c], ptr[c + 1]):
            while p < p_ptr[c + 1] and positives[p] < rows[q]:
                p += 1
            sign[q] = 1 if p < p_ptr[c + 1] and positives[p] == rows[q] else -1


@kernel
def mark(rows: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
    """Set the bit of each row."""
    for q in range(len(rows)):
        words[rows[q] >> 6] |= np.uint64(1) << np.uint64(rows[q] & 63)


@kernel
def count_before(words: NDArray[np.uint64], before: NDArray[np.int32]) -> int:
    """before[w] = bits set in the words ahead of w; returns all bits set."""
    total = 0
    for w in range(len(words)):
        before[w] = total
        total += popcount(words[w])
    return total


@kernel
def marked_rows(words: NDArray[np.uint64], out: NDArray[np.int64]) -> None:
    """The marked rows in ascending order."""
    filled = 0
    for w in range(len(words)):
        word = words[w]
        if word:
            for b in range(64):
                if (word >> np.uint64(b)) & np.uint64(1):
                    out[filled] = w * 64 + b
                    filled += 1


@kernel
def rank(rows: NDArray[np.int64], words: NDArray[np.uint64], before: NDArray[np.int32], out: NDArray[np.int64]) -> None:
    """Number of each (marked) row among the marked ones."""
    for q in range(len(rows)):
        w = rows[q] >> 6
        below = (np.uint64(1) << np.uint64(rows[q] & 63)) - np.uint64(1)
        out[q] = before[w] + popcount(words[w] & below)


@kernel
def count_below(
    ptr: NDArray[np.int64], rows: NDArray[Any], bounds: NDArray[np.int64], counts: NDArray[np.int64]
) -> None:
    """counts[c, b] += how many rows of class c are below bounds[b] (ascending). ptr: places of the classes in `rows`."""
    for c in range(len(ptr) - 1):
        q = ptr[c]
        for b in range(len(bounds)):
            q = place_of(rows, q, ptr[c + 1], bounds[b])
            counts[c, b] += q - ptr[c]


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
