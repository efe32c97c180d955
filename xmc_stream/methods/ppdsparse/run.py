"""PPDSparse's rounds: solve all units, search all rows for violators, and again; then a check, and the model.

The loop is a generator: it yields phases of jobs and is sent their receipts, so it runs under any engine, and again
from the start after a kill, when receipts come out of the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from xmc_stream.jobs.job import Job, Ledger, Loop, Phase, Receipt
from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.methods.ppdsparse.candidates import FoundFile
from xmc_stream.methods.ppdsparse.parameters import WORTH, PPDSparseParameters
from xmc_stream.methods.ppdsparse.plan import SearchSize, SolvePlan, class_blocks, plan_solve, search_leg, search_ranges
from xmc_stream.methods.ppdsparse.search import Piece, SearchJob
from xmc_stream.methods.ppdsparse.solve import SolveJob, open_gap, update_figures
from xmc_stream.methods.ppdsparse.solver import row_order, start_sizes
from xmc_stream.methods.ppdsparse.start import StartJob, learned_from, weights_of_terms
from xmc_stream.methods.ppdsparse.state import (
    BIAS,
    DUAL,
    EMPTY,
    INSIDE,
    KEPT,
    LOSS,
    OUTSIDE,
    STATUS,
    WRITER_BYTES,
    UnitState,
)
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.linear.tiles import Run, TileSizes
from xmc_stream.models.linear.units import tiles_of, units_of_run
from xmc_stream.models.linear.weights import LinearWeights, Unit, new_unit, starts_of, unit_of, unit_path
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import make_folder, remove
from xmc_stream.store.model import UNIT

_CLASS_BYTES = 320  # of a class in a solve job: two times its figures, and some 25 numbers
_USED_SHARE = 8  # rough searches go on while one in so many of the rows they bring in is of use


@dataclass(frozen=True)
class FinaliseJob:
    """Write a unit of the model from its last state, and what the last search, an exact one, says of its classes.

    Objective and gap are those of the weights before small ones are left out.
    """

    parameters: PPDSparseParameters
    round: int
    n_samples: int
    n_features: int
    unit: Unit
    state: str
    found: tuple[FoundFile, ...]
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"finalise/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt sums objective, gap and size."""
        drop_tiles()
        first, last = self.unit
        state = UnitState(Path(self.state), last - first, self.n_samples, self.n_features)
        figures = state.figures
        update_figures(figures, self.found, first, self.parameters, self.n_samples, self.round)
        tiles = TileSizes(first, last, self.n_features)
        with new_unit(Path(self.out), self.n_features, last - first) as writer:
            for block in state.weights.blocks(max(4 * MIB, 16 * self.n_features)):
                lengths, features, values = np.diff(block.indptr), block.indices, block.values
                if self.parameters.prune > 0:
                    kept = np.abs(values) >= np.float32(self.parameters.prune)
                    lengths = np.diff(np.concatenate([[0], np.cumsum(kept)])[block.indptr])
                    features, values = features[kept], values[kept]
                writer.weights.append(lengths, features, values)
                tiles.add(lengths, features)
            writer.bias[:] = figures[:, BIAS]
            objective = figures[:, KEPT] + self.parameters.C * figures[:, LOSS]
            gap = objective + figures[:, DUAL]
            writer.figures = {
                "objective": objective,
                "duality_gap": gap,
                "violation": np.maximum(figures[:, INSIDE], figures[:, OUTSIDE]),
            }
        learned = figures[:, STATUS] != EMPTY
        relative = gap[learned] / objective[learned]
        return {
            "nnz": writer.weights.nnz,
            "runs": [astuple(run) for run in tiles.runs],
            "learned": int(learned.sum()),
            "open": int((writer.figures["violation"][learned] > self.parameters.tol).sum()),
            "objective": float(objective.sum()),
            "gap_worst": float(relative.max(initial=0.0)),
            "gap_sum": float(relative.sum()),
            "violation": float(writer.figures["violation"][learned].max(initial=0.0)),
        }


def solve_plan(
    plan: MemoryPlan, dataset: Dataset, parameters: PPDSparseParameters, warm_start: bool, units: Sequence[Unit]
) -> SolvePlan:
    """What a solve job may hold. Raises MemoryLimitError where that is too little."""
    n_features = dataset.n_features
    most = np.array([dataset.most_positives()])  # an active set grows with the positives
    largest = int(most[0] + start_sizes(most, dataset.n_samples)[0])
    # beside what every solve holds: sizes of two kinds of tiles and their work; weights of a warm start; a wide unit
    extra = 32 * n_features * parameters.approximate + (20 * n_features + MIB) * warm_start
    extra += _CLASS_BYTES * max(0, *(unit.last - unit.first - UNIT for unit in units))
    order = row_order(dataset.n_samples, dataset.X_rows().nnz)
    return plan_solve(plan, dataset.n_samples, n_features, WRITER_BYTES + extra, largest, order, len(units))


@dataclass
class PPDSparseRun:
    """A training run: what to learn from, where to, and within which memory.

    work: folder of the unfinished model; what jobs leave for each other lies in its `state`. warm_start: path of the
    model whose weights a run begins from, "" for none. blocks: class blocks of each search that a forecast promised; a
    search has more only where its tiles turn out larger than foreseen.
    """

    dataset: Dataset
    work: Path
    parameters: PPDSparseParameters
    seed: int
    plan: MemoryPlan
    ledger: Ledger
    warm_start: str = ""
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.warm_start:
            self.parameters = self.parameters.warm(
                self._of_start, learned_from(LinearWeights(self.warm_start), self.dataset)
            )

    @cached_property
    def units(self) -> list[Unit]:
        """What the classes are cut into."""
        return units_of_run(self.dataset, self.ledger)

    def loop(self) -> Loop:
        """Phases of jobs until every class is done or the cap on rounds is reached; returns figures of the model."""
        p = self.parameters
        solves = yield from self._first_solve()
        rough = p.approximate
        for round_ in itertools.count(1):
            last = round_ == p.max_rounds
            rough = rough and (p.common_rounds is None or round_ < p.common_rounds)
            finished = self._all_known(self._finalise_jobs(round_, []))
            if not last and self._all_known(self._solve_jobs(round_, [])):
                files: list[FoundFile] = []  # searched and solved in an earlier session
            elif finished or not any(receipt["open"] for receipt in solves):
                files, last = [], True
            else:
                files, n_found = yield from self._search(round_, rough, solves)
                if rough and n_found == 0:  # whether nothing is left, an exact search says
                    rough = False
                    files, n_found = yield from self._search(round_, rough, solves)
                settled = n_found == 0 and all(receipt["inside"] <= p.tol for receipt in solves)
                last = last or settled or not self._worth_more(round_, files)
            if last:
                break
            make_folder(self._state(f"solve-{round_}"))
            solves = yield Phase(
                f"round {round_ + 1}: solve",
                self._solve_jobs(round_, files, rough),
                unit="round",
                number=round_ + 1,
                gathers=True,
            )
            self._drop_before(round_)
            # a row that nothing moved was found by error; an exact search brings none in by error and is kept to
            fresh, used = (sum(receipt.get(name, 0) for receipt in solves) for name in ("fresh", "used"))
            rough = rough and 0 < fresh <= _USED_SHARE * used
        receipts = yield Phase("finalise", self._finalise_jobs(round_, files))
        learned = sum(receipt["learned"] for receipt in receipts)
        return {
            "rounds": round_,
            "nnz": sum(receipt["nnz"] for receipt in receipts),
            "tiles": tiles_of(receipts),
            "objective": math.fsum(receipt["objective"] for receipt in receipts),
            "duality_gap": max(receipt["gap_worst"] for receipt in receipts),
            "duality_gap_mean": math.fsum(receipt["gap_sum"] for receipt in receipts) / max(learned, 1),
            "violation": max(receipt["violation"] for receipt in receipts),
            "n_open": sum(receipt["open"] for receipt in receipts),
            "n_empty": self.dataset.n_labels - learned,
            **starts_of(self.units),
        }

    def _worth_more(self, round_: int, files: list[FoundFile]) -> bool:
        """Whether another round pays: always up to `common_rounds`, then while open classes are far from their optimum."""
        p = self.parameters
        if p.common_rounds is None or round_ < p.common_rounds or round_ == p.max_rounds:
            return True
        note = f"gap/{round_}"
        if (known := self.ledger.get(note)) is None:
            sums = []
            for unit in self.units:
                d, state = self.dataset, self._state(f"solve-{round_ - 1}", unit.name)
                figures = UnitState(state, unit.last - unit.first, d.n_samples, d.n_features).figures
                update_figures(figures, self._of_unit(files, unit), unit.first, p, d.n_samples, round_)
                sums.append(open_gap(figures, p.C))
            gap, objective = (math.fsum(of_units) for of_units in zip(*sums, strict=True))
            known = {"worth": gap > WORTH * objective}
            self.ledger.add(note, known)
        return bool(known["worth"])

    @cached_property
    def _of_start(self) -> dict[str, float]:
        return weights_of_terms(LinearWeights(self.warm_start))

    @property
    def _start_slope(self) -> float:
        """See `PPDSparseParameters.start_slope`."""
        return self.parameters.start_slope(self._of_start.get("C", self.parameters.C)) if self.warm_start else 0.0

    def _first_solve(self) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """Round 0: from nothing, or from the weights of a model and what a search with them finds."""
        files: list[FoundFile] = []
        if self.warm_start and not self._all_known(self._solve_jobs(0, [])):
            make_folder(self._state("solve--1"))
            starts = yield Phase("warm start: weights", self._start_jobs(), gathers=True)
            files, _ = yield from self._search(0, False, starts)
        make_folder(self._state("solve-0"))
        solves = yield Phase("round 1: solve", self._solve_jobs(0, files), unit="round", number=1, gathers=True)
        self._drop_before(0)
        return solves

    def _drop_before(self, round_: int) -> None:
        """Remove what a round was made from and is needed no more."""
        for old in (self._state(f"solve-{round_ - 1}"), self._state(f"search-{round_}")):
            remove(old)

    def _state(self, kind: str, name: str = "") -> Path:
        return self.work / "state" / kind / name

    def _all_known(self, jobs: Sequence[Job]) -> bool:
        return all(self.ledger.get(job.key) is not None for job in jobs)

    def _start_jobs(self) -> list[StartJob]:
        sizes = solve_plan(self.plan, self.dataset, self.parameters, bool(self.warm_start), self.units)
        return [
            StartJob(
                str(self.dataset.path), self.warm_start, self.parameters, unit,
                str(self._state("solve--1", unit.name)), sizes,
            )
            for unit in self.units
        ]  # fmt: skip

    def _solve_jobs(self, round_: int, files: list[FoundFile], rough: bool = False) -> list[SolveJob]:
        d = self.dataset
        sizes = solve_plan(self.plan, d, self.parameters, bool(self.warm_start), self.units)
        return [
            SolveJob(
                str(d.path), self.parameters, self.seed, round_, unit,
                str(self._state(f"solve-{round_ - 1}", unit.name)) if round_ or self.warm_start else "",
                self._of_unit(files, unit), rough, str(self._state(f"solve-{round_}", unit.name)), self.plan, sizes,
                self._start_slope,
            )
            for unit in self.units
        ]  # fmt: skip

    def _finalise_jobs(self, round_: int, files: list[FoundFile]) -> list[FinaliseJob]:
        return [
            FinaliseJob(
                self.parameters, round_, self.dataset.n_samples, self.dataset.n_features, unit,
                str(self._state(f"solve-{round_ - 1}", unit.name)),
                self._of_unit(files, unit), str(unit_path(self.work, unit)),
            )
            for unit in self.units
        ]  # fmt: skip

    @staticmethod
    def _of_unit(files: list[FoundFile], unit: Unit) -> tuple[FoundFile, ...]:
        return tuple(file for file in files if file.first < unit.last and file.last > unit.first)

    def _search(
        self, round_: int, rough: bool, solves: list[Receipt]
    ) -> Generator[Phase, list[Receipt], tuple[list[FoundFile], int]]:
        """One pass over the rows for each class block; returns the files written and how many classes have violators.

        solves: receipts of the jobs that made the weights.

        A search that an earlier session finished is used as it was cut then; one that it left unfinished goes on if
        the present limit cuts it the same way, else it begins anew.
        """
        note = f"cut/{round_}/rough" if rough else f"cut/{round_}"
        before = self.ledger.get(note)
        if before is not None:
            known = [receipt for key in before["keys"] if (receipt := self.ledger.get(key)) is not None]
            if len(known) == len(before["keys"]):
                files = [FoundFile(first, last, str(self.work / path)) for first, last, path in before["files"]]
                return files, sum(receipt["found"] for receipt in known)
        check = round_ in (self.parameters.common_rounds, self.parameters.max_rounds) and round_ > 0
        blocks = self._cut_classes(round_, check, rough, solves)
        phases = [self._search_jobs(round_, check, rough, *block) for block in blocks]
        jobs = [job for phase in phases for job in phase]
        files = [FoundFile(job.first, job.last, job.out) for job in jobs]
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
            name = "check" if check else f"round {round_ + 1}: search" if round_ else "warm start: search"
            name = f"{name} {b + 1}/{len(phases)}" if len(phases) > 1 else name
            receipts = yield Phase(name, phase, unit="" if check else "round", number=round_ + 1 if round_ else 0)
            n_found += sum(receipt["found"] for receipt in receipts)
        return files, n_found

    def _search_jobs(
        self, round_: int, check: bool, rough: bool, pieces: tuple[Piece, ...], cache_bytes: int, leg: int
    ) -> list[SearchJob]:
        d = self.dataset
        name = f"{'rough.' if rough else ''}{pieces[0].first}-{pieces[-1].last}"
        return [
            SearchJob(
                str(d.path), self.parameters, self.seed, round_, check, rough, start, stop, pieces,
                str(self._state(f"search-{round_}", f"{name}.{start}-{stop}")), self.plan, cache_bytes, leg,
            )
            for start, stop in search_ranges(self.plan, d.n_samples)
        ]  # fmt: skip

    def _cut_classes(
        self, round_: int, check: bool, rough: bool, solves: list[Receipt]
    ) -> list[tuple[tuple[Piece, ...], int, int]]:
        """Class blocks: the pieces of each, the bytes of its tiles, rows of a leg. Only open classes are in them."""
        kind = "rough_runs" if rough and self.parameters.delta > 0 else "runs"
        units = [[SearchSize(Run(*run[:4]), *run[4:]) for run in receipt[kind]] for receipt in solves]
        if check:
            units = [
                [replace(size, wanted=[size.run.last - size.run.first] * len(size.wanted)) for size in sizes]
                for sizes in units
            ]
        blocks = []
        at = round_ if self.warm_start else round_ - 1
        promised = self.blocks[at] if at < len(self.blocks) else 1
        d = self.dataset
        for block in class_blocks(self.plan, units, d.n_features, d.n_samples, promised):
            pieces = tuple(
                Piece(run.first, run.last, unit, str(self._state(f"solve-{round_ - 1}", unit.name)), run.tile)
                for run, unit in ((piece.run, unit_of(self.units, piece.run.first)) for piece in block)
            )
            leg = search_leg(self.plan, block, d.n_features, d.n_samples)
            blocks.append((pieces, sum(piece.tile_bytes for piece in pieces), leg))
        if self.plan.cuts.classes:
            blocks = [
                ((small,), small.tile_bytes, leg)
                for pieces, _, leg in blocks
                for piece in pieces
                for small in self._split(piece, self.plan.cuts.classes)
            ]
        return blocks

    def _split(self, piece: Piece, step: int) -> list[Piece]:
        """A piece in parts of `step` classes. A narrower tile has more dense rows: 1,024 is a bound on their growth."""
        bound = piece.tile_bytes * UNIT
        return [
            replace(piece, first=first, last=min(first + step, piece.last), tile_bytes=bound)
            for first in range(piece.first, piece.last, step)
        ]
