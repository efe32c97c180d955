"""Jobs of PD-Sparse on the tables that a pass left: what held-out rows say of them, the objective, the weights by class.

Those that go over rows end when they have taken as long as a job should; the next one goes on with the rows that follow.
"""

from __future__ import annotations

import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import Unit, new_unit
from xmc_stream.metrics import among
from xmc_stream.models.decisions import HeldOut
from xmc_stream.pdsparse.kernels.dual import rank_rows, sum_losses
from xmc_stream.pdsparse.kernels.tables import norms
from xmc_stream.pdsparse.rows import Data, Rows, TablesOf, Which
from xmc_stream.pdsparse.solver import Stepper, label_numbers
from xmc_stream.pdsparse.state import ENTRIES, stored_tables
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, MatrixWriter, new_store
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import DECISION
from xmc_stream.store.transpose import transpose

PLACES = 5  # of the ranking of a held-out row that are looked at


def _ranked(
    rows: Rows, stepper: Stepper, k: int, some: tuple[Block, NDArray[np.int64], NDArray[np.int32]]
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
    """The k best labels of some rows, their scores, and which of them are right."""
    block, indptr, numbers = some
    label_of = np.argsort(rows.numbers).astype(np.int32)
    labels, scores = np.empty((block.n, k), np.int64), np.empty((block.n, k), np.float32)
    csr = block.indptr, block.indices, block.values
    rank_rows(*csr, rows.numbers, label_of, stepper.tables, stepper.z, labels, scores)
    return labels, scores, among(np.arange(block.n)[:, None], labels, indptr, label_of[numbers])


@dataclass(frozen=True)
class LookJob:
    """Rank the labels of rows that are held out, from row `first` on; the receipt says before which row it ended."""

    data: Data
    stage: int
    number: int
    tables: TablesOf
    first: int

    @property
    def key(self) -> str:
        """Stage and pass, first row."""
        return f"look/{self.stage}/{self.number}/{self.first}"

    def run(self) -> Receipt:
        """Count hits."""
        rows = Rows(self.data)
        stepper = self.tables.open(self.data, rows)
        hits, n, k = np.zeros(PLACES, np.int64), 0, min(PLACES, rows.n_labels)
        for some in rows.blocks_of_job(self.first, True):
            hits[:k] += _ranked(rows, stepper, k, some)[2].sum(axis=0)
            n += some[0].n
        self.data.held.keep(stepper, self.tables.folder)
        return {"last": rows.last, "hits": hits.tolist(), "n_held_out": n, "bytes_read": rows.bytes_read}


@dataclass(frozen=True)
class DecisionJob:
    """Which labels of a row are to be predicted, by rows that are held out and the weights of some tables."""

    data: Data
    stage: int
    number: int
    tables: TablesOf

    @property
    def key(self) -> str:
        """Stage and pass."""
        return f"{DECISION}/{self.stage}/{self.number}"

    def run(self) -> Receipt:
        """Score those rows that it is learned from, and learn it."""
        rows = Rows(self.data)
        stepper, held_out = self.tables.open(self.data, rows), HeldOut(rows.n_held_out, rows.dataset)
        unseen = rows.dataset.label_counts() == 0
        for first in range(0, rows.n_samples, rows.step):
            for some in rows.blocks(first, True, held_out.wanted):
                labels, scores, right = _ranked(rows, stepper, held_out.k, some)
                scores[unseen[labels]] = UNSEEN  # as the model has them
                held_out.take(scores, right, np.diff(some[1]))
        self.data.held.keep(stepper, self.tables.folder)
        return {DECISION: held_out.decision(), "bytes_read": rows.bytes_read}


@dataclass(frozen=True)
class ObjectiveJob:
    """The losses of rows that were learned from, from row `first` on, by the weights of some tables.

    before: the losses of the rows before it, which the receipt's are added to; the receipt also says before which row it ended.
    """

    data: Data
    tables: TablesOf
    rows: Which
    first: int
    before: float

    @property
    def key(self) -> str:
        """The tables and the row."""
        return f"objective/{'/'.join(Path(self.tables.folder).parts[-2:])}/{self.first}"

    def run(self) -> Receipt:
        """Sum; also the norms of the weights."""
        rows = Rows(self.data, self.rows)
        stepper, total = self.tables.open(self.data, rows), self.before
        for block, indptr, labels in rows.blocks_of_job(self.first, False):
            total += sum_losses(block.indptr, block.indices, block.values, indptr, labels, stepper.tables, stepper.z)
        square, l1, _ = norms(stepper.tables)
        self.data.held.keep(stepper, self.tables.folder)
        passes = (rows.last - self.first) / rows.n_samples
        return {
            "last": rows.last, "losses": total, "square": square, "l1": l1, "passes": passes, "bytes_read": rows.bytes_read,
        }  # fmt: skip


@dataclass(frozen=True)
class WeightsJob:
    """The weights of some tables by class: D x K, csc."""

    data: Data
    lam: float
    tables: str
    out: str
    max_bytes: int

    @property
    def key(self) -> str:
        """There is one."""
        return "weights"

    def run(self) -> Receipt:
        """Write them by feature, then by class."""
        dataset = Dataset(self.data.path)
        n_features, n_labels = dataset.n_features, dataset.n_labels
        label_of = np.argsort(label_numbers(n_labels, self.data.seed)).astype(np.int32)
        counts = np.zeros(n_labels, np.int64)
        with new_store(Path(self.out), {}) as group:
            rows = MatrixWriter(
                group.create_group("rows"), "csr_matrix", (n_features, n_labels), np.float32, SCRATCH_CHUNK_BYTES
            )
            for _, n_of, numbers, v in stored_tables(Path(self.tables), n_features, n_labels, ENTRIES):
                w = (v - np.clip(v, -self.lam, self.lam)).astype(np.float32)
                features = np.repeat(np.arange(len(n_of)), n_of)
                kept = np.flatnonzero(w)
                labels = label_of[numbers[kept]]
                order = np.argsort(features[kept] * n_labels + labels)
                labels = labels[order]
                rows.append(np.bincount(features[kept], minlength=len(n_of)), labels, w[kept][order])
                counts += np.bincount(labels, minlength=n_labels)
            rows.close()
            matrix = SparseMatrix(group.path / "rows")
            transpose(matrix, counts, group.create_group("columns"), self.max_bytes)
            shutil.rmtree(matrix.path)
        return {"nnz": int(counts.sum())}


@dataclass(frozen=True)
class UnitJob:
    """Write a unit of the model from the weights by class. The bias of a class without positives is -inf: it comes last."""

    data: Data
    weights: str
    n_features: int
    unit: Unit
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"finalise/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt has the sizes of tiles that predictions are planned from."""
        first, last = self.unit
        weights = SparseMatrix(Path(self.weights) / "columns").expect((self.n_features, None), "csc_matrix", np.float32)
        tiles = TileSizes(first, last, self.n_features)
        with new_unit(Path(self.out), self.n_features, last - first) as writer:
            writer.bias[Dataset(self.data.path).label_counts(first, last) == 0] = -np.inf
            for block in weights.blocks(max(4 * MIB, 16 * self.n_features), first, last):
                writer.weights.append(np.diff(block.indptr), block.indices, block.values)
                tiles.add(np.diff(block.indptr), block.indices)
        return {"nnz": writer.weights.nnz, "tile_ranges": [astuple(span) for span in tiles.ranges]}
