"""The order of large classes against its twin; many classes on streaming rows against each of them held whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.classes import Rows
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import order as twin

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.kernels.order import GROUP, RowOrder, stream_order
from xmc_stream.linear.kernels.dcd import ONCE, Times, new_scratch
from xmc_stream.ppdsparse.active_rows import Taken
from xmc_stream.ppdsparse.kernels.stream import ActiveRows
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.solver import Solver
from xmc_stream.ppdsparse.streaming import StreamSolver

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def order_of(rows: NDArray[Any], n: int, strip_bits: int, seed: int, round_: int, epoch: int) -> NDArray[np.int64]:
    out = np.empty(len(rows), np.int64)
    stream_order(rows, n, strip_bits, seed, round_, epoch, out)
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 6), st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 9), st.data())
def test_the_order_is_that_of_the_twin(
    n: int, strip_bits: int, seed: int, round_: int, epoch: int, data: st.DataObject
) -> None:
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=60))), np.int64)
    expected = twin.stream_order(rows.tolist(), n, strip_bits, seed, round_, epoch)
    assert order_of(rows, n, strip_bits, seed, round_, epoch).tolist() == expected


def test_the_order_of_some_rows_is_that_of_all_rows_without_the_others() -> None:
    n, strip_bits = 5000, 4
    everything = order_of(np.arange(n), n, strip_bits, 3, 1, 0)
    some = np.flatnonzero(np.random.default_rng(0).random(n) < 0.3)
    assert np.array_equal(some[order_of(some, n, strip_bits, 3, 1, 0)], everything[np.isin(everything, some)])
    assert not np.array_equal(order_of(np.arange(n), n, strip_bits, 3, 1, 1), everything)


def test_a_group_of_runs_is_visited_before_the_next_one_begins() -> None:
    n, strip_bits = GROUP * 40 * 8, 3
    strips = order_of(np.arange(n), n, strip_bits, 0, 0, 0) >> strip_bits
    groups = [set(part.tolist()) for part in np.split(strips, 40)]
    assert all(len(group) == GROUP for group in groups)
    assert sum(len(group) for group in groups) == len(set.union(*groups))
    assert max(groups[0]) - min(groups[0]) > 5 * GROUP  # from all over the rows
    assert np.abs(np.diff(strips[: GROUP * 8])).mean() > 20  # and mixed


class Streamed:
    """Rows in memory, with their times, in the place of `StreamedRows`."""

    def __init__(
        self, n_features: int, gather: Callable[[NDArray[np.int64], int], Callable[[], Rows] | None],
        ahead: Callable[[Any], None] = lambda ranges: None, times: NDArray[np.float64] = ONCE.rows,
    ) -> None:  # fmt: skip
        self.n_features, self.gather, self.ahead, self.weights = n_features, gather, ahead, self
        self.times = times

    def of(self, lines: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.times[lines] if len(self.times) else self.times


class Held:
    """A store of active rows in memory."""

    def __init__(self, sets: ActiveSets, n_samples: int, strip_bits: int) -> None:
        self.n_classes = len(sets.ptr) - 1
        n = len(sets.rows)
        edges = np.arange(RowOrder(n_samples, 0, strip_bits).n_strips + 1) << strip_bits
        starts = [np.searchsorted(sets.rows[a:b], edges) for a, b in itertools.pairwise(sets.ptr)]
        self.all = ActiveRows(
            sets.ptr, sets.rows.astype(np.int32), sets.sign, sets.alpha.copy(), np.zeros(n, np.bool_),
            np.array(starts, np.int32),
        )  # fmt: skip

    def take(self, ranges: Any) -> Taken:
        return Taken(self.all)

    def give_back(self, taken: Taken) -> None:
        pass

    def sleeping(self) -> NDArray[np.bool_]:
        ptr = self.all.ptr
        return np.array([self.all.asleep[a:b].any() for a, b in itertools.pairwise(ptr)])

    def wake(self, classes: NDArray[np.bool_]) -> None:
        for c in np.flatnonzero(classes):
            self.all.asleep[self.all.ptr[c] : self.all.ptr[c + 1]] = False


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 400), st.sampled_from([1, 2]), st.booleans(), st.booleans(),
    st.sampled_from([1.0, 3.0]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_streaming_takes_the_steps_that_holding_takes(
    seed: int, strip_bits: int, room: int, threads: int, hinge: bool, bias: bool, weight: float, dense: bool,
    weighed: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    n, d, k = int(rng.integers(1, 150)), 37 if dense else 9, 3
    X = np.where(rng.random((n, d)) < 0.5, rng.standard_normal((n, d)), 0).astype(np.float32)
    at = np.nonzero(X)
    block = Rows(np.concatenate([[0], np.cumsum(np.bincount(at[0], minlength=n))]), at[1].astype(np.int32), X[at])
    p = PPDSparseParameters(
        C=1.0, positive_weight=weight, lam=0.1, loss="hinge" if hinge else "squared_hinge", bias=bias, epochs=6, tol=0.05,
        max_rounds=5,
    )  # fmt: skip
    active = [np.flatnonzero(rng.random(n) < 0.7) for _ in range(k)]
    ptr = np.concatenate([[0], np.cumsum([len(rows) for rows in active])])
    rows = np.concatenate(active)
    alpha = np.where(rng.random(len(rows)) < 0.5, 0.0, rng.random(len(rows)))
    sets = ActiveSets(5, ptr, rows, np.where(rng.random(len(rows)) < 0.4, 1, -1).astype(np.int8), alpha)
    active = Held(sets, n, strip_bits)

    times = Times(rng.uniform(0.5, 3, (k, 2)), rng.choice([0.0, 0.4, 2.0], n)) if weighed else ONCE
    figures, weights = np.empty((k, 4)), np.zeros((k, d), np.float32)
    done = 0

    def sink(counts: NDArray[np.int64], features: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        nonlocal done
        ends = np.cumsum(counts)
        for begin, end in zip(ends - counts, ends, strict=True):
            weights[done, features[begin:end]] = values[begin:end]
            done += 1

    inner = Solver(p, seed, RowOrder(n, -1, strip_bits), dense, 1)
    inner.solve(sets, rows, block, new_scratch(d, n, n * d), figures, sink, times)

    def gather(lines: NDArray[np.int64], buffer: int) -> Callable[[], Rows] | None:
        found = block.take(lines)
        return None if len(found.indices) > max(room, d) else lambda: found

    solver = StreamSolver(inner, active, Streamed(d, gather, times=times.rows), times.classes, threads)
    inside = solver.solve()
    assert np.array_equal(active.all.alpha, sets.alpha)
    assert np.array_equal(inside, figures[:, 3])
    assert np.array_equal((np.sign(solver.v) * np.maximum(np.abs(solver.v) - p.lam, 0)).astype(np.float32), weights)
    assert np.array_equal(solver.v0.astype(np.float32), figures[:, 0].astype(np.float32))


def test_what_is_gathered_next_is_told_before() -> None:
    """Where most rows are needed, so that the disk reads them while the rows before are worked on."""
    rng = np.random.default_rng(0)
    n, d, strip_bits = 3000, 5, 2
    block = Rows(np.arange(n + 1), rng.integers(0, d, n).astype(np.int32), rng.random(n).astype(np.float32))
    told: list[set[int]] = []
    checked = 0

    def ahead(ranges: Any) -> None:
        told.append({row for start, stop in ranges for row in range(start, stop)})

    def gather(lines: NDArray[np.int64], buffer: int) -> Callable[[], Rows]:
        nonlocal checked
        if len(told) == 2 or (told and told[0] >= set(lines.tolist())):  # of the part before, and of this one
            assert set(lines.tolist()) <= told.pop(0)
            checked += 1
        taken = block.take(lines)
        return lambda: taken

    for share, expected in ((0.9, 2 * 5 - 1), (0.2, 0)):
        rows = np.flatnonzero(rng.random(n) < share)
        signs = np.where(rng.random(len(rows)) < 0.5, 1, -1).astype(np.int8)
        active = Held(ActiveSets(0, np.array([0, len(rows)]), rows, signs, np.zeros(len(rows))), n, strip_bits)
        p = PPDSparseParameters(lam=0.1, C=1.0, positive_weight=1.0, max_rounds=1, last_epochs=1)
        checked = 0
        inner = Solver(p, 0, RowOrder(n, -1, strip_bits))
        StreamSolver(inner, active, Streamed(d, gather, ahead), ONCE.classes).solve()
        # an epoch and the look at violations, six parts each, the first of which nobody could foresee; nor the second
        # of the epoch, as it was not known yet that most rows are needed
        assert (checked, len(told)) == (expected, 0)
