"""Processes that compile one kernel do so in turn.

Numba numbers the files of a kernel's types by those that its index has, and reads the index before it writes: two processes
that save at once would give their code one name.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from pathlib import Path
from typing import IO, Any

from numba.core import event as events

from xmc_stream.kernels.cache import take

_LOCK, _COMPILE = "numba:compiler_lock", "numba:compile"


class Turns(events.Listener):  # type: ignore[misc, unused-ignore]
    """A kernel's lock is held from the begin of its compilation until it is saved.

    Numba has a lock of its own meanwhile, within those of the kernels that call this one. So nobody waits in a circle.
    """

    def __init__(self, folder: Path, functions: Container[Any]) -> None:
        """functions: those that are kept in the folder; others are not waited for."""
        self._folder, self._functions = folder, functions
        self._of_thread = threading.local()  # the files locked by each call of numba that is under way

    def register(self) -> None:
        """Listen to numba, from now on."""
        register: Any = events.register  # it has no types
        for kind in (_LOCK, _COMPILE):
            register(kind, self)

    def on_start(self, event: Any) -> None:
        """Numba's lock is wanted, or a kernel is compiled in it."""
        calls = self._calls()
        if event.kind == _LOCK:
            calls.append([])
        elif calls and (function := event.data["dispatcher"].py_func) in self._functions:
            lock = take(self._folder / f"{function.__module__}.{function.__qualname__}.lock")
            if lock is not None:
                calls[-1].append(lock)

    def on_end(self, event: Any) -> None:
        """The kernel is saved once numba's lock is free."""
        calls = self._calls()
        if event.kind == _LOCK and calls:
            for lock in calls.pop():
                lock.close()

    def _calls(self) -> list[list[IO[str]]]:
        calls: list[list[IO[str]]] = self._of_thread.__dict__.setdefault("calls", [])
        return calls
