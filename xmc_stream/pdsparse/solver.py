"""PD-Sparse: max-margin learning of all classes at once, by fully-corrective block-coordinate Frank-Wolfe steps.

Yen, Huang, Zhong, Ravikumar, Dhillon: PD-Sparse, ICML 2016.

    min_W  sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i max_{n in N_i, p in P_i} (1 + z_in - z_ip)_+,   z_i = W^T x_i

A step takes one sample: a search brings in the labels that violate most, and the dual variables of its active labels are
set to their best. This module covers the steps on rows in memory. Parameters, passes and files are in
`pdsparse.parameters` and `pdsparse.run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels import order
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.domains import LABEL_NUMBERS, PASSES
from xmc_stream.kernels.order import GROUP
from xmc_stream.kernels.permutation import key_of, visiting_order
from xmc_stream.pdsparse.kernels.dual import packed, sum_negatives
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels, Visit, visit_rows
from xmc_stream.pdsparse.kernels.tables import new_tables
from xmc_stream.pdsparse.parameters import PDSparseParameters

_STEP_WORK = 16  # a look at v takes as long as so many weights of a search
PLACES = 1 << 19  # of v that are remembered for a row at a time, at most
_STRIP_BYTES, _STRIP_BITS = 1 << 17, 7  # of a strip of rows, on average, and rows at most (log2)


def strip_bits(n_samples: int, nnz: int) -> int:
    """Rows of a strip, log2: a matter of the data alone."""
    return order.strip_bits(n_samples, nnz, _STRIP_BYTES, _STRIP_BITS)


def n_groups(n_samples: int, nnz: int) -> int:
    """Groups of strips that a pass takes in turn."""
    n_strips = -(-n_samples >> strip_bits(n_samples, nnz))
    return -(-n_strips // GROUP)


def label_numbers(n_labels: int, seed: int) -> NDArray[np.int64]:
    """The number of each label in a random permutation, under which the tables know it."""
    numbers = np.empty(n_labels, np.int64)
    visiting_order(0, n_labels, np.uint64(key_of(seed, LABEL_NUMBERS, 0, 0)), numbers)
    return numbers


def pass_key(seed: int, stage: int, number: int) -> np.uint64:
    """The key of a pass's order and draws."""
    return np.uint64(key_of(seed, PASSES, stage, number))


def more_labels(most: int, searched: int, stepped: int, bound: int) -> int:
    """Labels that searches of the next pass may bring in, at most `bound`: twice as many after one that mostly searched.

    searched, stepped: weights that searches and steps met; counted, as a time would make the model a matter of chance.
    """
    return min(2 * most, bound) if searched > 2 * _STEP_WORK * stepped else most


class TablesFullError(Exception):
    """The tables do not hold what a step would put there."""


class Stretch(NamedTuple):
    """Rows that are visited together.

    members: which they are of the rows whose active labels are at hand, ascending; at: places in members, in the order of
    visits; numbers: of the members' rows in X, for their draws; n_positive: labels that each has.
    """

    members: NDArray[np.int64]
    at: NDArray[np.int64]
    numbers: NDArray[np.int64]
    n_positive: NDArray[np.int64]


class Stepper:
    """Takes steps on rows in memory: the tables, and scratch.

    most_bytes: of tables; 0 for dense vectors. sums: of the rows visited so far (see `take_sums`).
    """

    def __init__(
        self, n_features: int, n_labels: int, parameters: PDSparseParameters, lam: float, rate: int, most_bytes: int
    ) -> None:
        self.tables = new_tables(n_features, n_labels, min(parameters.parts, n_labels), lam, most_bytes)
        self.C, self.rate, self.z = float(parameters.C), rate, np.zeros(n_labels, np.float32)
        self._places = np.empty(0, np.int64)
        self._reset()

    def _reset(self) -> None:
        self._work, self._largest = np.zeros(2, np.int64), np.zeros(1)
        self._sums = np.zeros(4)

    def visit(
        self, stretch: Stretch, key: np.uint64, block: Any, state: ActiveLabels, most: int, fixed: bool,
        make_room: Callable[[], None] | None = None,
    ) -> ActiveLabels:  # fmt: skip
        """Visit the rows of a block; returns their active labels then, in the block's order.

        key: of the pass; most, fixed: see `Visit`; make_room: packs the tables where they are full of regions that were left.
        Raises TablesFullError.
        """
        members, at, numbers, n_positive = stretch
        n, sets = len(members), packed(state, members, most)
        longest, room = int(np.diff(block.indptr).max(initial=0)), int(sets.size.max(initial=0)) + most
        if len(self._places) < min(longest * room, PLACES):
            self._places = np.empty(min(longest * room, PLACES), np.int64)
        x, how = CSR.of(block), Visit(self.C, self.rate, most, longest, room, fixed)
        done, full = 0, -1
        while True:
            done += visit_rows(
                at[done:], numbers, key, x, sets, n_positive, self.tables, how, self.z, self._places, self._work,
                self._largest,
            )  # fmt: skip
            if done == n:
                break
            if make_room is None or full == done:
                raise TablesFullError
            make_room()
            full = done
        negatives, active, used = sum_negatives(sets, n_positive)
        self._sums += [n, negatives, active, used]
        return sets

    def take_sums(self) -> dict[str, Any]:
        """Of the rows visited since the last call: how many, sums over them, weights met, the largest step."""
        rows, negatives, active, used = self._sums.tolist()
        sums = {
            "rows": int(rows), "negatives": negatives, "active": int(active), "used": int(used),
            "searched": int(self._work[0]), "stepped": int(self._work[1]), "largest": float(self._largest[0]),
        }  # fmt: skip
        self._reset()
        return sums
