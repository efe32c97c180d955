"""How much work a stop may lose: what a run keeps on the way, and how often.

What lies in scratch is lost with a session. Where the work since something was last kept is more than `WORK`, by an estimate
that the data and the parameters alone decide, what is needed to go on is put into a pack of the state. What a job within
itself has come to ends in ".begun", and is in no ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.factors.factors import LINES, Factor, Panels
from xmc_stream.factors.products import Array
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.packing import PackedArrayWriter, new_pack, pack_damage

# multiply-adds of a sparse product: some seven seconds of a processor, eleven where X has very many features
WORK = 1 << 36
_ENTRY = 32  # columns that take as long as an entry itself
_PAIR, _GATHERED = 150, 7  # columns that take as long as the loss of a pair; as a column of a given pair


def sparse_work(nnz: int, columns: int) -> int:
    """Of a sparse matrix times a dense one of so many columns."""
    return nnz * (columns + _ENTRY)


def pair_work(pairs: int, p: LEMLParameters) -> int:
    """Of a product over pairs of rows and labels, whose weights are made anew. Factors of given pairs are gathered."""
    return pairs * (_PAIR + (_GATHERED if p.observed == "given" else 1) * p.rank)


def most_products(p: LEMLParameters) -> int:
    """With Hessians, of a half-step over pairs, and as much as these take beside them."""
    return (1 if p.loss == "squared" else p.newton) * (p.cg + 2)


def h_work(pairs: int, p: LEMLParameters) -> int:
    """Of an H step over pairs."""
    if p.loss == "squared":
        return pairs * p.rank * p.rank
    return most_products(p) * pair_work(pairs, p)


def pieces_of(work: int) -> int:
    """How many pieces some work takes, of which a stop may lose one."""
    return max(1, -(-work // WORK))


def row_pieces(n: int, work: int, multiple: int) -> tuple[tuple[int, int], ...]:
    """Ranges of rows that each are no more work than a stop may lose. work: of all; multiple: where they may begin."""
    blocks = -(-n // multiple)
    return tuple((a * multiple, min(b * multiple, n)) for a, b in even_ranges(blocks, pieces_of(work)))


def steps_within(work: int) -> int:
    """Steps from one that is kept to the next. work: of a step."""
    return max(1, WORK // max(work, 1))


@dataclass(frozen=True)
class KeepJob:
    """Keep vectors of a W step, by name. receipt: what else is needed to go on from them."""

    name: str
    vectors: dict[str, Panels]
    receipt: Receipt
    out: str

    @property
    def key(self) -> str:
        """Of what."""
        return self.name

    def run(self) -> Receipt:
        """Copy them into a pack, some lines at a time."""
        with new_pack(Path(self.out)) as pack:
            for name, panels in self.vectors.items():
                writer = PackedArrayWriter(pack, name, np.float32)
                for first, last in _lines(panels.n):
                    writer.append(panels.read(first, last).ravel())
                writer.close()
        return self.receipt


@dataclass(frozen=True)
class RestoreJob:
    """Put lines that were kept where jobs read them, by name. kept: the pack. rows: which lines of the panels."""

    name: str
    kept: str
    vectors: dict[str, tuple[Panels, tuple[int, int]]]

    @property
    def key(self) -> str:
        """Of what."""
        return f"{self.name}/again"

    def run(self) -> Receipt:
        """Copy them, whatever columns were in a job when they were kept."""
        for name, (panels, rows) in self.vectors.items():
            begin, end = panels.col_ranges[0][0], panels.col_ranges[-1][1]
            source = Factor(f"{self.kept}/{name}", end - begin, rows[1] - rows[0])
            for first, last in _lines(source.n):
                lines = source.read(first, last)
                for low, high in panels.col_ranges:
                    panels.write((low, high), rows[0] + first, lines[:, low - begin : high - begin])
        return {}


def write_sum(path: Path, values: NDArray[np.float64], durable: bool) -> None:
    """A matrix into a pack. durable: as of `new_pack`."""
    with new_pack(path, durable) as pack:
        pack.write("sum", values.ravel())


def read_sum(path: str, lines: int) -> NDArray[np.float64]:
    """What was written, of so many lines."""
    array = open_array(Path(path) / "sum")
    return np.asarray(array.read(0, array.size).reshape(lines, -1))


def write_begun(path: Path, arrays: Mapping[str, Array]) -> None:
    """What a job has come to, or a loop, into a pack."""
    with new_pack(path) as pack:
        for name, values in arrays.items():
            values = values.astype(np.uint8) if values.dtype == np.bool_ else values
            writer = PackedArrayWriter(pack, name, values.dtype)
            for first, last in _lines(len(values)):
                writer.append(values[first:last].ravel())
            writer.close()


def begun_at(path: Path) -> bool:
    """Whether something was written, and is whole."""
    return path.exists() and not pack_damage(path)


def read_begun(path: Path, name: str) -> Array:
    """One of the arrays that were written, in one line."""
    array = open_array(path / name)
    return array.read(0, array.size)


def number_begun(path: Path, name: str) -> int:
    """One of the numbers that were written, for those who watch; 0 where nothing was."""
    try:
        return int(open_array(path / name).read(0, 1)[0]) if path.exists() else 0
    except StoreError:
        return 0


class Resumable(Protocol):
    """A job that goes on from what it has come to."""

    def share(self) -> float:
        """Of it, that is done, from 0 to 1."""
        ...


def share_begun(jobs: Sequence[Resumable]) -> float:
    """Of the jobs of a phase, that an earlier session did within them."""
    return sum(job.share() for job in jobs) / max(len(jobs), 1)


def within(span: tuple[float, float] | None, begin: float, end: float) -> tuple[float, float] | None:
    """A part of the span of a phase."""
    return None if span is None else (span[0] + begin * (span[1] - span[0]), span[0] + end * (span[1] - span[0]))


def _lines(n: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + LINES, n)) for first in range(0, n, LINES))
