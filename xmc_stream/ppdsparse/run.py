"""PPDSparse's rounds: search all rows for violators, solve all classes, and again; then a check, and the model.

The loop is a generator: it yields phases of jobs and is sent their receipts, so it runs under any engine, and again
from the start after a kill, when receipts come out of the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmc_stream.linear.guide import GUIDE
from xmc_stream.linear.implied import IMPLIED, ImpliedJob
from xmc_stream.linear.weights import LinearWeights, finalise_key, starts_of, unit_path
from xmc_stream.methods.contract import WRITING
from xmc_stream.ppdsparse.finalise import FinaliseJob, figures_of
from xmc_stream.ppdsparse.groups import (
    GROUPS_SAY,
    GroupsJob,
    KeepGroupsJob,
    groups_run_beside,
    guide_weight,
    implied_margin,
    takes_groups,
)
from xmc_stream.ppdsparse.parameters import APPROXIMATE, EXACT, LARGE_MODEL, NARROW, WORTH
from xmc_stream.ppdsparse.problem import Found
from xmc_stream.ppdsparse.rounds import BROUGHT, Rounds
from xmc_stream.ppdsparse.scale import least_weight
from xmc_stream.ppdsparse.start import CarryJob, MatchJob, StartJob, match_bytes, say_matched
from xmc_stream.ppdsparse.state import DUAL, KEPT, LOSS, OPEN, STATUS, UnitState, update_statistics
from xmc_stream.runtime.job import Job, Loop, Phase, Receipt
from xmc_stream.store.model import HALVES
from xmc_stream.store.places import make_folder

# the attribute: how many labels of a warm start were kept, new, gone; by_name: how matched
STARTED = "warm_start_labels"
_USED_SHARE = 8  # approximate searches go on while one in so many of the rows they bring in is of use
_UNCHECKED = ("objective", "duality_gap", "duality_gap_mean", "violation", "n_open")  # what only a check says

_Receipts = Generator[Phase, list[Receipt], list[Receipt]]


@dataclass
class PPDSparseRun(Rounds):
    """A training run: how it begins, which rounds it takes, and what comes out."""

    _approximate: bool = field(default=False, init=False)  # whether searches still are
    _started: dict[str, Any] = field(default_factory=dict, init=False)  # how a warm start's labels were matched

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
        self._approximate = self.parameters.approximate and not self.carried
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
        needs = {"labels of both": match_bytes(self.dataset, LinearWeights(self.warm_start))}
        self.plan.refuse_unless(needs, "matching labels")
        make_folder(self.state("match"))
        job = MatchJob(str(self.dataset.path), self.warm_start, self._matched)
        (receipt,) = yield Phase("warm start: labels", [job], "matching labels")
        self._started = say_matched(receipt)
        self.parameters = self.parameters.warm(new_labels=bool(receipt["new"]))

    @property
    def _matched(self) -> str:
        return str(self.state("match", "labels"))

    def _search_with_the_model(self) -> Generator[Phase, list[Receipt], Found]:
        """The violators of a model's weights."""
        make_folder(self.state("solve--1"))
        jobs = [
            StartJob(self.problem, self.warm_start, unit, self._matched, str(self.state("solve--1", unit.name)))
            for unit in self.units
        ]
        words = "reading the weights to begin from"
        starts = yield Phase("warm start: weights", jobs, words, gathers=True, twice=True)
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
        if all(self.knows(finalise_key(unit.name)) for unit in self.units) or self._unchecked(round_):
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
                    update_statistics(statistics, searched, unit.first, p, round_, of_classes=of_classes)
                objective = statistics[:, KEPT] + p.C * statistics[:, LOSS]
                gap = (objective + statistics[:, DUAL])[statistics[:, STATUS] == OPEN]
                sums.append((math.fsum(gap), math.fsum(objective)))
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
