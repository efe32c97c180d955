"""Products of sparse rows with dense factors, and folds of scores, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from xmc_stream.factors.kernels.ranges import Ranges, add_transposed_ranges, into_ranges, multiply_ranges
from xmc_stream.kernels.blocks import Labels
from xmc_stream.kernels.lines import CACHE_LINE, aligned_zeros, lanes
from xmc_stream.kernels.metrics import fold_counts, take_positives
from xmc_stream.kernels.products import add_transposed, multiply
from xmc_stream.kernels.ranking import fold_top_k
from xmc_stream.lowrank.kernels.steps import add_column_dots, are_true, pair_dots


def triple(M: Any) -> tuple[Any, Any, Any]:
    return M.indptr.astype(np.int64), M.indices, M.data


def test_lines_are_whole_cache_lines_and_hold_their_columns() -> None:
    assert [lanes(n) for n in (1, 2, 3, 8, 9, 16, 17, 100)] == [1, 2, 4, 8, 16, 16, 32, 112]
    for shape, dtype in (((5, 16), np.float32), ((3, 48), np.float64)):
        lines = aligned_zeros(shape, dtype)
        assert lines.ctypes.data % (CACHE_LINE * 4) == 0
        assert lines.shape == shape
        assert lines.dtype == dtype
        assert lines.flags.c_contiguous
        assert not lines.any()


@pytest.mark.parametrize("width", [1, 7, 8, 33])
def test_products_are_numpys_and_do_not_depend_on_the_other_columns(width: int) -> None:
    rng = np.random.default_rng(width)
    M = sp.random(40, 30, 0.2, format="csr", dtype=np.float32, random_state=1)
    S, U = rng.random((30, width)).astype(np.float32), rng.random((40, width)).astype(np.float32)
    out, total = np.empty((40, width), np.float32), np.ones((30, width), np.float32)
    multiply(*triple(M), S, out)
    add_transposed(*triple(M), U, total)
    np.testing.assert_allclose(out, M @ S, rtol=1e-5)
    np.testing.assert_allclose(total, 1 + M.T @ U, rtol=1e-5)
    one, alone = np.empty((40, 1), np.float32), np.ones((30, 1), np.float32)
    multiply(*triple(M), np.ascontiguousarray(S[:, -1:]), one)
    add_transposed(*triple(M), np.ascontiguousarray(U[:, -1:]), alone)
    np.testing.assert_array_equal(one[:, 0], out[:, -1])
    np.testing.assert_array_equal(alone[:, 0], total[:, -1])


@pytest.mark.parametrize(("bits", "width"), [(1, 1), (3, 16), (4, 33), (5, 8)])
def test_products_by_ranges_of_features_have_the_bits_of_those_by_rows(bits: int, width: int) -> None:
    rng = np.random.default_rng(bits)
    dense = sp.random(200, 30, 0.3, dtype=np.float32, random_state=3).toarray()
    dense[:, 16:24] = 0  # a range without entries
    dense[7] = 0
    M = sp.csr_matrix(dense)
    S, U = rng.random((30, width)).astype(np.float32), rng.random((200, width)).astype(np.float32)
    starts = np.full((29 >> bits) + 2, -1, np.int64)
    entries = Ranges(bits, starts, np.empty(M.nnz, np.uint32), np.empty(M.nnz, np.float32))
    into_ranges(*triple(M), entries)
    order = np.argsort(M.indices >> bits, kind="stable")
    np.testing.assert_array_equal(starts, np.searchsorted(M.indices[order] >> bits, np.arange(len(starts))))
    rows = np.repeat(np.arange(200), np.diff(M.indptr))
    np.testing.assert_array_equal(entries.places, ((rows << bits) | (M.indices & ((1 << bits) - 1)))[order])
    np.testing.assert_array_equal(entries.values, M.data[order])
    out, want = np.full((200, width), 7, np.float32), np.empty((200, width), np.float32)
    multiply_ranges(entries, S, out)
    multiply(*triple(M), S, want)
    np.testing.assert_array_equal(out.view(np.int32), want.view(np.int32))
    total, sums = np.ones((30, width), np.float32), np.ones((30, width), np.float32)
    add_transposed_ranges(entries, U, total)
    add_transposed(*triple(M), U, sums)
    np.testing.assert_array_equal(total.view(np.int32), sums.view(np.int32))


def test_pairs() -> None:
    rng = np.random.default_rng(0)
    A, H = rng.random((20, 11)), rng.random((15, 11))
    mask = sp.random(20, 15, 0.4, format="csr", random_state=2)
    Y = sp.csr_matrix((rng.random((20, 15)) < 0.4).astype(float))
    dots, true = np.empty(mask.nnz), np.empty(mask.nnz, np.bool_)
    pair_dots(*triple(mask)[:2], A, H, dots)
    are_true(*triple(mask)[:2], *triple(Y)[:2], true)
    rows = np.repeat(np.arange(20), np.diff(mask.indptr))
    np.testing.assert_allclose(dots, (A @ H.T)[rows, mask.indices])
    np.testing.assert_array_equal(true, Y.toarray()[rows, mask.indices] > 0)
    out = np.zeros(11)
    add_column_dots(A, A, out)
    np.testing.assert_allclose(out, (A * A).sum(axis=0))


def test_scores_are_folded_into_predictions_and_counts() -> None:
    rng = np.random.default_rng(3)
    Z = rng.integers(-3, 4, (25, 40)).astype(np.float32)  # many ties
    Y = sp.csr_matrix((rng.random((25, 40)) < 0.2).astype(float))
    y_indptr, y_indices, _ = triple(Y)
    labels, scores = np.full((25, 6), -1, np.int64), np.full((25, 6), -np.inf, np.float32)
    positives = np.empty(Y.nnz, np.float32)
    predicted, above, none = np.zeros(40, np.int32), np.zeros(25, np.int64), np.empty(0, np.int64)
    for low, high in ((0, 17), (17, 40)):
        take_positives(Z[:, low:high].copy(), low, y_indptr, y_indices, positives)
    rows = np.repeat(np.arange(25), np.diff(y_indptr))
    np.testing.assert_array_equal(positives, Z[rows, y_indices])
    for i in range(25):
        positives[y_indptr[i] : y_indptr[i + 1]].sort()
    for low, high in ((0, 17), (17, 40)):
        tile = Z[:, low:high].copy()
        fold_top_k(tile, low, Labels(none, none), labels, scores)
        fold_counts(tile, low, y_indptr, positives, np.float32(0), predicted, above)
    best = np.argsort(-Z, axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(labels, best)
    np.testing.assert_array_equal(scores, np.take_along_axis(Z, best, axis=1))
    np.testing.assert_array_equal(predicted, (Z > 0).sum(axis=0))
    for i in range(25):
        true = Z[i, y_indices[y_indptr[i] : y_indptr[i + 1]]]
        assert above[i] == sum(2 * int(z > s) + int(z == s) for z in Z[i] for s in true)
    barred = Labels(np.arange(26, dtype=np.int64), np.full(25, 5))  # of each row label 5
    labels[:], scores[:] = -1, -np.inf
    fold_top_k(Z.copy(), 0, barred, labels, scores)
    assert not (labels == 5).any()
