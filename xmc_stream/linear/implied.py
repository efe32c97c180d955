"""Labels that a model's labels imply: how they lie on disk, and what becomes of a row's best labels.

The folder `implied` of a model is a matrix of ones (K x K, csr): row j has the labels that every training row of label j
has. See `linear.kernels.implied` for what they do to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.implied import Implied, lift
from xmc_stream.linear.weights import LinearWeights
from xmc_stream.models.cache import shared_cache
from xmc_stream.models.model import Checker
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import understood

IMPLIED = "implied"  # the folder, and the attribute that says what it holds


@dataclass(frozen=True)
class ImpliedLabels:
    """Of an opened model. margin: of their scores; pairs: of a label and one that it implies."""

    model: LinearWeights
    margin: float
    pairs: int

    @classmethod
    def of(cls, model: LinearWeights) -> ImpliedLabels | None:
        """What a model's attributes say; None where no label implies one. Raises StoreError where it cannot be."""
        about = model.attributes.get(IMPLIED)
        if about is None:
            return None
        with understood(model.path / "zarr.json"):
            margin, pairs = float(about["margin"]), about["pairs"]
            if not (margin > 0 and type(pairs) is int and pairs >= 0):
                raise ValueError(f"{IMPLIED}: {about}")
        return cls(model, margin, pairs) if pairs else None

    @property
    def nbytes(self) -> int:
        """In memory."""
        return 8 * (self.model.n_labels + 1) + 4 * self.pairs

    def matrix(self) -> SparseMatrix:
        """Of all labels."""
        shape = (self.model.n_labels, self.model.n_labels)
        return SparseMatrix(self.model.path / IMPLIED).expect(shape, "csr_matrix", None)

    def read(self) -> Implied:
        """Into memory."""
        matrix = self.matrix()
        if matrix.nnz != self.pairs:
            raise StoreError(
                f"{matrix.path} has {matrix.nnz} labels where {self.pairs} were noted: it is damaged; train the model again"
            )
        block = matrix.block(0, self.model.n_labels)
        return Implied(block.indptr, block.indices, np.float32(self.margin))

    def used(self, cache_bytes: int) -> AbstractContextManager[Implied]:
        """The same, shared by the threads of a process. cache_bytes: for all that they share."""
        return shared_cache(cache_bytes).use((str(self.model.path), IMPLIED), self.nbytes, self.read)

    def hash(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on, beside the margin, which is a parameter."""
        implied = self.read()
        update(implied.ptr.astype("<i8").data)
        update(implied.labels.astype("<i8").data)

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """The labels as a matrix."""
        path, k = self.model.path / IMPLIED, self.model.n_labels
        if (matrix := checker.matrix(path, (k, k), "csr_matrix")) is not None:
            checker.expect(f"the labels of {path}", matrix.nnz, self.pairs)
            yield from checker.lines({IMPLIED: matrix})


def lift_implied(implied: ImpliedLabels | None, best: Ranking, barred: Labels, cache_bytes: int) -> None:
    """Let the best labels of some rows lift what they imply. None: nothing. cache_bytes: for what threads share."""
    if implied is not None:
        with implied.used(cache_bytes) as of_labels:
            lift(of_labels, best, barred)
