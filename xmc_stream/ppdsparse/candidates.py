"""What the search jobs of a round found together: all of some classes in memory, or one class as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.ppdsparse.kernels.active import append_lines
from xmc_stream.ppdsparse.state import CandidateRows
from xmc_stream.store.encoding import index_dtype

_WHOLE = 1 << 20  # rows found of a class that are read at once, whatever is wanted of them
_HIGH = 16  # bits of a score's key that are counted at a time


@dataclass(frozen=True)
class CandidateFile:
    """What one search job found for classes [first, last). Files of the same classes stand in the order of their rows."""

    first: int
    last: int
    path: str

    def open(self, n_samples: int) -> CandidateRows:
        """What it holds of the rows of so many samples."""
        return CandidateRows(Path(self.path), self.last - self.first, n_samples)


def read_candidates(
    files: Sequence[CandidateFile], first: int, last: int, n_samples: int, room: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """What was found for classes [first, last): their places (n + 1,), rows (ascending in a class) and scores.

    room (n,): how many are wanted. All that was found is read, but for a class by itself of which very much was.
    """
    parts = [(file.open(n_samples), file.first, low, high) for file, low, high in _holding(files, first, last)]
    ptr = np.zeros(last - first + 1, np.int64)
    for found, start, low, high in parts:
        ptr[low - first + 1 : high - first + 1] += found.of_classes("counts", low - start, high - start)
    np.cumsum(ptr, out=ptr)
    one = last - first == 1 and ptr[1] > max(_WHOLE, room[0])
    if one:
        ptr[1] = room[0]
    rows, scores = np.empty(ptr[-1], index_dtype(n_samples)), np.empty(ptr[-1], np.float32)
    if one:
        filled, (threshold, last_tie) = 0, select_threshold(files, first, int(room[0]), n_samples)
        for some_rows, some in candidate_windows(files, first, n_samples):
            best = (some > threshold) | ((some == threshold) & (some_rows <= last_tie))
            part = slice(filled, filled := filled + int(np.count_nonzero(best)))
            if filled > len(rows):
                break
            rows[part], scores[part] = some_rows[best], some[best]
        _expect(filled == len(rows), files)
        return ptr, rows, scores
    place = ptr[:-1].copy()
    for found, start, low, high in parts:
        for lines, block in found.blocks(low - start, high - start):
            classes = lines + (low - first)
            after = place.copy()
            np.add.at(after, classes, np.diff(block.indptr))
            _expect(bool((after <= ptr[1:]).all()), files)
            append_lines(block.indptr, block.indices, block.values, classes, place, rows, scores)
    _expect(bool((place == ptr[1:]).all()), files)
    return ptr, rows, scores


def _expect(counted: bool, files: Sequence[CandidateFile]) -> None:
    if not counted:
        raise StoreError(
            f"{Path(files[0].path).parent}: rows found are not as many as counted: remove the unfinished run"
        )


def candidate_windows(
    files: Sequence[CandidateFile], label: int, n_samples: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """What was found for one class, a few MB at a time: rows (int64, ascending throughout) and scores."""
    for file, _, _ in _holding(files, label, label + 1):
        for rows, scores in file.open(n_samples).windows(label - file.first):
            yield rows.astype(np.int64), scores


def select_threshold(files: Sequence[CandidateFile], label: int, room: int, n_samples: int) -> tuple[float, int]:
    """A score t and a row r: the best `room` rows found for a class score above t, or just t and are not beyond r.

    Better are higher scores, then lower rows. r is -1 where none with score t is among them. Where no more than `room`
    were found, all score above t.
    """
    if room == 0:
        return np.inf, -1
    prefix, above = 0, 0  # the leading bits of the key of the score, and how many keys lead with more
    for bits in (32 - _HIGH, 0):
        counts = np.zeros(1 << _HIGH, np.int64)
        for _, scores in candidate_windows(files, label, n_samples):
            keys = _keys(scores).astype(np.int64) >> bits
            keys = keys[keys >> _HIGH == prefix] - (prefix << _HIGH)
            counts += np.bincount(keys, minlength=len(counts))
        at_least = above + np.cumsum(counts[::-1])[::-1]
        if at_least[0] <= room and bits:
            return -np.inf, -1
        digit = int(np.flatnonzero(at_least >= room)[-1])
        above = int(at_least[digit] - counts[digit])
        prefix = (prefix << _HIGH) + digit
    threshold = _score_of(prefix)
    ties = room - above
    for rows, scores in candidate_windows(files, label, n_samples):
        equal = rows[scores == threshold]
        if len(equal) >= ties:
            return threshold, int(equal[ties - 1])
        ties -= len(equal)
    return threshold, -1


def _keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Whole numbers that are ordered as the scores are; of -0.0 that of 0.0."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _score_of(key: int) -> float:
    bits = key - (1 << 31) if key >> 31 else ~key & 0xFFFFFFFF
    return float(np.uint32(bits).view(np.float32))


def _holding(files: Sequence[CandidateFile], first: int, last: int) -> Iterator[tuple[CandidateFile, int, int]]:
    """The files that hold some of classes [first, last), and which."""
    for file in files:
        low, high = max(first, file.first), min(last, file.last)
        if low < high:
            yield file, low, high
