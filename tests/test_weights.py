"""Weights of samples and of classes: against LIBLINEAR, against rows given twice or left out, in runs that end and go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from helpers.problems import TIGHT, dense_weights, problem
from helpers.trainings import kill_when, train
from reference import dcd as twin
from sklearn.svm import LinearSVC

import xmc_stream as xs
from xmc_stream.errors import InputError, ResumeError
from xmc_stream.methods.contract import Task
from xmc_stream.methods.registry import method_of, parameters
from xmc_stream.methods.weights import Given, read_weights
from xmc_stream.metrics import inverse_propensity
from xmc_stream.ppdsparse import solver as ppdsparse
from xmc_stream.ppdsparse.problem import LossWeights
from xmc_stream.runtime.plan import Cuts

LIMIT = "2GB"
EXACT: dict[str, Any] = {**TIGHT, "added": 200, "memory_limit": LIMIT, "C": 1.0, "positive_weight": 1.0, "prune": 0.0}
LOSSES = ("squared_hinge", "hinge")
losses = pytest.mark.parametrize("loss", LOSSES)


def some_weights(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice([0.0, 0.3, 1.0, 2.5], n)


def class_weights(kind: str, Y: sp.csr_matrix) -> tuple[Any, np.ndarray]:
    """What is asked for, and by what C counts for negatives and positives of each label."""
    n, k = Y.shape
    counts, pairs = np.asarray(Y.sum(axis=0)).ravel(), np.ones((k, 2))
    if kind == "balanced":
        return kind, n / (2 * np.column_stack([n - counts, counts]))
    if kind == "propensity":
        pairs[:, 1] = 2 * inverse_propensity(counts, n) - 1
        return kind, pairs
    pairs[:, 1] = np.linspace(0.5, 4, k)
    if kind == "dict":
        pairs[1:, 1] = 1.0
        return {0: 0.5}, pairs
    return pairs[:, 1], pairs


@losses
@pytest.mark.parametrize("kind", ["array", "dict", "balanced", "propensity"])
def test_weights_give_what_liblinear_gives(loss: str, kind: str) -> None:
    X, Y = problem(n=120)
    asked, pairs = class_weights(kind, Y)
    samples = some_weights(120)
    clf = xs.PPDSparse(**EXACT, lam=0.0, loss=loss, class_weight=asked).fit(X, Y, sample_weight=samples)
    W, bias = dense_weights(clf.model_)
    for k, (of_negatives, of_positives) in enumerate(pairs):
        peer = LinearSVC(
            loss=loss, dual=True, C=0.5 if loss == "squared_hinge" else 1.0, tol=1e-10, max_iter=2_000_000, random_state=0,
            class_weight={-1: of_negatives, 1: of_positives},
        )  # fmt: skip
        peer.fit(X.astype(np.float64), 2 * Y[:, k].toarray().ravel() - 1, sample_weight=samples)
        assert np.abs(W[:, k] - peer.coef_[0]).max() < 1e-4
        assert abs(bias[k] - peer.intercept_[0]) < 1e-4


@losses
def test_objective_and_gap_are_those_of_the_dense_formula(loss: str) -> None:
    X, Y = problem(n=90, k=5, seed=4)
    samples, (asked, pairs) = some_weights(90, 1), class_weights("balanced", Y)
    for rounds in (1, 4):
        options = {**EXACT, "lam": 0.02, "loss": loss, "max_rounds": rounds, "epochs": 1, "last_epochs": 2}
        clf = xs.PPDSparse(**options, class_weight=asked, threads=1).fit(X, Y, sample_weight=samples)
        W, bias = dense_weights(clf.model_)
        total = 0.0
        for k in range(5):
            y = 2 * Y[:, k].toarray().ravel() - 1
            times = samples * np.where(y > 0, pairs[k, 1], pairs[k, 0])
            p = twin.Problem(X.toarray().astype(np.float64), y, 0.02, 1.0, 1.0, loss, True, times=times)
            total += twin.primal(p, np.append(W[:, k], bias[k]))
        assert clf.report_["objective"] == pytest.approx(total, rel=1e-6)
        assert clf.report_["duality_gap"] > -1e-6


@losses
def test_a_weight_of_two_is_a_row_given_twice_and_of_none_a_row_left_out(loss: str) -> None:
    X, Y = problem(n=80)
    samples = np.random.default_rng(3).integers(0, 3, 80)
    options = {**EXACT, "lam": 0.03, "loss": loss}
    weighed = xs.PPDSparse(**options).fit(X, Y, sample_weight=samples)
    rows = np.repeat(np.arange(80), samples)
    repeated = xs.PPDSparse(**options).fit(X[rows], Y[rows])
    assert weighed.report_["objective"] == pytest.approx(repeated.report_["objective"], rel=1e-5)
    np.testing.assert_allclose(weighed.model_.to_scipy().toarray(), repeated.model_.to_scipy().toarray(), atol=5e-5)
    np.testing.assert_allclose(weighed.model_.bias(), repeated.model_.bias(), atol=5e-5)


def test_weights_of_one_change_no_bit() -> None:
    X, Y = problem(n=100, k=6)
    plain = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y)
    ones = xs.PPDSparse(memory_limit=LIMIT, class_weight=np.ones(6)).fit(X, Y, sample_weight=np.ones(100))
    for mine, theirs in zip(dense_weights(ones.model_), dense_weights(plain.model_), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert ones.report_["objective"] == plain.report_["objective"]
    assert "class_weight" not in plain.report_["params"]


def test_what_each_word_stands_for(tmp_path: Path) -> None:
    X, Y = problem(n=50, k=4)
    Y = sp.csr_matrix(np.column_stack([Y.toarray()[:, :2], np.zeros(50), np.ones(50)]).astype(np.float32))
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    counts = np.asarray(Y.sum(axis=0)).ravel()
    assert (LossWeights(None, 50).of_classes(data, 0, 4) == np.ones((4, 2))).all()
    balanced = LossWeights("balanced", 50).of_classes(data, 0, 4)
    np.testing.assert_allclose(balanced[:2, 1], 50 / (2 * counts[:2]))
    np.testing.assert_allclose(balanced[:2, 0], 50 / (2 * (50 - counts[:2])))
    propensity = LossWeights("propensity", 50).of_classes(data, 0, 4)
    C = (math.log(50) - 1) * 2.5**0.55  # of Jain et al. 2016, A = 0.55 and B = 1.5
    np.testing.assert_allclose(propensity[:2, 1], 1 + 2 * C * (counts[:2] + 1.5) ** -0.55)
    assert (propensity[:, 0] == 1).all()
    assert (balanced[2:] == 1).all()  # of these nothing is learned
    assert (propensity[2:] == 1).all()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[xs.Dataset, Path]:
    """1,500 rows with a class of nine rows in ten, and weights of these rows."""
    folder = tmp_path_factory.mktemp("large")
    X, Y = problem(n=1500, d=40, k=5)
    head = np.random.default_rng(0).random((1500, 1)) < 0.9
    Y = sp.csr_matrix(np.column_stack([head, Y.toarray()]).astype(np.float32))
    np.save(folder / "weights.npy", some_weights(1500))
    return xs.convert(X, folder / "data.xmc", labels=Y, memory_limit=LIMIT), folder / "weights.npy"


@losses
def test_no_bit_depends_on_how_classes_are_solved_and_rows_cut(
    large: tuple[xs.Dataset, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Held in batches, one by one, streamed from memory and by strips from disk; searches in blocks of any size."""
    monkeypatch.setattr(ppdsparse, "LARGE_BYTES", 90 * (8 * 16 + ppdsparse.ROW_BYTES))
    monkeypatch.setattr(ppdsparse, "STRIP_BYTES", 2000)
    data, weights = large

    def digest(name: str, threads: int = 1, cuts: Cuts | None = None) -> tuple[str, float]:
        clf = xs.PPDSparse(memory_limit=LIMIT, threads=threads, loss=loss, class_weight="balanced", epochs=3)
        fit_cut(clf, data, tmp_path / name, cuts, sample_weight=read_weights(weights))
        return clf.model_.digest(), clf.report_["objective"]

    whole = digest("held")
    assert digest("streamed", 2, Cuts(solve_rows=60)) == whole
    assert digest("cut", 2, Cuts(classes=2, rows=70, solve_rows=700, interval=64)) == whole


def test_dense_rows_are_solved_as_lists_of_entries_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    X = sp.csr_matrix(rng.standard_normal((200, 20)).astype(np.float32) / 4)
    Y = sp.csr_matrix((X @ rng.standard_normal((20, 4)) > 0.5).astype(np.float32))
    options: dict[str, Any] = {"memory_limit": LIMIT, "class_weight": "propensity", "threads": 1}
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="l2")
    lines, pieces = (
        fit_cut(xs.PPDSparse(**options), data, tmp_path / f"{i}", cuts, sample_weight=some_weights(200)).model_
        for i, cuts in enumerate((None, Cuts(solve_rows=50, rows=30)))
    )
    assert pieces.digest() == lines.digest()


@losses
def test_a_warm_start_ends_at_the_optimum_with_weights_too(loss: str) -> None:
    X, Y = problem(n=120, k=5, seed=2)
    samples = some_weights(120)
    options = {**EXACT, "tol": 1e-4, "lam": 0.02, "loss": loss, "class_weight": "balanced"}
    cold = xs.PPDSparse(**options).fit(X, Y, sample_weight=samples)
    other = xs.PPDSparse(**{**options, "C": 3.0}).fit(X, Y, sample_weight=samples)
    again = xs.PPDSparse(**options).fit(X, Y, sample_weight=samples, warm_start=other.model_)
    for mine, theirs in zip(dense_weights(again.model_), dense_weights(cold.model_), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
    if loss == "hinge":  # whose alpha does not follow from the margins
        return
    few = {**options, "max_rounds": 1, "epochs": 1, "last_epochs": 1}
    warm = xs.PPDSparse(**few).fit(X, Y, sample_weight=samples, warm_start=cold.model_)
    once = xs.PPDSparse(**few).fit(X, Y, sample_weight=samples)
    best = cold.report_["objective"]
    assert best - 1e-6 < warm.report_["objective"] < best + 0.2 * (once.report_["objective"] - best)


def test_refused_with_a_line_that_says_what_is_wrong(tmp_path: Path) -> None:
    X, Y = problem(n=30)
    clf = xs.PPDSparse(memory_limit=LIMIT)
    for weights, said in (
        (np.ones(29), "expected"), (-np.ones(30), "0 or more"), (np.full(30, np.nan), "NaN"), (np.zeros(30), "zero"),
        (tmp_path / "none.npy", "none.npy"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            clf.fit(X, Y, sample_weight=weights)
    for of_classes, said in (
        (np.ones(3), "3 weights of labels"), (np.zeros(4), "above 0"), ({9: 1.0}, "9"), ("other", "class_weight"),
        ("given", "given"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            xs.PPDSparse(memory_limit=LIMIT, class_weight=of_classes).fit(X, Y)
    for samples, said in (
        (np.zeros(3), "all zero"),
        (np.array([1.0, -1.0]), "0 or more"),
        (np.array([np.inf]), "infinity"),
    ):
        with pytest.raises(InputError, match=said):
            Given(samples)
    with pytest.raises(InputError, match="calibrate"):
        clf.fit(X, Y, sample_weight=np.ones(30), calibrate=0.5)


@pytest.mark.parametrize("solver", ["pdsparse", "leml", "cplst", "group-lasso", "memoir"])
def test_methods_that_take_no_weights_say_so(tmp_path: Path, solver: str) -> None:
    X, Y = problem(n=30)
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    asked = parameters(solver, {})
    with pytest.raises(InputError, match="takes no weights"):
        method_of(asked).check(Task(data, asked, 0, given=Given(np.ones(30))))


@pytest.mark.slow
def test_weights_in_files_are_kept_with_a_run(small: Path, tmp_path: Path, commands: Any) -> None:
    """Killed and gone on with, even where the file was written anew meanwhile; of other weights it is another run."""
    data, weights = xs.open_dataset(small), tmp_path / "weights.npy"
    np.save(weights, some_weights(data.n_samples))
    np.save(tmp_path / "labels.npy", np.linspace(1, 3, data.n_labels))
    more = ("--sample-weight", weights, "--class-weight", tmp_path / "labels.npy")
    train(small, tmp_path / "whole", more=more)
    killed = tmp_path / "killed"
    assert kill_when(small, killed, "solve/1/0", 0.02, more=more)
    other = tmp_path / "other.npy"
    np.save(other, np.ones(data.n_samples))
    said = commands("train", small, killed, "--memory-limit", "1GB", "--sample-weight", other, fails=True)
    assert "other" in said or "parameters" in said
    figures = train(small, killed, limit="600MB", threads=1, more=more)
    assert figures["resumed"]
    assert xs.load_model(killed).digest() == xs.load_model(tmp_path / "whole").digest()
    assert not (killed / "weights").exists()
    assert "fits" in commands("plan", "train", small, killed, "--memory-limit", "1GB", *more)
    said = commands("train", small, tmp_path / "leml", "--solver", "leml", *more[:2], fails=True)
    assert "takes no weights" in said


def test_other_weights_are_another_run(tmp_path: Path) -> None:
    X, Y = problem(n=60)
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    clf = xs.PPDSparse(memory_limit=LIMIT)
    first = clf.fit(data, model=tmp_path / "m", sample_weight=some_weights(60)).model_.digest()
    assert clf.fit(data, model=tmp_path / "m", sample_weight=some_weights(60)).model_.digest() == first
    with pytest.raises(ResumeError):
        clf.fit(data, model=tmp_path / "m", sample_weight=some_weights(60, 1))
    with pytest.raises(ResumeError):
        clf.fit(data, model=tmp_path / "m")
    identity = json.loads((tmp_path / "m" / "zarr.json").read_text())["attributes"]["identity"]
    assert set(identity["weights"]) == {"samples"}


def test_a_weight_of_a_class_that_is_no_number_is_named() -> None:
    with pytest.raises(xs.InputError, match=r"class_weight of 'a' is 'much': give a number"):
        xs.PPDSparse(class_weight={"a": "much"}).fit(np.eye(4), ["a", "b", "a", "b"])
