"""From rows to labels: down the levels of each tree, then the score of a label, and the mean over trees.

    z_k = w_k.x + b_k          path  S_c = S_parent - max(0, 1 - z_c)^3,  S_root = 0
    score of a label           s = -max(0, 1.3 - z)^3 + a S_leaf + what the guide says (`tree.guide`)
    several trees              the mean of s where rows have several labels, else ln of the mean of exp(s)

a is 1/2 where rows have several labels, else 1/4. A score is at most 0 and saturates; ties go to the larger mean of z, then
to the lower label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.store.dataset import Dataset
from xmc_stream.tree.beams import at_root, descended, descended_to_all
from xmc_stream.tree.guide import CLUSTERINGS, GROUPS, N_GROUPS, guide_weight
from xmc_stream.tree.kernels.beam import (
    Beams,
    Best,
    Hints,
    Rule,
    average_trees,
    hint_terms,
    pairs_by_node,
    score_labels,
)
from xmc_stream.tree.kernels.records import Panels
from xmc_stream.tree.kernels.whole import score_all_labels
from xmc_stream.tree.nodes import GUIDE
from xmc_stream.tree.structure import Structure

SHORT = 1.3
SEVERAL = 1.5  # labels of a row, on average, from which on rows have several
LIST = 20  # labels of a tree that a mean is made of
UNREACHED = np.float32(UNSEEN / 2)  # the score of a label that no beam reached: below every other but UNSEEN
UnitsOf = Callable[[int, int, NDArray[np.int64]], Iterable[Panels]]  # of a tree and a level: those of some parents


def score_of(dataset: Dataset, guide: bool) -> dict[str, Any]:
    """The rule by which labels are scored, as a model's attributes have it. guide: whether there may be one."""
    labels_per_row = dataset.Y_rows().nnz / max(dataset.n_samples, 1)
    several = labels_per_row > SEVERAL
    weight = guide_weight(labels_per_row) if guide and several and dataset.n_labels >= 2 * GROUPS else 0.0
    return {"short": SHORT, "path": 0.5 if several else 0.25, "guide": weight, "by_score": several}


@dataclass(frozen=True)
class Scorer:
    """Scores the labels that the beams of some rows reach."""

    trees: Sequence[Structure]
    groups: NDArray[np.uint8]
    units: UnitsOf
    score: Mapping[str, Any]
    beam: int

    def best(self, x: CSR, barred: Labels, k: int) -> Best:
        """The k best labels of each row, best first. barred: pairs that are left out."""
        n = len(x.indptr) - 1
        m = k if len(self.trees) == 1 else LIST  # whatever k is: a mean depends on how long the lists are
        hints = self._hints(x)
        lists = [self._of_tree(tree, x, hints, barred, no_labels(n, m)) for tree in range(len(self.trees))]
        if len(lists) == 1:
            return lists[0]
        best = no_labels(n, k)
        beside = Best(*(np.concatenate(parts, axis=1) for parts in zip(*lists, strict=True)))
        average_trees(beside, len(lists), bool(self.score["by_score"]), best)
        return best

    def _hints(self, x: CSR) -> Hints:
        terms = np.empty((len(x.indptr) - 1, N_GROUPS if len(self.groups) else 0), np.float32)
        if len(self.groups):
            for panels in self.units(GUIDE, 0, np.zeros(1, np.int64)):
                hint_terms(x, panels, np.float32(self.score["guide"] / CLUSTERINGS), terms)
        return Hints(terms, self.groups)

    def every(self, x: CSR, scores: NDArray[np.float32]) -> None:
        """Enter the score of every label that the beams of the first tree reach (n, K)."""
        order, level, hints, beams = self.trees[0].order, self.trees[0].levels[-1], self._hints(x), self._leaves(0, x)
        pairs = pairs_by_node(beams.nodes, level.n_parents)
        for panels in self.units(0, level.number, pairs.nodes):
            score_all_labels(x, pairs, beams, panels, order, self._rule, hints, scores)

    def _of_tree(self, tree: int, x: CSR, hints: Hints, barred: Labels, best: Best) -> Best:
        order, level, beams = self.trees[tree].order, self.trees[tree].levels[-1], self._leaves(tree, x)
        pairs = pairs_by_node(beams.nodes, level.n_parents)
        for panels in self.units(tree, level.number, pairs.nodes):
            score_labels(x, pairs, beams, panels, order, self._rule, hints, barred, best)
        return best

    def _leaves(self, tree: int, x: CSR) -> Beams:
        """The leaves that rows reach, and their paths."""
        beams = at_root(len(x.indptr) - 1)
        for level in self.trees[tree].levels[:-1]:
            units = partial(self.units, tree, level.number)
            if self.beam < level.n_children:
                beams = descended(level, units, x, beams, self.beam)
            else:
                beams = descended_to_all(level, units, x, beams)
        return beams

    @property
    def _rule(self) -> Rule:
        return Rule(np.float32(self.score["short"]), np.float32(self.score["path"]))


def no_labels(n: int, k: int) -> Best:
    """Of n rows, before any label is seen."""
    return Best(
        np.full((n, k), -1, np.int64), np.full((n, k), -np.inf, np.float32), np.full((n, k), -np.inf, np.float32)
    )
