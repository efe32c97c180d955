"""Labels that come with others: how they are found, how they lie on disk, what becomes of a row's best labels.

Where labels lie within each other (a topic's topic, a term's parent), a label's classifier may say less than that of a label
inside it. A label implies those that all its training rows have. They are found exactly: two passes over Y, or more where
memory is short. What is implied is then lifted.

The folder `implied` of a model is a matrix of ones (K x K, csr): row j has the labels that every training row of label j
has. See `linear.kernels.implied` for what they do to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.implied import Implied, first_others, intersect, lift
from xmc_stream.models.cache import shared_cache
from xmc_stream.models.kind import Checker
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import StoredModel
from xmc_stream.store.nodes import understood

IMPLIED = "implied"  # the folder, and the attribute that says what it holds
FEWEST = 5  # training rows of a label that implies others: of fewer, it may be chance
_ENTRY_BYTES = 24  # of a list, also while lists are put together
_LABEL_BYTES = 64  # counts, room, sizes and where lists begin


@dataclass(frozen=True)
class ImpliedLabels:
    """Of an opened model. margin: of their scores; pairs: of a label and one that it implies, 0 where there are none."""

    model: StoredModel
    margin: float = 0.0
    pairs: int = 0

    @classmethod
    def of(cls, model: StoredModel) -> ImpliedLabels:
        """What a model's attributes say. Raises StoreError where it cannot be."""
        about = model.attributes.get(IMPLIED)
        if about is None:
            return cls(model)
        with understood(model.path / "zarr.json"):
            margin, pairs = float(about["margin"]), about["pairs"]
            if not (margin > 0 and type(pairs) is int and pairs >= 0):
                raise ValueError(f"{IMPLIED}: {about}")
        return cls(model, margin, pairs)

    @property
    def nbytes(self) -> int:
        """In memory."""
        return 8 * (self.model.n_labels + 1) + 4 * self.pairs if self.pairs else 0

    def read(self) -> Implied:
        """Into memory."""
        k = self.model.n_labels
        matrix = SparseMatrix(self.model.path / IMPLIED).expect((k, k), "csr_matrix", None)
        if matrix.nnz != self.pairs:
            raise StoreError(
                f"{matrix.path} has {matrix.nnz} labels where {self.pairs} were noted: it is damaged; train the model again"
            )
        block = matrix.block(0, k)
        return Implied(block.indptr, block.indices, np.float32(self.margin))

    def lift(self, best: Ranking, barred: Labels, cache_bytes: int) -> None:
        """Let the best labels of some rows lift what they imply. cache_bytes: for what the threads of a process share."""
        if self.pairs:
            key = (str(self.model.path), IMPLIED)
            with shared_cache(cache_bytes).use(key, self.nbytes, self.read) as implied:
                lift(implied, best, barred)

    def hash(self, update: Callable[[Any], None]) -> None:
        """Hash what scores depend on, beside the margin, which is a parameter."""
        if self.pairs:
            implied = self.read()
            update(implied.ptr.astype("<i8").data)
            update(implied.labels.astype("<i8").data)

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """The labels as a matrix."""
        path, k = self.model.path / IMPLIED, self.model.n_labels
        if self.pairs and (matrix := checker.matrix(path, (k, k), "csr_matrix")) is not None:
            checker.expect(f"the labels of {path}", matrix.nnz, self.pairs)
            yield from checker.lines({IMPLIED: matrix})


def implied_needs(plan: MemoryPlan, dataset: Dataset) -> dict[str, int]:
    """Bytes by component that finding them takes at least."""
    return {
        "labels": _LABEL_BYTES * dataset.n_labels, "row blocks": 3 * plan.row_block_bytes, "lists of labels": MIB
    }  # fmt: skip


def implied_read(dataset: Dataset) -> int:
    """Bytes that finding them reads, where memory is not short."""
    Y = dataset.Y_rows()
    return int(2 * (Y.nnz * Y.entry_bytes + 8 * Y.n_lines))


@dataclass(frozen=True)
class ImpliedJob:
    """Find what each label implies, and write it into the folder `out` of a model."""

    data: str
    out: str
    plan: MemoryPlan

    @property
    def key(self) -> str:
        """There is one."""
        return IMPLIED

    def run(self) -> Receipt:
        """Find and write; the receipt has how many pairs there are."""
        dataset = Dataset(self.data)
        Y, k = dataset.Y_rows(), dataset.n_labels
        needs = implied_needs(self.plan, dataset)
        self.plan.refuse_unless(needs, "finding implied labels")
        others = np.full(k, -1, np.int64)
        for block in Y.blocks(self.plan.row_block_bytes):
            first_others(Labels.of(block), others)
        room = np.where(dataset.label_counts() >= FEWEST, np.maximum(others, 0), 0)
        most = (MIB + self.plan.budget - sum(needs.values())) // _ENTRY_BYTES
        with new_matrix(Path(self.out), "csr_matrix", (k, k), None) as writer:
            for first, last in _ranges(room, most):
                writer.append(*implied_of(lambda: Y.blocks(self.plan.row_block_bytes), first, room[first:last]))
        return {"pairs": writer.nnz, "bytes_read": Y.bytes_read}


def implied_of(
    blocks: Callable[[], Iterable[Block]], first: int, room: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """How many labels each of labels first, first + 1, ... implies, and which. blocks: gives the rows of Y.

    room: what the lists of these labels take at most.
    """
    ptr = np.concatenate([[0], np.cumsum(room)])
    sizes, labels = np.full(len(room), -1, np.int64), np.empty(ptr[-1], np.int32)
    for block in blocks() if len(labels) else ():
        intersect(Labels.of(block), first, ptr, sizes, labels)
    sizes = np.maximum(sizes, 0) * (room > 0)
    kept = np.arange(len(labels)) < np.repeat(ptr[:-1] + sizes, room)
    return sizes, labels[kept]


def _ranges(room: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of labels whose lists take so much together, or one label's."""
    ends, first = np.cumsum(room), 0
    while first < len(room):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield first, last
        first = last
