"""Kernels of the group lasso against plain NumPy: losses, gradients, curvature, steps, proximal operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import grouplasso as twin

from xmc_stream.grouplasso.kernels.descent import (
    BACK,
    KEPT,
    LARGEST,
    LINEAR,
    N_SUMS,
    PENALTY,
    SQUARE,
    VIOLATION,
    Problem,
    Visited,
    add_squares,
    draw,
    new_step,
    penalties,
    propose,
    prox,
    step_rows,
    violation,
    visit,
)  # fmt: skip
from xmc_stream.grouplasso.kernels.margins import (
    LANES,
    PAD,
    Lines,
    add_entries,
    add_gradients,
    add_scores,
    fast_exp,
    move_entries,
    new_sums,
    settle,
)  # fmt: skip
from xmc_stream.grouplasso.parameters import LOSSES
from xmc_stream.kernels.blocks import CSR
from xmc_stream.kernels.instructions import total
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.lines import lanes

losses = pytest.mark.parametrize("loss", LOSSES)


def made(loss: str, seed: int, n: int = 30, d: int = 6, k: int = 5) -> tuple[Any, Any, Any]:
    """X, Y and W with a few zeros; rows with no label, with one, and, where the loss takes them, with several."""
    rng = np.random.default_rng(seed)
    X = (rng.normal(size=(n, d)) * (rng.random((n, d)) < 0.6)).astype(np.float32)
    Y = np.arange(k) == rng.integers(0, k, n)[:, None]
    if loss in ("multitask", "label-ranking"):
        Y |= rng.random((n, k)) < 0.3
    Y[: n // 8] = False
    W = (rng.normal(size=(d, k)) * (rng.random((d, 1)) < 0.7)).astype(np.float32)
    return X, Y, W


def csc(X: Any) -> CSR:
    columns = [np.flatnonzero(column) for column in X.T]
    values = np.concatenate([column[rows] for column, rows in zip(X.T, columns, strict=True)])
    indptr = np.cumsum([0, *map(len, columns)])
    return CSR(indptr.astype(np.int64), np.concatenate(columns).astype(np.int32), values.astype(np.float32))


def wide(W: Any) -> Any:
    out = np.zeros((len(W), max(LANES, lanes(W.shape[1]))), np.float32)
    out[:, : W.shape[1]] = W
    return out


def settled(loss: str, X: Any, Y: Any, W: Any) -> tuple[Lines, float]:
    """The array of a loss, and the sum of the losses."""
    labels = [np.flatnonzero(row) for row in Y]
    indptr = np.cumsum([0, *map(len, labels)]).astype(np.int64)
    values = np.zeros((len(X), wide(W).shape[1]), np.float32)
    lines = Lines(values, np.zeros(len(X), np.float32), indptr, np.concatenate(labels).astype(np.int32))
    block = csc(X)
    add_scores(block.indptr, block.indices, block.values, 0, wide(W), values)
    return lines, settle(LOSSES.index(loss), W.shape[1], lines)


def problem(
    loss: str, n: int, k: int, lam1: float = 0.0, lam2: float = 0.1, ridge: float = 0.0, search: bool = True
) -> Problem:
    bound = {"multitask": 2.0, "logistic": 0.5}.get(loss, 2.0 * k)
    scale = (1.0 if loss == "logistic" else 2.0) / n
    return Problem(LOSSES.index(loss), k, n, scale, lam1, lam2, ridge, search, bound)


@losses
@pytest.mark.parametrize("k", [2, 5, 16, 21])
def test_losses_gradients_and_curvature_are_the_twins(loss: str, k: int) -> None:
    X, Y, W = made(loss, k, k=k, n=100)
    lines, summed = settled(loss, X, Y, W)
    exact = [array.astype(np.float64) for array in (X, W)]
    assert summed / len(X) == pytest.approx(twin.losses(loss, exact[0], Y, exact[1]), rel=1e-6)
    g, h = (of(loss, exact[0], Y, exact[1]) for of in (twin.gradient, twin.curvature))
    block, scale = csc(X), (1.0 if loss == "logistic" else 2.0) / len(X)
    for j in range(X.shape[1]):
        sums = new_sums(lines.values.shape[1])
        begin, end = block.indptr[j], block.indptr[j + 1]
        middle = (begin + end) // 2
        for part in ((begin, middle), (middle, end)):  # in pieces, as a long column comes
            add_entries(LOSSES.index(loss), *part, begin, 0, block.indices, block.values, lines, sums)
        got = sums.g + sums.near_g, sums.h + sums.near_h
        np.testing.assert_allclose(scale * got[0][:k], g[j], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scale * got[1][:k], h[j], rtol=1e-4, atol=1e-5)
        assert not got[0][k:].any()


@losses
def test_gradients_are_those_of_finite_differences(loss: str) -> None:
    X, Y, W = made(loss, 3)
    X, W = X.astype(np.float64), W.astype(np.float64)
    g = twin.gradient(loss, X, Y, W)
    for j, r in np.ndindex(*W.shape):
        step = np.zeros_like(W)
        step[j, r] = 1e-6
        rise = twin.losses(loss, X, Y, W + step) - twin.losses(loss, X, Y, W - step)
        assert g[j, r] == pytest.approx(rise / 2e-6, rel=1e-5, abs=1e-7)


@losses
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-4, 1e-2, 1.0, 30.0]))
def test_the_constant_bounds_the_curvature_and_a_step_tells_what_it_gained(loss: str, seed: int, size: float) -> None:
    """The losses lie below their quadratic bound for each feature; `move_entries` gives how far they are above the tangent."""
    X, Y, W = made(loss, seed, n=15)
    rng, k = np.random.default_rng(seed), W.shape[1]
    j = int(rng.integers(X.shape[1]))
    d = (size * rng.normal(size=k)).astype(np.float32)
    exact = X.astype(np.float64), W.astype(np.float64)
    after = exact[1].copy()
    after[j] += d
    f, moved = (twin.losses(loss, exact[0], Y, w) for w in (exact[1], after))
    above = moved - f - twin.gradient(loss, exact[0], Y, exact[1])[j] @ d
    constant = problem(loss, len(X), k).curvature * (exact[0][:, j] ** 2).sum() / len(X)
    assert -1e-9 <= above <= 0.5 * constant * float((d.astype(np.float64) ** 2).sum()) * (1 + 1e-6) + 1e-9

    lines, _ = settled(loss, X, Y, W)
    block, sums = csc(X), new_sums(lines.values.shape[1])
    step = wide(d[None])[0]
    arguments = LOSSES.index(loss), block.indptr[j], block.indptr[j + 1], block.indices, block.values
    got = move_entries(*arguments, step, lines, sums, 0.0) / len(X)
    rounding = 1e-6 * float(np.abs(d).max()) ** 2 + 3e-7 * float(np.abs(d).max())
    assert got == pytest.approx(above, rel=2e-4, abs=rounding + 1e-9)
    there, _ = settled(loss, X, Y, after.astype(np.float32))
    counted = Y.any(axis=1) | (loss == "multitask")
    np.testing.assert_allclose(
        lines.values[counted, :k], there.values[counted, :k], rtol=1e-3, atol=2e-4 * max(1.0, size)
    )
    assert (lines.values[:, k:] == (0 if loss == "logistic" else PAD)).all()


@settings(max_examples=50)
@given(
    v=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    lam1=st.floats(0, 2),
    lam2=st.floats(0, 3),
    ridge=st.floats(0, 2),
)
def test_the_proximal_operator_minimises(v: list[float], lam1: float, lam2: float, ridge: float) -> None:
    at, rng = np.array(v), np.random.default_rng(0)
    w = at.copy()
    kept = prox(w, len(w), lam1, lam2, ridge)
    np.testing.assert_allclose(w, twin.prox(at, lam1, lam2, ridge), atol=1e-12)
    assert kept == bool(w.any()) or np.abs(w).max(initial=0) < 1e-150  # whose square is 0
    value = 0.5 * ((w - at) ** 2).sum() + twin.penalty(w[None], lam1, lam2, ridge)
    for size in (1e-4, 1e-2, 1.0):
        other = w + size * rng.normal(size=len(w))
        assert value <= 0.5 * ((other - at) ** 2).sum() + twin.penalty(other[None], lam1, lam2, ridge) + 1e-12


@losses
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("lams", [(0.0, 0.02, 0.0), (0.01, 0.01, 0.0), (0.0, 0.0, 0.1)])
def test_a_visit_lowers_the_objective_and_keeps_the_array(loss: str, search: bool, lams: tuple[float, ...]) -> None:
    X, Y, W = made(loss, 11, n=60)
    k, of = W.shape[1], problem(loss, len(X), W.shape[1], *lams, search)
    lines, _ = settled(loss, X, Y, W)
    weights, every = wide(W), np.arange(X.shape[1])
    visited = Visited(np.zeros(2), np.zeros(1, np.bool_), np.zeros(1, np.bool_))
    exact = X.astype(np.float64)
    for j in [*every, *every[:3]]:
        now = weights[:, :k].astype(np.float64)
        before = twin.losses(loss, exact, Y, now) + twin.penalty(now, *lams)
        g = twin.gradient(loss, exact, Y, now)[j]
        of_row = float(np.linalg.norm(twin.soft(g + lams[2] * now[j], lams[0])))
        sums, step = new_sums(weights.shape[1]), new_step(weights.shape[1])
        was = visited.violation[0]
        visit(np.array([j]), csc(X), weights, of, lines, sums, step, visited)
        wrong = abs(of_row - lams[1]) if now[j].any() else max(of_row - lams[1], 0)
        assert visited.violation[0] - was == pytest.approx(wrong, rel=1e-3, abs=1e-5)
        now = weights[:, :k].astype(np.float64)
        assert twin.losses(loss, exact, Y, now) + twin.penalty(now, *lams) <= before + 1e-6
        assert visited.kept[0] == now[j].any()
    there, _ = settled(loss, X, Y, weights[:, :k])
    counted = Y.any(axis=1) | (loss == "multitask")
    np.testing.assert_allclose(lines.values[counted], there.values[counted], rtol=1e-4, atol=1e-4)


def test_a_constant_step_is_the_twins() -> None:
    X, Y, W = made("multiclass", 5)
    of = problem("multiclass", len(X), W.shape[1], 0.01, 0.05, 0.0, False)
    lines, _ = settled("multiclass", X, Y, W)
    sums, step, block = new_sums(16), new_step(16), csc(X)
    begin, end = block.indptr[1:3]
    add_entries(0, begin, end, begin, 0, block.indices, block.values, lines, sums)
    square = add_squares(begin, end, block.values, 0.0)
    propose(wide(W)[1], square, of, sums, step)
    length = of.curvature * (X[:, 1].astype(np.float64) ** 2).sum() / len(X)
    g = twin.gradient("multiclass", X.astype(np.float64), Y, W.astype(np.float64))[1]
    after = twin.prox(W[1] - g / length, 0.01 / length, 0.05 / length)
    np.testing.assert_allclose(step.d[: W.shape[1]], after - W[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("loss", "seed", "j"), [("multiclass", 6, 5), ("logistic", 32, 3), ("label-ranking", 37, 1)])
def test_a_step_that_lowers_too_little_is_halved(loss: str, seed: int, j: int) -> None:
    X, Y, W = made(loss, seed, n=15)
    W *= np.float32(4)
    k, of, block = W.shape[1], problem(loss, len(X), W.shape[1], 0.0, 0.01), csc(X)
    begin, end = block.indptr[j : j + 2]
    lines, _ = settled(loss, X, Y, W)
    weights, sums, step = wide(W), new_sums(LANES), new_step(LANES)
    add_entries(of.loss, begin, end, begin, 0, block.indices, block.values, lines, sums)
    propose(weights[j], add_squares(begin, end, block.values, 0.0), of, sums, step)
    whole = step.d[:k].copy()

    def objective(share: float) -> float:
        after = W.astype(np.float64)
        after[j] += share * whole
        return twin.losses(loss, X.astype(np.float64), Y, after) + twin.penalty(after, 0.0, 0.01)

    promised = float(step.noted[1])
    assert objective(1.0) - objective(0.0) > 0.01 * promised  # the whole step is too long
    visited = Visited(np.zeros(2), np.zeros(1, np.bool_), np.zeros(1, np.bool_))
    lines, _ = settled(loss, X, Y, W)
    visit(np.array([j]), block, weights, of, lines, sums, step, visited)
    np.testing.assert_allclose(weights[j, :k] - W[j], 0.5 * whole, rtol=1e-5, atol=1e-6)
    assert objective(0.5) - objective(0.0) <= 0.005 * promised
    there, _ = settled(loss, X, Y, weights[:, :k])
    counted = Y.any(axis=1)
    np.testing.assert_allclose(lines.values[counted, :k], there.values[counted, :k], rtol=1e-4, atol=1e-4)


@losses
def test_a_feature_drawn_twice_in_a_batch_is_visited_twice(loss: str) -> None:
    X, Y, W = made(loss, 4, n=60)
    of = problem(loss, len(X), W.shape[1], 0.0, 0.002, 0.0, False)
    found = []
    for batches in ([[0, 3, 0]], [[0], [3], [0]]):
        lines, _ = settled(loss, X, Y, W)
        weights, sums, step, violated = wide(W), new_sums(LANES), new_step(LANES), np.zeros(2)
        for order in batches:
            visited = Visited(violated, np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_))
            visit(np.array(order), csc(X), weights, of, lines, sums, step, visited)
        found.append((weights, lines.values, violated))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    assert (found[0][0][[0, 3]] != wide(W)[[0, 3]]).any(axis=1).all()


@losses
def test_gradients_by_windows_of_rows_are_those_of_all_rows(loss: str) -> None:
    X, Y, W = made(loss, 2, n=150)
    lines, _ = settled(loss, X, Y, W)
    block, width = csc(X), lines.values.shape[1]
    found = []
    for step in (150, 37, 1):
        at = block.indptr[:-1].copy()
        near, whole = np.zeros((X.shape[1], width), np.float32), np.zeros((X.shape[1], width))
        for first in range(0, 150, step):
            some = slice(first, min(first + step, 150))
            part = Lines(lines.values[some], lines.active[some], lines.y_indptr[first : some.stop + 1], lines.y_indices)
            add_gradients(LOSSES.index(loss), block, at, first, part, new_sums(width), near, whole)
        found.append(whole)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    scale = (1.0 if loss == "logistic" else 2.0) / len(X)
    exact = twin.gradient(loss, X.astype(np.float64), Y, W.astype(np.float64))
    np.testing.assert_allclose(scale * found[0][:, : W.shape[1]], exact, rtol=1e-4, atol=1e-5)


def test_steps_of_rows_and_their_sums_are_the_twins() -> None:
    rng = np.random.default_rng(1)
    v, g, w = (wide(rng.normal(size=(40, 5))) for _ in range(3))
    g *= np.float32(0.3)
    of, out, sums = problem("multiclass", 9, 5, 0.05, 0.4), np.zeros_like(v), np.zeros(N_SUMS)
    step_rows(v, g, w, 2.0, of, out, sums)
    exact = [array[:, :5].astype(np.float64) for array in (v, g, w)]
    after = np.array([twin.prox(a - b / 2.0, 0.025, 0.2) for a, b in zip(exact[0], exact[1], strict=True)])
    np.testing.assert_allclose(out[:, :5], after, atol=1e-6)
    step = after - exact[0]
    norms = np.array([np.linalg.norm(twin.soft(row, 0.05)) for row in exact[1]])
    wrong = np.abs(norms - 0.4)
    wanted = {
        LINEAR: (exact[1] * step).sum(), SQUARE: (step**2).sum(), PENALTY: twin.penalty(after, 0.05, 0.4),
        BACK: -(step * (after - exact[2])).sum(), VIOLATION: wrong.sum(), LARGEST: wrong.max(),
        KEPT: after.any(axis=1).sum(),
    }  # fmt: skip
    for name, value in wanted.items():
        assert sums[name] == pytest.approx(value, rel=1e-5)
    each = np.empty(40)
    penalties(out, of, each)
    assert each.sum() == pytest.approx(wanted[PENALTY], rel=1e-5)


def test_the_violation_is_that_of_the_rows_state() -> None:
    g = np.array([0.3, -0.4])
    assert violation(np.zeros(2, np.float32), g, 2, 0.0, 0.6, 0.0) == 0
    assert violation(np.zeros(2, np.float32), g, 2, 0.0, 0.4, 0.0) == pytest.approx(0.1)
    assert violation(np.ones(2, np.float32), g, 2, 0.0, 0.6, 0.0) == pytest.approx(0.1)
    assert violation(np.zeros(2, np.float32), g, 2, 0.3, 0.05, 0.0) == pytest.approx(0.05)


def test_exponentials_sums_and_draws() -> None:
    xs = np.concatenate([np.linspace(-80, 80, 4001), np.linspace(-0.1, 0.1, 401)]).astype(np.float32)
    got = np.array([fast_exp(x) for x in xs], np.float64)
    assert np.abs(got / np.exp(xs.astype(np.float64)) - 1).max() < 3e-7
    assert np.isfinite([fast_exp(np.float32(x)) for x in (-1e6, 1e6)]).all()
    values = np.random.default_rng(0).random(48).astype(np.float32)
    summed = kernel(lambda array: total(array))
    assert summed(values) == total(values) == pytest.approx(values.sum(dtype=np.float64), rel=1e-6)
    out = np.empty(20_000, np.int64)
    draw(7, np.uint64(2**63 + 5), out)
    counts = np.bincount(out, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - len(out) / 7).max() < 5 * np.sqrt(len(out) / 7)
