"""Features of two inputs side by side, as text and embeddings: the columns of a matrix are appended to those of a source.

Where rows are scaled to length one, those of the source and of the matrix are so first, each by itself, and then the
whole: text and vector weigh the same. The matrix is read when the source has settled, by the rows of its pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.formats import npz, numpy_arrays
from xmc_stream.convert.lines.files import file_identity
from xmc_stream.convert.matrices.arrays import check_file, reading
from xmc_stream.convert.matrices.rules import Rules
from xmc_stream.convert.matrices.sides import BlockSize, Reader, Side, block_bytes, fitted
from xmc_stream.convert.options import Like
from xmc_stream.convert.pieces import WINDOW, Piece, PieceRows, PieceWriter, work_folder
from xmc_stream.convert.rows import Rows
from xmc_stream.convert.source import PartRead, Settled, Source
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.names import WRITER_BYTES, Names, new_names, new_vectorizer, open_names, open_vectorizer
from xmc_stream.system.files import regular

_NAMES = 2**13  # names and weights written at a time
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


class BesideSource:
    """A source whose X has the columns of matrices behind its own: all else is that source's.

    like: whose matrices had as many columns; normalize: as asked for, None for what the source does. Raises InputError
    for files that are no matrices, of other sizes, or an option that would leave out rows.
    """

    def __init__(
        self, source: Source, files: Sequence[Path], like: Like | None, normalize: str | None, skip: bool
    ) -> None:
        self._source = source
        self._like = like
        self._normalize = normalize
        if skip:
            raise InputError(
                f"{files[0]}: bad rows cannot be left out (" + flags.ON_ERROR_SKIP + "): they have features here too"
            )
        self._sides = [_opened(path) for path in files]
        self._columns = [_columns(side) for side in self._sides]
        for i, side in enumerate(self._sides):
            if source.n_samples is not None and side.n_rows != source.n_samples:
                raise _other_rows(side, source.n_samples)
            if like and self._columns[i] != like.beside[i]:
                raise InputError(
                    f"{side.name} has {self._columns[i]} columns and what stood there in {like.name} {like.beside[i]}: give "
                    "the matrix that belongs to it"
                )
        files = [file for side in self._sides for file in side.files]
        self.files = [*source.files, *files]
        stamps = [file_identity(file) for file in files]
        self.bytes_beside = sum(int(size) for _, size, _ in stamps)
        self.identity = {**source.identity, "beside": [str(normalize), *stamps]}
        own = source.n_features
        self.n_features = None if own is None else own + sum(self._columns)
        self._sizes = [BlockSize() for _ in self._sides]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def bytes_in(self) -> int:
        """Of the source and the matrices."""
        return self._source.bytes_in + self.bytes_beside

    @property
    def x_entries(self) -> int | None:
        """At most. It is set to what is foreseen of the source."""
        entries = [self._source.x_entries, *(side.entries for side in self._sides)]
        known = [n for n in entries if n is not None]
        return sum(known) if len(known) == len(entries) else None

    @x_entries.setter
    def x_entries(self, foreseen: int | None) -> None:
        self._source.x_entries = foreseen

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
        for i, (side, columns) in enumerate(zip(self._sides, self._columns, strict=True)):
            if side.n_rows != n_rows:
                raise _other_rows(side, n_rows)
            apart = [[piece] for piece in pieces] if getattr(side, "divisible", False) else [pieces]
            jobs = []
            first = 0
            for number, some in enumerate(apart if pieces else []):
                job = Join(
                    f"beside/{i}/{number:05d}", [piece.receipt() for piece in some], side.reader(), _rules(side),
                    self._sizes[i], first, base, n_features, columns, scale, not i, str(work / f"beside-{i}-{number:05d}"),
                )  # fmt: skip
                jobs.append(job)
                first += job.n_rows
            receipts = yield Phase("join features", jobs, twice=True)
            side.settle([receipt["notes"] for receipt in receipts])
            pieces, base, n_features = [Piece.of(receipt["piece"]) for receipt in receipts], 0, n_features + columns
        folders = dict(settled.folders)
        if "names/features" in folders or "vectorizer" in folders:
            job_of_names = ExtendNames(
                str(folders.get("names/features", "")), str(folders.get("vectorizer", "")), str(work / "beside"),
                tuple(Path(side.name).name for side in self._sides), tuple(self._columns), str(self._names_of_like()),
            )  # fmt: skip
            yield Phase("names of features", [job_of_names], twice=True)
            for name in ("names/features", "vectorizer"):
                if name in folders:
                    folders[name] = work / "beside" / name
        about = [
            {"source": Path(side.name).name, "n_features": columns}
            for side, columns in zip(self._sides, self._columns, strict=True)
        ]
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

    def _names_of_like(self) -> Path | str:
        """Where the names of the training set's features are, if they have any."""
        names = None if self._like is None else open_names(self._like.path, "features")
        return "" if names is None else names.path


@dataclass(frozen=True)
class Join:
    """A job: pieces of X and the rows from `first` on of a matrix, as one piece in `folder`.

    n_before: columns of the pieces, whose ids begin at `base`; columns: of the matrix; scale: rows of the matrix, and
    those of the pieces where `both`, are scaled to length one.
    """

    key: str
    pieces: list[dict[str, Any]]
    reader: Reader
    rules: Rules
    size: BlockSize
    first: int
    base: int
    n_before: int
    columns: int
    scale: bool
    both: bool
    folder: str

    @property
    def n_rows(self) -> int:
        """Of the pieces."""
        return sum(int(piece["n_rows"]) for piece in self.pieces)

    def run(self) -> Receipt:
        """Join; the receipt has the piece, and notes for `Side.settle`."""
        notes: dict[str, Any] = {}
        dtype = index_dtype(self.n_before + self.columns)
        with PieceWriter(Path(self.folder), valued=True) as writer:
            own = self._own()
            row, last = self.first, self.first + self.n_rows
            rest: Rows | None = None  # of the source, behind the rows that were joined
            for raw in self.reader.blocks(row, last, self.size, notes):
                beside = self.rules.rows(raw, row, notes)
                row += len(raw[0]) - 1
                if self.scale:
                    _scale(beside)
                at, n = 0, len(beside[0]) - 1
                while at < n:
                    rest = rest or next(own)
                    m = min(n - at, len(rest[0]) - 1)
                    writer.append(*_joined(_cut(rest, 0, m), _cut(beside, at, at + m), self.n_before, dtype))
                    rest = _cut(rest, m, len(rest[0]) - 1) if m < len(rest[0]) - 1 else None
                    at += m
            for _ in own:  # to the ends of the files, where their checksums are compared
                pass
        return {"piece": writer.piece().receipt(), "notes": notes}

    def _own(self) -> Iterator[Rows]:
        """The rows of the pieces, some at a time."""
        for receipt in self.pieces:
            piece = Piece.of(receipt)
            blocks = PieceRows(piece)
            for lengths, indices, data in blocks.rows(piece.n_rows):
                indptr = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(lengths, out=indptr[1:])
                rows = indptr, indices - indices.dtype.type(self.base), data
                if self.scale and self.both:
                    _scale(rows)
                yield rows
            blocks.end()


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


@dataclass(frozen=True)
class ExtendNames:
    """A job: names and vectorizer of the source, with those of the columns beside, below `folder`.

    names, vectorizer: of the source, "" for none; files, columns: of the matrices; like: the names of a training set,
    whose last ones these are, "" for none.
    """

    names: str
    vectorizer: str
    folder: str
    files: tuple[str, ...]
    columns: tuple[int, ...]
    like: str

    @property
    def key(self) -> str:
        """Names it in its run."""
        return "beside/names"

    def run(self) -> Receipt:
        """Copy and append; a column is called FILE:NUMBER, and has the weight one."""
        with work_folder(Path(self.folder)) as work:
            if self.names:
                with new_names(work / "names" / "features") as writer:
                    for window in Names(Path(self.names)).windows():
                        writer.append(window)
                    for names in self._beside():
                        writer.append(names)
            if self.vectorizer:
                options, idf = open_vectorizer(Path(self.vectorizer).parent) or ({}, None)
                with new_vectorizer(work / "vectorizer", options) as weights:
                    for start in range(0, idf.size if idf else 0, _NAMES):
                        weights.append(idf.read(start, min(start + _NAMES, idf.size)))  # type: ignore[union-attr]
                    for n in self.columns:
                        weights.append(np.ones(n))
        return {}

    def _beside(self) -> Iterator[list[bytes]]:
        """Names of the columns beside."""
        if self.like:
            known = Names(Path(self.like))
            for start in range(len(known) - sum(self.columns), len(known), _NAMES):
                yield known.read_bytes(start, min(start + _NAMES, len(known)))
            return
        for file, n in zip(self.files, self.columns, strict=True):
            for start in range(0, n, _NAMES):
                yield [f"{file}:{i}".encode() for i in range(start, min(start + _NAMES, n))]


def _opened(path: Path) -> Side:
    """A matrix in a file, by its content."""
    check_file(path, folders=True)
    with reading(path):
        head = b""
        if not path.is_dir():
            with open(path, "rb", opener=regular) as file:
                head = file.read(16)
    if npz.recognises(path, head):
        return npz.open_side(path)
    if numpy_arrays.recognises(path, head):
        return numpy_arrays.open_side(path)
    raise InputError(f"{path} is not a matrix to stand beside others: it must be a .npy or .npz, dense or CSR")


def _columns(side: Side) -> int:
    if side.n_columns is None:
        raise InputError(f"{side.name} does not say how many columns it has: save shape.npy with it")
    return side.n_columns


def _rules(side: Side) -> Rules:
    return Rules("X", side.name, side.n_columns, side.n_columns)


def _other_rows(side: Side, n_rows: int) -> InputError:
    return InputError(
        f"{side.name} has {side.n_rows} rows and the input {n_rows}: a row stands beside each of it, in order"
    )
