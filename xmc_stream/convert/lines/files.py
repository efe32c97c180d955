"""Text files, plain or compressed, in windows of whole lines, in memory that does not grow with the file.

A plain file can be read by byte ranges: a range is the lines that begin in it. A compressed one, standard input and
pipes are read from the beginning to the end.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.lines.compression import DAMAGE, Decompressing, compression_of
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.system.files import regular, regular_or_pipe
from xmc_stream.system.memory import format_size

STANDARD_INPUT = Path("-")
HEAD = 2**16  # bytes that tell what a text is
_WINDOW = 8 * 2**20  # bytes of text parsed at a time
_LEAST_LONGEST = 2**18  # bytes of a line, for which there is room at least
_READ = 2**20  # bytes asked of a decompressor at a time, which holds them twice
_LONGEST_HEADER = 1000
_PART = 32 * 2**20  # bytes of a plain file that are read apart from the rest, at least
_PARTS = 128  # of a file, at most
_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_FEW = 2**16  # bytes of lines that are taken one by one: each is an object of its own
Stamps = dict[Path, list[Any]]  # of paths: their `file_identity`, and the numbers of their files
_streams: dict[Path, TextFile] = {}  # pipes whose beginning was looked at, until their reader claims them


@dataclass(frozen=True)
class Buffers:
    """Bytes of a window of text, of the longest line there is room for, and that compressed streams may add."""

    window: int = _WINDOW
    longest: int = _WINDOW
    room: int = 0

    @classmethod
    def fitting(cls, room: int, per_byte: float, size: int | None) -> tuple[Buffers, int]:
        """Buffers for `room` bytes, and what they take at most.

        per_byte: bytes that the reader of the windows makes of a byte of text; size: of the text, None if unknown.
        """
        per_byte += 1.5  # the byte itself, and once more in half when the window grows
        longest = max(_LEAST_LONGEST, int((room - 2 * _READ) / per_byte))
        window = max(2, min(_WINDOW, longest, _WINDOW if size is None else size + 1))
        taken = int(window * per_byte) + 2 * _READ
        return cls(window, longest, max(0, room - taken)), taken


@dataclass(frozen=True)
class TextRange:
    """Lines of a file: those that begin in bytes [start, stop) of a plain one, or all (stop None) behind `start`.

    path: becomes an absolute one; name: what messages call the file, the path as it was given.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", name_of(self.path))
            object.__setattr__(self, "path", _absolute(self.path))

    def open(self, buffers: Buffers) -> TextFile:
        """The lines, opened. A pipe can be opened once."""
        stream = _streams.pop(self.path, None)
        text = stream or TextFile(self)
        text.buffers = buffers
        return text


class TextFile(AbstractContextManager["TextFile"]):
    """An opened range of the lines of a text; a byte order mark is left out.

    n_lines: of the range that are behind us, kept up to date by who parses them; bytes_read: of the file, of a pipe of its
    text; decompressor_bytes: that decompression keeps. Raises InputError where the file cannot be read.
    """

    def __init__(self, lines: TextRange) -> None:
        self.path = path = lines.path
        self.name = lines.name
        self.n_lines = 0
        self._headers = 0  # lines taken before those of the range, of what is read from its beginning
        self.buffers = Buffers()
        self.compression = ""
        self._raw: Decompressing | None = None
        self._pending = b""  # text that was looked at and is not yet taken
        self._stop: int | None = None  # where a range of a plain file ends
        self._start = lines.start
        self._read = lines.start  # bytes of text read
        try:
            if path.is_dir():
                raise InputError(f"{self.name} is a folder: name a file in it, or a dataset of a known kind")
            if path == STANDARD_INPUT and sys.stdin is None:
                raise InputError("standard input is closed: pipe a text into it, or name a file")
            self._file: Any = (
                sys.stdin.buffer if path == STANDARD_INPUT else open(path, "rb", opener=regular_or_pipe)  # noqa: SIM115
            )
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror}): check the name") from None
        try:
            self._open(lines.start, lines.stop)
        except BaseException:
            self.close()
            raise

    def _open(self, start: int, stop: int | None) -> None:
        with self._reading():
            status = os.fstat(self._file.fileno())
            regular = stat.S_ISREG(status.st_mode) and self.path != STANDARD_INPUT  # which cannot be opened again
            self.size = status.st_size if regular else None
            self.compression = compression_of(self._file.peek())
            self._text: Any = self._file
            if self.compression == "gzip":
                self._text = gzip.GzipFile(fileobj=self._file)
            elif self.compression:
                self._text = self._raw = Decompressing(self._file, self.compression)
            if self.plain and (start or stop is not None):
                self._start = self._read = self._line_begin(start)
                self._stop = None if stop is None else self._line_begin(stop)
                self._file.seek(self._start)
            elif start:
                self._skip(start)
        self.decompressor_bytes = self._raw.needed if self._raw else 0

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def plain(self) -> bool:
        """Whether this is an uncompressed file, which can be read by ranges."""
        return self.size is not None and not self.compression

    @property
    def bytes_read(self) -> int:
        """Bytes of the file, compressed ones if it is, that are read; of a pipe, of its text."""
        if self.compression and self.size is not None:
            return int(self._file.tell())
        return self._read - self._start

    def close(self) -> None:
        """Close the file."""
        if self.path != STANDARD_INPUT:
            self._file.close()

    def _line_begin(self, position: int) -> int:
        """The first byte at or behind `position` that begins a line."""
        if position == 0:
            return 0
        self._file.seek(position - 1)
        while (piece := self._file.readline(2**16)) and not piece.endswith(b"\n"):
            pass
        return int(self._file.tell())

    def _skip(self, n_bytes: int) -> None:
        """Pass over the first bytes of a stream, its header."""
        while n_bytes:
            content = self._text.read(n_bytes)
            if not content:
                raise InputError(f"{self.name} was changed meanwhile: convert again")
            n_bytes -= len(content)

    def head(self, n_bytes: int = HEAD) -> bytes:
        """The first bytes of the text, which stay to be read; without a byte order mark."""
        if self._stop is not None:
            n_bytes = min(n_bytes, self._stop - self._start)
        try:
            with self._reading(looked=True):
                while len(self._pending) < n_bytes and (content := self._text.read1(n_bytes - len(self._pending))):
                    self._pending += content
                    self._read += len(content)
        except MemoryLimitError:
            if self.size is None or not self._pending:
                raise  # else what was read tells enough, and the file is opened again with all the room there is
        if self._start == 0 and self._pending.startswith(_BOM):
            self._pending, self._start = self._pending[len(_BOM) :], len(_BOM)
        return self._pending[:n_bytes]

    def header(self) -> tuple[bytes, int]:
        """The first line (its first 1000 bytes if it is longer), taken; and where the next one begins."""
        line = self.head(_LONGEST_HEADER).split(b"\n", 1)[0]
        ended = self._pending[len(line) : len(line) + 1] == b"\n"
        self._pending = self._pending[len(line) + ended :]
        self._headers = 1
        return line + b"\n" * ended, self._start + len(line) + ended

    def leave(self) -> None:
        """Keep this pipe for who opens it again; anything else is closed."""
        if self.size is None:
            _streams[self.path] = self
        else:
            self.close()

    def first_line(self) -> int:
        """The number, from 1, of the first line of the range; counts the lines before it."""
        if not (self._start and self.plain):
            return 1 + self._headers + (self._start > len(_BOM) and not self._headers)
        number, left = 1, self._start
        with open(self.path, "rb", opener=regular) as file:
            while left and (content := file.read(min(left, _READ))):
                number += content.count(b"\n")
                left -= len(content)
        return number

    def windows(self) -> Iterator[NDArray[np.uint8]]:
        """The text in windows of whole lines, the last with a newline too; a window is gone when the next one comes.

        Raises InputError and MemoryLimitError with file and line.
        """
        buffer = bytearray(self.buffers.window)
        if self._raw:
            self._raw.room = self.decompressor_bytes + self.buffers.room
        if self._start == 0:
            self.head(len(_BOM))
        filled = 0
        while True:
            n = self._fill(buffer, filled)
            filled += n
            if not n and filled and buffer[filled - 1] != _NEWLINE:  # the end, where a buffer is never full
                buffer[filled] = _NEWLINE
                filled += 1
            cut = buffer.rfind(b"\n", 0, filled) + 1
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
        """Read until the buffer is full or the text ends; returns the bytes read."""
        start = filled
        taken = self._pending[: len(buffer) - filled]
        buffer[filled : filled + len(taken)] = taken
        self._pending = self._pending[len(taken) :]
        filled += len(taken)
        with memoryview(buffer) as view:
            while filled < len(buffer):
                stop = filled + (_READ if self._stop is None else min(_READ, self._stop - self._read))
                with self._reading(buffer, filled):
                    n = self._text.readinto1(view[filled:stop])  # what precedes damage is not lost
                if not n:
                    break
                filled += n
                self._read += n
        return filled - start

    def _grown(self, buffer: bytearray) -> bytearray:
        """A copy of the buffer that is twice as long, or as long as the memory plan allows."""
        size = min(2 * len(buffer), self.buffers.longest)
        if size <= len(buffer):
            raise MemoryLimitError(
                f"{self.name}:{self.first_line() + self.n_lines}: the line is longer than {format_size(len(buffer))}, "
                "all that the limit leaves for one: raise "
                + flags.MEMORY_LIMIT
                + ", or check that this is a text of lines"
            )
        grown = bytearray(size)
        grown[: len(buffer)] = buffer
        return grown

    @contextmanager
    def _reading(self, buffer: bytearray | None = None, filled: int = 0, looked: bool = False) -> Iterator[None]:
        """Put errors of reading into words. buffer: holds lines that are read and not yet counted; looked: so does what
        was looked at."""

        def here() -> str:
            lines = 0 if buffer is None else buffer.count(b"\n", 0, filled)
            lines += self._pending.count(b"\n") if looked else 0
            return f"{self.name}:{self.first_line() + self.n_lines + lines}: the {self.compression} data"

        try:
            yield
        except EOFError:
            raise InputError(f"{here()} end early at this line of the text: fetch the file again") from None
        except DAMAGE:
            raise InputError(f"{here()} are damaged at this line of the text: fetch the file again") from None
        except MemoryError:
            raise MemoryLimitError(
                f"{here()} need more memory from this line of the text on than the limit leaves: raise "
                + flags.MEMORY_LIMIT
            ) from None
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror or error}): check the file") from None


def numbered_lines(path: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line of a file, plain or compressed, without its end; a longer one is cut.

    Raises InputError naming the line, and MemoryLimitError for one of more than twice the longest.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be read (it is a folder, pipe or device, and no file): check the name")
    with TextRange(path).open(Buffers(_FEW, 2 * longest)) as file:
        for window in file.windows():
            lines = window.tobytes().split(b"\n")
            if not lines[-1]:
                lines.pop()  # behind the last newline
            for line in lines:
                file.n_lines += 1
                yield file.n_lines, line[:longest]


def place_of(text: TextRange, number: int) -> str:
    """File and line of a line of a range, by its number there, from 1; those before the range are counted for that."""
    if text.start == 0:
        return f"{text.name}:{number}"
    with TextFile(text) as file:
        return f"{file.name}:{file.first_line() + number - 1}"


def name_of(path: Path) -> str:
    """What messages call a file."""
    return "standard input" if path == STANDARD_INPUT else str(path)


def _absolute(path: Path) -> Path:
    """A path that is the same in any folder, as a worker has one of its own. Links in it stay."""
    return path if path == STANDARD_INPUT else path.absolute()


NO_TEXT = TextRange(Path(os.devnull))  # for a parser that reads nothing


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Put errors of reading a file into words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the name") from None


def forget(paths: Iterable[Path]) -> None:
    """Close those of these pipes whose beginning was looked at and which nobody reads on."""
    for path in paths:
        if stream := _streams.pop(_absolute(path), None):
            stream.close()


def cuts(first: int, size: int) -> list[int]:
    """Where the ranges of a plain file of `size` bytes begin, the first of them at `first`.

    They depend on the file alone, so that a conversion goes on under another memory limit.
    """
    step = max(_PART, -(-size // _PARTS))
    return [first, *range(first + step, size - step // 2, step)]


def ranges(
    path: Path, first: int, size: int | None, cut: Callable[[int, int], Sequence[int]] = cuts
) -> list[TextRange]:
    """A file cut into ranges; first: the byte behind its header; size: of a plain file, None for what streams; cut: as
    `cuts`, where they begin."""
    if size is None:
        return [TextRange(path, first)]
    begins = cut(first, size)
    return [TextRange(path, a, b) for a, b in zip(begins, [*begins[1:], max(size, first)], strict=True)]


def file_identity(path: Path) -> list[Any]:
    """What tells a file, or a folder of files, from another: name, size and time; of a pipe, something that never comes again.

    Raises InputError where there is no such file.
    """
    try:
        if path == STANDARD_INPUT or not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
            return [str(path), os.urandom(16).hex()]
        found = _statuses(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the name") from None
    return [
        str(path.absolute()), sum(one.st_size for one in found), max((one.st_mtime_ns for one in found), default=0)
    ]  # fmt: skip


def _statuses(path: Path) -> list[os.stat_result]:
    """Those of a file, or of the files in a folder."""
    return [file.stat() for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path.stat()]


def stamps(paths: Iterable[Path]) -> Stamps:
    """What tells that files, and folders of files, are not what they were; of pipes and what is not there nothing."""
    files = (path for path in paths if path != STANDARD_INPUT and (path.is_file() or path.is_dir()))
    return {path: [*file_identity(path), *(one.st_ino for one in _statuses(path))] for path in files}


@contextmanager
def unchanged(before: Stamps) -> Iterator[None]:
    """What is read in the block is of use if the files are what they were before, else it ends in an InputError.

    So does what was found wrong in a file that was not whole yet.
    """

    def refuse() -> None:
        changed = next((path for path, was in before.items() if stamps([path]).get(path) != was), None)
        if changed is not None:
            raise InputError(
                f"{name_of(changed)} was changed while it was read: give the same command again when nobody writes to it"
            )

    try:
        yield
    except InputError:
        refuse()
        raise
    refuse()
