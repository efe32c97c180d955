"""LEML's alternations: W, then H, until the objective or the held-out rows say stop; then the model of the best one.

The loop is a generator, as that of `ppdsparse.run`. What a half-step leaves is durable and in the ledger. What
lies in `scratch` is not: a session that goes on makes it again.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmc_stream.factors.factors import FACTORS, ColumnRange, Factor, Panels, SideBySide
from xmc_stream.factors.heldrows import Holding
from xmc_stream.factors.products import (
    BLOCK,
    LARGE_ROW_BYTES,
    LEAST_COLUMNS,
    LINES,
    ROW_BYTES,
    ROW_LINES,
    Learned,
    column_ranges,
    csr,
    held_bytes,
    job_width,
    lines_of,
    range_bits,
    times,
)
from xmc_stream.factors.projection import ProjectJob
from xmc_stream.kernels.lines import CACHE_LINE, aligned_zeros, lanes
from xmc_stream.kernels.products import add_transposed
from xmc_stream.lowrank.h_step import LABELS, AlternationJob, LabelsJob
from xmc_stream.lowrank.known_pairs import LOSS_UNIT
from xmc_stream.lowrank.normal import normal_bytes
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.ridge import RidgeJob, Ridges, Rows, row_parts, solve_ridges
from xmc_stream.lowrank.scale import ScaleJob
from xmc_stream.lowrank.steps import FactorsJob, ModelJob, StartJob, gram_jobs
from xmc_stream.lowrank.w_step import VECTORS, WStep, WStepJob
from xmc_stream.methods.contract import WRITING
from xmc_stream.metrics import average_auc
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan, even_ranges, jobs_worth
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import remove
from xmc_stream.store.matrix import stream

_ALTERNATED = 0.97  # of a run, that alternations take
_SHOWN = ("held_out_P@1", "held_out_auc")  # while it goes on
_PROBED = 64  # columns, at most
_HELD = (
    0.75  # of what is left of a plan, that rows may take which jobs by rows leave in memory: near its limit a run waits
)
_SMALL = 1 << 28  # multiply-adds of a product, up to which sharing it out takes longer than doing it


@dataclass(frozen=True)
class LowRankPlan:
    """col_ranges: of columns, a job each; rows, labels: of a job over pairs; small: whether a W step is one job. parts: of the

    rows, which sums over all pairs are taken in; products: see `solve_ridges`; row_bytes: of X in a row block of a W step;
    held: bytes of a part, and of a process, see `Holding`.
    """

    col_ranges: tuple[ColumnRange, ...]
    rows: tuple[Rows, ...]
    labels: tuple[tuple[int, int], ...]
    small: bool
    parts: tuple[Rows, ...]
    products: tuple[ColumnRange, ...]
    row_bytes: int = ROW_BYTES
    held: tuple[int, int] = (0, 0)

    def ridges(self, whole: Ridges, name: str, p: LEMLParameters, out: Path) -> list[RidgeJob]:
        """The jobs of a W step."""
        return [
            RidgeJob(
                replace(whole, cols=cols, values=whole.values[slice(*cols)]), name, p.cg, p.cg_tol,
                str(out / f"{cols[0]}-{cols[1]}"),
            )
            for cols in self.col_ranges
        ]  # fmt: skip

    @property
    def widest(self) -> tuple[int, int, int]:
        """Columns of a job at most, and of one by rows; bytes of a row block."""
        return _widest(self.col_ranges), _widest(self.products), self.row_bytes


def _widest(col_ranges: Sequence[ColumnRange]) -> int:
    return max((last - first for first, last in col_ranges), default=0)


def lowrank_needs(
    plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, columns: int, by_rows: int = 0, row_bytes: int = ROW_BYTES
) -> dict[str, int]:
    """Bytes by component where a job has so many columns. by_rows: columns of one that has a part of the rows. row_bytes: of

    X in a row block of a W step. "rows" is what is left for blocks that stay in memory.
    """
    d, k, r, t, width = dataset.n_features + 1, dataset.n_labels, p.rank, plan.threads, lanes(columns)
    wide, parts = lanes(by_rows) if by_rows else 0, len(row_parts(dataset))
    of_columns = t if p.direct else min(t, -(-r // columns))  # jobs beside each other; of X^T X there are more
    of_rows = min(t, parts * -(-r // by_rows)) if by_rows else 0
    beside, widest = max(of_columns, of_rows), max(width, wide)
    needs = {
        "row blocks": beside
        * (dataset.Y_rows().block_bytes(ROW_BYTES) + _row_block(dataset, widest, row_bytes) + 2 * MIB),
        "systems of equations": 6 * 8 * r * r + t * (8 * r * r + 16 * BLOCK * r) + 32 * LINES * r,
        "writers": beside * 8 * MIB,
    }
    if p.lam is None:
        needs["scale of lam"] = 24 * d + 64 * k
    if p.closed:
        lines = max(2 * of_rows * wide, of_columns * width) if by_rows else of_columns * (4 + (parts > 1)) * width
        needs |= {"columns of W": 4 * d * lines, "columns of H": 4 * k * max(of_columns * width, of_rows * wide)}
        if p.direct:
            needs["normal equations"] = normal_bytes(d, r)
            needs["columns of H"] *= 3
    else:
        given = p.observed == "given"
        needs |= {
            "vectors of W": 4 * VECTORS * d * r,
            "columns of W": of_columns * 4 * d * width,
            "H": t * 4 * k * r if given else t * 4 * BLOCK * r,
            "pairs": t
            * (8 * dataset.observed_rows().block_bytes(ROW_BYTES) if given else 40 * BLOCK * BLOCK + 16 * BLOCK * r),
        }
    left = plan.budget - sum(needs.values())
    if p.closed and range_bits(dataset.n_features):  # larger row blocks come first
        left -= beside * (_row_block(dataset, widest, LARGE_ROW_BYTES) - _row_block(dataset, widest, row_bytes))
    return {**needs, "rows": max(0, min(held_bytes(dataset), int(_HELD * left)))}


def _row_block(dataset: Dataset, width: int, row_bytes: int) -> int:
    """Bytes of a row block of X, of the same by ranges of features, and of lines of a dense matrix for it."""
    X = dataset.X_rows()
    block_bytes = X.block_bytes(row_bytes)
    return block_bytes + 8 * block_bytes // X.entry_bytes + 3 * 4 * lines_of(row_bytes) * width


def _row_bytes(plan: MemoryPlan, dataset: Dataset, width: int, needs: dict[str, int]) -> int:
    """Of X in a row block of a W step: more than ROW_BYTES where X has many features and the plan leaves room."""
    if not range_bits(dataset.n_features):
        return ROW_BYTES
    each = (plan.budget - sum(needs.values())) // plan.threads
    more = each * ROW_BYTES // _row_block(dataset, width, ROW_BYTES)
    return min(LARGE_ROW_BYTES, ROW_BYTES + max(0, more))


def plan_lowrank(plan: MemoryPlan, dataset: Dataset, p: LEMLParameters) -> LowRankPlan:
    """Cut the columns into few ranges: see `_width`. Raises MemoryLimitError where not even single columns fit."""
    r, at_once, kept = p.rank, plan.threads * plan.processes, held_bytes(dataset)
    width = _width(plan, dataset, p, kept)
    if (n_ranges := -(-r // width)) > at_once:  # none waits for the last
        width = -(-r // (-(-n_ranges // at_once) * at_once))
    n, k, pairs = dataset.n_samples, dataset.n_labels, dataset.n_samples * dataset.n_labels
    n_blocks = -(-n // BLOCK)
    labels = tuple((first, min(first + LABELS, k)) for first in range(0, k, LABELS))
    if p.observed == "given":
        pairs = dataset.observed_rows().nnz
        labels = _given_labels(plan, dataset, jobs_worth(4 * at_once, pairs * r, n * r))  # each reads A
    rows = tuple((a * BLOCK, min(b * BLOCK, n)) for a, b in even_ranges(n_blocks, 4 * at_once))
    small = (2 * dataset.X_rows().nnz + 2 * pairs) * r <= _SMALL
    small = small and sum(lowrank_needs(plan, dataset, p, r).values()) <= plan.budget
    col_ranges = column_ranges(r, r if small and not p.closed else width)
    width, of_rows = _widest(col_ranges), row_parts(dataset)
    products = _products(plan, dataset, p, col_ranges, kept) if p.closed else ()
    wide = _widest(products)
    needs = lowrank_needs(plan, dataset, p, width, wide)
    row_bytes = _row_bytes(plan, dataset, lanes(max(width, wide)), needs) if p.closed else ROW_BYTES
    room, parts = needs["rows"], len(of_rows)
    held = room if room == kept else room // (-(-parts // plan.processes) if products else parts), room
    return LowRankPlan(col_ranges, rows, labels, small, of_rows, products, row_bytes, held)


def _width(plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, kept: int) -> int:
    """Columns of a job, at most.

    Jobs share the rows that stay in memory. Where all do, there is a job a thread, as far as jobs have LEAST_COLUMNS. Where
    not, each job reads X anew: there are as few as fit, and one a process. kept: bytes of all rows.
    """
    r, needs = p.rank, {}
    most = max(1, min(plan.threads * plan.processes, r // LEAST_COLUMNS))
    few = min(plan.processes, most)
    wide = [job_width(r, n) for n in range(few, most + 1)]
    narrow = [w for w in (*range(wide[-1] // CACHE_LINE * CACHE_LINE, 0, -CACHE_LINE), 8, 4, 2, 1) if w < wide[-1]]
    for widths, all_stay in ((wide[::-1], True), ([*wide, *narrow], False)):
        for width in widths:
            if width not in needs:
                needs[width] = lowrank_needs(plan, dataset, p, width)
            if sum(needs[width].values()) <= plan.budget and (needs[width]["rows"] == kept or not all_stay):
                return width
    least = min(needs, key=lambda width: sum(needs[width].values()))
    plan.refuse_unless(needs[least], f"LEML of rank {r} on {plan.threads} threads")
    return least


def _products(
    plan: MemoryPlan, dataset: Dataset, p: LEMLParameters, col_ranges: Sequence[ColumnRange], kept: int
) -> tuple[ColumnRange, ...]:
    """Columns of a job of a W step's product by rows (see `solve_ridges`): all of them, or where all rows stay in memory, as

    few ranges as leave no thread without a job. None where the step is better done by columns: on one thread, on small data.
    """
    at_once, parts = plan.threads * plan.processes, len(row_parts(dataset))
    if parts == 1 or at_once == 1:
        return ()
    for n in (-(-at_once // parts), 1):
        runs = even_ranges(len(col_ranges), n)
        products = tuple((col_ranges[first][0], col_ranges[last - 1][1]) for first, last in runs)
        needs = lowrank_needs(plan, dataset, p, _widest(col_ranges), _widest(products))
        if sum(needs.values()) <= plan.budget and (needs["rows"] == kept or n == 1):
            return products
    return ()


def _given_labels(plan: MemoryPlan, dataset: Dataset, parts: int) -> tuple[tuple[int, int], ...]:
    """ranges of labels whose given pairs take an eighth of a thread's memory at most, and a part of all."""
    mask = dataset.observed_columns()
    ends = mask.ends(0, mask.n_lines)
    most = max(1, min(plan.per_thread // 8 // 32, mask.nnz // parts))
    col_ranges, first = [], 0
    while first < dataset.n_labels:
        last = int(ends.searchsorted(ends[first] + most, side="right")) - 1
        last = min(max(last, first + 1), dataset.n_labels)
        col_ranges.append((first, last))
        first = last
    return tuple(col_ranges)


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
        projections = [
            ProjectJob(learned, f"a/{number}", cols, parts, scores, self._sizes.parts, self._holding, sums)
            for cols in self._sizes.col_ranges
        ]
        projected = yield Phase(
            f"{name}, A", projections, self._words(step, "H"), self._span(step, 0.5, 0.7), kept=False
        )
        grams = gram_jobs(learned, f"gram/{number}", d.n_samples, scores, self._scratch)
        yield Phase(f"{name}, A^T A", grams, self._words(step, "H"), self._span(step, 0.7, 0.9), kept=False)
        job = FactorsJob(
            learned, f"h/{number}", step.lam, tuple(gram.out for gram in grams), sums, scores,
            projected[0]["positives"], h, tuple(before["values"]), parts, self._panels("h", d.n_labels, whole=True), str(out),
            max(solved["steps"] for solved in steps), p.criterion,
        )  # fmt: skip
        receipt = (yield Phase(f"{name}, H", [job], self._words(step, "H"), self._span(step, 0.9, 1.0)))[0]
        remove(w)
        return receipt

    def _step(self, step: Alternation, before: Receipt) -> Generator[Phase, list[Receipt], Receipt]:
        """Both half-steps over pairs."""
        p, d, number, name, learned = self.parameters, self.dataset, step.number, step.name, step.learned
        h, w = self._factor(step.start, "H"), self._state("w", number) / "all"
        previous = self._factor(step.start, "W") if step.start else None
        of_w = WStep(
            learned, f"w/{number}", f"{name}, W", number, p, step.lam, self._sizes.col_ranges, self._sizes.rows, h, previous,
            str(self._scratch), self._sizes.parts, self._holding,
        )  # fmt: skip
        solved = self.ledger.get(of_w.name)
        if self._sizes.small:
            alone = [WStepJob(of_w, str(w))]
            words, span = self._words(step, "W"), self._span(step, 0.0, 0.6)
            solved = (yield Phase(f"{name}, W", alone, words, span, unit="alternation", number=number))[0]
        elif solved is None:
            receipt = yield from of_w.loop()
            solved = (yield Phase(f"{name}, W", [WStepJob(of_w, str(w), receipt)], self._words(step, "W")))[0]
        found, scores = Factor(str(w / "W"), p.rank, learned.n_inputs()), self._panels("a", d.n_samples)
        projections = [
            ProjectJob(learned, f"a/{number}", cols, found, scores, self._sizes.parts, self._holding)
            for cols in self._sizes.col_ranges
        ]
        words = self._words(step, "H")
        yield Phase(f"{name}, A", projections, words, self._span(step, 0.6, 0.7), kept=False)
        lines = self._panels("h", d.n_labels, whole=True)
        jobs = [
            LabelsJob(learned, f"labels/{number}", p, step.lam, first, last, h, scores, lines)
            for first, last in self._sizes.labels
        ]
        receipts = yield Phase(f"{name}, H", jobs, words, self._span(step, 0.7, 0.95), kept=False)
        losses = sum(receipt["units"] for receipt in receipts) * LOSS_UNIT
        job = AlternationJob(
            learned, f"h/{number}", step.lam, found, lines, scores, losses, math.fsum(before["values"]), solved,
            str(self._state("factors", number) / "all"), p.criterion,
        )  # fmt: skip
        receipt = (yield Phase(f"{name}, store", [job], words, self._span(step, 0.95, 1.0)))[0]
        remove(w.parent)
        return receipt
