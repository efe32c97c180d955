"""Parts that are lines of text, a row each: to blocks of rows by the compiled parser, and what is wrong in them to words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.kernels import parse, tokens
from xmc_stream.convert.lines.files import Buffers, TextRange
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import Like
from xmc_stream.convert.pieces import Rows, positives, row_with_minus_one
from xmc_stream.errors import InputError
from xmc_stream.store.encoding import index_dtype

# x_indptr, x_indices, x_data, y_indptr, y_indices; indptr from 0, indices sorted and unique in a row
ParsedRows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32], NDArray[np.int64], NDArray[Any]]

LISTED = 1000  # skipped rows that are listed with their reasons
UNKNOWN = 2**31 - 1  # in place of a number of features or labels that only reading tells: ids below fit int32

_LINE_BYTES = 32  # rows are planned for lines of this length; shorter ones are parsed in several steps


@dataclass(frozen=True)
class Dialect:
    """How lines are read.

    libsvm: `#` begins a comment, lines without anything else are no rows; else every line is a row. x_base, y_base: the
    first id of features and of labels, None where only the whole input tells. skip, sum_duplicates, drop_unseen: as in
    `ConvertOptions`.
    """

    libsvm: bool = False
    x_base: int | None = 0
    y_base: int | None = 0
    skip: bool = False
    sum_duplicates: bool = False
    drop_unseen: bool = False


XMLREPO = Dialect()


class Parser:
    """Lines of text to blocks of rows, and what is wrong in them to words.

    name: of the file, for messages; n_features, n_labels: D and K, which come from `like` if it is given, or UNKNOWN;
    ids stay as they are read, whatever the base. n_labels: None where lines are `id:value id:value ...` alone; noun:
    what those ids are of, then. first_line: the number of the first line of the first text, or what tells it, which is
    asked when something is wrong.
    n_rows counts rows so far, n_lines the lines behind us.
    """

    def __init__(
        self,
        name: str,
        n_features: int,
        n_labels: int | None,
        like: Like | None = None,
        first_line: int | Callable[[], int] = 2,
        noun: str = "feature",
        dialect: Dialect = XMLREPO,
    ) -> None:
        self.name = name
        self.n_features = n_features
        self.n_labels = n_labels
        self.n_rows = 0
        self._like = like
        self._first_line = first_line
        self._noun = noun
        self._dialect = dialect
        self._skipped: list[tuple[int, str]] = []
        self._state = parse.new_state()
        self._x_base = dialect.y_base if noun == "label" else dialect.x_base
        x_stop, y_stop = _stop(n_features, self._x_base), -1 if n_labels is None else _stop(n_labels, dialect.y_base)
        self._bounds = np.array([self._x_base or 0, x_stop, dialect.y_base or 0, y_stop])
        self._x_dtype = index_dtype(x_stop)
        self._y_dtype = index_dtype(max(0, y_stop))
        self._allocate(0)

    @property
    def bytes_per_byte(self) -> float:
        """Bytes of arrays a byte of text.

        A quarter of an entry of X, half an entry of Y, indptrs, the writer's sums, a copy of a line without its newline.
        """
        labels = 0.0 if self.n_labels is None else self._y_dtype.itemsize / 2
        return (self._x_dtype.itemsize + 4) / 4 + labels + 6 * 8 / _LINE_BYTES + 1

    @property
    def n_lines(self) -> int:
        """Lines behind the last block, or behind the text when its blocks have ended."""
        return int(self._state[parse.LINES])

    def notes(self) -> dict[str, Any]:
        """What was counted so far, as JSON values.

        rows, lines, blank_lines; skipped, and skipped_rows (line, reason) of the first 1000; dropped_features,
        dropped_labels, summed_duplicates (entries that one of the same id took in); x_ids, y_ids: the least and the
        largest id of features and of labels, None without any.
        """
        state = self._state
        bounds = (state[parse.X_LEAST : parse.X_MOST + 1], state[parse.Y_LEAST : parse.Y_MOST + 1])
        ids = [None if most < 0 else [int(least), int(most)] for least, most in bounds]
        dropped = [int(state[parse.DROPPED_FEATURES]), int(state[parse.DROPPED_LABELS])]
        if self._noun == "label":
            ids, dropped = ids[::-1], dropped[::-1]
        return {
            "rows": self.n_rows,
            "lines": self.n_lines,
            "blank_lines": int(state[parse.BLANK_LINES]),
            "skipped": int(state[parse.SKIPPED]),
            "skipped_rows": [list(row) for row in self._skipped],
            "dropped_features": dropped[0],
            "dropped_labels": dropped[1],
            "summed_duplicates": int(state[parse.SUMMED]),
            "x_ids": ids[0],
            "y_ids": ids[1],
        }

    def _allocate(self, length: int) -> None:
        """Arrays that hold what `length` bytes of text can hold; rows apart, which are parsed in as many steps."""
        self._capacity = length
        n_rows = length // _LINE_BYTES + 1
        self._x_indptr = np.empty(n_rows + 1, np.int64)
        self._y_indptr = np.empty(n_rows + 1, np.int64)
        self._x_indices = np.empty(length // 4 + 1, self._x_dtype)
        self._x_data = np.empty(length // 4 + 1, np.float32)
        self._y_indices = np.empty(0 if self.n_labels is None else length // 2 + 1, self._y_dtype)

    def blocks(self, text: NDArray[np.uint8]) -> Iterator[ParsedRows]:
        """The rows of a text of lines, each with its newline. Raises InputError with file and line.

        A block is gone when the next one comes.
        """
        if len(text) > self._capacity:
            self._allocate(len(text))
        state, dialect = self._state, self._dialect
        rules = parse.LIBSVM * dialect.libsvm + parse.SUM * dialect.sum_duplicates + parse.DROP * dialect.drop_unseen
        state[: parse.LINES] = 0
        no_data = np.empty(0, np.float32)
        code = tokens.FULL
        while code != tokens.DONE:
            code = parse.parse_lines(
                text,
                state,
                rules + parse.SKIP * (len(self._skipped) >= LISTED),
                self._bounds,
                self._x_indptr,
                self._x_indices,
                self._x_data,
                self._y_indptr,
                self._y_indices,
                no_data,
            )
            if code == tokens.SLOW:
                code = self._take_slowly(text, state)
            if code not in (tokens.DONE, tokens.FULL, tokens.SLOW):
                self._bad_line(code, text)
            elif code != tokens.SLOW and state[parse.ROW]:
                n, nx, ny = (int(state[at]) for at in (parse.ROW, parse.X_END, parse.Y_END))
                self.n_rows += n
                x = self._x_indptr[: n + 1], self._x_indices[:nx], self._x_data[:nx]
                yield *x, self._y_indptr[: n + 1], self._y_indices[:ny]
                parse.start_block(state)

    def _take_slowly(self, text: NDArray[np.uint8], state: NDArray[np.int64]) -> int:
        """Store a number so near to the middle of two float32 values that only float() can tell; returns the code."""
        value = float(text[state[parse.CULPRIT] : state[parse.POSITION]].tobytes())
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
        if np.isinf(rounded):
            return tokens.VALUE_RANGE
        if state[parse.ID] < self._bounds[1]:
            self._x_data[state[parse.X_END]] = rounded
            state[parse.X_END] += 1
        else:
            state[parse.X_DROPPED] += 1
        return tokens.SLOW

    def _bad_line(self, code: int, text: NDArray[np.uint8]) -> None:
        """Raise an InputError, or leave the line out and say why."""
        if not self._dialect.skip:
            raise InputError(f"{self.name}:{self._line()}: " + self._reason(code, text))
        self._state[parse.SKIPPED] += 1
        self._state[parse.WHERE] = parse.LEAVE
        if len(self._skipped) < LISTED:
            self._skipped.append((self._line(), self._reason(code, text)))

    def _line(self) -> int:
        """The number of the line that is being parsed."""
        if not isinstance(self._first_line, int):
            self._first_line = self._first_line()
        return self._first_line + self.n_lines

    def _reason(self, code: int, text: NDArray[np.uint8]) -> str:
        """What is wrong in a line, and what to do."""
        culprit, number = int(self._state[parse.CULPRIT]), int(self._state[parse.ID])
        if self.n_labels is None and code == tokens.BAD_LABEL:
            code = tokens.BAD_FEATURE
        about_labels = (tokens.BAD_LABEL, tokens.LABEL_RANGE, tokens.LABEL_TWICE, tokens.LABEL_BELOW)
        kind = "label" if code in about_labels else self._noun
        if code in (tokens.LABEL_TWICE, tokens.FEATURE_TWICE):
            advice = "leave one of them out" if kind == "label" else "add up the values, or leave one out"
            return f"{kind} {number} stands twice in the row: {advice} (or " + flags.DUPLICATES_SUM + ")"
        if code == tokens.SUM_RANGE:
            return (
                f"the values of {kind} {number}, which stands more than once, add up beyond float32: correct the line"
            )
        if code in (tokens.LABEL_BELOW, tokens.FEATURE_BELOW):
            base = self._dialect.y_base if code == tokens.LABEL_BELOW else self._x_base
            origin = ", as in " + flags.LIKE + f" {self._like.name}" if self._like else ""
            said = f"{kind} id {number} is below {base}: ids count from {base} here"
            return said + origin + "; use " + flags.ZERO_BASED + " if they do not"
        token = re.match(rb"[^ \t\n]*", text[culprit : culprit + 1000].tobytes())[0]  # type: ignore[index]
        said = shown(token)
        if b"\0" in token:
            return f"there is a NUL byte in {said}: the file is damaged or not a text"
        if b"\r" in token.removesuffix(b"\r") or (code == tokens.BAD_FEATURE and token.startswith(b"\r")):
            return f"there is a carriage return in {said}: lines must end in LF or CRLF"
        if code in (tokens.BAD_VALUE, tokens.VALUE_RANGE):
            why = "is not a finite decimal number" if code == tokens.BAD_VALUE else "is too large for float32"
            return f"value {said} of {kind} {number} {why}: correct the line"
        if code in (tokens.LABEL_RANGE, tokens.FEATURE_RANGE):
            return self._beyond(kind, code == tokens.LABEL_RANGE, re.match(rb"\+?\d{1,40}", token)[0].decode())  # type: ignore[index]
        return self._no_token(kind, code == tokens.BAD_LABEL, token, said)

    def _beyond(self, kind: str, of_labels: bool, digits: str) -> str:
        """The reason for an id that is too large."""
        size, bound = ("K", self.n_labels) if kind == "label" else ("D", self.n_features)
        if not of_labels:
            bound = self.n_features
        if bound == UNKNOWN:
            option = flags.LABELS_COUNT if kind == "label" else flags.FEATURES
            return f"{kind} id {digits} is 2^31 or more: if there are so many {kind}s, say how many by " + option
        base = self._dialect.y_base if of_labels else self._x_base
        like = self._like if not of_labels or (self._like and self._like.labels) else None
        if like:
            origin: str = "which comes from " + flags.LIKE + f" {like.name}"
        else:
            origin = "as was given" if self._dialect.libsvm else "which comes from the header"
        above = f"not below {size}" if base == 0 else f"above {size}"
        counts = "" if base is None else f": ids count from {base}"
        advice = "; " + flags.UNSEEN_DROP + " leaves out such ids" if like else ""
        return f"{kind} id {digits} is {above} = {bound}, " + origin + counts + advice

    def _no_token(self, kind: str, of_labels: bool, token: bytes, said: str) -> str:
        """The reason for what is no label or no feature."""
        libsvm, apart = self._dialect.libsvm, "" if self.n_labels is None else ", commas labels"
        for applies, pattern, reason in (
            (
                libsvm, rb"qid:",
                f"{said} is a query of ranking data, which have no classes: take such tokens out to read the rest",
            ),
            (
                libsvm and of_labels, rb"-\d",
                f"label {said} is negative: labels are ids of classes from 0 or 1; write -1 and +1 as 0 and 1",
            ),
            (True, rb"-\d", f"{kind} id in {said} is negative: ids count from 0"),
            (
                of_labels, rb"\+?\d*\.\d|\+?\d+[eE]",
                f"label {said} is not a whole number: labels are ids of classes, and values to fit are not for this",
            ),
            (of_labels, rb"\r*\Z", "the list of labels ends in a comma: a label is missing"),
            (of_labels, rb"", f"{said} is not a list of label ids: write them as 1,2,3, before the features"),
        ):  # fmt: skip
            if applies and re.match(pattern, token):
                return reason
        return f"{said} is not a {kind} id:value: blanks separate {kind}s{apart}"


def _stop(n: int, base: int | None) -> int:
    """The number behind the last of n ids; of one more where the base is not known: the whole input tells if it is."""
    return n if n == UNKNOWN else n + (1 if base is None else base)


def bom_length(name: str, head: bytes) -> int:
    """Bytes of the byte order mark that a text begins with, to be left out: 3 or 0. name: of the file.

    Raises InputError for UTF-16 and UTF-32, known by theirs.
    """
    if head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        raise InputError(f"{name}:1: this is UTF-16 or UTF-32, by its byte order mark: save the file as UTF-8 or ASCII")
    return 3 if head.startswith(b"\xef\xbb\xbf") else 0


@dataclass(frozen=True)
class LinesPart:
    """Lines of X and Y together, or of one of them.

    sides: ("X", "Y"), ("X",), or ("Y",) where lines are `l:v l:v ...` and a label of the value zero is none. bounds: of
    the ids of both sides, or of the one. unlabelled: labels in the lines are passed over, whatever their ids.
    """

    text: TextRange
    buffers: Buffers
    sides: tuple[str, ...]
    bounds: tuple[int, ...]
    like: Like | None
    dialect: Dialect = XMLREPO
    unlabelled: bool = False

    def parser(self, name: str, first_line: Any = 1) -> Parser:
        """What reads the lines."""
        noun = "label" if self.sides == ("Y",) else "feature"
        n_labels = self.bounds[1] if len(self.bounds) == 2 else None
        dialect = self.dialect
        if self.unlabelled:
            n_labels, dialect = UNKNOWN, replace(dialect, y_base=0)
        return Parser(name, self.bounds[0], n_labels, self.like, first_line, noun, dialect)

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows; notes: bytes_read, and those of the parser. Raises InputError with file and line, MemoryLimitError."""
        notes["bytes_read"] = 0
        with self.text.open(self.buffers) as file:
            parser = self.parser(file.name, file.first_line)
            for window in file.windows():
                for x_indptr, x_indices, x_data, y_indptr, y_indices in parser.blocks(window):
                    notes["bytes_read"] = file.bytes_read
                    if self.unlabelled:
                        yield (x_indptr, x_indices, x_data), (np.zeros_like(x_indptr), y_indices[:0], None)
                    elif len(self.sides) == 2:
                        yield (x_indptr, x_indices, x_data), (y_indptr, y_indices, None)
                    elif self.sides == ("X",):
                        yield ((x_indptr, x_indices, x_data),)
                    else:
                        if (row := row_with_minus_one(x_indptr, x_data)) is not None:
                            line = file.first_line() + parser.n_lines - (len(x_indptr) - 1) + row
                            raise InputError(
                                f"{file.name}:{line}: a label has the value -1: what is not zero is a positive, leave it out"
                            )
                        yield ((*positives(x_indptr, x_indices, x_data != 0), None),)
                file.n_lines = parser.n_lines
            notes |= parser.notes()
            if self.unlabelled:
                notes["y_ids"] = None


def attributes_of(read: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the parts of a source counted, as attributes of the dataset. read: a part's file, for people, and its notes."""
    names = ("skipped", "dropped_features", "dropped_labels", "summed_duplicates", "blank_lines")
    totals: dict[str, Any] = dict.fromkeys(names, 0)
    rows: list[list[Any]] = []
    for file, notes in read:
        for name in names:
            totals[name] += notes[name]
        rows += [[file, *row] for row in notes["skipped_rows"][: LISTED - len(rows)]]
    counts = {name: count for name, count in totals.items() if count}
    return {**counts, "skipped_rows": rows} if rows else counts
