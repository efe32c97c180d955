"""The state of a unit of classes after a round: active sets, weights, and statistics of each class, a line of numbers.

Scratch of one run: written whole or not at all, read by the next jobs, removed when no job needs it any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.kernels.penalty import ONCE
from xmc_stream.ppdsparse.candidates import CandidateRows, holding
from xmc_stream.ppdsparse.parameters import DOUBLINGS, FAR, PATIENCE, ROUNDING, PPDSparseParameters
from xmc_stream.store.chunks import read_small
from xmc_stream.store.encoding import PackedMatrixWriter, PackWriter, new_pack
from xmc_stream.store.matrix import SparseMatrix

# columns of a state's statistics, one row a class; ROOM: how many rows the next search may bring; MARK: a gap of before;
# FRESH: 1 for a class that began from nothing beside those of a warm start
BIAS, DUAL, KEPT, INSIDE, OUTSIDE, LOSS, STATUS, ROOM, MARK, FRESH, N_STATISTICS = range(11)
OPEN, DONE, EMPTY = 0.0, 1.0, 2.0  # values of STATUS: still to solve; not any more; nothing to be learned
SURE = 1e6  # the score of a class that every training row is positive for
WRITER_BYTES = 12 * 2**20  # of a state and one of large classes: a chunk of each array, copies of what is appended


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
    exact: bool = True,
    of_classes: NDArray[np.float64] = ONCE.classes,
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
    if len(of_classes):  # searches count positives as many times more than negatives
        losses *= of_classes[:, 0]
    statistics[open_, LOSS] = losses[open_]
    statistics[open_, OUTSIDE] = np.maximum(best[open_] + 1.0, 0.0)
    close_classes(statistics, ~parameters.violates(best), parameters, round_)
    return n_found


def close_classes(
    statistics: NDArray[np.float64], complete: NDArray[np.bool_] | bool, parameters: PPDSparseParameters, round_: int
) -> None:
    """Say of open classes whether they are done, after so many rounds; losses are known.

    complete: whether no row outside the active set violates.
    """
    done = complete & (statistics[:, INSIDE] <= parameters.tol)
    objective = statistics[:, KEPT] + parameters.C * statistics[:, LOSS]
    gap = objective + statistics[:, DUAL]
    if parameters.common_rounds is not None:
        done |= (gap <= FAR * objective) & (round_ >= parameters.own_rounds(statistics[:, FRESH] > 0))
    elif round_ and round_ % PATIENCE == 0:
        if round_ > PATIENCE * DOUBLINGS:  # epochs are as many as they will be
            done |= gap > statistics[:, MARK] / 2
        # scores are float32: a gap that rounding hides, or turns below zero, cannot be seen to halve
        done |= (round_ > PATIENCE) & (gap <= ROUNDING * objective)
        statistics[:, MARK] = gap
    statistics[(statistics[:, STATUS] == OPEN) & done, STATUS] = DONE
