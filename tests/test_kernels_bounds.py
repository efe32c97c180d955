"""Ordered tiles: bounds on scores hold, and the best labels are those of all scores, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.compiler import unless_plain
from helpers.tiles import csr, rows_of
from numpy.typing import NDArray
from reference import guide as guide_twin
from reference import scores as twin

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.kernels.calibration import NOT_CALIBRATED
from xmc_stream.kernels.ranking import Ranking
from xmc_stream.linear.kernels import topk
from xmc_stream.linear.kernels.guide import NO_GROUPS, no_terms
from xmc_stream.linear.kernels.scores import TileClasses
from xmc_stream.linear.kernels.topk import LEAD, top_k
from xmc_stream.linear.tiles import (
    BoundedTile,
    TileRange,
    bounds_bytes,
    bounds_of,
    make_bounded,
    tile_bytes,
    tile_width,
)

NONE = Labels(np.empty(0, np.int64), np.empty(0, np.int32))


def span_of(W: NDArray[Any], first: int = 0) -> TileRange:
    n = W.shape[1]
    return TileRange(first, first + n, tile_bytes(np.count_nonzero(W, axis=1), n, len(W)), np.count_nonzero(W))


def tile_of(W: NDArray[Any], bias: NDArray[np.float32], first: int, last: int) -> BoundedTile:
    return make_bounded(span_of(W[:, first:last], first), *csr(W[:, first:last].T), bias[first:last], len(W))


def ranked(
    X: NDArray[np.float32], W: NDArray[np.float32], bias: NDArray[np.float32], k: int, cuts: Sequence[int],
    terms: NDArray[np.float32] | None = None, groups: NDArray[np.uint8] = NO_GROUPS, barred: Labels = NONE,
    together: bool = True,
) -> list[list[tuple[int, float]]]:  # fmt: skip
    terms = no_terms(len(X)) if terms is None else terms
    labels, scores = np.full((len(X), k), -1, np.int64), np.full((len(X), k), -np.inf, np.float32)
    tiles = []
    for first, last in itertools.pairwise(cuts):
        made = tile_of(W, bias, first, last)
        classes = TileClasses(
            first, last - first, made.tile, NOT_CALIBRATED, np.ascontiguousarray(groups[:, first:last]), made.bounds,
            np.empty(len(made.tile.bias), np.float32),
        )  # fmt: skip
        assert len(made.bounds.order) == (last - first if last - first > LEAD else 0)
        tiles.append(classes)
    for some in [tiles] if together else [[one] for one in tiles]:
        top_k(CSR(*csr(X)), some, terms, Ranking(labels, scores), barred)
    return [list(zip(a, b, strict=True)) for a, b in zip(labels.tolist(), scores.tolist(), strict=True)]


def problem(whole: bool, n: int = 30, d: int = 20, k: int = 900) -> tuple[Any, Any, Any]:
    """Rows that have most features; a few long classes among short ones. Small whole numbers, so that scores tie, or not."""
    rng = np.random.default_rng(4)
    X = (
        rng.integers(0, 2, (n, d)) + (rng.random((n, d)) < 0.4)
        if whole
        else rng.random((n, d)) * (rng.random((n, d)) < 0.8)
    )
    W = rng.integers(-1, 2, (d, k)) if whole else rng.normal(0, 0.1, (d, k))
    W = W * np.where(rng.random(k) < 0.1, 3.0, 1.0)
    bias = rng.integers(-2, 1, k) if whole else rng.normal(-1, 0.3, k)
    return X.astype(np.float32), W.astype(np.float32), bias.astype(np.float32)


@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_no_score_exceeds_its_bound_and_bounds_do_not_rise(scale: float) -> None:
    X, W, bias = problem(whole=False)
    X[0] = W[:, 7] / np.linalg.norm(W[:, 7])  # the very direction of a class, and of a feature alone
    X[1] = np.eye(len(W))[0]
    X *= np.float32(scale)
    bias[3] = -np.inf
    ptr, _, values = csr(W.T)
    order, highest, longest = bounds_of(ptr, values, bias)
    assert sorted(order.tolist()) == list(range(len(bias)))
    assert order[-1] == 3
    assert (np.diff(highest) <= 0).all()
    assert (np.diff(longest) <= 0).all()
    scores = twin.scores(rows_of(X), W, bias)[:, order]
    excess = np.maximum(np.linalg.norm(X, axis=1) - 1, 0)[:, None]
    assert (scores <= highest + longest * excess.astype(np.float32)).all()
    if scale == 1.0:  # it is what the row in the class's own direction reaches
        slot = order.tolist().index(7)
        assert scores[0, slot] == pytest.approx(highest[slot], abs=0.02)


@pytest.mark.parametrize("cuts", [[0, 900], [0, 300, 340, 900], [0, 100, 900]])
@pytest.mark.parametrize(("whole", "scale"), [(True, 1.0), (False, 0.2), (False, 3.0)])
def test_the_best_of_ordered_tiles_are_those_of_all_scores(whole: bool, cuts: list[int], scale: float) -> None:
    X, W, bias = problem(whole)
    X *= np.float32(scale)
    scores = twin.scores(rows_of(X), W, bias)
    for k in unless_plain((1, 5, 60), (5,)):
        for together in (True, False):
            assert ranked(X, W, bias, k, cuts, together=together) == [twin.top_k(row, k) for row in scores]
        assert ranked(X[:3], W, bias, k, cuts) == [twin.top_k(row, k) for row in scores[:3]]  # one by one


@pytest.mark.parametrize("whole", [True, False])
def test_the_best_guided_labels_of_ordered_tiles(whole: bool) -> None:
    X, W, bias = problem(whole)
    rng = np.random.default_rng(0)
    n = len(bias)
    groups = np.stack([rng.integers(0, 2, n), rng.integers(2, 4, n)]).astype(np.uint8)
    terms = guide_twin.terms_of(rng.normal(0.5, 1, (len(X), 4)).astype(np.float32), 0.5)
    of_rows = guide_twin.guided_scores(twin.scores(rows_of(X), W, bias), terms, groups)
    for some in (slice(None), slice(3)):  # in fours, and one by one
        found = ranked(X[some], W, bias, 5, [0, 400, 900], terms[some], groups)
        assert found == [twin.top_k(row, 5) for row in of_rows[some]]


def test_classes_that_are_sure_tie_and_the_lower_label_is_first() -> None:
    """Scores of groups are flat near 1: labels just below it round to the same number, whatever their bounds are."""
    rng = np.random.default_rng(1)
    n, k = 8, 400
    W, X = np.zeros((1, k), np.float32), np.ones((n, 1), np.float32)
    W[0] = 1 - rng.permutation(np.linspace(0, 0.02, k))
    groups, terms = np.zeros((1, k), np.uint8), np.zeros((n, 1), np.float32)
    of_rows = guide_twin.guided_scores(twin.scores(rows_of(X), W, np.zeros(k, np.float32)), terms, groups)
    assert len(set(of_rows[0].tolist())) < k / 2
    found = ranked(X, W, np.zeros(k, np.float32), 20, [0, k], terms, groups)
    assert found == [twin.top_k(row, 20) for row in of_rows]


def test_what_is_not_predicted_does_not_hide_what_is() -> None:
    X, W, bias = problem(whole=False)
    scores = twin.scores(rows_of(X), W, bias)
    best = np.argsort(-scores, axis=1)[:, :7]
    barred = Labels(7 * np.arange(len(X) + 1), np.sort(best, axis=1).ravel().astype(np.int32))
    np.put_along_axis(scores, best, -np.inf, axis=1)
    assert ranked(X, W, bias, 5, [0, 300, 900], barred=barred) == [twin.top_k(row, 5) for row in scores]
    few = Labels(barred.indptr[:4], barred.indices)
    assert ranked(X[:3], W, bias, 5, [0, 300, 900], barred=few) == [twin.top_k(row, 5) for row in scores[:3]]


def test_classes_that_cannot_be_among_the_best_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    X, W, bias = problem(whole=False, n=400)
    W[:, 30:] *= np.float32(0.01)
    bias[:] = -1
    scored = []
    fours = topk.score_fours

    def counted(lines: Any, tile: Any, low: int, ends: NDArray[np.int64], scores: Any) -> None:
        scored.append(4 * int(np.maximum(ends - low, 0).sum()))
        fours(lines, tile, low, ends, scores)

    monkeypatch.setattr(topk, "score_fours", counted)
    ranked(X, W, bias, 5, [0, 450, 900])
    assert 0 < sum(scored) < 0.4 * len(X) * len(bias)


@pytest.mark.parametrize("size", [1e-25, 1e-19, 1e19, 3e19, 1e24, 1e37])
@pytest.mark.parametrize("even", [True, False], ids=["scores as usual", "scores far from it"])
def test_the_best_where_squares_leave_the_range_of_float32(size: float, even: bool) -> None:
    X, W, bias = problem(whole=False)
    X, W = X * np.float32(size), W * np.float32(1 / size if even else 1.0)
    W[:, 100:230] = 0
    with np.errstate(all="ignore"):
        scores = twin.scores(rows_of(X), W, bias)
        assert ranked(X, W, bias, 5, [0, 400, 900]) == [twin.top_k(row, 5) for row in scores]


@pytest.mark.parametrize("n", [LEAD + 1, 512, 900, 1000, 1024])
def test_a_tile_with_bounds_is_full_and_has_the_size_that_is_planned(n: int) -> None:
    _, W, bias = problem(whole=False, k=n)
    span = span_of(W)
    made = make_bounded(span, *csr(W.T), bias, len(W))
    width = tile_width(n)
    spare = 32 if width % 128 == 0 else 0
    assert len(made.tile.slots) == 0
    assert len(made.tile.weights) == (width + spare) * len(W)
    planned = bounds_bytes([span], len(W))
    assert planned == 10 * n + 4 * spare * (len(W) + 1)
    assert made.nbytes <= span.tile + planned
    W[:] = 0
    W[:, : width // 4 + 2] = 1  # so few that they would be scattered in a tile that is wider
    made = make_bounded(span_of(W), *csr(W.T), bias, len(W))
    assert len(made.bounds.order) == n
    assert len(made.tile.slots) == 0


def test_no_bounds_for_narrow_tiles_few_weights_and_many_features() -> None:
    _, W, _ = problem(whole=False)
    assert bounds_bytes([span_of(W)], len(W)) > 0
    assert bounds_bytes([span_of(W[:, :LEAD])], len(W)) == 0
    W[:, 200:] = 0
    assert bounds_bytes([span_of(W)], len(W)) == 0
    many = np.ones((1 << 15, LEAD + 1), np.float32)
    assert bounds_bytes([span_of(many)], 1 << 15) == 0


@pytest.mark.parametrize("weight", [2.0, 100.0])
def test_the_best_by_groups_of_large_weight(weight: float) -> None:
    """All groups doubt as much as they may: that is when sums are rounded most."""
    rng = np.random.default_rng(2)
    n, k, of = 8, 400, 8
    W, X = (0.8 + 0.2 * rng.random((1, k))).astype(np.float32), np.ones((n, 1), np.float32)
    groups = np.repeat(np.arange(of, dtype=np.uint8)[:, None], k, axis=1)
    terms = guide_twin.terms_of(np.full((n, of), -1, np.float32), weight / of)
    none = np.zeros(k, np.float32)
    of_rows = guide_twin.guided_scores(twin.scores(rows_of(X), W, none), terms, groups)
    assert len(set(of_rows[0].tolist())) < k
    assert ranked(X, W, none, 20, [0, k], terms, groups) == [twin.top_k(row, 20) for row in of_rows]
