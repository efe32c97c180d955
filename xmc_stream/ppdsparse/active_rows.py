"""Where the active rows of large classes are while X streams by: in memory, or of one class on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.kernels.order import RowOrder
from xmc_stream.ppdsparse.kernels.active import count_before, draw_negatives, mark, marked_rows
from xmc_stream.ppdsparse.kernels.stream import ActiveRows
from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.ppdsparse.state import RoundSets, RowBits
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.matrix import SparseMatrix

POSITIVE, ASLEEP, FRESH = 1, 2, 4  # bits of the flags of an active row on disk
_STEP = MIB // 16  # rows, or entries of a line, at a time


@dataclass
class Taken:
    """Active rows that were given out: from which places on disk, with which flags."""

    active: ActiveRows
    places: Sequence[tuple[int, int]] = ()
    flags: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))


# some active rows of a class, ascending: rows, signs, alpha, and which an approximate search has brought in
_Part = tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.float64], NDArray[np.bool_]]


class ScratchFile:
    """n values of one type on disk, 0 at first."""

    def __init__(self, path: Path, dtype: Any, n: int) -> None:
        self.dtype = np.dtype(dtype)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        os.truncate(self._fd, n * self.dtype.itemsize)

    def write(self, at: int, values: NDArray[Any]) -> None:
        view, offset = values.view(np.uint8), at * self.dtype.itemsize
        while len(view):
            n = os.pwrite(self._fd, view.data, offset)
            view, offset = view[n:], offset + n

    def read(self, begin: int, end: int) -> NDArray[Any]:
        out: NDArray[Any] = np.fromfile(self._path, self.dtype, end - begin, offset=begin * self.dtype.itemsize)
        if len(out) < end - begin:
            raise StoreError(f"{self._path} ends early: run the same command again, it goes on")
        return out

    def close(self) -> None:
        os.close(self._fd)


class MemoryRows:
    """Active rows of some classes in memory. order: of the rows."""

    def __init__(self, sizes: NDArray[np.int64], order: RowOrder, approximate: bool) -> None:
        self.n_classes = len(sizes)
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        n = int(ptr[-1])
        self._strip_bits = order.strip_bits
        self.all = ActiveRows(
            ptr, np.empty(n, index_dtype(order.n_samples)), np.empty(n, np.int8), np.empty(n), np.zeros(n, np.bool_),
            np.empty((len(sizes), order.n_strips + 1), np.int32),
        )  # fmt: skip
        self._approximate, self._fresh = approximate, np.zeros(n, np.bool_)

    def put(self, c: int, sets: ActiveSets) -> None:
        """The active set of class c."""
        mine = slice(int(self.all.ptr[c]), int(self.all.ptr[c + 1]))
        self.all.rows[mine], self.all.sign[mine], self.all.alpha[mine] = sets.rows, sets.sign, sets.alpha
        starts = self.all.starts[c]
        starts[:] = np.searchsorted(sets.rows, np.arange(len(starts)) << self._strip_bits)
        if self._approximate:
            self._fresh[mine] = (sets.alpha == 0.0) & (sets.sign < 0)

    def take(self, ranges: Sequence[tuple[int, int]]) -> Taken:
        """All of them, with their `starts`."""
        return Taken(self.all)

    def give_back(self, taken: Taken) -> None:
        pass

    def sleeping(self) -> NDArray[np.bool_]:
        ends = itertools.pairwise(self.all.ptr.tolist())
        return np.array([self.all.asleep[a:b].any() for a, b in ends], np.bool_)

    def wake(self, classes: NDArray[np.bool_]) -> None:
        for c in np.flatnonzero(classes):
            self.all.asleep[self.all.ptr[c] : self.all.ptr[c + 1]] = False

    def parts(self, c: int) -> Iterator[_Part]:
        """The active rows of class c."""
        mine = slice(int(self.all.ptr[c]), int(self.all.ptr[c + 1]))
        yield self.all.rows[mine], self.all.sign[mine], self.all.alpha[mine], self._fresh[mine]

    def close(self) -> None:
        pass


class DiskRows:
    """Active rows of one class, on disk: alpha and flags, a value a row. Which rows is a bit each in memory."""

    n_classes = 1

    def __init__(self, folder: Path, bits: RowBits) -> None:
        self._bits, self._n_samples = bits, bits.n_samples
        self.n = count_before(bits.words, bits.before)
        self._dtype = np.dtype(np.int32 if bits.n_samples < 2**31 else np.int64)
        self._asleep = 0
        folder.mkdir(parents=True)
        self._alpha = ScratchFile(folder / "alpha", np.float64, self.n)
        self._flags = ScratchFile(folder / "flags", np.uint8, self.n)

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        begin, end = self._bits.places(np.array([start, min(stop, self._n_samples - 1)], np.int64)).tolist()
        return begin, self.n if stop >= self._n_samples else end

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The active rows in [start, stop), ascending."""
        words, before = self._bits.words, self._bits.before
        low, high = start >> 6, min((stop + 63) >> 6, len(words))
        last = self.n if high == len(words) else int(before[high])
        rows = np.empty(last - int(before[low]), np.int64)
        marked_rows(words[low:high], rows)
        rows += low << 6
        begin, end = np.searchsorted(rows, (start, stop))
        return rows[begin:end]

    def steps(self) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.uint8]]]:
        """Some places after the other: the first of them, the alpha and the flags that stand there."""
        for begin in range(0, self.n, _STEP):
            yield begin, *self._read(begin, min(begin + _STEP, self.n))

    def put(self, rows: NDArray[np.int64], alpha: NDArray[np.float64] | None, flag: int) -> None:
        """Give some of the active rows, ascending, alpha and a flag."""
        at = self._bits.places(rows)
        for begin in range(int(at[0]) // _STEP * _STEP, int(at[-1]) + 1, _STEP):
            mine = slice(*np.searchsorted(at, (begin, begin + _STEP)))
            alphas, flags = self._read(begin, min(begin + _STEP, self.n))
            flags[at[mine] - begin] |= np.uint8(flag)
            if alpha is not None:
                alphas[at[mine] - begin] = alpha[mine]
            self.write(begin, alphas, flags)

    def write(self, at: int, alpha: NDArray[np.float64], flags: NDArray[np.uint8]) -> None:
        """Values of the active rows from place `at` on."""
        self._alpha.write(at, alpha)
        self._flags.write(at, flags)

    def _read(self, begin: int, end: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        return self._alpha.read(begin, end), self._flags.read(begin, end)

    def take(self, ranges: Sequence[tuple[int, int]]) -> Taken:
        places = [self._places(*each) for each in ranges]
        read = [self._read(*each) for each in places]
        rows = np.concatenate([self.rows(*each) for each in ranges]).astype(self._dtype)
        alpha = np.concatenate([values[0] for values in read])
        flags = np.concatenate([values[1] for values in read])
        sign = np.where(flags & POSITIVE, 1, -1).astype(np.int8)
        asleep = (flags & ASLEEP).astype(np.bool_)
        active = ActiveRows(np.array([0, len(rows)]), rows, sign, alpha, asleep, np.empty((0, 0), np.int32))
        return Taken(active, places, flags)

    def give_back(self, taken: Taken) -> None:
        """What was taken has been changed."""
        active = taken.active
        self._asleep += int(active.asleep.sum()) - int(np.count_nonzero(taken.flags & ASLEEP))
        taken.flags = flags = taken.flags & np.uint8(POSITIVE | FRESH) | np.uint8(ASLEEP) * active.asleep
        done = 0
        for begin, end in taken.places:
            mine = slice(done, done + end - begin)
            self.write(begin, active.alpha[mine], flags[mine])
            done += end - begin

    def sleeping(self) -> NDArray[np.bool_]:
        return np.array([self._asleep > 0])

    def wake(self, classes: NDArray[np.bool_]) -> None:
        if classes[0]:
            for begin, alpha, flags in self.steps():
                self.write(begin, alpha, flags & np.uint8(POSITIVE | FRESH))
            self._asleep = 0

    def parts(self, c: int) -> Iterator[_Part]:
        for start in range(0, self._n_samples, _STEP):
            taken = self.take([(start, min(start + _STEP, self._n_samples))])
            active = taken.active
            yield active.rows, active.sign, active.alpha, (taken.flags & FRESH) > 0

    def close(self) -> None:
        """Close the files."""
        self._alpha.close()
        self._flags.close()


def rows_on_disk(folder: Path, sets: RoundSets, c: int) -> DiskRows:
    """The active set of class c, which is larger than memory: what `RoundSets.of` makes, on disk."""
    words, Y, label = sets.bits.words, sets.Y, sets.first + c
    old = None if sets.previous is None else (sets.previous.active, sets.line + c)
    words[:] = 0
    if old is None:
        n_positive = 0
        for rows, _ in _line(Y, label):
            mark(rows, words)
            n_positive += len(rows)
        n_drawn = int(start_sizes(np.array([n_positive]), sets.n_samples)[0])
        draw_negatives(n_drawn, label, sets.n_samples, sets.seed, words)
    else:
        for rows in itertools.chain((rows for rows, _ in _line(*old)), sets.new_rows(c)):
            mark(rows, words)
    active = DiskRows(folder, sets.bits)
    for rows, _ in _line(Y, label):
        if not sets.bits.has(rows).all():
            raise StoreError(
                f"{Y.path}: positives of label {label} are not among its active rows: remove the unfinished run"
            )
        active.put(rows, None, POSITIVE)
    for rows, kept in _line(*old) if old else ():
        active.put(rows, kept, 0)
    for begin, alpha, flags in active.steps() if sets.approximate else ():
        active.write(begin, alpha, np.where((alpha == 0.0) & (flags == 0), np.uint8(FRESH), flags))
    return active


def _line(matrix: SparseMatrix, line: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64] | None]]:
    """Indices and values of one line, in parts."""
    for indices, data in matrix.windows(line, line + 1, _STEP):
        yield indices.astype(np.int64, copy=False), data
