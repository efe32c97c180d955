"""Row blocks of X, and of Y, that stay in the memory of a process for all jobs of a run: they are read once, not once a job.

To read and to sort them takes a quarter of a product. What stays is for speed alone: blocks are the same wherever they come
from. They are let go when a plan needs room, when jobs of another run come, and when none has asked for a while: a worker
is not told of a run's end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from xmc_stream.factors.products import Rows, entries_bytes, lines_of, ranged_blocks, to_hold
from xmc_stream.store.matrix import Block, SparseMatrix, stream
from xmc_stream.system.memory import return_freed_memory, when_room_is_needed

_IDLE = 60.0  # seconds without a job, after which nothing stays

Part = tuple[int, int]  # rows [first, last)
Pair = tuple[Rows, Block | None]  # a block of X; the same rows of Y, where they stay too


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
