"""Predictions that stand in a file, as `predict` writes them: labels of a .npz, or lines of `label:score`, best first."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.formats.numpy_arrays import Head, read_head
from xmc_stream.convert.formats.pairs import numbered_lines
from xmc_stream.convert.messages import one_line, shown
from xmc_stream.errors import InputError
from xmc_stream.store.predictions import CHUNK_ROWS, Predictions

_ZIP = b"PK"
_LABELS = "labels.npy"
_LINE = re.compile(rb"(?:\d{1,18}:[-+.\w]++\s*+)*+")
_LABEL = re.compile(rb"(\d+):")
_LONGEST_LINE = 2**20


class Rankings(Protocol):
    """Predicted labels of n_samples rows, k of each, -1 where there are fewer."""

    path: Path
    n_samples: int
    k: int

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        """First row and labels of a few thousand rows at a time; what comes third is not for comparing."""


def open_predictions(path: Path) -> Rankings:
    """A store of predictions, or a file of them. Raises InputError for a file of anything else, and StoreError."""
    if not path.is_file():
        return Predictions(path)
    try:
        with open(path, "rb") as file:
            head = file.read(2)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the file") from None
    if head == _ZIP:
        return _Arrays(path)
    if head[:1] == b"{":
        raise InputError(
            f"{path} holds names of labels, for people to read: predict to a .npz or .txt file, or a zarr group, and "
            "evaluate that, or evaluate the model"
        )
    return _Text(path)


class _Arrays:
    """The array `labels` (n x k) of a .npz file, read as a stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as (head, _):
            self.n_samples, self.k = head.shape

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], None]]:
        with self._opened() as (head, file):
            for start in range(0, self.n_samples, CHUNK_ROWS):
                n = min(CHUNK_ROWS, self.n_samples - start)
                content = file.read(n * self.k * head.dtype.itemsize)  # all of it, or it is an error
                yield start, np.frombuffer(content, head.dtype).reshape(n, self.k), None
            if file.read(1):  # which also compares the checksum
                raise ValueError("there is more of its labels than their shape says")

    @contextmanager
    def _opened(self) -> Iterator[tuple[Head, IO[bytes]]]:
        """The header of the array, and its bytes behind that. Raises InputError."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(_LABELS) as file:
                n_bytes = archive.getinfo(_LABELS).file_size
                head = read_head(file, n_bytes)
                if len(head.shape) != 2 or head.fortran or head.dtype.kind not in "iu":
                    raise ValueError(f"its labels have the shape {head.shape} and type {head.dtype}")
                yield head, file
        except (
            ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise InputError(
                f"{self.path} does not hold the predictions of `xmc-stream predict` ({one_line(error)}): predict again"
            ) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read ({error.strerror or error}): check the file") from None


class _Text:
    """A row a line, read twice: for its sizes, then for its labels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_samples = self.k = 0
        for row in self._rows():
            self.n_samples += 1
            self.k = max(self.k, len(row))

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], None]]:
        rows = self._rows()
        for start in range(0, self.n_samples, CHUNK_ROWS):
            labels = np.full((min(CHUNK_ROWS, self.n_samples - start), self.k), -1, np.int64)
            for mine, row in zip(labels, rows, strict=False):
                mine[: len(row)] = row
            yield start, labels, None

    def _rows(self) -> Iterator[list[int]]:
        for number, line in numbered_lines(self.path, _LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise InputError(
                    f"{self.path}:{number}: a line of more than 1 MB: predict fewer labels, or to a .npz file"
                )
            if not _LINE.fullmatch(line.strip()):
                raise InputError(
                    f"{self.path}:{number}: {shown(line.rstrip())} is not a line of predictions, 'label:score label:score "
                    "...': give what `xmc-stream predict` wrote"
                )
            yield list(map(int, _LABEL.findall(line)))
