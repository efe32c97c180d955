"""The exact oracles, over sparse class vectors and over dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.mips.kernels.classvectors import RankedRows
from xmc_stream.mips.kernels.innerproducts import Best, Excluded, RowTile, fill_tile, scan
from xmc_stream.mips.oracle import Oracle, no_best
from xmc_stream.mips.vectors import ClassVectors, DenseVectors
from xmc_stream.system.blas import one_blas_thread

ROWS = 8192  # of a tile: a class's scores take 32 KiB, and each pass over all vectors serves as many rows
HEAVY = 12  # a feature that one in so many rows has is a dense column
_BLOCK = 512  # dense rows and classes that are multiplied at a time


class _Scanning(Oracle):
    """An oracle that scans all classes in ranges, one a thread, and needs no index."""

    def __init__(
        self, vectors: ClassVectors | DenseVectors, seed: int = 0, threads: int = 1, *, by_norm: bool = False
    ) -> None:
        super().__init__(vectors, seed, threads)
        self.by_norm = by_norm

    def refresh(self, classes: NDArray[Any]) -> None:
        """Nothing is kept."""

    def _factors(self) -> NDArray[np.float32]:
        """1 / ||w_c|| of each class; none, where scores are not divided by it."""
        if not self.by_norm:
            return np.empty(0, np.float32)
        norms = np.sqrt(self.vectors.squares)
        return (1.0 / np.where(norms > 0.0, norms, 1.0)).astype(np.float32)

    def _merge(self, first: int, last: int, found: list[Best], best: Best) -> None:
        """The best of what ranges of classes, ascending, found for the rows [first, last)."""
        for part in found:
            better = part.scores > best.scores[first:last]
            best.scores[first:last][better] = part.scores[better]
            best.classes[first:last][better] = part.classes[better]


def _by_class(first: int, last: int, excluded: Labels) -> Excluded:
    """The pairs that rows [first, last) exclude, by class."""
    begin, end = excluded.indptr[first], excluded.indptr[last]
    order = np.argsort(excluded.indices[begin:end], kind="stable")
    lines = np.repeat(np.arange(last - first), np.diff(excluded.indptr[first : last + 1]))
    return Excluded(excluded.indices[begin:end][order], lines[order])


class Exact(_Scanning):
    """Scores every class whose vector shares a feature with any row, over tiles of rows that are stored by feature.

    score(c, x) = sum_j w_cj x_j in float32, added in the order of features by a fixed hash. It costs a look at each entry of
    all vectors for every 8,192 rows, and the multiply-adds where a class and a row share a feature.

    Parameters
    ----------
    vectors : ClassVectors
        The classes.
    seed, threads : int
        As of `Oracle`; each thread takes a range of the classes.
    by_norm : bool, default False
        Whether scores are divided by the norms of the vectors: by the cosine, the norms of rows left out.
    """

    name = "exact"

    @staticmethod
    def bytes_of(n_features: int, n_entries: int, threads: int = 1, n_classes: int = 0) -> int:
        """Bytes that a query holds beside its rows, its answers and the vectors; n_entries: of the largest tile of rows.

        n_classes: counts what is held for a moment for each class.
        """
        return 12 * n_features + 4 * HEAVY * n_entries + 12 * ROWS * threads + 32 * n_classes

    def _tile(self, first: int, last: int, rows: RankedRows) -> RowTile:
        n = last - first
        features = rows.features[rows.indptr[first] : rows.indptr[last]]
        counts = np.bincount(features, minlength=self.vectors.n_features)
        least = 1 - (-n // HEAVY)  # the least count of a heavy feature
        heavy, light = np.flatnonzero(counts >= least), np.flatnonzero((counts > 0) & (counts < least))
        column = np.zeros(self.vectors.n_features, np.int32)
        column[light], column[heavy] = np.arange(1, len(light) + 1), -np.arange(1, len(heavy) + 1)
        indptr = np.concatenate([[0], np.cumsum(counts[light])])
        tile = RowTile(
            column, indptr, np.empty(indptr[-1], np.uint16), np.empty(indptr[-1], np.float32),
            np.zeros((len(heavy), n), np.float32),
        )  # fmt: skip
        fill_tile(first, last, rows, indptr[:-1].copy(), tile)
        return tile

    def _find(self, rows: RankedRows, excluded: Labels, best: Best) -> None:
        tables, factors = self.vectors.tables, self._factors()
        # ranges of about as many entries, and as many comparisons
        work = np.cumsum(self.vectors.n_entries.astype(np.int64) + 64)
        bounds = np.searchsorted(work, np.linspace(0, work[-1], self.threads + 1)[1:-1])
        bounds = np.concatenate([[0], bounds, [self.n_classes]])
        for first in range(0, len(best.classes), ROWS):
            last = min(first + ROWS, len(best.classes))
            tile, barred = self._tile(first, last, rows), _by_class(first, last, excluded)

            def some(
                begin: int, end: int, n: int = last - first, tile: RowTile = tile, barred: Excluded = barred
            ) -> Best:
                found = no_best(n)
                scan(begin, end, tables, tile, barred, factors, np.empty(n, np.float32), found)
                return found

            self._merge(first, last, self._on_threads(some, bounds), best)
        self.scored += len(best.classes) * int(np.count_nonzero(self.vectors.n_entries))


class DenseExact(_Scanning):
    """Scores every class, over dense vectors: what `SimpleLSH` is compared with.

    Scores are matrix products of fixed blocks, by BLAS in one thread, so that they are the same for any number of threads.

    Parameters
    ----------
    vectors : DenseVectors
        The classes.
    seed, threads : int
        As of `Oracle`; each thread takes a range of the blocks of classes.
    by_norm : bool, default False
        As of `Exact`.
    """

    name = "dense-exact"

    @staticmethod
    def bytes_of(threads: int = 1) -> int:
        """Bytes that a query holds beside its rows and the vectors."""
        return _BLOCK * (4 * _BLOCK + 16) * threads

    def _find(self, rows: NDArray[np.float32], excluded: Labels, best: Best) -> None:
        factors, zero = self._factors(), self.vectors.zero
        barrier = np.where(zero, np.float32(-np.inf), np.float32(0.0))
        for first in range(0, len(rows), _BLOCK):
            last = min(first + _BLOCK, len(rows))
            x, barred = np.ascontiguousarray(rows[first:last], np.float32), _by_class(first, last, excluded)

            def some(begin: int, end: int, x: NDArray[np.float32] = x, barred: Excluded = barred) -> Best:
                found, lines = no_best(len(x)), np.arange(len(x))
                for low in range(_BLOCK * begin, min(_BLOCK * end, self.n_classes), _BLOCK):
                    high = min(low + _BLOCK, self.n_classes)
                    scores = x @ self.vectors.values[low:high].T
                    if self.by_norm:
                        scores *= factors[low:high]
                    scores += barrier[low:high]
                    pairs = slice(*np.searchsorted(barred.classes, [low, high]))
                    scores[barred.lines[pairs], barred.classes[pairs] - low] = -np.inf
                    at = scores.argmax(axis=1)
                    better = np.flatnonzero(scores[lines, at] > found.scores)
                    found.classes[better], found.scores[better] = low + at[better], scores[better, at[better]]
                return found

            with one_blas_thread():
                self._merge(first, last, self._on_threads(some, self._cuts(-(-self.n_classes // _BLOCK))), best)
        self.scored += len(rows) * int(np.count_nonzero(~zero))
