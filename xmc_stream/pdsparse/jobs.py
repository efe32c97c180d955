"""Jobs of PD-Sparse: a segment of a pass over the rows; what held-out rows say of a pass, its objective, its weights by class.

The tables stay in the process from job to job. A segment leaves them on disk too, with the dual variables of the rows it
visited, so that the next one may run anywhere. A segment is neighbouring groups of an order that the data and the seed
give: as many as a job should take. Jobs on the tables that a pass left end too when they have taken that long, where they
go over rows: the next one goes on with the rows that follow.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.order import GROUP, strip_slots
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import Unit, new_unit
from xmc_stream.metrics import among
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.decisions import HeldOut
from xmc_stream.pdsparse.kernels.dual import group_rows, packed, rank_rows, sum_losses
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels
from xmc_stream.pdsparse.kernels.tables import bytes_used, clear, norms
from xmc_stream.pdsparse.memory import STRETCH, Data, Rows, TablesOf, Which
from xmc_stream.pdsparse.solver import Stepper, Stretch, TablesFullError, label_numbers, pass_key
from xmc_stream.pdsparse.state import (
    ENTRIES,
    PassState,
    begin_with,
    new_segment,
    read_tables,
    stored_tables,
    write_tables,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, Portion
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, MatrixWriter, new_store
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import DECISION
from xmc_stream.store.places import remove
from xmc_stream.store.transpose import transpose
from xmc_stream.system.memory import format_size

_MORE = 1.5  # than the first rows of a pass or two say: labels that later searches bring in
PLACES = 5  # of the ranking of a held-out row that are looked at
_DEAD = 1e-9  # |v| up to here is what rounding left of a sum that is 0


@dataclass(frozen=True)
class SegmentJob:
    """Groups of a pass from the first on, as many as a job should take; the receipt says before which group it ended.

    stage: of the run: a value of lam, or the post-solve. most: labels that a search may bring in. dual: folders of the
    pass before, none for a = 0. tables: that this segment begins from. support: where these are fixed, a stage takes |v| >
    support of the tables that it begins from. total: groups of the pass. rows: that it visits.
    """

    data: Data
    stage: int
    number: int
    first: int
    total: int
    most: int
    dual: tuple[str, ...]
    tables: TablesOf
    support: float | None = None
    rows: Which = "learned"

    @property
    def key(self) -> str:
        """Stage, pass and first group."""
        return f"pass/{self.stage}/{self.number}/{self.first}"

    def folder(self, kind: str) -> Path:
        """`dual` or `tables` of this segment."""
        return Path(self.data.work) / "state" / f"{kind}-{self.stage}-{self.number}" / f"{self.first:06d}"

    def run(self) -> Receipt:
        """Visit the rows; write dual variables and tables; the receipt has sums of the segment."""
        drop_tiles()
        last, rows = self.first, Rows(self.data, self.rows)
        stepper = self.tables.open(self.data, rows, self._left_out())
        key = pass_key(self.data.seed, self.stage, self.number)
        slots = np.empty(-(-rows.n_samples >> rows.bits), np.int64)
        strip_slots(len(slots), key, slots)
        order, segments = np.argsort(slots), [Path(segment) for segment in self.dual]
        before = PassState(segments, rows.n_samples, rows.n_labels, rows.bits) if segments else None
        portion = Portion()
        with new_segment(self.folder("dual"), rows.n_labels) as (active, visited):
            while last < self.total:
                strips = np.sort(order[last * GROUP : (last + 1) * GROUP])
                following = np.sort(order[(last + 1) * GROUP : (last + 2) * GROUP])
                for strip in following.tolist():
                    rows.X.will_need(strip << rows.bits, min((strip + 1) << rows.bits, rows.n_samples))
                state = self._visit(rows, stepper, before, strips, slots[strips], key)
                active.append(state.size, state.labels, state.a)
                visited.append(strips)
                last += 1
                if portion.done():
                    break
        write_tables(self.folder("tables"), stepper.tables, rows.dataset.n_features)
        sums = stepper.take_sums()
        square, l1, nnz = norms(stepper.tables)
        self.data.held.keep(stepper, str(self.folder("tables")))
        return {
            "last": last, **sums, "square": square, "l1": l1, "nnz": nnz, "passes": (last - self.first) / self.total,
            "bytes_read": rows.bytes_read + (before.bytes_read if before else 0),
        }  # fmt: skip

    def _left_out(self) -> float | None:
        """Up to which |v| a pass begins without entries: without what labels that came and went left in v."""
        if self.first:
            return None
        return self.support if self.support is not None and self.number == 0 else _DEAD

    def _visit(
        self, rows: Rows, stepper: Stepper, before: PassState | None, strips: NDArray[np.int64], slots: NDArray[np.int64],
        key: np.uint64,
    ) -> ActiveLabels:  # fmt: skip
        """Visit the rows of a group; returns what they have then, row after row."""
        most = len(strips) << rows.bits
        at, places = np.empty(most, np.int64), np.empty(most, np.int64)
        n = group_rows(strips, slots, rows.n_samples, rows.bits, key, at, places)
        at = at[:n]
        indptr, labels = rows.labels(at)
        n_positive = np.diff(indptr)
        if before is None:
            state = ActiveLabels(indptr[:-1], n_positive, labels, np.zeros(len(labels)))
        else:
            sizes = np.minimum((strips + 1) << rows.bits, rows.n_samples) - (strips << rows.bits)
            state = before.read(strips, sizes)
            if not begin_with(state, indptr, labels):
                raise StoreError(
                    f"{Path(self.dual[0]).parent}: labels of rows are not theirs: remove the unfinished run and begin anew"
                )
        visited = (n_positive > 0) & (n_positive < rows.n_labels) & (rows.kept_out(at) == (self.rows == "held out"))
        order = np.argsort(places[:n])
        order = order[visited[order]]
        firsts, counts = rows.X.lengths(at)
        # rows that are not visited keep what they have: at first their positives, with a = 0
        others = np.flatnonzero(~visited)
        parts = [(others, packed(state, others))]
        for stretch in rows.stretches(counts, order):
            members = np.sort(stretch)
            block = rows.X.gather(at[members], rows.buffer, (firsts[members], counts[members]))
            try:
                sets = stepper.visit(
                    Stretch(members, np.searchsorted(members, stretch), at[members], n_positive[members]),
                    key, block, state, self.most, self.tables.fixed, lambda: self._pack(stepper, rows.dataset.n_features),
                )  # fmt: skip
            except TablesFullError:
                raise self._too_many(
                    f"in pass {self.number + 1} the tables of v and w need more than the "
                    f"{format_size(stepper.tables.most_bytes)} that the memory limit leaves them"
                ) from None
            parts.append((members, packed(sets, np.arange(len(members)))))
        begin, size, filled = np.empty(n, np.int64), np.empty(n, np.int64), 0
        for members, part in parts:
            begin[members], size[members] = part.begin + filled, part.size
            filled += len(part.labels)
        needed = 12 * (len(state.labels) + 2 * filled)
        if needed > self.data.plan.dual:
            raise self._too_many(
                f"{n} rows have {filled} active labels, whose dual variables take {format_size(needed)} where "
                f"{format_size(self.data.plan.dual)} are planned"
            )
        labels = np.concatenate([part.labels for _, part in parts])
        a = np.concatenate([part.a for _, part in parts])
        del parts, part
        return packed(ActiveLabels(begin, size, labels, a), np.arange(n))

    def _pack(self, stepper: Stepper, n_features: int) -> None:
        """Give tables regions as short as may be, and none that were left; over the disk, as they fill the memory."""
        path = Path(self.data.work) / "state" / "packed.partial" / "all"
        write_tables(path, stepper.tables, n_features)
        clear(stepper.tables)
        read_tables(path, stepper.tables, n_features)
        remove(path)

    def _too_many(self, what: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"{what}: raise " + flags.MEMORY_LIMIT + ", or have fewer active labels: a larger lam (now "
            f"{self.tables.lam:g}) or a smaller C (now {self.data.parameters.C:g})"
        )


@dataclass(frozen=True)
class PassProbe:
    """Visit the first rows twice, in memory: seconds for a row of a pass over all (`seconds`), and how large tables get.

    tables: bytes, about, for all rows: they grow as they did from half of these rows to all of these. full: whether these rows
    alone fill the tables of the plan; then it is less than it will be.
    """

    data: Data

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "probe"

    def run(self) -> Receipt:
        """Visit them."""
        rows = Rows(self.data)
        n = min(rows.n_samples, STRETCH)
        spans = rows.X.lengths(np.arange(n))
        n = max(1, int(np.searchsorted(np.cumsum(spans[1]), self.data.plan.nnz, side="right")))
        half, _, _ = self._visits(rows, max(1, n // 2))
        used, seconds, full = self._visits(rows, n)
        growth = max(1.0, used / max(half, 1)) ** math.log2(rows.n_samples / n)
        return {"seconds": seconds, "tables": int(_MORE * used * growth), "full": full}

    def _visits(self, rows: Rows, n: int) -> tuple[int, float, bool]:
        """Visit so many rows, from nothing: bytes of tables, seconds of a row, whether the tables are full."""
        d, at, p = rows.dataset.n_features, np.arange(n), self.data.parameters
        stepper = Stepper(d, rows.n_labels, p, p.lams[0], max(1, p.rate), self.data.plan.most_bytes())
        block, (indptr, labels) = rows.X.gather(at, rows.buffer, rows.X.lengths(at)), rows.labels(at)
        state = ActiveLabels(indptr[:-1], np.diff(indptr), labels, np.zeros(len(labels)))
        seconds, full = 0.0, False
        try:
            for number in range(2):
                began = time.perf_counter()
                key = pass_key(self.data.seed, 0, number)
                state = stepper.visit(Stretch(at, at, at, np.diff(indptr)), key, block, state, 1, False)
                seconds = (time.perf_counter() - began) / n
        except TablesFullError:
            full = True
        return int(bytes_used(stepper.tables)), seconds, full


def _ranked(
    rows: Rows, stepper: Stepper, k: int, some: tuple[Block, NDArray[np.int64], NDArray[np.int32]]
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
    """The k best labels of some rows, their scores, and which of them are right."""
    block, indptr, numbers = some
    labels, scores = np.empty((block.n, k), np.int64), np.empty((block.n, k), np.float32)
    csr = block.indptr, block.indices, block.values
    rank_rows(*csr, rows.numbers, rows.label_of, stepper.tables, stepper.z, labels, scores)
    return labels, scores, among(np.arange(block.n)[:, None], labels, indptr, rows.label_of[numbers])


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
