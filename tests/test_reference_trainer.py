"""The reference trainer of docs/examples: that it is right, and that the library learns what it learns.

Both end where no row violates by more than tol. With the squared hinge a row then adds C_i tol^2 / 2 to the duality gap at
most. So F is above the optimum by less than `gap_of(...)`. F is strongly convex by tau: ||w - w*||^2 <= 2 gap / tau.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.tools import ROOT, load_tool
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.svm import LinearSVC

import xmc_stream as xs

reference = load_tool("reference_ppdsparse", "docs/examples")

Floats = NDArray[np.float64]

TOL = 1e-5  # the least that the library takes
ALL_ROWS_TOL = 1e-4  # all rows at once: alpha and v are float32, and violations of C <= 4 are as exact as this
REFERENCE_TOL = 1e-6
FIRST = 1e6  # what stands for an infinite bias: of labels of every row, and of none


class Drawn(NamedTuple):
    """A small set, rows that are held out, and the parameters of a training."""

    X: sp.csr_array
    Y: sp.csr_array
    held_out: sp.csr_array
    parameters: dict[str, float]

    @property
    def learned(self) -> list[int]:
        """Labels that some rows have and others have not."""
        counts = np.asarray(self.Y.sum(axis=0))
        return np.flatnonzero((counts > 0) & (counts < self.Y.shape[0])).tolist()


def rows(rng: np.random.Generator, n: int, d: int, density: float = 0.3) -> Floats:
    """Sparse rows of length one, as float32 has them."""
    X = rng.normal(size=(n, d)) * (rng.random((n, d)) < density)
    return (X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-6)).astype(np.float32).astype(np.float64)


def noisy_scores(rng: np.random.Generator, X: Floats, k: int) -> Floats:
    return X @ rng.normal(size=(X.shape[1], k)) + 0.3 * rng.normal(size=(len(X), k))


def multi_class() -> tuple[Floats, Any]:
    rng = np.random.default_rng(0)
    X = rows(rng, 100, 30)
    return X, np.eye(5)[noisy_scores(rng, X, 5).argmax(axis=1)]


def multi_label() -> tuple[Floats, Any]:
    rng = np.random.default_rng(1)
    X = rows(rng, 60, 25)
    scores = noisy_scores(rng, X, 6)
    return X, scores > np.quantile(scores, 0.7, axis=0)


def rare_labels() -> tuple[Floats, Any]:
    """Labels of few rows: most negatives are outside the first active sets, so searches have to find them."""
    rng = np.random.default_rng(2)
    X = rows(rng, 300, 40, density=0.15)
    scores = noisy_scores(rng, X, 4)
    return X, scores >= np.sort(scores, axis=0)[-np.array([1, 2, 4, 8]), np.arange(4)]


def odd_rows() -> tuple[Floats, Any]:
    """Empty rows, rows without labels, equal rows of other labels, a label of no row and one of every row."""
    rng = np.random.default_rng(3)
    X = rows(rng, 80, 20) * rng.choice([0.5, 1.0, 2.0], (80, 1))
    scores = noisy_scores(rng, X, 6)
    Y = scores > np.quantile(scores, 0.8, axis=0)
    X[[0, 7, 70]], X[30], X[:, 11] = 0.0, X[31], 0.0
    Y[[5, 70]], Y[30] = False, ~Y[31]
    Y[:, 2], Y[:, 4] = False, True
    return X, Y


def wide() -> tuple[Floats, Any]:
    """More features than rows."""
    rng = np.random.default_rng(4)
    X = rows(rng, 50, 250, density=0.1)
    scores = noisy_scores(rng, X, 3)
    return X, scores > np.quantile(scores, 0.6, axis=0)


SETS: dict[str, tuple[Callable[[], tuple[Floats, Any]], dict[str, float]]] = {
    "multi-class": (multi_class, {"lam": 0.01, "tau": 1.0, "C": 1.0, "positive_weight": 1.0}),
    "multi-label": (multi_label, {"lam": 0.5, "tau": 0.5, "C": 1.5, "positive_weight": 2.0}),
    "rare labels": (rare_labels, {"lam": 0.05, "tau": 1.0, "C": 4.0, "positive_weight": 1.0}),
    "odd rows": (odd_rows, {"lam": 0.2, "tau": 2.0, "C": 0.7, "positive_weight": 1.5}),
    "wide": (wide, {"lam": 0.1, "tau": 1.0, "C": 2.0, "positive_weight": 1.0}),
}
each_set = pytest.mark.parametrize("name", SETS)


@cache
def drawn(name: str) -> Drawn:
    draw, parameters = SETS[name]
    X, Y = draw()
    held_out = rows(np.random.default_rng(99), 60, X.shape[1])
    return Drawn(sp.csr_array(X), sp.csr_array(Y.astype(np.float64)), sp.csr_array(held_out), parameters)


@cache
def solved(name: str) -> tuple[Floats, Floats]:
    """W (1 + D, K) and alpha (N, K) of the reference."""
    data = drawn(name)
    classes = [reference.problem(data.X, data.Y, k, **data.parameters) for k in range(data.Y.shape[1])]
    W, alpha = zip(*(reference.solve(p, tol=REFERENCE_TOL) for p in classes), strict=True)
    return np.column_stack(W), np.column_stack(alpha)


# The formulas once more, dense and without the reference: what both are measured by.


def loss_weights(data: Drawn) -> Floats:
    """C_ik (N, K)."""
    C = data.parameters["C"]
    return np.where(data.Y.toarray() > 0, C * data.parameters["positive_weight"], C)


def primal(data: Drawn, W: Floats) -> Floats:
    """F of each class (K,), by W (1 + D, K)."""
    lam, tau = data.parameters["lam"], data.parameters["tau"]
    margins = np.where(data.Y.toarray() > 0, 1.0, -1.0) * (W[0] + data.X.toarray() @ W[1:])
    losses = (loss_weights(data) * np.maximum(0.0, 1.0 - margins) ** 2 / 2).sum(axis=0)
    return lam * np.abs(W[1:]).sum(axis=0) + tau / 2 * (W**2).sum(axis=0) + losses


def of_alpha(data: Drawn, alpha: Floats) -> tuple[Floats, Floats]:
    """W (1 + D, K) and G (K,), by alpha (N, K)."""
    lam, tau = data.parameters["lam"], data.parameters["tau"]
    signed = np.where(data.Y.toarray() > 0, 1.0, -1.0) * alpha
    V = data.X.toarray().T @ signed
    W = np.vstack([signed.sum(axis=0), np.where(np.abs(V) > lam, V - lam * np.sign(V), 0.0)]) / tau
    return W, tau / 2 * (W**2).sum(axis=0) + (alpha**2 / (2 * loss_weights(data)) - alpha).sum(axis=0)


def gap_of(data: Drawn, tol: float) -> Floats:
    """The largest duality gap of each class where no row violates by more than tol."""
    return loss_weights(data).sum(axis=0) * tol**2 / 2


def distance(data: Drawn, gap: Floats) -> Floats:
    """How far w of such a gap is from the optimum."""
    return np.sqrt(2 * gap / data.parameters["tau"])


@each_set
def test_duality_gap_of_the_reference_says_that_it_is_at_the_optimum(name: str) -> None:
    data, (W, alpha) = drawn(name), solved(name)
    learned = data.learned
    of_the_dual, G = of_alpha(data, alpha)
    np.testing.assert_allclose(W[:, learned], of_the_dual[:, learned], atol=1e-12)
    assert alpha.min() >= 0
    F = primal(data, of_the_dual)
    gap = (F + G)[learned]
    rounding = 1e-14 * F[learned]
    assert (gap >= -rounding).all()
    assert (gap <= gap_of(data, REFERENCE_TOL)[learned] + rounding).all()
    for k in learned:  # its own formulas are these
        p = reference.problem(data.X, data.Y, k, **data.parameters)
        assert reference.objective(p, W[:, k]) == pytest.approx(F[k], rel=1e-12)
        assert reference.dual_objective(p, W[:, k], alpha[:, k]) == pytest.approx(G[k], rel=1e-12)


@each_set
def test_alpha_of_the_reference_is_the_slope_of_the_loss(name: str) -> None:
    data, (W, alpha) = drawn(name), solved(name)
    learned = data.learned
    W, y = W[:, learned], np.where(data.Y.toarray() > 0, 1.0, -1.0)[:, learned]
    margins = y * (W[0] + data.X.toarray() @ W[1:])
    C = loss_weights(data)[:, learned]
    assert (np.abs(alpha[:, learned] - C * np.maximum(0.0, 1.0 - margins)) <= 1.001 * C * REFERENCE_TOL).all()


@each_set
def test_reference_without_l1_is_what_liblinear_finds(name: str) -> None:
    data = drawn(name)
    data = data._replace(parameters={**data.parameters, "lam": 0.0})
    C, tau, weight = (data.parameters[word] for word in ("C", "tau", "positive_weight"))
    for k in data.learned:
        w, _ = reference.solve(reference.problem(data.X, data.Y, k, **data.parameters), tol=REFERENCE_TOL)
        svm = LinearSVC(
            dual=True, C=C / (2 * tau), class_weight={1: weight}, tol=1e-10, max_iter=10**6, random_state=0
        ).fit(data.X, np.where(data.Y[:, [k]].toarray().ravel() > 0, 1, -1))
        theirs = np.append(svm.intercept_, svm.coef_[0])
        assert np.linalg.norm(w - theirs) <= distance(data, gap_of(data, REFERENCE_TOL))[k] + 1e-8


@each_set
def test_reference_with_l1_is_what_a_quasi_newton_method_finds(name: str) -> None:
    data, (W, _) = drawn(name), solved(name)
    X, d = np.hstack([np.ones((data.X.shape[0], 1)), data.X.toarray()]), data.X.shape[1]
    lam, tau, F = data.parameters["lam"], data.parameters["tau"], primal(data, W)
    for k in data.learned:
        y, C = np.where(data.Y[:, [k]].toarray().ravel() > 0, 1.0, -1.0), loss_weights(data)[:, k]

        def of(u: Floats, y: Floats = y, C: Floats = C) -> tuple[float, Floats]:
            """F and its slopes by the bias and two parts of w, both above 0: w = u_1 - u_2, so |w| = u_1 + u_2."""
            w = np.append(u[0], u[1 : d + 1] - u[d + 1 :])
            short = np.maximum(0.0, 1.0 - y * (X @ w))
            slopes = tau * w - X.T @ (C * short * y)
            f = lam * u[1:].sum() + tau / 2 * w @ w + C @ short**2 / 2
            return f, np.concatenate([slopes[:1], lam + slopes[1:], lam - slopes[1:]])

        bounds = [(None, None)] + [(0.0, None)] * (2 * d)
        options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 0.0, "gtol": 1e-6}
        found = minimize(of, np.zeros(2 * d + 1), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        assert F[k] <= found.fun + gap_of(data, REFERENCE_TOL)[k] + 1e-14 * F[k]
        assert found.fun <= F[k] * (1 + 1e-7)


@each_set
@pytest.mark.parametrize(("all_rows", "tol"), [(False, TOL), (True, ALL_ROWS_TOL)], ids=["rounds", "all rows"])
def test_library_learns_what_the_reference_learns(name: str, all_rows: bool, tol: float) -> None:
    data, (W, _) = drawn(name), solved(name)
    learned = data.learned
    # The same problem: C and positive_weight given, as they would follow the data; scores without groups of labels, and so
    # without implied ones (guide); all weights, whole (prune, weight_type); rows as they are (normalize). To its end: no cap
    # on rounds.
    clf = xs.PPDSparse(
        **data.parameters, guide=0, prune=0, weight_type="float32", tol=TOL, max_rounds=None, epochs=2000,
        all_rows=all_rows, normalize=None, memory_limit="4GB", threads=1,
    ).fit(data.X, data.Y)  # fmt: skip
    assert clf.report_["n_open"] == 0
    theirs = np.vstack([clf.model_.bias(), clf.model_.to_scipy().toarray()]).astype(np.float64)

    gap, their_gap = gap_of(data, REFERENCE_TOL)[learned], gap_of(data, tol)[learned]
    F, F_theirs = primal(data, W)[learned], primal(data, theirs)[learned]
    assert (F_theirs >= F - gap).all()
    assert (F_theirs <= F + their_gap).all()
    assert clf.report_["objective"] == pytest.approx(F.sum(), rel=1e-6)  # of the library's losses in float32

    apart = distance(data, gap) + distance(data, their_gap)
    assert (np.linalg.norm(theirs[:, learned] - W[:, learned], axis=0) <= apart).all()

    finite = np.nan_to_num(W, posinf=FIRST, neginf=-FIRST)
    k = W.shape[1]  # so labels of no row are seen to come last
    for X in (data.X, data.held_out):
        scores = finite[0] + X @ finite[1:]
        # scores of the library are float32: of about this many terms, each rounded
        rounding = np.finfo(np.float32).eps * (1 + np.diff(X.indptr).max()) * np.abs(scores[:, learned]).max()
        near = 2 * (np.sqrt(1 + X.multiply(X).sum(axis=1)).max() * apart.max() + rounding)
        same_ranking(scores, clf.predict_topk(X, k=k)[0], reference.predict_topk(X, W, k), near)


def same_ranking(scores: Floats, got: Any, expected: Any, near: float) -> None:
    """Each place has the same label, or one of a score as near as this."""
    assert all(len(set(labels)) == len(labels) for labels in got.tolist())
    their, best = (np.take_along_axis(scores, labels.astype(np.int64), axis=1) for labels in (got, expected))
    assert (np.abs(their - best) <= near).all()
    assert (got == expected).mean() > 0.99  # ties are few


def test_example_says_how_near_it_is_and_what_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs/examples/reference_ppdsparse.py"), run_name="__main__")
    said = re.fullmatch(
        r"objective ([\d.]+), duality gap ([\d.e-]+); P@1 on rows held out: ([\d.]+) %\n", capsys.readouterr().out
    )
    assert said is not None
    objective, gap, precision = map(float, said.groups())
    assert gap < 1e-3 * objective
    assert precision > 2 * 100 / 6  # twice what a guess among six labels has
