"""Matrices in arrays, read in windows: CSR, dense, class ids, names of classes; and what a kind of file gives for an array.

Labels of names are the different ones, sorted. They are looked for when a file is opened, and are kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.lines.files import reading
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side, check_real
from xmc_stream.convert.options import Like, of_labels
from xmc_stream.errors import InputError
from xmc_stream.store.names import NamedIds, open_names
from xmc_stream.system.files import regular

Take = Callable[[int], NDArray[Any]]  # gives the next n items, a fresh array; raises InputError where there are less


@dataclass(frozen=True)
class Array:
    """A one-dimensional array on disk, picklable, or in memory. stream: opens items [start, stop), to be taken in turn."""

    n_items: int
    dtype: np.dtype[Any]
    stream: Callable[[int, int], AbstractContextManager[Take]]


def check_file(path: Path, folders: bool = False) -> None:
    """Raises InputError for what is there and is no file, or folder where that may be."""
    if path.exists() and not (path.is_file() or (folders and path.is_dir())):
        raise InputError(f"{path} is not a file: arrays are read at several places at once, not from pipes or folders")


def beginning(path: Path) -> bytes:
    """The first bytes of a file, b"" of a folder. Raises InputError for anything else."""
    check_file(path, folders=True)
    if path.is_dir():
        return b""
    with reading(path), open(path, "rb", opener=regular) as file:
        return file.read(16)


@dataclass(frozen=True)
class CSRSide(Side):
    """A compressed sparse matrix of three arrays, by rows. data: None for ones."""

    indptr: Array
    indices: Array
    data: Array | None

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop)."""
        # the item that two ranges share belongs to the first of them
        first = self._item(start) if start else 0
        end = self.indices.n_items if stop == self.n_rows else self._item(stop)
        with ExitStack() as opened:
            ends = opened.enter_context(self.indptr.stream(start + 1 if start else 0, stop + 1))
            if start == 0:
                self._check(ends(1), 0, 0, 0)
            indices = opened.enter_context(self.indices.stream(first, end))
            data = opened.enter_context(self.data.stream(first, end)) if self.data else None
            at = np.empty(0, np.int64)  # where rows end that are not yet passed on
            while start < stop:
                n = min(size.block, stop - start) - len(at)
                if n > 0:
                    more = self._check(ends(n), start + len(at), int(at[-1]) if len(at) else first)
                    at = np.concatenate([at, more])
                n = max(1, int(np.searchsorted(at, first + size.block, side="right")))
                n_entries = int(at[n - 1]) - first
                if n == 1:
                    size.check(n_entries, self.name, start)
                indptr = np.zeros(n + 1, np.int64)
                np.subtract(at[:n], first, out=indptr[1:])
                yield indptr, indices(n_entries), data(n_entries) if data else None
                at, first, start = at[n:].copy(), first + n_entries, start + n

    def _item(self, row: int) -> int:
        """Where a row begins."""
        with self.indptr.stream(row, row + 1) as take:
            return int(self._check(take(1), row, 0)[0])

    def _check(self, ends: NDArray[Any], row: int, low: int, most: int | None = None) -> NDArray[np.int64]:
        """Items of indptr, which must ascend from `low` to `most`, the number of entries if it is not given."""
        if most is None:
            most = min(array.n_items for array in (self.indices, self.data) if array is not None)
        good = (ends >= low) & (ends <= most)
        good[1:] &= ends[1:] >= ends[:-1]
        if not good.all():
            at = int(np.argmin(good))
            raise InputError(
                f"{self.name}: indptr leads from row {row + at} (from 0) to entry {ends[at]}, and they must ascend "
                f"from {low} to {most} at most: its arrays do not fit its shape, make the matrix again"
            )
        return ends.astype(np.int64)


def csr_side(
    name: str, kind: str, files: Sequence[Path], shape: tuple[int | None, int | None], indptr: Array, indices: Array,
    data: Array | None, **more: Any,
) -> CSRSide:  # fmt: skip
    """A matrix in arrays whose types can be one. Raises ValueError where they cannot."""
    for array, what in ((indptr, "indptr"), (indices, "indices")):
        if array.dtype.kind not in "iu":
            raise ValueError(f"{what} of type {array.dtype}")
    n_rows, n_columns = shape
    if indptr.n_items < 1 or (n_rows is not None and indptr.n_items != n_rows + 1):
        raise ValueError(f"{indptr.n_items} items of indptr for {n_rows} rows")
    if data is not None:
        if data.n_items != indices.n_items:
            raise ValueError(f"{indices.n_items} indices and {data.n_items} values")
        check_real(data.dtype, name)
    return CSRSide(name, kind, files, indptr.n_items - 1, n_columns, indices.n_items, indptr, indices, data, **more)


@dataclass(frozen=True)
class DenseSide(Side):
    """A dense matrix of real numbers in C order."""

    array: Array

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) without their zeros, of either sign, and values that are zero in float32."""
        width = self.n_columns or 0
        size.check(2 * width, self.name, start)  # finding what is not zero takes as much again
        step = max(1, min(size.block, size.block // 2 // max(width, 1)))
        with self.array.stream(start * width, stop * width) as take:
            for row in range(start, stop, step):
                n = min(step, stop - row)
                block = take(n * width).reshape(n, width)
                with np.errstate(over="ignore", invalid="ignore"):
                    there = block.astype(np.float32) != 0
                indptr = np.zeros(n + 1, np.int64)
                np.cumsum(np.count_nonzero(there, axis=1), out=indptr[1:])
                yield indptr, np.nonzero(there)[1], block[there]


def dense(
    name: str, kind: str, files: Sequence[Path], n_rows: int, n_columns: int, array: Array, **more: Any
) -> DenseSide:
    """A dense matrix of which all may be entries. Raises InputError where its numbers are not real."""
    check_real(array.dtype, name)
    return DenseSide(name, kind, files, n_rows, n_columns, n_rows * n_columns, array, **{"divisible": True, **more})


@dataclass(frozen=True)
class ClassSide(Side):
    """The class of each row."""

    array: Array

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), each with one entry."""
        with self.array.stream(start, stop) as take:
            for row in range(start, stop, size.block):
                n = min(size.block, stop - row)
                yield np.arange(n + 1), take(n), None


def classes(name: str, kind: str, files: Sequence[Path], array: Array, **more: Any) -> ClassSide:
    """Class ids."""
    return ClassSide(name, kind, files, array.n_items, None, array.n_items, array, **{"divisible": True, **more})


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
