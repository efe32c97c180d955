"""Loading the kernels of a training by PPDSparse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.kernels.order import RowOrder
from xmc_stream.linear.implied import implied_of
from xmc_stream.linear.kernels.denserows import in_fours
from xmc_stream.linear.weights import Unit
from xmc_stream.methods.contract import Task
from xmc_stream.ppdsparse.groups import guide_weight, implied_margin
from xmc_stream.ppdsparse.parameters import EXACT, NARROW, PPDSparseParameters
from xmc_stream.ppdsparse.plan import StreamRoom
from xmc_stream.ppdsparse.problem import Found, LossWeights, Problem, Share, ShareWeights
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.search import SearchJob, UnitSpan
from xmc_stream.ppdsparse.sets import RoundSets, Weights
from xmc_stream.ppdsparse.solver import Solver, has_dense_rows, ramp_of, row_order
from xmc_stream.ppdsparse.state import new_unit_state
from xmc_stream.ppdsparse.streaming import LargeClasses
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block
from xmc_stream.store.model import begin_model, finish_model, model_attributes


@dataclass(frozen=True)
class PPDSparseWarmUp(WarmUp):
    """Train on a few rows.

    parameters: whose options are used; again: with a warm start too; large: with a class whose rows stream by; guided: with
    groups of labels; dense: for rows that have most features, and fours: which are scored four at a time; lifts: with implied
    labels; all_rows: of classes that begin with all rows, one round and no more (which takes a third of the time to compile).
    """

    parameters: PPDSparseParameters = field(default_factory=PPDSparseParameters)
    again: bool = False
    large: bool = False
    guided: bool = False
    dense: bool = False
    fours: bool = False
    lifts: bool = False
    all_rows: bool = False

    @classmethod
    def of(cls, task: Task) -> PPDSparseWarmUp:
        """Of a training whose classes have active sets."""
        p, d = task.parameters, task.dataset
        shape, nnz = (d.n_samples, d.n_features), d.X_rows().nnz
        return cls(
            p,
            again=task.warm_start is not None and task.start_state is None,
            large=d.n_samples > row_order(d.n_samples, nnz).large,
            guided=guide_weight(p, d) > 0,
            dense=has_dense_rows(*shape, nnz),
            fours=in_fours(*shape, nnz),
            lifts=implied_margin(p, d) is not None,
        )

    @property
    def seconds(self) -> float:
        """Searches and active sets have the largest kernels."""
        return 6.0 if self.all_rows else 25.0

    @property
    def loads(self) -> str:
        p, own = (
            self.parameters,
            (self.again, self.large, self.guided, self.dense, self.fours, self.lifts, self.all_rows),
        )
        return f"ppdsparse {own, p.cut > 0, p.delta > 0, p.min_value > 0}"

    def load(self) -> None:
        with a_few_rows(d=6 if self.dense else 12) as dataset:  # of which a row has four
            path = Path(dataset.path).parent
            work = path / "model.partial"
            begin_model(work)
            # class 0 has more active rows than a batch may have, class 1 fewer: both ways of solving are loaded;
            # and it wants more rows than an interval has
            plan, notes = MemoryPlan(2**40, 256 * MIB, 1, cuts=Cuts(solve_rows=8, interval=16)), Notes()
            of = self.parameters
            p = PPDSparseParameters(
                C=1.0, positive_weight=1.0, cut=of.cut, delta=of.delta, min_value=of.min_value, guide=float(self.guided),
                implied=1.0 if self.lifts else None, all_rows=self.all_rows, max_rounds=1 if self.all_rows else 6,
            )  # fmt: skip
            result = run_here(PPDSparseRun(dataset, work, p, 0, plan, notes).loop(), notes)
            if self.fours and not self.dense:
                self._search_in_fours()
            if self.large:
                self._stream(dataset, p, path)
            if self.lifts:  # a row of these has one label, which implies none
                two = Block(0, np.array([0, 2]), np.arange(2, dtype=np.int32), None)
                implied_of(lambda: [two], 0, np.ones(2, np.int64))
            if self.again:
                finish_model(work, path / "model", model_attributes(dataset, p.solver, p.to_dict(), 0, result))
                begin_model(work)
                notes = Notes()
                run_here(PPDSparseRun(dataset, work, p, 0, plan, notes, str(path / "model")).loop(), notes)

    def _search_in_fours(self) -> None:
        """Search rows that are dense enough for tiles of four rows, which those of `load` are not."""
        with a_few_rows(d=6) as dataset:
            path, n, k = Path(dataset.path).parent, dataset.n_samples, dataset.n_labels
            with new_unit_state(path / "state", k, n, dataset.n_features) as writer:
                writer.active.append(np.zeros(k, np.int64), np.zeros(0, np.int32), np.zeros(0))
                writer.weights.append(np.ones(k, np.int64), np.zeros(k, np.int32), np.ones(k, np.float32))
            span, plan = UnitSpan(0, k, Unit(0, k), str(path / "state"), MIB), MemoryPlan(2**40, 256 * MIB, 1)
            p = replace(self.parameters, C=1.0, positive_weight=1.0)
            problem = Problem(str(dataset.path), p, 0, plan, LossWeights(None, n))
            for kind in (EXACT, NARROW):
                out = str(path / f"found{kind}")
                SearchJob(problem, 1, False, kind, 0, n, (span,), 1, out, MIB, n, 0.0).run()

    def _stream(self, dataset: Dataset, parameters: PPDSparseParameters, path: Path) -> None:
        """Solve class 0 with all rows streaming by."""
        n, d, k = dataset.n_samples, dataset.n_features, dataset.n_labels
        problem = Problem(str(dataset.path), parameters, 0, MemoryPlan(2**40, 256 * MIB, 1), LossWeights(None, n))
        sets = _AllRows(problem, dataset, 0, Share(0, k, Unit(0, k)), None, Found())
        weights, ramp = ShareWeights(problem.weights, dataset, 0, k), ramp_of(parameters, {})
        large = LargeClasses(
            Solver(parameters, 0, RowOrder(n, 0, 1)), sets, dataset.X_rows(), StreamRoom(64, MIB, 1, d, n), weights,
            ramp if self.again else None, path / "active",
        )  # fmt: skip
        for name, size in (("memory", n), ("disk", MIB)):  # the second is said to be too large for memory
            with new_unit_state(path / name, 1, n, d) as writer:
                large.solve(np.zeros(1, np.int64), np.array([size]), np.zeros(1, np.int64), writer)


class _AllRows(RoundSets):
    """All rows are active, and some have alpha > 0."""

    def of(self, low: int, high: int) -> ActiveSets:
        n = self.n_samples
        sign = np.where(np.arange(n) < 3, 1, -1).astype(np.int8)
        return ActiveSets(0, np.array([0, n]), np.arange(n), sign, np.where(sign > 0, 0.5, 0.0))

    def start_weights(self, classes: NDArray[np.int64]) -> Iterator[Weights]:
        yield np.arange(1), np.ones(1, np.float32), 0.0
