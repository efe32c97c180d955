"""Estimators among scikit-learn's own tools: its checks, pipelines, searches, meta-estimators."""

from __future__ import annotations

import logging
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from helpers.problems import LIMIT, overlapping
from sklearn.base import clone, is_classifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import (
    check_classifiers_multilabel_output_format_decision_function,
    check_classifiers_multilabel_output_format_predict,
    check_classifiers_multilabel_representation_invariance,
    check_estimator,
    estimator_checks_generator,
)
from sklearn.utils.validation import has_fit_parameter

import xmc_stream as xs

# a round, and a pass of PDSparse, is a phase of its own: few of them, for time
# what the checks ask of is their common base's: in every run of all tests one method has them all, and PPDSparse those
# that this one is not asked
CHECKED, WEIGHED = xs.GroupLasso(), xs.PPDSparse(max_rounds=1)
OTHERS = (
    WEIGHED,
    xs.PPDSparse.dismec(),
    xs.PDSparse(max_passes=3, held_out=0.0),
    xs.LEML(),
    xs.CPLST(),
    xs.MEMOIR(),
    xs.LabelTree(),
)
METHODS = (xs.PPDSparse, xs.PDSparse, xs.LEML, xs.CPLST, xs.GroupLasso, xs.MEMOIR, xs.LabelTree)
# of those that take sample_weight; docs/estimators.md lists them
EQUIVALENCE = {
    f"check_sample_weight_equivalence_on_{kind}_data": "both are within tol of the same optimum, and the check wants more"
    for kind in ("dense", "sparse")
}
TEXTS = ["red round apple", "green sour apple", "fast red car", "slow old car"] * 10
KINDS = ["fruit", "fruit", "car", "car"] * 10


def words(estimator: Any) -> str:
    return str(estimator).replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", [CHECKED, *(pytest.param(each, marks=pytest.mark.soak) for each in OTHERS)], ids=words
)
def test_the_checks_of_scikit_learn_pass(estimator: Any) -> None:
    exceptions = EQUIVALENCE if has_fit_parameter(estimator, "sample_weight") else {}
    done = check_estimator(estimator, expected_failed_checks=exceptions, on_skip=None)
    states = {check["check_name"]: check["status"] for check in done}
    assert set(states.values()) <= {"passed", "skipped", "xfail"}
    assert {name for name, state in states.items() if state == "xfail"} == set(exceptions)
    skipped = {name for name, state in states.items() if state == "skipped"}
    assert skipped <= {"check_array_api_input", "check_classifiers_multilabel_output_format_predict_proba"}


def named(check: Any) -> str:
    return str(check.func.__name__)


@pytest.mark.slow
def test_the_checks_of_scikit_learn_of_weights_and_of_several_labels_pass() -> None:
    asked = {named(check) for _, check in estimator_checks_generator(CHECKED, legacy=True)}
    others = {named(check): check for _, check in estimator_checks_generator(WEIGHED, legacy=True)}
    others = {name: check for name, check in others.items() if name not in asked}
    assert {"check_sample_weights_shape", "check_classifiers_multilabel_output_format_predict"} <= others.keys()
    failed = set()
    for name, check in others.items():
        try:
            check(clone(WEIGHED))
        except AssertionError:
            failed.add(name)
        except SkipTest:
            assert name == "check_classifiers_multilabel_output_format_predict_proba"
    assert failed == set(EQUIVALENCE)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_tags_and_parameters_of_each(kind: Any) -> None:
    clf = kind(memory_limit=LIMIT)
    tags = get_tags(clf)
    assert is_classifier(clf)
    assert tags.input_tags.sparse
    assert tags.target_tags.required
    assert tags.classifier_tags.multi_label == (kind is not xs.GroupLasso)
    assert clone(clf).get_params() == clf.get_params()
    assert repr(clf) == f"{kind.__name__}(memory_limit='4GB')"
    assert not hasattr(clf, "classes_")
    assert not hasattr(clf, "coef_")
    assert not hasattr(clf, "predict_proba")


@pytest.mark.parametrize("check", [
    check_classifiers_multilabel_representation_invariance, check_classifiers_multilabel_output_format_predict,
    check_classifiers_multilabel_output_format_decision_function,
])  # fmt: skip
def test_group_lasso_takes_several_labels_a_row_with_the_losses_that_do(check: Any) -> None:
    check("GroupLasso", xs.GroupLasso(loss="multitask", memory_limit=LIMIT))
    assert get_tags(xs.GroupLasso(loss="multitask")).classifier_tags.multi_label
    assert get_tags(xs.GroupLasso(loss="label-ranking")).classifier_tags.multi_label


def test_a_pipeline_from_text() -> None:
    clf = Pipeline([("tfidf", TfidfVectorizer()), ("learn", xs.PPDSparse(C=10, memory_limit=LIMIT))]).fit(TEXTS, KINDS)
    assert clf.predict(["a red apple", "an old car"]).tolist() == ["fruit", "car"]
    assert clf.score(TEXTS, KINDS) == 1.0
    assert clf.classes_.tolist() == ["car", "fruit"]


def test_a_grid_search_over_lam_and_c() -> None:
    grid = {"ppdsparse__lam": np.array([0.01, 100.0]), "ppdsparse__C": [1.0, np.float64(10.0)]}
    pipeline = make_pipeline(TfidfVectorizer(), xs.PPDSparse(memory_limit=LIMIT))
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(TEXTS, KINDS)
    assert search.best_params_["ppdsparse__lam"] == 0.01
    scores = dict(
        zip([(p["ppdsparse__lam"], p["ppdsparse__C"]) for p in search.cv_results_["params"]],
            search.cv_results_["mean_test_score"], strict=True)
    )  # fmt: skip
    assert scores[0.01, 10.0] == 1.0
    assert scores[100.0, 1.0] < 1.0  # every weight is 0 there
    assert search.predict(["a fast car"]).tolist() == ["car"]


def test_cross_validated_predictions_of_classes_and_of_several_labels() -> None:
    X, Y = overlapping(n=90)
    clf = xs.PPDSparse(memory_limit=LIMIT, max_rounds=2)
    found = cross_val_predict(clf, X, Y.toarray(), cv=3)
    assert found.shape == Y.shape
    assert set(np.unique(found)) <= {0, 1}
    assert (found == Y.toarray()).mean() > 0.6
    margins = cross_val_predict(clf, X, Y.toarray(), cv=3, method="decision_function")
    assert np.array_equal(margins > 0, found == 1)
    P1 = cross_val_score(clf, X, Y.toarray(), cv=3)
    best = np.take_along_axis(Y.toarray(), margins.argmax(axis=1)[:, None], axis=1)
    np.testing.assert_allclose(P1.mean(), best.mean(), atol=1e-6)


def test_one_vs_rest_around_an_estimator() -> None:
    X, Y = overlapping(k=3, single=True)
    y = Y.toarray().argmax(axis=1)
    own = xs.PPDSparse(memory_limit=LIMIT).fit(X, y)
    around = OneVsRestClassifier(xs.PPDSparse(memory_limit=LIMIT)).fit(X, y)
    assert (around.predict(X) == own.predict(X)).mean() > 0.9
    assert around.decision_function(X).shape == (80, 3)


def test_metadata_of_fit_is_not_asked_for_by_meta_estimators() -> None:
    assert not xs.LEML().get_metadata_routing().fit.requests
    assert xs.PPDSparse().get_metadata_routing().fit.requests == {"sample_weight": None}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_fit_and_predict_say_nothing(kind: Any, capfd: Any, caplog: Any) -> None:
    X, Y = overlapping(single=True)
    options = {"max_passes": 2, "held_out": 0.0} if kind is xs.PDSparse else {}
    with caplog.at_level(logging.WARNING):
        clf = kind(memory_limit=LIMIT, **options).fit(X, Y)
        clf.predict(X)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("xmc_stream")]
