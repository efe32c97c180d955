"""The active sets of a round: drawn in the first one, else what the last one kept and what a search found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.ppdsparse.candidates import candidate_windows, read_candidates, select_threshold
from xmc_stream.ppdsparse.kernels.active import (
    count_before,
    mark,
    marked_rows,
    merge_candidates,
    rank,
    set_signs,
    start_sets,
)
from xmc_stream.ppdsparse.parameters import APPROXIMATE
from xmc_stream.ppdsparse.problem import Found, Problem, Share
from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.ppdsparse.state import BIAS, ROOM, UnitState
from xmc_stream.store.dataset import Dataset

Weights = tuple[NDArray[Any], NDArray[np.float32], float]  # of a class: features, values, bias


class RowBits:
    """A set of rows, a bit each. before: how many of them are ahead of each of the words."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples
        self.words = np.zeros(-(-n_samples // 64), np.uint64)
        self.before = np.empty(len(self.words), np.int32)

    def set(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mark some rows and no others; returns the different ones, ascending."""
        self.words[:] = 0
        mark(rows, self.words)
        union = np.empty(count_before(self.words, self.before), np.int64)
        marked_rows(self.words, union)
        return union

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some rows are marked."""
        return np.asarray((self.words[rows >> 6] >> (rows & 63).astype(np.uint64)) & np.uint64(1) > 0)

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of the marked rows each row is; they are counted."""
        at = np.empty(len(rows), np.int64)
        rank(rows, self.words, self.before, at)
        return at


def kept_rows(sets: ActiveSets) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The active rows that stay after a solve, all but negatives with alpha = 0; how many each class has."""
    kept = (sets.sign > 0) | (sets.alpha > 0.0)
    return kept, np.diff(np.concatenate([[0], np.cumsum(kept)])[sets.ptr])


class RoundSets:
    """Of the classes of a share, which count from its first.

    previous: the unit's state after the round before, or that of a warm start; None where classes begin from nothing. found: by
    the search before. line: of the first class, in `previous`. room: rows that each class may add.
    """

    def __init__(
        self, problem: Problem, dataset: Dataset, round_: int, share: Share, previous: UnitState | None, found: Found
    ) -> None:  # fmt: skip
        self.seed, self.n_samples, self.Y = problem.seed, dataset.n_samples, dataset.Y_columns()
        self.first, self.n, self.line = share.first, share.last - share.first, share.first - share.unit.first
        self.previous, self.approximate = previous, found.kind == APPROXIMATE
        self.found = found.open(self.n_samples)
        self.bits = RowBits(self.n_samples)
        self.room = np.zeros(self.n, np.int64)
        if previous is not None:
            self.room = previous.statistics[self.line : self.line + self.n, ROOM].astype(np.int64)
            if (
                round_ == problem.parameters.common_rounds
            ):  # a check keeps the best row of each job, a matter of the cut
                self.room = np.minimum(self.room, 1)

    def of(self, low: int, high: int) -> ActiveSets:
        """Of classes [low, high)."""
        first, last = self.first + low, self.first + high
        positives, ptr = self.Y.block(first, last), np.zeros(high - low + 1, np.int64)
        if self.previous is None:
            counts = np.diff(positives.indptr)
            sizes = start_sizes(counts, self.n_samples)
            rows = np.empty(int((counts + sizes).sum()), np.int64)
            start_sets(positives.indptr, positives.indices, sizes, first, self.n_samples, self.seed, ptr, rows)
            alpha = np.zeros(len(rows))
        else:
            old, room = self.previous.active.block(self.line + low, self.line + high), self.room[low:high]
            f_ptr, f_rows, f_scores = read_candidates(self.found, first, last, self.n_samples, room)
            rows = np.empty(int((np.diff(old.indptr) + np.minimum(room, np.diff(f_ptr))).sum()), np.int64)
            alpha = np.empty(len(rows))
            merge_candidates(old.indptr, old.indices, old.values, f_ptr, f_rows, f_scores, room, ptr, rows, alpha)
        sign = np.empty(len(rows), np.int8)
        set_signs(positives.indptr, positives.indices, ptr, rows, sign)
        return ActiveSets(first, ptr, rows, sign, alpha)

    def new_rows(self, c: int) -> Iterator[NDArray[np.int64]]:
        """What class c adds of what was found, part by part."""
        if self.previous is None:
            return
        label = self.first + c
        score, last = select_threshold(self.found, label, int(self.room[c]))
        for rows, scores in candidate_windows(self.found, label):
            yield rows[(scores > score) | ((scores == score) & (rows <= last))]

    def start_weights(self, classes: NDArray[np.int64]) -> Iterator[Weights]:
        """Weights and biases that a warm start begins from."""
        if self.previous is not None:
            for line in (self.line + classes).tolist():
                w = self.previous.weights.block(line, line + 1)
                yield w.indices, w.values, float(self.previous.statistics[line, BIAS])
