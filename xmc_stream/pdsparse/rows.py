"""What jobs of PD-Sparse work on: the rows of a dataset, gathered, and the tables, which stay in memory from job to job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.heldout import HELD_OUT, held_out
from xmc_stream.kernels.order import GROUP
from xmc_stream.pdsparse.kernels.tables import purge
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.plan import STRETCH, PassPlan
from xmc_stream.pdsparse.solver import Stepper, label_numbers, strip_bits
from xmc_stream.pdsparse.state import read_tables
from xmc_stream.runtime.plan import Portion, fitting_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer

Which = Literal["learned", "held out", "all"]


class Held:
    """The tables that a run's last job left in this process, and the folder where they are too; elsewhere there are none."""

    def __init__(self) -> None:
        self.keep(None, "")

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()

    def keep(self, stepper: Stepper | None, folder: str) -> None:
        """Leave tables for the next job; None lets go of those that are here."""
        self.stepper, self.folder = stepper, folder


@dataclass(frozen=True)
class Data:
    """What is learned from, and how; the same for all jobs of a run. work: folder of the run."""

    path: str
    work: str
    parameters: PDSparseParameters
    seed: int
    plan: PassPlan
    held: Held = field(default_factory=Held, compare=False)


class Rows:
    """Rows of a dataset, for one job, and their labels by number.

    which: to visit: those to learn from, those held out, or all; of all none is held out.
    """

    def __init__(self, data: Data, which: Which = "learned") -> None:
        self.dataset = Dataset(data.path)
        self.n_samples, self.n_labels = self.dataset.n_samples, self.dataset.n_labels
        self.X, self.Y = self.dataset.X_rows(), self.dataset.Y_rows()
        self.bits = strip_bits(self.n_samples, self.X.nnz)
        self.numbers = label_numbers(self.n_labels, data.seed).astype(np.int32)
        share = min(data.parameters.held_out, HELD_OUT / max(self.n_samples, 1))
        self._seed, self._share = data.seed, 0.0 if which == "all" else share
        self.n_held_out = round(self._share * self.n_samples)  # about
        self.step = GROUP << self.bits  # rows that `blocks` goes over, a multiple of which it begins at
        self._nnz, self.last = data.plan.nnz, 0
        self.buffer = Buffer(self.X, data.plan.nnz)  # for a piece of `stretches`

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return self.X.bytes_read + self.Y.bytes_read

    def kept_out(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are held out."""
        out = np.zeros(len(rows), np.bool_)
        if self._share:
            held_out(rows, self._seed, self._share, out)
        return out

    def labels(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Labels of rows (ascending), by number: indptr, numbers."""
        block = self.Y.gather(rows)
        return block.indptr, self.numbers[block.indices]

    def stretches(self, counts: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """An order of rows with so many entries each, in pieces that fit in memory."""
        for start in range(0, len(order), STRETCH):
            some = order[start : start + STRETCH]
            for first, last in fitting_ranges(counts[some], self._nnz):
                yield some[first:last]

    def blocks_of_job(self, first: int, held_out: bool) -> Iterator[tuple[Block, NDArray[np.int64], NDArray[np.int32]]]:
        """As `blocks`, from row `first` on, as many as a job should take; then `last` tells before which row it ended."""
        portion, self.last = Portion(), first
        while self.last < self.n_samples:
            yield from self.blocks(self.last, held_out)
            self.last = min(self.last + self.step, self.n_samples)
            if portion.done():
                break

    def blocks(
        self, first: int, held_out: bool, some: Callable[[int], NDArray[np.int64]] | None = None
    ) -> Iterator[tuple[Block, NDArray[np.int64], NDArray[np.int32]]]:
        """Rows with labels, but not all, that are held out, or the others, in order: X, their labels as indptr, numbers.

        first: `step` rows are gone over from it on. some: which of the next n of them are wanted, if not all.
        """
        rows = np.arange(first, min(first + self.step, self.n_samples))
        n_labels = self.Y.lengths(rows)[1]
        rows = rows[(self.kept_out(rows) == held_out) & (n_labels > 0) & (n_labels < self.n_labels)]
        rows = rows if some is None else rows[some(len(rows))]
        if not len(rows):
            return
        spans = self.X.lengths(rows)
        for piece in self.stretches(spans[1], np.arange(len(rows))):
            mine = spans[0][piece], spans[1][piece]
            yield self.X.gather(rows[piece], self.buffer, mine), *self.labels(rows[piece])


@dataclass(frozen=True)
class TablesOf:
    """Tables on disk, and how steps with them are taken. folder: "" for v = 0; fixed: whether the support stays as it is."""

    folder: str
    lam: float
    rate: int
    fixed: bool = False

    def open(self, data: Data, rows: Rows, begins: float | None = None) -> Stepper:
        """Those that are held, if they are these; else they are read. begins: without entries |v| up to here.

        They are held no more until a job gives them back, as who changes them may fail.
        """
        held, folder = data.held.stepper, data.held.folder
        data.held.keep(None, "")
        most_bytes, d = data.plan.most_bytes(self.fixed), rows.dataset.n_features
        if held and (folder, held.tables.lam, held.tables.most_bytes) == (self.folder, self.lam, most_bytes):
            if begins is not None:
                purge(begins, held.tables)
            return held
        del held
        stepper = Stepper(d, rows.n_labels, data.parameters, self.lam, self.rate, most_bytes)
        if self.folder:
            read_tables(Path(self.folder), stepper.tables, d, begins)
        return stepper
