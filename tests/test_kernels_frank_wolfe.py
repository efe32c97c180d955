"""Steps of PD-Sparse against dense arithmetic: each is the twin's, the dual objective never rises, the gap closes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.compiler import needs_compiler, unless_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import frank_wolfe as twin
from sklearn.svm import LinearSVC

from xmc_stream.kernels.blocks import CSR
from xmc_stream.pdsparse.kernels.frank_wolfe import (
    ActiveLabels,
    Visit,
    add_scores,
    sample_row,
    search_row,
    visit_rows,
)
from xmc_stream.pdsparse.kernels.tables import (
    Tables,
    bytes_used,
    find,
    new_tables,
    place,
    set_weight,
    soft,
)


@dataclass
class Problem:
    X: NDArray[np.float64]
    Y: NDArray[np.bool_]
    lam: float
    C: float

    def csr(self) -> tuple[Any, Any, Any]:
        rows, features = np.nonzero(self.X)
        indptr = np.searchsorted(rows, np.arange(len(self.X) + 1))
        return indptr.astype(np.int64), features.astype(np.int32), self.X[rows, features].astype(np.float32)


class State:
    """The dual variables of all samples, and the tables."""

    def __init__(self, problem: Problem, n_parts: int, dense: bool, most: int, most_bytes: int = 1 << 20) -> None:
        (n, d), k = problem.X.shape, problem.Y.shape[1]
        self.problem, self.most = problem, most
        lam = problem.lam
        self.tables = new_tables(d, k, n_parts, lam, 0 if dense else most_bytes)
        self.tables.values[:] = 0.0 if dense else 7.0  # whatever was there before
        room = k + most
        self.n_positive = problem.Y.sum(axis=1)
        self.sets = ActiveLabels(
            np.arange(n) * room,
            self.n_positive.copy(),
            np.zeros(n * room, np.int32),
            np.zeros(n * room),
        )
        for i in range(n):
            self.sets.labels[i * room : i * room + self.n_positive[i]] = np.flatnonzero(problem.Y[i])
        self.z = np.zeros(k, np.float32)
        self.longest, self.room = d, room
        self.places, self.work = np.empty(d * room // 3, np.int64), np.zeros(2, np.int64)  # for some rows, not for all
        self.largest = np.zeros(1)

    def visit(self, rows: Any, keys: Any, rate: int = 1) -> int:
        p = self.problem
        rows, numbers = np.asarray(rows, np.int64), np.zeros(len(p.X), np.int64)
        numbers[rows] = keys
        done = visit_rows(
            rows, numbers, np.uint64(0), CSR(*p.csr()), self.sets, self.n_positive, self.tables,
            Visit(p.C, rate, self.most, self.longest, self.room, False), self.z, self.places, self.work, self.largest,
        )  # fmt: skip
        assert not self.z.any()
        return int(done)

    def active(self, i: int) -> NDArray[np.int64]:
        begin, size = self.sets.begin[i], self.sets.size[i]
        return self.sets.labels[begin : begin + size].astype(np.int64)

    @property
    def A(self) -> NDArray[np.float64]:
        A = np.zeros(self.problem.Y.shape)
        for i in range(len(A)):
            begin = self.sets.begin[i]
            A[i, self.active(i)] = self.sets.a[begin : begin + self.sets.size[i]]
        return A

    @property
    def V(self) -> NDArray[np.float64]:
        d, k = self.problem.X.shape[1], self.problem.Y.shape[1]
        V = np.zeros((d, k))
        for j in range(d):
            for label in range(k):
                at = find(j, label, self.tables)
                V[j, label] = self.tables.values[at] if at >= 0 else 0.0
        return V

    def dual(self) -> float:
        return twin.dual(self.problem.X, self.problem.Y, self.A, self.problem.lam)

    def primal(self) -> float:
        p = self.problem
        return twin.primal(p.X, p.Y, twin.weights(p.X, self.A, p.lam), p.lam, p.C)


def problem(seed: int, n: int, d: int, k: int, single: bool, lam: float, C: float = 1.0) -> Problem:
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((n, d)) < 0.5, rng.standard_normal((n, d)), 0).astype(np.float32).astype(np.float64)
    Y = rng.random((n, k)) < 0.3
    if single:
        Y = np.arange(k) == rng.integers(0, k, n)[:, None]
    return Problem(X, Y, lam, C)


SEEDS = st.integers(0, 10**6)


@settings(deadline=None, max_examples=60)
@given(
    SEEDS,
    st.booleans(),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_a_step_is_the_twins_and_never_raises_the_dual(
    seed: int, dense: bool, n_parts: int, rate: int, single: bool, lam: float
) -> None:
    p = problem(seed, 12, 6, 7, single, lam)
    state, rng = State(p, n_parts, dense, 2), np.random.default_rng(seed)
    before = state.dual()
    for t in range(40):
        i, A = int(rng.integers(len(p.X))), state.A
        assert state.visit([i], [rng.integers(2**63)], rate) == 1
        row = state.A[i]
        # what was active before and is idle now was active in the step; so was what stands there now
        if p.Y[i].any() and not p.Y[i].all() and p.X[i].any():
            active = np.flatnonzero((A[i] != 0) | (row != 0) | p.Y[i])
            expected = twin.step(p.X, p.Y, A, i, active, lam, p.C)
            assert np.allclose(row, expected, atol=1e-8), t
        assert np.allclose(row[p.Y[i]].sum(), -row[~p.Y[i]].sum())
        assert -1e-12 <= row[p.Y[i]].sum() <= p.C + 1e-9
        assert (row[p.Y[i]] >= 0).all()
        assert (row[~p.Y[i]] <= 0).all()
        after = state.dual()
        assert after <= before + 1e-9
        before = after
    assert np.allclose(state.V, p.X.T @ state.A, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.booleans(), st.integers(1, 3), st.integers(1, 5))
def test_a_search_finds_the_labels_that_score_highest(seed: int, dense: bool, n_parts: int, wanted: int) -> None:
    rng = np.random.default_rng(seed)
    d, k, lam = 8, int(rng.integers(1, 60)), 0.25  # scores are multiples of 1/4, exact in float32
    V = np.where(rng.random((d, k)) < rng.choice([0.02, 0.5]), np.round(rng.standard_normal((d, k)) * 2) / 2, 0)
    tables = new_tables(d, k, n_parts, lam, 0 if dense else 1 << 17)
    fill(tables, V)
    x, features = np.round(rng.standard_normal(d) * 2).astype(np.float32), np.arange(d)
    z, active = np.zeros(k, np.float32), np.flatnonzero(rng.random(k) < 0.2).astype(np.int32)
    exact = (x[:, None] * (np.sign(V) * np.maximum(np.abs(V) - lam, 0))).sum(axis=0)
    found: list[int] = []
    for part in range(n_parts):
        best, best_z = np.empty(wanted, np.int64), np.empty(wanted, np.float32)
        n, _ = search_row(features, x, active, part, tables, z, best, best_z)
        assert not z.any()
        low, high = -(-k * part // n_parts), -(-k * (part + 1) // n_parts)
        mine = [label for label in range(low, high) if label not in active and exact[label] > 0]
        mine.sort(key=lambda label: (-exact[label], label))
        assert n == min(wanted, len(mine))
        assert np.allclose(best_z[:n], exact[mine[:n]], atol=1e-4)
        found += best[:n].tolist()
    assert len(set(found)) == len(found)


def fill(tables: Tables, V: NDArray[np.float64]) -> None:
    for feature, label in zip(*np.nonzero(V), strict=True):
        at = place(feature, label, tables)
        tables.values[at] = V[feature, label]
        if not tables.dense:
            set_weight(feature, label, at, np.float32(soft(tables.values[at], tables.lam)), tables)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("n_drawn", [1, 5, 13])
def test_scores_of_samples_are_the_exact_ones_on_average(dense: bool, n_drawn: int) -> None:
    """Within five standard errors, each of 12 labels'; and all together vary no more than with independent draws."""
    rng, (d, k, n, lam) = np.random.default_rng(0), (20, 12, unless_plain(10_000, 3_000), 0.3)
    V = np.where(rng.random((d, k)) < 0.5, rng.standard_normal((d, k)), 0)
    W = np.sign(V) * np.maximum(np.abs(V) - lam, 0)
    tables = new_tables(d, k, 2, lam, 0 if dense else 1 << 20)
    fill(tables, V)
    x = rng.standard_normal(d).astype(np.float32)
    at, value, z = np.empty(n_drawn, np.int64), np.empty(n_drawn, np.float32), np.empty((n, k), np.float32)
    z[:] = 0.0
    for scores, key in zip(z, rng.integers(2**63, size=n), strict=True):
        sample_row(np.arange(d), x, n_drawn, np.uint64(key), at, value)
        for part in range(2):
            add_scores(at, value, part, tables, scores)
    exact, mean, variance = x.astype(np.float64) @ W, z.mean(axis=0, dtype=np.float64), z.var(axis=0, dtype=np.float64)
    assert (np.abs(mean - exact) < 5 * np.sqrt(variance / n)).all()
    norm = np.abs(x).sum()
    independent = (norm * (np.abs(x) @ W**2) - exact**2) / n_drawn
    assert 0 < variance.sum() < 1.03 * independent.sum()


def test_searches_draw_parts_and_what_no_weight_touches_evenly() -> None:
    """Rows without a common feature, so that no weight touches any label: what a search brings in is all chance."""
    n, k, n_parts = 900, 12, 3
    Y = np.zeros((n, k), np.bool_)
    Y[:, 0] = True
    state = State(Problem(np.eye(n), Y, 0.0, 1.0), n_parts, False, 1, most_bytes=1 << 22)
    keys = np.random.default_rng(0).integers(2**63, size=n)
    assert state.visit(np.arange(n), keys) == n
    drawn = (state.A < 0).sum(axis=0)
    assert drawn[0] == 0
    assert drawn.sum() == n  # one each
    chance = np.repeat([1 / 9, 1 / 12], [3, 8])  # a part is one in three, and the first has the positive
    assert (((drawn[1:] - n * chance) ** 2) / (n * chance)).sum() < 29.6  # chi squared, 10 degrees: one in a thousand


def learnable(single: bool, lam: float) -> Problem:
    """Rows of length one, labels that follow from them but for some noise; where they are several, some rows have none."""
    rng, (n, d, k) = np.random.default_rng(0), unless_plain((60, 10, 8), (32, 6, 6))
    X = np.where(rng.random((n, d)) < 0.5, rng.standard_normal((n, d)), 0)
    X /= np.maximum(np.sqrt((X**2).sum(axis=1, keepdims=True)), 1e-9)
    X = X.astype(np.float32).astype(np.float64)
    scores = X @ rng.standard_normal((d, k)) + 0.5 * rng.standard_normal((n, k))
    Y = np.arange(k) == scores.argmax(axis=1)[:, None] if single else scores > np.quantile(scores, 0.8, axis=0)
    return Problem(X, Y, lam, 1.0)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.3])
@pytest.mark.parametrize(("n_parts", "rate"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_the_gap_closes_whatever_the_search(dense: bool, single: bool, lam: float, n_parts: int, rate: int) -> None:
    """The sum over samples falls below 1e-4, where the loss of no weights at all is 49 or 60. It takes 150 to 550 passes."""
    p, closed = learnable(single, lam), unless_plain(1e-4, 1e-2)
    state, rng = State(p, n_parts, dense, 2), np.random.default_rng(0)
    duals = [0.0]
    for _ in range(1000):
        state.visit(rng.permutation(len(p.X)), rng.integers(2**63, size=len(p.X)), rate)
        duals.append(state.dual())
        gaps = twin.gap(p.X, p.Y, state.A, lam, p.C)
        if gaps.sum() < closed:
            break
    assert gaps.sum() < closed
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(duals))
    # what makes the gap a bound: it is primal + dual, of a feasible a
    A, W = state.A, twin.weights(p.X, state.A, lam)
    primal = twin.primal(p.X, p.Y, W, lam, p.C)
    assert gaps.sum() == pytest.approx(primal + duals[-1], abs=1e-10)
    assert gaps.min() > -1e-9
    assert gaps.sum() < closed / 10 * primal
    assert (A[p.Y] >= 0).all()
    assert (A[~p.Y] <= 0).all()
    assert np.allclose(A.sum(axis=1), 0, atol=1e-9)
    assert (np.where(p.Y, A, 0).sum(axis=1) <= p.C + 1e-9).all()
    assert np.allclose(state.V, p.X.T @ A, atol=1e-9)
    # and there was something to find
    assert primal < 0.95 * p.C * p.Y.any(axis=1).sum()
    assert (W == 0).any() == (lam > 0)


@needs_compiler
def test_without_l1_a_single_label_is_crammer_and_singers_machine() -> None:
    p = problem(3, 60, 8, 4, True, 0.0)
    state, rng = State(p, 1, True, 2), np.random.default_rng(0)
    for _ in range(30_000):
        state.visit(rng.permutation(len(p.X)), rng.integers(2**63, size=len(p.X)))
    gap = state.primal() + state.dual()
    assert gap <= 1e-4 * state.primal()
    peer = LinearSVC(multi_class="crammer_singer", fit_intercept=False, C=p.C, tol=1e-8, max_iter=10**6)
    peer.fit(p.X, p.Y.argmax(axis=1))
    W = twin.weights(p.X, state.A, 0.0)
    assert np.abs(p.X @ W - peer.decision_function(p.X)).max() < 1e-3
    assert ((W - peer.coef_.T) ** 2).sum() <= 2 * gap + 1e-6


def test_a_full_arena_is_told_before_anything_moves() -> None:
    p = problem(2, 30, 6, 20, False, 0.01)
    whole = State(p, 1, False, 2)
    rows, keys = np.arange(30), np.arange(30)
    assert whole.visit(rows, keys) == 30
    small = State(p, 1, False, 2, most_bytes=int(bytes_used(whole.tables)) - 600)
    done = small.visit(rows, keys)
    assert 0 < done < 30
    twin_ = State(p, 1, False, 2)
    twin_.visit(rows[:done], keys[:done])
    assert np.array_equal(small.A, twin_.A)


@pytest.mark.parametrize("k", [200, 2000])
@pytest.mark.parametrize("lam", [0.0, 1e6])
def test_tables_never_outgrow_their_memory(k: int, lam: float) -> None:
    """Nor do the regions that they leave as they grow. With lam so large no list of weights leaves room for these."""
    rng = np.random.default_rng(0)
    for seed in range(unless_plain(20, 6)):
        p = problem(seed, 40, 1 + seed % 3, k, False, lam)
        p.Y &= rng.random(p.Y.shape) < 0.1
        for most_bytes in range(1000, 20_000, 700):
            state = State(p, 1, False, 5)
            state.tables = state.tables._replace(most_bytes=most_bytes)  # in arenas that are larger
            state.visit(np.arange(40), rng.integers(2**63, size=40))
            assert bytes_used(state.tables) <= most_bytes


def test_tables_and_dense_vectors_give_the_same_bits() -> None:
    p = problem(5, 50, 12, 30, False, 0.05)
    states = [State(p, 2, dense, 3) for dense in (False, True)]
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows, keys = rng.permutation(50), rng.integers(2**63, size=50)
        for state in states:
            state.visit(rows, keys, 2)
    assert np.array_equal(states[0].A, states[1].A)
    assert np.array_equal(states[0].V, states[1].V)
