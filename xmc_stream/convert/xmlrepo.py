"""XMLRepo text, plain or gzip: a header "N D K", then a line `l1,l2,... f:v f:v ...` a sample, ids from zero.

A line that begins with a blank has no labels (so has one that begins with `f:v`); a line without features, and an empty
line, are samples too. The text is read in pieces cut at a line's end; nothing grows with the file.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.memory import format_size

if TYPE_CHECKING:
    from xmc_stream.convert import Like, Rows

_PIECE = 8 * 2**20  # bytes of text parsed at a time
_LEAST_PIECE = 2**18
_READ = 2**20  # bytes asked of gzip at a time, which holds them twice
_LINE_BYTES = 32  # rows are planned for lines of this length; shorter ones are parsed in several steps
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_RATIO = 1032  # what deflate can make of a byte
_HEADER = re.compile(rb"[ \t]*(\d{1,15})[ \t]+(\d{1,15})[ \t]+(\d{1,15})[ \t]*\r?\n?")
_LONGEST_HEADER = 1000
_SHOWN = 40  # characters of a token in a message


class XMLRepoText:
    """An opened text whose header is read. like: where D and K come from instead of the header.

    Raises InputError where the file or its header cannot be read.
    """

    def __init__(self, path: Path, like: Like | None = None) -> None:
        self.name = str(path)
        self._like = like
        self._lines = 0  # lines behind us
        self._read = 0  # bytes of text read
        self._piece = _PIECE
        self._longest = _PIECE  # line that the memory plan has room for
        try:
            self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): check the name") from None
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise
        self.held: dict[str, int] = {}

    def _open(self) -> None:
        with self._reading():
            status = os.fstat(self._file.fileno())
            self._size = status.st_size if stat.S_ISREG(status.st_mode) else None
            zipped = self._file.peek(2)[:2] == _GZIP_MAGIC
            self._text: Any = gzip.GzipFile(fileobj=self._file) if zipped else self._file
            header = self._text.readline(_LONGEST_HEADER)
        self._zipped = zipped
        self._read = len(header)
        self.n_samples, self.n_features, self.n_labels = self._sizes(header)
        if self._like:
            self.n_features, self.n_labels = self._like.n_features, self._like.n_labels
        self._lines = 1
        self.attributes = {
            "source": Path(self.name).name,
            "source_format": "XMLRepo text, gzip" if zipped else "XMLRepo text",
        }
        length = None if self._size is None else self._size * (_GZIP_RATIO if zipped else 1)
        self.x_entries = None if length is None else length // 4 + 1  # "0:1 "
        self.y_entries = None if length is None else length // 2 + 1  # "0,"

    def _sizes(self, header: bytes) -> tuple[int, int, int]:
        match = _HEADER.fullmatch(header)
        if match is None:
            found = f"not {_shown(header)}" if header else "but the file is empty"
            raise InputError(
                f"{self.name}:1: the first line must be the header 'N D K' (numbers of rows, features, labels), {found}"
            )
        return int(match[1]), int(match[2]), int(match[3])

    @property
    def bytes_in(self) -> int:
        """Bytes of the file; of a pipe, bytes of the text read so far."""
        return self._read if self._size is None else self._size

    def load_kernels(self) -> None:
        """Compile or load the parser."""
        for _ in Parser(self.name, self.n_features, self.n_labels).blocks(np.zeros(0, np.uint8)):
            pass

    def fit(self, room: int) -> int:
        """Choose the size of a piece for `room` bytes; returns what a piece of it and its rows take at most."""
        index = 4 if max(self.n_features, self.n_labels) <= 2**31 else 8
        # a byte of text: itself, and once more in half when the piece grows; a quarter of an entry of X, half an entry
        # of Y; an indptr each and the writer's sums of them
        per_byte = 1.5 + (index + 4) / 4 + index / 2 + 6 * 8 / _LINE_BYTES
        self._longest = max(_LEAST_PIECE, int((room - 2 * _READ) / per_byte))
        whole = _PIECE if self._size is None or self._zipped else self._size + 1
        self._piece = max(2, min(_PIECE, whole, self._longest))
        return int(self._piece * per_byte) + 2 * _READ

    def position(self) -> int:
        """Bytes of the file, compressed ones if it is, that are read."""
        return self._file.tell() if self._zipped and self._size is not None else self._read

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def blocks(self) -> Iterator[Rows]:
        """All rows, block by block. Raises InputError with file and line, MemoryLimitError for too long a line."""
        parser = Parser(self.name, self.n_features, self.n_labels, self._like)
        pieces = self._pieces()
        for text in pieces:
            for block in parser.blocks(text):
                if parser.n_rows > self.n_samples:
                    rest = _count_lines(text[parser.position :]) + sum(_count_lines(piece) for piece in pieces)
                    raise self._wrong_count(parser.n_rows + rest, 1)
                yield block
            self._lines = 1 + parser.n_rows
        if parser.n_rows < self.n_samples:
            raise self._wrong_count(parser.n_rows, self._lines)

    def _wrong_count(self, n_rows: int, line: int) -> InputError:
        return InputError(
            f"{self.name}:{line}: the header promises {self.n_samples} rows and {n_rows} follow: fetch the file again, "
            "or correct the header"
        )

    def _pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The text behind the header, in pieces of whole lines; a piece is gone when the next one comes."""
        buffer = bytearray(self._piece)
        filled = 0
        while True:
            n = self._fill(buffer, filled)
            filled += n
            cut = buffer.rfind(b"\n", 0, filled) + 1 if n else filled
            if cut:
                yield np.frombuffer(buffer, np.uint8, cut)
            if not n:
                return
            if not cut and filled == len(buffer):
                buffer = self._grown(buffer)
            elif cut:
                buffer[: filled - cut] = buffer[cut:filled]
                filled -= cut

    def _fill(self, buffer: bytearray, filled: int) -> int:
        """Read until the buffer is full or the file ends; returns the bytes read."""
        with memoryview(buffer) as view:
            start = filled
            while filled < len(buffer):
                with self._reading(buffer, filled):
                    n = self._text.readinto1(view[filled : filled + _READ])  # what precedes damage is not lost
                if not n:
                    break
                filled += n
            self._read += filled - start
            return filled - start

    def _grown(self, buffer: bytearray) -> bytearray:
        """A copy of the buffer that is twice as long, or as long as the memory plan allows."""
        size = min(2 * len(buffer), self._longest)
        if size == len(buffer):
            raise MemoryLimitError(
                f"{self.name}:{self._lines + 1}: the line is longer than {format_size(size)}, all that the limit "
                "leaves for one: raise --memory-limit, or check that this is a text of lines"
            )
        grown = bytearray(size)
        grown[: len(buffer)] = buffer
        return grown

    @contextmanager
    def _reading(self, buffer: bytearray | None = None, filled: int = 0) -> Iterator[None]:
        """Put errors of reading into words. buffer: holds lines that are read and not yet counted."""
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            lines = self._lines + (0 if buffer is None else buffer.count(b"\n", 0, filled))
            what = "end early" if isinstance(error, EOFError) else "are damaged"
            raise InputError(
                f"{self.name}:{lines + 1}: the gzip data {what} at this line of the text: fetch the file again"
            ) from None
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror or error}): check the file") from None


class Parser:
    """Lines of text to blocks of rows, and what is wrong in them to words.

    name: of the file, for messages; ids must be below n_features and n_labels, which come from `like` if it is given.
    n_rows counts rows so far; position is where the block given last ends in its text.
    """

    def __init__(
        self, name: str, n_features: int, n_labels: int, like: Like | None = None, first_line: int = 2
    ) -> None:
        from xmc_stream.store.encoding import index_dtype

        self.name = name
        self.n_features = n_features
        self.n_labels = n_labels
        self.n_rows = 0
        self.position = 0
        self._like = like
        self._first_line = first_line
        self._x_dtype = index_dtype(n_features)
        self._y_dtype = index_dtype(n_labels)
        self._allocate(0)

    def _allocate(self, length: int) -> None:
        """Arrays that hold what `length` bytes of text can hold; rows apart, which are parsed in as many steps."""
        self._capacity = length
        n_rows = length // _LINE_BYTES + 1
        self._x_indptr = np.empty(n_rows + 1, np.int64)
        self._y_indptr = np.empty(n_rows + 1, np.int64)
        self._x_indices = np.empty(length // 4 + 1, self._x_dtype)
        self._x_data = np.empty(length // 4 + 1, np.float32)
        self._y_indices = np.empty(length // 2 + 1, self._y_dtype)

    def blocks(self, text: NDArray[np.uint8]) -> Iterator[Rows]:
        """The rows of a text of whole lines. Raises InputError with file and line."""
        from xmc_stream.kernels import parse

        if len(text) > self._capacity:
            self._allocate(len(text))
        state = np.zeros(parse.STATE_SIZE, np.int64)
        no_data = np.empty(0, np.float32)
        code = parse.FULL
        while code != parse.DONE:
            code = parse.parse_lines(
                text,
                state,
                self.n_features,
                self.n_labels,
                self._x_indptr,
                self._x_indices,
                self._x_data,
                self._y_indptr,
                self._y_indices,
                no_data,
            )
            if code == parse.SLOW:
                code = self._take_slowly(text, state)
            if code not in (parse.DONE, parse.FULL, parse.SLOW):
                raise self._error(code, text, state)
            if code in (parse.DONE, parse.FULL) and state[parse.ROW]:
                n, nx, ny = (int(state[at]) for at in (parse.ROW, parse.X_END, parse.Y_END))
                self.n_rows += n
                self.position = int(state[parse.POSITION])
                yield (
                    self._x_indptr[: n + 1],
                    self._x_indices[:nx],
                    self._x_data[:nx],
                    self._y_indptr[: n + 1],
                    self._y_indices[:ny],
                )
                state[[parse.ROW, parse.X_END, parse.Y_END]] = 0

    def _take_slowly(self, text: NDArray[np.uint8], state: NDArray[np.int64]) -> int:
        """Store a number so near to the middle of two float32 values that only float() can tell; returns the code."""
        from xmc_stream.kernels import parse

        value = float(text[state[parse.CULPRIT] : state[parse.POSITION]].tobytes())
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
        if np.isinf(rounded):
            return parse.VALUE_RANGE
        self._x_data[state[parse.X_END]] = rounded
        state[parse.X_END] += 1
        return parse.SLOW

    def _error(self, code: int, text: NDArray[np.uint8], state: NDArray[np.int64]) -> InputError:
        from xmc_stream.kernels import parse

        where = f"{self.name}:{self._first_line + self.n_rows + int(state[parse.ROW])}: "
        culprit = int(state[parse.CULPRIT])
        if code == parse.LABEL_TWICE:
            return InputError(f"{where}label {culprit} stands twice in the row: leave one of them out")
        if code == parse.FEATURE_TWICE:
            return InputError(f"{where}feature {culprit} stands twice in the row: add up the values, or leave one out")
        token = re.match(rb"[^ \t\n]*", text[culprit : culprit + 1000].tobytes())[0]  # type: ignore[index]
        shown = _shown(token)
        if b"\0" in token:
            return InputError(f"{where}there is a NUL byte in {shown}: the file is damaged or not a text")
        if code in (parse.BAD_VALUE, parse.VALUE_RANGE):
            feature = int(self._x_indices[state[parse.X_END]])
            why = "is not a finite decimal number" if code == parse.BAD_VALUE else "is too large for float32"
            return InputError(f"{where}value {shown} of feature {feature} {why}: correct the line")
        if code in (parse.LABEL_RANGE, parse.FEATURE_RANGE):
            kind, size, bound = (
                ("label", "K", self.n_labels) if code == parse.LABEL_RANGE else ("feature", "D", self.n_features)
            )
            number = re.match(rb"\d{1,40}", token)[0].decode()  # type: ignore[index]
            origin = f"which comes from --like {self._like.name}" if self._like else "which comes from the header"
            return InputError(f"{where}{kind} id {number} is not below {size} = {bound}, {origin}: ids count from 0")
        kind = "label" if code == parse.BAD_LABEL else "feature"
        if re.match(rb"-\d", token):
            return InputError(f"{where}{kind} id in {shown} is negative: ids count from 0")
        if kind == "label":
            if not token.strip(b"\r"):
                return InputError(f"{where}the list of labels ends in a comma: a label is missing")
            return InputError(f"{where}{shown} is not a list of label ids: write them as 1,2,3, before the features")
        return InputError(f"{where}{shown} is not a feature id:value: blanks separate features, commas labels")


def _count_lines(text: NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(text == 10)) + (len(text) > 0 and int(text[-1]) != 10)


def _shown(token: bytes) -> str:
    """A token in quotes, in one line and not too long."""
    text = token.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
