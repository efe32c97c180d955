"""Where compiled kernels are kept, and which were compiled before, for the very sources, numba and processor.

Numba keeps a kernel for the file that it stands in. The code of other kernels, their constants and the order of a tuple's
members are in it too: code that is older than these would take one array for another. So there is a folder for the sources
that all kernels have. When it is made, those of older sources go.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any
from zlib import crc32

_PACKAGE = Path(__file__).parents[1]
_PATIENCE = 60.0  # seconds that a process waits for another one that compiles: that may be stopped
LOG = logging.getLogger("xmc_stream")


@functools.cache
def versions() -> dict[str, str]:
    """Of numba and llvmlite, without importing them."""
    return {name: version(name) for name in ("numba", "llvmlite")}


@functools.cache
def processor_type() -> str:
    """The name that LLVM has for this processor, and a number for all its features: what code is compiled for."""
    from llvmlite import binding

    features = str(binding.get_host_cpu_features().flatten()).encode()
    return f"{binding.get_host_cpu_name()} {crc32(features):08x}"


@functools.cache
def folder() -> Path | None:
    """The folder of compiled kernels, which is there; None where there is no place that can be written to."""
    made_by = f"{_PACKAGE} {sys.implementation.cache_tag} {versions()}"
    own = f"xmc_stream-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}"
    sources = hashlib.sha256()
    for source in sorted(_PACKAGE.rglob("kernels/*.py")):
        sources.update(source.read_bytes())
    for place in _places():
        with suppress(OSError):
            kept = place / own / sources.hexdigest()[:16]
            if not kept.is_dir():
                kept.mkdir(parents=True, exist_ok=True)
                for other in kept.parent.iterdir():
                    if other != kept:
                        shutil.rmtree(other, ignore_errors=True)
            tempfile.TemporaryFile(dir=kept).close()
            return kept
    LOG.warning(
        "note: compiled kernels cannot be kept, as no folder for them can be written to: each process compiles them anew, "
        "which takes seconds. Set NUMBA_CACHE_DIR to a folder that can be"
    )
    return None


def _places() -> Iterator[Path]:
    """Where the folder may be, in order; some cannot be written to."""
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(told).absolute()
    yield Path(__file__).parent / "__pycache__"
    for home in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(home):  # without a home, ~ stays as it is
            yield Path(home)
    with suppress(OSError):
        shared = Path(tempfile.gettempdir(), f"xmc_stream-kernels-{os.getuid()}")
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()  # another user may have made it, or a link to somewhere
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            yield shared


def compiled_before(name: str) -> bool:
    """Whether what `name` stands for is kept."""
    note = _note(name, "compiled")
    return note is not None and note.exists()


def note_compiled(name: str) -> None:
    """Say that it is; where that cannot be written down, it is not."""
    if (note := _note(name, "compiled")) is not None:
        with suppress(OSError):
            note.touch()


def turn(name: str) -> AbstractContextManager[Any]:
    """For a block that one process of a machine is in at a time; who has waited a minute goes on without."""
    lock = _note(name, "lock")
    return (take(lock) if lock else None) or nullcontext()


def take(file: Path) -> IO[str] | None:
    """The file, locked, for which this process waits a minute; None where it has no luck, or where files cannot be locked."""
    end = time.monotonic() + _PATIENCE
    with suppress(OSError):
        lock = open(file, "a")  # noqa: SIM115
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return lock
        lock.close()
    return None


def _note(name: str, kind: str) -> Path | None:
    """A file for what `name` stands for; None where nothing is kept."""
    if (kept := folder()) is None:
        return None
    told = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))  # how to compile
    made_of = hashlib.sha256(f"{name} {processor_type()} {told}".encode())
    return kept / f"{made_of.hexdigest()[:16]}.{kind}"
