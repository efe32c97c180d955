"""Rows on their way down a tree: the children of the nodes that a row goes on from are scored, and the best are kept.

The margin of child k is z_k = w_k.x + b_k, summed in the order of the row's features, by whole units of the child's scale. The
path of a child is S_k = S_parent - max(0, 1 - z_k)^3, that of the root 0. Pairs of a row and a node are visited node by node,
so that a node's weights are read once. What is kept does not depend on the order: ties go to the lower number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.jit import inner_kernel, kernel
from xmc_stream.kernels.order import order_of
from xmc_stream.kernels.permutation import word_bits
from xmc_stream.kernels.ranking import insert
from xmc_stream.tree.kernels.records import Panels, margins

_0, _1 = np.float32(0.0), np.float32(1.0)


class Beams(NamedTuple):
    """Of each row the best nodes of a level, and their paths (n, b), best first; -1 and -inf where there are fewer."""

    nodes: NDArray[np.int32]
    paths: NDArray[np.float32]


class Rule(NamedTuple):
    """The score of a label, -max(0, short - z)^3 + path S: see `score_labels`."""

    short: np.float32
    path: np.float32


class Hints(NamedTuple):
    """What the guide says: terms (n, groups) of each row, at most 0, and the groups of each label (K, r); r may be 0."""

    terms: NDArray[np.float32]
    groups: NDArray[np.uint8]


class Best(NamedTuple):
    """Of each row the best labels, their scores and margins (n, k), best first; -1 and -inf where there are fewer."""

    labels: NDArray[np.int64]
    scores: NDArray[np.float32]
    margins: NDArray[np.float32]


class Pairs(NamedTuple):
    """Pairs of a row and a node, node by node.

    nodes (m,): those that have a row, ascending; ptr (m + 1,): where the pairs of each begin in places, which are places of a
    beam (n, b), rows ascending in each.
    """

    nodes: NDArray[np.int64]
    ptr: NDArray[np.int64]
    places: NDArray[np.int64]


@kernel
def pairs_by_node(nodes: NDArray[np.int32], n_nodes: int) -> Pairs:
    """The pairs of a beam (n, b), where -1 is none. n_nodes: of its level; what it takes does not grow with them."""
    n, b = nodes.shape
    flat = nodes.reshape(n * b)
    filled = 0
    for place in range(n * b):
        filled += int(flat[place] >= 0)
    keys, at, order = np.empty(filled, np.int64), np.empty(filled, np.int64), np.empty(filled, np.int64)
    filled = 0
    for place in range(n * b):
        if flat[place] >= 0:
            keys[filled], at[filled] = flat[place], place
            filled += 1
    order_of(keys, word_bits(n_nodes), order)
    found, ptr, m = np.empty(filled, np.int64), np.empty(filled + 1, np.int64), 0
    for q in range(filled):
        order[q] = at[order[q]]
        node = flat[order[q]]
        if m == 0 or found[m - 1] != node:
            found[m], ptr[m] = node, q
            m += 1
    ptr[m] = filled
    return Pairs(found[:m], ptr[: m + 1], order)


@kernel
def go_down(x: CSR, pairs: Pairs, above: Beams, of: Panels, below: Beams) -> None:
    """Fold the children of some parents into the beams of their level. pairs: of above."""
    z, b, weights = np.empty(256, np.float32), above.nodes.shape[1], of.records.view(np.int8)
    low, high = np.searchsorted(pairs.nodes, of.first), np.searchsorted(pairs.nodes, of.first + len(of.panels) - 1)
    for r in range(low, high):
        parent = pairs.nodes[r] - of.first
        for q in range(pairs.ptr[r], pairs.ptr[r + 1]):
            i, t = pairs.places[q] // b, pairs.places[q] % b
            nodes, paths = below.nodes[i], below.paths[i]
            worst = paths[len(paths) - 1]
            for panel in range(of.panels[parent], of.panels[parent + 1]):
                m = margins(i, x, panel, of, weights, z)
                for u in range(m):
                    short = max(_0, _1 - z[u])
                    path = above.paths[i, t] - short * short * short
                    if path > worst or (path == worst and path > -np.inf):
                        insert(of.children[panel] + u, path, nodes, paths)
                        worst = paths[len(paths) - 1]


@inner_kernel
def insert_label(
    label: int, score: np.float32, z: np.float32, labels: NDArray[np.int64], scores: NDArray[np.float32],
    zs: NDArray[np.float32],
) -> None:  # fmt: skip
    """Put a label among a row's best, if it is one: ties go to the larger margin, then to the lower label."""
    q = len(scores) - 1
    if score < scores[q] or (score == scores[q] and (z < zs[q] or (z == zs[q] and label > labels[q]))):
        return
    while q > 0:
        s = scores[q - 1]
        if s > score or (s == score and (zs[q - 1] > z or (zs[q - 1] == z and labels[q - 1] < label))):
            break
        scores[q], zs[q], labels[q] = s, zs[q - 1], labels[q - 1]
        q -= 1
    scores[q], zs[q], labels[q] = score, z, label


@kernel
def score_labels(
    x: CSR, pairs: Pairs, above: Beams, of: Panels, order: NDArray[np.int64], rule: Rule, hints: Hints, barred: Labels,
    best: Best,
) -> None:  # fmt: skip
    """Fold the labels of some leaves into each row's best. order: the labels of the tree; barred: left out, if there are any.

    score = -max(0, short - z)^3 + path S_leaf + the terms of its groups.
    """
    z, b, weights = np.empty(256, np.float32), above.nodes.shape[1], of.records.view(np.int8)
    low, high = np.searchsorted(pairs.nodes, of.first), np.searchsorted(pairs.nodes, of.first + len(of.panels) - 1)
    for r in range(low, high):
        parent = pairs.nodes[r] - of.first
        for q in range(pairs.ptr[r], pairs.ptr[r + 1]):
            i, t = pairs.places[q] // b, pairs.places[q] % b
            labels, scores, zs = best.labels[i], best.scores[i], best.margins[i]
            base = rule.path * above.paths[i, t]
            for panel in range(of.panels[parent], of.panels[parent + 1]):
                m = margins(i, x, panel, of, weights, z)
                for u in range(m):
                    short = max(_0, rule.short - z[u])
                    score = base - short * short * short
                    if score >= scores[len(scores) - 1] and score > -np.inf:
                        label = order[of.children[panel] + u]
                        for r in range(hints.groups.shape[1]):
                            score += hints.terms[i, hints.groups[label, r]]
                        if score >= scores[len(scores) - 1] and not has_label(i, label, barred):
                            insert_label(label, score, z[u], labels, scores, zs)


@kernel
def hint_terms(x: CSR, of: Panels, weight: np.float32, terms: NDArray[np.float32]) -> None:
    """terms[i, g] = -weight max(0, 1 - z_g)^3 for the groups of the guide, which are the children of its one parent."""
    z, weights = np.empty(256, np.float32), of.records.view(np.int8)
    for i in range(len(terms)):
        m = margins(i, x, 0, of, weights, z)
        for g in range(m):
            short = max(_0, _1 - z[g])
            terms[i, g] = -weight * short * short * short


@inner_kernel
def has_label(i: int, label: int, of: Labels) -> bool:
    """Whether row i has a label; none has one where there are no rows."""
    if len(of.indptr):
        for q in range(of.indptr[i], of.indptr[i + 1]):
            if of.indices[q] == label:
                return True
    return False


@kernel
def average_trees(one: Best, n_trees: int, by_score: bool, best: Best) -> None:
    """Fold the lists of several trees into each row's best: the mean of a label's scores, and of its margins.

    one (n, n_trees m): lists of m labels beside each other, -1 where there are fewer. by_score: the mean of the scores, where
    a label that a tree did not reach has the last score of its list; else the logarithm of the mean of exp(score).
    """
    n, width = one.labels.shape
    m = width // n_trees
    last = np.empty(n_trees, np.float32)
    for i in range(n):
        labels, scores, zs = one.labels[i], one.scores[i], one.margins[i]
        for tree in range(n_trees):
            last[tree] = _0
            for q in range(m):
                if labels[tree * m + q] >= 0:
                    last[tree] = scores[tree * m + q]
        for q in range(width):
            label = labels[q]
            if label < 0:
                continue
            total, z, found, met = 0.0, 0.0, 0, False
            for tree in range(n_trees):
                score, there = last[tree], False
                for u in range(tree * m, tree * m + m):
                    if labels[u] == label:
                        met |= u < q
                        score, there = scores[u], True
                        z, found = z + np.float64(zs[u]), found + 1
                        break
                if by_score:
                    total += np.float64(score)
                elif there:
                    total += np.exp(np.float64(score))
            if met:
                continue
            mean = total / n_trees if by_score else np.log(max(total / n_trees, 1e-300))
            insert_label(
                label, np.float32(mean), np.float32(z / found), best.labels[i], best.scores[i], best.margins[i]
            )


@kernel
def order_ties(before: Best, best: Best) -> None:
    """Order equal scores of each row by the margins that its labels had before, then by label.

    best: labels and scores in order, some of them lifted; its margins become those of before, -inf of lifted labels, of which
    before has some or not, as k is.
    """
    n, k = best.labels.shape
    for i in range(n):
        labels, scores, zs = best.labels[i], best.scores[i], best.margins[i]
        for q in range(k):
            label, score, z = labels[q], scores[q], np.float32(-np.inf)
            for u in range(k):
                if before.labels[i, u] == label and label >= 0 and before.scores[i, u] == score:
                    z = before.margins[i, u]
            t = q
            while t > 0 and scores[t - 1] == score and (zs[t - 1] < z or (zs[t - 1] == z and labels[t - 1] > label)):
                labels[t], zs[t] = labels[t - 1], zs[t - 1]
                t -= 1
            labels[t], zs[t] = label, z


@kernel
def fill_up(
    counts: NDArray[np.int64],
    unreached: np.float32,
    unseen: np.float32,
    barred: Labels,
    labels: NDArray[np.int64],
    scores: NDArray[np.float32],
) -> None:
    """Where a row has fewer labels than there is room for, the others in their order, those without training rows last.

    counts (K,): training rows of each label.
    """
    n, k = labels.shape
    for i in range(n):
        filled = 0
        while filled < k and labels[i, filled] >= 0:
            filled += 1
        found = filled
        for turn in range(2 if found < k else 0):
            label = 0
            n_labels = len(counts)
            while label < n_labels and filled < k:
                if (counts[label] > 0) == (turn == 0):
                    known = has_label(i, label, barred)
                    for q in range(found):
                        known |= labels[i, q] == label
                    if not known:
                        labels[i, filled], scores[i, filled] = label, unreached if turn == 0 else unseen
                        filled += 1
                label += 1
