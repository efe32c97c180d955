"""The rows that children of a parent are solved on: those with a label below the parent, and of the others some (`Others`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.tree.beams import Others
from xmc_stream.tree.structure import Level, Structure


class Parent(NamedTuple):
    """The rows of a parent, ascending, and which of these each of its children has, by their places."""

    rows: NDArray[np.int64]
    y: Labels


def parents_of(
    Y: SparseMatrix, structure: Structure, level: Level, parents: NDArray[np.int64], before: Sequence[str], negatives: float
) -> Iterator[Parent]:  # fmt: skip
    """The rows of some parents of a level, ascending. before: packs of the beams of all rows.

    The one parent of the first level has all rows; one whose only child is a node has none, as that is not solved.
    """
    below = [structure.order[level.parents[c] : level.parents[c + 1]] for c in parents if not level.alone[c]]
    labels = np.sort(np.concatenate([np.empty(0, np.int64), *below]))
    columns = Y.gather(labels)
    others = Others(before, parents) if before else None
    for number, parent in enumerate(parents):
        if level.alone[parent]:
            yield Parent(np.empty(0, np.int64), Labels(np.zeros(2, np.int64), np.empty(0, np.int64)))
            continue
        at = np.searchsorted(labels, structure.order[level.parents[parent] : level.parents[parent + 1]])
        parts = [columns.indices[columns.indptr[line] : columns.indptr[line + 1]] for line in at]
        of_children = level.children[level.ptr[parent] : level.ptr[parent + 1] + 1] - level.parents[parent]
        ends = np.concatenate([[0], np.cumsum([len(part) for part in parts])])[of_children]
        found = np.concatenate(parts).astype(np.int64)
        if others is None:
            rows = np.arange(Y.shape[0])
        else:
            positive = np.unique(found)
            rows = np.sort(np.concatenate([positive, others.drawn(number, int(np.ceil(negatives * len(positive))))]))
        yield Parent(rows, Labels(ends.astype(np.int64), np.searchsorted(rows, found)))


def union_of(parents: Sequence[Parent]) -> NDArray[np.int64]:
    """The rows of some parents together, ascending."""
    return np.unique(np.concatenate([parent.rows for parent in parents]))
