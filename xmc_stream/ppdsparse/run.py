"""PPDSparse's rounds: search all rows for violators, solve all classes, and again; then a check, and the model.

The loop is a generator: it yields phases of jobs and is sent their receipts, so it runs under any engine, and again
from the start after a kill, when receipts come out of the ledger. How a round's two phases are cut into jobs is a matter of
memory, and changes nothing that comes out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from xmc_stream.linear.guide import GUIDE
from xmc_stream.linear.implied import IMPLIED, ImpliedJob
from xmc_stream.linear.tiles import TileRange
from xmc_stream.linear.weights import LinearWeights, Unit, finalise_key, starts_of, unit_of, unit_path, units_of_run
from xmc_stream.methods.contract import WEIGHTS, WRITING
from xmc_stream.methods.start import STARTED, match_bytes, say_matched
from xmc_stream.methods.weights import Given
from xmc_stream.ppdsparse.candidates import CandidateFile, Found
from xmc_stream.ppdsparse.forecast import part_of, spans_of
from xmc_stream.ppdsparse.groups import GROUPS_SAY, GroupsJob, KeepGroupsJob, groups_run_beside, takes_groups
from xmc_stream.ppdsparse.parameters import APPROXIMATE, EXACT, LARGE_MODEL, NARROW, WORTH, PPDSparseParameters
from xmc_stream.ppdsparse.plan import (
    SearchSize,
    SolvePlan,
    class_blocks,
    longest_of,
    search_interval,
    search_parts,
    search_ranges_of,
    solve_plan,
)
from xmc_stream.ppdsparse.problem import (
    LossWeights,
    Problem,
    Share,
    guide_weight,
    implied_margin,
    least_weight,
    settled,
)
from xmc_stream.ppdsparse.search import SearchJob, UnitSpan
from xmc_stream.ppdsparse.solve import SolveJob
from xmc_stream.ppdsparse.start import CarryJob, MatchJob, StartJob, weights_of_terms
from xmc_stream.ppdsparse.state import (
    OPEN,
    STATUS,
    FinaliseJob,
    JoinSharesJob,
    UnitState,
    figures_of,
    objective_and_gap,
    update_statistics,
)
from xmc_stream.runtime.job import Job, Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import HALVES, UNIT
from xmc_stream.store.places import make_folder, remove

BROUGHT = ("fresh", "used")  # in receipts of solves: see `SolveJob`; of approximate searches alone
# the attribute: how many labels of a warm start were kept, new, gone; by_name: how matched
_USED_SHARE = 8  # approximate searches go on while one in so many of the rows they bring in is of use
_UNCHECKED = ("objective", "duality_gap", "duality_gap_mean", "violation", "n_open")  # what only a check says

_Receipts = Generator[Phase, list[Receipt], list[Receipt]]


@dataclass
class PPDSparseRun:
    """A training run: what it learns from, where to, and within which memory; which rounds it takes, and how it does one.

    work: folder of the unfinished model; what jobs leave for each other lies in its `state`. warm_start: path of the
    model whose weights a run begins from, "" for none. blocks: class blocks of each search that a forecast promised; a
    search has more only where its tiles turn out larger than foreseen. carried: of a trial, the state that it goes on
    from, "" for none. A search and a solve follow, and no check: nothing is known then of objective, gap and violation. Or a
    solve on all rows follows, from nothing.
    seconds: that each phase is foreseen to take, by the beginning of its jobs' keys. given: weights that are kept in `work`.
    kernels: loads those of searches and active sets, which a run on all rows has not loaded when its later rounds begin, also
    where it was resumed in them.
    terms: what the model of a warm start was trained with.
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
        if self.warm_start or not self.parameters.all_rows:
            self.kernels = None  # all are loaded
        self.terms = weights_of_terms(LinearWeights(self.warm_start)) if self.warm_start else {}
        self._matched = str(self.state("match", "labels"))
        self.spans = spans_of(self.parameters, self.seconds)
        self._approximate = self.parameters.approximate and not self.carried  # whether searches still are
        self._started: dict[str, Any] = {}  # how a warm start's labels were matched

    def loop(self) -> Loop:
        """Phases of jobs until another round does not pay; returns attributes of the model.

        Algorithm 1 of the paper, for all classes together. Its step 0 is `_begin`, with a first solve. A search finds the
        rows outside A of the largest -dG/dalpha, which is the step 1; a solve adds them to A, minimises over A and drops
        from A the negatives with alpha = 0, the steps 2 to 4. The last search is exact: the check.
        """
        solves = yield from self._begin()
        for round_ in itertools.count(1):
            found = yield from self._search(round_, solves)
            if not self._pays(round_, found, solves):
                break  # the search was the check: it says losses and gaps of all classes
            solves = yield from self.solve(round_, found)
        return (yield from self._finalise(round_, found, solves))

    def _begin(self) -> _Receipts:
        """The first round, which has no search: from alpha = 0, a model's weights or the state of another setting."""
        if self.warm_start:
            yield from self._match_labels()
        beside = yield from self._learn_groups()
        if self.carried and not self.parameters.all_rows:
            return (yield from self._go_on_from_another_setting(beside))
        found = None
        if self.warm_start and not self.solved(0):
            found = yield from self._search_with_the_model()
        return (yield from self.solve(0, found, beside))

    def _match_labels(self) -> Generator[Phase, list[Receipt], None]:
        """Which labels of a warm start's model the data have: new ones take more rounds."""
        needs = {"labels of both": match_bytes(LinearWeights(self.warm_start), self.dataset)}
        self.plan.refuse_unless(needs, "matching labels")
        make_folder(self.state("match"))
        jobs = [MatchJob(str(self.dataset.path), self.warm_start, self._matched)]
        (receipt,) = yield Phase("warm start: labels", jobs, "matching labels")
        self._started = {name: receipt[name] for name in ("by_name", "kept", "new", "gone")}
        say_matched(self._started, "weights")
        self.parameters = self.parameters.warm(new_labels=bool(receipt["new"]))
        self.spans = spans_of(self.parameters, self.seconds)

    def _search_with_the_model(self) -> Generator[Phase, list[Receipt], Found]:
        """The violators of a model's weights."""
        make_folder(self.state("solve--1"))
        jobs = [
            StartJob(self.problem, self.warm_start, unit, self._matched, str(self.state("solve--1", unit.name)))
            for unit in self.units
        ]
        starts = yield Phase("warm start: weights", jobs, "reading the weights to begin from", gathers=True, twice=True)
        return (yield from self.search(0, self.parameters.kind_of_search(0), starts))

    def _go_on_from_another_setting(self, beside: list[Job]) -> _Receipts:
        """Of a trial: take over the active sets, alpha and weights of a neighbour."""
        make_folder(self.state("solve-0"))
        jobs = [
            CarryJob(self.problem, unit, str(Path(self.carried) / unit.name), str(self.state("solve-0", unit.name)))
            for unit in self.units
        ]
        words = "taking over another setting's rows"
        receipts = yield Phase("go on from another setting", [*beside, *jobs], words, gathers=True, twice=True)
        return receipts[len(beside) :]

    def _learn_groups(self) -> Generator[Phase, list[Receipt], list[Job]]:
        """Groups of labels, where they have a say. Returns the job, to run beside the first solve, where memory has room."""
        p = self.parameters
        if not guide_weight(p, self.dataset):
            return []
        job: Job
        if self._keeps_groups():
            job = KeepGroupsJob(self.problem, self.warm_start, self._matched, str(self.work / GUIDE))
        else:
            job = GroupsJob(self.problem, least_weight(p, self.dataset), str(self.work / GUIDE))
        shares, sizes = self.solve_plan(0)
        if groups_run_beside(self.plan, self.dataset, p, len(shares), sizes.beside):
            return [job]
        yield Phase("groups of labels", [job], gathers=True)
        return []

    def _keeps_groups(self) -> bool:
        """Whether groups of labels are those of the warm start's model: few labels are new, and C is much the same."""
        if not self._started or not 0.5 <= self.terms.get("C", 0.0) / self.parameters.C <= 2.0:
            return False
        return takes_groups(LinearWeights(self.warm_start), self._started["kept"], self._started["new"])

    def _search(self, round_: int, solves: list[Receipt]) -> Generator[Phase, list[Receipt], Found | None]:
        """The rows that violate most; None where an earlier session went on with them, or nobody asks for any.

        Searches before the check may be approximate, or narrow: what they bring in is solved exactly. Where they find
        nothing, an exact one says whether nothing is left.
        """
        p = self.parameters
        if round_ > 1:
            # a row that nothing moved was found by error; an exact search brings none in by error and is kept to
            fresh, used = (sum(receipt.get(name, 0) for receipt in solves) for name in BROUGHT)
            self._approximate = self._approximate and 0 < fresh <= _USED_SHARE * used
        self._approximate = self._approximate and (p.common_rounds is None or round_ < p.common_rounds)
        if self.solved(round_) or self._ends_unsearched(round_, solves):
            return None
        kind = APPROXIMATE if self._approximate else p.kind_of_search(round_)
        found = yield from self.search(round_, kind, solves)
        if not found.n_classes and (kind == APPROXIMATE or (kind == NARROW and self._converged(solves))):
            self._approximate = False
            found = yield from self.search(round_, EXACT, solves)
        return found

    def _ends_unsearched(self, round_: int, solves: list[Receipt]) -> bool:
        """Whether the run ends without another search.

        An earlier session has begun to write the model; or it is a trial; or all rows were seen and no round follows; or no
        class is open.
        """
        if all(self.ledger.get(finalise_key(unit.name)) for unit in self.units) or self._unchecked(round_):
            return True
        if self.seen(round_) and (round_ == self.parameters.max_rounds or not self._is_far(round_, Found())):
            return True
        return not any(receipt["open"] for receipt in solves)

    def _unchecked(self, round_: int) -> bool:
        """Whether a trial ends here, without a last search."""
        return bool(self.carried) and round_ == self.parameters.common_rounds

    def _converged(self, solves: list[Receipt]) -> bool:
        """Whether no class violates by more than tol inside its active set."""
        return all(receipt["inside"] <= self.parameters.tol for receipt in solves)

    def _pays(self, round_: int, found: Found | None, solves: list[Receipt]) -> bool:
        """Whether another round follows: below the cap, while rows violate and classes are far from their optimum."""
        if self.solved(round_):  # an earlier session said so
            return True
        if found is None or round_ == self.parameters.max_rounds:
            return False
        return bool(found.n_classes or not self._converged(solves)) and self._is_far(round_, found)

    def _is_far(self, round_: int, found: Found) -> bool:
        """Whether open classes are so far from their optimum that it pays; before `common_rounds` all count as far."""
        p, d = self.parameters, self.dataset
        if p.common_rounds is None or round_ < p.common_rounds or round_ == p.max_rounds:
            return True
        note = f"gap/{round_}"
        if (known := self.ledger.get(note)) is None:
            sums = []
            for unit in self.units:
                path = self.state(f"solve-{round_ - 1}", unit.name)
                statistics = UnitState(path, unit.last - unit.first, d.n_samples, d.n_features).statistics
                if not self.seen(round_):
                    of_classes, searched = self.weights.of_classes(d, *unit), found.of(*unit).open(d.n_samples)
                    update_statistics(statistics, searched, unit.first, p, round_, of_classes)
                objective, gap = objective_and_gap(statistics, p.C)
                sums.append((math.fsum(gap[statistics[:, STATUS] == OPEN]), math.fsum(objective)))
            gaps, objectives = (math.fsum(of_units) for of_units in zip(*sums, strict=True))
            known = {"worth": gaps > WORTH * objectives}
            self.ledger.add(note, known)
        return bool(known["worth"])

    def _finalise(self, round_: int, found: Found | None, solves: list[Receipt]) -> Loop:
        """Write the model's weights, and which labels imply others; returns attributes."""
        p, d, problem, files = self.parameters, self.dataset, self.problem, found or Found()
        large = sum(receipt["nnz"] for receipt in solves) >= LARGE_MODEL
        prune = least_weight(p, d) if large or p.prune is not None else 0.0
        jobs = [
            FinaliseJob(
                problem, prune, p.halves(large), round_, unit, str(self.state(f"solve-{round_ - 1}", unit.name)),
                files.of(*unit), str(unit_path(self.work, unit)),
            )
            for unit in self.units
        ]  # fmt: skip
        implied = yield from self._find_implied()
        receipts = yield Phase("finalise", jobs, WRITING, self.spans.get("finalise"), twice=True)
        groups = self.ledger.get(GUIDE)
        return {
            "rounds": round_,
            "C": p.C,
            "positive_weight": p.positive_weight,
            **figures_of(receipts, d.n_labels),
            "pruned_below": prune,
            **({HALVES: sum(receipt["float16"] for receipt in receipts)} if p.halves(large) else {}),
            **starts_of(self.units),
            **(
                {GUIDE: {"weight": guide_weight(p, d), **{name: groups[name] for name in GROUPS_SAY}}} if groups else {}
            ),
            **implied,
            **({STARTED: self._started} if self._started else {}),
            **(dict.fromkeys(_UNCHECKED) if self._unchecked(round_) and not self.seen(round_) else {}),
        }

    def _find_implied(self) -> Loop:
        """Labels that all rows of another label have, where these are lifted; returns what the model says of them."""
        margin = implied_margin(self.parameters, self.dataset)
        if margin is None:
            return {}
        # alone: its lists may take all of the budget
        job = ImpliedJob(str(self.dataset.path), str(self.work / IMPLIED), self.plan)
        (found,) = yield Phase("implied labels", [job], gathers=True, twice=True)
        return {IMPLIED: {"margin": margin, "pairs": found["pairs"]}}

    @property
    def problem(self) -> Problem:
        """What jobs share."""
        return Problem(str(self.dataset.path), self.parameters, self.seed, self.plan, self.weights)

    @cached_property
    def units(self) -> list[Unit]:
        """What the classes are cut into."""
        return units_of_run(self.dataset, self.ledger, ("start", "solve/0", "finalise"))

    def state(self, kind: str, name: str = "") -> Path:
        """Where a round's states lie, or one of them."""
        return self.work / "state" / kind / name

    def solved(self, round_: int) -> bool:
        """Whether an earlier session has solved all units."""
        return all(self.ledger.get(f"solve/{round_}/{unit.name}") for unit in self.units)

    def seen(self, round_: int) -> bool:
        """Whether all rows were looked at with the weights as they are: losses and violations are known without a search."""
        return bool(self.parameters.all_rows) and round_ == 1

    def _words(self, doing: str, round_: int) -> str:
        """What a round does, and which one it is."""
        p, common = self.parameters, self.parameters.common_rounds
        if common is None:
            return f"{doing}, round {round_ + 1} of as many as it takes"
        if round_ < common:
            return f"{doing}, round {round_ + 1} of {common}"
        return f"{doing}, round {round_ + 1} of at most {p.max_rounds}, of classes far from their optimum"

    def solve(
        self, round_: int, found: Found | None, beside: Sequence[Job] = ()
    ) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """Solve every class: a job for each unit, or one for each share of a unit, which are joined then.

        found: by the search before, if there was one. beside: jobs that nothing waits for, so that no thread does. Returns the
        receipts of the units.
        """
        folder, number = self.state(f"solve-{round_}"), round_ + 1
        make_folder(folder)
        words, span = self._words("solving", round_), self.spans.get(f"solve/{round_}")
        shares, sizes = self.solve_plan(round_)
        todo = [share for share in shares if share.whole or not self.ledger.get(f"solve/{round_}/{share.unit.name}")]
        before = f"solve-{round_ - 1}" if round_ or self.warm_start else ""
        start = self.terms if self.warm_start and not round_ else None
        jobs = [
            *beside,
            *(
                SolveJob(
                    self.problem, round_, share, str(self.state(before, share.unit.name)) if before else "",
                    (found or Found()).of(share.first, share.last), str(folder / share.name), sizes, start,
                )
                for share in todo
            ),
        ]  # fmt: skip
        receipts = yield Phase(
            f"round {number}: solve", jobs, words, span, unit="round", number=number, gathers=True, twice=True,
            loads=self.kernels if round_ else None,
        )  # fmt: skip
        told = {job.key: receipt for job, receipt in zip(jobs, receipts, strict=True)}
        joins = list(self._join_jobs(round_, shares, told))
        if joins:
            receipts = yield Phase(f"round {number}: join", joins, words, span and (span[1], span[1]), twice=True)
            told |= {job.key: receipt for job, receipt in zip(joins, receipts, strict=True)}
        for path in folder.glob("*.*-*[0-9]"):  # states of shares, also those that an earlier session left
            path.unlink(missing_ok=True)
        self._drop_before(round_)
        return [told[f"solve/{round_}/{unit.name}"] for unit in self.units]

    def solve_plan(self, round_: int) -> tuple[list[Share], SolvePlan]:
        """What the jobs of a round solve, and what each may hold."""
        p = replace(self.parameters, all_rows=False) if round_ else self.parameters  # later rounds are on active sets
        warm, guided = bool(self.warm_start), guide_weight(p, self.dataset) > 0
        return solve_plan(self.dataset, self.plan, p, warm, self.units, self.weights.of_samples, guided)

    def _join_jobs(self, round_: int, shares: Sequence[Share], told: Mapping[str, Receipt]) -> Iterator[JoinSharesJob]:
        """One for each unit that was solved in shares. told: receipts of these, those that this session has."""
        cut = (share for share in shares if not share.whole)
        for unit, of_unit in itertools.groupby(cut, lambda share: share.unit):
            mine = tuple(of_unit)
            receipts = [told.get(f"solve/{round_}/{share.name}", {}) for share in mine]
            sums = {name: sum(of.get(name, 0) for of in receipts) for name in BROUGHT if self.parameters.approximate}
            yield JoinSharesJob(self.problem, round_, unit, mine, str(self.state(f"solve-{round_}")), sums)

    def _drop_before(self, round_: int) -> None:
        """Remove what a round was made from and is needed no more."""
        for state in (f"solve-{round_ - 1}", f"search-{round_}"):
            remove(self.state(state))

    def search(self, round_: int, kind: str, solves: list[Receipt]) -> Generator[Phase, list[Receipt], Found]:
        """Search all rows for violators of all open classes: one pass over the rows for each class block.

        solves: receipts of the jobs that made the weights.
        A search that an earlier session finished is used as it was cut then; one that it left unfinished goes on if
        the present limit cuts it the same way, else it begins anew.
        """
        note = f"cut/{round_}/{kind}" if kind else f"cut/{round_}"
        before = self.ledger.get(note)
        if before is not None:
            known = [receipt for key in before["keys"] if (receipt := self.ledger.get(key)) is not None]
            if len(known) == len(before["keys"]):
                files = tuple(
                    CandidateFile(first, last, str(self.work / path)) for first, last, path in before["files"]
                )
                return Found(files, kind, sum(receipt["found"] for receipt in known))
        check = round_ in (self.parameters.common_rounds, self.parameters.max_rounds) and round_ > 0
        blocks = [self._search_jobs(round_, check, kind, *block) for block in self._cut_classes(round_, check, solves)]
        jobs = [job for block in blocks for job in block]
        files = tuple(CandidateFile(job.first, job.last, job.out) for job in jobs)
        cut = {
            "keys": [job.key for job in jobs],
            "files": [[f.first, f.last, str(Path(f.path).relative_to(self.work))] for f in files],
            "class_blocks": len(blocks),
        }
        if cut != before:
            self.ledger.add(note, cut)
        make_folder(self.state(f"search-{round_}"))
        n_found = 0
        for b, block in enumerate(blocks):
            receipts = yield self._search_phase(round_, check and not self.seen(round_), block, b, len(blocks))
            n_found += sum(receipt["found"] for receipt in receipts)
        return Found(files, kind, n_found)

    def _search_phase(self, round_: int, checks: bool, jobs: Sequence[Job], block: int, blocks: int) -> Phase:
        name = "check" if checks else f"round {round_ + 1}: search" if round_ else "warm start: search"
        words = "checking all rows" if checks else self._words("searching for violators", round_)
        span = self.spans.get(f"search/{round_}")
        if blocks > 1:
            name, words = f"{name} {block + 1}/{blocks}", f"{words}, part {block + 1} of {blocks}"
            span = span and part_of(span, block, blocks)
        return Phase(
            name, jobs, words, span, unit="" if checks else "round", number=round_ + 1 if round_ else 0, twice=True,
            loads=self.kernels if round_ else None,
        )  # fmt: skip

    def _search_jobs(
        self, round_: int, check: bool, kind: str, spans: tuple[UnitSpan, ...], interval: int, parts: int,
        rows: Sequence[tuple[int, int]],
    ) -> list[SearchJob]:  # fmt: skip
        """The jobs of a class block, whose spans so many share for each range of rows."""
        p, cache_bytes = self.parameters, sum(span.tile_bytes for span in spans)
        near = p.near if kind == EXACT else -p.tol
        if self.warm_start and round_ == 0:
            near = p.warm_near(self.terms)
        jobs: list[SearchJob] = []
        for low, high in even_ranges(len(spans), parts):
            mine = spans[low:high]
            name = f"{kind + '.' if kind else ''}{mine[0].first}-{mine[-1].last}"
            jobs += [
                SearchJob(
                    self.problem, round_, check, kind, start, stop, mine, parts,
                    str(self.state(f"search-{round_}", f"{name}.{start}-{stop}")), cache_bytes, interval, near,
                )
                for start, stop in rows
            ]  # fmt: skip
        return jobs

    def _cut_classes(
        self, round_: int, check: bool, solves: list[Receipt]
    ) -> Iterator[tuple[tuple[UnitSpan, ...], int, int, list[tuple[int, int]]]]:
        """Class blocks, of open classes: spans, rows of an interval, parts that jobs take, ranges of rows."""
        d = self.dataset
        units = [[SearchSize(TileRange(*span[:4]), *span[4:]) for span in receipt["tile_ranges"]] for receipt in solves]
        if check:
            units = [
                [replace(size, wanted=[size.span.last - size.span.first] * len(size.wanted)) for size in sizes]
                for sizes in units
            ]
        at, step = round_ if self.warm_start else round_ - 1, self.plan.cuts.classes
        promised = self.blocks[at] if at < len(self.blocks) else 1
        blocks = class_blocks(self.plan, units, d.n_features, d.n_samples, promised)
        for block in blocks:
            spans = tuple(
                UnitSpan(tile.first, tile.last, unit, str(self.state(f"solve-{round_ - 1}", unit.name)), tile.tile)
                for tile, unit in ((size.span, unit_of(self.units, size.span.first)) for size in block)
            )
            parts = search_parts(self.plan, d, block) if len(blocks) == 1 and not step else 1
            interval = search_interval(self.plan, block, d.n_features, d.n_samples) if parts == 1 else d.n_samples
            rows = search_ranges_of(self.plan, block, d.n_samples, d.X_rows().nnz, parts)
            if not step:
                yield spans, interval, parts, rows
            for span in spans if step else ():
                for first in range(span.first, span.last, step):
                    # a narrower tile has more dense rows: 1,024 is a bound on their growth
                    few = replace(
                        span, first=first, last=min(first + step, span.last), tile_bytes=span.tile_bytes * UNIT
                    )
                    yield (few,), interval, 1, rows
