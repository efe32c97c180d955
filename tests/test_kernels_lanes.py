"""Classes beside each other on all rows: against the plain twin, alone and in company, and at the optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.classes import Parameters, Rows, biases, lams, losses, random_rows, sparse
from helpers.compiler import unless_plain
from numpy.typing import NDArray
from reference import dcd as twin
from reference import lanes as reference

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.kernels.dcd import ONCE, Steps, Times
from xmc_stream.linear.kernels.lanecd import begin_lanes, descend_lanes, new_lanes
from xmc_stream.linear.kernels.rows import row_squares
from xmc_stream.ppdsparse.solver import penalty_of, solve_on_all_rows

# uncompiled, numpy says so when a key wraps around, and when a row of nothing at all divides by its norm
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")

SEED = 7
N, D = 40, 12
CLASSES = unless_plain(2 * LANES + 3, LANES + 1)
EPOCHS = unless_plain(400, 150)


class Solution:
    """Of each class: statistics, losses, alpha (n_classes, N), w (n_classes, D)."""

    def __init__(self, n_classes: int) -> None:
        self.statistics, self.losses = np.full((n_classes, 4), np.nan), np.full(n_classes, np.nan)
        self.alpha, self.kept = np.zeros((n_classes, N)), np.zeros((n_classes, N), np.bool_)
        self.w = np.zeros((n_classes, D), np.float32)

    def bits(self, c: int) -> tuple[bytes, ...]:
        return tuple(array[c].tobytes() for array in (self.statistics, self.losses, self.alpha, self.kept, self.w))


def labels_of(seed: int = 0, n_classes: int = CLASSES) -> NDArray[np.bool_]:
    """Whether a row has a label (N, n_classes): some labels are rare, one no row has, and one each row."""
    rng = np.random.default_rng(seed)
    Y = rng.random((N, n_classes)) < np.linspace(0.05, 0.6, n_classes)
    Y[:, 3], Y[:, 5] = False, True
    return Y


def block_of(Y: NDArray[np.bool_]) -> Rows:
    labels, rows = np.nonzero(Y.T)
    return Rows(np.searchsorted(labels, np.arange(Y.shape[1] + 1)).astype(np.int64), rows.astype(np.int32), np.empty(0))


def solved(X: NDArray[np.float64], Y: NDArray[np.bool_], p: Parameters, epochs: int, times: Times = ONCE) -> Solution:
    solution, c = Solution(Y.shape[1]), 0
    for some in solve_on_all_rows(p, SEED, sparse(X), block_of(Y), D, times, epochs):
        of_weights, of_rows = (np.cumsum([0, *counts]) for counts, _, _ in (some.weights, some.active))
        for at in range(len(some.statistics)):
            mine = slice(of_weights[at], of_weights[at + 1])
            features, values = some.weights[1][mine], some.weights[2][mine]
            assert np.all(np.diff(features) > 0)
            assert np.all(values != 0)
            solution.w[c, features] = values
            mine = slice(of_rows[at], of_rows[at + 1])
            rows, alpha = some.active[1][mine], some.active[2][mine]
            assert np.all(np.diff(rows) > 0)
            solution.alpha[c, rows], solution.kept[c, rows] = alpha, True
            solution.statistics[c], solution.losses[c] = some.statistics[at], some.losses[at]
            c += 1
    return solution


def problem_of(p: Parameters, X: NDArray[np.float64], y: NDArray[np.bool_]) -> twin.Problem:
    return twin.Problem(X, np.where(y, 1.0, -1.0), p.lam, p.tau, p.C, p.loss, p.bias, p.positive_weight)


def parameters(loss: str, bias: bool, lam: float, tol: float = 1e-5) -> Parameters:
    return Parameters(lam=lam, tau=0.7, C=1.25, positive_weight=1.5, loss=loss, bias=bias, tol=tol)


@losses
@biases
@lams
def test_passes_follow_the_twin(loss: str, bias: bool, lam: float) -> None:
    X, Y, p = random_rows(np.random.default_rng(0), N, D), labels_of(), parameters(loss, bias, lam)
    for epochs in (1, 3):
        got = solved(X, Y, p, epochs)
        for c in range(Y.shape[1]):
            problem = problem_of(p, X, Y[:, c])
            if not Y[:, c].any():
                assert not got.alpha[c].any()
                continue
            want = reference.descend(problem, SEED, 0, epochs, p.tol)
            np.testing.assert_allclose(got.alpha[c], want, rtol=0, atol=2e-5)
            np.testing.assert_allclose(got.w[c], twin.weights(problem, want)[:D], rtol=0, atol=2e-5)


@losses
@biases
def test_a_class_takes_the_same_steps_in_any_company(loss: str, bias: bool) -> None:
    X, Y, p = random_rows(np.random.default_rng(1), N, D), labels_of(1), parameters(loss, bias, 0.05, 0.02)
    order = np.random.default_rng(2).permutation(Y.shape[1])
    together, shuffled = solved(X, Y, p, 12), solved(X, Y[:, order], p, 12)
    for at, c in enumerate(order):
        assert shuffled.bits(at) == together.bits(c)
    for c in (0, 7, LANES):
        assert solved(X, Y[:, [c]], p, 12).bits(0) == together.bits(c)


@losses
@biases
@pytest.mark.parametrize("lam", unless_plain([0.0, 0.3], [0.3]))
def test_many_passes_come_to_the_optimum_and_say_so(loss: str, bias: bool, lam: float) -> None:
    X, Y, p = random_rows(np.random.default_rng(3), N, D), labels_of(3), parameters(loss, bias, lam)
    got = solved(X, Y, replace(p, max_rounds=None), EPOCHS)
    for c in range(0, Y.shape[1], 5):
        problem = problem_of(p, X, Y[:, c])
        w = np.append(got.w[c], got.statistics[c, 0]) if bias else got.w[c].astype(np.float64)
        objective = twin.primal(problem, w)
        bias_of, dual, kept, inside = got.statistics[c]
        assert dual == pytest.approx(twin.dual(problem, got.alpha[c]), rel=1e-6)
        assert kept == pytest.approx(twin.regulariser(problem, w), rel=1e-5)
        assert got.losses[c] == pytest.approx(objective - twin.regulariser(problem, w), rel=1e-4, abs=1e-5)
        assert bias_of == pytest.approx(twin.weights(problem, got.alpha[c])[-1] if bias else 0.0, abs=2e-6)
        assert inside == pytest.approx(twin.violation(problem, got.alpha[c]), abs=2e-5)
        assert -1e-5 * objective <= objective + dual <= 0.02 * objective
        if loss == "squared_hinge":
            assert inside < 1e-3
            np.testing.assert_allclose(w, twin.fista(problem), atol=2e-3)


@biases
def test_a_class_stands_still_when_an_epoch_gains_little(bias: bool) -> None:
    X, Y, p = random_rows(np.random.default_rng(8), N, D), labels_of(8), parameters("squared_hinge", bias, 0.05, 0.08)
    got, epochs, stopped = solved(X, Y, p, 12), 12, 0
    for c in range(Y.shape[1]):
        if not Y[:, c].any():
            continue
        problem = problem_of(p, X, Y[:, c])
        want = reference.descend(problem, SEED, 0, epochs, p.tol, p.least_gain)
        np.testing.assert_allclose(got.alpha[c], want, rtol=0, atol=2e-5)
        on = reference.descend(problem, SEED, 0, epochs, p.tol)
        stopped += bool(np.abs(on - want).max() > 1e-4)
    assert stopped > Y.shape[1] / 2
    assert p.least_gain == 0.02
    assert replace(p, loss="hinge").least_gain == replace(p, max_rounds=None).least_gain == 0.0


def test_rows_that_are_kept_have_the_label_or_alpha() -> None:
    X, Y = random_rows(np.random.default_rng(4), N, D), labels_of(4)
    got = solved(X, Y, parameters("squared_hinge", True, 0.1), 5)
    np.testing.assert_array_equal(got.kept, Y.T | (got.alpha > 0))
    assert (~got.kept).any()


def test_a_class_moves_until_nothing_that_a_pass_meets_violates() -> None:
    X, Y, p = random_rows(np.random.default_rng(5), N, D), labels_of(5), parameters("squared_hinge", True, 0.05)
    least = replace(p, tol=100.0)  # what the first pass meets is below it
    once, twice = solved(X, Y, p, 1), solved(X, Y, p, 2)
    stopped = solved(X, Y, least, 2)
    for c in range(Y.shape[1]):
        assert stopped.alpha[c].tobytes() == once.alpha[c].tobytes()
    assert any(twice.alpha[c].tobytes() != once.alpha[c].tobytes() for c in range(Y.shape[1]))


@losses
def test_weights_of_rows_and_classes_are_those_of_their_losses(loss: str) -> None:
    rng = np.random.default_rng(6)
    X, Y, p = random_rows(rng, N, D), labels_of(6), parameters(loss, True, 0.05)
    of_rows, of_classes = rng.random(N) * 3, rng.random((Y.shape[1], 2)) + 0.5
    of_rows[::9] = 0.0
    got = solved(X, Y, p, 4, Times(of_classes, of_rows))
    for c in range(0, Y.shape[1], 3):
        if not Y[:, c].any():
            continue
        times = of_rows * np.where(Y[:, c], of_classes[c, 1], of_classes[c, 0])
        problem = replace(problem_of(p, X, Y[:, c]), times=times)
        want = reference.descend(problem, SEED, 0, 4, p.tol)
        np.testing.assert_allclose(got.alpha[c], want, rtol=0, atol=5e-5)
        assert not got.alpha[c][::9].any()
        at_bound = np.isclose(got.alpha[c], problem.upper, rtol=1e-12)
        assert (loss == "hinge") == bool((at_bound & (problem.upper > 0)).any())
        got.alpha[c][at_bound] = problem.upper[at_bound]  # three factors, in another order
        assert got.statistics[c, 1] == pytest.approx(twin.dual(problem, got.alpha[c]), rel=1e-4)
        assert got.statistics[c, 3] == pytest.approx(twin.violation(problem, got.alpha[c]), abs=1e-3)
        w = np.append(got.w[c], got.statistics[c, 0])
        lost = twin.primal(problem, w) - twin.regulariser(problem, w)
        assert got.losses[c] == pytest.approx(lost, rel=1e-4)


def test_lanes_without_a_class_stand_still() -> None:
    X, Y = sparse(random_rows(np.random.default_rng(9), N, D)), block_of(labels_of(9, 6))
    squares, lanes = np.empty(N), new_lanes(N, D)
    row_squares(X.indptr, X.values, 1.0, squares)
    penalty = penalty_of(parameters("squared_hinge", True, 0.05))
    awake = begin_lanes(0, Labels.of(Y), ONCE.classes, penalty, lanes)
    assert awake == 0b110111  # label 3 has no row
    descend_lanes(CSR.of(X), squares, ONCE.rows, Steps(SEED, 0, 2, 1e-5, 0.0), penalty, awake, lanes, 0.0)
    alpha, v = lanes.alpha.reshape(N, LANES), lanes.v.reshape(D, LANES)
    for lane in range(LANES):
        moved = bool(awake >> lane & 1)
        assert alpha[:, lane].any() == v[:, lane].any() == moved
        assert bool(lanes.v0[lane]) == moved
