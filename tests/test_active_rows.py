"""Active rows on disk against plain arrays: what is taken, given back, woken and collected."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.linear.weights import Unit
from xmc_stream.ppdsparse import spill as spilled
from xmc_stream.ppdsparse.active_rows import DiskRows, rows_on_disk
from xmc_stream.ppdsparse.kernels.active import start_sets
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import Found, Problem, Share
from xmc_stream.ppdsparse.sets import RoundSets
from xmc_stream.ppdsparse.solver import start_sizes
from xmc_stream.ppdsparse.spill import SpilledRows
from xmc_stream.ppdsparse.weights import LossWeights
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset


def active_sets(rng: np.random.Generator, n: int, k: int) -> list[ActiveSets]:
    sets = []
    for c in range(k):
        rows = np.flatnonzero(rng.random(n) < rng.random())
        alpha = np.where(rng.random(len(rows)) < 0.5, 0.0, rng.random(len(rows)))
        sign = np.where(rng.random(len(rows)) < 0.5, 1, -1).astype(np.int8)
        sets.append(ActiveSets(c, np.array([0, len(rows)]), rows, sign, alpha))
    return sets


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 5), st.sampled_from([1, 7, 1000]), st.booleans())
def test_spilled_rows_are_what_arrays_hold(
    seed: int, strip_bits: int, k: int, at_a_time: int, approximate: bool
) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 200))
    sets = active_sets(rng, n, k)
    n_strips = -(-n >> strip_bits)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilled, "SORTED", at_a_time)
        patch.setattr(spilled, "SLICES", int(rng.integers(1, 9)))
        active = SpilledRows(Path(folder) / "active", k, n, strip_bits)
        for c, each in enumerate(sets):
            active.put(c, each, approximate)
        active.arrange()
        asleep = [np.zeros(len(each.rows), np.bool_) for each in sets]
        fresh = [(each.alpha == 0.0) & (each.sign < 0) for each in sets]
        for _ in range(4):
            strips = np.flatnonzero(rng.random(n_strips) < 0.5)
            ranges = [(int(r) << strip_bits, min((int(r) + 1) << strip_bits, n)) for r in strips]
            given = active.take(ranges)
            taken = given.active
            for c, each in enumerate(sets):
                mine = np.isin(each.rows >> strip_bits, strips)
                at = slice(int(taken.ptr[c]), int(taken.ptr[c + 1]))
                np.testing.assert_array_equal(taken.rows[at], each.rows[mine])
                np.testing.assert_array_equal(taken.sign[at], each.sign[mine])
                np.testing.assert_array_equal(taken.alpha[at], each.alpha[mine])
                np.testing.assert_array_equal(taken.asleep[at], asleep[c][mine])
                each.alpha[mine] = taken.alpha[at] = rng.random(int(mine.sum()))
                asleep[c][mine] = taken.asleep[at] = rng.random(int(mine.sum())) < 0.4
            active.give_back(given)
            assert active.sleeping().tolist() == [bool(each.any()) for each in asleep]
            if rng.random() < 0.4:
                woken = rng.random(k) < 0.5
                active.wake(woken)
                for c in np.flatnonzero(woken):
                    asleep[c][:] = False
        active.collect()
        new = sum(int(f.sum()) for f in fresh)
        used = sum(int((each.alpha[f] > 0).sum()) for each, f in zip(sets, fresh, strict=True))
        assert active.fresh() == ((new, used) if approximate else (0, 0))
        for c, each in enumerate(sets):
            parts = list(active.parts(c))
            for number, expected in enumerate((each.rows, each.sign, each.alpha)):
                got = np.concatenate([part[number] for part in parts] or [np.empty(0)])
                np.testing.assert_array_equal(got, expected)
        active.close()


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """3,000 rows; class 1 has the rows that divide by three."""
    path, n = tmp_path_factory.mktemp("active") / "data.xmc", 3000
    with new_dataset(path, 4, 3, {}) as writer:
        positive = np.arange(n) % 3 == 0
        y = np.concatenate([[0], np.cumsum(positive)])
        writer.append(
            np.arange(n + 1), np.zeros(n, np.int32), np.ones(n, np.float32), y, np.ones(n, np.int32)[positive]
        )
    return Dataset(path)


def all_of(active: DiskRows) -> list[np.ndarray]:
    return [np.concatenate(values) for values in zip(*active.parts(0), strict=True)]


def test_a_class_on_disk_starts_with_the_rows_that_memory_draws(labelled: Dataset, tmp_path: Path) -> None:
    n, seed, Y = labelled.n_samples, 5, labelled.Y_columns()
    positives = Y.gather(np.array([1]))
    size = int(start_sizes(np.array([len(positives.indices)]), n)[0])
    ptr, rows = np.zeros(2, np.int64), np.empty(len(positives.indices) + size, np.int64)
    start_sets(positives.indptr, positives.indices, np.array([size]), 1, n, seed, ptr, rows)
    problem = Problem(
        str(labelled.path), PPDSparseParameters(), seed, MemoryPlan(2**30, 2**30, 1), LossWeights(None, n)
    )
    sets = RoundSets(problem, labelled, 0, Share(0, 3, Unit(0, 3)), None, Found())
    active = rows_on_disk(tmp_path / "d", sets, 1)
    got = all_of(active)
    active.close()
    np.testing.assert_array_equal(got[0], rows)
    np.testing.assert_array_equal(got[1] > 0, rows % 3 == 0)
    assert not got[2].any()
