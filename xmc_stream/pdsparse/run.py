"""PD-Sparse's passes: segment after segment until the held-out rows say stop, for each lam; then the model of the best pass.

The loop is a generator, as that of `ppdsparse.run`. All it decides comes from receipts. After a kill it runs
again from the start, and the receipts come out of the ledger.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xmc_stream.linear.weights import Unit, starts_of, tiles_of, unit_path, units_of_run
from xmc_stream.methods.contract import WRITING, TrainingRun
from xmc_stream.pdsparse.jobs import PLACES, DecisionJob, LookJob, ObjectiveJob, SegmentJob, UnitJob, WeightsJob
from xmc_stream.pdsparse.memory import Data, TablesOf, Which, plan_pass
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.solver import more_labels, n_groups
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.model import DECISION
from xmc_stream.store.places import remove

_HELD_OUT_PASSES = 2  # over the rows that were held out, before those over all
_REFIT_VISITS = 25_000  # of rows in passes over all, at least: of a small set held-out rows say little of when to stop
_PASSES = 0.95  # of a run, that passes take
_POST_PASSES = 10  # of the post-solve, at most
_LAST = ("square", "l1", "nnz")  # of the last segment of a pass
_SUMS = ("rows", "negatives", "active", "used", "searched", "stepped")


def refit_passes(n_samples: int) -> int:
    """Passes over all rows once held-out ones have said when to stop: one, or more where they take next to nothing."""
    return -(-_REFIT_VISITS // max(n_samples, 1))


def most_passes(parameters: PDSparseParameters, n_samples: int) -> int:
    """Passes of a run, at most: for each lam, over all rows, of the post-solve, for the objective."""
    refit = _HELD_OUT_PASSES + min(refit_passes(n_samples), parameters.max_passes)
    again = refit * (parameters.refit and parameters.held_out > 0) + _POST_PASSES * parameters.post_solve
    return len(parameters.lams) * parameters.max_passes + again + 1


@dataclass(frozen=True)
class Stage:
    """Passes with one lam. number: of the stage in the run; start: the pass that it goes on from, None for from nothing.

    support, rows: see `SegmentJob`; passes: at most.
    """

    number: int
    name: str
    lam: float
    passes: int
    start: Pass | None = None
    support: float | None = None
    rows: Which = "learned"


@dataclass
class Pass:
    """A pass that has ended: where it left things, sums over its segments and over what held-out rows say of it, and what
    stands in the receipt of its last segment.
    """

    stage: Stage
    number: int
    most: int
    dual: tuple[str, ...]
    tables: TablesOf
    sums: dict[str, Any]

    @property
    def dual_objective(self) -> float:
        """1/2 ||w||^2 + the sum of a over negatives."""
        square, negatives = float(self.sums["square"]), float(self.sums["negatives"])
        return 0.5 * square + negatives

    def precision(self, k: int) -> float:
        """P@k on the rows held out, in per cent; 0 without any."""
        hits, held_out = sum(self.sums["hits"][:k]), int(self.sums["n_held_out"])
        return float(100.0 * hits / (k * max(held_out, 1)))

    def to_dict(self) -> dict[str, Any]:
        """Numbers for the model's attributes."""
        f, rows = self.sums, max(self.sums["rows"], 1)
        return {
            "stage": self.stage.name, "pass": self.number + 1, "lam": self.stage.lam, "dual": self.dual_objective,
            **{f"held_out_P@{k}": round(self.precision(k), 4) for k in (1, 3, 5) if f["n_held_out"]}, "nnz": f["nnz"],
            "active_labels": round(f["active"] / rows, 4), "nnz_a": round(f["used"] / rows, 4), "rows": f["rows"],
        }  # fmt: skip


_Passes = Generator[Phase, list[Receipt], Pass]


@dataclass
class PDSparseRun(TrainingRun):
    """A training run of PD-Sparse."""

    parameters: PDSparseParameters

    def __post_init__(self) -> None:
        d, p = self.dataset, self.parameters
        nnz = d.X_rows().nnz
        self._data = Data(str(d.path), str(self.work), p, self.seed, plan_pass(self.plan, d, p))
        self._groups = n_groups(d.n_samples, nnz)
        self._rate = p.rate_for(d.n_features, d.n_labels, d.n_samples, nnz)
        self._passes: list[Pass] = []

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model.

        Passes for each lam, until held-out rows say stop; then over all rows; then the post-solve of section 4.3, if it is
        asked for.
        """
        best = yield from self._choose_lam()
        decided = yield from self._decide(best)
        final, rows = yield from self._refit(best)
        primal, lam, d = final, best.stage.lam, self.dataset
        losses = yield from self._losses(final, rows)
        if self.parameters.post_solve:
            final = yield from self._post_solve(final, best, rows)
            if rows == "learned" and final is not best:
                decided = yield from self._decide(final)
        units = units_of_run(d, self.ledger, ("finalise",))
        receipts = yield from self._write(final, units)
        objective = 0.5 * losses["square"] + lam * losses["l1"] + self.parameters.C * losses["losses"]
        gap = objective + primal.dual_objective
        return {
            "rounds": len(self._passes),
            "nnz": sum(receipt["nnz"] for receipt in receipts),
            "tiles": tiles_of(receipts),
            **starts_of(units),
            "objective": objective,
            "duality_gap": gap / objective if objective else 0.0,
            "lam": lam,
            "best_pass": best.number + 1,
            **{name: value for name, value in best.to_dict().items() if name.startswith("held_out")},
            **decided,
            "n_learned": final.sums["rows"],
            "n_held_out": best.sums["n_held_out"],
            "n_skipped": d.n_samples - best.sums["rows"] - best.sums["n_held_out"],
            "history": [done.to_dict() for done in self._passes],
        }

    def _decide(self, done: Pass) -> Loop:
        """What held-out rows say of which labels to predict, where rows have several; {} where they say nothing."""
        if not done.sums["n_held_out"] or self.dataset.one_label:
            return {}
        job = DecisionJob(self._data, done.stage.number, done.number, done.tables)
        words = "learning from the rows held out which labels to predict"
        (receipt,) = yield Phase("decision", [job], words)
        return {DECISION: receipt[DECISION]}

    def _losses(self, done: Pass, rows: Which) -> Loop:
        """The losses of rows that were learned from, by the weights that a pass left, and norms of these."""
        receipt: Receipt = {"last": 0, "losses": 0.0}
        while receipt["last"] < self.dataset.n_samples:
            job = ObjectiveJob(self._data, done.tables, rows, receipt["last"], receipt["losses"])
            (receipt,) = yield Phase("objective", [job], "computing the objective")
        return receipt

    def _choose_lam(self) -> _Passes:
        """The best pass of all values of lam; each goes on from the best one before it."""
        p = self.parameters
        best: Pass | None = None
        for number, lam in enumerate(p.lams):
            name = "pass" if len(p.lams) == 1 else f"lam {lam:g}, pass"
            found = yield from self._stage(Stage(number, name, lam, p.max_passes), best)
            worse: Pass | None = found
            if best is None or self._score(found) > self._score(best):
                worse, best = best, found
            self._drop(worse)
        assert best is not None  # there is a lam
        return best

    def _refit(self, best: Pass) -> Generator[Phase, list[Receipt], tuple[Pass, Which]]:
        """Passes over all rows, where some were held out; returns the last one, and which rows it learned from."""
        p, lam, number = self.parameters, best.stage.lam, len(self.parameters.lams)
        if not best.sums["n_held_out"]:
            return best, "all"
        if not p.refit:
            return best, "learned"
        # rows that were held out begin from nothing: they come to where the others are before these move again
        stage = Stage(number, "held-out rows, pass", lam, _HELD_OUT_PASSES, best, rows="held out")
        caught_up = yield from self._stage(stage)
        passes = min(refit_passes(self.dataset.n_samples), p.max_passes)
        stage = Stage(number + 1, "all rows, pass", lam, passes, caught_up, rows="all")
        return (yield from self._stage(stage)), "all"

    def _post_solve(self, final: Pass, best: Pass, rows: Which) -> _Passes:
        """Without the l1 term, on the support that it has left; what was best stays where held-out rows find this worse."""
        number, lam = len(self.parameters.lams) + 2, best.stage.lam
        stage = Stage(number, "post-solve, pass", 0.0, _POST_PASSES, final, support=lam, rows=rows)
        solved = yield from self._stage(stage)
        return solved if rows == "all" or self._score(solved) > self._score(best) else best

    def _write(self, final: Pass, units: list[Unit]) -> Generator[Phase, list[Receipt], list[Receipt]]:
        """The weights that a pass has left, by class; returns receipts of the units."""
        self._data.held.keep(None, "")
        weights, max_bytes = self.work / "state" / "weights" / "all", max(16 * MIB, self.plan.budget // 2)
        by_class = WeightsJob(self._data, final.stage.lam, final.tables.folder, str(weights), max_bytes)
        yield Phase("weights", [by_class], WRITING, (_PASSES, _PASSES))
        n_features = self.dataset.n_features
        jobs = [UnitJob(self._data, str(weights), n_features, unit, str(unit_path(self.work, unit))) for unit in units]
        return (yield Phase("finalise", jobs, WRITING, (_PASSES, 1.0), twice=True))

    def _score(self, done: Pass) -> float:
        """What held-out rows say of a pass: P@1, or where rows have several labels the mean of P@1, P@3, P@5."""
        several = self.dataset.Y_rows().nnz > self.dataset.n_samples
        ks = (1, 3, 5) if several else (1,)
        return sum(done.precision(k) for k in ks) / len(ks)

    def _stage(self, stage: Stage, other: Pass | None = None) -> _Passes:
        """Passes until they bring no more; returns the best. other: a pass that must stay."""
        p, d = self.parameters, self.dataset
        bound = min(p.most, d.n_labels)
        most = stage.start.most if stage.start else min(bound, max(1, -(-d.Y_rows().nnz // max(d.n_samples, 1))))
        best, before, waited, stay = None, stage.start, 0, (stage.start, other)
        for number in range(stage.passes):
            done = yield from self._pass(stage, number, before, most)
            if before is not best and before not in stay:
                self._drop(before)
            before, f = done, done.sums
            most = most if stage.start else more_labels(most, f["searched"], f["stepped"], bound)
            if f["n_held_out"] and best is not None and self._score(done) <= self._score(best):
                waited += 1
                if waited == p.patience:
                    break
                continue
            if best not in stay:
                self._drop(best)
            best, waited = done, 0
            if not f["n_held_out"] and f["largest"] <= p.tol:
                break
        if before is not best:
            self._drop(before)
        return best or done

    def _pass(self, stage: Stage, number: int, before: Pass | None, most: int) -> _Passes:
        last_one = self._passes[-1] if self._passes else None
        said = "" if last_one is None else f" ({self._told(last_one)})"
        words = f"{stage.name} {number + 1} of at most {stage.passes}{said}"
        first, dual, folder = (0, (), "") if before is None else (0, before.dual, before.tables.folder)
        tables = TablesOf(folder, stage.lam, self._rate, stage.support is not None)
        segments: list[SegmentJob] = []
        sums: dict[str, Any] = dict.fromkeys((*_SUMS, "largest", "n_held_out"), 0) | {"hits": [0]}
        while first < self._groups:
            job = SegmentJob(
                self._data, stage.number, number, first, self._groups, most, dual, tables, stage.support, stage.rows,
            )  # fmt: skip
            here, name = self._place(stage, number, first), f"{stage.name} {number + 1}"
            (known,) = yield Phase(name, [job], words, (here, here), unit="pass", number=len(self._passes) + 1)
            first = known["last"]
            if segments:
                remove(segments[-1].folder("tables"))
            segments.append(job)
            tables = replace(tables, folder=str(job.folder("tables")))
            for what in _SUMS:
                sums[what] += known[what]
            sums["largest"] = max(sums["largest"], known["largest"])
            sums |= {what: known[what] for what in _LAST}
        done = Pass(stage, number, most, tuple(str(segment.folder("dual")) for segment in segments), tables, sums)
        if stage.rows == "learned" and self.parameters.held_out:
            yield from self._look(done, words)
        if stage.rows != "held out":
            self._passes.append(done)
        return done

    def _look(self, done: Pass, words: str) -> Generator[Phase, list[Receipt], None]:
        """Add to a pass's sums what the rows held out say of it."""
        last, hits = 0, np.zeros(PLACES, np.int64)
        end = self._place(done.stage, done.number, self._groups)
        while last < self.dataset.n_samples:
            job = LookJob(self._data, done.stage.number, done.number, done.tables, last)
            (receipt,) = yield Phase(
                "held-out rows", [job], words, (end, end), unit="pass", number=len(self._passes) + 1
            )
            hits += receipt["hits"]
            done.sums["n_held_out"] += receipt["n_held_out"]
            last = receipt["last"]
        done.sums["hits"] = hits.tolist()

    def _place(self, stage: Stage, number: int, group: int) -> float:
        """How far a run is, before a group of rows of a pass; stages may end before all of their passes."""
        p = self.parameters
        stages = len(p.lams) + 2 * p.refit + p.post_solve
        within = (number + group / self._groups) / stage.passes
        return _PASSES * min(1.0, (min(stage.number, stages - 1) + within) / stages)

    @staticmethod
    def _told(done: Pass) -> str:
        f = done.to_dict()
        held_out = f"P@1 {f['held_out_P@1']:.2f}, " if "held_out_P@1" in f else ""
        return f"dual {f['dual']:.6g}, {held_out}{f['nnz']:,} weights, {f['active_labels']:.3g} active labels a sample"

    def _drop(self, done: Pass | None) -> None:
        """Remove what a pass left on disk."""
        if done is not None:
            for kind in ("dual", "tables"):
                remove(self.work / "state" / f"{kind}-{done.stage.number}-{done.number}")
