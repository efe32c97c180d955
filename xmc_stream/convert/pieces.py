"""Pieces: the rows of a part as plain files, between reading the input and writing the store.

A piece of a matrix is a folder with the files `lengths` (int64, entries of each row), `indices` (int32 or int64) and,
for X, `data` (float32). Ids are as the input has them. It appears under its name when it is whole. Pieces are gone in
minutes, so nothing waits for the disk: a checksum of each file tells whether it survived a crash of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.places import make_folder, new_folder
from xmc_stream.system.stop import stop_if_unwanted

# Rows of X or Y: indptr from 0, indices sorted and unique in a row, values (None of Y, where each is one).
Rows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]


def positives(
    indptr: NDArray[np.int64], indices: NDArray[Any], positive: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The entries of Y that are not stored zeros. positive (nnz,): one or zero for each, of any type."""
    if positive.all():
        return indptr, indices
    return set_before(positive)[indptr], indices[positive != 0]


def row_with_minus_one(indptr: NDArray[np.int64], values: NDArray[Any]) -> int | None:
    """The first row with a -1 in Y, which beside 1 means that a label is not there; None for none."""
    signs = values == -1
    return int(np.searchsorted(indptr, np.argmax(signs), side="right")) - 1 if signs.any() else None


def set_before(flags: NDArray[Any]) -> NDArray[np.int64]:
    """How many of the flags before each, and of all, are set."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return before


WINDOW = 2**19  # items read at a time
_FILES = ("lengths", "indices", "data")


class DamagedPieceError(StoreError):
    """A piece is not what was written, as after a crash of the machine."""


@dataclass(frozen=True)
class Piece:
    """Rows of X or Y on disk.

    folder: its path; longest: entries of a row, at most; checksums: crc32c of lengths, indices, data; index_type:
    "int32" or "int64"; valued: has data.
    """

    folder: str
    n_rows: int
    nnz: int
    longest: int
    checksums: tuple[int, ...]
    index_type: str
    valued: bool

    @classmethod
    def of(cls, receipt: Mapping[str, Any]) -> Piece:
        """A piece from its receipt."""
        return cls(**{**receipt, "checksums": tuple(receipt["checksums"])})

    def receipt(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Entries of each row, in windows."""
        return self._windows(0, np.dtype(np.int64), self.n_rows)

    def indices(self) -> Iterator[NDArray[Any]]:
        """Indices of all rows in turn, in windows."""
        return self._windows(1, np.dtype(self.index_type), self.nnz)

    def values(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Values of whole rows, as an indptr from 0 and the values, which may be changed."""
        buffer = np.empty(min(max(WINDOW, self.longest), self.nnz), np.float32)
        with _checked(self, 2) as fill:
            for lengths in self.lengths():
                indptr = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(lengths, out=indptr[1:])
                start = 0
                while start < len(lengths):
                    stop = int(np.searchsorted(indptr, indptr[start] + len(buffer), side="right")) - 1
                    data = buffer[: int(indptr[stop] - indptr[start])]
                    fill(data)
                    yield indptr[start : stop + 1] - indptr[start], data
                    start = stop

    def _windows(self, which: int, dtype: np.dtype[Any], n_items: int) -> Iterator[NDArray[Any]]:
        """All items; a window is gone when the next one comes."""
        buffer = np.empty(min(WINDOW, n_items), dtype)
        with _checked(self, which) as fill:
            for start in range(0, n_items, WINDOW):
                window = buffer[: min(WINDOW, n_items - start)]
                fill(window)
                yield window


@contextmanager
def _checked(piece: Piece, which: int) -> Iterator[Callable[[NDArray[Any]], None]]:
    """What fills an array from a file of a piece. The file is read to its end, and then compared with its checksum."""
    path, crc = Path(piece.folder) / _FILES[which], 0

    def fill(array: NDArray[Any]) -> None:
        nonlocal crc
        stop_if_unwanted()
        raw = array.view(np.uint8)
        view = raw.data
        while view.nbytes and (n := file.readinto(view)):
            view = view[n:]
        if view.nbytes:
            raise DamagedPieceError(f"{path} ends early: give the same command again, it starts anew")
        crc = google_crc32c.extend(crc, raw)

    with open(path, "rb", buffering=0) as file:
        yield fill
    if crc != piece.checksums[which]:
        raise DamagedPieceError(f"{path} fails its checksum: give the same command again, it starts anew")


@contextmanager
def work_folder(folder: Path, durable: bool = True) -> Iterator[Path]:
    """An empty folder, to be filled in the block, which becomes `folder` when that ends well: see `new_folder`."""
    stop_if_unwanted()  # a late copy makes no folder of a run that has ended
    make_folder(folder.parent)
    with new_folder(folder, durable=durable) as work:
        work.mkdir()
        yield work


@contextmanager
def new_piece(folder: Path, valued: bool) -> Iterator[PieceWriter]:
    """Appends rows to a new piece, which gets its name when the block ends well."""
    with ExitStack() as opened:
        work = opened.enter_context(work_folder(folder, durable=False))
        names = _FILES[: 2 + valued]
        yield PieceWriter(folder, [opened.enter_context(open(work / name, "wb", buffering=0)) for name in names])


class PieceWriter:
    """Appends rows to the files of a piece: see `new_piece`."""

    def __init__(self, folder: Path, files: Sequence[Any]) -> None:
        self._folder = folder
        self._files = files
        self._crcs = [0] * len(files)
        self._type = np.dtype(np.int32)
        self.n_rows = 0
        self.nnz = 0
        self._longest = 0

    def append(self, indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32] | None) -> None:
        """Add rows: indptr from 0, all indices of one type throughout the piece."""
        stop_if_unwanted()
        self._type = indices.dtype
        lengths = np.diff(indptr)
        arrays = [lengths, indices, data][: len(self._files)]
        for i, (file, array) in enumerate(zip(self._files, arrays, strict=True)):
            raw = np.ascontiguousarray(array).view(np.uint8)
            self._crcs[i] = google_crc32c.extend(self._crcs[i], raw)
            view = raw.data
            while view.nbytes:
                view = view[file.write(view) :]
        self.n_rows += len(lengths)
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        self.nnz += len(indices)

    def piece(self) -> Piece:
        """What was written, after the block."""
        checksums = tuple(self._crcs)
        return Piece(
            str(self._folder), self.n_rows, self.nnz, self._longest, checksums, self._type.name, len(self._files) == 3
        )


class PieceRows:
    """The rows of pieces in turn: lengths, indices and values, some at a time, of at most ENTRIES entries or one row."""

    ENTRIES = 2**18
    ROWS = 2**16

    def __init__(self, *pieces: Piece) -> None:
        self._lengths = Items(window for piece in pieces for window in piece.lengths())
        self._indices = Items(window for piece in pieces for window in piece.indices())
        valued = pieces[0].valued
        self._data = Items(data for piece in pieces for _, data in piece.values()) if valued else None

    def rows(self, n_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]]:
        """The next n_rows rows."""
        while n_rows:
            window = self._lengths.take(min(self.ROWS, n_rows))
            n_rows -= len(window)
            while len(window):
                n = max(1, int(np.searchsorted(np.cumsum(window), self.ENTRIES, side="right")))
                size = int(window[:n].sum())
                yield window[:n], self._indices.take(size), self._data.take(size) if self._data else None
                window = window[n:]

    def end(self) -> None:
        """Read to the end of the files, where their checksums are compared."""
        for items in (self._lengths, self._indices, self._data):
            if items:
                items.end()


class Items:
    """Items of an array in any numbers, from windows of it in turn."""

    def __init__(self, windows: Iterator[NDArray[Any]]) -> None:
        self._windows = windows
        self._window: NDArray[Any] = np.empty(0, np.int64)

    def take(self, n: int) -> NDArray[Any]:
        """The next n items, copied."""
        taken = [self._window[:n].copy()]
        missing = n - len(taken[0])
        self._window = self._window[n:]
        while missing:
            window = next(self._windows)
            taken.append(window[:missing].copy())
            self._window = window[missing:]
            missing -= len(taken[-1])
        return np.concatenate([items for items in taken if len(items)] or taken)

    def end(self) -> None:
        for _ in self._windows:
            pass
