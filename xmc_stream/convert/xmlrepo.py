"""XMLRepo text, plain or compressed: in one file, or features and labels in a file each. Ids count from zero.

One file: a header "N D K", then a line `l1,l2,... f:v f:v ...` a sample. A line that begins with a blank has no labels
(so has one that begins with `f:v`); a line without features, and an empty line, are samples too. Two files: a header
"N D", then a line `f:v f:v ...` a sample, and a header "N K", then a line `l:v l:v ...` a sample, where a label of the
value zero is none. The text is read in pieces cut at a line's end; nothing grows with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.compression import SUFFIXES
from xmc_stream.convert.parser import Parser, shown
from xmc_stream.convert.scipy_matrices import positives
from xmc_stream.convert.text import TextFile
from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.convert import Like, Rows

_POSITIVES = 17 / 4  # bytes that taking out zeros makes of a byte of labels: a flag, a sum and an index an entry
_HEADER = re.compile(rb"[ \t]*(\d{1,15})[ \t]+(\d{1,15})(?:[ \t]+(\d{1,15}))?[ \t]*\r?\n?")
_FORM = "'N D K' (numbers of rows, features, labels), or 'N D' where the labels have a file of their own"
_LABELS_FORM = "'N K' (numbers of rows, labels)"
_FEATURES_NAME = re.compile(r"(.*_X_)Xf\.txt(\.\w+)?")  # the labels beside it: Y for Xf


class XMLRepoText:
    """An opened text, or two of them, whose headers are read.

    labels: the file of the labels where `path` holds features alone; by default `NAME_X_Y.txt` beside `NAME_X_Xf.txt`,
    compressed or not. like: where D and K come from instead of the headers.
    Raises InputError where a file or its header cannot be read, or labels are given or lack against the header.
    """

    def __init__(self, path: Path, labels: Path | None = None, like: Like | None = None) -> None:
        with ExitStack() as opened:
            text = opened.enter_context(closing(TextFile(path)))
            self.n_samples, self.n_features, n_labels = _sizes(text, _FORM)
            self._files = [text]
            self.attributes = {"source": path.name}
            if n_labels is None:
                beside = _labels_beside(path) if labels is None else labels
                second = opened.enter_context(closing(TextFile(beside)))
                n_rows, n_labels, more = _sizes(second, _LABELS_FORM)
                if more is not None:
                    raise _not_the_header(second, _LABELS_FORM)
                if n_rows != self.n_samples:
                    raise InputError(
                        f"{text.name}:1: the header promises {self.n_samples} rows and that of {second.name} {n_rows}: "
                        "features and labels must be of the same samples"
                    )
                self._files.append(second)
                self.attributes["source_labels"] = beside.name
            elif labels is not None:
                raise InputError(f"{path} holds its labels itself, by its header of three numbers: leave out labels")
            self._opened = opened.pop_all()
        self.n_labels = n_labels
        if like:
            self.n_features, self.n_labels = like.n_features, like.n_labels
        self._like = like
        kinds = ", ".join(dict.fromkeys(file.compression for file in self._files if file.compression))
        self.attributes["source_format"] = "XMLRepo text" + (f", {kinds}" if kinds else "")
        self.held = {f"decompression of {file.name}": file.held for file in self._files if file.held}
        last = self._files[-1]
        self.x_entries = None if text.most is None else text.most // 4 + 1  # "0:1 "
        self.y_entries = None if last.most is None else last.most // (2 if last is text else 4) + 1  # "0,"

    def _parsers(self) -> list[Parser]:
        if len(self._files) == 1:
            return [Parser(self._files[0].name, self.n_features, self.n_labels, self._like)]
        return [
            Parser(self._files[0].name, self.n_features, None, self._like),
            Parser(self._files[1].name, self.n_labels, None, self._like, noun="label"),
        ]

    @property
    def bytes_in(self) -> int:
        """Bytes of the files; of a pipe, bytes of the text read so far."""
        return sum(file.bytes_in for file in self._files)

    def load_kernels(self) -> None:
        """Compile or load the parser."""
        for parser in self._parsers():
            for _ in parser.blocks(np.zeros(0, np.uint8)):
                pass

    def fit(self, room: int) -> int:
        """Choose the sizes of pieces for `room` bytes; returns what pieces of them and their rows take at most."""
        parsers = self._parsers()
        taken = 0
        if len(self._files) == 2:  # lines of labels are the shorter ones
            taken = self._files[1].fit(room // 4, parsers[1].bytes_per_byte + _POSITIVES)
        taken += self._files[0].fit(room - taken, parsers[0].bytes_per_byte)
        for file in self._files:
            file.allow(max(0, room - taken) // len(self._files))
        return taken

    def position(self) -> int:
        """Bytes of the files, compressed ones if they are, that are read."""
        return sum(file.position() for file in self._files)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def blocks(self) -> Iterator[Rows]:
        """All rows, block by block. Raises InputError with file and line, MemoryLimitError for too long a line."""
        parts = [self._rows(file, parser) for file, parser in zip(self._files, self._parsers(), strict=True)]
        return parts[0] if len(parts) == 1 else _side_by_side(*parts)

    def _rows(self, file: TextFile, parser: Parser) -> Iterator[Rows]:
        """The rows of a file, which must be as many as the header promises."""
        pieces = file.pieces()
        for text in pieces:
            for block in parser.blocks(text):
                if parser.n_rows > self.n_samples:
                    rest = _count_lines(text[parser.position :]) + sum(_count_lines(piece) for piece in pieces)
                    raise self._wrong_count(file, parser.n_rows + rest, 1)
                yield block
            file.lines = 1 + parser.n_rows
        if parser.n_rows < self.n_samples:
            raise self._wrong_count(file, parser.n_rows, file.lines)

    def _wrong_count(self, file: TextFile, n_rows: int, line: int) -> InputError:
        return InputError(
            f"{file.name}:{line}: the header promises {self.n_samples} rows and {n_rows} follow: fetch the file again, "
            "or correct the header"
        )


def _sizes(text: TextFile, form: str) -> tuple[int, int, int | None]:
    """The two or three numbers of a header, which should have this form."""
    match = _HEADER.fullmatch(text.header)
    if match is None:
        raise _not_the_header(text, form)
    return int(match[1]), int(match[2]), None if match[3] is None else int(match[3])


def _not_the_header(text: TextFile, form: str) -> InputError:
    found = f"not {shown(text.header)}" if text.header else "but the file is empty"
    return InputError(f"{text.name}:1: the first line must be the header {form}, {found}")


def _labels_beside(path: Path) -> Path:
    """The file of the labels that belongs to a file of features by its name; with the same suffix if there are more."""
    match = _FEATURES_NAME.fullmatch(path.name)
    if match is None:
        raise InputError(
            f"{path}:1: a header of two numbers says that here are features alone: name the file of their labels too "
            "(labels=, --labels)"
        )
    name = f"{match[1]}Y.txt"
    for suffix in (match[2] or "", "", *SUFFIXES):
        if (path.parent / f"{name}{suffix}").exists():
            return path.parent / f"{name}{suffix}"
    raise InputError(
        f"{path} holds features alone, and there is no {name} beside it, compressed or not: name the file of the labels "
        "(labels=, --labels)"
    )


def _side_by_side(features: Iterator[Rows], labels: Iterator[Rows]) -> Iterator[Rows]:
    """Rows of both files, each time as many as both have at hand. A file with too few rows raises by itself."""
    x = y = None
    i = j = 0
    while True:
        if x is None or i == len(x[0]) - 1:
            x, i = next(features, None), 0
        if y is None or j == len(y[0]) - 1:
            y, j = next(labels, None), 0
        if x is None or y is None:
            return
        n = min(len(x[0]) - i, len(y[0]) - j) - 1
        y_indptr, y_indices, values = _slice(y, j, n)
        yield *_slice(x, i, n), *positives(y_indptr, y_indices, values != 0)
        i, j = i + n, j + n


def _slice(rows: Rows, start: int, n: int) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """n rows of the first of two matrices: an indptr from 0, views of the entries."""
    indptr, indices, data = rows[0][start : start + n + 1], rows[1], rows[2]
    low, high = int(indptr[0]), int(indptr[-1])
    return indptr - low, indices[low:high], data[low:high]


def _count_lines(text: NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(text == 10)) + (len(text) > 0 and int(text[-1]) != 10)
