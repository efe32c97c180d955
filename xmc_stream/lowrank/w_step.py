"""The W step of low-rank models over pairs that are given, or of any loss: trust-region Newton on all of W.

Where products do not come down to r x r matrices, a product with the Hessian takes three phases: B = X S by columns,
V = (U * (B H^T)) H by rows, X^T V by columns. No sum is cut where another plan would cut it elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import Begun, ColumnRange, Dense, Factor, Panels, copy_factors, take
from xmc_stream.factors.products import BLOCK, Learned, ProjectJob
from xmc_stream.factors.rowblocks import ROW_BYTES, Array, Holding, Parts, row_blocks
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.solver import (
    LOSS_UNIT,
    AllPairs,
    Pairs,
    counted,
    dense_labels,
    given_pairs,
    loss_curvatures,
    loss_slopes,
    loss_values,
    positives_of,
    trust_region,
)
from xmc_stream.runtime.job import Job, Notes, Phase, Receipt, run_here
from xmc_stream.store.matrix import SparseMatrix, stream
from xmc_stream.system.blas import one_blas_thread


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

    def _weights(self, pairs: Pairs, h: Array, a: Array, b: Array | None) -> tuple[Array, int]:
        """D, and the losses' sum in units."""
        z = pairs.dots(a, h)
        if b is not None:
            return counted(pairs, loss_curvatures(self.loss, pairs.true, z) * pairs.dots(b, h)), 0
        values = counted(pairs, loss_values(self.loss, pairs.true, z.astype(np.float64)))
        return counted(pairs, loss_slopes(self.loss, pairs.true, z)), pairs.loss_units(values)

    def _lines(self, first: int, last: int) -> tuple[Array, Array | None]:
        """Lines of A, and of B."""
        return self.scores.read(first, last), None if self.images is None else self.images.read(first, last)

    def _given(self, mask: SparseMatrix, Y: SparseMatrix) -> int:
        units, h = 0, self.labels.read(0, self.labels.n)
        for known, y in stream((mask, Y), ROW_BYTES, self.first, self.last, BLOCK):
            held_out = self.learned.kept_out(known.start, known.n)
            pairs = given_pairs(known.indptr, known.indices, positives_of(known, y), held_out)
            weights, more = self._weights(pairs, h, *self._lines(known.start, known.start + known.n))
            units += more
            self.out.write((0, h.shape[1]), known.start, pairs.by_row(weights, h))
        return units

    def _all(self, Y: SparseMatrix) -> int:
        units, n_labels = 0, self.labels.n
        for first in range(self.first, self.last, BLOCK):
            last = min(first + BLOCK, self.last)
            y, lines, held_out = (
                Y.block(first, last),
                self._lines(first, last),
                self.learned.kept_out(first, last - first),
            )
            total = np.zeros((y.n, self.labels.columns), np.float32)
            for low in range(0, n_labels, BLOCK):
                high = min(low + BLOCK, n_labels)
                pairs, h = AllPairs(dense_labels(y, low, high), held_out), self.labels.read(low, high)
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
        total, width = take(self.source, self.cols), self.cols[1] - self.cols[0]
        total *= np.float32(self.lam)
        for x, _ in row_blocks(X, None, self.parts, self.holding):
            lines = aligned_zeros((x.n, total.shape[1]))
            lines[:, :width] = self.rows.read(x.start, x.start + x.n)[:, self.cols[0] : self.cols[1]]
            self.learned.add_transposed(x, lines, total)
        self.out.write(self.cols, 0, total[:, :width])
        return {"passes": width / self.out.columns, "bytes_read": X.bytes_read}


_READ = ("passes", "bytes_read")  # sums over the jobs of a step


@dataclass
class WStep:
    """The W step over pairs: trust-region Newton, or with the squared loss conjugate gradients. See `solver.Problem`.

    Its vectors (D x r) are in the memory of the process that runs the loop; products are phases of jobs, with columns in
    `col_ranges` and rows in `rows`. before: the W to begin from, None for 0. scratch: a folder. parts, holding: see
    `row_blocks`. begun: a pack for what it has come to. phase: what is said of all phases.
    """

    learned: Learned
    name: str
    parameters: LEMLParameters
    lam: float
    col_ranges: tuple[ColumnRange, ...]
    rows: tuple[tuple[int, int], ...]
    labels: Factor
    before: Dense | None
    scratch: str
    parts: Parts
    holding: Holding
    begun: str
    phase: Phase

    def __post_init__(self) -> None:
        self._shape = self.learned.n_inputs(), self.parameters.rank
        self._sums: Receipt = dict.fromkeys(_READ, 0)
        self._products = 0  # with Hessians, in this session
        self._at, self._asked = "a-1", "a-2"  # A of `hessian`, and of what `value` was asked last

    def loop(self) -> Generator[Phase, list[Receipt], Receipt]:
        """Phases of jobs; leaves W in the panels "w"."""
        p, begun = self.parameters, Begun(Path(self.begun))
        w = np.zeros(self._shape, np.float32) if self.before is None else take(self.before, (0, p.rank))[:, : p.rank]
        found, f, products = yield from trust_region(
            self, w.reshape(1, -1), p.newton, p.cg, p.cg_tol, p.loss == "squared", begun
        )
        self._write("w", found)
        return {"objective_w": float(f[0]), "products": products, **self._sums}

    def panels(self, name: str) -> Panels:
        """Scratch for a D x r vector (w, s, g), or N x r (a-1, a-2, b, v)."""
        by_row = name in ("a-1", "a-2", "b", "v")
        col_ranges = ((0, self.parameters.rank),) if name == "v" else self.col_ranges
        return Panels(f"{self.scratch}/{name}", self.rows[-1][1] if by_row else self._shape[0], col_ranges)

    def value(self, w: Array) -> Generator[Phase, list[Receipt], NDArray[np.float64]]:
        """The objective in W, with H held; the part of H left out."""
        self._write("w", w)
        yield from self._project("w", self._asked)
        receipts = yield from self._mix(self._asked, None)
        losses = sum(receipt["units"] for receipt in receipts) * LOSS_UNIT
        flat = w.reshape(self._shape)
        square = sum(float(np.square(flat[i : i + BLOCK], dtype=np.float64).sum()) for i in range(0, len(flat), BLOCK))
        return np.array([losses + 0.5 * self.lam * square])

    def gradient(self, w: Array) -> Generator[Phase, list[Receipt], Array]:
        """Where `value` was asked last, whose A becomes that of `hessian`."""
        self._at, self._asked = self._asked, self._at
        return (yield from self._backward("w"))

    def hessian(self, s: Array) -> Generator[Phase, list[Receipt], Array]:
        """Of the losses at A, and lam."""
        self._write("s", s)
        yield from self._project("s", "b")
        yield from self._mix(self._at, "b")
        image = yield from self._backward("s")
        self._products += 1
        return image

    def _do(self, jobs: Sequence[Job]) -> Generator[Phase, list[Receipt], list[Receipt]]:
        most = self.parameters.newton * self.parameters.cg
        span = self.phase.part(*(min(1.0, n / most) for n in (self._products, self._products + 1)))
        receipts = yield replace(self.phase, jobs=jobs, span=span, kept=False)
        for name in _READ:
            self._sums[name] += sum(receipt.get(name, 0) for receipt in receipts)
        return receipts

    def _write(self, name: str, vector: Array) -> None:
        """Leave a vector where jobs read it."""
        matrix = vector.reshape(self._shape)
        for cols in self.col_ranges:
            self.panels(name).write(cols, 0, matrix[:, cols[0] : cols[1]])

    def _project(self, source: str, out: str) -> Generator[Phase, list[Receipt], list[Receipt]]:
        name, s, a = f"{self.name}/{out}", self.panels(source), self.panels(out)
        return self._do(
            [ProjectJob(self.learned, name, cols, s, a, self.parts, self.holding) for cols in self.col_ranges]
        )

    def _mix(self, scores: str, images: str | None) -> Generator[Phase, list[Receipt], list[Receipt]]:
        name, p, a, v = f"{self.name}/v", self.parameters, self.panels(scores), self.panels("v")
        b = None if images is None else self.panels(images)
        jobs = [
            MixJob(self.learned, name, p.loss, p.observed, first, last, self.labels, a, b, v)
            for first, last in self.rows
        ]
        return self._do(jobs)

    def _backward(self, source: str) -> Generator[Phase, list[Receipt], Array]:
        name, v, s, g = f"{self.name}/g", self.panels("v"), self.panels(source), self.panels("g")
        yield from self._do(
            [
                BackwardJob(self.learned, name, cols, self.lam, v, s, g, self.parts, self.holding)
                for cols in self.col_ranges
            ]
        )
        out = np.empty(self._shape, np.float32)
        for cols in g.col_ranges:
            out[:, cols[0] : cols[1]] = take(g, cols)[:, : cols[1] - cols[0]]
        return out.reshape(1, -1)


@dataclass(frozen=True)
class WStepJob:
    """Store the W of a step, and solve for it before where it is too small to be shared out.

    receipt: of a step whose phases were shared out; what they read is counted with their jobs.
    """

    step: WStep
    out: str
    receipt: Receipt | None = None

    @property
    def key(self) -> str:
        """The alternation."""
        return self.step.name

    def run(self) -> Receipt:
        """Solve and store W."""
        receipt = self.receipt or run_here(replace(self.step).loop(), Notes())  # a run has a state of its own
        copy_factors(Path(self.out), {"W": self.step.panels("w")}, (0, self.step.parameters.rank))
        return {name: receipt[name] for name in receipt if self.receipt is None or name not in _READ}
