"""Compressed files as streams of bytes: gzip, bzip2, xz and zstd, known by their first bytes, in bounded memory.

Streams that follow each other in a file are read as one, and so is padding of NUL bytes; anything else behind them is
damage. What ends early raises EOFError, what is damaged one of DAMAGE, what needs more memory than it may MemoryError.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")

_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9]"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # it may begin with a frame to be skipped
}
_INPUT = 2**17  # bytes read at a time
_BESIDE_WINDOW = 2**20  # what decompressors hold besides their window, and more


class DamagedError(Exception):
    """Compressed data that are not what was written."""


DAMAGE = (DamagedError, zlib.error, gzip.BadGzipFile)


def compression_of(head: bytes) -> str:
    """The name of the compression of a file that begins with `head`, or ""."""
    return next((name for name, magic in _MAGIC.items() if magic.match(head)), "")


class Decompressing(io.RawIOBase):
    """What a bzip2, xz or zstd file holds.

    needed: bytes of memory that its first stream takes; room: bytes that any further stream may take.
    """

    def __init__(self, file: io.BufferedReader, compression: str) -> None:
        self._file = file
        self._make, self._error = _library(compression)
        self._data = b""  # read and not yet passed on
        self.needed = self.room = self._needed(file.peek())
        self._decompressor: Any = self._make(self.needed)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` from its beginning, all of which is asked of the decompressor at once; returns 0 at the end."""
        filled = 0
        with memoryview(target) as view:
            while not filled and len(view):
                if self._decompressor.eof:
                    if not self._next_stream():
                        break
                elif self._decompressor.needs_input and not self._data:
                    self._data = self._file.read(_INPUT)
                    if not self._data:
                        raise EOFError
                output = self._decompress(self._decompressor, self._data, len(view))
                self._data = b""
                filled = len(output)
                view[:filled] = output
        return filled

    readinto1 = readinto
    read1 = io.RawIOBase.read  # which asks `readinto` once

    def _next_stream(self) -> bool:
        """Begin with the stream behind the one that has ended; False where the file ends instead."""
        data = self._decompressor.unused_data.lstrip(b"\0") or self._file.read(_INPUT)
        while data and not data.strip(b"\0"):
            data = self._file.read(_INPUT)
        self._data = data.lstrip(b"\0")
        if data:
            self._decompressor = self._make(self.room)
        return bool(data)

    def _needed(self, head: bytes) -> int:
        """The memory that a stream with this beginning takes, found by trial: only the decoders can read it there."""
        for log in range(22, 33):
            room = (1 << log) + _BESIDE_WINDOW
            try:
                self._decompress(self._make(room), head, 1)
            except MemoryError:
                continue
            except DamagedError:
                pass
            break
        return room

    def _decompress(self, decompressor: Any, data: bytes, length: int) -> bytes:
        """At most `length` bytes of output. That it is memory that lacks, the libraries say in their messages alone."""
        try:
            output: bytes = decompressor.decompress(data, length)
        except self._error as error:
            if "memory" in str(error).lower():
                raise MemoryError from None
            raise DamagedError from None
        return output


def _library(compression: str) -> tuple[Callable[[int], Any], type[Exception]]:
    """How to make a decompressor that takes so many bytes of memory at most, and what it raises."""
    if compression == "bzip2":
        import bz2

        return lambda room: bz2.BZ2Decompressor(), OSError
    if compression == "xz":
        import lzma

        return lambda room: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=room), lzma.LZMAError
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    window = zstd.DecompressionParameter.window_log_max
    low, high = window.bounds()

    def make(room: int) -> Any:
        log = (room - _BESIDE_WINDOW).bit_length() - 1
        return zstd.ZstdDecompressor(options={window: min(max(log, low), high)})

    return make, zstd.ZstdError
