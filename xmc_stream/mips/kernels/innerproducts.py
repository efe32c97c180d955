"""The best class of each row: by exact search, class after class over rows that are stored by feature, or a drawn one.

Scores are float32, added in the order of ranks (`mips.kernels.classvectors`). A product with a stored zero changes no sum, so a
column of the rows may be dense or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.permutation import key_of
from xmc_stream.mips.kernels.classvectors import EMPTY, ClassTables, Int, RankedRows, feature_of, length


class RowTile(NamedTuple):
    """Rows by feature. column (D,): 0 for a feature that no row has, l + 1 for light column l, -(h + 1) for heavy column h.

    Light column l has the entries [indptr[l], indptr[l + 1]) of lines and values; heavy (n_heavy, rows).
    """

    column: NDArray[np.int32]
    indptr: NDArray[np.int64]
    lines: NDArray[np.uint16]
    values: NDArray[np.float32]
    heavy: NDArray[np.float32]


class Excluded(NamedTuple):
    """Pairs (class, row of the tile) that are no answers, by class ascending."""

    classes: NDArray[np.int32]
    lines: NDArray[np.int64]


class Best(NamedTuple):
    """The best class of each row so far, -1 if none, and its score, w_c.x in float32 (-inf if none)."""

    classes: NDArray[np.int32]
    scores: NDArray[np.float32]


@inner_kernel
def offer(c: Int, score: np.float32, i: Int, excluded: Labels, best: Best) -> None:
    """Make a class the best one of row i, where it is better, of equals lower, and the row does not exclude it."""
    if score > best.scores[i] or (score == best.scores[i] and c < best.classes[i]):
        for q in range(excluded.indptr[i], excluded.indptr[i + 1]):
            if excluded.indices[q] == c:
                return
        best.classes[i], best.scores[i] = c, score


@kernel
def fill_tile(first: int, last: int, rows: RankedRows, places: NDArray[np.int64], tile: RowTile) -> None:
    """Put the rows [first, last) into a tile; places (n_light,): where the next entry of each column goes, moved on."""
    for i in range(first, last):
        for p in range(rows.indptr[i], rows.indptr[i + 1]):
            column = tile.column[rows.features[p]]
            if column > 0:
                q = places[column - 1]
                tile.lines[q], tile.values[q] = i - first, rows.values[p]
                places[column - 1] = q + 1
            elif column < 0:
                tile.heavy[-column - 1, i - first] = rows.values[p]


@inner_kernel
def _axpy(w: np.float32, line: Int, x: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    for i in range(len(scores)):
        scores[i] += w * x[line, i]


@inner_kernel
def _keep_best(
    c: Int, excluded: Excluded, at: Int, factors: NDArray[np.float32], scores: NDArray[np.float32], best: Best
) -> int:
    """Compare the scores of a class, times its factor if there are factors, with the best. Moves on in `excluded`.

    Of equals the lower class is kept, which came before.
    """
    if len(factors):
        for i in range(len(scores)):
            scores[i] *= factors[c]
    while at < len(excluded.classes) and excluded.classes[at] <= c:
        if excluded.classes[at] == c:
            scores[excluded.lines[at]] = -np.inf
        at += 1
    classes, of_best = best.classes, best.scores
    for i in range(len(scores)):
        better = scores[i] > of_best[i]
        classes[i] = c if better else classes[i]
        of_best[i] = scores[i] if better else of_best[i]
    return int(at)


@kernel
def scan(
    first: int,
    last: int,
    tables: ClassTables,
    tile: RowTile,
    excluded: Excluded,
    factors: NDArray[np.float32],
    scores: NDArray[np.float32],
    best: Best,
) -> None:
    """The best of the classes [first, last) whose vector is not zero, for each row of a tile.

    factors (K,), or none: of the classes' scores. scores: room for them.
    """
    words, weights = tables.words, tables.values
    column, indptr, lines, values, heavy = tile.column, tile.indptr, tile.lines, tile.values, tile.heavy
    at = int(np.searchsorted(excluded.classes, first))
    for c in range(first, last):
        if tables.bits[c] < 0:
            continue
        scores[:] = 0.0
        for place in range(tables.begin[c], tables.begin[c] + length(np.int64(tables.bits[c]))):
            if words[2 * place] == EMPTY:
                continue
            found, w = column[feature_of(np.int64(words[2 * place]))], weights[2 * place + 1]
            if found > 0:
                for q in range(indptr[found - 1], indptr[found]):
                    scores[lines[q]] += w * values[q]
            elif found < 0:
                _axpy(w, -found - 1, heavy, scores)
        at = _keep_best(c, excluded, at, factors, scores, best)


@kernel
def draw_zero_classes(zero: NDArray[np.int32], excluded: Labels, seed: int, domain: int, step: int, best: Best) -> None:
    """Where a row's best score is 0 or less: one of the zero classes (ascending) that it does not exclude, if any, with 0."""
    for i in range(len(best.classes)):
        if best.classes[i] >= 0 and best.scores[i] > 0.0:
            continue
        barred = np.sort(excluded.indices[excluded.indptr[i] : excluded.indptr[i + 1]])
        places, n = np.empty(len(barred), np.int64), 0  # of the zero classes that it excludes, each once
        for c in barred:
            at = np.searchsorted(zero, c)
            if at < len(zero) and zero[at] == c and (n == 0 or places[n - 1] != at):
                places[n] = at
                n += 1
        if n == len(zero):
            continue
        drawn = np.int64(key_of(seed, domain, step, i) % np.uint64(len(zero) - n))
        for at in places[:n]:  # the drawn one of those that are left
            drawn += at <= drawn
        best.classes[i], best.scores[i] = zero[drawn], 0.0
