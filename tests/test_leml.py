"""LEML: what must hold of the solution, of its predictions and figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cuts import CutError
from helpers.soak import first
from reference import lowrank as twin

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.factors.factors import Begun, Factor, new_factors
from xmc_stream.factors.products import Learned
from xmc_stream.factors.rowblocks import Holding
from xmc_stream.lowrank.leml import ScaleJob
from xmc_stream.lowrank.parameters import LOSSES, LEMLParameters
from xmc_stream.lowrank.solver import Descent, loss_curvatures, loss_slopes, loss_values, run_alone, trust_region
from xmc_stream.lowrank.w_step import WStep
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.job import Notes, Phase, run_here

LIMIT = "4GB"  # bounds the whole process of the tests


def problem(n: int = 80, d: int = 15, k: int = 6, seed: int = 0) -> tuple[Any, Any]:
    """Labels that overlap, rows of length one."""
    rng = np.random.default_rng(seed)
    X = sp.random(n, d, 0.5, format="csr", dtype=np.float32, random_state=seed)
    X = sp.csr_matrix(X / np.maximum(np.sqrt(X.multiply(X).sum(axis=1)), 1e-6), dtype=np.float32)
    scores = X @ rng.normal(size=(d, k)) + 0.3 * rng.normal(size=(n, k))
    return X, sp.csr_matrix((scores > np.quantile(scores, 0.7, axis=0)).astype(np.float32))


def stored(X: Any, Y: Any, folder: Path) -> Any:
    return xs.convert(X, folder / "data.xmc", labels=Y, memory_limit=LIMIT, overwrite=True)


def fit(X: Any, Y: Any, folder: Path, mask: Any = None, **parameters: Any) -> Any:
    dataset = stored(X, Y, folder)
    if mask is not None:
        dataset.with_observed(mask)
        parameters["observed"] = "given"
    p = {
        "lam": 0.1,
        "tol": 0.0,
        "cg": 200,
        "cg_tol": 1e-6,
        "bias": False,
        "held_out": 0.0,
        "refit": False,
        **parameters,
    }
    return xs.LEML(memory_limit=LIMIT, **p).fit(dataset, model=folder / "model", overwrite=True)


@pytest.mark.parametrize("loss", LOSSES)
def test_slopes_and_curvatures_are_finite_differences(loss: str) -> None:
    rng = np.random.default_rng(0)
    true, z, e = rng.random(500) < 0.5, 3 * rng.normal(size=500), 1e-5
    z = z[np.abs(np.abs(z) - 1) > 1e-3][:400]  # where the squared hinge has no second derivative
    true = true[: len(z)]
    slopes = (loss_values(loss, true, z + e) - loss_values(loss, true, z - e)) / (2 * e)
    np.testing.assert_allclose(loss_slopes(loss, true, z), slopes, atol=1e-7)
    bends = (loss_slopes(loss, true, z + e) - loss_slopes(loss, true, z - e)) / (2 * e)
    np.testing.assert_allclose(loss_curvatures(loss, true, z), bends, atol=1e-7)
    np.testing.assert_allclose(loss_values(loss, true, z), twin.losses(loss, 1.0 * true, z), atol=1e-12)
    assert np.isfinite(loss_values(loss, np.array([True, False]), np.array([-1e4, 1e4]))).all()
    assert loss_slopes(loss, true, z.astype(np.float32)).dtype == np.float32


class Dense:
    """The W step of a small problem in float64, for `trust_region`; with `line`, of each label by itself."""

    def __init__(self, loss: str, X: Any, Y: Any, H: Any, lam: float) -> None:
        self.loss, self.X, self.true, self.H, self.lam = loss, X, Y > 0, H, lam
        self.values: list[float] = []

    def _z(self, w: Any) -> Any:
        return self.X @ w.reshape(self.X.shape[1], -1) @ self.H.T

    def value(self, w: Any) -> Any:
        self.values.append(float(loss_values(self.loss, self.true, self._z(w)).sum() + 0.5 * self.lam * (w * w).sum()))
        return np.array([self.values[-1]])
        yield

    def gradient(self, w: Any) -> Any:
        self.z = self._z(w)
        D = loss_slopes(self.loss, self.true, self.z)
        return (self.X.T @ D @ self.H + self.lam * w.reshape(self.X.shape[1], -1)).reshape(1, -1)
        yield

    def hessian(self, s: Any) -> Any:
        U = loss_curvatures(self.loss, self.true, self.z) * self._z(s)
        return (self.X.T @ U @ self.H + self.lam * s.reshape(self.X.shape[1], -1)).reshape(1, -1)
        yield


def stopped_at(most: int) -> Any:
    """`Begun.keep` that raises CutError behind so many calls."""
    keep, calls = Begun.keep, 0

    def kept(begun: Begun, state: Any) -> None:
        nonlocal calls
        keep(begun, state)
        calls += 1
        if calls == most:
            raise CutError

    return kept


@pytest.mark.parametrize("loss", LOSSES)
def test_trust_region_goes_on_from_any_product_to_the_same_bits(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = problem()
    H = np.random.default_rng(1).normal(size=(6, 3))

    def solved(folder: Path) -> Any:
        p = Dense(loss, X.toarray().astype(float), Y.toarray(), H, 0.3)
        begun = Begun(folder / "begun")
        return run_alone(trust_region(p, np.zeros((1, 45)), 4, 6, 1e-4, loss == "squared", begun))

    w, f, products = solved(tmp_path / "whole")
    assert products >= (6 if loss == "squared" else 12)
    monkeypatch.setattr(portion, "SECONDS", 0.0)  # each product is kept
    for number in range(1, products + 1):
        with monkeypatch.context() as broken:
            broken.setattr(Begun, "keep", stopped_at(number))
            with pytest.raises(CutError):
                solved(tmp_path / str(number))
        again, f_again, products_again = solved(tmp_path / str(number))
        np.testing.assert_array_equal(again, w)
        assert (f_again, products_again) == (f, products)


@pytest.mark.parametrize("loss", LOSSES)
def test_trust_region_finds_the_minimum_and_never_rises(loss: str) -> None:
    X, Y = problem()
    H = np.random.default_rng(1).normal(size=(6, 3))
    p = Dense(loss, X.toarray().astype(float), Y.toarray(), H, 0.3)
    w, f, _ = run_alone(trust_region(p, np.zeros((1, 45)), 60, 200, 1e-8))
    g = run_alone(p.gradient(w))
    assert np.abs(g).max() < 1e-4 * np.abs(run_alone(p.gradient(np.zeros((1, 45))))).max()
    assert f[0] == run_alone(p.value(w))[0]
    rng = np.random.default_rng(2)
    for _ in range(20):
        assert run_alone(p.value(w + 0.01 * rng.normal(size=w.shape)))[0] > f[0]
    _, f_few, _ = run_alone(trust_region(p, np.zeros((1, 45)), 2, 3, 1e-2))
    assert f[0] < f_few[0] < run_alone(p.value(np.zeros((1, 45))))[0]


def test_lines_of_a_trust_region_are_independent() -> None:
    class Lines:
        """Sums of quartic and quadratic terms, each line its own."""

        scale = np.array([[1.0], [50.0], [0.1]])

        def value(self, w: Any) -> Any:
            return (self.scale * ((w - 1) ** 4 + 0.5 * w * w)).sum(axis=1)
            yield

        def gradient(self, w: Any) -> Any:
            self.w = w
            return self.scale * (4 * (w - 1) ** 3 + w)
            yield

        def hessian(self, s: Any) -> Any:
            return self.scale * (12 * (self.w - 1) ** 2 + 1) * s
            yield

    start = np.array([[5.0, -3.0], [0.0, 9.0], [2.0, 2.0]])
    together = run_alone(trust_region(Lines(), start, 30, 10, 1e-6))[0]
    for i in range(3):
        one = Lines()
        one.scale = Lines.scale[i : i + 1]
        np.testing.assert_allclose(
            run_alone(trust_region(one, start[i : i + 1], 30, 10, 1e-6))[0][0], together[i], rtol=1e-6
        )
    np.testing.assert_allclose(4 * (together - 1) ** 3 + together, 0, atol=1e-3)


def solve(columns: Descent, product: Callable[[Any], Any], most: int) -> None:
    """Steps of conjugate gradients, until all columns have ended."""
    for _ in range(most):
        if columns.progress.going.any():
            columns.step(product(columns.direction))


def test_columns_are_solved_as_the_dense_systems() -> None:
    X = problem(d=20)[0].toarray().astype(np.float64)
    rng, values = np.random.default_rng(0), np.array([3.0, 0.5, 0.0])
    b = rng.normal(size=(20, 3))
    w = np.zeros((20, 3))
    solve(Descent.begin(w, b.copy(), 1e-12), lambda s: X.T @ (X @ s) * values + 0.2 * s, 300)
    for c in range(3):
        np.testing.assert_allclose(w[:, c], np.linalg.solve(values[c] * X.T @ X + 0.2 * np.eye(20), b[:, c]), rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("observed", ["full", "given"])
@pytest.mark.parametrize("loss", LOSSES)
def test_streamed_products_are_those_of_dense_matrices(loss: str, observed: str, bias: bool, tmp_path: Path) -> None:
    """Objective, gradient and Hessian products of a W step, by ranges of columns and rows, against float64."""
    X, Y = problem(n=2500, d=12)
    rng = np.random.default_rng(3)
    mask = rng.random(Y.shape) < (0.4 if observed == "given" else 1.1)
    dataset = xs.convert(X, tmp_path / "data.xmc", labels=Y, memory_limit=LIMIT)
    dataset.with_observed(sp.csr_matrix(mask))
    dense, d, r, lam = X.toarray().astype(float), X.shape[1] + bias, 5, 0.7
    if bias:
        dense = np.hstack([dense, np.ones((2500, 1))])
    W, S, H = (rng.normal(size=(n, r)).astype(np.float32) for n in (d, d, 6))
    with new_factors(tmp_path / "factors", {"H": r}) as writers:
        writers["H"].append(H.ravel())
    learned = Learned.of(dataset, 0.0, 0, bias)
    p = LEMLParameters(r, lam, loss=loss, observed=observed, bias=bias)
    labels, rows = Factor(str(tmp_path / "factors" / "H"), r, 6), ((0, 1024), (1024, 2048), (2048, 2500))
    step = WStep(
        learned, "w/1", p, p.lam_for(0.0), ((0, 2), (2, 5)), rows, labels, None, str(tmp_path / "scratch"),
        ((0, 1000), (1000, 2500)), Holding("products", 20_000, 40_000),
        str(tmp_path / "begun"), Phase("W", ()),
    )  # fmt: skip
    (tmp_path / "scratch").mkdir()

    def asked() -> Any:
        value = yield from step.value(W.reshape(1, -1))
        gradient = yield from step.gradient(W.reshape(1, -1))
        product = yield from step.hessian(S.reshape(1, -1))
        return {"value": value[0], "gradient": gradient.reshape(d, r), "product": product.reshape(d, r)}

    got = run_here(asked(), Notes())
    true, Z = Y.toarray() > 0, dense @ W @ H.T
    value = (twin.losses(loss, 1.0 * true, Z) * mask).sum() + 0.5 * lam * np.square(W, dtype=float).sum()
    assert got["value"] == pytest.approx(value, rel=1e-5)
    for name, pairs, at in (
        ("gradient", loss_slopes(loss, true, Z), W), ("product", loss_curvatures(loss, true, Z) * (dense @ S @ H.T), S)
    ):  # fmt: skip
        expected = dense.T @ (pairs * mask) @ H + lam * at
        np.testing.assert_allclose(got[name], expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_objective_is_that_of_the_factors_and_never_rises(loss: str, given: bool, tmp_path: Path) -> None:
    X, Y = problem()
    mask = sp.csr_matrix(np.random.default_rng(4).random((80, 6)) < 0.6) if given else None
    clf = fit(X, Y, tmp_path, mask, loss=loss, rank=3, alternations=3, cg=20)
    W, H = (factor.astype(np.float64) for factor in clf.model_.factors())
    known = np.ones((80, 6)) if mask is None else mask.toarray()
    f = twin.objective(loss, X.toarray(), Y.toarray(), known, W, H, 0.1)
    assert clf.report_["objective"] == pytest.approx(f, rel=1e-5)
    steps = [f for entry in clf.report_["history"] for f in (entry["objective_w"], entry["objective"])]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(steps))
    assert len(steps) == 6


@pytest.mark.slow
@pytest.mark.parametrize("loss", first(LOSSES, 2))
def test_all_pairs_and_a_mask_of_all_pairs_give_the_same(loss: str, tmp_path: Path) -> None:
    X, Y = problem()
    whole = fit(X, Y, tmp_path, loss=loss, rank=3, alternations=2, newton=8)
    mask = sp.csr_matrix(np.ones((80, 6), np.int8))
    given = fit(X, Y, tmp_path, mask, loss=loss, rank=3, alternations=2, newton=8)
    for a, b in zip(whole.report_["history"], given.report_["history"], strict=True):
        assert b["objective"] == pytest.approx(a["objective"], rel=1e-4)
    W, H = whole.model_.factors()
    V, G = given.model_.factors()
    np.testing.assert_allclose(V @ G.T, W @ H.T, atol=5e-3)


def test_without_weight_it_comes_to_the_closed_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.normal(size=(60, 8)).astype(np.float32))
    three = X @ rng.normal(size=(8, 3)) > 0.5
    # three labels and nearly the same again: as the weight goes, alternating converges as the fourth singular value over
    # the third is small
    Y = sp.csr_matrix(np.hstack([three, three ^ (rng.random((60, 3)) < 0.05)]).astype(np.float32))
    closed = X.toarray() @ twin.reduced_rank(X.toarray().astype(float), Y.toarray(), 3)
    errors = []
    for lam in (1e-1, 1e-3, 1e-5):
        W, H = fit(X, Y, tmp_path, rank=3, lam=lam, alternations=15).model_.factors()
        errors.append(np.abs(X @ W @ H.T - closed).max())
    assert errors[0] < 2e-1
    assert errors[1] < 5e-3
    assert errors[2] < 5e-4
    assert errors[2] < errors[1] < errors[0]


def test_cplst_is_the_closed_form(tmp_path: Path) -> None:
    X, Y = problem(n=120, d=20, k=12)
    dense = X.toarray().astype(float)
    for rank in (1, 4, 12):
        clf = xs.CPLST(rank=rank, iterations=12, cg=300, cg_tol=1e-7, lam=1e-8, bias=False, memory_limit=LIMIT).fit(
            X, Y
        )
        W, H = clf.model_.factors()
        Z = twin.reduced_rank(dense, Y.toarray(), rank)
        np.testing.assert_allclose(X @ W @ H.T, dense @ Z, atol=2e-3)
        fit_of_best = 0.5 * ((Y.toarray() - dense @ Z) ** 2).sum()
        assert clf.report_["objective"] == pytest.approx(fit_of_best, rel=1e-4)
    best, larger = (xs.CPLST(rank=rank, oversampling=0, memory_limit=LIMIT).fit(X, Y).model_ for rank in (12, 13))
    assert [factor.shape[1] for factor in larger.factors()] == [12, 12]  # Z has no rank above K
    for mine, other in zip(best.factors(), larger.factors(), strict=True):
        assert np.array_equal(mine, other)
    with pytest.raises(InputError, match="'iterations' parameter of CPLST"):
        xs.CPLST(rank=3, iterations=0).parameters()


def test_with_the_identity_held_the_w_step_is_ridge_regression() -> None:
    X, Y = problem()
    dense, targets = X.toarray().astype(float), Y.toarray()
    p = Dense("squared", dense, targets, np.eye(6), 0.7)
    w, _, _ = run_alone(trust_region(p, np.zeros((1, 90)), 1, 500, 1e-10, quadratic=True))
    np.testing.assert_allclose(w.reshape(15, 6), twin.ridge(dense, targets, 0.7), atol=1e-6)
    w = np.zeros((15, 6))
    solve(Descent.begin(w, dense.T @ targets, 1e-10), lambda s: dense.T @ (dense @ s) + 0.7 * s, 500)
    np.testing.assert_allclose(w, twin.ridge(dense, targets, 0.7), atol=1e-6)


@pytest.mark.slow
def test_at_full_rank_it_comes_to_the_least_trace_norm(tmp_path: Path) -> None:
    X, Y = problem(n=40, d=8, k=5)
    clf = fit(X, Y, tmp_path, rank=8, lam=0.5, alternations=200)
    assert clf.report_["objective"] == pytest.approx(twin.trace_norm(X.toarray(), Y.toarray(), 0.5, 2000), rel=2e-4)


@pytest.mark.slow
def test_a_label_without_pairs_and_rows_held_out_are_not_learned_from(tmp_path: Path) -> None:
    X, Y = problem(n=300)
    mask = np.random.default_rng(4).random((300, 6)) < 0.6
    mask[:, 2] = False
    for loss in LOSSES:
        clf = fit(X, Y, tmp_path, sp.csr_matrix(mask), loss=loss, rank=3, cg=10, alternations=2, held_out=0.3)
        assert not clf.model_.factors()[1][2].any()
        assert 50 < clf.report_["n_held_out"] < 130
        assert 0 < clf.report_["held_out_P@1"] <= 100
    assert "held_out_auc" not in clf.report_
    with pytest.raises(InputError, match="has no mask of observed entries"):
        xs.LEML(observed="given", memory_limit=LIMIT).fit(X, Y)
    with pytest.raises(InputError, match="has a mask of observed entries already"):
        xs.open_dataset(tmp_path / "data.xmc").with_observed(sp.csr_matrix(mask))
    with pytest.raises(InputError, match="must be a scipy sparse matrix of shape"):
        xs.open_dataset(tmp_path / "data.xmc").with_observed(np.ones((3, 3)))
    assert xs.verify(tmp_path / "data.xmc")["sound"]
    assert xs.verify(tmp_path / "model")["sound"]


def shuffled(n: int, d: int, k: int, seed: int) -> tuple[Any, Any]:
    """Rows of length one that have a common part; labels, some frequent, that have nothing to do with them."""
    rng = np.random.default_rng(seed)
    X = rng.random((n, d)) * (rng.random((n, d)) < 0.3)
    X[:, 0] = 1
    X /= np.sqrt((X**2).sum(axis=1, keepdims=True))
    return X, rng.random((n, k)) < rng.random(k) ** 3


@pytest.mark.parametrize("given", [False, True])
def test_the_scale_of_lam_is_that_of_chance(given: bool, tmp_path: Path) -> None:
    """It is the formula's, of rows that are learned from; and about the largest singular value that chance makes."""
    n, d, k = 3000, 40, 25
    X, Y = shuffled(n, d, k, 0)
    mask = np.random.default_rng(1).random((n, k)) < 0.3 if given else np.ones((n, k), np.bool_)
    dataset = xs.convert(
        sp.csr_matrix(X.astype(np.float32)), tmp_path / "data.xmc", labels=sp.csr_matrix(Y.astype(np.float32))
    )
    dataset.with_observed(sp.csr_matrix(mask))
    for share in (0.0, 0.3):
        learned = Learned.of(dataset, share, 0, True)
        scale = ScaleJob(learned, given).run()["scale"]
        held = learned.kept_out(0, n)
        rows = np.ones(n, np.bool_) if held is None else ~held
        known = mask[rows]
        residual = np.where(known, Y[rows] - (Y[rows] & known).sum(axis=0) / known.sum(axis=0), 0)
        spread = np.square(X[rows] - X[rows].mean(axis=0)).sum(axis=1).mean()
        assert scale == pytest.approx(np.sqrt(spread) * np.linalg.norm(residual, 2), rel=5e-3)
        chance = np.linalg.norm((X[rows] - X[rows].mean(axis=0)).T @ residual, 2)
        assert chance / 2 < scale < 2 * chance
    for loss, slope in (("squared", 1), ("logistic", 2), ("squared_hinge", 4)):
        clf = fit(sp.csr_matrix(X.astype(np.float32)), sp.csr_matrix(Y.astype(np.float32)), tmp_path, lam=None, loss=loss,
                  rank=2, alternations=1, cg=2)  # fmt: skip
        mine = ScaleJob(Learned.of(xs.open_dataset(tmp_path / "data.xmc"), 0.0, 0, False), False).run()["scale"]
        assert clf.report_["lam"] == pytest.approx(slope * mine / 16)
    assert LEMLParameters(lam=None).lam_for(0.0) == 1.0  # rows that are all the same, or no positives
    assert LEMLParameters(lam=3.0).lam_for(7.0) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_best_alternation_is_done_again_with_all_rows(loss: str, tmp_path: Path) -> None:
    """From where it began: with one alternation that is a run with nothing held out. Held-out rows then count."""
    X, Y = problem(n=400)
    held = Learned.of(stored(X, Y, tmp_path), 0.3, 0, False).kept_out(0, 400)
    Y = Y.tolil()
    Y[~held, 2] = 0  # only in rows that are held out
    Y = sp.csr_matrix(Y.tocsr(), dtype=np.float32)
    options = {"loss": loss, "rank": 3, "cg": 10, "newton": 2}
    one = fit(X, Y, tmp_path, **options, alternations=1, held_out=0.3, refit=True)
    again = one.model_.factors()
    all_rows = fit(X, Y, tmp_path, **options, alternations=1).model_.factors()
    for a, b in zip(again, all_rows, strict=True):
        np.testing.assert_array_equal(a, b)
    some = fit(X, Y, tmp_path, **options, alternations=4, held_out=0.3)
    some_factors = some.model_.factors()
    more = fit(X, Y, tmp_path, **options, alternations=4, held_out=0.3, refit=True)
    before, after = some.report_["history"], more.report_["history"]
    assert after[:-1] == before
    assert (after[-1]["stage"], after[-1]["alternation"]) == ("all rows", more.report_["best_pass"])
    assert "held_out_P@1" not in after[-1]
    assert more.report_["held_out_P@1"] == some.report_["held_out_P@1"]
    W, H = (factor.astype(np.float64) for factor in more.model_.factors())
    f = twin.objective(loss, X.toarray(), Y.toarray(), np.ones((400, 6)), W, H, 0.1)
    assert more.report_["objective"] == after[-1]["objective"] == pytest.approx(f, rel=1e-5)
    V, G = some_factors
    only_held = Y[:, 2].toarray()[:, 0] > 0
    assert (X @ W @ H[2])[only_held].mean() > (X @ V @ G[2])[only_held].mean()


@pytest.mark.slow
def test_rows_held_out_tell_when_to_stop_by_their_auc(tmp_path: Path) -> None:
    """The best alternation by AUC is kept, and the figure is that of `evaluate` on just these rows."""
    X, Y = problem(n=600, k=30)
    for loss in ("squared", "logistic"):
        clf = fit(
            X,
            Y,
            tmp_path,
            loss=loss,
            rank=3,
            lam=1e-3,
            cg=10,
            alternations=6,
            held_out=0.3,
            criterion="auc",
            patience=1,
        )
        aucs = [entry["held_out_auc"] for entry in clf.report_["history"]]
        assert aucs.index(max(aucs)) + 1 == clf.report_["best_pass"]
        assert clf.report_["held_out_auc"] == max(aucs)
        held = Learned.of(xs.open_dataset(tmp_path / "data.xmc"), 0.3, 0, False).kept_out(0, 600)
        assert held.sum() == clf.report_["n_held_out"]
        xs.convert(X[held], tmp_path / "held.xmc", labels=Y[held], memory_limit=LIMIT, overwrite=True)
        figures = xs.evaluate(tmp_path / "model", xs.open_dataset(tmp_path / "held.xmc"))
        assert figures["average_auc"] == pytest.approx(clf.report_["held_out_auc"], abs=1e-6)
        assert figures["P@3"] == pytest.approx(clf.report_["held_out_P@3"], abs=1e-3)


def test_a_file_of_pairs_is_a_mask(tmp_path: Path) -> None:
    X, Y = problem()
    mask = sp.csr_matrix(np.random.default_rng(4).random((80, 6)) < 0.6)
    rows, labels = mask.nonzero()
    order = np.random.default_rng(5).permutation(len(rows))
    (tmp_path / "known.txt").write_text("".join(f"{rows[i]} {labels[i]}\n" for i in order))
    sp.save_npz(tmp_path / "X.npz", X)
    sp.save_npz(tmp_path / "Y.npz", Y)
    from xmc_stream.convert import convert_report

    files = {"labels": tmp_path / "Y.npz", "observed": tmp_path / "known.txt", "memory_limit": LIMIT}
    dataset, _ = convert_report(tmp_path / "X.npz", tmp_path / "a.xmc", **files)
    for matrix in (dataset.observed_rows(), dataset.observed_columns()):
        block, kind = (
            matrix.block(0, matrix.n_lines),
            sp.csr_matrix if matrix.encoding == "csr_matrix" else sp.csc_matrix,
        )
        assert (kind((np.ones(len(block.indices)), block.indices, block.indptr), shape=(80, 6)) != mask).nnz == 0


def test_predictions_and_figures_are_those_of_the_scores(tmp_path: Path) -> None:
    X, Y = problem(n=2500, k=30)
    clf = fit(X, Y, tmp_path, rank=5, alternations=2, bias=True)
    W, H = clf.model_.factors()
    assert W.shape == (X.shape[1] + 1, 5)
    Z = (X @ W[:-1] + W[-1]) @ H.T
    labels, scores = clf.predict_topk(xs.open_dataset(tmp_path / "data.xmc"), k=3)
    np.testing.assert_allclose(scores, -np.sort(-Z, axis=1)[:, :3], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(Z, labels, axis=1), scores, atol=1e-5)
    figures = xs.evaluate(tmp_path / "model", xs.open_dataset(tmp_path / "data.xmc"), ks=(1, 3))
    true = Y.toarray() > 0
    hits = np.take_along_axis(true, labels, axis=1)
    assert figures["P@1"] == pytest.approx(100 * hits[:, 0].mean())
    assert figures["hamming_loss"] == pytest.approx(((Z > 0.5) != true).mean(), abs=1e-4)
    aucs = [(z[t][:, None] > z[~t]).mean() if 0 < t.sum() < 30 else 0.0 for z, t in zip(Z, true, strict=True)]
    assert figures["average_auc"] == pytest.approx(np.mean(aucs), abs=1e-4)
    at_zero = xs.evaluate(tmp_path / "model", xs.open_dataset(tmp_path / "data.xmc"), ks=(1,), threshold=0.0)
    assert at_zero["hamming_loss"] == pytest.approx(((Z > 0) != true).mean(), abs=1e-4)
