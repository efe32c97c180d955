"""Models with a vector of weights for each class: score_k = w_k0 + sum_j w_kj x_j.

What predicts and evaluates is imported when it is asked for: a training opens its model, and does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.guide import GUIDE, Guide
from xmc_stream.linear.implied import IMPLIED, ImpliedLabels
from xmc_stream.linear.weights import LinearWeights, unit_path
from xmc_stream.models.kind import Checker, WeightArrays
from xmc_stream.models.model import Model
from xmc_stream.runtime.check import CHECKED_BYTES, array_jobs, checked_reading, common_model_jobs
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.runtime.plan import Forecaster, even_ranges
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

if TYPE_CHECKING:
    import scipy.sparse

    from xmc_stream.linear.predict import HeldTiles, PredictRun

_WINDOW = 1 << 20  # items exported at a time


@dataclass(frozen=True)
class CheckWeightsJob:
    """Weights of units [first, last); bias and statistics are compared whenever they are read."""

    model: str
    first: int
    last: int

    @property
    def key(self) -> str:
        """The units."""
        return f"check/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged, or another one's."""
        model, n_bytes = LinearWeights(self.model), 0
        for unit in model.units[self.first : self.last]:
            for array in model.unit_weights(unit).arrays():
                if array.path is not None:
                    for k in range(array.n_chunks):
                        array.verify_chunk(k)
                    n_bytes += array.n_chunks * array.chunk_bytes
        return {"checked_bytes": n_bytes}


class LinearModel(LinearWeights, Model):
    """A model with weights by class."""

    kind = "linear"

    def _more(self) -> str:
        return ""

    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        for low, high in _thousands(self):  # whatever the units are
            unit = self.unit_of(low)
            matrix, bias = self.unit_weights(unit), self.unit_array(unit)
            low, high = low - unit.first, high - unit.first
            update(np.diff(matrix.ends(low, high)).astype("<i8").data)
            update(bias[low:high].astype("<f4").data)
            for block in matrix.blocks(max(1 << 24, 16 * self.n_features), low, high):  # a class always fits
                update(block.indices.astype("<i8").data)
                update(block.values.data)
        if (guide := Guide.of(self)) is not None:
            guide.hash(update)
        if (implied := ImpliedLabels.of(self)) is not None:
            implied.hash(update)

    def bias(self) -> NDArray[np.float32]:
        """The bias w_0 of each class: float32 array (K,). It is -inf for a class without training rows."""
        return np.concatenate([self.unit_array(unit) for unit in self.units])

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """All weights in memory, without the bias: scipy.sparse.csc_matrix (D x K, float32)."""
        import scipy.sparse

        units = []
        with checked_reading(self.path):
            for first, last in self.units:
                block = self.classes(first, last)
                triple = (block.values, block.indices, block.indptr)
                units.append(scipy.sparse.csc_matrix(triple, shape=(self.n_features, last - first)))
        return scipy.sparse.csc_matrix(scipy.sparse.hstack(units, format="csc"))

    def warm_up(self, evaluate: bool = False) -> Job:
        """Predict, or evaluate, a few rows by a few weights."""
        from xmc_stream.linear.kernels.denserows import MOST_FEATURES
        from xmc_stream.linear.warmup import LinearWarmUp

        fours = self.n_features <= MOST_FEATURES
        return LinearWarmUp(evaluate, Guide.of(self) is not None, ImpliedLabels.of(self) is not None, fours)

    def run_of(self, evaluate: bool) -> type[PredictRun]:
        """See `Kind`."""
        if evaluate:
            from xmc_stream.linear.evaluate import EvaluateRun

            return EvaluateRun
        from xmc_stream.linear.predict import PredictRun

        return PredictRun

    def held_needs(self) -> dict[str, int]:
        """All tiles."""
        from xmc_stream.linear.predict import held_needs

        return held_needs(self)

    def hold(self) -> HeldTiles:
        """All tiles."""
        from xmc_stream.linear.predict import HeldTiles

        return HeldTiles(self)

    def forecaster(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> Forecaster:
        """By a probe of a few tiles and rows."""
        from xmc_stream.linear.forecast import PredictForecaster

        return PredictForecaster(self, dataset, k, evaluate, filtered, once)

    def check_jobs(self) -> Sequence[Job]:
        """Seal, names, weights."""
        parts = even_ranges(len(self.units), min(len(self.units), max(1, 12 * self.nnz // CHECKED_BYTES)))
        beside = [job for name in (GUIDE, IMPLIED) for job in array_jobs(self.path, plain_arrays(self.path / name))]
        return [*common_model_jobs(self), *beside, *(CheckWeightsJob(str(self.path), a, b) for a, b in parts)]

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Every unit's weights as a matrix, every bias a number."""
        matrices, nnz = {}, 0
        for unit in self.units:
            n_classes = unit.last - unit.first
            folder = unit_path(self.path, unit)
            if not folder.exists():
                checker.damage.append(f"{folder} is missing")
                continue
            matrix = checker.matrix(folder / "weights", (self.n_features, n_classes), "csc_matrix")
            if matrix is not None:
                matrices[unit.name] = matrix
                nnz += matrix.nnz
            if checker.whole(folder / "bias"):
                bias = self.unit_array(unit)
                if len(bias) != n_classes or not (np.isfinite(bias) | (bias == -np.inf)).all():
                    checker.damage.append(
                        f"{folder / 'bias'} is not a number, or -inf, for each of {n_classes} classes"
                    )
        yield from checker.lines(matrices)
        if (guide := Guide.of(self)) is not None:
            yield from guide.verify(checker)
        if (implied := ImpliedLabels.of(self)) is not None:
            yield from implied.verify(checker)
        if len(matrices) == len(self.units):
            checker.expect("the attribute nnz", self.attributes.get("nnz"), nnz)

    def weight_arrays(self) -> WeightArrays:
        """All units one after another."""
        weights = [self.unit_weights(unit) for unit in self.units]

        def ends() -> Iterator[NDArray[Any]]:
            before = np.zeros(1, np.int64)
            yield before
            for matrix in weights:
                yield matrix.ends(0, matrix.n_lines)[1:] + before
                before = before + matrix.nnz

        def indices() -> Iterator[NDArray[Any]]:
            for matrix in weights:
                yield from matrix.index_windows(0, matrix.n_lines, _WINDOW)

        def data() -> Iterator[NDArray[Any]]:
            for matrix in weights:
                if matrix.data is not None:
                    for start in range(0, matrix.nnz, _WINDOW):
                        yield matrix.data.read(start, min(start + _WINDOW, matrix.nnz))

        bias = (self.unit_array(unit) for unit in self.units)
        return WeightArrays(sum(matrix.nnz for matrix in weights), ends(), indices(), data(), bias)


def _thousands(model: LinearWeights) -> Iterator[tuple[int, int]]:
    """ranges of UNIT classes, each of one unit."""
    for unit in model.units:
        for low in range(unit.first, unit.last, UNIT):
            yield low, min(low + UNIT, unit.last)
