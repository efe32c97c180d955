"""What estimators are given as labels, and what they answer: the same kind again; scores, weights, probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers.problems import LIMIT, overlapping, tight
from sklearn.linear_model import LogisticRegression

import xmc_stream as xs
from xmc_stream.errors import InputError

Y_KINDS = {
    "csr": sp.csr_matrix,
    "csc array": sp.csc_array,
    "lil": sp.lil_matrix,
    "array": lambda Y: Y.toarray().astype(np.int64),
    "bools": lambda Y: Y.toarray() > 0,
    "frame": lambda Y: pd.DataFrame(Y.toarray().astype(np.int8)),
}


def fitted(X: Any, y: Any, **options: Any) -> Any:
    return xs.PPDSparse(memory_limit=LIMIT, **options).fit(X, y)


@pytest.fixture(scope="module")
def several() -> tuple[Any, Any, Any]:
    """X, Y and what is learned from them."""
    X, Y = overlapping()
    return X, Y, fitted(X, Y)


@pytest.mark.parametrize("kind", Y_KINDS)
def test_indicators_come_back_as_they_were_given(kind: str, several: tuple[Any, Any, Any]) -> None:
    X, Y, clf = several
    given = Y_KINDS[kind](Y)
    other = fitted(X, given)
    assert other.model_.digest() == clf.model_.digest()
    found = other.predict(X)
    wanted = clf.decision_function(X) > 0
    assert wanted.any(axis=1).sum() < len(wanted)  # rows without any label stay without
    dtype = np.asarray(given).dtype if kind in ("array", "bools", "frame") else given.dtype
    assert found.dtype == dtype
    assert sp.issparse(found) == (kind not in ("array", "bools", "frame"))
    assert np.array_equal(found.toarray() if sp.issparse(found) else found, wanted)
    assert other.classes_.tolist() == [0, 1, 2, 3, 4]
    assert other.score(X, given) == clf.score(X, Y)


@pytest.mark.parametrize("row", [list, tuple, set, frozenset])
def test_lists_of_labels_come_back_as_lists(row: Any, several: tuple[Any, Any, Any]) -> None:
    X, Y, clf = several
    names = np.array(["vole", "wolf", "xerus", "yak", "zebra"], object)
    y = [row(names[Y[i].indices]) for i in range(Y.shape[0])]
    other = fitted(X, y)
    assert other.classes_.tolist() == sorted(names)
    found = other.predict(X)
    assert [set(labels) for labels in found] == [
        {names[k] for k in np.flatnonzero(scores > 0)} for scores in clf.decision_function(X)
    ]
    assert all(type(labels) is list for labels in found)
    assert other.score(X, y) == clf.score(X, Y)
    assert other.score(X, [["no such label"]] * 80) == 0.0
    assert other.model_.label_names().read(0, 5) == sorted(names)
    best, scores = other.predict_topk(X, 2)
    for labels, numbers, values in zip(found, best, scores, strict=True):
        assert labels[:2] == other.classes_[numbers[values > 0]].tolist()  # best first


@pytest.mark.parametrize(
    ("classes", "dtype"),
    [([3, 7, 11], "i"), (["b", "a", "c"], "U"), ([True, False], "b"), ([2.0, 1.0], "f"), (["x", "y"], "O")],
)
def test_one_class_a_row_comes_back(classes: list[Any], dtype: str) -> None:
    X, Y = overlapping(k=len(classes), single=True)
    y = np.array(classes, dtype=object if dtype == "O" else None)[Y.toarray().argmax(axis=1)]
    clf = fitted(X, y)
    assert clf.classes_.tolist() == sorted(classes)
    found, scores = clf.predict(X), clf.decision_function(X)
    assert found.dtype == clf.classes_.dtype == y.dtype
    assert found.shape == y.shape
    assert (found == y).mean() > 0.6
    assert clf.score(X, y) == (found == y).mean()
    weights = np.arange(len(y))
    np.testing.assert_allclose(clf.score(X, y, sample_weight=weights), np.average(found == y, weights=weights))
    by_hand = X @ clf.coef_.T.toarray() + clf.intercept_
    if len(classes) == 2:
        assert scores.shape == y.shape
        assert clf.coef_.shape == (1, 15)
        assert np.array_equal(found == clf.classes_[1], scores > 0)
        np.testing.assert_allclose(by_hand[:, 0], scores, atol=1e-5)
    else:
        assert np.array_equal(clf.classes_[scores.argmax(axis=1)], found)
        np.testing.assert_allclose(by_hand, scores, atol=1e-5)
    best, _ = clf.predict_topk(X, 1)
    assert np.array_equal(clf.classes_[best[:, 0]], found)


@pytest.mark.parametrize("kind", [pd.Series, list, lambda y: pd.Series(pd.Categorical(y)), lambda y: y[:, None]])
def test_classes_in_other_containers(kind: Any, recwarn: Any) -> None:
    X, Y = overlapping(k=3, single=True)
    y = np.array(["b", "a", "c"])[Y.toarray().argmax(axis=1)]
    with np.testing.suppress_warnings() as suppress:
        suppress.filter(UserWarning, "A column-vector y was passed")
        clf = fitted(X, kind(y))
    assert clf.model_.digest() == fitted(X, y).model_.digest()
    assert np.array_equal(clf.predict(X), fitted(X, y).predict(X))


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (None, "requires y to be passed"),
        (["a"] * 80, "1 class"),
        (np.linspace(0, 1, 80), "Unknown label type"),
        (np.full(80, np.nan), "contains NaN"),
        (np.arange(160).reshape(80, 2), "Unknown label type: y of 2 columns"),
        (["a", "b"], "inconsistent numbers of samples"),
        ([[]] * 80, "no label in any row"),
        ([["a", 3], ["b"]] * 40, "must all be numbers, or all be strings"),
        ([[["a"]], [["b"]]] * 40, "must all be numbers, or all be strings"),
        (sp.csr_matrix((79, 3)), "inconsistent numbers of samples"),
    ],
)
def test_labels_that_nothing_can_be_learned_from_are_refused(y: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fitted(overlapping()[0], y)


def test_a_dataset_has_its_labels_and_gives_an_indicator(several: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, Y, clf = several
    data = xs.convert(X, tmp_path / "data.xmc", labels=Y)
    other = xs.PPDSparse(memory_limit=LIMIT).fit(str(tmp_path / "data.xmc"))
    assert other.model_.digest() == clf.model_.digest()
    assert (other.predict(data) != clf.predict(X)).nnz == 0
    assert (other.predict(X) != clf.predict(X)).nnz == 0
    assert np.array_equal(other.decision_function(data), clf.decision_function(X))
    for place in (tmp_path / "data.xmc", str(tmp_path / "data.xmc")):
        assert np.array_equal(other.predict_topk(place, 2)[1], clf.predict_topk(X, 2)[1])
    assert other.score(data) == pytest.approx(clf.score(X, Y), abs=1e-4)
    assert other.score(tmp_path / "data.xmc") == other.score(data)
    assert (other.n_features_in_, other.classes_.tolist()) == (15, [0, 1, 2, 3, 4])
    with pytest.raises(InputError, match="leave out y"):
        other.fit(data, Y)


@pytest.mark.parametrize("part", [7, 2**16])
def test_all_labels_of_a_row_are_found_however_many(part: int, tmp_path: Path, monkeypatch: Any) -> None:
    """More than are asked for at first, of matrices in parts and of what is on disk."""
    monkeypatch.setattr("xmc_stream.estimators.fitted._PART", part)
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.random((40, 6)))
    Y = sp.csr_matrix(rng.random((40, 90)) < np.linspace(0.02, 0.98, 40)[:, None])
    data = xs.convert(X, tmp_path / "data.xmc", labels=Y, normalize="l2")
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(data)
    wanted = clf.decision_function(data) > 0
    assert wanted.sum(axis=1).max() > 64
    assert np.array_equal(clf.predict(data).toarray(), wanted)
    assert np.array_equal(clf.predict(X).toarray(), wanted)
    lists = fitted(X, [row.indices.tolist() for row in Y]).predict(X)
    order = clf.predict_topk(X, 90)[0]
    assert lists == [[k for k in order[i].tolist() if wanted[i, k]] for i in range(40)]


def test_a_method_whose_scores_have_no_zero_gives_each_row_its_best_label() -> None:
    X, Y = overlapping()
    clf = xs.PDSparse(memory_limit=LIMIT, held_out=0.0, max_passes=1, C=1e-3).fit(X, Y)
    found, scores = clf.predict(X).toarray(), clf.decision_function(X)
    assert found.any(axis=1).all()
    assert (scores.max(axis=1) <= 0).any()  # or this shows nothing
    assert np.array_equal(found, (scores > 0) | (np.arange(5) == scores.argmax(axis=1)[:, None]))


def test_the_squared_loss_predicts_above_one_half() -> None:
    X, Y = overlapping()
    clf = xs.LEML(rank=5, memory_limit=LIMIT).fit(X, Y)
    assert np.array_equal(clf.predict(X).toarray(), clf.decision_function(X) > 0.5)
    with pytest.raises(AttributeError, match=r"Model\.factors"):
        _ = clf.coef_


def test_weights_of_each_label(several: tuple[Any, Any, Any]) -> None:
    X, _, clf = several
    assert (clf.coef_.format, clf.coef_.shape, clf.intercept_.shape) == ("csr", (5, 15), (5,))
    np.testing.assert_allclose(X @ clf.coef_.T.toarray() + clf.intercept_, clf.decision_function(X), atol=1e-5)


def test_what_does_not_fit_in_the_limit_is_refused_with_what_to_do(several: tuple[Any, Any, Any]) -> None:
    X, Y, _ = several
    many = sp.csr_matrix((np.ones(1), ([0], [0])), shape=(10**7, 15))
    clf = fitted(X, Y.toarray())
    with pytest.raises(
        InputError, match=r"^a score for each of 10,000,000 rows and 5 .* take predict_topk .* memory_limit$"
    ):
        clf.set_params(memory_limit=tight(300 * 10**6)).decision_function(many)
    with pytest.raises(InputError, match=r"^a dense result of 10,000,000 rows .* fit with a sparse y"):
        clf.predict(many)


def test_errors_name_arguments_of_python() -> None:
    X, Y = overlapping()
    with pytest.raises(MemoryError, match=r"set memory_limit to") as caught:
        xs.PPDSparse(memory_limit="1MB").fit(X, Y)
    assert "--" not in str(caught.value)
    with pytest.raises(InputError, match="row 0 of X has 2 labels") as refused:
        xs.GroupLasso(memory_limit=LIMIT).fit(X, sp.csr_matrix(np.ones((80, 2))))
    assert "xmc_stream-" not in str(refused.value)
    with pytest.raises(InputError, match=r"^what calibrate holds out has 16 rows: calibration needs 100"):
        xs.PPDSparse(memory_limit=LIMIT).fit(X, Y, calibrate=0.2)
    for name in ("lam", "seed", "normalize"):
        with pytest.raises(InputError, match=f"The '{name}'( parameter)? of PPDSparse must be"):
            xs.PPDSparse(**{name: "much"}).fit(X, Y)
    with pytest.raises(TypeError, match="sample_weight"):
        xs.LEML().fit(X, Y, sample_weight=np.ones(80))


@pytest.fixture(scope="module")
def noisy() -> tuple[Any, Any]:
    """Rows of length one, and classes drawn with the probabilities of a multinomial logistic model."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1600, 10))
    X /= np.linalg.norm(X, axis=1)[:, None]
    return X, (4 * X @ rng.standard_normal((10, 4)) + rng.gumbel(size=(1600, 4))).argmax(axis=1)


def test_probabilities_are_those_of_held_out_rows(noisy: tuple[Any, Any]) -> None:
    X, y = noisy
    names = np.array(["d", "c", "b", "a"])
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X[:1000], names[y[:1000]], calibrate=0.2)
    p = clf.predict_proba(X[1000:])
    assert p.shape == (600, 4)
    np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-5)
    right = clf.classes_ == names[y[1000:], None]
    order = np.argsort(p.ravel())
    for part in np.array_split(order, 4):  # as many are right as is said
        assert abs(p.ravel()[part].mean() - right.ravel()[part].mean()) < 0.06
    assert p.max() - p.min() > 0.5
    log_loss = -np.log(p[right]).mean()
    logistic = LogisticRegression(C=10).fit(X[:1000], names[y[:1000]]).predict_proba(X[1000:])
    assert log_loss < 1.05 * -np.log(logistic[right]).mean()


def test_probabilities_of_several_labels_are_of_each(noisy: tuple[Any, Any]) -> None:
    X, y = noisy
    Y = (np.arange(4) == y[:, None]) | (np.arange(4) == (y[:, None] + 1) % 4)  # two a row
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X[:1000], Y[:1000], calibrate=0.2)
    p = clf.predict_proba(X[1000:])
    assert abs(p.mean() - 0.5) < 0.05
    assert abs(p.sum(axis=1).mean() - 2.0) < 0.2
    for part in np.array_split(np.argsort(p.ravel()), 4):
        assert abs(p.ravel()[part].mean() - Y[1000:].ravel()[part].mean()) < 0.06


def test_probabilities_are_the_same_whether_scores_are_calibrated_or_not(noisy: tuple[Any, Any]) -> None:
    X, y = noisy
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X[:1000], np.eye(4)[y[:1000]], calibrate=0.2)
    about = dict(clf.model_.attributes["calibration"])
    plain, capped = ({**about, "applied": applied, "cap": 0.5} for applied in (False, True))
    clf.model_.set_calibration(plain)
    p = clf.predict_proba(X[1000:])
    clf.model_.set_calibration(capped)
    assert clf.model_.calibrated
    np.testing.assert_allclose(clf.predict_proba(X[1000:]), p, atol=1e-3)


def test_without_held_out_rows_there_are_no_probabilities(several: tuple[Any, Any, Any]) -> None:
    X, _, clf = several
    assert not hasattr(clf, "predict_proba")
    with pytest.raises(AttributeError) as caught:
        clf.predict_proba(X)
    assert "fit with calibrate=0.1" in str(caught.value.__cause__)
