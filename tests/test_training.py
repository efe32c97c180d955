"""Training end to end through the estimator: the optimum, the same answer however the work is cut, resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import scipy.sparse as sp
from helpers.clusters import Worker, cluster
from helpers.executed import fit_cut, ranked
from helpers.problems import TIGHT, dense_weights, problem, rare_labels, tight
from helpers.tools import load_tool
from sklearn.svm import LinearSVC

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError, ResumeError, StoreError
from xmc_stream.models import Execution
from xmc_stream.ppdsparse import parameters as ppdsparse
from xmc_stream.runtime.plan import Cuts

# limits are generous here, as they bound the whole process of the tests; small ones are tried in child processes by
# test_resume.py and test_cli.py


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize(("loss", "scale"), [("squared_hinge", 0.5), ("hinge", 1.0)])
def test_without_l1_the_weights_are_those_of_liblinear(loss: str, scale: float, weight: float) -> None:
    X, Y = problem()
    C, tau = 0.7, 1.3
    clf = xs.PPDSparse(
        lam=0.0, tau=tau, C=C, positive_weight=weight, loss=loss, added=60, memory_limit="2GB", **TIGHT
    ).fit(X, Y)
    W, bias = dense_weights(clf.model_)
    for k in range(Y.shape[1]):
        y = 2 * Y[:, k].toarray().ravel() - 1
        peer = LinearSVC(
            loss=loss,
            dual=True,
            C=C * scale / tau,
            class_weight={1: weight},
            intercept_scaling=1,
            tol=1e-10,
            max_iter=2_000_000,
            random_state=0,
        ).fit(X.astype(np.float64), y)
        assert np.abs(W[:, k] - peer.coef_[0]).max() < 1e-4
        assert abs(bias[k] - peer.intercept_[0]) < 1e-4


@pytest.mark.parametrize("weight", [1.0, 5.0])
@pytest.mark.parametrize("loss", ["squared_hinge", "hinge"])
def test_objective_is_optimal_and_gap_closes(loss: str, weight: float) -> None:
    X, Y = problem(n=80, k=3, seed=3)
    lam, tau, C = 0.05, 1.0, 1.0
    clf = xs.PPDSparse(lam=lam, tau=tau, C=C, positive_weight=weight, loss=loss, memory_limit="2GB", **TIGHT).fit(X, Y)
    W, bias = (a.astype(np.float64) for a in dense_weights(clf.model_))
    signs = 2 * Y.toarray() - 1
    margins = np.maximum(0, 1 - signs * (X.toarray().astype(np.float64) @ W + bias))
    losses = np.where(signs > 0, weight, 1.0) * (0.5 * margins**2 if loss == "squared_hinge" else margins)
    objective = lam * np.abs(W).sum() + tau / 2 * ((W**2).sum() + (bias**2).sum()) + C * losses.sum()
    assert clf.report_["objective"] == pytest.approx(objective, rel=1e-5)
    assert abs(clf.report_["duality_gap"]) < 1e-4
    assert clf.report_["violation"] <= 1e-5
    assert clf.report_["n_open"] == 0


@pytest.mark.slow
def test_default_reaches_the_objective_of_the_peers(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, _ = real("bibtex")
    clf = xs.PPDSparse(C=2.0, tol=1e-3, max_rounds=None, epochs=50, memory_limit="2GB").fit(train, model=tmp_path / "m")
    assert clf.report_["objective"] == pytest.approx(17863.149, rel=1e-5)  # their C = 1 has no half in its loss


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("bibtex", 63.6), ("20news_bydate", 84.5), ("rcv1_topics", 95.7)])
def test_defaults_reach_the_accuracy_of_the_field(
    real: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str, least: float
) -> None:
    train, test = (xs.open_dataset(path) for path in real(name))
    clf = xs.PPDSparse(memory_limit="2GB").fit(train, model=tmp_path / "m")
    xs.predict(clf.model_, test, tmp_path / "p", 5)
    assert xs.evaluate(tmp_path / "p", test, train)["P@1"] >= least


@pytest.mark.slow
def test_any_cut_gives_the_same_model(small: Path, trained: Path, tmp_path: Path) -> None:
    digests = {xs.load_model(trained).digest()}
    for n, (threads, limit, cuts) in enumerate(
        [
            (1, tight(), Cuts(classes=150, rows=200)),
            (1, "2GB", Cuts(interval=30)),
            (2, "2GB", Cuts(classes=333, rows=97, interval=60, solve_rows=40)),
        ]
    ):
        clf = fit_cut(xs.PPDSparse(threads=threads, memory_limit=limit), small, tmp_path / f"{n}", cuts)
        digests.add(clf.model_.digest())
    assert len(digests) == 1
    assert clf.report_["class_blocks"] >= 4
    assert clf.report_["row_blocks"] >= 15


@pytest.mark.slow
def test_without_a_cap_on_rounds_searches_are_fewer_and_any_cut_gives_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"n_samples": 1000, "n_features": 500, "n_labels": 100, "features_per_sample": 20}
    data = load_tool("make_synthetic").make_synthetic(tmp_path / "d.xmc", **sizes, seed=1)

    def fit(name: str, cuts: Cuts | None = None) -> tuple[str, dict[str, Any]]:
        clf = fit_cut(xs.PPDSparse(max_rounds=None, memory_limit="2GB"), data, tmp_path / name, cuts)
        assert clf.report_["violation"] <= clf.tol
        assert clf.report_["n_open"] == 0
        return clf.model_.digest(), clf.report_

    digest, report = fit("whole")
    pieces, cut = fit("pieces", Cuts(classes=40, rows=150, solve_rows=200))
    assert pieces == digest
    assert cut["class_blocks"] >= 3
    assert cut["row_blocks"] >= 7
    # a round as a capped one is: two epochs, |A| rows that violate
    for rule, value in {"_MORE_EPOCHS": 1, "_NEAR": -0.01, "_GROWTH": 1}.items():
        monkeypatch.setattr(ppdsparse, rule, value)
    _, plain = fit("plain")
    assert report["passes"] <= 0.6 * plain["passes"]
    assert report["objective"] == pytest.approx(plain["objective"], rel=1e-4)


@pytest.mark.slow
def test_bibtex_in_35_pieces_is_the_same_model(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, _ = real("bibtex")
    whole = xs.PPDSparse(memory_limit="2GB", all_rows=False).fit(train, model=tmp_path / "whole")
    cuts = Cuts(classes=32, rows=700, interval=100)
    pieces = fit_cut(xs.PPDSparse(memory_limit="2GB", all_rows=False), train, tmp_path / "pieces", cuts)
    assert pieces.report_["class_blocks"] >= 5
    assert pieces.report_["row_blocks"] >= 7
    assert pieces.model_.digest() == whole.model_.digest()


def test_seed_and_parameters_make_another_model(small: Path, trained: Path, tmp_path: Path) -> None:
    models = [
        xs.PPDSparse(memory_limit="2GB", **change).fit(small, model=tmp_path / str(n)).model_.digest()
        for n, change in enumerate([{"seed": 1}, {"lam": 0.02}])
    ]
    assert len({*models, xs.load_model(trained).digest()}) == 3


def test_a_whole_number_is_the_same_parameter_as_its_float(small: Path, tmp_path: Path) -> None:
    models = [
        xs.PPDSparse(C=C, max_rounds=1, memory_limit="2GB").fit(small, model=tmp_path / str(C)).model_ for C in (2, 2.0)
    ]
    assert models[0].digest() == models[1].digest()


@pytest.mark.slow
def test_two_worker_processes_give_the_same_model(small: Path, trained: Path, tmp_path: Path) -> None:
    here = xs.load_model(trained)
    with (
        cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address),
        distributed.Client(address, set_as_default=False) as client,
    ):
        there = xs.PPDSparse(memory_limit="2GB", scheduler=client).fit(small, model=tmp_path / "there")
        pids = set(client.run(lambda: __import__("os").getpid()).values())
        labels, _ = there.predict_topk(xs.open_dataset(small), 3)
    assert len(pids) == 2
    assert there.model_.digest() == here.digest()
    assert np.array_equal(labels, here.predict_topk(xs.open_dataset(small), 3)[0])


def test_prediction_is_exact(small: Path, trained: Path) -> None:
    model = xs.load_model(trained)
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    block = test.X_rows().block(0, test.n_samples)
    X = sp.csr_matrix((block.values, block.indices, block.indptr), shape=(test.n_samples, test.n_features))
    W, bias = dense_weights(model)
    exact = X.toarray().astype(np.float64) @ W + bias
    labels, scores = model.predict_topk(test, 7)
    assert np.abs(np.take_along_axis(exact, labels, 1) - scores).max() < 1e-5
    assert np.abs(-np.sort(-exact, axis=1)[:, :7] - scores).max() < 1e-5
    for execution in (Execution(tight(), 1), Execution("2GB", 2, cuts=Cuts(rows=13))):
        again = ranked(model, test, 7, execution)
        assert np.array_equal(again[0], labels)
        assert np.array_equal(again[1], scores)
    from_scipy = model.predict_topk(X, 7)
    assert np.array_equal(from_scipy[0], labels)


@pytest.mark.slow
def test_a_learnable_set_is_learned(small: Path, trained: Path, tmp_path: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    xs.predict(xs.load_model(trained), test, tmp_path / "p", 5)
    chance = 100 / 1100
    assert xs.evaluate(tmp_path / "p", test)["P@1"] > 100 * chance


def test_class_without_positives_never_outranks_one_with(tmp_path: Path) -> None:
    X, Y = problem(k=3)
    Y = sp.csr_matrix(sp.hstack([Y[:, :1], sp.csr_matrix((Y.shape[0], 1)), Y[:, 1:]]))
    # with bias=False and little C all scores are near 0, so that a class left at 0 or -1 would outrank some
    for estimator in (xs.PPDSparse(C=0.01), xs.PPDSparse(bias=False), xs.PPDSparse(), xs.PDSparse(held_out=0.0)):
        clf = estimator.set_params(memory_limit="2GB").fit(X, Y)
        labels, scores = clf.predict_topk(X, k=4)
        assert np.array_equal(np.sort(labels[:, :3]), np.tile([0, 2, 3], (len(labels), 1)))
        assert (labels[:, 3] == 1).all()
        assert (scores[:, 3] == np.finfo(np.float32).min).all()


def test_class_without_positives_is_no_part_of_the_objective() -> None:
    X, Y = problem(n=20, k=3)
    more = sp.csr_matrix(sp.hstack([Y, sp.csr_matrix((Y.shape[0], 2))]))
    with_them, without = (xs.PPDSparse(C=0.01, memory_limit="2GB").fit(X, labels).report_ for labels in (more, Y))
    assert with_them["n_empty"] == 2
    assert with_them["objective"] == without["objective"]
    assert with_them["duality_gap_mean"] == without["duality_gap_mean"]


def test_rows_without_labels_or_features_are_learned_from(tmp_path: Path) -> None:
    X, Y = problem()
    X, Y = X.tolil(), Y.tolil()
    X[0, :], Y[1, :], X[2, :], Y[2, :] = 0, 0, 0, 0
    clf = xs.PPDSparse(lam=0.0, memory_limit="2GB", **TIGHT).fit(sp.csr_matrix(X), sp.csr_matrix(Y))
    y = 2 * Y[:, [0]].toarray().ravel() - 1
    peer = LinearSVC(dual=True, C=0.5, tol=1e-10, max_iter=1_000_000, random_state=0).fit(X.tocsr().astype(float), y)
    assert abs(clf.model_.bias()[0] - peer.intercept_[0]) < 1e-4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lam": -1}, "'lam'"), ({"tau": 0}, "'tau'"), ({"C": float("nan")}, "'C'"), ({"loss": "log"}, "'loss'"),
        ({"tol": 1e-9}, "'tol'"), ({"epochs": 0}, "'epochs'"), ({"max_rounds": 0}, "'max_rounds'"), ({"seed": -1}, "'seed'"),
        ({"bias": 1}, "'bias'"), ({"threads": 0}, "threads"), ({"memory_limit": "much"}, "much"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(small: Path, tmp_path: Path, change: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        xs.PPDSparse(**change).fit(small, model=tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_limit_that_cannot_work_is_refused_before_the_start(small: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="set memory_limit to"):
        xs.PPDSparse(memory_limit="150MB").fit(small, model=tmp_path / "m")


def test_finished_model_is_not_trained_again_and_not_replaced_by_another(
    small: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "m")
    again = xs.PPDSparse(memory_limit="2GB", threads=1).fit(small, model=tmp_path / "m")
    assert again.report_["resumed"]
    with pytest.raises(ResumeError, match="seed"):
        xs.PPDSparse(memory_limit="2GB", seed=2).fit(small, model=tmp_path / "m")
    other = xs.PPDSparse(memory_limit="2GB", seed=2).fit(small, model=tmp_path / "m", overwrite=True)
    assert not other.report_["resumed"]
    assert other.model_.digest() != xs.load_model(trained).digest()


def test_damaged_data_is_found_before_training(small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.xmc"
    shutil.copytree(small, copy)
    chunk = copy / "X" / "rows" / "data" / "c" / "0"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 4
    chunk.write_bytes(content)
    with pytest.raises(StoreError, match="checksum"):
        xs.PPDSparse(memory_limit="2GB").fit(copy, model=tmp_path / "m")
    xs.PPDSparse(memory_limit="2GB").fit(copy, model=tmp_path / "unchecked", check=False)


def test_event_log_tells_phases_and_memory(trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    phases = {event["phase"] for event in events}
    assert {"round 1: solve", "round 2: search", "check", "finalise"} <= phases
    assert all(0 < event["resident"] <= event["limit"] for event in events)


def test_classes_that_go_on_share_their_rows_though_done_ones_lie_between(tmp_path: Path) -> None:
    X, Y = rare_labels()
    train = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="l2")
    clf = xs.PPDSparse(C=4.0, memory_limit="2GB", all_rows=False)
    whole = clf.fit(train, model=tmp_path / "whole").model_
    cut = fit_cut(clf, train, tmp_path / "cut", Cuts(classes=10)).model_
    assert whole.digest() == cut.digest()
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    read = {event["phase"]: event["bytes_read"] for event in events if event["event"] == "job"}
    assert read["round 5: solve"] <= 1.1 * max(read["round 1: solve"], read["round 2: solve"])  # each row once
