"""Pieces: the rows of a part as plain files, between reading the input and writing the store.

A piece of a matrix is a folder with the files `lengths` (int64, entries of each row), `indices` (int32 or int64) and,
for X, `data` (float32). Ids are as the input has them. It appears under its name when it is whole and durable.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.encoding import fsync_folder

WINDOW = 2**19  # items read at a time


@dataclass(frozen=True)
class Piece:
    """Rows of X or Y on disk. folder: absolute path; index_type: of the indices, "int32" or "int64"; valued: has data."""

    folder: str
    n_rows: int
    nnz: int
    index_type: str
    valued: bool

    @classmethod
    def of(cls, receipt: Mapping[str, Any]) -> Piece:
        """A piece from its receipt."""
        return cls(**receipt)

    def receipt(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Entries of each row, in windows."""
        return self._windows("lengths", np.dtype(np.int64), self.n_rows)

    def indices(self) -> Iterator[NDArray[Any]]:
        """Indices of all rows in turn, in windows."""
        return self._windows("indices", np.dtype(self.index_type), self.nnz)

    def data(self) -> Iterator[NDArray[np.float32]]:
        """Values of all rows in turn, in windows."""
        return self._windows("data", np.dtype(np.float32), self.nnz)

    def _windows(self, name: str, dtype: np.dtype[Any], n_items: int) -> Iterator[NDArray[Any]]:
        """All items; a window is gone when the next one comes."""
        path = Path(self.folder) / name
        buffer = np.empty(min(WINDOW, n_items), dtype)
        with open(path, "rb", buffering=0) as file:
            for start in range(0, n_items, WINDOW):
                window = buffer[: min(WINDOW, n_items - start)]
                view = memoryview(window).cast("B")  # type: ignore[arg-type]
                while view.nbytes:
                    n = file.readinto(view)
                    if not n:
                        raise StoreError(f"{path} ends early: remove {path.parent.parent} and convert again")
                    view = view[n:]
                yield window


class PieceWriter:
    """Appends rows to a new piece. A context manager: the piece gets its name when the block ends well."""

    def __init__(self, folder: Path, valued: bool) -> None:
        self._folder = folder
        self._work = folder.with_name(folder.name + ".partial")
        self._valued = valued
        self._type = np.dtype(np.int32)
        self.n_rows = 0
        self.nnz = 0

    def __enter__(self) -> PieceWriter:
        for path in (self._work, self._folder):
            shutil.rmtree(path, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._files: list[BinaryIO] = [
            open(self._work / name, "wb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            for name in ("lengths", "indices", "data")[: 2 + self._valued]
        ]
        return self

    def append(self, indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32] | None) -> None:
        """Add rows: indptr from 0, all indices of one type throughout the piece."""
        self._type = indices.dtype
        arrays = [np.diff(indptr), indices, data][: len(self._files)]
        for file, array in zip(self._files, arrays, strict=True):
            view = memoryview(np.ascontiguousarray(array)).cast("B")  # type: ignore[arg-type]
            while view.nbytes:
                view = view[file.write(view) :]
        self.n_rows += len(indptr) - 1
        self.nnz += len(indices)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            if kind is None:
                os.fsync(file.fileno())
            file.close()
        if kind is None:
            self._work.rename(self._folder)
            fsync_folder(self._folder.parent)
        else:
            shutil.rmtree(self._work, ignore_errors=True)

    def piece(self) -> Piece:
        """What was written, after the block."""
        return Piece(str(self._folder), self.n_rows, self.nnz, self._type.name, self._valued)
