"""Groups of labels: how labels are clustered, what the groups learn, and what becomes of scores, from memory to disk."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.damage import damage, flip
from helpers.executed import ranked
from helpers.problems import LIMIT
from helpers.tiles import csr
from helpers.trainings import kill_when, train
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import guide as twin

import xmc_stream as xs
from xmc_stream.errors import MemoryLimitError, StoreError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.kernels.permutation import permuted, word_bits
from xmc_stream.linear.guide import Guide
from xmc_stream.linear.kernels.guide import group_terms, guide_row, least_score, sureness
from xmc_stream.linear.kernels.scores import Tile
from xmc_stream.linear.model import LinearModel
from xmc_stream.methods.contract import Task
from xmc_stream.models import Execution
from xmc_stream.ppdsparse import groups as module
from xmc_stream.ppdsparse.groups import CLUSTERINGS, GROUPS, N_GROUPS
from xmc_stream.ppdsparse.kernels.groups import add_to_labels, shares_of_sides
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import LEAST_LABELS, LossWeights, Problem, guide_weight
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.training.train import train as train_model

WEIGHT = 2.0


def random_problem(n: int = 300, d: int = 60, k: int = 50, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Rows of length one with two labels of one of five topics, whose features they share."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, 5, n)
    X = sp.random(n, d, 0.1, format="lil", random_state=seed, dtype=np.float64)
    Y = sp.lil_matrix((n, k))
    for i, topic in enumerate(topics):
        X[i, topic * 5 + rng.integers(0, 5, 3)] = 1.0
        Y[i, topic + 5 * rng.choice(k // 5, 2, replace=False)] = 1.0
    X = sp.csr_matrix(X, dtype=np.float32)
    lengths = np.sqrt(np.asarray(X.multiply(X).sum(axis=1)))
    return sp.csr_matrix(X.multiply(1 / lengths), dtype=np.float32), sp.csr_matrix(Y, dtype=np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    X, Y = random_problem()
    path = tmp_path_factory.mktemp("guided") / "guided.xmc"
    xs.convert(X, path, labels=Y)
    return path, X, Y


@pytest.fixture(scope="module")
def guided(data: tuple[Path, Any, Any], tmp_path_factory: pytest.TempPathFactory) -> LinearModel:
    clf = xs.PPDSparse(guide=WEIGHT, memory_limit=LIMIT).fit(
        data[0], model=tmp_path_factory.mktemp("guided") / "guided.model"
    )
    assert isinstance(clf.model_, LinearModel)
    return clf.model_


def parts(model: LinearModel) -> tuple[Any, Any, Any]:
    """Weights (D x groups), biases and groups of labels (R x K)."""
    guide = Guide.of(model)
    block = guide.weights().block(0, N_GROUPS)
    weights = sp.csc_matrix((block.values, block.indices, block.indptr), (model.n_features, N_GROUPS))
    return weights.toarray(), guide.bias(), guide.groups_of(0, model.n_labels)


def scores_by_hand(model: LinearModel, X: Any) -> Any:
    """Guided scores of all rows and labels, in float64."""
    weights, bias, groups = parts(model)
    Z = X.toarray().astype(np.float64) @ model.to_scipy().toarray() + model.bias()
    doubt = np.clip(1 - (X.toarray() @ weights + bias), 0, 1.15) ** 3
    says = doubt[:, groups].mean(axis=1)  # rows x labels
    sure = np.where(Z < 1, 1 - (1 - Z) ** 3, 1 + 0.01 * (Z - 1))
    return sure - WEIGHT * says


def test_scores_are_those_of_the_formula(guided: LinearModel, data: tuple[Path, Any, Any]) -> None:
    _, X, _ = data
    labels, scores = guided.predict_topk(X, k=50)
    by_hand = scores_by_hand(guided, X)
    assert np.allclose(np.take_along_axis(by_hand, labels, axis=1), scores, atol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()
    three, _ = guided.predict_topk(X, k=3)
    assert np.array_equal(three, labels[:, :3])


def test_the_labels_own_weights_are_those_without_groups(guided: LinearModel, data: tuple[Path, Any, Any]) -> None:
    plain = xs.PPDSparse(guide=0, memory_limit=LIMIT).fit(data[0]).model_
    assert (plain.to_scipy() != guided.to_scipy()).nnz == 0
    assert np.array_equal(plain.bias(), guided.bias())
    assert "guide" not in plain.attributes
    assert plain.digest() != guided.digest()
    Z = data[1].toarray() @ plain.to_scipy().toarray() + plain.bias()
    labels, scores = plain.predict_topk(data[1], k=2)
    assert np.allclose(np.take_along_axis(Z, labels, axis=1), scores, atol=1e-5)


def test_all_metrics_are_those_of_guided_scores(
    guided: LinearModel, data: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, X, Y = data
    figures = xs.evaluate(guided.path, xs.open_dataset(path))
    S, T = scores_by_hand(guided, X), Y.toarray() > 0
    auc = np.mean([
        ((S[i][T[i]][:, None] > S[i][~T[i]]) + 0.5 * (S[i][T[i]][:, None] == S[i][~T[i]])).mean() for i in range(len(S))
    ])  # fmt: skip
    assert figures["average_auc"] == pytest.approx(auc, abs=1e-4)
    best = np.argsort(-S, axis=1)[:, :3]
    assert figures["P@3"] == pytest.approx(100 * np.take_along_axis(T, best, axis=1).mean(), abs=0.3)


@pytest.mark.parametrize("change", [
    {"threads": 1}, {"threads": 2, "cuts": Cuts(classes=7, rows=13, solve_rows=40)},
])  # fmt: skip
def test_a_model_is_the_same_for_any_limit_threads_and_cuts(
    guided: LinearModel, data: tuple[Path, Any, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    execution = Execution(**{"memory_limit": LIMIT, **change})
    parameters = PPDSparseParameters(guide=WEIGHT)
    model, _ = train_model(Task(xs.open_dataset(data[0]), parameters, 0), tmp_path / "m", execution)
    assert model.digest() == guided.digest()
    labels, scores = guided.predict_topk(data[1], k=4)
    others, other_scores = ranked(model, data[1], 4, execution)
    assert np.array_equal(labels, others)
    assert np.array_equal(scores, other_scores)


def test_groups_come_with_many_labels_unless_they_are_asked_for(tmp_path: Path) -> None:
    few, many = (
        xs.convert(sp.identity(n, np.float32, "csr"), tmp_path / f"{n}.xmc", labels=sp.identity(n, np.float32, "csr"))
        for n in (LEAST_LABELS - 1, LEAST_LABELS)
    )
    assert [guide_weight(PPDSparseParameters(), dataset) for dataset in (few, many)] == [0.0, WEIGHT]
    assert guide_weight(PPDSparseParameters(guide=0.25), few) == 0.25
    assert guide_weight(PPDSparseParameters(guide=0), many) == 0.0


def test_labels_lie_in_groups_of_equal_size(guided: LinearModel, data: tuple[Path, Any, Any]) -> None:
    _, _, groups = parts(guided)
    assert groups.shape == (CLUSTERINGS, 50)
    for r in range(CLUSTERINGS):
        sizes = np.bincount(groups[r] - r * GROUPS, minlength=GROUPS)
        assert sizes.max() - sizes.min() <= 1
    # labels of one topic stand together far more often than labels of two
    together = np.mean([groups[:, a] == groups[:, b] for a, b in itertools.combinations(range(0, 50, 5), 2)])
    apart = np.mean([groups[:, a] == groups[:, b] for a, b in itertools.product(range(0, 50, 5), range(1, 50, 5))])
    assert together > 2 * apart


def test_a_split_is_that_of_dense_vectors() -> None:
    X, Y = random_problem(seed=3)
    counts = np.asarray(Y.sum(axis=0)).ravel()
    scale = 1 / np.sqrt(np.maximum(counts, 1))
    M = (Y.toarray().T @ X.toarray().astype(np.float64)) * scale[:, None]
    y = sp.csr_matrix(Y)
    sample = module._Sample(
        CSR(X.indptr.astype(np.int64), X.indices, X.data),
        Labels(y.indptr.astype(np.int64), y.indices),
        scale,
        X.shape[1],
        dense=False,
    )
    every = sample.labels
    sets, keys = [every[::2], every[:1], every[1::2], every, every[:3]], [np.uint64(k) for k in (1, 5, 99, 7, 2)]
    directions, halves = sample.split(sets, keys)
    for labels, key, direction, found in zip(sets, keys, directions.T, halves, strict=True):
        if len(labels) == 1:
            assert not direction.any()
            assert [half.tolist() for half in found] == [labels.tolist(), []]
            continue
        bits = word_bits(len(labels))
        first, second = (int(labels[permuted(b, len(labels), bits, key)]) for b in range(2))
        expected, *wanted = twin.split(M, labels.tolist(), first, second, module._MOST_STEPS)
        assert np.allclose(direction, expected, atol=1e-9)
        assert [half.tolist() for half in found] == wanted


@given(st.lists(st.integers(-2, 2), max_size=30), st.randoms(use_true_random=False))
def test_halves_are_the_highest_values_and_ties_go_to_lower_labels(values: list[int], random: Any) -> None:
    along = np.array(values, np.float64)
    labels = np.array(sorted(random.sample(range(len(values)), len(values) // 2)), np.int64)
    ordered = sorted(labels.tolist(), key=lambda label: (-along[label], label))
    first = -(-len(labels) // 2)
    found = [half.tolist() for half in module._halves(labels, along)]
    assert found == [sorted(ordered[:first]), sorted(ordered[first:])]


def test_a_split_does_not_depend_on_how_many_rows_are_summed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = random_problem(60, 30, 15, seed=2)
    x = CSR(X.indptr.astype(np.int64), X.indices, X.data)
    y = Labels(Y.indptr.astype(np.int64), Y.indices)
    sample = module._Sample(x, y, np.full(15, 0.5), 30, False)
    parts, keys = [np.arange(8), np.arange(8, 15)], [np.uint64(1), np.uint64(2)]
    directions, halves = sample.split(parts, keys)
    monkeypatch.setattr(module, "MIB", 200)
    again, others = sample.split(parts, keys)
    assert np.array_equal(again, directions)
    assert [[half.tolist() for half in pair] for pair in others] == [
        [half.tolist() for half in pair] for pair in halves
    ]


def test_the_kernels_are_dense_products() -> None:
    _, Y = random_problem(40, 30, 15, seed=1)
    y = Labels(Y.indptr.astype(np.int64), Y.indices)
    labels = Y.toarray()
    rng = np.random.default_rng(0)
    projected = rng.normal(size=(40, 3))
    sums = np.zeros((15, 3))
    add_to_labels(y, projected, sums)
    assert np.allclose(sums, labels.T @ projected)
    side, scale = rng.integers(-1, 2, (15, 4)).astype(np.int8), rng.random(15)
    shares = np.empty((40, 2, 4))
    shares_of_sides(y, side, scale, shares)
    expected = [labels @ (scale[:, None] * (side == b)) for b in range(2)]
    assert np.allclose(shares, np.stack(expected, axis=1))


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20))
def test_sureness_rises(values: list[float]) -> None:
    ordered = [sureness(np.float32(value)) for value in sorted(values)]
    assert all(a <= b for a, b in itertools.pairwise(ordered))
    assert sureness(np.float32(0)) == 0
    assert sureness(np.float32(1)) == 1
    assert sureness(np.float32(1.5)) > 1
    assert sureness(np.float32(-np.inf)) == sureness(UNSEEN) == UNSEEN  # and no label without rows overflows


@given(st.integers(0, 2**32 - 1), st.floats(-3, 1.25, width=32))
@settings(deadline=None)
def test_no_class_that_is_better_is_passed_over(seed: int, worst: float) -> None:
    rng = np.random.default_rng(seed)
    terms = twin.terms_of(rng.normal(0, 1, (1, 6)).astype(np.float32), 0.5)
    groups = np.stack([rng.integers(0, 3, 40), rng.integers(3, 6, 40)]).astype(np.uint8)
    z = rng.normal(0, 1, 40).astype(np.float32)
    least = least_score(np.float32(worst), 0, terms, 2)
    for c in range(40):
        if twin.guided(z[c], terms[0], groups[:, c]) > np.float32(worst):
            assert z[c] > least


def test_what_groups_say_is_worked_out_in_float32() -> None:
    X, _ = random_problem(30, 30, 15, seed=2)
    W = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)
    bias = np.arange(6, dtype=np.float32) / 7
    start = np.arange(31, dtype=np.int32) * 32
    weights = np.zeros((30, 32), np.float32)
    weights[:, :6] = W
    tile = Tile(
        start, np.zeros(960, np.uint16), weights.ravel(), np.append(bias, np.full(26, -np.inf)).astype(np.float32)
    )
    terms = np.empty((30, 6), np.float32)
    group_terms(CSR(*csr(X.toarray())), tile, np.float32(0.3), terms)
    scores = np.tile(bias, (30, 1))
    for i, j in itertools.product(range(30), range(30)):
        if X[i, j]:
            scores[i] += np.float32(X[i, j]) * W[j]
    assert np.array_equal(terms, twin.terms_of(scores, 0.3))
    row = scores[0].copy()
    groups = np.array([[0, 1, 2, 0, 1, 2], [3, 4, 5, 5, 4, 3]], np.uint8)
    guide_row(row, 0, terms, groups)
    assert np.array_equal(row, twin.guided_scores(scores[:1], terms, groups)[0])


@pytest.mark.slow
def test_a_killed_training_ends_as_the_undisturbed_one_and_groups_that_were_damaged_are_learned_again(
    data: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    more = ["--set", f"guide={WEIGHT}"]
    train(data[0], tmp_path / "whole", more=more)
    killed, damaged = tmp_path / "killed", tmp_path / "damaged"
    assert kill_when(data[0], killed, '"key":"guide"', 0.0, more=more)
    shutil.copytree(tmp_path / "killed.partial", tmp_path / "damaged.partial")
    flip(tmp_path / "damaged.partial" / "guide" / "bias" / "c" / "0")
    assert train(data[0], killed, limit="600MB", threads=1, more=more)["resumed"]
    assert train(data[0], damaged, more=more)["resumed"]
    for model, again in ((killed, 0), (damaged, 1)):
        events = [event["job"] for event in read_events(model / "events.jsonl") if event["event"] == "again"]
        assert events == ["guide"] * again
        assert xs.load_model(model).digest() == xs.load_model(tmp_path / "whole").digest()


@pytest.mark.parametrize("array", ["groups", "bias", "weights/data", "weights/indices", "weights/indptr"])
def test_damaged_groups_are_found(guided: LinearModel, data: tuple[Path, Any, Any], tmp_path: Path, array: str) -> None:
    path = tmp_path / "m"
    shutil.copytree(guided.path, path)
    assert not damage(path)
    flip(path / "guide" / array / "c" / "0", 3)
    assert damage(path)
    with pytest.raises(StoreError):
        xs.load_model(path).predict_topk(data[1])


def test_groups_that_cannot_be_are_refused(guided: LinearModel) -> None:
    for about in (
        {"weight": 1.0}, {"weight": "x", "clusterings": 8, "groups": 4, "tile": 1, "weights": 1},
        {"weight": 1.0, "clusterings": 80, "groups": 4, "tile": 1, "weights": 1},
        {"weight": 0.0, "clusterings": 8, "groups": 4, "tile": 1, "weights": 1},
    ):  # fmt: skip
        model = LinearModel(guided.path, {**guided.attributes, "guide": about})
        with pytest.raises(StoreError):
            Guide.of(model)


def problem_of(data: Path, seed: int, plan: MemoryPlan) -> Problem:
    return Problem(str(data), PPDSparseParameters(C=1.0, positive_weight=1.0), seed, plan, LossWeights(None, 0))


def test_too_little_memory_for_groups_is_refused(data: tuple[Path, Any, Any]) -> None:
    plan = MemoryPlan(2**20, 2**20, 1)
    job = module.GroupsJob(problem_of(data[0], 0, plan), 0.0, "nowhere")
    with pytest.raises(MemoryLimitError, match="groups of labels"):
        job.run()


@pytest.mark.parametrize(
    ("bytes_of_a_label", "shares", "beside"), [(100, 2, True), (4 * MIB, 2, False), (100, 1, True)]
)
def test_groups_are_learned_beside_the_first_solves_or_alone_where_a_thread_s_memory_is_too_little(
    data: tuple[Path, Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_of_a_label: int,
    shares: int,
    beside: bool,
) -> None:
    monkeypatch.setattr(module, "_LABEL_BYTES", bytes_of_a_label)
    dataset, plan = xs.open_dataset(data[0]), MemoryPlan(2**30, 256 * MIB, 2, cuts=Cuts(shares=shares))
    p = PPDSparseParameters(C=1.0, positive_weight=1.0, guide=1.0)
    phase = next(PPDSparseRun(dataset, tmp_path, p, 0, plan, Notes()).loop())
    keys = [job.key for job in phase.jobs]
    assert keys[0] == "guide"
    assert len(keys) == (1 + shares if beside else 1)
    assert module.groups_budget(plan, dataset) == (plan.budget if bytes_of_a_label > 100 else plan.per_thread)


def test_fewer_clusterings_in_a_pass_change_nothing(data: tuple[Path, Any, Any], tmp_path: Path) -> None:
    written = []
    dataset = xs.open_dataset(data[0])
    for budget in (64 * MIB, sum(module.group_needs(MemoryPlan(2**30, 64 * MIB, 1), dataset).values())):
        plan = MemoryPlan(2**30, budget, 1, cuts=Cuts(rows=50 if budget < 64 * MIB else 0))
        out = tmp_path / str(budget)
        module.GroupsJob(problem_of(data[0], 5, plan), 0.0, str(out)).run()
        written.append({f.relative_to(out): f.read_bytes() for f in sorted(out.rglob("c/*"))})
    assert written[0] == written[1]


def test_a_label_of_every_row_comes_first() -> None:
    X, Y = random_problem()
    Y = sp.csr_matrix(sp.hstack([Y, np.ones((Y.shape[0], 1))]), dtype=np.float32)
    for guide in (0.0, WEIGHT):
        clf = xs.PPDSparse(guide=guide, memory_limit=LIMIT).fit(X, Y)
        labels, scores = clf.predict_topk(X, k=2)
        assert (labels[:, 0] == 50).all()
        assert (scores[:, 0] > 100).all()
        assert clf.model_.to_scipy()[:, 50].nnz == 0
        assert clf.report_["n_empty"] == 1
        again = xs.PPDSparse(guide=guide, memory_limit=LIMIT).fit(X, Y, warm_start=clf.model_)
        assert (again.predict_topk(X, k=1)[0] == 50).all()
    plain = xs.PPDSparse(guide=0.0, memory_limit=LIMIT).fit(X, Y[:, :50])
    beside = xs.PPDSparse(guide=0.0, memory_limit=LIMIT).fit(X, Y)
    assert (plain.model_.to_scipy() != beside.model_.to_scipy()[:, :50]).nnz == 0


def test_weights_of_a_large_model_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, d, k = 1500, 400, 600
    X = sp.random(n, d, 0.05, format="csr", dtype=np.float32, random_state=0)
    X = sp.csr_matrix(X / np.maximum(np.sqrt(X.multiply(X).sum(axis=1)), 1e-6), dtype=np.float32)
    Y = sp.csr_matrix((np.ones(3 * n), (np.repeat(np.arange(n), 3), rng.integers(0, k, 3 * n))), (n, k))
    Y.data[:] = 1.0
    whole = xs.PPDSparse(prune=0, memory_limit=LIMIT).fit(X, Y).model_
    left = xs.PPDSparse(weight_type="float32", memory_limit=LIMIT).fit(X, Y).model_
    half = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y).model_
    assert whole.nnz > 100_000
    bound = left.attributes["pruned_below"]
    entries, norm = X.nnz / n, float(np.sqrt(X.multiply(X).sum(axis=1)).mean())
    assert bound == pytest.approx(0.25 / (norm * np.sqrt(entries)), rel=1e-5)
    W = whole.to_scipy().toarray()
    assert np.array_equal(np.where(np.abs(W) >= np.float32(bound), W, 0), left.to_scipy().toarray())
    assert np.array_equal(whole.bias(), left.bias())
    assert half.attributes["pruned_below"] == bound
    assert half.attributes["float16_weights"] == half.nnz == left.nnz
    assert np.array_equal(half.to_scipy().data, left.to_scipy().data.astype(np.float16).astype(np.float32))
    assert "float16_weights" not in whole.attributes
    few = xs.PPDSparse(memory_limit=LIMIT).fit(X[:20], Y[:20])
    assert few.model_.nnz < 100_000
    assert few.model_.attributes["pruned_below"] == 0
    assert "float16_weights" not in few.model_.attributes
