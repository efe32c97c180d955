"""Files of features and files of labels that are matrices of any two kinds, as one source.

Labels are known by their content: a .npz, arrays of NumPy, or XMLRepo's text of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.formats import npz, numpy_arrays
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.formats.xmlrepo import label_file
from xmc_stream.convert.lines.compression import compression_of
from xmc_stream.convert.lines.files import Buffers, TextRange
from xmc_stream.convert.lines.parser import Dialect, LinesPart
from xmc_stream.convert.matrices.arrays import DenseSide, beginning, with_names
from xmc_stream.convert.matrices.sides import BlockSize, Raw, Side, no_labels
from xmc_stream.convert.matrices.source import Matrices
from xmc_stream.convert.options import ConvertOptions, Like
from xmc_stream.errors import InputError

_TEXT_ROOM = 2**25  # bytes that reading a text of labels takes


def open_source(
    open_side: Callable[[Path], Side], paths: Sequence[Path], options: ConvertOptions, like: Like | None
) -> Matrices:
    """Features in files that `open_side` opens, and labels in any files of matrices. Raises InputError."""
    x = [open_side(path) for path in paths]
    return Matrices(x, label_sides(x, paths, options, like), options, like)


def label_sides(x: Sequence[Side], paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> list[Side]:
    """Y of each of the files of features, X. Raises InputError where they lack, or are of no kind known."""
    if options.unlabelled:
        return [no_labels(side) for side in x]
    if not options.label_files and all(
        isinstance(side, DenseSide) and side.kind.startswith("npz") and npz.has_labels(path)
        for side, path in zip(x, paths, strict=True)
    ):
        return with_names([npz.open_side(path, labels=True) for path in paths], like, options.drop_unseen)
    if not options.label_files:
        raise InputError(f"{paths[0]} holds features alone: name the file of its labels too (" + flags.LABELS + ")")
    if len(options.label_files) != len(paths):
        raise InputError(
            f"{len(paths)} files of features and {len(options.label_files)} of labels: name one of labels for each, in order"
        )
    return with_names([_open(path, options) for path in options.label_files], like, options.drop_unseen)


def open_matrix(path: Path, labels: bool = False) -> Side | None:
    """The matrix in a .npz, or in arrays of NumPy, by the content; None where it is neither. Raises InputError."""
    head = beginning(path)
    if FORMATS["npz"].recognises(path, head):
        return npz.open_side(path, labels)
    return numpy_arrays.open_side(path, labels) if FORMATS["npy"].recognises(path, head) else None


def _open(path: Path, options: ConvertOptions) -> Side:
    """The labels in a file, by its content."""
    if side := open_matrix(path, labels=True):
        return side
    head = beginning(path)
    if head[:1].isdigit() or compression_of(head):
        return _text(path, options)
    raise InputError(
        f"{path} is not a file of labels for a matrix: it must be a .npz of scipy.sparse.save_npz or numpy.savez, a folder or "
        "file of a CSR matrix in .npy files, a .npy of class ids or names, or a text with the header 'N K'"
    )


def _text(path: Path, options: ConvertOptions) -> Side:
    file = label_file(path)
    text, dialect = TextRange(path, file.first), Dialect(sum_duplicates=options.sum_duplicates)
    lines = LinesPart(text, Buffers(), ("Y",), (file.sizes[1],), None, dialect)
    buffers, taken = Buffers.fitting(_TEXT_ROOM, lines.parser("").bytes_per_byte + 8, file.size)
    entries = None if file.size is None else file.size // 4 + 1  # "0:1 "
    n_rows, n_columns = file.sizes
    load_bytes, lines = taken + file.decompressor_bytes, replace(lines, buffers=buffers)
    return _TextSide(str(path), "XMLRepo text", (path,), n_rows, n_columns, entries, lines, load_bytes=load_bytes)


@dataclass(frozen=True)
class _TextSide(Side):
    """XMLRepo's text of labels."""

    lines: LinesPart

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
