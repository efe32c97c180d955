"""Row blocks of X: as they stand, by ranges of features, and such as stay in memory, with those of Y, for all jobs of a run.

To read and to sort them takes a quarter of a product. What stays in the memory of a process is for speed alone: blocks are
the same wherever they come from. They are let go when a plan needs room, when jobs of another run come, and when none has
asked for a while: a worker is not told of a run's end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.kernels.ranges import Ranges, into_ranges
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix, stream
from xmc_stream.system.memory import return_freed_memory, when_room_is_needed

ROW_BYTES = 4 * MIB  # of X in a row block, and of Y
ROW_LINES = 2048  # rows of a row block, at most
LARGE_ROW_BYTES = 32 * MIB  # of X in a row block by ranges of features, at most
_LINE_BYTES = ROW_BYTES // ROW_LINES
_RANGE_BITS = 14  # features of a range: 4 MB of a line of 64 columns each
_RANGES = 256  # about, at most: more are slow to fill
_IDLE = 60.0  # seconds without a job, after which nothing stays
Array = NDArray[Any]
Part = tuple[int, int]  # rows [first, last)
Parts = tuple[tuple[int, int], ...]


def blocks(*matrices: SparseMatrix, rows: tuple[int, int] | None = None) -> Iterator[tuple[Block, ...]]:
    """Rows [first, last) of matrices, or all, by row blocks."""
    first, last = rows or (0, matrices[0].n_lines)
    return stream(matrices, ROW_BYTES, first, last, ROW_LINES)


@dataclass(frozen=True)
class RangedBlock:
    """Rows [start, start + n) of X, by ranges of features."""

    start: int
    n: int
    entries: Ranges


Rows = Block | RangedBlock
Pair = tuple[Rows, Block | None]  # a block of X; the same rows of Y, where they stay too


def most_whole() -> int:
    """Features, up to which rows are as good as they stand."""
    return 2 << _RANGE_BITS


def range_bits(n_features: int) -> int:
    """2^bits features are a range; 0 where X has so few that rows are as good as they stand."""
    if n_features <= most_whole():
        return 0
    # a place has 32 bits: a row's number needs these of the most lines of a block
    return min(
        max(_RANGE_BITS, (n_features // _RANGES).bit_length()), 32 - (lines_of(LARGE_ROW_BYTES) - 1).bit_length()
    )


def lines_of(row_bytes: int) -> int:
    """Rows of a row block, at most."""
    return row_bytes // _LINE_BYTES


def ranged(block: Block, n_features: int, places: Array | None = None, values: Array | None = None) -> Rows:
    """A block of X by ranges of features, where X has many. places, values: to fill, in the place of new arrays."""
    bits, nnz = range_bits(n_features), len(block.indices)
    if not bits:
        return block
    places = np.empty(nnz, np.uint32) if places is None else places
    values = np.empty(nnz, np.float32) if values is None else values
    starts = np.empty(((n_features - 1) >> bits) + 2, np.int64)
    entries = Ranges(bits, starts, places[:nnz], values[:nnz])
    into_ranges(*csr(block), entries)
    return RangedBlock(block.start, block.n, entries)


def ranged_blocks(X: SparseMatrix, rows: tuple[int, int], row_bytes: int) -> Iterator[Rows]:
    """Rows [first, last) of X by ranges of features. row_bytes: of X in a block."""
    bits = range_bits(X.shape[1])
    most = min(X.nnz, X.block_bytes(row_bytes) // X.entry_bytes) if bits else 0
    places, values = np.empty(most, np.uint32), np.empty(most, np.float32)
    for (x,) in stream((X,), row_bytes, *rows, lines_of(row_bytes)):
        yield ranged(x, X.shape[1], places, values)


def to_hold(block: Block, n_features: int) -> Rows:
    """A block of a stream, as `ranged_blocks` gives it, in memory of its own."""
    if range_bits(n_features):
        return ranged(block, n_features)
    data = None if block.data is None else block.data.copy()
    return Block(block.start, block.indptr, block.indices.copy(), data)


def csr(block: Block) -> tuple[Array, Array, Array]:
    """indptr, indices and values of a block; of ones where it has none."""
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return block.indptr, block.indices, data


def held_bytes(dataset: Dataset) -> int:
    """Of X and Y in memory, as products take them: see `entries_bytes`."""
    rows = 0, dataset.n_samples
    return entries_bytes(dataset.X_rows(), rows) + entries_bytes(dataset.Y_rows(), rows)


def entries_bytes(matrix: SparseMatrix, rows: tuple[int, int]) -> int:
    """Of rows [first, last) in memory: with their values, or by ranges of features."""
    begin, end = matrix.entries(*rows)
    return max(8, matrix.entry_bytes) * (end - begin) + 16 * (rows[1] - rows[0])  # a block has one item of indptr more


@dataclass(frozen=True)
class Holding:
    """What jobs of a run may leave in memory. run: names this session of it; part: bytes of a part of the rows; room: of a

    process.
    """

    run: str = ""
    part: int = 0
    room: int = 0


NO_HOLDING = Holding()


@dataclass(eq=False)
class _Share:
    """Memory for the first blocks of a part of the rows: bytes, the blocks once they are made, jobs that work with it."""

    n_bytes: int
    blocks: Sequence[Pair] | None = None
    jobs: int = 0
    _filling: threading.Lock = field(default_factory=threading.Lock)

    def filled(self, X: SparseMatrix, Y: SparseMatrix | None, rows: Part, row_bytes: int) -> Sequence[Pair]:
        """The blocks. The first job that comes makes them, as many as there is memory for; others wait, and read nothing."""
        with self._filling:
            if self.blocks is None:
                self.blocks = list(self._made(X, Y, rows, row_bytes)) if self.n_bytes else []
            return self.blocks

    def _made(self, X: SparseMatrix, Y: SparseMatrix | None, rows: Part, row_bytes: int) -> Iterator[Pair]:
        left = self.n_bytes
        for (x,) in stream((X,), row_bytes, *rows, lines_of(row_bytes)):
            mine = x.start, x.start + x.n
            left -= sum(entries_bytes(matrix, mine) for matrix in (X, Y) if matrix is not None)
            if left < 0:
                return
            yield to_hold(x, X.shape[1]), None if Y is None else Y.block(*mine)


class _Held:
    """Shares of parts of the rows of one run, and those let go of that jobs work with still; jobs: that are under way."""

    def __init__(self) -> None:
        # taken again by a thread that has it where the garbage collector, which runs anywhere, puts away a job that failed
        self._lock = threading.RLock()
        self._run, self._jobs = "", 0
        self._parts: dict[Part, _Share] = {}
        self._leaving: list[_Share] = []
        self._timer: threading.Timer | None = None

    @property
    def taken(self) -> int:
        """Bytes that are set aside. What jobs work with is, until these end, or more would be taken than was planned."""
        return sum(share.n_bytes for share in (*self._parts.values(), *self._leaving))

    @contextmanager
    def using(self, holding: Holding, rows: Part, n_bytes: int) -> Iterator[_Share]:
        """A block in which a job works on a part: its share. What stays is the job's run's.

        n_bytes: to set aside; where there is no room for them, the share has none.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if holding.run != self._run:
                self._forget()
                self._run = holding.run
            share = self._parts.get(rows)
            if share is None:
                fits = self.taken + n_bytes <= holding.room
                share = _Share(n_bytes if fits else 0)
                if fits:
                    self._parts[rows] = share
            share.jobs += 1
            self._jobs += 1
        try:
            yield share
        finally:
            with self._lock:
                share.jobs -= 1
                if not share.jobs and share in self._leaving:
                    self._leaving.remove(share)
                self._jobs -= 1
                if not self._jobs:
                    self._timer = threading.Timer(_IDLE, self.let_go)
                    self._timer.daemon = True
                    self._timer.start()

    def let_go(self) -> None:
        """Of all; what jobs are working with goes when these end."""
        with self._lock:
            some = bool(self._parts)
            self._forget()
        if some:
            return_freed_memory()

    def _forget(self) -> None:
        self._leaving += [share for share in self._parts.values() if share.jobs]
        self._parts, self._run = {}, ""


_held = _Held()
let_go = _held.let_go
when_room_is_needed(let_go)


def held_or_read(
    X: SparseMatrix, Y: SparseMatrix | None, rows: Part, row_bytes: int, holding: Holding
) -> Iterator[Pair]:
    """What `ranged_blocks` gives: the first blocks from memory, where they stay as far as there is room.

    Y: the same for all jobs of a run; its rows stay with those of X.
    """
    first = rows[0]
    if holding.room:
        n_bytes = sum(entries_bytes(matrix, rows) for matrix in (X, Y) if matrix is not None)
        with _held.using(holding, rows, min(holding.part, n_bytes)) as share:
            for x, y in share.filled(X, Y, rows, row_bytes):
                yield x, y
                first = x.start + x.n
    if first < rows[1]:
        for x in ranged_blocks(X, (first, rows[1]), row_bytes):
            yield x, None


def row_blocks(X: SparseMatrix, Y: SparseMatrix | None, parts: Parts, holding: Holding) -> Iterator[Pair]:
    """Row blocks of parts of the rows, of which some may be in memory, see `held_or_read`."""
    for rows in parts:
        if holding.room:
            yield from held_or_read(X, Y, rows, ROW_BYTES, holding)
        else:  # for one product it does not pay to sort them
            yield from ((x, None) for (x,) in blocks(X, rows=rows))
