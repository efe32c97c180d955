"""All compilation options in one place.

nogil: kernels run beside each other in one process. cache: a process loads what another compiled. No fastmath: a sum
must round the same in a dense and in a scattered path, so multiply and add are never fused and never reordered.
Numba counts references to arrays whenever one is named: a function that is called for every entry and takes many arrays
may spend a fifth of its time on that. `inner_kernel` is for these: no references are counted.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit
from numba.core.registry import cpu_target

from xmc_stream.kernels import kept

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = njit  # its types do not know _nrt
_options = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy"}


def _has_nrt() -> bool:
    """Whether numba still has its private option `_nrt`, by which an inner kernel counts no references."""
    return hasattr(getattr(cpu_target, "options", None), "_nrt")


def _counting(references: bool) -> dict[str, Any]:
    """The options of kernels, or of inner ones. Both say `_nrt`, as what is not said is taken over from the caller."""
    return {**_options, "_nrt": references} if _has_nrt() else _options


if not _has_nrt():
    warnings.warn(
        f"numba {numba.__version__} has no option _nrt any more, which keeps inner loops from counting references. Training "
        "takes longer and gives the same model. Install numba 0.68, which has the option",
        RuntimeWarning,
        stacklevel=1,
    )
KERNELS: list[Any] = []  # of the modules that are imported
_compiled, _uncounted = _njit(**_counting(True)), _njit(**_counting(False))


def kernel(function: F) -> F:
    """A compiled function whose code is kept for other processes."""
    return cast(F, _kept(_compiled(function)))


def inner_kernel(function: F) -> F:
    """A kernel that makes no array, and returns none (either does not compile, or must not be done), called by kernels."""
    return cast(F, _kept(_uncounted(function)))


@functools.cache
def sources() -> str:
    """A digest of the sources of all kernels."""
    made_of = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        made_of.update(source.read_bytes())
    return made_of.hexdigest()


def _kept(compiled: Any) -> Any:
    """Compiled code is of use only for the sources that all kernels had.

    Numba looks at a function's own file. The code of other kernels, their constants and the order of a tuple's members are in
    it too: code that is older than these would take one array for another.
    """
    KERNELS.append(compiled)
    cache = getattr(compiled, "_cache", None)
    file = getattr(cache, "_cache_file", None)
    if file is not None and hasattr(file, "_source_stamp"):
        file._source_stamp = file._source_stamp, sources()
    if cache is not None and fcntl is not None:
        cache.save_overload = _one_at_a_time(cache.save_overload, cache)
    if cache is not None and hasattr(cache, "_load_overload") and hasattr(cache, "_impl") and kept.usable():
        cache.load_overload = _without_compiler(cache)
        cache._impl.reduce, cache._impl.rebuild = kept.reduce, kept.rebuild
    return compiled


def _without_compiler(cache: Any) -> Callable[..., Any]:
    """Load kept code with no more than it needs: memory from numba's runtime.

    Numba would first load all that a compiler needs. Where nothing is kept it compiles, and does that then.
    """

    def load(signature: Any, context: Any) -> Any:
        kept.give_memory()
        return cache._load_overload(signature, context)

    return load


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
