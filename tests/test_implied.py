"""Implied labels: which there are, what they do to the best labels of a row, and how they come with a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.damage import damage, flip
from helpers.executed import ranked
from helpers.problems import LIMIT
from helpers.trainings import kill_when, train
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import implied as twin

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError, StoreError
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.implied import FEWEST, ImpliedJob, ImpliedLabels
from xmc_stream.linear.kernels.implied import Implied, lift
from xmc_stream.linear.model import LinearModel
from xmc_stream.methods.contract import Task
from xmc_stream.models import Execution
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import MARGIN, implied_margin
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.predictions import Predictions
from xmc_stream.training.train import train as train_model

NESTED = 0.1  # a margin
C = 20.0
K = 30


def nested_problem(n: int = 240, d: int = 40, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Rows of a leaf (labels 0 to 11), its parent (12 to 15) and the root (16), and one of 13 labels beside them."""
    rng = np.random.default_rng(seed)
    leaf = rng.integers(0, 12, n)
    X = sp.random(n, d, 0.2, format="lil", random_state=seed, dtype=np.float64)
    Y = sp.lil_matrix((n, K))
    for i, label in enumerate(leaf):
        X[i, label] = 0.5
        Y[i, [label, 12 + label // 3, 16, 17 + rng.integers(0, 13)]] = 1.0
    X = sp.csr_matrix(X, dtype=np.float32)
    lengths = np.sqrt(np.asarray(X.multiply(X).sum(axis=1)))
    return sp.csr_matrix(X.multiply(1 / lengths), dtype=np.float32), sp.csr_matrix(Y, dtype=np.float32)


class Data(NamedTuple):
    """A training set, its labels, and other rows: a dataset, and what it has."""

    path: Path
    labels: Any
    other: Path
    X: Any
    Y: Any


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder, (X, Y), (X_other, Y_other) = tmp_path_factory.mktemp("nested"), nested_problem(), nested_problem(seed=7)
    xs.convert(X, folder / "nested.xmc", labels=Y)
    xs.convert(X_other, folder / "other.xmc", labels=Y_other)
    return Data(folder / "nested.xmc", Y.toarray() > 0, folder / "other.xmc", X_other, Y_other.toarray() > 0)


@pytest.fixture(scope="module")
def models(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[LinearModel, LinearModel]:
    """Without and with implied labels."""
    folder, made = tmp_path_factory.mktemp("implied"), []
    for name, implied in (("plain", None), ("lifting", NESTED)):
        clf = xs.PPDSparse(implied=implied, C=C, memory_limit=LIMIT).fit(data.path, model=folder / name)
        assert isinstance(clf.model_, LinearModel)
        made.append(clf.model_)
    return made[0], made[1]


def own_scores(model: LinearModel, X: Any) -> Any:
    labels, scores = model.predict_topk(X, k=K)
    found = np.full(labels.shape, -np.inf, np.float32)
    there = labels >= 0
    np.put_along_axis(found, np.where(there, labels, 0), np.where(there, scores, -np.inf), axis=1)
    return found


def as_lists(of_labels: list[list[int]], margin: float) -> Implied:
    ptr = np.cumsum([0, *map(len, of_labels)])
    labels = np.array([label for some in of_labels for label in some], np.int32)
    return Implied(ptr.astype(np.int64), labels, np.float32(margin))


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.125, 0.25, 1.0, 1000.0]), st.booleans())
@settings(deadline=None)
def test_the_best_labels_are_those_of_all_scores(seed: int, k: int, margin: float, filtered: bool) -> None:
    rng = np.random.default_rng(seed)
    S = (rng.integers(-8, 8, (5, 12)) / 4).astype(np.float32)  # many ties, and none by rounding
    of_labels = [sorted({int(m) for m in rng.integers(0, 12, rng.integers(0, 4))} - {j}) for j in range(12)]
    barred = rng.random(S.shape) < 0.2 * filtered
    own = np.where(barred, -np.inf, S).astype(np.float32)
    wanted = np.where(barred, -np.inf, twin.lifted(own, of_labels, margin)).astype(np.float32)
    labels, scores = twin.best(own, k)
    labels[np.isneginf(scores)] = -1
    pairs = sp.csr_matrix(barred)
    no_pairs = Labels(np.empty(0, np.int64), np.empty(0, np.int32))
    of_rows = Labels(pairs.indptr.astype(np.int64), pairs.indices.astype(np.int32)) if filtered else no_pairs
    lift(as_lists(of_labels, margin), Ranking(labels, scores), of_rows)
    expected, expected_scores = twin.best(wanted, k)
    assert np.array_equal(scores, expected_scores)
    assert np.array_equal(labels, np.where(np.isneginf(expected_scores), -1, expected))


@given(st.integers(0, 2**32 - 1), st.sampled_from([3 * MIB, 64 * MIB]), st.integers(1, 30))
@settings(deadline=None, max_examples=15)
def test_implied_labels_are_those_of_dense_matrices(
    tmp_path_factory: pytest.TempPathFactory, seed: int, budget: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 6, 60)
    Y = rng.random((60, 25)) < 0.1
    for label in range(12):  # which lie in label + 12
        Y[:, label] = (groups == label % 6) & (rng.random(60) < 0.8)
        Y[:, label + 12] |= Y[:, label]
    folder = tmp_path_factory.mktemp("dense")
    xs.convert(sp.identity(60, np.float32, "csr"), folder / "d.xmc", labels=sp.csr_matrix(Y, dtype=np.float32))
    job = ImpliedJob(str(folder / "d.xmc"), str(folder / "found"), MemoryPlan(2**30, budget, 1, cuts=Cuts(rows=rows)))
    receipt = job.run()
    block = SparseMatrix(folder / "found").block(0, 25)
    found = [block.indices[block.indptr[j] : block.indptr[j + 1]].tolist() for j in range(25)]
    assert found == twin.implied(Y, FEWEST)
    assert receipt["pairs"] == sum(map(len, found))


def test_lists_that_memory_does_not_hold_are_made_in_turns(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmc_stream.linear import implied as module

    plan, written = MemoryPlan(2**30, 64 * MIB, 1), []
    for name, entry_bytes in (("whole", module._ENTRY_BYTES), ("turns", plan.budget // 8)):
        monkeypatch.setattr(module, "_ENTRY_BYTES", entry_bytes)
        receipt = ImpliedJob(str(data.path), str(tmp_path / name), plan).run()
        written.append({f.relative_to(tmp_path / name): f.read_bytes() for f in (tmp_path / name).rglob("c/*")})
        written.append(receipt["bytes_read"])
    assert written[0] == written[2]
    assert written[1] < written[3]


def test_a_model_lifts_what_its_labels_imply(models: tuple[LinearModel, LinearModel], data: Data) -> None:
    plain, lifting = models
    assert (plain.to_scipy() != lifting.to_scipy()).nnz == 0
    assert plain.digest() != lifting.digest()
    S = own_scores(plain, data.X)
    of_labels = twin.implied(data.labels, FEWEST)
    wanted = twin.lifted(S, of_labels, NESTED)
    assert (wanted > S).any(axis=1).mean() > 0.2  # else there is nothing to see here
    for k in (1, 2, 5, K):
        labels, scores = lifting.predict_topk(data.X, k=k)
        expected, expected_scores = twin.best(wanted, k)
        assert np.array_equal(labels, expected)
        assert np.array_equal(scores, expected_scores)
        cut = Execution(memory_limit=LIMIT, threads=2, cuts=Cuts(classes=7, rows=13))
        assert all(np.array_equal(a, b) for a, b in zip(ranked(lifting, data.X, k, cut), (labels, scores), strict=True))


def test_metrics_of_ranks_are_of_lifted_scores_and_those_of_all_labels_of_their_own(
    models: tuple[LinearModel, LinearModel], data: Data, tmp_path: Path
) -> None:
    plain, lifting = models
    before, after = (xs.evaluate(model.path, data.other, ks=(1, 5)) for model in models)
    labels, _ = twin.best(twin.lifted(own_scores(plain, data.X), twin.implied(data.labels, FEWEST), NESTED), 5)
    assert after["P@5"] == pytest.approx(100 * np.take_along_axis(data.Y, labels, axis=1).mean(), abs=1e-6)
    assert after["P@5"] > before["P@5"]
    for name in ("average_auc", "hamming_loss", "macro_F1"):
        assert after[name] == before[name]
    xs.predict(lifting.path, data.other, tmp_path / "p", k=5)
    assert xs.evaluate(tmp_path / "p", data.other, ks=(1, 5))["P@5"] == after["P@5"]


def test_a_filtered_label_is_not_lifted(models: tuple[LinearModel, LinearModel], data: Data, tmp_path: Path) -> None:
    whole, _ = models[1].predict_topk(data.X, k=4)
    lifted = (whole != models[0].predict_topk(data.X, k=4)[0]).any(axis=1) & (whole == 14).any(axis=1)
    assert lifted.any()
    (tmp_path / "pairs.txt").write_text("".join(f"{i} 14\n" for i in range(len(whole))))
    xs.predict(models[1].path, data.other, tmp_path / "p", k=4, filter=tmp_path / "pairs.txt")
    assert not (Predictions(tmp_path / "p").rows(0, len(whole))[0] == 14).any()


@pytest.mark.parametrize("change", [{"threads": 1}, {"threads": 2, "cuts": Cuts(classes=7, rows=13, solve_rows=40)}])
def test_a_model_is_the_same_for_any_threads_and_cuts(
    models: tuple[LinearModel, LinearModel], data: Data, tmp_path: Path, change: dict[str, Any]
) -> None:
    parameters = PPDSparseParameters(implied=NESTED, C=C)
    execution = Execution(**{"memory_limit": LIMIT, **change})
    model, _ = train_model(Task(xs.open_dataset(data.path), parameters, 0), tmp_path / "m", execution)
    assert model.digest() == models[1].digest()


def test_labels_are_lifted_where_there_are_groups_unless_it_is_said(data: Data) -> None:
    dataset = xs.open_dataset(data.path)
    assert implied_margin(PPDSparseParameters(), dataset) is None
    assert implied_margin(PPDSparseParameters(guide=1.0), dataset) == MARGIN
    assert implied_margin(PPDSparseParameters(guide=1.0, implied=1000), dataset) == 1000
    assert implied_margin(PPDSparseParameters(implied=0.5), dataset) == 0.5
    with pytest.raises(InputError, match="implied"):
        PPDSparseParameters(implied=0.0)


def test_classes_imply_nothing(tmp_path: Path) -> None:
    y = np.repeat(np.arange(4), 10)
    model = xs.PPDSparse(implied=NESTED, memory_limit=LIMIT).fit(np.eye(4, dtype=np.float32)[y], y).model_
    assert isinstance(model, LinearModel)
    assert model.attributes["implied"] == {"margin": NESTED, "pairs": 0}
    assert ImpliedLabels.of(model).pairs == 0
    assert (model.predict_topk(sp.identity(4, np.float32, "csr"), k=1)[0].ravel() == np.arange(4)).all()


def test_calibrated_scores_are_lifted_too(data: Data, tmp_path: Path) -> None:
    plain, lifting = (
        xs.PPDSparse(implied=implied, C=C, memory_limit=LIMIT).fit(data.path, model=tmp_path / str(implied)).model_
        for implied in (None, NESTED)
    )
    about = {"applied": True, "slope": [2.0, 0.5], "least": 0.1, "shift": [-1.0, 0.2], "fewest": 3, "cap": 0.5}
    for model in (plain, lifting):
        model.set_calibration(about)
    assert isinstance(plain, LinearModel)
    wanted = twin.lifted(own_scores(plain, data.X), twin.implied(data.labels, FEWEST), NESTED)
    labels, scores = lifting.predict_topk(data.X, k=5)
    expected, expected_scores = twin.best(wanted, 5)
    assert np.array_equal(labels, expected)
    assert np.array_equal(scores, expected_scores)


@pytest.mark.parametrize("array", ["indices", "indptr"])
def test_damaged_lists_are_found(
    models: tuple[LinearModel, LinearModel], data: Data, tmp_path: Path, array: str
) -> None:
    path = tmp_path / "m"
    shutil.copytree(models[1].path, path)
    assert not damage(path)
    flip(path / "implied" / array / "c" / "0", 3)
    assert damage(path)
    with pytest.raises(StoreError):
        xs.load_model(path).predict_topk(data.X)


def test_lists_that_cannot_be_are_refused(models: tuple[LinearModel, LinearModel]) -> None:
    model = models[1]
    for about in (
        {"margin": 0.1},
        {"margin": "x", "pairs": 1},
        {"margin": 0.0, "pairs": 1},
        {"margin": 1.0, "pairs": -1},
    ):
        with pytest.raises(StoreError):
            ImpliedLabels.of(LinearModel(model.path, {**model.attributes, "implied": about}))
    other = LinearModel(model.path, {**model.attributes, "implied": {"margin": 0.1, "pairs": 1}})
    found = ImpliedLabels.of(other)
    with pytest.raises(StoreError, match="damaged"):
        found.read()


def test_too_little_memory_is_refused(data: Data) -> None:
    with pytest.raises(MemoryLimitError, match="implied labels"):
        ImpliedJob(str(data.path), "nowhere", MemoryPlan(2**20, 2**20, 1)).run()


@pytest.mark.slow
def test_lists_that_were_damaged_are_made_again(data: Data, tmp_path: Path) -> None:
    more = ["--set", f"implied={NESTED}"]
    train(data.path, tmp_path / "whole", more=more)
    killed = tmp_path / "killed"
    assert kill_when(data.path, killed, '"key":"implied"', 0.0, more=more)
    flip(killed.with_name("killed.partial") / "implied" / "indices" / "c" / "0")
    train(data.path, killed, more=more)
    assert xs.load_model(killed).digest() == xs.load_model(tmp_path / "whole").digest()
