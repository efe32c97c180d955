"""PD-Sparse's passes: leg after leg until the held-out rows say stop, for each lam; then the model of the best pass.

The loop is a generator, as `jobs.ppdsparse`'s: all it decides comes from receipts, so it runs again from the start after a
kill, when they come out of the ledger.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc_stream.errors import InputError
from xmc_stream.jobs.job import Ledger, Loop, Phase, Receipt
from xmc_stream.jobs.passes import Data, LegJob, ObjectiveJob, UnitJob, WeightsJob, drop_session, plan_pass
from xmc_stream.jobs.plan import MIB, MemoryPlan
from xmc_stream.solvers.pdsparse import PDSparseParameters, more_labels, n_groups
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import n_units, unit_path

_LEG_SECONDS = 30.0  # of a leg, about: what a kill loses
_POST_PASSES = 10  # of the post-solve, at most
_SUMS = ("rows", "negatives", "active", "used", "searched", "stepped")


@dataclass
class Pass:
    """A pass that has ended: where it left things, sums over its legs, and what stands in the receipt of the last one."""

    stage: int
    number: int
    lam: float
    dual: tuple[str, ...]
    tables: str
    figures: dict[str, Any]

    @property
    def dual_objective(self) -> float:
        """1/2 ||w||^2 + the sum of a over negatives."""
        square, negatives = float(self.figures["square"]), float(self.figures["negatives"])
        return 0.5 * square + negatives

    @property
    def precision(self) -> float:
        """P@1 on the rows held out, in per cent; 0 without any."""
        hits, held = int(self.figures["hits"]), int(self.figures["held"])
        return 100.0 * hits / max(held, 1)

    def to_dict(self) -> dict[str, Any]:
        """Figures for the model's attributes."""
        f, rows = self.figures, max(self.figures["rows"], 1)
        return {
            "stage": self.stage, "pass": self.number + 1, "lam": self.lam, "dual": self.dual_objective,
            "held_out_P@1": round(self.precision, 4) if f["held"] else None, "nnz": f["nnz"],
            "active_labels": round(f["active"] / rows, 4), "nnz_a": round(f["used"] / rows, 4),
        }  # fmt: skip


@dataclass
class PDSparseRun:
    """A training run: what to learn from, where to, and within which memory; see `jobs.ppdsparse.PPDSparseRun`."""

    dataset: Dataset
    work: Path
    parameters: PDSparseParameters
    seed: int
    plan: MemoryPlan
    ledger: Ledger

    def __post_init__(self) -> None:
        d, p = self.dataset, self.parameters
        nnz = d.X_rows().nnz
        self._data = Data(str(d.path), str(self.work), p, self.seed, plan_pass(self.plan, d, p))
        self._groups = n_groups(d.n_samples, nnz)
        self._rate = p.rate_for(d.n_features, d.n_labels, d.n_samples, nnz)
        self._passes: list[Pass] = []

    def loop(self) -> Loop:
        """Phases of jobs; returns figures of the model."""
        p = self.parameters
        best: Pass | None = None
        for stage, lam in enumerate(p.lams):
            found = yield from self._stage(stage, lam, None, best)
            if best is None or found.precision > best.precision:
                self._drop(best)
                best = found
        if best is None:
            raise InputError("PDSparse has no lam to try")
        final, objective = best, ObjectiveJob(self._data, best.lam, best.tables)
        losses = (yield Phase("objective", [objective]))[0]
        if p.post_solve:
            final = yield from self._stage(len(p.lams), 0.0, best, None)
        weights = self.work / "state" / "weights" / "all"
        max_bytes = max(16 * MIB, self.plan.budget // 2)
        yield Phase("weights", [WeightsJob(self._data, final.lam, final.tables, str(weights), max_bytes)])
        d = self.dataset
        units = [
            UnitJob(str(weights), d.n_features, d.n_labels, unit, str(unit_path(self.work, unit)))
            for unit in range(n_units(d.n_labels))
        ]
        receipts = yield Phase("finalise", units)
        drop_session()
        primal = 0.5 * losses["square"] + best.lam * losses["l1"] + p.C * losses["losses"]
        gap = primal + best.dual_objective
        return {
            "rounds": len(self._passes),
            "nnz": sum(receipt["nnz"] for receipt in receipts),
            "tiles": [receipt["runs"] for receipt in receipts],
            "objective": primal,
            "duality_gap": gap / primal if primal else 0.0,
            "lam": best.lam,
            "best_pass": best.number + 1,
            "n_learned": best.figures["rows"],
            "n_held_out": best.figures["held"],
            "n_skipped": d.n_samples - best.figures["rows"] - best.figures["held"],
            "history": [done.to_dict() for done in self._passes],
        }

    def _stage(
        self, stage: int, lam: float, start: Pass | None, other: Pass | None
    ) -> Generator[Phase, list[Receipt], Pass]:
        """Passes until they bring no more, from nothing or, for the post-solve, from a pass; returns the best.

        other: a pass that must stay.
        """
        p, d = self.parameters, self.dataset
        most = min(p.most, max(1, -(-d.Y_rows().nnz // max(d.n_samples, 1))))
        best, before, waited = start, start, 0
        support = None if start is None else start.lam
        for number in range(_POST_PASSES if start else p.max_passes):
            done = yield from self._pass(stage, number, lam, before, most, support)
            for old in (before, best):
                if old is not None and old not in (best, start, other) and old is not done:
                    self._drop(old)
            before = done
            f = done.figures
            most = most if start else more_labels(most, f["searched"], f["stepped"], p.most)
            if f["held"]:
                if best is None or done.precision > best.precision:
                    if best is not None and best not in (start, other):
                        self._drop(best)
                    best, waited = done, 0
                else:
                    waited += 1
                    if waited == p.patience:
                        break
            else:
                best = done
                if f["largest"] <= p.tol:
                    break
        if before is not best and before is not None:
            self._drop(before)
        return best or done

    def _pass(
        self, stage: int, number: int, lam: float, before: Pass | None, most: int, support: float | None
    ) -> Generator[Phase, list[Receipt], Pass]:
        name = "post-solve, pass" if support is not None else "pass"
        if len(self.parameters.lams) > 1 and support is None:
            name = f"lam {lam:g}, pass"
        told = "" if not self._passes else f" ({self._told(self._passes[-1])})"
        legs: list[LegJob] = []
        first, tables, speed = 0, "" if before is None else before.tables, 0.0
        dual = () if before is None else before.dual
        figures: dict[str, Any] = dict.fromkeys(_SUMS, 0) | {"largest": 0.0, "hits": 0, "held": 0}
        if self._passes:
            f = self._passes[-1].figures
            speed = self._groups / max(f["seconds"], 1e-3)
        figures["seconds"] = 0.0
        while first < self._groups:
            last = min(self._groups, first + max(1, int(speed * _LEG_SECONDS)))
            job = LegJob(
                self._data, stage, lam, number, first, last, self._groups, most, self._rate, dual, tables, support
            )
            known = self.ledger.get(job.key)
            if known is None:
                receipts = yield Phase(f"{name} {number + 1}{told}", [job], first, self._groups)
                known = receipts[0]
            first, speed = known["last"], (known["last"] - first) / max(known["seconds"], 1e-3)
            if len(legs) > 1:  # the tables of two legs stay: one may turn out damaged
                shutil.rmtree(legs[-2].folder("tables"), ignore_errors=True)
            legs.append(job)
            tables = str(job.folder("tables"))
            for figure in (*_SUMS, "seconds"):
                figures[figure] += known[figure]
            figures["largest"] = max(figures["largest"], known["largest"])
            figures |= {what: known[what] for what in ("square", "l1", "nnz", "hits", "held") if what in known}
        done = Pass(stage, number, lam, tuple(str(leg.folder("dual")) for leg in legs), tables, figures)
        self._passes.append(done)
        return done

    @staticmethod
    def _told(done: Pass) -> str:
        f = done.to_dict()
        held = "" if f["held_out_P@1"] is None else f"P@1 {f['held_out_P@1']:.2f}, "
        return f"dual {f['dual']:.6g}, {held}{f['nnz']:,} weights, {f['active_labels']:.3g} active labels a sample"

    def _drop(self, done: Pass | None) -> None:
        """Remove what a pass left on disk."""
        if done is not None:
            for kind in ("dual", "tables"):
                shutil.rmtree(self.work / "state" / f"{kind}-{done.stage}-{done.number}", ignore_errors=True)


def model_attributes(dataset: Dataset, parameters: PDSparseParameters, seed: int, result: Receipt) -> dict[str, Any]:
    """What a model says of itself: how it was made, its sizes, and how well the problem was solved."""
    return {
        "solver": "pdsparse",
        "params": parameters.to_dict(),
        "seed": seed,
        "n_features": dataset.n_features,
        "n_labels": dataset.n_labels,
        "data": {"fingerprint": dataset.fingerprint, **{k: dataset.attributes.get(k) for k in ("source", "normalize")}},
        **result,
    }
