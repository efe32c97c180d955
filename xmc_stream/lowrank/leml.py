"""LEML's alternations: W, then H, until the objective or the held-out rows say stop; then the model of the best one.

The loop is a generator, as that of `ppdsparse.run`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import FACTORS, Factor, Stacked
from xmc_stream.factors.products import Learned
from xmc_stream.factors.rowblocks import Array, blocks, csr
from xmc_stream.kernels.products import add_lines, add_transposed, multiply
from xmc_stream.lowrank.h_step import AlternationJob, FactorsJob, LabelsJob
from xmc_stream.lowrank.kernels.steps import add_column_dots
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.run import LowRankRun, ModelJob, StartJob, gram_jobs
from xmc_stream.lowrank.solver import LOSS_UNIT, positives_of
from xmc_stream.lowrank.w_step import WStep, WStepJob
from xmc_stream.methods.contract import WRITING
from xmc_stream.metrics import average_auc
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.places import remove
from xmc_stream.system.blas import one_blas_thread

_ALTERNATED = 0.97  # of a run, that alternations take
_STEPS = 30  # of the power method that measures the scale of the data, at most
_ENOUGH = 1e-3  # relative change at which it ends
_SHOWN = ("held_out_P@1", "held_out_auc")  # while it goes on


def most_passes(p: LEMLParameters) -> int:
    """Passes over X of a run, at most: for each W step, and to project it."""
    alternations = p.alternations + (p.refit and p.held_out > 0)
    if p.closed:
        return (p.lam is None) + alternations * (p.cg + 2)
    newton = 1 if p.loss == "squared" else p.newton
    return (p.lam is None) + alternations * (2 + newton * (2 * p.cg + 2))  # a product takes two


@dataclass(frozen=True)
class Alternation:
    """number: of its factors; start: of those that it begins from; said: of the one before; learned: rows to learn from."""

    number: int
    start: int
    name: str
    said: str
    learned: Learned
    lam: float


class LEMLRun(LowRankRun):
    """A training run of LEML."""

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

    def _phase(self, step: Alternation, what: str, begin: float, end: float) -> Phase:
        """A part of an alternation, of the whole run; it may end before all of them."""
        p, factor = self.parameters, "W" if what == "W" else "H"
        most = p.alternations + p.refit
        span = tuple(_ALTERNATED * min(1.0, (step.number - 1 + of) / most) for of in (begin, end))
        words = f"solving for {factor}, {step.name} of at most {p.alternations}{step.said}"
        return Phase(f"{step.name}, {what}", (), words, (span[0], span[1]), unit="alternation", number=step.number)

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
        if done is None:
            done = yield from (self._closed_step if self.parameters.closed else self._step)(step, before)
        for kind in ("w", "labels"):
            remove(self._state(kind, step.number))
        return done

    def _closed_step(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """Both half-steps of the squared loss and full labels."""
        d, number, learned, values = self.dataset, step.number, step.learned, tuple(before["values"])
        w, steps = yield from self._ridges(
            learned, number, step.start, step.lam, values, self._phase(step, "W", 0.0, 0.5)
        )
        sums = self._panels("sums", d.n_labels)
        scores, positives = yield from self._project(learned, number, w, sums, self._phase(step, "A", 0.5, 0.7))
        grams = gram_jobs(learned, f"gram/{number}", scores, self._scratch / "gram")
        yield replace(self._phase(step, "A^T A", 0.7, 0.9), jobs=grams, kept=False)
        job = FactorsJob(
            learned, f"h/{number}", step.lam, tuple(gram.out for gram in grams), sums, scores, positives,
            self._factor(step.start, "H"), values, w,
            self._panels("h", d.n_labels, whole=True), str(self._state("factors", number) / "all"), steps,
            self.parameters.criterion,
        )  # fmt: skip
        return (yield replace(self._phase(step, "H", 0.9, 1.0), jobs=[job]))[0]

    def _step(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """Both half-steps over pairs."""
        p, number, learned = self.parameters, step.number, step.learned
        h, w = self._factor(step.start, "H"), self._state("w", number) / "all"
        previous, phase = self._factor(step.start, "W") if step.start else None, self._phase(step, "W", 0.0, 0.6)
        of_w = WStep(
            learned, f"w/{number}", p, step.lam, self._sizes.col_ranges, self._sizes.rows, h, previous, str(self._scratch),
            self._sizes.parts, self._holding, f"{w}.kept", phase,
        )  # fmt: skip
        shared = None
        if not self._sizes.small and self.ledger.get(of_w.name) is None:
            shared, phase = (yield from of_w.loop()), replace(phase, span=None)
        solved = (yield replace(phase, jobs=[WStepJob(of_w, str(w), shared)]))[0]
        found = Factor(str(w / "W"), p.rank, learned.n_inputs())
        scores, _ = yield from self._project(learned, number, found, None, self._phase(step, "A", 0.6, 0.7))
        folder = str(self._state("labels", number))
        jobs = [
            LabelsJob(learned, f"labels/{number}", p, step.lam, first, last, h, scores, folder)
            for first, last in self._sizes.labels
        ]
        receipts = yield replace(self._phase(step, "H", 0.7, 0.95), jobs=jobs)
        losses = sum(receipt["units"] for receipt in receipts) * LOSS_UNIT
        job = AlternationJob(
            learned, f"h/{number}", step.lam, found, Stacked(tuple(job.found for job in jobs)), scores, losses,
            math.fsum(before["values"]), solved, str(self._state("factors", number) / "all"), p.criterion,
        )  # fmt: skip
        return (yield replace(self._phase(step, "store", 0.95, 1.0), jobs=[job]))[0]


@dataclass(frozen=True)
class ScaleJob:
    """sqrt(mean_i ||x_i - m||^2) ||Y - M||_2, of the rows that are learned from; m, M: their mean, and each label's.

    With labels that have nothing to do with X, the largest singular value of X^T (Y - M) is about so large. Of given pairs,
    Y - M is 0 elsewhere, and a label's mean is that of its own pairs.
    """

    learned: Learned
    given: bool

    @property
    def key(self) -> str:
        """There is one."""
        return "scale"

    def run(self) -> Receipt:
        """Pass over X once, and over Y some times."""
        dataset = self.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        mask = dataset.observed_rows() if self.given else None
        with one_blas_thread():
            spread, value = self._spread(X), 0.0
            means, v = self._start(Y, mask)
            for _ in range(_STEPS):
                v, before = self._product(Y, mask, means, v), value
                value = math.sqrt(float(np.square(v).sum()))
                if abs(value - before) <= _ENOUGH * value:
                    break
        scale = math.sqrt(spread) * math.sqrt(value)
        read = X.bytes_read + Y.bytes_read + (mask.bytes_read if mask else 0)
        return {"scale": scale, "passes": 1.0, "bytes_read": read}

    def _counted(self, first: int, n: int) -> NDArray[np.bool_]:
        """Which rows are learned from."""
        held_out = self.learned.kept_out(first, n)
        return np.ones(n, np.bool_) if held_out is None else ~held_out

    def _spread(self, X: SparseMatrix) -> float:
        """The mean of ||x_i - m||^2. Sums go row after row, as blocks may be cut elsewhere."""
        total, square, n = np.zeros((X.shape[1], 1)), np.zeros(1), 0
        for (x,) in blocks(X):
            counted = self._counted(x.start, x.n)
            n += int(counted.sum())
            indptr, indices, values = csr(x)
            add_transposed(indptr, indices, values, counted[:, None].astype(np.float64), total)
            values = values[np.repeat(counted, np.diff(indptr)), None]
            add_column_dots(values, values, square)
        return max(0.0, float(square[0]) / n - float(np.square(total / n).sum())) if n else 0.0

    def _start(self, Y: SparseMatrix, mask: SparseMatrix | None) -> tuple[Array, Array]:
        """M, and the vector from which the power method comes to ||Y - M||_2."""
        positives, known = np.zeros(Y.shape[1]), np.zeros(Y.shape[1])
        for counted, indptr, labels, true in self._pairs(Y, mask):
            of_pairs = np.repeat(counted, np.diff(indptr))
            positives += np.bincount(labels[of_pairs & (true > 0)], minlength=len(known))
            known += int(counted.sum()) if mask is None else np.bincount(labels[of_pairs], minlength=len(known))
        means = positives / np.maximum(known, 1)
        return means, np.random.default_rng(0).standard_normal(len(means))

    def _product(self, Y: SparseMatrix, mask: SparseMatrix | None, means: Array, v: Array) -> NDArray[np.float64]:
        """(Y - M)^T (Y - M) v, of v scaled to length one."""
        length = math.sqrt(float(np.square(v).sum()))
        if length == 0:
            return np.zeros_like(v)
        v = v / length
        out, total = np.zeros((len(v), 1)), np.zeros(1)
        offset = float((means * v).sum()) if mask is None else 0.0
        for counted, indptr, labels, true in self._pairs(Y, mask):
            weights = true if mask is None else true - means[labels]
            lines = np.empty((len(counted), 1))
            multiply(indptr, labels, weights, v[:, None], lines)
            lines -= offset
            lines[~counted] = 0
            add_transposed(indptr, labels, weights, lines, out)
            add_lines(lines, total)
        return np.asarray(out[:, 0] - (means * total[0] if mask is None else 0.0))

    def _pairs(
        self, Y: SparseMatrix, mask: SparseMatrix | None
    ) -> Iterator[tuple[NDArray[np.bool_], Array, Array, Array]]:
        """By row blocks: which rows count; labels, of the mask if there is one, and whether they are theirs (1) or not (0)."""
        for y, *known in blocks(Y, *([] if mask is None else [mask])):
            counted = self._counted(y.start, y.n)
            if known:
                yield counted, known[0].indptr, known[0].indices, positives_of(known[0], y).astype(np.float32)
            else:
                yield counted, *csr(y)
