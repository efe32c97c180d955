"""Files that are damaged, and what verify finds."""

from __future__ import annotations

from pathlib import Path

from xmc_stream.datasets.verify import StoreCheck
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.store.inventory import take_inventory


def damage(path: Path) -> list[str]:
    """What verify finds, without an engine."""
    found: list[str] = run_here(StoreCheck(path, take_inventory(path), 12345).loop(), Notes())["damage"]
    return found


def flip(path: Path, at: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)
