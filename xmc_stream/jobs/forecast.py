"""What a training run will do, from sizes, parameters and a probe: passes, bytes, blocks, peak memory, seconds.

Sizes of classes are spread from the probe's sample over all classes by label count. The number of class blocks of each
search is part of the forecast, and the run keeps to it (`PPDSparseRun.blocks`): so passes and the bytes they stream are
known before the first one. Bytes that the solves gather depend on what the searches find: they are estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import (
    MIB,
    MemoryPlan,
    SearchSize,
    SolvePlan,
    class_blocks,
    plan_solve,
    search_needs,
    search_ranges,
)
from xmc_stream.jobs.tiles import Run, tile_width
from xmc_stream.solvers.ppdsparse import PPDSparseParameters, added_sizes, start_sizes
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import stream_bytes
from xmc_stream.store.model import UNIT, n_units, unit_range
from xmc_stream.store.state import WRITER_BYTES

_MORE_WEIGHTS = 1.3  # than after the first round: at most 1.29 times as many were seen on 15 real sets
_KEPT = 0.85  # of an active set's rows after a later round: 0.6 to 0.93 were seen
_MARGIN = 1.15  # on sizes that the sample only estimates
_ROUNDS_SHOWN = 3  # of a run without a cap on rounds, in the forecast of its memory

Needs = dict[str, int]


@dataclass(frozen=True)
class Forecast:
    """blocks: class blocks of each search, the check included. phases: bytes by component of what each phase holds.

    passes: searches over the data, a class block each. bytes_streamed: by them, exact; bytes_gathered: by the solves,
    estimated. seconds: estimated; capped: whether the number of rounds is known.
    """

    blocks: tuple[int, ...]
    row_blocks: int
    bytes_streamed: int
    bytes_gathered: int
    phases: dict[str, Needs]
    seconds: float
    capped: bool

    @property
    def passes(self) -> int:
        """Passes over the data."""
        return sum(self.blocks)

    @property
    def largest(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


class Forecaster:
    """Spreads a probe over all classes once, then forecasts for any memory plan."""

    def __init__(self, dataset: Dataset, parameters: PPDSparseParameters, probe: Receipt) -> None:
        self.dataset, self.parameters, self.probe = dataset, parameters, probe
        self.X, self.Y = dataset.X_rows(), dataset.Y_rows()
        n = dataset.n_samples
        counts = dataset.label_counts()
        self.row_length = self.X.nnz / n
        self.rounds = parameters.max_rounds or _ROUNDS_SHOWN
        started = counts + start_sizes(counts, n)
        self.weights = np.minimum(_spread(counts, probe["counts"], probe["weights"]), dataset.n_features)
        share = _spread(counts, probe["counts"], probe["kept"]) / np.maximum(
            _spread(counts, probe["counts"], probe["started"]), 1.0
        )
        kept = started * np.minimum(share, 1.0)
        self.active = [started.astype(np.float64)]  # rows of each class in each solve, at most
        self.kept = [np.minimum(kept * _MARGIN, started)]  # and after it
        self.found = [np.zeros(len(counts))]  # rows that the search before it brings, of one job
        for _ in range(1, self.rounds):
            room = np.where(counts > 0, added_sizes(self.kept[-1].astype(np.int64), parameters.added, n), 0)
            self.found.append(room.astype(np.float64))
            self.active.append(np.minimum(self.kept[-1] + room, n))
            self.kept.append(self.active[-1] * _KEPT)
        self.learned = counts > 0

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Raises MemoryLimitError as the run would."""
        d, p = self.dataset, self.parameters
        solve = plan_solve(plan, d.n_samples, d.n_features, WRITER_BYTES, int(self.active[0].max()))
        phases, blocks = {}, []
        for round_ in range(self.rounds):
            phases[f"round {round_ + 1}: solve"] = self._solve_needs(plan, solve, round_)
            cut = class_blocks(plan, self._units(round_, check=round_ + 1 == self.rounds), d.n_features)
            blocks.append(len(cut))
            name = "check" if round_ + 1 == p.max_rounds else f"round {round_ + 2}: search"
            phases[name] = max((self._search_needs(plan, pieces) for pieces in cut), key=lambda n: sum(n.values()))
        ranges = search_ranges(plan, d.n_samples)
        per_pass = stream_bytes((self.X, self.Y), ranges)
        streamed = per_pass * sum(blocks)
        gathered = self._gathered(plan, solve)
        row_bytes = max(
            self.X.nnz * self.X.entry_bytes + 8 * d.n_samples, self.Y.nnz * self.Y.entry_bytes + 8 * d.n_samples
        )
        row_blocks = max(len(ranges), -(-row_bytes // plan.row_block_bytes))
        return Forecast(
            tuple(blocks), row_blocks, streamed, gathered, phases,
            self._seconds(plan, streamed + gathered), p.max_rounds is not None,
        )  # fmt: skip

    def _units(self, round_: int, check: bool) -> list[list[SearchSize]]:
        """What each unit's solve job will say of its tiles, as foreseen."""
        d, units = self.dataset, []
        more = _MARGIN * (_MORE_WEIGHTS if round_ else 1.0)
        heaps = added_sizes(np.ceil(self.kept[round_]).astype(np.int64), self.parameters.added, d.n_samples)
        for unit in range(n_units(d.n_labels)):
            first, last = unit_range(unit, d.n_labels)
            sizes = []
            for level in range(4):
                step = (UNIT // 8) << level
                for a in range(first, last, step):
                    b = min(a + step, last)
                    mine = np.flatnonzero(self.learned[a:b]) + a
                    if len(mine):
                        weights = int(self.weights[mine].sum() * more)
                        fixed = 4 * (d.n_features + 1) + 4 * tile_width(len(mine))
                        run = Run(a, b, int(weights * self.probe["tile_ratio"]) + fixed, weights)
                        heap = len(mine) if check else int(heaps[mine].sum())
                        sizes.append(SearchSize(run, heap, int(self.kept[round_][mine].sum())))
                if step >= last - first:
                    break
            if sizes:
                units.append(sizes)
        return units

    def _search_needs(self, plan: MemoryPlan, pieces: Sequence[SearchSize]) -> Needs:
        """As `search_needs`, with what stays untouched left out."""
        needs = search_needs(plan, pieces, self.dataset.n_features)
        rows = max(stop - start for start, stop in search_ranges(plan, self.dataset.n_samples))
        data = max(self.row_length * self.X.entry_bytes, self.Y.nnz / self.X.n_lines * self.Y.entry_bytes) * rows
        needs["row blocks"] = plan.threads * (2 * min(plan.row_block_bytes, int(data)) + MIB)
        return needs

    def _solve_needs(self, plan: MemoryPlan, sizes: SolvePlan, round_: int) -> Needs:
        """Of the units with most active rows, one a thread."""
        d, t = self.dataset, plan.threads
        active, found = self.active[round_], self.found[round_] * len(search_ranges(plan, d.n_samples))
        starts = np.arange(0, d.n_labels, UNIT)
        rows = np.minimum(np.add.reduceat(active, starts), max(sizes.max_rows, float(active.max())))
        brought = np.minimum(np.add.reduceat(np.minimum(found, d.n_samples), starts), rows * 4)
        worst = np.sort(rows * 45 + brought * 20)[-t:].sum()  # see ROW_BYTES: what is held while sets are merged
        union = np.minimum(rows, d.n_samples)
        gathered = np.sort(np.minimum(union * self.row_length, sizes.max_nnz))[-t:].sum() * self.X.entry_bytes
        largest = float(active.max())
        of_class = min(largest * self.row_length, sizes.max_class_nnz) * 8 + min(largest, sizes.max_rows) * 25
        written = np.sort(np.add.reduceat(self.weights, starts) * _MORE_WEIGHTS)[-t:].sum() * 8
        return {
            "rows gathered": int(gathered),
            "active sets": int(worst + np.sort(union)[-t:].sum() * 24) + t * 8 * sizes.max_rows,
            "one class": t * int(of_class),
            "features": t * 36 * d.n_features + int(min(written, t * 8.0 * max(d.n_features, 1 << 20))),
            "marks of rows": t * (d.n_samples // 8 + d.n_samples // 16),
            "writers and windows": t * 3 * MIB + int(min(written + worst / 4, t * WRITER_BYTES)),
        }

    def _gathered(self, plan: MemoryPlan, sizes: SolvePlan) -> int:
        """Bytes that the solves read: each unit's active rows, once a batch; its positives."""
        total = 0.0
        starts = np.arange(0, self.dataset.n_labels, UNIT)
        n = self.dataset.n_samples
        for active in self.active:
            rows = np.add.reduceat(active, starts)
            batches = np.maximum(1, np.ceil(np.minimum(rows, n) * self.row_length / max(sizes.max_nnz, 1)))
            batches = np.maximum(batches, np.ceil(rows / max(sizes.max_rows, 1)))
            union = n * -np.expm1(-rows / batches / n)  # as if drawn at random
            total += float((batches * (union * self.row_length * self.X.entry_bytes + 8.0 * n)).sum())
            total += self.Y.nnz * self.Y.entry_bytes
        return int(total)

    def _seconds(self, plan: MemoryPlan, n_bytes: int) -> float:
        """Steps, scores and reading at the probe's rates, shared by the threads; what is constant added."""
        d, p = self.dataset, self.parameters
        steps = sum(
            float(active.sum()) * self.row_length * p.epochs_of(round_) for round_, active in enumerate(self.active)
        )
        scores = float(d.n_samples) * int(self.learned.sum()) * self.rounds
        work: float = steps * self.probe["step"] + scores * self.probe["score"] + n_bytes * self.probe["read"]
        model = float(self.weights.sum()) * 8 * _MORE_WEIGHTS
        return work / (plan.threads * plan.processes) + model / 100e6 + 0.5


def _spread(counts: NDArray[np.int64], sampled: Sequence[int], values: Sequence[int]) -> NDArray[np.float64]:
    """A size of every class from those of a sample, by label count; 0 for a class without positives.

    Between sampled counts on a straight line of logarithms; beyond the largest as the square root of the count.
    """
    at, inverse = np.unique(np.asarray(sampled, np.int64), return_inverse=True)
    mean = np.bincount(inverse, np.asarray(values, np.float64)) / np.bincount(inverse)
    known, levels = np.unique(counts, return_inverse=True)
    logs = np.interp(np.log1p(known), np.log1p(at), np.log1p(mean))
    beyond = np.sqrt(np.maximum(known / max(int(at[-1]), 1), 1.0))
    return np.where(known > 0, np.expm1(logs) * beyond, 0.0)[levels]
