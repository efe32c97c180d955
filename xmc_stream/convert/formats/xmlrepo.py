"""XMLRepo text, plain or compressed: in one file, or features and labels in a file each. Ids count from zero.

One file: a header "N D K", then a line `l1,l2,... f:v f:v ...` a sample. A line that begins with a blank has no labels
(so has one that begins with `f:v`); a line without features, and an empty line, are samples too. Two files: a header
"N D", then a line `f:v f:v ...` a sample, and a header "N K", then a line `l:v l:v ...` a sample, where a label of the
value zero is none. Several files are one set, their rows in turn.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.convert.formats.texts import LinesSource, TextInput, looked_at, most_entries
from xmc_stream.convert.lines.compression import SUFFIXES
from xmc_stream.convert.lines.files import TextRange
from xmc_stream.convert.lines.parser import Dialect, LinesPart, attributes_of
from xmc_stream.convert.messages import shown
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.pieces import WINDOW, Rows
from xmc_stream.convert.source import Part, PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt

_HEADER = re.compile(rb"[ \t]*(\d{1,15})[ \t]+(\d{1,15})(?:[ \t]+(\d{1,15}))?[ \t]*\r?\n?")
_FORM = "'N D K' (numbers of rows, features, labels), or 'N D' where the labels have a file of their own"
_LABELS_FORM = "'N K' (numbers of rows, labels)"
_FEATURES_NAME = re.compile(r"(.*_X_)Xf\.txt(\.\w+)?")  # the labels beside it: Y for Xf


def recognises(head: bytes) -> bool:
    """True for a text whose first line is two or three numbers."""
    return _HEADER.fullmatch(head.split(b"\n", 1)[0] + b"\n") is not None


@dataclass(frozen=True)
class _NoLabels:
    """Y of rows without labels."""

    n_rows: int

    sides = ("Y",)

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """Rows, each with nothing."""
        for start in range(0, self.n_rows, WINDOW):
            n = min(WINDOW, self.n_rows - start)
            yield ((np.zeros(n + 1, np.int64), np.empty(0, np.int32), None),)


class XMLRepoText(LinesSource):
    """One set in one or several texts, whose headers are read.

    options.label_files: the files of the labels where `paths` hold features alone; by default `NAME_X_Y.txt` beside
    `NAME_X_Xf.txt`, compressed or not; options.unlabelled: none. like: where D and K come from instead of the headers.
    Raises InputError where a file or its header cannot be read, files contradict each other, or labels are given or lack
    against the header.
    """

    def __init__(self, paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> None:
        inputs = [_opened(path, _FORM) for path in paths]
        first = inputs[0]
        apart = len(first.sizes) == 2
        for other in inputs:
            if other.sizes[1:] != first.sizes[1:]:
                raise InputError(
                    f"{other.name}:1: the header's sizes differ from those of {first.name}: files of one set have the "
                    "same D and K"
                )
        labels: list[TextInput] = []
        if apart:
            if options.skip:
                raise InputError(
                    f"{first.name} holds features alone: bad rows cannot be left out, they have labels elsewhere"
                )
            if not options.unlabelled:
                labels = _label_files(inputs, list(options.label_files) or [_labels_beside(path) for path in paths])
        elif options.label_files:
            raise InputError(f"{first.name} holds its labels itself, by its header of three numbers: leave out labels")
        super().__init__("XMLRepo text", {"X": inputs, "Y": labels} if apart else {"XY": inputs})
        self.n_features, self.n_labels = first.sizes[1], None if apart else first.sizes[2]
        if labels:
            self.n_labels = labels[0].sizes[1]
        if like:
            self.n_features = like.n_features
        if kept := of_labels(like):
            self.n_labels = kept.n_labels
        elif apart and options.unlabelled:
            self.n_labels = options.n_labels
        self._unlabelled, self._like = options.unlabelled, like
        bases = (like.base, like.label_base) if like and options.base is None else (options.base or 0,) * 2
        self._dialect = Dialect(
            x_base=bases[0], y_base=bases[1], skip=options.skip, sum_duplicates=options.sum_duplicates,
            drop_unseen=options.drop_unseen,
        )  # fmt: skip
        self.n_samples = sum(file.sizes[0] for file in inputs)
        self.x_entries = most_entries(inputs, 4)  # "0:1 "
        self.y_entries = most_entries(labels, 4) if apart else most_entries(inputs, 2)  # "0,"

    def _part(self, side: str, text: TextRange) -> LinesPart:
        sizes = {"X": self.n_features or 0, "Y": self.n_labels or 0}
        bounds, unlabelled = tuple(sizes[s] for s in side), self._unlabelled and side == "XY"
        return LinesPart(text, self._buffers, tuple(side), bounds, self._like, self._dialect, unlabelled)

    def parts(self) -> list[Part]:
        """Byte ranges of the files. Rows without labels are one part, the last."""
        parts: list[Part] = [
            self._part(side, text) for side, files in self._files.items() for file in files for text in file.ranges()
        ]
        if not self._files.get("Y", True):
            parts.append(_NoLabels(self.n_samples or 0))
        return parts

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """The sizes of the headers, which must agree with what was read."""
        yield from ()
        behind = iter(parts)
        pieces: dict[str, list[Any]] = {"X": [], "Y": []}
        notes: list[tuple[str, dict[str, Any]]] = []
        for side, files in self._files.items():
            for file in files:
                read = [next(behind) for _ in file.ranges()]
                lines = sum(part.notes["lines"] for part in read)
                notes += [(file.name, part.notes) for part in read]
                if lines != (n_rows := file.sizes[0]):
                    line = 1 if lines > n_rows else lines + 1
                    raise InputError(
                        f"{file.name}:{line}: the header promises {n_rows} rows and {lines} follow: fetch the file "
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


def label_file(path: Path) -> TextInput:
    """A file of labels alone. Raises InputError where its header is not "N K"."""
    labels = _opened(path, _LABELS_FORM)
    if len(labels.sizes) == 3:
        raise _not_the_header(labels.name, b"%d %d %d" % labels.sizes, _LABELS_FORM)
    return labels


def _label_files(features: Sequence[TextInput], paths: Sequence[Path]) -> list[TextInput]:
    """The files of the labels beside those of features. Raises InputError where they do not belong together."""
    if len(paths) != len(features):
        raise InputError(f"{len(features)} files of features and {len(paths)} of labels: give as many, in one order")
    found = [label_file(path) for path in paths]
    for file, labels in zip(features, found, strict=True):
        if labels.sizes[0] != file.sizes[0]:
            raise InputError(
                f"{file.name}:1: the header promises {file.sizes[0]} rows and that of {labels.name} {labels.sizes[0]}: "
                "features and labels must be of the same samples"
            )
        if labels.sizes != (labels.sizes[0], found[0].sizes[1]):
            raise InputError(f"{found[0].name}:1: the files of labels promise different numbers of labels")
    return found


def _opened(path: Path, form: str) -> TextInput:
    """A file and the two or three numbers of its header, which should have this form."""
    with looked_at(path) as file:
        line, first = file.header()
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _not_the_header(file.name, line, form)
        return TextInput.of(path, file, first, tuple(int(number) for number in match.groups() if number))


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


open_source = XMLRepoText  # the set in some files
