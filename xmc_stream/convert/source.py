"""What a format gives to the conversion: parts that are read apart from each other, and what all of them say together.

A conversion reads the parts of its source, in any order and beside each other, into pieces on disk; settles what only
the whole tells (sizes, the base of the ids, names); and puts the pieces together into a dataset.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.pieces import Piece
from xmc_stream.jobs.job import Phase, Receipt

if TYPE_CHECKING:
    from xmc_stream.convert.tfidf.vectorizer import TextOptions

# Rows of X or Y: indptr from 0, indices sorted and unique in a row, values (None of Y, where each is one).
Rows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32] | None]


@dataclass(frozen=True)
class Like:
    """What a test set takes over from its training set, or from a model.

    name: as the user wrote it, for messages; path: of the dataset or model; base, label_base: of the
    ids of features and of labels in its text, 0 or 1.
    """

    name: str
    path: Path
    n_features: int
    n_labels: int
    normalize: str
    base: int = 0
    label_base: int = 0


@dataclass(frozen=True)
class Options:
    """How an input is to be read; what a format has no use for, it refuses where it would change the result.

    labels: files of Y where the sources are of X alone, in the same order; base: of the ids, 0 or 1, None to decide over
    the whole input; skip: leave out bad rows, counted, instead of stopping; sum_duplicates: add up the values of a feature
    that stands twice in a row (a label twice counts once) instead of an error; drop_unseen: leave out features and
    labels that `like` does not have, counted, instead of an error; n_features, n_labels: sizes where the input does not
    say, at least what occurs; layer: of AnnData, instead of X; label_key: the column of its obs or matrix of its obsm that
    holds the labels, as "KEY", "obs/KEY" or "obsm/KEY"; text: how raw text becomes features; unlabelled: the rows get no
    labels, there need be none, and any that stand in the source itself are passed over.
    """

    labels: tuple[Path, ...] = ()
    base: int | None = None
    skip: bool = False
    sum_duplicates: bool = False
    drop_unseen: bool = False
    n_features: int | None = None
    n_labels: int | None = None
    layer: str | None = None
    label_key: str | None = None
    text: TextOptions | None = None
    unlabelled: bool = False


class Part(Protocol):
    """Rows that are read apart from all others: picklable, small, and may be read again.

    sides: the matrices its rows are of, in the order of `blocks`: ("X", "Y"), ("X",) or ("Y",).
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


class Source(Protocol):
    """A recognised, opened input, of which no rows are read yet.

    attributes: what is known of it before, for the dataset; identity: what tells this input from another when a killed
    conversion goes on (names, sizes, times, options); alone: its parts must be read in this process, one after another
    (standard input, matrices in memory); n_samples, n_features, n_labels, x_entries, y_entries: at most, None where
    only reading tells; held: bytes it keeps till the end, by name; bytes_in: of the input.
    """

    attributes: dict[str, Any]
    identity: dict[str, Any]
    alone: bool
    n_samples: int | None
    n_features: int | None
    n_labels: int | None
    x_entries: int | None
    y_entries: int | None
    held: dict[str, int]

    @property
    def bytes_in(self) -> int: ...

    def load_kernels(self) -> None:
        """Compile or load what the parts call, so that the memory of it is there before the plan."""

    def fit(self, room: int) -> int:
        """Choose the size of a part's buffers for `room` bytes; returns what one part takes at most, more if it must."""

    def parts(self) -> list[Part]:
        """The parts, in the order of their rows; after `fit`."""

    def settle(self, work: Path, parts: list[PartRead]) -> Generator[Phase, list[Receipt], Settled]:
        """What all parts tell together; may yield further phases of jobs, which write under `work`.

        Raises InputError where parts contradict the header or each other.
        """

    def close(self) -> None:
        """Close what is open."""
