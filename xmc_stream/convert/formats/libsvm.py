"""libsvm or svmlight text without a header, multi-class or multi-label, plain or compressed.

A line `l1,l2,... f:v f:v ...` is a sample; `#` begins a comment, lines without anything else are none. Sizes, and
whether ids count from 0 or 1, only the whole input tells: the ids of features, and apart from them those of labels,
count from 0 if any is 0. Several files are one set, their rows in turn.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from pathlib import Path

from xmc_stream import flags
from xmc_stream.convert.formats.texts import LinesSource, TextInput, looked_at, most_entries
from xmc_stream.convert.lines.files import HEAD, TextRange
from xmc_stream.convert.lines.parser import UNKNOWN, Dialect, LinesPart, attributes_of
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.source import Part, PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.flags import Wording
from xmc_stream.runtime.job import Phase, Receipt

_NUMBER = rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LABELS = re.compile(_NUMBER + rb"(?:," + _NUMBER + rb")*")
_FEATURE = re.compile(rb"(?:\d+|qid):[-+.\w]+")


def recognises(head: bytes) -> bool:
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


class LibsvmText(LinesSource):
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
        files = []
        for path in paths:
            with looked_at(path) as file:
                files.append(TextInput.of(path, file))
        super().__init__("libsvm text", {"XY": files})
        kept = of_labels(like)
        self.n_features = _size(flags.FEATURES, options.n_features, like.n_features if like else None)
        self.n_labels = _size(flags.LABELS_COUNT, options.n_labels, kept.n_labels if kept else None)
        self._like = like
        self._unlabelled = options.unlabelled
        self._dialect = Dialect(
            libsvm=True,
            x_base=options.base if options.base is not None or like is None else like.base,
            y_base=like.label_base if like else None,
            skip=options.skip,
            sum_duplicates=options.sum_duplicates,
            drop_unseen=options.drop_unseen,
        )
        self.x_entries = most_entries(files, 4)  # "0:1 "
        self.y_entries = most_entries(files, 2)  # "0,"

    def _part(self, side: str, text: TextRange) -> LinesPart:
        bounds = tuple(UNKNOWN if size is None else size for size in (self.n_features, self.n_labels))
        return LinesPart(text, self._buffers, ("X", "Y"), bounds, self._like, self._dialect, self._unlabelled)

    def parts(self) -> list[Part]:
        """Byte ranges of the files."""
        return [self._part("XY", text) for file in self._files["XY"] for text in file.ranges()]

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Bases and sizes, by the ids of all parts."""
        yield from ()
        names = [file.name for file in self._files["XY"] for _ in file.ranges()]
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


open_source = LibsvmText  # the set in some files
