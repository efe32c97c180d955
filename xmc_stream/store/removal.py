"""Removing what is of no use any more while a run goes on: a disk may take milliseconds a file."""

from __future__ import annotations

from pathlib import Path
from threading import Thread, current_thread

from xmc_stream.store.encoding import remove_tree, set_aside

_at_work: set[Thread] = set()


def remove_beside(*folders: Path) -> None:
    """Set folders aside, which takes no time, and remove them in a thread of its own.

    The process does not wait for it: what a run that ends early leaves goes with its other state.
    """
    thread = Thread(target=_remove, args=([set_aside(folder) for folder in folders],), daemon=True)
    _at_work.add(thread)
    thread.start()


def wait_for_removals() -> None:
    """Wait until all that this process began to remove is gone, also by a run that was interrupted."""
    for thread in tuple(_at_work):
        thread.join()


def _remove(folders: list[Path]) -> None:
    try:
        for folder in folders:
            remove_tree(folder)
    finally:
        _at_work.discard(current_thread())
