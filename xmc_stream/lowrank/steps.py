"""Jobs of low-rank models over all pairs: products of X and Y with a range of a factor's columns, and systems of its rank.

A job has a range of columns and all rows, so that every sum is taken row after row by one thread: it comes out the same for
any number of threads or processes and any limit, there are no partial sums to be added, and a factor is in memory once, not
once for each thread. The columns of a job are as many as the limit lets them be; X is read once for each range of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import Dense, Factor, Panels, SideBySide, by_lines, copy_factors, new_factors
from xmc_stream.factors.products import BLOCK, LINES, Learned, held_out_metrics
from xmc_stream.factors.rowblocks import Array
from xmc_stream.kernels.domains import FIRST_FACTORS
from xmc_stream.lowrank.solver import column_dots, solve_gram
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.model import UNIT
from xmc_stream.store.packing import new_pack
from xmc_stream.system.blas import one_blas_thread

_GRAMS = 16  # parts of A^T A, at most


def within(span: tuple[float, float] | None, begin: float, end: float) -> tuple[float, float] | None:
    """A part of the span of a phase."""
    return None if span is None else (span[0] + begin * (span[1] - span[0]), span[0] + end * (span[1] - span[0]))


def write_sum(path: Path, values: NDArray[np.float64], durable: bool) -> None:
    """A matrix into a pack. durable: as of `new_pack`."""
    with new_pack(path, durable) as pack:
        pack.write("sum", values.ravel())


def read_sum(path: str, lines: int) -> NDArray[np.float64]:
    """What was written, of so many lines."""
    array = open_array(Path(path) / "sum")
    return np.asarray(array.read(0, array.size).reshape(lines, -1))


@dataclass(frozen=True)
class StartJob:
    """The H that a run begins from, rotated: normal, of variance 1 / rank, drawn by seed and unit; W is 0."""

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
                rng = np.random.default_rng([self.learned.seed, FIRST_FACTORS, first])
                drawn = rng.standard_normal((min(UNIT, self.n_labels - first), self.rank), np.float32)
                drawn /= np.float32(math.sqrt(self.rank))
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
            for lines in by_lines(source):
                if rotation is not None:
                    lines = (lines @ rotation).astype(np.float32)
                squares[name] += column_dots(lines, lines)
                writers[name].append(lines.ravel())
    return {"values": squares["H"].tolist(), "w_square": math.fsum(squares.get("W", ()))}


@dataclass(frozen=True)
class GramJob:
    """A^T A over rows [first, last), which the number of rows decides, in float64, into a pack."""

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
                self.learned.leave_out(first, lines)
                gram += lines.T @ lines
        write_sum(Path(self.out), gram, durable=False)
        return {}


def gram_jobs(learned: Learned, name: str, scores: Panels, folder: Path) -> list[GramJob]:
    """The jobs of A^T A."""
    n, n_blocks = scores.n, -(-scores.n // BLOCK)
    return [
        GramJob(learned, name, a * BLOCK, min(b * BLOCK, n), scores, str(folder / str(a * BLOCK)))
        for a, b in even_ranges(n_blocks, min(_GRAMS, n_blocks))
    ]


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
            held_out = (
                held_out_metrics(self.learned, self.scores, self.solved, self.criterion) if self.learned.share else {}
            )
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.solved}, rotation_of(square))
        w_square = receipt["w_square"]
        fit_before = 0.5 * (self.positives - 2 * met_before + float(np.diag(gram) @ np.array(self.values)))
        fit = 0.5 * (self.positives - 2 * met + float(np.vdot(gram, square)))
        return {
            **receipt, **held_out, "products": self.steps,
            "objective_w": fit_before + 0.5 * self.lam * (w_square + sum(self.values)),
            "objective": fit + 0.5 * self.lam * (w_square + h_square),
        }  # fmt: skip


@dataclass(frozen=True)
class ModelJob:
    """Copy the factors of an alternation into the model, so many columns of them."""

    w: Factor
    h: Factor
    rank: int
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "finalise"

    def run(self) -> Receipt:
        """Copy."""
        copy_factors(Path(self.out), {"W": self.w, "H": self.h}, (0, self.rank))
        return {}
