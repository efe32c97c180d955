"""Scores of labels that groups of labels have a say in: how sure a label is, and how sure the groups that it is in.

A row's score z of a label and its scores z_1 ... z_R of the groups that the label is in, one of each clustering, give

    1 + h(z) - w/R sum_r d_r^3        h(z) = -(1 - z)^3 below 1, (z - 1) / 100 from there on
                                      d_r = min((1 - z_r)_+, 1.15), the doubt of a group

It rises with z. A group takes 1.15^3 w/R at most, so that one that is wrong about a row can be outvoted. Where the groups
are sure (z_r >= 1) and there is no more doubt than z = 0, it is 0 or more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.linear.kernels.scores import Tile, chunks, in_fours, score_all, score_fours

MOST_DOUBT = np.float32(1.15)  # of a group
BEYOND = np.float32(0.01)  # slope from 1 on: enough to order labels that are sure
_NEAR = 1e-3  # that a bound on a score lies below what it bounds, relative: rounding is far smaller

NO_GROUPS: NDArray[np.uint8] = np.empty((0, 0), np.uint8)


def no_terms(n_rows: int) -> NDArray[np.float32]:
    """What the groups say of some rows where there are none."""
    return np.empty((n_rows, 0), np.float32)


@inner_kernel
def sureness(z: np.float32) -> np.float32:
    """1 + h(z)."""
    one = np.float32(1.0)
    if z >= one:
        return np.float32(one + BEYOND * (z - one))
    doubt = one - z
    return np.float32(max(one - doubt * doubt * doubt, UNSEEN))


@inner_kernel
def guided(z: np.float32, c: int, i: int, terms: NDArray[np.float32], groups: NDArray[np.uint8]) -> np.float32:
    """The score of class c of a tile for row i of a block. groups (R, classes): of each class, by clustering."""
    total = sureness(z)
    for r in range(groups.shape[0]):
        total += terms[i, groups[r, c]]
    return np.float32(total)


@kernel
def guide_row(scores: NDArray[np.float32], i: int, terms: NDArray[np.float32], groups: NDArray[np.uint8]) -> None:
    """Scores of all classes of a tile into guided ones, in place; without groups they stay as they are."""
    if groups.shape[0]:
        for c in range(groups.shape[1]):
            scores[c] = guided(scores[c], c, i, terms, groups)


def group_terms(x: CSR, tile: Tile, weight: np.float32, terms: NDArray[np.float32]) -> None:
    """terms[i, g] = -weight min((1 - z)_+, 1.15)^3, z the score of row i for group g.

    weight: w/R. The tile holds the groups' weights.
    """
    n, n_features, width = len(x.indptr) - 1, len(tile.start) - 1, len(tile.bias)
    fours = in_fours(n, n_features, int(x.indptr[n] - x.indptr[0]))
    for low, high, lines, scores in chunks(x, n_features, width, fours):
        if len(lines):
            score_fours(lines, tile, 0, np.full(len(lines), width), scores)
        _terms(CSR(x.indptr[low : high + 1], x.indices, x.values), tile, scores, weight, terms[low:high])


@kernel
def _terms(x: CSR, tile: Tile, scored: NDArray[np.float32], weight: np.float32, terms: NDArray[np.float32]) -> None:
    """See `group_terms`. scored: the scores of the rows, or of no length where they are to be scored."""
    indptr, indices, data = x
    start, slots, weights, bias = tile
    scores = np.empty(len(bias), np.float32)
    for i in range(len(indptr) - 1):
        if len(scored):
            scores[:] = scored[i, : len(scores)]
        else:
            score_all(indptr[i], indptr[i + 1], indices, data, start, slots, weights, bias, scores)
        for g in range(terms.shape[1]):
            doubt = min(max(np.float32(1.0) - scores[g], np.float32(0.0)), MOST_DOUBT)
            terms[i, g] = -weight * (doubt * doubt * doubt)


@inner_kernel
def least_score(worst: np.float32, i: int, terms: NDArray[np.float32], n_clusterings: int) -> np.float32:
    """A number that z exceeds for every class whose guided score for row i exceeds `worst`, whatever groups it is in."""
    at_most = np.float64(0.0)  # of what groups add
    n = terms.shape[1] // n_clusterings
    for r in range(n_clusterings):
        best = terms[i, r * n]
        for g in range(r * n + 1, (r + 1) * n):
            best = max(best, terms[i, g])
        at_most += best
    short = 1.0 + at_most - worst  # (1 - z)^3 is below it, or z is 1 or more
    if not short > 0.0:
        return np.float32(1.0 - _NEAR)
    return np.float32(1.0 - _NEAR - np.cbrt(short) * (1.0 + _NEAR))
