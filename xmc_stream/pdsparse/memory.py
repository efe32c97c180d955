"""What a job of PD-Sparse holds in memory, and how much it may: rows of a dataset, gathered, and the tables.

Tables stay in memory from job to job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.order import GROUP
from xmc_stream.kernels.permutation import HELD_OUT, held_out
from xmc_stream.models.decisions import LEARNED_BYTES, labels_ranked
from xmc_stream.pdsparse.kernels.tables import most_bytes_of, purge
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.solver import PLACES, Stepper, label_numbers, strip_bits
from xmc_stream.pdsparse.state import ENTRIES, SEGMENT_BYTES, read_tables
from xmc_stream.runtime.plan import MIB, MemoryPlan, Portion, fitting_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer
from xmc_stream.store.model import UNIT

Which = Literal["learned", "held out", "all"]
STRETCH = 2048  # rows that are gathered and visited at a time, at most
_LABEL_BYTES = 3 * 12  # of an active label of a row of a group: before, after, and put in order
_ACTIVE, _ACTIVE_SHARE = 32, 6  # active labels of a row of a group on average; times as many as it has itself
_X_BYTES = 16 * MIB  # of rows gathered at a time
_LEAST_TABLES = 4 * MIB
MOST_FORESEEN = 128 * MIB  # of tables that a probe may ask for: it says too much of a large set


@dataclass(frozen=True)
class PassPlan:
    """What a segment may hold. nnz: entries of X at a time; dual: bytes of the dual variables of a group; tables: bytes of the
    tables; dense: vectors of all labels instead.

    A post-solve has tables in any case: they tell what is in the support.
    """

    nnz: int
    dual: int
    tables: int
    dense: bool = False

    def most_bytes(self, fixed: bool = False) -> int:
        """Of the tables; 0 for dense vectors."""
        return 0 if self.dense and not fixed else self.tables


def _group_rows(dataset: Dataset) -> int:
    """Rows of a group, at most."""
    return min(dataset.n_samples, GROUP << strip_bits(dataset.n_samples, dataset.X_rows().nnz))


def _gathered(dataset: Dataset) -> int:
    """Entries of X that are gathered at a time: of the longest row at least."""
    X = dataset.X_rows()
    return min(X.nnz, X.block_bytes(_X_BYTES) // X.entry_bytes)


def pass_needs(dataset: Dataset, parameters: PDSparseParameters) -> dict[str, int]:
    """What a segment holds beside the tables."""
    d, k, n, X = dataset.n_features, dataset.n_labels, dataset.n_samples, dataset.X_rows()
    parts, rows = min(parameters.parts, k), _group_rows(dataset)
    nnz, most = _gathered(dataset), min(parameters.most, k)
    active = min(k, max(_ACTIVE, _ACTIVE_SHARE * dataset.Y_rows().nnz // max(n, 1)))
    return {
        "features": 28 * d * parts + 24 * d,
        "labels": 36 * k,
        "rows": X.entry_bytes * nnz + 100 * rows + 8 * MIB,
        "a row": 8 * min(PLACES, min(d, nnz) * k),
        "labels that searches bring in": (12 * min(rows, STRETCH) + 48) * most,
        "dual variables": _LABEL_BYTES * rows * active + 24 * -(-n >> strip_bits(n, X.nnz)),
        "held-out rows": (LEARNED_BYTES + 32 * labels_ranked(dataset) * min(n, STRETCH)) * (parameters.held_out > 0),
        "writers and windows": SEGMENT_BYTES + 24 * ENTRIES + 4 * MIB,
    }


def most_tables(dataset: Dataset, parameters: PDSparseParameters) -> int:
    """Bytes that tables cannot outgrow."""
    return most_bytes_of(dataset.n_features, dataset.n_labels, min(parameters.parts, dataset.n_labels))


def plan_pass(plan: MemoryPlan, dataset: Dataset, parameters: PDSparseParameters) -> PassPlan:
    """Share the budget: dense vectors of all labels where they take no more than half of what is left, else tables.

    Raises MemoryLimitError where there is no room for either.
    """
    needs = pass_needs(dataset, parameters)
    dense = 8 * dataset.n_features * dataset.n_labels
    plan.refuse_unless({**needs, "tables": min(dense, _LEAST_TABLES)}, "PD-Sparse")
    left = plan.budget - sum(needs.values())
    # rows may come to have more active labels, all at most
    more = min(left // 8, _LABEL_BYTES * _group_rows(dataset) * dataset.n_labels)
    left -= more
    fits = dense <= left // 2 and dataset.n_labels <= UNIT
    return PassPlan(
        _gathered(dataset), needs["dual variables"] + more, min(left, most_tables(dataset, parameters)), fits
    )


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

    @cached_property
    def label_of(self) -> NDArray[np.int32]:
        """The label of each number."""
        labels = np.empty_like(self.numbers)
        labels[self.numbers] = np.arange(self.n_labels, dtype=np.int32)
        return labels

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
