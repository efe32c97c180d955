"""Predictions that stand in a file, as `predict` writes them, best first: labels of a .npz, lines of `label:score` behind a
row's id and a tab, or objects with labels, by their names or ids."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.formats.numpy_arrays import Head, read_head
from xmc_stream.convert.formats.pairs import numbered_lines
from xmc_stream.convert.messages import one_line, shown
from xmc_stream.errors import InputError
from xmc_stream.store.names import NamedIds, Names
from xmc_stream.store.predictions import CHUNK_ROWS, Predictions

_ZIP = b"PK"
_LABELS = "labels.npy"
_LINE = re.compile(rb"(?:[^\t]*\t)?(?:\d{1,18}:[-+.\w]++\s*+)*+")
_LABEL = re.compile(rb"(\d+):")
_LONGEST_LINE = 2**20
_LONGEST_OBJECT = 2**24
_NAME_BYTES = 600  # of a row and rank: a name, how it is looked up


class Rankings(Protocol):
    """Predicted labels of n_samples rows, k of each, -1 where there are fewer."""

    path: Path
    n_samples: int
    k: int

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        """First row and labels of a few thousand rows at a time; what comes third is not for comparing."""


def open_predictions(path: Path, names: Names | None = None) -> Rankings:
    """A store of predictions, or a file of them. names: of the labels that they are compared with.

    Raises InputError for a file of anything else, or for a label without a name there, and StoreError.
    """
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
        return _Objects(path, names)
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


class _Lines:
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
            block = list(islice(rows, min(CHUNK_ROWS, self.n_samples - start)))
            labels = np.full((len(block), self.k), -1, np.int64)
            lengths = np.fromiter(map(len, block), np.int64, len(block))
            labels[np.arange(self.k) < lengths[:, None]] = self._ids(list(chain.from_iterable(block)), start)
            yield start, labels, None

    def _rows(self) -> Iterator[list[Any]]:
        """The labels of each row, as they stand there."""
        raise NotImplementedError

    def _ids(self, labels: list[Any], start: int) -> list[int]:
        """Their ids; start: the first of some thousand rows that they are of."""
        return labels


class _Text(_Lines):
    """Lines of text."""

    def _rows(self) -> Iterator[list[int]]:
        for number, line in numbered_lines(self.path, _LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise InputError(
                    f"{self.path}:{number}: a line of more than 1 MB: predict fewer labels, or to a .npz file"
                )
            line = line.rstrip(b" \r\n")
            if not _LINE.fullmatch(line):
                raise InputError(
                    f"{self.path}:{number}: {shown(line.rstrip())} is not a line of predictions, 'label:score label:score "
                    "...': give what `xmc-stream predict` wrote"
                )
            yield list(map(int, _LABEL.findall(line[line.find(b"\t") + 1 :])))


class _Objects(_Lines):
    """Objects with labels, by their names or ids. names: of the labels, None where they have none."""

    def __init__(self, path: Path, names: Names | None) -> None:
        self._names = names
        self._by_name: NamedIds | None = None
        self.named = False
        super().__init__(path)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes by component that finding the ids of names takes."""
        names = 0 if self._names is None else len(self._names)
        return {"names of labels": NamedIds.BYTES * names + _NAME_BYTES * CHUNK_ROWS * self.k} if self.named else {}

    def _rows(self) -> Iterator[list[Any]]:
        for number, line in numbered_lines(self.path, _LONGEST_OBJECT):
            where = f"{self.path}:{number}"
            if len(line) == _LONGEST_OBJECT:
                raise InputError(f"{where}: a line of more than 16 MB: predict fewer labels, or to a .npz file")
            labels = _labels_of(line)
            if labels is None:
                raise InputError(
                    f'{where}: {shown(line.rstrip())} is not a line of predictions, {{"labels": [...], "scores": [...]}}: '
                    "give what `xmc-stream predict` wrote"
                )
            if labels and isinstance(labels[0], str):
                self.named = True
                if self._names is None:
                    raise InputError(
                        f"{where}: labels are names here, and the dataset has ids alone: predict to a .npz or .txt file, and "
                        "evaluate that, or evaluate the model"
                    )
            yield labels

    def _ids(self, labels: list[Any], start: int) -> list[int]:
        if not self.named or self._names is None:
            return labels
        self._by_name = self._by_name or NamedIds(self._names)
        try:
            return self._by_name.ids(labels)
        except LookupError as error:
            raise InputError(
                f"{self.path}: behind line {start}: {error.args[0]}: evaluate with the data that belong to it, or predict to "
                "a .npz file"
            ) from None


def naming_needs(stored: Rankings) -> dict[str, int]:
    """Bytes by component that labels take which stand in a file by their names."""
    return stored.needs if isinstance(stored, _Objects) else {}


def _labels_of(line: bytes) -> list[Any] | None:
    """The labels of an object, all names or all ids; None for anything else."""
    try:
        labels = json.loads(line)["labels"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(labels, list):
        return None
    kinds = set(map(type, labels))
    return labels if kinds <= {str} or (kinds == {int} and 0 <= min(labels) <= max(labels) < 2**62) else None
