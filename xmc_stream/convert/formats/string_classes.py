"""The class of each row as a text in an array of NumPy, of fixed width: labels are the different texts, sorted.

They are looked for when a file is opened, and are kept in memory, as many as they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.matrices.arrays import Array
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side
from xmc_stream.convert.options import Like, of_labels
from xmc_stream.errors import InputError
from xmc_stream.store.names import NamedIds, open_names

_MOST_CLASSES = 10**6
_WINDOW = 2**14  # rows looked at a time
_MOST_CHARACTERS = 2**12  # of a text


def ids_by_name(like: Like, kind: str, wanted: Sequence[str], name: str) -> NDArray[np.int64]:
    """The ids that names have in a training set, -1 for those it does not have. kind: "features" or "labels".

    Raises InputError where it has no names, or one twice. name: what messages call the test set.
    """
    names = open_names(like.path, kind)
    if names is None:
        raise InputError(
            f"{name} has names of {kind} and "
            + flags.LIKE
            + f" {like.name} has none to find them by, but ids: give ids here too, or convert that from names"
        )
    try:
        return NamedIds(names).find(wanted)
    except LookupError as error:
        raise InputError(f"{like.name}: {error.args[0]}: make the names unique first") from None


@dataclass(frozen=True)
class NamedClasses(Side):
    """The class of each row by its name. like: whose labels these are, "" for their own; drop: those that it does not have."""

    like: str
    drop: bool

    def labelled(
        self, codes: NDArray[np.int64], ids: NDArray[np.int64], names: Any, row: int, notes: dict[str, Any]
    ) -> Raw:
        """Rows from `row` on with one label, or none where the class is missing, counted.

        codes: the place of each row's class among the names, -1 for none; ids: the label of each name, -1 for none.
        """
        there = codes >= 0
        found = np.where(there, ids[codes] if len(ids) else -1, -1)
        unseen = there & (found < 0)
        if unseen.any() and not self.drop:
            at = int(np.argmax(unseen))
            raise InputError(
                f"{self.name}: class {str(names[codes[at]])!r:.50} in row {row + at} (from 0) is none of the labels of "
                + flags.LIKE
                + f" {self.like}: check that the two belong together, or "
                + flags.UNSEEN_DROP
            )
        notes["dropped"] = notes.get("dropped", 0) + int(unseen.sum())
        notes["missing"] = notes.get("missing", 0) + int((~there).sum())
        indptr = np.zeros(len(codes) + 1, np.int64)
        np.cumsum(found >= 0, out=indptr[1:])
        return indptr, found[found >= 0], None


@dataclass(frozen=True)
class StringClasses(NamedClasses):
    """Texts of an array. texts: those that occur, sorted; ids: the label of each, -1 for none."""

    array: Array
    texts: NDArray[Any]
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) with one label, or none where the text is empty."""
        row = start
        for texts in _windows(self.array, self.name):
            places = np.searchsorted(self.texts, texts)
            if not np.array_equal(self.texts[np.minimum(places, len(self.texts) - 1)], texts):
                raise InputError(f"{self.name} was changed meanwhile: convert again")
            yield self.labelled(np.where(texts == "", -1, places), self.ids, self.texts, row, notes)
            row += len(texts)


def string_classes(
    name: str, kind: str, files: Sequence[Path], array: Array, check: Callable[[], None] | None = None
) -> StringClasses:
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
    n = array.n_items
    return StringClasses(name, kind, files, n, 0, n, "", False, array, texts, check=check)


def _windows(array: Array, name: str) -> Iterator[NDArray[Any]]:
    """The texts of the rows, some at a time."""
    with array.stream(0, array.n_items) as take:
        for start in range(0, array.n_items, _WINDOW):
            window = take(min(_WINDOW, array.n_items - start))
            try:
                texts = np.char.decode(window, "utf-8") if window.dtype.kind == "S" else window.astype(str)
                "".join(texts.tolist()).encode()
            except (UnicodeError, ValueError):
                raise InputError(
                    f"{name}: a class in rows from {start} on is not readable: save the texts again"
                ) from None
            yield texts


def with_names(sides: Sequence[Side], like: Like | None, drop: bool) -> list[Side]:
    """Labels of several files, whose texts get the ids that they have in `like`, or in all files together."""
    named = [side for side in sides if isinstance(side, StringClasses)]
    if not named:
        return list(sides)
    if len(named) < len(sides):
        raise InputError(f"{named[0].name} has classes as texts, and another file of labels has not: save them alike")
    if (like := of_labels(like)) is not None:
        found: list[Side] = []
        for side in named:
            ids = ids_by_name(like, "labels", side.texts.tolist(), side.name)
            found.append(_numbered(side, ids, like.n_labels, like=like.name, drop=drop))
        return found
    labels = np.unique(np.concatenate([side.texts for side in named]))
    labels = labels[labels != ""]
    joined: list[Side] = []
    for side in named:
        ids = np.searchsorted(labels, side.texts).astype(np.int64)
        ids[side.texts == ""] = -1
        joined.append(_numbered(side, ids, len(labels), labels=labels))
    return joined


def _numbered(side: StringClasses, ids: NDArray[np.int64], n_columns: int, **more: Any) -> StringClasses:
    """With the ids of the labels; the texts, what is read of the file, and a copy of both are in memory."""
    n_labels = more["labels"].nbytes if "labels" in more else 0
    load_bytes = 2 * (side.texts.nbytes + n_labels + ids.nbytes + 4 * _WINDOW * side.array.dtype.itemsize)
    return replace(side, ids=ids, n_columns=n_columns, load_bytes=load_bytes, **more)
