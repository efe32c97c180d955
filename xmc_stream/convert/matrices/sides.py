"""Sources whose X and Y are matrices of their own: any kind of features beside any kind of labels.

A format opens a side: what is known of a matrix, and readers of ranges of its rows as they stand in the file. What is
common is here: the checks and decisions that make rows of them, the cut into parts, and two sides as one source.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.source import Like, Options, Part, PartRead, Rows, Settled
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.jobs.job import Phase, Receipt
from xmc_stream.memory import format_size

BLOCK = 2**18  # entries, and rows, passed on at a time
PART = 2**23  # entries, and rows, of a part, where a matrix can be cut
_LEAST = 2**12
_ENTRY_BYTES = 112  # of a block: an entry's index and value, a row's length, and what checking makes of them
_SUM_BYTES = 48  # and what adding up makes of them

# Rows as a file has them: indptr from 0, indices of any integers, values of any numbers (None: ones). All may be kept.
Raw = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None]


class Reader(Protocol):
    """Reads rows of a matrix: picklable and small."""

    def blocks(self, start: int, stop: int, size: Size, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), block by block, cut so that they keep `size`."""


class Side(Protocol):
    """An opened matrix, X or Y, of which no rows are read yet.

    name: for messages; files: what it is read from; kind: the format in words; n_columns, entries: None where only
    reading tells; load_bytes: what reading takes besides blocks.
    """

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> Sequence[Path]: ...

    @property
    def kind(self) -> str: ...

    @property
    def n_rows(self) -> int: ...

    @property
    def n_columns(self) -> int | None: ...

    @property
    def entries(self) -> int | None: ...

    @property
    def load_bytes(self) -> int: ...

    def ranges(self) -> list[tuple[int, int]]:
        """Ranges of rows that may be read apart."""

    def reader(self) -> Reader: ...

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Check what only all parts tell, from their notes in order. Raises InputError."""


@dataclass(frozen=True)
class Size:
    """block: entries, and rows, of a block; longest: entries of a row that may be longer."""

    block: int = BLOCK
    longest: int = BLOCK

    def check(self, entries: int, name: str, row: int) -> None:
        """Raises MemoryLimitError where a row is longer than memory allows."""
        if entries > self.longest:
            need = format_size(entries * _ENTRY_BYTES)
            raise MemoryLimitError(f"{name}: row {row} (from 0) takes {need} when it is read: raise --memory-limit")


@dataclass(frozen=True)
class Rules:
    """What is made of a file's rows. side: "X" or "Y"; n_columns: of the file; bound: D or K, None where it is unknown.

    like: whose D and K these are, for messages.
    """

    side: str
    name: str
    n_columns: int | None
    bound: int | None
    like: str = ""
    sum_duplicates: bool = False
    drop_unseen: bool = False

    def rows(self, raw: Raw, first: int, notes: dict[str, Any]) -> Rows:
        """Rows from `first` on, checked: values finite in float32; indices in range, sorted, unique; no zeros in Y.

        Raises InputError naming file and row.
        """
        indptr, indices, values = raw
        if len(indices):
            indptr, indices, values = self._in_range(indptr, indices, values, first, notes)
        indices = indices.astype(self._index_type(indices.dtype), copy=False)
        data = self._values(indptr, values, first) if self.side == "X" else self._signs(indptr, indices, values, first)
        indptr, indices, data = self._sorted(indptr, indices, data, first, notes)
        return (indptr, indices, data) if self.side == "X" else (*positives(indptr, indices, data), None)

    def load_kernels(self) -> None:
        """Compile or load what sorts the rows."""
        none = np.empty(0, np.int64)
        self.rows((np.zeros(1, np.int64), none, none), 0, {})

    def _index_type(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        from xmc_stream.store.encoding import index_dtype

        bound = self.n_columns if self.bound is None else self.bound
        if bound is None:
            return np.dtype(np.int32 if np.can_cast(dtype, np.int32) else np.int64)
        return index_dtype(bound)

    def _in_range(
        self, indptr: NDArray[np.int64], indices: NDArray[Any], values: Any, first: int, notes: dict[str, Any]
    ) -> Raw:
        """The entries whose indices are below the bound; all, or it is an error, unless unseen ones are left out."""
        high = int(indices.max())
        most = np.iinfo(np.int64).max if self.n_columns is None else self.n_columns
        if int(indices.min()) < 0 or high >= most:
            at = int(np.argmax((indices < 0) | (indices >= most)))
            within = "" if self.n_columns is None else f" and below {most}, its number of columns"
            raise InputError(
                f"{self.name}: index {indices[at]} in row {_row(indptr, at, first)} (from 0) is out of range, it must "
                f"be at least 0{within}: its arrays do not fit its shape, make the matrix again"
            )
        if self.bound is not None and high >= self.bound:
            keep = indices < self.bound
            if not self.drop_unseen:
                at = int(np.argmin(keep))
                what = "features D" if self.side == "X" else "labels K"
                origin = f", which comes from --like {self.like}" if self.like else ""
                raise InputError(
                    f"{self.name}: index {indices[at]} in row {_row(indptr, at, first)} (from 0) is not below the "
                    f"number of {what} = {self.bound}{origin}: check that the two belong together, or --unseen=drop"
                )
            before = _counted(keep)
            notes["dropped"] = notes.get("dropped", 0) + len(keep) - int(before[-1])
            indptr, indices = before[indptr], indices[keep]
            values = None if values is None else values[keep]
            high = int(indices.max(initial=-1))
        notes["columns"] = max(notes.get("columns", 0), high + 1)
        return indptr, indices, values

    def _values(self, indptr: NDArray[np.int64], values: Any, first: int) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):
            data: NDArray[np.float32] = values.astype(np.float32)
        finite = np.isfinite(data)
        if not finite.all():
            at = int(np.argmin(finite))
            raise InputError(
                f"{self.name}: value {values[at]} in row {_row(indptr, at, first)} (from 0) is not finite in float32: "
                "correct it, or leave the row out"
            )
        return data

    def _signs(self, indptr: NDArray[np.int64], indices: NDArray[Any], values: Any, first: int) -> NDArray[np.float32]:
        """One for each label whose value is not zero."""
        if values is None:
            return np.ones(len(indices), np.float32)
        if values.dtype.kind == "f" and np.isnan(values).any():
            row = _row(indptr, int(np.argmax(np.isnan(values))), first)
            raise InputError(f"{self.name}: a label in row {row} (from 0) is NaN: labels are zero or not, correct it")
        signs: NDArray[np.float32] = (values != 0).astype(np.float32)
        return signs

    def _sorted(
        self,
        indptr: NDArray[np.int64],
        indices: NDArray[Any],
        data: NDArray[np.float32],
        first: int,
        notes: dict[str, Any],
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
        """Rows sorted by index, in place; entries of the same index are added up in float64 where that is wanted."""
        from xmc_stream.kernels.parse import sort_rows

        row = sort_rows(indptr, indices, data)
        if row < 0:
            return indptr, indices, data
        if not self.sum_duplicates:
            index = indices[indptr[row] : indptr[row + 1]]
            twice = index[1:][index[1:] == index[:-1]][0]
            raise InputError(
                f"{self.name}: row {first + row} (from 0) has index {twice} twice: call sum_duplicates() of the "
                "matrix, or --duplicates=sum"
            )
        done = row + 1
        while row >= 0:
            row = sort_rows(indptr[done:], indices, data)
            done += row + 1
        new = np.ones(len(indices), bool)
        np.not_equal(indices[1:], indices[:-1], out=new[1:])
        new[indptr[:-1][np.diff(indptr) > 0]] = True
        before = _counted(new)
        notes["summed"] = notes.get("summed", 0) + len(new) - int(before[-1])
        starts = np.flatnonzero(new)
        indptr, indices = before[indptr], indices[new]
        if self.side == "Y":
            return indptr, indices, np.maximum.reduceat(data, starts)
        return indptr, indices, self._values(indptr, np.add.reduceat(data, starts, dtype=np.float64), first)


def positives(
    indptr: NDArray[np.int64], indices: NDArray[Any], positive: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The entries of Y that are not stored zeros. positive (nnz,): one or zero for each, of any type."""
    if positive.all():
        return indptr, indices
    return _counted(positive)[indptr], indices[positive != 0]


def _counted(flags: NDArray[Any]) -> NDArray[np.int64]:
    """How many of the flags before each, and of all, are set."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return before


def _row(indptr: NDArray[np.int64], at: int, first: int) -> int:
    """The row of an entry."""
    return first + int(np.searchsorted(indptr, at, side="right")) - 1


@dataclass(frozen=True)
class SidePart:
    """Rows [start, stop) of a matrix. bytes_in: of its files, the share of these rows."""

    reader: Reader
    rules: Rules
    start: int
    stop: int
    size: Size
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


def row_ranges(n_rows: int, n_parts: int) -> list[tuple[int, int]]:
    """Nearly equal ranges of rows, at least one."""
    n_parts = max(1, min(n_rows, n_parts))
    cuts = [n_rows * part // n_parts for part in range(n_parts + 1)]
    return list(pairwise(cuts))


def block_bytes(sum_duplicates: bool) -> int:
    """What an entry of a block takes at most."""
    return _ENTRY_BYTES + (_SUM_BYTES if sum_duplicates else 0)


def fitted(room: int, per_entry: int, entries: int | None, n_rows: int) -> Size:
    """Blocks for `room` bytes, no larger than a matrix."""
    longest = max(_LEAST, room // per_entry)
    whole = BLOCK if entries is None else max(entries, n_rows) + 1
    return Size(min(BLOCK, longest, whole), longest)


class Matrices:
    """X and Y, of one or several pairs of matrices whose rows follow each other, as a source.

    like: where D and K come from, whatever the shapes say. uses: options that the format knows besides the common ones.
    Raises InputError where the two of a pair have not as many rows, or an option has no meaning for matrices.
    """

    alone = False

    def __init__(
        self,
        x: Sequence[Side],
        y: Sequence[Side],
        options: Options,
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
        self.n_features = _columns(x, like.n_features if like else None, options.n_features, "--features")
        self.n_labels = _columns(y, like.n_labels if like else None, options.n_labels, "--labels-count")
        self.x_entries = _total([side.entries for side in x])
        self.y_entries = _total([side.entries for side in y])
        self.held: dict[str, int] = {}
        kinds = list(dict.fromkeys(side.kind for side in x)), list(dict.fromkeys(side.kind for side in y))
        self.attributes: dict[str, Any] = {
            "source": _names(x),
            **({} if options.unlabelled else {"source_labels": _names(y)}),
            "source_format": ", ".join(kinds[0]),
        }
        if kinds[0] != kinds[1]:
            self.attributes["source_labels_format"] = ", ".join(kinds[1])
        self._stamps = [_stamp(file) for file in dict.fromkeys(file for side in (*x, *y) for file in side.files)]
        self.identity: dict[str, Any] = {"files": self._stamps}
        self._size = {"X": Size(), "Y": Size()}

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
        """Sizes that no shape told, sums of what was left out or added up. Raises InputError for wrong checksums."""
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
        attributes = decisions([(part.notes, tuple(part.pieces)) for part in parts])
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


def decisions(parts: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]]) -> dict[str, int]:
    """What was left out or added up in all parts, for the dataset's attributes: notes and sides of each."""
    counts = {"dropped_features": 0, "dropped_labels": 0, "summed_duplicates": 0}
    for notes, sides in parts:
        counts["summed_duplicates"] += notes.get("summed", 0)
        counts["dropped_features" if sides == ("X",) else "dropped_labels"] += notes.get("dropped", 0)
    return {name: count for name, count in counts.items() if count}


def _check_options(options: Options, name: str, uses: Sequence[str]) -> None:
    """Refuse what would change the result elsewhere and cannot be done for matrices."""
    if options.base:
        raise InputError(f"{name}: columns of a matrix count from 0: leave out --one-based")
    if options.skip:
        raise InputError(
            f"{name}: rows of a matrix cannot be left out (--on-error=skip), as those of its labels are read apart: "
            "correct the rows, or convert a text"
        )
    if options.text is not None:
        raise InputError(f"{name} holds numbers: leave out the options of raw text")
    for option in ("layer", "label_key"):
        if getattr(options, option) and option not in uses:
            raise InputError(f"{name} is not AnnData: leave out --{option.replace('_', '-')}")


def _columns(sides: Sequence[Side], like: int | None, option: int | None, knob: str) -> int | None:
    """D or K: of the training set, or of the shapes, or as given if that is more; None where only reading tells."""
    if like is not None:
        return like
    known = [side.n_columns for side in sides if side.n_columns is not None]
    if option is not None:
        if known and option < max(known):
            raise InputError(f"{sides[0].name} has {max(known)} columns, more than {knob} {option}")
        return option
    return max(known) if len(known) == len(sides) else None


def _names(sides: Sequence[Side]) -> str | list[str]:
    names = [Path(side.name).name for side in sides]
    return names if len(names) > 1 else names[0]


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _stamp(path: Path) -> list[Any]:
    """Name, bytes and time of a file, or of the files of a folder."""
    stats = [file.stat() for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path.stat()]
    return [
        str(path.absolute()),
        sum(stat.st_size for stat in stats),
        max((stat.st_mtime_ns for stat in stats), default=0),
    ]
