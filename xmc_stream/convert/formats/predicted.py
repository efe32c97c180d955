"""Predictions that stand in a file, as `predict` or another program wrote them: arrays of a .npz, lines of `label:score`
(behind a row's id and a tab, if rows have ids), or objects with labels, by their names or ids, and scores.

Whatever they stand in, they are checked, and ranked by their scores; equal scores keep the order of the file.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.formats.numpy_arrays import Head, read_head
from xmc_stream.convert.lines.files import Stamps, numbered_lines, stamps, unchanged
from xmc_stream.convert.messages import one_line, shown
from xmc_stream.errors import InputError
from xmc_stream.store.names import NamedIds, Names
from xmc_stream.store.predictions import CHUNK_ROWS, Predictions
from xmc_stream.system.files import regular

_ZIP = b"PK"
_PAIR = re.compile(rb"(\d{1,18}):([-+.\da-zA-Z]++)")
_PAIRS = re.compile(rb"\s*+(?:\d{1,18}:[-+.\da-zA-Z]++(?:\s++|$))*+")
_LONGEST_LINE = 2**20
_LONGEST_OBJECT = 2**24
_NAME_BYTES = 600  # of a row and rank: a name, how it is looked up


class Rankings(Protocol):
    """Predicted labels of n_samples rows, k of each, -1 where there are fewer."""

    path: Path
    n_samples: int
    k: int

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        """First row, labels and scores (None where there are none) of a few thousand rows at a time."""


def open_predictions(path: Path, n_labels: int, names: Names | None = None) -> Ranked:
    """A store of predictions, or a file of them. n_labels, names: of the labels that they are compared with.

    Raises InputError for a file of anything else, or for a label without a name there, and StoreError.
    """
    if path.is_dir() or not path.exists():
        return Ranked(Predictions(path), n_labels, {})
    before = stamps([path])
    try:
        with open(path, "rb", opener=regular) as file:
            head = file.read(2)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the file") from None
    if head == _ZIP:
        return Ranked(_Arrays(path), n_labels, before)
    return Ranked(_Objects(path, names) if head[:1] == b"{" else _Text(path), n_labels, before)


class Ranked:
    """Predictions, each row checked and ranked by its scores; as it stands where there are none.

    before: of the file, from before it was opened. Raises InputError, with file and line (or row), for a label that is none
    of n_labels or stands twice, for a score that is not a number, and for a file that is changed meanwhile.
    """

    def __init__(self, stored: Rankings, n_labels: int, before: Stamps) -> None:
        self.path, self.n_samples, self.k = stored.path, stored.n_samples, stored.k
        self._stored, self._n_labels, self._before = stored, n_labels, before

    @property
    def needs(self) -> dict[str, int]:
        """Bytes by component that finding the ids of names takes."""
        return self._stored.needs if isinstance(self._stored, _Objects) else {}

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        """As `Rankings` has them."""
        with unchanged(self._before):
            for start, labels, scores in self._stored.blocks():
                self._check(start, labels, scores)
                yield start, labels if scores is None else _by_score(labels, scores), None

    def _check(self, start: int, labels: NDArray[Any], scores: Any) -> None:
        there, ordered = labels >= 0, np.sort(labels, axis=1)
        twice = np.zeros(labels.shape, np.bool_)
        twice[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        for bad, values, why in (
            (
                (labels < -1) | (labels >= self._n_labels),
                labels,
                f"is none of the {self._n_labels:,} labels of the data",
            ),
            (twice, ordered, "stands twice in the row"),
            (there & np.isnan(0.0 if scores is None else scores), labels, "has nan for a score"),
        ):
            if bad.any():
                row, rank = (int(place) for place in np.argwhere(bad)[0])
                where = (
                    f"{self.path}:{start + row + 1}"
                    if isinstance(self._stored, _Lines)
                    else f"{self.path}: row {start + row} (from 0)"
                )
                raise InputError(f"{where}: label {values[row, rank]} {why}: correct the predictions")


def _by_score(labels: NDArray[Any], scores: NDArray[Any]) -> NDArray[Any]:
    """The labels of each row by falling score, ties as they stand, what is no label last."""
    scores = np.where(labels < 0, -np.inf, scores)
    wrong = (scores[:, 1:] > scores[:, :-1]) | ((labels[:, 1:] >= 0) & (labels[:, :-1] < 0))
    rows = np.flatnonzero(wrong.any(axis=1))
    if not len(rows):
        return labels
    labels = labels.copy()
    order = np.lexsort((-scores[rows], labels[rows] < 0), axis=1)
    labels[rows] = np.take_along_axis(labels[rows], order, axis=1)
    return labels


class _Arrays:
    """The arrays `labels` and, if it is there, `scores` (n x k) of a .npz file, read as streams."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as arrays:
            self.n_samples, self.k = arrays[0][0].shape

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        with self._opened() as arrays:
            for start in range(0, self.n_samples, CHUNK_ROWS):
                n = min(CHUNK_ROWS, self.n_samples - start)
                labels, *scores = [
                    # all of it, or it is an error
                    np.frombuffer(file.read(n * self.k * head.dtype.itemsize), head.dtype).reshape(n, self.k)
                    for head, file in arrays
                ]
                yield start, labels, scores[0].astype(np.float64) if scores else None
            if any(file.read(1) for _, file in arrays):  # which also compares the checksum
                raise ValueError("there is more in an array than its shape says")

    @contextmanager
    def _opened(self) -> Iterator[list[tuple[Head, IO[bytes]]]]:
        """The header of each array, and its bytes behind that. Raises InputError."""
        try:
            with ExitStack() as opened:
                archive = opened.enter_context(zipfile.ZipFile(self.path))
                arrays: list[tuple[Head, IO[bytes]]] = []
                names = set(archive.namelist())
                for name, kinds in (("labels", "iu"), ("scores", "fiu")):
                    if name == "scores" and f"{name}.npy" not in names:
                        break
                    file = opened.enter_context(archive.open(f"{name}.npy"))
                    head = read_head(file, archive.getinfo(f"{name}.npy").file_size)
                    other = arrays and head.shape != arrays[0][0].shape
                    if len(head.shape) != 2 or head.fortran or head.dtype.kind not in kinds or other:
                        raise ValueError(f"its {name} have the shape {head.shape} and type {head.dtype}")
                    arrays.append((head, file))
                yield arrays
        except (
            ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise InputError(
                f"{self.path} does not hold the predictions of `xmc-stream predict` ({one_line(error)}): predict again"
            ) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read ({error.strerror or error}): check the file") from None


class _Lines:
    """A row a line, read twice: for its sizes, then for its labels and scores."""

    named = False  # whether labels stand there by their names

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_samples = self.k = 0
        for labels, _ in self._rows():
            self.n_samples += 1
            self.k = max(self.k, len(labels))

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], Any]]:
        rows = self._rows()
        for start in range(0, self.n_samples, CHUNK_ROWS):
            n = min(CHUNK_ROWS, self.n_samples - start)
            labels, scores = np.full((n, self.k), -1, np.int64), np.full((n, self.k), -np.inf)
            found: Any = [] if self.named else array("q")
            values, lengths = array("d"), array("q")
            for some, theirs in islice(rows, n):
                found.extend(some)
                values.extend(theirs)
                lengths.append(len(some))
            if len(lengths) < n or max(lengths) > self.k:
                raise InputError(f"{self.path} was changed while it was read: evaluate again")
            there = np.arange(self.k) < np.array(lengths)[:, None]
            labels[there] = self._ids(found, start) if self.named else found
            scores[there] = values
            yield start, labels, scores

    def _rows(self) -> Iterator[tuple[list[Any], list[float]]]:
        """The labels of each row, as they stand there, and their scores."""
        raise NotImplementedError

    def _ids(self, names: list[str], start: int) -> list[int]:
        """Their ids; start: the first of some thousand rows that they are of."""
        raise NotImplementedError


class _Text(_Lines):
    """Lines of text: pairs with blanks or tabs between them, behind a row's id and a tab if rows have ids."""

    def __init__(self, path: Path) -> None:
        self._have_ids = _have_ids(path)
        super().__init__(path)

    def _rows(self) -> Iterator[tuple[list[int], list[float]]]:
        for number, line in numbered_lines(self.path, _LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise InputError(
                    f"{self.path}:{number}: a line of more than 1 MB: predict fewer labels, or to a .npz file"
                )
            pairs = line.split(b"\t", 1)[-1] if self._have_ids else line
            try:
                if not _PAIRS.fullmatch(pairs):
                    raise ValueError(pairs)
                found = _PAIR.findall(pairs)
                row = [int(label) for label, _ in found], [float(score) for _, score in found]
            except ValueError:
                raise InputError(
                    f"{self.path}:{number}: {shown(line.rstrip())} is not a line of predictions, 'label:score label:score "
                    "...': give what `xmc-stream predict` wrote"
                ) from None
            yield row


def _have_ids(path: Path) -> bool:
    """Whether what stands before the first tab of a line is a row's id. An id may look like a pair, so all lines are asked.

    Raises InputError where some say that it is, and some that tabs separate pairs; and where none says which.
    """
    said, tabs = {True: 0, False: 0}, 0  # a line that says it, that has a tab
    for number, line in numbered_lines(path, _LONGEST_LINE):
        before, tab, behind = line.strip(b" \r\n").partition(b"\t")
        before, behind = before.strip(), behind.strip()
        if not tab:
            continue
        tabs = tabs or number
        if not _PAIRS.fullmatch(before) or (b"\t" not in behind and b" " in behind and b" " not in before):
            said[True] = said[True] or number
        elif b"\t" in behind or b" " in before:
            said[False] = said[False] or number
        if said[True] and said[False]:
            raise InputError(
                f"{path}:{number}: a tab stands behind a row's id in line {said[True]}, and between pairs in line "
                f"{said[False]}: write all lines alike"
            )
    if tabs and not any(said.values()):
        raise InputError(
            f"{path}:{tabs}: one pair before a tab and one behind it: nothing tells whether the first is a row's id. Write "
            "blanks between pairs, or give a .jsonl or .npz file"
        )
    return said[True] > 0


class _Objects(_Lines):
    """Objects with labels, by their names or ids, and scores. names: of the labels, None where they have none."""

    def __init__(self, path: Path, names: Names | None) -> None:
        self._names = names
        self._by_name: NamedIds | None = None
        super().__init__(path)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes by component that finding the ids of names takes."""
        names = 0 if self._names is None else len(self._names)
        return {"names of labels": NamedIds.BYTES * names + _NAME_BYTES * CHUNK_ROWS * self.k} if self.named else {}

    def _rows(self) -> Iterator[tuple[list[Any], list[float]]]:
        kinds: set[type] = set()
        for number, line in numbered_lines(self.path, _LONGEST_OBJECT):
            where = f"{self.path}:{number}"
            if len(line) == _LONGEST_OBJECT:
                raise InputError(f"{where}: a line of more than 16 MB: predict fewer labels, or to a .npz file")
            row = _row_of(line)
            kinds.update(map(type, row[0][:1] if row else ()))
            if row is None or len(kinds) > 1:
                raise InputError(
                    f'{where}: {shown(line.rstrip())} is not a line of predictions, {{"labels": [...], "scores": [...]}}'
                    f"{', as some lines have names and some ids' if row else ''}: give what `xmc-stream predict` wrote"
                )
            if str in kinds:
                self.named = True
                if self._names is None:
                    raise InputError(
                        f"{where}: labels are names here, and the dataset has ids alone: predict to a .npz or .txt file, and "
                        "evaluate that, or evaluate the model"
                    )
            yield row

    def _ids(self, names: list[str], start: int) -> list[int]:
        self._by_name = self._by_name or NamedIds(self._names)  # type: ignore[arg-type]
        try:
            return self._by_name.ids(names)
        except LookupError as error:
            raise InputError(
                f"{self.path}: behind line {start}: {error.args[0]}: evaluate with the data that belong to it, or predict to "
                "a .npz file"
            ) from None


def _row_of(line: bytes) -> tuple[list[Any], list[float]] | None:
    """The labels of an object, all names or all ids, and their scores, all alike where there are none; else None."""
    try:
        record = json.loads(line)
        labels, scores = record["labels"], record.get("scores")
        scores = [0.0] * len(labels) if scores is None else scores
        if not isinstance(labels, list) or len(scores) != len(labels) or not set(map(type, scores)) <= {int, float}:
            return None
        kinds = set(map(type, labels))
        if kinds <= {str} or (kinds == {int} and 0 <= min(labels) <= max(labels) < 2**62):
            return labels, [float(score) for score in scores]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return None
