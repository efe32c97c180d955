"""The state of a unit of classes after a round: active sets, weights, and statistics of each class, a line of numbers.

Scratch of one run: written whole or not at all, read by the next jobs, removed when no job needs it any more. Here is how it
lies on disk, what a search changes in it, the active sets of the next round that are made of it, and what becomes of it: a
unit's of those of its shares, the model's of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.linear.tiles import EIGHTH, TileSizes
from xmc_stream.linear.weights import HALF_LEAST, SURE, Unit, half_holds, new_unit, tiles_of
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.candidates import (
    CandidateRows,
    Found,
    candidate_windows,
    holding,
    read_candidates,
    select_threshold,
)
from xmc_stream.ppdsparse.kernels.active import (
    count_before,
    mark,
    marked_rows,
    merge_candidates,
    rank,
    set_signs,
    start_sets,
)
from xmc_stream.ppdsparse.parameters import APPROXIMATE, DOUBLINGS, FAR, PATIENCE, ROUNDING, PPDSparseParameters
from xmc_stream.ppdsparse.plan import held_rows
from xmc_stream.ppdsparse.problem import Problem, Share
from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedMatrixWriter, PackWriter, new_pack
from xmc_stream.store.matrix import SparseMatrix

# columns of a state's statistics, one row a class; ROOM: how many rows the next search may bring; MARK: a gap of before;
# FRESH: 1 for a class that began from nothing beside those of a warm start
BIAS, DUAL, KEPT, INSIDE, OUTSIDE, LOSS, STATUS, ROOM, MARK, FRESH, N_STATISTICS = range(11)
OPEN, DONE, EMPTY = 0.0, 1.0, 2.0  # values of STATUS: still to solve; not any more; nothing to be learned
Weights = tuple[NDArray[Any], NDArray[np.float32], float]  # of a class: features, values, bias


class UnitStateWriter:
    """active: classes x N (csr), its values alpha; weights: D x classes (csc); statistics: classes x N_STATISTICS."""

    def __init__(self, pack: PackWriter, n_classes: int, n_samples: int, n_features: int) -> None:
        self.active = PackedMatrixWriter(pack, "active", "csr_matrix", (n_classes, n_samples), np.float64)
        self.weights = PackedMatrixWriter(pack, "weights", "csc_matrix", (n_features, n_classes), np.float32)
        self.statistics = np.zeros((n_classes, N_STATISTICS))

    def copy(self, state: UnitState, low: int, high: int) -> None:
        """Lines [low, high) of another state as the next ones: active sets and weights."""
        self.active.copy(state.active, low, high)
        self.weights.copy(state.weights, low, high)

    def add_empty(self, n: int) -> None:
        """Classes of which nothing is to be learned."""
        self.active.append(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0))
        self.weights.append(np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))


@contextmanager
def new_unit_state(
    path: Path, n_classes: int, n_samples: int, n_features: int, durable: bool = True
) -> Iterator[UnitStateWriter]:
    """A unit's state after a round, a pack, under its name when the block ends well."""
    with new_pack(path, durable) as pack:
        writer = UnitStateWriter(pack, n_classes, n_samples, n_features)
        yield writer
        writer.active.close()
        writer.weights.close()
        pack.write("statistics", writer.statistics.ravel())


class UnitState:
    """A unit's state, opened for reading. Raises StoreError where it is not one of so many classes, samples and features."""

    def __init__(self, path: Path, n_classes: int, n_samples: int, n_features: int) -> None:
        self.path = path
        self.statistics = read_small(path, "statistics", n_classes * N_STATISTICS, np.float64).reshape(-1, N_STATISTICS)
        self.active = SparseMatrix(path / "active").expect((n_classes, n_samples), "csr_matrix", np.float64)
        self.weights = SparseMatrix(path / "weights").expect((n_features, n_classes), "csc_matrix", np.float32)


def set_known(statistics: NDArray[np.float64], counts: NDArray[np.int64], n_samples: int) -> None:
    """The statistics of classes of which nothing is to be learned: without positives they score -inf, with every row SURE."""
    for known, score in ((counts == 0, -np.inf), (counts == n_samples, SURE)):
        statistics[known] = 0.0
        statistics[known, STATUS], statistics[known, BIAS] = EMPTY, score


def update_statistics(
    statistics: NDArray[np.float64],
    searched: Sequence[CandidateRows],
    first: int,
    parameters: PPDSparseParameters,
    round_: int,
    of_classes: NDArray[np.float64],
    exact: bool = True,
) -> NDArray[np.int64]:
    """Enter what the search of a round saw of the classes first, first + 1, ...: losses, violations outside; who is done.

    statistics (n, N_STATISTICS) is changed in the rows of open classes. Losses are whole multiples of a power of two
    (`ppdsparse.kernels.search.loss_grid`), so that neither sums nor what is decided by them depend on the cut into files.
    Returns how many rows were found for each class. A search that is not exact enters nothing. of_classes: `Times.classes`,
    whose first column losses count.
    """
    n = len(statistics)
    n_found, losses, best = np.zeros(n, np.int64), np.zeros(n), np.full(n, -np.inf)
    for found, low, high in holding(searched, first, first + n):
        mine = slice(low - first, high - first)
        n_found[mine] += found.of_classes("counts", low, high)
        losses[mine] += found.of_classes("losses", low, high)
        best[mine] = np.maximum(best[mine], found.of_classes("best", low, high))
        found.close_files()
    if not exact:
        return n_found
    open_ = statistics[:, STATUS] == OPEN
    # searches count positives as many times more than negatives
    statistics[open_, LOSS] = (losses * of_classes[:, 0])[open_]
    statistics[open_, OUTSIDE] = np.maximum(best[open_] + 1.0, 0.0)
    close_classes(statistics, ~parameters.violates(best), parameters, round_)
    return n_found


def objective_and_gap(statistics: NDArray[np.float64], C: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The objective of each class, and its duality gap; losses are known."""
    objective = statistics[:, KEPT] + C * statistics[:, LOSS]
    return objective, objective + statistics[:, DUAL]


def close_classes(
    statistics: NDArray[np.float64], complete: NDArray[np.bool_] | bool, parameters: PPDSparseParameters, round_: int
) -> None:
    """Say of open classes whether they are done, after so many rounds; losses are known.

    complete: whether no row outside the active set violates.
    """
    done = complete & (statistics[:, INSIDE] <= parameters.tol)
    objective, gap = objective_and_gap(statistics, parameters.C)
    if parameters.common_rounds is not None:
        done |= (gap <= FAR * objective) & (round_ >= parameters.own_rounds(statistics[:, FRESH] > 0))
    elif round_ and round_ % PATIENCE == 0:
        if round_ > PATIENCE * DOUBLINGS:  # epochs are as many as they will be
            done |= gap > statistics[:, MARK] / 2
        # scores are float32: a gap that rounding hides, or turns below zero, cannot be seen to halve
        done |= (round_ > PATIENCE) & (gap <= ROUNDING * objective)
        statistics[:, MARK] = gap
    statistics[(statistics[:, STATUS] == OPEN) & done, STATUS] = DONE


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


def next_search(path: Path, unit: Unit, dataset: Dataset, parameters: PPDSparseParameters) -> Receipt:
    """Of the job that wrote a unit's state: how many classes are open, and what the search after it needs for them.

    The sizes of tiles are exact; a tile of fewer weights, for an approximate search, is smaller. Searches hold open classes
    alone, so one tile is enough for a wide unit too.
    """
    n, n_features = unit.last - unit.first, dataset.n_features
    state = UnitState(path, n, dataset.n_samples, n_features)
    open_ = state.statistics[:, STATUS] == OPEN
    occurrences = dataset.feature_counts() if parameters.approximate else None
    tiles = TileSizes(*unit, n_features, occurrences, EIGHTH * len(unit.numbers))
    tiles.in_tiles[:] = open_
    for w in state.weights.blocks(max(4 * MIB, 16 * n_features)):
        lengths, mine = np.diff(w.indptr), open_[w.start : w.start + w.n]
        tiles.add(lengths * mine, w.indices if mine.all() else w.indices[np.repeat(mine, lengths)])
    wanted = np.where(open_, state.statistics[:, ROOM], 0)
    active = np.where(open_, np.diff(state.active.ends(0, n)), 0)
    ranges = []
    for span in tiles.ranges:
        of = slice(span.first - unit.first, span.last - unit.first)
        ranges.append([*astuple(span), held_rows(wanted[of]), held_rows(active[of])])
    return {
        "open": int(open_.sum()),
        "nnz": state.weights.nnz,
        "inside": float(state.statistics[open_, INSIDE].max(initial=0.0)),
        "tile_ranges": ranges,
        **({"work": tiles.work} if parameters.approximate else {}),
    }


@dataclass(frozen=True)
class JoinSharesJob:
    """Make the state of a unit after a round of those of its shares, which lie beside it.

    folder: of the round's states. sums: over the receipts of the shares.
    """

    problem: Problem
    round: int
    unit: Unit
    shares: tuple[Share, ...]
    folder: str
    sums: Receipt

    @property
    def key(self) -> str:
        """As of a job that solves the whole unit."""
        return f"solve/{self.round}/{self.unit.name}"

    def run(self) -> Receipt:
        """Copy; the receipt is that of a job that solves the whole unit, without what the shares' receipts say."""
        drop_tiles()
        dataset, path = Dataset(self.problem.data), Path(self.folder) / self.unit.name
        shape = dataset.n_samples, dataset.n_features
        with new_unit_state(path, self.unit.last - self.unit.first, *shape) as writer:
            for share in self.shares:
                state = UnitState(path.with_name(share.name), share.last - share.first, *shape)
                writer.statistics[share.first - self.unit.first : share.last - self.unit.first] = state.statistics
                writer.copy(state, 0, share.last - share.first)
        return {**next_search(path, self.unit, dataset, self.problem.parameters), **self.sums}


@dataclass(frozen=True)
class FinaliseJob:
    """Write a unit of the model from its last state, and what the last search, an exact one, says of its classes.

    prune: below what a weight is left out; half: weights are stored in 16 bits, where that holds them. Objective and gap are
    those of the weights before.
    """

    problem: Problem
    prune: float
    half: bool
    round: int
    unit: Unit
    state: str
    found: Found
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"finalise/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt sums objective, gap and size."""
        drop_tiles()
        first, last = self.unit
        p, dataset = self.problem.parameters, Dataset(self.problem.data)
        n_samples, n_features = dataset.n_samples, dataset.n_features
        state = UnitState(Path(self.state), last - first, n_samples, n_features)
        statistics = state.statistics
        if self.found.files:  # else no class is open, its solve has seen all rows, or it is a trial and nobody asks
            of_classes = self.problem.weights.of_classes(dataset, first, last)
            searched = self.found.open(n_samples)
            update_statistics(statistics, searched, first, p, self.round, of_classes)
        tiles = TileSizes(first, last, n_features)
        least = np.float32(self.prune)
        half = self.half and half_holds(values for *_, values in self._weights(state, least))
        if half:
            least = max(least, HALF_LEAST)
        with new_unit(Path(self.out), n_features, last - first, np.float16 if half else np.float32) as writer:
            for lengths, features, values in self._weights(state, least):
                writer.weights.append(lengths, features, values)
                tiles.add(lengths, features)
            writer.bias[:] = statistics[:, BIAS]
            objective, gap = objective_and_gap(statistics, p.C)
            violation = np.maximum(statistics[:, INSIDE], statistics[:, OUTSIDE])
            figures = {"objective": objective, "duality_gap": gap, "violation": violation}
            writer.statistics = {name: values.astype(np.float32) for name, values in figures.items()}
        learned = statistics[:, STATUS] != EMPTY
        relative = gap[learned] / objective[learned]
        return {
            "nnz": writer.weights.nnz,
            "float16": writer.weights.nnz if half else 0,
            "tile_ranges": [astuple(span) for span in tiles.ranges],
            "learned": int(learned.sum()),
            "open": int((violation[learned] > p.tol).sum()),
            "objective": float(objective.sum()),
            "gap_worst": float(relative.max(initial=0.0)),
            "gap_sum": float(relative.sum()),
            "violation": float(violation[learned].max(initial=0.0)),
        }

    def _weights(
        self, state: UnitState, least: np.float32
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]]:
        """Of some classes at a time, the weights of at least that size: how many each has, their features, values."""
        for block in state.weights.blocks(max(4 * MIB, 16 * state.weights.shape[0])):
            lengths, features, values = np.diff(block.indptr), block.indices, block.values
            if least > 0:
                kept = np.flatnonzero(np.abs(values) >= least)
                lengths = np.diff(np.searchsorted(kept, block.indptr))
                features, values = features[kept], values[kept]
            yield lengths, features, values


def figures_of(receipts: Sequence[Receipt], n_labels: int) -> dict[str, Any]:
    """What a model says of all its units. receipts: of their jobs."""
    learned = sum(receipt["learned"] for receipt in receipts)
    return {
        "nnz": sum(receipt["nnz"] for receipt in receipts),
        "tiles": tiles_of(receipts),
        "objective": math.fsum(receipt["objective"] for receipt in receipts),
        "duality_gap": max(receipt["gap_worst"] for receipt in receipts),
        "duality_gap_mean": math.fsum(receipt["gap_sum"] for receipt in receipts) / max(learned, 1),
        "violation": max(receipt["violation"] for receipt in receipts),
        "n_open": sum(receipt["open"] for receipt in receipts),
        "n_empty": n_labels - learned,
    }
