"""Groups of labels, and classifiers of the groups: what a label that few rows have learns from labels like it.

A clustering cuts the labels into GROUPS groups of equal size: it splits them in two, and each half again. A label l is the
sum m_l of its rows over the square root of their number. A split is balanced 2-means: the half of the labels whose m_l.d is
highest stands against the others, d being the difference of the unit vectors of both halves' sums, until the halves stay.
There are CLUSTERINGS of them, each from other labels to begin with. A row is positive for a group if it has one of the
group's labels; the groups are solved as classes are, every row active.

Directions d and classifiers are learned on a sample of the rows, all of them where they are few. Every label is put on its
side by all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, ActiveSets, Labels
from xmc_stream.kernels.domains import LABEL_GROUPS
from xmc_stream.kernels.order import RowOrder
from xmc_stream.kernels.permutation import key_of, permuted, visiting_order, word_bits
from xmc_stream.kernels.products import add_transposed, multiply
from xmc_stream.linear.guide import GUIDE, Guide, write_guide
from xmc_stream.linear.kernels.dcd import new_scratch
from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import LinearWeights, half_holds
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.kernels.groups import add_to_labels, shares_of_sides
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.solver import Solver, has_dense_rows
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.matrix import Block, SparseMatrix, stream

CLUSTERINGS, LEVELS = 8, 2
GROUPS = 1 << LEVELS
N_GROUPS = CLUSTERINGS * GROUPS
_SPLITS = GROUPS - 1  # of a clustering, each with a direction
_EPOCHS = 2
_MOST_STEPS = 4  # of a split
_PRUNED = 2  # times the least weight of a class: that of a group
_SAMPLE_ENTRIES, _SAMPLE_PAIRS, _SAMPLE_ROWS = 3 << 20, 1 << 20, 1 << 18  # of X, of Y, and rows, at most
_ROW_BYTES = 96  # of a row of the sample in a solve
_LABEL_BYTES = 64 + CLUSTERINGS  # what a split holds, and groups
_NEW_ROWS = 64  # of a new label of a warm start, that choose its groups
_LEAST_KEPT = 0.8  # of the labels of a warm start: with fewer, groups are learned anew
GROUPS_SAY = ("clusterings", "groups", "tile", "weights")  # of a receipt, what a model says of its groups


def sample_rows(dataset: Dataset) -> int:
    """Rows that directions and groups are learned on."""
    n = dataset.n_samples
    of_x = _SAMPLE_ENTRIES * n // max(dataset.X_rows().nnz, 1)
    of_y = _SAMPLE_PAIRS * n // max(dataset.Y_rows().nnz, 1)
    return max(1, min(n, of_x, of_y, _SAMPLE_ROWS))


def group_needs(plan: MemoryPlan, dataset: Dataset) -> dict[str, int]:
    """Bytes by component that clustering the labels and solving the groups takes."""
    X, Y, rows = dataset.X_rows(), dataset.Y_rows(), sample_rows(dataset)
    entries, pairs = (1.2 * rows * matrix.nnz / max(matrix.n_lines, 1) for matrix in (X, Y))
    # the directions of a clustering, and the sums of both sides of its last splits, twice; the sums of labels: while labels are
    # split, these are fewer, and the halves before and after a level take the place of the others
    last = GROUPS // 2
    clustering = 8 * ((_SPLITS + 6 * last) * dataset.n_features + (_SPLITS + last) * dataset.n_labels)
    return {
        "sample of rows": int(2 * 8 * entries + 2 * 4 * pairs) + _ROW_BYTES * rows,
        "features": (40 + 8 * N_GROUPS) * dataset.n_features,
        "labels": _LABEL_BYTES * dataset.n_labels,
        "splits of a clustering": clustering,
        "row blocks": 3 * plan.row_block_bytes + 4 * MIB,
    }


def groups_budget(plan: MemoryPlan, dataset: Dataset) -> int:
    """Bytes that learning the groups may take: those of one job or, where that is too few, all, alone in its phase."""
    return plan.per_thread if sum(group_needs(plan, dataset).values()) <= plan.per_thread else plan.budget


def groups_run_beside(
    plan: MemoryPlan, dataset: Dataset, parameters: PPDSparseParameters, shares: int, beside: int
) -> bool:
    """Whether the groups are learned beside the first solves, in the memory that is one job's.

    beside: jobs that a process is planned to run beside each other, of so many shares that are solved.
    """
    one_more = beside == min(plan.threads, shares + 1)
    return one_more and groups_budget(plan, dataset) <= plan.per_thread and not parameters.all_rows


def groups_read(plan: MemoryPlan, dataset: Dataset) -> int:
    """Bytes that learning the groups reads: a sample, and all rows for some clusterings at a time."""
    share = sample_rows(dataset) / dataset.n_samples
    passes = share + -(-CLUSTERINGS // _together(plan, dataset))
    return int(
        passes
        * sum(matrix.nnz * matrix.entry_bytes + 8 * matrix.n_lines for matrix in (dataset.X_rows(), dataset.Y_rows()))
    )


def groups_work(dataset: Dataset) -> float:
    """Entries of all coordinate steps of the groups, and as many for clustering."""
    X = dataset.X_rows()
    entries = X.nnz * sample_rows(dataset) / max(X.n_lines, 1)
    return float(entries * (N_GROUPS * _EPOCHS + CLUSTERINGS * _SPLITS * _MOST_STEPS / 2))


def _together(plan: MemoryPlan, dataset: Dataset) -> int:
    """Clusterings that share a pass over the rows: as many as what is left of the budget lets be."""
    needs = group_needs(plan, dataset)
    spare = groups_budget(plan, dataset) - sum(needs.values())
    return min(CLUSTERINGS, 1 + max(0, spare) // max(1, needs["splits of a clustering"]))


@dataclass(frozen=True)
class GroupsJob:
    """Cluster the labels, learn the groups, and write both into the folder `out` of a model.

    prune: below what a weight of a class is left out.
    """

    problem: Problem
    prune: float
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return GUIDE

    def run(self) -> Receipt:
        """Cluster, solve, write; the receipt has the numbers of clusterings and groups, and the sizes of their tile."""
        drop_tiles()
        dataset = Dataset(self.problem.data)
        self.problem.plan.refuse_unless(group_needs(self.problem.plan, dataset), "learning groups of labels")
        X, Y = dataset.X_rows(), dataset.Y_rows()
        rows = np.empty(sample_rows(dataset), np.int64)
        visiting_order(0, dataset.n_samples, np.uint64(key_of(self.problem.seed, LABEL_GROUPS, 0, 0)), rows)
        rows.sort()
        x, y = X.gather(rows), Y.gather(rows)
        counts = dataset.label_counts()
        dense = has_dense_rows(dataset.n_samples, dataset.n_features, X.nnz)
        scale = 1.0 / np.sqrt(np.maximum(counts, 1))
        sample = _Sample(CSR.of(x), Labels.of(y), scale, dataset.n_features, dense)
        groups = self._cluster(dataset, (X, Y), sample, counts)
        solved = groups.copy()
        solved[:, counts == dataset.n_samples] = N_GROUPS  # a label of every row would make its groups so too
        blocks, biases = [], np.empty(N_GROUPS, np.float32)
        for g in range(N_GROUPS):
            block, biases[g] = self._solve(sample, solved[g // GROUPS], g)
            blocks.append(block)
        receipt = _written(self.out, self.problem.parameters, dataset.n_features, blocks, biases, groups)
        return {**receipt, "bytes_read": X.bytes_read + Y.bytes_read}

    def _cluster(
        self, dataset: Dataset, matrices: tuple[SparseMatrix, SparseMatrix], sample: _Sample,
        counts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:  # fmt: skip
        """Of each label the group in each clustering (CLUSTERINGS, K); labels without positives are in the first one."""
        together = _together(self.problem.plan, dataset)
        groups = _first_groups(dataset.n_labels)
        for first in range(0, CLUSTERINGS, together):
            some = range(first, min(first + together, CLUSTERINGS))
            directions = np.empty((dataset.n_features, len(some), _SPLITS))
            labels = [sample.labels] * len(some)
            for level in range(LEVELS):
                splits = range((1 << level) - 1, (2 << level) - 1)
                keys = [
                    np.uint64(key_of(self.problem.seed, LABEL_GROUPS, 1 + r, split)) for r in some for split in splits
                ]
                found, pairs = sample.split(labels, keys)
                directions[:, :, splits.start : splits.stop] = found.reshape(-1, len(some), len(splits))
                labels = [half for pair in pairs for half in pair]
            sums = self._sums(dataset, matrices, directions.reshape(-1, len(some) * _SPLITS))
            for at, r in enumerate(some):
                halves = [np.flatnonzero(counts)]
                for split in range(_SPLITS):
                    halves += _halves(halves[split], sums[:, at * _SPLITS + split] * sample.scale)
                for g, group in enumerate(halves[_SPLITS:]):
                    groups[r, group] += np.uint8(g)
        return groups

    def _sums(
        self, dataset: Dataset, matrices: tuple[SparseMatrix, SparseMatrix], directions: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Of each label, over its rows: x_i . d for each direction d (K, directions). One pass over the rows."""
        sums, most = np.zeros((dataset.n_labels, directions.shape[1])), self.problem.plan.row_block_bytes
        for x, y in stream(matrices, [most, most], 0, dataset.n_samples, self.problem.plan.cuts.rows):
            _add_along(CSR.of(x), Labels.of(y), directions, sums)
        return sums

    def _solve(self, sample: _Sample, groups: NDArray[np.uint8], g: int) -> tuple[Block, float]:
        """Weights and bias of a group, every row of the sample active. groups (K,): in the group's clustering."""
        n, p = sample.n_rows, replace(self.problem.parameters, rounds=2, max_rounds=2, epochs=_EPOCHS)
        of_group = np.flatnonzero(groups[sample.y.indices] == g)
        sign = np.full(n, -1, np.int8)
        sign[np.searchsorted(sample.y.indptr, of_group, side="right") - 1] = 1
        rows = np.arange(n)
        sets = ActiveSets(LABEL_GROUPS + g, np.array([0, n]), rows, sign, np.zeros(n))
        statistics = np.empty((1, 4))
        solved: list[Block] = []

        def sink(counts: NDArray[np.int64], features: NDArray[np.int32], values: NDArray[np.float32]) -> None:
            kept = np.abs(values) >= np.float32(_PRUNED * self.prune)
            solved.append(Block(g, np.array([0, int(kept.sum())]), features[kept], values[kept]))

        Solver(p, self.problem.seed, RowOrder(n, n, 0), sample.dense).solve(
            sets, rows, sample.x, sample.scratch, statistics, sink
        )
        return solved[0], float(statistics[0, 0])


def _first_groups(n_labels: int) -> NDArray[np.uint8]:
    """Every label in the first group of each clustering (CLUSTERINGS, K)."""
    return np.repeat(np.arange(0, N_GROUPS, GROUPS, dtype=np.uint8)[:, None], n_labels, axis=1)


def _written(
    out: str, parameters: PPDSparseParameters, n_features: int, blocks: Sequence[Block], bias: NDArray[np.float32],
    groups: NDArray[np.uint8],
) -> Receipt:  # fmt: skip
    """Write groups into a folder of a model; the numbers of clusterings and groups, and the sizes of their tile."""
    tiles = TileSizes(0, N_GROUPS, n_features)
    for block in blocks:
        tiles.add(np.diff(block.indptr), block.indices)
    # how many weights the labels will have is not known: so many labels mostly have more than that
    half = parameters.halves(large=True) and half_holds(block.values for block in blocks)
    write_guide(Path(out), n_features, blocks, bias, groups, np.float16 if half else np.float32)
    of_all = tiles.ranges[-1]
    return {"clusterings": CLUSTERINGS, "groups": GROUPS, "tile": of_all.tile, "weights": of_all.weights}


class _Sample:
    """The rows that directions and groups are learned on.

    labels: those that any of them has; scale (K,): of the sums m_l; dense: see `has_dense_rows`; scratch: for solving a group.
    """

    def __init__(self, x: CSR, y: Labels, scale: NDArray[np.float64], n_features: int, dense: bool) -> None:
        self.x, self.y, self.scale, self._n_features, self.dense = x, y, scale, n_features, dense
        self.n_rows = len(x.indptr) - 1
        seen = np.zeros(len(scale), np.bool_)
        seen[y.indices] = True
        self.labels = np.flatnonzero(seen)
        self.scratch = new_scratch(n_features, self.n_rows, len(x.indices))

    def split(
        self, parts: Sequence[NDArray[np.int64]], keys: Sequence[np.uint64]
    ) -> tuple[NDArray[np.float64], list[tuple[NDArray[np.int64], NDArray[np.int64]]]]:
        """Of some sets of labels, each by itself, the directions (D, sets) that part them, and both halves, ascending.

        The sets share the passes over the rows.
        """
        side = np.full((len(self.scale), len(parts)), -1, np.int8)
        directions = np.zeros((self._n_features, len(parts)))
        halves = [(labels, labels[len(labels) :]) for labels in parts]
        going = [m for m, labels in enumerate(parts) if len(labels) > 1]
        if not going:
            return directions, halves
        for m in going:
            labels = parts[m]
            bits = word_bits(len(labels))
            for b in range(2):
                side[labels[permuted(b, len(labels), bits, keys[m])], m] = b
        # np.take, as directions[:, going] would be by columns, and kernels go along lines
        directions[:, going] = self._directions(np.take(side, going, axis=1))
        for _ in range(_MOST_STEPS):
            sums = np.zeros((len(self.scale), len(going)))
            _add_along(self.x, self.y, np.take(directions, going, axis=1), sums)
            moved = []
            for at, m in enumerate(going):
                labels, before = parts[m], side[parts[m], m]
                halves[m] = _halves(labels, sums[:, at] * self.scale)
                for b, half in enumerate(halves[m]):
                    side[half, m] = b
                if (side[labels, m] != before).any():
                    moved.append(m)
            going = moved
            if not going:
                break
            directions[:, going] = self._directions(np.take(side, going, axis=1))
        return directions, halves

    def _directions(self, side: NDArray[np.int8]) -> NDArray[np.float64]:
        """The difference of the unit vectors of the sums of both sides, of each split (D, splits)."""
        n_splits = side.shape[1]
        sums = np.zeros((self._n_features, 2, n_splits))
        for x, y in _blocks(self.x, self.y, 2 * n_splits):
            shares = np.empty((len(x.indptr) - 1, 2, n_splits))
            shares_of_sides(y, side, self.scale, shares)
            add_transposed(*x, shares.reshape(len(shares), -1), sums.reshape(len(sums), -1))
        lengths = np.sqrt(np.einsum("jbm,jbm->bm", sums, sums))
        sums /= np.where(lengths > 0.0, lengths, 1.0)
        return sums[:, 0] - sums[:, 1]


def _add_along(x: CSR, y: Labels, directions: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
    """Add to each label's sums (K, directions), over its rows, x_i . d for each direction d."""
    for some, labels in _blocks(x, y, directions.shape[1]):
        projected = np.empty((len(some.indptr) - 1, directions.shape[1]))
        multiply(*some, directions, projected)
        add_to_labels(labels, projected, sums)


def _blocks(x: CSR, y: Labels, columns: int) -> Iterator[tuple[CSR, Labels]]:
    """Rows of x and y for which so many float64 columns take a MiB, in turn."""
    n, step = len(x.indptr) - 1, max(1, MIB // (8 * columns))
    for low in range(0, n, step):
        lines = slice(low, min(low + step, n) + 1)
        yield CSR(x.indptr[lines], x.indices, x.values), Labels(y.indptr[lines], y.indices)


def _halves(labels: NDArray[np.int64], along: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels whose values are highest, and the others, as many or one fewer; ascending. Ties go to the lower label."""
    values, first = along[labels], -(-len(labels) // 2)
    chosen = np.zeros(len(labels), np.bool_)
    if first:
        least = np.partition(values, len(values) - first)[len(values) - first]
        chosen = values > least
        chosen[np.flatnonzero(values == least)[: first - int(chosen.sum())]] = True
    return labels[chosen], labels[~chosen]


def takes_groups(model: LinearWeights, kept: int, new: int) -> bool:
    """Whether a model has groups that fit so many labels of its own and new ones."""
    guide = Guide.of(model)
    return (guide.clusterings, guide.groups) == (CLUSTERINGS, GROUPS) and kept >= _LEAST_KEPT * (kept + new)


@dataclass(frozen=True)
class KeepGroupsJob:
    """Write the groups of a warm start's model into the folder `out` of another one: nothing of them is learned again.

    Old labels stay in their groups. A new one joins, in each clustering, the group whose classifier scores its rows highest.
    match: what a `MatchJob` left.
    """

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
        guide = Guide.of(model)
        n, X = dataset.n_labels, dataset.X_rows()
        found = read_small(Path(self.match), "labels", n, np.int64)
        groups = _first_groups(n)
        kept = np.flatnonzero(found >= 0)
        groups[:, kept] = guide.groups_of(0, model.n_labels)[:, found[kept]]
        block, bias = guide.weights().block(0, N_GROUPS), guide.bias()
        new = np.flatnonzero((found < 0) & (dataset.label_counts() > 0))
        if len(new):
            directions = np.zeros((dataset.n_features, N_GROUPS))
            directions[block.indices, np.repeat(np.arange(N_GROUPS), np.diff(block.indptr))] = block.values
            Y = dataset.Y_columns()
            for label in new.tolist():
                groups[:, label] = _nearest_groups(_some_rows(Y, label), X, directions, bias)
        receipt = _written(self.out, self.problem.parameters, dataset.n_features, [block], bias, groups)
        return {**receipt, "bytes_read": X.bytes_read}


def _some_rows(Y: SparseMatrix, label: int) -> NDArray[np.int64]:
    """Rows of a label, evenly spaced, ascending."""
    counts = int(np.diff(Y.ends(label, label + 1))[0])
    step, rows, begin = -(-counts // _NEW_ROWS), [], 0
    for window in Y.index_windows(label, label + 1, MIB // 16):
        rows.append(window[(-begin) % step :: step].astype(np.int64))
        begin += len(window)
    return np.concatenate(rows)


def _nearest_groups(
    rows: NDArray[np.int64], X: SparseMatrix, directions: NDArray[np.float64], bias: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Of each clustering the group of the highest mean score; ties go to the first."""
    scores = np.empty((len(rows), N_GROUPS))
    multiply(*CSR.of(X.gather(rows)), directions, scores)
    mean = (scores.mean(axis=0) + bias).reshape(CLUSTERINGS, GROUPS)
    return np.asarray(np.arange(CLUSTERINGS) * GROUPS + mean.argmax(axis=1), np.uint8)
