"""What is in memory already as a source: matrices, arrays, frames and texts, and their labels."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.frames import Column, Frame, column_of, frame_of, indicated, numbers_of
from xmc_stream.convert.matrices.arrays import classes, dense, ids_by_name, string_classes, with_names
from xmc_stream.convert.matrices.memory import as_csr, dense_side, in_memory, memory_array, row_array
from xmc_stream.convert.matrices.sides import Side, no_labels
from xmc_stream.convert.matrices.source import Matrices
from xmc_stream.convert.messages import shown_text
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions, of_labels, refuse_idle
from xmc_stream.convert.source import Source
from xmc_stream.convert.tfidf.block import Record
from xmc_stream.convert.tfidf.counting import LABEL_FIELDS, BadRowError, label_base, labels_in
from xmc_stream.convert.tfidf.records import Input, Records, RecordsSource
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.system.memory import format_size

_BATCH = 256  # rows of text at hand
_PART = 2**18  # rows of text of a part
LISTS = "lists of labels"  # the kind of such a side
_LISTED = 2**12  # rows of labels at hand


def open_memory(X: Any, options: ConvertOptions, like: Like | None) -> Source:
    """X, with labels of `options` or in a column of its own. Raises InputError for what is no set of samples."""
    if isinstance(X, np.ma.MaskedArray):
        raise InputError("X is a masked array: fill what is masked")
    if options.labels is not None and (options.unlabelled or (options.text_options or TextOptions()).label_field):
        raise InputError(
            "labels are given, and a column of labels is named or they are to be left out: leave out one of them"
        )
    if frame := frame_of(X):
        return _of_frame(frame, options, like)
    column = column_of(X)
    if column is not None and column.numbers is None and _are_texts(column):
        return _of_texts(column, options, like)
    if hasattr(X, "tocsr"):
        return _joined(in_memory(X, "X"), options, like)
    matrix = _two_dimensions(X)
    if matrix.shape[1] == 0:
        raise InputError(f"X has the shape {matrix.shape}, without columns: there is nothing to convert")
    return _joined(dense_side(matrix, "X"), options, like)


def _joined(x: Side, options: ConvertOptions, like: Like | None, y: Side | None = None) -> Matrices:
    """X and Y, which is that of `options` if none is given."""
    if options.unlabelled:
        y = no_labels(x)
    elif y is None:
        if options.labels is None:
            raise InputError("features were given as a matrix and labels were not: give Y as labels=")
        y = label_side(options.labels, options, like)
    options = replace(options, labels=None, label=None)
    # of lists of labels, the options of text have said how they are read
    refuse_idle(x.name, "a matrix", replace(options, text=None) if y.kind == LISTS else options)
    source = Matrices([x], with_names([y], like, options.drop_unseen), options, like)
    source.alone = True
    kind = "scipy matrices" if x.kind == "scipy matrix" else x.kind
    source.attributes = {"source": kind, "source_format": kind}
    source.identity["matrices"] = uuid.uuid4().hex  # nothing tells others like them from these in a later process
    return source


def _two_dimensions(X: Any) -> Any:
    """X as an array (n x D). Raises InputError for what is none."""
    listed = isinstance(X, list | tuple)
    if not listed and hasattr(X, "__array__") and np.ndim(X) == 2:
        return np.asarray(X)
    shape = f" of the shape {np.shape(X)}" if hasattr(X, "__array__") else ""
    raise InputError(
        f"X must be a two-dimensional matrix or array, a frame, texts, or paths of files, got {type(X).__name__}{shape}"
        + (": give numpy.array of it, or texts with labels=" if listed else "")
    )


def label_side(Y: Any, options: ConvertOptions, like: Like | None) -> Side:
    """Y in memory: an indicator (N x K), sparse or dense, a class a row, or lists of labels. Raises InputError."""
    if hasattr(Y, "tocsr"):
        return in_memory(Y, "Y")
    if frame := frame_of(Y):
        Y = _array_of(frame)
    if isinstance(Y, np.ndarray):
        flat: Any = Y.reshape(-1) if Y.ndim == 2 and Y.shape[1:] == (1,) else Y
        if flat.ndim == 1 and flat.dtype.kind in "iu":
            return classes("Y", "class ids", (), memory_array(flat))
        if flat.ndim == 1 and flat.dtype.kind in "US":
            return string_classes("Y", "class names", (), memory_array(flat))
        if flat.ndim == 2:
            return dense_side(flat, "Y")
        Y = flat
    if isinstance(Y, str) or (column := column_of(Y)) is None:
        raise InputError(
            f"labels must be a matrix (N x K), a class a row, or lists of labels, beside X in memory, not {type(Y).__name__}: "
            "give files for both, or both in memory"
        )
    return listed_side(column, "labels", options, like)


def _array_of(frame: Frame) -> Any:
    columns = tuple(frame.columns.values())
    if any(column.numbers is None for column in columns):
        raise InputError(
            "labels are a frame with columns that are no numbers: give an indicator (N x K), or one column"
        )
    return numbers_of(columns, 0, frame.n_rows)


def _are_texts(column: Column) -> bool:
    """Whether all rows of a column are texts; those that are none are named when they are read."""
    return column.n_rows > 0 and isinstance(column.objects(0, 1)[0], str)


def _of_frame(frame: Frame, options: ConvertOptions, like: Like | None) -> Source:
    """A frame of texts, or of numbers alone beside the column of labels, if no text is named."""
    label = options.text_options.label_field if options.text_options else None
    if label is None and options.labels is None:
        label = next((name for name in LABEL_FIELDS if name in frame.columns), None)
    if not frame.n_rows:
        raise InputError("the frame has no rows: there is nothing to convert")
    features = {name: column for name, column in frame.columns.items() if name != label}
    fields = options.text_options.text_fields if options.text_options else ()
    if fields or not features or any(column.numbers is None for column in features.values()):
        return _of_records(frame, "frame", options, like)
    columns = tuple(features.values())
    array = row_array(partial(numbers_of, columns), frame.n_rows, len(columns), np.float64)
    x = dense("X", "frame", (), frame.n_rows, len(columns), array)
    if options.unlabelled or options.labels is not None:
        return _joined(x, options, like)
    if label is None or label not in frame.columns:
        raise InputError(f"the frame has no column {label or 'of labels'!r}: name it by label=, or give labels=")
    return _joined(x, options, like, listed_side(frame.columns[label], label, options, like))


def _of_texts(column: Column, options: ConvertOptions, like: Like | None) -> Source:
    """Texts alone: they have one field, which has no name of the user's."""
    text = options.text_options or TextOptions()
    if text.text_fields or text.label_field or text.id_field:
        raise InputError("a list of texts has no fields: name fields of a frame, and give labels as labels=")
    text = replace(text, text_fields=("text",), label_field=None if options.labels is not None else "")
    if options.labels is None and not options.unlabelled:
        raise InputError("texts were given and labels were not: give labels=, or unlabelled=True")
    return _of_records(Frame({"text": column}), "texts", replace(options, text=text, label=None), like)


def _of_records(frame: Frame, name: str, options: ConvertOptions, like: Like | None) -> RecordsSource:
    """Raw text in columns, as a file of Parquet has them; labels of their own are one more column."""
    if options.labels is not None:
        labels, n_labels = _label_column(options.labels)
        if labels.n_rows != frame.n_rows:
            raise InputError(f"there are {frame.n_rows} texts and labels of {labels.n_rows}: they must be as many")
        frame = Frame({**frame.columns, "labels": labels})
        text = replace(options.text_options or TextOptions(), label_field="labels")
        options = replace(options, text=text, label=None, labels=None, n_labels=options.n_labels or n_labels)
    starts = range(0, frame.n_rows, _PART)
    records = [MemoryRecords(frame, name, start, min(start + _PART, frame.n_rows)) for start in starts]
    # nothing tells others like them from these, as of matrices
    more = [uuid.uuid4().hex]
    found = Input(name, [Path(name)], records, frame.first(), None, more, alone=True, in_memory=True)
    return RecordsSource(found, options, like)


def _label_column(labels: Any) -> tuple[Column, int | None]:
    """Labels in memory as a column, and how many there are where their shape says it."""
    if frame := frame_of(labels):
        labels = _array_of(frame)
    if hasattr(labels, "tocsr") or (isinstance(labels, np.ndarray) and labels.ndim == 2):
        from scipy.sparse import csr_matrix

        matrix = as_csr(labels, "labels") if hasattr(labels, "tocsr") else csr_matrix(labels)
        return indicated(matrix), int(matrix.shape[1])
    column = None if isinstance(labels, str) else column_of(labels)
    if column is None:
        raise InputError(f"labels must be lists of labels, or a matrix (N x K), not {type(labels).__name__}")
    return column, None


@dataclass(frozen=True)
class MemoryRecords(Records):
    """Rows [start, stop) of columns in memory, numbered from 0."""

    frame: Frame
    name: str
    start: int
    stop: int

    def read(self, longest: int, notes: dict[str, Any], text: TextOptions) -> Iterator[tuple[int, Record]]:
        """Number and row."""
        notes["bytes_read"] = 0
        columns = [self.frame.columns[field] for field in text.columns]
        for start in range(self.start, self.stop, _BATCH):
            stop = min(start + _BATCH, self.stop)
            found = [column.objects(start, stop) for column in columns]
            n_bytes = sum(len(value) for values in found for value in values if isinstance(value, str))
            if n_bytes > longest * 4:
                raise MemoryLimitError(
                    f"{self.where(start)}: {stop - start} rows from here on have {format_size(n_bytes)} of text, and the "
                    f"limit leaves {format_size(longest * 4)}: raise " + flags.MEMORY_LIMIT
                )
            for number, values in enumerate(zip(*found, strict=True), start):
                yield number, dict(zip(text.columns, values, strict=True))

    def where(self, number: int) -> str:
        """The row."""
        return f"{self.name}[{number}]"


def listed_side(column: Column, name: str, options: ConvertOptions, like: Like | None) -> Side:
    """Y of a column. name: what messages call it. Raises InputError for what is no label, naming the row."""
    from scipy.sparse import csr_matrix

    text, like = options.text_options or TextOptions(), of_labels(like)
    numbers: dict[str, int] = {}
    found, ends, kinds = array("q"), array("q", [0]), set()
    for start in range(0, column.n_rows, _LISTED):
        for row, value in enumerate(column.objects(start, min(start + _LISTED, column.n_rows)), start):
            try:
                labels = labels_in({name: value}, name, text)
            except BadRowError as error:
                raise InputError(f"row {row} (from 0): " + error.args[0]) from None
            kinds |= {type(label) for label in labels}
            if len(kinds) > 1:
                raise InputError(
                    f"row {row} (from 0): labels are names in some rows and ids in others: write them alike"
                )
            found.extend(numbers.setdefault(one, len(numbers)) if isinstance(one, str) else one for one in labels)
            ends.append(len(found))
    ids, n_columns, names = np.array(found, np.int64), 0, None
    if numbers:
        known, n_columns, names = _numbered(numbers, like, options.drop_unseen, name)
        ids = known[ids]
    elif len(ids):
        ids -= label_base(options, like)
    indptr = np.array(ends)
    if (ids < 0).any() and numbers:
        indptr = np.concatenate([[0], np.cumsum(ids >= 0)])[indptr]
        ids = ids[ids >= 0]
    if len(ids) and ids.min() < 0:
        raise InputError(f"{name} has the label {ids.min()}: ids of labels count from 0")
    n_columns = n_columns or max(int(ids.max(initial=-1)) + 1, options.n_labels or 0, like.n_labels if like else 0)
    matrix = csr_matrix((np.ones(len(ids), np.float32), ids, indptr), shape=(column.n_rows, n_columns))
    return replace(in_memory(matrix, name), kind=LISTS, labels=names)


def _numbered(
    numbers: dict[str, int], like: Like | None, drop: bool, name: str
) -> tuple[NDArray[np.int64], int, list[str] | None]:
    """The label of each number, -1 for none; how many labels there are, and their names where those are new."""
    order = sorted(numbers, key=str.encode)
    known = np.empty(len(numbers), np.int64)
    places = [numbers[one] for one in order]
    if like is None:
        known[places] = np.arange(len(order))
        return known, len(order), order
    known[places] = ids = ids_by_name(like, "labels", order, name)
    if not drop and (ids < 0).any():
        unseen = order[int(np.argmin(ids))]
        raise InputError(
            f"{name}: label {shown_text(unseen)} does not occur in {like.name}: " + flags.UNSEEN_DROP + " leaves it out"
        )
    return known, like.n_labels, None
