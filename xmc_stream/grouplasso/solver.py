"""Block coordinate descent on W (D x K), with the array of the losses (N x K) kept up to date (Blondel et al. 2013, Alg. 1).

Columns of X come some at a time, W and the array stand in memory or in files: none of this changes what comes out.
`Extrapolation` goes from a row of sweeps to where they are going.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.arrays import Columns, InFile, Matrix, Some, Targets, rows_of
from xmc_stream.grouplasso.kernels.descent import (
    Problem,
    Visited,
    add_squares,
    draw,
    falls,
    new_step,
    note,
    penalties,
    propose,
    scale_step,
    visit,
)
from xmc_stream.grouplasso.kernels.margins import (
    LOGISTIC,
    MULTITASK,
    add_entries,
    add_scores,
    move_entries,
    new_sums,
    settle,
)
from xmc_stream.grouplasso.parameters import LOSSES, GroupLassoParameters
from xmc_stream.kernels.domains import FEATURE_ORDER
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.system.stop import stop_if_unwanted

_WINDOW = 1 << 20  # bytes of lines that are gone over at a time
ROWS_BYTES = 1 << 20  # of the rows of W of a batch of columns
# of sweeps that are extrapolated
MOST_VALUES = 1 << 19  # of W in one sweep: larger ones are not, whatever the memory
_MOST_SWEEPS = 6
LEAST_SWEEPS = 3
SWEEPS_BYTES = (_MOST_SWEEPS + 2) * 4 * MOST_VALUES + 16 * MOST_VALUES  # of what is kept, and of the sum
_REGULAR = 1e-10
_RUN = 1 << 13  # of these values that are gone over at a time


def problem_of(p: GroupLassoParameters, lam: float, ridge: float, n_samples: int, n_labels: int) -> Problem:
    """The numbers of the problem with one lam. The constant is a bound on the curvature of the loss of one row.

    lam counts beside the mean of the losses, ridge beside their sum.
    """
    loss = LOSSES.index(p.loss)
    curvature = {MULTITASK: 2.0, LOGISTIC: 0.5}.get(loss, 2.0 * n_labels)
    scale = (1.0 if loss == LOGISTIC else 2.0) / n_samples
    return Problem(
        loss, n_labels, n_samples, scale, lam * p.mix, lam * (1.0 - p.mix), ridge / n_samples, not p.draws, curvature
    )


def order_of(features: NDArray[np.int64], draws: bool, seed: int, stage: int, sweep: int) -> NDArray[np.int64]:
    """The features in the order of a sweep: drawn with replacement, or each once."""
    key = np.uint64(key_of(seed, FEATURE_ORDER, stage, sweep))
    at = np.empty(len(features), np.int64)
    if draws:
        draw(len(features), key, at)
    else:
        visiting_order(0, len(features), key, at)
    return features[at]


@dataclass
class Descent:
    """W and the array of one job. window: lines of the array that may be in memory, where it is in a file.

    nonzero (D,): whether W_j is not 0; active (D,): whether it is, or the feature violated when it was visited last.
    """

    problem: Problem
    columns: Columns
    targets: Targets
    weights: Matrix
    array: Matrix
    window: int
    nonzero: NDArray[np.bool_]
    active: NDArray[np.bool_]

    def __post_init__(self) -> None:
        self._sums, self._step = new_sums(self.array.width), new_step(self.array.width)
        self._room = aligned_zeros((self.window if isinstance(self.array, InFile) else 0, self.array.width))
        self._batch = max(1, ROWS_BYTES // (4 * self.array.width))

    def refresh(self) -> float:
        """Make the array anew from W, which takes out what rounding left there; returns the objective."""
        problem, array = self.problem, self.array
        array.clear()
        features, parts = np.flatnonzero(self.nonzero), [np.zeros(0)]
        for first, last in self.columns.batches(features, self._batch):
            some = features[first:last]
            rows = self.weights.take(some)
            parts.append(np.empty(len(some)))
            penalties(rows, problem, parts[-1])
            if self._is_long(some):
                for _, at, values in self.columns.pieces(int(some[0])):
                    self._add(np.array([0, len(at)]), at, values, rows)
            else:
                self._add(*self.columns.gather(some), rows)
        losses = []
        for start, lines in rows_of(array, max(1, _WINDOW // (4 * array.width))):
            losses.append(settle(problem.loss, problem.n_labels, self.targets.lines(start, lines)))
        return float(np.sum(losses)) / problem.n_samples + float(np.concatenate(parts).sum())

    def _add(
        self, indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32], rows: NDArray[np.float32]
    ) -> None:
        some = Some(self.targets, self.array, indices, self._room)
        add_scores(indptr, some.numbers, data, 0, rows, some.lines.values)
        some.put()

    def _is_long(self, features: NDArray[np.int64]) -> bool:
        """Whether a batch is one column that must be read in pieces."""
        return len(features) == 1 and int(self.columns.counts[features[0]]) > self.columns.most

    def visit(self, order: NDArray[np.int64], violation: NDArray[np.float64]) -> None:
        """Visit features in turn. violation (2,): the sum and the largest so far, see `grouplasso.kernels.descent.Visited`."""
        for first, last in self.columns.batches(order, self._batch):
            stop_if_unwanted()
            some = order[first:last]
            visited = Visited(violation, np.empty(len(some), np.bool_), np.empty(len(some), np.bool_))
            if self._is_long(some):
                self._visit_long(int(some[0]), visited)
            else:
                self._visit_batch(some, visited)
            self.nonzero[some] = visited.kept
            self.active[some] = visited.active

    def _visit_batch(self, some: NDArray[np.int64], visited: Visited) -> None:
        features, order = np.unique(some, return_inverse=True)
        columns = self.columns.gather(features)
        rows_of_w = self.weights.take(features)
        copied, moved = Some(self.targets, self.array, columns.indices, self._room), self.nonzero[features]
        visit(
            order, columns._replace(indices=copied.numbers), rows_of_w, self.problem, copied.lines, self._sums, self._step,
            visited,
        )  # fmt: skip
        if isinstance(self.array, InFile):
            moved[order[visited.active]] = True  # no other feature took a step
            changed = np.zeros(len(copied.lines.values), np.bool_)
            changed[copied.numbers[np.repeat(moved, np.diff(columns.indptr))]] = True
            copied.put(changed)
        self.weights.put(features, rows_of_w)

    def _visit_long(self, feature: int, visited: Visited) -> None:
        """Visit a column in pieces, as `grouplasso.kernels.descent.visit` does."""
        problem, sums, step, square = self.problem, self._sums, self._step, 0.0
        line = np.array([feature])
        w = self.weights.take(line)
        sums.g[:] = 0
        sums.h[:] = 0
        for begin, rows, values in self.columns.pieces(feature):
            some = Some(self.targets, self.array, rows, self._room)
            add_entries(problem.loss, 0, len(rows), -begin, 0, some.numbers, values, some.lines, sums)
            if problem.loss == LOGISTIC or not problem.search:
                square = add_squares(0, len(values), values, square)
        propose(w[0], square, problem, sums, step)
        if step.noted[1] < 0:
            size = 1.0
            while not falls(w[0], self._move_long(feature), size, problem, sums, step):
                scale_step(step.d, np.float32(-1.0))
                self._move_long(feature)
                scale_step(step.d, np.float32(-0.5))
                size *= 0.5
            w[0] += step.d
            self.weights.put(line, w)
        note(w[0], 0, problem, step, visited)

    def _move_long(self, feature: int) -> float:
        above = 0.0
        for _, rows, values in self.columns.pieces(feature):
            some = Some(self.targets, self.array, rows, self._room)
            above = move_entries(
                self.problem.loss, 0, len(rows), some.numbers, values, self._step.d, some.lines, self._sums, above
            )
            some.put()
        return above


class Extrapolation:
    """W of some features after the last sweeps over them, and where it is going (Bertrand, Massias 2021).

    Sweeps over the same features come to their limit along few directions, if slowly. From W after each of them, w_0 .. w_m,

        w = sum_i c_i w_i   (i = 1 .. m),   c minimises || sum_i c_i (w_i - w_{i-1}) ||  with  sum_i c_i = 1

    is often as near to it as many more sweeps would come: Anderson's extrapolation.
    """

    def __init__(self) -> None:
        self.features = np.zeros(0, np.int64)
        self._seen: list[NDArray[np.float32]] = []

    def stored(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The features, and W of them (width values a feature), sweep after sweep: what `go_on` takes."""
        return self.features, np.concatenate([np.zeros((0, width), np.float32), *self._seen])

    def go_on(self, features: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """From what was stored."""
        self.features = features
        self._seen = [rows[low : low + len(features)] for low in range(0, len(rows), max(len(features), 1))]

    def begin(self, features: NDArray[np.int64], width: int) -> None:
        """Sweeps over other features follow; where they have too many weights, nothing is kept of them."""
        few = len(features) * width <= MOST_VALUES
        self.features, self._seen = features if few else features[:0], []

    def add(self, rows: NDArray[np.float32]) -> None:
        """W of the features after a sweep."""
        self._seen = [*self._seen[-(_MOST_SWEEPS - 1) :], rows]

    def __len__(self) -> int:
        return len(self._seen)

    def result(self) -> NDArray[np.float32] | None:
        """Where they are going: rows that are 0 now stay so. None where that is not defined."""
        seen = [rows.reshape(-1) for rows in self._seen]
        m = len(seen) - 1
        gram = np.zeros((m, m))
        for low in range(0, len(seen[0]), _RUN):
            steps = np.diff(np.array([rows[low : low + _RUN] for rows in seen], np.float64), axis=0)
            for a in range(m):  # no BLAS: its sums depend on the number of threads
                for b in range(a + 1):
                    gram[a, b] += float((steps[a] * steps[b]).sum())
        gram = np.tril(gram) + np.tril(gram, -1).T
        scale = float(np.trace(gram))
        if not scale > 0:
            return None
        solved = np.linalg.solve(gram + _REGULAR * scale * np.eye(m), np.ones(m))
        if not np.isfinite(solved).all() or not abs(solved.sum()) > 0:
            return None
        c = solved / solved.sum()
        total = np.zeros(len(seen[0]))
        for factor, rows in zip(c.tolist(), seen[1:], strict=True):
            total += factor * rows
        out = total.astype(np.float32).reshape(self._seen[-1].shape)
        out[~self._seen[-1].any(axis=1)] = 0
        return out if bool(np.isfinite(out).all()) else None
