"""The group lasso end to end: optimum, algorithms, path, debiasing; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.problems import LIMIT, overlapping
from helpers.soak import first
from reference import grouplasso as twin

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.grouplasso import descent
from xmc_stream.grouplasso.descent import Data
from xmc_stream.grouplasso.parameters import LOSSES, SOLVERS, GroupLassoParameters
from xmc_stream.grouplasso.run import GroupLassoRun, SigmaJob
from xmc_stream.grouplasso.solver import Extrapolation
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes

TIGHT: dict[str, Any] = {"tol": 1e-7, "max_passes": 20_000}
LAM = 0.03


def data_for(loss: str, n: int = 80, d: int = 15, k: int = 5, seed: int = 0) -> tuple[Any, Any]:
    return overlapping(n, d, k, loss in ("multiclass", "logistic"), seed)


def solve(X: Any, Y: Any, folder: Path, threads: int = 1, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train without an engine: dense weights, and what the run says."""
    data = folder / "data.xmc"
    dataset = Dataset(data) if data.exists() else xs.convert(X, data, labels=Y, memory_limit=LIMIT)
    p, work, notes = GroupLassoParameters(**options), folder / "model.partial", Notes()
    begin_model(work)
    result = run_here(GroupLassoRun(dataset, work, p, 0, MemoryPlan(2**40, 2**30, threads), notes).loop(), notes)
    attributes = {**model_attributes(dataset, p.solver, p.to_dict(), 0, result), KIND: "row-sparse"}
    if (folder / "model").exists():
        (folder / "model").rename(folder / f"model-{len(list(folder.iterdir()))}")
    finish_model(work, folder / "model", attributes)
    return xs.load_model(folder / "model").to_scipy().toarray().astype(np.float64), result


def objective(loss: str, X: Any, Y: Any, W: Any, mix: float = 0.0, lam: float = LAM) -> float:
    exact = X.toarray().astype(np.float64)
    return twin.losses(loss, exact, Y.toarray() > 0, W) + twin.penalty(W, lam * mix, lam * (1 - mix))


@pytest.mark.parametrize("mix", [0.0, 0.4])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_solution_is_optimal_and_rows_are_zero_together(loss: str, mix: float, tmp_path: Path) -> None:
    X, Y = data_for(loss)
    lam = 0.4 if loss == "label-ranking" else 0.02 if loss == "logistic" else 0.15
    W, result = solve(X, Y, tmp_path, loss=loss, lam=lam, mix=mix, **TIGHT)
    exact, labels = X.toarray().astype(np.float64), Y.toarray() > 0
    g = twin.gradient(loss, exact, labels, W)
    assert twin.distance_from_optimal(g, W, lam * mix, lam * (1 - mix)) < 2e-4 * lam
    assert result["objective"] == pytest.approx(objective(loss, X, Y, W, mix, lam), rel=1e-6)
    zero = ~W.any(axis=1)
    assert 0 < zero.sum() < len(W)
    assert result["n_selected"] == (~zero).sum()
    if not mix:
        assert W[~zero].all()
    else:
        assert (W[~zero] == 0).any()
    reference = twin.solve(loss, exact, labels, lam * mix, lam * (1 - mix), 300)
    assert result["objective"] <= objective(loss, X, Y, reference, mix, lam) * (1 + 1e-6)


@pytest.mark.parametrize("loss", first(LOSSES, 2))
def test_all_algorithms_come_to_one_objective(loss: str, tmp_path: Path) -> None:
    X, Y = data_for(loss)
    found = {}
    for algorithm in SOLVERS:
        for search in (True, False) if algorithm == "fista" else (True,):
            options = {
                "algorithm": algorithm,
                "line_search": search,
                "max_passes": 200 if algorithm == "fobos" else 4000,
            }
            W, result = solve(X, Y, tmp_path, loss=loss, lam=LAM, tol=1e-5, **options)
            found[algorithm, search] = objective(loss, X, Y, W)
            assert result["objective"] == pytest.approx(found[algorithm, search], rel=2e-6)
            assert {"objective", "passes", "n_selected", "violation"} <= set(result["history"][0])
    best = min(found.values())
    assert best < objective(loss, X, Y, np.zeros((X.shape[1], Y.shape[1]))) * 0.9
    for (algorithm, _), value in found.items():
        assert value == pytest.approx(best, rel=3e-2 if algorithm == "fobos" else 1e-5), algorithm


@pytest.mark.parametrize("algorithm", ["bcd-cst", "fista", "sparsa"])
@pytest.mark.parametrize("loss", LOSSES)
def test_other_algorithms_end_at_an_optimum(loss: str, algorithm: str, tmp_path: Path) -> None:
    X, Y = data_for(loss, n=60, d=8, k=4)
    lam = 0.4 if loss == "label-ranking" else 0.02 if loss == "logistic" else 0.15
    W, _ = solve(X, Y, tmp_path, loss=loss, lam=lam, mix=0.2, algorithm=algorithm, tol=1e-6, max_passes=3000)
    g = twin.gradient(loss, X.toarray().astype(np.float64), Y.toarray() > 0, W)
    assert W.any()
    assert twin.distance_from_optimal(g, W, lam * 0.2, lam * 0.8) < 2e-3 * lam


def test_objectives_are_those_of_lightning(tmp_path: Path) -> None:
    """CDClassifier(penalty="l1/l2", multiclass=True, loss="squared_hinge") of lightning 0.6.2, with tol=1e-10."""
    i, j = np.ogrid[:60, :12]
    X = np.where((7 * i + 5 * j) % 3 == 0, 3 * np.sin(1.7 * i + 0.3 * j * j), 0.0).astype(np.float32)
    y = (X[:, :4] + X[:, 4:8]).argmax(axis=1)
    Y = sp.csr_matrix((y[:, None] == np.arange(4)).astype(np.float32))
    for lam, value in ((2.0, 2.7963444377), (0.5, 1.3696952627), (0.1, 0.5172842509)):
        _, result = solve(sp.csr_matrix(X), Y, tmp_path, lam=lam, **TIGHT)
        assert result["objective"] == pytest.approx(value, rel=1e-6)


@pytest.mark.filterwarnings("ignore:'penalty' was deprecated:FutureWarning")
def test_the_l1_penalty_is_that_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    X, Y = data_for("logistic", n=100, d=10)
    lam, y = 0.01, Y.toarray().argmax(axis=1)
    W, result = solve(X, Y, tmp_path, loss="logistic", lam=lam, mix=1.0, **TIGHT)
    options = {
        "penalty": "elasticnet",
        "l1_ratio": 1.0,
        "solver": "saga",
        "fit_intercept": False,
        "tol": 1e-8,
        "max_iter": 20_000,
    }
    other = LogisticRegression(C=1 / (len(y) * lam), random_state=0, **options).fit(X.toarray().astype(np.float64), y)
    assert result["objective"] == pytest.approx(objective("logistic", X, Y, other.coef_.T, 1.0, lam), rel=1e-6)
    np.testing.assert_allclose(W, other.coef_.T, atol=1e-3)
    assert (W == 0).any()


def tricky() -> dict[str, Any]:
    """Matrices by which an estimate of the largest singular value may be misled."""
    rng = np.random.default_rng(0)
    spike = np.zeros((200, 300), np.float32)
    spike[0, 1:] = 1.0  # found first, of norm 17.3
    spike[:, 0] = 1.5  # of norm 21.2
    return {
        "rows that add up to nothing": np.outer(rng.normal(size=40), [1, -1]).astype(np.float32),
        "a column beside a row": spike,
        "two parts": np.kron(np.diag([1.0, 3.0]), np.ones((20, 7))).astype(np.float32),
        "signs": rng.normal(size=(50, 30)).astype(np.float32),
        "one value": np.array([[2.0, 0.0], [0.0, 0.0]], np.float32),
        "sparse": sp.random(300, 100, 0.05, dtype=np.float32, random_state=1).toarray(),
    }


@pytest.mark.parametrize("name", list(tricky()))
def test_the_bound_on_the_largest_singular_value_is_above_it_however_x_is_cut(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = tricky()[name]
    xs.convert(sp.csr_matrix(X), tmp_path / "d.xmc", labels=sp.csr_matrix(np.ones((len(X), 1))), memory_limit=LIMIT)
    data = Data(str(tmp_path / "d.xmc"), str(tmp_path), GroupLassoParameters(), 0)
    found = {SigmaJob(data, block_bytes).run()["sigma"] for block_bytes in (8 * 301, 8 * 1000, 1 << 24)}
    (sigma,) = found
    monkeypatch.setattr(portion, "SECONDS", 0.0)  # an iteration a job
    job = SigmaJob(data, 1 << 24)
    job.out.parent.mkdir(parents=True)
    while (receipt := job.run())["sigma"] is None:
        assert receipt["passes"] == 1
        job = replace(job, number=receipt["number"], before=str(job.out), square=receipt["square"])
    assert receipt["sigma"] == sigma
    norm = np.linalg.norm(X.astype(np.float64), 2)
    of_sizes = np.linalg.norm(np.abs(X).astype(np.float64), 2)
    assert norm <= sigma <= 1.05 * of_sizes


@pytest.mark.parametrize("algorithm", ["fista", "sparsa", "fobos"])
def test_steps_work_where_rows_add_up_to_nothing(algorithm: str, tmp_path: Path) -> None:
    a = np.random.default_rng(0).normal(size=(60, 1)) * 5
    X = sp.csr_matrix(np.hstack([a, -a]).astype(np.float32))
    Y = sp.csr_matrix(np.hstack([a > 0, a <= 0]).astype(np.float32))
    options = {"lam": 0.01, "max_passes": 300 if algorithm == "fobos" else 2000}
    best = solve(X, Y, tmp_path, **options, tol=1e-7)[1]["objective"]
    found = solve(X, Y, tmp_path, **options, tol=1e-6, algorithm=algorithm, line_search=False)[1]["objective"]
    assert found == pytest.approx(best, rel=0.7 if algorithm == "fobos" else 1e-5)


@pytest.mark.parametrize("eta", [3e3, 1e30])
def test_steps_that_are_too_long_end_in_an_error_with_the_cure(eta: float, tmp_path: Path) -> None:
    X, Y = data_for("multiclass")
    with pytest.raises(InputError, match=r"fobos diverged in lam 0.03: .* set a smaller eta, or algorithm=bcd-ls"):
        solve(X, Y, tmp_path, lam=LAM, algorithm="fobos", eta=eta, max_passes=20)


@pytest.mark.parametrize("shrink", [True, False])
def test_shrinking_changes_the_way_and_not_the_end(shrink: bool, tmp_path: Path) -> None:
    X, Y = overlapping(100, 40, 4, True)
    W, result = solve(X, Y, tmp_path, lam=0.15, shrink=shrink, tol=1e-6, max_passes=20_000)
    exact = X.toarray().astype(np.float64)
    assert twin.distance_from_optimal(twin.gradient("multiclass", exact, Y.toarray() > 0, W), W, 0, 0.15) < 1e-4
    assert result["n_selected"] < 40
    assert (result["path"][0]["passes"] == len(result["history"])) != shrink


def test_an_extrapolation_finds_where_linear_steps_go() -> None:
    rng = np.random.default_rng(0)
    A = 0.95 * np.linalg.qr(rng.normal(size=(5, 5)))[0]
    A = (A + A.T) / 2
    target, w = rng.normal(size=(5, 1)), np.zeros((5, 1))
    sweeps = Extrapolation()
    sweeps.begin(np.arange(5), 1)
    for _ in range(9):
        w = target + A @ (w - target)
        sweeps.add(w.astype(np.float32))
    assert len(sweeps) == 6
    found = sweeps.result()
    assert found is not None
    assert np.abs(found - target).max() < 0.02 * np.abs(w - target).max()
    still = Extrapolation()
    for _ in range(4):
        still.add(np.ones((2, 3), np.float32))
    assert still.result() is None


def test_extrapolation_saves_passes_where_features_depend_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a segment ends after every other sweep: the next one goes on with the sweeps before it."""
    rng = np.random.default_rng(1)
    common = rng.normal(size=(150, 1)) * 3
    X = sp.csr_matrix((common + rng.normal(size=(150, 8))).astype(np.float32))
    Y = sp.csr_matrix((np.arange(4) == rng.integers(0, 4, 150)[:, None]).astype(np.float32))
    options = {"lam": 1e-3, "tol": 1e-5, "max_passes": 5000}
    passes, values = [], []
    for extrapolate, sweeps in ((True, 2), (True, 1000), (False, 1000)):
        monkeypatch.setattr(descent, "SEGMENT_WORK", 64 * X.nnz * sweeps)
        W, result = solve(X, Y, tmp_path, extrapolate=extrapolate, **options)
        passes.append(result["path"][0]["passes"])
        values.append(objective("multiclass", X, Y, W, lam=1e-3))
    assert values == pytest.approx([values[-1]] * 3, rel=1e-4)
    assert max(passes[:2]) < 0.8 * passes[2]


def test_a_path_ends_where_its_last_lam_alone_does(tmp_path: Path) -> None:
    X, Y = data_for("multiclass")
    W, result = solve(X, Y, tmp_path, lam=(0.02, 0.5, 0.1), **TIGHT)
    assert [stage["lam"] for stage in result["path"]] == [0.5, 0.1, 0.02]
    selected = [stage["n_selected"] for stage in result["path"]]
    assert selected == sorted(selected)
    assert result["lam"] == 0.02
    alone, _ = solve(X, Y, tmp_path, lam=0.02, **TIGHT)
    assert objective("multiclass", X, Y, W, lam=0.02) == pytest.approx(
        objective("multiclass", X, Y, alone, lam=0.02), rel=1e-6
    )


def test_a_lam_above_all_gradients_selects_nothing(tmp_path: Path) -> None:
    X, Y = data_for("multiclass")
    zero = np.zeros((X.shape[1], Y.shape[1]))
    g = twin.gradient("multiclass", X.toarray().astype(np.float64), Y.toarray() > 0, zero)
    most = float(np.linalg.norm(g, axis=1).max())
    assert solve(X, Y, tmp_path, lam=most * 1.001)[1]["n_selected"] == 0
    W, result = solve(X, Y, tmp_path, lam=(most * 1.001, most * 0.9), **TIGHT)
    assert 0 < result["n_selected"] < len(W)


def test_debiasing_solves_for_the_selected_features_without_the_penalty(tmp_path: Path) -> None:
    """Multinomial logistic regression with a squared norm is what scikit-learn has too."""
    from sklearn.linear_model import LogisticRegression

    X, Y = data_for("logistic", n=150)
    ridge, y = 1.5, Y.toarray().argmax(axis=1)
    before, _ = solve(X, Y, tmp_path, loss="logistic", lam=0.03)
    W, result = solve(X, Y, tmp_path, loss="logistic", lam=0.03, debias=ridge, tol=1e-5, max_passes=250)
    support = before.any(axis=1)
    assert 0 < support.sum() < len(W)
    assert np.array_equal(W.any(axis=1), support)
    exact = X.toarray().astype(np.float64)[:, support]
    other = LogisticRegression(C=1 / ridge, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(exact, y)
    np.testing.assert_allclose(W[support], other.coef_.T, atol=2e-3)
    stage = result["path"][-1]
    assert stage["debias"] == ridge
    worth = (
        twin.losses("logistic", exact, Y.toarray() > 0, other.coef_.T) + 0.5 * ridge / len(y) * (other.coef_**2).sum()
    )
    assert stage["objective"] == pytest.approx(worth, rel=1e-5)


@pytest.mark.parametrize("loss", ["logistic", "multiclass", "multitask"])
@pytest.mark.parametrize("ridge", [1e-2, 1.0])
def test_debiasing_by_its_defaults_is_a_dense_solver_s_and_helps(loss: str, ridge: float, tmp_path: Path) -> None:
    """sum_i loss_i + debias/2 ||W||^2 over the kept features, within 1e-4; held-out rows are told better than before."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(0)
    X = rng.normal(size=(900, 30)).astype(np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    truth = np.zeros((30, 5))
    truth[:8] = rng.normal(size=(8, 5))
    y = (X @ truth * 12 + rng.gumbel(size=(900, 5))).argmax(axis=1)
    train, test = slice(0, 300), slice(300, 900)
    Y = np.eye(5)[y[train]]
    at_zero = twin.gradient(loss, X[train].astype(np.float64), Y > 0, np.zeros((30, 5)))
    lam = 0.35 * float(np.linalg.norm(at_zero, axis=1).max())
    before, _ = solve(sp.csr_matrix(X[train]), sp.csr_matrix(Y), tmp_path, loss=loss, lam=lam)
    W, _ = solve(sp.csr_matrix(X[train]), sp.csr_matrix(Y), tmp_path, loss=loss, lam=lam, debias=ridge)
    kept = before.any(axis=1)
    assert 3 < kept.sum() < 20
    assert np.array_equal(W.any(axis=1), kept)
    exact = X[train].astype(np.float64)[:, kept]

    def worth(w: Any) -> float:
        return 300 * twin.losses(loss, exact, Y > 0, w) + 0.5 * ridge * float((w**2).sum())

    def both(flat: Any) -> tuple[float, Any]:
        w = flat.reshape(-1, 5)
        return worth(w), (300 * twin.gradient(loss, exact, Y > 0, w) + ridge * w).ravel()

    options = {"maxiter": 500, "ftol": 1e-14, "gtol": 1e-6}
    best = minimize(both, np.zeros(5 * kept.sum()), jac=True, method="L-BFGS-B", options=options).fun
    assert -1e-7 < worth(W[kept]) / best - 1 < 1e-4
    if ridge < 1:
        assert ((X[test] @ W).argmax(axis=1) == y[test]).mean() > ((X[test] @ before).argmax(axis=1) == y[test]).mean()


def test_rows_without_labels_count_for_nothing_and_all_negative_in_multitask(tmp_path: Path) -> None:
    X, Y = data_for("multiclass")
    keep = np.arange(80) >= 20
    Y = sp.csr_matrix(Y.multiply(keep[:, None]))
    for loss in LOSSES:
        (tmp_path / loss).mkdir()
        W, result = solve(X, Y, tmp_path / loss, loss=loss, lam=LAM, tol=1e-5)
        assert result["objective"] == pytest.approx(objective(loss, X, Y, W), rel=1e-6)
    empty = twin.losses("multitask", X.toarray()[:20], np.zeros((20, 5), np.bool_), W)
    assert empty > 0
    assert twin.losses("multiclass", X.toarray()[:20], np.zeros((20, 5), np.bool_), W) == 0


def test_ranking_of_rows_with_one_label_is_the_multiclass_loss(tmp_path: Path) -> None:
    X, Y = data_for("multiclass")
    found = [solve(X, Y, tmp_path, loss=loss, lam=LAM, **TIGHT)[0] for loss in ("multiclass", "label-ranking")]
    np.testing.assert_allclose(*found, atol=1e-3)


def test_rows_of_two_labels_are_refused_with_the_cure(tmp_path: Path) -> None:
    X, Y = overlapping()
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    first = int(np.flatnonzero(np.diff(Y.indptr) > 1)[0])
    for loss in ("multiclass", "logistic"):
        with pytest.raises(InputError, match=rf"row {first} of .* labels, .* set loss=label-ranking or loss=multitask"):
            xs.GroupLasso(loss=loss, memory_limit=LIMIT).fit(data)
    xs.GroupLasso(loss="label-ranking", lam=0.1, memory_limit=LIMIT).fit(data)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lam": -1}, r"'lam' parameter of GroupLasso must be a float in \[0, inf\), or several"),
        ({"loss": "hinge"}, "one of multiclass, multitask, logistic, label-ranking"),
        ({"mix": 1.1}, r"\[0, 1\]"),
        ({"algorithm": "bcd"}, "one of bcd-ls, bcd-cst, fista, sparsa, fobos"),
        ({"max_passes": 0}, "'max_passes' parameter"),
        ({"eta": 0}, "'eta' parameter"),
    ],
)
def test_parameters_are_checked(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        GroupLassoParameters.of(values)
