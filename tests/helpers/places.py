"""Where tests put their files."""

from __future__ import annotations

import shutil
from pathlib import Path

_ROOM = 6 * 2**30  # bytes; all tests take two or three


def memory_place() -> str | None:
    """A folder in memory: what is written there is not waited for as on a disk. None where there is none with room."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > _ROOM else None
