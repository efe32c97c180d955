"""Which kernels were compiled before: notes for the very sources, numba and processor.

A note may hold the machine code of the kernels that some work calls: then they are loaded without numba.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from xmc_stream.kernels import machine
from xmc_stream.kernels.jit import Kernel, sources

_DIGEST = 32  # bytes, at the beginning of a note that holds machine code


@functools.cache
def _folder() -> Path | None:
    """Where notes are: in the places that numba would use too, which importing it would have to tell; None if none can be."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(told),) if told else (Path(__file__).parent / "__pycache__", Path(home, "xmc_stream")):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


def _note(name: str) -> Path | None:
    """The file that says so; None where nothing is cached."""
    folder = _folder()
    if folder is None:
        return None
    told = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))  # how to compile
    made_of = hashlib.sha256(f"{name} {machine.stamp()} {told} {sources()}".encode())
    return folder / f"xmc_stream-{made_of.hexdigest()[:16]}.compiled"


def compiled_before(name: str) -> bool:
    """Whether what `name` stands for is in the cache; True also where there is no cache to put it in."""
    note = _note(name)
    return note is None or note.exists()


def note_compiled(name: str) -> None:
    """Say that it is; where that cannot be written down, it is not."""
    _write(name, b"")


def note_calls(name: str, calls: dict[tuple[Kernel, Any], Any]) -> None:
    """Say so, and keep the machine code of kernels that were called, as `calls_listed` has them."""
    kept = []
    for (kernel, kinds), types in calls.items():
        function = kernel.py_func
        kept.append(machine.kept_of(function.__module__, function.__name__, kinds, kernel.numba.overloads[types]))
    noted = pickle.dumps(kept)
    _write(name, hashlib.sha256(noted).digest() + noted)


def load_noted(name: str) -> bool:
    """Load the machine code that a note holds; False where it holds none, or is damaged."""
    note = _note(name)
    try:
        noted = b"" if note is None else note.read_bytes()
    except OSError:
        return False
    if note is None or not noted:
        return False
    told, noted = noted[:_DIGEST], noted[_DIGEST:]
    if told != hashlib.sha256(noted).digest():  # damaged code would end the process, or do worse
        with suppress(OSError):
            note.unlink()  # the next process makes it anew
        return False
    kept: list[machine.Kept] = pickle.loads(noted)
    wanted: list[tuple[Kernel, machine.Kept]] = [(getattr(import_module(one.module), one.name), one) for one in kept]
    wanted = [
        (kernel, one) for kernel, one in wanted if one.kinds not in kernel.machine_code
    ]  # other work may call it too
    for (kernel, one), function in zip(wanted, machine.load(one for _, one in wanted), strict=True):
        kernel.machine_code[one.kinds] = function
    return True


def _write(name: str, noted: bytes) -> None:
    note = _note(name)
    if note is not None:
        work = note.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            work.write_bytes(noted)
            work.replace(note)  # whoever looks meanwhile finds it whole
