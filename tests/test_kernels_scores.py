"""Tiles, scores and top k against the plain twin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.compiler import unless_plain
from helpers.tiles import ANY, SMALL, calibrations, csr, cut, matrices, random_matrices, rows_of, tile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import calibration as calibration_twin
from reference import guide as guide_twin
from reference import scores as twin

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.kernels.instructions import above, widen
from xmc_stream.kernels.jit import kernel
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels.guide import NO_GROUPS, no_terms
from xmc_stream.linear.kernels.scores import NO_BOUNDS, TileClasses, in_fours, narrow
from xmc_stream.linear.kernels.topk import top_k
from xmc_stream.linear.tiles import full_bytes, tile_bytes, tile_width


@kernel
def widened_by_kernel(weight: np.uint16) -> np.float32:
    return widen(weight)


@kernel
def word_above(scores: NDArray[np.float32], at: int, bounds: NDArray[np.float32]) -> np.uint64:
    return above(scores, at, bounds)


def best(
    X: NDArray[np.float32],
    W: NDArray[np.float32],
    bias: NDArray[np.float32],
    k: int,
    cuts: Sequence[int],
    by: NDArray[np.float32] = NOT_CALIBRATED,
    terms: NDArray[np.float32] | None = None,
    groups: NDArray[np.uint8] = NO_GROUPS,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Labels and scores of each row's best k, from one tile after another."""
    terms = no_terms(len(X)) if terms is None else terms
    labels, scores = np.full((len(X), k), -1, np.int64), np.full((len(X), k), -np.inf, np.float32)
    for first, last in itertools.pairwise(cuts):
        tile = tile_of(W[:, first:last], bias[first:last])
        classes = TileClasses(
            first, last - first, tile, np.ascontiguousarray(by[:, first:last]), np.ascontiguousarray(groups[:, first:last]),
            NO_BOUNDS, np.empty(len(tile.bias), np.float32),
        )  # fmt: skip
        none = Labels(np.empty(0, np.int64), np.empty(0, np.int32))
        top_k(CSR(*csr(X)), [classes], terms, Ranking(labels, scores), none)
    return labels, scores


# ---- layout


def check_layout(W: NDArray[np.float32], bias: NDArray[np.float32]) -> None:
    tile, width = tile_of(W, bias), tile_width(len(bias))
    assert width % 32 == 0
    assert 0 <= width - len(bias) < 32
    lengths = np.diff(tile.start).tolist()
    assert tile.start[0] == 0
    assert lengths == twin.run_lengths(W, width)
    found = np.zeros((len(W), width), np.float32)
    for j, begin in enumerate(tile.start[:-1]):
        run = tile.weights[begin : begin + lengths[j]]
        if lengths[j] == width:
            found[j] = run
        else:
            slots = tile.slots[begin : begin + lengths[j]]
            assert len(set(slots.tolist())) == lengths[j]
            found[j, slots] = run
            assert np.all(run != 0)
    full = lengths == [width] * len(W)
    assert len(tile.slots) == (0 if full else len(tile.weights))
    assert np.array_equal(found[:, : len(bias)], W)
    assert not found[:, len(bias) :].any()
    assert np.array_equal(tile.bias[: len(bias)], bias)
    assert np.all(tile.bias[len(bias) :] == -np.inf)
    planned = tile_bytes(np.count_nonzero(W, axis=1).astype(np.int32), len(bias), len(W))
    assert tile.nbytes == (full_bytes(width, len(W)) if full else planned) <= planned


@given(matrices(ANY))
@settings(deadline=None)
def test_a_tile_holds_the_weights_by_feature(problem: Any) -> None:
    check_layout(problem[1], problem[2])


@pytest.mark.parametrize("n_classes", [1024, 1000, 512, 33, 32, 31, 1])
def test_a_quarter_of_the_width_makes_a_run_dense(n_classes: int) -> None:
    quarter = tile_width(n_classes) // 4
    W = np.zeros((5, n_classes), np.float32)
    for j, count in enumerate([quarter - 1, quarter, n_classes, 0, 1]):
        W[j, n_classes - min(count, n_classes) :] = j + 1
    check_layout(W, np.arange(n_classes, dtype=np.float32))


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BETWEEN = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38, -3.4e38, 1e-45, -0.0, 0.0]


@given(st.lists(st.one_of(FINITE, st.sampled_from(BETWEEN)), min_size=1))
def test_narrow_weights_are_the_nearest_of_16_bits(values: list[float]) -> None:
    weights = np.array(values, np.float32)
    narrowed = narrow(weights.copy())
    assert narrowed.dtype == np.uint16
    widened = np.array([widened_by_kernel(weight) for weight in narrowed], np.float32)
    expected, largest = twin.narrow(weights), np.array([0x7F7F0000], np.uint32).view(np.float32)
    expected[np.isinf(expected)] = np.copysign(largest, expected[np.isinf(expected)])
    assert np.array_equal(widened.view(np.uint32), expected.view(np.uint32))


@given(matrices(ANY))
@settings(deadline=None)
def test_a_narrow_tile_has_the_places_of_a_wide_one(problem: Any) -> None:
    _, W, bias = problem
    wide, narrowed = tile_of(W, bias), tile_of(W, bias, narrowed=True)
    for name in ("start", "slots", "bias"):
        assert np.array_equal(getattr(wide, name), getattr(narrowed, name))
    assert np.array_equal(narrowed.weights.astype(np.uint32) << 16, twin.narrow(wide.weights).view(np.uint32))
    assert wide.nbytes - narrowed.nbytes == 2 * len(wide.weights)


@pytest.mark.parametrize("at", [0, 32])
def test_a_word_of_what_is_above_its_bound(at: int) -> None:
    rng = np.random.default_rng(0)
    scores, bounds = (rng.integers(-1, 2, 64).astype(np.float32) for _ in range(2))
    scores[3], bounds[9], scores[at + 31], bounds[at + 31] = np.nan, np.inf, 2.0, -np.inf
    expected = sum(1 << b for b in range(32) if scores[at + b] > bounds[at + b])
    assert int(word_above(scores, at, bounds)) == expected


# ---- scores and top k


def check_scores(X: Any, W: Any, bias: Any, cuts: Sequence[int]) -> None:
    labels, scores = best(X, W, bias, len(bias), cuts)
    found = np.empty_like(scores)
    np.put_along_axis(found, labels, scores, axis=1)
    expected = twin.scores(rows_of(X), W, bias)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@given(matrices(ANY), st.data())
@settings(deadline=None)
def test_scores_are_the_float32_loop_bit_for_bit(problem: Any, data: st.DataObject) -> None:
    X, W, bias = problem
    check_scores(X, W, bias, cut(data.draw, len(bias)))


@pytest.mark.parametrize("cuts", [*unless_plain([[0, 1000], [0, 100, 1000]], []), [0, 1, 500, 533, 1000]])
def test_scores_of_a_thousand_classes_bit_for_bit(cuts: list[int]) -> None:
    check_scores(*random_matrices(10, 40, 1000, 0, 0.3, whole=False), cuts)


def check_top_k(X: Any, W: Any, bias: Any, k: int, cuts: Sequence[int], by: Any = NOT_CALIBRATED) -> None:
    labels, scores = best(X, W, bias, k, cuts, by)
    for i, of_row in enumerate(calibration_twin.calibrated(twin.scores(rows_of(X), W, bias), by)):
        assert list(zip(labels[i].tolist(), scores[i].tolist(), strict=True)) == twin.top_k(of_row, k)


@given(matrices(SMALL), st.integers(1, 75), st.data())
@settings(deadline=None)
def test_top_k_is_the_sorted_ranking_ties_to_the_lower_label(problem: Any, k: int, data: st.DataObject) -> None:
    check_top_k(*problem, k, cut(data.draw, len(problem[2])))


@pytest.mark.parametrize("whole", [True, False])
def test_top_k_over_a_thousand_classes(whole: bool) -> None:
    check_top_k(*random_matrices(30, 20, 1000, 1, 0.5, whole), 20, [0, 512, 1000])


@pytest.mark.parametrize("n", [3, 4, 11])
@pytest.mark.parametrize("share", [0.8, 1.0])
def test_rows_that_have_most_features_are_scored_four_at_a_time_bit_for_bit(n: int, share: float) -> None:
    X, W, bias = random_matrices(n, 60, 300, 2, share, whole=False)
    assert in_fours(n, 60, np.count_nonzero(X))
    check_scores(X, W, bias, [0, 100, 300])
    check_top_k(X, W, bias, 5, [0, 300])
    bias[7] = -np.inf
    alone = [best(row[None], W, bias, 9, [0, 300]) for row in X]  # a row by itself is scored the other way
    for found, expected in zip(best(X, W, bias, 9, [0, 300]), zip(*alone, strict=True), strict=True):
        assert found.tobytes() == np.concatenate(expected).tobytes()


def test_rows_of_few_features_are_not() -> None:
    X, *_ = random_matrices(40, 60, 10, 3, 0.3, whole=False)
    assert not in_fours(40, 60, np.count_nonzero(X))


@pytest.mark.parametrize("whole", [True, False])
def test_top_k_where_rows_meet_few_weights(whole: bool) -> None:
    X, W, bias = random_matrices(40, 300, 500, 6, 0.03, whole)
    check_top_k(X, W, bias - 1, 5, [0, 30, 250, 500])
    check_top_k(X, W, bias, 5, [0, 250, 500])  # many labels tie with the worst of the best


@given(matrices(SMALL), st.integers(1, 75), st.data())
@settings(deadline=None)
def test_top_k_ranks_by_calibrated_scores(problem: Any, k: int, data: st.DataObject) -> None:
    n = len(problem[2])
    check_top_k(*problem, k, cut(data.draw, n), data.draw(calibrations(n)))


@given(matrices(SMALL), st.integers(1, 75), st.booleans(), st.data())
@settings(deadline=None)
def test_top_k_ranks_by_guided_scores(problem: Any, k: int, calibrated: bool, data: st.DataObject) -> None:
    X, W, bias = problem
    n = len(bias)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check_guided(X, W, bias, k, cut(data.draw, n), rng, data.draw(calibrations(n)) if calibrated else NOT_CALIBRATED)


@pytest.mark.parametrize("share", [0.03, 0.4])
def test_guided_top_k_over_many_classes(share: float) -> None:
    X, W, bias = random_matrices(40, 300, 500, 6, share, False)
    check_guided(X, W, bias - 1, 5, [0, 30, 250, 500], np.random.default_rng(0), NOT_CALIBRATED)


def check_guided(X: Any, W: Any, bias: Any, k: int, cuts: Sequence[int], rng: np.random.Generator, by: Any) -> None:
    groups = np.stack([rng.integers(0, 2, len(bias)), rng.integers(2, 4, len(bias))]).astype(np.uint8)
    terms = guide_twin.terms_of(rng.normal(0, 1, (len(X), 4)).astype(np.float32), 0.5)
    labels, scores = best(X, W, bias, k, cuts, by, terms, groups)
    of_rows = guide_twin.guided_scores(twin.scores(rows_of(X), W, bias), terms, groups)
    for i, of_row in enumerate(calibration_twin.calibrated(of_rows, by)):
        assert list(zip(labels[i].tolist(), scores[i].tolist(), strict=True)) == twin.top_k(of_row, k)


@pytest.mark.parametrize("whole", [True, False])
def test_calibrated_top_k_where_rows_meet_few_weights(whole: bool) -> None:
    X, W, bias = random_matrices(40, 300, 500, 6, 0.03, whole)
    rng = np.random.default_rng(0)
    by = np.stack([rng.uniform(0.5, 2, 500), rng.normal(size=500), np.full(500, 1.0), rng.uniform(1, 3, 500)])
    check_top_k(X, W, bias - 1, 5, [0, 30, 250, 500], by.astype(np.float32))


def test_a_row_without_features_scores_the_bias() -> None:
    W, bias = np.full((3, 5), 7, np.float32), np.array([0.5, 2, -1, 2, 0], np.float32)
    labels, scores = best(np.zeros((1, 3), np.float32), W, bias, 6, [0, 2, 5])
    assert labels.tolist() == [[1, 3, 0, 4, 2, -1]]
    assert scores.tolist() == [[2, 2, 0.5, 0, -1, -np.inf]]
