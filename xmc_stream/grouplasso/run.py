"""The group lasso's training: stage after stage (a value of lam, or the debiasing), each segment after segment; then the model.

The loop is a generator, as that of `ppdsparse.run`. All it decides comes from receipts.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.grouplasso.descent import ColumnsJob, Data, ModelJob, SegmentJob, Stage
from xmc_stream.grouplasso.firstorder import StepsJob
from xmc_stream.grouplasso.kernels.descent import LEAST_CURVATURE
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.plan import is_small, plan_descent, plan_gradient
from xmc_stream.grouplasso.solver import problem_of
from xmc_stream.methods.contract import WRITING, TrainingRun
from xmc_stream.runtime.check import CheckJob, array_jobs
from xmc_stream.runtime.job import Job, Loop, Phase, Receipt
from xmc_stream.runtime.plan import MIB, Portion
from xmc_stream.store.chunks import plain_arrays, read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.places import make_folder
from xmc_stream.system.stop import stop_if_unwanted

_ABOVE = 1.0 + 1e-6  # times F(0): rounding
_SIGMA_ABOVE = 1.05  # iterations end when the bound is no more than this above what is certainly reached
_SIGMA_MOST = 30
_ROUNDING = 1.0 + 1e-6  # of sums in float64


def refuse_diverged(p: GroupLassoParameters, stage: Stage, objective: float, at_zero: float) -> None:
    """Raise InputError for an end of a stage that is worse than W = 0."""
    if objective <= _ABOVE * at_zero:
        return
    if p.descends or stage.debias:
        cure: str = "scale the features, as by convert " + flags.NORMALIZE_L2
    else:
        cure = ("set a smaller eta" if p.algorithm == "fobos" else "scale the features") + ", or algorithm=bcd-ls"
    where = "the debiasing" if stage.debias else f"lam {stage.lam:g}"
    raise InputError(
        f"{p.algorithm} diverged in {where}: its objective is {objective:.6g}, that of W = 0 is {at_zero:.6g}: "
        + cure
        + ", and train again with "
        + flags.OVERWRITE
    )


def stages_of(p: GroupLassoParameters) -> list[Stage]:
    """The stages of a run, in turn."""
    stages = [Stage(number, lam) for number, lam in enumerate(p.lams)]
    if p.debias is not None:
        stages.append(Stage(len(stages), 0.0, True, p.debias))
    return stages


@dataclass(frozen=True)
class SigmaJob:
    """A bound on the largest singular value of X, never below it.

    With A = |X|^T |X|, and any v of positive values,

        sigma(X)^2 <= sigma(|X|)^2 <= max_j (A v)_j / v_j

    (Collatz, Wielandt). Power iterations, v = A v, bring it down to sigma(|X|)^2. ||X||_F^2 bounds it too. A job makes as many
    of them as a job should take. number: of those before; before: what the last of them left, "" for a v of ones; square: the
    bound on sigma^2 that they gave.
    """

    data: Data
    block_bytes: int
    number: int = 0
    before: str = ""
    square: float = math.inf

    @property
    def key(self) -> str:
        """The first iteration."""
        return f"sigma/{self.number}"

    @property
    def out(self) -> Path:
        """A pack of v."""
        return Path(self.data.work) / "state" / "stage-0" / f"sigma-{self.number}"

    def run(self) -> Receipt:
        """Iterate; the receipt has the bound, or None where iterations are left."""
        X, portion = Dataset(self.data.path).X_rows(), Portion()
        v, square, passes = np.ones(X.shape[1]), self.square, self.number
        if self.before:
            v = read_small(Path(self.before), "v", len(v), np.float64)
        while passes < _SIGMA_MOST:
            if passes > self.number and portion.done():
                with new_pack(self.out) as pack:
                    pack.write("v", v)
                return self._receipt(None, square, passes, X.bytes_read)
            after, squares = np.zeros(len(v)), 0.0
            for block in X.blocks(self.block_bytes):
                stop_if_unwanted()
                size = np.abs(block.values).astype(np.float64)
                scores = scipy.sparse.csr_matrix((size, block.indices, block.indptr), (block.n, len(v))) @ v
                # these two go entry after entry, so that sums do not depend on where blocks begin
                np.add.at(after, block.indices, size * np.repeat(scores, np.diff(block.indptr)))
                squares = float(np.add.accumulate(np.append(squares, size * size))[-1])
            passes += 1
            there = after > 0
            if not there.any():
                square = 0.0
                break
            square = min(square, squares, float((after[there] / v[there]).max()))
            reached = float((v * after).sum()) / float(np.square(v).sum())  # BLAS sums differ with its threads
            if square <= _SIGMA_ABOVE * reached:
                break
            v = np.maximum(after / after.max(), 1e-100)  # positive also where a part of X falls behind
        return self._receipt(math.sqrt(_ROUNDING * square), square, passes, X.bytes_read)

    def _receipt(self, sigma: float | None, square: float, number: int, bytes_read: int) -> Receipt:
        passes = number - self.number
        return {"sigma": sigma, "square": square, "number": number, "passes": passes, "bytes_read": bytes_read}


@dataclass
class GroupLassoRun(TrainingRun):
    """A training run of the group lasso."""

    parameters: GroupLassoParameters

    def __post_init__(self) -> None:
        self._data = Data(str(self.dataset.path), str(self.work), self.parameters, self.seed)
        self._constant = 0.0

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, d = self.parameters, self.dataset
        columns_job = ColumnsJob(self._data.path, max(4 * MIB, self.plan.budget // 2))
        yield Phase("columns", [columns_job], "storing the features by columns", kept=False)
        columns = d.path / "X" / "columns"
        checks: list[Job] = [CheckJob(str(columns)), *array_jobs(d.path, plain_arrays(columns))]
        yield Phase("check the columns", checks, "comparing the columns with their checksums", kept=False)
        if not p.descends:
            yield from self._bound()
        state, first, at_zero = "", -1.0, math.inf
        path: list[dict[str, Any]] = []
        history: list[dict[str, Any]] = []
        objective = 0.0
        for stage in stages_of(p):
            make_folder(self.work / "state" / f"stage-{stage.number}")
            state, receipt = yield from self._stage(stage, state, -1.0 if stage.debias else first)
            first = receipt["first"]
            if stage.number == 0:
                at_zero = receipt["history"][0]["objective"]
            refuse_diverged(p, stage, receipt["objective"], math.inf if stage.debias else at_zero)
            objective = objective if stage.debias else receipt["objective"]
            path.append(
                {
                    **({"debias": stage.ridge} if stage.debias else {"lam": stage.lam}),
                    "objective": receipt["objective"], "n_selected": receipt["n_selected"],
                    "passes": round(receipt["stage_passes"], 3), "violation": receipt["violation"],
                }
            )  # fmt: skip
            history += [{"stage": stage.number, **entry} for entry in receipt["history"]]
        written = (yield Phase("finalise", [ModelJob(self._data, state)], WRITING))[0]
        return {
            "nnz": written["nnz"],
            "n_selected": written["n_selected"],
            "objective": objective,
            "duality_gap": None,
            "lam": p.lams[-1],
            "path": path,
            "history": history,
        }

    def _stage(self, stage: Stage, state: str, first: float) -> Generator[Phase, list[Receipt], tuple[str, Receipt]]:
        """Segments until the stage is done; returns the state that it leaves, and its last receipt."""
        begins, number, before, passes, said = True, 0, state, 0.0, ""
        n_stages = len(stages_of(self.parameters))
        doing = "debiasing" if stage.debias else f"descending at lam {stage.lam:g}"
        name = "debias" if stage.debias else "train" if len(self.parameters.lams) == 1 else f"lam {stage.lam:g}"
        while True:
            job = self._segment(stage, number, before, begins, first)
            # from where the stage is to its end, in the whole run; it may end before all of its passes
            done = stage.number + min(1.0, passes / self.parameters.max_passes)
            span = done / n_stages, (stage.number + 1) / n_stages
            phase = Phase(name, [job], doing + said, span, unit="segment", number=number + 1)
            if isinstance(job, StepsJob) and not is_small(self.dataset) and self.ledger.get(job.key) is None:
                phase = Phase(name, [replace(job, made=(yield from job.loop()))], doing + said)
            (receipt,) = yield phase
            zero = 1.0 - receipt["n_selected"] / self.dataset.n_features
            passes = receipt["stage_passes"]
            said = (
                f" (pass {passes:.0f} of at most {self.parameters.max_passes}, objective {receipt['objective']:.6g}, "
                f"{zero:.2%} of features left out)"
            )
            if before != state:
                Path(before).unlink(missing_ok=True)
            before, begins, number = str(job.out), False, number + 1
            if receipt["done"]:
                return before, receipt

    def _bound(self) -> Generator[Phase, list[Receipt], None]:
        """The L of steps along the whole gradient that always works."""
        d = self.dataset
        make_folder(self.work / "state" / "stage-0")
        job, sigma = SigmaJob(self._data, self.plan.row_block_bytes), None
        while sigma is None:
            (receipt,) = yield Phase("largest singular value", [job], "measuring the largest singular value")
            if job.before:
                Path(job.before).unlink(missing_ok=True)
            job = replace(job, number=receipt["number"], before=str(job.out), square=receipt["square"])
            sigma = receipt["sigma"]
        curvature = problem_of(self.parameters, 0.0, 0.0, d.n_samples, d.n_labels).curvature
        self._constant = max(curvature * sigma**2 / d.n_samples, LEAST_CURVATURE)

    def _segment(self, stage: Stage, number: int, before: str, begins: bool, first: float) -> SegmentJob | StepsJob:
        """A segment by block coordinate descent, which debiasing is too, or some steps along the gradient."""
        common = self._data, stage, number, before, begins, first
        if stage.debias or self.parameters.descends:
            return SegmentJob(*common, plan_descent(self.plan, self.dataset, self.parameters))
        return StepsJob(*common, plan_gradient(self.plan, self.dataset), self._constant)
