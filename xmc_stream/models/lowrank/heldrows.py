"""Row blocks of X, by ranges of features, that stay in the memory of a process from one job of a run to the next.

To read and to sort them takes a quarter of a product. What stays is for speed alone: blocks are the same wherever they come
from. They are let go when a plan needs room, when jobs of another run come, and when none has asked for a while: a worker
is not told of a run's end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.memory import return_freed_memory, when_room_is_needed
from xmc_stream.models.lowrank.products import RangedBlock, Rows, by_ranges, lines_of, range_bits, ranged_blocks
from xmc_stream.store.matrix import SparseMatrix, stream

_ENTRY = 8  # bytes, with its place
_IDLE = 60.0  # seconds without a job, after which nothing stays

Part = tuple[int, int]  # rows [first, last)


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
    blocks: Sequence[RangedBlock] = ()
    jobs: int = 0


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
    def using(self, holding: Holding, rows: Part, n_bytes: int) -> Iterator[tuple[_Share, bool]]:
        """A block in which a job works on a part: its share, and whether to fill it. What stays is the job's run's.

        n_bytes: to set aside; where there is no room for them, the share has none.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if holding.run != self._run:
                self._forget()
                self._run = holding.run
            share, to_fill = self._parts.get(rows), False
            if share is None:
                to_fill = self.taken + n_bytes <= holding.room
                share = _Share(n_bytes if to_fill else 0)
                if to_fill:
                    self._parts[rows] = share
            share.jobs += 1
            self._jobs += 1
        try:
            yield share, to_fill
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


def held_or_read(X: SparseMatrix, rows: Part, row_bytes: int, holding: Holding) -> Iterator[Rows]:
    """What `ranged_blocks` gives: the first blocks from memory where they are there, else they are left there."""
    if not holding.room or not range_bits(X.shape[1]):
        yield from ranged_blocks(X, rows, row_bytes)
        return
    begin, end = X.entries(*rows)
    n_bytes = min(holding.part, _ENTRY * (end - begin))
    with _held.using(holding, rows, n_bytes) as (share, to_fill):
        if to_fill:
            yield from _filled(X, rows, row_bytes, share)
            return
        there = share.blocks
        yield from there
        first = there[-1].start + there[-1].n if there else rows[0]
        if first < rows[1]:
            yield from ranged_blocks(X, (first, rows[1]), row_bytes)


def _filled(X: SparseMatrix, rows: Part, row_bytes: int, share: _Share) -> Iterator[Rows]:
    """The blocks of a part. The first ones stay, as far as there is memory for them."""
    entries = share.n_bytes // _ENTRY
    places, values = np.empty(entries, np.uint32), np.empty(entries, np.float32)
    spare: tuple[NDArray[np.uint32], NDArray[np.float32]] | None = None  # for those that do not stay
    blocks: list[RangedBlock] = []
    at = 0
    try:
        for (x,) in stream((X,), row_bytes, *rows, lines_of(row_bytes)):
            end = at + len(x.indices)
            if spare is None and end <= entries:
                blocks.append(by_ranges(x, X.shape[1], places[at:end], values[at:end]))
                yield blocks[-1]
                at = end
                continue
            if spare is None:
                most = X.block_bytes(row_bytes) // X.entry_bytes
                spare = np.empty(most, np.uint32), np.empty(most, np.float32)
            yield by_ranges(x, X.shape[1], *spare)
    finally:
        share.blocks = blocks
