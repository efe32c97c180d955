"""What all jobs of a run share, and what a search hands to the solves after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.linear.kernels.penalty import ONCE
from xmc_stream.linear.weights import Unit
from xmc_stream.methods.weights import LABELS, SAMPLES, Given
from xmc_stream.metrics import inverse_propensity
from xmc_stream.ppdsparse.candidates import CandidateFile, CandidateRows
from xmc_stream.ppdsparse.parameters import BALANCED, EXACT, GIVEN, PROPENSITY, PPDSparseParameters
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset


@dataclass(frozen=True)
class Problem:
    """The same for all jobs of a run. data: path of the dataset; weights: of rows and classes in the loss."""

    data: str
    parameters: PPDSparseParameters
    seed: int
    plan: MemoryPlan
    weights: LossWeights


class Share(NamedTuple):
    """Classes [first, last) of a unit, or all of them, that are a solve job."""

    first: int
    last: int
    unit: Unit

    @property
    def whole(self) -> bool:
        """Whether it is the unit."""
        return (self.first, self.last) == self.unit

    @property
    def name(self) -> str:
        """In keys of jobs and names of states: the unit's, or with the classes "0.250-500"."""
        return self.unit.name if self.whole else f"{self.unit.name}.{self.first}-{self.last}"


@dataclass(frozen=True)
class Found:
    """What a search found. kind: of the search; n_classes: how many classes have violators."""

    files: tuple[CandidateFile, ...] = ()
    kind: str = EXACT
    n_classes: int = 0

    def of(self, first: int, last: int) -> Found:
        """The files that hold some of classes [first, last)."""
        mine = tuple(file for file in self.files if file.first < last and file.last > first)
        return Found(mine, self.kind, self.n_classes)

    def open(self, n_samples: int) -> list[CandidateRows]:
        """What the files hold, of the rows of so many samples."""
        return [file.open(n_samples) for file in self.files]


def propensity_weight(inverse: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight of a label's positives by its inverse propensity 1/p: 2/p - 1 (see docs/ppdsparse.md)."""
    return 2.0 * inverse - 1.0


@dataclass(frozen=True)
class LossWeights:
    """What weighs the losses of a run.

    classes: `class_weight`. path: where what was given is kept, "" if nothing was. mean: of the samples' weights, 0 where
    they have none.
    """

    classes: str | None
    n_samples: int
    path: str = ""
    mean: float = 0.0

    @classmethod
    def of(cls, classes: str | None, n_samples: int, given: Given | None, path: Path) -> LossWeights:
        """Of a run that keeps what was given at a path."""
        return cls(classes, n_samples) if given is None else cls(classes, n_samples, str(path), given.mean)

    @property
    def of_samples(self) -> bool:
        """Whether samples have weights."""
        return self.mean > 0.0

    def of_classes(self, dataset: Dataset, first: int, last: int) -> NDArray[np.float64]:
        """m_k and c_k (n, 2) of classes [first, last); (0, 2) where all are 1."""
        if self.classes is None:
            return ONCE.classes
        weights, counts = np.ones((last - first, 2)), dataset.label_counts(first, last)
        some = (counts > 0) & (counts < self.n_samples)
        if self.classes == BALANCED:
            weights[some, 0] = self.n_samples / (2 * (self.n_samples - counts[some]))
            weights[some, 1] = self.n_samples / (2 * counts[some])
        elif self.classes == PROPENSITY:
            weights[some, 1] = propensity_weight(inverse_propensity(counts[some], self.n_samples))
        elif self.classes == GIVEN:
            weights[:, 1] = open_array(Path(self.path) / LABELS).read(first, last)
        return weights


class RowWeights:
    """Reads the weights of samples; for one thread at a time."""

    def __init__(self, weights: LossWeights) -> None:
        self._array = open_array(Path(weights.path) / SAMPLES) if weights.of_samples else None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of some rows (ascending, unique); of no length where samples have no weights."""
        if self._array is None:
            return ONCE.rows
        out = np.empty(len(rows))
        self._array.read_ranges(rows.astype(np.int64, copy=False), np.ones(len(rows), np.int64), out)
        return out

    def of_range(self, start: int, stop: int) -> NDArray[np.float64]:
        """Of the rows in [start, stop), likewise."""
        return ONCE.rows if self._array is None else self._array.read(start, stop)


class ShareWeights:
    """How many times C counts for a share's classes, which count from its first, and for rows; for one thread at a time."""

    def __init__(self, weights: LossWeights, dataset: Dataset, first: int, last: int) -> None:
        self._weights, self.of_classes = weights, weights.of_classes(dataset, first, last)
        self.of_rows = RowWeights(weights)

    def of(self, classes: slice | NDArray[np.int64]) -> NDArray[np.float64]:
        """`Times.classes` of some classes."""
        return self.of_classes[classes] if len(self.of_classes) else self.of_classes

    def reader(self) -> RowWeights:
        """Of rows, for another thread."""
        return RowWeights(self._weights)


def check_weights(parameters: PPDSparseParameters, dataset: Dataset, given: Given | None) -> None:
    """Raise InputError where `class_weight` and the weights given do not go together, or not with the dataset."""
    if given is not None:
        given.check(dataset)
    labels = given is not None and given.labels is not None
    if parameters.class_weight == GIVEN and not labels:
        raise InputError(
            "class_weight is 'given', and no weights of labels are: give them (" + flags.CLASS_WEIGHT + " FILE.npy)"
        )
    if labels and parameters.class_weight != GIVEN:
        raise InputError(f"weights of labels are given, and class_weight is {parameters.class_weight!r}: leave out one")
    if parameters.class_weight == PROPENSITY:
        inverse_propensity([1], dataset.n_samples)
