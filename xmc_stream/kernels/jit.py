"""All compilation options in one place.

nogil: kernels run beside each other in one process. cache: a process loads what another compiled. No fastmath: a sum
must round the same in a dense and in a scattered path, so multiply and add are never fused and never reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

_compiled = njit(nogil=True, cache=True, fastmath=False, error_model="numpy")


def kernel(function: F) -> F:
    """A compiled function whose code is kept for other processes."""
    compiled: Any = _compiled(function)
    cache = getattr(compiled, "_cache", None)
    if cache is not None and fcntl is not None:
        cache.save_overload = _one_at_a_time(cache.save_overload, cache)
    return cast(F, compiled)


def _one_at_a_time(save: Callable[..., None], cache: Any) -> Callable[..., None]:
    """Save under a lock: two processes that compile one function for different types at once would name their code alike.

    Numba numbers the files of a function's types by those that its index has, and reads the index right before.
    """

    def locked(*arguments: Any) -> None:
        try:
            lock = open(Path(cache.cache_path) / "xmc_stream.lock", "a")  # noqa: SIM115
        except OSError:  # no folder yet, or none that can be written to: numba says what it must
            save(*arguments)
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(*arguments)

    return locked
