"""Row blocks of X, by ranges of features, that stay in the memory of a process from one job of a run to the next.

To read and to sort them takes a quarter of a product. What stays is for speed alone: blocks are the same wherever they come
from. They are let go when a plan needs room, when jobs of another run come, and when none has asked for a while: a worker
is not told of a run's end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.memory import return_freed_memory, when_room_is_needed
from xmc_stream.models.lowrank.products import RangedBlock, Rows, lines_of, range_bits, ranged, ranged_blocks
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


class _Held:
    """The first blocks of parts of the rows of one run, None where they are being made; users: jobs that are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run, self._taken, self._users = "", 0, 0
        self._parts: dict[Part, list[RangedBlock] | None] = {}
        self._timer: threading.Timer | None = None

    @contextmanager
    def using(self, run: str) -> Iterator[None]:
        """A block in which a job of a run works: what stays is that run's."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if run != self._run:
                self._forget()
                self._run = run
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._timer = threading.Timer(_IDLE, self.let_go)
                    self._timer.daemon = True
                    self._timer.start()

    def ask(self, rows: Part, n_bytes: int, room: int) -> tuple[list[RangedBlock], bool]:
        """What is there of a part; whether it is to be filled, for which n_bytes are set aside."""
        with self._lock:
            if rows in self._parts:
                return self._parts[rows] or [], False
            if self._taken + n_bytes > room:
                return [], False
            self._parts[rows] = None
            self._taken += n_bytes
            return [], True

    def fill(self, run: str, rows: Part, blocks: list[RangedBlock]) -> None:
        """Leave a part's first blocks, if its run is still the one that is here."""
        with self._lock:
            if run == self._run and rows in self._parts:
                self._parts[rows] = blocks

    def let_go(self) -> None:
        """Of all; what jobs are working with goes when these end."""
        with self._lock:
            some = bool(self._parts)
            self._forget()
        if some:
            return_freed_memory()

    def _forget(self) -> None:
        self._parts, self._taken, self._run = {}, 0, ""


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
    with _held.using(holding.run):
        there, to_fill = _held.ask(rows, n_bytes, holding.room)
        yield from there
        first = there[-1].start + there[-1].n if there else rows[0]
        if to_fill:
            yield from _filled(X, rows, row_bytes, n_bytes // _ENTRY, holding.run)
        elif first < rows[1]:
            yield from ranged_blocks(X, (first, rows[1]), row_bytes)


def _filled(X: SparseMatrix, rows: Part, row_bytes: int, entries: int, run: str) -> Iterator[Rows]:
    """The blocks of a part. The first ones stay, as far as they have so many entries in all."""
    places, values = np.empty(entries, np.uint32), np.empty(entries, np.float32)
    spare: tuple[NDArray[np.uint32], NDArray[np.float32]] | None = None  # for those that do not stay
    blocks: list[RangedBlock] = []
    at = 0
    try:
        for (x,) in stream((X,), row_bytes, *rows, lines_of(row_bytes)):
            end = at + len(x.indices)
            if spare is None and end <= entries:
                block = ranged(x, X.shape[1], places[at:end], values[at:end])
                assert isinstance(block, RangedBlock)
                blocks.append(block)
                yield block
                at = end
                continue
            if spare is None:
                most = row_bytes // X.entry_bytes
                spare = np.empty(most, np.uint32), np.empty(most, np.float32)
            yield ranged(x, X.shape[1], *spare)
    finally:
        _held.fill(run, rows, blocks)
