"""Which kernels were compiled before: notes beside numba's cache, for the very sources, numba and processor.

A note may list kernels with the types of their arguments: then they are loaded without being called.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from xmc_stream.kernels.jit import KERNELS, sources
from xmc_stream.kernels.permutation import mix


def _note(name: str) -> Path | None:
    """The file that says so; None where nothing is cached."""
    cache: Any = getattr(mix, "_cache", None)
    folder = getattr(cache, "cache_path", None)
    if folder is None:
        return None
    processor = cpu_target.target_context.codegen().magic_tuple()
    made_of = hashlib.sha256(f"{name} {numba.__version__} {processor} {sources()}".encode())
    return Path(folder) / f"xmc_stream-{made_of.hexdigest()[:16]}.compiled"


def compiled_before(name: str) -> bool:
    """Whether what `name` stands for is in the cache; True also where there is no cache to put it in."""
    note = _note(name)
    return note is None or note.exists()


def note_compiled(name: str) -> None:
    """Say that it is; where that cannot be written down, it is not."""
    note = _note(name)
    if note is not None:
        with suppress(OSError):
            note.touch()


def note_loaded(name: str) -> None:
    """Say so, and list the kernels that this process has loaded: of those that it compiled also what they call."""
    note = _note(name)
    if note is not None:
        listed = [
            (kernel.py_func.__module__, kernel.py_func.__name__, types)
            for kernel in KERNELS
            for types in kernel.overloads
        ]
        work = note.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            work.write_bytes(pickle.dumps(listed))
            work.replace(note)  # whoever looks meanwhile finds it whole


def load_listed(name: str) -> bool:
    """Load what a note lists; False where it lists nothing."""
    note = _note(name)
    try:
        listed = pickle.loads(b"" if note is None else note.read_bytes())
    except (EOFError, OSError, pickle.UnpicklingError):
        return False
    for module, kernel, types in listed:
        getattr(import_module(module), kernel).compile(types)
    return True
