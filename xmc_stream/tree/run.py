"""The training of a label tree: vectors, clustering, then level by level: solve children, write them, let all rows go down.

The loop is a generator, as that of `ppdsparse.run`. All it decides comes from receipts and the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.implied import IMPLIED, ImpliedJob
from xmc_stream.methods.contract import WRITING, TrainingRun
from xmc_stream.methods.start import STARTED, say_matched
from xmc_stream.methods.weights import Given
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.model import Model
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.store.places import empty, make_folder, remove_tree
from xmc_stream.tree.beams import BeamJob, beam_path, row_ranges
from xmc_stream.tree.choice import MOST_ROWS, ChoiceJob, DecisionJob, Pick, climbed, cut_picks, only, picks_of
from xmc_stream.tree.given import given_tree
from xmc_stream.tree.guide import N_GROUPS
from xmc_stream.tree.guide import UNIT as GUIDE_UNIT
from xmc_stream.tree.nodes import GUIDE, Unit, UnitTiles, structure_path, units_of
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.plan import cut_children, cut_parents, plan_tree, rows_of_parents, shape_of
from xmc_stream.tree.scoring import score_of
from xmc_stream.tree.shapes import Shapes
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.shuffle import ListJob, Lists, ShuffleJob, lists_of, ranges_of_rows
from xmc_stream.tree.solve import SolveJob
from xmc_stream.tree.streaming import StreamJob
from xmc_stream.tree.structure import Level, Structure
from xmc_stream.tree.units import UnitJob

_SHUFFLES = ("list", "shuffle")
_KINDS = ("vectors", "split", "solve", "beam", "choice", *_SHUFFLES)  # of jobs that leave packs
MARGIN = 0.1  # of implied labels
_PARTS = 16  # of a level, each solved and then written: so many, or fewer of so many units
_CLUSTERED = 0.08  # of a run: where the trees have their shapes
_TOGETHER, _CHOSEN = 0.15, 0.05  # of a level: to bring its rows together, to choose C
Steps = Generator[Phase, list[Receipt], Any]


@dataclass
class _Progress:
    """Levels that are done, of all trees."""

    levels: int
    done: int = 0

    def span(self, begin: float, end: float) -> tuple[float, float]:
        """A part of the level that is under way, in the whole run."""
        low = _CLUSTERED + (1.0 - _CLUSTERED) * self.done / self.levels
        length = (1.0 - _CLUSTERED) / self.levels
        return low + begin * length, low + end * length


@dataclass
class TreeRun(TrainingRun):
    """A training run of the label tree. start: the model of a warm start, whose trees, groups and C it keeps."""

    parameters: TreeParameters
    given: Given | None = None
    start: Model | None = None

    def __post_init__(self) -> None:
        parameters = self.parameters.resolved(self.dataset.n_samples)
        self._of = Shared.of(self.dataset, self.work, parameters, self.seed, self.given)
        self._tried: dict[str, float] = {}
        self._decided: dict[str, Any] = {}
        self._gaps: dict[str, list[float]] = {}
        self._removals = list[Future[None]]()
        self._waiting = list[UnitJob]()  # the one that writes the guide: no job waits for it, so it runs beside labels
        self._shape = shape_of(self.parameters, self.dataset.n_labels, given_tree(self.given), self.start)
        self._sizes = plan_tree(self.plan, self.dataset, self.parameters, self._shape)
        self._score = score_of(self.dataset, self.parameters.guide)

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        with ThreadPoolExecutor(1) as self._beside:  # removing gigabytes waits for the disk, and jobs need not
            made = yield from self._steps()
        for removal in self._removals:
            removal.result()
        return made

    def _steps(self) -> Loop:
        p = self.parameters
        for kind in _KINDS:
            make_folder(self.work / "state" / kind)
        started = yield from self._shapes()
        progress, tiles = _Progress(p.n_trees * (len(self._shape.nodes) + 1)), []
        nnz, implied, levels = 0, {}, list[list[int]]()
        if self._score["guide"]:
            yield from self._groups(progress)
        if self._score["by_score"] and p.guide:
            job = ImpliedJob(self._of.data, str(self.work / IMPLIED), self.plan)
            (found,) = yield Phase(
                "implied labels", [job], "finding labels that others imply", progress.span(0.0, 0.0), twice=True
            )
            implied = {IMPLIED: {"margin": MARGIN, "pairs": found["pairs"]}}
        for tree in range(p.n_trees):
            structure = Structure.read(structure_path(self.work, tree), self.dataset.n_labels)
            levels.append([level.n_children for level in structure.levels])
            for level in structure.levels:
                receipts = yield from self._level(tree, structure, level, progress)
                nnz += sum(receipt["nnz"] for receipt in receipts)
                of_level = [
                    (unit, receipt["bytes"]) for unit, receipt in zip(units_of(tree, level), receipts, strict=True)
                ]
                tiles += [[*astuple(unit), size] for unit, size in of_level]
                if not level.last:
                    yield from self._down(tree, level, tuple(of_level), progress)
                progress.done += 1
        if (guide := self.ledger.get(GUIDE_UNIT.key)) is not None:
            nnz, tiles = nnz + guide["nnz"], [[*astuple(GUIDE_UNIT), guide["bytes"]], *tiles]
            self._gaps = {"groups": guide["gaps"], **self._gaps}
        return {
            "nnz": nnz, "objective": None, "duality_gap": None, "trees": p.n_trees, "tiles": tiles, "levels": levels,
            "tree_score": self._score, "beam": p.beam, "C": self._of.parameters.C, "C_tried": self._tried,
            "gaps": {name: [round(f(of), 6) for f in (np.mean, np.max)] for name, of in self._gaps.items() if of},
            **implied, **started, **self._decided,
        }  # fmt: skip

    def _state(self, kind: str, name: str) -> str:
        """Where a job leaves its pack: by its key, see `key_of_state`."""
        return str(self.work / "state" / kind / name)

    def _shapes(self) -> Generator[Phase, list[Receipt], dict[str, Any]]:
        """The shapes of all trees, and groups; returns what the model says of a warm start."""
        guided = self._score["guide"] > 0
        start = "" if self.start is None else str(self.start.path.absolute())
        groups = self.start is not None and self.start.attributes["tree_score"]["guide"] > 0
        shapes = Shapes(
            self._of, self.dataset.n_labels, self._shape, self._sizes, guided, start, groups, self._state, _CLUSTERED
        )
        keys = [f"structure/{tree}" for tree in range(self.parameters.n_trees)] + ["groups"] * guided
        done = [receipt for receipt in map(self.ledger.get, keys) if receipt is not None]
        first, *_ = done if len(done) == len(keys) else (yield from shapes.loop())
        for kind in ("vectors", "split"):  # which nobody needs any more
            self._removals.append(self._beside.submit(empty, self.work / "state" / kind))
        if not start:
            return {}
        say_matched(first, "places")
        return {STARTED: first}

    def _groups(self, progress: _Progress) -> Steps:
        """Solve the groups of the guide, which are written later."""
        jobs = list[StreamJob]()
        if self._unwritten(GUIDE_UNIT):
            jobs = self._stream_jobs(GUIDE, 0, 0, N_GROUPS, None)
        phase = Phase("guide", jobs, "solving groups of labels", progress.span(0.0, 0.0), twice=True)
        left = yield from self._solved(phase)
        packs = tuple(left[job.out] for job in jobs)
        self._waiting = [UnitJob(self._of, GUIDE_UNIT, (packs,), self._sizes.weights)]

    def _note_gaps(self, what: str, units: list[Receipt]) -> None:
        """Keep the relative duality gaps of some of the children that were solved."""
        self._gaps.setdefault(what, []).extend(gap for receipt in units for gap in receipt["gaps"])

    def _level(self, tree: int, structure: Structure, level: Level, progress: _Progress) -> Steps:
        """Solve and write the children of a level; returns the receipts of its units."""
        dataset, p, rows = self.dataset, self._of.parameters, np.full(1, self.dataset.n_samples)
        if level.number:
            rows = rows_of_parents(dataset.label_counts(), structure.order, level, p, dataset.n_samples)
        row_entries = dataset.X_rows().nnz / max(dataset.n_samples, 1)
        what = f"solving {level.n_children:,} {'labels' if level.last else 'nodes'}{self._tree(tree)}"
        words = WRITING if level.last and tree == p.n_trees - 1 else "writing nodes"
        units, found = units_of(tree, level), list[Receipt]()
        lists = yield from self._shuffle(tree, level, units, rows, row_entries, progress)
        begin, step = _TOGETHER * bool(lists), units_of_part(len(units))
        if level.last and p.C is None:
            yield from self._choose(structure, level, lists, progress, begin)
            begin += _CHOSEN
        for first in range(0, len(units), step):
            some, part = units[first : first + step], (0.75 - begin) / len(units)
            span = progress.span(begin + part * first, begin + part * (first + 0.9 * len(some)))
            solves = [
                [*self._solve_jobs(unit, level, rows, row_entries)] if self._unwritten(unit) else [] for unit in some
            ]
            jobs = [job for of_unit in solves for of_parents in of_unit for job in of_parents]
            waiting, self._waiting = (self._waiting, []) if level.last else ([], self._waiting)
            phase = Phase(
                "solve", [*waiting, *jobs], what, span, unit="level", number=progress.done + 1,
                gathers=level.number > 0 and not self._sizes.shuffles, twice=True,
            )  # fmt: skip
            left = yield from self._solved(phase)
            self._remove(pack for job in waiting for packs in job.parts for pack in packs)
            writes = [
                UnitJob(
                    self._of, unit, tuple(tuple(left[job.out] for job in of) for of in of_unit), self._sizes.weights
                )
                for unit, of_unit in zip(some, solves, strict=True)
            ]
            span = progress.span(begin + part * (first + 0.9 * len(some)), begin + part * (first + len(some)))
            found += yield Phase("finalise", writes, words, span, twice=True)
            self._remove(left.values())
        for kind in _SHUFFLES:  # of this level: a run that goes on comes by levels that are written
            self._remove(map(str, (self.work / "state" / kind).glob(f"{tree}_{level.number}_*")))
        self._note_gaps("labels" if level.last else f"level {level.number + 1}", found)
        return found

    def _shuffle(
        self, tree: int, level: Level, units: list[Unit], rows: NDArray[np.int64], row_entries: float,
        progress: _Progress,
    ) -> Generator[Phase, list[Receipt], Lists]:  # fmt: skip
        """Bring the rows of each job of a level side by side; returns lists of these jobs, none where X is read."""
        if not (self._sizes.shuffles and level.number):
            return ()
        cuts = [cut for unit in units for cut in cut_parents(rows, level, unit, row_entries)]
        lists = lists_of([first for first, _, _ in cuts])
        if any(map(self._unwritten, units)):
            spans = iter([(first, last) for first, last, _ in cuts])
            finds = [
                ListJob(self._of, tree, level.number, tuple(itertools.islice(spans, len(firsts)))) for firsts in lists
            ]
            words, half = f"bringing rows together{self._tree(tree)}", _TOGETHER / 2.0
            yield Phase("rows listed", finds, words, progress.span(0.0, half), twice=True)
            ranges = range(len(ranges_of_rows(self.dataset.X_rows())))
            moves = [ShuffleJob(self._of, tree, level.number, lists, number) for number in ranges]
            yield Phase("rows together", moves, words, progress.span(half, _TOGETHER), twice=True)
        return lists

    def _unwritten(self, unit: Unit) -> bool:
        """Whether the jobs have to be done that a unit is made from, which are gone when it is written."""
        return self.ledger.get(unit.key) is None

    def _solved(self, phase: Phase) -> Generator[Phase, list[Receipt], dict[str, str]]:
        """Do jobs that solve children, and those that go on where one left off; returns the pack of each, by its `out`."""
        left = dict[str, str]()
        while phase.jobs:
            receipts, more = (yield phase), list[StreamJob]()
            for job, receipt in zip(phase.jobs, receipts, strict=True):
                if isinstance(job, StreamJob):
                    if job.part:
                        self._remove([left[job.out]])  # where the part before left off
                    left[job.out] = job.left
                    more += [replace(job, part=job.part + 1)] if receipt["open"] else []
                elif isinstance(job, SolveJob):
                    left[job.out] = job.out
            phase = replace(phase, jobs=more)
        return left

    def _remove(self, packs: Iterable[str]) -> None:
        """What jobs left, which nobody needs any more."""
        self._removals.append(self._beside.submit(_remove_all, list(packs)))

    def _choose(self, structure: Structure, level: Level, lists: Lists, progress: _Progress, begin: float) -> Steps:
        """Choose C of the labels, and what the rows held out say of which labels are predicted.

        lists: see `_shuffle`; begin: how much of the level is done.
        """
        dataset = self.dataset
        rows = rows_of_parents(dataset.label_counts(), structure.order, level, self._of.parameters, dataset.n_samples)
        rows = np.minimum(rows if level.number else np.full(1, dataset.n_samples), MOST_ROWS)
        row_entries = dataset.X_rows().nnz / max(dataset.n_samples, 1)
        parts = cut_picks(picks_of(level, rows, self.seed), rows, row_entries)
        chosen_at = begin + _CHOSEN
        known = None if self.start is None else float(self.start.attributes["C"])
        climb, left = climbed() if known is None else only(known), dict[float, tuple[str, ...]]()
        found: Any = None
        while True:
            try:
                values = climb.send(found)
            except StopIteration as end:
                self._of = replace(self._of, parameters=replace(self._of.parameters, C=end.value))
                break
            jobs = [self._choice_job(values, level, picks, lists) for picks in parts]
            receipts = yield Phase(
                "choice", jobs, "choosing C", progress.span(begin, chosen_at), gathers=not lists, twice=True
            )
            weights = np.array([receipt["right"] for receipt in receipts])
            of_jobs = np.array([receipt["precisions"] for receipt in receipts])
            means = (of_jobs * weights[:, None]).sum(axis=0) / max(weights.sum(), 1)
            found = dict(zip(values, means.tolist(), strict=True))
            left |= dict.fromkeys(values, tuple(job.out for job in jobs))
            self._tried |= {f"{c:g}": round(precision, 4) for c, precision in found.items()}
        if not dataset.one_label:
            chosen = self._of.parameters.chosen_C
            job = DecisionJob(chosen, left[chosen])
            (self._decided,) = yield Phase("decision", [job], "choosing C", progress.span(chosen_at, chosen_at))

    def _choice_job(self, values: Sequence[float], level: Level, picks: tuple[Pick, ...], lists: Lists) -> ChoiceJob:
        out = self._state("choice", f"{values[0]:g}_{picks[0][0]}-{picks[0][1]}")
        return ChoiceJob(self._of, level.number, tuple(values), picks, self._score["path"], out, lists)

    def _solve_jobs(
        self, unit: Unit, level: Level, rows: NDArray[np.int64], row_entries: float
    ) -> Iterator[Sequence[SolveJob | StreamJob]]:
        """Jobs for the parents of a unit: one of several parents, or several of one. rows: of each parent, at most."""
        tree, number = unit.tree, unit.level
        for first, last, large in cut_parents(rows, level, unit, row_entries):
            if large:
                n_children, n_rows = int(np.diff(level.ptr)[first]), int(rows[first]) if number else None
                yield self._stream_jobs(tree, number, first, n_children, n_rows)
                continue
            out = self._state("solve", f"{tree}_{number}_{first}-{last}")
            shuffled = self._sizes.shuffles and number > 0
            yield [SolveJob(self._of, tree, number, first, last, self._sizes.entries, self.plan, out, shuffled)]

    def _stream_jobs(self, tree: int, level: int, parent: int, n_children: int, rows: int | None) -> list[StreamJob]:
        """Jobs for the children of a parent whose rows stream by, at most so many, None for all."""
        at_once = self.plan.threads * self.plan.processes
        spans, spare = cut_children(n_children, rows, self.dataset, self._sizes, at_once)
        name = f"{tree}_{level}_{parent}"
        shuffled = self._sizes.shuffles and rows is not None
        return [
            StreamJob(self._of, tree, level, parent, *span, spare, out=self._state("solve", f"{name}_{span[0]}-{span[1]}"),
                      shuffled=shuffled)
            for span in spans
        ]  # fmt: skip

    def _down(self, tree: int, level: Level, tiles: UnitTiles, progress: _Progress) -> Steps:
        """Let all rows go down a level."""
        drop_tiles()
        jobs = []
        for start, stop in row_ranges(self.dataset.n_samples):
            before, out = (beam_path(self._of.work, tree, number, start) for number in (level.number - 1, level.number))
            sizes = tiles, self._sizes.cache_bytes, self._sizes.block_bytes
            jobs.append(BeamJob(self._of, tree, level.number, start, stop, *sizes, before if level.number else "", out))
        yield Phase("beam", jobs, f"letting rows go down{self._tree(tree)}", progress.span(0.75, 1.0), twice=True)
        drop_tiles()

    def _tree(self, tree: int) -> str:
        n = self.parameters.n_trees
        return "" if n == 1 else f" of tree {tree + 1} of {n}"


def _remove_all(packs: Sequence[str]) -> None:
    for pack in packs:
        remove_tree(Path(pack))


def units_of_part(n: int) -> int:
    """Units of a level of n that are solved before they are written: what they are made from is on disk meanwhile."""
    return max(_PARTS, -(-n // _PARTS))


def key_of_state(pack: Path) -> str:
    """The key of the job that left a pack."""
    return f"{pack.parent.name}/{pack.name.replace('_', '/')}"


def made_from(key: str, done: Sequence[str]) -> list[str]:
    """Of jobs that are done those whose packs a shape or a unit was made from, which are removed when it is there.

    key: of the job that made it.
    """
    kind, _, name = key.partition("/")
    if kind == "solve" and key.count("/") == 5:  # where a part left off: those before it are gone
        children = key.rpartition("/")[0]
        return [other for other in done if other == children or other.startswith(f"{children}/")]
    if kind in ("structure", "groups"):
        return [other for other in done if other.startswith(("vectors/", "split/"))]
    if kind != "finalise":
        return []
    tree, level, first = (GUIDE, 0, 0) if key == GUIDE_UNIT.key else map(int, name.split("-"))
    found = []
    for other in done:
        kind, *numbers = other.split("/")
        if numbers[:2] != [str(tree), str(level)]:
            continue
        # those of units behind it too: of these it is not known where they begin
        if kind in _SHUFFLES or (kind == "solve" and int(numbers[2].split("-")[0]) >= first):
            found.append(other)
    return found
