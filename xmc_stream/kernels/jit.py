"""How kernels are compiled: all options in one place.

nogil: kernels run beside each other in one process. cache: a process loads what another compiled (`cache`). No fastmath: a
sum must round the same in a dense and in a scattered path, so multiply and add are never fused and never reordered.

Numba counts references to arrays whenever one is named: a function that is called for every entry and takes many arrays
may spend more time on that than on its work. `inner_kernel` is for these: no references are counted. It has numba's private
option `_nrt`: without it, trainings take 1.1 (PPDSparse) to 3.2 times as long (PD-Sparse; benchmarks/README.md).

Importing numba takes a third of a second: it is imported when the first kernel is called. With NUMBA_DISABLE_JIT=1 kernels
are the plain Python functions that stand in the files.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from xmc_stream.kernels.cache import folder

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
_options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
_making = threading.RLock()


class Kernel:
    """A function that numba compiles when it is first called."""

    def __init__(self, function: Callable[..., Any], references: bool) -> None:
        self.py_func = function
        self._references = references
        self._made: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self._made or self.numba)(*arguments, **named)

    @property
    def numba(self) -> Any:
        """What numba makes of the function. Imports numba."""
        with _making:
            if self._made is None:
                self._made = _compiler()(self.py_func, self._references)
            return self._made


def kernel(function: F) -> F:
    """A compiled function whose code is kept for other processes."""
    return cast(F, Kernel(function, True)) if COMPILED else function


def inner_kernel(function: F) -> F:
    """A kernel that makes no array, and returns none (either does not compile, or must not be done), called by kernels.

    Python may call it too: it keeps the arrays meanwhile.
    """
    return cast(F, Kernel(function, False)) if COMPILED else function


@functools.cache
def _compiler() -> Callable[..., Any]:
    """Numba's decorator, with our options, in our folder."""
    import numba
    from numba import config
    from numba.extending import typeof_impl

    from xmc_stream.kernels.intrinsics import UNCOUNTED  # which also tells numba what the instructions are
    from xmc_stream.kernels.turns import Turns

    kept, settings, typeof = folder(), cast(Any, config), cast(Any, numba.typeof)
    functions: set[Callable[..., Any]] = set()
    compiling: Any = numba.njit  # its types do not know _nrt

    def make(function: Callable[..., Any], references: bool) -> Any:
        functions.add(function)
        before = settings.CACHE_DIR
        settings.CACHE_DIR = str(kept)  # read when a function is made
        try:
            counted = dict.fromkeys(UNCOUNTED, True)  # what is not said is the caller's
            options = {**_options, **(counted if references else UNCOUNTED)}
            return compiling(**options, cache=kept is not None)(function)
        finally:
            settings.CACHE_DIR = before

    @typeof_impl.register(Kernel)
    def _of_kernel(value: Kernel, context: Any) -> Any:
        """Where a kernel calls another one."""
        return typeof(value.numba)

    if kept is not None:
        Turns(kept, functions).register()
    return make
