"""Beams as wide as a level: each node and each label has a place of its own, so none is put in order.

Paths and scores are those of `tree.kernels.beam`, bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.jit import kernel
from xmc_stream.tree.kernels.beam import Beams, Hints, Pairs, Rule
from xmc_stream.tree.kernels.records import Panels, margins

_0, _1 = np.float32(0.0), np.float32(1.0)


@kernel
def go_down_to_all(x: CSR, pairs: Pairs, above: Beams, of: Panels, below: Beams) -> None:
    """Enter the children of some parents into their level (n, children), at their numbers; -1 where a path is -inf.

    pairs: of above.
    """
    z, b, weights = np.empty(256, np.float32), above.nodes.shape[1], of.records.view(np.int8)
    low, high = np.searchsorted(pairs.nodes, of.first), np.searchsorted(pairs.nodes, of.first + len(of.panels) - 1)
    for r in range(low, high):
        parent = pairs.nodes[r] - of.first
        for q in range(pairs.ptr[r], pairs.ptr[r + 1]):
            i, t = pairs.places[q] // b, pairs.places[q] % b
            nodes, paths = below.nodes[i], below.paths[i]
            for panel in range(of.panels[parent], of.panels[parent + 1]):
                m = margins(i, x, panel, of, weights, z)
                for u in range(m):
                    short = max(_0, _1 - z[u])
                    path = above.paths[i, t] - short * short * short
                    if path > -np.inf:
                        child = of.children[panel] + u
                        nodes[child], paths[child] = child, path


@kernel
def score_all_labels(
    x: CSR, pairs: Pairs, above: Beams, of: Panels, order: NDArray[np.int64], rule: Rule, hints: Hints,
    scores: NDArray[np.float32],
) -> None:  # fmt: skip
    """Enter the scores of the labels of some leaves (n, K); a score of -inf is left out. See `score_labels`."""
    z, b, weights = np.empty(256, np.float32), above.nodes.shape[1], of.records.view(np.int8)
    low, high = np.searchsorted(pairs.nodes, of.first), np.searchsorted(pairs.nodes, of.first + len(of.panels) - 1)
    for r in range(low, high):
        parent = pairs.nodes[r] - of.first
        for q in range(pairs.ptr[r], pairs.ptr[r + 1]):
            i, t = pairs.places[q] // b, pairs.places[q] % b
            row, base = scores[i], rule.path * above.paths[i, t]
            for panel in range(of.panels[parent], of.panels[parent + 1]):
                m = margins(i, x, panel, of, weights, z)
                for u in range(m):
                    short = max(_0, rule.short - z[u])
                    score = base - short * short * short
                    if score > -np.inf:
                        label = order[of.children[panel] + u]
                        for r in range(hints.groups.shape[1]):
                            score += hints.terms[i, hints.groups[label, r]]
                        row[label] = score
