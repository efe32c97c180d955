"""Which rows a node's children are trained on beside those that have a label below it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.permutation import key_of, uniform
from xmc_stream.tree.kernels.beam import Beams

_HALF = np.float32(0.5)


@kernel
def draw_others(
    first_row: int, beams: Beams, y: Labels, nodes: NDArray[np.int32], seed: int, domain: int, others: NDArray[np.int32],
    keys: NDArray[np.float32],
) -> None:  # fmt: skip
    """Of each row the nodes of its beam that no label of it lies below, and a key each: path / 2 + Gumbel noise.

    nodes: of each label. The noise is drawn by seed, domain, node and row. others, keys (n, b): -1 where there is none.
    """
    n, b = beams.nodes.shape
    for i in range(n):
        for t in range(b):
            node = beams.nodes[i, t]
            others[i, t] = node
            if node < 0:
                continue
            for q in range(y.indptr[i], y.indptr[i + 1]):
                if nodes[y.indices[q]] == node:
                    others[i, t] = -1
                    break
            if others[i, t] >= 0:
                u = uniform(key_of(seed, domain, node, first_row + i), 0)
                noise = -np.log(-np.log(u + 2.0**-60))
                keys[i, t] = np.float32(np.float64(_HALF * beams.paths[i, t]) + noise)
