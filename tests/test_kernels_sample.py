"""Cut and drawn weights against their twins, their mean against the weights; entries and multiply-adds against plain counts."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import sample as twin

from xmc_stream.linear.tiles import make_tile, tile_width
from xmc_stream.ppdsparse.kernels.sample import count_work, cut_small, keep_large, sparsify

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

values = st.floats(-4, 4, width=32).filter(lambda w: abs(w) > 1e-6)
classes = st.lists(st.lists(values, max_size=30), min_size=1, max_size=5)


def drawn(
    w: NDArray[np.float32], labels: NDArray[np.int64], delta: float, seed: int, round_: int
) -> NDArray[np.float32]:
    """Dense weights (D, K) after the kernel, which is given their non-zeros."""
    W = sp.csc_matrix(w)
    indptr, features, data = W.indptr.astype(np.int64), W.indices.copy(), W.data.copy()
    n = sparsify(indptr, features, data, labels, seed, round_, delta)
    assert n == indptr[-1]
    return sp.csc_matrix((data[:n], features[:n], indptr), shape=W.shape).toarray()


@settings(max_examples=100, deadline=None)
@given(classes, st.floats(0.05, 30), st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 2**31))
def test_draws_are_those_of_the_twin_to_the_bit(
    lists: list[list[float]], delta: float, seed: int, round_: int, first: int
) -> None:
    w = np.zeros((31, len(lists)), np.float32)
    for c, column in enumerate(lists):
        w[: len(column), c] = column
    out = drawn(w, np.arange(first, first + len(lists)), delta, seed, round_)
    for c, column in enumerate(lists):
        expected = twin.sparsified(w[: len(column), c], delta, first + c, seed, round_)
        assert np.array_equal(out[: len(column), c], expected)


def test_draws_depend_on_the_class_and_not_on_what_is_drawn_with_it() -> None:
    w = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    together = drawn(w, np.arange(10, 16), 40.0, 3, 1)
    for c in range(6):
        alone = drawn(w[:, [c]], np.array([10 + c]), 40.0, 3, 1)
        assert np.array_equal(alone[:, 0], together[:, c])
    assert not np.array_equal(drawn(w, np.arange(10, 16), 40.0, 3, 2), together)


def test_the_mean_of_many_draws_is_the_weights() -> None:
    rng = np.random.default_rng(1)
    w = (rng.normal(size=60) * rng.exponential(size=60)).astype(np.float32)
    n, delta = 4000, 20.0
    l1 = np.abs(w).sum(dtype=np.float64)
    R = np.ceil(2 * l1**2 / delta**2)
    assert R < 30
    draws = drawn(np.tile(w[:, None], (1, n)), np.arange(n), delta, 0, 0).astype(np.float64)
    assert np.abs(np.abs(draws).sum(0) - l1).max() < 1e-3 * l1  # all of the norm is handed out
    # R draws from the whole have the variance |w_j| (l1 - |w_j|) / R; one from each of R parts has no more
    bound = np.abs(w) * (l1 - np.abs(w)) / R
    assert np.all(np.abs(draws.mean(1) - w) < 5 * np.sqrt(bound / n))
    assert draws.var(1).sum() < bound.sum()


def cut(w: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """Dense weights (D, K) after the kernel, which is given their non-zeros."""
    W = sp.csc_matrix(w)
    indptr, features, data = W.indptr.astype(np.int64), W.indices.copy(), W.data.copy()
    n = cut_small(indptr, features, data, share)
    assert n == indptr[-1]
    return sp.csc_matrix((data[:n], features[:n], indptr), shape=W.shape).toarray()


far_apart = st.one_of(values, st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda w: abs(w) > 2.0**-100))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(far_apart, max_size=30), min_size=1, max_size=5), st.sampled_from([0.0, 0.01, 0.3, 0.99]))
def test_what_is_cut_is_what_the_twin_cuts(lists: list[list[float]], share: float) -> None:
    w = np.zeros((31, len(lists)), np.float32)
    for c, column in enumerate(lists):
        w[: len(column), c] = column
    out = cut(w, share)
    for c in range(len(lists)):
        assert np.array_equal(out[:, c], twin.cut(w[:, c], share))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.7])
def test_the_smallest_weights_are_cut_and_scores_err_by_their_norm_at_most(share: float) -> None:
    rng = np.random.default_rng(3)
    w = (rng.normal(size=(2000, 8)) * rng.exponential(size=(2000, 8)) * 10.0 ** np.arange(-4, 4)).astype(np.float32)
    out = cut(w, share)
    X = rng.normal(size=(300, 2000))
    X /= np.linalg.norm(X, axis=1)[:, None]
    for c in range(8):
        kept, left = np.abs(w[out[:, c] != 0, c]), np.abs(w[out[:, c] == 0, c])
        norm = np.linalg.norm(w[:, c].astype(np.float64))
        assert np.array_equal(out[out[:, c] != 0, c], w[out[:, c] != 0, c])
        assert left.max() < kept.min()
        assert 0.7 * share * norm < np.linalg.norm(left.astype(np.float64)) <= share * norm
        assert np.abs(X @ (w[:, c].astype(np.float64) - out[:, c])).max() <= share * norm


def test_weights_of_one_size_are_all_kept() -> None:
    w = np.full((9, 1), -0.5, np.float32)
    assert np.array_equal(cut(w, 0.99), w)
    assert not cut(np.zeros((9, 2), np.float32), 0.99).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(values, max_size=9), max_size=6), st.sampled_from([0.0, 0.5, 1.0, 5.0]))
def test_rows_are_closed_up_over_small_entries(lists: list[list[float]], least: float) -> None:
    rows = [[(j, np.float32(x)) for j, x in enumerate(row)] for row in lists]
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    indices = np.array([j for row in rows for j, _ in row], np.int32)
    data = np.array([x for row in rows for _, x in row], np.float32)
    n = keep_large(indptr, indices, data, least)
    kept = [twin.large(row, least) for row in rows]
    assert np.array_equal(np.diff(indptr), [len(row) for row in kept])
    assert n == indptr[-1]
    assert list(zip(indices[:n], data[:n], strict=True)) == [pair for row in kept for pair in row]


@pytest.mark.parametrize("n_classes", [3, 40, 96])
def test_multiply_adds_count_weights_and_not_the_zeros_of_dense_rows(n_classes: int) -> None:
    rng = np.random.default_rng(n_classes)
    w = rng.normal(size=(50, n_classes)) * (rng.random((50, n_classes)) < rng.random((50, 1)) ** 2)
    W = sp.csc_matrix(w.astype(np.float32))
    tile = make_tile(W.indptr.astype(np.int64), W.indices, W.data, np.zeros(n_classes, np.float32), 50)
    entries = rng.integers(0, 7, 50)
    counted = count_work(entries.astype(np.int32), tile.start, tile.weights, tile_width(n_classes))
    assert counted == twin.work(entries, W.toarray())
