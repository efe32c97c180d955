"""Jobs of PD-Sparse: a segment of a pass over the rows, the objective of what came out, the weights by class.

The tables stay in the process from segment to segment. A segment leaves them on disk too, with the dual variables of
the rows it visited, so that the next one may run anywhere. A segment is neighbouring groups of an order that the data
and the seed give.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.order import GROUP
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import Unit, new_unit
from xmc_stream.metrics import among
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.decisions import HeldOut
from xmc_stream.pdsparse.kernels.dual import group_rows, pack, rank_rows, sum_losses
from xmc_stream.pdsparse.kernels.tables import bytes_used, clear, enter, list_entries, norms, purge
from xmc_stream.pdsparse.plan import ENTRIES, STRETCH
from xmc_stream.pdsparse.rows import Data, Rows, Which
from xmc_stream.pdsparse.solver import Stepper, Stretch, TablesFullError, label_numbers, pass_key
from xmc_stream.pdsparse.state import DualRows, PassState, begin_with, new_segment, new_tables, stored_tables
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, MatrixWriter, new_store, remove
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import DECISION
from xmc_stream.store.transpose import transpose
from xmc_stream.system.memory import format_size

PLACES = 5  # of the ranking of a held-out row that are looked at
_MORE = 1.5  # than the first rows of a pass or two say: labels that later searches bring in
_DEAD = 1e-9  # |v| up to here is what rounding left of a sum that is 0


@dataclass
class _Session:
    """The tables in this process, and after which segment they are so."""

    stepper: Stepper
    after: str

    def fits(self, lam: float, most_bytes: int) -> bool:
        """Whether a segment may go on with them: of another stage, or under another limit, it may not."""
        return self.stepper.tables.lam == lam and self.stepper.tables.most_bytes == most_bytes


_sessions: dict[str, _Session] = {}  # by the run's folder
_at_work: set[str] = set()  # runs that have a job here
_lock = Lock()


def drop_session(work: str | None = None) -> None:
    """Let go of tables that an earlier job left in this process, of the run of a folder or of all."""
    with _lock:
        for one in list(_sessions) if work is None else [work]:
            _sessions.pop(one, None)


def _at_work_alone(run: Callable[[Any], Receipt]) -> Callable[[Any], Receipt]:
    """`run` of a job: tables that others left here go, as far as these and runs at work are more than are planned."""

    @wraps(run)
    def run_alone(job: Any) -> Receipt:
        data: Data = job.data
        with _lock:
            _at_work.add(data.work)
            left = [work for work in _sessions if work not in _at_work]
            for work in left[: max(0, len(_at_work) + len(left) - data.plan.parts)]:
                del _sessions[work]
        try:
            return run(job)
        finally:
            with _lock:
                _at_work.discard(data.work)

    return run_alone


@dataclass(frozen=True)
class SegmentJob:
    """Groups [first, last) of a pass.

    stage: of the run: a value of lam, or the post-solve. most: labels that a search may bring in. dual: folders of the
    pass before, none for a = 0. tables: the folder that this segment begins from, "" for v = 0. support: no search, and no v
    but those there, of the tables that the stage begins from |v| > support. total: groups of the pass; the last segment looks
    at the rows that are held out, if it learns from the others. rows: that it visits.
    """

    data: Data
    stage: int
    lam: float
    number: int
    first: int
    last: int
    total: int
    most: int
    rate: int
    dual: tuple[str, ...]
    tables: str
    support: float | None = None
    rows: Which = "learned"

    @property
    def fixed(self) -> bool:
        """Whether the support stays as it is."""
        return self.support is not None

    @property
    def key(self) -> str:
        """Stage, pass and first group."""
        return f"pass/{self.stage}/{self.number}/{self.first}"

    @property
    def name(self) -> str:
        """Of the folders that it leaves."""
        return f"{self.first:06d}"

    def folder(self, kind: str) -> Path:
        """`dual` or `tables` of this segment."""
        return Path(self.data.work) / "state" / f"{kind}-{self.stage}-{self.number}" / self.name

    @_at_work_alone
    def run(self) -> Receipt:
        """Visit the rows; write dual variables and tables; the receipt has sums of the segment and, at the end, the pass."""
        drop_tiles()
        began = time.perf_counter()
        rows = Rows(self.data, self.rows)
        stepper = self._stepper(rows)
        key = pass_key(self.data.seed, self.stage, self.number)
        order, slots = rows.groups(key)
        before = (
            PassState([Path(segment) for segment in self.dual], rows.n_samples, rows.n_labels, rows.bits)
            if self.dual
            else None
        )
        with new_segment(self.folder("dual"), rows.n_labels) as writer:
            for group in range(self.first, self.last):
                strips = np.sort(order[group * GROUP : (group + 1) * GROUP])
                following = np.sort(order[(group + 1) * GROUP : (group + 2) * GROUP])
                for strip in following.tolist():
                    rows.X.will_need(strip << rows.bits, min((strip + 1) << rows.bits, rows.n_samples))
                state = self._visit(rows, stepper, before, strips, slots[strips], key)
                writer.active.append(state.size, state.labels, state.a)
                writer.strips.append(strips)
        write_tables(self.folder("tables"), stepper, rows.dataset.n_features)
        sums = stepper.take_sums()
        square, l1, nnz = norms(stepper.tables)
        receipt: Receipt = {
            "last": self.last, **sums, "square": square, "l1": l1, "nnz": nnz,
            "passes": (self.last - self.first) / self.total,
        }  # fmt: skip
        if self.last == self.total and self.rows != "held out":
            receipt |= self._held_out(rows, stepper)
        _sessions[self.data.work] = _Session(stepper, str(self.folder("tables")))
        read = rows.bytes_read + (before.bytes_read if before else 0)
        return {**receipt, "bytes_read": read, "seconds": round(time.perf_counter() - began, 3)}

    def _stepper(self, rows: Rows) -> Stepper:
        """The tables as this segment finds them: those that are in this process, or read from disk."""
        session = _sessions.pop(self.data.work, None)
        most_bytes = self.data.plan.most_bytes(self.fixed)
        # a pass begins without what labels that came and went left in v
        begins = self.support if self.support is not None and self.number == 0 else _DEAD
        if session is not None and session.after == self.tables and session.fits(self.lam, most_bytes):
            if not self.first:
                purge(begins, session.stepper.tables)
            return session.stepper
        del session
        d = rows.dataset.n_features
        stepper = Stepper(d, rows.n_labels, self.data.parameters, self.lam, self.rate, most_bytes)
        if self.tables:
            read_tables(Path(self.tables), stepper, d, begins if self.first == 0 else None)
        return stepper

    def _visit(
        self, rows: Rows, stepper: Stepper, before: PassState | None, strips: NDArray[np.int64], slots: NDArray[np.int64],
        key: np.uint64,
    ) -> DualRows:  # fmt: skip
        """Visit the rows of a group; returns what they have then, row after row."""
        most = len(strips) << rows.bits
        at, places = np.empty(most, np.int64), np.empty(most, np.int64)
        n = group_rows(strips, slots, rows.n_samples, rows.bits, key, at, places)
        at = at[:n]
        indptr, labels = rows.labels(at)
        n_positive = np.diff(indptr)
        if before is None:
            state = DualRows(indptr[:-1], n_positive, labels, np.zeros(len(labels)))
        else:
            sizes = np.minimum((strips + 1) << rows.bits, rows.n_samples) - (strips << rows.bits)
            state = before.read(strips, sizes)
            if not begin_with(state, indptr, labels):
                raise StoreError(
                    f"{Path(self.dual[0]).parent}: labels of rows are not theirs: remove the unfinished run and begin anew"
                )
        visited = (n_positive > 0) & (n_positive < rows.n_labels) & rows.visited(at)
        order = np.argsort(places[:n])
        order = order[visited[order]]
        firsts, counts = rows.X.lengths(at)
        # rows that are not visited keep what they have: at first their positives, with a = 0
        others = np.flatnonzero(~visited)
        begin, size, filled = np.zeros(n, np.int64), state.size.copy(), int(state.size[others].sum())
        begin[others] = np.cumsum(size[others]) - size[others]
        packed = [(np.empty(filled, np.int32), np.empty(filled))]
        pack(others, state.begin, state.size, state.labels, state.a, *packed[0])
        for stretch in rows.stretches(counts, order):
            members = np.sort(stretch)
            block = rows.gather(at[members], (firsts[members], counts[members]))
            try:
                sets = stepper.visit(
                    Stretch(members, np.searchsorted(members, stretch), at[members], n_positive[members]),
                    key, block, state, self.most, self.fixed, lambda: self._pack(stepper, rows.dataset.n_features),
                )  # fmt: skip
            except TablesFullError:
                raise self._full(stepper) from None
            total = int(sets.size.sum())
            part = np.empty(total, np.int32), np.empty(total)
            pack(np.arange(len(members)), sets.begin, sets.size, sets.labels, sets.a, *part)
            packed.append(part)
            begin[members], size[members] = np.cumsum(sets.size) - sets.size + filled, sets.size
            filled += total
        all_labels, all_a = (np.concatenate([part[side] for part in packed]) for side in (0, 1))
        del packed
        total = int(size.sum())
        needed = 12 * (len(state.labels) + filled + total)
        if needed > self.data.plan.dual:
            raise MemoryLimitError(
                f"{n} rows have {total} active labels, whose dual variables take {format_size(needed)} where "
                f"{format_size(self.data.plan.dual)} are planned: raise "
                + flags.MEMORY_LIMIT
                + ", or have fewer of them: a larger lam "
                f"(now {self.lam:g}) or a smaller C (now {self.data.parameters.C:g})"
            )
        out = DualRows(begin, size, np.empty(total, np.int32), np.empty(total))
        pack(np.arange(n), begin, size, all_labels, all_a, out.labels, out.a)
        return out

    def _pack(self, stepper: Stepper, n_features: int) -> None:
        """Give tables regions as short as may be, and none that were left; over the disk, as they fill the memory."""
        path = Path(self.data.work) / "state" / "packed.partial" / "all"
        write_tables(path, stepper, n_features)
        clear(stepper.tables)
        read_tables(path, stepper, n_features)
        remove(path)

    def _full(self, stepper: Stepper) -> MemoryLimitError:
        bound = format_size(stepper.tables.most_bytes)
        return MemoryLimitError(
            f"the tables of v and w need more than the {bound} that the memory limit leaves them, in pass {self.number + 1}: "
            "raise "
            + flags.MEMORY_LIMIT
            + f", or have fewer of them: a larger lam (now {self.lam:g}) or a smaller C (now "
            f"{self.data.parameters.C:g})"
        )

    def _held_out(self, rows: Rows, stepper: Stepper) -> Receipt:
        """What rows that are held out say of the tables: hits, and where rows have several labels, which to predict."""
        dataset, hits, n = rows.dataset, np.zeros(PLACES, np.int64), 0
        several, unseen = not dataset.one_label, dataset.label_counts() == 0
        label_of = np.empty(rows.n_labels, np.int32)
        label_of[rows.numbers] = np.arange(rows.n_labels, dtype=np.int32)
        held_out = HeldOut(rows.n_held_out, dataset)
        k = held_out.k if several else min(PLACES, rows.n_labels)
        for block, indptr, numbers in rows.blocks(True):
            labels, scores = np.empty((block.n, k), np.int64), np.empty((block.n, k), np.float32)
            csr = block.indptr, block.indices, block.values
            rank_rows(*csr, rows.numbers, stepper.tables, stepper.z, labels, scores)
            right = among(np.arange(block.n)[:, None], labels, indptr, label_of[numbers])
            hits[:k] += right[:, :PLACES].sum(axis=0)
            n += block.n
            if several:
                scores[unseen[labels]] = UNSEEN  # as the model has them
                held_out.add(scores, right, np.diff(indptr))
        decision = {DECISION: held_out.decision()} if several and n else {}
        return {"hits": hits.tolist(), "n_held_out": n, **decision}


def write_tables(path: Path, stepper: Stepper, n_features: int) -> None:
    """Leave the tables on disk."""
    tables = stepper.tables
    per_feature = np.full(n_features, tables.n_labels, np.int64)
    if not tables.dense:
        per_feature = tables.v.n.reshape(n_features, -1).sum(axis=1, dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(per_feature)])
    with new_tables(path) as writer:
        first = 0
        while first < n_features:
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + ENTRIES, side="right")) - 1)
            room = int(ends[last] - ends[first])
            counts, labels, values = np.empty(last - first, np.int32), np.empty(room, np.int32), np.empty(room)
            n = list_entries(first, last, tables, counts, labels, values)
            writer.append(counts, labels[:n], values[:n])
            first = last


def read_tables(path: Path, stepper: Stepper, n_features: int, above: float | None = None) -> None:
    """Take the tables from disk, or their entries |v| > above. Raises MemoryLimitError where they do not fit."""
    for first, counts, labels, values in stored_tables(path, n_features, stepper.tables.n_labels, ENTRIES):
        if above is not None:
            kept = np.abs(values) > above
            counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(counts)])])
            counts, labels, values = counts.astype(np.int32), labels[kept], values[kept]
        if not enter(first, stepper.tables, counts, labels, values):
            bound = format_size(stepper.tables.most_bytes)
            raise MemoryLimitError(
                f"{path}: these tables take more than the {bound} that the memory limit leaves them: go on with a larger "
                + flags.MEMORY_LIMIT
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

    @_at_work_alone
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
        block, (indptr, labels) = rows.gather(at, rows.X.lengths(at)), rows.labels(at)
        state = DualRows(indptr[:-1], np.diff(indptr), labels, np.zeros(len(labels)))
        seconds, full = 0.0, False
        try:
            for number in range(2):
                began = time.perf_counter()
                key = pass_key(self.data.seed, 0, number)
                sets = stepper.visit(Stretch(at, at, at, np.diff(indptr)), key, block, state, 1, False)
                state = DualRows(sets.begin, sets.size, sets.labels, sets.a)
                seconds = (time.perf_counter() - began) / n
        except TablesFullError:
            full = True
        return int(bytes_used(stepper.tables)), seconds, full


@dataclass(frozen=True)
class ObjectiveJob:
    """The losses of all rows that were learned from, by the weights of some tables."""

    data: Data
    lam: float
    tables: str
    rows: Which

    @property
    def key(self) -> str:
        """The tables."""
        return f"objective/{'/'.join(Path(self.tables).parts[-2:])}"

    @_at_work_alone
    def run(self) -> Receipt:
        """Sum; also the norms of the weights."""
        session = _sessions.pop(self.data.work, None)
        rows = Rows(self.data, self.rows)
        if session is not None and session.after == self.tables:
            stepper = session.stepper
        else:
            del session
            stepper = Stepper(
                rows.dataset.n_features, rows.n_labels, self.data.parameters, self.lam, 1, self.data.plan.most_bytes()
            )
            read_tables(Path(self.tables), stepper, rows.dataset.n_features)
        total = 0.0
        for block, indptr, labels in rows.blocks(False):
            total += sum_losses(block.indptr, block.indices, block.values, indptr, labels, stepper.tables, stepper.z)
        square, l1, _ = norms(stepper.tables)
        return {"losses": total, "square": square, "l1": l1, "passes": 1.0, "bytes_read": rows.bytes_read}


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

    @_at_work_alone
    def run(self) -> Receipt:
        """Write them by feature, then by class."""
        drop_session(self.data.work)
        dataset = Dataset(self.data.path)
        n_features, n_labels = dataset.n_features, dataset.n_labels
        label_of = np.empty(n_labels, np.int32)
        label_of[label_numbers(n_labels, self.data.seed)] = np.arange(n_labels, dtype=np.int32)
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

    @_at_work_alone
    def run(self) -> Receipt:
        """Write; the receipt has the sizes of tiles that predictions are planned from."""
        drop_session(self.data.work)
        first, last = self.unit
        weights = SparseMatrix(Path(self.weights) / "columns").expect((self.n_features, None), "csc_matrix", np.float32)
        tiles = TileSizes(first, last, self.n_features)
        with new_unit(Path(self.out), self.n_features, last - first) as writer:
            writer.bias[Dataset(self.data.path).label_counts(first, last) == 0] = -np.inf
            for block in weights.blocks(max(4 * MIB, 16 * self.n_features), first, last):
                writer.weights.append(np.diff(block.indptr), block.indices, block.values)
                tiles.add(np.diff(block.indptr), block.indices)
        return {"nnz": writer.weights.nnz, "tile_ranges": [astuple(span) for span in tiles.ranges]}
