"""Classes whose active rows memory holds: neighbours are solved together, as many as fit, on rows that are gathered once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.linear.kernels.dcd import new_scratch
from xmc_stream.linear.kernels.penalty import Times
from xmc_stream.ppdsparse.kernels.active import drop_idle
from xmc_stream.ppdsparse.kernels.balance import start_alpha, start_scores
from xmc_stream.ppdsparse.plan import SolvePlan
from xmc_stream.ppdsparse.sets import RoundSets
from xmc_stream.ppdsparse.solver import Sink, Solver, dense_bytes, ramp_of
from xmc_stream.ppdsparse.state import BIAS, DUAL, INSIDE, KEPT, OPEN, STATUS, UnitStateWriter
from xmc_stream.ppdsparse.weights import ShareWeights
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix


class Batches:
    """Solves classes of a share, which count from its first; `out` gets them in turn.

    sets: their active sets. weights: of them in the loss. start: what the model of a warm start was trained
    with, in the first round.
    """

    def __init__(
        self, solver: Solver, sets: RoundSets, X: SparseMatrix, sizes: SolvePlan, weights: ShareWeights,
        start: Mapping[str, float] | None, out: UnitStateWriter,
    ) -> None:  # fmt: skip
        self.solver, self.sets, self.X, self.sizes, self.weights = solver, sets, X, sizes, weights
        self.start, self.out, self.n_features = start, out, X.shape[1]
        most_rows, most_nnz = min(sizes.max_rows, sets.n_samples), min(sizes.max_class_nnz, X.nnz)
        self.scratch = new_scratch(self.n_features, most_rows, most_nnz)
        self.buffer = Buffer(X, min(sizes.max_nnz, X.nnz))
        # negatives that an approximate search brought in, and those with alpha > 0 in the end
        self.fresh = self.used = 0

    def solve(self, low: int, high: int, solved: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Classes [low, high): those that are solved, and between them those that are carried over as they are.

        All together if their rows fit, else one half after the other; a class by itself as it may be. Returns the sizes of the
        active sets that are kept.
        """
        whole, statistics, sink = self.sets.of(low, high), np.empty((high - low, 4)), self._sink(low, solved)
        # what was kept of the last round has alpha > 0, but for positives
        fresh = (whole.alpha == 0.0) & (whole.sign < 0) if self.sets.approximate else np.zeros(0, np.bool_)
        sets = whole if solved.all() else _some(whole, solved)
        todo = [(sets, statistics)]
        while todo:
            part, figures = todo.pop()
            n = len(part.ptr) - 1
            if not len(part.rows):  # classes without positives
                sink(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
            elif n == 1:
                self._solve_alone(part, figures[0], sink)
            elif (held := self._gather(part)) is not None:
                at, block, times = held
                self.solver.solve(part, at, block, self.scratch, figures, sink, times)
            else:
                middle = n // 2
                todo += [(_range(part, middle, n), figures[middle:]), (_range(part, 0, middle), figures[:middle])]
        if sets is not whole:
            whole.alpha[np.repeat(solved, np.diff(whole.ptr))] = sets.alpha
        if self.sets.approximate:
            self.fresh += int(fresh.sum())
            self.used += int((fresh & (whole.alpha > 0.0)).sum())
        known = self.out.statistics[low:high]
        open_ = np.flatnonzero(solved & (known[:, STATUS] == OPEN))
        known[open_[:, None], [BIAS, DUAL, KEPT, INSIDE]] = statistics[open_]
        counts = np.empty(high - low, np.int64)
        filled = drop_idle(whole.ptr, whole.rows, whole.sign, whole.alpha, counts)
        self.out.active.append(counts, whole.rows[:filled], whole.alpha[:filled])
        return counts

    def _sink(self, low: int, solved: NDArray[np.bool_]) -> Sink:
        """Takes the weights of classes from `low` on as they are solved; of carried ones, the weights that they had."""
        # of runs of solved classes, and of carried ones
        ends = np.append(np.flatnonzero(np.diff(solved)) + 1, len(solved))
        done = 0

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], values: NDArray[np.float32]) -> None:
            nonlocal done
            first, filled = done, 0
            while done < first + len(counts):
                begin, done = done, min(int(ends[np.searchsorted(ends, done, "right")]), first + len(counts))
                if solved[begin]:
                    mine = counts[begin - first : done - first]
                    part = slice(filled, filled + int(mine.sum()))
                    self.out.weights.append(mine, features[part], values[part])
                    filled = part.stop
                elif self.sets.previous is not None:
                    line = self.sets.line + low
                    self.out.weights.copy(self.sets.previous.weights, line + begin, line + done)

        return sink

    def _gather(self, sets: ActiveSets) -> tuple[NDArray[np.int64], Block, Times] | None:
        """The rows of some classes, if they fit: which of them are each class's, and how many times C counts."""
        sizes = self.sizes
        if len(sets.rows) > sizes.max_rows:
            return None
        union = self.sets.bits.set(sets.rows)
        spans = self.X.lengths(union)
        most, total = sizes.max_nnz, int(spans[1].sum())
        if self.solver.dense:  # as whole lines they are there twice
            most //= 2
        if total > most or (self.solver.dense and dense_bytes(len(union), self.n_features) > 8 * most):
            return None
        at = self.sets.bits.places(sets.rows)
        nnz = np.diff(np.concatenate([[0], np.cumsum(spans[1][at])])[sets.ptr])  # of each class
        if int(nnz.max()) > sizes.max_class_nnz:
            return None
        block, times = self.X.gather(union, self.buffer, spans), self._times(sets, union)
        if self.start is not None:
            self._start_scores(sets, at, block)
            self._start_alpha(sets, at, times, self.start)
        return at, block, times

    def _solve_alone(self, sets: ActiveSets, statistics: NDArray[np.float64], sink: Sink) -> None:
        """One class of any size."""
        lengths, times, most = self.X.lengths(sets.rows)[1], self._times(sets, sets.rows), self.sizes.max_nnz
        if self.start is not None:
            ends = np.concatenate([[0], np.cumsum(lengths)])
            begin = 0
            while begin < len(sets.rows):
                end = max(int(np.searchsorted(ends, ends[begin] + most, side="right")) - 1, begin + 1)
                block, mine = self.X.gather(sets.rows[begin:end], self.buffer), slice(begin, end)
                part = ActiveSets(
                    sets.first_label, np.array([0, end - begin]), sets.rows[mine], sets.sign[mine], sets.alpha[mine]
                )
                self._start_scores(part, np.arange(end - begin), block)
                begin = end
            self._start_alpha(sets, np.arange(len(sets.rows)), times, self.start)
        self.solver.solve_large(
            sets, lengths, lambda rows: self.X.gather(rows, self.buffer), most, self.scratch, statistics, sink, times
        )

    def _times(self, sets: ActiveSets, rows: NDArray[np.int64]) -> Times:
        """How many times C counts for the classes of some active sets, and for some rows (ascending, unique)."""
        low = sets.first_label - self.sets.first
        return Times(self.weights.of(slice(low, low + len(sets.ptr) - 1)), self.weights.of_rows.of(rows))

    def _start_scores(self, sets: ActiveSets, at: NDArray[np.int64], block: Block) -> None:
        """The scores that the weights of the warm start give the active rows (rows `at` of the block), in alpha's place."""
        previous = self.sets.previous
        if previous is None:
            return
        low = self.sets.line + sets.first_label - self.sets.first
        biases = previous.statistics[:, BIAS].copy()
        dense = np.zeros(self.n_features, np.float32)
        for w in previous.weights.blocks(max(MIB, 16 * len(dense)), low, low + len(sets.ptr) - 1):
            ptr = sets.ptr[w.start - low : w.start - low + w.n + 1]
            mine = slice(int(ptr[0]), int(ptr[-1]))
            start_scores(
                CSR.of(w), biases[w.start : w.start + w.n], ptr, at[mine], CSR.of(block), dense, sets.alpha[mine]
            )

    def _start_alpha(self, sets: ActiveSets, at: NDArray[np.int64], times: Times, start: Mapping[str, float]) -> None:
        """alpha from the scores in its place: it gives each class tau times the bias of its start, 0 to one without weights.

        at: places of the rows in `times`. Large classes stay as they are, also where memory holds them: as X streams by,
        they are too many to look at twice.
        """
        p, n, previous = self.solver.parameters, len(sets.ptr) - 1, self.sets.previous
        tau = start.get("tau", 0.0)  # 0 where the model's bias is none of a dual
        if previous is None:
            return
        low = self.sets.line + sets.first_label - self.sets.first
        wanted = tau * previous.statistics[low : low + n, BIAS]
        wanted[np.diff(previous.weights.ends(low, low + n)) == 0] = np.nan
        follows = p.bias and p.loss == "squared_hinge" and tau > 0  # the hinge's alpha does not
        unshifted = np.diff(sets.ptr) > self.solver.order.large if follows else np.full(n, True)
        wanted[unshifted & ~np.isnan(wanted)] = np.inf
        start_alpha(sets.ptr, sets.sign, at, wanted, ramp_of(p, start), times, sets.alpha)


def _range(sets: ActiveSets, a: int, b: int) -> ActiveSets:
    """Classes a .. b - 1 of some active sets: views, so that alpha is shared."""
    mine = slice(int(sets.ptr[a]), int(sets.ptr[b]))
    ptr = sets.ptr[a : b + 1] - sets.ptr[a]
    return ActiveSets(sets.first_label + a, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])


def _some(sets: ActiveSets, chosen: NDArray[np.bool_]) -> ActiveSets:
    """Copies, in which the classes that are not chosen have no rows."""
    sizes = np.diff(sets.ptr)
    mine, ptr = np.repeat(chosen, sizes), np.concatenate([[0], np.cumsum(sizes * chosen)])
    return ActiveSets(sets.first_label, ptr, sets.rows[mine], sets.sign[mine], sets.alpha[mine])
