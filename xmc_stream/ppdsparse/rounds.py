"""The two phases of a round, cut into jobs as memory lets be: search all rows for violators, solve every class.

How they are cut changes nothing that comes out. Which rounds there are is decided in `ppdsparse.run`.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from xmc_stream.linear.tiles import TileRange
from xmc_stream.linear.weights import LinearWeights, Unit, unit_of, units_of_run
from xmc_stream.methods.contract import WEIGHTS
from xmc_stream.methods.weights import Given
from xmc_stream.ppdsparse.candidates import CandidateFile
from xmc_stream.ppdsparse.groups import guide_weight
from xmc_stream.ppdsparse.parameters import EXACT, PPDSparseParameters
from xmc_stream.ppdsparse.plan import (
    SearchSize,
    SolvePlan,
    class_blocks,
    longest_of,
    search_interval,
    search_parts,
    search_ranges_of,
)
from xmc_stream.ppdsparse.problem import Found, LossWeights, Problem, Share
from xmc_stream.ppdsparse.scale import settled
from xmc_stream.ppdsparse.search import SearchJob, UnitSpan
from xmc_stream.ppdsparse.shares import JoinSharesJob, solve_plan
from xmc_stream.ppdsparse.solve import SolveJob
from xmc_stream.ppdsparse.start import weights_of_terms
from xmc_stream.runtime.job import Job, Ledger, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT
from xmc_stream.store.places import make_folder, remove

_ALL_ROUNDS, _WRITING = 0.85, 0.97  # of a run: where rounds of every class end, and where the model is written
BROUGHT = ("fresh", "used")  # in receipts of solves: see `SolveJob`; of approximate searches alone

Span = tuple[float, float]


@dataclass
class Rounds:
    """What a training run learns from, where to, and within which memory; and how it does a round.

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

    def knows(self, key: str) -> bool:
        """Whether a job is done."""
        return self.ledger.get(key) is not None

    def solved(self, round_: int) -> bool:
        """Whether an earlier session has solved all units."""
        return all(self.knows(f"solve/{round_}/{unit.name}") for unit in self.units)

    def seen(self, round_: int) -> bool:
        """Whether all rows were looked at with the weights as they are: losses and violations are known without a search."""
        return bool(self.parameters.all_rows) and round_ == 1

    @cached_property
    def terms(self) -> dict[str, float]:
        """What the model of a warm start was trained with."""
        return weights_of_terms(LinearWeights(self.warm_start))

    @cached_property
    def spans(self) -> dict[str, Span | None]:
        """See `spans_of`."""
        return spans_of(self.parameters, self.seconds)

    def _words(self, doing: str, round_: int) -> str:
        """What a round does, and which one it is."""
        p, common = self.parameters, self.parameters.common_rounds
        if common is None:
            return f"{doing}, round {round_ + 1} of as many as it takes"
        if round_ < common:
            return f"{doing}, round {round_ + 1} of {common}"
        return f"{doing}, round {round_ + 1} of at most {p.max_rounds}, of classes far from their optimum"

    def _kernels_of(self, round_: int) -> Job | None:
        """What a round calls that one on all rows does not; also of a run that was resumed in it."""
        return self.kernels if self.parameters.all_rows and round_ else None

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
        todo = [share for share in shares if share.whole or not self.knows(f"solve/{round_}/{share.unit.name}")]
        jobs = [*beside, *(self._solve_job(round_, found or Found(), share, sizes) for share in todo)]
        told: dict[str, Receipt] = {}
        if jobs:
            receipts = yield Phase(
                f"round {number}: solve", jobs, words, span, unit="round", number=number, gathers=True, twice=True,
                loads=self._kernels_of(round_),
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
        guided = guide_weight(self.parameters, self.dataset) > 0
        return solve_plan(
            self.dataset, self.plan, p, bool(self.warm_start), self.units, self.weights.of_samples, guided
        )

    def _solve_job(self, round_: int, found: Found, share: Share, sizes: SolvePlan) -> SolveJob:
        warm = bool(self.warm_start)
        previous = str(self.state(f"solve-{round_ - 1}", share.unit.name)) if round_ or warm else ""
        mine, out = found.of(share.first, share.last), str(self.state(f"solve-{round_}", share.name))
        return SolveJob(
            self.problem, round_, share, previous, mine, out, sizes, self.terms if warm and not round_ else None
        )

    def _join_jobs(self, round_: int, shares: Sequence[Share], told: Mapping[str, Receipt]) -> Iterator[JoinSharesJob]:
        """One for each unit that was solved in shares. told: receipts of these, those that this session has."""
        cut = (share for share in shares if not share.whole)
        for unit, of_unit in itertools.groupby(cut, lambda share: share.unit):
            mine = tuple(of_unit)
            receipts = [told.get(f"solve/{round_}/{share.name}", {}) for share in mine]
            names = BROUGHT if self.parameters.approximate else ()
            sums = {name: sum(receipt.get(name, 0) for receipt in receipts) for name in names}
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
            span = _part_of(span, block, blocks)
        return Phase(
            name, jobs, words, span, unit="" if checks else "round", number=round_ + 1 if round_ else 0, twice=True,
            loads=self._kernels_of(round_),
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


def _part_of(span: Span | None, part: int, parts: int) -> Span | None:
    """One of several equal parts."""
    if span is None:
        return None
    begin, end = span
    return begin + (end - begin) * part / parts, begin + (end - begin) * (part + 1) / parts


def spans_of(p: PPDSparseParameters, seconds: Mapping[str, float]) -> dict[str, Span | None]:
    """From where to where each phase takes the whole run; of none where nobody knows how many rounds there will be.

    seconds: as of `Rounds`. Rounds that only some classes need come behind the others.
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
    spans: dict[str, Span | None] = {}
    at = 0.0
    for name, of in seconds.items():
        spans[name] = end * at / before, end * (at + of) / before
        at += of
    for i, name in enumerate(more):
        spans[name] = _part_of((end, written), i, len(more))
    return {**spans, "finalise": (written, 1.0)}
