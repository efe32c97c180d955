"""Products of sparse rows with dense factors, each sum in the order of entries or rows, and folds of their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.lines import CACHE_LINE
from xmc_stream.kernels.prefetch import prefetch_near
from xmc_stream.kernels.ranking import bar, insert_all

AHEAD = 24  # entries, by which lines of a dense matrix are asked for before they are used


@inner_kernel
def ahead(indices: NDArray[Any], p: int, end: int, flat: NDArray[Any], c: int) -> None:
    """Begin to bring the line (of c columns) near that entry p + AHEAD of a csr pattern, which ends at `end`, will use."""
    if p + AHEAD < end:
        first = np.int64(indices[p + AHEAD]) * c
        for at in range(first, first + c, CACHE_LINE):
            prefetch_near(flat, at)


@kernel
def multiply(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any], out: NDArray[Any]
) -> None:
    """out (n x c) = the rows (n x d, csr) times dense (d x c)."""
    flat, end = dense.reshape(-1), indptr[-1]
    for i in range(len(indptr) - 1):
        row = out[i]
        row[:] = 0
        for p in range(indptr[i], indptr[i + 1]):
            ahead(indices, p, end, flat, len(row))
            x, other = data[p], dense[indices[p]]
            for c in range(len(row)):
                row[c] += x * other[c]


@kernel
def add_transposed(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any], out: NDArray[Any]
) -> None:
    """out (d x c) += the transpose of the rows (n x d, csr) times dense (n x c)."""
    flat, end = out.reshape(-1), indptr[-1]
    for i in range(len(indptr) - 1):
        row = dense[i]
        for p in range(indptr[i], indptr[i + 1]):
            ahead(indices, p, end, flat, len(row))
            x, other = data[p], out[indices[p]]
            for c in range(len(row)):
                other[c] += x * row[c]


@kernel
def add_lines(dense: NDArray[Any], out: NDArray[Any]) -> None:
    """out (c) += each line of dense (n x c), in turn."""
    for i in range(len(dense)):
        line = dense[i]
        for c in range(len(out)):
            out[c] += line[c]


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


@kernel
def fold_top_k(
    scores: NDArray[np.float32], first_class: int, barred: Labels, best_labels: NDArray[np.int64],
    best_scores: NDArray[np.float32],
) -> None:  # fmt: skip
    """Fold scores (n x c) of classes first_class, first_class + 1, ... into each row's best k; see `ranking.top_k`."""
    n, c = scores.shape
    for i in range(n):
        bar(i, first_class, c, barred, scores[i])
        insert_all(scores[i], first_class, c, best_labels[i], best_scores[i])


@kernel
def take_positives(
    scores: NDArray[np.float32], first_class: int, y_indptr: NDArray[np.int64], y_indices: NDArray[Any],
    positives: NDArray[np.float32],
) -> None:  # fmt: skip
    """positives[p] = the score of the true label y_indices[p], for those among the classes of scores (n x c)."""
    n, c = scores.shape
    for i in range(n):
        for p in range(y_indptr[i], y_indptr[i + 1]):
            if first_class <= y_indices[p] < first_class + c:
                positives[p] = scores[i, y_indices[p] - first_class]


@kernel
def fold_counts(
    scores: NDArray[np.float32], first_class: int, y_indptr: NDArray[np.int64], positives: NDArray[np.float32],
    threshold: np.float32, predicted: NDArray[Any], above: NDArray[np.int64],
) -> None:  # fmt: skip
    """predicted[label] += rows whose score exceeds the threshold; above[i]: see `metrics.count_above`.

    scores (n x c): of classes first_class, first_class + 1, ...; positives: of the true labels, ascending in each row.
    """
    n, c = scores.shape
    for i in range(n):
        row = scores[i]
        for k in range(c):
            predicted[first_class + k] += np.int32(row[k] > threshold)
        for p in range(y_indptr[i], y_indptr[i + 1]):
            over, level = np.int32(0), np.int32(0)
            for k in range(c):
                over += np.int32(row[k] > positives[p])
                level += np.int32(row[k] >= positives[p])
            if level == 0:  # nor does any reach the higher ones
                break
            above[i] += over + level
