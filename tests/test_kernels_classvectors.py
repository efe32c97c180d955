"""Class vectors in hash tables against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import mips as twin

from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.mips.kernels import classvectors as kernels
from xmc_stream.mips.vectors import ClassVectors, DenseVectors, ranked

K, D = 5, 40


def rows_of(X: NDArray[np.float32]) -> kernels.RankedRows:
    """Ranked rows of a dense matrix."""
    line, column = np.nonzero(X)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(line, minlength=len(X)))])
    return ranked(CSR(indptr, column.astype(np.int32), X[line, column]))


def dense(vectors: ClassVectors) -> NDArray[np.float32]:
    """All vectors as a matrix; their lists go up by feature."""
    out, rows = np.zeros((vectors.n_classes, vectors.n_features), np.float32), vectors.export()
    for c in range(vectors.n_classes):
        features = rows.indices[rows.indptr[c] : rows.indptr[c + 1]]
        assert (np.diff(features) > 0).all()
        out[c, features] = rows.values[rows.indptr[c] : rows.indptr[c + 1]]
    return out


def check_tables(vectors: ClassVectors) -> None:
    """Entries are in the order of ranks, at or after their places, and no search ends too early."""
    tables = vectors.tables
    regions = []
    for c in range(vectors.n_classes):
        if tables.bits[c] < 0:
            assert tables.n[c] == 0
            continue
        bits = int(tables.bits[c])
        places = range(int(tables.begin[c]), int(tables.begin[c]) + kernels.length(bits))
        regions.append(places)
        found = [(p, int(tables.words[2 * p])) for p in places if tables.words[2 * p] != 0xFFFFFFFF]
        assert len(found) == tables.n[c] <= 0.75 * 2**bits
        assert found[-1][0] < places[-1]
        assert [rank for _, rank in found] == sorted({rank for _, rank in found})
        for p, rank in found:
            home = places[0] + (rank >> (32 - bits))
            assert all(tables.words[2 * q] != 0xFFFFFFFF for q in range(home, p + 1))
    taken = [p for region in regions for p in region]
    assert len(taken) == len(set(taken))
    assert max(taken, default=-1) < tables.used[0]


NUMBERS = st.sampled_from([-2.0, -1.0, -0.5, 0.25, 1.0, 3.0])
CLASS = st.integers(0, K - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(CLASS, st.integers(0, 7), NUMBERS), max_size=30)),
        st.tuples(st.just("put"), st.lists(CLASS, unique=True)),
        st.tuples(st.just("clear"), st.lists(CLASS, unique=True)),
        st.tuples(st.just("shrink"), st.tuples(NUMBERS, st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.0, 0.5]))),
        st.tuples(st.just("truncate"), st.sampled_from([0.0, 1.0, 4.0, 100.0])),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 3))
def test_vectors_hold_what_a_matrix_holds(steps: list[tuple[str, object]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = (rng.integers(-3, 4, (8, D)) * (rng.random((8, D)) < 0.4)).astype(np.float32)
    vectors, W, rows = ClassVectors(K, D, 1 << 13), np.zeros((K, D), np.float32), rows_of(X)
    for name, value in steps:
        if name == "add":
            triples = np.array(value, np.float64).reshape(-1, 3)
            vectors.add(triples[:, 0], triples[:, 1], triples[:, 2], rows)
            for c, i, a in triples:
                W[int(c)] += np.float32(a) * X[int(i)]
        elif name == "put":
            classes = np.array(value, np.int64)
            vectors.put(classes, rows_of(X[: len(classes)]))
            W[classes] = X[: len(classes)]
        elif name == "clear":
            vectors.clear(np.array(value, np.int64))
            W[np.array(value, np.int64)] = 0.0
        elif name == "shrink":
            scale, threshold, cut = value  # type: ignore[misc]
            before = np.count_nonzero(W)
            W = twin.soft(np.float32(scale) * W, threshold)
            W[np.abs(W) <= cut] = 0.0
            assert vectors.shrink(None, scale, threshold, cut) == before - np.count_nonzero(W)
        else:
            n = twin.smallest(W, value)  # type: ignore[arg-type]
            t = vectors.smallest(value)  # type: ignore[arg-type]
            assert np.count_nonzero((np.abs(W) <= t) & (W != 0.0)) == n
            assert vectors.shrink(cut=t) == n
            W[np.abs(W) <= t] = 0.0
        check_tables(vectors)
        assert (dense(vectors) == W).all()
        assert vectors.zero.tolist() == (~W.any(axis=1)).tolist()
        assert np.allclose(vectors.squares, (W.astype(np.float64) ** 2).sum(axis=1), rtol=1e-12)


def test_a_dot_product_is_added_in_the_order_of_ranks_whatever_the_region() -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((2, 300)).astype(np.float32)
    x = (rng.standard_normal((1, 300)) * (rng.random((1, 300)) < 0.5)).astype(np.float32)
    vectors, rows = ClassVectors(2, 300, 1 << 16), rows_of(x)
    vectors.put(np.arange(2), rows_of(W))
    wanted = [twin.score(w, x[0]) for w in W]
    args = 0, len(rows.ranks), rows.ranks, rows.values, vectors.tables
    assert [kernels.dot(c, *args) for c in range(2)] == wanted
    more = np.zeros((1, 300), np.float32)
    more[0, x[0] == 0.0] = 1.0
    vectors.add([1, 1], [0, 0], [1.0, -1.0], rows_of(more))  # as many as before, and in float32 nearly the same
    left = dense(vectors)
    vectors.shrink(np.array([0]), cut=2.5)  # moves to a shorter region
    assert kernels.dot(1, *args) == twin.score(left[1], x[0])
    assert kernels.dot(0, *args) == twin.score(dense(vectors)[0], x[0])


def test_ranks_are_a_bijection() -> None:
    features = [0, 1, 2, 3, 1000, 2**20 + 1, 2**31 - 2]
    assert [kernels.rank_of(j) for j in features] == [twin.rank_of(j) for j in features]
    assert [kernels.feature_of(kernels.rank_of(j)) for j in features] == features
    assert kernels.feature_of(0xFFFFFFFF) > kernels.MOST_FEATURES


def test_gaps_close_where_room_runs_out_and_an_error_names_the_cure() -> None:
    X = np.eye(1, 60, dtype=np.float32) + 1.0
    rows, n = rows_of(X), 6
    vectors = ClassVectors(n, 60, n * 21 + 8 * 144 * 3)  # three in regions of 128
    for c in range(3):
        vectors.put(np.array([c]), rows)
    for c in range(3, n):
        vectors.clear(np.array([c - 3]))
        vectors.put(np.array([c]), rows)
    assert (dense(vectors)[3:] == X).all()
    check_tables(vectors)
    with pytest.raises(MemoryLimitError, match=r"6 classes need more than .*: set a larger memory_limit"):
        vectors.put(np.array([0]), rows)
    with pytest.raises(MemoryLimitError):
        ClassVectors(1000, 5, 100)
    with pytest.raises(InputError, match="at most"):
        ClassVectors(1, 2**31, 1 << 20)


@pytest.mark.parametrize("before", [0, 1, 100, 1000])
def test_a_long_row_takes_one_region_of_the_size_that_it_needs(before: int) -> None:
    """Where regions grew step by step, each in turn full of the row's least ranks, the work was quadratic."""
    n = 5000
    rng = np.random.default_rng(before)
    W, x = np.zeros((1, n), np.float32), rng.integers(1, 9, (1, n)).astype(np.float32)
    W[0, rng.choice(n, before, replace=False)] = 1.0
    vectors = ClassVectors(1, n, 1 << 20)
    vectors.put(np.array([0]), rows_of(W))
    places = int(vectors.tables.used[0])
    vectors.add([0], [0], [0.5], rows_of(x))
    assert vectors.tables.used[0] == places + kernels.length(13)  # 5000 entries are 0.61 of 2^13
    assert np.count_nonzero(vectors.tables.free >= 0) == (before > 0)
    assert (dense(vectors) == W + 0.5 * x).all()
    check_tables(vectors)
    vectors.add([0], [0], [-0.5], rows_of(x))
    assert (dense(vectors) == W).all()
    vectors.put(np.array([0]), rows_of(x))
    assert vectors.tables.used[0] == places + kernels.length(13)
    assert (dense(vectors) == x).all()


def test_no_region_is_taken_for_entries_that_a_class_has_or_that_are_zero() -> None:
    x = np.ones((1, 20), np.float32)
    vectors, rows = ClassVectors(2, 20, 1 << 12), rows_of(x)
    vectors.put(np.array([0]), rows)
    used, bits = int(vectors.tables.used[0]), int(vectors.tables.bits[0])
    vectors.add([0, 1], [0, 0], [1.0, 0.0], rows)
    assert (vectors.tables.used[0], vectors.tables.bits[0], vectors.tables.bits[1]) == (used, bits, -1)
    check_tables(vectors)


def test_vectors_do_not_depend_on_what_was_in_their_memory() -> None:
    rng = np.random.default_rng(1)
    X = rng.standard_normal((4, D)).astype(np.float32)
    fresh, used = ClassVectors(2, D, 1 << 14), ClassVectors(2, D, 1 << 14)
    used.put(np.arange(2), rows_of(X[2:]))
    for vectors in (fresh, used):
        vectors.clear(np.arange(2))
        vectors.add([0, 1, 0], [0, 1, 1], [1.0, 0.3, -0.7], rows_of(X))
    assert (dense(fresh) == dense(used)).all()
    assert fresh.squares.tolist() == used.squares.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_square_that_cancels_is_summed_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors, rows = ClassVectors(2, D, 1 << 14), rows_of(rng.standard_normal((1, D)).astype(np.float32))
    vectors.add([0, 1, 0, 1], [0, 0, 0, 0], [1e4, 1e4, -9999.99, -9999.999], rows)  # by differences some 1e-6 off
    exact = (dense(vectors).astype(np.float64) ** 2).sum(axis=1)
    assert (exact > 0.0).all()
    assert (exact < 0.1).all()
    assert np.allclose(vectors.squares, exact, rtol=1e-12, atol=0.0)


def test_dense_vectors_hold_what_a_matrix_holds() -> None:
    rng = np.random.default_rng(2)
    X, vectors, W = (
        rng.standard_normal((6, 9)).astype(np.float32),
        DenseVectors(4, 9, 1 << 12),
        np.zeros((4, 9), np.float32),
    )
    vectors.add([1, 3, 1], [0, 2, 5], [0.5, -1.0, 2.0], X)
    for c, i, a in ((1, 0, 0.5), (3, 2, -1.0), (1, 5, 2.0)):
        W[c] += np.float32(a) * X[i]
    vectors.put(np.array([0, 3]), X[:2])
    W[[0, 3]] = X[:2]
    vectors.scale(0.5)
    W *= np.float32(0.5)
    vectors.clear(np.array([0]))
    W[0] = 0.0
    assert (vectors.values == W).all()
    assert np.allclose(vectors.squares, (W.astype(np.float64) ** 2).sum(axis=1))
    assert vectors.zero.tolist() == [True, False, True, False]
    with pytest.raises(MemoryLimitError, match="fewer coordinates"):
        DenseVectors(4, 9, 100)
