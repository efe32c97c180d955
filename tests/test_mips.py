"""Oracles of maximum inner products against all scores: sequences of changes, threads, zero classes, exclusions, recall."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler, unless_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import mips as twin

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.mips import exact
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.kernels.innerproducts import Best
from xmc_stream.mips.lsh import SimpleLSH
from xmc_stream.mips.oracle import Oracle, largest
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import ClassVectors, DenseVectors, ranked

K, D = 9, 12
WIDE = {"ef": K, "ef_links": K, "entries": K, "hubs": K, "posts": K, "links": 3, "drift": 0.0}
ORACLES: dict[str, dict[str, Any]] = {
    "exact": {}, "sw-graph": WIDE, "dense-exact": {}, "simple-lsh": {"bits": 64, "candidates": K, "hubs": 0},
}  # fmt: skip


def matrix(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """Rows of small integers, whose inner products are exact; some are zero."""
    return (rng.integers(-3, 4, (n, D)) * (rng.random((n, D)) < 0.4)).astype(np.float32)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "update", "remove"]), st.lists(st.integers(0, K - 1), unique=True)), max_size=8
)


@pytest.mark.parametrize("oracle", ORACLES)
@settings(max_examples=40)
@given(changes=CHANGES, seed=st.integers(0, 50))
def test_an_index_answers_as_all_scores_do(oracle: str, changes: list[tuple[str, list[int]]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = xs.InnerProductIndex(K, D, oracle, threads=1 + seed % 2, seed=seed, memory_limit="16GB", **ORACLES[oracle])
    W, present = np.zeros((K, D), np.float32), np.zeros(K, bool)
    for step, (what, named) in enumerate(changes):
        ids = np.array([k for k in named if present[k] == (what != "add")], np.int64)
        X = matrix(rng, len(ids))
        given_as = sp.csr_matrix(X) if seed % 3 else X
        if what == "remove":
            index.remove(ids)
            W[ids], present[ids] = 0.0, False
        else:
            getattr(index, what)(ids, given_as)
            W[ids], present[ids] = X, True
        queries, pairs = matrix(rng, 5), rng.random((5, K)) < 0.3
        found, scores = index.query(sp.csr_matrix(queries), exclude=sp.csr_matrix(pairs), step=step)
        barred = np.flatnonzero(~present).tolist()
        excluded = [np.flatnonzero(line).tolist() for line in pairs]
        wanted, tops = twin.best(W, queries, excluded, seed, step, barred)
        assert scores.tolist() == tops
        assert found.tolist() == wanted
    assert index.query(np.zeros((0, D), np.float32))[0].shape == (0,)


def low_rank(K: int, D: int, n: int) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Sparse classes in clusters, and rows that are parts of classes."""
    rng = np.random.default_rng(5)
    centres = sp.random_array((K // 10, D), density=0.03, rng=rng, data_sampler=rng.standard_normal).toarray()
    mask = rng.random((K, D)) < 0.6
    own = sp.random_array((K, D), density=0.01, rng=rng, data_sampler=rng.standard_normal).toarray()
    W = centres[np.arange(K) % (K // 10)] * mask + own
    W *= rng.lognormal(0.0, 0.4, (K, 1))
    X = np.abs(W[rng.integers(0, K, n)]) * (rng.random((n, D)) < 0.5) + (rng.random((n, D)) < 0.005) * 0.5
    return sp.csr_matrix(W.astype(np.float32)), sp.csr_matrix(X.astype(np.float32))


def rows_of(X: sp.csr_matrix) -> Any:
    return ranked(CSR(X.indptr, X.indices, X.data))


def vectors_of(W: sp.csr_matrix, dense: bool = False) -> Any:
    vectors = (DenseVectors if dense else ClassVectors)(*W.shape, most_bytes=1 << 24)
    vectors.put(np.arange(W.shape[0]), W.toarray() if dense else rows_of(W))
    return vectors


def nobody(n: int) -> Labels:
    return Labels(np.zeros(n + 1, np.int64), np.empty(0, np.int32))


def same(a: Best, b: Best) -> bool:
    return a.classes.tolist() == b.classes.tolist() and a.scores.tolist() == b.scores.tolist()


@pytest.mark.parametrize("kind", [Exact, SmallWorld, DenseExact, SimpleLSH])
def test_answers_do_not_depend_on_threads(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    W, X = low_rank(300, 400, 120)
    dense = kind in (DenseExact, SimpleLSH)
    rows = X.toarray() if dense else rows_of(X)
    answers = []
    for threads, tile in ((1, 8192), (3, 50)):
        monkeypatch.setattr(exact, "ROWS", tile)
        oracle = kind(vectors_of(W, dense), seed=3, threads=threads)
        oracle.vectors.put(np.arange(40), rows[:40] if dense else rows_of(X[:40]))
        oracle.refresh(np.arange(40))
        answers.append(oracle.query(rows, nobody(120), step=2))
    assert same(*answers)


@needs_compiler
def test_recall_is_high_and_all_oracles_agree_on_scores() -> None:
    W, X = low_rank(600, 500, 300)
    truth = Exact(vectors_of(W)).query(rows_of(X), nobody(300))
    assert np.allclose(truth.scores, (X @ W.T).toarray().max(axis=1), rtol=1e-5)
    graph = SmallWorld(vectors_of(W))
    found = graph.query(rows_of(X), nobody(300))
    right = found.classes == truth.classes
    assert right.mean() >= 0.95
    assert found.scores[right].tolist() == truth.scores[right].tolist()  # the same sum, bit for bit
    assert graph.scored < 300 * 200
    dense = DenseExact(vectors_of(W, dense=True)).query(X.toarray(), nobody(300))
    assert np.allclose(dense.scores, truth.scores, rtol=1e-5)
    hashed = SimpleLSH(vectors_of(W, dense=True), bits=128).query(X.toarray(), nobody(300))
    assert (hashed.classes == dense.classes).mean() >= 0.8


@pytest.mark.parametrize("n_classes", [10, 20, 100])
def test_each_of_few_classes_is_linked(n_classes: int) -> None:
    W, X = low_rank(n_classes, 300, 100)
    vectors = vectors_of(W)
    graph = SmallWorld(vectors)
    assert graph.graph.linked.all()
    assert (np.count_nonzero(graph.graph.neighbours >= 0, axis=1) >= 3).all()
    truth = Exact(vectors).query(rows_of(X), nobody(100))
    assert (graph.query(rows_of(X), nobody(100)).scores >= truth.scores).mean() >= 0.95


def test_a_search_looks_past_what_is_excluded() -> None:
    """Where the ten best classes of each row are no answers, as other true labels may be."""
    n = unless_plain(200, 60)
    W, X = low_rank(3 * n, 500, n)
    best = np.argsort(-(X @ W.T).toarray(), axis=1)[:, :10].astype(np.int32)
    excluded = Labels(10 * np.arange(n + 1), best.ravel())
    truth = Exact(vectors_of(W)).query(rows_of(X), excluded)
    found = SmallWorld(vectors_of(W)).query(rows_of(X), excluded)
    assert not (found.classes[:, None] == best).any()
    assert (found.scores >= truth.scores).mean() >= 0.9


@needs_compiler
def test_a_graph_that_is_changed_finds_as_much_as_a_new_one() -> None:
    W, X = low_rank(500, 400, 200)
    rng = np.random.default_rng(0)
    vectors = vectors_of(W[rng.permutation(500)])  # other vectors at first
    graph = SmallWorld(vectors)
    for classes in np.array_split(rng.permutation(500), 7):
        classes = np.sort(classes)
        vectors.clear(classes[::3])
        graph.refresh(classes[::3])
        vectors.put(classes, rows_of(W[classes]))
        graph.refresh(classes)
    truth = Exact(vectors).query(rows_of(X), nobody(200))
    assert (graph.query(rows_of(X), nobody(200)).classes == truth.classes).mean() >= 0.95


def test_a_refresh_links_only_what_drifted() -> None:
    W, _ = low_rank(200, 400, 1)
    vectors = vectors_of(W)
    graph, every = SmallWorld(vectors), np.arange(200)
    assert graph.linked_anew == 200
    graph.refresh(every)
    vectors.shrink(every, scale=1.1)
    graph.refresh(every)
    assert graph.linked_anew == 200
    vectors.shrink(np.arange(50), scale=2.0)
    graph.refresh(every)
    assert graph.linked_anew == 250
    vectors.put(
        np.array([7]), rows_of(W[8] * float(np.sqrt(vectors.squares[7] / vectors.squares[8])))
    )  # the norm stays
    graph.refresh(np.array([7]))
    assert graph.linked_anew == 251


def test_all_that_is_excluded_or_absent_leaves_no_answer() -> None:
    for name, options in ORACLES.items():
        index = xs.InnerProductIndex(3, D, name, threads=1, **options)
        x = np.ones((2, D), np.float32)
        assert index.query(x)[0].tolist() == [-1, -1]
        index.add([0, 2], np.stack([x[0], 2.0 * x[0]]))
        assert index.query(x, exclude=[2, -1])[0].tolist() == [0, 2]
        found, scores = index.query(x, exclude=sp.csr_matrix([[1, 0, 1], [0, 0, 0]]))
        assert found.tolist() == [-1, 2]
        assert scores.tolist() == [-np.inf, 2.0 * D]
        assert index.query(-x)[0].tolist() == [0, 0]  # below 0, and no vector of zeros is there
        index.add([1], np.zeros((1, D)))
        assert index.query(-x)[0].tolist() == [1, 1]
        assert index.query(-x, exclude=[1, -1])[0].tolist() == [0, 1]


def test_zero_classes_are_drawn_evenly_and_by_key() -> None:
    vectors = ClassVectors(8, D, 1 << 12)
    oracle: Oracle = Exact(vectors, seed=4)
    rows, excluded = (
        rows_of(sp.csr_matrix(np.ones((4000, D), np.float32))),
        Labels(np.arange(4001), np.full(4000, 3, np.int32)),
    )
    first, again, other = (oracle.query(rows, excluded, step).classes for step in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    counts = np.bincount(first, minlength=8)
    assert counts[3] == 0
    assert counts[np.arange(8) != 3].min() > 4000 / 7 * 0.8


def test_the_bound_of_codes_is_the_norm_that_one_class_in_a_hundred_exceeds() -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((400, D)).astype(np.float32)
    W /= np.linalg.norm(W, axis=1)[:, None]
    W[:4] *= 100.0
    W[4] *= 1.25
    vectors = DenseVectors(500, D, 1 << 17)  # the last are zero
    vectors.put(np.arange(400), W)
    oracle = SimpleLSH(vectors, bits=64)
    assert oracle.bound == pytest.approx(1.25)
    before = oracle.codes.copy()
    vectors.put(np.arange(4), 2 * W[:4])  # they have the codes of their direction
    oracle.refresh(np.arange(4))
    assert (oracle.codes == before).all()
    vectors.put(np.arange(400), 1.4 * W)
    oracle.refresh(np.arange(4))
    assert oracle.bound == pytest.approx(1.25)
    vectors.put(np.arange(400), 2 * W)
    oracle.refresh(np.arange(4))
    assert oracle.bound == pytest.approx(2.5)
    assert (oracle.codes == before).all()  # all were made anew
    vectors.put(np.arange(5, 400), 0.1 * W[5:])
    vectors.clear(np.arange(5))
    oracle.refresh(np.arange(5))
    fresh = SimpleLSH(vectors, bits=64)
    assert oracle.bound == fresh.bound == pytest.approx(0.1)
    assert (oracle.codes == fresh.codes)[:, 5:400].all()


def test_the_longest_classes_are_found_whatever_their_order() -> None:
    squares = np.array([3.0, 0.0, 5.0, 3.0, 1.0, 3.0])
    assert largest(squares, 3).tolist() == [0, 2, 3]
    assert largest(squares, 9).tolist() == [0, 2, 3, 4, 5]
    assert largest(np.zeros(4), 3).tolist() == largest(squares, 0).tolist() == []


@pytest.mark.parametrize(
    ("oracle", "name", "value"),
    [
        *(("sw-graph", name, value) for name in ("ef", "ef_links", "links", "sketch", "posts", "entries", "threads")
          for value in (0, -3, 2.0, "2", True, 2**31)),
        *(("sw-graph", "hubs", value) for value in (-1, 2.0)),
        *(("sw-graph", "drift", value) for value in (-0.1, np.nan, np.inf, "0.5", None)),
        *((oracle, "seed", value) for oracle in ORACLES for value in (-1, 2**63, 2**70, 0.0, None)),
        *((oracle, "threads", value) for oracle in ORACLES for value in (0, -1, 2.0, "2")),
        *(("simple-lsh", "candidates", value) for value in (0, -5, 2.5, "3")),
        *(("simple-lsh", "bits", value) for value in (0, 60, 64.0, "64", 320)),
        ("simple-lsh", "hubs", -1), ("exact", "n_ids", 3.0), ("exact", "n_ids", 2**31), ("exact", "n_features", "4"),
    ],
)  # fmt: skip
def test_an_option_out_of_range_is_named(oracle: str, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^The '{name}' of .* must be .*\. Got .* instead\.$"):
        xs.InnerProductIndex(**{"n_ids": 3, "n_features": D, "oracle": oracle, "memory_limit": "16GB", name: value})


@pytest.mark.parametrize("oracle", ORACLES)
def test_the_least_and_numpy_integers_are_options(oracle: str) -> None:
    least: dict[str, Any] = {
        "sw-graph": dict.fromkeys(["ef", "ef_links", "links", "sketch", "posts", "entries"], 1)
        | {"hubs": 0, "drift": 0},
        "simple-lsh": {"bits": np.int64(64), "candidates": 1, "hubs": 0},
    }
    options = least.get(oracle, {})
    index = xs.InnerProductIndex(np.int32(9), D, oracle, "16GB", np.int64(1), 2**63 - 1, **options)
    X = np.eye(9, D, dtype=np.float32)
    index.add(np.arange(9), X)
    found, scores = index.query(X)
    assert (found >= 0).all()
    assert scores.tolist() == (X @ X.T)[np.arange(9), found].tolist()


def test_memory_that_the_machine_or_the_limit_does_not_have_is_an_error_of_ours() -> None:
    with pytest.raises(MemoryLimitError, match="set a smaller memory_limit"):
        xs.InnerProductIndex(3, D, memory_limit="1000000TB")
    for oracle in ORACLES:
        with pytest.raises(MemoryLimitError, match="set a larger"):
            xs.InnerProductIndex(3, D, oracle, memory_limit="1MB")


@pytest.mark.parametrize(
    ("k", "n_features", "n", "per_row"),
    [
        (3, 1_000_000, 200, 5),
        (3, 440, unless_plain(6_000, 600), 40),
        (3, 200_000, unless_plain(8_000, 800), 30),
        (200_000, 50, 10, 5),
    ],
)
def test_exact_search_holds_no_more_than_it_says(k: int, n_features: int, n: int, per_row: int) -> None:
    """With many features, with all of them heavy, with most of them light, and with many classes."""
    rng = np.random.default_rng(0)
    vectors = ClassVectors(k, n_features, 1 << 23)
    vectors.put(np.arange(3), rows_of(sp.csr_matrix(np.ones((3, 20), np.float32), shape=(3, 20))))
    oracle = Exact(vectors, by_norm=True)
    starts = rng.integers(0, n_features // per_row, n)[:, None]
    features = (starts + np.arange(per_row) * (n_features // per_row)).astype(np.int32)
    rows = ranked(CSR(per_row * np.arange(n + 1), features.ravel(), np.ones(n * per_row, np.float32)))
    oracle.query(rows, nobody(n))  # compiles
    tracemalloc.start()
    oracle.query(rows, nobody(n))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    answers = 60 * n + (1 << 14)
    assert peak <= Exact.bytes_of(n_features, n * per_row, n_classes=k) + answers


@pytest.mark.parametrize("oracle", ["exact", "sw-graph"])
def test_ids_that_found_no_room_are_not_in_the_index(oracle: str) -> None:
    n = 500
    index = xs.InnerProductIndex(4, n, oracle, memory_limit="16GB", threads=1)
    small: Any = ClassVectors(
        4, n, most_bytes=4 * 21 + 8 * (2 * 1040 + 64)
    )  # two vectors of 500 entries, and short ones
    index.vectors = index.oracle.vectors = small  # type: ignore[attr-defined]
    ones, one = np.ones((1, n), np.float32), np.eye(1, n, dtype=np.float32)
    index.add([0, 1], np.concatenate([ones, one]))
    with pytest.raises(MemoryLimitError):
        index.add([2, 3], np.concatenate([2.0 * ones, 2.0 * ones]))  # the first of them had room
    assert index.query(ones)[0].tolist() == [0]
    assert index.query(-ones)[0].tolist() == [1]  # the others are no vectors of zeros
    index.add([2], 2.0 * ones)
    with pytest.raises(MemoryLimitError):
        index.update([1], ones)
    assert index.query(-ones)[0].tolist() == [0]
    index.add([1], one)
    assert [index.query(x)[0].tolist() for x in (ones, -ones)] == [[2], [1]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda index, x: index.add([0], x), "in the index already: update it"),
        (lambda index, x: index.update([1], x), "not in the index: add it"),
        (lambda index, x: index.remove([1]), "not in the index"),
        (lambda index, x: index.add([5], x), "from 0 to 2"),
        (lambda index, x: index.add([1, 1], x), "given twice"),
        (lambda index, x: index.add([1, 2], x), "2 ids were given, and 1 vectors"),
        (lambda index, x: index.add([1], x[:, 1:]), "features here"),
        (lambda index, x: index.add([1], x * np.inf), "not finite"),
        (lambda index, x: index.query(x, exclude=[3]), "an id for each of the 1 rows"),
        (lambda index, x: index.query(x, exclude=sp.csr_matrix((1, 2))), "is wanted"),
        (lambda index, x: xs.InnerProductIndex(3, D, "simplest"), "no oracle 'simplest'"),
        (lambda index, x: xs.InnerProductIndex(3, D, "exact", ef=3), "does not take these options"),
        (lambda index, x: xs.InnerProductIndex(3, D, "simple-lsh", bits=60), "must be 64, 128, 192 or 256"),
        (lambda index, x: xs.InnerProductIndex(0, D), "'n_ids' of InnerProductIndex must be an int from 1 to"),
        (lambda index, x: index.query(x, step=0.5), "'step' of InnerProductIndex.query must be an int from 0"),
    ],
)
def test_what_is_wrong_is_said(call: Any, words: str) -> None:
    index = xs.InnerProductIndex(3, D, threads=1)
    x = np.ones((1, D), np.float32)
    index.add([0], x)
    with pytest.raises(InputError, match=words):
        call(index, x)
    assert index.query(x)[0].tolist() == [0]
