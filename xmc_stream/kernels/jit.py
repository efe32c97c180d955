"""All compilation options in one place, and functions that are compiled when they are needed.

nogil: kernels run beside each other in one process. cache: a process loads what another compiled. No fastmath: a sum
must round the same in a dense and in a scattered path, so multiply and add are never fused and never reordered.
Numba counts references to arrays whenever one is named: a function that is called for every entry and takes many arrays
may spend a fifth of its time on that. `inner_kernel` is for these: no references are counted.

Importing numba takes a third of a small training. It is imported when a kernel is called for which no machine code was
loaded by itself (`machine`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from xmc_stream.kernels.machine import kinds_of

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = os.environ.get("NUMBA_DISABLE_JIT", "0") != "0"
_options = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy"}
_PATIENCE = 60.0  # seconds that a process waits for another one that compiles or saves: that may be stopped
_making = threading.RLock()
_calls: dict[tuple[Kernel, Any], Any] | None = None  # numba's types of calls, where they are listed


class Kernel:
    """A function that numba compiles when it is called, unless machine code for such arguments was loaded.

    machine_code: functions, by the kinds of arguments that each is for.
    """

    def __init__(self, function: Callable[..., Any], references: bool) -> None:
        self.py_func = function
        self.machine_code: dict[Any, Callable[..., Any]] = {}
        self._references = references

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.machine_code and not named:
            compiled = self.machine_code.get(kinds_of(arguments))
            if compiled is not None:
                return compiled(*arguments)
        if _calls is not None and not named:
            _calls[self, kinds_of(arguments)] = tuple(map(self.numba.typeof_pyval, arguments))
        return self.numba(*arguments, **named)

    @property
    def numba(self) -> Any:
        """What numba makes of the function. Imports numba."""
        made = self.__dict__.get("_made")
        if made is None:
            with _making:
                made = self.__dict__.get("_made")
                if made is None:
                    made = self._made = _kept(_compilers()[self._references](self.py_func))
        return made

    @property
    def _numba_type_(self) -> Any:
        """Asked for by numba, where a kernel calls this one."""
        return self.numba._numba_type_


class Instruction:
    """What only compiled code has, by its name in `instructions`."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _numba_type_(self) -> Any:
        """Asked for by numba, where a kernel calls it."""
        from numba.core.registry import cpu_target

        made = getattr(import_module("xmc_stream.kernels.instructions"), self._name)
        context = cpu_target.typing_context
        context.refresh()  # or it does not know yet what was made
        return context.resolve_value_type(made)


def kernel(function: F) -> F:
    """A compiled function whose code is kept for other processes."""
    return function if _PLAIN else cast(F, Kernel(function, True))


def inner_kernel(function: F) -> F:
    """A kernel that makes no array, and returns none (either does not compile, or must not be done), called by kernels."""
    return function if _PLAIN else cast(F, Kernel(function, False))


def instruction(name: str, plain: Callable[..., Any] | None = None) -> Any:
    """A function of `instructions` for kernels; plain: the same in Python, for kernels that are not compiled."""
    return plain if _PLAIN else Instruction(name)


@contextmanager
def calls_listed() -> Iterator[dict[tuple[Kernel, Any], Any]]:
    """A block of which all calls of kernels from Python are listed: numba's types, by kernel and kinds of arguments."""
    global _calls
    _calls = {}
    try:
        yield _calls
    finally:
        _calls = None


@functools.cache
def sources() -> str:
    """A digest of the sources of all kernels."""
    made_of = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("kernels/*.py")):
        made_of.update(source.read_bytes())
    return made_of.hexdigest()


@functools.cache
def _compilers() -> tuple[Any, Any]:
    """Numba's decorators: of inner kernels, and of all others. Both say `_nrt`, as what is not said is the caller's.

    `_nrt` is a private option, by which an inner kernel counts no references.
    """
    import numba
    from numba.core.registry import cpu_target

    compiling: Any = numba.njit  # its types do not know _nrt
    if hasattr(getattr(cpu_target, "options", None), "_nrt"):
        return compiling(**_options, _nrt=False), compiling(**_options, _nrt=True)
    warnings.warn(
        f"numba {numba.__version__} has no option _nrt any more, which keeps inner loops from counting references. Training "
        "takes longer and gives the same model. Install numba 0.68, which has the option",
        RuntimeWarning,
        stacklevel=1,
    )
    return compiling(**_options), compiling(**_options)


def _kept(compiled: Any) -> Any:
    """Compiled code is of use only for the sources that all kernels had.

    Numba looks at a function's own file. The code of other kernels, their constants and the order of a tuple's members are in
    it too: code that is older than these would take one array for another.
    """
    from xmc_stream.kernels import kept

    cache = getattr(compiled, "_cache", None)
    file = getattr(cache, "_cache_file", None)
    if file is not None and hasattr(file, "_source_stamp"):
        file._source_stamp = file._source_stamp, sources()
    if cache is not None and fcntl is not None:
        cache.save_overload = _one_at_a_time(cache.save_overload, cache)
    if cache is not None and hasattr(cache, "_load_overload") and hasattr(cache, "_impl") and kept.usable():
        cache.load_overload = _without_compiler(cache, kept.give_memory)
        cache._impl.reduce, cache._impl.rebuild = kept.reduce, kept.rebuild
    if cache is not None and fcntl is not None:
        turn = _Turn(cache, compiled)
        cache.load_overload, compiled.compile = turn.load, turn.compile
    return compiled


def _without_compiler(cache: Any, give_memory: Callable[[], None]) -> Callable[..., Any]:
    """Load kept code with no more than it needs: memory from numba's runtime.

    Numba would first load all that a compiler needs. Where nothing is kept it compiles, and does that then.
    """

    def load(signature: Any, context: Any) -> Any:
        give_memory()
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
            if _has(lock) is not False:  # else it is not kept, and another process compiles it once more
                save(*arguments)

    return locked


def _has(lock: IO[str]) -> bool | None:
    """Whether this process has the lock of a file, for which it waits a minute; None where the file system has no locks."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return None
        else:
            return True
    return False


class _Turn:
    """One process compiles a function at a time: another one that needs it waits, and finds it in the cache.

    Who has a turn waits for none but those of functions that are called by it, so nobody waits in a circle.
    """

    def __init__(self, cache: Any, compiled: Any) -> None:
        self._load, self._compile, self._folder = cache.load_overload, compiled.compile, cache.cache_path
        self._name = f"{compiled.py_func.__module__}.{compiled.py_func.__qualname__}.lock"
        self._held: IO[str] | None = None

    def compile(self, signature: Any) -> Any:
        """Load or compile it, and save it. A turn that was taken ends here, however that does."""
        try:
            return self._compile(signature)
        finally:
            if self._held is not None:
                self._held.close()
                self._held = None

    def load(self, signature: Any, context: Any) -> Any:
        """What is kept of it; where nothing is, the turn is taken."""
        found = self._load(signature, context)
        if found is None and self._held is None:
            self._take()
            found = self._load(signature, context)  # of whoever had the turn before
        return found

    def _take(self) -> None:
        try:
            os.makedirs(self._folder, exist_ok=True)
            lock = open(Path(self._folder, self._name), "a")  # noqa: SIM115
        except OSError:  # where nothing can be written nothing is kept
            return
        if _has(lock):
            self._held = lock
        else:
            lock.close()
