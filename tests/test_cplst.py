"""CPLST comes to its closed form: slow spectra, features that depend on each other, real data; by both ways to solve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.lowrank import parameters
from xmc_stream.store.dataset import Dataset

LIMIT = "2GB"


def best_of(X: np.ndarray[Any, Any], Y: np.ndarray[Any, Any], rank: int) -> float:
    """1/2 ||Y - X Z||^2 of the best Z of a rank, by singular values in float64; X with a column of ones."""
    U, s, _ = np.linalg.svd(np.hstack([X, np.ones((len(X), 1))]), full_matrices=False)
    found = np.linalg.svd(U[:, s > 1e-9 * s[0]].T @ Y, compute_uv=False)
    return 0.5 * float((Y**2).sum() - (found[:rank] ** 2).sum())


def objective_of(model: Any, X: np.ndarray[Any, Any], Y: np.ndarray[Any, Any]) -> float:
    """That of the stored factors, in float64."""
    W, H = (np.asarray(factor, np.float64) for factor in model.factors())
    return 0.5 * float(((Y - (X @ W[:-1] + W[-1]) @ H.T) ** 2).sum())


def dense(dataset: Dataset) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = (matrix.block(0, dataset.n_samples) for matrix in (dataset.X_rows(), dataset.Y_rows()))
    X = sp.csr_matrix((x.data.astype(np.float64), x.indices, x.indptr), (dataset.n_samples, dataset.n_features))
    Y = sp.csr_matrix((np.ones(len(y.indices)), y.indices, y.indptr), (dataset.n_samples, dataset.n_labels))
    return X.toarray(), Y.toarray()


def made(path: Path, decay: float, dependent: bool = False) -> Dataset:
    """800 rows of 120 features, whose lengths fall by their number; 90 labels of which none is told by a few directions."""
    rng = np.random.default_rng(0)
    X = sp.random(800, 120, 0.2, "csr", np.float32, rng, data_rvs=lambda size: rng.integers(1, 5, size))
    if dependent:  # the same again, and sums that are exact
        X = sp.hstack([X, 2 * X, X[:, :40] + X[:, 40:80], sp.csr_matrix((800, 3), dtype=np.float32)]).tocsr()
    lengths = np.arange(1.0, X.shape[1] + 1) ** -decay
    X = sp.csr_matrix(X @ sp.diags(lengths.astype(np.float32)))
    score = X @ (rng.normal(size=(X.shape[1], 90)) / lengths[:, None])
    Y = sp.csr_matrix((score / score.std(axis=0) + rng.normal(size=score.shape) > 1.2).astype(np.float32))
    return xs.convert(X, path, labels=Y, normalize="none")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("decay", "rank"), [(0.0, 3), (0.0, 40), (1.0, 40)])
def test_slow_spectra(direct: bool, decay: float, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = made(tmp_path / "d.xmc", decay)
    if not direct:
        monkeypatch.setattr(parameters, "MOST_INPUTS", 0)
    fitted = xs.CPLST(rank=rank, oversampling=10, memory_limit=LIMIT).fit(dataset)
    best, true = best_of(*dense(dataset), rank), objective_of(fitted.model_, *dense(dataset))
    assert -1e-9 < true / best - 1 < 1e-6
    assert abs(fitted.report_["objective"] / true - 1) < 2e-6  # of sums in float32
    objectives = [done["objective"] for done in fitted.report_["history"]]
    assert len(objectives) == fitted.report_["rounds"] < 100
    assert all(after < before * (1 + 1e-6) for before, after in pairwise(objectives))


def test_features_that_are_sums_of_others(tmp_path: Path) -> None:
    dataset = made(tmp_path / "d.xmc", 0.0, dependent=True)
    model = xs.CPLST(rank=20, memory_limit=LIMIT).fit(dataset).model_
    assert abs(objective_of(model, *dense(dataset)) / best_of(*dense(dataset), 20) - 1) < 1e-6


@pytest.mark.parametrize("direct", [True, False])
def test_any_limit_and_number_of_threads_gives_the_same_model(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = made(tmp_path / "d.xmc", 0.0)
    if not direct:
        monkeypatch.setattr(parameters, "MOST_INPUTS", 0)
    digests = {
        xs.CPLST(rank=20, memory_limit=limit, threads=threads).fit(dataset).model_.digest()
        for limit, threads in (("2GB", 1), ("2GB", 3), ("3GB", 7), ("1800MB", 2))
    }
    assert len(digests) == 1


def test_defaults_on_real_data(real: Callable[[str], tuple[Path, Path]]) -> None:
    dataset = Dataset(real("mediamill_partial")[0])
    for rank in (10, 100):
        model = xs.CPLST(rank=rank, memory_limit=LIMIT).fit(dataset).model_
        assert -1e-9 < objective_of(model, *dense(dataset)) / best_of(*dense(dataset), rank) - 1 < 1e-6
