"""Large classes of a unit, solved while X streams by: where their pairs are kept, how many go together, what comes out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.jobs.plan import MIB, StreamRoom
from xmc_stream.kernels.active import count_before, draw_negatives, mark, marked_rows, rank
from xmc_stream.kernels.dcd import dual_terms, take_weights
from xmc_stream.solvers.ppdsparse import ActiveSets, PPDSparseParameters, RowOrder
from xmc_stream.solvers.stream import Pairs, StreamSolver, Weights
from xmc_stream.store.matrix import Block, Buffer, SparseMatrix
from xmc_stream.store.state import BIAS, DUAL, INSIDE, KEPT, UnitStateWriter

_STEP = MIB // 4  # rows, or entries of a line, at a time
_POSITIVE, _ASLEEP, _FRESH = 1, 2, 4  # bits of a pair's flags on disk


class _MemoryPairs:
    """Pairs of some classes in memory."""

    def __init__(self, sizes: NDArray[np.int64], dtype: np.dtype[np.signedinteger], rough: bool) -> None:
        self.n_classes = len(sizes)
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        n = int(ptr[-1])
        self.all = Pairs(
            ptr, np.empty(n, dtype), np.empty(n, np.int8), np.empty(n), np.zeros(n, np.bool_)
        )  # fmt: skip
        self._fresh = np.zeros(n if rough else 0, np.bool_)

    def put(self, c: int, sets: ActiveSets) -> None:
        """The active set of class c."""
        mine = slice(int(self.all.ptr[c]), int(self.all.ptr[c + 1]))
        self.all.rows[mine], self.all.sign[mine], self.all.alpha[mine] = sets.rows, sets.sign, sets.alpha
        if len(self._fresh):
            self._fresh[mine] = (sets.alpha == 0.0) & (sets.sign < 0)

    def take(self, ranges: Sequence[tuple[int, int]]) -> Pairs:
        return self.all

    def give_back(self, pairs: Pairs) -> None:
        pass

    def sleeping(self) -> NDArray[np.bool_]:
        some = np.concatenate([[0], np.cumsum(self.all.asleep)])[self.all.ptr]
        return np.diff(some) > 0

    def wake(self, classes: NDArray[np.bool_]) -> None:
        for c in np.flatnonzero(classes):
            self.all.asleep[self.all.ptr[c] : self.all.ptr[c + 1]] = False

    def fresh(self) -> tuple[int, int]:
        """Rows that a rough search brought in, and those of them that are of use."""
        return int(self._fresh.sum()), int((self.all.alpha[: len(self._fresh)][self._fresh] > 0.0).sum())

    def parts(self, c: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.float64]]]:
        """Rows, signs, alpha of class c, ascending."""
        mine = slice(int(self.all.ptr[c]), int(self.all.ptr[c + 1]))
        yield self.all.rows[mine], self.all.sign[mine], self.all.alpha[mine]

    def close(self) -> None:
        pass


@dataclass
class _Taken(Pairs):
    """Pairs that were read from disk: from which places, with which flags."""

    places: list[tuple[int, int]]
    flags: NDArray[np.uint8]


class DiskPairs:
    """Pairs of one class, on disk: alpha and flags, a value a row. Which rows is a bit each in memory.

    words (N / 64,): the active rows are marked; before: how many are ahead of each word.
    """

    n_classes = 1

    def __init__(self, folder: Path, words: NDArray[np.uint64], before: NDArray[np.int32], n_samples: int) -> None:
        self._words, self._before, self._n_samples = words, before, n_samples
        self.n = count_before(words, before)
        self._dtype = np.dtype(np.int32 if n_samples < 2**31 else np.int64)
        self._asleep = 0
        folder.mkdir(parents=True)
        self._files = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("alpha", "flags")]

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        at = np.array([start, min(stop, self._n_samples - 1)], np.int64)
        out = np.empty(2, np.int64)
        rank(at, self._words, self._before, out)
        return int(out[0]), self.n if stop >= self._n_samples else int(out[1])

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The active rows in [start, stop), ascending."""
        low, high = start >> 6, min((stop + 63) >> 6, len(self._words))
        last = self.n if high == len(self._words) else int(self._before[high])
        rows = np.empty(last - int(self._before[low]), np.int64)
        marked_rows(self._words[low:high], rows)
        rows += low << 6
        begin, end = np.searchsorted(rows, (start, stop))
        return rows[begin:end]

    def write(self, at: int, alpha: NDArray[np.float64], flags: NDArray[np.uint8]) -> None:
        """Values of the pairs from place `at` on."""
        for fd, values in zip(self._files, (alpha.view(np.uint8), flags), strict=True):
            itemsize = len(values) // max(len(flags), 1)
            done = 0
            while done < len(values):
                done += os.pwrite(fd, values[done:].data, at * itemsize + done)

    def _read(self, begin: int, end: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        alpha, flags = np.empty(end - begin), np.empty(end - begin, np.uint8)
        for fd, values, itemsize in zip(self._files, (alpha.view(np.uint8), flags), (8, 1), strict=True):
            done = 0
            while done < len(values):
                n = os.preadv(fd, [values[done:].data], begin * itemsize + done)
                if n == 0:
                    raise StoreError("a file of the run's state ends early: run the same command again")
                done += n
        return alpha, flags

    def take(self, ranges: Sequence[tuple[int, int]]) -> Pairs:
        places = [self._places(*each) for each in ranges]
        read = [self._read(*each) for each in places]
        rows = np.concatenate([self.rows(*each) for each in ranges]).astype(self._dtype)
        alpha = np.concatenate([values[0] for values in read])
        flags = np.concatenate([values[1] for values in read])
        sign = np.where(flags & _POSITIVE, 1, -1).astype(np.int8)
        asleep = (flags & _ASLEEP).astype(np.bool_)
        return _Taken(np.array([0, len(rows)]), rows, sign, alpha, asleep, places, flags)

    def give_back(self, pairs: Pairs) -> None:
        if not isinstance(pairs, _Taken):
            return
        flags = pairs.flags & np.uint8(_POSITIVE | _FRESH)
        flags[pairs.asleep] |= _ASLEEP
        self._asleep += int(pairs.asleep.sum()) - int(np.count_nonzero(pairs.flags & _ASLEEP))
        pairs.flags = flags
        done = 0
        for begin, end in pairs.places:
            mine = slice(done, done + end - begin)
            self.write(begin, pairs.alpha[mine], flags[mine])
            done += end - begin

    def sleeping(self) -> NDArray[np.bool_]:
        return np.array([self._asleep > 0])

    def wake(self, classes: NDArray[np.bool_]) -> None:
        if classes[0]:
            for begin, end in self._steps():
                alpha, flags = self._read(begin, end)
                self.write(begin, alpha, flags & np.uint8(_POSITIVE | _FRESH))
            self._asleep = 0

    def _steps(self) -> Iterator[tuple[int, int]]:
        step = MIB // 16
        return ((begin, min(begin + step, self.n)) for begin in range(0, self.n, step))

    def fresh(self) -> tuple[int, int]:
        fresh = used = 0
        for places in self._steps():
            alpha, flags = self._read(*places)
            mine = (flags & _FRESH) > 0
            fresh, used = fresh + int(mine.sum()), used + int((alpha[mine] > 0.0).sum())
        return fresh, used

    def parts(self, c: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.float64]]]:
        for start in range(0, self._n_samples, _STEP):
            pairs = self.take([(start, min(start + _STEP, self._n_samples))])
            yield pairs.rows, pairs.sign, pairs.alpha

    def close(self) -> None:
        """Close the files."""
        for fd in self._files:
            os.close(fd)


def disk_pairs(
    folder: Path, words: NDArray[np.uint64], before: NDArray[np.int32], n_samples: int, label: int, seed: int,
    Y: SparseMatrix, n_active: int, old: tuple[SparseMatrix, int] | None, found: Iterator[NDArray[np.int64]], rough: bool,
) -> DiskPairs:  # fmt: skip
    """The active set of a class that is larger than memory: what `merge_found` or `start_sets` make, on disk.

    words, before: for its rows' bits. Y: by columns. n_active: its size. old: the active sets of the round before and
    the class's line in them, None in round 0. found: rows that a search brings in, part by part.
    """
    words[:] = 0
    n_positive = 0
    for rows, _ in _line(Y, label):
        n_positive += len(rows)
        if old is None:
            mark(rows, words)
    if old is None:
        draw_negatives(n_active - n_positive, label, n_samples, seed, words)
    else:
        for rows, _ in _line(*old):
            mark(rows, words)
        for rows in found:
            mark(rows, words)
    pairs = DiskPairs(folder, words, before, n_samples)
    positives, kept = _Cursor(_line(Y, label)), _Cursor(iter(()) if old is None else _line(*old))
    done = 0
    for start in range(0, n_samples, _STEP):
        stop = min(start + _STEP, n_samples)
        rows = pairs.rows(start, stop)
        alpha, flags = np.zeros(len(rows)), np.zeros(len(rows), np.uint8)
        mine, _ = positives.up_to(stop)
        flags[np.searchsorted(rows, mine)] = _POSITIVE
        mine, values = kept.up_to(stop)
        alpha[np.searchsorted(rows, mine)] = values
        if rough:
            flags[(alpha == 0.0) & (flags == 0)] = _FRESH
        pairs.write(done, alpha, flags)
        done += len(rows)
    return pairs


_Part = tuple[NDArray[np.int64], NDArray[np.float64]]


def _line(matrix: SparseMatrix, line: int) -> Iterator[_Part]:
    """Indices and values (zeros for a matrix of ones) of one line, in parts."""
    first, last = matrix.indptr.read(line, line + 2).tolist()
    for begin in range(first, last, _STEP):
        end = min(begin + _STEP, last)
        indices = matrix.indices.read(begin, end).astype(np.int64, copy=False)
        yield indices, np.zeros(end - begin) if matrix.data is None else matrix.data.read(begin, end)


class _Cursor:
    """Takes an ascending line apart by ranges of indices."""

    def __init__(self, parts: Iterator[_Part]) -> None:
        self._parts = parts
        self._ahead: _Part = np.empty(0, np.int64), np.empty(0)

    def up_to(self, stop: int) -> _Part:
        """What is below `stop` and was not taken yet."""
        taken = []
        while True:
            indices, values = self._ahead
            n = int(np.searchsorted(indices, stop))
            taken.append((indices[:n], values[:n]))
            self._ahead = indices[n:], values[n:]
            if n < len(indices):
                break
            part = next(self._parts, None)
            if part is None:
                break
            self._ahead = part
        return np.concatenate([part[0] for part in taken]), np.concatenate([part[1] for part in taken])


AnyPairs = _MemoryPairs | DiskPairs


class LargeClasses:
    """Solves large classes of a unit, a run of them at a time, and writes their lines of a unit's state in order.

    active_set: of a class, in memory. disk_pairs: of a class that is too large for that, in a folder. weights: those of
    a warm start of some classes, or None.
    """

    def __init__(
        self,
        parameters: PPDSparseParameters,
        seed: int,
        round_: int,
        order: RowOrder,
        X: SparseMatrix,
        room: StreamRoom,
        rough: bool,
        active_set: Callable[[int], ActiveSets],
        disk_pairs: Callable[[int, Path], DiskPairs],
        weights: Callable[[NDArray[np.int64]], Iterator[Weights]] | None,
        scratch: Path,
    ) -> None:
        self.parameters, self.seed, self.round, self.order = parameters, seed, round_, order
        self.X, self.room, self.rough, self.scratch = X, room, rough, scratch
        self._active_set, self._disk_pairs, self._weights = active_set, disk_pairs, weights
        self.fresh = self.used = 0
        self.passes = 0

    def solve(
        self,
        classes: NDArray[np.int64],
        n_active: NDArray[np.int64],
        n_found: NDArray[np.int64],
        writer: UnitStateWriter,
    ) -> NDArray[np.int64]:
        """Solve; class classes[i], with so many active rows and rows found, is line i of the state.

        Returns the sizes of the active sets that are kept.
        """
        buffers = [Buffer(self.X, min(self.room.nnz, self.X.nnz)) for _ in range(2)]
        kept = np.empty(len(classes), np.int64)
        for begin, end in self.room.together(n_active, n_found):
            mine = slice(begin, end)
            fits = self.room.bytes(n_active[mine], n_found[mine]) <= self.room.classes
            self._solve(classes[mine], n_active[mine], fits, begin, buffers, writer, kept[mine])
        return kept

    def _solve(
        self, classes: NDArray[np.int64], n_active: NDArray[np.int64], fits: bool, line: int, buffers: list[Buffer],
        writer: UnitStateWriter, kept: NDArray[np.int64],
    ) -> None:  # fmt: skip
        with ExitStack() as stack:
            pairs: AnyPairs
            if fits:
                n = self.X.n_lines
                pairs = _MemoryPairs(n_active, np.dtype(np.int32 if n < 2**31 else np.int64), self.rough)
                for i, c in enumerate(classes):
                    pairs.put(i, self._active_set(int(c)))
            else:
                shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
                stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
                pairs = self._disk_pairs(int(classes[0]), self.scratch)
            stack.callback(pairs.close)

            def gather(lines: NDArray[np.int64], number: int) -> Block | None:
                spans = self.X.lengths(lines)
                total = int(spans[1].sum())
                if total > self.room.nnz:
                    if len(lines) == 1:
                        raise MemoryLimitError(
                            f"row {lines[0]} of {self.X.path} has {total} entries, more than the "
                            f"{self.room.nnz} planned for: raise --memory-limit or lower --threads"
                        )
                    return None
                return self.X.gather(lines, buffers[number], spans)

            solver = StreamSolver(
                self.parameters, self.seed, self.order.n_samples, self.X.shape[1], self.order.run_bits, pairs, gather,
                min(self.room.threads, len(classes)),
            )  # fmt: skip
            inside = solver.solve(self.round, self._weights(classes) if self._weights else None)
            self.passes += solver.passes
            if self.rough:
                fresh, used = pairs.fresh()
                self.fresh, self.used = self.fresh + fresh, self.used + used
            self._write(pairs, solver, inside, line, writer, kept)

    def _write(
        self, pairs: AnyPairs, solver: StreamSolver, inside: NDArray[np.float64], line: int, writer: UnitStateWriter,
        kept: NDArray[np.int64],
    ) -> None:  # fmt: skip
        p, n_features = self.parameters, self.X.shape[1]
        features, local_of = np.arange(n_features, dtype=np.int32), np.empty(n_features, np.int32)
        w_features, w_values = np.empty(n_features, np.int32), np.empty(n_features, np.float32)
        for i in range(pairs.n_classes):
            dual, kept[i] = 0.0, 0
            for _, sign, alpha in pairs.parts(i):
                dual = dual_terms(alpha, p.h2, dual)
                kept[i] += int(((sign > 0) | (alpha > 0.0)).sum())
            local_of[:] = features
            n, square, objective, bias = take_weights(
                n_features, features, local_of, solver.v[i], solver.v0[i], p.lam, p.tau, w_features, w_values
            )
            one = np.array([n], np.int64)
            writer.weights.append(one, w_features[:n], w_values[:n])
            writer.figures[line + i, [BIAS, DUAL, KEPT, INSIDE]] = (
                bias, 0.5 * p.tau * square + dual, objective, inside[i],
            )  # fmt: skip
            counts = kept[i : i + 1]
            for rows, sign, alpha in pairs.parts(i):
                mine = (sign > 0) | (alpha > 0.0)
                writer.active.append(counts, rows[mine], alpha[mine])
                counts = counts[:0]
