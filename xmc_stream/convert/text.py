"""Text files, plain or compressed, in pieces of whole lines, in memory that does not grow with the file."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.compression import DAMAGE, GZIP_RATIO, Decompressing, compression_of
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.memory import format_size

_PIECE = 8 * 2**20  # bytes of text parsed at a time
_LEAST_PIECE = 2**18
_READ = 2**20  # bytes asked of a decompressor at a time, which holds them twice
_LONGEST_HEADER = 1000


class TextFile:
    """An opened text whose first line, the header, is read.

    lines: how many are behind us, kept up to date by who parses them; most: bytes of text at most, None if unknown;
    held: bytes that decompression keeps. Raises InputError where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.lines = 0
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

    def _open(self) -> None:
        self.compression = ""
        self._raw: Decompressing | None = None
        with self._reading():
            status = os.fstat(self._file.fileno())
            self._size = status.st_size if stat.S_ISREG(status.st_mode) else None
            self.compression = compression_of(self._file.peek())
            self._text: Any = self._file
            if self.compression == "gzip":
                self._text = gzip.GzipFile(fileobj=self._file)
            elif self.compression:
                self._text = self._raw = Decompressing(self._file, self.compression)
            self.header: bytes = self._text.readline(_LONGEST_HEADER)
        self._read = len(self.header)  # bytes of text read
        self.lines = 1
        ratio = {"": 1, "gzip": GZIP_RATIO}.get(self.compression)
        self.most = None if self._size is None or ratio is None else self._size * ratio
        self.held = self._raw.needed if self._raw else 0

    @property
    def bytes_in(self) -> int:
        """Bytes of the file; of a pipe, bytes of the text read so far."""
        return self._read if self._size is None else self._size

    def position(self) -> int:
        """Bytes of the file, compressed ones if it is, that are read."""
        return self._file.tell() if self.compression and self._size is not None else self._read

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def fit(self, room: int, per_byte: float) -> int:
        """Choose the size of a piece for `room` bytes; returns what a piece of it takes at most.

        per_byte: bytes that the reader of the pieces makes of a byte of text.
        """
        per_byte += 1.5  # the byte itself, and once more in half when the piece grows
        self._longest = max(_LEAST_PIECE, int((room - 2 * _READ) / per_byte))
        whole = _PIECE if self._size is None or self.compression else self._size + 1
        self._piece = max(2, min(_PIECE, whole, self._longest))
        return int(self._piece * per_byte) + 2 * _READ

    def allow(self, room: int) -> None:
        """Let compressed streams behind the first one take `room` bytes more than `held`."""
        if self._raw:
            self._raw.room = self.held + room

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The text behind the header, in pieces of whole lines; a piece is gone when the next one comes.

        Raises InputError and MemoryLimitError with file and line.
        """
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
                f"{self.name}:{self.lines + 1}: the line is longer than {format_size(size)}, all that the limit "
                "leaves for one: raise --memory-limit, or check that this is a text of lines"
            )
        grown = bytearray(size)
        grown[: len(buffer)] = buffer
        return grown

    @contextmanager
    def _reading(self, buffer: bytearray | None = None, filled: int = 0) -> Iterator[None]:
        """Put errors of reading into words. buffer: holds lines that are read and not yet counted."""

        def here() -> str:
            lines = self.lines + (0 if buffer is None else buffer.count(b"\n", 0, filled))
            return f"{self.name}:{lines + 1}: the {self.compression} data"

        try:
            yield
        except EOFError:
            raise InputError(f"{here()} end early at this line of the text: fetch the file again") from None
        except DAMAGE:
            raise InputError(f"{here()} are damaged at this line of the text: fetch the file again") from None
        except MemoryError:
            raise MemoryLimitError(
                f"{here()} need more memory from this line of the text on than the limit leaves: raise --memory-limit"
            ) from None
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror or error}): check the file") from None
