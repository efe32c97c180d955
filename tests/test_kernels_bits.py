"""Sorting by bits, against Python's own; places among sorted numbers, against NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmc_stream.kernels.bits import place_of, sort_numbers

# uncompiled, numpy says so when a count of bits wraps around
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@given(st.sets(st.integers(0, 700), max_size=200), st.sampled_from([0, 1, 63, 64, 10**6]), st.randoms())
def test_numbers_are_sorted(numbers: set[int], more: int, random: Any) -> None:
    """By bits, or among very many by comparing; up to the last number that there may be."""
    shuffled = list(numbers)
    random.shuffle(shuffled)
    for kind in (np.int32, np.int64):
        found = np.array(shuffled, kind)
        sort_numbers(found, max(numbers, default=0) + 1 + more)
        assert found.tolist() == sorted(numbers)


def test_all_numbers_of_a_range_are_sorted() -> None:
    for n in (1, 63, 64, 65, 1000):
        found = np.random.default_rng(n).permutation(n)
        sort_numbers(found, n)
        assert found.tolist() == list(range(n))


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(-1, 31), st.data())
def test_places_in_a_part_are_those_of_numpy(numbers: list[int], number: int, data: Any) -> None:
    high = data.draw(st.integers(0, len(numbers)))
    low = data.draw(st.integers(0, high))
    for kind in (np.int32, np.int64):
        ascending = np.sort(np.array(numbers, kind))
        assert place_of(ascending, low, high, number) == low + np.searchsorted(ascending[low:high], number)
