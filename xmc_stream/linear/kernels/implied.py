"""Labels that come with others: which labels every row of a label has, and what that says of a row's best labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.ranking import Ranking


class Implied(NamedTuple):
    """Label j implies labels[ptr[j] : ptr[j + 1]], ascending: each scores at least what j does, less margin > 0."""

    ptr: NDArray[np.int64]
    labels: NDArray[np.int32]
    margin: np.float32

    @property
    def nbytes(self) -> int:
        """Of both arrays."""
        return self.ptr.nbytes + self.labels.nbytes


@kernel
def lift(implied: Implied, best: Ranking, barred: Labels) -> None:
    """Let the k best labels of each row lift those that they imply, in place.

    The score of label l becomes  max(s_l, max_{j implies l} s_j - margin).  As margin > 0, whatever lifts a label into the
    k best is one of them itself, so the k best by own scores are all that is needed. barred: labels that a row must not get.
    """
    ptr, of_labels, margin = implied
    best_labels, best_scores = best
    barred_indptr, barred_indices = barred
    k = best_scores.shape[1]
    for i in range(len(best_scores)):
        worst, n = best_scores[i, k - 1], k
        for r in range(k):  # how many there may be
            j = best_labels[i, r]
            if j < 0 or best_scores[i, r] - margin < worst:
                break
            n += ptr[j + 1] - ptr[j]
        if n == k:
            continue
        labels, scores = np.empty(n, np.int64), np.empty(n, np.float32)
        n = k
        for r in range(k):
            labels[r], scores[r] = best_labels[i, r], best_scores[i, r]
        for r in range(k):
            j = best_labels[i, r]
            score = best_scores[i, r] - margin
            if j < 0 or score < worst:
                break
            for p in range(ptr[j], ptr[j + 1]):
                taken = True
                if len(barred_indptr):
                    for q in range(barred_indptr[i], barred_indptr[i + 1]):
                        taken = taken and barred_indices[q] != of_labels[p]
                if taken:
                    labels[n], scores[n] = of_labels[p], score
                    n += 1
        m = 0  # each label once, by its highest score; places that are empty have -1
        single, highest = np.empty(n, np.int64), np.empty(n, np.float32)
        for t in np.argsort(labels[:n], kind="mergesort"):
            if m and labels[t] >= 0 and single[m - 1] == labels[t]:
                highest[m - 1] = max(highest[m - 1], scores[t])
            else:
                single[m], highest[m] = labels[t], scores[t]
                m += 1
        for r, t in enumerate(np.argsort(-highest[:m], kind="mergesort")[:k]):
            best_labels[i, r], best_scores[i, r] = single[t], highest[t]


@kernel
def first_others(y: Labels, others: NDArray[np.int64]) -> None:
    """others[j]: how many labels the first row of label j has beside it. It is -1 before that row is seen."""
    indptr, indices = y
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            if others[indices[p]] < 0:
                others[indices[p]] = indptr[i + 1] - indptr[i] - 1


@kernel
def intersect(
    y: Labels, first: int, ptr: NDArray[np.int64], sizes: NDArray[np.int64], labels: NDArray[np.int32]
) -> None:
    """Keep of each label's list what the rows of a block have too.

    ptr (n + 1,): label first + c has room for labels[ptr[c] : ptr[c + 1]], as many as its first row has beside it, or none
    where it is not asked about. sizes (n,): of the list so far, -1 before its first row is seen.
    """
    indptr, indices = y
    n = len(sizes)
    for i in range(len(indptr) - 1):
        begin, end = indptr[i], indptr[i + 1]
        for p in range(begin, end):
            c = indices[p] - first
            if not 0 <= c < n or ptr[c] == ptr[c + 1] or sizes[c] == 0:
                continue
            at, kept = ptr[c], 0
            if sizes[c] < 0:
                for q in range(begin, end):
                    if q != p:
                        labels[at + kept] = indices[q]
                        kept += 1
            else:
                q = begin
                for t in range(at, at + sizes[c]):  # both ascend
                    while q < end and indices[q] < labels[t]:
                        q += 1
                    if q < end and indices[q] == labels[t]:
                        labels[at + kept] = labels[t]
                        kept += 1
            sizes[c] = kept
