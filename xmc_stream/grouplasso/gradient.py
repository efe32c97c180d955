"""Jobs of the algorithms that step along the whole gradient: scores by rows of X, gradient and steps by features.

What they hand to each other are D x K and N x K matrices in files of the run's scratch, which each job reads a part of.
Sums are made over fixed runs of rows or features, whatever the jobs, and added exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmc_stream.grouplasso.arrays import Columns, InFile
from xmc_stream.grouplasso.descent import Data, Stage
from xmc_stream.grouplasso.kernels.descent import N_SUMS, Problem, step_rows
from xmc_stream.grouplasso.kernels.margins import Lines, add_gradients, add_scores, new_sums, settle
from xmc_stream.grouplasso.plan import GradientPlan, feature_run, row_run, width_of
from xmc_stream.grouplasso.solver import problem_of
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import Portion, even_ranges
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.packing import new_pack
from xmc_stream.system.stop import stop_if_unwanted

_SIGMA_ABOVE = 1.05  # iterations end when the bound is no more than this above what is certainly reached
_SIGMA_MOST = 30
_ROUNDING = 1.0 + 1e-6  # of sums in float64


@dataclass(frozen=True)
class _Part:
    """A job on a part of the rows or features [first, last). step: which of the stage's steps; its files have names."""

    data: Data
    stage: Stage
    sizes: GradientPlan
    step: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Never in a ledger: kind, stage, step, rows or features."""
        return f"{type(self).__name__}/{self.stage.number}/{self.step}/{self.first}"

    @property
    def _dataset(self) -> Dataset:
        return Dataset(self.data.path)

    def _matrix(self, name: str) -> InFile:
        """D x K, or the N x K array."""
        dataset = self._dataset
        n = dataset.n_samples if name == "array" else dataset.n_features
        return InFile(self.data.scratch(name), n, width_of(dataset.n_labels), fresh=False)

    def _problem(self) -> Problem:
        dataset, p = self._dataset, self.data.parameters
        return problem_of(p, self.stage.lam, self.stage.ridge, dataset.n_samples, dataset.n_labels)


@dataclass(frozen=True)
class ScoresJob(_Part):
    """Make the array's lines of rows [first, last) from a matrix W; the receipt has the losses of fixed runs of rows."""

    source: str

    def run(self) -> Receipt:
        """Add up scores, column after column of X; threads share its rows, and what is read."""
        dataset, source = self._dataset, self._matrix(self.source)
        columns = Columns(dataset, self.sizes.entries)
        values = aligned_zeros((self.last - self.first, source.width))
        with ThreadPoolExecutor(self.sizes.team) as team:
            self._add_up(source, columns, values, team)
            losses = self._settle(dataset, values, team)
        self._matrix("array").write(self.first, values)
        share = (self.last - self.first) / dataset.n_samples
        return {"losses": losses, "passes": share, "bytes_read": columns.X.bytes_read}

    def _add_up(self, source: InFile, columns: Columns, values: NDArray[np.float32], team: Executor) -> None:
        shares = even_ranges(len(values), self.sizes.team)
        for low in range(0, source.n, self.sizes.columns):
            rows = source.read(low, min(low + self.sizes.columns, source.n))
            features = np.flatnonzero(rows.any(axis=1) & (columns.counts[low : low + len(rows)] > 0))
            for a, b in columns.batches(features + low, self.sizes.columns):
                stop_if_unwanted()
                add = partial(self._add, columns.gather(features[a:b] + low), rows[features[a:b]], values)
                list(team.map(add, shares))  # which raises what they do

    def _add(
        self, block: CSR, weights: NDArray[np.float32], values: NDArray[np.float32], share: tuple[int, int]
    ) -> None:
        """To the lines of some rows."""
        first, last = share
        add_scores(block.indptr, block.indices, block.values, self.first + first, weights, values[first:last])

    def _settle(self, dataset: Dataset, values: NDArray[np.float32], team: Executor) -> list[float]:
        """Make scores the lines of the array; the losses of fixed runs of rows."""
        Y = dataset.Y_rows().block(self.first, self.last)
        problem, run, active = self._problem(), row_run(dataset), np.zeros(len(values), np.float32)

        def losses(low: int) -> float:
            some = slice(low, min(low + run, len(values)))
            part = Lines(values[some], active[some], Y.indptr[low : some.stop + 1], Y.indices)
            return float(settle(problem.loss, problem.n_labels, part))

        return list(team.map(losses, range(0, len(values), run)))


@dataclass(frozen=True)
class GradientJob(_Part):
    """The gradient's rows of features [first, last), from the array."""

    out: str

    def run(self) -> Receipt:
        """Add up, window after window of the array's lines."""
        dataset, problem, out = self._dataset, self._problem(), self._matrix(self.out)
        columns, array = Columns(dataset, self.sizes.entries), self._matrix("array")
        room = new_sums(out.width)
        whole = list(self._windows(dataset, array)) if self.sizes.rows >= dataset.n_samples else None
        for low in range(self.first, self.last, self.sizes.columns):
            features = np.arange(low, min(low + self.sizes.columns, self.last))
            for a, b in columns.batches(features, self.sizes.columns):
                block = columns.gather(features[a:b])
                at = block.indptr[:-1].copy()
                near, wide = np.zeros((b - a, out.width), np.float32), np.zeros((b - a, out.width))
                for first, lines in whole or self._windows(dataset, array):
                    stop_if_unwanted()
                    add_gradients(problem.loss, block, at, first, lines, room, near, wide)
                out.write(int(features[a]), (wide * problem.scale).astype(np.float32))
        share = int(columns.counts[self.first : self.last].sum()) / max(columns.X.nnz, 1)
        return {"passes": share, "bytes_read": columns.X.bytes_read}

    def _windows(self, dataset: Dataset, array: InFile) -> Iterator[tuple[int, Lines]]:
        Y = dataset.Y_rows()
        for first in range(0, array.n, self.sizes.rows):
            last = min(first + self.sizes.rows, array.n)
            labels = Y.block(first, last)
            active = np.zeros(last - first, np.float32)  # of the curvature, which is not asked for
            yield first, Lines(array.read(first, last), active, labels.indptr, labels.indices)


@dataclass(frozen=True)
class StepJob(_Part):
    """Rows [first, last) of out = prox(v - g / length); sums of fixed runs of features, see `step_rows` of the kernels."""

    length: float
    point: str
    gradient: str
    w: str
    out: str

    def run(self) -> Receipt:
        """Step."""
        problem, run = self._problem(), feature_run(self._dataset)
        point, gradient, w, out = map(self._matrix, (self.point, self.gradient, self.w, self.out))
        sums = []
        for low in range(self.first, self.last, run):
            stop_if_unwanted()
            high = min(low + run, self.last)
            rows, mine = aligned_zeros((high - low, out.width)), np.zeros(N_SUMS)
            step_rows(
                point.read(low, high), gradient.read(low, high), w.read(low, high), self.length, problem, rows, mine
            )
            out.write(low, rows)
            sums.append(mine.tolist())
        return {"sums": sums}


@dataclass(frozen=True)
class MomentumJob(_Part):
    """Rows [first, last) of out = w + beta (w - before)."""

    beta: float
    w: str
    before: str
    out: str

    def run(self) -> Receipt:
        """Extrapolate."""
        w, before, out = map(self._matrix, (self.w, self.before, self.out))
        run, beta = feature_run(self._dataset), np.float32(self.beta)
        for low in range(self.first, self.last, run):
            high = min(low + run, self.last)
            rows = w.read(low, high)
            out.write(low, rows + beta * (rows - before.read(low, high)))
        return {}


@dataclass(frozen=True)
class ChangeJob(_Part):
    """||s||^2 and s.y over rows [first, last), for s = w - w_before, y = g - g_before, in fixed runs of features."""

    names: tuple[str, str, str, str]

    def run(self) -> Receipt:
        """Sum."""
        matrices, run, sums = [self._matrix(name) for name in self.names], feature_run(self._dataset), []
        for low in range(self.first, self.last, run):
            w, w_before, g, g_before = (m.read(low, min(low + run, self.last)).astype(np.float64) for m in matrices)
            s = w - w_before
            sums.append([float((s * s).sum()), float((s * (g - g_before)).sum())])
        return {"sums": sums}


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


def total_of(receipts: list[Receipt], name: str) -> list[float]:
    """The exact sum of each column of what receipts have by a name."""
    return [math.fsum(column) for column in zip(*(line for receipt in receipts for line in receipt[name]), strict=True)]


def losses_of(receipts: list[Receipt]) -> float:
    """The exact sum of the losses that receipts have."""
    return math.fsum(loss for receipt in receipts for loss in receipt["losses"])
