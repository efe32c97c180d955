"""Jobs of PD-Sparse: a segment of a pass over the rows; see `outcome` for what becomes of a pass.

The tables stay in the process from segment to segment. A segment leaves them on disk too, with the dual variables of
the rows it visited, so that the next one may run anywhere. A segment is neighbouring groups of an order that the data
and the seed give: as many as a job should take.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.kernels.order import GROUP, strip_slots
from xmc_stream.models.cache import drop_tiles
from xmc_stream.pdsparse.kernels.dual import group_rows, pack
from xmc_stream.pdsparse.kernels.tables import bytes_used, clear, norms
from xmc_stream.pdsparse.plan import STRETCH
from xmc_stream.pdsparse.rows import Data, Rows, TablesOf, Which
from xmc_stream.pdsparse.solver import Stepper, Stretch, TablesFullError, pass_key
from xmc_stream.pdsparse.state import DualRows, PassState, begin_with, new_segment, read_tables, write_tables
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import Portion
from xmc_stream.store.places import remove
from xmc_stream.system.memory import format_size

_MORE = 1.5  # than the first rows of a pass or two say: labels that later searches bring in
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
        visited = (n_positive > 0) & (n_positive < rows.n_labels) & (rows.kept_out(at) == (self.rows == "held out"))
        order = np.argsort(places[:n])
        order = order[visited[order]]
        firsts, counts = rows.X.lengths(at)
        # rows that are not visited keep what they have: at first their positives, with a = 0
        others = np.flatnonzero(~visited)
        begin, size, filled = np.zeros(n, np.int64), state.size.copy(), int(state.size[others].sum())
        begin[others] = np.cumsum(size[others]) - size[others]
        packed = [(np.empty(filled, np.int32), np.empty(filled))]
        pack(others, state.begin, state.size, state.labels, state.a, 0, *packed[0])
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
            total = int(sets.size.sum())
            part = np.empty(total, np.int32), np.empty(total)
            pack(np.arange(len(members)), sets.begin, sets.size, sets.labels, sets.a, 0, *part)
            packed.append(part)
            begin[members], size[members] = np.cumsum(sets.size) - sets.size + filled, sets.size
            filled += total
        all_labels, all_a = (np.concatenate([part[side] for part in packed]) for side in (0, 1))
        del packed
        total = int(size.sum())
        needed = 12 * (len(state.labels) + filled + total)
        if needed > self.data.plan.dual:
            raise self._too_many(
                f"{n} rows have {total} active labels, whose dual variables take {format_size(needed)} where "
                f"{format_size(self.data.plan.dual)} are planned"
            )
        out = DualRows(begin, size, np.empty(total, np.int32), np.empty(total))
        pack(np.arange(n), begin, size, all_labels, all_a, 0, out.labels, out.a)
        return out

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
