"""The H step of low-rank models, with A = X W fixed, and storing both factors behind it.

With the squared loss and full labels one system of equations has all labels on its right side (`FactorsJob`). Over pairs that
are given, or of any other loss, labels are solved for one by one (`LabelsJob`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmc_stream.factors.factors import LINES, Begun, Dense, Factor, Panels, SideBySide
from xmc_stream.factors.products import BLOCK, Learned, held_out_metrics
from xmc_stream.factors.rowblocks import Array
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.run import read_sum, rotation_of, write_factors
from xmc_stream.lowrank.solver import (
    AllPairs,
    GivenPairs,
    Pairs,
    counted,
    dense_labels,
    given_pairs,
    loss_curvatures,
    loss_slopes,
    loss_units,
    loss_values,
    positives_of,
    run_alone,
    solve_gram,
    trust_region,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.blas import one_blas_thread

_GRAMS = 1 << 22  # entries of r x r matrices of labels that are solved for at a time
# of rows [first, last), of which some may be held out
PairsOf = Callable[[int, int, NDArray[np.bool_] | None], Pairs]


@dataclass(frozen=True)
class FactorsJob:
    """The H step of the squared loss and full labels: H = Y^T A (A^T A + lam I)^-1; then W and H, rotated for the next W step.

    grams: files of parts of A^T A; sums: Y^T A; positives: of the rows learned from; values: squared norms of the
    columns of the H before; w: what the W step found, in so many steps. The receipt has the objective before and after.
    """

    learned: Learned
    name: str
    lam: float
    grams: tuple[str, ...]
    sums: Panels
    scores: Panels
    positives: int
    before: Factor
    values: tuple[float, ...]
    w: SideBySide
    solved: Panels
    out: str
    steps: int
    criterion: str

    @property
    def key(self) -> str:
        """The alternation."""
        return self.name

    def run(self) -> Receipt:
        """Solve and write."""
        with one_blas_thread():
            gram = np.zeros((self.scores.columns,) * 2)
            for file in self.grams:
                gram += read_sum(file, len(gram))
            square, met, met_before = np.zeros_like(gram), 0.0, 0.0
            for first in range(0, self.sums.n, LINES):
                last = min(first + LINES, self.sums.n)
                sums = self.sums.read(first, last).astype(np.float64)
                met_before += float(np.vdot(sums, self.before.read(first, last)))
                h = solve_gram(gram, sums, self.lam).astype(np.float32)
                met += float(np.vdot(sums, h))
                self.solved.write((0, h.shape[1]), first, h)
                square += h.T.astype(np.float64) @ h
            held_out = held_out_metrics(self.learned, self.scores, self.solved, self.criterion)
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.solved}, rotation_of(square))
        w_square = receipt["w_square"]
        fit_before = 0.5 * (self.positives - 2 * met_before + float(np.diag(gram) @ np.array(self.values)))
        fit = 0.5 * (self.positives - 2 * met + float(np.vdot(gram, square)))
        return {
            **receipt, **held_out, "products": self.steps,
            "objective_w": fit_before + 0.5 * self.lam * (w_square + sum(self.values)),
            "objective": fit + 0.5 * self.lam * (w_square + float(np.trace(square))),
        }  # fmt: skip


@dataclass(frozen=True)
class LabelsJob:
    """The H step over pairs, of labels [first, last): with A fixed, each h_k is a problem of r variables by itself.

    Squared loss: solved; else trust-region Newton. A label without a pair gets 0. Writes its lines of H into a pack of the
    folder; where the Newton method is, into another one.
    """

    learned: Learned
    name: str
    parameters: LEMLParameters
    lam: float
    first: int
    last: int
    before: Factor
    scores: Panels
    folder: str

    @property
    def key(self) -> str:
        """What for, and labels."""
        return f"{self.name}/{self._range}"

    @property
    def _range(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def found(self) -> Factor:
        """Its lines of H."""
        return Factor(f"{self.folder}/{self._range}/H", self.parameters.rank, self.last - self.first)

    def run(self) -> Receipt:
        """Solve; the receipt has the losses' sum and lam/2 ||H||^2, in units."""
        p, dataset, labels = self.parameters, self.learned.dataset(), (self.first, self.last)
        given = p.observed == "given"
        Y, mask = dataset.Y_columns() if given else dataset.Y_rows(), dataset.observed_columns() if given else None
        h = self.before.read(self.first, self.last).astype(np.float64)
        with one_blas_thread():
            if mask is None:
                pairs_of: PairsOf = partial(_all_of_rows, Y, labels)
            else:
                pairs_of = partial(_given_of_rows, _rows_of(mask, Y, labels))
            problem = _Labels(self, pairs_of)
            if p.loss == "squared":
                h = problem.solve()
                f = run_alone(problem.value(h))
            else:
                h[problem.n_pairs == 0] = 0
                begun = Begun(Path(f"{self.folder}/{self._range}.kept"))
                h, f, _ = run_alone(trust_region(problem, h, p.newton, p.cg, p.cg_tol, begun=begun))
        with new_pack(Path(self.folder) / self._range) as pack:
            pack.write("H", h.astype(np.float32).ravel())
        return {"units": loss_units(f), "bytes_read": Y.bytes_read + (mask.bytes_read if mask else 0)}


def _all_of_rows(
    Y: SparseMatrix, labels: tuple[int, int], first: int, last: int, held_out: NDArray[np.bool_] | None
) -> AllPairs:
    """The pairs of rows [first, last) and a range of labels."""
    return AllPairs(dense_labels(Y.block(first, last), *labels), held_out)


def _rows_of(mask: SparseMatrix, Y: SparseMatrix, labels: tuple[int, int]) -> scipy.sparse.csr_matrix:
    """The given pairs of a range of labels, all in memory: which of them are positives. mask, Y: by columns."""
    known = mask.block(*labels)
    pattern = positives_of(known, Y.block(*labels)).view(np.int8), known.indices, known.indptr
    return scipy.sparse.csc_matrix(pattern, (mask.shape[0], known.n)).tocsr()


def _given_of_rows(
    rows: scipy.sparse.csr_matrix, first: int, last: int, held_out: NDArray[np.bool_] | None
) -> GivenPairs:
    """Those of rows [first, last)."""
    ends = rows.indptr[first : last + 1].astype(np.int64)
    mine = slice(int(ends[0]), int(ends[-1]))
    return given_pairs(ends - ends[0], rows.indices[mine], rows.data[mine].view(np.bool_), held_out)


class _Labels:
    """The problems of a range of labels, for `trust_region`; `solve` for the squared loss."""

    def __init__(self, job: LabelsJob, pairs_of: PairsOf) -> None:
        self._job, self._pairs_of, self._n = job, pairs_of, job.last - job.first
        self._at = np.zeros((self._n, job.parameters.rank), np.float32)
        self.n_pairs = np.zeros(self._n)
        for some, _ in self._sweep():
            self.n_pairs += some.label_sums(counted(some, np.ones(some.true.shape)), self._n)

    def _sweep(self) -> Iterator[tuple[Pairs, Array]]:
        """Pairs of row blocks, and their lines of A."""
        n = self._job.scores.n
        for first in range(0, n, BLOCK):
            last = min(first + BLOCK, n)
            held_out = self._job.learned.kept_out(first, last - first)
            yield self._pairs_of(first, last, held_out), self._job.scores.read(first, last)

    def value(self, h: Array) -> Generator[Any, Any, NDArray[np.float64]]:
        """The objective of each label."""
        loss, low = self._job.parameters.loss, h.astype(np.float32)
        total = 0.5 * self._job.lam * np.square(h).sum(axis=1)
        for pairs, a in self._sweep():
            values = loss_values(loss, pairs.true, pairs.dots(a, low).astype(np.float64))
            total += pairs.label_sums(counted(pairs, values), self._n)
        return np.asarray(total)
        yield  # a generator, as the protocol has it, that waits for nobody

    def gradient(self, h: Array) -> Generator[Any, Any, Array]:
        """Its gradient, (labels x r)."""
        self._at = h.astype(np.float32)
        total = self._job.lam * h
        for pairs, a in self._sweep():
            slopes = loss_slopes(self._job.parameters.loss, pairs.true, pairs.dots(a, self._at))
            pairs.add_by_label(counted(pairs, slopes), a, total)
        return np.asarray(total)
        yield

    def hessian(self, s: Array) -> Generator[Any, Any, Array]:
        """The products with the Hessians."""
        total, low = self._job.lam * s, s.astype(np.float32)
        for pairs, a in self._sweep():
            weights = loss_curvatures(self._job.parameters.loss, pairs.true, pairs.dots(a, self._at))
            weights *= pairs.dots(a, low)
            pairs.add_by_label(counted(pairs, weights), a, total)
        return np.asarray(total)
        yield

    def solve(self) -> Array:
        """h_k = (sum_i a_i a_i^T + lam I)^-1 sum_i y_ik a_i over the pairs of label k, some labels at a time."""
        r, lam = self._at.shape[1], self._job.lam
        out = np.zeros(self._at.shape)
        step = max(1, _GRAMS // (r * r))
        for low in range(0, self._n, step):
            high = min(low + step, self._n)
            grams, right = np.zeros((high - low, r, r)), np.zeros((high - low, r))
            for pairs, a in self._sweep():
                self._add_grams(pairs, a.astype(np.float64), low, grams, right)
            for k in range(low, high):
                if self.n_pairs[k]:
                    out[k] = solve_gram(grams[k - low], right[k - low][None], lam)[0]
        return out

    @staticmethod
    def _add_grams(pairs: Any, a: Array, low: int, grams: Array, right: Array) -> None:
        rows = np.repeat(np.arange(len(a)), np.diff(pairs.indptr))
        kept = (pairs.labels >= low) & (pairs.labels < low + len(grams))
        if pairs.held_out is not None:
            kept &= ~pairs.held_out
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
    h: Dense
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
            held_out = held_out_metrics(self.learned, self.scores, self.h, self.criterion)
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.h}, None)
        return {
            **receipt, **held_out, "products": self.solved["products"],
            "objective_w": self.solved["objective_w"] + 0.5 * self.lam * self.h_square,
            "objective": self.losses + 0.5 * self.lam * receipt["w_square"],
        }  # fmt: skip
