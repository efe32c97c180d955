"""The class of each row as a text in an array of NumPy, of fixed width: labels are the different texts, sorted.

They are looked for when a file is opened, and are kept in memory, as many as they may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.matrices.arrays import Array
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Reader, Side
from xmc_stream.convert.options import Like, of_labels
from xmc_stream.errors import InputError

_MOST_CLASSES = 10**6
_WINDOW = 2**14  # rows looked at a time
_MOST_CHARACTERS = 2**12  # of a text


@dataclass(frozen=True)
class StringClasses:
    """The class of each row, and its reader.

    texts: those that occur, sorted; ids: the label of each, -1 for none; labels: names of all of them, None where they
    are those of `like`.
    """

    name: str
    kind: str
    files: Sequence[Path]
    array: Array
    texts: NDArray[Any]
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    n_columns: int = 0
    labels: NDArray[Any] | None = None
    like: str = ""
    drop: bool = False

    @property
    def n_rows(self) -> int:
        """N."""
        return self.array.n_items

    @property
    def entries(self) -> int:
        """One a row, at most."""
        return self.array.n_items

    @property
    def load_bytes(self) -> int:
        """The texts, what is read of the file, and a copy of both."""
        n_labels = 0 if self.labels is None else self.labels.nbytes
        return 2 * (self.texts.nbytes + n_labels + self.ids.nbytes + 4 * _WINDOW * self.array.dtype.itemsize)

    def ranges(self) -> list[tuple[int, int]]:
        """All rows at once."""
        return [(0, self.n_rows)]

    def reader(self) -> Reader:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: the array was read when it was opened too."""

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) with one label, or none where the text is empty, counted."""
        row = start
        for texts in _windows(self.array, self.name):
            places = np.searchsorted(self.texts, texts)
            if not np.array_equal(self.texts[np.minimum(places, len(self.texts) - 1)], texts):
                raise InputError(f"{self.name} was changed meanwhile: convert again")
            ids, there = self.ids[places], texts != ""
            unseen = there & (ids < 0)
            if unseen.any() and not self.drop:
                at = int(np.argmax(unseen))
                raise InputError(
                    f"{self.name}: class {str(texts[at])!r:.50} in row {row + at} (from 0) is none of the labels of "
                    + flags.LIKE
                    + f" {self.like}: check that the two belong together, or "
                    + flags.UNSEEN_DROP
                )
            notes["dropped"] = notes.get("dropped", 0) + int(unseen.sum())
            notes["missing"] = notes.get("missing", 0) + int((~there).sum())
            indptr = np.zeros(len(ids) + 1, np.int64)
            np.cumsum(ids >= 0, out=indptr[1:])
            row += len(ids)
            yield indptr, ids[ids >= 0], None


def string_classes(name: str, kind: str, files: Sequence[Path], array: Array) -> StringClasses:
    """An array of texts, which is read once. Raises InputError for too many different ones, or what is no UTF-8."""
    if not 0 < array.dtype.itemsize <= 4 * _MOST_CHARACTERS:
        raise InputError(
            f"{name} has texts of {array.dtype.itemsize} bytes: a class has from 1 to {_MOST_CHARACTERS} characters"
        )
    texts = np.zeros(0, "U1")
    for window in _windows(array, name):
        texts = np.union1d(texts, window)
        if len(texts) > _MOST_CLASSES:
            raise InputError(f"{name} has more than {_MOST_CLASSES:,} different classes: save ids of them instead")
    return StringClasses(name, kind, files, array, texts)


def _windows(array: Array, name: str) -> Iterator[NDArray[Any]]:
    """The texts of the rows, some at a time."""
    with array.stream(0, array.n_items) as stream:
        for start in range(0, array.n_items, _WINDOW):
            window = stream.take(min(_WINDOW, array.n_items - start))
            try:
                texts = np.char.decode(window, "utf-8") if window.dtype.kind == "S" else window.astype(str)
                "".join(texts.tolist()).encode()
            except (UnicodeError, ValueError):
                raise InputError(
                    f"{name}: a class in rows from {start} on is not readable: save the texts again"
                ) from None
            yield texts
        stream.finish()


def with_names(sides: Sequence[Side], like: Like | None, drop: bool) -> list[Side]:
    """Labels of several files, whose texts get the ids that they have in `like`, or in all files together."""
    named = [side for side in sides if isinstance(side, StringClasses)]
    if not named:
        return list(sides)
    if len(named) < len(sides):
        raise InputError(f"{named[0].name} has classes as texts, and another file of labels has not: save them alike")
    if (like := of_labels(like)) is not None:
        from xmc_stream.store.names import NamedIds, open_names

        names = open_names(like.path, "labels")
        if names is None:
            raise InputError(
                f"{named[0].name} has names of classes and "
                + flags.LIKE
                + f" {like.name} has none to find them by: convert that from names too, or save ids"
            )
        known = NamedIds(names)
        found: list[Side] = []
        for side in named:
            try:
                ids = known.find(side.texts.tolist())
            except LookupError as error:
                raise InputError(f"{like.name}: {error.args[0]}: make the names unique first") from None
            found.append(replace(side, ids=ids, n_columns=like.n_labels, like=like.name, drop=drop))
        return found
    labels = np.unique(np.concatenate([side.texts for side in named]))
    labels = labels[labels != ""]
    joined: list[Side] = []
    for side in named:
        ids = np.searchsorted(labels, side.texts).astype(np.int64)
        ids[side.texts == ""] = -1
        joined.append(replace(side, ids=ids, n_columns=len(labels), labels=labels))
    return joined


def write_names(sides: Sequence[Side], folder: Path) -> bool:
    """Write the names of labels that are texts; False where they are not, or are those of a training set."""
    from xmc_stream.store.names import new_names

    labels = getattr(sides[0], "labels", None)
    if labels is None:
        return False
    with new_names(folder) as names:
        for start in range(0, len(labels), _WINDOW):
            names.append([name.encode() for name in labels[start : start + _WINDOW]])
    return True
