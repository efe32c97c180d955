"""The cache of tiles with one thread and with eight."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from xmc_stream.errors import MemoryLimitError
from xmc_stream.linear.kernels.scores import Tile
from xmc_stream.models.cache import TileCache


def empty_tile() -> Tile:
    return Tile(np.zeros(0, np.int32), np.zeros(0, np.uint16), np.zeros(0, np.float32), np.zeros(0, np.float32))


def no_tile() -> Tile:
    raise AssertionError("the tile is there already")


def visit(cache: TileCache, key: str, size: int, made: list[str]) -> None:
    def make() -> Tile:
        made.append(key)
        return empty_tile()

    with cache.use(key, size, make):
        pass


def in_threads(n: int, work: Callable[[int], None]) -> None:
    """Run work(0) .. work(n - 1) beside each other; their errors, and threads that wait forever, are raised here."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0 if errors else 20)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def in_time(test: Callable[[], None]) -> Callable[[], None]:
    """A test that fails where it would wait forever."""
    return functools.wraps(test)(lambda: in_threads(1, lambda _: test()))


@in_time
def test_the_least_recently_used_tiles_are_dropped() -> None:
    cache, made = TileCache(10), []
    for key in "abca":  # 9 of 10 bytes, b is the oldest
        visit(cache, key, 3, made)
    assert made == ["a", "b", "c"]
    visit(cache, "d", 4, made)  # takes the place of b
    with cache.use("a", 3, no_tile), cache.use("c", 3, no_tile):
        pass
    visit(cache, "b", 3, made)  # takes the place of d, the oldest
    with cache.use("a", 3, no_tile), cache.use("c", 3, no_tile), cache.use("b", 3, no_tile):
        pass
    visit(cache, "d", 10, made)
    visit(cache, "a", 3, made)
    assert made == ["a", "b", "c", "d", "b", "d", "a"]


@in_time
def test_a_dropped_tile_is_given_back_before_the_next_is_made() -> None:
    cache, dropped = TileCache(5), []
    with cache.use("a", 3, empty_tile) as tile:
        weakref.finalize(tile.weights, dropped.append, "a")
        del tile

    def make() -> Tile:
        assert dropped == ["a"]
        return empty_tile()

    with cache.use("b", 3, make):
        pass


@in_time
def test_a_tile_that_never_fits_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"takes 11 B and 10 B are planned for tiles: raise memory_limit"):
        TileCache(10).use("a", 11, empty_tile).__enter__()


@in_time
def test_a_tile_that_could_not_be_made_is_not_remembered() -> None:
    cache, made = TileCache(10), []

    def fail() -> Tile:
        raise OSError("no")

    for _ in range(2):
        with pytest.raises(OSError, match="no"), cache.use("a", 8, fail):
            raise AssertionError("not reached")
    visit(cache, "b", 10, made)  # all the room is there
    visit(cache, "a", 10, made)
    assert made == ["b", "a"]


def test_threads_that_want_the_same_tile_get_one() -> None:
    cache, made, tiles = TileCache(10), [], []
    together = threading.Barrier(8)

    def make() -> Tile:
        made.append(1)
        time.sleep(0.05)
        if len(made) == 1:
            raise OSError("the first attempt fails")  # and one of those who wait makes it
        return empty_tile()

    def work(_: int) -> None:
        together.wait(10)
        try:
            with cache.use("a", 10, make) as tile:
                tiles.append(tile)
        except OSError:
            made.append(0)

    in_threads(8, work)
    assert sorted(made) == [0, 1, 1]
    assert len(tiles) == 7
    assert all(tile is tiles[0] for tile in tiles)


@pytest.mark.parametrize(("max_bytes", "all_fit"), [(9, False), (20, False), (45, True)])
def test_eight_threads_keep_the_bound(max_bytes: int, all_fit: bool) -> None:
    sizes = dict(zip("abcdefghi", range(1, 10), strict=True))
    cache, lock, made = TileCache(max_bytes), threading.Lock(), Counter[str]()
    alive, busy, leaving = Counter[str](), Counter[str](), Counter[str]()
    most = 0

    def check() -> None:
        # what lives, but for tiles that a thread is just giving back
        nonlocal most
        held = sum(sizes[key] for key, count in alive.items() for _ in range(count - leaving[key]))
        most = max(most, held)
        assert held <= max_bytes

    def dropped(key: str) -> None:
        with lock:
            alive[key] -= 1

    def make(key: str) -> Tile:
        with lock:
            made[key] += 1
            alive[key] += 1
            assert not busy[key]
            check()
        time.sleep(1e-4)
        tile = empty_tile()
        weakref.finalize(tile.weights, dropped, key)
        return tile

    def work(i: int) -> None:
        rng = np.random.default_rng(i)
        for key in rng.choice(list(sizes), 150):
            with cache.use(key, sizes[key], lambda key=key: make(key)) as tile:
                with lock:
                    assert tile is not None
                    busy[key] += 1
                    check()
                time.sleep(1e-5)
                with lock:
                    busy[key] -= 1
                    leaving[key] += 1
            del tile
            with lock:
                leaving[key] -= 1

    in_threads(8, work)
    assert most > max_bytes // 2
    assert (set(made.values()) == {1}) == all_fit
