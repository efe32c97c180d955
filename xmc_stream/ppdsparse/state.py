"""What a run keeps between its jobs: the state of a unit of classes after a round, and what a search job found.

Scratch of one run: written whole or not at all, read by the next jobs, removed when no job needs it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import are_apart, clip_ranges, open_array, read_small
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.nodes import plain_array
from xmc_stream.store.packing import PackedMatrixWriter, PackWriter, new_pack

_LINES = 1 << 15  # gathered at a time
_WINDOW = 1 << 17  # entries of one class read at a time

# columns of a state's statistics, one row a class; ROOM: how many rows the next search may bring; MARK: a gap of before;
# FRESH: 1 for a class that began from nothing beside those of a warm start
BIAS, DUAL, KEPT, INSIDE, OUTSIDE, LOSS, STATUS, ROOM, MARK, FRESH, N_STATISTICS = range(11)
OPEN, DONE, EMPTY = 0.0, 1.0, 2.0  # values of STATUS: still to solve; not any more; nothing to be learned
WRITER_BYTES = 12 * 2**20  # of a state and one of large classes: a chunk of each array, copies of what is appended


class UnitStateWriter:
    """active: classes x N (csr), its values alpha; weights: D x classes (csc); statistics: classes x N_STATISTICS."""

    def __init__(self, pack: PackWriter, n_classes: int, n_samples: int, n_features: int) -> None:
        self.active = PackedMatrixWriter(pack, "active", "csr_matrix", (n_classes, n_samples), np.float64)
        self.weights = PackedMatrixWriter(pack, "weights", "csc_matrix", (n_features, n_classes), np.float32)
        self.statistics = np.zeros((n_classes, N_STATISTICS))


@contextmanager
def new_unit_state(
    path: Path, n_classes: int, n_samples: int, n_features: int, durable: bool = True
) -> Iterator[UnitStateWriter]:
    """A unit's state after a round, a pack, under its name when the block ends well."""
    with new_pack(path, durable) as pack:
        writer = UnitStateWriter(pack, n_classes, n_samples, n_features)
        yield writer
        writer.active.close()
        writer.weights.close()
        pack.write("statistics", writer.statistics.ravel())


class UnitState:
    """A unit's state, opened for reading. Raises StoreError where it is not one of so many classes, samples and features."""

    def __init__(self, path: Path, n_classes: int, n_samples: int, n_features: int) -> None:
        self.path = path
        self.statistics = read_small(path, "statistics", n_classes * N_STATISTICS, np.float64).reshape(-1, N_STATISTICS)
        self.active = SparseMatrix(path / "active").expect((n_classes, n_samples), "csr_matrix", np.float64)
        self.weights = SparseMatrix(path / "weights").expect((n_features, n_classes), "csc_matrix", np.float32)

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return self.active.bytes_read + self.weights.bytes_read


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
    """What a search job found, opened for reading; classes are counted from the first of the job's block.

    n_classes, n_samples: of the block, and in all. Raises StoreError where it is of others.
    """

    def __init__(self, path: Path, n_classes: int, n_samples: int) -> None:
        self._path, self._n_classes, self._n_samples = path, n_classes, n_samples
        self._rows = SparseMatrix(path / "rows").expect((n_classes, n_samples), "csr_matrix", np.float32)
        self._flushed = np.zeros(0, np.int64)
        self._intervals = None
        if plain_array(path / "flushed") is not None:
            self._intervals = SparseMatrix(path / "intervals").expect((None, n_samples), "csr_matrix", np.float32)
            n = open_array(path / "flushed").size
            if not 0 < n <= n_classes or self._intervals.n_lines % n:
                raise self._damaged("flushed")
            self._flushed = read_small(path, "flushed", n, np.int64)
            if not are_apart(self._flushed, np.ones(n, np.int64), n_classes):
                raise self._damaged("flushed")

    def _damaged(self, name: str) -> StoreError:
        return StoreError(f"{self._path / name} has what it cannot have: remove the unfinished run and begin anew")

    def of_classes(self, name: str, low: int, high: int) -> NDArray[Any]:
        """counts, losses or best of classes [low, high)."""
        dtype = np.int64 if name == "counts" else np.float64
        values = read_small(self._path, name, self._n_classes, dtype, slice(low, high))
        if name == "counts" and len(values) and not 0 <= values.min() <= values.max() <= self._n_samples:
            raise self._damaged(name)
        return values

    def blocks(self, low: int, high: int) -> Iterator[tuple[NDArray[np.int64], Block]]:
        """All that was found for classes [low, high): blocks, and of each line the class, counted from low.

        A class's lines come in ascending order of their rows.
        """
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
                raise self._damaged("rows")
            before = int(rows[-1])
            yield rows, scores
