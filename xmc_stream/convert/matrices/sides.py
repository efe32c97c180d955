"""A side: a matrix that is X or Y, opened, of which ranges of rows are read as they stand in the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError
from xmc_stream.system.memory import format_size

BLOCK = 2**18  # entries, and rows, passed on at a time
PART = 2**23  # entries, and rows, of a part, where a matrix can be cut
_LEAST = 2**12
_ENTRY_BYTES = 112  # of a block: an entry's index and value, a row's length, and what checking makes of them
_SUM_BYTES = 48  # and what adding up makes of them

# Rows as a file has them: indptr from 0, indices of any integers, values of any numbers (None: ones). All may be kept.
Raw = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None]


@dataclass(frozen=True)
class BlockSize:
    """block: entries, and rows, of a block; longest: entries of a row that may be longer."""

    block: int = BLOCK
    longest: int = BLOCK

    def check(self, entries: int, name: str, row: int) -> None:
        """Raises MemoryLimitError where a row is longer than memory allows."""
        if entries > self.longest:
            need = format_size(entries * _ENTRY_BYTES)
            raise MemoryLimitError(
                f"{name}: row {row} (from 0) takes {need} when it is read: raise " + flags.MEMORY_LIMIT
            )


def row_ranges(n_rows: int, entries: int) -> list[tuple[int, int]]:
    """Nearly equal ranges of rows, at least one, of about PART entries if these are spread evenly."""
    n_parts = max(1, min(n_rows, max(entries, n_rows) // PART + 1))
    cuts = [n_rows * part // n_parts for part in range(n_parts + 1)]
    return list(pairwise(cuts))


def block_bytes(sum_duplicates: bool) -> int:
    """What an entry of a block takes at most."""
    return _ENTRY_BYTES + (_SUM_BYTES if sum_duplicates else 0)


def fitted(room: int, per_entry: int, entries: int | None, n_rows: int) -> BlockSize:
    """Blocks for `room` bytes, no larger than a matrix."""
    longest = max(_LEAST, room // per_entry)
    whole = BLOCK if entries is None else max(entries, n_rows) + 1
    return BlockSize(min(BLOCK, longest, whole), longest)


@dataclass(frozen=True)
class Side(ABC):
    """An opened matrix, X or Y, of which no rows are read yet: picklable and small, but for what is in memory.

    name: for messages; kind: the format in words; files: what it is read from; n_columns, entries: at most, None where
    only reading tells; load_bytes: what reading takes besides blocks; divisible: ranges of its rows may be read apart;
    check: raises InputError for what only the whole file tells, when all rows are read; labels: the names of its columns,
    where it has some that are new.
    """

    name: str
    kind: str
    files: Sequence[Path]
    n_rows: int
    n_columns: int | None
    entries: int | None
    _: KW_ONLY
    load_bytes: int = 0
    divisible: bool = False
    check: Callable[[], None] | None = None
    labels: Sequence[str] | None = None

    def ranges(self) -> list[tuple[int, int]]:
        """Ranges of rows that are read apart: of about PART entries, if these are spread evenly, or all at once."""
        return row_ranges(self.n_rows, self.entries or 0) if self.divisible else [(0, self.n_rows)]

    @abstractmethod
    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), block by block, cut so that they keep `size`."""


class NoLabels(Side):
    """Y of rows without labels."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), each with nothing."""
        for row in range(start, stop, size.block):
            yield np.zeros(min(size.block, stop - row) + 1, np.int64), np.empty(0, np.int32), None


def no_labels(x: Side) -> Side:
    """Y of rows without labels beside X."""
    return NoLabels(x.name, x.kind, (), x.n_rows, 0, 0)
