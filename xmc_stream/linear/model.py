"""Models with a vector of weights for each class: score_k = w_k0 + sum_j w_kj x_j.

What predicts and evaluates is imported when it is asked for: a training opens its model, and does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.guide import GUIDE, Guide
from xmc_stream.linear.implied import IMPLIED, ImpliedLabels
from xmc_stream.linear.kernels.scores import MOST_FEATURES
from xmc_stream.linear.weights import LinearWeights, hash_classes, unit_path
from xmc_stream.models.kind import Checker, WeightArrays
from xmc_stream.models.model import Model
from xmc_stream.runtime.check import array_jobs, checked_reading, common_model_jobs
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

if TYPE_CHECKING:
    import scipy.sparse

    from xmc_stream.linear.predict import HeldTiles, LinearTask

_WINDOW = 1 << 20  # items exported at a time


class LinearModel(LinearWeights, Model):
    """A model with weights by class."""

    kind = "linear"

    def _more(self) -> str:
        return ""

    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        for unit in self.units:
            matrix, bias = self.unit_weights(unit), self.unit_array(unit)
            for low in range(0, len(bias), UNIT):  # whatever the units are
                hash_classes(update, matrix, bias, low, min(low + UNIT, len(bias)))
        Guide.of(self).hash(update)
        ImpliedLabels.of(self).hash(update)

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
        from xmc_stream.linear.predict import LinearWarmUp

        fours = self.n_features <= MOST_FEATURES
        return LinearWarmUp(evaluate, Guide.of(self).clusterings > 0, ImpliedLabels.of(self).pairs > 0, fours)

    def held_needs(self, room: int) -> dict[str, int]:
        """All tiles."""
        from xmc_stream.linear.predict import held_needs

        return held_needs(self)

    def hold(self, room: int) -> HeldTiles:
        """All tiles."""
        from xmc_stream.linear.predict import HeldTiles

        return HeldTiles(self)

    def ranking(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> LinearTask:
        """What it takes is foreseen by a probe of a few tiles and rows."""
        from xmc_stream.linear.predict import LinearTask

        return LinearTask(self, dataset, k, filtered, evaluate, once)

    def check_jobs(self) -> Sequence[Job]:
        """Seal, names, weights; bias and statistics are compared whenever they are read."""
        parts: list[str | Path] = [GUIDE, IMPLIED, *(unit_path(self.path, unit) / "weights" for unit in self.units)]
        arrays = (array for part in parts for array in plain_arrays(self.path / part))
        return [*common_model_jobs(self), *array_jobs(self.path, arrays)]

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
        yield from Guide.of(self).verify(checker)
        yield from ImpliedLabels.of(self).verify(checker)
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
