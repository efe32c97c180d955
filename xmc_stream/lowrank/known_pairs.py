"""Pairs of some rows and labels over which losses of low-rank models are taken: all of them, or given ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.products import add_transposed, multiply
from xmc_stream.lowrank.kernels.steps import are_true, pair_dots
from xmc_stream.lowrank.solver import Array
from xmc_stream.store.matrix import Block

LOSS_UNIT = 2.0**-32  # losses are summed as whole numbers of it, in any order


def loss_units(values: Array) -> int:
    """The sum of losses, each rounded to whole units."""
    return int(np.rint(values / LOSS_UNIT).astype(np.int64).sum())


@dataclass(frozen=True)
class AllPairs:
    """All pairs of some rows and labels. true (n x k). held_out: which rows do not count; None where all do."""

    true: NDArray[np.bool_]
    held_out: NDArray[np.bool_] | None

    def dots(self, left: Array, right: Array) -> Array:
        """left_i . right_k of each pair."""
        return np.asarray(left @ right.T)

    def by_row(self, weights: Array, right: Array) -> Array:
        """sum_k weights_ik right_k."""
        return np.asarray(weights @ right)

    def add_by_label(self, weights: Array, left: Array, out: Array) -> None:
        """out_k += sum_i weights_ik left_i."""
        out += weights.T @ left

    def label_sums(self, values: Array, n: int) -> Array:
        """Sums of values over the rows, of n labels."""
        return np.asarray(values.sum(axis=0))

    def loss_units(self, values: Array) -> int:
        """The sum of values, in units; the block is the same under every plan, so it is rounded as a whole."""
        return loss_units(values.sum(keepdims=True))


@dataclass(frozen=True)
class GivenPairs:
    """Given pairs of some rows and labels: a csr pattern, and true of each entry. held_out: which entries do not count."""

    indptr: NDArray[np.int64]
    labels: Array
    true: NDArray[np.bool_]
    held_out: NDArray[np.bool_] | None

    def dots(self, left: Array, right: Array) -> Array:
        """left_i . right_k of each pair."""
        out = np.empty(len(self.labels), left.dtype)
        pair_dots(self.indptr, self.labels, left, right, out)
        return out

    def by_row(self, weights: Array, right: Array) -> Array:
        """sum_k weights_ik right_k."""
        out = np.empty((len(self.indptr) - 1, right.shape[1]), right.dtype)
        multiply(self.indptr, self.labels, weights, right, out)
        return out

    def add_by_label(self, weights: Array, left: Array, out: Array) -> None:
        """out_k += sum_i weights_ik left_i."""
        add_transposed(self.indptr, self.labels, weights, left, out)

    def label_sums(self, values: Array, n: int) -> Array:
        """Sums of values over the rows, of n labels."""
        return np.bincount(self.labels, values, n)

    def loss_units(self, values: Array) -> int:
        """The sum of values, in units, each rounded by itself: a plan may cut rows into other blocks."""
        return loss_units(values)


Pairs = AllPairs | GivenPairs


def counted(pairs: Pairs, values: Array) -> Array:
    """Values of pairs, with 0 for those of rows that are held out."""
    if pairs.held_out is not None:
        values[pairs.held_out] = 0
    return values


def given_pairs(
    indptr: NDArray[np.int64], labels: Array, true: NDArray[np.bool_], held_out: NDArray[np.bool_] | None
) -> GivenPairs:
    """The given pairs of some rows. held_out: rows."""
    return GivenPairs(indptr, labels, true, None if held_out is None else np.repeat(held_out, np.diff(indptr)))


def positives_of(mask: Block, y: Block) -> NDArray[np.bool_]:
    """Which pairs of a mask are positives."""
    true = np.empty(len(mask.indices), np.bool_)
    are_true(mask.indptr, mask.indices, y.indptr, y.indices, true)
    return true


def dense_labels(y: Block, first: int, last: int) -> NDArray[np.bool_]:
    """Which of the labels [first, last) each row of a block has."""
    rows = np.repeat(np.arange(y.n), np.diff(y.indptr))
    mine = (y.indices >= first) & (y.indices < last)
    out = np.zeros((y.n, last - first), np.bool_)
    out[rows[mine], y.indices[mine] - first] = True
    return out
