"""Labels that come with others: of each label, those that all its training rows have.

Where labels lie within each other (a topic's topic, a term's parent), a label's classifier may say less than that of a label
inside it. What is implied is then lifted, see `linear.kernels.implied`. Which labels imply which is found exactly: two passes
over Y, or more where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.linear.implied import IMPLIED
from xmc_stream.ppdsparse.groups import guide_weight
from xmc_stream.ppdsparse.kernels.implied import first_others, intersect
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import Block

MARGIN = 0.1  # where nothing else is asked for
FEWEST = 5  # training rows of a label that implies others: of fewer, it may be chance
_ENTRY_BYTES = 24  # of a list, also while lists are put together
_LABEL_BYTES = 64  # counts, room, sizes and where lists begin


def implied_margin(parameters: PPDSparseParameters, dataset: Dataset) -> float | None:
    """Margin of implied labels; None where no label is lifted."""
    if parameters.implied is not None:
        return parameters.implied
    return MARGIN if guide_weight(parameters, dataset) else None


def implied_attributes(receipt: Receipt, margin: float) -> dict[str, Any]:
    """What a model says of its implied labels."""
    return {"margin": margin, "pairs": receipt["pairs"]}


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
