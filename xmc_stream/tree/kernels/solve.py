"""Children of a node, LANES beside each other: solved on the rows of the node, and taken as entries by feature."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES, soft_lines
from xmc_stream.kernels.jit import kernel
from xmc_stream.linear.kernels.dcd import Penalty, Steps
from xmc_stream.linear.kernels.lanecd import Lanes, Rest, begin_lanes, measure_lanes, settle_lanes
from xmc_stream.tree.kernels.records import Weights


@kernel
def solve_lanes(
    first: int, x: CSR, squares: NDArray[np.float64], rows: NDArray[np.float64], y: Labels, classes: NDArray[np.float64],
    penalty: Penalty, steps: Steps, rule: Rest, lanes: Lanes,
) -> int:  # fmt: skip
    """Solve children first, first + 1, ... of those whose rows are y; returns bits of the lanes that have rows."""
    used = begin_lanes(first, y, classes, penalty, lanes)
    settle_lanes(x, squares, rows, steps, penalty, used, rule, lanes)
    return used


@kernel
def measure_rows(
    x: CSR, squares: NDArray[np.float64], rows: NDArray[np.float64], penalty: Penalty, lanes: Lanes,
    figures: NDArray[np.float64],
) -> None:  # fmt: skip
    """Add to figures (LANES, 2), for each lane, what the rows add to its objective and to its duality gap."""
    losses = np.empty(LANES)
    measure_lanes(x, squares, rows, penalty, lanes, losses)
    figures[:, 0] += losses
    figures[:, 1] += losses
    for i in range(len(lanes.positive)):
        weight = rows[i] if len(rows) else 1.0
        for lane in range(LANES):
            a = np.float64(lanes.alpha[i * LANES + lane])
            if a > 0.0:
                h2 = np.float64(lanes.h2[((int(lanes.positive[i]) >> lane) & 1) * LANES + lane])
                figures[lane, 1] += 0.5 * h2 / weight * a * a - a


@kernel
def measure_weights(lam: float, lanes: Lanes, figures: NDArray[np.float64]) -> None:
    """As `measure_rows`, what the weights add."""
    for p in range(len(lanes.v)):
        w = max(abs(np.float64(lanes.v[p])) - lam, 0.0)
        figures[p % LANES, 0] += lam * w + 0.5 * w * w
        figures[p % LANES, 1] += lam * w + w * w
    for lane in range(LANES):
        bias = np.float64(lanes.v0[lane])
        figures[lane, 0] += 0.5 * bias * bias
        figures[lane, 1] += bias * bias


@kernel
def take_entries(
    used: int, lam: float, prune: float, lanes: Lanes, low: int, high: int, names: NDArray[np.int32], first: int,
    filled: int, entries: Weights,
) -> int:  # fmt: skip
    """The weights soft(v, lam) that are at least `prune` in size, feature by feature; returns how many there are so far.

    Of features [low, high), those of lanes that are used; lane 0 is child `first`. names: what the features are called, empty
    where that is their number. entries: behind the first `filled`, with room for LANES weights of each feature and LANES more.
    """
    v, least, bound = lanes.v, np.float32(prune), np.float32(lam)
    for j in range(low, high):
        largest = np.float32(0.0)
        for lane in range(LANES):
            largest = max(largest, abs(v[j * LANES + lane]))
        if largest < least + bound:
            continue
        name = names[j] if len(names) else np.int32(j)
        for lane in range(LANES):
            value = v[j * LANES + lane]
            w = value - min(max(value, -bound), bound)
            # written whether it counts or not: to foresee which do takes longer than to write
            entries.features[filled], entries.children[filled], entries.values[filled] = name, first + lane, w
            filled += int(abs(w) >= least and w != np.float32(0.0) and (used >> lane) & 1)
    return filled


@kernel
def margins_of(
    x: CSR, first: int, lam: float, prune: float, lanes: Lanes, z: NDArray[np.float32]
) -> None:  # fmt: skip
    """z[i, lane] = the margin of row first + i by the weights that `take_entries` takes; v becomes these."""
    v, sums, least, bound = lanes.v, lanes.sums, np.float32(prune), np.float32(lam)
    for p in range(len(v)):
        w = v[p] - min(max(v[p], -bound), bound)
        v[p] = w if abs(w) >= least else np.float32(0.0)
    for i in range(len(z)):
        soft_lines(x.indices, x.values, x.indptr[first + i], x.indptr[first + i + 1], v, np.float32(0.0), sums)
        for lane in range(LANES):
            z[i, lane] = sums[lane] + lanes.v0[lane]


@kernel
def mark_rows(y: Labels, nodes: NDArray[np.int32], first: int, positive: NDArray[np.uint16]) -> None:
    """positive[i] = a bit for each child first, first + 1, ... that a label of row i lies below.

    nodes (K, r): of each label, one in each of r clusterings.
    """
    for i in range(len(y.indptr) - 1):
        bits = 0
        for q in range(y.indptr[i], y.indptr[i + 1]):
            for r in range(nodes.shape[1]):
                lane = nodes[y.indices[q], r] - first
                if 0 <= lane < LANES:
                    bits |= 1 << lane
        positive[i] = np.uint16(bits)
