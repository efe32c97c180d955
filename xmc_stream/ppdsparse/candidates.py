"""What the search jobs of a round found: as each job leaves it, and all together, of some classes in memory or of one as a
stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError, spoilt_state
from xmc_stream.ppdsparse.kernels.active import append_lines
from xmc_stream.ppdsparse.parameters import EXACT
from xmc_stream.store.chunks import are_apart, open_array, read_small, small_array
from xmc_stream.store.encoding import PackedMatrixWriter, PackWriter, index_dtype, new_pack
from xmc_stream.store.matrix import Block, SparseMatrix, clip_ranges
from xmc_stream.store.nodes import plain_array

_LINES = 1 << 15  # gathered at a time
_WINDOW = 1 << 17  # entries of one class read at a time
_WHOLE = 1 << 20  # rows found of a class that are read at once, whatever is wanted of them
_HIGH = 16  # bits of a score's key that are counted at a time


class CandidateWriter:
    """What a search job found; of each class its rows ascend, with their scores.

    rows: classes x N (csr), values the scores. Classes of which more may be found than is kept at a time (`flushed`,
    numbers of classes, ascending) are empty there. Theirs stand in intervals, ((interval, flushed class) x N), written
    as each interval of the rows ends. counts (classes,): rows found; losses (classes,): summed over the rows searched;
    best (classes,): the best score outside the active set, if found.
    """

    def __init__(self, pack: PackWriter, n_classes: int, n_samples: int, flushed: NDArray[np.int64]) -> None:
        self.rows = PackedMatrixWriter(pack, "rows", "csr_matrix", (n_classes, n_samples), np.float32)
        self.intervals = None
        if len(flushed):
            self.intervals = PackedMatrixWriter(pack, "intervals", "csr_matrix", (None, n_samples), np.float32)
        self.counts = np.zeros(n_classes, np.int64)
        self.losses = np.zeros(n_classes)
        self.best = np.full(n_classes, -np.inf)


@contextmanager
def new_candidates(path: Path, n_classes: int, n_samples: int, flushed: NDArray[np.int64]) -> Iterator[CandidateWriter]:
    """What a search job found for a range of classes, a pack, under its name when the block ends well."""
    with new_pack(path) as pack:
        writer = CandidateWriter(pack, n_classes, n_samples, flushed)
        yield writer
        writer.rows.close()
        if writer.intervals is not None:
            writer.intervals.close()
            pack.write("flushed", flushed)
        for name, values in (("counts", writer.counts), ("losses", writer.losses), ("best", writer.best)):
            pack.write(name, values)


class CandidateRows:
    """What one search job found for classes [first, last), opened for reading; it keeps no file open.

    n_samples: of the dataset. Raises StoreError where it is of other classes or samples.
    """

    def __init__(self, path: Path, first: int, last: int, n_samples: int) -> None:
        self.first, self.last = first, last
        self.path, self._n_samples, n_classes = path, n_samples, last - first
        self._small = {
            name: small_array(path, name, n_classes, np.int64 if name == "counts" else np.float64)
            for name in ("counts", "losses", "best")
        }
        self._rows = SparseMatrix(path / "rows").expect((n_classes, n_samples), "csr_matrix", np.float32)
        self._flushed = np.zeros(0, np.int64)
        self._intervals = None
        if plain_array(path / "flushed") is not None:
            self._intervals = SparseMatrix(path / "intervals").expect((None, n_samples), "csr_matrix", np.float32)
            n = open_array(path / "flushed").size
            if not 0 < n <= n_classes or self._intervals.n_lines % n:
                raise spoilt_state(self.path / "flushed")
            self._flushed = read_small(path, "flushed", n, np.int64)
            if not are_apart(self._flushed, np.ones(n, np.int64), n_classes):
                raise spoilt_state(self.path / "flushed")

    def close_files(self) -> None:
        """Close the files that reading opened; who reads on opens them again."""
        for matrix in (self._rows, self._intervals):
            if matrix is not None:
                matrix.close_files()
        for array in self._small.values():
            array.close_files()

    def of_classes(self, name: str, first: int, last: int) -> NDArray[Any]:
        """counts, losses or best of classes [first, last)."""
        values = self._small[name].read_checked(first - self.first, last - self.first)
        if name == "counts" and len(values) and not 0 <= values.min() <= values.max() <= self._n_samples:
            raise spoilt_state(self.path / name)
        return values

    def blocks(self, first: int, last: int) -> Iterator[tuple[NDArray[np.int64], Block]]:
        """All that was found for classes [first, last): blocks, and of each line the class, counted from first.

        A class's lines come in ascending order of their rows.
        """
        low, high = first - self.first, last - self.first
        yield np.arange(high - low), self._rows.block(low, high)
        a, b = np.searchsorted(self._flushed, [low, high])
        if self._intervals is None or a == b:
            return
        n = len(self._flushed)
        n_intervals, step = self._intervals.n_lines // n, max(1, _LINES // int(b - a))
        for interval in range(0, n_intervals, step):
            intervals = np.arange(interval, min(interval + step, n_intervals))
            lines = (intervals[:, None] * n + np.arange(a, b)).ravel()
            yield np.tile(self._flushed[a:b] - low, len(intervals)), self._intervals.gather(lines)

    def windows(self, label: int) -> Iterator[tuple[NDArray[Any], NDArray[np.float32]]]:
        """What was found for one class, a window of it at a time: rows (ascending) and scores."""
        label -= self.first
        at = int(np.searchsorted(self._flushed, label))
        matrix, lines = self._rows, np.array([label])
        if self._intervals is not None and at < len(self._flushed) and self._flushed[at] == label:
            matrix, lines = self._intervals, np.arange(at, self._intervals.n_lines, len(self._flushed))
        firsts, counts = matrix.lengths(lines)
        total, before = int(counts.sum()), -1
        for begin in range(0, total, _WINDOW):
            end = min(begin + _WINDOW, total)
            rows, scores = matrix.parts(*clip_ranges(firsts, counts, begin, end))
            if scores is None or rows[0] <= before or (rows[1:] <= rows[:-1]).any():
                raise spoilt_state(self.path / "rows")
            before = int(rows[-1])
            yield rows, scores


class CandidateFile(NamedTuple):
    """What one search job found for classes [first, last). Files of the same classes stand in the order of their rows."""

    first: int
    last: int
    path: str


@dataclass(frozen=True)
class Found:
    """What a search found. kind: of the search; n_classes: how many classes have violators."""

    files: tuple[CandidateFile, ...] = ()
    kind: str = EXACT
    n_classes: int = 0

    def of(self, first: int, last: int) -> Found:
        """The files that hold some of classes [first, last)."""
        mine = tuple(file for file in self.files if file.first < last and file.last > first)
        return Found(mine, self.kind, self.n_classes)

    def open(self, n_samples: int) -> list[CandidateRows]:
        """What the files hold, of the rows of so many samples."""
        return [CandidateRows(Path(path), first, last, n_samples) for first, last, path in self.files]


def read_candidates(
    found: Sequence[CandidateRows], first: int, last: int, n_samples: int, room: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """What was found for classes [first, last): their places (n + 1,), rows (ascending in a class) and scores.

    found: by search jobs of the same classes, in the order of their rows. room (n,): how many rows are wanted of each class.
    All that was found is read, but for a class by itself of which very much was.
    """
    parts = list(holding(found, first, last))
    ptr = np.zeros(last - first + 1, np.int64)
    for of, low, high in parts:
        ptr[low - first + 1 : high - first + 1] += of.of_classes("counts", low, high)
    np.cumsum(ptr, out=ptr)
    one = last - first == 1 and ptr[1] > max(_WHOLE, room[0])
    if one:
        ptr[1] = room[0]
    rows, scores = np.empty(ptr[-1], index_dtype(n_samples)), np.empty(ptr[-1], np.float32)
    if one:
        filled, (threshold, last_tie) = 0, select_threshold(found, first, int(room[0]))
        for some_rows, some in candidate_windows(found, first):
            best = (some > threshold) | ((some == threshold) & (some_rows <= last_tie))
            part = slice(filled, filled := filled + int(np.count_nonzero(best)))
            if filled > len(rows):
                break
            rows[part], scores[part] = some_rows[best], some[best]
        _expect(filled == len(rows), found)
        return ptr, rows, scores
    place = ptr[:-1].copy()
    for of, low, high in parts:
        for lines, block in of.blocks(low, high):
            classes = lines + (low - first)
            after = place.copy()
            np.add.at(after, classes, np.diff(block.indptr))
            _expect(bool((after <= ptr[1:]).all()), found)
            append_lines(block.indptr, block.indices, block.values, classes, place, rows, scores)
        of.close_files()
    _expect(bool((place == ptr[1:]).all()), found)
    return ptr, rows, scores


def _expect(counted: bool, found: Sequence[CandidateRows]) -> None:
    if not counted:
        raise StoreError(f"{found[0].path.parent}: rows found are not as many as counted: remove the unfinished run")


def candidate_windows(
    found: Sequence[CandidateRows], label: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """What was found for one class, a few MB at a time: rows (int64, ascending throughout) and scores."""
    for of, _, _ in holding(found, label, label + 1):
        for rows, scores in of.windows(label):
            yield rows.astype(np.int64), scores
        of.close_files()


def select_threshold(found: Sequence[CandidateRows], label: int, room: int) -> tuple[float, int]:
    """A score t and a row r: the best `room` rows found for a class score above t, or just t and are not beyond r.

    Better are higher scores, then lower rows. r is -1 where none with score t is among them. Where no more than `room`
    were found, all score above t.
    """
    if room == 0:
        return np.inf, -1
    prefix, above = 0, 0  # the leading bits of the key of the score, and how many keys lead with more
    for bits in (32 - _HIGH, 0):
        counts = np.zeros(1 << _HIGH, np.int64)
        for _, scores in candidate_windows(found, label):
            keys = _keys(scores).astype(np.int64) >> bits
            keys = keys[keys >> _HIGH == prefix] - (prefix << _HIGH)
            counts += np.bincount(keys, minlength=len(counts))
        at_least = above + np.cumsum(counts[::-1])[::-1]
        if at_least[0] <= room and bits:
            return -np.inf, -1
        digit = int(np.flatnonzero(at_least >= room)[-1])
        above = int(at_least[digit] - counts[digit])
        prefix = (prefix << _HIGH) + digit
    bits = prefix - (1 << 31) if prefix >> 31 else ~prefix & 0xFFFFFFFF
    threshold = float(np.uint32(bits).view(np.float32))
    ties = room - above
    for rows, scores in candidate_windows(found, label):
        equal = rows[scores == threshold]
        if len(equal) >= ties:
            return threshold, int(equal[ties - 1])
        ties -= len(equal)
    return threshold, -1


def _keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Whole numbers that are ordered as the scores are; of -0.0 that of 0.0."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def holding(found: Sequence[CandidateRows], first: int, last: int) -> Iterator[tuple[CandidateRows, int, int]]:
    """What holds some of classes [first, last), and which."""
    for of in found:
        low, high = max(first, of.first), min(last, of.last)
        if low < high:
            yield of, low, high
