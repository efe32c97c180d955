"""Entries of selected features, and their products with tiles of W, against plain NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.row_sparse import rows_and_labels
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import rowsparse as reference

from xmc_stream.grouplasso.kernels.rows import add_products
from xmc_stream.kernels.csr import keep_selected


def triple(M: Any) -> tuple[Any, Any, Any]:
    return M.indptr.astype(np.int64), M.indices.copy(), M.data.copy()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(features=st.sets(st.integers(0, 39)), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_entries_of_selected_features_are_kept_in_their_order(dtype: Any, features: set[int], seed: int) -> None:
    X, _ = rows_and_labels(30, 40, 3, 0.2, seed)
    indptr, indices, data = triple(X)
    indices, chosen = indices.astype(dtype), np.array(sorted(features), np.int64)
    ends, places, values = reference.kept(indptr, indices, data, chosen)
    got = np.full(31, -1, np.int64)
    keep_selected(indptr, indices, data, chosen, got)
    np.testing.assert_array_equal(got, ends)
    np.testing.assert_array_equal(indices[: got[-1]], places)
    np.testing.assert_array_equal(data[: got[-1]], values)


@given(cuts=st.sets(st.integers(1, 39)), low=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_products_are_the_same_bits_for_any_tiles(cuts: set[int], low: int, seed: int) -> None:
    X, _ = rows_and_labels(30, 40, 3, 0.2, seed)
    W = np.random.default_rng(seed).standard_normal((40, 21)).astype(np.float32)
    indptr, places, data = triple(X)
    whole = reference.products(indptr, places, data, W)
    np.testing.assert_allclose(whole, X @ W, rtol=1e-4, atol=1e-5)
    at, out = indptr[:-1].copy(), np.zeros((30, 21 - low), np.float32)
    bounds = [0, *sorted(cuts), 40]
    for first, last in itertools.pairwise(bounds):
        add_products(indptr, places, data, first, np.ascontiguousarray(W[first:last, low:]), at, out)
    np.testing.assert_array_equal(out, whole[:, low:])
    np.testing.assert_array_equal(at, indptr[1:])
