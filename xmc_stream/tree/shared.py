"""What all jobs of a training share: the data, the folder of the unfinished model, parameters, weights that were given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.kernels.dcd import ONCE
from xmc_stream.methods.contract import WEIGHTS
from xmc_stream.methods.weights import LABELS, Given, RowWeights
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.tree.nodes import structure_path
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.structure import Structure


@dataclass(frozen=True)
class Shared:
    """The same for all jobs of a run. samples, labels: whether these have weights, see `methods.weights`."""

    data: str
    work: str
    parameters: TreeParameters
    seed: int
    samples: bool = False
    labels: bool = False

    @classmethod
    def of(cls, dataset: Dataset, work: Path, parameters: TreeParameters, seed: int, given: Given | None) -> Shared:
        """Of a run. given: what it keeps at WEIGHTS in its work folder."""
        has = (False, False) if given is None else (given.samples is not None, given.labels is not None)
        return cls(str(dataset.path), str(work), parameters, seed, *has)

    @property
    def model(self) -> Path:
        """The folder of the unfinished model."""
        return Path(self.work)

    def dataset(self) -> Dataset:
        """The data, opened."""
        return Dataset(self.data)

    def structure(self, tree: int, n_labels: int) -> Structure:
        """The shape of a tree."""
        return Structure.read(structure_path(self.model, tree), n_labels, checked=False)

    def row_weights(self) -> RowWeights:
        """Reads those of rows."""
        return RowWeights(self.model / WEIGHTS if self.samples else None)

    def label_weights(self, labels: NDArray[np.int64]) -> NDArray[np.float64]:
        """How many times C counts for the positives of some labels: `Times.classes`."""
        if not self.labels:
            return ONCE.classes
        weights = np.ones((len(labels), 2))
        array = open_array(self.model / WEIGHTS / LABELS)
        weights[:, 1] = array.read(0, array.size)[labels]
        return weights
