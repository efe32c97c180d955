"""Vectors of classes in memory: sparse ones that grow within a budget, and dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.blocks import CSR, CSRBlock
from xmc_stream.mips.kernels import classvectors as kernels
from xmc_stream.mips.kernels.hashing import add_dense, sum_squares
from xmc_stream.system.memory import format_size

CLASS_BYTES = 21  # begin, bits, n and square of a class
ENTRY_BYTES = 22  # of an entry, at most: its table is 3/8 full
_BINS = 1 << 16
_PAIRS = 1 << 12  # of dense vectors and rows that are multiplied at a time


def ranked(block: CSRBlock) -> kernels.RankedRows:
    """Rows, the first from entry 0 on, as kernels of class vectors take them. A feature must not occur twice in a row."""
    indptr = np.ascontiguousarray(block.indptr, np.int64)
    indices, values = np.ascontiguousarray(block.indices, np.int32), np.ascontiguousarray(block.values, np.float32)
    rows = kernels.RankedRows(indptr, np.empty(len(indices), np.uint32), np.empty_like(indices), np.empty_like(values))
    kernels.rank_rows(indptr, indices, values, rows.ranks, rows.features, rows.values)
    return rows


def chosen_rows(rows: kernels.RankedRows, lines: NDArray[np.int64]) -> kernels.RankedRows:
    """Some of the rows, also more than once."""
    begins, sizes = rows.indptr[lines], np.diff(rows.indptr)[lines]
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    places = np.repeat(begins - indptr[:-1], sizes) + np.arange(indptr[-1])
    return kernels.RankedRows(indptr, rows.ranks[places], rows.features[places], rows.values[places])


class ClassVectors:
    """K sparse float32 vectors w_c over D features, 8 bytes a place of their hash tables.

    Places are reserved as one array, and become resident as they are used. A table is 3/8 to 3/4 full, and a region that
    was left is used again, so an entry takes 11 to 22 bytes. What a vector holds is a function of the operations, in their
    order. The order of sums over it is that of features by a fixed hash (`mips.kernels.classvectors`), whatever was done.

    Parameters
    ----------
    n_classes, n_features : int
        K and D.
    most_bytes : int
        Bytes for all of it; D is bounded by 2^31 - 1.

    Raises
    ------
    InputError
        D is too large.
    MemoryLimitError
        The bytes do not hold K empty vectors; raised by operations too, when what they add has no room.

    Examples
    --------
    >>> import numpy as np
    >>> from xmc_stream.kernels.blocks import CSR
    >>> vectors = ClassVectors(3, 10, most_bytes=1 << 16)
    >>> rows = CSR(np.array([0, 2]), np.array([4, 7], np.int32), np.array([1.0, 2.0], np.float32))
    >>> vectors.add(np.array([1]), np.array([0]), np.array([0.5]), ranked(rows))
    >>> vectors.export(np.array([1])).values.tolist(), float(vectors.squares[1])
    ([0.5, 1.0], 1.25)
    """

    def __init__(self, n_classes: int, n_features: int, most_bytes: int) -> None:
        if n_features > kernels.MOST_FEATURES:
            raise InputError(f"class vectors have {kernels.MOST_FEATURES} features at most, not {n_features}")
        self.n_classes, self.n_features, self.most_bytes = n_classes, n_features, most_bytes
        if most_bytes < n_classes * CLASS_BYTES:
            raise self._no_room()
        self.tables = kernels.class_tables(n_classes, most_bytes - n_classes * CLASS_BYTES)
        # (K,): entries of each vector, 0 exactly where it is zero; ||w_c||^2, kept up to date by differences, never below 0.
        # `shrink` sums it anew, and `add` where a row takes it to less than 1e-6 of the largest on the way
        self.n_entries, self.squares = self.tables.n, self.tables.square

    def _no_room(self) -> MemoryLimitError:
        return MemoryLimitError(
            f"the vectors of {self.n_classes} classes need more than the {format_size(self.most_bytes)} that they have: set a "
            "larger " + flags.MEMORY_LIMIT + ", or make them sparser"
        )

    @property
    def zero(self) -> NDArray[np.bool_]:
        """Which vectors are zero (K,)."""
        return np.equal(self.tables.n, 0)

    def add(self, classes: NDArray[Any], lines: NDArray[Any], steps: NDArray[Any], rows: kernels.RankedRows) -> None:
        """w_c += a x_i for each (c, i, a) of classes, lines, steps, in their order; an entry that becomes 0 leaves.

        Raises MemoryLimitError where there is no room; the triples before are done, and some entries of the next.
        """
        c, i = np.ascontiguousarray(classes, np.int32), np.ascontiguousarray(lines, np.int32)
        a, done, slid = np.ascontiguousarray(steps, np.float32), np.zeros(2, np.int64), (-1, -1)
        largest = np.zeros(1)
        while not kernels.add_rows(c, i, a, rows, self.tables, done, largest):
            if slid == (done[0], done[1]):
                self.shrink(c[done[0] : done[0] + 1])  # sums the square of what is done in part
                raise self._no_room()
            slid = int(done[0]), int(done[1])
            placed = np.flatnonzero(self.tables.bits >= 0)  # its regions move together
            kernels.slide(placed[np.argsort(self.tables.begin[placed])], self.tables)

    def put(self, classes: NDArray[Any], rows: kernels.RankedRows) -> None:
        """w_c = x_i for class i of `classes`; raises MemoryLimitError as `add` does."""
        classes = np.ascontiguousarray(classes, np.int32)
        kernels.clear(classes, self.tables)
        self.add(classes, np.arange(len(classes)), np.ones(len(classes)), rows)

    def clear(self, classes: NDArray[Any]) -> None:
        """w_c = 0."""
        kernels.clear(np.ascontiguousarray(classes, np.int32), self.tables)

    def shrink(
        self, classes: NDArray[Any] | None = None, scale: float = 1.0, threshold: float = 0.0, cut: float = 0.0
    ) -> int:
        """w <- soft(scale w, threshold), then 0 where |w| <= cut, of some classes or of all; returns how many entries left."""
        chosen = np.arange(self.n_classes) if classes is None else classes
        numbers = np.float32(scale), np.float32(threshold), np.float32(cut)
        return int(kernels.shrink(np.ascontiguousarray(chosen, np.int32), *numbers, self.tables))

    def scale(self, factor: float) -> None:
        """W *= factor."""
        self.shrink(scale=factor)

    def smallest(self, bound: float) -> float:
        """A magnitude t: the entries |w| <= t are the most, smallest first, whose l2 norm together is at most `bound`.

        `shrink(cut=t)` is the truncation of equation 13 of the paper. Equal magnitudes go together.
        """
        budget, low, width = float(bound) ** 2, 0, 31
        for shift in (15, 0):  # 2^16 ranges of magnitudes, then the magnitudes of the first range that is not cut whole
            counts, squares = np.zeros(_BINS, np.int64), np.zeros(_BINS)
            kernels.magnitudes(self.tables, low, low + (1 << width), shift, counts, squares)
            whole = np.cumsum(squares) <= budget
            cut = _BINS if whole.all() else int(np.argmin(whole))
            if cut == _BINS and shift:
                cut = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
            elif shift:
                budget -= float(squares[:cut].sum())
            low, width = low + (cut << shift), shift
        return float(np.array([max(low - 1, 0)], np.uint32).view(np.float32)[0])

    def dots(self, classes: NDArray[Any], lines: NDArray[Any], rows: kernels.RankedRows) -> NDArray[np.float32]:
        """w_c . x_i of each pair (c, i)."""
        out = np.empty(len(classes), np.float32)
        c, i = np.ascontiguousarray(classes, np.int32), np.ascontiguousarray(lines, np.int32)
        kernels.dots(c, i, rows, self.tables, out)
        return out

    def export(self, classes: NDArray[Any] | None = None) -> CSR:
        """Vectors of some classes, or of all, as rows with ascending features."""
        chosen = np.ascontiguousarray(np.arange(self.n_classes) if classes is None else classes, np.int32)
        indptr = np.concatenate([[0], np.cumsum(self.tables.n[chosen], dtype=np.int64)])
        out = CSR(indptr, np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32))
        kernels.export(chosen, self.tables, *out)
        return out


class DenseVectors:
    """K dense float32 vectors over r coordinates.

    Parameters
    ----------
    n_classes, n_features : int
        K and r.
    most_bytes : int
        Bytes for all of it: 4 K r + 9 K are needed.

    Raises
    ------
    MemoryLimitError
        They do not suffice.
    """

    def __init__(self, n_classes: int, n_features: int, most_bytes: int) -> None:
        needed = n_classes * (4 * n_features + 9)
        if needed > most_bytes:
            raise MemoryLimitError(
                f"dense vectors of {n_classes} classes and {n_features} coordinates need {format_size(needed)}, and have "
                f"{format_size(most_bytes)}: set a larger " + flags.MEMORY_LIMIT + ", or fewer coordinates"
            )
        self.n_classes, self.n_features = n_classes, n_features
        self.values, self.squares = np.zeros((n_classes, n_features), np.float32), np.zeros(n_classes)

    @property
    def zero(self) -> NDArray[np.bool_]:
        """Which vectors are zero (K,)."""
        return np.equal(self.squares, 0.0)

    def add(self, classes: NDArray[Any], lines: NDArray[Any], steps: NDArray[Any], rows: NDArray[np.float32]) -> None:
        """w_c += a x_i for each (c, i, a) of classes, lines, steps, in their order."""
        c, i = np.ascontiguousarray(classes, np.int32), np.ascontiguousarray(lines, np.int32)
        add_dense(c, i, np.ascontiguousarray(steps, np.float32), rows, self.values)
        sum_squares(np.unique(c), self.values, self.squares)

    def put(self, classes: NDArray[Any], rows: NDArray[np.float32]) -> None:
        """w_c = x_i for class i of `classes`."""
        self.values[classes] = rows
        sum_squares(np.ascontiguousarray(classes, np.int32), self.values, self.squares)

    def clear(self, classes: NDArray[Any]) -> None:
        """w_c = 0."""
        self.values[classes], self.squares[classes] = 0.0, 0.0

    def scale(self, factor: float) -> None:
        """W *= factor."""
        self.values *= np.float32(factor)
        sum_squares(np.arange(self.n_classes, dtype=np.int32), self.values, self.squares)

    def dots(self, classes: NDArray[Any], lines: NDArray[Any], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """w_c . x_i of each pair (c, i)."""
        out = np.empty(len(classes), np.float32)
        for first in range(0, len(classes), _PAIRS):
            some = slice(first, first + _PAIRS)
            out[some] = (self.values[classes[some]] * rows[lines[some]]).sum(axis=1)
        return out
