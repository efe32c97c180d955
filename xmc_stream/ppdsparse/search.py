"""Search jobs: a range of rows, scored for all classes of a block; what violates most outside the active sets is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.csr import count_indices
from xmc_stream.linear.kernels.dcd import ONCE
from xmc_stream.linear.kernels.scores import Tile, in_fours
from xmc_stream.linear.tiles import make_tile, tile_width
from xmc_stream.linear.weights import Unit
from xmc_stream.models.cache import shared_cache
from xmc_stream.ppdsparse.candidates import CandidateWriter, new_candidates
from xmc_stream.ppdsparse.kernels.active import count_below
from xmc_stream.ppdsparse.kernels.sample import count_work, cut_small, keep_large, sparsify
from xmc_stream.ppdsparse.kernels.search import (
    BINS,
    NO_LOSS,
    ActiveAhead,
    BestRows,
    LossSums,
    begin_anew,
    bias_losses,
    close_up,
    loss_grid,
    places,
    search,
)
from xmc_stream.ppdsparse.parameters import APPROXIMATE, EXACT, NARROW, PPDSparseParameters
from xmc_stream.ppdsparse.problem import LossWeights, Problem
from xmc_stream.ppdsparse.state import BIAS, OPEN, ROOM, STATUS, UnitState, new_unit_state
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import a_few_rows
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import LineWriter
from xmc_stream.store.matrix import Block, SparseMatrix, clip_ranges, stream

_WINDOW = 1 << 19  # entries of active sets read at a time


@dataclass(frozen=True)
class UnitSpan:
    """Classes [first, last) of one unit, the unit, its state, and the bytes of their tile (or a bound)."""

    first: int
    last: int
    unit: Unit
    state: str
    tile_bytes: int


class _SpanSearch:
    """The search state of one span: what was found, thresholds, the active rows still ahead, losses; one entry a slot.

    bounds: ends of the job's intervals. Slots that want more rows than an interval has are flushed when it ends.
    """

    def __init__(self, span: UnitSpan, job: SearchJob, dataset: Dataset, bounds: NDArray[np.int64]) -> None:
        self.span, self.job = span, job
        n_rows, interval, parameters = job.stop - job.start, int(bounds[1] - bounds[0]), job.problem.parameters
        low, n_samples = span.first - span.unit.first, dataset.n_samples
        state = UnitState(Path(span.state), span.unit.last - span.unit.first, n_samples, dataset.n_features)
        mine = slice(low, low + span.last - span.first)
        open_ = state.statistics[mine, STATUS] == OPEN
        self.classes = np.flatnonzero(open_)  # of each slot, from span.first
        self.slot_of = np.full(len(open_), -1, np.int16)
        self.slot_of[open_] = np.arange(len(self.classes))
        self.bias = state.statistics[mine, BIAS][open_].astype(np.float32)
        self.width = tile_width(len(self.classes))

        ptr = state.active.ends(mine.start, mine.stop)
        room = state.statistics[mine, ROOM][open_].astype(np.int64)
        wanted = np.minimum(room, 1 if job.check else n_rows)
        large = wanted > interval
        self.flushed, self.kept = np.flatnonzero(large), np.flatnonzero(~large)
        self.wanted = wanted[self.flushed]
        capacity = np.zeros(self.width, np.int64)
        capacity[: len(wanted)] = np.minimum(wanted, interval)
        rows_of_slot = np.full(self.width, n_rows)
        rows_of_slot[self.flushed] = interval
        of_slot = places(capacity, rows_of_slot)
        order = np.concatenate([self.flushed, self.kept])
        end = np.zeros(self.width, np.int64)
        end[order] = np.cumsum(of_slot[order])
        begin = np.zeros(self.width, np.int64)
        begin[order] = end[order] - of_slot[order]
        n_places = int(of_slot.sum())
        threshold = np.full(self.width, np.inf, np.float32)
        threshold[: len(wanted)][wanted > 0] = np.float32(-1.0 - job.near)
        self.best = BestRows(
            capacity, begin, end, np.zeros(self.width, np.int64), np.empty(n_places, np.float32), np.empty(n_places, np.int32),
            threshold,
        )  # fmt: skip
        self.counts = np.zeros((len(self.flushed), BINS), np.int32)
        loss, grid = (
            parameters.loss_code if job.kind == EXACT else NO_LOSS,
            loss_grid(n_samples, job.problem.weights.mean or 1.0),
        )
        positive = np.full(self.width, parameters.positive_weight)
        of_classes = job.problem.weights.of_classes(dataset, span.first, span.last)
        positive[: len(wanted)] *= (of_classes[:, 1] / of_classes[:, 0])[self.classes]
        self.losses = LossSums(loss, grid, positive, np.zeros(self.width), np.zeros(self.width), ONCE.rows)
        self.losses.of_bias[: len(self.bias)] = bias_losses(self.bias, loss, grid)
        self.fours = in_fours(n_samples, dataset.n_features, dataset.X_rows().nnz)

        self.begins = self._begins_of_intervals(state.active, mine, ptr, bounds)
        self.begins[~open_] = 0
        most_active = int(np.diff(self.begins.sum(axis=0)).max())
        self.ahead = ActiveAhead(
            np.zeros(self.width, np.int64), np.zeros(self.width, np.int64), np.empty(most_active, np.int32)
        )  # fmt: skip
        self.start_interval(0)

    @staticmethod
    def _begins_of_intervals(
        active: SparseMatrix, mine: slice, ptr: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where the active rows of each class in each interval begin: (classes, intervals + 1). One pass over the rows."""
        begins = np.empty((len(ptr) - 1, len(bounds)), np.int64)
        begins[:] = ptr[:-1, None]
        low = int(ptr[0])
        for rows in active.index_windows(mine.start, mine.stop, _WINDOW):
            high = low + len(rows)
            # the classes with entries in the window: the last one may go on in the next
            a, b = int(np.searchsorted(ptr, low, "right")) - 1, int(np.searchsorted(ptr, high, "left"))
            count_below(np.clip(ptr[a : b + 1], low, high) - low, rows, bounds, begins[a:b])
            low = high
        return begins

    def start_interval(self, interval: int) -> None:
        """Read the active rows of an interval, as numbers from the job's start, class after class."""
        # not left open: a file of each span of a block is more than a process may have open
        indices = open_array(Path(self.span.state) / "active" / "indices")
        firsts = self.begins[self.classes, interval]
        counts = self.begins[self.classes, interval + 1] - firsts
        ends = np.cumsum(counts)
        self.ahead.end[: len(ends)] = ends
        self.ahead.next[: len(ends)] = ends - counts
        total = int(counts.sum())
        window = np.empty(min(_WINDOW, total), indices.dtype)
        for low in range(0, total, _WINDOW):
            high = min(low + _WINDOW, total)
            indices.read_ranges(*clip_ranges(firsts, counts, low, high), window[: high - low])
            self.ahead.rows[low:high] = window[: high - low] - self.job.start

    def end_interval(self, writer: CandidateWriter) -> None:
        """Write what the interval brought to the slots that are flushed, and empty them."""
        if writer.intervals is not None and len(self.flushed):
            n = len(self.flushed)
            scores = self._append(writer, writer.intervals, self.flushed, np.arange(n), n)
            begin_anew(self.flushed, self.wanted, self.best.size, scores, self.counts, self.best.threshold)

    def end(self, writer: CandidateWriter) -> None:
        """Write what is left, and the losses; classes without a slot, from where the last span ended, are empty."""
        done = self.job.first + writer.rows.lines
        writer.rows.append(np.zeros(self.span.first - done, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))
        self._append(writer, writer.rows, self.kept, self.classes[self.kept], self.span.last - self.span.first)
        losses = self.losses.sums
        if not self.job.problem.weights.of_samples:
            losses = losses + (self.job.stop - self.job.start) * self.losses.of_bias
        writer.losses[self.span.first - self.job.first + self.classes] = losses[: len(self.classes)]

    def _append(
        self, writer: CandidateWriter, to: LineWriter, slots: NDArray[np.int64], lines: NDArray[np.int64], n_lines: int
    ) -> NDArray[np.float32]:
        """Append n_lines lines, with what was found for some slots in theirs; returns the scores, slot after slot."""
        n = close_up(slots, self.best)
        begin = int(self.best.begin[slots[0]]) if len(slots) else 0
        scores, rows = self.best.scores[begin : begin + n], self.best.rows[begin : begin + n]
        sizes, classes = self.best.size[slots], self.span.first - self.job.first + self.classes[slots]
        writer.counts[classes] += sizes
        some = sizes > 0
        if n:
            highest = np.maximum.reduceat(scores, (np.cumsum(sizes) - sizes)[some])
            writer.best[classes[some]] = np.maximum(writer.best[classes[some]], highest)
        lengths = np.zeros(n_lines, np.int64)
        lengths[lines] = sizes
        for low in range(0, max(n, 1), _WINDOW):  # absolute numbers may be twice as wide
            part = slice(low, min(low + _WINDOW, n))
            to.append(lengths if low == 0 else lengths[:0], rows[part] + np.int64(self.job.start), scores[part])
        return scores

    def make_tile(self, n_features: int) -> Tile:
        """Weights of the open classes, by feature: all and whole, of 16 bits, or some of these, see `SearchJob.kind`."""
        weights = SparseMatrix(Path(self.span.state) / "weights").expect((n_features, None), "csc_matrix", np.float32)
        low, job, p = self.span.first - self.span.unit.first, self.job, self.job.problem.parameters
        classes = self.classes.astype(np.int64)
        block = weights.gather(low + classes)
        n = len(block.indices)  # weights that remain
        if job.kind == APPROXIMATE and p.cut > 0:
            n = cut_small(block.indptr, block.indices, block.values, p.cut)
        if job.kind == APPROXIMATE and p.delta > 0:
            labels, of = self.span.first + classes, (block.indptr, block.indices[:n], block.values[:n])
            n = sparsify(*of, labels, job.problem.seed, job.round, p.delta)
        return make_tile(block.indptr, block.indices[:n], block.values[:n], self.bias, n_features, job.kind != EXACT)

    def tile(self, n_features: int) -> AbstractContextManager[Tile]:
        """The tile, from the process's cache or made."""
        key = (self.span.state, self.span.first, self.span.last, self.job.kind)
        make = partial(self.make_tile, n_features)
        return shared_cache(self.job.cache_bytes).use(key, self.span.tile_bytes, make)

    def search(self, x: Block, y: Block, low: int, high: int, tile: Tile, weights: NDArray[np.float64]) -> None:
        """Score rows [low, high) of a row block, all of one interval. weights: of the block's rows."""
        search(
            CSR(x.indptr[low : high + 1], x.indices, x.values), Labels(y.indptr[low : high + 1], y.indices),
            x.start + low - self.job.start, self.span.first, self.slot_of, tile, self.ahead, self.best,
            self.losses._replace(rows=weights[low:high]),
            self.fours and in_fours(high - low, len(tile.start) - 1, int(x.indptr[high] - x.indptr[low])),
        )  # fmt: skip


@dataclass(frozen=True)
class SearchJob:
    """Rows [start, stop) for the classes of a block, or of one of its parts, from the weights of the round before.

    Writes, for each class [first, last) of the block, the rows outside its active set that score highest above
    -1 - near, at most as many as the next round may add, and the loss summed over the rows. check: no round follows, so the
    highest one is enough. kind: EXACT; NARROW, with weights of 16 bits, so that only the rows count and no loss is summed; or
    APPROXIMATE, narrow with the parameters' cut, delta and min_value. interval: rows after which what a class found is
    written where it wants more than so many; its active rows are read as many at a time.
    """

    problem: Problem
    round: int
    check: bool
    kind: str
    start: int
    stop: int
    spans: tuple[UnitSpan, ...]
    parts: int
    out: str
    cache_bytes: int
    interval: int
    near: float

    @property
    def first(self) -> int:
        """First class of the block."""
        return self.spans[0].first

    @property
    def last(self) -> int:
        """Last class of the block, plus one."""
        return self.spans[-1].last

    @property
    def key(self) -> str:
        """Round, classes, rows."""
        kind = f"{self.kind}/" if self.kind else ""
        return f"search/{self.round}/{kind}{self.first}-{self.last}/{self.start}-{self.stop}"

    def run(self) -> Receipt:
        """Search; the receipt counts classes with violators (`found`), bytes, row blocks and, where searches may be
        approximate, multiply-adds.
        """
        problem, dataset = self.problem, Dataset(self.problem.data)
        p, d = problem.parameters, dataset.n_features
        X, Y = dataset.X_rows(), dataset.Y_rows()
        bounds = np.append(np.arange(self.start, self.stop, self.interval), self.stop)
        searches = [_SpanSearch(span, self, dataset, bounds) for span in self.spans]
        searches = [one for one in searches if len(one.classes)]
        flushed = [one.span.first - self.first + one.classes[one.flushed] for one in searches]
        entries = np.zeros(d if p.approximate else 0, np.int32)  # scored, of each feature
        n_blocks, interval, of_rows = 0, 0, problem.weights.of_rows()
        with new_candidates(
            Path(self.out), self.last - self.first, dataset.n_samples, np.concatenate([np.empty(0, np.int64), *flushed])
        ) as writer:
            for x, y in stream((X, Y), problem.plan.row_block_bytes, self.start, self.stop, problem.plan.cuts.rows):
                n_blocks += 1
                weights = of_rows.of_range(x.start, x.start + x.n)
                if self.kind == APPROXIMATE and p.min_value > 0:
                    keep_large(x.indptr, x.indices, x.values, p.min_value)
                if p.approximate:
                    count_indices(x.indices[: x.indptr[-1]], entries)
                low = 0
                while low < x.n:
                    high = min(x.n, int(bounds[interval + 1]) - x.start)
                    for one in searches:
                        with one.tile(d) as tile:
                            one.search(x, y, low, high, tile, weights)
                        del tile  # or it would stay beside the next one, uncounted
                    if x.start + high == bounds[interval + 1]:
                        interval += 1
                        for one in searches:
                            one.end_interval(writer)
                            if interval + 1 < len(bounds):
                                one.start_interval(interval)
                    low = high
            work = {}
            if p.approximate:
                work["work"] = 0
                for one in searches:
                    with one.tile(d) as tile:
                        work["work"] += count_work(entries, tile.start, tile.weights, one.width)
                    del tile
            for one in searches:
                one.end(writer)
            nothing = np.zeros(self.last - self.first - writer.rows.lines, np.int64)
            writer.rows.append(nothing, np.empty(0, np.int32), np.empty(0, np.float32))
        return {
            "found": int(p.violates(writer.best).sum()),
            "row_blocks": n_blocks,
            "passes": (self.stop - self.start) / dataset.n_samples / self.parts,
            "bytes_read": X.bytes_read + Y.bytes_read,
            **work,
        }


def search_in_fours(parameters: PPDSparseParameters) -> None:
    """For a warm-up: search a few rows that are dense enough for tiles of four rows, with weights of both kinds."""
    with a_few_rows(d=6) as dataset:
        path, n, k = dataset.path.parent, dataset.n_samples, dataset.n_labels
        with new_unit_state(path / "state", k, n, dataset.n_features) as writer:
            writer.active.append(np.zeros(k, np.int64), np.zeros(0, np.int32), np.zeros(0))
            writer.weights.append(np.ones(k, np.int64), np.zeros(k, np.int32), np.ones(k, np.float32))
        span, plan = UnitSpan(0, k, Unit(0, k), str(path / "state"), MIB), MemoryPlan(2**40, 256 * MIB, 1)
        problem = Problem(str(dataset.path), parameters, 0, plan, LossWeights(None, n))
        for kind in (EXACT, NARROW):
            SearchJob(problem, 1, False, kind, 0, n, (span,), 1, str(path / f"found{kind}"), MIB, n, 0.0).run()
