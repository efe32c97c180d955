"""Parquet with columns of text and labels, as `jsonl` has fields; read by pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.convert.options import ConvertOptions, Like, TextOptions
from xmc_stream.convert.tfidf.block import Record
from xmc_stream.convert.tfidf.records import Input, Records, RecordsSource
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.system.memory import format_size

_BATCH = 256  # rows at hand
_PAGES = 2**21  # bytes that a column's reader keeps, and more


@dataclass(frozen=True)
class RowGroup(Records):
    """The rows of a group of a file, of which `first` is the number of its first one, from 1.

    path: absolute; name: what messages call the file, the path as it was given.
    """

    path: str
    name: str
    group: int
    first: int

    def read(self, longest: int, notes: dict[str, Any], text: TextOptions) -> Iterator[tuple[int, Record]]:
        """Number in the group, from 1, and row."""
        with _opened(self.path, self.name) as file:
            number = 0
            size = sum(_sizes(file, self.group, text.columns, compressed=True))
            n_rows = max(file.metadata.row_group(self.group).num_rows, 1)
            for batch in _reading(self.name, file.iter_batches(_BATCH, [self.group], list(text.columns))):
                if batch.nbytes > longest * 4:
                    raise MemoryLimitError(
                        f"{self.where(number + 1)}: {batch.num_rows} rows from here on take {format_size(batch.nbytes)}, "
                        f"and the limit leaves {format_size(longest * 4)}: raise " + flags.MEMORY_LIMIT
                    )
                for i in range(batch.num_rows):
                    number += 1
                    yield number, _row(batch, i)
                notes["bytes_read"] = size * number // n_rows

    def where(self, number: int) -> str:
        """File and row."""
        return f"{self.name}:{self.first + number - 1}"


def _row(batch: Any, i: int) -> Record:
    """A row by the names of the columns, or what is wrong with it."""
    try:
        return {name: column[i].as_py() for name, column in zip(batch.schema.names, batch, strict=True)}
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of a text is not UTF-8: write the file anew"


def _reading(name: str, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with pyarrow's errors in words."""
    import pyarrow

    while True:
        try:
            batch = next(batches, None)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{name} is damaged or not readable ({reason}): write or fetch it again") from None
        if batch is None:
            return
        yield batch


def _opened(path: str | Path, name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{name} is Parquet, which pyarrow reads: pip install 'xmc-stream[parquet]'") from None
    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name} is not a whole Parquet file ({reason}): write or fetch it again") from None


def _sizes(file: Any, group: int, columns: Sequence[str], compressed: bool) -> list[int]:
    """Bytes of each of the columns in a group."""
    found = file.metadata.row_group(group)
    chunks = [found.column(i) for i in range(found.num_columns)]
    return [
        chunk.total_compressed_size if compressed else chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in columns
    ]


def open_source(paths: Sequence[Path], options: ConvertOptions, like: Like | None) -> RecordsSource:
    """Files of Parquet as one set. Raises InputError where their columns show no text and labels, or pyarrow lacks."""
    groups: list[tuple[Path, int, int]] = []
    first: dict[str, Any] = {}
    overhead = 0
    for path in paths:
        with _opened(path, str(path)) as file:
            names = tuple(file.schema_arrow.names)
            number = 1
            for group in range(file.num_row_groups):
                groups.append((path, group, number))
                number += file.metadata.row_group(group).num_rows
                overhead = max(
                    overhead, sum(min(size, _PAGES) for size in _sizes(file, group, names, compressed=False))
                )
            if not first and number > 1:  # rows that are not UTF-8 are told of later, or left out
                heads = (_row(head, 0) for head in _reading(str(path), file.iter_batches(1)) if head.num_rows)
                first = next((head for head in heads if isinstance(head, dict)), {})
    if not first and groups:
        raise InputError(f"{paths[0]}:1: none of its rows is text in UTF-8: write the file anew")
    if not first:
        raise InputError(f"{paths[0]} has no rows: give a file with columns of text and labels")
    records = [RowGroup(str(path.absolute()), str(path), group, number) for path, group, number in groups]
    return RecordsSource(Input("Parquet", paths, records, first, None, overhead=2 * overhead), options, like)
