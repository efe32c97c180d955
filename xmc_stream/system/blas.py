"""One BLAS thread a job: the scheduler has the threads, and a product comes out the same however many there are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_lock = threading.Lock()
_inside = 0
_limits: Any = None


@cache
def _controller() -> Any:
    import scipy.linalg  # noqa: F401 (it brings a BLAS of its own, which must be there to be found)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _take_control() -> None:
    """Let this thread set the number: threadpoolctl 3.8 has one thread in control of OpenBLAS, and ignores all others."""
    for library in _controller().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS uses one thread while any thread of the process is in such a block; what was set before is set again."""
    global _inside, _limits
    with _lock:
        if _inside == 0:
            _take_control()
            _limits = _controller().limit(limits=1, user_api="blas")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _take_control()
                _limits.restore_original_limits()
                _take_control()
