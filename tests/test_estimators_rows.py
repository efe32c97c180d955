"""What estimators are given as rows: matrices of any kind, frames; rows of length one and others."""

from __future__ import annotations

import gzip
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers.problems import LIMIT, overlapping
from sklearn.datasets import load_svmlight_file

import xmc_stream as xs
from xmc_stream.errors import InputError

SPARSE = [getattr(sp, f"{name}_{kind}") for name in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok") for kind in
          ("matrix", "array")]  # fmt: skip
LOGGED = "rows of X are divided by their l2 norms"


def fitted(X: Any, y: Any, **options: Any) -> Any:
    return xs.PPDSparse(memory_limit=LIMIT, **options).fit(X, y)


@pytest.fixture(scope="module")
def learned() -> tuple[Any, Any, Any]:
    """X, Y and what is learned from them."""
    X, Y = overlapping()
    return X, Y, fitted(X, Y)


@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.__name__)
def test_sparse_matrices_of_any_kind_are_rows(kind: Any, learned: tuple[Any, Any, Any]) -> None:
    X, Y, clf = learned
    same = kind(X)
    assert np.array_equal(clf.predict_topk(same, 2)[1], clf.predict_topk(X, 2)[1])
    if kind in (sp.coo_array, sp.lil_matrix, sp.bsr_array):  # the others go the same way
        assert fitted(same, Y).model_.digest() == clf.model_.digest()


@pytest.mark.parametrize("make", [
    lambda X: X.toarray(), lambda X: np.asfortranarray(X.toarray()), lambda X: X.toarray().tolist(),
    lambda X: X.toarray().astype(object), lambda X: pd.DataFrame(X.toarray()),
    lambda X: pd.DataFrame.sparse.from_spmatrix(X),
], ids=["array", "by columns", "lists", "objects", "frame", "sparse frame"])  # fmt: skip
def test_dense_rows_and_frames(make: Any, learned: tuple[Any, Any, Any]) -> None:
    X, Y, clf = learned
    with np.errstate(all="ignore"):
        other = fitted(make(X), Y)
    assert other.n_features_in_ == 15
    np.testing.assert_allclose(other.decision_function(make(X)), clf.decision_function(X), atol=1e-6)
    assert np.array_equal(clf.predict_topk(make(X), 2)[0], clf.predict_topk(X, 2)[0])


def test_names_of_a_frame_are_kept_and_compared(learned: tuple[Any, Any, Any]) -> None:
    X, Y, _ = learned
    frame = pd.DataFrame(X.toarray(), columns=[f"word {j}" for j in range(15)])
    clf = fitted(frame, Y)
    assert clf.feature_names_in_.tolist() == list(frame.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        clf.predict(frame.rename(columns={"word 3": "other"}))
    clf.fit(X, Y)
    assert not hasattr(clf, "feature_names_in_")


def test_frames_of_polars(learned: tuple[Any, Any, Any]) -> None:
    polars = pytest.importorskip("polars")
    X, Y, clf = learned
    frame = polars.DataFrame(X.toarray(), schema=[f"word {j}" for j in range(15)])
    other = fitted(frame, polars.DataFrame(Y.toarray()))
    assert np.array_equal(other.predict(frame), clf.predict(X).toarray())


def test_values_that_stand_twice_are_added_up(learned: tuple[Any, Any, Any]) -> None:
    X, Y, clf = learned
    C = X.tocoo()
    halves = sp.csr_matrix(
        (np.repeat(C.data / 2, 2), np.repeat(C.col, 2), 2 * X.indptr), shape=X.shape
    )  # as scipy's arithmetic leaves them: twice each, and unsorted
    before = halves.data.copy()
    assert fitted(halves, Y).model_.digest() == clf.model_.digest()
    assert np.array_equal(clf.predict_topk(halves, 2)[1], clf.predict_topk(X, 2)[1])
    assert np.array_equal(halves.data, before)  # the caller's own stays as it is


@pytest.mark.parametrize(
    ("X", "said"),
    [
        (np.ones(15), "Reshape your data"),
        (np.ones((80, 14)), "X has 14 features, but PPDSparse is expecting 15 features"),
        (np.full((2, 15), np.nan), "contains NaN"),
        (np.full((2, 15), 1j), "Complex data not supported"),
        (sp.csr_matrix((2, 14)), "X has 14 features, but PPDSparse is expecting 15 features"),
        (sp.csr_matrix((np.ones(1), np.array([99]), np.array([0, 1, 1])), shape=(2, 15)), "X"),
    ],
)
def test_rows_that_do_not_fit_are_refused(X: Any, said: str, learned: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match=said):
        learned[2].predict(X)


def test_a_text_is_no_row(learned: tuple[Any, Any, Any]) -> None:
    for answer in (learned[2].predict, learned[2].predict_topk, learned[2].decision_function):
        with pytest.raises(InputError, match=r"X is 'red apples', .* give its path, or texts as a list"):
            answer("red apples")
    with pytest.raises(InputError):
        learned[2].predict(["red apples"])  # the model knows no words


@pytest.fixture
def long_rows() -> tuple[Any, Any, Any]:
    """X of rows of length one, the same rows of other lengths, and Y."""
    X, Y = overlapping()
    lengths = np.linspace(3, 60, 80)
    return X, sp.csr_matrix(sp.diags(lengths) @ X), Y


def test_rows_of_other_lengths_are_normalised_and_it_is_said_once(long_rows: Any, caplog: Any, tmp_path: Path) -> None:
    X, longer, Y = long_rows
    with caplog.at_level(logging.INFO, logger="xmc_stream"):
        clf = fitted(longer, Y)
        found = clf.predict(longer)
    assert [
        LOGGED in record.getMessage()
        for record in caplog.records
        if record.name == "xmc_stream" and not record.getMessage().startswith("plan:")
    ] == [True]
    assert clf.model_.attributes["normalize"] == "l2"
    assert clf.decision_function(X) == pytest.approx(fitted(X, Y).decision_function(X), abs=1e-3)
    assert (found != clf.predict(X)).nnz == 0
    loaded = xs.load_model(clf.save(tmp_path / "m").path)
    for rows in (longer, sp.csc_array(longer), longer.astype(np.float64)):
        assert np.array_equal(loaded.predict_topk(rows, 3)[1], clf.predict_topk(longer, 3)[1])


def test_rows_are_normalised_bit_for_bit_as_a_conversion_does(long_rows: Any, tmp_path: Path) -> None:
    _, longer, Y = long_rows
    clf = fitted(longer, Y)
    data = xs.convert(longer, tmp_path / "data.xmc", labels=Y, normalize="l2")
    assert xs.PPDSparse(memory_limit=LIMIT).fit(data).model_.digest() == clf.model_.digest()
    for one, other in zip(clf.predict_topk(data, 4), clf.predict_topk(longer, 4), strict=True):
        assert np.array_equal(one, other)
    many = sp.vstack([longer] * 60, format="csr")  # so many that an engine predicts
    assert np.array_equal(clf.predict_topk(many, 4)[1][-80:], clf.predict_topk(longer, 4)[1])


def test_rows_of_length_one_stay_as_they_are(long_rows: Any, caplog: Any) -> None:
    X, _, Y = long_rows
    near = sp.csr_matrix(X * (1 + 3e-5))
    with caplog.at_level(logging.INFO, logger="xmc_stream"):
        clf = fitted(near, Y)
    assert not [
        record
        for record in caplog.records
        if record.name == "xmc_stream" and not record.getMessage().startswith("plan:")
    ]
    assert clf.model_.attributes["normalize"] == "none"
    assert clf.model_.digest() == fitted(near, Y, normalize=None).model_.digest()


def test_normalising_can_be_forced_either_way(long_rows: Any) -> None:
    X, longer, Y = long_rows
    plain = fitted(longer, Y, normalize=None)
    assert plain.model_.attributes["normalize"] == "none"
    by_hand = longer @ plain.coef_.T.toarray() + plain.intercept_
    np.testing.assert_allclose(plain.decision_function(longer), by_hand, rtol=1e-4, atol=1e-4)
    forced = fitted(X, Y, normalize="l2")
    assert forced.model_.attributes["normalize"] == "l2"
    np.testing.assert_allclose(forced.decision_function(longer), forced.decision_function(X), atol=1e-5)


def test_rows_of_zeros_and_huge_values(long_rows: Any) -> None:
    _, longer, Y = long_rows
    rows = longer.toarray()
    rows[3] = 0
    clf = fitted(rows, Y)
    np.testing.assert_allclose(clf.decision_function(rows)[3], clf.intercept_, atol=1e-6)
    rows[4, 0] = 1e300
    with pytest.raises(InputError, match="X"):
        clf.predict(rows)


def test_a_dataset_that_is_not_normalised_is_said_so(long_rows: Any, caplog: Any, tmp_path: Path) -> None:
    X, longer, Y = long_rows
    data = xs.convert(longer, tmp_path / "long.xmc", labels=Y)
    for normalize, said in (("auto", True), (None, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="xmc_stream"):
            clf = xs.PPDSparse(memory_limit=LIMIT, normalize=normalize).fit(data)
        mine = [
            record
            for record in caplog.records
            if record.name == "xmc_stream" and not record.getMessage().startswith("plan:")
        ]
        assert [record.levelname for record in mine] == ["WARNING"] * said
        assert all("convert them with normalize='l2'" in record.getMessage() for record in mine)
        assert clf.model_.attributes["normalize"] == "none"
    with pytest.raises(InputError, match="convert them with normalize='l2'"):
        xs.PPDSparse(normalize="l2").fit(data)
    caplog.clear()
    for rows, options in ((X, {}), (longer, {"normalize": "l2"})):
        sound = xs.convert(rows, tmp_path / f"sound{len(options)}.xmc", labels=Y, **options)
        xs.PPDSparse(memory_limit=LIMIT).fit(sound)
    assert not [
        record
        for record in caplog.records
        if record.name == "xmc_stream" and not record.getMessage().startswith("plan:")
    ]


def test_a_model_of_selected_features_leaves_rows_alone(long_rows: Any, tmp_path: Path) -> None:
    """Its rows are parts of rows of length one."""
    _, longer, Y = long_rows
    data = xs.convert(longer, tmp_path / "data.xmc", labels=Y, normalize="l2")
    some = xs.select_features(data, tmp_path / "some.xmc", features=[1, 2, 5, 7, 9])
    clf = xs.PPDSparse(memory_limit=LIMIT, normalize=None).fit(some)
    assert clf.model_.attributes["normalize"] == "l2"
    block = some.X_rows().block(0, 80)
    rows = sp.csr_matrix((block.data, block.indices, block.indptr), shape=(80, 5))
    assert np.array_equal(clf.predict_topk(rows, 3)[1], clf.predict_topk(some, 3)[1])


def read(path: Path) -> tuple[Any, list[list[int]]]:
    """Rows and labels of an XMLRepo text."""
    with gzip.open(path) as file:
        _, d, _ = map(int, file.readline().split())
        X, y = load_svmlight_file(file, n_features=d, multilabel=True, zero_based=True)
    return X, [list(map(int, labels)) for labels in y]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("letter", 67.5), ("stackex_cooking", 59.0)])
def test_real_sets_that_are_not_normalised_end_where_others_do(name: str, least: float) -> None:
    """Without a word of the user's: as matrices with labels as they are."""
    folder = os.environ.get("XMC_STREAM_DATA")
    if not folder:
        pytest.skip("XMC_STREAM_DATA is not set: no real data sets at hand")
    train, test = (read(Path(folder) / name / f"{part}.txt.gz") for part in ("train", "test"))
    y, truth = ([row[0] for row in part[1]] if name == "letter" else part[1] for part in (train, test))
    assert 100 * fitted(train[0], y).score(test[0], truth) > least
