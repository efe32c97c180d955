"""A side: a matrix that is X or Y, opened, of which ranges of rows are read as they stand in the file.

What is made of these rows is here too: the checks common to all formats of matrices.
"""

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
from xmc_stream.convert.pieces import Rows, positives, row_with_minus_one, set_before
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.store.encoding import index_dtype
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
        items = max(self.entries or 0, self.n_rows) if self.divisible else 0
        n_parts = max(1, min(self.n_rows, items // PART + 1))
        return list(pairwise(self.n_rows * part // n_parts for part in range(n_parts + 1)))

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


def check_real(dtype: np.dtype[Any], name: str) -> None:
    """Raises InputError for values that are not real numbers."""
    if dtype.kind not in "biuf":
        raise InputError(f"{name} has values of type {dtype}: they must be real numbers")


@dataclass(frozen=True)
class Rules:
    """What is made of a file's rows. side: "X" or "Y"; n_columns: of the file; bound: D or K, None where it is unknown.

    like: whose D and K these are, for messages.
    """

    side: str
    name: str
    n_columns: int | None
    bound: int | None
    like: str = ""
    sum_duplicates: bool = False
    drop_unseen: bool = False

    def rows(self, raw: Raw, first: int, notes: dict[str, Any]) -> Rows:
        """Rows from `first` on, checked: values finite in float32; indices in range, sorted, unique; no zeros in Y.

        Raises InputError naming file and row.
        """
        indptr, indices, values = raw
        if len(indices):
            indptr, indices, values = self._in_range(indptr, indices, values, first, notes)
        indices = indices.astype(self._index_type(indices.dtype), copy=False)
        data = self._values(indptr, values, first) if self.side == "X" else self._signs(indptr, indices, values, first)
        indptr, indices, data = self._sorted(indptr, indices, data, first, notes)
        return (indptr, indices, data) if self.side == "X" else (*positives(indptr, indices, data), None)

    def load_kernels(self) -> None:
        """Compile or load what sorts the rows."""
        none = np.empty(0, np.int64)
        self.rows((np.zeros(1, np.int64), none, none), 0, {})

    def _index_type(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        bound = self.n_columns if self.bound is None else self.bound
        if bound is None:
            return np.dtype(np.int32 if np.can_cast(dtype, np.int32) else np.int64)
        return index_dtype(bound)

    def _in_range(
        self, indptr: NDArray[np.int64], indices: NDArray[Any], values: Any, first: int, notes: dict[str, Any]
    ) -> Raw:
        """The entries whose indices are below the bound; all, or it is an error, unless unseen ones are left out."""
        high = int(indices.max())
        most = np.iinfo(np.int64).max if self.n_columns is None else self.n_columns
        if int(indices.min()) < 0 or high >= most:
            at = int(np.argmax((indices < 0) | (indices >= most)))
            within = "" if self.n_columns is None else f" and below {most}, its number of columns"
            raise InputError(
                f"{self.name}: index {indices[at]} in row {_row(indptr, at, first)} (from 0) is out of range, it must "
                f"be at least 0{within}: its arrays do not fit its shape, make the matrix again"
            )
        if self.bound is not None and high >= self.bound:
            keep = indices < self.bound
            if not self.drop_unseen:
                at = int(np.argmin(keep))
                what = "features D" if self.side == "X" else "labels K"
                origin = ", which comes from " + flags.LIKE + f" {self.like}" if self.like else ""
                raise InputError(
                    f"{self.name}: index {indices[at]} in row {_row(indptr, at, first)} (from 0) is not below the "
                    f"number of {what} = {self.bound}"
                    + origin
                    + ": check that the two belong together, or "
                    + flags.UNSEEN_DROP
                )
            before = set_before(keep)
            notes["dropped"] = notes.get("dropped", 0) + len(keep) - int(before[-1])
            indptr, indices = before[indptr], indices[keep]
            values = None if values is None else values[keep]
            high = int(indices.max(initial=-1))
        notes["columns"] = max(notes.get("columns", 0), high + 1)
        return indptr, indices, values

    def _values(self, indptr: NDArray[np.int64], values: Any, first: int) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):
            data: NDArray[np.float32] = values.astype(np.float32)
        finite = np.isfinite(data)
        if not finite.all():
            at = int(np.argmin(finite))
            raise InputError(
                f"{self.name}: value {values[at]} in row {_row(indptr, at, first)} (from 0) is not finite in float32: "
                "correct it, or leave the row out"
            )
        return data

    def _signs(self, indptr: NDArray[np.int64], indices: NDArray[Any], values: Any, first: int) -> NDArray[np.float32]:
        """One for each label whose value is not zero."""
        if values is None:
            return np.ones(len(indices), np.float32)
        if values.dtype.kind == "f" and np.isnan(values).any():
            row = _row(indptr, int(np.argmax(np.isnan(values))), first)
            raise InputError(f"{self.name}: a label in row {row} (from 0) is NaN: labels are zero or not, correct it")
        if (signed := row_with_minus_one(indptr, values)) is not None:
            raise InputError(
                f"{self.name}: a label in row {first + signed} (from 0) has the value -1: what is not zero is a positive, save "
                "Y > 0"
            )
        if self.n_columns == 1 and (values > 1).any():
            raise InputError(f"{self.name} is one column of numbers: save class ids as a vector, an .npy of shape (N,)")
        signs: NDArray[np.float32] = (values != 0).astype(np.float32)
        return signs

    def _sorted(
        self,
        indptr: NDArray[np.int64],
        indices: NDArray[Any],
        data: NDArray[np.float32],
        first: int,
        notes: dict[str, Any],
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
        """Rows sorted by index, in place; entries of the same index are added up in float64 where that is wanted."""
        from xmc_stream.convert.kernels.parse import sort_rows

        row = sort_rows(indptr, indices, data)
        if row < 0:
            return indptr, indices, data
        if not self.sum_duplicates:
            index = indices[indptr[row] : indptr[row + 1]]
            twice = index[1:][index[1:] == index[:-1]][0]
            raise InputError(
                f"{self.name}: row {first + row} (from 0) has index {twice} twice: call sum_duplicates() of the "
                "matrix, or " + flags.DUPLICATES_SUM
            )
        done = row + 1
        while row >= 0:
            row = sort_rows(indptr[done:], indices, data)
            done += row + 1
        new = np.ones(len(indices), bool)
        np.not_equal(indices[1:], indices[:-1], out=new[1:])
        new[indptr[:-1][np.diff(indptr) > 0]] = True
        before = set_before(new)
        notes["summed"] = notes.get("summed", 0) + len(new) - int(before[-1])
        starts = np.flatnonzero(new)
        indptr, indices = before[indptr], indices[new]
        if self.side == "Y":
            return indptr, indices, np.maximum.reduceat(data, starts)
        return indptr, indices, self._values(indptr, np.add.reduceat(data, starts, dtype=np.float64), first)


def checked_rows(matrix: Side, size: BlockSize) -> Iterator[Rows]:
    """All rows of X or Y, which its name says, block by block, as a dataset has them. Raises InputError."""
    rules, first = Rules(matrix.name, matrix.name, matrix.n_columns, matrix.n_columns), 0
    for raw in matrix.blocks(0, matrix.n_rows, size, {}):
        yield rules.rows(raw, first, {})
        first += len(raw[0]) - 1


def whole_bytes(matrix: Side) -> int:
    """What `whole_rows` takes at most."""
    return matrix.load_bytes + (matrix.entries or 0) * block_bytes(False) + 24 * (matrix.n_rows + 1)


def whole_rows(matrix: Side) -> Rows:
    """X as a dataset of it would have it, without one. Raises InputError as a conversion does."""
    n_entries = matrix.entries or 0
    (rows,) = checked_rows(matrix, BlockSize(matrix.n_rows + n_entries, n_entries))
    return rows


def _row(indptr: NDArray[np.int64], at: int, first: int) -> int:
    """The row of an entry."""
    return first + int(np.searchsorted(indptr, at, side="right")) - 1
