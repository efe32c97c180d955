"""Tiles of weights in memory, shared by the threads of a process and bounded in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.system.memory import format_size

T = TypeVar("T")


@dataclass
class _Entry:
    """A tile; None while it is made."""

    size: int
    users: int = 1
    tile: Any = None


class TileCache:
    """Least recently used tiles are dropped to keep within max_bytes; tiles in use stay.

    Two threads that want the same tile get one: the second waits. A thread that finds no room waits for others to let
    go of theirs, and as it holds none itself then, some thread always goes on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._free = threading.Condition()
        self._entries: dict[Hashable, _Entry] = {}  # the least recently used one first
        self._taken = 0  # bytes of all entries

    @contextmanager
    def use(self, key: Hashable, size: int, make: Callable[[], T]) -> Iterator[T]:
        """The tile of a key, made if it is not there. size: its bytes, or a bound on them."""
        if size > self.max_bytes:
            raise MemoryLimitError(
                f"a tile of weights takes {format_size(size)} and {format_size(self.max_bytes)} are planned for tiles: "
                "raise " + flags.MEMORY_LIMIT + " or lower " + flags.THREADS
            )
        entry = self._take(key, size)
        try:
            if entry.tile is None:
                self._make(entry, make)
            yield entry.tile
        finally:
            with self._free:
                entry.users -= 1
                if entry.tile is None:  # it could not be made
                    self._drop(key)
                self._free.notify_all()

    def _take(self, key: Hashable, size: int) -> _Entry:
        """The entry of a tile that is there, or a new one, whose tile is to be made."""
        with self._free:
            while True:
                entry = self._entries.get(key)
                if entry is None and self._make_room(size):
                    self._entries[key] = _Entry(size)
                    self._taken += size
                    return self._entries[key]
                if entry is not None and entry.tile is not None:
                    self._entries[key] = self._entries.pop(key)
                    entry.users += 1
                    return entry
                del entry  # who waits keeps no tile that is dropped meanwhile
                self._free.wait()

    def _make(self, entry: _Entry, make: Callable[[], Any]) -> None:
        tile = make()
        if tile.nbytes > entry.size:
            raise StoreError(
                f"a tile of weights takes {format_size(tile.nbytes)} and {format_size(entry.size)} by what was noted when "
                "they were written: model or unfinished run are damaged; train anew"
            )
        with self._free:
            entry.tile = tile
            self._free.notify_all()

    def _make_room(self, size: int) -> bool:
        room, dropped = self.max_bytes - self._taken, []
        for key, entry in self._entries.items():
            if room >= size:
                break
            if entry.users == 0:
                dropped.append(key)
                room += entry.size
        for key in dropped:
            self._drop(key)
        return room >= size

    def _drop(self, key: Hashable) -> None:
        self._taken -= self._entries.pop(key).size


_cache = TileCache(0)
_cache_lock = threading.Lock()


def shared_cache(max_bytes: int) -> TileCache:
    """The process's cache; jobs that plan with another size start a new one."""
    global _cache
    with _cache_lock:
        if _cache.max_bytes != max_bytes:
            _cache = TileCache(max_bytes)
        return _cache


def drop_tiles() -> None:
    """Give the process's tiles back."""
    shared_cache(0)
