"""CPLST: the closed form that LEML has without regularisation, by a randomised method out of core.

With P the projection onto the columns of X, the best H of a rank are the leading eigenvectors of Y^T P Y, and W solves
X W = P Y H. An iteration takes W = argmin ||Y H - X W|| and A = X W, and turns these such that A^T A = I and the columns of
H = Y^T A are at right angles. A H^T is then the best that A's columns give, its first columns the best of a lesser rank. The
squared norms v of H's columns come to the eigenvalues.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmc_stream.factors.factors import FACTORS, Dense, Factor, Panels, SideBySide
from xmc_stream.factors.heldrows import Holding
from xmc_stream.factors.products import LINES, Learned
from xmc_stream.factors.projection import ProjectJob
from xmc_stream.lowrank.by_rows import solve_ridges
from xmc_stream.lowrank.normal import COLUMNS, NormalJob, NormalSolveJob
from xmc_stream.lowrank.parameters import CPLSTParameters
from xmc_stream.lowrank.plan import plan_lowrank
from xmc_stream.lowrank.ridge import Ridges
from xmc_stream.lowrank.steps import ModelJob, StartJob, gram_jobs, read_sum, write_factors
from xmc_stream.methods.contract import WRITING
from xmc_stream.runtime.job import Ledger, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MemoryPlan, even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import remove
from xmc_stream.system.blas import one_blas_thread

_NOTHING = 1e-12  # of the largest eigenvalue: what rounding leaves of one that is 0


@dataclass(frozen=True)
class TurnJob:
    """From A = X W: W and H, turned such that A^T A = I and the columns of H = Y^T A are at right angles, the longest first.

    grams: files of parts of A^T A; sums: Y^T A before. The receipt has the objective of so many first columns (`rank`).
    """

    name: str
    grams: tuple[str, ...]
    sums: Panels
    positives: int
    w: Dense
    rank: int
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return self.name

    def run(self) -> Receipt:
        """Turn and write."""
        q = self.sums.columns
        gram, square = np.zeros((q, q)), np.zeros((q, q))
        with one_blas_thread():
            for file in self.grams:
                gram += read_sum(file, q)
            for first in range(0, self.sums.n, LINES):
                sums = self.sums.read(first, min(first + LINES, self.sums.n)).astype(np.float64)
                square += sums.T @ sums
            values, vectors = np.linalg.eigh(gram)
            some = values > _NOTHING * max(float(values[-1]), 1e-300)
            turn = vectors * np.where(some, 1 / np.sqrt(np.where(some, values, 1.0)), 0.0)
            values, vectors = np.linalg.eigh(turn.T @ square @ turn)
            turn = np.ascontiguousarray((turn @ vectors)[:, ::-1])
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.sums}, turn)
        return {**receipt, "objective": 0.5 * (self.positives - float(values[::-1][: self.rank].sum()))}


@dataclass
class CPLSTRun:
    """A training run: what to learn from, where to, and within which memory; see `ppdsparse.run.PPDSparseRun`."""

    dataset: Dataset
    work: Path
    parameters: CPLSTParameters
    seed: int
    plan: MemoryPlan
    ledger: Ledger

    def __post_init__(self) -> None:
        self._inner = self.parameters.steps(self.dataset.n_features, self.dataset.n_labels)
        self._sizes = plan_lowrank(self.plan, self.dataset, self._inner)
        self._holding = Holding(uuid.uuid4().hex, *self._sizes.held)
        self._learned = Learned.of(self.dataset, 0.0, self.seed, self.parameters.bias)
        self._scratch = self.work / "scratch"
        self._grams: list[NormalJob] = []  # of X^T X, in this session

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, d, q = self.parameters, self.dataset, self._inner.rank
        rank = p.rank_for(d.n_features, d.n_labels)
        self._scratch.mkdir(parents=True, exist_ok=True)
        drawn = Panels(str(self._scratch / "h"), d.n_labels, ((0, q),))
        start = StartJob(self._learned, d.n_labels, q, False, drawn, str(self._state("factors", 0) / "all"))
        receipt = (yield Phase("start", [start], "drawing the first factors"))[0]
        history: list[dict[str, float]] = []
        for number in range(1, p.iterations + 1):
            values = tuple(receipt["values"]) if history else (1.0,) * q
            receipt = self.ledger.get(f"h/{number}") or (yield from self._iterate(number, values, rank))
            for kind in ("w", "right"):
                remove(self._state(kind, number))
            remove(self._state("factors", number - 1))
            history.append({"iteration": number, "objective": receipt["objective"]})
            if number > 1 and history[-2]["objective"] - receipt["objective"] <= p.tol * receipt["objective"]:
                break
        job = ModelJob(self._factor(number, "W"), self._factor(number, "H"), rank, str(self.work / FACTORS))
        yield Phase("finalise", [job], WRITING)
        return {
            "rounds": number,
            "rank": rank,
            "threshold": p.threshold,
            "nnz": (self._learned.n_inputs() + d.n_labels) * rank,
            "objective": receipt["objective"],
            "duality_gap": None,
            "history": history,
        }

    def _state(self, what: str, number: int) -> Path:
        return self.work / "state" / f"{what}-{number}"

    def _factor(self, number: int, name: str) -> Factor:
        n = self._learned.n_inputs() if name == "W" else self.dataset.n_labels
        return Factor(str(self._state("factors", number) / "all" / name), self._inner.rank, n)

    def _iterate(self, number: int, values: tuple[float, ...], rank: int) -> Generator[Phase, list[Receipt], Receipt]:
        """W, then H; returns what the turning of both says."""
        d, most, learned, scratch = self.dataset, self.parameters.iterations, self._learned, self._scratch
        name = f"iteration {number}"
        words, ends = f"{name} of at most {most}", [(number - 1 + of) / most for of in (0.0, 0.6, 0.9, 1.0)]
        phase = Phase(f"{name}, W", (), f"solving for W, {words}", (ends[0], ends[1]), unit="iteration", number=number)
        w = yield from (self._solved if self._inner.direct else self._descended)(number, values, phase)
        scores, sums = (
            Panels(str(scratch / kind), n, self._sizes.col_ranges)
            for kind, n in (("a", d.n_samples), ("sums", d.n_labels))
        )
        words = f"solving for H, {words}"
        projections = [
            ProjectJob(learned, f"a/{number}", cols, w, scores, self._sizes.parts, self._holding, sums)
            for cols in scores.col_ranges
        ]
        receipts = yield Phase(f"{name}, A", projections, words, (ends[1], ends[2]), kept=False)
        grams = gram_jobs(learned, f"gram/{number}", scores, scratch / "gram")
        yield Phase(f"{name}, A^T A", grams, words, (ends[2], ends[2]), kept=False)
        turn = TurnJob(
            f"h/{number}", tuple(gram.out for gram in grams), sums, receipts[0]["positives"], w, rank,
            str(self._state("factors", number) / "all"),
        )  # fmt: skip
        return (yield Phase(f"{name}, H", [turn], words, (ends[2], ends[3])))[0]

    def _solved(self, number: int, values: tuple[float, ...], phase: Phase) -> Generator[Phase, list[Receipt], Dense]:
        """W by the normal equations."""
        n_inputs, key, rights = self._learned.n_inputs(), f"w/{number}", list[NormalJob]()
        if self.ledger.get(key) is None:
            if not self._grams:
                columns = min(COLUMNS, max(last - first for first, last in self._sizes.col_ranges))
                ranges, words = (
                    even_ranges(n_inputs, -(-n_inputs // columns)),
                    "multiplying the features with each other",
                )
                self._grams = [
                    NormalJob(self._learned, "normal/0", cols, None, self._state("normal", 0)) for cols in ranges
                ]
                yield replace(phase, name="X^T X", jobs=self._grams, words=words, unit="", number=0)
            h, folder = self._factor(number - 1, "H"), self._state("right", number)
            rights = [NormalJob(self._learned, f"right/{number}", cols, h, folder) for cols in self._sizes.col_ranges]
            yield replace(phase, name=f"{phase.name}, X^T Y H", jobs=rights, unit="", number=0)
        grams, right = (tuple(job.out for job in jobs) for jobs in (self._grams, rights))
        out = str(self._state("w", number) / "all")
        solve = NormalSolveJob(key, n_inputs, self.parameters.lam, grams, right, values, out)
        yield replace(phase, jobs=[solve])
        return solve.found

    def _descended(
        self, number: int, values: tuple[float, ...], phase: Phase
    ) -> Generator[Phase, list[Receipt], Dense]:
        """W by conjugate gradients, from the one before."""
        before = self._factor(number - 1, "W") if number > 1 else None
        whole = Ridges(
            self._learned, self.parameters.lam, (0, self._inner.rank), values, self._factor(number - 1, "H"), before,
            self._sizes.parts, self._sizes.row_bytes, self._holding,
        )  # fmt: skip
        jobs = self._sizes.ridges(whole, f"w/{number}", self._inner, self._state("w", number))
        yield from solve_ridges(jobs, self._sizes.products, phase, self.ledger, self._scratch)
        return SideBySide(tuple(job.found for job in jobs))
