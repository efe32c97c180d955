"""The rows that PD-Sparse learns from, for one job, and what a job may hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.kernels.dual import held_out
from xmc_stream.kernels.order import GROUP, run_slots
from xmc_stream.kernels.tables import most_bytes_of
from xmc_stream.solvers.pdsparse import PLACES, PDSparseParameters, label_numbers, run_bits
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, Buffer
from xmc_stream.store.model import UNIT
from xmc_stream.store.passes import LEG_BYTES

Which = Literal["learned", "held out", "all"]
HELD_OUT = 50_000  # rows, about, so that looking at them takes little beside a pass
STRETCH = 2048  # rows that are gathered and visited at a time, at most
ENTRIES = 1 << 18  # of tables written or read at a time
_LABEL_BYTES = 3 * 12  # of an active label of a row of a group: before, after, and put in order
_X_BYTES = 16 * MIB  # of rows gathered at a time
_LEAST_TABLES = 4 * MIB


@dataclass(frozen=True)
class PassPlan:
    """What a leg may hold. nnz: entries of X at a time; dual: bytes of the dual variables of a group; tables: bytes of the
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


def group_rows(dataset: Dataset) -> int:
    """Rows of a group, at most."""
    return min(dataset.n_samples, GROUP << run_bits(dataset.n_samples, dataset.X_rows().nnz))


def pass_needs(dataset: Dataset, parameters: PDSparseParameters) -> dict[str, int]:
    """What a leg holds beside the tables."""
    d, k, n, X = dataset.n_features, dataset.n_labels, dataset.n_samples, dataset.X_rows()
    parts, rows = min(parameters.parts, k), group_rows(dataset)
    longest, most = min(d, X.nnz, _X_BYTES // 8), min(parameters.most, k)
    return {
        "features": 28 * d * parts + 24 * d,
        "labels": 24 * k,
        "rows": 8 * min(X.nnz, _X_BYTES // 8) + 100 * rows + 8 * MIB,
        "a row": 8 * min(PLACES, longest * k),
        "labels that searches bring in": (12 * min(rows, STRETCH) + 48) * most,
        "dual variables": _LABEL_BYTES * rows * min(32, k) + 24 * -(-n >> run_bits(n, X.nnz)),
        "writers and windows": LEG_BYTES + 24 * ENTRIES + 4 * MIB,
    }


def plan_pass(plan: MemoryPlan, dataset: Dataset, parameters: PDSparseParameters) -> PassPlan:
    """Share the budget: dense vectors of all labels where they take no more than half of what is left, else tables.

    Raises MemoryLimitError where there is no room for either.
    """
    needs = pass_needs(dataset, parameters)
    dense = 8 * dataset.n_features * dataset.n_labels
    plan.refuse_unless({**needs, "tables": min(dense, _LEAST_TABLES)}, "PD-Sparse")
    left = plan.budget - sum(needs.values())
    # rows may come to have more active labels, all at most
    more = min(left // 8, _LABEL_BYTES * group_rows(dataset) * dataset.n_labels)
    left -= more
    nnz = min(dataset.X_rows().nnz, _X_BYTES // 8)
    whole = most_bytes_of(dataset.n_features, dataset.n_labels, min(parameters.parts, dataset.n_labels))
    return PassPlan(
        nnz, needs["dual variables"] + more, min(left, whole), dense <= left // 2 and dataset.n_labels <= UNIT
    )


@dataclass(frozen=True)
class Data:
    """What is learned from, and how; the same for all jobs of a run. work: folder of the run."""

    path: str
    work: str
    parameters: PDSparseParameters
    seed: int
    plan: PassPlan


class Rows:
    """Rows of a dataset, for one job, and their labels by number.

    which: to visit: those to learn from, those held out, or all; of all none is held out.
    """

    def __init__(self, data: Data, which: Which = "learned") -> None:
        self.dataset = Dataset(data.path)
        self.n_samples, self.n_labels = self.dataset.n_samples, self.dataset.n_labels
        self.X, self.Y = self.dataset.X_rows(), self.dataset.Y_rows()
        self.bits = run_bits(self.n_samples, self.X.nnz)
        self.n_runs = -(-self.n_samples >> self.bits)
        self.numbers = label_numbers(self.n_labels, data.seed).astype(np.int32)
        share = min(data.parameters.held_out, HELD_OUT / max(self.n_samples, 1))
        self._seed, self._share, self._which = data.seed, 0.0 if which == "all" else share, which
        self._nnz = data.plan.nnz
        self._buffer = Buffer(self.X, data.plan.nnz)

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return self.X.bytes_read + self.Y.bytes_read

    def groups(self, key: np.uint64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Runs in the order of a pass, and the slot of each run."""
        slots = np.empty(self.n_runs, np.int64)
        run_slots(self.n_runs, key, slots)
        return np.argsort(slots), slots

    def kept_out(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are held out."""
        out = np.zeros(len(rows), np.bool_)
        if self._share:
            held_out(rows, self._seed, self._share, out)
        return out

    def visited(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are to visit."""
        return ~(self.kept_out(rows) ^ (self._which == "held out"))

    def labels(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Labels of rows (ascending), by number: indptr, numbers."""
        block = self.Y.gather(rows)
        return block.indptr, self.numbers[block.indices]

    def stretches(self, counts: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """An order of rows with so many entries each, in pieces that fit in memory."""
        ends = np.cumsum(counts[order])
        begin = 0
        while begin < len(order):
            before = int(ends[begin - 1]) if begin else 0
            end = max(int(np.searchsorted(ends, before + self._nnz, side="right")), begin + 1)
            end = min(end, begin + STRETCH, len(order))
            yield order[begin:end]
            begin = end

    def gather(self, rows: NDArray[np.int64], spans: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Block:
        """Rows (ascending) of X. Raises MemoryLimitError for one that is longer than there is room for."""
        if int(spans[1].sum()) > self._nnz:
            raise MemoryLimitError(
                f"row {rows[0]} of {self.X.path} has {spans[1].sum()} entries, more than the {self._nnz} planned for: "
                "leave such rows out"
            )
        return self.X.gather(rows, self._buffer, spans)

    def blocks(self, held: bool) -> Iterator[tuple[Block, NDArray[np.int64], NDArray[np.int32]]]:
        """Rows with labels, but not all, that are held out, or the others, in order: X, their labels as indptr, numbers."""
        step = GROUP << self.bits
        for start in range(0, self.n_samples, step):
            rows = np.arange(start, min(start + step, self.n_samples))
            n_labels = self.Y.lengths(rows)[1]
            rows = rows[(self.kept_out(rows) == held) & (n_labels > 0) & (n_labels < self.n_labels)]
            if not len(rows):
                continue
            spans = self.X.lengths(rows)
            for piece in self.stretches(spans[1], np.arange(len(rows))):
                mine = spans[0][piece], spans[1][piece]
                yield self.gather(rows[piece], mine), *self.labels(rows[piece])
