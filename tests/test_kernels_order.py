"""Sorting by digits: the order of an argsort, for keys of any number of bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmc_stream.kernels.order import order_of


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_numbers_come_by_ascending_key(bits: int, n: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 1 << bits, n)
    expected = np.argsort(keys, kind="stable")  # equal keys: as they come
    out = np.empty(n, np.int64)
    order_of(keys, bits, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("key", [0, 1, (1 << 32) - 1])
def test_all_keys_alike(key: int) -> None:
    out = np.empty(5, np.int64)
    order_of(np.full(5, key), 32, out)
    assert out.tolist() == [0, 1, 2, 3, 4]
