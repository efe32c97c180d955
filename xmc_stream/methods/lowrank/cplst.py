"""CPLST: the closed form that LEML has without regularisation, by a randomised method out of core.

With P the projection onto the columns of X, the best H of a rank are the leading eigenvectors of Y^T P Y, and W solves
X W = P Y H. Subspace iterations take Y^T P Y times V as Y^T (X W), where W = argmin ||Y V - X W||: the jobs of LEML's W step.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.blas import one_blas_thread
from xmc_stream.jobs.job import Ledger, Loop, Phase, Receipt
from xmc_stream.jobs.plan import MemoryPlan
from xmc_stream.methods.contract import WRITING
from xmc_stream.methods.lowrank.leml import plan_lowrank
from xmc_stream.methods.lowrank.parameters import CPLSTParameters
from xmc_stream.methods.lowrank.ridge import Ridges, solve_ridges
from xmc_stream.methods.lowrank.steps import ModelJob, StartJob, write_factors
from xmc_stream.models.lowrank.factors import FACTORS, Factor, Panels, SideBySide
from xmc_stream.models.lowrank.heldrows import Holding
from xmc_stream.models.lowrank.products import LINES, Learned, ProjectJob
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import remove

_NOTHING = 1e-12  # of the largest eigenvalue: what rounding leaves of one that is 0


@dataclass(frozen=True)
class TurnJob:
    """From P = Y^T A, of the V before: an orthonormal V that spans the same; or, at last, W and H of the rank.

    In the end V^T P is Y^T P Y as V sees it, and its leading eigenvectors turn V into H and W into the model's W. The receipt
    has the objective then.
    """

    learned: Learned
    name: str
    sums: Panels
    positives: int
    before: Factor
    w: SideBySide
    rank: int
    last: bool
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return self.name

    def run(self) -> Receipt:
        """Turn and write."""
        q = self.sums.columns
        gram, seen = np.zeros((q, q)), np.zeros((q, q))
        with one_blas_thread():
            for first in range(0, self.sums.n, LINES):
                last = min(first + LINES, self.sums.n)
                sums = self.sums.read(first, last).astype(np.float64)
                gram += sums.T @ sums
                seen += self.before.read(first, last).T.astype(np.float64) @ sums
            if self.last:
                values, vectors = np.linalg.eigh((seen + seen.T) / 2)
                turn = np.ascontiguousarray(vectors[:, ::-1][:, : self.rank])
                receipt = write_factors(Path(self.out), {"W": self.w, "H": self.before}, turn)
                return {**receipt, "objective": 0.5 * (self.positives - float(values[::-1][: self.rank].sum()))}
            values, vectors = np.linalg.eigh(gram)
            some = values > _NOTHING * max(float(values[-1]), 1e-300)
            turn = vectors * np.where(some, 1 / np.sqrt(np.where(some, values, 1.0)), 0.0)
            return write_factors(Path(self.out), {"H": self.sums}, np.ascontiguousarray(turn[:, ::-1]))


@dataclass
class CPLSTRun:
    """A training run: what to learn from, where to, and within which memory; see `methods.ppdsparse.run.PPDSparseRun`."""

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

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, inner, d = self.parameters, self._inner, self.dataset
        state, scratch, q = self.work / "state", self.work / "scratch", inner.rank
        rank = p.rank_for(d.n_features, d.n_labels)
        learned = Learned.of(d, 0.0, self.seed, p.bias)
        scratch.mkdir(parents=True, exist_ok=True)
        drawn = Panels(str(scratch / "h"), d.n_labels, ((0, q),))
        start = StartJob(learned, d.n_labels, q, False, drawn, str(state / "factors-0" / "all"))
        yield Phase("start", [start], "drawing the first factors")
        for number in range(1, p.iterations + 1):
            before = Factor(str(state / f"factors-{number - 1}" / "all" / "H"), q, d.n_labels)
            last, out = number == p.iterations, state / f"factors-{number}" / "all"
            whole = Ridges(
                learned, p.lam, (0, q), (1.0,) * q, before, None, self._sizes.parts, self._sizes.row_bytes, self._holding
            )  # fmt: skip
            solves = self._sizes.ridges(whole, f"w/{number}", inner, state / f"w-{number}")
            w = SideBySide(tuple(job.found for job in solves))
            name = f"iteration {number}"
            if self.ledger.get(f"h/{number}") is None:
                words, ends = (
                    f"{name} of {p.iterations}",
                    [(number - 1 + of) / p.iterations for of in (0.0, 0.6, 0.9, 1.0)],
                )
                phase = Phase(
                    f"{name}, W", (), f"solving for W, {words}", (ends[0], ends[1]), unit="iteration", number=number
                )
                yield from solve_ridges(solves, self._sizes.products, phase, self.ledger, scratch)
                scores, sums = (
                    Panels(str(scratch / kind), n, self._sizes.cuts)
                    for kind, n in (("a", d.n_samples), ("sums", d.n_labels))
                )
                jobs = [ProjectJob(learned, f"a/{number}", cut, w, scores, sums) for cut in self._sizes.cuts]
                words = f"solving for H, {words}"
                projected = yield Phase(f"{name}, A", jobs, words, (ends[1], ends[2]), kept=False)
                positives = projected[0]["positives"]
                turn = TurnJob(learned, f"h/{number}", sums, positives, before, w, rank, last, str(out))
                receipt = (yield Phase(f"{name}, H", [turn], words, (ends[2], ends[3])))[0]
            else:
                receipt = self.ledger.get(f"h/{number}") or {}
            remove(state / f"w-{number}")
            remove(state / f"factors-{number - 1}")
        lines = ("W", learned.n_inputs()), ("H", d.n_labels)
        w_factor, h_factor = (Factor(str(out / name), rank, n) for name, n in lines)
        yield Phase("finalise", [ModelJob(w_factor, h_factor, str(self.work / FACTORS))], WRITING)
        return {
            "rounds": p.iterations,
            "rank": rank,
            "threshold": p.threshold,
            "nnz": (d.n_features + p.bias + d.n_labels) * rank,
            "objective": receipt["objective"],
            "duality_gap": None,
        }
