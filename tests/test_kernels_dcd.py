"""The dual solver: against the plain twin, against other solvers, and in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
from helpers.classes import Parameters, Rows, biases, lams, losses, random_rows, sparse
from helpers.compiler import unless_plain
from numpy.typing import NDArray
from reference import dcd as twin
from sklearn.svm import LinearSVC

from xmc_stream.kernels.blocks import CSR, ActiveSets
from xmc_stream.kernels.instructions import soft_product
from xmc_stream.kernels.order import RowOrder
from xmc_stream.linear.kernels.dcd import ONCE, Scratch, Times, dual_terms, new_scratch, take_weights, violation
from xmc_stream.linear.kernels.rows import add_rows
from xmc_stream.ppdsparse.solver import Solver, has_dense_rows, penalty_of

# uncompiled, numpy says so when a key wraps around, and when a row of nothing at all divides by its norm
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")

SEED, ROUND = 7, 2
NEVER = RowOrder(1, 2**62, 0)  # no class is large
MANY = unless_plain(40, 16)  # rows of a problem that is solved to its optimum
weights = pytest.mark.parametrize("weight", unless_plain([1.0, 4.0, 0.25], [4.0]))


# ----------------------------------------------------------------------------------------------------------------------
# problems


def parameters(p: twin.Problem, epochs: int, tol: float, rounds: int = ROUND + 1) -> Parameters:
    """rounds: ROUND is the last one of them, or others follow."""
    return Parameters(
        lam=p.lam, tau=p.tau, C=p.C, positive_weight=p.positive_weight, loss=p.loss, bias=p.bias, tol=tol, rounds=rounds,
        max_rounds=99, epochs=epochs, last_epochs=epochs,
    )  # fmt: skip


def one_class(p: twin.Problem, alpha: NDArray[np.float64] | None = None, label: int = 0) -> ActiveSets:
    """All rows are active."""
    n = len(p.y)
    alpha = np.zeros(n) if alpha is None else alpha.copy()
    return ActiveSets(label, np.array([0, n]), np.arange(n), p.y.astype(np.int8), alpha)


@dataclass
class Solution:
    """alpha of all classes; w (n, D) float32 without the bias; statistics (n, 4); how many weights came at once."""

    alpha: NDArray[np.float64]
    w: NDArray[np.float32]
    statistics: NDArray[np.float64]
    portions: list[int]

    def bits(self) -> tuple[bytes, bytes, bytes]:
        return self.alpha.tobytes(), self.w.tobytes(), self.statistics.tobytes()


class Collector:
    """A sink that makes rows of w of what comes in."""

    def __init__(self, n_features: int) -> None:
        self.n_features = n_features
        self.rows: list[NDArray[np.float32]] = []
        self.portions: list[int] = []

    def __call__(self, counts: NDArray[np.int64], features: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        self.portions.append(len(counts))
        assert counts.sum() == len(features) == len(weights)
        assert np.all(weights != 0)
        ends = np.cumsum(counts)
        for begin, end in zip(ends - counts, ends, strict=True):
            assert np.all(np.diff(features[begin:end]) > 0)
            self.rows.append(np.zeros(self.n_features, np.float32))
            self.rows[-1][features[begin:end]] = weights[begin:end]


def check_clean(scratch: Scratch) -> None:
    assert np.all(scratch.local_of == -1)
    assert not scratch.v.any()


def solved(
    p: twin.Problem, sets: ActiveSets, epochs: int, tol: float = 1e-12, block: Rows | None = None, max_nnz: int = 10_000,
    rounds: int = ROUND + 1, dense: bool = False, times: Times = ONCE,
) -> Solution:  # fmt: skip
    """Solve classes whose active rows are rows of X, or of the block given."""
    block = block or sparse(p.X, dense)
    scratch = new_scratch(p.X.shape[1], int(np.diff(sets.ptr).max()), max_nnz)
    statistics, sink = np.full((len(sets.ptr) - 1, 4), np.nan), Collector(p.X.shape[1])
    Solver(parameters(p, epochs, tol, rounds), SEED, NEVER, dense, ROUND).solve(
        sets, sets.rows, block, scratch, statistics, sink, times
    )
    check_clean(scratch)
    return Solution(sets.alpha, np.array(sink.rows), statistics, sink.portions)


def problem(loss: str, bias: bool, lam: float, seed: int = 0, n: int = 40, d: int = 12, **other: float) -> twin.Problem:
    rng = np.random.default_rng(seed)
    y = np.where(rng.random(n) < 0.3, 1.0, -1.0)
    return twin.Problem(random_rows(rng, n, d), y, lam, **{"tau": 0.7, "C": 1.3, **other}, loss=loss, bias=bias)


def start(p: twin.Problem, seed: int = 1) -> NDArray[np.float64]:
    """An alpha to begin with: some at 0, some at the upper bound if there is one."""
    rng = np.random.default_rng(seed)
    alpha = rng.random(len(p.y)) * (rng.random(len(p.y)) < 0.6) * np.minimum(p.C, p.upper)
    return np.where(rng.random(len(p.y)) < 0.2, p.upper if p.loss == "hinge" else 0.0, alpha)


# ----------------------------------------------------------------------------------------------------------------------
# solving


@losses
@biases
@lams
@weights
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("epochs", "tol"), [(1, 1e-5), (2, 1e-5), (7, 1e-5), (40, 0.05)])
def test_epochs_follow_the_twin(
    loss: str, bias: bool, lam: float, weight: float, epochs: int, tol: float, dense: bool
) -> None:
    for seed, begin in ((0, False), (1, True)):
        p = problem(loss, bias, lam, seed, positive_weight=weight)
        sets = one_class(p, start(p) if begin else None, label=3)
        expected = twin.descend(p, sets.alpha, SEED, 3, ROUND, epochs, tol)
        got = solved(p, sets, epochs, tol, dense=dense)
        np.testing.assert_allclose(got.alpha, expected, rtol=0, atol=1e-10)
        w = twin.weights(p, expected)
        np.testing.assert_allclose(got.w[0], w[:12], rtol=1e-6, atol=1e-9)
        kept = np.append(got.w[0], got.statistics[0, 0]) if bias else got.w[0].astype(np.float64)
        statistics = twin.dual(p, expected), twin.regulariser(p, kept), twin.violation(p, expected)
        np.testing.assert_allclose(got.statistics[0, 1:], statistics, rtol=1e-9, atol=1e-9)
        assert got.statistics[0, 0] == pytest.approx(w[12] if bias else 0.0, rel=1e-7, abs=1e-9)
        assert got.statistics[0, 0] == np.float32(got.statistics[0, 0])  # the bias as it is kept


@losses
@biases
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("of", ["classes", "rows", "both"])
def test_epochs_with_weights_follow_the_twin(loss: str, bias: bool, dense: bool, of: str) -> None:
    """A row of weight 0 has no alpha and violates nothing."""
    rng = np.random.default_rng(4)
    for seed, epochs in ((0, 1), (1, 3), (2, 30)):
        p = problem(loss, bias, 0.2, seed, positive_weight=2.0)
        of_class, of_rows = np.array([[0.6, 3.0]]), rng.choice([0.0, 0.25, 1.0, 3.0], len(p.y))
        weighed = Times(of_class[: of != "rows"], of_rows[: len(p.y) * (of != "classes")])
        times = np.ones(len(p.y))
        times *= np.where(p.y > 0, 3.0, 0.6) if of != "rows" else 1.0
        times *= of_rows if of != "classes" else 1.0
        p = replace(p, times=times)
        begin = np.minimum(start(p), p.upper) * (times > 0)
        expected = twin.descend(p, begin, SEED, 3, ROUND, epochs, 1e-5)
        got = solved(p, one_class(p, begin, label=3), epochs, 1e-5, dense=dense, times=weighed)
        np.testing.assert_allclose(got.alpha, expected, rtol=0, atol=1e-10)
        assert not got.alpha[times == 0].any()
        kept = np.append(got.w[0], got.statistics[0, 0]) if bias else got.w[0].astype(np.float64)
        statistics = twin.dual(p, expected), twin.regulariser(p, kept), twin.violation(p, expected)
        np.testing.assert_allclose(got.statistics[0, 1:], statistics, rtol=1e-9, atol=1e-9)


@losses
@pytest.mark.parametrize("tol", [1e-5, 0.05])
def test_a_round_that_others_follow_only_says_whether_a_class_is_within_tol(loss: str, tol: float) -> None:
    for epochs in (1, 3, 100):
        p = problem(loss, True, 0.3)
        whole, more = (solved(p, one_class(p), epochs, tol, rounds=rounds) for rounds in (ROUND + 1, ROUND + 2))
        assert more.alpha.tobytes() == whole.alpha.tobytes()
        assert more.statistics[0, :3].tobytes() == whole.statistics[0, :3].tobytes()
        largest, said = whole.statistics[0, 3], more.statistics[0, 3]
        assert said == largest if largest <= tol else tol < said <= largest


def several(loss: str, bias: bool, lam: float) -> tuple[list[twin.Problem], ActiveSets, Rows]:
    """Nine classes over sixty rows, each with its own active rows, and a block of the rows that any of them has."""
    rng = np.random.default_rng(3)
    X = random_rows(rng, 60, 50, 0.15)
    problems, members = [], []
    for _ in range(9):
        rows = np.flatnonzero(rng.random(60) < rng.choice([0.1, 0.2]))
        rows = rows[rows % 7 != 3]
        y = np.where(rng.random(len(rows)) < 0.3, 1.0, -1.0)
        problems.append(twin.Problem(X[rows], y, lam, 1.0, 0.8, loss, bias))
        members.append(rows)
    union = np.unique(np.concatenate(members))
    assert len(union) < 60
    at = np.concatenate([np.searchsorted(union, rows) for rows in members])
    sign = np.concatenate([p.y for p in problems]).astype(np.int8)
    alpha = np.concatenate([start(p, c) for c, p in enumerate(problems)])
    ptr = np.cumsum([0, *map(len, members)])
    return problems, ActiveSets(100, ptr, at, sign, alpha), sparse(X[union])


@losses
@biases
def test_classes_are_solved_one_by_one_as_together(loss: str, bias: bool) -> None:
    problems, sets, block = several(loss, bias, 0.2)
    before = sets.alpha.copy()
    together = solved(problems[0], sets, 5, 1e-5, block)
    assert together.portions == [9]
    for c, p in enumerate(problems):
        mine = slice(sets.ptr[c], sets.ptr[c + 1])
        part = ActiveSets(100 + c, np.array([0, len(p.y)]), sets.rows[mine], sets.sign[mine], before[mine].copy())
        alone = solved(p, part, 5, 1e-5, block)
        assert alone.alpha.tobytes() == together.alpha[mine].tobytes()
        assert alone.w[0].tobytes() == together.w[c].tobytes()
        assert alone.statistics[0].tobytes() == together.statistics[c].tobytes()
        expected = twin.descend(p, before[mine], SEED, 100 + c, ROUND, 5, 1e-5)
        np.testing.assert_allclose(alone.alpha, expected, rtol=0, atol=1e-10)


def test_weights_come_in_portions_where_room_is_short() -> None:
    problems, sets, block = several("squared_hinge", True, 0.0)
    before = sets.alpha.copy()
    whole = solved(problems[0], sets, 3, 1e-5, block)
    most = max(int(np.count_nonzero(p.X)) for p in problems)
    again = solved(problems[0], sets._replace(alpha=before), 3, 1e-5, block, max_nnz=most)
    assert again.bits() == whole.bits()
    assert whole.portions == [9]
    assert len(again.portions) > 2
    assert sum(again.portions) == 9


@losses
@biases
@lams
@weights
def test_the_dual_never_rises(loss: str, bias: bool, lam: float, weight: float) -> None:
    for seed in range(3):
        p = problem(loss, bias, lam, seed, positive_weight=weight)
        begin = start(p, seed)
        duals = [twin.dual(p, begin)]
        duals += [float(solved(p, one_class(p, begin), epochs).statistics[0, 1]) for epochs in range(1, 6)]
        assert np.all(np.diff(duals) <= 1e-12)
        assert duals[5] < duals[0] - 0.1


# ----------------------------------------------------------------------------------------------------------------------
# gradients


def state(p: twin.Problem, alpha: NDArray[np.float64]) -> tuple[Rows, NDArray[np.int8], NDArray[np.float64], float]:
    """The local matrix (all features), signs, v and v_0."""
    block, sign, v = sparse(p.X), p.y.astype(np.int8), np.zeros(p.X.shape[1])
    v0 = add_rows(np.arange(len(p.y)), CSR.of(block), sign, alpha, v, 0.0)
    return block, sign, v, v0 if p.bias else 0.0


def kernel_dual(p: twin.Problem, alpha: NDArray[np.float64]) -> float:
    """G by the kernels."""
    d = p.X.shape[1]
    _, sign, v, v0 = state(p, alpha)
    every = np.arange(d, dtype=np.int32)
    _, square, _, _ = take_weights(
        d, every, every.copy(), v, v0, p.lam, p.tau, np.empty(d, np.int32), np.empty(d, np.float32)
    )
    return 0.5 * p.tau * square + dual_terms(sign, alpha, penalty_of(parameters(p, 1, 1e-5)), ONCE.rows, 0.0)


@losses
@biases
@lams
@weights
def test_gradients_are_the_slopes_of_the_dual(loss: str, bias: bool, lam: float, weight: float) -> None:
    p = problem(loss, bias, lam, seed=5, positive_weight=weight)
    alpha = np.random.default_rng(6).uniform(0.1, 0.9, len(p.y)) * p.weights
    block, sign, v, v0 = state(p, alpha)
    gradient = twin.gradient(p, alpha)
    assert kernel_dual(p, alpha) == pytest.approx(twin.dual(p, alpha), rel=1e-12)
    for i in range(len(p.y)):
        step = 1e-5 * np.eye(len(p.y))[i]
        slope = (kernel_dual(p, alpha + step) - kernel_dual(p, alpha - step)) / 2e-5
        assert slope == pytest.approx(gradient[i], abs=1e-5)
        inside = violation(
            np.array([i]), CSR.of(block), sign[i : i + 1], alpha[i : i + 1], v, v0, penalty_of(parameters(p, 1, 1e-5)),
            ONCE.rows, np.inf,
        )  # fmt: skip
        assert inside == pytest.approx(abs(slope), abs=1e-5)


@losses
@biases
@lams
@weights
def test_violation_is_that_of_the_dense_formula_or_the_first_above_what_is_enough(
    loss: str, bias: bool, lam: float, weight: float
) -> None:
    for seed in range(20):
        p = problem(loss, bias, lam, seed, n=8, positive_weight=weight)
        alpha = start(p, seed)
        block, sign, v, v0 = state(p, alpha)
        for rows in (np.arange(8), np.array([5]), np.array([2, 7]), np.empty(0, np.int64)):
            part = twin.gradient(p, alpha)[rows]
            part = np.where(alpha[rows] == 0, np.minimum(part, 0), part)
            part = np.abs(np.where(alpha[rows] == p.upper[rows], np.maximum(part, 0), part))
            for enough in (np.inf, 0.05, 0.0):
                above = part[part > enough]
                expected = above[0] if len(above) else np.max(part, initial=0.0)
                got = violation(
                    rows, CSR.of(block), sign[rows], alpha[rows], v, v0, penalty_of(parameters(p, 1, 1e-5)),
                    ONCE.rows, enough,
                )  # fmt: skip
                assert got == pytest.approx(expected, rel=1e-12, abs=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# the optimum


@losses
@biases
@lams
@weights
def test_the_gap_is_never_negative_and_closes(loss: str, bias: bool, lam: float, weight: float) -> None:
    p = problem(loss, bias, lam, seed=8, n=MANY, positive_weight=weight)
    gaps = [twin.gap(p, start(p, seed)) for seed in range(20)]
    gaps += [twin.gap(p, solved(p, one_class(p), epochs).alpha) for epochs in (1, 2, 5, 20)]
    assert min(gaps) > 0
    best = solved(p, one_class(p), 50_000)
    assert -1e-12 < twin.gap(p, best.alpha) < 1e-9
    assert best.statistics[0, 3] < 1e-8


def optimum(p: twin.Problem) -> tuple[NDArray[np.float64], float]:
    """The w that the kernels end at, in float64, and its gap; that it is the one they return is checked."""
    found = solved(p, one_class(p), 100_000)
    w, gap = twin.weights(p, found.alpha), twin.gap(p, found.alpha)
    assert -1e-12 < gap <= 5e-9 * p.tau
    kept = np.append(found.w[0], found.statistics[0, 0]) if p.bias else found.w[0]
    np.testing.assert_allclose(kept, w, rtol=1e-6, atol=1e-9)
    return w, max(gap, 0.0)


@losses
@pytest.mark.parametrize("seed", unless_plain(range(3), range(1)))
@weights
@pytest.mark.parametrize(("tau", "C"), [(1.0, 1.0), (0.5, 2.0)])
def test_without_l1_it_is_what_liblinear_finds(loss: str, seed: int, weight: float, tau: float, C: float) -> None:
    p = problem(loss, True, 0.0, seed, n=unless_plain(60, 24), tau=tau, C=C, positive_weight=weight)
    theirs = LinearSVC(
        loss=loss, dual=True, intercept_scaling=1, C=C / (2 * tau) if loss == "squared_hinge" else C / tau, tol=1e-10,
        max_iter=1_000_000, random_state=0, class_weight={1: weight},
    ).fit(p.X, p.y)  # fmt: skip
    (w, gap), expected = optimum(p), np.append(theirs.coef_[0], theirs.intercept_)
    theirs_gap = max(twin.primal(p, expected) - twin.primal(p, w) + gap, 0.0)  # both may be exact but for rounding
    assert np.linalg.norm(w - expected) <= np.sqrt(2 * gap / tau) + np.sqrt(2 * theirs_gap / tau) + 1e-7
    assert np.linalg.norm(w - expected) <= 1e-4


@biases
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lam", [0.01, 0.5, 3.0])
@weights
def test_with_l1_it_is_what_fista_finds(bias: bool, seed: int, lam: float, weight: float) -> None:
    p = problem("squared_hinge", bias, lam, seed, n=MANY, positive_weight=weight)
    (w, gap), expected = optimum(p), twin.fista(p)
    assert np.linalg.norm(w - expected) <= np.sqrt(2 * gap / p.tau) + 1e-7
    assert np.array_equal(w != 0, expected != 0)


@losses
@lams
@pytest.mark.parametrize("n_positives", [1, 5])
def test_the_dual_variables_are_bounded(loss: str, lam: float, n_positives: int) -> None:
    # with a bias, that is: without one, w = (0, -1) is not there to compare with
    for seed in range(5):
        p = problem(loss, True, lam, seed, n=2 * MANY, d=3)
        p.y[:] = np.where(np.arange(2 * MANY) < n_positives, 1.0, -1.0)
        alpha = solved(p, one_class(p), 50_000).alpha
        bound = p.tau + 4 * p.C * n_positives
        assert bound / 4 < alpha.sum() <= bound


# ----------------------------------------------------------------------------------------------------------------------
# large classes


def solved_large(
    p: twin.Problem, sets: ActiveSets, epochs: int, tol: float, max_nnz: int, rounds: int, dense: bool = False
) -> Solution:
    rows, d = sparse(p.X, dense), p.X.shape[1]
    lengths = np.diff(rows.indptr)
    scratch, statistics, sink = new_scratch(d, 0, 0), np.full(4, np.nan), Collector(d)

    def gather(wanted: NDArray[np.int64]) -> Rows:
        assert np.all(np.diff(wanted) > 0)
        assert lengths[wanted].sum() <= max_nnz or len(wanted) == 1
        return rows.take(wanted)

    Solver(parameters(p, epochs, tol, rounds), SEED, NEVER, dense, ROUND).solve_large(
        sets, lengths[sets.rows], gather, max_nnz, scratch, statistics, sink
    )
    check_clean(scratch)
    assert sink.portions == [1]
    return Solution(sets.alpha, np.array(sink.rows), statistics[None], sink.portions)


def sizes(p: twin.Problem) -> Sequence[int]:
    """From less than a row to everything."""
    nnz = int(np.count_nonzero(p.X))
    return [1, nnz // 7, nnz // 2, nnz - 1, nnz, nnz + 1]


@losses
@biases
@pytest.mark.parametrize(("lam", "epochs", "tol"), [(0.0, 6, 1e-5), (0.3, 1, 1e-5), (0.3, 60, 0.05)])
@weights
@pytest.mark.parametrize(("dense", "d"), [(False, 12), (True, 41)])
def test_a_large_class_in_pieces_ends_the_same(
    loss: str, bias: bool, lam: float, weight: float, epochs: int, tol: float, dense: bool, d: int
) -> None:
    for begin in (False, True):
        p = problem(loss, bias, lam, int(begin), n=24, d=d, positive_weight=weight)
        alpha, rounds = start(p) if begin else None, ROUND + 1 + (begin == bias)
        expected = solved(p, one_class(p, alpha, label=3), epochs, tol, rounds=rounds, dense=dense).bits()
        for max_nnz in sizes(p):
            got = solved_large(p, one_class(p, alpha, label=3), epochs, tol, max_nnz, rounds, dense)
            assert got.bits() == expected


@numba.njit
def _soft_product(row: NDArray[np.float32], at: int, v: NDArray[np.float64], n: int, lam: float) -> float:
    return soft_product(row, at, v, n, lam)


@pytest.mark.parametrize("lam", [0.0, 0.4])
def test_a_soft_product_is_that_of_numpy(lam: float) -> None:
    rng = np.random.default_rng(3)
    row, v = rng.standard_normal(100).astype(np.float32), rng.standard_normal(64)
    soft = np.sign(v) * np.maximum(np.abs(v) - lam, 0.0)
    for n in (0, 16, 48, 64):
        np.testing.assert_allclose(
            _soft_product(row, 20, v, n, lam), row[20 : 20 + n] @ soft[:n], rtol=1e-13, atol=1e-14
        )


def test_what_dense_rows_are() -> None:
    assert has_dense_rows(10, 100, 500)
    assert not has_dense_rows(10, 100, 499)
    assert not has_dense_rows(10, 5000, 50_000)  # v would not stay in a cache
