"""Files of features and files of labels that are matrices of any two kinds, as one source.

Labels are known by their content: a .npz, arrays of NumPy, or XMLRepo's text of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.formats import npz, numpy_arrays
from xmc_stream.convert.formats.string_classes import with_names, write_names
from xmc_stream.convert.formats.xmlrepo import label_file
from xmc_stream.convert.lines.compression import compression_of
from xmc_stream.convert.lines.files import Buffers, TextRange
from xmc_stream.convert.lines.parser import Dialect, LinesPart
from xmc_stream.convert.matrices.arrays import check_file, reading
from xmc_stream.convert.matrices.sides import BlockSize, NoLabels, Raw, Reader, Side
from xmc_stream.convert.matrices.source import Matrices
from xmc_stream.convert.options import ConvertOptions, Like
from xmc_stream.convert.source import PartRead, Settled
from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.system.files import regular

_TEXT_ROOM = 2**25  # bytes that reading a text of labels takes


class NamedMatrices(Matrices):
    """Matrices, of which labels may be texts: they keep their names."""

    def fit(self, room: int) -> int:
        """As of any matrices, or what writing names takes."""
        from xmc_stream.store.names import WRITER_BYTES

        return max(super().fit(room), WRITER_BYTES)

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """Names of labels, and how many rows have none."""
        settled = yield from super().settle(work, parts)
        missing = sum(part.notes.get("missing", 0) for part in parts)
        attributes = {**settled.attributes, **({"rows_without_class": missing} if missing else {})}
        folders = dict(settled.folders)
        if write_names(self._sides["Y"], work / "names-labels"):
            folders["names/labels"] = work / "names-labels"
        return replace(settled, attributes=attributes, folders=folders)


def open_source(
    open_side: Callable[[Path], Side], paths: Sequence[Path], options: ConvertOptions, like: Like | None
) -> NamedMatrices:
    """Features in files that `open_side` opens, and labels in any files of matrices. Raises InputError."""
    x = [open_side(path) for path in paths]
    return NamedMatrices(x, label_sides(x, paths, options, like), options, like)


def label_sides(x: Sequence[Side], paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> list[Side]:
    """Y of each of the files of features, X. Raises InputError where they lack, or are of no kind known."""
    if options.unlabelled:
        return [NoLabels(side.name, side.kind, side.n_rows) for side in x]
    if (
        not options.label_files
        and all(isinstance(side, npz.NpzDense) for side in x)
        and all(map(npz.has_labels, paths))
    ):
        return with_names([npz.open_side(path, labels=True) for path in paths], like, options.drop_unseen)
    if not options.label_files:
        raise InputError(f"{paths[0]} holds features alone: name the file of its labels too (" + flags.LABELS + ")")
    if len(options.label_files) != len(paths):
        raise InputError(
            f"{len(paths)} files of features and {len(options.label_files)} of labels: name one of labels for each, in order"
        )
    return with_names([_open(path, options) for path in options.label_files], like, options.drop_unseen)


def _open(path: Path, options: ConvertOptions) -> Side:
    """The labels in a file, by its content."""
    check_file(path, folders=True)
    with reading(path):
        if path.is_dir():
            head = b""
        else:
            check_file(path)
            with open(path, "rb", opener=regular) as file:
                head = file.read(16)
    if npz.recognises(path, head):
        return npz.open_side(path, labels=True)
    if numpy_arrays.recognises(path, head):
        return numpy_arrays.open_side(path, labels=True)
    if head[:1].isdigit() or compression_of(head):
        return _text(path, options)
    raise InputError(
        f"{path} is not a file of labels for a matrix: it must be a .npz of scipy.sparse.save_npz or numpy.savez, a folder or "
        "file of a CSR matrix in .npy files, a .npy of class ids or names, or a text with the header 'N K'"
    )


def _text(path: Path, options: ConvertOptions) -> Side:
    file = label_file(path)
    lines = LinesPart(
        TextRange(path, file.first),
        Buffers(),
        ("Y",),
        (file.n_columns,),
        None,
        Dialect(sum_duplicates=options.sum_duplicates),
    )
    buffers, taken = Buffers.fitting(_TEXT_ROOM, lines.parser("").bytes_per_byte + 8, file.size)
    lines = LinesPart(lines.text, buffers, lines.sides, lines.bounds, None, lines.dialect)
    entries = None if file.size is None else file.size // 4 + 1  # "0:1 "
    return _TextSide(str(path), path, file.n_rows, file.n_columns, entries, taken + file.decompressor_bytes, lines)


@dataclass(frozen=True)
class _TextSide:
    """XMLRepo's text of labels, and its reader."""

    name: str
    path: Path
    n_rows: int
    n_columns: int
    entries: int | None
    load_bytes: int
    lines: LinesPart
    kind: str = "XMLRepo text"

    @property
    def files(self) -> Sequence[Path]:
        return (self.path,)

    def ranges(self) -> list[tuple[int, int]]:
        return [(0, self.n_rows)]

    def reader(self) -> Reader:
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        pass

    def blocks(self, start: int, stop: int, size: BlockSize, notes: dict[str, Any]) -> Iterator[Raw]:
        """All rows, which must be as many as the header promises. Raises InputError with the line."""
        row, counted = 0, dict[str, Any]()
        for ((indptr, indices, _),) in self.lines.blocks(counted):
            row += len(indptr) - 1
            if row > self.n_rows:
                break
            yield indptr, indices, None
        if row != self.n_rows:
            follow = f"{row} follow" if row < self.n_rows else "more follow"
            raise InputError(
                f"{self.name}:1: the header promises {self.n_rows} rows and {follow}: fetch the file again, or correct it"
            )
        notes["summed"] = notes.get("summed", 0) + counted["summed_duplicates"]
