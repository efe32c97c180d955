"""Warm start: the trees of a model, and the groups of its guide, for data that grew. What is learned on them is learned anew.

A label that the model has stays where it is (`methods.start` says which it is). A new one hangs below the leaf whose labels it
is most like, and joins the group of each clustering likewise: the sum of their vectors has the largest cosine with its own.
Labels that are gone are left out, and nodes that have none left.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.methods.start import check_start, match_bytes, matched_labels, said_of
from xmc_stream.models.model import Model
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import StoredModel
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.clustering import DIMENSIONS, WINDOW, Vectors
from xmc_stream.tree.guide import CLUSTERINGS, GROUPS, read_groups, write_groups
from xmc_stream.tree.kernels.vectors import add_to_sides, nearest, to_length_one
from xmc_stream.tree.nodes import structure_path
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.structure import Structure

_LABEL_BYTES = 80  # of a label, while it is put where it belongs


def refuse_start(model: Model, kind: str, n_trees: int, dataset: Dataset) -> None:
    """Raise InputError where a training cannot begin from a model."""
    if model.kind != kind:
        raise InputError(f"{model.path} is a {model.kind} model, which has no trees to begin from")
    check_start(model, dataset)
    if model.attributes["trees"] != n_trees:
        raise InputError(f"{model.path} has {model.attributes['trees']} trees: set n_trees to as many")


def kept_nodes(model: StoredModel) -> list[int]:
    """Of each level but the last of a model's trees, at most."""
    return [max(of_trees) for of_trees in zip(*model.attributes["levels"], strict=True)][:-1]


def start_needs(model: StoredModel, dataset: Dataset, threads: int) -> dict[str, int]:
    """Bytes by component that jobs of this module take, one on each thread."""
    sets = max([CLUSTERINGS * GROUPS, *kept_nodes(model)])
    of_labels = match_bytes(model, dataset) + _LABEL_BYTES * dataset.n_labels
    return {"labels of both": threads * of_labels, "vectors": threads * (12 * sets + 4 * WINDOW) * DIMENSIONS}


@dataclass(frozen=True)
class KeepTreeJob:
    """A tree of a model, with the labels of the data."""

    of: Shared
    tree: int
    model: str
    vectors: Vectors
    out: str

    @property
    def key(self) -> str:
        """The tree."""
        return f"structure/{self.tree}"

    def run(self) -> Receipt:
        """Match, hang new labels, write."""
        dataset, model = self.of.dataset(), StoredModel(self.model)
        found = matched_labels(model, dataset)
        before = Structure.read(structure_path(model.path, self.tree), model.n_labels)
        place = np.empty(model.n_labels, np.int64)
        place[before.order] = np.arange(model.n_labels)
        place = np.where(found >= 0, place[found], model.n_labels)  # new labels stand last in their leaf
        order, bounds = np.argsort(place, kind="stable"), list[NDArray[np.int64]]()
        if before.bounds:
            leaves = before.bounds[-1]
            leaf = np.where(found >= 0, np.searchsorted(leaves, place, side="right") - 1, -1)
            leaf = joined(self.vectors, leaf, len(leaves) - 1)
            order = np.lexsort((place, leaf))
            for above in before.bounds:
                sizes = np.bincount(np.searchsorted(above, leaves[leaf], side="right") - 1)
                bounds.append(np.concatenate([[0], np.cumsum(sizes[sizes > 0])]))
        Structure(order, bounds).write(Path(self.out))
        return said_of(model, dataset, found, found >= 0)


@dataclass(frozen=True)
class KeepGroupsJob:
    """The groups of a model's guide, with the labels of the data."""

    of: Shared
    model: str
    vectors: Vectors
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "groups"

    def run(self) -> Receipt:
        """Match, join, write."""
        model = StoredModel(self.model)
        found = matched_labels(model, self.of.dataset())
        groups = read_groups(model.path, model.n_labels)[found].astype(np.int64)
        for r in range(CLUSTERINGS):
            mine = np.where(found >= 0, groups[:, r] - r * GROUPS, -1)
            groups[:, r] = joined(self.vectors, mine, GROUPS) + r * GROUPS
        write_groups(groups.astype(np.uint8), Path(self.out))
        return {}


def joined(vectors: Vectors, sets: NDArray[np.int64], n_sets: int) -> NDArray[np.int64]:
    """The set of each label, where -1 becomes the one whose sum of vectors has the largest cosine with the label's."""
    new = np.flatnonzero(sets < 0)
    if not len(new):
        return sets
    sums, sides, arrays = np.zeros((n_sets, 1, DIMENSIONS)), np.zeros(WINDOW, np.uint8), vectors.opened()
    old, sets = np.flatnonzero(sets >= 0), sets.copy()
    for first in range(0, len(old), WINDOW):
        stop_if_unwanted()
        some = old[first : first + WINDOW]
        add_to_sides(vectors.of(some, arrays), sets[some].astype(np.int32), sides[: len(some)], sums)
    centres = sums[:, 0].astype(np.float32)
    to_length_one(centres)
    for first in range(0, len(new), WINDOW):
        stop_if_unwanted()
        some = new[first : first + WINDOW]
        sets[some] = nearest(vectors.of(some, arrays), centres)
    return sets
