"""How many rounds a class gets: those of all, more where that pays, and an end where nothing is gained any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import fit_cut
from scipy.optimize import minimize
from sklearn.svm import LinearSVC

import xmc_stream as xs
from xmc_stream.runtime.plan import Cuts


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Classes of three rows each among many rows that look like theirs: three rounds bring too few of these."""
    rng = np.random.default_rng(0)
    n, d, k = 3000, 60, 40
    X = sp.random(n, d, 0.2, format="csr", dtype=np.float32, random_state=0)
    Y = sp.lil_matrix((n, k), dtype=np.float32)
    for c in range(k):
        Y[rng.choice(n, 3, replace=False), c] = 1
    return xs.convert(X, tmp_path_factory.mktemp("few") / "d.xmc", labels=Y.tocsr(), normalize="l2")


@pytest.fixture(scope="module")
def gone_on(few_rows: xs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> xs.PPDSparse:
    """The defaults, on classes of few rows."""
    return xs.PPDSparse(memory_limit="2GB", C=4.0).fit(few_rows, model=tmp_path_factory.mktemp("on") / "m")


def test_classes_far_from_their_optimum_go_on(few_rows: xs.Dataset, gone_on: xs.PPDSparse, tmp_path: Path) -> None:
    options = {"memory_limit": "2GB", "C": 4.0}
    capped = xs.PPDSparse(**options, max_rounds=3).fit(few_rows, model=tmp_path / "three").report_
    optimum = xs.PPDSparse(**options, max_rounds=None, tol=1e-3).fit(few_rows, model=tmp_path / "best").report_
    assert capped["rounds"] == 3
    assert capped["objective"] > 1.05 * optimum["objective"]
    assert 3 < gone_on.report_["rounds"] <= 6
    assert gone_on.report_["objective"] < 1.02 * optimum["objective"]


def test_which_classes_go_on_does_not_depend_on_the_cut(
    few_rows: xs.Dataset, gone_on: xs.PPDSparse, tmp_path: Path
) -> None:
    cuts = Cuts(classes=7, rows=130, solve_rows=300, interval=90)
    cut = fit_cut(xs.PPDSparse(C=4.0, threads=2, memory_limit="3GB"), few_rows, tmp_path / "cut", cuts)
    assert cut.model_.digest() == gone_on.model_.digest()
    # losses are rounded so that their sums are exact: no cut shows in the figures either
    names = ("objective", "duality_gap", "duality_gap_mean", "violation", "n_open", "rounds")
    assert [cut.report_[name] for name in names] == [gone_on.report_[name] for name in names]


@pytest.mark.slow
def test_rounds_that_are_not_worth_it_are_left_out(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    data, _ = real("bibtex")
    for all_rows, rounds in ((False, 3), (None, 1)):
        clf = xs.PPDSparse(memory_limit="2GB", threads=1, all_rows=all_rows)
        clf.fit(data, model=tmp_path / "m", overwrite=True)
        report = clf.report_
        assert report["rounds"] == report["passes"] == rounds
        assert report["duality_gap_mean"] < 0.02


def objectives(clf: xs.PPDSparse, X: Any, Y: Any, W: Any, b: Any) -> Any:
    """F of each class by W (D x K) and b (K), in float64."""
    p, C = clf.report_["params"], clf.report_["C"]
    margins = np.where(Y > 0, 1.0, -1.0) * (X @ W + b)
    short, weights = np.maximum(0.0, 1.0 - margins), np.where(Y > 0, C * clf.report_["positive_weight"], C)
    losses = (weights * (0.5 * short**2 if p["loss"] == "squared_hinge" else short)).sum(axis=0)
    return p["lam"] * np.abs(W).sum(axis=0) + 0.5 * p["tau"] * ((W**2).sum(axis=0) + b**2) + losses


def weights_of(clf: xs.PPDSparse) -> tuple[Any, Any]:
    return clf.model_.to_scipy().toarray().astype(np.float64), clf.model_.bias().astype(np.float64)


WHOLE: dict[str, Any] = {"memory_limit": "2GB", "guide": 0, "prune": 0, "weight_type": "float32", "max_rounds": None}


@pytest.mark.parametrize(("loss", "C"), [("squared_hinge", None), ("squared_hinge", 100.0), ("hinge", 20.0)])
def test_without_a_cap_every_class_comes_to_its_optimum(loss: str, C: float | None, tmp_path: Path) -> None:
    """Rows that lie close together, where coordinate steps do little: LIBLINEAR's optimum is the judge."""
    rng = np.random.default_rng(3)
    X = (1.0 + 0.1 * rng.normal(size=(600, 30))).astype(np.float32)
    scores = (X - 1.0) @ rng.normal(size=(30, 6)) + 0.3 * rng.normal(size=(600, 6))
    Y = scores > np.quantile(scores, [0.5, 0.7, 0.8, 0.9, 0.95, 0.99], axis=0).diagonal()
    data = xs.convert(sp.csr_matrix(X), tmp_path / "d.xmc", labels=sp.csr_matrix(Y, dtype=np.float32), normalize="l2")
    X = X / np.linalg.norm(X, axis=1, keepdims=True).astype(np.float64)
    clf = xs.PPDSparse(**WHOLE, lam=0, loss=loss, C=C, threads=1).fit(data, model=tmp_path / "m")
    C, weight = clf.report_["C"], clf.report_["positive_weight"]
    squared, best = loss == "squared_hinge", []
    for k in range(6):
        svm = LinearSVC(
            C=C / 2 if squared else C, loss=loss, class_weight={1: weight}, dual=not squared, tol=1e-8, max_iter=10**6
        ).fit(X, Y[:, k])
        best.append((svm.coef_[0], svm.intercept_[0]))
    optimum = objectives(clf, X, Y, np.array([w for w, _ in best]).T, np.array([b for _, b in best]))
    assert (objectives(clf, X, Y, *weights_of(clf)) <= (1 + clf.report_["params"]["tol"]) * optimum).all()
    assert clf.report_["n_open"] == 0


@pytest.mark.soak
@pytest.mark.slow
def test_without_a_cap_no_class_of_mediamill_can_be_bettered(
    real: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """A dense solver goes on from each class's weights, and gains less than tol."""
    dataset = xs.open_dataset(real("mediamill_partial")[0])
    clf = xs.PPDSparse(**WHOLE).fit(dataset, model=tmp_path / "m")
    p, tol = clf.report_["params"], clf.report_["params"]["tol"]
    x, y = (matrix.block(0, dataset.n_samples) for matrix in (dataset.X_rows(), dataset.Y_rows()))
    X = sp.csr_matrix((x.values.astype(np.float64), x.indices, x.indptr), (x.n, dataset.n_features)).toarray()
    Y = sp.csr_matrix((np.ones(len(y.indices)), y.indices, y.indptr), (y.n, dataset.n_labels)).toarray()
    W, b = weights_of(clf)
    reached = objectives(clf, X, Y, W, b)
    C = np.where(Y > 0, clf.report_["C"] * clf.report_["positive_weight"], clf.report_["C"])
    assert clf.report_["n_open"] == 0
    d = dataset.n_features
    for k in np.flatnonzero((Y.sum(axis=0) > 0) & (Y.sum(axis=0) < len(Y))).tolist():
        sign = np.where(Y[:, k] > 0, 1.0, -1.0)

        def of(u: Any, sign: Any = sign, C: Any = C[:, k]) -> tuple[float, Any]:
            """F and its slopes; w = u_1 - u_2, both above 0, and the bias."""
            w, bias = u[:d] - u[d : 2 * d], u[-1]
            short = np.maximum(0.0, 1.0 - sign * (X @ w + bias))
            slopes = p["tau"] * w - X.T @ (C * short * sign)
            f = p["lam"] * u[:-1].sum() + 0.5 * p["tau"] * (w @ w + bias * bias) + 0.5 * (C * short**2).sum()
            return f, np.concatenate(
                [p["lam"] + slopes, p["lam"] - slopes, [p["tau"] * bias - (C * short * sign).sum()]]
            )

        start = np.concatenate([np.maximum(W[:, k], 0.0), np.maximum(-W[:, k], 0.0), b[k : k + 1]])
        bounds = [(0.0, None)] * (2 * d) + [(None, None)]
        after = minimize(of, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 100, "maxcor": 30})
        assert reached[k] <= (1 + tol) * after.fun, k


@pytest.mark.slow
def test_without_a_cap_rows_far_from_length_one_take_more_epochs(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    X = rng.integers(0, 16, size=(1500, 16)).astype(np.float32)  # far from length one
    Y = np.zeros((1500, 3), np.float32)
    Y[np.arange(1500), np.argmax(X[:, :3] + rng.normal(scale=8, size=(1500, 3)), axis=1)] = 1
    data = xs.convert(sp.csr_matrix(X), tmp_path / "d.xmc", labels=sp.csr_matrix(Y))
    clf = xs.PPDSparse(max_rounds=None, memory_limit="2GB").fit(data, model=tmp_path / "m")
    assert clf.report_["n_open"] == 0
    assert clf.report_["duality_gap"] < 0.01
