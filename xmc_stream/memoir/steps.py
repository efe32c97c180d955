"""Jobs of MEMOIR: steps of a segment, and the model from what the best segment left.

A segment begins with W on disk, makes the oracle's index anew from it, takes some steps and leaves W. Where it begins and ends
depends on the data alone. A job does as many of its steps as a job should take; where these are not all it leaves what the
next one goes on from bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import JobError
from xmc_stream.factors.factors import Factor, Panels, by_lines, new_factors
from xmc_stream.factors.rowblocks import let_go
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import Unit, new_unit
from xmc_stream.memoir.draws import Copies, Steps, held_out_of
from xmc_stream.memoir.learners import Learner, learner_of, read_dense, read_sparse, state_path
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.plan import RANGE, StepsPlan, scored_together
from xmc_stream.memoir.solver import StepSums, macro_f1, take_step
from xmc_stream.metrics import among
from xmc_stream.models.decisions import HeldOut
from xmc_stream.models.runs import filter_pairs, no_predictions
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import Portion
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import DECISION
from xmc_stream.system.blas import one_blas_thread
from xmc_stream.system.stop import stop_if_unwanted

_TOGETHER = 512  # classes whose scores are made together


@dataclass(frozen=True)
class Data:
    """What is learned from, and how; the same for all jobs of a run. work: folder of the run.

    share: of the rows, those that are held out; reduced: the coordinates of all rows, of the lsh variant.
    """

    path: str
    work: str
    parameters: MEMOIRParameters
    seed: int
    share: float
    reduced: Panels | None = None


@dataclass(frozen=True)
class Paused:
    """A segment that was left before its end.

    step: the next one; loss, violators, drawn: sums over its draws so far; index: names of the arrays of the oracle's index.
    """

    step: int
    loss: float = 0.0
    violators: int = 0
    drawn: int = 0
    index: tuple[str, ...] = ()

    def after(self, step: int, sums: StepSums, drawn: int) -> Paused:
        """One step later."""
        return Paused(step + 1, self.loss + sums.loss, self.violators + sums.violators, self.drawn + drawn)


@dataclass(frozen=True)
class StepsJob:
    """Steps of a segment, from the one that `going` names up to `last` - 1, or as many as a job should take.

    before: the state that they begin from, "" for W = 0: of the segment before, or of this one where `goes_on`.
    """

    data: Data
    number: int
    going: Paused
    last: int
    before: str
    goes_on: bool
    sizes: StepsPlan

    @property
    def key(self) -> str:
        """The segment, and the first step."""
        return f"steps/{self.number}/{self.going.step}"

    @property
    def out(self) -> Path:
        """The state that they leave."""
        return state_path(Path(self.data.work), self.number, self.going.step)

    def run(self) -> Receipt:
        """Step; the receipt says where the segment was left, or how good W is at its end."""
        let_go()  # of what the reduction left in memory
        data, p, going = self.data, self.data.parameters, self.going
        dataset = Dataset(data.path)
        copies = Copies(dataset, data.seed, data.share)
        learned = np.zeros(dataset.n_labels, np.bool_)
        learned[copies.classes] = True
        learner = learner_of(dataset, p, data.reduced, learned, data.seed, self.sizes)
        steps = Steps(dataset, copies, p.draws, data.seed, p.sampling == "class", learner.rows)
        if self.goes_on:
            learner.resume(Path(self.before), going.index)
        elif self.before:
            learner.load(Path(self.before))
        portion, said = Portion(), None
        for step, drawn in steps.of(going.step, self.last):
            stop_if_unwanted()
            sums = take_step(learner.weights, drawn.rows, drawn.places, learner.find(drawn, step), step, p)
            learner.refresh(sums.touched)
            going = going.after(step, sums, p.draws)
            if portion.done():
                going = replace(going, index=tuple(learner.pause(self.out)))
                break
        else:
            said = self._end(dataset, learner, going)
        passes = (going.drawn - self.going.drawn) / max(dataset.n_samples, 1)
        n_bytes = steps.bytes_read + learner.bytes_read
        return {
            "going": asdict(going), "said": said, "passes": passes, "bytes_read": n_bytes, "bytes_gathered": n_bytes,
        }  # fmt: skip

    def _end(self, dataset: Dataset, learner: Learner, going: Paused) -> dict[str, Any]:
        """Leave W; how good it is. Raises JobError where it is not finite."""
        p, done = self.data.parameters, max(going.drawn, 1)
        learner.weights.fold()
        if not np.isfinite(going.loss + learner.weights.norm):
            raise JobError(
                f"MEMOIR diverged by step {self.last}: loss or W is not finite: give the rows length one (convert "
                + flags.NORMALIZE_L2
                + "), or a smaller eta0"
            )
        said = {
            "loss": going.loss / done, "violators": round(going.violators / done, 6), "eta": p.rate(self.last - 1),
            "nnz": learner.nnz, "norm": learner.weights.norm, **self._held_out(dataset, learner),
        }  # fmt: skip
        learner.store(self.out, {})
        return said

    def _held_out(self, dataset: Dataset, learner: Learner) -> dict[str, Any]:
        """Accuracy and macro-F1, in per cent, of the copies of rows that are held out."""
        if not self.data.share:
            return {}
        rows = held_out_rows(self.data, dataset)
        Y, labels, predicted = dataset.Y_rows(), [], []
        at_a_time = scored_together(self.data.parameters)
        for low in range(0, len(rows), at_a_time):
            stop_if_unwanted()
            some = rows[low : low + at_a_time]
            own = Y.gather(some)
            best = learner.predict(learner.rows(some), len(some))
            labels.append(own.indices.astype(np.int64))
            predicted.append(np.repeat(best, np.diff(own.indptr)))
        if not labels or not sum(map(len, labels)):
            return {}
        accuracy, f1 = macro_f1(np.concatenate(labels), np.concatenate(predicted), dataset.n_labels)
        return {"accuracy": round(accuracy, 4), "macro_F1": round(f1, 4), "n_held_out": len(rows)}


def held_out_rows(data: Data, dataset: Dataset) -> NDArray[np.int64]:
    """The rows that are held out, ascending."""
    parts = (np.arange(low, min(low + RANGE, dataset.n_samples)) for low in range(0, dataset.n_samples, RANGE))
    return np.concatenate([part[held_out_of(part, data.seed, data.share)] for part in parts])


@dataclass(frozen=True)
class DecisionJob:
    """Which labels of a row are to be predicted, by the rows that are held out and a state, as the model will have it."""

    data: Data
    state: str

    @property
    def key(self) -> str:
        """There is one."""
        return DECISION

    def run(self) -> Receipt:
        """Score rows by all classes, and learn from that."""
        data, dataset = self.data, Dataset(self.data.path)
        X, Y, unseen = dataset.X_rows(), dataset.Y_rows(), dataset.label_counts() == 0
        rows = held_out_rows(data, dataset)
        held_out, at_a_time = HeldOut(len(rows), dataset), scored_together(data.parameters)
        for start in range(0, len(rows), at_a_time):
            some = rows[start : start + at_a_time]
            x, y = self._rows(X, some) if data.reduced is None else data.reduced.gather(some), Y.gather(some)
            labels, scores = no_predictions(len(some), held_out.k)
            with one_blas_thread():
                for low, vectors in self._vectors(dataset):
                    stop_if_unwanted()
                    tile: Any = x @ vectors.T
                    tile = tile if isinstance(tile, np.ndarray) else tile.toarray()
                    fold_top_k(np.ascontiguousarray(tile, np.float32), low, filter_pairs(), labels, scores)
            scores[unseen[labels]] = UNSEEN  # as the model has them
            right = among(np.arange(len(some))[:, None], labels, y.indptr, y.indices)
            held_out.add(scores, right, np.diff(y.indptr))
        return {DECISION: held_out.decision(), "bytes_read": X.bytes_read + Y.bytes_read}

    def _rows(self, X: SparseMatrix, some: NDArray[np.int64]) -> Any:
        """Some rows, with a last feature of 1 where there is a bias."""
        block = X.gather(some)
        x = scipy.sparse.csr_matrix((block.values, block.indices, block.indptr), (len(some), X.shape[1]))
        if not self.data.parameters.bias:
            return x
        return scipy.sparse.hstack([x, scipy.sparse.csr_matrix(np.ones((len(some), 1), np.float32))], format="csr")

    def _vectors(self, dataset: Dataset) -> Iterator[tuple[int, Any]]:
        """The vectors of a few classes after the other: the first class, a matrix."""
        path, n, cosine = Path(self.state), dataset.n_labels, self.data.parameters.cosine
        parts: Iterator[tuple[int, Any]]
        if self.data.reduced is not None:
            parts = ((low, as_cosines(a, cosine)) for low, a in read_dense(path, n, self.data.reduced.columns))
        else:
            width = dataset.n_features + self.data.parameters.bias
            parts = (
                (low, scipy.sparse.csr_matrix((cosines_of(a, cosine), a.indices, a.indptr), (len(a.indptr) - 1, width)))
                for low, a in read_sparse(path, n, width)
            )
        for low, part in parts:
            for first in range(0, part.shape[0], _TOGETHER):
                yield low + first, part[first : first + _TOGETHER]


@dataclass(frozen=True)
class UnitJob:
    """Write a unit of the model from a state. The bias of a class without positives is -inf: it comes last."""

    data: Data
    state: str
    unit: Unit
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"finalise/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt has the sizes of tiles that predictions are planned from."""
        p, (first, last) = self.data.parameters, self.unit
        dataset = Dataset(self.data.path)
        d = dataset.n_features
        tiles = TileSizes(first, last, d)
        with new_unit(Path(self.out), d, last - first) as writer:
            for low, some in read_sparse(Path(self.state), dataset.n_labels, d + p.bias, first, last):
                kept, values = np.diff(some.indptr), cosines_of(some, p.cosine)
                lines = np.repeat(np.arange(len(kept)), kept)
                bias, inside = some.indices == d, some.indices < d
                writer.bias[low - first + lines[bias]] = values[bias]
                kept[lines[bias]] -= 1
                writer.weights.append(kept, some.indices[inside], values[inside])
                tiles.add(kept, some.indices[inside])
            writer.bias[dataset.label_counts(first, last) == 0] = -np.inf
        return {"nnz": writer.weights.nnz, "tile_ranges": [astuple(span) for span in tiles.ranges]}


@dataclass(frozen=True)
class FactorsJob:
    """Write the model of the lsh variant: W (D x r) = the singular vectors, H (K x r) = the weights in their coordinates."""

    data: Data
    state: str
    vectors: Factor
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "finalise"

    def run(self) -> Receipt:
        """Write."""
        rank, k = self.vectors.columns, Dataset(self.data.path).n_labels
        with new_factors(Path(self.out), {"W": rank, "H": rank}) as writers:
            for lines in by_lines(self.vectors):
                writers["W"].append(lines.ravel())
            for _, lines in read_dense(Path(self.state), k, rank):
                writers["H"].append(as_cosines(lines, self.data.parameters.cosine).ravel())
        return {}


def cosines_of(vectors: CSR, cosine: bool) -> NDArray[np.float32]:
    """The values of sparse vectors, divided by the norms of these."""
    if not cosine:
        return vectors.values
    counts = np.diff(vectors.indptr)
    lines = np.repeat(np.arange(len(counts)), counts)
    norms = np.sqrt(np.bincount(lines, np.square(vectors.values, dtype=np.float64), minlength=len(counts)))
    return (vectors.values / np.maximum(norms, 1e-300)[lines]).astype(np.float32)


def as_cosines(lines: NDArray[np.float32], cosine: bool) -> NDArray[np.float32]:
    """Lines divided by their norms; those of zeros stay."""
    if not cosine:
        return lines
    norms = np.sqrt(np.square(lines, dtype=np.float64).sum(axis=1))
    return np.asarray(lines / np.maximum(norms, 1e-300)[:, None], np.float32)
