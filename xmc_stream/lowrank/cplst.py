"""CPLST: the closed form that LEML has without regularisation, by a randomised method out of core.

With P the projection onto the columns of X, the best H of a rank are the leading eigenvectors of Y^T P Y, and W solves
X W = P Y H. An iteration takes W = argmin ||Y H - X W|| and A = X W, and turns these such that A^T A = I and the columns of
H = Y^T A are at right angles. A H^T is then the best that A's columns give, its first columns the best of a lesser rank. The
squared norms v of H's columns come to the eigenvalues.

With few features W solves the normal equations, column by column of H, with X^T X in memory, in float64:

    (X^T X + lam I) w_c = X^T Y h_c / v_c

With many it is that of LEML's W step (`ridge`). Where singular values of X lie ten thousand times apart, its conjugate
gradients in float32 do not come to the end.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import FACTORS, Begun, ColumnRange, Dense, Factor, Panels, by_lines, copy_factors, take
from xmc_stream.factors.products import Learned, times
from xmc_stream.factors.rowblocks import blocks, csr
from xmc_stream.lowrank.run import LowRankRun, ModelJob, StartJob, gram_jobs, read_sum, write_factors, write_sum
from xmc_stream.lowrank.solver import solve_gram
from xmc_stream.methods.contract import WRITING
from xmc_stream.runtime.job import Loop, Phase, Receipt
from xmc_stream.runtime.plan import even_ranges
from xmc_stream.store.places import remove
from xmc_stream.system.blas import one_blas_thread

_NOTHING = 1e-12  # of the largest eigenvalue: what rounding leaves of one that is 0
# is added to the diagonal of X^T X, which is scaled to ones: features may be the same, or sums of others
_LEAST = 1e-12
_COLUMNS = 256  # of X^T X in a job, at most


@dataclass(frozen=True)
class TurnJob:
    """From A = X W: W and H, turned such that A^T A = I and the columns of H = Y^T A are at right angles, the longest first.

    grams: files of parts of A^T A; sums: Y^T A before. The receipt has the objective of so many first columns (`rank`).
    """

    name: str
    grams: tuple[str, ...]
    sums: Panels
    positives: int
    w: Dense
    rank: int
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return self.name

    def run(self) -> Receipt:
        """Turn and write."""
        q = self.sums.columns
        gram, square = np.zeros((q, q)), np.zeros((q, q))
        with one_blas_thread():
            for file in self.grams:
                gram += read_sum(file, q)
            for lines in by_lines(self.sums):
                sums = lines.astype(np.float64)
                square += sums.T @ sums
            values, vectors = np.linalg.eigh(gram)
            some = values > _NOTHING * max(float(values[-1]), 1e-300)
            turn = vectors * np.where(some, 1 / np.sqrt(np.where(some, values, 1.0)), 0.0)
            values, vectors = np.linalg.eigh(turn.T @ square @ turn)
            turn = np.ascontiguousarray((turn @ vectors)[:, ::-1])
            receipt = write_factors(Path(self.out), {"W": self.w, "H": self.sums}, turn)
        return {**receipt, "objective": 0.5 * (self.positives - float(values[::-1][: self.rank].sum()))}


@dataclass(frozen=True)
class NormalJob:
    """Columns of X^T X; or, with labels, of X^T Y H. Row after row, in float64, into a pack."""

    learned: Learned
    name: str
    cols: ColumnRange
    labels: Dense | None
    folder: Path

    @property
    def key(self) -> str:
        """What for, and columns."""
        return f"{self.name}/{self.cols[0]}-{self.cols[1]}"

    @property
    def out(self) -> str:
        """The pack."""
        return str(self.folder / f"{self.cols[0]}-{self.cols[1]}")

    def run(self) -> Receipt:
        """Sum and write."""
        learned, dataset, width = self.learned, self.learned.dataset(), self.cols[1] - self.cols[0]
        X, Y, begun, first = dataset.X_rows(), dataset.Y_rows(), Begun(Path(f"{self.out}.kept")), 0
        total = np.zeros((learned.n_inputs(), width))
        if begun.found:
            total, first = begun.read("sum").reshape(total.shape), int(begun.read("rows")[0])
        h = None if self.labels is None else take(self.labels, self.cols)[:, :width].astype(np.float64)
        for x, *ys in blocks(X, *([] if h is None else [Y]), rows=(first, X.n_lines)):
            right = self._columns(*csr(x)) if h is None else times(ys[0], h)
            learned.add_transposed(x, right, total)
            begun.keep({"sum": total, "rows": np.array([x.start + x.n])})
        write_sum(Path(self.out), total, durable=True)
        share = width / (total.shape[0] if self.labels is None else self.labels.columns)
        return {"passes": share, "bytes_read": X.bytes_read}

    def _columns(
        self, indptr: NDArray[np.int64], indices: NDArray[np.int64], values: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """These columns of a block of X, the bias among them."""
        import scipy.sparse

        n, inputs = len(indptr) - 1, self.learned.n_inputs()
        x = scipy.sparse.csr_matrix((values, indices, indptr), (n, inputs))[:, self.cols[0] : self.cols[1]]
        dense = np.ascontiguousarray(x.toarray(), np.float64)
        if self.learned.bias and self.cols[1] == inputs:
            dense[:, -1] = 1
        return dense


@dataclass(frozen=True)
class NormalSolveJob:
    """W of the normal equations. grams, right: what `NormalJob` wrote, in the order of columns; values: v_c."""

    name: str
    n_inputs: int
    lam: float
    grams: tuple[str, ...]
    right: tuple[str, ...]
    values: tuple[float, ...]
    out: str

    @property
    def key(self) -> str:
        """The iteration."""
        return self.name

    def run(self) -> Receipt:
        """Solve and write."""
        values = np.array(self.values)
        gram, right = (self._side_by_side(files) for files in (self.grams, self.right))
        right *= np.where(values > 0, 1 / np.where(values > 0, values, 1.0), 0.0)
        gram[np.diag_indices_from(gram)] += self.lam
        scale = 1 / np.sqrt(gram.diagonal())
        gram *= scale[:, None]
        gram *= scale
        right *= scale[:, None]
        with one_blas_thread():
            w = solve_gram(gram, np.ascontiguousarray(right.T), _LEAST).T * scale[:, None]
        copy_factors(Path(self.out), {"W": w.astype(np.float32)}, (0, len(values)))
        return {"steps": 1}

    def _side_by_side(self, files: tuple[str, ...]) -> NDArray[np.float64]:
        return np.concatenate([read_sum(file, self.n_inputs) for file in files], axis=1)

    @property
    def found(self) -> Factor:
        """W."""
        return Factor(f"{self.out}/W", len(self.values), self.n_inputs)


class CPLSTRun(LowRankRun):
    """A training run of CPLST."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._learned = Learned.of(self.dataset, 0.0, self.seed, self.parameters.bias)
        self._squares: list[NormalJob] = []  # of X^T X, in this session

    def loop(self) -> Loop:
        """Phases of jobs; returns attributes of the model."""
        p, d, q = self.parameters, self.dataset, self._steps.rank
        rank = p.rank_for(d.n_features, d.n_labels)
        self._scratch.mkdir(parents=True, exist_ok=True)
        drawn = Panels(str(self._scratch / "h"), d.n_labels, ((0, q),))
        start = StartJob(self._learned, d.n_labels, q, False, drawn, str(self._state("factors", 0) / "all"))
        receipt = (yield Phase("start", [start], "drawing the first factors"))[0]
        history: list[dict[str, float]] = []
        for number in range(1, p.iterations + 1):
            values = tuple(receipt["values"]) if history else (1.0,) * q
            receipt = self.ledger.get(f"h/{number}") or (yield from self._iterate(number, values, rank))
            for kind in ("w", "right"):
                remove(self._state(kind, number))
            remove(self._state("factors", number - 1))
            history.append({"iteration": number, "objective": receipt["objective"]})
            if number > 1 and history[-2]["objective"] - receipt["objective"] <= p.tol * receipt["objective"]:
                break
        job = ModelJob(self._factor(number, "W"), self._factor(number, "H"), rank, str(self.work / FACTORS))
        yield Phase("finalise", [job], WRITING)
        return {
            "rounds": number,
            "rank": rank,
            "threshold": p.threshold,
            "nnz": (self._learned.n_inputs() + d.n_labels) * rank,
            "objective": receipt["objective"],
            "duality_gap": None,
            "history": history,
        }

    def _iterate(self, number: int, values: tuple[float, ...], rank: int) -> Generator[Phase, list[Receipt], Receipt]:
        """W, then H; returns what the turning of both says."""
        most, learned = self.parameters.iterations, self._learned
        name = f"iteration {number}"
        words, ends = f"{name} of at most {most}", [(number - 1 + of) / most for of in (0.0, 0.6, 0.9, 1.0)]
        phase = Phase(f"{name}, W", (), f"solving for W, {words}", (ends[0], ends[1]), unit="iteration", number=number)
        if self._steps.direct:
            w: Dense = yield from self._solved(number, values, phase)
        else:
            w, _ = yield from self._ridges(learned, number, number - 1, self._steps.lam or 0.0, values, phase)
        sums, words = self._panels("sums", self.dataset.n_labels), f"solving for H, {words}"
        phase = Phase(f"{name}, A", (), words, (ends[1], ends[2]))
        scores, positives = yield from self._project(learned, number, w, sums, phase)
        grams = gram_jobs(learned, f"gram/{number}", scores, self._scratch / "gram")
        yield Phase(f"{name}, A^T A", grams, words, (ends[2], ends[2]), kept=False)
        out = str(self._state("factors", number) / "all")
        turn = TurnJob(f"h/{number}", tuple(gram.out for gram in grams), sums, positives, w, rank, out)
        return (yield Phase(f"{name}, H", [turn], words, (ends[2], ends[3])))[0]

    def _solved(self, number: int, values: tuple[float, ...], phase: Phase) -> Generator[Phase, list[Receipt], Dense]:
        """W by the normal equations."""
        n_inputs, key, rights = self._learned.n_inputs(), f"w/{number}", list[NormalJob]()
        if self.ledger.get(key) is None:
            if not self._squares:
                columns = min(_COLUMNS, max(last - first for first, last in self._sizes.col_ranges))
                ranges, folder = even_ranges(n_inputs, -(-n_inputs // columns)), self._state("normal", 0)
                self._squares = [NormalJob(self._learned, "normal/0", cols, None, folder) for cols in ranges]
                words = "multiplying the features with each other"
                yield replace(phase, name="X^T X", jobs=self._squares, words=words, unit="", number=0)
            h, folder = self._factor(number - 1, "H"), self._state("right", number)
            rights = [NormalJob(self._learned, f"right/{number}", cols, h, folder) for cols in self._sizes.col_ranges]
            yield replace(phase, name=f"{phase.name}, X^T Y H", jobs=rights, unit="", number=0)
        grams, right = (tuple(job.out for job in jobs) for jobs in (self._squares, rights))
        out = str(self._state("w", number) / "all")
        solve = NormalSolveJob(key, n_inputs, self.parameters.lam, grams, right, values, out)
        yield replace(phase, jobs=[solve])
        return solve.found
