"""Jobs of low-rank models over all pairs: products of X and Y with a run of a factor's columns, and systems of its rank.

A job has a run of columns and all rows, so that every sum is taken row after row by one thread: it comes out the same for
any number of threads or processes and any limit, there are no partial sums to be added, and a factor is in memory once, not
once for each thread. The columns of a job are as many as the limit lets them be; X is read once for each run of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.jobs.blas import one_blas_thread
from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import MIB
from xmc_stream.jobs.rows import HELD_OUT
from xmc_stream.kernels.dual import held_out
from xmc_stream.kernels.figures import sort_rows
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.lowrank import add_lines, add_transposed, fold_counts, fold_top_k, multiply, take_positives
from xmc_stream.metrics import auc_units
from xmc_stream.solvers.leml import column_dots, first_labels, solve_columns, solve_gram
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.factors import Beside, Cut, Dense, Factor, Panels, new_factors
from xmc_stream.store.matrix import Block, SparseMatrix, stream
from xmc_stream.store.model import UNIT

# rows, or classes, of a product of dense matrices, of which all sides are long, or two are r: fixed, as its rounding may
# depend on its shape
BLOCK, LINES = 1024, 4096
ROW_BYTES = 4 * MIB  # of X in a row block, and of Y
ROW_LINES = 2048  # rows of a row block, at most
_HELD_SCORES = 1 << 24  # of rows held out, about, at most: half a second's, at rank 100
_LEAST_HELD = 1000  # rows, about, whatever that takes
PLACES = 5  # of the ranking of a held-out row that are looked at

Array = NDArray[Any]


def blocks(*matrices: SparseMatrix) -> Iterator[tuple[Block, ...]]:
    """All rows of matrices, by row blocks."""
    return stream(matrices, ROW_BYTES, 0, matrices[0].n_lines, ROW_LINES)


@dataclass(frozen=True)
class Learned:
    """What is learned from; the same for all jobs of a run. share: of the rows, those that are held out; bias: whether rows

    have one more feature, which is 1.
    """

    path: str
    seed: int
    share: float
    bias: bool

    @classmethod
    def of(cls, dataset: Dataset, held: float, seed: int, bias: bool) -> Learned:
        """held: the share asked for; fewer rows are held out where scoring all labels of these would take long."""
        most = min(HELD_OUT, max(_LEAST_HELD, _HELD_SCORES // max(dataset.n_labels, 1)))
        return cls(str(dataset.path), seed, min(held, most / max(dataset.n_samples, 1)), bias)

    def dataset(self) -> Dataset:
        """The dataset, opened by this job."""
        return Dataset(self.path)

    def n_inputs(self) -> int:
        """Rows of W: features, and the bias."""
        return self.dataset().n_features + self.bias

    def times(self, x: Block, dense: Array, room: Array | None = None) -> Array:
        """A block of X, with the bias, times a dense matrix."""
        out = times(x, dense, room)
        if self.bias:
            out += dense[-1]
        return out

    def add_transposed(self, x: Block, lines: Array, out: Array) -> None:
        """out += the transpose of a block of X, with the bias, times a dense matrix."""
        add_transposed(*csr(x), lines, out)
        if self.bias:
            add_lines(lines, out[-1])

    def kept_out(self, first: int, n: int) -> NDArray[np.bool_] | None:
        """Which of n rows from `first` on are held out; None where no rows are."""
        if not self.share:
            return None
        out = np.empty(n, np.bool_)
        held_out(np.arange(first, first + n), self.seed, self.share, out)
        return out


def csr(block: Block) -> tuple[Array, Array, Array]:
    """indptr, indices and values of a block; of ones where it has none."""
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return block.indptr, block.indices, data


def times(block: Block, dense: Array, room: Array | None = None) -> Array:
    """A block's rows times a dense matrix, in the first lines of `room` if there is one."""
    out = np.empty((block.n, dense.shape[1]), dense.dtype) if room is None else room[: block.n]
    multiply(*csr(block), dense, out)
    return out


def x_bytes(dataset: Dataset) -> int:
    """Of X in memory."""
    X = dataset.X_rows()
    return int(X.nnz * X.entry_bytes + 8 * (X.n_lines + 1))


@dataclass(frozen=True)
class StartJob:
    """The H that a run begins from, rotated; W is 0."""

    learned: Learned
    n_labels: int
    rank: int
    rotate: bool
    scratch: Panels
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "start"

    def run(self) -> Receipt:
        """Draw and write."""
        with one_blas_thread():
            square = np.zeros((self.rank, self.rank))
            for first in range(0, self.n_labels, UNIT):
                drawn = first_labels(first, min(first + UNIT, self.n_labels), self.rank, self.learned.seed)
                self.scratch.write((0, self.rank), first, drawn)
                square += drawn.T.astype(np.float64) @ drawn
            rotation = rotation_of(square) if self.rotate else None
            return write_factors(Path(self.out), {"H": self.scratch}, rotation)


def rotation_of(square: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rotation Q (r x r) that makes Q^T square Q diagonal, largest first."""
    _, vectors = np.linalg.eigh(square)
    return np.ascontiguousarray(vectors[:, ::-1])


def write_factors(path: Path, sources: dict[str, Dense], rotation: NDArray[np.float64] | None) -> Receipt:
    """Store W and H, each times a rotation if there is one; the receipt has the squared norms of H's columns, and of W.

    A rotation changes neither W H^T nor the norms of W and H.
    """
    squares: dict[str, Array] = {}
    columns = {name: source.columns if rotation is None else rotation.shape[1] for name, source in sources.items()}
    with new_factors(path, columns) as writers:
        for name, source in sources.items():
            squares[name] = np.zeros(columns[name])
            for first in range(0, source.n, LINES):
                lines = source.read(first, min(first + LINES, source.n))
                if rotation is not None:
                    lines = (lines @ rotation).astype(np.float32)
                squares[name] += column_dots(lines, lines)
                writers[name].append(lines.ravel())
    return {"values": squares["H"].tolist(), "w_square": math.fsum(squares.get("W", ()))}


@dataclass(frozen=True)
class RidgeJob:
    """The W step of the squared loss and full labels, of a run of columns.

    Where H^T H is diagonal, with values v_c, column c of W is by itself a ridge regression,
        (v_c X^T X + lam I) w_c = X^T Y h_c,
    which conjugate gradients solve. before: the W to begin from, None for 0. kept: bytes of X up to which it is read once
    and not in each pass. Writes its columns of W.
    """

    learned: Learned
    name: str
    lam: float
    cg: int
    cg_tol: float
    cut: Cut
    values: tuple[float, ...]
    labels: Factor
    before: Dense | None
    out: str
    kept: int

    @property
    def key(self) -> str:
        """Alternation and columns."""
        return f"{self.name}/{self.cut[0]}-{self.cut[1]}"

    def run(self) -> Receipt:
        """Solve; the receipt has steps and passes over X."""
        dataset = self.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        h, width = self.labels.take(self.cut), self.cut[1] - self.cut[0]
        values = np.zeros(h.shape[1], np.float32)
        values[:width] = self.values
        shape = self.learned.n_inputs(), h.shape[1]
        w = np.zeros(shape, np.float32) if self.before is None else self.before.take(self.cut)
        residual = aligned_zeros(shape)
        np.multiply(w, np.float32(-self.lam), out=residual)
        for x, y in blocks(X, Y):
            targets = times(y, h)
            if self.before is not None:
                targets -= self.learned.times(x, w) * values
            self._leave_out(x, targets)
            self.learned.add_transposed(x, targets, residual)
        image, room = aligned_zeros(shape), aligned_zeros((ROW_LINES, shape[1]))
        passes = 1
        in_memory = None
        if x_bytes(dataset) <= self.kept:
            cuts = range(0, X.n_lines, ROW_LINES)
            in_memory = [(X.block(first, min(first + ROW_LINES, X.n_lines)),) for first in cuts]

        def product(direction: Array) -> Array:
            nonlocal passes
            np.multiply(direction, np.float32(self.lam), out=image)
            for (x,) in in_memory or blocks(X):
                scores = self.learned.times(x, direction, room)
                scores *= values
                self._leave_out(x, scores)
                self.learned.add_transposed(x, scores, image)
            passes += 1
            return image

        steps = solve_columns(w, residual, product, self.cg, self.cg_tol)
        with new_factors(Path(self.out), {"W": width}) as writers:
            for first in range(0, len(w), BLOCK):
                writers["W"].append(w[first : first + BLOCK, :width].ravel())
        share = width / self.labels.columns
        return {"steps": steps, "passes": passes * share, "bytes_read": X.bytes_read + Y.bytes_read}

    def _leave_out(self, x: Block, lines: Array) -> None:
        held = self.learned.kept_out(x.start, x.n)
        if held is not None:
            lines[held] = 0


@dataclass(frozen=True)
class ProjectJob:
    """A = X W, of a run of columns, for all rows; sums: also Y^T A over the rows that are learned from."""

    learned: Learned
    name: str
    cut: Cut
    source: Dense
    out: Panels
    sums: Panels | None = None

    @property
    def key(self) -> str:
        """What for, and columns."""
        return f"{self.name}/{self.cut[0]}-{self.cut[1]}"

    def run(self) -> Receipt:
        """Write; the receipt counts the positives of rows that are learned from."""
        dataset = self.learned.dataset()
        X, Y = dataset.X_rows(), dataset.Y_rows()
        w, width, positives = self.source.take(self.cut), self.cut[1] - self.cut[0], 0
        total = aligned_zeros((dataset.n_labels if self.sums else 0, w.shape[1]))
        for x, *ys in blocks(X, *([Y] if self.sums else [])):
            scores = self.learned.times(x, w)
            self.out.write(self.cut, x.start, scores[:, :width])
            held = self.learned.kept_out(x.start, x.n)
            if held is not None:
                scores[held] = 0
            for y in ys:
                add_transposed(*csr(y), scores, total)
                lengths = np.diff(y.indptr)
                positives += int(lengths.sum() if held is None else lengths[~held].sum())
        if self.sums is not None:
            for first in range(0, len(total), BLOCK):
                self.sums.write(self.cut, first, total[first : first + BLOCK, :width])
        share = width / self.out.columns
        return {"positives": positives, "passes": share, "bytes_read": X.bytes_read + Y.bytes_read}


@dataclass(frozen=True)
class GramJob:
    """A^T A over rows [first, last), which the number of rows decides, in float64."""

    learned: Learned
    name: str
    first: int
    last: int
    scores: Panels
    out: str

    @property
    def key(self) -> str:
        """What for, and rows."""
        return f"{self.name}/{self.first}"

    def run(self) -> Receipt:
        """Write the sum."""
        gram = np.zeros((self.scores.columns,) * 2)
        with one_blas_thread():
            for first in range(self.first, self.last, BLOCK):
                lines = self.scores.read(first, min(first + BLOCK, self.last)).astype(np.float64)
                held = self.learned.kept_out(first, len(lines))
                if held is not None:
                    lines[held] = 0
                gram += lines.T @ lines
        np.save(self.out, gram)
        return {}


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
    w: Beside
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
                gram += np.load(file)
            square, met, met_before, h_square = np.zeros_like(gram), 0.0, 0.0, 0.0
            for first in range(0, self.sums.n, LINES):
                last = min(first + LINES, self.sums.n)
                sums = self.sums.read(first, last).astype(np.float64)
                met_before += float(np.vdot(sums, self.before.read(first, last)))
                h = solve_gram(gram, sums, self.lam).astype(np.float32)
                met += float(np.vdot(sums, h))
                self.solved.write((0, h.shape[1]), first, h)
                square += h.T.astype(np.float64) @ h
            h_square = float(np.trace(square))
            held = held_figures(self.learned, self.scores, self.solved, self.criterion) if self.learned.share else {}
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.solved}, rotation_of(square))
        w_square = receipt["w_square"]
        fit_before = 0.5 * (self.positives - 2 * met_before + float(np.diag(gram) @ np.array(self.values)))
        fit = 0.5 * (self.positives - 2 * met + float(np.vdot(gram, square)))
        return {
            **receipt, **held, "products": self.steps,
            "objective_w": fit_before + 0.5 * self.lam * (w_square + sum(self.values)),
            "objective": fit + 0.5 * self.lam * (w_square + h_square),
        }  # fmt: skip


@dataclass(frozen=True)
class ModelJob:
    """Copy the factors of an alternation into the model."""

    w: Factor
    h: Factor
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "finalise"

    def run(self) -> Receipt:
        """Copy."""
        with new_factors(Path(self.out), {"W": self.w.columns, "H": self.h.columns}) as writers:
            for name, source in (("W", self.w), ("H", self.h)):
                for first in range(0, source.n, BLOCK):
                    writers[name].append(source.read(first, min(first + BLOCK, source.n)).ravel())
        return {}


def held_figures(learned: Learned, scores: Panels, labels: Dense, criterion: str) -> Receipt:
    """Of the rows held out: how many, hits among the first 1, ..., PLACES predictions, and if asked the AUC (`auc_units`)."""
    Y, hits, n, auc = learned.dataset().Y_rows(), np.zeros(PLACES, np.int64), 0, 0
    for first in range(0, scores.n, BLOCK):
        last = min(first + BLOCK, scores.n)
        held = learned.kept_out(first, last - first)
        if held is None or not held.any():
            continue
        lines, y = scores.read(first, last)[held], Y.gather(first + np.flatnonzero(held))
        best, at = np.full((len(lines), PLACES), -1, np.int64), np.full((len(lines), PLACES), -np.inf, np.float32)
        for low, tile in tiles(lines, labels):
            fold_top_k(tile, low, *_NOTHING, best, at)
        for i in range(len(lines)):
            hits += np.cumsum(np.isin(best[i], y.indices[y.indptr[i] : y.indptr[i + 1]]))
        n += len(lines)
        if criterion == "auc":
            auc += _auc(lines, labels, y)
    figures = {"hits": hits.tolist(), "held": n, "bytes_read": Y.bytes_read}
    return {**figures, **({"auc": auc} if criterion == "auc" else {})}


_NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)  # pairs that are barred


def tiles(lines: Array, labels: Dense) -> Iterator[tuple[int, Array]]:
    """Lines of A times H^T, by tiles of classes: the first class, scores (rows x classes)."""
    for low in range(0, labels.n, BLOCK):
        yield low, lines @ labels.read(low, min(low + BLOCK, labels.n)).T


def _auc(lines: Array, labels: Dense, y: Block) -> int:
    """The sum of some rows' AUC, in units."""
    positives = np.empty(len(y.indices), np.float32)
    for low, tile in tiles(lines, labels):
        take_positives(tile, low, y.indptr, y.indices, positives)
    sort_rows(y.indptr, positives)
    predicted, above = np.zeros(labels.n, np.int64), np.zeros(len(lines), np.int64)
    for low, tile in tiles(lines, labels):
        fold_counts(tile, low, y.indptr, positives, np.float32(0), predicted, above)
    return auc_units(above, np.diff(y.indptr), labels.n)
