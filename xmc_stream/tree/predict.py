"""Prediction and evaluation by label trees: rows go down in blocks, and the weights of a unit are read once for a block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN, calibrate_rows, calibrated
from xmc_stream.kernels.csr import count_indices
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.implied import ImpliedLabels
from xmc_stream.linear.kernels.implied import lift
from xmc_stream.metrics import among, leave_out_labels
from xmc_stream.models.cache import TileCache
from xmc_stream.models.decisions import Decision
from xmc_stream.models.runs import (
    HELD_ROWS,
    HITS,
    LEAST_BLOCK,
    PREDICTED,
    RESULT_BYTES,
    TRUE,
    RankingJob,
    RankingTask,
    StreamPlan,
    Wanted,
    calibration_of,
    count_best,
    filter_pairs,
    fold_metrics,
    no_predictions,
    rank_a_few,
)
from xmc_stream.runtime.job import Loop
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.runtime.warmup import WarmUp, a_few_rows, train_a_few
from xmc_stream.store.matrix import Block, stream_bytes
from xmc_stream.store.model import StoredModel, finish_model, model_attributes
from xmc_stream.store.nodes import understood
from xmc_stream.store.predictions import CHUNK_ROWS
from xmc_stream.tree.beams import BLOCK_ROWS, ROW_BYTES
from xmc_stream.tree.guide import LEVEL, NO_GROUPS, read_groups
from xmc_stream.tree.kernels.beam import Best, fill_up, order_ties
from xmc_stream.tree.kernels.records import Panels
from xmc_stream.tree.nodes import (
    GUIDE,
    OPEN_CHILD,
    OPEN_PARENT,
    OPEN_UNIT,
    PARENT_BYTES,
    OpenUnit,
    Unit,
    UnitTiles,
    edges_of,
    met,
    shared_units,
    structure_path,
)
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.run import TreeRun
from xmc_stream.tree.scoring import LIST, UNREACHED, Scorer
from xmc_stream.tree.structure import NODE_BYTES, Structure

COUNTED = 200  # labels of a row, the best, that an evaluation looks at, at least
_LABEL_BYTES = 64  # of the shapes of a tree, and what goes with a label
_LEAST_ROWS, _LEAST_BYTES = 256, 4 * MIB  # of rows that go down together, at least: so many, or that they take so much
_MORE = 16  # times the rows of a block, where weights do not stay in memory
_ROW_NS, _NODES = 5e4, 10  # of a row and so many nodes of its beam, about


class TreeWeights(StoredModel):
    """A model of label trees, as it lies on disk. beam: nodes of a level that a row goes on from, None for all."""

    beam: int | None

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(path, attributes)
        with understood(self.path / "zarr.json"):
            self.n_trees, self.beam = int(self.attributes["trees"]), int(self.attributes["beam"])
            self.levels = [list(map(int, sizes)) for sizes in self.attributes["levels"]]  # children, of each tree
            self.score = dict(self.attributes["tree_score"])
            self.tiles = [(Unit(*map(int, unit)), int(size)) for *unit, size in self.attributes["tiles"]]

    @property
    def shape_bytes(self) -> int:
        """What the shapes of all trees take in memory."""
        nodes = sum(sum(of_tree[:-1]) for of_tree in self.levels)
        return self.n_trees * _LABEL_BYTES * self.n_labels + NODE_BYTES * nodes

    @property
    def widest(self) -> int:
        """The nodes of the level that has most."""
        return max((size for sizes in self.levels for size in sizes[:-1]), default=1)

    @property
    def width(self) -> int:
        """The beam, no wider than a level."""
        return self.widest if self.beam is None else min(self.beam, self.widest)

    @property
    def scores_all(self) -> bool:
        """Whether every label has a score: one tree, and the beam is as wide as its levels. Several trees join lists."""
        return self.n_trees == 1 and self.width == self.widest

    def tiles_of(self, tree: int, level: int) -> UnitTiles:
        """The units of a level, and their bytes in memory."""
        return [(unit, size) for unit, size in self.tiles if (unit.tree, unit.level) == (tree, level)]

    def structures(self) -> list[Structure]:
        """The shapes of all trees. Raises StoreError where one is damaged, or its units are not all there."""
        found = [Structure.read(structure_path(self.path, tree), self.n_labels) for tree in range(self.n_trees)]
        for tree, structure in enumerate(found):
            if self.levels[tree : tree + 1] != [[level.n_children for level in structure.levels]]:
                raise StoreError(f"{self.path} has trees of other levels than it says: it is damaged; train it again")
            for level in structure.levels:
                spans = [(unit.first, unit.last) for unit, _ in self.tiles_of(tree, level.number)]
                edges = [0, *(last for _, last in spans)]
                if [first for first, _ in spans] != edges[:-1] or edges[-1] != level.n_parents:
                    raise StoreError(f"{self.path} lacks units of its trees: it is damaged; train it again")
        return found

    def unit(self, unit: Unit, structures: list[Structure]) -> Panels:
        """A unit in memory."""
        return self.open_unit(unit, structures).read(unit.first, unit.last)

    def open_unit(self, unit: Unit, structures: list[Structure]) -> OpenUnit:
        """A unit on disk."""
        level = LEVEL if unit.tree == GUIDE else structures[unit.tree].levels[unit.level]
        return OpenUnit(self.path, unit, level, self.n_features)


@dataclass(frozen=True)
class TreesPlan(StreamPlan):
    """cache_bytes: of units in memory; keeps: whether that is all of them; beam: nodes of a level that a row goes on from;
    every: whether all labels are scored, for AUC.
    """

    cache_bytes: int
    keeps: bool
    beam: int
    every: bool


class OpenTrees:
    """Trees that are read as they are needed, or held. counts: training rows of each label.

    cache_bytes: of units in memory, which the threads of a process share. None: this has its own, all of them, or where `room`
    is given the levels from the root on that so many bytes hold: below these, parents are read as rows reach them, and stay as
    far as the rest goes.
    """

    def __init__(
        self, model: TreeWeights, beam: int, cache_bytes: int | None, raw: bool = False, room: int | None = None
    ) -> None:
        self.model, self.structures, self._cache = model, model.structures(), cache_bytes
        own = {} if cache_bytes is not None else dict(model.tiles)
        held = own if room is None else _upper(own, room)
        self._held = {unit: model.unit(unit, self.structures) for unit in held}
        self._open = {unit: model.open_unit(unit, self.structures) for unit in own if unit not in held}
        self._parents = TileCache(0 if room is None else room - sum(held.values()))
        self._tiles: dict[tuple[int, int], list[tuple[Unit, int]]] = defaultdict(list)
        for unit, size in model.tiles:
            self._tiles[unit.tree, unit.level].append((unit, size))
        self._edges = {place: edges_of(tiles) for place, tiles in self._tiles.items()}
        self.counts = (
            model.label_counts(0, model.n_labels) if model.has_label_counts else np.ones(model.n_labels, np.int64)
        )
        self._by = calibration_of(model, 0, model.n_labels, raw)
        self._groups = read_groups(model.path, model.n_labels) if model.score["guide"] else NO_GROUPS
        self._scorer = Scorer(self.structures, self._groups, self._units, model.score, beam)
        implied = ImpliedLabels.of(model)
        self._implied = implied.read() if implied.pairs and not raw else None

    def _units(self, tree: int, level: int, parents: NDArray[np.int64]) -> Iterable[Panels]:
        tiles = self._tiles[tree, level]
        if self._cache is not None:
            of_level = LEVEL if tree == GUIDE else self.structures[tree].levels[level]
            return shared_units(self.model.path, of_level, self.model.n_features, tiles, parents, self._cache)
        units = [tiles[number][0] for number in met(self._edges[tree, level], parents)]
        if all(unit in self._held for unit in units):  # a level is held, or not
            return [self._held[unit] for unit in units]
        return (panels for unit in units for panels in self._open[unit].kept(self._parents, parents))

    def best(self, x: CSR, barred: Labels, k: int) -> Best:
        """The k best labels of each row; where the model is calibrated, of the COUNTED best by their own scores."""
        best = self._scorer.best(x, barred, max(k, min(COUNTED, self.model.n_labels)) if self._by.shape[1] else k)
        if self._implied is not None:
            before = Best(best.labels.copy(), best.scores.copy(), best.margins.copy())
            lift(self._implied, Ranking(best.labels, best.scores), barred)
            order_ties(before, best)
        if self._by.shape[1]:
            found = best.labels >= 0
            scores = best.scores[found]
            for place, label in enumerate(best.labels[found].tolist()):
                scores[place] = calibrated(scores[place], label, self._by)
            best.scores[found] = scores
            order = np.lexsort((best.labels, -best.scores), axis=1)
            best = Best._make(np.take_along_axis(part, order[:, :k], axis=1) for part in best)
        return best

    def every(self, x: CSR) -> NDArray[np.float32]:
        """The scores of all labels (n, K), before any is lifted: of one tree, see `TreeWeights.scores_all`."""
        scores = np.empty((len(x.indptr) - 1, self.model.n_labels), np.float32)
        scores[:] = np.where(self.counts > 0, UNREACHED, UNSEEN)
        self._scorer.every(x, scores)
        calibrate_rows(scores, self._by)
        return scores

    def fill(self, best: Best, barred: Labels, ranking: Ranking) -> None:
        """Take the best of a longer list, or all, and what no beam reached behind them."""
        k = ranking.labels.shape[1]
        ranking.labels[:], ranking.scores[:] = best.labels[:, :k], best.scores[:, :k]
        fill_up(self.counts, UNREACHED, np.float32(UNSEEN), barred, ranking.labels, ranking.scores)


@dataclass(frozen=True)
class TreeJob(RankingJob):
    """Row block by row block, down the trees."""

    sizes: TreesPlan

    def opened(self) -> OpenTrees:
        """See `RankingJob`."""
        return OpenTrees(TreeWeights(self.model), self.sizes.beam, self.sizes.cache_bytes, self.wanted.raw)

    def fold(
        self, model: OpenTrees, rows: range, read: tuple[Block, ...], barred: Labels, best: Ranking, counts: NDArray[np.int32]
    ) -> int:  # fmt: skip
        """See `RankingJob`. Labels that no beam reached count as not predicted; AUC where all labels are scored."""
        x, k, n_labels = CSR.of(read[0]), best.labels.shape[1], model.model.n_labels
        found = model.best(x, barred, min(n_labels, max(k, COUNTED)) if len(read) > 1 else k)
        model.fill(found, barred, best)
        if len(read) > 1:
            y = Labels.of(read[1])
            y = Labels(*leave_out_labels(*y, *barred)) if len(barred.indptr) else y
            count_indices(y.indices, counts[TRUE])
            above = (found.labels >= 0) & (found.scores > self.wanted.decision.above)
            count_indices(found.labels[above], counts[PREDICTED])
            right = among(np.arange(len(found.labels))[:, None], found.labels, *y)
            count_indices(found.labels[above & right], counts[HITS])
            count_best(self.wanted.decision, best, (y.indptr, y.indices), counts)
            if self.sizes.every:
                return row_auc(model, x, read[1], barred)
        return 0


def row_auc(model: OpenTrees, x: CSR, y: Block, barred: Labels) -> int:
    """The sum of the rows' AUC."""
    scores = model.every(x)
    nothing, best = np.zeros((3, scores.shape[1]), np.int32), Ranking(*no_predictions(len(scores), 1))
    return fold_metrics(lambda: [(0, scores)], y, barred, Decision(np.inf), best, nothing)


class HeldTrees:
    """All trees in memory, or of those on disk the parents that rows reached, as far as there is room (bytes)."""

    def __init__(self, model: TreeWeights, room: int) -> None:
        needs = held_needs(model, room)
        self._trees = OpenTrees(model, model.width, None, room=needs.get("nodes that rows reach"))
        self._rows = _held_rows(model)

    def rank(self, x: Block, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """See `Held`."""
        none = filter_pairs()
        for first in range(0, x.n, self._rows):
            mine = slice(first, min(first + self._rows, x.n))
            best = self._trees.best(CSR.of(x.lines(mine.start, mine.stop)), none, labels.shape[1])
            self._trees.fill(best, none, Ranking(labels[mine], scores[mine]))


def _held_rows(model: TreeWeights) -> int:
    """Rows that go down a model in memory together."""
    return min(HELD_ROWS, _least_rows(model.width * ROW_BYTES) * 16)


def _least_rows(of_row: int) -> int:
    """Rows that go down together, at least. of_row: bytes."""
    return max(1, min(_LEAST_ROWS, _LEAST_BYTES // of_row))


def held_needs(model: TreeWeights, room: int) -> dict[str, int]:
    """See `Model.held_needs`."""
    needs = _all_needs(model)
    if sum(needs.values()) <= room:
        return needs
    children, parents = sum(map(sum, model.levels)), sum(1 + sum(sizes[:-1]) for sizes in model.levels)
    needs["trees"] = model.shape_bytes + OPEN_CHILD * children + OPEN_PARENT * parents + OPEN_UNIT * len(model.tiles)
    return {**needs, "nodes that rows reach": max(_largest(dict(model.tiles)), room - sum(needs.values()))}


def _largest(tiles: dict[Unit, int]) -> int:
    """What reading a parent of some units takes at most."""
    return PARENT_BYTES + 2 * max(tiles.values(), default=0)


def _upper(tiles: dict[Unit, int], room: int) -> dict[Unit, int]:
    """The units of the levels from the root on, as many as there is room for, beside any parent below."""
    upper: dict[Unit, int] = {}
    for level in range(1 + max(unit.level for unit in tiles)):
        more = {unit: size for unit, size in tiles.items() if unit.level <= level}
        below = {unit: size for unit, size in tiles.items() if unit.level > level}
        if sum(more.values()) + _largest(below) > room:
            break
        upper = more
    return upper


def _all_needs(model: TreeWeights) -> dict[str, int]:
    return {
        "trees": sum(size for _, size in model.tiles) + model.shape_bytes,
        "ranking": 4 * MIB + _held_rows(model) * model.width * ROW_BYTES,
    }


@dataclass(frozen=True)
class TreeTask(RankingTask):
    """A prediction or an evaluation by label trees."""

    job = TreeJob

    model: TreeWeights

    @property
    def every(self) -> bool:
        """Whether all labels are scored, for AUC."""
        return self.evaluate and self.model.scores_all

    @property
    def of_row(self) -> int:
        """Bytes of a row on its way down: lists of labels, beams, and where all are scored, the scores."""
        model = self.model
        width = min(model.n_labels, max(self.k, COUNTED)) if self.evaluate or model.calibrated else self.k
        lists = max(width, LIST if model.n_trees > 1 else 0) * 20 * (model.n_trees + 1)
        return lists + model.width * ROW_BYTES + (4 * model.n_labels if self.every else 0)

    def sizes(self, plan: MemoryPlan) -> TreesPlan:
        """See `RankingTask`."""
        t, model, least, of_row = plan.threads, self.model, self.least_block, self.of_row
        largest = max(size for _, size in model.tiles)
        fixed = {
            "results": t * CHUNK_ROWS * self.k * RESULT_BYTES,
            "shapes of trees": t * model.shape_bytes,
            "long rows": t * 4 * (least - LEAST_BLOCK),
            "windows": t * 4 * MIB,
            "counts": t * self.of_labels * (1 + self.every),
        }
        smallest = {"weights": t * largest, "row blocks": t * (2 * LEAST_BLOCK + _least_rows(of_row) * of_row)}
        plan.refuse_unless({**fixed, **smallest}, f"predicting on {t} threads")
        left = plan.budget - sum(fixed.values())
        total = sum(size for _, size in model.tiles) + t * largest
        keeps = total <= left * 3 // 4
        # else every unit is read for each block of rows: the more rows, the better
        cache = total if keeps else max(t * largest, min(4 * t * largest, left // 2))
        share, most = (left - cache) // t, 1 if keeps else _MORE
        rows = max(_least_rows(of_row), min(most * BLOCK_ROWS, share // 2 // of_row))
        row_bytes = max(least, min(32 * most * MIB, share // (8 if self.pairs else 4)))
        jobs = t * plan.processes * (4 if keeps else 1)
        chunks = max(1, -(-self.dataset.n_samples // CHUNK_ROWS) // jobs)
        chunks = min(chunks, max(1, 64 * MIB // (CHUNK_ROWS * self.k * RESULT_BYTES)))
        while chunks > 1 and t * chunks * CHUNK_ROWS * self.k * RESULT_BYTES > left // 8:
            chunks -= 1
        return TreesPlan(chunks * CHUNK_ROWS, rows, row_bytes, cache, keeps, model.width, self.every)

    def reads_least(self, plan: MemoryPlan) -> bool:
        """Whether every unit is read once."""
        return self.sizes(plan).keeps

    def loop(self, plan: MemoryPlan, wanted: Wanted) -> Loop:
        """As of every task; without the figure that needs the scores of all labels, where not all have one."""
        found = yield from super().loop(plan, wanted)
        if not self.evaluate or self.every:
            return found
        return {name: value for name, value in found.items() if name != "average_auc"}

    @property
    def unscored(self) -> str:
        """Why not all labels have scores; "" where they have, or need none."""
        if not self.evaluate or self.every:
            return ""
        if self.model.n_trees > 1:
            return f"of {self.model.n_trees} trees the {LIST} best labels of each are joined, and others have no score"
        return "it needs the scores of all labels, which beam none gives (in Python model.with_beam(None))"

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        """From the number of rows."""
        dataset, sizes = self.dataset, self.sizes(plan)
        matrices = (dataset.X_rows(), dataset.Y_rows()) if self.evaluate else (dataset.X_rows(),)
        n_bytes = stream_bytes(matrices, sizes.ranges(dataset.n_samples))
        t, model = plan.threads, self.model
        needs = {
            "results": t * min(sizes.rows_per_job, dataset.n_samples) * self.k * RESULT_BYTES,
            "weights": min(sizes.cache_bytes, sum(size for _, size in model.tiles)),
            "shapes of trees": t * model.shape_bytes,
            "row blocks": t * (sizes.row_bytes + max(4 * MIB, min(sizes.rows, dataset.n_samples) * self.of_row)),
        }
        of_row = 1e-9 * _ROW_NS * model.n_trees * max(1.0, model.width / _NODES) * (1 + self.every)
        seconds = of_row * dataset.n_samples / (t * plan.processes)
        return self.foreseen(sizes.row_blocks(dataset), n_bytes, needs, seconds)


@dataclass(frozen=True)
class TreesWarmUp(WarmUp):
    """Predict a few rows, and evaluate a model on them."""

    seconds = 12.0

    @property
    def loads(self) -> str:
        """Whatever the model."""
        return "prediction by trees"

    def load(self) -> None:
        """By two small trees."""
        with a_few_rows(n=120, k=20, several=True) as dataset:
            path = dataset.path.parent
            p = TreeParameters(max_leaf=5, root=2, branching=2, n_trees=2, C=1.0)
            made = train_a_few(TreeRun, dataset, "model", p)
            finish_model(path / "model.partial", path / "model", model_attributes(dataset, "", {}, 0, made))
            model = TreeWeights(path / "model")
            for evaluate in (False, True):
                rank_a_few(TreeTask(model, dataset, 12, evaluate=evaluate))
            x, y = (matrix.block(0, dataset.n_samples) for matrix in (dataset.X_rows(), dataset.Y_rows()))
            row_auc(OpenTrees(model, model.widest, None), CSR.of(x), y, filter_pairs())
