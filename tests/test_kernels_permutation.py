"""Visiting orders: those of the twin, everything once, and as if they were drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.compiler import needs_compiler, unless_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import permutation as orders
from scipy import stats

from xmc_stream.kernels.permutation import key_of, permuted, visiting_order, word_bits

# uncompiled, numpy says so when a key wraps around
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SEED = 7
LONGEST = unless_plain(100_000, 2_000)


def order(n: int, key: int) -> NDArray[np.int64]:
    out = np.empty(n, np.int64)
    visiting_order(0, n, np.uint64(key), out)
    return out


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 0x123456789ABCDEF0])
def test_orders_of_up_to_two_hundred_are_those_of_the_twin(key: int) -> None:
    for n in range(1, unless_plain(201, 70)):
        got = order(n, key).tolist()
        assert sorted(got) == list(range(n))
        assert got == orders.permutation(n, key)


@given(st.integers(1, LONGEST), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=25)
def test_orders_of_any_length_have_everything_once(n: int, key: int) -> None:
    got = order(n, key)
    assert np.array_equal(np.sort(got), np.arange(n))
    for t in range(0, n, max(1, n // 20)):
        assert got[t] == permuted(t, n, word_bits(n), np.uint64(key)) == orders.permuted(t, n, key)


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.data())
@settings(deadline=None)
def test_a_part_of_an_order_is_that_part(n: int, key: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, n))
    part = np.empty(data.draw(st.integers(0, n - begin)), np.int64)
    visiting_order(begin, n, np.uint64(key), part)
    assert np.array_equal(part, order(n, key)[begin : begin + len(part)])


numbers = st.tuples(st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 2**40))


@given(numbers)
@settings(deadline=None)
def test_keys_are_those_of_the_twin(four: tuple[int, int, int, int]) -> None:
    assert key_of(*four) == orders.key_of(*four)


def test_every_number_of_a_key_changes_the_order() -> None:
    keys = [key_of(*four) for four in itertools.product(range(4), repeat=4)]
    assert len({tuple(order(20, key)) for key in keys}) == 256


def orders_of(n: int, n_keys: int) -> NDArray[np.int64]:
    return np.array([order(n, key_of(SEED, label, 0, 0)) for label in range(n_keys)])


@pytest.mark.parametrize("n", [2, 4, 8, *(pytest.param(n, marks=needs_compiler) for n in (16, 37, 64, 200))])
def test_every_item_is_as_likely_at_every_place(n: int) -> None:
    for at_place in orders_of(n, 200 * n).T:
        assert stats.chisquare(np.bincount(at_place, minlength=n)).pvalue > 1e-5


@pytest.mark.parametrize("n", [3, 5, *(pytest.param(n, marks=needs_compiler) for n in (9, 17, 33))])
def test_items_are_spread_roughly_where_words_are_short_and_half_of_them_fall_outside(n: int) -> None:
    # a network of so few bits is not a perfect shuffle: of these n, the share of an item is up to 1.4 times its due
    for at_place in orders_of(n, 400 * n).T:
        shares = np.bincount(at_place, minlength=n) / 400
        assert 1 / 2 < shares.min() < shares.max() < 7 / 4


@needs_compiler
def test_what_comes_next_does_not_depend_on_what_came_first() -> None:
    first, second = orders_of(200, 80_000)[:, :2].T
    pairs = np.bincount(first * 200 + second, minlength=200 * 200)[~np.eye(200, dtype=bool).ravel()]
    assert stats.chisquare(pairs).pvalue > 1e-5
