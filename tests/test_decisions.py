"""Which labels of a row are predicted: the best one, or what a threshold says that was learned from rows held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import sklearn.base
from helpers.soak import first
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import f1_score, hamming_loss
from sklearn.utils import get_tags

import xmc_stream as xs
from xmc_stream import estimators
from xmc_stream.errors import JobError
from xmc_stream.kernels.calibration import UNSEEN
from xmc_stream.methods.registry import method_of
from xmc_stream.models.decisions import BEST_LABEL, Decision, HeldOut, learn
from xmc_stream.store.inventory import seal
from xmc_stream.store.model import DECISION
from xmc_stream.training import train as training

K = 12
LIMIT = "4GB"
# every estimator; the losses of group lasso are as good as methods of their own
KINDS = [kind for name in estimators.__all__ if (kind := getattr(estimators, name)) is not estimators.Estimator]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "GroupLasso": [{}, {"loss": "multitask"}, {"loss": "label-ranking"}],
    "MEMOIR": [{}, {"variant": "lsh", "rank": 10}, {"bias": True, "cosine": True}, {"held_out": 0.0, "steps": 200}],
    "PDSparse": [{"max_passes": 9, **more} for more in ({}, {"refit": False}, {"held_out": 0.0})],
    "LEML": [{"rank": 8}],
    "CPLST": [{"rank": 8}],
}
ASKED = [kind(**options) for kind in KINDS for options in OPTIONS.get(kind.__name__, [{}])]
GUESSING = [clf for clf in ASKED if not method_of(clf.parameters()).has_zero(clf.parameters())]
RANKING = xs.GroupLasso(loss="label-ranking", memory_limit=LIMIT)
SEVERAL = [clf for clf in GUESSING if get_tags(clf).classifier_tags.multi_label]


def words(clf: Any) -> str:
    return str(clf).replace("\n", "")


def rows(seed: int, n: int, most: int) -> tuple[Any, NDArray[np.float32]]:
    """Rows of one to `most` labels of 12, whose features tell them, not without doubt."""
    rng = np.random.default_rng(seed)
    Y = np.zeros((n, K), np.float32)
    for i in range(n):
        Y[i, rng.choice(K, rng.integers(1, most + 1), replace=False)] = 1
    X = Y @ np.eye(K, 30, dtype=np.float32) + 0.25 * np.abs(rng.standard_normal((n, 30))).astype(np.float32)
    return sp.csr_matrix(X / np.linalg.norm(X, axis=1, keepdims=True)), Y


def figures_of(Y: NDArray[np.float32], P: NDArray[Any]) -> dict[str, float]:
    return {
        "macro_F1": 100 * f1_score(Y, P, average="macro", zero_division=0),
        "hamming_loss": hamming_loss(Y, P),
    }


def only(figures: dict[str, Any]) -> dict[str, float]:
    return {name: figures[name] for name in ("macro_F1", "hamming_loss")}


@pytest.mark.parametrize("clf", ASKED, ids=words)
def test_rows_of_one_label_get_their_best(clf: Any, tmp_path: Path) -> None:
    X, Y = rows(0, 200, 1)
    clf.fit(X, Y)
    assert clf.model_.decision == BEST_LABEL
    test, truth = rows(1, 90, 1)
    data = xs.convert(test, tmp_path / "d.xmc", labels=sp.csr_matrix(truth))
    scores = clf.decision_function(test)
    best = np.eye(K)[scores.argmax(axis=1)]
    assert np.array_equal(clf.predict(test), best)
    assert clf.score(test, truth) == pytest.approx((best * truth).sum() / 90)
    figures = xs.evaluate(clf.model_.path, data, ks=(1,), memory_limit=LIMIT)
    assert only(figures) == pytest.approx(figures_of(truth, best), rel=1e-9)
    assert figures["P@1"] == pytest.approx(100 * clf.score(test, truth))
    # a cut that is given stands
    cut = float(np.median(scores))
    given_ = xs.evaluate(clf.model_.path, data, ks=(1,), threshold=cut, memory_limit=LIMIT)
    assert only(given_) == pytest.approx(figures_of(truth, scores.astype(np.float64) > cut), rel=1e-9)
    # also where scores are calibrated
    clf.model_.set_calibration(
        {"applied": True, "slope": [2.0, 0.1], "least": 0.2, "shift": [9.0, 0.0], "fewest": 1, "cap": None}
    )
    assert np.array_equal(clf.predict(test), np.eye(K)[clf.decision_function(test).argmax(axis=1)])


OF_KINDS = [xs.PPDSparse(), xs.LEML(rank=8), xs.GroupLasso(), xs.LabelTree(max_leaf=2, root=2, branching=2, beam=2)]


@pytest.mark.parametrize("clf", OF_KINDS, ids=words)
def test_the_best_label_is_none_that_the_filter_takes_out(clf: Any, tmp_path: Path) -> None:
    X, Y = rows(0, 200, 1)
    clf.fit(X, Y)
    data, scores = xs.convert(X, tmp_path / "d.xmc", labels=sp.csr_matrix(Y)), clf.decision_function(X)
    out = [(row, int(scores[row].argmax())) for row in range(0, 200, 3)] + [(1, label) for label in range(K)]
    (tmp_path / "pairs.txt").write_text("".join(f"{row} {label}\n" for row, label in out))
    left, truth = scores.copy(), Y.copy()
    left[tuple(zip(*out, strict=True))] = -np.inf
    truth[tuple(zip(*out, strict=True))] = 0
    best = np.eye(K)[left.argmax(axis=1)]
    best[1] = 0  # of this row nothing is left
    found = xs.evaluate(clf.model_.path, data, ks=(1,), filter=tmp_path / "pairs.txt", memory_limit=LIMIT)
    assert only(found) == pytest.approx(figures_of(truth, best), rel=1e-9)


def test_a_row_of_none_or_two_labels_makes_it_several() -> None:
    X, Y = rows(0, 200, 1)
    Y[7] = 0
    assert xs.PPDSparse().fit(X, Y).model_.decision == Decision(0.0)
    Y[7] = Y[8]
    assert xs.PPDSparse().fit(X, Y).model_.decision == BEST_LABEL
    Y[7, :2] = 1
    assert xs.LEML(rank=4).fit(X, Y).model_.decision == Decision(0.5)


@pytest.mark.parametrize("clf", GUESSING, ids=words)
def test_tune_compares_what_is_predicted(clf: Any, tmp_path: Path) -> None:
    X, Y = rows(0, 520, 1)
    data = xs.convert(X, tmp_path / "d.xmc", labels=sp.csr_matrix(Y))
    parameters = {name: getattr(clf, name) for name in clf.parameters().rules()}
    lam = parameters.pop("lam")
    report = xs.tune(
        data,
        clf.parameters().solver,
        {"lam": [lam or 0.002]},
        fixed=parameters,
        metric="macro_F1",
        held_out=0.2,
        memory_limit=LIMIT,
    )
    figures = report["settings"][0]["figures"]
    # one label is predicted for each row: two are wrong in a row that is wrong
    assert figures["hamming_loss"] == pytest.approx(2 * (1 - figures["P@1"] / 100) / K, rel=1e-6)


@pytest.mark.parametrize("clf", SEVERAL, ids=words)
def test_several_labels_are_cut_where_rows_held_out_say(clf: Any, tmp_path: Path) -> None:
    X, Y = rows(0, 600, 4)
    clf.fit(X, Y)
    about = clf.model_.attributes[DECISION]
    assert 20 <= about["rows"] <= 180  # a fifth or a quarter of them
    assert about == clf.report_[DECISION]
    test, truth = rows(1, 300, 4)
    scores, predicted = clf.decision_function(test), clf.predict(test)
    decision = clf.model_.decision
    expected = scores > decision.threshold
    expected[np.arange(300), scores.argmax(axis=1)] |= decision.best
    assert np.array_equal(predicted > 0, expected)
    found = f1_score(truth, predicted, average="micro")
    # near to the best that one threshold can do, and better than 0, which says nothing
    assert 100 * found > learn(scores, truth > 0, int(truth.sum()))["micro_F1"] - 4
    assert found > f1_score(truth, scores > 0, average="micro")
    assert predicted.sum() == pytest.approx(truth.sum(), rel=0.3)
    data = xs.convert(test, tmp_path / "d.xmc", labels=sp.csr_matrix(truth))
    assert only(xs.evaluate(clf.model_.path, data, ks=(1,), memory_limit=LIMIT)) == pytest.approx(
        figures_of(truth, predicted), rel=1e-9
    )
    # the scores of what is calibrated have a 0
    clf.model_.set_calibration(
        {"applied": True, "slope": [2.0, 0.1], "least": 0.2, "shift": [-1.0, 0.0], "fewest": 1, "cap": None}
    )
    assert clf.model_.decision == Decision(0.0)


@pytest.mark.parametrize("clf", first(SEVERAL, 3), ids=words)
def test_decisions_are_the_same_whatever_the_limit_and_no_part_of_the_digest(clf: Any, tmp_path: Path) -> None:
    X, Y = rows(0, 300, 4)
    data = xs.convert(X, tmp_path / "d.xmc", labels=sp.csr_matrix(Y))
    said = []
    for limit, threads in ((LIMIT, 1), ("3GB", 2)):
        clf.set_params(memory_limit=limit, threads=threads)
        clf.fit(data, model=tmp_path / f"{threads}.model")
        said.append((clf.model_.attributes[DECISION], clf.model_.digest()))
    assert said[0] == said[1]
    file = tmp_path / "1.model" / "zarr.json"
    about = json.loads(file.read_bytes())
    del about["attributes"][DECISION]  # as earlier versions wrote models
    file.write_text(json.dumps(about))
    seal(tmp_path / "1.model")
    assert xs.load_model(tmp_path / "1.model").decision == Decision(0.0)
    assert xs.load_model(tmp_path / "1.model").digest() == said[0][1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a model of them whose run nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    X, Y = rows(0, 300, 4)
    data = xs.convert(X, folder / "d.xmc", labels=sp.csr_matrix(Y))
    RANKING.fit(data, model=folder / "m")
    return folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, JobError])
@pytest.mark.parametrize("last", ["split_once", "finish_model", "predict_to"])
def test_a_run_that_was_killed_learns_the_same(
    last: str, error: type[BaseException], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, clf, expected = xs.open_dataset(whole / "d.xmc"), sklearn.base.clone(RANKING), xs.load_model(whole / "m")

    def then_killed(of: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            of(*args, **options)
            raise error("the scheduler is gone")

        return run

    with monkeypatch.context() as patched:
        patched.setattr(training, last, then_killed(getattr(training, last)))
        with pytest.raises(error):
            clf.fit(data, model=tmp_path / "m")
    assert list((tmp_path / "m.partial" / DECISION).iterdir())  # what it did is kept
    found = clf.fit(data, model=tmp_path / "m").model_
    assert found.attributes[DECISION] == expected.attributes[DECISION]
    assert found.digest() == expected.digest()
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == sorted(p.name for p in expected.path.iterdir())
    assert not list(tmp_path.glob("*.partial"))


def test_too_few_rows_say_nothing() -> None:
    X, Y = rows(0, 60, 4)
    for clf in SEVERAL:
        clf.fit(X, Y)
        assert clf.model_.decision == BEST_LABEL
        assert (clf.predict(X).sum(axis=1) == 1).all()


def test_old_models_cut_as_they_did(trained: Path) -> None:
    assert xs.load_model(trained).decision == Decision(0.0)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5))
def test_what_is_learned_is_the_best_of_all_cuts(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.round(rng.standard_normal((n, k)) * 2).astype(np.float32) / 2  # with ties
    if rng.random() < 0.3:
        scores[rng.random((n, k)) < 0.3] = UNSEEN
    true, more = rng.random((n, k)) < 0.4, int(rng.integers(0, 3))
    about = learn(scores, true, int(true.sum()) + more)
    below = scores.copy()
    below[np.arange(n), scores.argmax(axis=1)] = UNSEEN
    found = {}
    cuts = [(np.inf, True), *((z, False) for z in scores.flat), *((z, True) for z in below.flat)]
    for cut, best in cuts:
        if cut == UNSEEN:
            continue
        chosen = scores > cut
        chosen[np.arange(n), scores.argmax(axis=1)] |= best
        found[cut, best] = 200 * (chosen & true).sum() / max(chosen.sum() + true.sum() + more, 1)
    assert about["micro_F1"] == pytest.approx(max(found.values()), abs=1e-4)
    cut = np.inf if about["threshold"] is None else about["threshold"]
    chosen = scores > Decision(cut).above
    chosen[np.arange(n), scores.argmax(axis=1)] |= about["best"]
    assert 200 * (chosen & true).sum() / max(chosen.sum() + true.sum() + more, 1) == pytest.approx(
        about["micro_F1"], abs=1e-4
    )


def test_rows_held_out_are_evenly_spaced_and_few(tmp_path: Path) -> None:
    X, Y = rows(0, 200, 4)
    data = xs.convert(X, tmp_path / "d.xmc", labels=sp.csr_matrix(Y))
    held_out = HeldOut(100_000, data)
    scores = np.arange(100_000 * K, dtype=np.float32).reshape(-1, K)
    for part in np.array_split(np.arange(100_000), 7):  # however they come
        held_out.add(scores[part], np.ones((len(part), K), np.bool_), np.full(len(part), K))
    about = held_out.decision()
    assert about["rows"] * K <= 2**17
    assert about["rows"] > 2**16 / K
