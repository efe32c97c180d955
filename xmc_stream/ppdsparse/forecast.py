"""What a training run will do, from sizes, parameters and a probe: passes, bytes, blocks, peak memory, seconds.

Sizes of classes are spread from the probe's sample over all classes by label count. The number of class blocks of each
search is part of the forecast, and the run keeps to it (`PPDSparseRun.blocks`): so passes and the bytes they stream are
known before the first one. Bytes that the solves gather depend on what the searches find: they are estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.implied import implied_needs, implied_read
from xmc_stream.linear.tiles import EIGHTH, TileRange, tile_width, widest
from xmc_stream.linear.weights import LinearWeights, cut_units
from xmc_stream.methods.start import match_bytes
from xmc_stream.methods.weights import Given
from xmc_stream.ppdsparse.groups import (
    group_needs,
    groups_read,
    groups_run_beside,
    groups_work,
)
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import (
    INTERVALS,
    SCATTER,
    WRITER_BYTES,
    SearchSize,
    SolvePlan,
    choose_streamed,
    class_blocks,
    held_rows,
    longest_of,
    most_rows,
    search_needs,
    search_parts,
    search_ranges_of,
    solve_plan,
)
from xmc_stream.ppdsparse.problem import guide_weight, implied_margin
from xmc_stream.ppdsparse.solver import added_sizes, all_rows_bytes, row_order, start_sizes, warm_sizes
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import stream_bytes

_MORE_WEIGHTS = 1.12  # than after the first round: with the margin, 1.29 times as many, the most on 15 real sets
_KEPT = 0.75  # of an active set's rows after a later round: 0.6 to 0.93 were seen, 0.7 on the large sets
_MARGIN = 1.15  # on sizes that the sample only estimates
_SIFTING = 1.4e-7  # seconds for a row that a search job keeps: it meets some six times as many
_CLASS_BYTES = 144  # of a class while a training is planned: what it holds and takes in each round, as foreseen
_CONSTANT = 1.0  # seconds for loading kernels, checking, small files
_ROUNDS_SHOWN = 3  # of a run without a cap on rounds, in the forecast of its memory
_ALL_ROUNDS, _WRITING = 0.85, 0.97  # of a run: where rounds of every class end, and where the model is written

Needs = dict[str, int]
Span = tuple[float, float]


class _Cut(NamedTuple):
    """Of a search: its class blocks, the parts that jobs take of a block, the ranges of rows of each, bytes by component."""

    blocks: int
    parts: int
    ranges: list[tuple[int, int]]
    needs: Needs


class _Streams(NamedTuple):
    """Of a round: classes solved as X streams by, how often it does in all, bytes of the most that go together."""

    classes: NDArray[np.bool_]
    passes: int
    largest: int


class PPDSparseForecaster(Forecaster):
    """Spreads a probe over all classes once, then forecasts for any memory plan."""

    def __init__(
        self, dataset: Dataset, parameters: PPDSparseParameters, probe: Receipt, warm_start: LinearWeights | None = None,
        carried: bool = False, given: Given | None = None,
    ) -> None:  # fmt: skip
        if warm_start is not None:
            # which labels are new by their names is not known yet
            parameters = parameters.warm(warm_start.n_labels != dataset.n_labels)
        self.dataset, self.parameters, self.probe, self.warm_start = dataset, parameters, probe, warm_start
        self.X, self.Y = dataset.X_rows(), dataset.Y_rows()
        self.longest = longest_of(dataset)
        self.units = cut_units(dataset)
        # the first class of each eighth of a unit
        self.eighths = [np.arange(*unit, EIGHTH * len(unit.numbers)) for unit in self.units]
        n = dataset.n_samples
        counts = dataset.label_counts()
        self.row_length = self.X.nnz / n
        self.rounds = parameters.common_rounds or _ROUNDS_SHOWN
        started = np.where(counts > 0, n, 0) if parameters.all_rows else counts + start_sizes(counts, n)
        self.weights = np.minimum(_spread(counts, probe["counts"], probe["weights"]), dataset.n_features)
        share = _spread(counts, probe["counts"], probe["kept"]) / np.maximum(
            _spread(counts, probe["counts"], probe["started"]), 1.0
        )
        kept = started * np.minimum(share, 1.0)
        if warm_start is not None:
            started = np.where(counts > 0, counts + warm_sizes(counts, parameters.added, n), 0)
        self.active = [started.astype(np.float64)]  # rows of each class in each solve, at most
        self.kept = [np.minimum(kept * _MARGIN, started)]  # and after it
        brought = np.maximum(self.active[0] - counts, 0) * (warm_start is not None)
        self.found = [brought]  # rows that the search before it brings, of one job
        for round_ in range(1, self.rounds):
            before = self.kept[-1].astype(np.int64)
            room = np.where(
                counts > 0, added_sizes(before, parameters.added, n, parameters.growth_after(round_ - 1)), 0
            )
            self.found.append(room.astype(np.float64))
            self.active.append(np.minimum(self.kept[-1] + room, n))
            self.kept.append(self.active[-1] * _KEPT)
        self.learned = counts > 0
        self.order = row_order(n, self.X.nnz)
        self.guided = guide_weight(parameters, dataset) > 0
        self.lifts = implied_margin(parameters, dataset) is not None
        self.carried = carried  # a trial: one search, no check
        self.of_samples = given is not None and given.samples is not None  # whether they have weights
        # where the first solve sees all rows, a search follows only if classes need more rounds, which nobody foresees
        self.seen = bool(parameters.all_rows) and parameters.common_rounds is not None
        self.searches = self.rounds + (warm_start is not None) - (carried or self.seen)
        self._sums: dict[tuple[int, bool], NDArray[np.float64]] = {}  # of each round, see `_eighths`

    def check(self, plan: MemoryPlan) -> None:
        """Whether every phase fits."""
        self.forecast(plan)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether a search takes all classes at once."""
        return bool(sum(self.forecast(plan)["class_blocks"]) == self.searches)

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """What the contract asks for. Raises MemoryLimitError as the run would.

        class_blocks: of each search, the check included. passes: readings of all rows: searches, a class block each, and by
        shares that are solved on all rows. solve_passes: how often X streams by for large classes, at most. bytes_streamed:
        by the searches, exact where jobs do not share classes; bytes_gathered: by the solves, estimated.
        """
        plan = replace(plan, longest=self.longest)
        d, p = self.dataset, self.parameters
        refuse_too_many_classes(plan, d)
        warm = self.warm_start
        shares, solve = solve_plan(d, plan, p, warm is not None, self.units, self.of_samples, self.guided)
        starts = np.array([share.first for share in shares])
        phases = self._before_rounds(plan)
        cuts: list[_Cut] = []  # of each search
        if warm is not None:
            known = warm.shape == (d.n_features, d.n_labels)
            units = self._start_units(warm) if known else self._units(0, False)
            cuts.append(self._cut(plan, units))
            phases["warm start: search"] = cuts[-1].needs
        streams = [self._streamed(solve, starts, round_) for round_ in range(self.rounds)]
        for round_, of_round in enumerate(streams):
            if self._on_all_rows(round_):
                needs = self._all_rows_needs(solve)
            else:
                needs = self._solve_needs(plan, solve, starts, round_, of_round, len(cuts[-1].ranges) if cuts else 1)
            if self.guided and not round_ and groups_run_beside(plan, d, p, len(shares), solve.beside):
                of_groups, of_solves = sum(group_needs(plan, d).values()), sum(needs.values())
                needs = {**needs, "groups of labels": max(0, of_groups - of_solves // plan.threads)}
            phases[f"round {round_ + 1}: solve"] = needs
            if (self.carried and round_ + 1 == self.rounds) or (self.seen and p.max_rounds == 1):
                break
            cut = self._cut(plan, self._units(round_, round_ + 1 == self.rounds))
            name = "check" if round_ + 1 == p.max_rounds else f"round {round_ + 2}: search"
            phases[name] = cut.needs
            if not self.seen:
                cuts.append(cut)
        streamed = sum(stream_bytes((self.X, self.Y), cut.ranges) * cut.blocks * cut.parts for cut in cuts)
        reads = self._solve_reads(solve, starts, streams)
        apart = (groups_read(plan, d) if self.guided else 0) + (implied_read(d) if self.lifts else 0)
        gathered = int(sum(map(sum, reads))) + apart
        row_bytes = max(matrix.nnz * matrix.entry_bytes + 8 * d.n_samples for matrix in (self.X, self.Y))
        row_blocks = max([-(-row_bytes // plan.row_block_bytes), *(cut.parts * len(cut.ranges) for cut in cuts)])
        jobs = min(len(shares), solve.beside * plan.processes) if p.all_rows else len(shares)
        blocks = [cut.blocks for cut in cuts]
        largest = max(phases, key=lambda name: sum(phases[name].values()))
        seconds = self._seconds(plan, streamed, reads, cuts, jobs)
        return {
            "passes": sum(blocks) + (len(shares) if p.all_rows else 0),
            "solve_passes": sum(of.passes for of in streams),
            "rounds_known": p.max_rounds is not None,
            "class_blocks": blocks,
            "row_blocks": row_blocks,
            "bytes_read": streamed + gathered,
            "bytes_streamed": streamed,
            "bytes_gathered": gathered,
            "peak_phase": largest,
            "peak_parts": phases[largest],
            "seconds": round(sum(seconds.values()) + _CONSTANT, 1),
            "phase_seconds": {name: float(f"{of:.3g}") for name, of in seconds.items()},
        }

    def _before_rounds(self, plan: MemoryPlan) -> dict[str, Needs]:
        """What phases hold that come before the rounds, or behind them and alone; each must fit."""
        d, phases = self.dataset, {}
        if self.guided:
            phases["groups of labels"] = group_needs(plan, d)
            plan.refuse_unless(phases["groups of labels"], "learning groups of labels")
        if self.lifts:
            phases["implied labels"] = implied_needs(plan, d)
            plan.refuse_unless(phases["implied labels"], "finding implied labels")
        if self.warm_start is not None:
            phases["warm start: labels"] = {"labels of both": match_bytes(self.warm_start, d)}
            plan.refuse_unless(phases["warm start: labels"], "matching labels")
        return phases

    def _cut(self, plan: MemoryPlan, units: Sequence[Sequence[SearchSize]]) -> _Cut:
        """How a search of units of such sizes is cut into jobs, and what the one that needs most holds."""
        n, nnz = self.dataset.n_samples, self.X.nnz
        blocks = class_blocks(plan, units, self.dataset.n_features, n)
        parts = search_parts(plan, self.dataset, blocks[0]) if len(blocks) == 1 else 1
        ranges = [search_ranges_of(plan, sizes, n, nnz, parts) for sizes in blocks]
        needs = (self._search_needs(plan, sizes, parts) for sizes in blocks)
        most = max(needs, key=lambda of: sum(of.values()), default={})
        return _Cut(len(blocks), parts, max(ranges, key=len, default=[(0, n)]), most)

    def _start_units(self, model: LinearWeights) -> list[list[SearchSize]]:
        """What the jobs of a warm start will say of the model's tiles."""
        counts = self.dataset.label_counts()
        wanted = self.active[0] - counts
        spans = [[TileRange(*span) for span in some] for some in model.tiles]
        units = []
        for unit in self.units:
            mine = spans[unit.numbers[0]]
            if len(unit.numbers) > 1:  # one tile instead of many
                parts = [widest(spans[number], lambda span: True)[0] for number in unit.numbers]
                of_features = 4 * (self.dataset.n_features + 1)
                tile = sum(span.tile - of_features for span in parts) + of_features
                mine = [TileRange(*unit, tile, sum(span.weights for span in parts))]
            sizes = []
            for span in mine:
                classes = slice(span.first, span.last)
                sizes.append(SearchSize(span, held_rows(wanted[classes]), held_rows(counts[classes])))
            units.append(sizes)
        return units

    def _units(self, round_: int, check: bool) -> list[list[SearchSize]]:
        """What each unit's solve job will say of its tiles, as foreseen."""
        if (round_, check) not in self._sums:
            self._sums[round_, check] = self._eighths(round_, check)
        more = _MARGIN * (_MORE_WEIGHTS if round_ else 1.0)
        units, low = [], 0
        for unit, starts in zip(self.units, self.eighths, strict=True):
            eighths, low = self._sums[round_, check][:, low : low + len(starts)], low + len(starts)
            sizes = []
            for level in range(4):
                firsts = starts[:: 1 << level]
                of_spans = np.add.reduceat(eighths, np.arange(0, len(starts), 1 << level), axis=1)
                for first, last, of in zip(firsts, [*firsts[1:], unit.last], of_spans.T, strict=True):
                    learned, weights, rows = int(of[0]), int(of[1] * more), of[2:].astype(np.int64).tolist()
                    if learned:
                        fixed = 4 * (self.dataset.n_features + 1) + 4 * tile_width(learned)
                        span = TileRange(
                            int(first), int(last), int(weights * self.probe["tile_ratio"]) + fixed, weights
                        )
                        sizes.append(SearchSize(span, rows[: len(INTERVALS) + 1], rows[len(INTERVALS) + 1 :]))
                if len(firsts) == 1:
                    break
            if sizes:
                units.append(sizes)
        return units

    def _eighths(self, round_: int, check: bool) -> NDArray[np.float64]:
        """Sums over each eighth of a unit: classes learned, their weights, then `held_rows` of what is wanted and kept."""
        p, n, kept = self.parameters, self.dataset.n_samples, self.kept[round_]
        room = added_sizes(np.ceil(kept).astype(np.int64), p.added, n, p.growth_after(round_))
        wanted = np.where(self.learned, 1 if check else room, 0)
        in_memory = (np.minimum(sizes, interval) for sizes in (wanted, kept) for interval in (*INTERVALS, n))
        of_classes = itertools.chain((self.learned, self.weights), in_memory)
        starts = np.concatenate(self.eighths)
        return np.array([np.add.reduceat(of, starts, dtype=np.float64) for of in of_classes])

    def _search_needs(self, plan: MemoryPlan, sizes: Sequence[SearchSize], parts: int) -> Needs:
        """As `search_needs`, with what stays untouched left out."""
        needs = search_needs(plan, sizes, self.dataset.n_features, self.dataset.n_samples, parts)
        rows = most_rows(plan, self.dataset.n_samples, parts)
        x, y = (int(matrix.nnz / matrix.n_lines * matrix.entry_bytes * rows) for matrix in (self.X, self.Y))
        x = min(x, plan.row_block_bytes)
        y = min(y, int(x * self.Y.nnz * self.Y.entry_bytes / max(1, self.X.nnz * self.X.entry_bytes) * 2))
        needs["row blocks"] = plan.threads * (x + y + 3 * MIB)
        if (
            parts == 1
        ):  # the threads come to the tiles in the same order, and all of a block stay: one is made at a time
            needs["making tiles"] //= plan.threads
        return needs

    def _solve_needs(
        self, plan: MemoryPlan, sizes: SolvePlan, starts: NDArray[np.int64], round_: int, streams: _Streams, ranges: int
    ) -> Needs:
        """Of the shares with most active rows, one a thread: of their large classes that stream, or of their batches.

        starts: where the shares begin. streams: of the round. ranges: of the rows, in each of which the search before looked
        by itself.

        Sets are merged before rows are gathered: in a share that is one batch, memory holds one or the other.
        """
        d, t = self.dataset, sizes.beside
        active = np.where(streams.classes, 0.0, self.active[round_])
        found = np.where(streams.classes, 0.0, self.found[round_] * ranges)
        of_share = np.add.reduceat(active, starts)
        found_of_share = np.add.reduceat(np.minimum(found, d.n_samples), starts)
        bound = of_share + found_of_share / 4  # as solve jobs cut shares into batches
        # the part of a batch that follows a full one, with whose rows its merging shares the memory
        second = min(1.0, max(0.0, float(bound.max()) / sizes.max_rows - 1.0)) if self.X.nnz <= sizes.max_nnz else 1.0
        batch = np.minimum(1.0, max(sizes.max_rows, float(active.max())) / np.maximum(bound, 1.0))
        rows, brought = of_share * batch, found_of_share * batch
        union = np.minimum(rows, d.n_samples)

        def most(of_each: NDArray[np.float64]) -> int:
            return int(np.sort(of_each)[-t:].sum())

        largest = float(active.max())
        of_class = min(largest * self.row_length, sizes.max_class_nnz) * 8 + min(largest, sizes.max_rows) * 25
        # bytes a row, see ROW_BYTES: of what is kept, what was found twice, and what becomes of them
        merging = {"active sets": most(rows * 23), "rows found": most(brought * 20)}
        solving = {
            "active sets": most(rows * 30 + union * 24),
            "rows gathered": most(np.minimum(union * self.row_length, sizes.max_nnz)) * self.X.entry_bytes,
            "one class": t * int(of_class) + t * 8 * min(sizes.max_rows, d.n_samples),
        }
        if self.of_samples:
            solving["weights of rows"] = most(union * 8) + t * 16 * min(int(largest), sizes.max_rows)
        written = most(np.add.reduceat(self.weights, starts)) * _MORE_WEIGHTS * 8
        solving["rows found"] = int(second * merging["rows found"])
        kinds = [merging, solving]
        if streams.largest and sizes.room is not None:
            groups = sizes.room.group_bytes(self.order) + 16 * d.n_features
            kinds.append({
                "large classes": t * min(streams.largest, sizes.room.classes),
                "rows gathered": t * 2 * min(8 * sizes.room.nnz, self.X.nnz * self.X.entry_bytes),
                "groups of rows": t * groups,
            })  # fmt: skip
        needs = max(kinds, key=lambda of: sum(of.values()))
        return {
            **needs,
            "features": t * 36 * d.n_features + int(min(written, t * 8.0 * max(d.n_features, 1 << 20))),
            "marks of rows": t * (d.n_samples // 8 + d.n_samples // 16),
            "writers and windows": t * 3 * MIB + int(min(written + most(rows) * 12, t * WRITER_BYTES)),
        }

    def _on_all_rows(self, round_: int) -> bool:
        return bool(self.parameters.all_rows) and not round_

    def _all_rows_needs(self, sizes: SolvePlan) -> Needs:
        """What a process holds while the first round solves on all rows."""
        written = min(LANES * 8 * float(self.weights.max(initial=0)), WRITER_BYTES)
        return {
            "all rows": sizes.beside * all_rows_bytes(self.dataset),
            "writers and windows": int(sizes.beside * (3 * MIB + written)),
        }

    def _streamed(self, sizes: SolvePlan, starts: NDArray[np.int64], round_: int) -> _Streams:
        n_labels, n = self.dataset.n_labels, self.dataset.n_samples
        active, epochs = self.active[round_].astype(np.int64), self.parameters.epochs_of(round_)
        streamed, passes, largest = np.zeros(n_labels, np.bool_), 0, 0
        large = np.flatnonzero((active > self.order.large) & (not self._on_all_rows(round_)))
        of_shares = np.searchsorted(starts, large, "right")
        for classes in np.split(large, np.flatnonzero(np.diff(of_shares)) + 1):
            chosen = classes[choose_streamed(active[classes], epochs, sizes, self.X.nnz, n)]
            if len(chosen) and sizes.room is not None:
                streamed[chosen] = True
                turns = sizes.room.together(active[chosen])
                passes += len(turns) * (epochs + 2)
                largest = max(largest, *(n_bytes for _, n_bytes in turns))
        return _Streams(streamed, passes, largest)

    def _solve_reads(
        self, sizes: SolvePlan, starts: NDArray[np.int64], streams: Sequence[_Streams]
    ) -> list[tuple[float, float]]:
        """Bytes that the solves of each round stream, X for large classes, and gather: each share's active rows, once a
        batch, and the positives.
        """
        n, reads = self.dataset.n_samples, []
        of_pass = float(self.X.nnz * self.X.entry_bytes + 8 * n)
        for round_, of_round in enumerate(streams):
            if self._on_all_rows(round_):
                reads.append((0.0, len(starts) * of_pass + self.Y.nnz * self.Y.entry_bytes))
                continue
            rows = np.add.reduceat(np.where(of_round.classes, 0.0, self.active[round_]), starts)
            batches = np.maximum(1, np.ceil(np.minimum(rows, n) * self.row_length / max(sizes.max_nnz, 1)))
            batches = np.maximum(batches, np.ceil(rows / max(sizes.max_rows, 1)))
            union = n * -np.expm1(-rows / batches / n)  # as if drawn at random
            held = float((batches * (union * self.row_length * self.X.entry_bytes + 8.0 * n)).sum())
            reads.append((of_round.passes * of_pass, held + self.Y.nnz * self.Y.entry_bytes))
        return reads

    def _seconds(
        self, plan: MemoryPlan, streamed: int, reads: list[tuple[float, float]], cuts: Sequence[_Cut], jobs: int
    ) -> dict[str, float]:
        """Of each phase: steps, scores and reading at the probe's rates, shared by the threads; what is constant added.

        streamed: bytes that the searches read. reads: of the solves, by `_solve_reads`. jobs: that solve at a time.
        """
        d, p, probe = self.dataset, self.parameters, self.probe
        threads, warm = plan.threads * plan.processes, self.warm_start is not None
        solving = min(threads, jobs)
        seconds: dict[str, float] = {}
        scored = float(d.n_samples) * int(self.learned.sum()) * probe["score"]
        scored += streamed / max(self.searches, 1) * probe["stream"]
        # the probe gathers few rows, far apart; the more there are, the less a byte takes
        gather = min(probe["gather"], SCATTER * probe["stream"])
        for round_, active in enumerate(self.active):
            if round_ or warm:
                sifted = _SIFTING * float(self.found[round_].sum()) * len(cuts[round_ - (not warm)].ranges)
                seconds[f"search/{round_}"] = (scored + sifted) / threads
            steps = float(active.sum()) * self.row_length * p.epochs_of(round_) * probe["step"]
            if self._on_all_rows(round_):
                solved = int(np.count_nonzero(active))  # and lanes that are empty
                steps *= -(-solved // LANES) * LANES / max(solved, 1)
            of_streams, of_gathers = reads[round_]
            seconds[f"solve/{round_}"] = (steps + of_streams * probe["stream"] + of_gathers * gather) / solving
        if self.guided:  # one job, beside the first solve
            groups = groups_work(d) * probe["step"] + groups_read(plan, d) * probe["stream"]
            seconds["solve/0"] = max(seconds["solve/0"] + groups / threads, groups)
        if not (self.carried or self.seen):
            seconds[f"search/{self.rounds}"] = scored / threads
        seconds["finalise"] = float(self.weights.sum()) * 8 * _MORE_WEIGHTS / 100e6
        return seconds


def refuse_too_many_classes(plan: MemoryPlan, dataset: Dataset) -> None:
    """Raise MemoryLimitError where the classes cannot be planned."""
    needs = {f"sizes of {dataset.n_labels} classes": _CLASS_BYTES * dataset.n_labels}
    plan.refuse_unless(needs, "planning the training")


def _spread(counts: NDArray[np.int64], sampled: Sequence[int], values: Sequence[int]) -> NDArray[np.float64]:
    """A size of every class from those of a sample, by label count; 0 for a class without positives.

    Between sampled counts on a straight line of logarithms; beyond the largest as the square root of the count.
    """
    if not len(sampled):
        return np.zeros(len(counts))
    at, inverse = np.unique(np.asarray(sampled, np.int64), return_inverse=True)
    mean = np.bincount(inverse, np.asarray(values, np.float64)) / np.bincount(inverse)
    known, levels = np.unique(counts, return_inverse=True)
    logs = np.interp(np.log1p(known), np.log1p(at), np.log1p(mean))
    beyond = np.sqrt(np.maximum(known / max(int(at[-1]), 1), 1.0))
    return np.where(known > 0, np.expm1(logs) * beyond, 0.0)[levels]


def part_of(span: Span, part: int, parts: int) -> Span:
    """One of several equal parts."""
    begin, end = span
    return begin + (end - begin) * part / parts, begin + (end - begin) * (part + 1) / parts


def spans_of(p: PPDSparseParameters, seconds: Mapping[str, float]) -> dict[str, Span]:
    """From where to where each phase takes the whole run; of none where nobody knows how many rounds there will be.

    seconds: that each phase is foreseen to take, by the beginning of its jobs' keys. Rounds that only some
    classes need come behind the others.
    """
    if p.common_rounds is None or p.max_rounds is None:
        return {}
    seconds = dict(seconds)
    last = seconds.pop("finalise", 0.0)
    before = max(sum(seconds.values()), 1e-9)
    rounds = [name for r in range(p.max_rounds) for name in (f"solve/{r}", f"search/{r + 1}")]
    ends = p.all_rows and p.max_rounds == 1  # nothing is searched
    more = [name for name in rounds if name not in seconds and not ends]
    end, written = (_ALL_ROUNDS, _WRITING) if more else (before / (before + last),) * 2
    spans: dict[str, Span] = {}
    at = 0.0
    for name, of in seconds.items():
        spans[name] = end * at / before, end * (at + of) / before
        at += of
    for i, name in enumerate(more):
        spans[name] = part_of((end, written), i, len(more))
    return {**spans, "finalise": (written, 1.0)}
