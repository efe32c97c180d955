"""Dense matrices of many lines and few columns: the factors of a model, checksummed; and scratch that jobs share.

A factor is a 1-D array of its lines, one after another, chunked as all arrays are. Panels are plain files that several jobs
write at once, each a range of columns or of lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.runtime.plan import Portion
from xmc_stream.store.chunks import WINDOW, ChunkedArray, open_array, read_lines
from xmc_stream.store.encoding import ArrayWriter, PackedArrayWriter, new_pack, new_store, pack_damage
from xmc_stream.store.model import StoredModel
from xmc_stream.store.nodes import understood, whole_of
from xmc_stream.system.stop import stop_if_unwanted

FACTORS = "factors"  # where a model has W (D x r) and H (K x r)
CHUNK_BYTES = 4 * 2**20  # of a factor
LINES = 4096  # of a matrix with r columns at a time: fixed, as sums and products over them round by it
_ITEM = 4

ColumnRange = tuple[int, int]  # columns [first, last)


@dataclass(frozen=True)
class Factor:
    """Lines x columns, float32, in a store. n: lines, as many as there must be."""

    path: str
    columns: int
    n: int

    def _open(self) -> ChunkedArray:
        array = open_array(Path(self.path))
        if array.size != self.n * self.columns or array.dtype != np.float32:
            raise StoreError(
                f"{self.path} has {array.size} values of {array.dtype}, not {self.n} lines of {self.columns}: the store is "
                "damaged; make it again"
            )
        return array

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Lines [first, last): (last - first, columns)."""
        values = self._open().read(first * self.columns, last * self.columns)
        if not np.isfinite(values).all():
            raise StoreError(f"{self.path} has values that are not finite: its training diverged, or it is damaged")
        return values.reshape(last - first, self.columns)


@contextmanager
def new_factors(path: Path, names: Mapping[str, int]) -> Iterator[dict[str, ArrayWriter]]:
    """Factors by name in a new store, under its name when the block ends well: append takes lines. names: their columns."""
    with new_store(path, {"columns": dict(names)}) as group:
        writers = {name: ArrayWriter(group, name, np.float32, CHUNK_BYTES) for name in names}
        yield writers
        for writer in writers.values():
            writer.close()


@dataclass(frozen=True)
class Panels:
    """Lines x columns, float32, in plain files of one range of columns each. col_ranges: these ranges, in order."""

    folder: str
    n: int
    col_ranges: tuple[ColumnRange, ...]

    @property
    def columns(self) -> int:
        """In all."""
        return self.col_ranges[-1][1]

    def _file(self, cols: ColumnRange) -> str:
        return f"{self.folder}/{cols[0]}-{cols[1]}"  # not a Path: it is made for every few lines

    def write(self, cols: ColumnRange, first: int, lines: NDArray[np.float32]) -> None:
        """Lines from `first` on, of one of the ranges of columns."""
        stop_if_unwanted()
        os.makedirs(self.folder, exist_ok=True)
        with os.fdopen(os.open(self._file(cols), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC), "wb") as file:
            file.seek(first * lines.shape[1] * _ITEM)
            for some in by_lines(lines):
                file.write(np.ascontiguousarray(some, np.float32).data)

    def _read(self, cols: ColumnRange, first: int, last: int) -> NDArray[np.float32]:
        """Lines [first, last) of one range of columns."""
        stop_if_unwanted()
        out = np.empty((last - first, cols[1] - cols[0]), np.float32)
        with open(self._file(cols), "rb") as file:
            file.seek(first * out.shape[1] * _ITEM)
            if file.readinto(out.data) < out.nbytes:
                raise StoreError(f"{self._file(cols)} ends early: run the same command again, it goes on")
        return out

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Lines [first, last) of all columns."""
        parts = [self._read(cols, first, last) for cols in self.col_ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def gather(self, lines: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some lines, ascending, of all columns."""
        out = np.empty((len(lines), self.columns), np.float32)
        for cols in self.col_ranges:
            part = np.empty((len(lines), cols[1] - cols[0]), np.float32)
            staging = np.empty(max(WINDOW, _ITEM * part.shape[1]), np.uint8)
            with open(self._file(cols), "rb") as file:
                read_lines(file.fileno(), Path(file.name), lines, staging, part)
            out[:, cols[0] : cols[1]] = part
        return out


@dataclass(frozen=True)
class SideBySide:
    """Factors of as many lines each, their columns beside each other."""

    parts: tuple[Factor, ...]

    @property
    def n(self) -> int:
        """Lines."""
        return self.parts[0].n

    @property
    def columns(self) -> int:
        """In all."""
        return sum(part.columns for part in self.parts)

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Lines [first, last) of all columns."""
        return np.concatenate([part.read(first, last) for part in self.parts], axis=1)


@dataclass(frozen=True)
class Stacked:
    """Factors of as many columns each, the lines of each behind those of the one before."""

    parts: tuple[Factor, ...]

    @property
    def n(self) -> int:
        """Lines, in all."""
        return sum(part.n for part in self.parts)

    @property
    def columns(self) -> int:
        """Of each."""
        return self.parts[0].columns

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Lines [first, last)."""
        found, begin = [], 0
        for part in self.parts:
            low, high = max(first - begin, 0), min(last - begin, part.n)
            if low < high:
                found.append(part.read(low, high))
            begin += part.n
        return found[0] if len(found) == 1 else np.concatenate(found)


Dense = Factor | Panels | SideBySide | Stacked


def read_columns(source: Dense, cols: ColumnRange, first: int, last: int) -> NDArray[np.float32]:
    """Columns [begin, end) of lines [first, last)."""
    if isinstance(source, Panels) and cols in source.col_ranges:  # they are a file of their own
        source = replace(source, col_ranges=(cols,))
    lines = source.read(first, last)
    return lines if lines.shape[1] == cols[1] - cols[0] else np.ascontiguousarray(lines[:, cols[0] : cols[1]])


def by_lines(source: Dense | NDArray[Any], step: int = LINES) -> Iterator[NDArray[Any]]:
    """All lines of a matrix, so many at a time."""
    n = len(source) if isinstance(source, np.ndarray) else source.n
    for first in range(0, n, step):
        last = min(first + step, n)
        yield source[first:last] if isinstance(source, np.ndarray) else source.read(first, last)


def take(source: Dense, cols: ColumnRange) -> NDArray[np.float32]:
    """Columns [begin, end) of all lines, and columns of zeros after them up to `lanes`."""
    out = aligned_zeros((source.n, lanes(cols[1] - cols[0])))
    for first in range(0, source.n, LINES):
        last = min(first + LINES, source.n)
        out[first:last, : cols[1] - cols[0]] = read_columns(source, cols, first, last)
    return out


def copy_factors(path: Path, sources: Mapping[str, Dense | NDArray[np.float32]], cols: ColumnRange) -> None:
    """Store columns [begin, end) of matrices as factors."""
    with new_factors(path, dict.fromkeys(sources, cols[1] - cols[0])) as writers:
        for name, source in sources.items():
            for lines in by_lines(source):
                writers[name].append(lines[:, cols[0] : cols[1]].ravel())


class LowRankFactors(StoredModel):
    """A model of two factors, whose scores are x W H^T. rank: their columns."""

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(path, attributes)
        self.rank = whole_of(self.path, self.attributes, "rank", 1)

    @property
    def bias_row(self) -> bool:
        """Whether W has a last row for the bias."""
        with understood(self.path / "zarr.json"):
            return bool(self.attributes["params"]["bias"])

    def factor(self, name: str) -> Factor:
        """W (D x r) or H (K x r) of a low-rank model."""
        n = self.n_features + self.bias_row if name == "W" else self.n_labels
        return Factor(str(self.path / FACTORS / name), self.rank, n)


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
