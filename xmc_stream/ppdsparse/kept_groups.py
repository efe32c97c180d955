"""Groups of labels that a warm start takes over from its model: nothing of them is learned again.

Old labels stay in their groups. A new one joins, in each clustering, the group whose classifier scores its rows highest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.products import multiply
from xmc_stream.linear.guide import GUIDE, Guide, GuideSizes, write_guide
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import LinearWeights, half_holds
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.groups import CLUSTERINGS, GROUPS, N_GROUPS, group_needs
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.start import matched
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import SparseMatrix

_ROWS = 64  # of a new label, that choose its groups
_LEAST_KEPT = 0.8  # of the labels: with fewer, groups are learned anew


def takes_groups(model: LinearWeights, kept: int, new: int) -> bool:
    """Whether a model has groups that fit so many labels of its own and new ones."""
    sizes = GuideSizes.of(model)
    fits = sizes is not None and (sizes.clusterings, sizes.groups) == (CLUSTERINGS, GROUPS)
    return fits and kept >= _LEAST_KEPT * (kept + new)


@dataclass(frozen=True)
class KeepGroupsJob:
    """Write the groups of a model into the folder `out` of another one. match: what a `MatchJob` left."""

    problem: Problem
    model: str
    match: str
    out: str

    @property
    def key(self) -> str:
        """The same as of learning them."""
        return GUIDE

    def run(self) -> Receipt:
        """Copy, place new labels, write; the receipt as of learning them."""
        drop_tiles()
        dataset, model = Dataset(self.problem.data), LinearWeights(self.model)
        self.problem.plan.refuse_unless(group_needs(self.problem.plan, dataset), "groups of labels")
        guide = Guide(model, GuideSizes.of(model))  # type: ignore[arg-type]  # see takes_groups
        n, X = dataset.n_labels, dataset.X_rows()
        found = matched(Path(self.match), n, 0, n)
        groups = np.repeat(np.arange(0, N_GROUPS, GROUPS, dtype=np.uint8)[:, None], n, axis=1)
        kept = np.flatnonzero(found >= 0)
        groups[:, kept] = guide.groups(0, model.n_labels)[:, found[kept]]
        block, bias = guide.weights().block(0, N_GROUPS), guide.bias()
        new = np.flatnonzero((found < 0) & (dataset.label_counts() > 0))
        if len(new):
            directions = np.zeros((dataset.n_features, N_GROUPS))
            directions[block.indices, np.repeat(np.arange(N_GROUPS), np.diff(block.indptr))] = block.values
            Y = dataset.Y_columns()
            for label in new.tolist():
                groups[:, label] = _nearest(_some_rows(Y, label), X, directions, bias)
        tiles = TileSizes(0, N_GROUPS, dataset.n_features)
        tiles.add(np.diff(block.indptr), block.indices)
        # as of groups that are learned: how many weights the labels will have is not known
        half = self.problem.parameters.halves(large=True) and half_holds([block.values])
        write_guide(Path(self.out), dataset.n_features, [block], bias, groups, np.float16 if half else np.float32)
        return {
            "clusterings": CLUSTERINGS,
            "groups": GROUPS,
            "tile": tiles.ranges[-1].tile,
            "weights": tiles.ranges[-1].weights,
            "bytes_read": X.bytes_read,
        }


def _some_rows(Y: SparseMatrix, label: int) -> NDArray[np.int64]:
    """Rows of a label, evenly spaced, ascending."""
    counts = int(np.diff(Y.ends(label, label + 1))[0])
    step, rows, begin = -(-counts // _ROWS), [], 0
    for window in Y.index_windows(label, label + 1, MIB // 16):
        rows.append(window[(-begin) % step :: step].astype(np.int64))
        begin += len(window)
    return np.concatenate(rows)


def _nearest(
    rows: NDArray[np.int64], X: SparseMatrix, directions: NDArray[np.float64], bias: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Of each clustering the group of the highest mean score; ties go to the first."""
    scores = np.empty((len(rows), N_GROUPS))
    multiply(*CSR.of(X.gather(rows)), directions, scores)
    mean = (scores.mean(axis=0) + bias).reshape(CLUSTERINGS, GROUPS)
    return np.asarray(np.arange(CLUSTERINGS) * GROUPS + mean.argmax(axis=1), np.uint8)
