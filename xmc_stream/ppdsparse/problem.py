"""What all jobs of a run share: data, parameters, weights in the loss; and what parameters are where they are not given.

The last is a matter of the data alone, never of memory or threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.weights import Unit
from xmc_stream.methods.parameters import GIVEN
from xmc_stream.methods.weights import LABELS, Given, RowWeights, check_given
from xmc_stream.metrics import inverse_propensity
from xmc_stream.ppdsparse.parameters import BALANCED, PROPENSITY, PPDSparseParameters
from xmc_stream.ppdsparse.solver import all_rows_bytes, has_dense_rows, start_sizes
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

_PAIRS = 256  # of rows that are compared: the mean is then within some per cent
# where a class begins with all rows
_LEAST_PAIRS = 1 << 17  # pairs of a row and a class: with fewer, a training is little but its start
# the first active sets have one in so many of these pairs, or more; they grow to several times as many
_ACTIVE_SHARE = 25
_MOST_BYTES = 128 * MIB  # of what a job holds
_MOST_LABELS = 1 << 17  # more of them have fewer rows than that
_ENTRIES = 1 << 17  # of rows that are in memory at a time, beyond those of a pair
LEAST_LABELS = 2048  # with positives: of fewer, groups have little to say that the labels' own weights do not
WEIGHT = 2.0  # of what groups of labels say, where nothing else is asked for
MARGIN = 0.1  # of implied labels, likewise
# Weights so small that, left out, all of them together cannot move the score of a row by more; of many labels, of which only
# the first few places count, by more than the second.
_MOVED, _MOVED_OF_MANY = 0.25, 0.35


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

    def of_rows(self) -> RowWeights:
        """Reads those of samples."""
        return RowWeights(Path(self.path) if self.of_samples else None)

    def of_classes(self, dataset: Dataset, first: int, last: int) -> NDArray[np.float64]:
        """m_k and c_k (n, 2) of classes [first, last): `Times.classes`."""
        weights = np.ones((last - first, 2))
        if self.classes is None:
            return weights
        counts = dataset.label_counts(first, last)
        some = (counts > 0) & (counts < self.n_samples)
        if self.classes == BALANCED:
            weights[some, 0] = self.n_samples / (2 * (self.n_samples - counts[some]))
            weights[some, 1] = self.n_samples / (2 * counts[some])
        elif self.classes == PROPENSITY:
            # 2/p - 1, see docs/ppdsparse.md
            weights[some, 1] = 2.0 * inverse_propensity(counts[some], self.n_samples) - 1.0
        elif self.classes == GIVEN:
            weights[:, 1] = open_array(Path(self.path) / LABELS).read(first, last)
        return weights


def check_weights(parameters: PPDSparseParameters, dataset: Dataset, given: Given | None) -> None:
    """Raise InputError where `class_weight` and the weights given do not go together, or not with the dataset."""
    check_given(given, dataset, parameters.class_weight)
    if parameters.class_weight == PROPENSITY:
        inverse_propensity([1], dataset.n_samples)


def guide_weight(parameters: PPDSparseParameters, dataset: Dataset) -> float:
    """Weight of what groups of labels say, 0 where there are none."""
    if parameters.guide is not None:
        return parameters.guide
    return WEIGHT if has_many_labels(dataset) else 0.0


def implied_margin(parameters: PPDSparseParameters, dataset: Dataset) -> float | None:
    """Margin of implied labels; None where no label is lifted."""
    if parameters.implied is not None:
        return parameters.implied
    return MARGIN if guide_weight(parameters, dataset) else None


def has_many_labels(dataset: Dataset) -> bool:
    """Whether so many labels have positives that groups of them are worth their while."""
    return int(dataset.positives_of_ranges(UNIT)[0].sum()) >= LEAST_LABELS


def takes_all_rows(parameters: PPDSparseParameters, dataset: Dataset) -> bool:
    """What `all_rows` says; where it says nothing, whether data and parameters are such that it pays."""
    if parameters.all_rows is not None:
        return parameters.all_rows
    n = dataset.n_samples
    if (
        parameters.max_rounds is None
        or parameters.approximate
        or dataset.n_labels > _MOST_LABELS
        or all_rows_bytes(dataset) > _MOST_BYTES
    ):
        return False
    counts = dataset.label_counts()
    counts = counts[(counts > 0) & (counts < n)]
    pairs, started = n * len(counts), int((counts + start_sizes(counts, n)).sum())
    return (
        pairs >= _LEAST_PAIRS
        and started * _ACTIVE_SHARE >= pairs
        and not has_dense_rows(n, dataset.n_features, dataset.X_rows().nnz)
    )


def settled(parameters: PPDSparseParameters, dataset: Dataset) -> PPDSparseParameters:
    """The parameters with C and the weight of positives as numbers, and with what `all_rows` is."""
    p = replace(parameters, all_rows=takes_all_rows(parameters, dataset))
    if p.C is not None and p.positive_weight is not None:
        return p
    of_rows = spread(dataset)
    return replace(
        p,
        C=p.C_for(of_rows) if p.C is None else p.C,
        positive_weight=p.positive_weight_for(of_rows) if p.positive_weight is None else p.positive_weight,
    )


def least_weight(parameters: PPDSparseParameters, dataset: Dataset) -> float:
    """Below what a weight is left out of a large model.

    By Cauchy and Schwarz, a row of d values and length r has ||x||_1 <= r sqrt(d), and its score moves by ||x||_1 times
    this at most. d and r are means over the rows.
    """
    if parameters.prune is not None:
        return parameters.prune
    moves = _mean_norm(dataset) * math.sqrt(dataset.X_rows().nnz / dataset.n_samples)
    return (_MOVED_OF_MANY if has_many_labels(dataset) else _MOVED) / moves if moves > 0 else 0.0


def _mean_norm(dataset: Dataset) -> float:
    """Of the rows."""
    n, step = dataset.n_samples, MIB // 4
    norms = (dataset.row_norms(start, min(start + step, n)) for start in range(0, n, step))
    return sum(float(some.sum(dtype=np.float64)) for some in norms) / n


def spread(dataset: Dataset) -> float:
    """The mean of ||x_i - m||^2, m being the mean of all rows, from random pairs of rows: half of ||x_i - x_j||^2 each.

    The pairs are the same in every run. So many of them are in memory at a time as have a megabyte of entries, one at least.
    inf where there are no two rows. The forecast of a training and the training ask for it, so it is kept.
    """
    return _spread(dataset.path, dataset.fingerprint)


@lru_cache(maxsize=8)
def _spread(path: Path, fingerprint: str) -> float:
    """Of the dataset at a path while it has this fingerprint."""
    dataset = Dataset(path)
    X, n = dataset.X_rows(), dataset.n_samples
    if n < 2:
        return float("inf")
    rng = np.random.default_rng(0)
    pairs = np.empty((_PAIRS, 2), np.int64)
    for q in range(_PAIRS):
        i, j = int(rng.integers(n)), int(rng.integers(n - 1))
        j += j >= i
        pairs[q] = min(i, j), max(i, j)
    rows, at = np.unique(pairs, return_inverse=True)
    at = at.reshape(pairs.shape)
    firsts, counts = X.lengths(rows)
    group = np.cumsum(counts[at].sum(axis=1)) // _ENTRIES  # pairs that are read together
    total = 0.0
    for mine in np.split(at, np.flatnonzero(np.diff(group)) + 1):
        some = np.flatnonzero(np.bincount(mine.ravel()))  # np.unique would import numpy.ma: 0.01 s of a start
        read = X.gather(rows[some], lengths=(firsts[some], counts[some]))
        for first, second in np.searchsorted(some, mine):
            left, right = (slice(*read.indptr[r : r + 2]) for r in (first, second))
            x, y = (np.ones(of.stop - of.start) if read.data is None else read.data[of] for of in (left, right))
            values = np.concatenate([x, y]).astype(np.float64)
            x, y = values[: len(x)], values[len(x) :]
            low, high = (np.searchsorted(read.indices[right], read.indices[left], side) for side in ("left", "right"))
            both = low < high  # features of x that y has too
            # no BLAS: its sums depend on the number of threads
            total += 0.5 * float(np.square(values).sum()) - float((x[both] * y[low[both]]).sum())
    return max(0.0, total / _PAIRS)
