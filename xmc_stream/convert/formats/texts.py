"""Texts of lines that a compiled parser reads: what is known of their files before, and the source that they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xmc_stream.convert.lines.files import NO_TEXT, Buffers, TextFile, TextRange, ranges
from xmc_stream.convert.lines.parser import LinesPart, bom_length
from xmc_stream.convert.source import Source, names_of

if TYPE_CHECKING:
    from xmc_stream.convert.tfidf.records import Input, Records

_POSITIVES = 17 / 4  # bytes that taking out zeros makes of a byte of labels: a flag, a sum and an index an entry


@contextmanager
def looked_at(path: Path) -> Iterator[TextFile]:
    """A file whose beginning is looked at; a pipe stays open for who reads it. Raises InputError for UTF-16."""
    file = TextRange(path).open(Buffers())
    try:
        bom_length(file.name, file.head(4))
        yield file
    finally:
        file.leave()


@dataclass(frozen=True)
class TextInput:
    """A file. size: of a plain one, else None; first: the byte behind its header; sizes: that this promises."""

    path: Path
    name: str
    size: int | None
    decompressor_bytes: int
    compression: str
    first: int = 0
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, path: Path, file: TextFile, first: int = 0, sizes: tuple[int, ...] = ()) -> TextInput:
        """Of an opened file."""
        size = file.size if file.plain else None
        return cls(path, file.name, size, file.decompressor_bytes, file.compression, first, sizes)

    def ranges(self) -> list[TextRange]:
        """Byte ranges of a plain file; a compressed one and a pipe are one."""
        return ranges(self.path, self.first, self.size)


def text_records(
    name: str,
    files: Sequence[TextInput],
    records: Sequence[Records],
    first: Mapping[str, Any],
    more: Sequence[Any] = (),
) -> Input:
    """Records in files of text. more: see `Input`."""
    from xmc_stream.convert.tfidf.records import Input

    paths = [file.path for file in files]
    alone = not all(path.is_file() for path in paths)
    overhead = max(file.decompressor_bytes for file in files)
    return Input(name, paths, records, first, largest(files), more, alone, overhead)


def largest(files: Sequence[TextInput]) -> int | None:
    """Bytes of the largest file; None where one is not plain."""
    sizes = [file.size for file in files if file.size is not None]
    return max(sizes) if len(sizes) == len(files) else None


class LinesSource(Source):
    """Samples in lines of one or several texts. what: the format in words; files: by what stands in their lines, "XY" or one
    of them."""

    def __init__(self, what: str, files: dict[str, list[TextInput]]) -> None:
        self._files = files
        everything = [file for some in files.values() for file in some]
        super().__init__([file.path for file in everything], not all(file.path.is_file() for file in everything))
        kinds = dict.fromkeys(file.compression for file in everything if file.compression)
        self.attributes["source"] = names_of(file.path for file in next(iter(files.values())))
        if labels := files.get("Y"):
            self.attributes["source_labels"] = names_of(file.path for file in labels)
        self.attributes["source_format"] = ", ".join([what, *kinds])
        self.overhead = {
            f"decompression of {file.name}": file.decompressor_bytes for file in everything if file.decompressor_bytes
        }
        self._buffers = Buffers()

    @abstractmethod
    def _part(self, side: str, text: TextRange) -> LinesPart:
        """A range of lines with `side` in them."""

    def load_kernels(self) -> None:
        """Compile or load the parser."""
        for side in self._files:
            for _ in self._part(side, NO_TEXT).parser("").blocks(np.zeros(0, np.uint8)):
                pass

    def fit(self, room: int) -> int:
        """Choose the sizes of windows of text for `room` bytes; returns what a window and its rows take at most."""
        per_byte = max(
            self._part(side, NO_TEXT).parser("").bytes_per_byte + (_POSITIVES if side == "Y" else 0)
            for side in self._files
        )
        everything = [file for some in self._files.values() for file in some]
        self._buffers, taken = Buffers.fitting(room, per_byte, largest(everything))
        return taken


def most_entries(files: Sequence[TextInput], entry: int) -> int | None:
    """Entries that files hold at most, if one takes `entry` bytes at least."""
    most = [file.size // entry + 1 for file in files if file.size is not None]
    return sum(most) if len(most) == len(files) else None
