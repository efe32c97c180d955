"""What a job, or a loop, has come to within itself: a session that goes on begins there, not at its beginning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import Dense, Factor, by_lines
from xmc_stream.runtime.plan import Portion
from xmc_stream.store.chunks import open_array
from xmc_stream.store.packing import PackedArrayWriter, new_pack, pack_damage


class Begun:
    """A pack of the state, in no ledger, that is replaced whenever a portion of work is done. A damaged one counts for nothing.

    of_loop: its work is done by jobs, on other machines perhaps: a portion is one of the clock, not of this process.
    """

    def __init__(self, path: Path, of_loop: bool = False) -> None:
        self.path, self._of_loop = path, of_loop
        self.found = path.exists() and not pack_damage(path)
        self._begin_portion()

    def _begin_portion(self) -> None:
        self._portion = Portion(time.monotonic) if self._of_loop else Portion()

    def read(self, name: str) -> NDArray[Any]:
        """An array that was kept, in one line."""
        array = open_array(self.path / name)
        return array.read(0, array.size)

    def factor(self, name: str, columns: int, n: int) -> Factor:
        """A matrix that was kept, of n lines."""
        return Factor(str(self.path / name), columns, n)

    def keep(self, state: Mapping[str, NDArray[Any] | Dense]) -> None:
        """Asked after each bit of the work: where a portion is done, keep what is needed to go on from here."""
        if self._portion.done():
            self._write(state)
            self._begin_portion()

    def _write(self, state: Mapping[str, NDArray[Any] | Dense]) -> None:
        with new_pack(self.path) as pack:
            for name, values in state.items():
                writer = PackedArrayWriter(pack, name, values.dtype if isinstance(values, np.ndarray) else np.float32)
                for lines in by_lines(values):
                    writer.append(lines.ravel())
                writer.close()
