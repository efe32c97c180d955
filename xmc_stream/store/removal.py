"""Removing what is of no use any more while a run goes on: a disk may take milliseconds a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from xmc_stream.store.encoding import remove_tree, set_aside


class Removal:
    """Removes folders in a thread of its own. Not shared between threads."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def begin(self, *folders: Path) -> None:
        """Set folders aside, which takes no time, and begin to remove them once those of before are gone."""
        self.wait()
        # the process does not wait for it: what a run that ends early leaves goes with the run's other state
        self._thread = Thread(target=_remove, args=([set_aside(folder) for folder in folders],), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all are gone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        remove_tree(folder)
