"""Asking a job that is under way to stop: a run that was interrupted does not wait for what it has begun.

Jobs are asked at their block boundaries, when the store reads or writes for them. A compiled kernel cannot be asked.

On a cluster a job may run in two places at once: a worker that is frozen or cut off has one, and another one was given it.
So what a job writes has a work name of that copy, until it is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class StoppedError(BaseException):
    """Ends a job that its run does not want any more; no error, so that nothing takes it for one."""


_thread = threading.local()


@contextmanager
def wanted_while(wanted: Callable[[], bool], copy: str = "") -> Iterator[None]:
    """What this thread does in the block ends with StoppedError soon after wanted() is false. copy: see `work_name`."""
    _thread.wanted, _thread.copy = wanted, copy
    try:
        stop_if_unwanted()
        yield
    finally:
        del _thread.wanted, _thread.copy


def copy_name() -> str:
    """What tells this thread's job from other copies of it; "" where there can be none."""
    name: str = getattr(_thread, "copy", "")
    return name


def work_name(path: Path) -> Path:
    """Where this thread writes what will be `path`; another copy of its job does elsewhere."""
    copy = copy_name()
    return path.with_name(f"{path.name}.{copy}.partial" if copy else f"{path.name}.partial")


def stop_if_unwanted() -> None:
    """Raise StoppedError in a job that is not wanted any more."""
    wanted: Callable[[], bool] | None = getattr(_thread, "wanted", None)
    if wanted is not None and not wanted():
        raise StoppedError
