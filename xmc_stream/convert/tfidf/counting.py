"""Rows of words and of labels as a part counts them, by numbers of its own; which fields of a record they stand in.

What is wrong with a record is said in words.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.convert.kernels.tokens import KIND, LIST
from xmc_stream.convert.messages import meant, shown, shown_text
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions, of_labels
from xmc_stream.convert.pieces import Rows
from xmc_stream.convert.tfidf.block import Block
from xmc_stream.convert.tfidf.table import NO_COUNTS, Counts, Terms, WordTable, joined, terms_of, texts_of
from xmc_stream.convert.tfidf.vectorizer import analyser_of, hashed, rule_of
from xmc_stream.convert.tfidf.vocabulary import write_sorted_run
from xmc_stream.errors import InputError
from xmc_stream.store.names import new_names

_NO_LABELS: Rows = (np.zeros(1, np.int64), np.zeros(0, np.int64), None)
PART_IDS = "ids"  # the rows' own ids, in the folder of a part
_SHOWN_FIELDS = 10
TEXT_FIELDS = ("title", "content", "text", "body", "document", "abstract", "description", "sentence")
LABEL_FIELDS = ("target_ind", "labels", "label", "tags", "categories", "topics", "classes", "category", "class")
_TOGETHER = 2**18  # characters that are counted together
_BATCH_BYTES = 2**18  # of ids that are written together
_ESCAPE = r"""\\(?:['"\\abfnrtv]|x[0-9a-f]{2}|u[0-9a-f]{4})"""
_ITEM = rf"""(?:'(?:[^'\\\r\n]|{_ESCAPE})*+'|"(?:[^"\\\r\n]|{_ESCAPE})*+"|0|[1-9][0-9]{{0,17}})\s*"""
_LISTED = re.compile(
    rf"\s*[\[({{]\s*(?:{_ITEM}(?:,\s*{_ITEM})*+(?:,\s*)?)?[\])}}]\s*"
)  # as Python writes lists, tuples, sets
_WHOLE = re.compile(r" *[+-]?[0-9]{1,19} *")


class BadRowError(Exception):
    """What is wrong with a record."""


def kind_of(value: Any) -> str:
    """The kind of a JSON value in words."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a text",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def sound(text: str, field: str) -> str:
    """The text. Raises BadRowError where it has NUL characters, or cannot be written as UTF-8."""
    if "\0" in text:
        raise BadRowError(f"there is a NUL character in field {field!r}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRowError(f"there is half a surrogate pair in field {field!r}, which is no text") from None
    return text


class WordRows:
    """Rows of words, by the numbers of a dictionary."""

    def __init__(self, text: TextOptions) -> None:
        self._rule = rule_of(text)
        self._text = text
        self._begin()

    def _begin(self) -> None:
        self._table = WordTable()
        self._counted: list[Counts] = []
        self._waiting: list[str] = []  # texts
        self._size = self.n_tokens = 0  # characters of them; words that are counted

    @property
    def size(self) -> int:
        """Bytes of the dictionary."""
        return self._table.size

    def add(self, text: str) -> None:
        """Count the words of a text."""
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= _TOGETHER:
            self._count()

    def extend(self, texts: Terms) -> None:
        """Count the words of several texts."""
        if self._rule:
            self._count()
            self._keep(self._table.count_texts(texts, self._rule))
        else:
            for text in texts_of(texts):
                self.add(text)

    def _count(self) -> None:
        """Count what waits."""
        texts, self._waiting, self._size = self._waiting, [], 0
        if not texts:
            return
        if self._rule:
            self._keep(self._table.count_texts(terms_of(texts), self._rule))
        else:
            analyse = analyser_of(self._text)
            tokens = [list(analyse(text)) for text in texts]
            lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
            flat = terms_of(itertools.chain.from_iterable(tokens))
            self._keep(self._table.count_terms(flat, lengths, np.zeros(len(lengths), np.int64)))

    def _keep(self, rows: Counts) -> None:
        self._counted.append(rows)
        self.n_tokens += len(rows[1])

    def take(self) -> Rows:
        """The rows since the last call, each in the order of its words."""
        self._count()
        rows = joined(self._counted, NO_COUNTS)
        self._counted, self.n_tokens = [], 0
        return rows

    def write(self, folder: Path) -> int:
        """Write the dictionary, and begin with an empty one."""
        run = write_sorted_run(folder, self._table, 0)
        self._begin()
        return run.n


class HashedRows:
    """Rows of hashed words."""

    size = 0

    def __init__(self, text: TextOptions) -> None:
        self._analyse = analyser_of(text)
        self._text = text
        self._rows = np.zeros(text.hash_features or 0, np.int64)
        self._tokens: list[list[str]] = []
        self.n_tokens = 0

    def add(self, text: str) -> None:
        tokens = list(self._analyse(text))
        self._tokens.append(tokens)
        self.n_tokens += len(tokens)

    def extend(self, texts: Terms) -> None:
        """Hash the words of several texts."""
        for text in texts_of(texts):
            self.add(text)

    def take(self) -> Rows:
        """The rows since the last call."""
        rows = hashed(self._text, self._tokens)
        self._tokens, self.n_tokens = [], 0
        np.add.at(self._rows, rows[1], 1)
        return rows

    def write(self, folder: Path) -> int:
        folder.mkdir()
        self._rows.tofile(folder / "rows")
        return len(self._rows)


def label_base(options: ConvertOptions, like: Like | None) -> int:
    """Where ids of labels begin: as given, or as in the training set, or 0."""
    of_like = like.label_base if like else 0
    return of_like if options.base is None else options.base


def _whole(label: str | int) -> int:
    """A label that is an id."""
    if isinstance(label, str) and not _WHOLE.fullmatch(label):
        raise BadRowError(
            f"label {shown(label.encode())} is no whole number, as ids are: names need no "
            + flags.LABEL_IDS
            + ", several ids in a text need "
            + flags.LABEL_DELIMITER
            + " or "
            + flags.LABEL_LISTS
        )
    return int(label)


def listed(text: str) -> Any:
    """The labels in a list as JSON or Python writes one; none in a blank text. Raises BadRowError for anything else."""
    if not text.strip():
        return []
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), list):
            return found
    inner = text.strip()
    # Python would join strings that have no comma between them
    if _LISTED.fullmatch(text) and inner[0] + inner[-1] in ("[]", "()", "{}"):
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(f"[{inner[1:-1]}]")
    raise BadRowError(f"{shown(text.encode())} is no list of labels, as ['a', 'b'] is one")


def labels_in(record: Mapping[str, Any], field: str, text: TextOptions) -> list[Any]:
    """The labels of a record, ids or names. Raises BadRowError."""
    if field not in record:
        raise BadRowError(f"there is no field {field!r}: name the field of the labels (" + flags.LABEL_FIELD + ")")
    labels = record[field]
    if isinstance(labels, str) and text.label_lists:
        labels = listed(sound(labels, field))
    elif isinstance(labels, str) and text.label_delimiter is not None:
        labels = [label.strip() for label in labels.split(text.label_delimiter)] if labels.strip() else []
    elif isinstance(labels, str) or (isinstance(labels, int) and not isinstance(labels, bool)):
        labels = [labels]
    if not isinstance(labels, list):
        raise BadRowError(f"field {field!r} is {kind_of(labels)}, not a list of labels")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, str | int) or type(label) is not type(labels[0]):
            raise BadRowError(f"field {field!r} has {kind_of(label)} in it: labels are all names or all whole numbers")
        if isinstance(label, str) and not sound(label, field):
            raise BadRowError(f"a label in field {field!r} is empty")
    return [_whole(label) for label in labels] if text.label_ids else labels


class LabelRows:
    """Labels of rows: ids as they stand, or names by the numbers of a dictionary; kind: which, "" before the first."""

    def __init__(
        self, text: TextOptions, options: ConvertOptions, like: Like | None, part: int, kind: str, notes: dict[str, Any]
    ) -> None:
        self._field = text.label_field or ""
        self._text = text
        self._options, self._notes = options, notes
        self._like = of_labels(like)
        self._bound = self._like.n_labels if self._like else options.n_labels
        self._part = part
        self._base = label_base(options, like)
        self.kind = kind
        self.most = -1
        notes.update({"dropped_labels": 0, "summed_duplicates": 0, "label_texts": 0})
        self._begin()

    def _begin(self) -> None:
        self._table = WordTable()
        self._rows: list[Rows] = []
        self.n_ids = 0  # of rows that are not taken yet
        self._waiting: list[list[Any]] = []  # labels of rows that are not counted yet
        self._lines: list[int] = []
        self._size = 0  # characters of them

    @property
    def size(self) -> int:
        """Bytes of the dictionary of names."""
        return self._table.size

    def add(self, record: Mapping[str, Any], line: int) -> None:
        """Take the labels of a row. Raises BadRowError, and has taken none then."""
        labels = labels_in(record, self._field, self._text) if self._field else []
        if len(set(labels)) < len(labels):
            if not self._options.sum_duplicates:
                twice = next(label for i, label in enumerate(labels) if label in labels[:i])
                raise BadRowError(f"label {shown(str(twice).encode())} stands twice in the row: leave one of them out")
            self._notes["summed_duplicates"] += len(labels) - len(set(labels))
            labels = list(dict.fromkeys(labels))
        if labels:
            kind = "names" if isinstance(labels[0], str) else "ids"
            if self.kind not in ("", kind):
                raise BadRowError(f"labels are {kind} here and {self.kind} elsewhere: write them all alike")
            if kind == "ids":
                labels = self._in_range(labels)
                self.most = max(self.most, *labels) if labels else self.most
            self.kind = kind
        self._notes["label_texts"] += isinstance(record.get(self._field), str)
        named = self.kind == "names"
        self._waiting.append(labels if named else sorted(labels))
        self._lines.append(line)
        self.n_ids += len(labels)
        self._size += sum(map(len, labels)) if named else 0
        if self._size >= _TOGETHER:
            self._count()

    def look(self, block: Block, column: int) -> None:
        """Read the labels of a block's lines by kernels; a line that must be asked about anything is left to `add`."""
        if self.kind == "names" and not self._text.label_ids and not self._text.label_lists:
            self._texts = block.places[:, column, KIND] != LIST
            self._terms, self._indptr = block.label_names(column, self._text.label_delimiter)
        elif self.kind == "ids":
            high = 2**62 if self._bound is None else self._base + self._bound
            self._found, self._indptr = block.label_ids(column, max(self._base, 0), high)
        else:
            block.require(column, ())

    def extend(self, block: Block, start: int, stop: int) -> None:
        """Take the labels of some lines of the block that was looked at."""
        self._count()
        if not self._field:
            self._rows.append((np.zeros(stop - start + 1, np.int64), *_NO_LABELS[1:]))
            return
        indptr = self._indptr
        low, high = int(indptr[start]), int(indptr[stop])
        if self.kind == "names":
            self._notes["label_texts"] += int(self._texts[start:stop].sum())
            terms = self._terms[0], self._terms[1][low : high + 1]
            rows = self._table.count_terms(terms, np.diff(indptr[start : stop + 1]), block.numbers[start:stop])
            self._rows.append((rows[0], rows[1].astype(np.int64), None))
        else:
            ids = self._found[low:high]
            self.most = max(self.most, int(ids.max(initial=-1)))
            self._rows.append((indptr[start : stop + 1] - low, ids.copy(), None))
        self.n_ids += high - low

    def _in_range(self, labels: list[int]) -> list[int]:
        low, high = min(labels), max(labels)
        if low < self._base or high >= 2**62:
            bad = low if low < self._base else high
            raise BadRowError(f"label id {bad} is out of range: ids count from {self._base}")
        if self._bound is not None and high - self._base >= self._bound:
            if self._like is None or not self._options.drop_unseen:
                origin = "which comes from " + flags.LIKE + f" {self._like.name}" if self._like else "as you gave it"
                raise BadRowError(
                    f"label id {high} is not below K = {self._bound}, " + origin + f": ids from {self._base}"
                )
            kept = [label for label in labels if label - self._base < self._bound]
            self._notes["dropped_labels"] += len(labels) - len(kept)
            return kept
        return labels

    def _count(self) -> None:
        """Take what waits."""
        waiting, lines, self._waiting, self._lines, self._size = self._waiting, self._lines, [], [], 0
        if not waiting:
            return
        lengths = np.fromiter(map(len, waiting), np.int64, len(waiting))
        flat = itertools.chain.from_iterable(waiting)
        if self.kind == "names":
            indptr, numbers, _ = self._table.count_terms(terms_of(flat), lengths, np.array(lines))
            self._rows.append((indptr, numbers.astype(np.int64), None))
        else:
            self._rows.append((np.concatenate([[0], np.cumsum(lengths)]), np.fromiter(flat, np.int64), None))

    def take(self) -> Rows:
        """The rows since the last call."""
        self._count()
        rows, self._rows, self.n_ids = joined(self._rows, _NO_LABELS), [], 0
        return rows

    def write(self, folder: Path) -> int:
        """Write the dictionary, and begin with an empty one."""
        run = write_sorted_run(folder, self._table, self._part)
        self._begin()
        return run.n


class RowIds:
    """Writes ids of rows into a folder, while `opened` is; nothing without a field."""

    def __init__(self, field: str | None, folder: Path, opened: ExitStack) -> None:
        self._field = field
        self._batch: list[bytes] = []
        self._size = 0
        if field:
            self._names = opened.enter_context(new_names(folder / PART_IDS))

    def of(self, record: Mapping[str, Any]) -> bytes:
        """The id of a row in UTF-8. Raises BadRowError where it is neither a text nor a whole number."""
        if not self._field:
            return b""
        if self._field not in record:
            raise BadRowError(f"there is no field {self._field!r}: name the field of the ids (" + flags.ID_FIELD + ")")
        value = record[self._field]
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadRowError(f"field {self._field!r} is {kind_of(value)}, not an id: a text or a whole number")
        return sound(str(value), self._field).encode()

    def add(self, name: bytes) -> None:
        """Take the id of a sound row."""
        if self._field:
            self._batch.append(name)
            self._size += len(name) + 64
            if self._size > _BATCH_BYTES:
                self.close()

    def extend(self, block: Block, start: int, stop: int, column: int) -> None:
        """Take the ids of sound lines."""
        for name in block.values(start, stop, column):
            self.add(name)

    def close(self) -> None:
        """Write what is at hand."""
        if self._batch:
            self._names.append(self._batch)
            self._batch, self._size = [], 0


def resolved(
    text: TextOptions, given: TextOptions, first: Mapping[str, Any], name: str, optional: bool
) -> tuple[TextOptions, str]:
    """Options with the fields that this input has, and what was chosen, in words.

    given: what was asked for of this input, which must be there; optional: whether labels may lack.
    """
    fields = text.text_fields
    if not fields:
        strings = [field for field in TEXT_FIELDS if isinstance(first.get(field), str)]
        fields = tuple(strings[: 2 if {"title", "content"} <= set(strings) else 1])
    if not fields:
        raise InputError(f"{name}:1: no text field of a common name: it has {_names(first)}: give " + flags.TEXT_FIELD)
    for kind, asked, flag in (
        ("text", fields, flags.TEXT_FIELD),
        ("label", (given.label_field,), flags.LABEL_FIELD),
        ("id", (given.id_field,), flags.ID_FIELD),
    ):
        for field in asked:
            if field and field not in first:
                raise InputError(
                    f"{name}:1: no {kind} field {shown_text(field)}{meant(field, first)}: it has {_names(first)}: give "
                    + flag
                )
    label = text.label_field
    if label is None or (label and optional and label not in first):
        label = next((field for field in LABEL_FIELDS if field in first), "")
    if not label and not optional and text.label_field is None:
        raise InputError(f"{name}:1: no label field: it has {_names(first)}: give " + flags.LABEL_FIELD)
    ids = text.id_field if text.id_field in first else None
    said = f"text of {' and '.join(fields)}, " + (f"labels of {label}" if label else "no labels")
    said += f", ids of {ids}" if ids else ""
    return replace(text, text_fields=tuple(fields), label_field=label, id_field=ids), said


def _names(first: Mapping[str, Any]) -> str:
    """The fields of a record, the first of them, in a line."""
    names = list(map(shown_text, islice(first, _SHOWN_FIELDS)))
    return ", ".join(names) + (", ..." if len(first) > len(names) else "")


def kind_of_labels(text: TextOptions, first: Mapping[str, Any]) -> str:
    """What the labels of a record are: "names" or "ids", "" where it has none."""
    labels = LabelRows(text, ConvertOptions(), None, 0, "", {})
    try:
        labels.add(first, 1)
    except BadRowError:
        return ""
    return labels.kind
