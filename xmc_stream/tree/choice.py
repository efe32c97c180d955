"""C of the labels, where nobody gives it: by rows that some leaves hold out.

Some groups of LANES neighbouring labels are drawn. Each is solved on three quarters of its leaf's rows, for one C after
another. How good C is, is the micro average precision of the scores of all pairs of a row that is held out and a label of the
group. Labels with fewer than two rows left are not looked at: that they are rare is known of them, and that they are among
the rows held out too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.domains import TREE_CHOICE
from xmc_stream.kernels.instructions import LANES
from xmc_stream.kernels.permutation import held_out, key_of, uniform
from xmc_stream.linear.kernels.dcd import Steps, of_lines
from xmc_stream.linear.kernels.lanecd import new_lanes
from xmc_stream.linear.kernels.rows import localise, row_squares
from xmc_stream.models.decisions import JUST_THE_BEST, LEAST_ROWS, learn
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import fitting_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.model import DECISION
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.beams import Paths, beams_above
from xmc_stream.tree.kernels.solve import margins_of, solve_lanes
from xmc_stream.tree.parents import Parent, parents_of
from xmc_stream.tree.scoring import SHORT
from xmc_stream.tree.shared import Shared
from xmc_stream.tree.shuffle import Lists, shuffled_of
from xmc_stream.tree.solve import Problem
from xmc_stream.tree.structure import Level

SHARE, LEAST, MOST = 0.05, 12, 512  # of the work of solving all labels; groups, at least and at most
_HELD_OUT, _FEWEST = 0.25, 2  # of the rows of a leaf; rows that a label must have left
MOST_ROWS = 1 << 16  # of a leaf that are looked at
ENTRIES = 1 << 21  # of X, of a job, or those of one leaf
_GAIN = 0.3  # points of average precision: less is no reason to go on
_LEAST_C, _MOST_C = 0.125, 32.0
_GOLDEN = 0.6180339887498949

Pick = tuple[int, int]  # a leaf, and the first label of a group of its labels, counted from its first


def picks_of(level: Level, rows: NDArray[np.int64], seed: int) -> list[Pick]:
    """The groups that are looked at, evenly spaced from a place that is drawn. rows: of each leaf, at most."""
    counts = -(-np.diff(level.ptr) // LANES)
    leaves = np.repeat(np.arange(level.n_parents), counts)
    firsts = LANES * (np.arange(len(leaves)) - np.repeat(np.concatenate([[0], np.cumsum(counts)[:-1]]), counts))
    work, total, chosen, done = rows[leaves], float(rows[leaves].sum()), set[int](), 0
    place = uniform(np.uint64(key_of(seed, TREE_CHOICE, 0, 0)), 0)
    for _ in range(4 * len(leaves)):
        place = (place + _GOLDEN) % 1.0
        at = int(place * len(leaves))
        if at in chosen:
            continue
        if len(chosen) >= MOST or (len(chosen) >= LEAST and done + work[at] > SHARE * total):
            break
        chosen.add(at)
        done += int(work[at])
    return [(int(leaves[at]), int(firsts[at])) for at in sorted(chosen)]


def cut_picks(picks: Sequence[Pick], rows: NDArray[np.int64], row_entries: float) -> list[tuple[Pick, ...]]:
    """Groups of labels in jobs. rows: of each leaf, at most; row_entries: of X, on average."""
    entries = [int(rows[leaf] * max(row_entries, 1.0)) for leaf, _ in picks]
    return [tuple(picks[low:high]) for low, high in fitting_ranges(entries, ENTRIES)]


@dataclass(frozen=True)
class ChoiceJob:
    """Try some C on some groups of labels. path: the weight of a leaf's path in a score.

    lists: of the jobs whose rows lie side by side on disk, see `shuffle`; none where they do not.
    """

    of: Shared
    level: int
    values: tuple[float, ...]
    picks: tuple[Pick, ...]
    path: float
    out: str
    lists: Lists = ()

    @property
    def key(self) -> str:
        """The first C and the first group."""
        return f"choice/{self.values[0]:g}/{self.picks[0][0]}-{self.picks[0][1]}"

    def run(self) -> Receipt:
        """Solve and score; the receipt has the average precision of each C, and how many pairs are right."""
        dataset, of_rows = self.of.dataset(), self.of.row_weights()
        Y, p, bytes_read = dataset.Y_columns(), self.of.parameters, 0
        structure = self.of.structure(0, dataset.n_labels)
        level = structure.levels[self.level]
        leaves = np.unique([leaf for leaf, _ in self.picks])
        before = beams_above(self.of.work, 0, self.level, dataset.n_samples)
        found = parents_of(Y, structure, level, leaves, before, p.negatives)
        parents = dict(zip(leaves.tolist(), found, strict=True))
        trials = [_Trial(parents[leaf], first, self.of.seed) for leaf, first in self.picks]
        rows = np.unique(np.concatenate([trial.rows for trial in trials]))
        paths = Paths(before, rows, dataset.n_samples)
        scores: list[list[NDArray[np.float32]]] = [[] for _ in self.values]
        hits, seen = [np.zeros(0, np.bool_)], [np.zeros(0, np.int64)]
        for (leaf, first), trial in zip(self.picks, trials, strict=True):
            stop_if_unwanted()
            if not (trial.n_left and trial.n_held):
                continue
            path = paths.of(trial.held_rows, leaf)
            looked_at = np.isfinite(path)[:, None] & trial.judged
            hits.append(trial.true[looked_at])
            seen.append(trial.held_rows[looked_at.any(axis=1)])
            X = shuffled_of(self.of, dataset, self.level, self.lists, leaf) if self.lists else dataset.X_rows()
            trial.localise(CSR.of(X.gather(trial.rows)), of_rows.of(trial.rows), dataset.n_features)
            bytes_read += X.bytes_read
            low = int(level.ptr[leaf]) + first
            classes = self.of.label_weights(structure.order[low : min(low + LANES, int(level.ptr[leaf + 1]))])
            for c, of_c in zip(self.values, scores, strict=True):
                problem = Problem.of(replace(p, C=c), 0, True)
                z = trial.margins(
                    problem, classes, problem.steps(self.of.seed, 0, self.level, int(level.ptr[leaf]), first)
                )
                short = np.maximum(np.float32(0.0), np.float32(SHORT) - z)
                of_c.append((np.float32(self.path) * path[:, None] - short * short * short)[looked_at])
        right = np.concatenate(hits)
        of_values = [np.concatenate([np.zeros(0, np.float32), *of_c]) for of_c in scores]
        with new_pack(Path(self.out)) as pack:
            pack.write("hits", right.view(np.uint8))
            pack.write("rows", np.unique(np.concatenate(seen)))
            for c, values in zip(self.values, of_values, strict=True):
                pack.write(f"scores-{c:g}", values)
        return {
            "precisions": [average_precision(values, right) for values in of_values], "right": int(right.sum()),
            "bytes_read": bytes_read + Y.bytes_read,
        }  # fmt: skip


class _Trial:
    """A group of labels of a leaf, some of whose rows are held out.

    rows: of the leaf, ascending; true (held out, LANES): whether a row has a label; judged: whether the label is looked at.
    """

    def __init__(self, parent: Parent, first: int, seed: int) -> None:
        all_rows = parent.rows
        step = -(-len(all_rows) // MOST_ROWS) or 1
        taken = np.arange(0, len(all_rows), step)
        self.rows = all_rows[taken]
        held = np.zeros(len(self.rows), np.bool_)
        held_out(self.rows, seed, _HELD_OUT, held)
        self._order = np.concatenate([np.flatnonzero(~held), np.flatnonzero(held)])
        self.held_rows, self.n_held = self.rows[held], int(held.sum())
        self.n_left = len(self.rows) - self.n_held
        place = np.empty(len(self.rows), np.int64)
        place[self._order] = np.arange(len(self.rows))
        self.true, self.judged, mine = np.zeros((self.n_held, LANES), np.bool_), np.zeros(LANES, np.bool_), []
        indptr = parent.y.indptr
        for lane in range(min(LANES, len(indptr) - 1 - first)):
            rows = parent.y.indices[indptr[first + lane] : indptr[first + lane + 1]]
            places = place[rows[rows % step == 0] // step]
            self.true[places[places >= self.n_left] - self.n_left, lane] = True
            mine.append(places[places < self.n_left])
            self.judged[lane] = len(mine[-1]) >= _FEWEST
        self._y = Labels(np.concatenate([[0], np.cumsum([len(some) for some in mine])]), np.concatenate(mine))

    def localise(self, x: CSR, weights: NDArray[np.float64], n_features: int) -> None:
        """Take the rows: those held out stand last."""
        n, nnz = len(x.indptr) - 1, len(x.indices)
        local_of, features = np.full(n_features, -1, np.int32), np.empty(n_features + 1, np.int32)
        self._x = CSR(np.empty(n + 1, np.int64), np.empty(nnz, np.int32), np.empty(nnz, np.float32))
        none = np.zeros(n, np.int8), np.zeros(n)
        n_local, _ = localise(self._order, x, *none, local_of, features, np.empty(0), self._x)
        self._squares, self._weights = np.empty(n), of_lines(self._order, weights)
        row_squares(self._x.indptr, self._x.values, 1.0, self._squares)
        self._lanes = new_lanes(self.n_left, n_local)

    def margins(self, problem: Problem, classes: NDArray[np.float64], steps: Steps) -> NDArray[np.float32]:
        """z of the rows held out (held out, LANES), by labels that are solved on the others."""
        left, squares = self._x._replace(indptr=self._x.indptr[: self.n_left + 1]), self._squares[: self.n_left]
        how = classes, problem.penalty, steps, problem.rule, self._lanes
        solve_lanes(0, left, squares, self._weights[: self.n_left], self._y, *how)
        z = np.empty((self.n_held, LANES), np.float32)
        margins_of(self._x, self.n_left, problem.penalty.lam, problem.prune, self._lanes, z)
        return z


def average_precision(scores: NDArray[np.float32], hits: NDArray[np.bool_]) -> float:
    """The mean over the hits of the share of hits among what scores as high, in per cent; 0 without hits."""
    order = np.argsort(-scores)
    found, ends = np.cumsum(hits[order]), np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    if not hits.any():
        return 0.0
    gained = np.diff(found[ends], prepend=0)  # where scores are equal, all count as at the end of them
    return float(100.0 * (gained * (found[ends] / (ends + 1))).sum() / found[-1])


def climbed() -> Generator[list[float], dict[float, float], float]:
    """Which C are tried: 1 and 2, then larger ones, or smaller ones, as long as that gains more than _GAIN points.

    Yields values of C, is sent the average precision of each, returns the last that gained: 2 where none did.
    """
    found = dict((yield [1.0, 2.0]))
    best, step = (1.0, 0.5) if found[1.0] > found[2.0] + _GAIN else (2.0, 2.0)
    while _LEAST_C <= best * step <= _MOST_C:
        found |= yield [best * step]
        if found[best * step] <= found[best] + _GAIN:
            break
        best *= step
    return best


def only(c: float) -> Generator[list[float], dict[float, float], float]:
    """As `climbed`, where C is known."""
    yield [c]
    return c


@dataclass(frozen=True)
class DecisionJob:
    """Learn which labels are predicted, from what the jobs left that tried the C that was chosen."""

    C: float
    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        """There is one."""
        return "decision"

    def run(self) -> Receipt:
        """The threshold of the highest micro-F1; the best label of a row is predicted in any case."""
        found = []
        for name in (f"scores-{self.C:g}", "hits", "rows"):
            arrays = [open_array(Path(part) / name) for part in self.parts]
            found.append(np.concatenate([array.read(0, array.size) for array in arrays]))
        scores, hits, n_rows = found[0], found[1] > 0, len(np.unique(found[2]))
        if n_rows < LEAST_ROWS:
            return {DECISION: JUST_THE_BEST}
        learned = learn(scores[:, None], hits[:, None], int(hits.sum()))
        if learned["threshold"] is None:  # with one score a row, that is all of them
            learned["threshold"] = float(np.nextafter(scores.min(), np.float32(-np.inf)))
        return {DECISION: {**learned, "best": True, "rows": n_rows}}
