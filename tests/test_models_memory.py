"""Models answer for what is in memory: arrays, frames and series, as for the sparse matrix of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

import xmc_stream as xs

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

LIMIT: dict[str, Any] = {"memory_limit": "2GB"}


def matrices(n: int = 50, d: int = 6, k: int = 5) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    X = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    return np.where(X < 0, np.float32(0), X), np.arange(n) % k


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    folder = tmp_path_factory.mktemp("dense")
    X, y = matrices(60)
    data = xs.convert(X, folder / "d.xmc", labels=y, normalize="l2", **LIMIT)
    return xs.PPDSparse(**LIMIT).fit(data, model=folder / "m.model").model_


def test_a_model_of_vectors_is_asked_about_arrays(dense_model: xs.Model) -> None:
    X = matrices(60)[0]
    labels, scores = dense_model.predict_topk(sparse.csr_matrix(X), 3)
    columns = [f"c{i}" for i in range(X.shape[1])]
    for rows in (X, np.asfortranarray(X), X.astype(np.float64), pd.DataFrame(X), pl.DataFrame(X, schema=columns)):
        found = dense_model.predict_topk(rows, 3)
        assert np.array_equal(found[0], labels)
        assert np.array_equal(found[1], scores)


def test_predictions_of_arrays_are_written(tmp_path: Path) -> None:
    X = matrices(60)[0]
    estimator = xs.PPDSparse(**LIMIT).fit(X, matrices(60)[1], model=tmp_path / "m.model")
    assert estimator.model_.attributes["normalize"] == "l2"  # of rows that are asked about too
    labels, scores = estimator.model_.predict_topk(X, 3)
    for i, rows in enumerate((sparse.csr_matrix(X), X, pd.DataFrame(X))):
        xs.predict(tmp_path / "m.model", rows, tmp_path / f"{i}.npz", 3, **LIMIT)
        found = np.load(tmp_path / f"{i}.npz")
        assert np.array_equal(found["labels"], labels)
        assert np.array_equal(found["scores"], scores)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.ones(6), r"shape \(6,\): give rows"),
        (np.ones((2, 3)), "a matrix of 3 features: give .* 6 features"),
        (np.array([["a"] * 6]), "real numbers"),
        (np.full((2, 6), np.nan), "not finite"),
        (pd.Series(["a", None]), "row 1 .* others are texts"),
    ],
)
def test_a_model_refuses_other_arrays(data: Any, said: str, dense_model: xs.Model) -> None:
    with pytest.raises(xs.InputError, match=said):
        dense_model.predict_topk(data, 3)
