"""Dual variables of samples as they stream by, and what weights say of samples: for PD-Sparse."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import place_in_group
from xmc_stream.kernels.ranking import insert, insert_all
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels, add_scores
from xmc_stream.pdsparse.kernels.tables import Tables


@kernel
def group_rows(
    strips: NDArray[np.int64], slots: NDArray[np.int64], n_samples: int, strip_bits: int, key: np.uint64,
    rows: NDArray[np.int64], places: NDArray[np.int64],
) -> int:  # fmt: skip
    """The rows of a group's strips (ascending), and when each is visited; returns how many."""
    n = 0
    for j in range(len(strips)):
        first = strips[j] << strip_bits
        for offset in range(min(1 << strip_bits, n_samples - first)):
            rows[n], places[n] = first + offset, place_in_group(slots[j], offset, strip_bits, key)
            n += 1
    return n


@kernel
def _copy_labels(rows: NDArray[np.int64], sets: ActiveLabels, out: ActiveLabels) -> None:
    for i in range(len(rows)):
        first, to, n = sets.begin[rows[i]], out.begin[i], out.size[i]
        out.labels[to : to + n] = sets.labels[first : first + n]
        out.a[to : to + n] = sets.a[first : first + n]


def packed(sets: ActiveLabels, rows: NDArray[np.int64], more: int = 0) -> ActiveLabels:
    """Some rows alone, one after another, each with room for so many more labels."""
    size = sets.size[rows]
    total = int(size.sum()) + more * len(rows)
    out = ActiveLabels(np.cumsum(size + more) - size - more, size, np.empty(total, np.int32), np.empty(total))
    _copy_labels(rows, sets, out)
    return out


@kernel
def sum_negatives(sets: ActiveLabels, n_positive: NDArray[np.int64]) -> tuple[float, int, int]:
    """The sum of a over negatives, the active labels, those of them with a != 0. n_positive: of each row."""
    total, active, used = 0.0, 0, 0
    for r in range(len(n_positive)):
        for k in range(sets.size[r]):
            a = sets.a[sets.begin[r] + k]
            used += 1 if a != 0.0 else 0
            if k >= n_positive[r]:
                total += a
        active += sets.size[r]
    return total, active, used


@inner_kernel
def _rank_labels(
    features: NDArray[Any], x: NDArray[np.float32], numbers: NDArray[np.int32], label_of: NDArray[np.int32],
    tables: Tables, z: NDArray[np.float32], marks: NDArray[np.int32], mark: int, best: NDArray[np.int64],
    best_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """The labels that score highest for the entries of a row, of all, from best to worst: ties to the lower label.

    numbers, label_of: see `rank_rows`. z (K,): zero before and after. marks (K,): nowhere `mark`.
    best: -1 where there are no more labels.
    """
    n_labels, w = tables.n_labels, tables.w
    best[:], best_z[:] = -1, -np.inf
    all_ = False
    for part in range(tables.n_parts):
        all_ = add_scores(features, x, part, tables, z)[1] or all_
    if all_:
        for label in range(n_labels):
            if z[numbers[label]] > best_z[len(best_z) - 1]:
                insert(label, z[numbers[label]], best, best_z)
        z[:] = 0.0
        return
    for p in range(len(features)):
        for t in range(features[p] * tables.n_parts, (features[p] + 1) * tables.n_parts):
            for at in range(w.begin[t], w.begin[t] + w.n[t]):
                k = w.words[at]
                if marks[k] != mark:
                    marks[k] = mark
                    insert(label_of[k], z[k], best, best_z)
                    z[k] = 0.0
    # labels that no weight touches score 0: the lowest of them, until one is not among the best
    for label in range(n_labels):
        if best_z[len(best_z) - 1] >= 0.0 and (best_z[len(best_z) - 1] > 0.0 or best[len(best) - 1] < label):
            break
        if marks[numbers[label]] != mark:
            insert(label, np.float32(0.0), best, best_z)


@kernel
def rank_rows(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32], numbers: NDArray[np.int32],
    label_of: NDArray[np.int32], tables: Tables, z: NDArray[np.float32], best: NDArray[np.int64],
    best_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """The labels that score highest for each row and their scores (n, k), as predictions have them: see `_rank_labels`.

    numbers, label_of (K,): the number of each label, and back. A label that no weight touches scores 0; ties go to the lower
    label.
    """
    marks = np.full(tables.n_labels, -1, np.int32)
    for r in range(len(indptr) - 1):
        features, x = indices[indptr[r] : indptr[r + 1]], data[indptr[r] : indptr[r + 1]]
        _rank_labels(features, x, numbers, label_of, tables, z, marks, r, best[r], best_z[r])


@kernel
def sum_losses(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32], y_indptr: NDArray[np.int64],
    y_labels: NDArray[np.int32], tables: Tables, z: NDArray[np.float32],
) -> float:  # fmt: skip
    """sum over rows of max over negatives n and positives p of (1 + z_n - z_p)_+; 0 for a row without either."""
    total = 0.0
    best, best_z = np.empty(1, np.int64), np.empty(1, np.float32)
    for r in range(len(indptr) - 1):
        n_pos = y_indptr[r + 1] - y_indptr[r]
        if n_pos == 0 or n_pos == tables.n_labels:
            continue
        for part in range(tables.n_parts):
            add_scores(indices[indptr[r] : indptr[r + 1]], data[indptr[r] : indptr[r + 1]], part, tables, z)
        lowest = np.inf
        for k in range(y_indptr[r], y_indptr[r + 1]):
            lowest = min(lowest, np.float64(z[y_labels[k]]))
            z[y_labels[k]] = -np.inf
        best_z[0] = -np.inf
        insert_all(z, 0, tables.n_labels, best, best_z)
        total += max(0.0, 1.0 + np.float64(best_z[0]) - lowest)
        z[:] = 0.0
    return total
