"""A short measured probe: some classes solved once, some rows scored, to foresee sizes and times of a training run.

What decides the cut of a run (sizes of weights and active sets) comes from data, parameters and seed alone; only the
rates depend on the machine and the moment.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets, Labels
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.kernels.dcd import ONCE, new_scratch
from xmc_stream.linear.kernels.scores import Tile, in_fours
from xmc_stream.linear.tiles import make_tile, tile_bytes
from xmc_stream.ppdsparse.kernels.active import set_signs, start_sets
from xmc_stream.ppdsparse.kernels.search import ActiveAhead, BestRows, LossSums, bias_losses, loss_grid, search
from xmc_stream.ppdsparse.plan import SolvePlan
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.solver import Solver, has_dense_rows, row_order, solve_on_all_rows, start_sizes
from xmc_stream.ppdsparse.state import RowBits, kept_rows
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.store.model import UNIT

_ENTRIES = 1 << 21  # of active rows solved at most: 16 MiB, a fraction of a second
_SHARE = 16  # of what the first round solves, one entry in so many at most,
_FEW_ENTRIES = 1 << 17  # or so many where that is more
_FEWEST = 16  # classes, as far as they fit
_SECONDS = 0.15  # of scoring at most; a quarter of what solving took, where that is less: longer tells no more
_ROWS = 512  # scored at a time
_STREAMED, _PLACES = 8 << 20, 5  # bytes of X that are streamed for the rate at each place, and places at most
_EPOCHS = 3  # on all rows; what comes before and after takes about as long as one more
_SCORING = 2  # times an entry in a step of classes beside each other, about, a class is scored for it
# without a label that has positives, there is nothing to do
_NO_RATES = dict.fromkeys(("step", "score", "gather", "stream"), 0.0)


class _Solved(NamedTuple):
    """Some classes: sizes of their active sets before and after, counts of weights, the weights, biases; what it took.

    step: seconds of an entry of a row in a step. gather: seconds of a byte of X.
    """

    started: NDArray[np.int64]
    kept: NDArray[np.int64]
    weights: NDArray[np.int64]
    features: NDArray[np.int32]
    values: NDArray[np.float32]
    bias: NDArray[np.float64]
    seconds: float
    step: float
    gather: float


@dataclass(frozen=True)
class ProbeJob:
    """Solve a sample of the classes for one round and score some rows with their weights.

    The receipt: of each class sampled its label count, size of its active set before and after, and weights; bytes of a
    tile a weight; seconds of a coordinate step's entry (`step`), of the search for a row and a class (`score`), of a byte
    of scattered rows (`gather`), and of one that is streamed (`stream`).
    """

    problem: Problem
    sizes: SolvePlan

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "probe"

    def run(self) -> Receipt:
        """Solve and score."""
        dataset = Dataset(self.problem.data)
        n = dataset.n_samples
        counts = dataset.label_counts()
        X = dataset.X_rows()
        classes = self._sample(counts, n, X.nnz / n)
        if not len(classes):
            return {"counts": [], "started": [], "kept": [], "weights": [], "tile_ratio": 0.0, **_NO_RATES}
        solved = (self._on_all_rows if self.problem.parameters.all_rows else self._on_active_sets)(dataset, X, classes)
        of_feature = np.bincount(solved.features, minlength=dataset.n_features)
        fixed = tile_bytes(np.zeros(0), len(classes), dataset.n_features)
        if self.problem.parameters.all_rows:  # little is searched: it is not measured
            rates = {"stream": solved.gather, "score": _SCORING * solved.step * X.nnz / n}
        else:
            indptr = np.concatenate([[0], np.cumsum(solved.weights)])
            tile = make_tile(indptr, solved.features, solved.values, solved.bias.astype(np.float32), dataset.n_features)
            score = self._score(X, dataset.Y_rows(), tile, min(solved.seconds / 4, _SECONDS))
            rates = {"stream": self._stream(X, dataset.Y_rows()), "score": score}
        return {
            "counts": counts[classes].tolist(),
            "started": solved.started.tolist(),
            "kept": solved.kept.tolist(),
            "weights": solved.weights.tolist(),
            "tile_ratio": (tile_bytes(of_feature, len(classes), dataset.n_features) - fixed)
            / max(1, int(solved.weights.sum())),
            "step": solved.step,
            "gather": solved.gather,
            **rates,
        }

    def _on_active_sets(self, dataset: Dataset, X: SparseMatrix, classes: NDArray[np.int64]) -> _Solved:
        """One round on first active sets."""
        n, positives = dataset.n_samples, dataset.Y_columns().gather(classes)
        sizes = start_sizes(np.diff(positives.indptr), n)
        ptr = np.zeros(len(classes) + 1, np.int64)
        rows = np.empty(int((np.diff(positives.indptr) + sizes).sum()), np.int64)
        start_sets(positives.indptr, positives.indices, sizes, 0, n, self.problem.seed, ptr, rows)
        started = np.diff(ptr)
        if len(classes) == 1:  # it may be larger than what is planned for: some of its rows serve
            rows = rows[:: -(-len(rows) // self._most_rows(X.nnz / n))].copy()
            ptr[1] = len(rows)
        sign = np.empty(len(rows), np.int8)
        set_signs(positives.indptr, positives.indices, ptr, rows, sign)
        sets = ActiveSets(0, ptr, rows, sign, np.zeros(len(rows)))

        bits = RowBits(n)
        union, at = bits.set(rows), bits.places(rows)
        began = time.perf_counter()
        block = X.gather(union)
        gather = (time.perf_counter() - began) / max(1, X.bytes_read)

        lengths: list[NDArray[np.int64]] = []
        parts: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], data: NDArray[np.float32]) -> None:
            lengths.append(counts.copy())
            parts.append((features.copy(), data.copy()))

        entries = int(np.diff(block.indptr)[at].sum())
        scratch = new_scratch(
            dataset.n_features, len(rows), max(1, int(np.add.reduceat(np.diff(block.indptr)[at], ptr[:-1]).max()))
        )
        statistics = np.empty((len(classes), 4))
        began = time.perf_counter()
        dense = has_dense_rows(n, dataset.n_features, X.nnz)
        Solver(self.problem.parameters, self.problem.seed, row_order(n, X.nnz), dense).solve(
            sets, at, block, scratch, statistics, sink
        )
        seconds = time.perf_counter() - began
        kept = kept_rows(sets)[1]
        return _Solved(
            started, kept * (started // np.maximum(np.diff(ptr), 1)), np.concatenate(lengths),
            np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), statistics[:, 0],
            seconds, seconds / max(1, entries * self.problem.parameters.epochs_of(0)), gather,
        )  # fmt: skip

    def _on_all_rows(self, dataset: Dataset, X: SparseMatrix, classes: NDArray[np.int64]) -> _Solved:
        """Some passes over all rows, for as many classes as there are lanes: sizes are then nearly those of all passes."""
        n, began = dataset.n_samples, time.perf_counter()
        x = X.block(0, n)
        gather = (time.perf_counter() - began) / max(1, X.bytes_read)
        began = time.perf_counter()
        y = dataset.Y_columns().gather(classes)
        (solved,) = solve_on_all_rows(
            self.problem.parameters, self.problem.seed, x, y, dataset.n_features, ONCE, _EPOCHS
        )
        seconds = time.perf_counter() - began
        (weights, features, values), (kept, _, _) = solved.weights, solved.active
        return _Solved(
            np.full(len(classes), n), kept, weights, features, values, solved.statistics[:, 0],
            seconds, seconds / ((_EPOCHS + 1) * LANES * max(1, X.nnz)), gather,
        )  # fmt: skip

    def _most_rows(self, row_length: float) -> int:
        """Active rows solved at most."""
        most = min(_ENTRIES, self.sizes.max_nnz // 2, self.sizes.max_class_nnz) / max(row_length, 1.0)
        return max(1, min(int(most), self.sizes.max_rows))

    def _sample(self, counts: NDArray[np.int64], n_samples: int, row_length: float) -> NDArray[np.int64]:
        """Classes of all sizes, evenly by rank of their label counts, as many as fit; ascending."""
        most = self._most_rows(row_length) * max(row_length, 1.0)
        classes = np.flatnonzero(counts)
        active = counts[classes] + start_sizes(counts[classes], n_samples)
        if not len(classes):
            return classes
        classes = classes[np.argsort(active, kind="stable")]
        entries = np.sort(active) * max(row_length, 1.0)
        most = min(most, max(float(entries.sum()) / _SHARE, _FEW_ENTRIES))
        n = int(len(classes) * min(1.0, most / max(float(entries.sum()), 1.0)))
        if self.problem.parameters.all_rows:
            n, most = LANES, np.inf
        n = min(max(n, _FEWEST), len(classes), UNIT)
        chosen = ((np.arange(n) + 0.5) * len(classes) / n).astype(np.int64)
        fits = np.cumsum(entries[chosen]) <= most
        fits[0] = True
        return np.sort(classes[chosen[fits]])

    def _score(self, X: SparseMatrix, Y: SparseMatrix, tile: Tile, seconds: float) -> float:
        """Seconds of a search for a row and a class: rows from the middle on, until so many seconds are spent."""
        width, n = len(tile.bias), X.n_lines
        none, one, begins = np.zeros(width, np.int64), np.ones(width, np.int64), 2 * np.arange(width)
        rows, took, loss, grid = 0, 0.0, self.problem.parameters.loss_code, loss_grid(n)
        fours = in_fours(n, X.shape[1], X.nnz)
        for x, y in stream((X, Y), self.problem.plan.row_block_bytes, n // 2, n, _ROWS):
            threshold = np.full(width, -1.0 - self.problem.parameters.near, np.float32)
            began = time.perf_counter()
            best = BestRows(
                one, begins, begins + 2, np.zeros(width, np.int64), np.empty(2 * width, np.float32),
                np.empty(2 * width, np.int32), threshold,
            )  # fmt: skip
            search(
                CSR.of(x), Labels.of(y), 0, 0, np.full(1, -1, np.int16), tile, ActiveAhead(none, none, np.empty(0, np.int32)),
                best, LossSums(loss, grid, np.ones(width), bias_losses(tile.bias, loss, grid), np.zeros(width), np.empty(0)),
                fours,
            )  # fmt: skip
            rows, took = rows + x.n, took + time.perf_counter() - began
            if took > seconds:
                break
        return took / max(rows, 1) / width

    def _stream(self, X: SparseMatrix, Y: SparseMatrix) -> float:
        """Seconds of a byte that is streamed, while nothing else is done: the median of some places, one in few rows."""
        n_lines, rates = X.n_lines, []
        n = max(1, int(_STREAMED / (8 * X.nnz / max(n_lines, 1) + 8)))
        places = max(1, min(_PLACES, n_lines // (2 * n)))
        for place in range(1, places + 1):
            end, before = max(1, n_lines * place // (places + 1)), X.bytes_read + Y.bytes_read
            began = time.perf_counter()
            for _ in stream((X, Y), self.problem.plan.row_block_bytes, max(0, end - n), end):
                pass
            rates.append((time.perf_counter() - began) / max(X.bytes_read + Y.bytes_read - before, 1))
        return float(np.median(rates))
