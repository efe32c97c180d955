"""Searches for violators, tile by tile, against the plain twin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers.compiler import unless_plain
from helpers.tiles import ANY, SMALL, csr, cut, matrices, random_matrices, rows_of, tile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from reference import scores as twin

from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.linear import tiles
from xmc_stream.linear.kernels.scores import FEW, in_fours
from xmc_stream.linear.tiles import tile_bytes, tile_width
from xmc_stream.ppdsparse.kernels import search as search_kernels
from xmc_stream.ppdsparse.kernels.search import (
    BINS,
    ActiveAhead,
    BestRows,
    LossSums,
    begin_anew,
    bias_losses,
    close_up,
    keep_best,
    loss_grid,
    places,
    search,
)
from xmc_stream.ppdsparse.parameters import LOSSES, PPDSparseParameters

KINDS = (*LOSSES, "none")  # of searches


@dataclass
class Problem:
    """X, W, bias; of each row and class: true, active; of each class: capacity, open or not. Labels start at first.

    weight: how many times the loss of positives counts; rows: how many times each row counts, None for once.
    """

    X: NDArray[np.float32]
    W: NDArray[np.float32]
    bias: NDArray[np.float32]
    true: NDArray[np.bool_]
    active: NDArray[np.bool_]
    capacity: NDArray[np.int64]
    open: NDArray[np.bool_]
    first: int
    threshold: float
    weight: float = 1.0
    rows: NDArray[np.float64] | None = None


Result = tuple[dict[int, list[tuple[int, float]]], dict[int, float]]


def searched(
    p: Problem, loss: str, start: int, cuts: Sequence[int], interval: int = 1000, narrowed: bool = False
) -> Result:
    """What is found, rows ascending, and the losses, by open class; rows cuts[0] .. cuts[-1] - 1 of a range from start.

    Classes that want more than `interval` rows are emptied after so many. narrowed: with weights of 16 bits.
    """
    classes, n_rows = np.flatnonzero(p.open), cuts[-1] - start
    width = tile_width(len(classes))
    tile = tile_of(p.W[:, classes], p.bias[classes], narrowed)
    slot_of = np.full(len(p.open), -1, np.int16)
    slot_of[classes] = np.arange(len(classes))
    wanted = np.zeros(width, np.int64)
    wanted[: len(classes)] = p.capacity[classes]
    large, capacity = wanted > interval, np.minimum(wanted, interval)
    flushed, kept = np.flatnonzero(large), np.flatnonzero(~large)
    order, of_slot = np.concatenate([flushed, kept]), places(capacity, np.where(large, interval, n_rows))
    end = np.zeros(width, np.int64)
    end[order] = np.cumsum(of_slot[order])
    begin = end - of_slot
    sizes = np.zeros(width, np.int64)
    best_scores, best_rows = np.empty(of_slot.sum(), np.float32), np.empty(of_slot.sum(), np.int32)
    threshold = np.where(capacity > 0, p.threshold, np.inf).astype(np.float32)
    members = [np.flatnonzero(p.active[start : cuts[-1], c]) for c in classes]
    ends = np.zeros(width, np.int64)
    ends[: len(classes)] = np.cumsum([len(rows) for rows in members])
    nexts = np.concatenate([[0], ends[:-1]]) * (ends > 0)
    active = np.concatenate([*members, np.empty(0)]).astype(np.int32)
    of_rows = np.empty(0) if p.rows is None else p.rows
    grid = loss_grid(len(p.X), float(of_rows.mean()) if len(of_rows) else 1.0)
    base = bias_losses(tile.bias, KINDS.index(loss), grid)
    losses, counts = np.zeros(width), np.zeros((len(flushed), BINS), np.int32)
    kept_rows = BestRows(capacity, begin, end, sizes, best_scores, best_rows, threshold)
    found: dict[int, list[tuple[int, float]]] = {c: [] for c in classes.tolist()}

    def take(slots: NDArray[np.int64]) -> NDArray[np.float32]:
        n = close_up(slots, kept_rows)
        at = int(begin[slots[0]]) if len(slots) else 0
        pairs = iter(zip((best_rows[at : at + n] + start).tolist(), best_scores[at : at + n].tolist(), strict=True))
        for s in slots:
            if s < len(classes):
                found[int(classes[s])] += itertools.islice(pairs, int(sizes[s]))
        assert next(pairs, None) is None
        return best_scores[at : at + n]

    # labels before, of and behind the classes
    Y = np.pad(p.true, ((0, 0), (p.first, 2)), constant_values=True)
    for low, high in itertools.pairwise(sorted({*cuts, *range(start, cuts[-1], interval)})):
        search(
            CSR(*csr(p.X[low:high])), Labels(*csr(Y[low:high])[:2]), low - start, p.first, slot_of, tile,
            ActiveAhead(nexts, ends, active), kept_rows,
            LossSums(KINDS.index(loss), grid, np.full(width, p.weight), base, losses, of_rows[low:high]),
            in_fours(*p.X.shape, np.count_nonzero(p.X)),
        )  # fmt: skip
        if (high - start) % interval == 0 or high == cuts[-1]:
            begin_anew(flushed, wanted[flushed], sizes, take(flushed), counts, threshold)
            assert not sizes[flushed].any()
    take(kept)
    assert not losses[len(classes) :].any()
    assert not sizes[len(classes) :].any()
    assert all(pairs == sorted(pairs) for pairs in found.values())
    losses += n_rows * base if p.rows is None else 0.0
    return found, dict(zip(classes.tolist(), losses.tolist(), strict=False))


def best_of(pairs: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Higher scores first, then lower rows; in ascending order."""
    return sorted(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:most])


def check_search(p: Problem, loss: str, ranges: Sequence[Sequence[int]], interval: int = 7) -> None:
    """Ranges: of each the ends of its row blocks. interval: rows of an interval, where there are intervals."""
    scores = twin.scores(rows_of(p.X), p.W, p.bias)
    together: dict[int, list[tuple[int, float]]] = {c: [] for c in np.flatnonzero(p.open).tolist()}
    for cuts in ranges:
        start, stop = cuts[0], cuts[-1]
        found, losses = searched(p, loss, start, cuts)
        assert (found, losses) == searched(p, loss, start, [start, stop])  # the same bits in one block
        for c, pairs in found.items():
            active, true = (set(np.flatnonzero(of[start:stop, c]).tolist()) for of in (p.active, p.true))
            if p.rows is not None:  # those of weight 0 are as if active
                active |= set(np.flatnonzero(p.rows[start:stop] == 0).tolist())
            expected = twin.violators(scores[start:stop, c], active, int(p.capacity[c]), p.threshold)
            assert pairs == [(start + row, score) for row, score in sorted(expected)]
            assert losses[c] == pytest.approx(
                twin.loss(scores[start:stop, c], true, loss, p.weight, None if p.rows is None else p.rows[start:stop]),
                rel=1e-5,
                abs=1e-5,
            )
            together[c] += pairs
        in_intervals, losses_of_intervals = searched(p, loss, start, cuts, interval)
        assert losses_of_intervals == losses
        for c, pairs in in_intervals.items():
            assert len(pairs) <= p.capacity[c] or p.capacity[c] > interval
            assert best_of(pairs, int(p.capacity[c])) == found[c]
    for c, pairs in together.items():
        active = set(np.flatnonzero(p.active[:, c] if p.rows is None else p.active[:, c] | (p.rows == 0)).tolist())
        expected = twin.violators(scores[:, c], active, int(p.capacity[c]), p.threshold)
        assert best_of(pairs, int(p.capacity[c])) == sorted(expected)


@st.composite
def problems(draw: st.DrawFn, element: st.SearchStrategy[float]) -> Problem:
    X, W, bias = draw(matrices(element))
    n, k = len(X), len(bias)
    flags = st.booleans()
    true, active = (draw(arrays.arrays(np.bool_, (n, k), elements=flags, fill=st.just(False))) for _ in range(2))
    capacity = draw(arrays.arrays(np.int64, k, elements=st.integers(0, n + 1), fill=st.integers(0, n + 1)))
    open_ = draw(arrays.arrays(np.bool_, k, elements=flags, fill=st.just(True)))
    open_[draw(st.integers(0, k - 1))] = True
    threshold = draw(st.sampled_from([-3.0, -1.0, np.float32(-0.99), 0.0]))
    weight = draw(st.sampled_from([1.0, 4.0, 0.3]))
    rows = draw(
        st.none() | arrays.arrays(np.float64, n, elements=st.sampled_from([0.0, 0.3, 1.0, 7.5]), fill=st.just(1.0))
    )
    if rows is not None and n and not rows.any():
        rows[0] = 0.3
    return Problem(
        X, W, bias, true, active | true, capacity, open_, draw(st.integers(0, 3)), float(threshold), weight, rows
    )


def cut_ranges(draw: st.DrawFn, n: int) -> list[list[int]]:
    return [
        [start, *sorted(draw(st.lists(st.integers(start, stop), max_size=2))), stop]
        for start, stop in itertools.pairwise(cut(draw, n))
    ]


@given(st.one_of(problems(SMALL), problems(ANY)), st.sampled_from(KINDS), st.data())
@settings(deadline=None)
def test_search_finds_what_sorting_finds(p: Problem, loss: str, data: st.DataObject) -> None:
    check_search(p, loss, cut_ranges(data.draw, len(p.X)), data.draw(st.integers(1, 9)))


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_search_of_many_rows(whole: bool, loss: str) -> None:
    rng = np.random.default_rng(2)
    n = unless_plain(300, 90)
    X, W, bias = random_matrices(n, 12, 100, 3, 0.4, whole)
    true = rng.random((n, 100)) < 0.02
    active = true | (rng.random((n, 100)) < rng.random(100) ** 4)
    p = Problem(X, W, bias, true, active, rng.integers(0, n // 5, 100), rng.random(100) < 0.9, 5, -1.0)
    ranges = [[0, n // 3, n // 3 + 1, n - 10], [n - 10, n]]
    for interval in unless_plain((1, n // 15, n // 2), (n // 15,)):
        check_search(p, loss, ranges, interval)
    check_search(replace(p, rows=rng.choice([0.0, 0.1, 2.0], n)), loss, ranges, n // 15)


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("share", [0.8, 1.0])
def test_search_of_rows_that_have_most_features(share: float, loss: str) -> None:
    """They are scored four at a time, but for what is left of a block: nobody can tell."""
    rng = np.random.default_rng(2)
    X, W, bias = random_matrices(60, 30, 100, 3, share, whole=False)
    assert in_fours(60, 30, np.count_nonzero(X))
    true = rng.random((60, 100)) < 0.05
    active = true | (rng.random((60, 100)) < rng.random(100) ** 4)
    p = Problem(X, W, bias, true, active, rng.integers(0, 20, 100), rng.random(100) < 0.9, 5, -1.0)
    check_search(p, loss, [[0, 3, 20, 51], [51, 60]], 7)
    check_search(replace(p, rows=rng.choice([0.0, 0.1, 2.0], 60)), loss, [[0, 3, 20, 51], [51, 60]], 7)
    assert searched(p, loss, 0, [0, 60]) == searched(p, loss, 0, list(range(61)))  # each row by itself


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("features", [2, 9])
def test_weighted_rows_that_meet_nothing_lose_the_same_by_any_cut(features: int, loss: str) -> None:
    n, k = 7, 40
    X, W = np.ones((n, features), np.float32), np.zeros((features, k), np.float32)
    bias = np.random.default_rng(3).uniform(-0.9, -0.1, k).astype(np.float32)  # below the threshold, and yet they lose
    none = np.zeros((n, k), np.bool_)
    rows = np.array([7.5, 7.5, 7.5, 1.0, 0.3, 0.0, 1.0])
    p = Problem(X, W, bias, none, none, np.full(k, 2), np.ones(k, np.bool_), 0, 0.0, 1.0, rows)
    at_once = searched(p, loss, 0, [0, n])
    assert searched(p, loss, 0, [0, 2, 3, n]) == at_once
    assert searched(p, loss, 0, list(range(n + 1))) == at_once


@given(problems(ANY), st.data())
@settings(deadline=None)
def test_a_narrow_search_is_one_of_rounded_weights(p: Problem, data: st.DataObject) -> None:
    cuts = cut(data.draw, len(p.X))
    rounded = replace(p, W=twin.narrow(p.W))
    assert searched(p, "none", 0, cuts, narrowed=True) == searched(rounded, "none", 0, cuts)


@pytest.mark.parametrize("share", [0.04, 0.3, 0.9])
def test_a_narrow_search_finds_what_an_exact_one_does_up_to_rounding(share: float) -> None:
    n, k, most = unless_plain((400, 200, 40), (150, 80, 15))
    X, W, bias = random_matrices(n, 100, k, 5, share, whole=False)
    W[:] /= 10
    none = np.zeros((n, k), np.bool_)
    p = Problem(X, W, bias, none, none, np.full(k, most), np.ones(k, np.bool_), 0, -1.0)
    exact, narrow = searched(p, "none", 0, [0, n])[0], searched(p, "none", 0, [0, n], narrowed=True)[0]
    assert exact != narrow
    scores, error = twin.scores(rows_of(X), W, bias), 2.0**-8 * np.abs(X) @ np.abs(W) + 1e-5
    for c in range(k):
        of_exact, of_narrow = dict(exact[c]), dict(narrow[c])
        least = min(of_exact.values()) if len(of_exact) == most else -1.0
        bound = error[:, c].max()
        assert set(np.flatnonzero(scores[:, c] > least + bound)) <= set(of_narrow)
        assert all(scores[row, c] > least - bound for row in of_narrow)
        assert all(abs(score - scores[row, c]) <= error[row, c] for row, score in of_narrow.items())


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shift", [-0.5, -1.0])
def test_search_where_rows_meet_few_weights(whole: bool, loss: str, shift: float) -> None:
    """Some rows are scored for the classes they meet alone, and others for all: nobody can tell."""
    rng = np.random.default_rng(2)
    X, W, bias = random_matrices(200, 300, 200, 3, 0.04, whole)
    bias += np.float32(shift)
    true = rng.random((200, 200)) < 0.02
    active = true | (rng.random((200, 200)) < rng.random(200) ** 4)
    p = Problem(X, W, bias, true, active, rng.integers(0, 30, 200), rng.random(200) < 0.9, 5, -1.0)
    width = tile_width(int(p.open.sum()))
    lengths = np.array(twin.run_lengths(W[:, p.open], width))
    share = np.mean([lengths[row != 0].sum() <= width // FEW for row in X])
    assert 0.2 < share < 0.9
    check_search(p, loss, [[0, 100, 101, 190], [190, 200]], 20)
    found, losses = searched(p, loss, 0, [0, 200])
    for mine in (np.arange(200) < 50, np.arange(200) >= 50):  # a narrower tile has other runs, and other rows meet few
        part = replace(p, open=p.open & mine)
        assert searched(part, loss, 0, [0, 200]) == (
            {c: pairs for c, pairs in found.items() if mine[c]}, {c: value for c, value in losses.items() if mine[c]}
        )  # fmt: skip


def test_thresholds_rise_from_leg_to_interval() -> None:
    """What is taken of many intervals is not much more than is wanted of all of them."""
    X, W, bias = random_matrices(3000, 12, 3, 3, 0.8, whole=False)
    nothing = np.zeros((3000, 3), np.bool_)
    p = Problem(X, W, bias, nothing, nothing, np.array([100, 300, 2999]), np.ones(3, np.bool_), 0, -1.0)
    taken = {c: len(pairs) for c, pairs in searched(p, "none", 0, [0, 3000], 50)[0].items()}
    violators = [len(twin.violators(of_class, (), 3000, -1.0)) for of_class in twin.scores(rows_of(X), W, bias).T]
    assert taken[0] < 700
    assert taken[1] < 1400 < min(violators)
    assert taken[2] == violators[2]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_whole_numbers_are_exact(loss: str) -> None:
    X, W, bias = random_matrices(50, 8, 40, 4, 0.5, whole=True)
    true = np.random.default_rng(5).random((50, 40)) < 0.3
    p = Problem(X, W, bias, true, true, np.zeros(40, np.int64), np.ones(40, np.bool_), 0, -1.0)
    found, losses = searched(p, loss, 0, [0, 50])
    z = np.where(true, 1, -1) * (X @ W + bias)
    hinge = np.maximum(0.0, 1.0 - z)
    expected = (hinge**2 / 2 if loss == "squared_hinge" else hinge).sum(axis=0)
    assert list(losses.values()) == expected.tolist()
    assert not any(found.values())  # no class had room


@given(
    st.lists(st.tuples(st.lists(SMALL, max_size=40), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=5),
    st.randoms(),
)
@settings(deadline=None)
def test_closing_up_keeps_the_best_in_order_of_rows(slots: Any, random: Any) -> None:
    begin = np.cumsum([3, *(len(scores) + gap for scores, gap, _ in slots)]).astype(np.int64)
    sizes = np.array([len(scores) for scores, _, _ in slots], np.int64)
    capacity = np.array([capacity for _, _, capacity in slots], np.int64)
    best_scores, best_rows = np.full(begin[-1], 99, np.float32), np.full(begin[-1], -7, np.int32)
    expected = []
    for first, (scores, _, most) in zip(begin, slots, strict=False):
        pairs = list(zip(sorted(random.sample(range(100), len(scores))), scores, strict=True))
        expected += best_of(pairs, most)
        for q, (row, score) in enumerate(pairs):
            best_scores[first + q], best_rows[first + q] = score, row
    kept = BestRows(capacity, begin[:-1], begin[1:], sizes, best_scores, best_rows, np.full(len(slots), -5, np.float32))
    n = close_up(np.arange(len(slots)), kept)
    assert n == len(expected)
    assert list(zip(best_rows[3 : 3 + n].tolist(), best_scores[3 : 3 + n].tolist(), strict=True)) == expected
    assert best_rows[:3].tolist() == [-7] * 3  # what stands before the first slot


FAR = st.sampled_from([np.inf, 3.4e38, -3e38, 1e-45, -1e-45, -0.0])


@given(st.lists(st.one_of(SMALL, ANY, FAR), min_size=2, max_size=60), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_the_best_are_kept_and_a_bound_below_them_is_named(
    values: list[float], before: int, data: st.DataObject
) -> None:
    size = len(values)
    capacity = data.draw(st.integers(1, size - 1))
    most = data.draw(st.integers(capacity, size - 1))
    scores, rows = np.array([9.0] * before + values, np.float32), np.arange(before + size, dtype=np.int32)
    pairs = list(zip(rows.tolist(), scores.tolist(), strict=True))
    lowest = np.float32(min(values))
    below = data.draw(st.sampled_from([lowest, *(min(lowest, np.float32(far)) for far in (-1e30, -5))]))
    n, bound = keep_best(scores, rows, before, size, capacity, most, below)
    assert capacity <= n <= most
    kept = list(zip(rows[before : before + n].tolist(), scores[before : before + n].tolist(), strict=True))
    assert rows[:before].tolist() == list(range(before))
    # rows ascend, and those that are best of all are among them, best first
    assert best_of(kept, n) == kept
    assert best_of(kept, capacity) == best_of(pairs[before:], capacity)
    # a later row that does not exceed the bound would not be one of the best
    assert sum(score >= bound for _, score in kept) == n
    left = [score for pair in pairs[before:] if pair not in kept for score in pair[1:]]
    assert all(score <= bound for score in left)


@given(st.lists(st.one_of(st.floats(-1, 4, width=32), st.sampled_from([-1 / 64, 0.0, -1e-30])), max_size=80), st.data())
@settings(deadline=None)
def test_a_raised_threshold_leaves_as_many_rows_as_are_wanted(values: list[float], data: st.DataObject) -> None:
    wanted, counts, threshold = data.draw(st.integers(1, 90)), np.zeros((1, BINS), np.int32), np.full(4, -1, np.float32)
    scores, before = np.array(values, np.float32), np.float32(-1)
    for part in np.split(scores, sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))):
        sizes = np.array([5, 5, len(part), 5])
        begin_anew(np.array([2]), np.array([wanted]), sizes, part, counts, threshold)
        assert sizes.tolist() == [5, 5, 0, 5]
        assert threshold[2] >= before
        before = threshold[2]
    assert counts.sum() == len(scores)
    assert threshold[2] == -1 or (scores >= threshold[2]).sum() >= wanted
    if (scores >= 0.5).sum() >= wanted:
        assert threshold[2] >= 0.5
    assert threshold[[0, 1, 3]].tolist() == [-1] * 3


def test_places_have_room_for_more_than_is_wanted_but_not_for_more_than_there_is() -> None:
    capacity = np.array([0, 1, 10, 100, 1000])
    assert places(capacity, 10_000).tolist() == [0, 17, 26, 150, 1500]
    assert places(capacity, 120).tolist() == [0, 17, 26, 120, 1000]


def test_a_tile_of_more_entries_than_four_bytes_number(monkeypatch: pytest.MonkeyPatch) -> None:
    X, W, bias = random_matrices(40, 20, 70, 7, 0.4, whole=False)
    none = np.zeros((40, 70), np.bool_)
    p = Problem(X, W, bias, none, none, np.full(70, 5), np.ones(70, np.bool_), 0, -1.0)
    usual, small = searched(p, "hinge", 0, [0, 40]), tile_of(W, bias)
    monkeypatch.setattr(tiles, "_MOST_PLACES", len(small.weights) - 1)
    large = tile_of(W, bias)
    assert (small.start.dtype, large.start.dtype) == (np.int32, np.int64)
    assert np.array_equal(large.start, small.start)
    assert tile_bytes(np.count_nonzero(W, axis=1), 70, len(W)) == large.nbytes == small.nbytes + 4 * 21
    assert searched(p, "hinge", 0, [0, 40]) == usual
    monkeypatch.setattr(tiles, "_MOST_PLACES", len(small.weights))
    assert tile_of(W, bias).start.dtype == np.int32


def test_a_loss_has_the_number_of_its_place() -> None:
    """What is summed where nothing is has a number that no loss has."""
    numbers = {name: PPDSparseParameters(loss=name).loss_code for name in LOSSES}
    assert numbers == {"squared_hinge": search_kernels.SQUARED_HINGE, "hinge": search_kernels.HINGE}
    assert search_kernels.NO_LOSS not in numbers.values()
