"""Dual variables as they stream by, sums over rows and the tables' way to disk, against dense arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import frank_wolfe as twin

from xmc_stream.kernels.order import GROUP, strip_slots
from xmc_stream.kernels.permutation import held_out
from xmc_stream.pdsparse.kernels.dual import group_rows, packed, rank_rows, sum_losses, sum_negatives
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels
from xmc_stream.pdsparse.kernels.tables import (
    Tables,
    bytes_used,
    enter,
    find,
    list_entries,
    new_tables,
    norms,
)

LAM = 0.5


def tables_of(V: NDArray[np.float64], n_parts: int, dense: bool) -> Tables:
    d, k = V.shape
    tables = new_tables(d, k, n_parts, LAM, 0 if dense else 1 << 18)
    rows, labels = np.nonzero(V)
    counts = np.bincount(rows, minlength=d).astype(np.int32)
    order = np.random.default_rng(0).permutation(len(rows))
    order = order[np.argsort(rows[order], kind="stable")]  # by feature, in no order within one
    assert enter(0, tables, counts, labels[order].astype(np.int32), V[rows, labels][order])
    return tables


def soft(V: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.sign(V) * np.maximum(np.abs(V) - LAM, 0))


def values(rng: np.random.Generator, d: int, k: int) -> NDArray[np.float64]:
    return np.where(rng.random((d, k)) < rng.choice([0.05, 0.6]), np.round(rng.standard_normal((d, k)) * 4) / 4, 0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_tables_go_to_disk_and_back(seed: int, dense: bool, n_parts: int) -> None:
    rng = np.random.default_rng(seed)
    d, k = 6, int(rng.integers(1, 70))
    V = values(rng, d, k)
    tables = tables_of(V, n_parts, dense)
    got = np.zeros((d, k))
    for j in range(d):
        for label in range(k):
            at = find(j, label, tables)
            got[j, label] = tables.values[at] if at >= 0 else 0.0
    assert np.array_equal(got, V)
    cuts = [-(-part * k // n_parts) for part in range(n_parts + 1)]
    weights = [(soft(V)[:, a:b] != 0).sum(axis=1) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(tables.w.n.reshape(d, n_parts), np.array(weights).T)
    counts, labels, v = np.empty(d, np.int32), np.empty(d * k, np.int32), np.empty(d * k)
    n = list_entries(0, d, tables, counts, labels, v)
    again = np.zeros((d, k))
    again[np.repeat(np.arange(d), counts), labels[:n]] = v[:n]
    assert np.array_equal(again, V)
    square, total, nnz = norms(tables)
    assert np.allclose([square, total, nnz], [(soft(V) ** 2).sum(), np.abs(soft(V)).sum(), (soft(V) != 0).sum()])


def test_tables_that_do_not_fit_are_told() -> None:
    small, labels = new_tables(1, 100, 1, LAM, 400), np.arange(60, dtype=np.int32)
    assert not enter(0, small, np.array([60], np.int32), labels, np.ones(60))
    assert bytes_used(small) <= 400


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_rankings_and_losses_are_those_of_dense_scores(seed: int, dense: bool, n_parts: int) -> None:
    rng = np.random.default_rng(seed)
    n, d, k = 7, 6, int(rng.integers(2, 40))
    V = values(rng, d, k)
    X = np.round(np.where(rng.random((n, d)) < 0.6, rng.standard_normal((n, d)), 0) * 4) / 4
    Y = rng.random((n, k)) < rng.choice([0.0, 0.2, 1.0], p=[0.1, 0.8, 0.1])
    rows, features = np.nonzero(X)
    csr = np.searchsorted(rows, np.arange(n + 1)), features.astype(np.int32), X[rows, features].astype(np.float32)
    y_rows, y_labels = np.nonzero(Y)
    y = np.searchsorted(y_rows, np.arange(n + 1)), y_labels.astype(np.int32)
    tables, z = tables_of(V, n_parts, dense), np.zeros(k, np.float32)
    label_of = rng.permutation(k)  # by number
    labels, best_scores = np.empty((n, 3), np.int64), np.empty((n, 3), np.float32)
    numbers = np.argsort(label_of)
    rank_rows(*csr, numbers.astype(np.int32), label_of.astype(np.int32), tables, z, labels, best_scores)
    scores = X @ soft(V)  # multiples of 1/16: exact in float32, so ties are ties
    for i in range(n):
        best = np.lexsort((label_of, -scores[i]))[:3]  # all labels, also those that score 0 and less
        assert labels[i].tolist() == [*label_of[best], *[-1] * (3 - len(best))]
        assert best_scores[i].tolist() == [*scores[i, best], *[-np.inf] * (3 - len(best))]
    assert np.isclose(sum_losses(*csr, *y, tables, z), twin.losses(scores, Y).sum())
    assert not z.any()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 4), st.integers(0, 1000))
@settings(deadline=None)
def test_rows_are_packed_with_and_without_room(sizes: list[int], more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, size = len(sizes), np.array(sizes)
    begin = np.cumsum(size) - size
    labels, a = rng.integers(0, 99, size.sum()).astype(np.int32), rng.standard_normal(size.sum())
    order = rng.permutation(n)[: max(1, n // 2)]
    n_positive = np.minimum(size[order], 1)
    out = packed(ActiveLabels(begin, size, labels, a), order, more)
    assert np.array_equal(np.diff(out.begin), (size[order] + more)[:-1])
    assert len(out.labels) == len(out.a) == out.begin[-1] + size[order[-1]] + more
    got = packed(out, np.arange(len(order)))
    pieces = [slice(begin[r], begin[r] + size[r]) for r in order]
    assert np.array_equal(got.labels, np.concatenate([labels[piece] for piece in pieces]))
    assert np.array_equal(got.a, np.concatenate([a[piece] for piece in pieces]))
    negatives, active, used = sum_negatives(out, n_positive)
    assert np.isclose(negatives, sum(a[piece][1:].sum() for piece in pieces))
    assert (active, used) == (len(got.a), np.count_nonzero(got.a))


@pytest.mark.parametrize(("n", "bits"), [(1, 0), (500, 0), (1000, 3), (5000, 7)])
def test_a_pass_visits_every_row_once_by_groups(n: int, bits: int) -> None:
    n_strips, seen = -(-n >> bits), []
    slots = np.empty(n_strips, np.int64)
    strip_slots(n_strips, np.uint64(5), slots)
    order = np.argsort(slots)
    for first in range(0, n_strips, GROUP):
        strips = np.sort(order[first : first + GROUP])
        rows, places = np.empty(GROUP << bits, np.int64), np.empty(GROUP << bits, np.int64)
        m = group_rows(strips, slots[strips], n, bits, np.uint64(5), rows, places)
        assert len(set(places[:m].tolist())) == m
        assert (np.diff(rows[:m]) > 0).all()
        seen += rows[:m].tolist()
    assert sorted(seen) == list(range(n))


def test_what_is_held_out_is_a_share_drawn_by_row_and_seed() -> None:
    rows, out, other = np.arange(20_000), np.zeros(20_000, np.bool_), np.zeros(20_000, np.bool_)
    held_out(rows, 1, 0.1, out)
    held_out(rows, 2, 0.1, other)
    assert abs(out.mean() - 0.1) < 0.01
    assert abs((out & other).mean() - 0.01) < 0.005
    some = np.zeros(3, np.bool_)
    held_out(np.array([7, 9999, 12]), 1, 0.1, some)
    assert some.tolist() == out[[7, 9999, 12]].tolist()
