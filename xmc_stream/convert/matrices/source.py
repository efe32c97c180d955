"""X and Y that are matrices of their own, as one source: any kind of features beside any kind of labels."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.lines.files import file_identity
from xmc_stream.convert.matrices.rules import Rules
from xmc_stream.convert.matrices.sides import BlockSize, Reader, Side, block_bytes, fitted
from xmc_stream.convert.options import ConvertOptions, Like, of_labels
from xmc_stream.convert.rows import Rows
from xmc_stream.convert.source import Part, PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.flags import Wording
from xmc_stream.runtime.job import Phase, Receipt


@dataclass(frozen=True)
class SidePart:
    """Rows [start, stop) of a matrix. bytes_in: of its files, the share of these rows."""

    reader: Reader
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
        for raw in self.reader.blocks(self.start, self.stop, self.size, notes):
            rows = self.rules.rows(raw, row, notes)
            row += len(raw[0]) - 1
            notes["bytes_read"] = self.bytes_in * (row - self.start) // max(self.stop - self.start, 1)
            yield (rows,)


class Matrices:
    """X and Y, each of one or several matrices whose rows follow each other, as a source.

    like: where D and K come from, whatever the shapes say. uses: options that the format knows besides the common ones.
    Raises InputError where a matrix of X and the one of Y beside it have not as many rows, or an option has no meaning for
    matrices.
    """

    alone = False

    def __init__(
        self,
        x: Sequence[Side],
        y: Sequence[Side],
        options: ConvertOptions,
        like: Like | None,
        uses: Sequence[str] = (),
    ) -> None:
        _check_options(options, x[0].name, uses)
        for a, b in zip(x, y, strict=True):
            if a.n_rows != b.n_rows:
                raise InputError(
                    f"{a.name} has {a.n_rows} rows and {b.name} has {b.n_rows}: features and labels must have as many"
                )
        self._sides = {"X": x, "Y": y}
        self._options = options
        self._like = like
        self.n_samples: int | None = sum(side.n_rows for side in x)
        self.n_features = _columns(x, like.n_features if like else None, options.n_features, flags.FEATURES)
        self.n_labels = _columns(
            y, kept.n_labels if (kept := of_labels(like)) else None, options.n_labels, flags.LABELS_COUNT
        )
        self.x_entries = _total([side.entries for side in x])
        self.y_entries = _total([side.entries for side in y])
        self.overhead: dict[str, int] = {}
        kinds = list(dict.fromkeys(side.kind for side in x)), list(dict.fromkeys(side.kind for side in y))
        self.attributes: dict[str, Any] = {
            "source": _names(x),
            **({} if options.unlabelled else {"source_labels": _names(y)}),
            "source_format": ", ".join(kinds[0]),
        }
        if kinds[0] != kinds[1]:
            self.attributes["source_labels_format"] = ", ".join(kinds[1])
        self.files = list(dict.fromkeys(file for side in (*x, *y) for file in side.files))
        self._stamps = [file_identity(file) for file in self.files]
        self.identity: dict[str, Any] = {"files": self._stamps}
        self._size = {"X": BlockSize(), "Y": BlockSize()}

    @property
    def bytes_in(self) -> int:
        """Bytes of all files."""
        return sum(int(size) for _, size, _ in self._stamps)

    def load_kernels(self) -> None:
        """Compile or load what sorts the rows; import scipy where a matrix goes through it."""
        for side, matrices in self._sides.items():
            self._rules(side, matrices[0]).load_kernels()
            if any(matrix.load_bytes for matrix in matrices):
                import scipy.sparse  # noqa: F401

    def fit(self, room: int) -> int:
        """Choose the size of a block for `room` bytes; returns what the largest part takes at most."""
        per_entry = block_bytes(self._options.sum_duplicates)
        taken = 0
        for side, matrices in self._sides.items():
            load = max(matrix.load_bytes for matrix in matrices)
            entries = _total([matrix.entries for matrix in matrices])
            self._size[side] = fitted(room - load, per_entry, entries, int(self.n_samples or 0))
            taken = max(taken, load + self._size[side].block * per_entry)
        return taken

    def parts(self) -> list[Part]:
        """All of X, then all of Y."""
        return [
            SidePart(
                matrix.reader(),
                self._rules(side, matrix),
                start,
                stop,
                self._size[side],
                self._share(matrix, start, stop),
            )
            for side, matrices in self._sides.items()
            for matrix in matrices
            for start, stop in matrix.ranges()
        ]

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Sizes that no shape says, sums of what was left out or added up. Raises InputError for wrong checksums."""
        yield from ()
        begin = 0
        for matrices in self._sides.values():
            for matrix in matrices:
                end = begin + len(matrix.ranges())
                matrix.settle([part.notes for part in parts[begin:end]])
                begin = end
        found = {
            side: {
                "pieces": [part.pieces[side] for part in parts if side in part.pieces],
                "columns": max((part.notes.get("columns", 0) for part in parts if side in part.pieces), default=0),
            }
            for side in ("X", "Y")
        }
        return self._settled(found, parts)

    def _settled(self, found: Mapping[str, Mapping[str, Any]], parts: Sequence[PartRead]) -> Settled:
        attributes = attributes_of([(part.notes, tuple(part.pieces)) for part in parts])
        labels = self.attributes.get("source_labels_format")
        said = f"{self.attributes['source_format']}{f' with labels of {labels}' if labels else ''}, "
        return Settled(
            n_features=max(found["X"]["columns"], self.n_features or 0, self._options.n_features or 0),
            n_labels=max(found["Y"]["columns"], self.n_labels or 0, self._options.n_labels or 0),
            x=found["X"]["pieces"],
            y=found["Y"]["pieces"],
            said=said + f"{self.n_samples:,} rows",
            attributes=attributes,
        )

    def close(self) -> None:
        """Nothing is open between parts."""

    def _share(self, matrix: Side, start: int, stop: int) -> int:
        """Bytes of input behind a range of rows."""
        sizes = {path: size for path, size, _ in self._stamps}
        n_bytes = sum(int(sizes[str(file.absolute())]) for file in matrix.files)
        return n_bytes * (stop - start) // max(matrix.n_rows, 1)

    def _rules(self, side: str, matrix: Side) -> Rules:
        bound = self.n_features if side == "X" else self.n_labels
        return Rules(
            side,
            matrix.name,
            matrix.n_columns,
            bound,
            self._like.name if self._like else "",
            self._options.sum_duplicates,
            self._options.drop_unseen,
        )


def attributes_of(parts: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]]) -> dict[str, int]:
    """What was left out or added up in all parts, for the dataset's attributes: notes and sides of each."""
    counts = {"dropped_features": 0, "dropped_labels": 0, "summed_duplicates": 0}
    for notes, sides in parts:
        counts["summed_duplicates"] += notes.get("summed", 0)
        counts["dropped_features" if sides == ("X",) else "dropped_labels"] += notes.get("dropped", 0)
    return {name: count for name, count in counts.items() if count}


def _check_options(options: ConvertOptions, name: str, uses: Sequence[str]) -> None:
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
    if options.text_options is not None:
        raise InputError(f"{name} holds numbers: leave out the options of raw text")
    for option, flag in (("layer", flags.LAYER), ("label_key", flags.LABEL_KEY)):
        if getattr(options, option) and option not in uses:
            raise InputError(f"{name} is not AnnData: leave out " + flag)


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


def _names(sides: Sequence[Side]) -> str | list[str]:
    names = [Path(side.name).name for side in sides]
    return names if len(names) > 1 else names[0]


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
