"""libsvm or svmlight text without a header, multi-class or multi-label, plain or compressed.

A line `l1,l2,... f:v f:v ...` is a sample; `#` begins a comment, lines without anything else are none. Sizes, and
whether ids count from 0 or 1, only the whole input tells: the ids of features, and apart from them those of labels,
count from 0 if any is 0. Several files are one set, their rows in turn.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.convert.lines.files import HEAD, NO_TEXT, Buffers, TextRange, file_identity, forget, ranges
from xmc_stream.convert.lines.parser import UNKNOWN, Dialect, LinesPart, attributes_of, bom_length
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.source import Part, PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.flags import Wording
from xmc_stream.runtime.job import Phase, Receipt

_NUMBER = rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LABELS = re.compile(_NUMBER + rb"(?:," + _NUMBER + rb")*")
_FEATURE = re.compile(rb"(?:\d+|qid):[-+.\w]+")


def recognises(path: Path, head: bytes) -> bool:
    """True for a text whose first lines are labels and features, up to the first that has features.

    Those that are no ids of classes, as -1 and 0.5, and queries are known too: reading says what is to be done.
    """
    lines = head.split(b"\n")
    if len(head) >= HEAD:  # the last one is cut
        lines[-1] = lines[-1].rpartition(b" ")[0] if len(lines) == 1 else b""
    for line in lines:
        first, *tokens = re.sub(rb",[ \t]+", b",", line.split(b"#")[0]).split() or [b""]
        if b":" in first:
            tokens.insert(0, first)
        elif first and not _LABELS.fullmatch(first):
            return False
        if not all(map(_FEATURE.fullmatch, tokens)):
            return False
        if tokens:
            return True
    return False


@dataclass(frozen=True)
class _Input:
    """A file. size: of a plain one, else None."""

    path: Path
    name: str
    size: int | None
    decompressor_bytes: int
    compression: str

    @classmethod
    def of(cls, path: Path) -> _Input:
        """Look at a file. Raises InputError where it cannot be read, or is UTF-16."""
        text = TextRange(path).open(Buffers())
        try:
            bom_length(text.name, text.head(HEAD))
        finally:
            text.leave()
        return cls(path, text.name, text.size if text.plain else None, text.decompressor_bytes, text.compression)


class LibsvmText:
    """One set in one or several texts.

    options.base: of the ids of features; n_features, n_labels: D and K. like: all of them, unless options say otherwise.
    Raises InputError where a file cannot be read, or options contradict each other.
    """

    def __init__(self, paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> None:
        if options.label_files:
            raise InputError(
                f"{paths[0]}:1: without a header 'N D' this is libsvm text, which holds its labels itself: leave out "
                "labels, or write the header"
            )
        self.n_features = _size(flags.FEATURES, options.n_features, like.n_features if like else None)
        self.n_labels = _size(
            flags.LABELS_COUNT, options.n_labels, kept.n_labels if (kept := of_labels(like)) else None
        )
        self._like = like
        self._unlabelled = options.unlabelled
        self._files = files = [_Input.of(path) for path in paths]
        self._dialect = Dialect(
            libsvm=True,
            x_base=options.base if options.base is not None or like is None else like.base,
            y_base=like.label_base if like else None,
            skip=options.skip,
            sum_duplicates=options.sum_duplicates,
            drop_unseen=options.drop_unseen,
        )
        kinds = ", ".join(dict.fromkeys(file.compression for file in files if file.compression))
        self.attributes: dict[str, Any] = {
            "source": [path.name for path in paths] if len(paths) > 1 else paths[0].name,
            "source_format": "libsvm text" + (f", {kinds}" if kinds else ""),
        }
        self.files = list(paths)
        self.identity = {"files": [file_identity(path) for path in paths]}
        self.alone = not all(path.is_file() for path in paths)
        self.overhead = {
            f"decompression of {file.name}": file.decompressor_bytes for file in files if file.decompressor_bytes
        }
        self.n_samples: int | None = None
        most = None if any(file.size is None for file in files) else sum(file.size or 0 for file in files)
        self.x_entries = None if most is None else most // 4 + len(files)  # "0:1 "
        self.y_entries = None if most is None else most // 2 + len(files)  # "0,"
        self.bytes_in = 0 if self.alone else sum(path.stat().st_size for path in paths)
        self._buffers = Buffers()

    def _part(self, text: TextRange) -> LinesPart:
        bounds = tuple(UNKNOWN if size is None else size for size in (self.n_features, self.n_labels))
        return LinesPart(text, self._buffers, ("X", "Y"), bounds, self._like, self._dialect, self._unlabelled)

    def load_kernels(self) -> None:
        """Compile or load the parser."""
        for _ in self._part(NO_TEXT).parser("").blocks(np.zeros(0, np.uint8)):
            pass

    def fit(self, room: int) -> int:
        """Choose the sizes of windows of text for `room` bytes; returns what a window and its rows take at most."""
        sizes = [file.size for file in self._files]
        largest = None if None in sizes else max(size or 0 for size in sizes)
        per_byte = self._part(NO_TEXT).parser("").bytes_per_byte
        self._buffers, taken = Buffers.fitting(room, per_byte, largest)
        return taken

    def parts(self) -> list[Part]:
        """Byte ranges of plain files; a compressed one and a pipe are one part."""
        return [self._part(text) for file in self._files for text in ranges(file.path, 0, file.size)]

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Bases and sizes, by the ids of all parts."""
        yield from ()
        names = [file.name for file in self._files for _ in ranges(file.path, 0, file.size)]
        read = list(zip(names, [part.notes for part in parts], strict=True))
        n_rows = sum(notes["rows"] for _, notes in read)
        if not n_rows:
            raise InputError(f"{names[0]}: no line is a row: check that this is the file you mean")
        x_base, n_features = _decided("feature", [n["x_ids"] for _, n in read], self._dialect.x_base, self.n_features)
        y_base, n_labels = _decided("label", [n["y_ids"] for _, n in read], self._dialect.y_base, self.n_labels)
        said = (
            f"{self.attributes['source_format']}, {n_rows:,} rows, feature ids from {x_base}, label ids from {y_base}"
        )
        return Settled(
            n_features,
            n_labels,
            [part.pieces["X"] for part in parts],
            [part.pieces["Y"] for part in parts],
            said,
            x_base,
            y_base,
            attributes={"base": x_base, "label_base": y_base, **attributes_of(read)},
        )

    def close(self) -> None:
        """Close pipes that were not read."""
        forget(file.path for file in self._files)


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> LibsvmText:
    """The set in these files."""
    return LibsvmText(paths, options, like)


def _size(option: Wording, given: int | None, taken_over: int | None) -> int | None:
    """D or K as far as it is known before reading."""
    if given is not None and taken_over is not None and given != taken_over:
        raise InputError(option + f" is {given} and " + flags.LIKE + f" has {taken_over}: leave out one of them")
    return taken_over if given is None else given


def _decided(kind: str, ids: list[list[int] | None], base: int | None, size: int | None) -> tuple[int, int]:
    """The base of ids, and how many there are. ids: the least and the largest of each part; base, size: where known."""
    known = [bounds for bounds in ids if bounds is not None]
    option = flags.FEATURES if kind == "feature" else flags.LABELS_COUNT
    if not known:
        if size is None:
            raise InputError(
                f"no row has a {kind}: say how many {kind}s there are by " + option + ", or by " + flags.LIKE
            )
        return base or 0, size
    if base is None:
        base = int(min(least for least, _ in known) > 0)
    most = max(most for _, most in known)
    if size is not None and most - base >= size:  # it is the id behind the last, and ids count from 0
        raise InputError(
            f"{kind} id {most} is one too large for "
            + option
            + f" {size}, as {kind} ids count from 0: one of them is 0"
        )
    return base, most + 1 - base if size is None else size
