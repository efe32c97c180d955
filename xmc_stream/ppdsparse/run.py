"""PPDSparse's rounds: solve all units, search all rows for violators, and again; then a check, and the model.

The loop is a generator: it yields phases of jobs and is sent their receipts, so it runs under any engine, and again
from the start after a kill, when receipts come out of the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.linear.guide import GUIDE
from xmc_stream.linear.implied import IMPLIED, ImpliedJob, implied_attributes
from xmc_stream.linear.tiles import TileRange
from xmc_stream.linear.units import tiles_of, units_of_run
from xmc_stream.linear.weights import (
    LinearWeights,
    Unit,
    starts_of,
    unit_of,
    unit_path,
)
from xmc_stream.methods.contract import WEIGHTS, WRITING
from xmc_stream.methods.weights import Given
from xmc_stream.ppdsparse.candidates import CandidateFile
from xmc_stream.ppdsparse.carry import CarryJob
from xmc_stream.ppdsparse.finalise import FinaliseJob
from xmc_stream.ppdsparse.groups import (
    GroupsJob,
    groups_run_beside,
    guide_attributes,
    guide_weight,
    has_many_labels,
    implied_margin,
)
from xmc_stream.ppdsparse.kept_groups import KeepGroupsJob, takes_groups
from xmc_stream.ppdsparse.outline import Outline, part_of
from xmc_stream.ppdsparse.parameters import APPROXIMATE, EXACT, LARGE_MODEL, NARROW, WORTH, PPDSparseParameters
from xmc_stream.ppdsparse.plan import (
    SearchSize,
    SolvePlan,
    class_blocks,
    longest_of,
    search_interval,
    search_parts,
    search_ranges,
)
from xmc_stream.ppdsparse.scale import settled
from xmc_stream.ppdsparse.search import SearchJob, UnitSpan
from xmc_stream.ppdsparse.shares import JoinSharesJob, Share, remove_shares, solve_plan
from xmc_stream.ppdsparse.solve import SolveJob
from xmc_stream.ppdsparse.start import MatchJob, StartJob, match_bytes, weights_of_terms
from xmc_stream.ppdsparse.state import UnitState
from xmc_stream.ppdsparse.statistics import open_gap, update_statistics
from xmc_stream.ppdsparse.weights import LossWeights
from xmc_stream.runtime.job import Job, Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import HALVES, UNIT
from xmc_stream.store.places import make_folder
from xmc_stream.store.removal import remove_beside, wait_for_removals
from xmc_stream.system.progress import LOG

# the attribute: how many labels of a warm start were kept, new, gone; by_name: how matched
STARTED = "warm_start_labels"
_BROUGHT = ("fresh", "used")  # in receipts: see `SolveJob`; of approximate searches alone
_USED_SHARE = 8  # approximate searches go on while one in so many of the rows they bring in is of use


@dataclass
class PPDSparseRun:
    """A training run: what to learn from, where to, and within which memory.

    work: folder of the unfinished model; what jobs leave for each other lies in its `state`. warm_start: path of the
    model whose weights a run begins from, "" for none. blocks: class blocks of each search that a forecast promised; a
    search has more only where its tiles turn out larger than foreseen. carried: of a trial, the state that it goes on
    from, "" for none. A search and a solve follow, and no check: nothing is known then of objective, gap and violation. Or a
    solve on all rows follows, from nothing.
    seconds: that each phase is foreseen to take, by the beginning of its jobs' keys. given: weights that are kept in `work`.
    kernels: loads those of searches and active sets, which a run on all rows has not loaded.
    """

    dataset: Dataset
    work: Path
    parameters: PPDSparseParameters
    seed: int
    plan: MemoryPlan
    ledger: Ledger
    warm_start: str = ""
    blocks: tuple[int, ...] = ()
    carried: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    given: Given | None = None
    kernels: Job | None = None

    def __post_init__(self) -> None:
        self.plan = replace(self.plan, longest=longest_of(self.dataset))
        self.parameters = settled(self.parameters, self.dataset)
        self.weights = LossWeights.of(
            self.parameters.class_weight, self.dataset.n_samples, self.given, self.work / WEIGHTS
        )
        if self.carried:
            self.parameters = self.parameters.carried()
        self._cold = self.parameters
        if self.warm_start:
            self.parameters = self.parameters.warm()

    @cached_property
    def units(self) -> list[Unit]:
        """What the classes are cut into."""
        return units_of_run(self.dataset, self.ledger, ("start", "solve/0", "finalise"))

    def loop(self) -> Loop:
        """Phases of jobs until every class is done or the cap on rounds is reached; returns attributes of the model."""
        matched = yield from self._match()  # says how many rounds there are
        p = self.parameters
        jobs = self._groups_jobs(self._takes_groups(matched.get(STARTED)))
        beside = jobs if groups_run_beside(self.plan, self.dataset, p, self._solve_plan(0)[1].beside) else []
        groups = (yield Phase("groups of labels", jobs, gathers=True)) if len(beside) < len(jobs) else []
        solves = yield from self._first_solve(beside)
        groups, solves = groups + solves[: len(beside)], solves[len(beside) :]
        guide = {GUIDE: guide_attributes(groups[0], guide_weight(p, self.dataset))} if jobs else {}
        approximate = p.approximate and not self.carried
        for round_ in itertools.count(1):
            last = round_ == p.max_rounds
            approximate = approximate and (p.common_rounds is None or round_ < p.common_rounds)
            kind = APPROXIMATE if approximate else p.kind_of_search(round_)
            finished = all(self._knows(job.key) for job in self._finalise_jobs(round_, []))
            if not last and self._solved(round_):
                files: list[CandidateFile] = []  # searched and solved in an earlier session
            elif finished or self._needs_no_check(round_, last) or not any(receipt["open"] for receipt in solves):
                files, last = [], True
            else:
                files, n_found = yield from self._search(round_, kind, solves)
                solved = all(receipt["inside"] <= p.tol for receipt in solves)
                if n_found == 0 and (approximate or (kind == NARROW and solved)):
                    approximate, kind = False, EXACT  # which says whether nothing is left
                    files, n_found = yield from self._search(round_, kind, solves)
                settled = n_found == 0 and solved
                last = last or settled or not self._worth_more(round_, files)
            if last:
                break
            solves = yield from self._solve(round_, files, kind)
            # a row that nothing moved was found by error; an exact search brings none in by error and is kept to
            fresh, used = (sum(receipt.get(name, 0) for receipt in solves) for name in ("fresh", "used"))
            approximate = approximate and 0 < fresh <= _USED_SHARE * used
        large = sum(receipt["nnz"] for receipt in solves) >= LARGE_MODEL
        prune = self._least_weight if large or p.prune is not None else 0.0
        finalise = self._finalise_jobs(round_, files, prune, p.halves(large))
        implied: dict[str, Any] = {}
        if (margin := implied_margin(p, self.dataset)) is not None:
            # alone: its lists may take all of the budget
            job = ImpliedJob(str(self.dataset.path), str(self.work / IMPLIED), self.plan)
            (found,) = yield Phase("implied labels", [job], gathers=True, twice=True)
            implied = {IMPLIED: implied_attributes(found, margin)}
        receipts = yield Phase("finalise", finalise, WRITING, self._outline.span("finalise"), twice=True)
        halves = {HALVES: sum(receipt["float16"] for receipt in receipts)} if p.halves(large) else {}
        wait_for_removals()
        learned = sum(receipt["learned"] for receipt in receipts)
        unknown = ("objective", "duality_gap", "duality_gap_mean", "violation", "n_open")
        return {
            "rounds": round_,
            "C": p.C,
            "positive_weight": p.positive_weight,
            "nnz": sum(receipt["nnz"] for receipt in receipts),
            "tiles": tiles_of(receipts),
            "objective": math.fsum(receipt["objective"] for receipt in receipts),
            "duality_gap": max(receipt["gap_worst"] for receipt in receipts),
            "duality_gap_mean": math.fsum(receipt["gap_sum"] for receipt in receipts) / max(learned, 1),
            "violation": max(receipt["violation"] for receipt in receipts),
            "n_open": sum(receipt["open"] for receipt in receipts),
            "n_empty": self.dataset.n_labels - learned,
            "pruned_below": prune,
            **halves,
            **starts_of(self.units),
            **guide,
            **implied,
            **matched,
            **(dict.fromkeys(unknown) if self._unchecked(round_) and not self._seen(round_) else {}),
        }

    @cached_property
    def _outline(self) -> Outline:
        return Outline(self.parameters, self.seconds)

    def _unchecked(self, round_: int) -> bool:
        """Whether a trial ends here, without a last search."""
        return bool(self.carried) and round_ == self.parameters.common_rounds

    def _needs_no_check(self, round_: int, last: bool) -> bool:
        """Whether the run ends without another search: a trial, or one that has seen all rows and gains no more by them.

        last: whether no round follows, whatever is found.
        """
        return self._unchecked(round_) or (self._seen(round_) and (last or not self._worth_more(round_, [])))

    def _seen(self, round_: int) -> bool:
        """Whether all rows were looked at with the weights as they are: losses and violations are known without a search."""
        return bool(self.parameters.all_rows) and round_ == 1

    def _kernels_of(self, round_: int) -> Job | None:
        """What a round calls that one on all rows does not; also of a run that was resumed in it."""
        return self.kernels if self.parameters.all_rows and round_ else None

    def _groups_jobs(self, kept: bool) -> list[Job]:
        """The job that learns groups of labels, where they are to have a say.

        kept: those of the warm start's model are taken.
        """
        if not guide_weight(self.parameters, self.dataset):
            return []
        data, out = str(self.dataset.path), str(self.work / GUIDE)
        if not kept:
            return [GroupsJob(data, self.parameters, self.seed, self._least_weight, out, self.plan)]
        # as of those that are learned: how many weights the labels will have is not known
        half = self.parameters.halves(large=True)
        return [KeepGroupsJob(data, self.warm_start, self._matched, half, out, self.plan)]

    def _worth_more(self, round_: int, files: list[CandidateFile]) -> bool:
        """Whether another round pays: always up to `common_rounds`, then while open classes are far from their optimum."""
        p = self.parameters
        if p.common_rounds is None or round_ < p.common_rounds or round_ == p.max_rounds:
            return True
        note = f"gap/{round_}"
        if (known := self.ledger.get(note)) is None:
            sums = []
            for unit in self.units:
                d, state = self.dataset, self._state(f"solve-{round_ - 1}", unit.name)
                statistics = UnitState(state, unit.last - unit.first, d.n_samples, d.n_features).statistics
                if not self._seen(round_):
                    update_statistics(
                        statistics, self._of_unit(files, unit), unit.first, p, d.n_samples, round_,
                        of_classes=self.weights.of_classes(d, *unit),
                    )  # fmt: skip
                sums.append(open_gap(statistics, p.C))
            gap, objective = (math.fsum(of_units) for of_units in zip(*sums, strict=True))
            known = {"worth": gap > WORTH * objective}
            self.ledger.add(note, known)
        return bool(known["worth"])

    @cached_property
    def _least_weight(self) -> float:
        """Below what a weight is left out of a large model."""
        d, step = self.dataset, MIB // 4
        norms = sum(
            float(d.row_norms(start, min(start + step, d.n_samples)).sum(dtype=np.float64))
            for start in range(0, d.n_samples, step)
        )
        return self.parameters.least_weight(d.X_rows().nnz / d.n_samples, norms / d.n_samples, has_many_labels(d))

    @cached_property
    def _of_start(self) -> dict[str, float]:
        return weights_of_terms(LinearWeights(self.warm_start))

    @property
    def _start_slopes(self) -> tuple[float, float]:
        """See `PPDSparseParameters.start_slopes`."""
        return self.parameters.start_slopes(self._of_start) if self.warm_start else (0.0, 0.0)

    def _first_solve(self, beside: list[Job]) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """Round 0: from nothing, or from the weights of a model and what a search with them finds.

        beside: jobs that nothing waits for, so that no thread does; their receipts come first.
        """
        files: list[CandidateFile] = []
        kind = EXACT
        if self.carried and not self.parameters.all_rows:
            make_folder(self._state("solve-0"))
            words = "taking over another setting's rows"
            jobs = [*beside, *self._carry_jobs()]
            return (yield Phase("go on from another setting", jobs, words, gathers=True, twice=True))
        if self.warm_start and not self._solved(0):
            make_folder(self._state("solve--1"))
            words = "reading the weights to begin from"
            starts = yield Phase("warm start: weights", self._start_jobs(), words, gathers=True, twice=True)
            kind = self.parameters.kind_of_search(0)
            files, _ = yield from self._search(0, kind, starts)
        return (yield from self._solve(0, files, kind, beside))

    def _solve(
        self, round_: int, files: list[CandidateFile], kind: str, beside: Sequence[Job] = ()
    ) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """Solve all units: each by a job, or in shares that are joined then. Returns the receipts of `beside`, of the units."""
        p, folder, number = self.parameters, self._state(f"solve-{round_}"), round_ + 1
        make_folder(folder)
        words, span = self._outline.words("solving", round_), self._outline.span(f"solve/{round_}")
        shares, sizes = self._solve_plan(round_)
        todo = [share for share in shares if share.whole or not self._knows(f"solve/{round_}/{share.unit.name}")]
        jobs = [*beside, *self._solve_jobs(round_, files, kind, todo, sizes)]
        told: dict[str, Receipt] = {}
        if jobs:
            receipts = yield Phase(
                f"round {number}: solve", jobs, words, span, unit="round", number=number, gathers=True, twice=True,
                loads=self._kernels_of(round_),
            )  # fmt: skip
            told = {job.key: receipt for job, receipt in zip(jobs, receipts, strict=True)}
        joins = []
        for unit, of_unit in itertools.groupby(
            (share for share in shares if not share.whole), lambda share: share.unit
        ):
            mine = tuple(of_unit)
            of_shares = [told.get(f"solve/{round_}/{share.name}", {}) for share in mine]
            sums = {name: sum(of.get(name, 0) for of in of_shares) for name in _BROUGHT if p.approximate}
            joins.append(JoinSharesJob(str(self.dataset.path), p, self.seed, round_, unit, mine, str(folder), sums))
        if joins:
            receipts = yield Phase(f"round {number}: join", joins, words, span and (span[1], span[1]), twice=True)
            told |= {job.key: receipt for job, receipt in zip(joins, receipts, strict=True)}
        remove_shares(folder)
        self._drop_before(round_)
        return [*(told[job.key] for job in beside), *(told[f"solve/{round_}/{unit.name}"] for unit in self.units)]

    def _drop_before(self, round_: int) -> None:
        """Remove what a round was made from and is needed no more, while what follows is at work."""
        remove_beside(self._state(f"solve-{round_ - 1}"), self._state(f"search-{round_}"))

    def _match(self) -> Generator[Phase, list[Receipt], dict[str, Any]]:
        """Which labels of a warm start's model the data have; returns what the model says of it."""
        if not self.warm_start:
            return {}
        self.plan.refuse_unless(
            {"labels of both": match_bytes(self.dataset, LinearWeights(self.warm_start))}, "matching labels"
        )
        make_folder(self._state("match"))
        job = MatchJob(str(self.dataset.path), self.warm_start, self._matched)
        (receipt,) = yield Phase("warm start: labels", [job], "matching labels")
        said = {name: receipt[name] for name in ("by_name", "kept", "new", "gone")}
        if receipt["new"] or receipt["gone"]:
            by = "name" if receipt["by_name"] else "id"
            LOG.info(
                "warm start: {kept:,} labels keep their weights, {new:,} are new, {gone:,} are gone (by %s)".format(
                    **said
                ),
                by,
            )
        self.parameters = self._cold.warm(new_labels=bool(receipt["new"]))
        return {STARTED: said}

    def _takes_groups(self, started: dict[str, int] | None) -> bool:
        """Whether groups of labels are those of the warm start's model: few labels are new, and C is much the same."""
        if started is None or not 0.5 <= self._of_start.get("C", 0.0) / self.parameters.C <= 2.0:
            return False
        return takes_groups(LinearWeights(self.warm_start), started["kept"], started["new"])

    @property
    def _matched(self) -> str:
        return str(self._state("match", "labels"))

    def _state(self, kind: str, name: str = "") -> Path:
        return self.work / "state" / kind / name

    def _knows(self, key: str) -> bool:
        return self.ledger.get(key) is not None

    def _solved(self, round_: int) -> bool:
        """Whether an earlier session has solved all units."""
        return all(self._knows(f"solve/{round_}/{unit.name}") for unit in self.units)

    def _solve_plan(self, round_: int) -> tuple[list[Share], SolvePlan]:
        warm, of_samples = bool(self.warm_start), self.weights.of_samples
        p = replace(self.parameters, all_rows=False) if round_ else self.parameters  # later rounds are on active sets
        return solve_plan(self.plan, self.dataset, p, warm, self.units, of_samples)

    def _start_jobs(self) -> list[StartJob]:
        return [
            StartJob(
                str(self.dataset.path), self.warm_start, self.parameters, self.seed, unit, self._matched,
                str(self._state("solve--1", unit.name)),
            )
            for unit in self.units
        ]  # fmt: skip

    def _carry_jobs(self) -> list[CarryJob]:
        return [
            CarryJob(
                str(self.dataset.path), self.parameters, unit, str(Path(self.carried) / unit.name),
                str(self._state("solve-0", unit.name)),
            )
            for unit in self.units
        ]  # fmt: skip

    def _solve_jobs(
        self, round_: int, files: list[CandidateFile], kind: str, shares: Sequence[Share], sizes: SolvePlan
    ) -> list[SolveJob]:
        d = self.dataset
        return [
            SolveJob(
                str(d.path), self.parameters, self.seed, round_, share,
                str(self._state(f"solve-{round_ - 1}", share.unit.name)) if round_ or self.warm_start else "",
                self._of_unit(files, share), kind, str(self._state(f"solve-{round_}", share.name)), self.plan, sizes,
                self._start_slopes, self._of_start.get("tau", 0.0) if self.warm_start else 0.0, self.weights,
            )
            for share in shares
        ]  # fmt: skip

    def _finalise_jobs(
        self, round_: int, files: list[CandidateFile], prune: float = 0.0, half: bool = False
    ) -> list[FinaliseJob]:
        return [
            FinaliseJob(
                str(self.dataset.path), self.parameters, self.weights, prune, half, round_, self.dataset.n_samples,
                self.dataset.n_features, unit,
                str(self._state(f"solve-{round_ - 1}", unit.name)),
                self._of_unit(files, unit), str(unit_path(self.work, unit)),
            )
            for unit in self.units
        ]  # fmt: skip

    @staticmethod
    def _of_unit(files: list[CandidateFile], unit: Unit | Share) -> tuple[CandidateFile, ...]:
        return tuple(file for file in files if file.first < unit.last and file.last > unit.first)

    def _search(
        self, round_: int, kind: str, solves: list[Receipt]
    ) -> Generator[Phase, list[Receipt], tuple[list[CandidateFile], int]]:
        """One pass over the rows for each class block; returns the files written and how many classes have violators.

        solves: receipts of the jobs that made the weights.

        A search that an earlier session finished is used as it was cut then; one that it left unfinished goes on if
        the present limit cuts it the same way, else it begins anew.
        """
        note = f"cut/{round_}/{kind}" if kind else f"cut/{round_}"
        before = self.ledger.get(note)
        if before is not None:
            known = [receipt for key in before["keys"] if (receipt := self.ledger.get(key)) is not None]
            if len(known) == len(before["keys"]):
                files = [CandidateFile(first, last, str(self.work / path)) for first, last, path in before["files"]]
                return files, sum(receipt["found"] for receipt in known)
        check = round_ in (self.parameters.common_rounds, self.parameters.max_rounds) and round_ > 0
        blocks = self._cut_classes(round_, check, kind, solves)
        phases = [self._search_jobs(round_, check, kind, *block) for block in blocks]
        jobs = [job for phase in phases for job in phase]
        files = [CandidateFile(job.first, job.last, job.out) for job in jobs]
        cut = {
            "keys": [job.key for job in jobs],
            "files": [[f.first, f.last, str(Path(f.path).relative_to(self.work))] for f in files],
            "class_blocks": len(phases),
        }
        if cut != before:
            self.ledger.add(note, cut)
        make_folder(self._state(f"search-{round_}"))
        n_found = 0
        for b, phase in enumerate(phases):
            checks = check and not self._seen(round_)
            name = "check" if checks else f"round {round_ + 1}: search" if round_ else "warm start: search"
            words = "checking all rows" if checks else self._outline.words("searching for violators", round_)
            span = self._outline.span(f"search/{round_}")
            if len(phases) > 1:
                name, words = f"{name} {b + 1}/{len(phases)}", f"{words}, part {b + 1} of {len(phases)}"
                span = part_of(span, b, len(phases))
            receipts = yield Phase(
                name, phase, words, span, unit="" if checks else "round", number=round_ + 1 if round_ else 0, twice=True,
                loads=self._kernels_of(round_),
            )  # fmt: skip
            n_found += sum(receipt["found"] for receipt in receipts)
        return files, n_found

    def _search_jobs(
        self, round_: int, check: bool, kind: str, spans: tuple[UnitSpan, ...], cache_bytes: int, interval: int, parts: int
    ) -> list[SearchJob]:  # fmt: skip
        """The jobs of a class block, whose spans so many share for each range of rows."""
        d, p = self.dataset, self.parameters
        near = p.near if kind == EXACT else -p.tol
        if self.warm_start and round_ == 0:
            near = p.warm_near(self._of_start)
        jobs: list[SearchJob] = []
        for low, high in even_ranges(len(spans), parts):
            mine = spans[low:high]
            name = f"{kind + '.' if kind else ''}{mine[0].first}-{mine[-1].last}"
            jobs += [
                SearchJob(
                    str(d.path), p, self.seed, round_, check, kind, start, stop, mine, parts,
                    str(self._state(f"search-{round_}", f"{name}.{start}-{stop}")), self.plan, cache_bytes, interval, near,
                    self.weights,
                )
                for start, stop in search_ranges(self.plan, d.n_samples, parts)
            ]  # fmt: skip
        return jobs

    def _cut_classes(
        self, round_: int, check: bool, kind: str, solves: list[Receipt]
    ) -> list[tuple[tuple[UnitSpan, ...], int, int, int]]:
        """Class blocks, of open classes: spans, bytes of their tiles, rows of an interval, parts that jobs take."""
        ranges = "approximate_ranges" if kind == APPROXIMATE and self.parameters.fewer_weights else "tile_ranges"
        units = [[SearchSize(TileRange(*span[:4]), *span[4:]) for span in receipt[ranges]] for receipt in solves]
        if check:
            units = [
                [replace(size, wanted=[size.span.last - size.span.first] * len(size.wanted)) for size in sizes]
                for sizes in units
            ]
        blocks = []
        at = round_ if self.warm_start else round_ - 1
        promised = self.blocks[at] if at < len(self.blocks) else 1
        d = self.dataset
        cut = class_blocks(self.plan, units, d.n_features, d.n_samples, promised)
        for block in cut:
            spans = tuple(
                UnitSpan(tile.first, tile.last, unit, str(self._state(f"solve-{round_ - 1}", unit.name)), tile.tile)
                for tile, unit in ((size.span, unit_of(self.units, size.span.first)) for size in block)
            )
            parts = search_parts(self.plan, d, block) if len(cut) == 1 and not self.plan.cuts.classes else 1
            interval = search_interval(self.plan, block, d.n_features, d.n_samples) if parts == 1 else d.n_samples
            blocks.append((spans, sum(span.tile_bytes for span in spans), interval, parts))
        if self.plan.cuts.classes:
            blocks = [
                ((small,), small.tile_bytes, interval, 1)
                for spans, _, interval, _ in blocks
                for span in spans
                for small in self._split(span, self.plan.cuts.classes)
            ]
        return blocks

    def _split(self, span: UnitSpan, step: int) -> list[UnitSpan]:
        """A span in spans of `step` classes. A narrower tile has more dense rows: 1,024 is a bound on their growth."""
        bound = span.tile_bytes * UNIT
        return [
            replace(span, first=first, last=min(first + step, span.last), tile_bytes=bound)
            for first in range(span.first, span.last, step)
        ]
