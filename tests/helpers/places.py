"""Where tests put their files."""

from __future__ import annotations

import shutil
from pathlib import Path

_ROOM = 4 * 2**30  # bytes, of which the fast lane takes one or two


def memory_place() -> str | None:
    """A folder in memory: what is written there is not waited for as on a disk. None where there is none with room."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > _ROOM else None
