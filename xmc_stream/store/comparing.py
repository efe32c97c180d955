"""Comparing chunks with their checksums as they are read: each once a run, whichever of its threads comes by it first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_MOST = 1 << 14  # chunks that are known to be compared: some megabytes; one that is forgotten is compared again


@dataclass(frozen=True)
class Comparing:
    """What a run compares as it reads it: the chunks of these stores."""

    stores: tuple[str, ...]
    run: str


@dataclass
class _Comparison:
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_thread = threading.local()


def comparing() -> Comparing | None:
    """What the arrays that this thread opens now compare."""
    what: Comparing | None = getattr(_thread, "comparing", None)
    return what


def run_comparing(array: Path) -> str:
    """The run that compares the chunks of an array as this thread opens it now; "" where none does."""
    what = comparing()
    if what is None or not f"{array}/".startswith(tuple(f"{store}/" for store in what.stores)):
        return ""
    return what.run


@contextmanager
def compare_while_reading(what: Comparing | None) -> Iterator[None]:
    """Arrays that this thread opens in the block compare a chunk with its checksum before they give anything of it."""
    before, _thread.comparing = comparing(), what
    try:
        yield
    finally:
        _thread.comparing = before


def once(run: str, chunk: Path, compare: Callable[[], None]) -> None:
    """Compare a chunk, unless that was done in this run; who comes meanwhile waits."""
    comparison = _comparison(run, str(chunk))
    with comparison.lock:
        if not comparison.done:
            compare()
            comparison.done = True


@functools.lru_cache(maxsize=_MOST)
def _comparison(run: str, chunk: str) -> _Comparison:
    return _Comparison()
