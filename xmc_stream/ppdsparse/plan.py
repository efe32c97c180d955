"""What a training by PPDSparse may hold, and how it is cut: shares of units to solve, streams of large classes, searches.

Plans decide where work is cut and never what comes out of it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.order import GROUP, RowOrder
from xmc_stream.linear.tiles import TileRange, widest
from xmc_stream.linear.weights import Unit
from xmc_stream.ppdsparse.kernels.search import BINS, SPARE
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import Share
from xmc_stream.ppdsparse.solver import ROW_BYTES, all_rows_bytes, row_order, start_sizes
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import stream_bytes
from xmc_stream.store.model import UNIT

BUFFERS = 3  # portions of streamed rows in memory: one takes its steps, one is read, one is planned
ACTIVE_BYTES = 15  # of a large class's active row: its number, sign, alpha, whether it is asleep, and new
SCATTER = 8  # a gather of scattered rows takes as long as a stream of so many times the bytes
WRITER_BYTES = 12 * MIB  # of a state and one of large classes: a chunk of each array, copies of what is appended
_WEIGHT_BYTES = 24  # of an active row's weight: of its line in the block, by itself, and while it is read
_MERGING = 60  # bytes a row, while the active set of one class is put together
_SOLVED_BYTES = 352  # of a class in a solve job: two times its statistics, and some 29 numbers
_WINDOWS = 4 * MIB  # what reading indptr and a gather's staging take, per thread
_HELD_PASSES = 2  # of streaming take one thread as long as holding the classes does
# shares of units
_ENOUGH = 4  # units for each thread: their jobs end at much the same time
_SHARES = 2  # for each thread, where there are fewer
_NEARLY = 1e-6  # what rounding may add to a number of shares
_HELD = 4  # X is held where it takes one in so many of a job's bytes at most
_STREAMED = 8  # entries of active rows for each of X, in a share that streams it: passes are little beside the steps
_LEAST = 1 << 22  # entries of active rows in a share: a job's files are little beside that
# of an entry of a first active set in a pass over it, about: later sets are larger, and much of them is asleep
_PASS_SECONDS = 6e-9
_LANE_PASS_SECONDS = 6e-10  # the same, of a class among LANES
# searches
INTERVALS = tuple(4096 << k for k in range(0, 10, 2))  # rows of an interval of a job, if it is not all of its rows
_CLASS_BYTES = 160  # of a class beside its tile and what it finds: some 17 numbers
_SEARCH_ROWS = 131072  # that a job has at least, where that leaves enough jobs: each keeps rows of its own
_MAX_SEARCH_JOBS = 4  # per thread and class block: each keeps what it found on disk until the next round
_SCORE_SECONDS = 4e-10  # of an entry of X and a class, about


@dataclass(frozen=True)
class SolvePlan:
    """What a solve job may hold.

    max_rows: active rows of a batch of classes; max_nnz: entries gathered for it; max_class_nnz: of one class of a
    batch. A class by itself may have as many rows; if it is not large, entries that do not fit are gathered again. room:
    for large classes, see `StreamRoom`; None where no class can become large. beside: jobs of a process that may hold that.
    """

    max_rows: int
    max_nnz: int
    max_class_nnz: int
    room: StreamRoom | None
    beside: int


@dataclass(frozen=True)
class StreamRoom:
    """What a solve job may hold while X streams by for large classes.

    nnz: entries of X, in each of BUFFERS buffers; classes: bytes for the classes solved beside each other; threads: that
    share them. n_strips: of X.
    """

    nnz: int
    classes: int
    threads: int
    n_features: int
    n_strips: int

    def group_bytes(self, order: RowOrder) -> int:
        """Of BUFFERS groups of rows: their places and numbers, each thread's scratch."""
        return ((58 * BUFFERS + 40 * self.threads) << order.strip_bits) * GROUP + MIB

    def together(
        self, n_active: NDArray[np.int64], n_found: NDArray[np.int64] | None = None
    ) -> list[tuple[tuple[int, int], int]]:
        """Ranges of classes that fit beside each other, a larger one by itself, and the bytes that each takes.

        n_found: rows that the searches found for each, where that is known.
        """
        most = n_active if n_found is None else np.maximum(n_active, n_found // 2)
        cuts, begin = [], 0
        while begin < len(n_active):
            # of the classes from here on: what the first, the first two, ... take
            of_class = 8 * self.n_features + 4 * (self.n_strips + 1) + ACTIVE_BYTES * n_active[begin:]
            taken = np.cumsum(of_class) + _MERGING * np.maximum.accumulate(most[begin:])
            n = max(1, int(np.searchsorted(taken, self.classes, "right")))
            cuts.append(((begin, begin + n), int(taken[n - 1])))
            begin += n
        return cuts


def longest_of(dataset: Dataset) -> int:
    """Bytes of a row block that the longest row of X or Y fits into."""
    return max(matrix.block_bytes(MIB // 2) for matrix in (dataset.X_rows(), dataset.Y_rows()))


def plan_solve(
    plan: MemoryPlan, dataset: Dataset, parameters: PPDSparseParameters, warm_start: bool, shares: Sequence[Share],
    beside: int, of_samples: bool,
) -> SolvePlan:  # fmt: skip
    """Share a job's memory between rows and entries.

    beside: jobs that a process runs beside each other; their large classes have the threads that are left. of_samples:
    whether rows have weights. Raises MemoryLimitError where it is too little.
    """
    n_samples, n_features, t = dataset.n_samples, dataset.n_features, beside
    most = np.array([dataset.most_positives()])  # an active set grows with the positives
    largest_class = int(most[0] + start_sizes(most, n_samples)[0])
    order = row_order(n_samples, dataset.X_rows().nnz)
    row_bytes = ROW_BYTES + _WEIGHT_BYTES * of_samples
    # beside what every solve holds: sizes of two kinds of tiles and their work; weights of a warm start; a wide unit
    writer_bytes = WRITER_BYTES + 32 * n_features * parameters.approximate + (20 * n_features + 4 * MIB) * warm_start
    writer_bytes += _SOLVED_BYTES * max(0, *(share.last - share.first - UNIT for share in shares))
    fixed = {
        "features": t * (45 * n_features + 8 * MIB),  # scratch, weights, their counts
        "marks of rows": t * (n_samples // 4 + n_samples // 16),
        "writers and windows": t * (writer_bytes + _WINDOWS),
    }
    # a quarter of what is left is for the numbers of rows, the rest for the rows themselves
    needs = {"rows": t * max(8 * MIB, 4 * min(largest_class, order.large) * row_bytes, 16 * plan.longest // 3)}
    threads, streaming, least = plan.threads // t, 0, 8 * n_features + 4 * MIB
    if n_samples > order.large:
        # beside a group: for taking weights
        streaming = StreamRoom(0, 0, threads, n_features, 0).group_bytes(order) + 25 * n_features
        least += 2 * BUFFERS * max(0, plan.longest - MIB // 2)
        if streaming + least > needs["rows"] // t:
            needs = {"large classes": t * (streaming + least)}
    plan.refuse_unless({**fixed, **needs}, f"solving on {t} threads")
    if parameters.all_rows:
        on_all = {"all rows": t * all_rows_bytes(dataset), "writers and windows": fixed["writers and windows"]}
        plan.refuse_unless(on_all, f"solving on all rows on {t} threads")
    left = (plan.budget - sum(fixed.values())) // t
    rows = left // 4 // row_bytes  # of a batch, or of a class by itself
    room = None
    if streaming:
        # half of what is left at most; a group takes 16 to 32 MiB on average
        nnz = max(plan.longest, min((left - streaming - 8 * n_features) // (2 * BUFFERS), 36 * MIB)) // 8
        room = StreamRoom(nnz, left - streaming - 8 * BUFFERS * nnz, threads, n_features, order.n_strips)
    return SolvePlan(min(rows, plan.cuts.solve_rows or rows), left * 9 // 16 // 8, left * 3 // 16 // 8, room, beside)


def cut_shares(
    units: Sequence[Unit], dataset: Dataset, plan: MemoryPlan, parameters: PPDSparseParameters
) -> tuple[list[Share], int]:
    """Units in shares of nearly equal work, and how many of them a process solves beside each other, at most.

    There are two for each thread of all workers at least, or whole units where these are enough; and so many that none takes
    much longer than `MemoryPlan.job_seconds`. A class counts by the rows that it begins with: all of them, if `all_rows` is
    set. Where there are large classes and jobs cannot hold X, every share streams X by itself, and the threads of a
    process share that (see `streaming`): so each has a process with all its threads and memory for itself, and there are no
    more than are worth that.
    """
    at_once, all_rows = plan.threads * plan.processes, bool(parameters.all_rows)
    n, nnz = dataset.n_samples, dataset.X_rows().nnz
    counts = dataset.label_counts()
    rows = np.where((counts > 0) & (counts < n), n, 0) if all_rows else counts + start_sizes(counts, n)
    entries = np.concatenate([[0.0], np.cumsum(rows * (nnz / n))])
    enough = at_once == 1 or len(units) >= _ENOUGH * at_once
    wanted = 1 if enough else at_once if all_rows else _SHARES * at_once
    least, beside = _LEAST, plan.threads
    # the round that passes over a class's rows most often
    passes = max(parameters.epochs_of(0), parameters.epochs_of((parameters.common_rounds or 1) - 1))
    longest = plan.job_seconds / (passes * (_LANE_PASS_SECONDS if all_rows else _PASS_SECONDS))
    if not all_rows and int(rows.max(initial=0)) > row_order(n, nnz).large and 8 * nnz > plan.per_thread // _HELD:
        longest = max(longest, _STREAMED * nnz)
        if not enough:
            wanted, beside = plan.processes, 1 if len(units) <= plan.processes else plan.threads
    if plan.cuts.shares:
        wanted, least = plan.cuts.shares, 1
    size = max(least, min(entries[-1] / wanted, longest))
    step = LANES * nnz if all_rows and not plan.cuts.shares else 0  # what is solved together stays together
    middles = (entries[1:] + entries[:-1]) / 2
    shares = []
    for unit in units:
        begin, end = entries[unit.first], entries[unit.last]
        parts = max(1, math.ceil((end - begin) / size - _NEARLY))
        places = np.linspace(begin, end, parts + 1)[1:-1]
        if step:
            places = begin + step * np.maximum(1, np.round((places - begin) / step))
        bounds = np.searchsorted(middles, places)  # the nearest end of a class
        cut = sorted({unit.first, *np.clip(bounds, *unit).tolist(), unit.last})
        shares += [Share(first, last, unit) for first, last in itertools.pairwise(cut)]
    return shares, beside


def solve_plan(
    dataset: Dataset, plan: MemoryPlan, parameters: PPDSparseParameters, warm_start: bool, units: Sequence[Unit],
    of_samples: bool = False, guided: bool = False,
) -> tuple[list[Share], SolvePlan]:  # fmt: skip
    """What the solve jobs of a round solve, and what one may hold. Raises MemoryLimitError where that is too little.

    guided: whether groups of labels are learned, which may be beside the first solves, as one more job.
    """
    others = int(guided and not parameters.all_rows)
    whole = [Share(*unit, unit) for unit in units]
    # as many jobs as threads need more memory than one: where it is not there, there are as few as one thread would have
    few, _ = cut_shares(units, dataset, replace(plan, threads=1, processes=1, cuts=Cuts()), parameters)
    cut, beside = cut_shares(units, dataset, plan, parameters)
    ways = [(cut, min(beside, len(cut) + others)), (few, min(plan.threads, len(few)))]
    if parameters.all_rows:  # it may hold all rows once, where it cannot for each thread
        ways.append((few, 1))
    elif few != whole:
        ways.append((whole, min(plan.threads, len(whole))))
    for shares, beside in ways[:-1]:
        with suppress(MemoryLimitError):
            return shares, plan_solve(plan, dataset, parameters, warm_start, shares, beside, of_samples)
    shares, beside = ways[-1]
    return shares, plan_solve(plan, dataset, parameters, warm_start, shares, beside, of_samples)


def choose_streamed(
    n_active: NDArray[np.int64], epochs: int, sizes: SolvePlan, nnz: int, n_samples: int
) -> NDArray[np.bool_]:
    """Which large classes, with so many active rows, are solved as X streams by: it changes no bit of the result.

    Those that do not fit otherwise; all of them where that reads less than gathering their rows, or where the job has so
    many threads, which share them only then, that it is sooner done: a class that is held takes about as long as two
    passes of streaming it, as rows asleep cost nothing then (see benchmarks/README.md).
    """
    if sizes.room is None or not len(n_active):
        return np.zeros(len(n_active), np.bool_)
    mean = nnz / n_samples
    fits = (n_active <= sizes.max_rows) & (1.2 * mean * n_active <= sizes.max_class_nnz)
    if nnz <= sizes.max_nnz:  # a batch gathers X at most
        gathered = nnz * (1 + n_active.sum() / max(sizes.max_rows, 1))
    else:
        gathered = np.minimum(SCATTER * mean * n_active, nnz).sum()
    streams_less = len(sizes.room.together(n_active)) * (epochs + 2) * nnz < gathered
    shared = sizes.room.threads > 1 and epochs + 2 <= _HELD_PASSES * sizes.room.threads
    return np.asarray(~fits | streams_less | shared)


def held_rows(sizes: NDArray[Any]) -> list[int]:
    """How many rows some classes with so many rows hold at a time: for each of INTERVALS, and where an interval is all rows."""
    return [*(int(np.minimum(sizes, interval).sum()) for interval in INTERVALS), int(sizes.sum())]


@dataclass(frozen=True)
class SearchSize:
    """What a search needs for some classes of a unit: their tile; rows wanted, and of active sets, as `held_rows`."""

    span: TileRange
    wanted: Sequence[int]
    active: Sequence[int]


@dataclass(frozen=True)
class _Load:
    """The sums over some sizes; `making`: the weights of the largest one."""

    tiles: int = 0
    classes: int = 0
    making: int = 0
    wanted: Sequence[int] = (0,) * (len(INTERVALS) + 1)
    active: Sequence[int] = (0,) * (len(INTERVALS) + 1)

    def plus(self, size: SearchSize) -> _Load:
        return _Load(
            self.tiles + size.span.tile,
            self.classes + size.span.last - size.span.first,
            max(self.making, size.span.weights),
            [a + b for a, b in zip(self.wanted, size.wanted, strict=True)],
            [a + b for a, b in zip(self.active, size.active, strict=True)],
        )

    def needs(self, plan: MemoryPlan, n_features: int, rows: int, interval: int) -> dict[str, int]:
        """See `search_needs`. rows: of a search job at most."""
        t, k, intervals = plan.threads, bisect_left(INTERVALS, interval), -(-rows // interval)
        wanted = self.wanted[k]
        flushed = min(self.classes, self.wanted[-1] // interval) if intervals > 1 else 0
        found = 12 * wanted + 8 * SPARE * self.classes  # see `places`
        return {
            "tiles": self.tiles,
            "rows found": t * (found + 4 * BINS * flushed),
            "active sets": t * 4 * self.active[k],
            "classes": t * (_CLASS_BYTES + 8 * intervals) * self.classes,
            "making tiles": t * (8 * self.making + 8 * n_features),
            "row blocks": t * (2 * plan.row_block_bytes + _WINDOWS),
        }


def search_needs(
    plan: MemoryPlan, sizes: Sequence[SearchSize], n_features: int, n_samples: int, parts: int = 1
) -> dict[str, int]:
    """Bytes by component that a search of spans of these sizes takes in a process, by intervals of `search_interval`.

    parts: that jobs take of the spans, then without intervals.
    """
    load, rows = reduce(_Load.plus, sizes, _Load()), most_rows(plan, n_samples, parts)
    if parts == 1:
        return load.needs(plan, n_features, rows, _interval(plan, load, n_features, rows))
    loads = (reduce(_Load.plus, sizes[low:high], _Load()) for low, high in even_ranges(len(sizes), parts))
    needs = [{**of.needs(plan, n_features, rows, rows), "tiles": load.tiles} for of in loads]
    return max(needs, key=lambda of: sum(of.values()))


def search_interval(plan: MemoryPlan, sizes: Sequence[SearchSize], n_features: int, n_samples: int) -> int:
    """Rows of an interval of a search of spans of these sizes: the longest that fit; all of a job's rows where they do."""
    return _interval(plan, reduce(_Load.plus, sizes, _Load()), n_features, most_rows(plan, n_samples))


def most_rows(plan: MemoryPlan, n_samples: int, parts: int = 1) -> int:
    """Of a search job of a class block, whose spans so many jobs share."""
    return -(-n_samples // _fewest_ranges(plan, n_samples, parts))


def _interval(plan: MemoryPlan, load: _Load, n_features: int, rows: int) -> int:
    """The longest interval that fits, else the one that needs least."""
    if plan.cuts.interval:
        return min(plan.cuts.interval, rows)
    totals = {}
    for interval in (rows, *(interval for interval in reversed(INTERVALS) if interval < rows)):
        totals[interval] = sum(load.needs(plan, n_features, rows, interval).values())
        if totals[interval] <= plan.budget:
            return interval
    return min(totals, key=totals.__getitem__)


def class_blocks(
    plan: MemoryPlan, units: Sequence[Sequence[SearchSize]], n_features: int, n_samples: int, at_least: int = 1
) -> list[list[SearchSize]]:
    """Sizes of spans of units in blocks, each as long as the budget allows. units: of each, all spans it may be cut into.

    at_least: blocks that a forecast promised; they are made of nearly equal size. Raises MemoryLimitError for a smallest
    span that does not fit by itself.
    """
    rows = most_rows(plan, n_samples)
    blocks = _cut_blocks(plan, units, n_features, rows)
    if len(blocks) >= at_least:
        return blocks
    low, high, more = 0, plan.budget, blocks
    while high - low > plan.budget // 256:  # the largest budget that gives as many
        middle = (low + high) // 2
        try:
            cut = _cut_blocks(replace(plan, budget=middle), units, n_features, rows)
        except MemoryLimitError:  # not a single span fits
            low = middle
            continue
        if len(cut) < at_least:
            high = middle
        else:
            low, more = middle, cut
    while len(more) > at_least:  # the two neighbours that are smallest together become one
        sizes = [
            _bytes(plan, reduce(_Load.plus, [*a, *b], _Load()), n_features, rows) for a, b in itertools.pairwise(more)
        ]
        at = sizes.index(min(sizes))
        more[at : at + 2] = [[*more[at], *more[at + 1]]]
    return more


def _bytes(plan: MemoryPlan, load: _Load, n_features: int, rows: int) -> int:
    return sum(load.needs(plan, n_features, rows, _interval(plan, load, n_features, rows)).values())


def _cut_blocks(
    plan: MemoryPlan, units: Sequence[Sequence[SearchSize]], n_features: int, rows: int
) -> list[list[SearchSize]]:
    def fit(load: _Load) -> bool:
        return _bytes(plan, load, n_features, rows) <= plan.budget

    blocks: list[list[SearchSize]] = []
    load = _Load()  # of the last block
    for sizes in units:
        of = {size.span: size for size in sizes}
        for span in widest(of, lambda span: fit(_Load().plus(of[span]))):  # noqa: B023 - called at once
            size = of[span]
            alone, together = _Load().plus(size), load.plus(size)
            if blocks and fit(together):
                blocks[-1].append(size)
                load = together
                continue
            what = f"the search for classes {span.first} to {span.last - 1} on {plan.threads} threads"
            plan.refuse_unless(alone.needs(plan, n_features, rows, _interval(plan, alone, n_features, rows)), what)
            blocks.append([size])
            load = alone
    return blocks


def search_parts(plan: MemoryPlan, dataset: Dataset, sizes: Sequence[SearchSize]) -> int:
    """How many jobs share the spans of a search's only class block, for each range of rows.

    Jobs that share rows each find as many rows a class as one alone would, and other processes make the same tiles; jobs
    that share classes only read the same rows. So where a job would have few rows, and all are read from memory. Parts
    differ by a span: they are as many as fit and leave a tenth of the time idle at most.
    """
    n, at_once, spans = dataset.n_samples, plan.threads * plan.processes, len(sizes)
    if at_once == 1 or n >= at_once * _SEARCH_ROWS:
        return 1
    if stream_bytes((dataset.X_rows(), dataset.Y_rows()), [(0, n)]) > plan.limit:
        return 1
    parts = [k for k in range(2, min(at_once, spans) + 1) if at_once % k == 0 and 10 * k * -(-spans // k) <= 11 * spans]
    fit = (k for k in parts if sum(search_needs(plan, sizes, dataset.n_features, n, k).values()) <= plan.budget)
    return max(fit, default=1)


def _fewest_ranges(plan: MemoryPlan, n_samples: int, parts: int) -> int:
    at_once = plan.threads * plan.processes // parts
    ranges = min(max(at_once, n_samples // _SEARCH_ROWS), _MAX_SEARCH_JOBS * at_once)
    return max(ranges, -(-n_samples // 2**31))  # a job numbers its rows in four bytes


def search_ranges_of(
    plan: MemoryPlan, sizes: Sequence[SearchSize], n_samples: int, nnz: int, parts: int
) -> list[tuple[int, int]]:
    """The rows of each search job for a class block of these sizes: more than the fewest where jobs would take long.

    nnz: entries of X. What more jobs find takes no more of the disk than X, at most.
    """
    fewest = _fewest_ranges(plan, n_samples, parts)
    classes, wanted = (sum(of) for of in zip(*((s.span.last - s.span.first, s.wanted[-1]) for s in sizes), strict=True))
    wished = int(_SCORE_SECONDS * nnz * classes / (parts * plan.job_seconds))
    return even_ranges(n_samples, max(fewest, min(wished, 8 * nnz // max(12 * wanted, 1))))
