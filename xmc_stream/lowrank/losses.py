"""Jobs of low-rank models over pairs that are given, or of any loss: what is done row by row, and the H step label by label.

Where products do not come down to r x r matrices, a product with the Hessian of the W step takes three phases: B = X S by
columns, V = (U * (B H^T)) H by rows, X^T V by columns. No sum is cut where another plan would cut it elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmc_stream.factors.factors import ColumnRange, Dense, Factor, Panels, new_factors
from xmc_stream.factors.heldrows import Holding
from xmc_stream.factors.products import BLOCK, ROW_BYTES, Learned, held_out_metrics
from xmc_stream.factors.projection import Parts, ProjectJob, row_blocks
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.known_pairs import LOSS_UNIT, AllPairs, GivenPairs, dense_labels, given, loss_units
from xmc_stream.lowrank.newton import run_alone, trust_region
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.solver import Array, loss_curvatures, loss_slopes, loss_values, solve_gram
from xmc_stream.lowrank.steps import write_factors
from xmc_stream.runtime.job import Job, Notes, Phase, Receipt, run_here
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.system.blas import one_blas_thread

LABELS = 128  # that the H step solves for at a time where all pairs count: fixed, as `BLOCK` is
GRAMS = 1 << 22  # entries of r x r matrices of labels that are solved for at a time


@dataclass(frozen=True)
class MixJob:
    """V = D H for rows [first, last), D the slopes of the losses at A; or, with images B, D = curvatures * (B H^T)."""

    learned: Learned
    name: str
    loss: str
    observed: str
    first: int
    last: int
    labels: Dense
    scores: Panels
    images: Panels | None
    out: Panels

    @property
    def key(self) -> str:
        """What for, and rows."""
        return f"{self.name}/{self.first}"

    def run(self) -> Receipt:
        """Write V; the receipt has the losses' sum in units."""
        dataset = self.learned.dataset()
        Y, mask = dataset.Y_rows(), dataset.observed_rows() if self.observed == "given" else None
        with one_blas_thread():
            units = self._all(Y) if mask is None else self._given(mask, Y)
        return {"units": units, "bytes_read": Y.bytes_read + (mask.bytes_read if mask else 0)}

    def _weights(
        self, pairs: AllPairs | GivenPairs, h: Array, a: Array, b: Array | None, held_out: Any
    ) -> tuple[Array, int]:
        z = pairs.dots(a, h)
        if b is None:
            values, weights = (
                loss_values(self.loss, pairs.true, z.astype(np.float64)),
                loss_slopes(self.loss, pairs.true, z),
            )
        else:
            values, weights = np.zeros(1), loss_curvatures(self.loss, pairs.true, z) * pairs.dots(b, h)
        if held_out is not None:
            left = pairs.rows_left(held_out)
            weights[left] = 0
            if b is None:
                values[left] = 0
        return weights, pairs.loss_units(values)

    def _lines(self, first: int, n: int) -> tuple[Array, Array | None, Any]:
        b = None if self.images is None else self.images.read(first, first + n)
        return self.scores.read(first, first + n), b, self.learned.kept_out(first, n)

    def _given(self, mask: SparseMatrix, Y: SparseMatrix) -> int:
        units, h = 0, self.labels.read(0, self.labels.n)
        for known, y in stream((mask, Y), ROW_BYTES, self.first, self.last, BLOCK):
            pairs = given(known, y)
            weights, more = self._weights(pairs, h, *self._lines(known.start, known.n))
            units += more
            self.out.write((0, h.shape[1]), known.start, pairs.by_row(weights, h))
        return units

    def _all(self, Y: SparseMatrix) -> int:
        units, n_labels = 0, self.labels.n
        for first in range(self.first, self.last, BLOCK):
            y = Y.block(first, min(first + BLOCK, self.last))
            lines = self._lines(first, y.n)
            total = np.zeros((y.n, self.labels.columns), np.float32)
            for low in range(0, n_labels, BLOCK):
                high = min(low + BLOCK, n_labels)
                pairs, h = AllPairs(dense_labels(y, low, high)), self.labels.read(low, high)
                weights, more = self._weights(pairs, h, *lines)
                units += more
                total += pairs.by_row(weights, h)
            self.out.write((0, total.shape[1]), first, total)
        return units


@dataclass(frozen=True)
class BackwardJob:
    """X^T V + lam S, of a range of columns."""

    learned: Learned
    name: str
    cols: ColumnRange
    lam: float
    rows: Panels
    source: Panels
    out: Panels
    parts: Parts
    holding: Holding

    @property
    def key(self) -> str:
        """What for, and columns."""
        return f"{self.name}/{self.cols[0]}-{self.cols[1]}"

    def run(self) -> Receipt:
        """Write."""
        X = self.learned.dataset().X_rows()
        total, width = self.source.take(self.cols), self.cols[1] - self.cols[0]
        total *= np.float32(self.lam)
        for x, _ in row_blocks(X, None, self.parts, self.holding):
            lines = aligned_zeros((x.n, total.shape[1]))
            lines[:, :width] = self.rows.read(x.start, x.start + x.n)[:, self.cols[0] : self.cols[1]]
            self.learned.add_transposed(x, lines, total)
        for first in range(0, len(total), BLOCK):
            self.out.write(self.cols, first, total[first : first + BLOCK, :width])
        return {"passes": width / self.out.columns, "bytes_read": X.bytes_read}


@dataclass(frozen=True)
class WStep:
    """The W step over pairs: trust-region Newton, or with the squared loss conjugate gradients.

    Its vectors (`VECTORS` of D x r) are in the memory of the process that runs the loop; products are phases of jobs, with
    columns in `col_ranges` and rows in `rows`. title, number: of the phases, and of the alternation. before: the W to begin
    from, None for 0. scratch: a folder. parts, holding: see `row_blocks`.
    """

    learned: Learned
    name: str
    title: str
    number: int
    parameters: LEMLParameters
    lam: float
    col_ranges: tuple[ColumnRange, ...]
    rows: tuple[tuple[int, int], ...]
    labels: Factor
    before: Dense | None
    scratch: str
    parts: Parts
    holding: Holding

    def panels(self, name: str) -> Panels:
        """Scratch for a D x r vector (w, s, g), or N x r (a, a-next, b, v)."""
        dataset = self.learned.dataset()
        by_row = name in ("a", "a-next", "b", "v")
        col_ranges = ((0, self.col_ranges[-1][1]),) if name == "v" else self.col_ranges
        return Panels(f"{self.scratch}/{name}", dataset.n_samples if by_row else self.learned.n_inputs(), col_ranges)

    def loop(self) -> Generator[Phase, list[Receipt], Receipt]:
        """Phases of jobs, none of them kept; leaves W in the panels "w"."""
        p, d = self.parameters, self.learned.n_inputs()
        w = np.zeros((1, d * p.rank), np.float32)
        if self.before is not None:
            for cols in self.col_ranges:
                w.reshape(d, p.rank)[:, cols[0] : cols[1]] = self.before.take(cols)[:, : cols[1] - cols[0]]
        problem = _Pairs(self)
        found, f, products = yield from trust_region(problem, w, p.newton, p.cg, p.cg_tol, p.loss == "squared")
        problem.write("w", found)
        return {"objective_w": float(f[0]), "products": products, **problem.sums}


VECTORS = 8  # of D x r, in a W step over pairs: w, the next one, g, s, residual, direction, image, one on the way


class _Pairs:
    """The problem of a W step, for `trust_region`."""

    def __init__(self, step: WStep) -> None:
        self._step = step
        self._shape = step.learned.n_inputs(), step.parameters.rank
        self.sums = {"passes": 0.0, "bytes_read": 0}

    def _do(self, jobs: Sequence[Job]) -> Generator[Phase, list[Receipt], list[Receipt]]:
        receipts = yield Phase(
            self._step.title, jobs, f"solving for {self._step.title}", kept=False, unit="alternation",
            number=self._step.number,
        )  # fmt: skip
        for name in self.sums:
            self.sums[name] += sum(receipt.get(name, 0) for receipt in receipts)
        return receipts

    def write(self, name: str, vector: Array) -> None:
        """Leave a vector where jobs read it."""
        panels, matrix = self._step.panels(name), vector.reshape(self._shape)
        for cols in panels.col_ranges:
            for first in range(0, len(matrix), BLOCK):
                panels.write(cols, first, matrix[first : first + BLOCK, cols[0] : cols[1]])

    def _project(self, source: str, out: str) -> Generator[Phase, list[Receipt], list[Receipt]]:
        step = self._step
        jobs = [
            ProjectJob(
                step.learned, f"{step.name}/{out}", cols, step.panels(source), step.panels(out), step.parts, step.holding
            )
            for cols in step.col_ranges
        ]  # fmt: skip
        return self._do(jobs)

    def _mix(self, scores: str, images: str | None) -> Generator[Phase, list[Receipt], list[Receipt]]:
        step, p = self._step, self._step.parameters
        b = None if images is None else step.panels(images)
        jobs = [
            MixJob(
                step.learned, f"{step.name}/v", p.loss, p.observed, first, last, step.labels, step.panels(scores), b,
                step.panels("v"),
            )
            for first, last in step.rows
        ]  # fmt: skip
        return self._do(jobs)

    def _backward(self, source: str) -> Generator[Phase, list[Receipt], Array]:
        step = self._step
        panels = step.panels("g")
        jobs = [
            BackwardJob(
                step.learned, f"{step.name}/g", cols, step.lam, step.panels("v"), step.panels(source), panels, step.parts,
                step.holding,
            )
            for cols in step.col_ranges
        ]  # fmt: skip
        yield from self._do(jobs)
        out = np.empty(self._shape, np.float32)
        for cols in panels.col_ranges:
            out[:, cols[0] : cols[1]] = panels.take(cols)[:, : cols[1] - cols[0]]
        return out.reshape(1, -1)

    def value(self, w: Array) -> Generator[Phase, list[Receipt], NDArray[np.float64]]:
        """The objective in W, with H held; the part of H left out."""
        self.write("w", w)
        yield from self._project("w", "a-next")
        receipts = yield from self._mix("a-next", None)
        losses = sum(receipt["units"] for receipt in receipts) * LOSS_UNIT
        flat = w.reshape(self._shape)
        square = sum(float(np.square(flat[i : i + BLOCK], dtype=np.float64).sum()) for i in range(0, len(flat), BLOCK))
        return np.array([losses + 0.5 * self._step.lam * square])

    def gradient(self, w: Array) -> Generator[Phase, list[Receipt], Array]:
        """Where `value` was asked last, whose A becomes that of `hessian`."""
        for cols in self._step.col_ranges:
            self._step.panels("a-next").move(cols, self._step.panels("a"))
        return (yield from self._backward("w"))

    def hessian(self, s: Array) -> Generator[Phase, list[Receipt], Array]:
        """Of the losses at A, and lam."""
        self.write("s", s)
        yield from self._project("s", "b")
        yield from self._mix("a", "b")
        return (yield from self._backward("s"))


@dataclass(frozen=True)
class WStepJob:
    """A W step that is too small to be shared out: all of its phases in this job."""

    step: WStep
    out: str

    @property
    def key(self) -> str:
        """The alternation."""
        return self.step.name

    def run(self) -> Receipt:
        """Solve and store W."""
        receipt = run_here(self.step.loop(), Notes())
        return receipt | StoreWJob(self.step, self.out, receipt).run()


@dataclass(frozen=True)
class StoreWJob:
    """Store the W that a step left in its panels. receipt: of the step; what it read is counted with its own jobs."""

    step: WStep
    out: str
    receipt: Receipt

    @property
    def key(self) -> str:
        """The alternation."""
        return self.step.name

    def run(self) -> Receipt:
        """Write."""
        panels = self.step.panels("w")
        with new_factors(Path(self.out), {"W": panels.columns}) as writers:
            for first in range(0, panels.n, BLOCK):
                writers["W"].append(panels.read(first, min(first + BLOCK, panels.n)).ravel())
        return {name: self.receipt[name] for name in ("objective_w", "products")}


@dataclass(frozen=True)
class LabelsJob:
    """The H step over pairs, of labels [first, last): with A fixed, each h_k is a problem of r variables by itself.

    Squared loss: solved; else trust-region Newton. A label without a pair gets 0. Writes its lines of H.
    """

    learned: Learned
    name: str
    parameters: LEMLParameters
    lam: float
    first: int
    last: int
    before: Factor
    scores: Panels
    out: Panels

    @property
    def key(self) -> str:
        """What for, and labels."""
        return f"{self.name}/{self.first}"

    def run(self) -> Receipt:
        """Solve; the receipt has the losses' sum and lam/2 ||H||^2, in units."""
        p, dataset = self.parameters, self.learned.dataset()
        h = self.before.read(self.first, self.last).astype(np.float64)
        with one_blas_thread():
            of = _AllOfLabels if p.observed == "full" else _GivenOfLabels
            pairs = of(dataset, self.first, self.last)
            problem = _Labels(self, pairs)
            if p.loss == "squared":
                h = problem.solve()
                f = run_alone(problem.value(h))
            else:
                h[problem.n_pairs == 0] = 0
                h, f, _ = run_alone(trust_region(problem, h, p.newton, p.cg, p.cg_tol))
        self.out.write((0, p.rank), self.first, h.astype(np.float32))
        return {"units": loss_units(f), "bytes_read": pairs.bytes_read}


class _AllOfLabels:
    """The pairs of all rows and labels [first, last), by row blocks."""

    def __init__(self, dataset: Dataset, first: int, last: int) -> None:
        self._Y, self._first, self._last = dataset.Y_rows(), first, last

    @property
    def bytes_read(self) -> int:
        """So far."""
        return self._Y.bytes_read

    def __call__(self, first: int, last: int) -> AllPairs:
        return AllPairs(dense_labels(self._Y.block(first, last), self._first, self._last))


class _GivenOfLabels:
    """The given pairs of labels [first, last), by row blocks; all of them are in memory."""

    def __init__(self, dataset: Dataset, first: int, last: int) -> None:
        mask, Y = dataset.observed_columns(), dataset.Y_columns()
        pairs = given(mask.block(first, last), Y.block(first, last))
        self.bytes_read = mask.bytes_read + Y.bytes_read
        shape = dataset.n_samples, last - first
        columns = scipy.sparse.csc_matrix((pairs.true.view(np.int8), pairs.labels, pairs.indptr), shape=shape)
        self._rows = columns.tocsr()

    def __call__(self, first: int, last: int) -> GivenPairs:
        ends = self._rows.indptr[first : last + 1].astype(np.int64)
        mine = slice(int(ends[0]), int(ends[-1]))
        return GivenPairs(ends - ends[0], self._rows.indices[mine], self._rows.data[mine].view(np.bool_))


class _Labels:
    """The problems of a range of labels, for `trust_region`; `solve` for the squared loss."""

    def __init__(self, job: LabelsJob, pairs: _AllOfLabels | _GivenOfLabels) -> None:
        self._job, self._pairs, self._n = job, pairs, job.last - job.first
        self._at = np.zeros((self._n, job.parameters.rank), np.float32)
        self.n_pairs = np.zeros(self._n)
        for p, _, held_out in self._sweep():
            self.n_pairs += p.label_sums(self._counted(p, np.ones(p.true.shape), held_out), self._n)

    def _sweep(self) -> Iterator[tuple[AllPairs | GivenPairs, Array, Any]]:
        n = self._job.scores.n
        for first in range(0, n, BLOCK):
            last = min(first + BLOCK, n)
            yield (
                self._pairs(first, last),
                self._job.scores.read(first, last),
                self._job.learned.kept_out(first, last - first),
            )

    @staticmethod
    def _counted(pairs: AllPairs | GivenPairs, values: Array, held_out: Any) -> Array:
        if held_out is not None:
            values[pairs.rows_left(held_out)] = 0
        return values

    def value(self, h: Array) -> Generator[Any, Any, NDArray[np.float64]]:
        """The objective of each label."""
        loss, low = self._job.parameters.loss, h.astype(np.float32)
        total = 0.5 * self._job.lam * np.square(h).sum(axis=1)
        for pairs, a, held_out in self._sweep():
            values = loss_values(loss, pairs.true, pairs.dots(a, low).astype(np.float64))
            total += pairs.label_sums(self._counted(pairs, values, held_out), self._n)
        return np.asarray(total)
        yield  # a generator, as the protocol has it, that waits for nobody

    def gradient(self, h: Array) -> Generator[Any, Any, Array]:
        """Its gradient, (labels x r)."""
        self._at = h.astype(np.float32)
        total = self._job.lam * h
        for pairs, a, held_out in self._sweep():
            slopes = loss_slopes(self._job.parameters.loss, pairs.true, pairs.dots(a, self._at))
            pairs.add_by_label(self._counted(pairs, slopes, held_out), a, total)
        return np.asarray(total)
        yield

    def hessian(self, s: Array) -> Generator[Any, Any, Array]:
        """The products with the Hessians."""
        total, low = self._job.lam * s, s.astype(np.float32)
        for pairs, a, held_out in self._sweep():
            weights = loss_curvatures(self._job.parameters.loss, pairs.true, pairs.dots(a, self._at))
            weights *= pairs.dots(a, low)
            pairs.add_by_label(self._counted(pairs, weights, held_out), a, total)
        return np.asarray(total)
        yield

    def solve(self) -> Array:
        """h_k = (sum_i a_i a_i^T + lam I)^-1 sum_i y_ik a_i over the pairs of label k, some labels at a time."""
        r, lam = self._at.shape[1], self._job.lam
        out = np.zeros(self._at.shape)
        step = max(1, GRAMS // (r * r))
        for low in range(0, self._n, step):
            high = min(low + step, self._n)
            grams, right = np.zeros((high - low, r, r)), np.zeros((high - low, r))
            for pairs, a, held_out in self._sweep():
                self._add_grams(pairs, a.astype(np.float64), held_out, low, grams, right)
            for k in range(low, high):
                if self.n_pairs[k]:
                    out[k] = solve_gram(grams[k - low], right[k - low][None], lam)[0]
        return out

    @staticmethod
    def _add_grams(pairs: AllPairs | GivenPairs, a: Array, held_out: Any, low: int, grams: Array, right: Array) -> None:
        if not isinstance(pairs, GivenPairs):
            raise TypeError("all pairs of the squared loss are solved by lowrank.steps")
        rows = np.repeat(np.arange(len(a)), np.diff(pairs.indptr))
        kept = (pairs.labels >= low) & (pairs.labels < low + len(grams))
        if held_out is not None:
            kept &= ~held_out[rows]
        order = np.argsort(pairs.labels[kept], kind="stable")
        rows, labels, true = rows[kept][order], pairs.labels[kept][order] - low, pairs.true[kept][order]
        ends = np.searchsorted(labels, np.arange(len(grams) + 1))
        for k in np.flatnonzero(np.diff(ends)).tolist():
            mine = slice(int(ends[k]), int(ends[k + 1]))
            lines = a[rows[mine]]
            grams[k] += lines.T @ lines
            right[k] += lines[true[mine]].sum(axis=0)


@dataclass(frozen=True)
class AlternationJob:
    """Store the factors of an alternation together; the receipt has its sums.

    losses: with lam/2 ||H||^2, after the H step; h_square: ||H||^2 before it; solved: the receipt of the W step.
    """

    learned: Learned
    name: str
    lam: float
    w: Dense
    h: Panels
    scores: Panels
    losses: float
    h_square: float
    solved: Receipt
    out: str
    criterion: str

    @property
    def key(self) -> str:
        """The alternation."""
        return self.name

    def run(self) -> Receipt:
        """Write."""
        with one_blas_thread():
            held_out = held_out_metrics(self.learned, self.scores, self.h, self.criterion) if self.learned.share else {}
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.h}, None)
        return {
            **receipt, **held_out, "products": self.solved["products"],
            "objective_w": self.solved["objective_w"] + 0.5 * self.lam * self.h_square,
            "objective": self.losses + 0.5 * self.lam * receipt["w_square"],
        }  # fmt: skip
