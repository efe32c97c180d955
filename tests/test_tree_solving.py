"""Children of nodes: each is at the optimum of its problem on the rows of its parent; which rows these are; how C is chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.classes import random_rows, sparse
from helpers.compiler import needs_compiler, unless_plain
from helpers.trees import Trained, array, flat, run_tree, solved, stored, take_solved, topics
from numpy.typing import NDArray
from reference import dcd
from reference import tree as twin
from sklearn.metrics import average_precision_score
from sklearn.svm import LinearSVC

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.kernels.dcd import ONCE, Steps
from xmc_stream.linear.kernels.lanecd import Rest, begin_lanes, new_lanes, settle_lanes, visit_lanes
from xmc_stream.linear.kernels.rows import row_squares
from xmc_stream.methods.weights import Given
from xmc_stream.tree import choice, plan, streaming
from xmc_stream.tree.beams import BeamJob
from xmc_stream.tree.choice import ChoiceJob
from xmc_stream.tree.kernels.solve import measure_rows, measure_weights
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.parents import parents_of
from xmc_stream.tree.solve import Problem, SolveJob, relative_gaps
from xmc_stream.tree.streaming import StreamJob

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")

EXACT: dict[str, Any] = {"C": 1.5, "C_nodes": 2.5, "lam": 0.05, "tol": 1e-5, "epochs": 3000, "prune": 0.0}
SHAPE: dict[str, Any] = {"max_leaf": 6, "root": 4, "branching": 2, "beam": 3}
WITHIN = 2e-4  # of weights: v is float32

# ----------------------------------------------------------------------------------------------------------------------
# lanes

N, D = 60, 12


def some_labels(n_labels: int, seed: int = 0) -> NDArray[np.bool_]:
    rng = np.random.default_rng(seed)
    return rng.random((N, n_labels)) < np.linspace(0.05, 0.6, n_labels)


def settled(
    X: NDArray[np.float64], Y: NDArray[np.bool_], p: TreeParameters, seed: int = 7, visits: int = 2
) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Epochs, alpha (labels, N) and weights (labels, D + 1) of up to LANES labels beside each other."""
    p, block, squares, lanes = p.resolved(N), sparse(X), np.empty(N), new_lanes(N, D)
    row_squares(block.indptr, block.values, 1.0, squares)
    labels, rows = np.nonzero(Y.T)
    y = Labels(np.searchsorted(labels, np.arange(Y.shape[1] + 1)).astype(np.int64), rows.astype(np.int64))
    penalty, steps = Problem.of(p, 0, True).penalty, Steps(seed, 0, p.epochs, p.tol, 0.0)
    used = begin_lanes(0, y, ONCE.classes, penalty, lanes)
    done = settle_lanes(CSR.of(block), squares, ONCE.rows, steps, penalty, used, Rest(p.tol, visits), lanes)
    v = np.vstack([lanes.v.reshape(D, LANES), lanes.v0]).astype(np.float64)
    v[:-1] = dcd.soft(v[:-1], np.float64(p.lam))
    return done, lanes.alpha.reshape(N, LANES).T[: Y.shape[1]].astype(np.float64), v.T[: Y.shape[1]]


@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize(("lam", "weighted"), [(0.0, False), (0.3, True)])
def test_gaps_are_those_of_the_problem(epochs: int, lam: float, weighted: bool) -> None:
    X, Y = random_rows(np.random.default_rng(0), N, D), some_labels(LANES - 2)
    p = TreeParameters(C=2.0, lam=lam, positive_weight=1.5, epochs=epochs).resolved(N)
    times = np.tile([1.0, 0.5, 0.0, 2.0], N // 4) if weighted else ONCE.rows
    block, squares, lanes = CSR.of(sparse(X)), np.empty(N), new_lanes(N, D)
    row_squares(block.indptr, block.values, 1.0, squares)
    labels, rows = np.nonzero(Y.T)
    y = Labels(np.searchsorted(labels, np.arange(Y.shape[1] + 1)).astype(np.int64), rows.astype(np.int64))
    penalty, steps, figures = (
        Problem.of(p, 0, True).penalty,
        Steps(7, 0, epochs, p.tol, 0.0),
        np.zeros((LANES, 2)),
    )
    used = begin_lanes(0, y, ONCE.classes, penalty, lanes)
    settle_lanes(block, squares, times, steps, penalty, used, Rest(p.tol, 2), lanes)
    measure_rows(block, squares, times, penalty, lanes, figures)
    measure_weights(lam, lanes, figures)
    gaps = relative_gaps(used, figures)
    assert len(gaps) == LANES - 2
    for c, gap in enumerate(gaps):
        of = problem_of(p, X, Y[:, c])
        of = replace(of, times=times) if weighted else of
        alpha = lanes.alpha.reshape(N, LANES)[:, c].astype(np.float64)
        assert gap == pytest.approx(dcd.gap(of, alpha) / dcd.primal(of, dcd.weights(of, alpha)), rel=1e-3)
        assert gap > 1e-4


def problem_of(p: TreeParameters, X: NDArray[np.float64], y: NDArray[np.bool_]) -> dcd.Problem:
    """Of a label."""
    return dcd.Problem(
        X, np.where(y, 1.0, -1.0), p.lam, 1.0, p.chosen_C, "squared_hinge", True, positive_weight=p.positive_weight
    )


@pytest.mark.parametrize(("lam", "positive_weight"), [(0.0, 1.0), (0.3, 3.0)])
@pytest.mark.parametrize("tol", [0.1, 1e-2, 1e-4])
def test_lanes_settle_where_nothing_violates_by_more_than_tol(lam: float, positive_weight: float, tol: float) -> None:
    X, Y = random_rows(np.random.default_rng(0), N, D), some_labels(LANES)
    p = TreeParameters(C=2.0, lam=lam, positive_weight=positive_weight, tol=tol, epochs=2000)
    done, alpha, weights = settled(X, Y, p)
    assert 2 < done < 2000
    violations = []
    for y, a, w in zip(Y.T, alpha, weights, strict=True):
        of = problem_of(p, X, y)
        violations.append(dcd.violation(of, a))
        np.testing.assert_allclose(w, dcd.weights(of, a), atol=2e-5)
        if tol < 1e-3:
            np.testing.assert_allclose(w, dcd.fista(of), atol=WITHIN)
    assert max(violations) <= tol + 1e-5
    if tol > 1e-3:  # and no step was taken that need not be
        assert max(violations) > tol / 20


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_a_label_settles_at_its_optimum_in_any_lane_and_company(lam: float) -> None:
    X, Y = random_rows(np.random.default_rng(1), N, D), some_labels(LANES, 1)
    p = TreeParameters(C=2.0, lam=lam, tol=unless_plain(1e-5, 1e-3), epochs=3000)
    order = np.random.default_rng(2).permutation(LANES)
    _, _, together = settled(X, Y, p)
    _, _, shuffled = settled(X, Y[:, order], p, seed=8)
    for c in range(0, LANES, unless_plain(3, 8)):
        best = dcd.fista(problem_of(p, X, Y[:, c]))
        _, _, alone = settled(X, Y[:, [c]], p)
        for found in (together[c], shuffled[order.tolist().index(c)], alone[0]):
            np.testing.assert_allclose(found, best, atol=unless_plain(WITHIN, 5e-3))


def test_epochs_are_counted_and_end_where_they_must() -> None:
    X, Y = random_rows(np.random.default_rng(0), N, D), some_labels(LANES)
    p = TreeParameters(C=2.0, tol=1e-6, epochs=3)
    done, three, _ = settled(X, Y, p)
    assert done == 3
    assert (settled(X, Y, replace(p, epochs=4))[1] != three).any()
    done, alpha, _ = settled(X, Y, replace(p, tol=1e3, epochs=50))
    assert done == 1
    assert not alpha.any()


def test_a_row_that_visits_do_not_move_sleeps() -> None:
    X, Y = random_rows(np.random.default_rng(0), N, D), some_labels(4)
    block, squares, lanes = sparse(X), np.empty(N), new_lanes(N, D)
    row_squares(block.indptr, block.values, 1.0, squares)
    penalty = Problem.of(TreeParameters(C=1.0).resolved(N), 0, True).penalty
    begin_lanes(0, Labels(np.zeros(1, np.int64), np.empty(0, np.int64)), ONCE.classes, penalty, lanes)
    lanes.positive[:] = Y @ (1 << np.arange(4))
    lanes.quiet[:], lanes.order[:] = 0, np.arange(N)
    how = CSR.of(block), squares, ONCE.rows, lanes.order[:0], penalty, np.uint16(0b1111)
    # at 0 the gradient of every row is -1
    assert visit_lanes(*how, N, Rest(1.0, 2), lanes) == N
    assert not lanes.alpha.any()
    assert (lanes.quiet == 1).all()
    assert visit_lanes(*how, N, Rest(0.99, 2), lanes) > 0
    moved = lanes.alpha.reshape(N, LANES).any(axis=1)
    assert moved.any()
    assert not lanes.alpha.reshape(N, LANES)[:, 4:].any()
    assert lanes.quiet.tolist() == np.where(moved, 0, 2).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# children of a root and of nodes


def liblinear(X: Any, y: NDArray[np.bool_], C: float) -> NDArray[np.float64]:
    """Its C is half of ours."""
    svm = LinearSVC(loss="squared_hinge", dual=True, C=C / 2, tol=1e-10, max_iter=10**6, intercept_scaling=1)
    svm.fit(X.astype(np.float64), y)
    return np.append(svm.coef_[0], svm.intercept_)


def nodes_below(run: Trained, number: int, tree: int = 0) -> Iterator[tuple[int, list[list[int]]]]:
    """Each parent of a level, and the labels of each of its children."""
    structure = run.structure(tree)
    level = structure.levels[number]
    labels = [structure.order[low:high].tolist() for low, high in itertools.pairwise(level.children)]
    for parent, (low, high) in enumerate(itertools.pairwise(level.ptr)):
        yield parent, labels[low:high]


def beams_of(run: Trained, number: int, tree: int = 0) -> list[dict[int, float]]:
    """Of each node of a level, the rows whose beam has it, and their paths."""
    found: list[dict[int, float]] = [{} for _ in range(run.structure(tree).levels[number].n_children)]
    for job in run.of(BeamJob):
        if (job.tree, job.level) == (tree, number):
            nodes = array(job.out, "nodes").reshape(job.stop - job.start, -1)
            paths = array(job.out, "paths").reshape(nodes.shape)
            for i, t in zip(*np.nonzero(nodes >= 0), strict=True):
                found[nodes[i, t]][job.start + int(i)] = float(paths[i, t])
    return found


def rows_by_hand(run: Trained, Y: Any, number: int, tree: int = 0) -> Iterator[list[int]]:
    """R(c) of each parent of a level."""
    if number == 0:
        yield list(range(Y.shape[0]))
        return
    beams = beams_of(run, number - 1, tree)
    for parent, children in nodes_below(run, number, tree):
        positive = np.flatnonzero(Y[:, flat(children)].getnnz(axis=1)).tolist()
        noise = lambda row, c=parent: twin.gumbel(run.seed, tree, number - 1, c, row)  # noqa: E731
        yield twin.rows_of_parent(positive, beams[parent], run.p.negatives, noise)


CHANGES: dict[str, dict[str, Any]] = {
    "liblinear": {"lam": 0.0},
    "two trees": {"lam": 0.0, "n_trees": 2, "negatives": 0.7},
    "l1": {"lam": 0.2, "positive_weight": 3.0},
    "weights": {"class_weight": "given", "positive_weight": 0.7},
}
OF_ROWS, OF_LABELS = np.tile([1.0, 0.0, 2.5, 0.3], 75), np.linspace(0.5, 3.0, 48)  # of "weights"


@pytest.fixture(scope="module", params=CHANGES)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Any, Any]:
    """A run whose children are solved exactly, on many strips of rows, of some parents too. Some labels have no rows."""
    X, Y = topics(unseen=(0, 1, 2, 3, 4, 5, 40, 41))
    folder = tmp_path_factory.mktemp("exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "STRIP_BYTES", 64)
        patch.setattr(plan, "LARGE", 1000)
        p = TreeParameters(**{**EXACT, **SHAPE, **CHANGES[request.param]})
        weights = Given(OF_ROWS, OF_LABELS) if p.class_weight else None
        run = run_tree(stored(folder, X, Y), folder, p, 5, given=weights)
    return run, X, Y


@needs_compiler
@pytest.mark.parametrize("number", [0, 1, 2])
def test_children_are_at_the_optimum_of_their_problems(exact: tuple[Trained, Any, Any], number: int) -> None:
    run, X, Y = exact
    compared = 0
    for tree in range(run.p.n_trees):
        assert len(run.structure(tree).levels) == 3
        W, bias = solved(run, number, tree)
        last, at = number == 2, 0
        for (_, children), rows in zip(nodes_below(run, number, tree), rows_by_hand(run, Y, number, tree), strict=True):
            for labels in children:
                y = Y[rows][:, labels].getnnz(axis=1) > 0
                found, at = np.append(W[:, at], bias[at]), at + 1
                if not y.any():
                    assert not found[:-1].any()
                    assert found[-1] == -np.inf
                    continue
                of = problem_of(run.p, X[rows].toarray().astype(np.float64), y)
                of = of if last else replace(of, lam=0.0, C=run.p.C_nodes, positive_weight=1.0)
                if run.p.class_weight:
                    of = replace(of, times=OF_ROWS[rows] * np.where(y & last, OF_LABELS[labels[0]], 1.0))
                plain = of.lam == 0.0 and of.positive_weight == 1.0 and not run.p.class_weight and not y.all()
                best = liblinear(X[rows], y, of.C) if plain else dcd.fista(of)
                np.testing.assert_allclose(found, best, atol=WITHIN)
                compared += 1
    assert compared >= [4, 8, 38][number] * run.p.n_trees
    gaps = run.result["gaps"]
    assert {"level 1", "level 2", "labels"} <= set(gaps)
    assert all(mean <= worst < 1e-3 for what, (mean, worst) in gaps.items() if what != "groups")


@needs_compiler
def test_how_rows_and_children_are_cut_changes_no_bit(
    exact: tuple[Trained, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STRIP_BYTES", 64)
    run, out = exact[0], str(tmp_path / "again")
    streamed = run.of(StreamJob)
    assert run.of(SolveJob)
    assert {job.level for job in streamed} == {0, 1, 2}
    for again, job in [
        *((replace(job, max_entries=1, out=out), job) for job in run.of(SolveJob)),
        *((replace(job, spare=0, out=out), job) for job in streamed),  # rows and alpha are in files
    ]:
        assert again.run()["nnz"] == len(array(job.out, "values"))
        for name in ("features", "children", "values", "counts", "bias"):
            assert array(again.out, name).tobytes() == array(job.out, name).tobytes()


@needs_compiler
@pytest.mark.parametrize("spare", [0, 1 << 30])
def test_a_job_that_leaves_off_and_goes_on_changes_no_bit(
    exact: tuple[Trained, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    run = exact[0]
    monkeypatch.setattr(streaming, "STRIP_BYTES", 64)
    monkeypatch.setattr(streaming, "_SECONDS", -1.0)
    monkeypatch.setattr(streaming, "_LEFT_BYTES", 1e30)
    shorter = {level: next(job for job in run.of(StreamJob) if job.level == level) for level in (0, 2)}
    for level, job in shorter.items():
        part = replace(job, spare=spare, out=str(tmp_path / f"{level}"))
        while part.run()["open"]:
            part = replace(part, part=part.part + 1)
            assert part.key == f"{job.key}/{part.part}"
        assert part.part > 10
        for name in ("features", "children", "values", "counts", "bias", "gaps"):
            assert array(part.left, name).tobytes() == array(job.out, name).tobytes()


@needs_compiler
def test_rows_of_a_parent_are_its_positives_and_some_that_came_by(exact: tuple[Trained, Any, Any]) -> None:
    run, _, Y = exact
    drawn = 0
    for tree, number in itertools.product(range(run.p.n_trees), (1, 2)):
        structure = run.structure(tree)
        level = structure.levels[number]
        before = tuple(job.out for job in run.of(BeamJob) if (job.tree, job.level) == (tree, number - 1))
        found = parents_of(
            run.dataset.Y_columns(), structure, level, np.arange(level.n_parents), before, run.p.negatives
        )
        for parent, rows, (_, children) in zip(
            found, rows_by_hand(run, Y, number, tree), nodes_below(run, number, tree), strict=True
        ):
            assert parent.rows.tolist() == rows
            positive = np.flatnonzero(Y[:, flat(children)].getnnz(axis=1))
            assert np.isin(positive, rows).all()
            assert len(rows) <= len(positive) + math.ceil(run.p.negatives * len(positive))
            drawn += len(rows) - len(positive)
            for child, labels in enumerate(children):
                mine = parent.y.indices[parent.y.indptr[child] : parent.y.indptr[child + 1]]
                assert np.unique(parent.rows[mine]).tolist() == np.flatnonzero(Y[:, labels].getnnz(axis=1)).tolist()
        (some,) = parents_of(run.dataset.Y_columns(), structure, level, np.array([2]), before, run.p.negatives)
        assert some.rows.tolist() == list(rows_by_hand(run, Y, number, tree))[2]
    assert drawn > 100


@needs_compiler
def test_draws_are_the_same_for_any_range_of_rows(exact: tuple[Trained, Any, Any], tmp_path: Path) -> None:
    run = exact[0]
    for tree in range(run.p.n_trees):
        above, below = (job for job in run.of(BeamJob) if job.tree == tree)
        for start, stop in ((0, 111), (111, 112), (112, 300)):
            first = replace(above, start=start, stop=stop, out=str(tmp_path / f"{tree}-0-{start}"))
            second = replace(below, start=start, stop=stop, before=first.out, out=str(tmp_path / f"{tree}-1-{start}"))
            for whole, part, width in ((above, first, run.p.beam), (below, second, run.p.leaf_beam)):
                part.run()
                for name in ("nodes", "paths"):
                    rows = slice(start * width, stop * width)
                    assert array(part.out, name).tobytes() == array(whole.out, name)[rows].tobytes()
                every, mine, nodes = (
                    array(whole.out, "rows"),
                    array(part.out, "rows"),
                    np.repeat(np.arange(len(array(whole.out, "ptr")) - 1), np.diff(array(whole.out, "ptr"))),
                )
                inside = (every >= start) & (every < stop)
                assert mine.tolist() == every[inside].tolist()
                assert array(part.out, "keys").tobytes() == array(whole.out, "keys")[inside].tobytes()
                assert (
                    np.diff(array(part.out, "ptr")).tolist()
                    == np.bincount(nodes[inside], minlength=len(array(whole.out, "ptr")) - 1).tolist()
                )


# ----------------------------------------------------------------------------------------------------------------------
# one level


@needs_compiler
@pytest.mark.parametrize("weighted", [False, True])
def test_a_tree_of_one_level_is_one_vs_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    monkeypatch.setattr(streaming, "STRIP_BYTES", 1 << 10)
    X, Y = topics(n=200, k=40, unseen=(7,))
    change = {"lam": 0.2, "positive_weight": 3.0, "class_weight": "given"} if weighted else {"lam": 0.0}
    p, weights = TreeParameters(**{**EXACT, **change, "max_leaf": 40}), Given(OF_ROWS[:200], OF_LABELS[:40])
    run = run_tree(stored(tmp_path, X, Y), tmp_path, p, 1, given=weights if weighted else None)
    assert not run.of(BeamJob)
    W, bias = solved(run, 0)
    order = run.structure().order
    assert order.tolist() == list(range(40))
    z = X @ W + bias
    for k in (2, 7, 16, 39) if weighted else range(40):
        if k == 7:
            assert (z[:, k] == -np.inf).all()
            continue
        y = Y[:, [k]].toarray()[:, 0] > 0
        if weighted:
            times = OF_ROWS[:200] * np.where(y, OF_LABELS[k], 1.0)
            best = dcd.fista(replace(problem_of(p, X.toarray().astype(np.float64), y), times=times))
        else:
            best = liblinear(X, y, p.chosen_C)
        np.testing.assert_allclose(z[:, k], X @ best[:-1] + best[-1], atol=WITHIN)
    (job,) = run.of(StreamJob)[-1:]
    assert (job.first, job.last) == (0, 40)
    for first in (0, 16, 32):  # groups beside each other, or jobs of their own
        part = replace(job, first=first, last=min(first + 16, 40), out=str(tmp_path / f"part-{first}"))
        part.run()
        W_part, bias_part = np.zeros_like(W), np.zeros_like(bias)
        take_solved(part.out, [(part.first, part.last)], 0, W_part, bias_part)
        mine = slice(part.first, part.last)
        assert W_part[:, mine].tobytes() == W[:, mine].tobytes()
        assert bias_part[mine].tobytes() == bias[mine].tobytes()


# ----------------------------------------------------------------------------------------------------------------------
# the choice of C


@needs_compiler
@pytest.mark.parametrize(("most", "lam"), [(1 << 16, 0.0), (60, 0.1)])
def test_labels_are_looked_at_on_rows_that_their_leaf_holds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, lam: float
) -> None:
    monkeypatch.setattr(choice, "MOST_ROWS", most)
    X, Y = topics(n=240, k=40)
    Y = Y.tolil()
    Y[:, 3] = 0.0
    Y[[5, 17], 3] = 1.0  # a label that may have two rows left, or fewer
    Y = Y.tocsr()
    p = TreeParameters(**{**EXACT, "C": None, "max_leaf": 20, "beam": 1, "tol": 1e-4, "lam": lam})
    run = run_tree(stored(tmp_path, X, Y), tmp_path, p, seed=2)
    jobs, structure = run.of(ChoiceJob), run.structure()
    level, beams, rows_of = structure.levels[-1], beams_of(run, 0), list(rows_by_hand(run, Y, 1))
    assert level.n_parents == 2
    assert len(jobs) >= 2
    few = 0
    for job in jobs:
        hits, means = array(job.out, "hits"), job.run()
        assert len(job.picks) == 4  # two groups of labels of each leaf
        for c in job.values:
            want_hits, want = [], []
            for leaf, first in job.picks:
                rows = np.array(rows_of[leaf])[:: -(-len(rows_of[leaf]) // most)]
                held = np.array(twin.held_out(rows.tolist(), 2, 0.25))
                labels = structure.order[level.parents[leaf] : level.parents[leaf + 1]][first : first + LANES]
                there = [row in beams[leaf] for row in rows[held]]
                path = np.array([beams[leaf].get(row, np.nan) for row in rows[held]])
                z = np.full((held.sum(), len(labels)), np.nan)
                for lane, label in enumerate(labels):
                    y = Y[rows][:, [label]].toarray()[:, 0] > 0
                    if y[~held].sum() < 2:
                        few += 1
                        continue
                    left = X[rows[~held]].toarray().astype(np.float64)
                    w = dcd.fista(problem_of(replace(p, C=c), left, y[~held])) if lam else liblinear(left, y[~held], c)
                    z[:, lane] = X[rows[held]] @ w[:-1] + w[-1]
                scores = job.path * path[:, None] - np.maximum(0, 1.3 - z) ** 3
                looked_at = np.isfinite(scores) & np.array(there)[:, None]
                want.append(scores[looked_at])
                want_hits.append((Y[rows[held]][:, labels].toarray() > 0)[looked_at])
            assert hits.tolist() == np.concatenate(want_hits).tolist()
            scores = array(job.out, f"scores-{c:g}")
            np.testing.assert_allclose(scores, np.concatenate(want), atol=5e-3)
            precision = 100 * average_precision_score(hits, scores)
            assert means["precisions"][job.values.index(c)] == pytest.approx(precision)
            assert run.result["C_tried"][f"{c:g}"] == pytest.approx(precision, abs=1e-4)
    assert few > 0
    assert run.result["C"] in {c for job in jobs for c in job.values}
