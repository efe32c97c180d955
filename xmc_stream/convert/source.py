"""What a format gives to the conversion: parts that are read apart from each other, and what all of them say together.

A conversion reads the parts of its source, in any order and beside each other, into pieces on disk; settles what only
the whole tells (sizes, the base of the ids, names); and puts the pieces together into a dataset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from xmc_stream.convert.lines.files import file_identity, forget
from xmc_stream.convert.pieces import Piece, Rows
from xmc_stream.runtime.job import Phase, Receipt


class Part(Protocol):
    """Rows that are read apart from all others: picklable, small, and may be read again.

    sides: the matrices its rows are of, in the order of `blocks`: ("X", "Y"), ("X",) or ("Y",). Its paths are absolute,
    as a worker has a folder of its own; messages call files as they were given.
    """

    @property
    def sides(self) -> tuple[str, ...]: ...

    def blocks(self, notes: dict[str, Any]) -> Iterator[tuple[Rows, ...]]:
        """The rows, block by block, one matrix a side; a block is gone when the next one comes.

        notes: gets what `Source.settle` must know of the part, as small JSON values; complete when the iterator ends.
        It comes with "folder", the path of a folder that the part may make for files of its own beside its pieces.
        Raises InputError naming file and line (of the whole file), MemoryLimitError.
        """


@dataclass(frozen=True)
class PartRead:
    """A part that was read: its pieces by side, and its notes."""

    pieces: dict[str, Piece]
    notes: dict[str, Any]


@dataclass(frozen=True)
class Settled:
    """What the whole of a source tells when all parts are read.

    x, y: the pieces of X and Y in the order of their rows; base: what is subtracted from their ids, features' and labels';
    attributes: for the dataset, JSON values; said: a line for people, as "XMLRepo text, 15,539 rows, ids from 0";
    folders: finished zarr groups that the dataset keeps, by their names in it, as {"names/labels": path}, moved there.
    """

    n_features: int
    n_labels: int
    x: list[Piece]
    y: list[Piece]
    said: str
    x_base: int = 0
    y_base: int = 0
    normalize: str | None = None  # of the rows where the user names none: "none" or "l2"
    attributes: dict[str, Any] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)


class Source(ABC):
    """A recognised, opened input, of which no rows are read yet.

    files: all that are read; attributes: what is known of it before, for the dataset; identity: what tells this input
    from another when a killed conversion goes on (names, sizes, times, options); alone: its parts must be read in this
    process, one after another (standard input, matrices in memory); n_samples, n_features, n_labels, x_entries,
    y_entries: at most, None where only reading tells; overhead: bytes it keeps till the end beside the buffers of its
    parts, by name; bytes_in: of the input, 0 where only reading tells.
    """

    n_samples: int | None = None
    n_features: int | None = None
    n_labels: int | None = None
    x_entries: int | None = None
    y_entries: int | None = None

    def __init__(self, files: Sequence[Path], alone: bool = False) -> None:
        """Raises InputError where there is no such file."""
        self.files = list(files)
        self.alone = alone
        stamps = [file_identity(file) for file in files]
        self.identity: dict[str, Any] = {"files": stamps}
        self.bytes_in: int = 0 if alone else sum(size for _, size, _ in stamps)
        self.attributes: dict[str, Any] = {}
        self.overhead: dict[str, int] = {}

    def load_kernels(self) -> None:  # noqa: B027 (some call none)
        """Compile or load what the parts call, so that the memory of it is there before the plan."""

    @abstractmethod
    def fit(self, room: int) -> int:
        """Choose the size of a part's buffers for `room` bytes; returns what one part takes at most, more if it must."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """The parts, in the order of their rows; after `fit`."""

    @abstractmethod
    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """What all parts tell together; may yield further phases of jobs, which write under `work`.

        Raises InputError where parts contradict the header or each other.
        """

    def close(self) -> None:
        """Close pipes that were not read."""
        forget(self.files)


def names_of(paths: Iterable[str | Path]) -> str | list[str]:
    """The names of files for an attribute of the dataset: of one, or of several."""
    names = [Path(path).name for path in paths]
    return names if len(names) > 1 else names[0]


def total(counts: Iterable[int | None]) -> int | None:
    """The sum, None where one is unknown."""
    known = list(counts)
    return None if None in known else sum(known)  # type: ignore[arg-type]
