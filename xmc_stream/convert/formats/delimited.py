"""CSV and TSV: a row a record, with columns of text and labels, as `jsonl` has fields; read by Python's csv.

Texts in quotes may have delimiters and newlines in them. Everything in a cell is text; an empty cell of labels is none.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.texts import TextInput, looked_at, text_records
from xmc_stream.convert.kernels.tokens import BLANK, HEADER
from xmc_stream.convert.lines.files import HEAD, Buffers, TextFile, TextRange, cuts, name_of, place_of, ranges
from xmc_stream.convert.lines.parser import bom_length
from xmc_stream.convert.messages import one_line, shown
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions
from xmc_stream.convert.tfidf.block import LINES, Block, Record
from xmc_stream.convert.tfidf.counting import LABEL_FIELDS, TEXT_FIELDS
from xmc_stream.convert.tfidf.records import Records, RecordsSource
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.system.memory import format_size

_DELIMITERS = "\t,;|"  # that are recognised
_QUOTE = '"'
_WINDOW = 2**19  # bytes of lines at hand
_LONGEST_FIRST = 2**24  # bytes of the header and the first row
_SAMPLE = 50  # rows that tell the delimiter
_UNREADABLE = "\ufffd"  # for bytes that are not UTF-8
_REASONS = {  # of what Python's csv says
    "expected after": "text follows a closing quote: write a quote within quotes twice, or "
    + flags.QUOTE_NONE
    + " where quotes are text",
    "unexpected end": "quotes that begin here do not end: close them, or "
    + flags.QUOTE_NONE
    + " where quotes are text",
    "new-line character": "there is a carriage return within the row: put the text in quotes, or end lines alike",
}


@dataclass(frozen=True)
class Dialect:
    """How rows are written. quote: "" for none."""

    delimiter: str
    quote: str

    def reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """The rows of lines that end in a newline, raising csv.Error for a bad one, and reading on behind it then."""
        return csv.reader(
            lines, delimiter=self.delimiter, quotechar=self.quote or None, strict=True,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
        )  # fmt: skip


@dataclass(frozen=True)
class CsvRows(Records):
    """The rows of a range of a file. names: of its columns; header: whether the range begins with the names."""

    text: TextRange
    dialect: Dialect
    names: tuple[str, ...]
    header: bool

    def read(self, longest: int, notes: dict[str, Any], text: TextOptions) -> Iterator[tuple[int, Record] | Block]:
        """The rows, by the lines that they begin in, numbered in the range from 1."""
        from xmc_stream.convert.kernels.records import read_records

        csv.field_size_limit(max(csv.field_size_limit(), longest))  # of the process: rows are bounded here
        columns = np.full(len(self.names), -1, np.int64)
        columns[[self.names.index(name) for name in text.columns]] = np.arange(len(text.columns))
        quote = ord(self.dialect.quote) if self.dialect.quote else -1
        begins, lines = np.empty(LINES + 1, np.int64), np.ones(LINES + 1, np.int64)
        status, places = np.empty(LINES, np.uint8), np.empty((LINES, len(text.columns), 3), np.int32)
        rest = np.empty(0, np.uint8)
        header = self.header
        with self.text.open(Buffers(min(_WINDOW, longest), longest)) as file:
            for window in file.windows():
                notes["bytes_read"] = file.bytes_read
                found, at = np.concatenate([rest, window]), 0

                def record(i: int, found: NDArray[np.uint8] = found) -> Record:
                    return self._by_python(found[begins[i] : begins[i + 1]].tobytes(), text)

                while n := read_records(
                    found, at, ord(self.dialect.delimiter), quote, columns, begins, lines, status, places
                ):
                    for i in np.flatnonzero(np.diff(begins[: n + 1]) > longest + 1)[:1]:
                        raise self._too_long(file, int(lines[i]), longest)
                    if header and (rows := np.flatnonzero(status[:n] != BLANK)).size:
                        status[rows[0]], header = HEADER, False
                    yield Block(lines[:n], found, status[:n], places[:n], True, record)
                    at, lines[0] = int(begins[n]), lines[n]
                rest = found[at:].copy()
                file.n_lines = int(lines[0]) - 1
                if len(rest) > longest + 1:
                    raise self._too_long(file, int(lines[0]), longest)
            notes["bytes_read"] = file.bytes_read
        if len(rest):
            yield int(lines[0]), self._by_python(rest.tobytes(), text)

    def load_kernels(self) -> None:
        """Read a row."""
        from xmc_stream.convert.kernels.records import read_records

        places, counts = np.empty((1, 1, 3), np.int32), np.zeros((3, 2), np.int64)
        text = np.frombuffer(bytearray(b"a\n"), np.uint8)
        read_records(text, 0, ord(","), ord(_QUOTE), counts[0, :1], counts[1], counts[2], np.empty(1, np.uint8), places)

    def _too_long(self, file: TextFile, line: int, longest: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"{file.name}:{file.first_line() + line - 1}: the row that begins here is longer than "
            f"{format_size(longest)}, all that the limit leaves for one: close its quotes, or raise "
            + flags.MEMORY_LIMIT
        )

    def _by_python(self, content: bytes, text: TextOptions) -> Record:
        """A row, or what is wrong with it, as Python's csv has it."""
        lines = _Lines(content)
        try:
            row = next(self.dialect.reader(iter(lines)), [])
        except csv.Error as error:
            return lines.wrong or _reason(error, lines)
        if not row:
            return lines.wrong or None
        if lines.wrong or len(row) != len(self.names):
            return lines.wrong or self._other_length(row)
        record: dict[str, Any] = {name: row[self.names.index(name)] for name in text.columns}
        if text.label_field and not record[text.label_field].strip():
            record[text.label_field] = []  # an empty cell has no labels
        return record

    def _other_length(self, row: list[str]) -> str:
        return (
            f"the row has {len(row)} columns and the header {len(self.names)}: put a text with "
            f"{shown(self.dialect.delimiter.encode())} in it into quotes, or name another " + flags.DELIMITER
        )

    def where(self, number: int) -> str:
        """File and line; the lines before the range are counted when it is asked."""
        return place_of(self.text, number)


class _Lines:
    """The lines of a row as texts. n: of those that were taken; wrong: what is wrong with them."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.n, self.wrong = 0, ""

    def __iter__(self) -> Iterator[str]:
        return map(self._text, io.BytesIO(self._content))

    def _text(self, line: bytes) -> str:
        self.n += 1
        if b"\0" in line:
            self.wrong = self.wrong or "there is a NUL byte in the row: the file is damaged or not a text"
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            where = "the line" if self.n == 1 else f"line {self.n} of the row"
            self.wrong = self.wrong or f"byte {error.start + 1} of {where} is not UTF-8: convert the file to UTF-8"
            return line.decode("utf-8", "replace")


def _reason(error: csv.Error, lines: _Lines) -> str:
    said = next((words for part, words in _REASONS.items() if part in str(error)), one_line(error))
    more = lines.n - 1
    return said + (f" (the row goes on for {more:,} lines)" if more else "")


@dataclass(frozen=True)
class _Table:
    """What the beginning of a file shows. first: its first row, if there is one."""

    names: tuple[str, ...]
    dialect: Dialect
    first: list[str] | None


def recognises(head: bytes) -> bool:
    """A header of names, none of them a number, and rows of as many columns; or a name that `jsonl` knows as a field."""
    text = head.decode("utf-8-sig", "replace")
    if len(head) >= HEAD:
        text = text.rpartition("\n")[0]
    rows, _, agree = _sampled(text, None, _QUOTE)
    known = {*TEXT_FIELDS, *LABEL_FIELDS}
    if not rows or _UNREADABLE in "".join(rows[0]) or any(map(_is_number, rows[0])):
        return False
    return (len(rows[0]) > 1 and agree > 0) or bool(known & set(rows[0]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sampled(text: str, delimiter: str | None, quote: str) -> tuple[list[list[str]], Dialect, int]:
    """The first rows of a text that are sound, with the delimiter given, or else with the one that cuts them alike into
    most columns; and how many rows behind the first have as many columns as that."""
    found = []
    for character in delimiter or _DELIMITERS:
        dialect = Dialect(character, quote)
        rows = list(islice(_sound(dialect.reader(io.StringIO(text, newline="\n"))), _SAMPLE))
        agree = sum(len(row) == len(rows[0]) for row in rows[1:])
        columns = len(rows[0]) if rows else 0
        found.append((columns > 1, agree == len(rows) - 1, agree, columns, rows, dialect))
    best = max(found, key=lambda one: one[:4])
    if not best[0]:  # one column
        best = next(one for one in found if delimiter or one[5].delimiter == ",")
    return best[4], best[5], best[2]


def _sound(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows before the first that is not sound, as that which was cut off, without blank lines."""
    with suppress(csv.Error):
        yield from filter(None, rows)


def _table(file: TextFile, options: ConvertOptions) -> _Table:
    """Names of columns, dialect and first row, by the beginning of a file. Raises InputError where there are none."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIRST))
    quote = _QUOTE if options.quote is None else options.quote
    size = HEAD
    while True:
        head = file.head(size)
        whole = len(head) < size
        text = head if whole else head[: head.rfind(b"\n") + 1]
        rows, dialect, _ = _sampled(text.decode("utf-8", "replace"), options.delimiter, quote)
        if len(rows) > 1 or whole or size >= _LONGEST_FIRST:
            break
        size *= 4
    if not rows:
        raise InputError(f"{file.name}:1: there is no row: give a file with a header of names and rows, quotes closed")
    if not options.header:
        return _Table(tuple(map(str, range(1, len(rows[0]) + 1))), dialect, rows[0])
    names = [name.strip() for name in rows[0]]
    if _UNREADABLE in "".join(names):
        raise InputError(f"{file.name}:1: the header is not UTF-8: convert the file to UTF-8")
    twice = next((name for i, name in enumerate(names) if name and name in names[:i]), None)
    if twice is not None:
        raise InputError(
            f"{file.name}:1: there are two columns {shown(twice.encode())}: give each a name of its own, or "
            + flags.NO_HEADER
            + " and numbers instead of names"
        )
    return _Table(tuple(names), dialect, next((row for row in rows[1:] if len(row) == len(names)), None))


def _cuts(path: Path, dialect: Dialect, first: int, size: int) -> list[int]:
    """As `cuts`, at the begin of the next row. The file is read once for that, if it has several ranges."""
    from xmc_stream.convert.kernels.records import BEGIN, next_record

    wanted = cuts(first, size)
    found = wanted[:1]
    if len(wanted) == 1:
        return found
    quote = ord(dialect.quote) if dialect.quote else -1
    with open(path, "rb", buffering=0) as file:
        at, state = bom_length(str(path), file.read(3)), BEGIN
        file.seek(at)
        buffer = np.empty(_WINDOW, np.uint8)
        targets = iter(wanted[1:])
        target = next(targets)
        while n := file.readinto(buffer.data):
            begin = 0
            while begin < n:
                place, state = next_record(buffer[begin:n], state, ord(dialect.delimiter), quote, target - at - begin)
                if place < 0:
                    break
                begin += place
                found.append(at + begin)
                target = next((one for one in targets if one > at + begin), size + 1)
            at += n
    return [place for place in found if place < size]


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> RecordsSource:
    """Files of CSV as one set. Raises InputError where a header shows no columns of text and labels, or differs."""
    tables: list[_Table] = []
    files: list[TextInput] = []
    for path in paths:
        with looked_at(path) as file:
            tables.append(_table(file, options))
            files.append(TextInput.of(path, file))
        if set(tables[-1].names) != set(tables[0].names):
            raise InputError(
                f"{name_of(path)}:1: its columns are not those of {name_of(paths[0])}: files of one set have the same"
            )
    first = next((table for table in tables if table.first is not None), tables[0])
    row = dict(zip(first.names, first.first or [""] * len(first.names), strict=True))
    records = [
        CsvRows(text, table.dialect, table.names, options.header and text.start == 0)
        for file, table in zip(files, tables, strict=True)
        for text in ranges(file.path, 0, file.size, partial(_cuts, file.path, table.dialect))
    ]
    dialects = [[table.dialect.delimiter, table.dialect.quote] for table in tables]
    return RecordsSource(text_records("CSV", files, records, row, dialects), options, like)
