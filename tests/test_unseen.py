"""Labels without training rows: one finite score below all others, probability 0, the last ranks; on every face of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.metrics import (
    coverage_error,
    label_ranking_average_precision_score,
    label_ranking_loss,
    ndcg_score,
    roc_auc_score,
)
from sklearn.utils import get_tags

import xmc_stream as xs
from xmc_stream import estimators
from xmc_stream.kernels.calibration import UNSEEN

N, K, NEVER = 120, 14, [0, 5, 13]
CALIBRATION = {"applied": True, "slope": [2.0, 0.1], "least": 0.2, "shift": [0.5, -0.1], "fewest": 1, "cap": 0.5}
# every estimator, and what makes another kind of model, or other scores, of one
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "PPDSparse": [{"guide": 2.0}],
    "MEMOIR": [{"variant": "lsh", "rank": 8}],
    "GroupLasso": [{"loss": "multitask"}, {"loss": "label-ranking"}],
    "LEML": [{"rank": 4}],
    "CPLST": [{"rank": 4}],
    "LabelTree": [{"max_leaf": 3, "root": 2, "branching": 2, "n_trees": 2}],
}
KINDS = [kind for name in estimators.__all__ if (kind := getattr(estimators, name)) is not estimators.Estimator]
ASKED = [kind(**options) for kind in KINDS for options in ({}, *OPTIONS.get(kind.__name__, []))]


def rows(seed: int, several: bool, never: list[int]) -> tuple[Any, NDArray[np.float32]]:
    """Rows of a few labels each, or of one, whose features tell them."""
    rng = np.random.default_rng(seed)
    Y = np.zeros((N, K), np.float32)
    there = [label for label in range(K) if label not in never]
    for i in range(N):
        Y[i, rng.choice(there, rng.integers(1, 4) if several else 1, replace=False)] = 1
    X = Y @ np.eye(K, 40, dtype=np.float32) + 0.2 * np.abs(rng.standard_normal((N, 40))).astype(np.float32)
    return sp.csr_matrix(X / np.linalg.norm(X, axis=1, keepdims=True)), Y


@pytest.fixture(scope="module", params=ASKED, ids=lambda clf: str(clf).replace("\n", ""))
def fitted(request: pytest.FixtureRequest) -> Any:
    several = get_tags(request.param).classifier_tags.multi_label
    X, Y = rows(0, several, NEVER)
    return request.param.fit(X, Y)


@pytest.fixture(params=[False, True], ids=["raw", "calibrated"])
def clf(fitted: Any, request: pytest.FixtureRequest) -> Any:
    fitted.model_.set_calibration(CALIBRATION if request.param else None)
    return fitted


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Rows that are asked about, of which all labels are."""
    X, Y = rows(1, True, [])
    return xs.convert(X, tmp_path_factory.mktemp("unseen") / "d.xmc", labels=sp.csr_matrix(Y))


def test_they_come_last_with_one_finite_score(clf: Any, data: xs.Dataset, tmp_path: Path) -> None:
    X, Y = rows(1, True, [])
    scores = clf.decision_function(X)
    others = np.delete(np.arange(K), NEVER)
    assert (scores[:, NEVER] == UNSEEN).all()
    assert np.isfinite(scores).all()
    assert (scores[:, others] > UNSEEN / 2).all()
    labels, best = clf.predict_topk(X, K)
    assert labels[:, -len(NEVER) :].tolist() == [NEVER] * N
    assert np.array_equal(np.sort(labels, axis=1), np.tile(np.arange(K), (N, 1)))
    assert np.array_equal(best, np.take_along_axis(scores, labels, axis=1))
    assert np.array_equal(clf.predict_topk(X, 2)[0], labels[:, :2])
    # an engine's jobs say the same as a model in memory
    xs.predict(clf.model_, data, tmp_path / "p.npz", K, memory_limit="4GB")
    with np.load(tmp_path / "p.npz") as stored:
        assert np.array_equal(stored["labels"], labels)
        assert np.array_equal(stored["scores"], best)
    xs.predict(clf.model_, data, tmp_path / "p.txt", K, memory_limit="4GB")
    figures = xs.evaluate(clf.model_.path, data, ks=(1, K), memory_limit="4GB")
    assert xs.evaluate(tmp_path / "p.txt", data, ks=(1, K))[f"nDCG@{K}"] == figures[f"nDCG@{K}"]
    assert figures[f"R@{K}"] == 100
    if "average_auc" not in figures:  # it needs the scores of all labels
        assert clf.model_.kind == "tree"
        return
    lowest = ranked_last(scores)
    above = np.sign(lowest[:, :, None] - lowest[:, None, :]) / 2 + 0.5
    pairs = Y[:, :, None] * (1 - Y[:, None, :])  # of a label that the row has and one that it has not
    auc = (above * pairs).sum(axis=(1, 2)) / pairs.sum(axis=(1, 2))
    assert figures["average_auc"] == pytest.approx(auc.mean(), rel=1e-6)


def ranked_last(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same order, where labels without training rows are one below the lowest other score."""
    plain = scores.astype(np.float64)
    plain[:, NEVER] = np.delete(plain, NEVER, axis=1).min() - 1
    return plain


def test_scorers_of_scikit_learn_have_figures(clf: Any) -> None:
    X, Y = (of[:40] for of in rows(1, True, []))
    assert Y.any(axis=0).all()
    scores = clf.decision_function(X)
    for scorer in (label_ranking_average_precision_score, coverage_error, label_ranking_loss, ndcg_score):
        # of float32 SciPy 1.18 gives ranks in float32
        assert scorer(Y, scores) == pytest.approx(scorer(Y, ranked_last(scores)), rel=1e-6)
    for average in ("micro", "macro", "samples"):
        found, expected = (roc_auc_score(Y, z, average=average) for z in (scores, ranked_last(scores)))
        assert found == pytest.approx(expected, rel=1e-9)


def test_their_probability_is_zero(fitted: Any) -> None:
    X, _ = rows(1, True, [])
    for applied in (False, True):
        fitted.model_.set_calibration({**CALIBRATION, "applied": applied, "sharpness": 20.0})
        p = fitted.predict_proba(X)
        assert (p[:, NEVER] == 0).all()
        assert np.isfinite(p).all()
        assert (np.delete(p, NEVER, axis=1) > 0).any()
    fitted.model_.set_calibration(None)


@pytest.mark.parametrize("options", [{}, {"bias": True}])
def test_weights_and_intercept_give_the_scores(options: dict[str, Any]) -> None:
    clf = xs.MEMOIR(**options) if options else xs.PPDSparse()
    X, Y = rows(0, True, NEVER)
    clf.fit(X, Y)
    assert np.isfinite(clf.intercept_).all()
    assert np.isneginf(clf.model_.bias()[NEVER]).all()  # what is stored stays as it is
    by_hand = X @ clf.coef_.toarray().T + clf.intercept_
    assert np.allclose(by_hand[:, 1], clf.decision_function(X)[:, 1], atol=1e-5)
    assert (by_hand[:, NEVER] == UNSEEN).all()
