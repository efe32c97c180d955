"""LEML's alternations: W, then H, until the objective or the held-out rows say stop; then the model of the best one.

The loop is a generator, as that of `ppdsparse.run`. What a half-step leaves is durable and in the ledger, and of a long one
what it comes to on the way (see `Begun`). What lies in `scratch` is not: a session that goes on makes it again.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.factors.factors import FACTORS, Dense, Factor, Panels, SideBySide, Stacked
from xmc_stream.factors.heldrows import Holding
from xmc_stream.factors.products import (
    ROW_BYTES,
    ROW_LINES,
    Learned,
    csr,
    times,
)
from xmc_stream.factors.projection import ProjectJob
from xmc_stream.kernels.lines import aligned_zeros, lanes
from xmc_stream.kernels.products import add_transposed
from xmc_stream.lowrank.by_rows import solve_ridges
from xmc_stream.lowrank.h_step import AlternationJob, LabelsJob
from xmc_stream.lowrank.known_pairs import LOSS_UNIT
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.plan import plan_lowrank
from xmc_stream.lowrank.ridge import Ridges
from xmc_stream.lowrank.scale import ScaleJob
from xmc_stream.lowrank.steps import FactorsJob, ModelJob, StartJob, gram_jobs
from xmc_stream.lowrank.w_step import WStep, WStepJob
from xmc_stream.methods.contract import WRITING
from xmc_stream.metrics import average_auc
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import remove
from xmc_stream.store.matrix import stream

_ALTERNATED = 0.97  # of a run, that alternations take
_SHOWN = ("held_out_P@1", "held_out_auc")  # while it goes on
_PROBED = 64  # columns, at most


def most_passes(p: LEMLParameters) -> int:
    """Passes over X of a run, at most: for each W step, and to project it."""
    alternations = p.alternations + (p.refit and p.held_out > 0)
    if p.closed:
        return (p.lam is None) + alternations * (p.cg + 2)
    newton = 1 if p.loss == "squared" else p.newton
    return (p.lam is None) + alternations * (2 + newton * (2 * p.cg + 2))  # a product takes two


@dataclass(frozen=True)
class LEMLProbe:
    """Multiply the first rows with a few columns and back: seconds of a pass over X with all columns (`seconds`).

    columns: that a plan has room for.
    """

    data: str
    parameters: LEMLParameters
    seed: int
    columns: int

    @property
    def key(self) -> str:
        """Never in a ledger."""
        return "probe"

    def run(self) -> Receipt:
        """Multiply."""
        dataset = Dataset(self.data)
        X = dataset.X_rows()
        (x,) = next(stream((X,), ROW_BYTES, 0, X.n_lines, ROW_LINES))
        width = min(self.columns, _PROBED)
        dense = aligned_zeros((dataset.n_features, lanes(width)))
        taken = []
        for _ in range(3):  # kernels are loaded in the first
            began = time.perf_counter()
            add_transposed(*csr(x), times(x, dense), dense)
            taken.append(time.perf_counter() - began)
        share = max(len(x.indices), 1) * width / (max(X.nnz, 1) * self.parameters.rank)
        return {"seconds": min(taken) / share}


@dataclass(frozen=True)
class Alternation:
    """number: of its factors; start: of those that it begins from; said: of the one before; learned: rows to learn from."""

    number: int
    start: int
    name: str
    said: str
    learned: Learned
    lam: float


@dataclass
class LEMLRun:
    """A training run: what to learn from, where to, and within which memory; see `ppdsparse.run.PPDSparseRun`."""

    dataset: Dataset
    work: Path
    parameters: LEMLParameters
    seed: int
    plan: MemoryPlan
    ledger: Ledger

    def __post_init__(self) -> None:
        self._sizes = plan_lowrank(self.plan, self.dataset, self.parameters)
        self._scratch = self.work / "scratch"
        self._holding = Holding(uuid.uuid4().hex, *self._sizes.held)

    def _panels(self, name: str, n: int, whole: bool = False) -> Panels:
        col_ranges = ((0, self.parameters.rank),) if whole else self._sizes.col_ranges
        return Panels(str(self._scratch / name), n, col_ranges)

    def _state(self, kind: str, number: int) -> Path:
        return self.work / "state" / f"{kind}-{number}"

    def _factor(self, number: int, name: str) -> Factor:
        n = self.dataset.n_features + self.parameters.bias if name == "W" else self.dataset.n_labels
        return Factor(str(self._state("factors", number) / "all" / name), self.parameters.rank, n)

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, d = self.parameters, self.dataset
        self._scratch.mkdir(parents=True, exist_ok=True)
        learned = Learned.of(d, p.held_out, self.seed, p.bias)
        measured: Receipt = {"scale": 0.0}
        if p.lam is None:
            scale = ScaleJob(learned, p.observed == "given")
            measured = (yield Phase("scale", [scale], "measuring the scale of the data"))[0]
        lam = p.lam_for(measured["scale"])
        h = self._panels("h", d.n_labels, whole=True)
        start = StartJob(learned, d.n_labels, p.rank, p.closed, h, str(self._state("factors", 0) / "all"))
        receipts = [(yield Phase("start", [start], "drawing the first factors"))[0]]
        history: list[dict[str, Any]] = []
        best, waited, before = 0, 0, float("inf")
        for number in range(1, p.alternations + 1):
            step = Alternation(number, number - 1, f"alternation {number}", self._told(history), learned, lam)
            receipt = yield from self._alternate(step, receipts[-1])
            receipts.append(receipt)
            history.append(self._entry("alternation", number, receipt))
            f = history[-1]["objective"]
            if receipt.get("n_held_out") and best and self._score(history[-1]) <= self._score(history[best - 1]):
                waited += 1
            else:
                best, waited = number, 0
            # the best one, what it began from, and what the next begins from
            self._keep({best, best - 1, number}, number)
            if waited == p.patience or before - f <= p.tol * abs(f):
                break
            before = f
        final, said = best, history[best - 1]
        if p.refit and receipt.get("n_held_out"):
            final, everything = len(receipts), replace(learned, share=0.0)
            step = Alternation(final, best - 1, f"alternation {best}, all rows", self._told(history), everything, lam)
            again = yield from self._alternate(step, receipts[best - 1])
            history.append(self._entry("all rows", best, again))
        job = ModelJob(self._factor(final, "W"), self._factor(final, "H"), p.rank, str(self.work / FACTORS))
        yield Phase("finalise", [job], WRITING, (_ALTERNATED, 1.0))
        return {
            "rounds": len(history),
            "rank": p.rank,
            "lam": lam,
            "threshold": p.threshold,
            "nnz": (d.n_features + p.bias + d.n_labels) * p.rank,
            "objective": history[final - 1]["objective"],
            "duality_gap": None,
            "best_pass": best,
            **{name: value for name, value in said.items() if name.startswith("held_out")},
            "n_held_out": receipt.get("n_held_out", 0),
            "history": history,
        }

    def _score(self, entry: dict[str, Any]) -> float:
        if self.parameters.criterion == "auc":
            return float(entry["held_out_auc"])
        return float(sum(entry[f"held_out_P@{k}"] for k in (1, 3, 5)))

    def _words(self, step: Alternation, factor: str) -> str:
        return f"solving for {factor}, {step.name} of at most {self.parameters.alternations}{step.said}"

    def _span(self, step: Alternation, begin: float, end: float) -> tuple[float, float]:
        """A part of an alternation, in the whole run; it may end before all of them."""
        p = self.parameters
        most = p.alternations + p.refit
        return tuple(_ALTERNATED * min(1.0, (step.number - 1 + of) / most) for of in (begin, end))  # type: ignore[return-value]

    @staticmethod
    def _told(history: list[dict[str, Any]]) -> str:
        if not history:
            return ""
        last = history[-1]
        held_out = "".join(f", {name.removeprefix('held_out_')} {last[name]:.4g}" for name in _SHOWN if name in last)
        return f" (objective {last['objective']:.6g}{held_out})"

    @staticmethod
    def _entry(stage: str, number: int, receipt: Receipt) -> dict[str, Any]:
        held_out = receipt.get("n_held_out", 0)
        metrics = {
            f"held_out_P@{k}": round(100 * receipt["hits"][k - 1] / (k * held_out), 4) for k in (1, 3, 5) if held_out
        }
        if held_out and "auc" in receipt:
            metrics["held_out_auc"] = round(average_auc(receipt["auc"], held_out), 6)
        return {
            "stage": stage, "alternation": number, "objective_w": receipt["objective_w"], "objective": receipt["objective"],
            "products": receipt["products"], **metrics,
        }  # fmt: skip

    def _keep(self, kept: set[int], last: int) -> None:
        """Remove factors that nothing is made from any more."""
        for number in range(last + 1):
            if number not in kept:
                remove(self._state("factors", number))

    def _alternate(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """An alternation; before: the receipt of what it begins from."""
        done = self.ledger.get(f"h/{step.number}")
        if done is not None:
            self._clear(step.number)  # the end may have come between
            return done
        return (yield from (self._closed_step if self.parameters.closed else self._step)(step, before))

    def _closed_step(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """Both half-steps of the squared loss and full labels."""
        p, d, number, name, learned = self.parameters, self.dataset, step.number, step.name, step.learned
        h, w = self._factor(step.start, "H"), self._state("w", number)
        previous = self._factor(step.start, "W") if step.start else None
        whole = Ridges(learned, step.lam, (0, p.rank), tuple(before["values"]), h, previous, self._sizes.parts,
            self._sizes.row_bytes, self._holding,
        )  # fmt: skip
        solves = self._sizes.ridges(whole, f"w/{number}", p, w)
        out = self._state("factors", number) / "all"
        phase = Phase(
            f"{name}, W", (), self._words(step, "W"), self._span(step, 0.0, 0.5), unit="alternation", number=number
        )
        steps = yield from solve_ridges(solves, self._sizes.products, phase, self.ledger, self._scratch)
        parts = SideBySide(tuple(job.found for job in solves))
        scores, sums = self._panels("a", d.n_samples), self._panels("sums", d.n_labels)
        words = self._words(step, "H")
        positives = (yield self._projecting(step, parts, scores, sums, self._span(step, 0.5, 0.7)))[0]["positives"]
        grams = gram_jobs(learned, f"gram/{number}", scores, self._scratch / "gram")
        yield Phase(f"{name}, A^T A", grams, words, self._span(step, 0.7, 0.9), kept=False)
        job = FactorsJob(
            learned, f"h/{number}", step.lam, tuple(gram.out for gram in grams), sums, scores,
            positives, h, tuple(before["values"]), parts, self._panels("h", d.n_labels, whole=True), str(out),
            max(solved["steps"] for solved in steps), p.criterion,
        )  # fmt: skip
        receipt = (yield Phase(f"{name}, H", [job], words, self._span(step, 0.9, 1.0)))[0]
        self._clear(number)
        return receipt

    def _projecting(
        self, step: Alternation, w: Dense, scores: Panels, sums: Panels | None, span: tuple[float, float]
    ) -> Phase:
        """A = X W, and the sums Y^T A, if they are asked for."""
        jobs = [
            ProjectJob(step.learned, f"a/{step.number}", cols, w, scores, self._sizes.parts, self._holding, sums)
            for cols in scores.col_ranges
        ]
        return Phase(f"{step.name}, A", jobs, self._words(step, "H"), span, kept=False)

    def _clear(self, number: int) -> None:
        """Remove what an alternation kept on its way."""
        for kind in ("w", "labels"):
            remove(self._state(kind, number))

    def _step(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """Both half-steps over pairs."""
        p, d, number, name, learned = self.parameters, self.dataset, step.number, step.name, step.learned
        h, w = self._factor(step.start, "H"), self._state("w", number) / "all"
        previous = self._factor(step.start, "W") if step.start else None
        of_w = WStep(
            learned, f"w/{number}", f"{name}, W", number, p, step.lam, self._sizes.col_ranges, self._sizes.rows, h, previous,
            str(self._scratch), self._sizes.parts, self._holding, f"{w}.begun", self._span(step, 0.0, 0.6),
        )  # fmt: skip
        solved, words = self.ledger.get(of_w.name), self._words(step, "W")
        if self._sizes.small:
            alone, span = [WStepJob(of_w, str(w))], self._span(step, 0.0, 0.6)
            solved = (yield Phase(f"{name}, W", alone, words, span, unit="alternation", number=number))[0]
        elif solved is None:
            store = [WStepJob(of_w, str(w), (yield from of_w.loop()))]
            solved = (yield Phase(f"{name}, W", store, words, self._span(step, 0.6, 0.6)))[0]
        found, scores = Factor(str(w / "W"), p.rank, learned.n_inputs()), self._panels("a", d.n_samples)
        yield self._projecting(step, found, scores, None, self._span(step, 0.6, 0.7))
        folder, words = str(self._state("labels", number)), self._words(step, "H")
        jobs = [
            LabelsJob(learned, f"labels/{number}", p, step.lam, first, last, h, scores, folder)
            for first, last in self._sizes.labels
        ]
        receipts = yield Phase(f"{name}, H", jobs, words, self._span(step, 0.7, 0.95))
        losses = sum(receipt["units"] for receipt in receipts) * LOSS_UNIT
        lines = Stacked(tuple(job.found for job in jobs))
        job = AlternationJob(
            learned, f"h/{number}", step.lam, found, lines, scores, losses, math.fsum(before["values"]), solved,
            str(self._state("factors", number) / "all"), p.criterion,
        )  # fmt: skip
        receipt = (yield Phase(f"{name}, store", [job], words, self._span(step, 0.95, 1.0)))[0]
        self._clear(number)
        return receipt
