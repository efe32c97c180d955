"""Rows go down trees, and labels are scored: beams and scores against plain NumPy, bit for bit; all labels by the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import unless_plain
from helpers.problems import LIMIT
from helpers.rankings import pairs_csr
from helpers.tiles import csr, rows_of
from helpers.trees import stored, topics, unpacked
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import tree as twin

import xmc_stream as xs
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.implied import Implied, lift
from xmc_stream.metrics import leave_out_predictions
from xmc_stream.store.predictions import Predictions
from xmc_stream.tree.beams import at_root, descended
from xmc_stream.tree.guide import CLUSTERINGS, GROUPS, LEVEL, NO_GROUPS, read_groups
from xmc_stream.tree.guide import UNIT as GUIDE_UNIT
from xmc_stream.tree.kernels.beam import Best, fill_up, order_ties, pairs_by_node
from xmc_stream.tree.kernels.records import Panels, Weights
from xmc_stream.tree.nodes import GUIDE, Source, Unit, read_unit, write_unit
from xmc_stream.tree.predict import OpenTrees, TreeWeights
from xmc_stream.tree.scoring import LIST, UNREACHED, Scorer
from xmc_stream.tree.structure import Level, Structure

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")

D = 6
NOTHING = Labels(np.empty(0, np.int64), np.empty(0, np.int32))


@dataclass
class Forest:
    """Trees that were drawn, and their twins."""

    structures: list[Structure]
    twins: list[twin.TreeTwin]
    units: Callable[[int, int, Any], Iterable[Panels]]
    groups: NDArray[np.uint8]
    guide: twin.LevelTwin | None


def drawn_level(
    rng: np.random.Generator, folder: Path, tree: int, level: Level, share: float
) -> tuple[twin.LevelTwin, list[Panels]]:
    """Weights of a level, few different ones, so that much ties; some children have no rows. In units, in any order."""
    m = level.n_children
    W = (rng.integers(-2, 3, (D, m)) * (rng.random((D, m)) < share)).astype(np.float32)
    bias = rng.integers(-1, 3, m).astype(np.float32) / np.float32(2)
    if tree != GUIDE:  # each group has rows, if its labels have
        bias[rng.random(m) < 0.2] = -np.inf
    whole, scale = twin.rounded(W)
    panels = []
    edges = np.unique([0, *rng.integers(0, level.n_parents + 1, 2), level.n_parents]).tolist()
    for first, last in itertools.pairwise(edges):
        unit = Unit(tree, level.number, first, last) if tree != GUIDE else GUIDE_UNIT
        sources = []
        for low, high in itertools.pairwise(level.ptr[first : last + 1].tolist()):
            at, children = np.nonzero(W[:, low:high])
            weights = Weights(at.astype(np.int32), children.astype(np.int32), W[at, children + low])
            sources.append(Source(len(at), lambda weights=weights: iter([weights])))  # type: ignore[misc]
        mine = slice(int(level.ptr[first]), int(level.ptr[last]))
        write_unit(unit.path(folder), unit, level, D, bias[mine], sources, 10**6)
        panels.append(read_unit(folder, unit, level, D))
    rng.shuffle(panels)  # type: ignore[arg-type]
    return twin.LevelTwin(level.ptr.tolist(), whole, scale, bias), panels


def forest(folder: Path, seed: int, n_labels: int, n_trees: int, guided: bool, share: float) -> Forest:
    rng = np.random.default_rng(seed)
    structures, twins, kept = [], [], {}
    for tree in range(n_trees):
        edges, bounds = np.arange(n_labels + 1), []
        for _ in range(int(rng.integers(0, 4))):  # from the leaves up, each level some of the edges below
            edges = edges[np.r_[True, rng.random(max(len(edges) - 2, 0)) < 0.5, True]] if len(edges) > 1 else edges
            bounds.insert(0, edges.astype(np.int64))
        structures.append(Structure(rng.permutation(n_labels), bounds))
        levels = [drawn_level(rng, folder, tree, level, share) for level in structures[-1].levels]
        kept |= {(tree, number): panels for number, (_, panels) in enumerate(levels)}
        twins.append(twin.TreeTwin([of for of, _ in levels], structures[-1].order.tolist()))
    guide, groups = None, NO_GROUPS
    if guided:
        guide, kept[GUIDE, 0] = drawn_level(rng, folder, GUIDE, LEVEL, share)
        groups = (np.arange(CLUSTERINGS) * GROUPS + rng.integers(0, GROUPS, (n_labels, CLUSTERINGS))).astype(np.uint8)

    def units(tree: int, level: int, parents: NDArray[np.int64]) -> Iterable[Panels]:
        return [of for of in kept[tree, level] if np.isin(of.first + np.arange(len(of.panels) - 1), parents).any()]

    return Forest(structures, twins, units, groups, guide)


@settings(max_examples=unless_plain(40, 10))
@given(seed=st.integers(0, 999), n=st.integers(0, 9), b=st.integers(1, 5), n_nodes=st.sampled_from([1, 3, 40, 10**6]))
def test_pairs_stand_node_by_node(seed: int, n: int, b: int, n_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = np.where(rng.random((n, b)) < 0.3, -1, rng.integers(0, n_nodes, (n, b))).astype(np.int32)
    pairs = pairs_by_node(nodes, n_nodes)
    want = sorted((node, place) for place, node in enumerate(nodes.ravel().tolist()) if node >= 0)
    assert pairs.places.tolist() == [place for _, place in want]
    assert np.repeat(pairs.nodes, np.diff(pairs.ptr)).tolist() == [node for node, _ in want]
    assert (np.diff(pairs.nodes) > 0).all()
    assert (np.diff(pairs.ptr) > 0).all()


def some_rows(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    return np.asarray(rng.integers(-2, 3, (n, D)) * (rng.random((n, D)) < 0.6), np.float32)


def labels_csr(of_rows: Sequence[set[int]]) -> Labels:
    indptr, indices = pairs_csr(of_rows)
    return Labels(indptr.astype(np.int64), indices)


@settings(max_examples=unless_plain(50, 5))
@given(
    st.integers(0, 2**32), st.integers(1, 45), st.sampled_from([1, 1, 2, 3]), st.booleans(), st.booleans(),
    st.integers(1, 12), st.integers(1, 30), st.sampled_from([0.2, 0.6]),
)  # fmt: skip
def test_the_best_labels_are_those_of_the_twin(
    tmp_path_factory: Any,
    seed: int,
    n_labels: int,
    n_trees: int,
    guided: bool,
    several: bool,
    beam: int,
    k: int,
    share: float,
) -> None:
    """Of beams of any width; ties go to the larger margin, then to the lower label, of nodes to the lower one."""
    of = forest(tmp_path_factory.mktemp("forest"), seed, n_labels, n_trees, guided, share)
    rng, k = np.random.default_rng(seed), min(k, n_labels)
    X = some_rows(rng, 6)
    barred = [set(rng.choice(n_labels, n_labels // 4, replace=False).tolist()) for _ in X] if rng.random() < 0.5 else []
    score = {"short": 1.3, "path": 0.5 if several else 0.25, "guide": 0.5, "by_score": several}
    scorer = Scorer(of.structures, of.groups, of.units, score, beam)
    best = scorer.best(CSR(*csr(X)), labels_csr(barred) if barred else NOTHING, k)
    for i, row in enumerate(rows_of(X)):
        says = np.zeros(0, np.float32) if of.guide is None else twin.hints(of.guide, row, 0.5 / CLUSTERINGS)
        assert (says <= 0).all()
        m = k if n_trees == 1 else LIST
        lists = [
            tree.best(row, beam, m, (1.3, score["path"]), of.groups, says, barred[i] if barred else ())
            for tree in of.twins
        ]
        want = lists[0] if n_trees == 1 else twin.average(lists, several, k)
        n = len(want)
        assert (best.scores[i, :n] <= 0).all()
        if n_trees == 1 or several:
            assert best.labels[i, :n].tolist() == [label for label, _, _ in want]
            assert best.scores[i, :n].tobytes() == np.array([s for _, s, _ in want], np.float32).tobytes()
            assert best.margins[i, :n].tobytes() == np.array([z for _, _, z in want], np.float32).tobytes()
        else:  # exp and log are those of another library
            np.testing.assert_allclose(best.scores[i, :n], [s for _, s, _ in want], rtol=1e-5, atol=1e-6)
            means = {label: s for label, s, _ in twin.average(lists, several, n_labels)}
            np.testing.assert_allclose(
                best.scores[i, :n], [means[label] for label in best.labels[i, :n].tolist()], atol=1e-5
            )
        assert (best.labels[i, n:] == -1).all()
        assert (best.scores[i, n:] == -np.inf).all()


@settings(max_examples=unless_plain(60, 5))
@given(st.integers(0, 2**32), st.integers(2, 60), st.integers(1, 10))
def test_beams_are_those_of_the_twin(tmp_path_factory: Any, seed: int, n_labels: int, beam: int) -> None:
    of = forest(tmp_path_factory.mktemp("forest"), seed, n_labels, 1, False, 0.2)
    X = some_rows(np.random.default_rng(seed), 5)
    beams, want = at_root(5), [[(0, np.float32(0))] for _ in X]
    for level, of_level in zip(of.structures[0].levels[:-1], of.twins[0].levels, strict=False):
        beams = descended(level, partial(of.units, 0, level.number), CSR(*csr(X)), beams, beam)
        want = [twin.down(of_level, row, above, beam) for row, above in zip(rows_of(X), want, strict=True)]
        assert beams.nodes.shape == beams.paths.shape == (5, beam)
        for nodes, paths, mine in zip(beams.nodes, beams.paths, want, strict=True):
            n = len(mine)
            assert nodes[:n].tolist() == [node for node, _ in mine]
            assert paths[:n].tobytes() == np.array([path for _, path in mine], np.float32).tobytes()
            assert (paths[:n] <= 0).all()
            assert (nodes[n:] == -1).all()
            assert (paths[n:] == -np.inf).all()


@given(st.data())
def test_what_no_beam_reached_comes_last(data: st.DataObject) -> None:
    """Those with training rows first, each in the order of labels; what is barred never."""
    k, n = data.draw(st.integers(1, 12)), 3
    counts = np.array(data.draw(st.lists(st.integers(0, 2), min_size=k, max_size=k)))
    width = data.draw(st.integers(1, k))
    labels, scores = np.full((n, width), -1), np.full((n, width), -np.inf, np.float32)
    barred = [data.draw(st.sets(st.integers(0, k - 1))) for _ in range(n)] if data.draw(st.booleans()) else []
    for i in range(n):
        free = [label for label in data.draw(st.permutations(range(k))) if not barred or label not in barred[i]]
        found = free[: data.draw(st.integers(0, width))]
        labels[i, : len(found)], scores[i, : len(found)] = found, -np.arange(len(found))
    before = labels.copy()
    fill_up(counts, UNREACHED, np.float32(UNSEEN), labels_csr(barred) if barred else NOTHING, labels, scores)
    for i, (was, now, of_now) in enumerate(zip(before, labels, scores, strict=True)):
        found = was[was >= 0].tolist()
        others = [label for label in range(k) if label not in found and not (barred and label in barred[i])]
        want = [
            *found,
            *(label for label in others if counts[label]),
            *(label for label in others if not counts[label]),
        ]
        assert now.tolist() == [*want, *[-1] * width][:width]
        for label, score in zip(now.tolist()[len(found) :], of_now.tolist()[len(found) :], strict=True):
            assert score == (-np.inf if label < 0 else UNREACHED if counts[label] else UNSEEN)
    assert UNSEEN < UNREACHED < -1e30


# ----------------------------------------------------------------------------------------------------------------------
# models

UNSEEN_LABELS = (0, 1, 40)


@pytest.fixture(scope="module", params=[2, 1], ids=["several labels a row", "one label a row"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[xs.Model, Any]:
    """A model whose beam is as wide as its widest level, which has eight nodes; and its rows."""
    folder = tmp_path_factory.mktemp("model")
    X, Y = topics(labels=request.param, unseen=UNSEEN_LABELS)
    clf = xs.LabelTree(max_leaf=6, root=4, branching=2, beam=8, C=2, epochs=30, memory_limit=LIMIT)
    made: xs.Model = clf.fit(stored(folder, X, Y), model=folder / "m").model_
    assert made.attributes.get("implied", {"pairs": 0})["pairs"] == 0
    return made, X


def dense(panels: Panels, d: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights (D, children) and bias of a unit."""
    W = np.zeros((d, len(panels.bias)))
    for features, children, values in unpacked(panels):
        W[features, children - panels.children[0]] = values
    return W, panels.bias.astype(np.float64)


def scores_by_hand(model: xs.Model, X: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of all rows and labels, and margins, straight from the formulas; there is one tree."""
    of = TreeWeights(model.path)
    (structure,) = of.structures()
    rows, S = X.toarray().astype(np.float64), np.zeros((X.shape[0], 1))

    def margins(tree: int, number: int) -> NDArray[np.float64]:
        units = [dense(of.unit(unit, [structure]), model.n_features) for unit, _ in of.tiles_of(tree, number)]
        return np.concatenate([rows @ W + bias for W, bias in units], axis=1)

    for level in structure.levels[:-1]:
        S = np.repeat(S, np.diff(level.ptr), axis=1) - np.maximum(0, 1 - margins(0, level.number)) ** 3
        assert (S <= 0).all()
    last = structure.levels[-1]
    z, S = margins(0, last.number), np.repeat(S, np.diff(last.ptr), axis=1)
    several = of.score["by_score"]
    scores = -(np.maximum(0, 1.3 - z) ** 3) + (0.5 if several else 0.25) * S
    by_label = np.argsort(structure.order)
    scores, z = scores[:, by_label], z[:, by_label]
    if several:
        says = -((2 - 1) / 4) * np.maximum(0, 1 - margins(GUIDE, 0)) ** 3  # two labels a row
        assert (says <= 0).all()
        scores += says[:, read_groups(model.path, model.n_labels)].mean(axis=2)
    return scores, z


def test_a_beam_as_wide_as_the_level_scores_every_label(model: tuple[xs.Model, Any]) -> None:
    made, X = model
    several = X.nnz > 2200  # see `topics`
    rule = {"short": 1.3, "path": 0.5 if several else 0.25, "guide": 0.25 if several else 0.0, "by_score": several}
    assert TreeWeights(made.path).score == rule
    labels, scores = made.predict_topk(X, made.n_labels)
    want, z = scores_by_hand(made, X)
    assert (np.sort(labels, axis=1) == np.arange(made.n_labels)).all()
    seen = np.isfinite(want)
    assert np.flatnonzero(~seen.any(axis=0)).tolist() == list(UNSEEN_LABELS)
    found = np.zeros_like(want)
    np.put_along_axis(found, labels, scores.astype(np.float64), axis=1)
    np.testing.assert_allclose(found[seen], want[seen], rtol=2e-5, atol=2e-5)
    assert (np.diff(scores, axis=1) <= 0).all()
    best = OpenTrees(TreeWeights(made.path), 8, None).best(csr_of(X), NOTHING, made.n_labels)
    n = made.n_labels - len(UNSEEN_LABELS)
    np.testing.assert_allclose(best.margins[:, :n], np.take_along_axis(z, labels[:, :n], axis=1), atol=2e-5)
    # equal scores: by the margin
    ties = np.diff(best.scores[:, :n], axis=1) == 0
    assert (np.diff(best.margins[:, :n], axis=1)[ties] <= 0).all()


def csr_of(X: Any) -> CSR:
    return CSR(X.indptr.astype(np.int64), X.indices, X.data)


def test_labels_without_training_rows_come_last_in_any_beam(model: tuple[xs.Model, Any]) -> None:
    made, X = model
    k, wide = made.n_labels, made.predict_topk(X, made.n_labels)[1]
    for beam in (1, 3, 8):
        open_ = OpenTrees(TreeWeights(made.path), beam, None)
        labels, scores = np.empty((X.shape[0], k), np.int64), np.empty((X.shape[0], k), np.float32)
        best = open_.best(csr_of(X), NOTHING, k)
        open_.fill(best, NOTHING, Ranking(labels, scores))
        assert labels[:, -3:].tolist() == [list(UNSEEN_LABELS)] * X.shape[0]
        assert (scores[:, -3:] == UNSEEN).all()
        reached = best.labels >= 0
        assert (labels[reached] == best.labels[reached]).all()
        assert (scores[~reached][scores[~reached] != UNSEEN] == UNREACHED).all()
        assert (reached.sum(axis=1) <= 6 * beam).all()
    assert np.array_equal(scores, wide)


def test_a_filter_leaves_out_its_pairs_and_nothing_else(model: tuple[xs.Model, Any], tmp_path: Path) -> None:
    """Also where that leaves fewer labels than are asked for, and where no beam reached what it names."""
    made, X = model
    rng = np.random.default_rng(0)
    pairs = {(i, int(label)) for i in range(300) for label in rng.choice(48, 20, replace=False)}
    pairs |= {(7, label) for label in range(48) if label not in (5, 11)}
    (tmp_path / "f.txt").write_text("".join(f"{row} {label}\n" for row, label in sorted(pairs)))
    data = xs.open_dataset(made.path.with_name("data.xmc"))
    for beam in (8, 1):
        narrow = made.with_beam(beam)
        full, full_scores = narrow.predict_topk(X, 48)
        barred = pairs_csr([{label for row, label in pairs if row == i} for i in range(300)])
        for k in (5, 48):
            xs.predict(narrow, data, tmp_path / "p", k, overwrite=True, filter=tmp_path / "f.txt", memory_limit=LIMIT)
            labels, scores = Predictions(tmp_path / "p").rows(0, 300)
            rows, ranks = np.nonzero(labels >= 0)
            named = {(int(row), int(labels[row, rank])) for row, rank in zip(rows, ranks, strict=True)} & pairs
            assert not named
            assert labels.tolist() == leave_out_predictions(full, *barred)[:, :k].tolist()
            of_label = np.zeros_like(full_scores)
            np.put_along_axis(of_label, full, full_scores, axis=1)
            assert np.array_equal(scores[rows, ranks], of_label[rows, labels[rows, ranks]])
            assert (scores[labels < 0] == -np.inf).all()


def test_lifted_labels_stand_alike_in_short_and_long_lists() -> None:
    """They tie; some are in a long list by their own scores, with a margin, and not in a short one."""
    rng, K = np.random.default_rng(0), 12
    lists = [np.sort(rng.choice(np.arange(3, K), 4, replace=False)) if j < 3 else [] for j in range(K)]
    implied = Implied(np.cumsum([0, *map(len, lists)]), np.concatenate(lists).astype(np.int32), np.float32(0.1))
    own, z = -rng.random((50, K)).astype(np.float32), rng.random((50, K)).astype(np.float32)
    order = np.argsort(-own, axis=1)

    def ranked(k: int) -> Best:
        first = order[:, :k]
        best = Best(first.copy(), np.take_along_axis(own, first, 1), np.take_along_axis(z, first, 1))
        before = Best(*(part.copy() for part in best))
        lift(implied, Ranking(best.labels, best.scores), NOTHING)
        order_ties(before, best)
        return best

    long = ranked(K)
    assert (np.diff(long.scores, axis=1) == 0).any(axis=1).mean() > 0.5
    for k in (2, 3, 5, 8):
        short = ranked(k)
        assert np.array_equal(short.labels, long.labels[:, :k])
        assert np.array_equal(short.scores, long.scores[:, :k])
