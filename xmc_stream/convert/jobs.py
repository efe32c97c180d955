"""The jobs of a conversion: parts of the input to pieces, and pieces to the arrays of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream.convert.pieces import Piece, PieceWriter, work_folder
from xmc_stream.convert.source import Part, Source
from xmc_stream.runtime.job import Receipt
from xmc_stream.store import new_dataset as assembly
from xmc_stream.store.new_dataset import load_kernels
from xmc_stream.store.places import fsync_folder


@dataclass(frozen=True)
class PartJob:
    """Part `number` of a source to pieces below `folder`."""

    number: int
    part: Part
    folder: str

    @property
    def key(self) -> str:
        return f"read/{self.number:05d}"

    def run(self) -> Receipt:
        """Read the part."""
        own, *folders = (Path(self.folder) / f"{self.number:05d}-{what}" for what in ("own", *self.part.sides))
        with ExitStack() as stack:
            notes: dict[str, Any] = {"folder": str(stack.enter_context(work_folder(own, durable=False)))}
            writers = [
                stack.enter_context(PieceWriter(folder, side == "X"))
                for folder, side in zip(folders, self.part.sides, strict=True)
            ]
            for block in self.part.blocks(notes):
                for writer, rows in zip(writers, block, strict=True):
                    writer.append(*rows)
        pieces = {side: writer.piece().receipt() for side, writer in zip(self.part.sides, writers, strict=True)}
        notes["folder"] = str(own)
        if any(own.iterdir()):  # they are durable, and now have this name
            fsync_folder(own.parent)
        return {"pieces": pieces, "notes": notes, "bytes_read": notes.get("bytes_read", 0)}


@dataclass(frozen=True)
class ArrayJob:
    """An array of X or Y by rows, from its pieces. array: "lengths", "indices" or "data"; bound: D or K."""

    path: str
    side: assembly.Side
    array: str
    pieces: tuple[Piece, ...]
    base: int
    bound: int
    normalize: str

    @property
    def key(self) -> str:
        return f"write/{self.side}/{self.array}"

    def run(self) -> Receipt:
        """Write the array. Raises InputError where an index is out of range."""
        path = Path(self.path)
        if self.array == "lengths":
            return assembly.write_lengths(path, self.side, self._all(Piece.lengths))
        if self.array == "indices":
            return assembly.write_indices(path, self.side, self._all(Piece.indices), self.base, self.bound)
        return assembly.write_values(path, self._all(Piece.values), self.normalize)

    def _all(self, read: Callable[[Piece], Iterator[Any]]) -> Iterator[Any]:
        for piece in self.pieces:
            yield from read(piece)


@dataclass(frozen=True)
class ColumnsJob:
    """X or Y by columns, from rows that are finished, in buffers of max_bytes."""

    path: str
    side: assembly.Side
    max_bytes: int

    @property
    def key(self) -> str:
        return f"write/{self.side}/columns"

    def run(self) -> Receipt:
        """Transpose."""
        assembly.make_columns(Path(self.path), self.side, self.max_bytes)
        return {}


@dataclass(frozen=True)
class LoadJob:
    """Loads what the other jobs call: some 70 MB of compiled code, to be there before the plan counts what is left.

    source: whose own kernels are loaded too; where its parts are read elsewhere, they are not.
    """

    source: Source

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "load"

    def run(self) -> Receipt:
        """Compile or load."""
        load_kernels(*(n or 0 for n in (self.source.n_samples, self.source.n_features, self.source.n_labels)))
        self.source.load_kernels()
        return {}
