"""Asking a job that is under way to stop: a run that was interrupted does not wait for what it has begun.

Jobs are asked at their block boundaries, when the store reads or writes for them. A compiled kernel cannot be asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(BaseException):
    """Ends a job that its run does not want any more; no error, so that nothing takes it for one."""


_thread = threading.local()


@contextmanager
def wanted_while(wanted: Callable[[], bool]) -> Iterator[None]:
    """What this thread does in the block ends with StoppedError soon after wanted() is false."""
    _thread.wanted = wanted
    try:
        stop_if_unwanted()
        yield
    finally:
        del _thread.wanted


def stop_if_unwanted() -> None:
    """Raise StoppedError in a job that is not wanted any more."""
    wanted: Callable[[], bool] | None = getattr(_thread, "wanted", None)
    if wanted is not None and not wanted():
        raise StoppedError
