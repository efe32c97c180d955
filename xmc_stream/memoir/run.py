"""MEMOIR's training: segments of steps until the held-out rows say stop; then the model of the best one.

The loop is a generator, as that of `ppdsparse.run`. All it decides comes from receipts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from xmc_stream.factors.factors import FACTORS
from xmc_stream.factors.products import Learned
from xmc_stream.linear.weights import starts_of, tiles_of, unit_path, units_of_run
from xmc_stream.memoir.plan import plan_steps, resolved, shares
from xmc_stream.memoir.reduction import REDUCED, Reduction
from xmc_stream.memoir.steps import Data, DecisionJob, FactorsJob, Paused, StepsJob, UnitJob
from xmc_stream.methods.contract import WRITING, TrainingRun
from xmc_stream.runtime.job import Job, Loop, Phase
from xmc_stream.store.model import DECISION
from xmc_stream.store.places import make_folder

_STEPPED = 0.95  # of a run: where the steps end
SEGMENTS = 20  # of a run, at most; after each the held-out rows are scored


class MEMOIRRun(TrainingRun):
    """A training run of MEMOIR."""

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, d = resolved(self.parameters, self.dataset), self.dataset
        learned = Learned.of(d, 0.0, self.seed, p.bias)
        reduction = Reduction(learned, p.rank, self.work, self.plan, self.ledger)
        reduced: dict[str, Any] = {}
        data = Data(str(d.path), str(self.work), p, self.seed, shares(d, p))
        if p.variant == "lsh":
            made = yield from reduction.loop()
            reduced = {"rank": reduction.kept, "singular_values": made["singular_values"], "threshold": 0.0}
            data = replace(data, reduced=(yield from reduction.project()))
        make_folder(self.work / "state" / "steps")
        history, best, state = yield from self._steps(data)
        decided: dict[str, Any] = {}
        if data.share and not d.one_label:
            words = "learning from the rows held out which labels to predict"
            decided = (yield Phase("decision", [DecisionJob(data, state)], words, (_STEPPED, _STEPPED)))[0]
        rows = {name: history[best][name] for name in ("accuracy", "macro_F1", "n_held_out") if name in history[best]}
        common = {
            "objective": history[-1]["loss"], "duality_gap": None, "best_step": history[best]["steps"],
            "steps": history[-1]["steps"], **{f"held_out_{name}": value for name, value in rows.items()},
            "history": history, **({DECISION: decided[DECISION]} if decided else {}),
        }  # fmt: skip
        if p.variant == "lsh":
            job = FactorsJob(data, state, reduction.vectors(), str(self.work / FACTORS))
            yield Phase("finalise", [job], WRITING, (_STEPPED, 1.0))
            return {**common, **reduced, "nnz": (learned.n_inputs() + d.n_labels) * reduction.kept}
        units = units_of_run(d, self.ledger, ("finalise",))
        jobs: list[Job] = [UnitJob(data, state, unit, str(unit_path(self.work, unit))) for unit in units]
        receipts = yield Phase("finalise", jobs, WRITING, (_STEPPED, 1.0), twice=True)
        return {
            **common, "nnz": sum(receipt["nnz"] for receipt in receipts), "tiles": tiles_of(receipts), **starts_of(units),
        }  # fmt: skip

    def _steps(self, data: Data) -> Any:
        """Segments until they bring no more; returns what each says, which is the best, and the state that it left."""
        p, most = data.parameters, data.parameters.most_steps
        length = -(-most // SEGMENTS)
        history: list[dict[str, Any]] = []
        best, states = 0, [""]
        for number, first in enumerate(range(0, most, length)):
            last = min(first + length, most)
            said, state = yield from self._segment(data, number, first, last, states[-1], _told(history))
            history.append({"segment": number, "steps": last, **said})
            states.append(state)
            if "macro_F1" not in said or said["macro_F1"] > history[best]["macro_F1"]:
                best = number
            for old in states[1:-1]:
                if old != states[best + 1]:
                    Path(old).unlink(missing_ok=True)
            if number - best >= p.patience:
                break
        return history, best, states[best + 1]

    def _segment(self, data: Data, number: int, first: int, last: int, before: str, told: str) -> Any:
        """A segment, job after job; returns what it says in the end, and the state that it leaves. told: of the one before."""
        p, most = data.parameters, data.parameters.most_steps
        sizes, begin = plan_steps(self.plan, self.dataset, p), REDUCED if p.variant == "lsh" else 0.0
        going, state, goes_on, said = Paused(first), before, False, None
        while said is None:
            job = StepsJob(data, number, going, last, state, goes_on, sizes)
            span = begin + (_STEPPED - begin) * going.step / most, begin + (_STEPPED - begin) * last / most
            words = f"step {going.step + 1:,} of {most:,}{told}"
            (receipt,) = yield Phase("steps", [job], words, span, unit="segment", number=number + 1)
            if goes_on:
                Path(state).unlink(missing_ok=True)
            going = Paused(**receipt["going"])
            state, goes_on, said = str(job.out), True, receipt["said"]
        return said, state


def _told(history: list[dict[str, Any]]) -> str:
    if not history:
        return ""
    entry = history[-1]
    held_out = f"macro-F1 {entry['macro_F1']:.2f}, " if "macro_F1" in entry else ""
    return f" ({held_out}loss {entry['loss']:.4g}, {entry['nnz']:,} weights)"
