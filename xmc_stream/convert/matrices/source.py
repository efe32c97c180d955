"""X and Y that are matrices of their own, as one source: any kind of features beside any kind of labels."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.lines.files import file_identity
from xmc_stream.convert.matrices.sides import BlockSize, Rules, Side, block_bytes, fitted
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.pieces import Rows
from xmc_stream.convert.source import Part, PartRead, Settled, Source, names_of, total
from xmc_stream.errors import InputError
from xmc_stream.flags import Wording
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import WRITER_BYTES, new_names

_NAMES = 2**12  # written at a time


@dataclass(frozen=True)
class SidePart:
    """Rows [start, stop) of a matrix. bytes_in: of its files, the share of these rows."""

    matrix: Side
    rules: Rules
    start: int
    stop: int
    size: BlockSize
    bytes_in: int

    @property
    def sides(self) -> tuple[str, ...]:
        """X or Y."""
        return (self.rules.side,)

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows, block by block, checked."""
        row = self.start
        for raw in self.matrix.blocks(self.start, self.stop, self.size, notes):
            rows = self.rules.rows(raw, row, notes)
            row += len(raw[0]) - 1
            notes["bytes_read"] = self.bytes_in * (row - self.start) // max(self.stop - self.start, 1)
            yield (rows,)


class Matrices(Source):
    """X and Y, each of one or several matrices whose rows follow each other, as a source. Labels may have names.

    like: where D and K come from, whatever the shapes say. Raises InputError where a matrix of X and the one of Y beside it
    have not as many rows, or an option has no meaning for matrices.
    """

    def __init__(self, x: Sequence[Side], y: Sequence[Side], options: ConvertOptions, like: Like | None) -> None:
        _check_options(options, x[0].name)
        for a, b in zip(x, y, strict=True):
            if a.n_rows != b.n_rows:
                raise InputError(
                    f"{a.name} has {a.n_rows} rows and {b.name} has {b.n_rows}: features and labels must have as many"
                )
        super().__init__(list(dict.fromkeys(file for side in (*x, *y) for file in side.files)))
        self._sides = {"X": x, "Y": y}
        self._options = options
        self._like = like
        kept = of_labels(like)
        self.n_samples = sum(side.n_rows for side in x)
        self.n_features = _columns(x, like.n_features if like else None, options.n_features, flags.FEATURES)
        self.n_labels = _columns(y, kept.n_labels if kept else None, options.n_labels, flags.LABELS_COUNT)
        self.x_entries = total(side.entries for side in x)
        self.y_entries = total(side.entries for side in y)
        kinds = [", ".join(dict.fromkeys(side.kind for side in sides)) for sides in (x, y)]
        self.attributes["source"] = names_of(side.name for side in x)
        if not options.unlabelled:
            self.attributes["source_labels"] = names_of(side.name for side in y)
        self.attributes["source_format"] = kinds[0]
        if kinds[0] != kinds[1]:
            self.attributes["source_labels_format"] = kinds[1]
        self._size = {"X": BlockSize(), "Y": BlockSize()}

    def load_kernels(self) -> None:
        """Compile or load what sorts the rows; import scipy where a matrix goes through it."""
        for side, matrices in self._sides.items():
            self._rules(side, matrices[0]).load_kernels()
            if any(matrix.load_bytes for matrix in matrices):
                import scipy.sparse  # noqa: F401

    def fit(self, room: int) -> int:
        """Choose the size of a block for `room` bytes; returns what the largest part takes at most, or writing names."""
        per_entry = block_bytes(self._options.sum_duplicates)
        taken = WRITER_BYTES
        for side, entries in (("X", self.x_entries), ("Y", self.y_entries)):
            load = max(matrix.load_bytes for matrix in self._sides[side])
            self._size[side] = fitted(room - load, per_entry, entries, int(self.n_samples or 0))
            taken = max(taken, load + self._size[side].block * per_entry)
        return taken

    def parts(self) -> list[Part]:
        """All of X, then all of Y."""
        parts: list[Part] = []
        for side, matrices in self._sides.items():
            for matrix in matrices:
                n_bytes, rules = sum(file_identity(file)[1] for file in matrix.files), self._rules(side, matrix)
                for start, stop in matrix.ranges():
                    share = n_bytes * (stop - start) // max(matrix.n_rows, 1)
                    parts.append(SidePart(matrix, rules, start, stop, self._size[side], share))
        return parts

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Sizes that no shape says, names of labels, what was left out or added up. Raises InputError for wrong checksums."""
        yield from ()
        for matrix in (*self._sides["X"], *self._sides["Y"]):
            if matrix.check:
                matrix.check()
        x, y = ([part for part in parts if side in part.pieces] for side in ("X", "Y"))
        counts = {
            "dropped_features": sum(part.notes.get("dropped", 0) for part in x),
            "dropped_labels": sum(part.notes.get("dropped", 0) for part in y),
            "summed_duplicates": sum(part.notes.get("summed", 0) for part in parts),
            "rows_without_class": sum(part.notes.get("missing", 0) for part in parts),
        }
        labels = self.attributes.get("source_labels_format")
        said = f"{self.attributes['source_format']}{f' with labels of {labels}' if labels else ''}, "
        folders = {}
        if (names := self._sides["Y"][0].labels) is not None:
            folders["names/labels"] = work / "names-labels"
            write_names(folders["names/labels"], names)
        return Settled(
            n_features=max(
                self.n_features or 0, self._options.n_features or 0, *(part.notes.get("columns", 0) for part in x)
            ),
            n_labels=max(
                self.n_labels or 0, self._options.n_labels or 0, *(part.notes.get("columns", 0) for part in y)
            ),
            x=[part.pieces["X"] for part in x],
            y=[part.pieces["Y"] for part in y],
            said=said + f"{self.n_samples:,} rows",
            attributes={name: count for name, count in counts.items() if count},
            folders=folders,
        )

    def _rules(self, side: str, matrix: Side) -> Rules:
        bound = self.n_features if side == "X" else self.n_labels
        like = self._like.name if self._like else ""
        options = self._options
        return Rules(side, matrix.name, matrix.n_columns, bound, like, options.sum_duplicates, options.drop_unseen)


def write_names(folder: Path, names: Iterable[str]) -> int:
    """Write names as a group; returns how many they are."""
    left = iter(names)
    with new_names(folder) as writer:
        while window := [name.encode() for name in islice(left, _NAMES)]:
            writer.append(window)
        return writer.n


def _check_options(options: ConvertOptions, name: str) -> None:
    """Refuse what would change the result elsewhere and cannot be done for matrices."""
    if options.base:
        raise InputError(f"{name}: columns of a matrix count from 0: leave out " + flags.ONE_BASED)
    if options.skip:
        raise InputError(
            f"{name}: rows of a matrix cannot be left out ("
            + flags.ON_ERROR_SKIP
            + "), as those of its labels are read apart: "
            "correct the rows, or convert a text"
        )


def _columns(sides: Sequence[Side], like: int | None, option: int | None, flag: Wording) -> int | None:
    """D or K: of the training set, or of the shapes, or as given if that is more; None where only reading tells."""
    if like is not None:
        return like
    known = [side.n_columns for side in sides if side.n_columns is not None]
    if option is not None:
        if known and option < max(known):
            raise InputError(f"{sides[0].name} has {max(known)} columns, more than " + flag + f" {option}")
        return option
    return max(known) if len(known) == len(sides) else None
