"""What a job, or a loop, has come to within itself: a session that goes on begins there, not at its beginning."""

from __future__ import annotations

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
    """A pack of the state, in no ledger, replaced whenever a portion of work is done. A damaged one counts for nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self._portion = path, Portion()
        self.found = path.exists() and not pack_damage(path)

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
            self._portion = Portion()

    def _write(self, state: Mapping[str, NDArray[Any] | Dense]) -> None:
        with new_pack(self.path) as pack:
            for name, values in state.items():
                writer = PackedArrayWriter(pack, name, values.dtype if isinstance(values, np.ndarray) else np.float32)
                for lines in by_lines(values):
                    writer.append(lines.ravel())
                writer.close()
