"""What runs of LEML and CPLST have in common: their state, W by conjugate gradients, and A = X W with sums over its rows."""

from __future__ import annotations

import math
import uuid
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import Dense, Factor, Panels, SideBySide, by_lines, copy_factors, new_factors
from xmc_stream.factors.products import BLOCK, Learned, ProjectJob
from xmc_stream.factors.rowblocks import Array, Holding
from xmc_stream.kernels.domains import FIRST_FACTORS
from xmc_stream.lowrank.parameters import LEMLParameters
from xmc_stream.lowrank.plan import plan_lowrank
from xmc_stream.lowrank.ridge import Ridges, solve_ridges
from xmc_stream.lowrank.solver import column_dots
from xmc_stream.methods.contract import TrainingRun
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.model import UNIT
from xmc_stream.system.blas import one_blas_thread

_GRAMS = 16  # parts of A^T A, at most


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


@dataclass
class LowRankRun(TrainingRun):
    """A training run.

    What a half-step leaves is durable and in the ledger, and of a long one what it comes to on the way (see `Begun`). What
    lies in `scratch` is not: a session that goes on makes it again.
    """

    def __post_init__(self) -> None:
        self._steps: LEMLParameters = self.parameters.steps(self.dataset.n_features, self.dataset.n_labels)
        self._sizes = plan_lowrank(self.plan, self.dataset, self._steps)
        self._scratch = self.work / "scratch"
        self._holding = Holding(uuid.uuid4().hex, *self._sizes.held)

    def _state(self, kind: str, number: int) -> Path:
        return self.work / "state" / f"{kind}-{number}"

    def _factor(self, number: int, name: str) -> Factor:
        n = self.dataset.n_features + self._steps.bias if name == "W" else self.dataset.n_labels
        return Factor(str(self._state("factors", number) / "all" / name), self._steps.rank, n)

    def _panels(self, name: str, n: int, whole: bool = False) -> Panels:
        return Panels(str(self._scratch / name), n, ((0, self._steps.rank),) if whole else self._sizes.col_ranges)

    def _ridges(
        self, learned: Learned, number: int, start: int, lam: float, values: tuple[float, ...], phase: Phase
    ) -> Generator[Phase, list[Receipt], tuple[SideBySide, int]]:
        """W of a half-step by conjugate gradients, from the factors number `start`; and the steps that it took."""
        previous = self._factor(start, "W") if start else None
        whole = Ridges(
            learned, lam, (0, self._steps.rank), values, self._factor(start, "H"), previous, self._sizes.parts,
            self._sizes.row_bytes, self._holding,
        )  # fmt: skip
        jobs = self._sizes.ridges(whole, f"w/{number}", self._steps, self._state("w", number))
        solved = yield from solve_ridges(jobs, self._sizes.products, phase, self.ledger, self._scratch)
        return SideBySide(tuple(job.found for job in jobs)), max(receipt["steps"] for receipt in solved)

    def _project(
        self, learned: Learned, number: int, w: Dense, sums: Panels | None, phase: Phase
    ) -> Generator[Phase, list[Receipt], tuple[Panels, int]]:
        """Make A = X W, and Y^T A, if `sums` are given; returns A, and the positives of rows that are learned from."""
        scores, parts = self._panels("a", self.dataset.n_samples), self._sizes.parts
        jobs = [
            ProjectJob(learned, f"a/{number}", cols, w, scores, parts, self._holding, sums)
            for cols in scores.col_ranges
        ]
        return scores, int((yield replace(phase, jobs=jobs, kept=False))[0]["positives"])
