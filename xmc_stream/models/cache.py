"""Tiles of weights in memory, shared by the threads of a process and bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.system.memory import format_size


class Sized(Protocol):
    """A tile of whatever kind of model."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class TileCache:
    """Least recently used tiles are dropped to keep within max_bytes; tiles in use stay.

    Two threads that want the same tile get one: the second waits. A thread that finds no room waits for others to let
    go of theirs, and as it holds none itself then, some thread always goes on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._free = threading.Condition()
        self._tiles: OrderedDict[Hashable, Any] = OrderedDict()  # None: being made
        self._sizes: dict[Hashable, int] = {}
        self._users: dict[Hashable, int] = {}

    @contextmanager
    def use(self, key: Hashable, size: int, make: Callable[[], T]) -> Iterator[T]:
        """The tile of a key, made if it is not there. size: its bytes, or a bound on them."""
        tile = self._take(key, size, make)
        try:
            yield tile
        finally:
            with self._free:
                self._users[key] -= 1
                self._free.notify_all()

    def _take(self, key: Hashable, size: int, make: Callable[[], T]) -> T:
        if size > self.max_bytes:
            raise MemoryLimitError(
                f"a tile of weights takes {format_size(size)} and {format_size(self.max_bytes)} are planned for tiles: "
                "raise " + flags.MEMORY_LIMIT + " or lower " + flags.THREADS
            )
        with self._free:
            while True:
                tile: T | None = self._tiles.get(key)
                if tile is not None:
                    self._tiles.move_to_end(key)
                    self._users[key] += 1
                    return tile
                if key not in self._tiles and self._make_room(size):
                    self._tiles[key], self._sizes[key], self._users[key] = None, size, 1
                    break
                self._free.wait()
        try:
            tile = make()
            if tile.nbytes > size:
                raise StoreError(
                    f"a tile of weights takes {format_size(tile.nbytes)} and {format_size(size)} by what was noted when they "
                    "were written: model or unfinished run are damaged; train anew"
                )
        except BaseException:
            with self._free:
                self._forget(key)
                self._free.notify_all()
            raise
        with self._free:
            self._tiles[key] = tile
            self._free.notify_all()
        return tile

    def _make_room(self, size: int) -> bool:
        for key in list(self._tiles):
            if sum(self._sizes.values()) + size <= self.max_bytes:
                return True
            if self._users[key] == 0:
                self._forget(key)
        return sum(self._sizes.values()) + size <= self.max_bytes

    def _forget(self, key: Hashable) -> None:
        del self._tiles[key], self._sizes[key], self._users[key]


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
