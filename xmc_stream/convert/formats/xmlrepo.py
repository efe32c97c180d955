"""XMLRepo text, plain or compressed: in one file, or features and labels in a file each. Ids count from zero.

One file: a header "N D K", then a line `l1,l2,... f:v f:v ...` a sample. A line that begins with a blank has no labels
(so has one that begins with `f:v`); a line without features, and an empty line, are samples too. Two files: a header
"N D", then a line `f:v f:v ...` a sample, and a header "N K", then a line `l:v l:v ...` a sample, where a label of the
value zero is none. Several files are one set, their rows in turn.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.convert.lines.compression import SUFFIXES
from xmc_stream.convert.lines.files import NO_TEXT, Buffers, TextRange, file_identity, forget, ranges
from xmc_stream.convert.lines.parser import Dialect, LinesPart, attributes_of, bom_length
from xmc_stream.convert.matrices.rules import Rules
from xmc_stream.convert.matrices.sides import BlockSize, NoLabels
from xmc_stream.convert.matrices.source import SidePart
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.source import Part, PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt

_POSITIVES = 17 / 4  # bytes that taking out zeros makes of a byte of labels: a flag, a sum and an index an entry
_HEADER = re.compile(rb"[ \t]*(\d{1,15})[ \t]+(\d{1,15})(?:[ \t]+(\d{1,15}))?[ \t]*\r?\n?")
_LEAST_HEAD = 4  # bytes that tell UTF-16
_FORM = "'N D K' (numbers of rows, features, labels), or 'N D' where the labels have a file of their own"
_LABELS_FORM = "'N K' (numbers of rows, labels)"
_FEATURES_NAME = re.compile(r"(.*_X_)Xf\.txt(\.\w+)?")  # the labels beside it: Y for Xf


def recognises(path: Path, head: bytes) -> bool:
    """True for a text whose first line is two or three numbers."""
    return _HEADER.fullmatch(head.split(b"\n", 1)[0] + b"\n") is not None


@dataclass(frozen=True)
class _Input:
    """A file whose header is read. first: the byte behind it; sizes: of the header, -1 where it has two numbers."""

    path: Path
    name: str
    first: int
    size: int | None
    decompressor_bytes: int
    compression: str
    n_rows: int
    n_columns: int
    n_more: int


class XMLRepoText:
    """One set in one or several texts, whose headers are read.

    options.label_files: the files of the labels where `paths` hold features alone; by default `NAME_X_Y.txt` beside
    `NAME_X_Xf.txt`, compressed or not; options.unlabelled: none. like: where D and K come from instead of the headers.
    Raises InputError where a file or its header cannot be read, files contradict each other, or labels are given or lack
    against the header.
    """

    def __init__(self, paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> None:
        inputs = [_opened(path, _FORM) for path in paths]
        first = inputs[0]
        apart = first.n_more < 0
        for other in inputs:
            if (other.n_columns, other.n_more) != (first.n_columns, first.n_more):
                raise InputError(
                    f"{other.name}:1: the header's sizes differ from those of {first.name}: files of one set have the "
                    "same D and K"
                )
        self._sides = {"X": inputs, "Y": []} if apart else {"XY": inputs}
        self._unlabelled = options.unlabelled
        self.n_features: int | None = first.n_columns
        self.n_labels: int | None = first.n_more
        self.attributes: dict[str, Any] = {"source": [path.name for path in paths] if len(paths) > 1 else paths[0].name}
        if apart:
            if options.skip:
                raise InputError(
                    f"{first.name} holds features alone: bad rows cannot be left out, they have labels elsewhere"
                )
            if not options.unlabelled:
                self._add_labels(paths, options)
        elif options.label_files:
            raise InputError(f"{first.name} holds its labels itself, by its header of three numbers: leave out labels")
        if like:
            self.n_features = like.n_features
        if kept := of_labels(like):
            self.n_labels = kept.n_labels
        elif apart and options.unlabelled:
            self.n_labels = options.n_labels
        self._like = like
        bases = (like.base, like.label_base) if like and options.base is None else (options.base or 0,) * 2
        self._dialect = Dialect(
            x_base=bases[0], y_base=bases[1], skip=options.skip, sum_duplicates=options.sum_duplicates,
            drop_unseen=options.drop_unseen,
        )  # fmt: skip
        everything = [file for side in self._sides.values() for file in side]
        kinds = ", ".join(dict.fromkeys(file.compression for file in everything if file.compression))
        self.attributes["source_format"] = "XMLRepo text" + (f", {kinds}" if kinds else "")
        self.n_samples: int | None = sum(file.n_rows for file in inputs)
        self.files = [file.path for file in everything]
        self.identity = {"files": [file_identity(path) for path in self.files]}
        self.alone = not all(file.path.is_file() for file in everything)
        self.overhead = {
            f"decompression of {file.name}": file.decompressor_bytes for file in everything if file.decompressor_bytes
        }
        self.x_entries = _most(inputs, 4)  # "0:1 "
        self.y_entries = _most(self._sides["Y"], 4) if apart else _most(inputs, 2)  # "0,"
        self.bytes_in = sum(file.path.stat().st_size for file in everything if not self.alone)
        self._buffers = Buffers()

    def _add_labels(self, paths: Sequence[Path], options: ConvertOptions) -> None:
        features = self._sides["X"]
        beside = list(options.label_files) or [_labels_beside(path) for path in paths]
        if len(beside) != len(features):
            raise InputError(
                f"{len(features)} files of features and {len(beside)} of labels: give as many, in one order"
            )
        for file, path in zip(features, beside, strict=True):
            labels = label_file(path)
            if labels.n_rows != file.n_rows:
                raise InputError(
                    f"{file.name}:1: the header promises {file.n_rows} rows and that of {labels.name} {labels.n_rows}: "
                    "features and labels must be of the same samples"
                )
            self._sides["Y"].append(labels)
        if len({labels.n_columns for labels in self._sides["Y"]}) > 1:
            raise InputError(f"{self._sides['Y'][0].name}:1: the files of labels promise different numbers of labels")
        self.n_labels = self._sides["Y"][0].n_columns
        names = [path.name for path in beside]
        self.attributes["source_labels"] = names if len(names) > 1 else names[0]

    def _part(self, side: str, text: TextRange) -> LinesPart:
        sizes = {"X": self.n_features or 0, "Y": self.n_labels or 0}
        bounds, unlabelled = tuple(sizes[s] for s in side), self._unlabelled and side == "XY"
        return LinesPart(text, self._buffers, tuple(side), bounds, self._like, self._dialect, unlabelled)

    def load_kernels(self) -> None:
        """Compile or load the parser."""
        for side in self._sides:
            for _ in self._part(side, NO_TEXT).parser("").blocks(np.zeros(0, np.uint8)):
                pass

    def fit(self, room: int) -> int:
        """Choose the sizes of windows of text for `room` bytes; returns what a window and its rows take at most."""
        per_byte = 0.0
        for side in self._sides:
            parser = self._part(side, NO_TEXT).parser("")
            per_byte = max(per_byte, parser.bytes_per_byte + (_POSITIVES if side == "Y" else 0))
        sizes = [file.size for side in self._sides.values() for file in side]
        largest = None if None in sizes else max(size or 0 for size in sizes)
        self._buffers, taken = Buffers.fitting(room, per_byte, largest)
        return taken

    def parts(self) -> list[Part]:
        """Byte ranges of plain files; a compressed one and a pipe are one part. Rows without labels are one, the last."""
        parts: list[Part] = [
            self._part(side, text)
            for side, files in self._sides.items()
            for file in files
            for text in ranges(file.path, file.first, file.size)
        ]
        if not self._sides.get("Y", True):
            name, n_rows = self._sides["X"][0].name, self.n_samples or 0
            nothing = NoLabels(name, "xmlrepo", n_rows)
            parts.append(SidePart(nothing, Rules("Y", name, 0, self.n_labels), 0, n_rows, BlockSize(), 0))
        return parts

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """The sizes of the headers, which must agree with what was read."""
        yield from ()
        behind = iter(parts)
        pieces: dict[str, list[Any]] = {"X": [], "Y": []}
        notes: list[tuple[str, dict[str, Any]]] = []
        for side, files in self._sides.items():
            for file in files:
                read = [next(behind) for _ in ranges(file.path, file.first, file.size)]
                lines = sum(part.notes["lines"] for part in read)
                notes += [(file.name, part.notes) for part in read]
                if lines != file.n_rows:
                    line = 1 if lines > file.n_rows else lines + 1
                    raise InputError(
                        f"{file.name}:{line}: the header promises {file.n_rows} rows and {lines} follow: fetch the file "
                        "again, or correct the header"
                    )
                for one in side:
                    pieces[one] += [part.pieces[one] for part in read]
        pieces["Y"] += [part.pieces["Y"] for part in behind]  # of rows without labels
        n_features, n_labels = self.n_features or 0, self.n_labels or 0
        base, label_base = self._dialect.x_base or 0, self._dialect.y_base or 0
        bases = f"ids from {base}" if base == label_base else f"feature ids from {base}, label ids from {label_base}"
        n_rows = sum(piece.n_rows for piece in pieces["X"])
        said = f"{self.attributes['source_format']}, {bases}, {n_rows:,} rows"
        attributes = {"base": base, "label_base": label_base, **attributes_of(notes)}
        return Settled(n_features, n_labels, pieces["X"], pieces["Y"], said, base, label_base, attributes=attributes)

    def close(self) -> None:
        """Close pipes that were not read."""
        forget(file.path for side in self._sides.values() for file in side)


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> XMLRepoText:
    """The set in these files."""
    return XMLRepoText(paths, options, like)


def label_file(path: Path) -> _Input:
    """A file of labels alone. Raises InputError where its header is not "N K"."""
    labels = _opened(path, _LABELS_FORM)
    if labels.n_more >= 0:
        numbers = b"%d %d %d" % (labels.n_rows, labels.n_columns, labels.n_more)
        raise _not_the_header(labels.name, numbers, _LABELS_FORM)
    return labels


def _opened(path: Path, form: str) -> _Input:
    """A file and the two or three numbers of its header, which should have this form."""
    text = TextRange(path).open(Buffers())
    try:
        bom_length(text.name, text.head(_LEAST_HEAD))
        line, first = text.header()
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _not_the_header(text.name, line, form)
    except BaseException:
        text.close()
        raise
    size = text.size if text.plain else None
    sizes = (int(match[1]), int(match[2]), -1 if match[3] is None else int(match[3]))
    text.leave()
    return _Input(path, text.name, first, size, text.decompressor_bytes, text.compression, *sizes)


def _most(files: Sequence[_Input], entry: int) -> int | None:
    """Entries that files hold at most, if one takes `entry` bytes at least."""
    total = 0
    for file in files:
        if file.size is None:
            return None
        total += file.size // entry + 1
    return total


def _not_the_header(name: str, line: bytes | None, form: str) -> InputError:
    found = "" if line is None else f", not {shown(line)}" if line else ", but the file is empty"
    return InputError(f"{name}:1: the first line must be the header {form}{found}")


def _labels_beside(path: Path) -> Path:
    """The file of the labels that belongs to a file of features by its name; with the same suffix if there are more."""
    match = _FEATURES_NAME.fullmatch(path.name)
    if match is None:
        raise InputError(
            f"{path}:1: a header of two numbers says that here are features alone: name the file of their labels too ("
            + flags.LABELS
            + ")"
        )
    name = f"{match[1]}Y.txt"
    for suffix in (match[2] or "", "", *SUFFIXES):
        if (path.parent / f"{name}{suffix}").exists():
            return path.parent / f"{name}{suffix}"
    raise InputError(
        f"{path} holds features alone, and there is no {name} beside it, compressed or not: name the file of the labels ("
        + flags.LABELS
        + ")"
    )
