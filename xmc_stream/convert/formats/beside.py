"""What stands beside an input: the columns of matrices, as embeddings beside a text, and names of features or labels.

The columns of a matrix are appended to those of a source. Where rows are scaled to length one, those of the source and of the
matrix are so first, each by itself, and then the whole: text and vector weigh the same. The matrix is read when the source
has settled, by the rows of its pieces. Names stand one a line, or as JSON objects with a title.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats.matrix_files import open_matrix
from xmc_stream.convert.lines.files import file_identity, numbered_lines
from xmc_stream.convert.matrices.sides import BlockSize, Rules, Side, block_bytes, fitted
from xmc_stream.convert.matrices.source import write_names
from xmc_stream.convert.options import Like
from xmc_stream.convert.pieces import WINDOW, Piece, PieceRows, Rows, new_piece
from xmc_stream.convert.source import PartRead, Settled, Source, total
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import WRITER_BYTES, Names, new_names, new_vectorizer, open_names, open_vectorizer

_NAMES = 2**13  # names and weights written at a time
_FIELDS = ("title", "name", "label", "text")  # of an object, as in lbl.json of the Extreme Classification Repository
_LONGEST = 2**23  # bytes of a line
_JOIN_BYTES = 64 * PieceRows.ENTRIES + 16 * PieceRows.ROWS + 24 * WINDOW  # of the source's rows, and of those together


def words_of(like: Like, given: Sequence[Path]) -> Like:
    """What the source itself takes over from a training set. Raises InputError where matrices lack, or are too many."""
    if len(given) != len(like.beside):
        columns = ", ".join(f"{n:,}" for n in like.beside)
        has = f"has {columns} features of matrices beside" if like.beside else "has no features of a matrix beside"
        raise InputError(
            f"{like.name} {has}, and {len(given)} are given: name a matrix for each by " + flags.BESIDE + ", in order"
        )
    return replace(like, n_features=like.n_features - sum(like.beside), beside=())


class _Extended:
    """A source to which something is added: all else is that source's. files: of that; more: what tells them from others."""

    def __init__(self, source: Source, files: Sequence[Path], **more: Any) -> None:
        self._source = source
        self.files = [*source.files, *files]
        self.identity = {**source.identity, **more}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)


class BesideSource(_Extended):
    """A source whose X has the columns of matrices behind its own.

    like: whose matrices had as many columns; normalize: as asked for, None for what the source does. Raises InputError
    for files that are no matrices, of other sizes, or an option that would leave out rows.
    """

    def __init__(
        self, source: Source, files: Sequence[Path], like: Like | None, normalize: str | None, skip: bool
    ) -> None:
        if skip:
            raise InputError(
                f"{files[0]}: bad rows cannot be left out (" + flags.ON_ERROR_SKIP + "): they have features here too"
            )
        self._sides = [_opened(path) for path in files]
        for i, side in enumerate(self._sides):
            if source.n_samples is not None and side.n_rows != source.n_samples:
                raise _other_rows(side, source.n_samples)
            if like and side.n_columns != like.beside[i]:
                raise InputError(
                    f"{side.name} has {side.n_columns} columns and what stood there in {like.name} {like.beside[i]}: give "
                    "the matrix that belongs to it"
                )
        files = [file for side in self._sides for file in side.files]
        stamps = [file_identity(file) for file in files]
        super().__init__(source, files, beside=[str(normalize), *stamps])
        self._like = like
        self._normalize = normalize
        self.bytes_beside = sum(int(size) for _, size, _ in stamps)
        self.bytes_in = source.bytes_in + self.bytes_beside
        self.n_features = total([source.n_features, *(side.n_columns for side in self._sides)])
        self.entries_beside = sum(side.entries or 0 for side in self._sides)
        self.x_entries = total([source.x_entries, self.entries_beside])
        self._sizes = [BlockSize() for _ in self._sides]

    def load_kernels(self) -> None:
        """Those of the source, and what checks the matrices."""
        self._source.load_kernels()
        for side in self._sides:
            _rules(side).load_kernels()

    def fit(self, room: int) -> int:
        """As the source, or what joining takes."""
        taken = max(self._source.fit(room), WRITER_BYTES + 2**20)
        for i, side in enumerate(self._sides):
            fixed = _JOIN_BYTES + side.load_bytes
            self._sizes[i] = fitted(room - fixed, block_bytes(False), side.entries, side.n_rows)
            taken = max(taken, fixed + self._sizes[i].block * block_bytes(False))
        return taken

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """What the source settles, with the columns of the matrices in X, and their names."""
        settled = yield from self._source.settle(work, parts)
        n_rows = sum(piece.n_rows for piece in settled.x)
        scale = (self._normalize or settled.normalize) == "l2"
        pieces, base, n_features = [piece for piece in settled.x if piece.n_rows], settled.x_base, settled.n_features
        for i, side in enumerate(self._sides):
            if side.n_rows != n_rows:
                raise _other_rows(side, n_rows)
            apart = [[piece] for piece in pieces] if side.divisible else [pieces]
            jobs = []
            first = 0
            for number, some in enumerate(apart if pieces else []):
                job = Join(
                    f"beside/{i}/{number:05d}", [piece.receipt() for piece in some], side, self._sizes[i], first, base,
                    n_features, scale, not i, str(work / f"beside-{i}-{number:05d}"),
                )  # fmt: skip
                jobs.append(job)
                first += job.n_rows
            receipts = yield Phase("join features", jobs, twice=True)
            if side.check:
                side.check()
            pieces, base = [Piece.of(receipt["piece"]) for receipt in receipts], 0
            n_features += side.n_columns or 0
        folders = self._named(settled.folders, work / "beside")
        about = [{"source": Path(side.name).name, "n_features": side.n_columns} for side in self._sides]
        beside = " and ".join(f"{one['n_features']:,} features of {one['source']}" for one in about)
        return replace(
            settled,
            x=pieces or settled.x,
            x_base=base,
            n_features=n_features,
            said=f"{settled.said}, beside {beside}",
            attributes={**settled.attributes, "beside": about},
            folders=folders,
        )

    def _named(self, folders: Mapping[str, Path], target: Path) -> dict[str, Path]:
        """Names and vectorizer of the source, with those of the columns beside, below `target`."""
        extended = dict(folders)
        if names := folders.get("names/features"):
            extended["names/features"] = target / "names" / "features"
            with new_names(extended["names/features"]) as writer:
                for window in Names(names).windows():
                    writer.append(window)
                for window in self._names_beside():
                    writer.append(window)
        if vectorizer := folders.get("vectorizer"):
            extended["vectorizer"] = target / "vectorizer"
            options, idf = open_vectorizer(vectorizer.parent) or ({}, None)
            with new_vectorizer(extended["vectorizer"], options) as weights:
                for start in range(0, idf.size if idf else 0, _NAMES):
                    weights.append(idf.read(start, min(start + _NAMES, idf.size)))  # type: ignore[union-attr]
                for side in self._sides:
                    weights.append(np.ones(side.n_columns or 0))
        return extended

    def _names_beside(self) -> Iterator[list[bytes]]:
        """Names of the columns beside, as in the training set; without one a column is called FILE:NUMBER."""
        if self._like and (known := open_names(self._like.path, "features")):
            for start in range(len(known) - sum(self._like.beside), len(known), _NAMES):
                yield known.read_bytes(start, min(start + _NAMES, len(known)))
            return
        for side in self._sides:
            file, n = Path(side.name).name, side.n_columns or 0
            for start in range(0, n, _NAMES):
                yield [f"{file}:{i}".encode() for i in range(start, min(start + _NAMES, n))]


@dataclass(frozen=True)
class Join:
    """A job: pieces of X and the rows from `first` on of a matrix, as one piece in `folder`.

    n_before: columns of the pieces, whose ids begin at `base`; scale: rows of the matrix, and those of the pieces where
    `both`, are scaled to length one.
    """

    key: str
    pieces: list[dict[str, Any]]
    matrix: Side
    size: BlockSize
    first: int
    base: int
    n_before: int
    scale: bool
    both: bool
    folder: str

    @property
    def n_rows(self) -> int:
        """Of the pieces."""
        return sum(int(piece["n_rows"]) for piece in self.pieces)

    def run(self) -> Receipt:
        """Join; the receipt has the piece."""
        rules, row = _rules(self.matrix), self.first
        dtype = index_dtype(self.n_before + (self.matrix.n_columns or 0))
        own = PieceRows(*map(Piece.of, self.pieces))
        with new_piece(Path(self.folder), valued=True) as writer:
            for raw in self.matrix.blocks(row, row + self.n_rows, self.size, {}):
                beside = rules.rows(raw, row, {})
                if self.scale:
                    _scale(beside)
                at, n = 0, len(raw[0]) - 1
                for lengths, indices, data in own.rows(n):
                    mine = np.concatenate([[0], np.cumsum(lengths)]), indices - indices.dtype.type(self.base), data
                    if self.scale and self.both:
                        _scale(mine)
                    writer.append(*_joined(mine, _cut(beside, at, at + len(lengths)), self.n_before, dtype))
                    at += len(lengths)
                row += n
            own.end()
        return {"piece": writer.piece().receipt()}


def _scale(rows: Rows) -> None:
    from xmc_stream.kernels.csr import scale_rows_l2

    if rows[2] is not None:
        scale_rows_l2(rows[0], rows[2])


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    """Rows [start, stop) of some."""
    indptr, indices, data = rows
    a, b = int(indptr[start]), int(indptr[stop])
    return indptr[start : stop + 1] - a, indices[a:b], None if data is None else data[a:b]


def _joined(a: Rows, b: Rows, n_before: int, dtype: Any) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """Each row of `a` followed by that of `b`, whose ids are raised."""
    indptr = a[0] + b[0]
    indices, data = np.empty(int(indptr[-1]), dtype), np.empty(int(indptr[-1]), np.float32)
    for rows, before, raised in ((a, b[0][:-1], 0), (b, a[0][1:], n_before)):
        places = np.repeat(before, np.diff(rows[0]))
        places += np.arange(len(places))
        indices[places] = rows[1].astype(dtype) + dtype.type(raised)
        data[places] = rows[2]
    return indptr, indices, data


def _opened(path: Path) -> Side:
    """A matrix in a file, by its content."""
    side = open_matrix(path)
    if side is None:
        raise InputError(f"{path} is not a matrix to stand beside others: it must be a .npy or .npz, dense or CSR")
    if side.n_columns is None:
        raise InputError(f"{side.name} does not say how many columns it has: save shape.npy with it")
    return side


def _rules(side: Side) -> Rules:
    return Rules("X", side.name, side.n_columns, side.n_columns)


def _other_rows(side: Side, n_rows: int) -> InputError:
    return InputError(
        f"{side.name} has {side.n_rows} rows and the input {n_rows}: a row stands beside each of it, in order"
    )


def store_names(path: Path, target: Path, n_names: int | None, what: str) -> int:
    """Write the names in a text as a group at `target`; returns how many.

    what: "labels" or "features"; n_names: how many there must be, None for any number. Raises InputError naming file and
    line.
    """
    n = write_names(target, (_name(line, f"{path}:{i}") for i, line in numbered_lines(path, _LONGEST)))
    if n_names is not None and n != n_names:
        raise InputError(f"{path}:{n}: there are {n:,} names for {n_names:,} {what}: one a line")
    return n


def _name(line: bytes, where: str) -> str:
    try:
        text = line.decode().rstrip("\r")
        record = json.loads(text) if text.startswith('{"') else None
        if isinstance(record, dict):
            text = next(record[field] for field in _FIELDS if isinstance(record.get(field), str))
        text.encode()
    except StopIteration:
        raise InputError(f"{where}: there is no name in the object: give one of {', '.join(_FIELDS)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: the name is not readable ({error}): write it in UTF-8, one a line") from None
    return text


class NamedSource(_Extended):
    """A source whose features or labels have names in files of their own.

    files: by "features" and "labels". Where the source does not say how many there are, the names do.
    """

    def __init__(self, source: Source, files: Mapping[str, Path]) -> None:
        named = [[what, *file_identity(path)] for what, path in files.items()]
        super().__init__(source, list(files.values()), names=named)
        self._files = files

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """What the source settles, and the names."""
        settled = yield from self._source.settle(work, parts)
        for what, path in self._files.items():
            if f"names/{what}" in settled.folders:
                raise InputError(f"{path}: the {what} have names in the input itself: leave this file out")
            size = f"n_{what}"
            target = work / "names" / what
            said = getattr(self._source, size)
            n, least = store_names(path, target, said, what), getattr(settled, size)
            if n < least:
                raise InputError(f"{path}:{n}: there are {n:,} names for {least:,} {what}: one a line")
            folders = {**settled.folders, f"names/{what}": target}
            settled = replace(settled, folders=folders, **{size: n})  # type: ignore[arg-type]
        return settled
