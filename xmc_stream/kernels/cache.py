"""Whether kernels were compiled before: a note beside numba's cache, for the very sources, numba and processor."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from xmc_stream.kernels.jit import sources
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
