"""Rows to columns: scipy's transposition, the same bytes for any buffer, in at most two passes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import csr as reference

from xmc_stream.errors import StoreError
from xmc_stream.kernels import csr as kernels
from xmc_stream.store import transpose as module
from xmc_stream.store.encoding import new_matrix, new_store
from xmc_stream.store.matrix import SparseMatrix, stream_bytes
from xmc_stream.store.nodes import Group
from xmc_stream.store.transpose import transpose


def write(path: Path, X: Any, with_data: bool = True) -> SparseMatrix:
    """A scipy CSR matrix on disk; without data: a matrix of ones."""
    with new_matrix(path, "csr_matrix", X.shape, np.float32 if with_data else None) as writer:
        writer.append(np.diff(X.indptr), X.indices, X.data if with_data else None)
    return SparseMatrix(path)


def column_counts(X: Any) -> Any:
    return np.bincount(X.indices, minlength=X.shape[1])


def transposed(rows: SparseMatrix, X: Any, path: Path, max_bytes: int) -> SparseMatrix:
    with new_store(path, {}) as group:
        transpose(rows, column_counts(X), group, max_bytes)
    return SparseMatrix(path)


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def check(got: SparseMatrix, X: Any) -> None:
    """`got` is scipy's CSC form of X."""
    expected = X.tocsc()
    expected.sort_indices()
    block = got.block(0, got.n_lines)
    assert (got.encoding, got.shape) == ("csc_matrix", X.shape)
    np.testing.assert_array_equal(block.indptr, expected.indptr)
    np.testing.assert_array_equal(block.indices, expected.indices)
    if block.data is not None:
        np.testing.assert_array_equal(block.data, expected.data)


def random_matrix(n: int, m: int, density: float, seed: int) -> Any:
    """CSR with float32 values, zeros among them; its first columns are the fullest."""
    rng = np.random.default_rng(seed)
    X = sp.csr_matrix(rng.random((n, m)) < density * np.linspace(2, 0, m), dtype=np.float32)
    X.data[:] = rng.integers(-3, 4, X.nnz)
    return X


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 60),
    m=st.integers(1, 40),
    density=st.floats(0, 1),
    seed=st.integers(0, 99),
    max_bytes=st.integers(1900, 12_000),
    with_data=st.booleans(),
)
def test_any_matrix_is_transposed_as_by_scipy_with_the_same_bytes_for_any_buffer(
    n: int, m: int, density: float, seed: int, max_bytes: int, with_data: bool
) -> None:
    X = random_matrix(n, m, density, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write(folder / "rows", X, with_data)
        check(transposed(rows, X, folder / "small", max_bytes), X)
        transposed(rows, X, folder / "large", 2**26)
        assert files(folder / "small") == files(folder / "large")
        assert sorted(p.name for p in folder.iterdir()) == ["large", "rows", "small"]


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("max_bytes", [2**26, 2**17, 2**14, 2**12])
def test_rows_are_read_once_whatever_the_buffer(tmp_path: Path, with_data: bool, max_bytes: int) -> None:
    X = random_matrix(3000, 100, 0.3, 0)
    rows = write(tmp_path / "rows", X, with_data)
    check(transposed(rows, X, tmp_path / "columns", max_bytes), X)
    assert rows.bytes_read == stream_bytes([rows], [(0, 3000)])
    assert not (tmp_path / "columns" / "spill").exists()


@pytest.mark.parametrize("with_data", [True, False])
def test_columns_larger_than_the_buffer_are_streamed(tmp_path: Path, with_data: bool) -> None:
    X = sp.lil_matrix((200_000, 5), dtype=np.float32)  # more rows than a spilled block has
    X[:, 1] = np.arange(1, 200_001)[:, None]
    X[::3, 2] = 7
    X[5, 3] = 1
    X[:, 4] = 9
    X = X.tocsr()
    rows = write(tmp_path / "rows", X, with_data)
    small = transposed(rows, X, tmp_path / "small", 40_000)
    check(small, X)
    transposed(rows, X, tmp_path / "large", 2**26)
    assert files(tmp_path / "small") == files(tmp_path / "large")


def test_more_columns_than_two_bytes_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(
        (np.ones(3000, np.float32), (rng.integers(0, 90, 3000), rng.integers(0, 200_000, 3000))), (90, 200_000)
    )
    X.sum_duplicates()
    check(transposed(write(tmp_path / "rows", X), X, tmp_path / "columns", 20_000), X)


def test_rows_beyond_int32_take_int64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X = random_matrix(500, 30, 0.2, 1)
    rows = write(tmp_path / "rows", X)
    transposed(rows, X, tmp_path / "narrow", 4000)
    monkeypatch.setattr(module, "index_dtype", lambda bound: np.dtype(np.int64))
    monkeypatch.setattr("xmc_stream.store.encoding.index_dtype", lambda bound: np.dtype(np.int64))
    wide = transposed(rows, X, tmp_path / "wide", 4000)
    assert wide.indices.dtype == np.int64
    check(wide, X)


def test_what_a_killed_process_spilled_is_replaced(tmp_path: Path) -> None:
    X = random_matrix(500, 30, 0.2, 1)
    rows = write(tmp_path / "rows", X)
    with new_store(tmp_path / "columns", {}) as group:
        left = tmp_path / "columns.partial" / "spill"
        left.mkdir()
        (left / "segments").write_bytes(bytes(10_000))
        transpose(rows, column_counts(X), group, 4000)
    check(SparseMatrix(tmp_path / "columns"), X)


@pytest.mark.parametrize("max_bytes", [2**20, 4000, 1900])
@pytest.mark.parametrize("how", ["more", "moved", "moved far", "beyond", "negative"])
def test_counts_and_rows_that_disagree_are_refused_and_leave_nothing(tmp_path: Path, how: str, max_bytes: int) -> None:
    X = random_matrix(500, 30, 0.2, 1)
    counts = column_counts(X)
    if how == "more":
        counts[3] += 1
    elif how.startswith("moved"):
        counts[3] -= 1
        counts[4 if how == "moved" else 29] += 1
    else:
        X.indices[70] = 30 if how == "beyond" else -1
    rows = write(tmp_path / "rows", X)
    with pytest.raises(StoreError, match="damaged"), new_store(tmp_path / "columns", {}) as group:
        transpose(rows, counts, group, max_bytes)
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_rows_larger_than_the_buffer_become_columns(tmp_path: Path) -> None:
    X = sp.csr_matrix(np.arange(1, 6001, dtype=np.float32).reshape(3, 2000))
    rows = write(tmp_path / "rows", X)
    with new_store(tmp_path / "columns", {}) as group:
        transpose(rows, column_counts(X), group, 20_000)
    found = SparseMatrix(tmp_path / "columns").block(0, 2000)
    columns = X.tocsc()
    for mine, theirs in (
        (found.indptr, columns.indptr),
        (found.indices, columns.indices),
        (found.values, columns.data),
    ):
        assert np.array_equal(mine, theirs)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 20), m=st.integers(1, 12), seed=st.integers(0, 99), with_data=st.booleans())
def test_kernels_do_what_their_plain_twins_do(n: int, m: int, seed: int, with_data: bool) -> None:
    X = random_matrix(n, m, 0.5, seed)
    rng = np.random.default_rng(seed)
    data = X.data if with_data else np.empty(0, np.float32)
    indptr = X.indptr.astype(np.int64)
    bucket_of = np.sort(rng.integers(0, 4, m)).astype(np.int32)
    bounds = np.searchsorted(bucket_of, np.arange(5))
    first = int(rng.integers(0, 2**40))
    places = np.concatenate([[0], np.cumsum(column_counts(X))[:-1]])

    def run(twin: Any) -> list[Any]:
        columns, lines, values = np.zeros(X.nnz, np.uint16), np.zeros(X.nnz, np.uint16), np.zeros(X.nnz, np.float32)
        starts = np.full(5, 7, np.int64)
        twin.sort_by_bucket(indptr, X.indices, data, bucket_of, bounds, starts, columns, lines, values)
        got = [columns, lines, values, starts]
        ends, indices, out = places.copy(), np.zeros(X.nnz, np.int64), np.zeros(X.nnz, np.float32)
        twin.scatter_lines(indptr, X.indices, data, first, ends, indices, out)
        got += [ends, indices, out]
        ends, indices, out = places.copy(), np.zeros(X.nnz, np.int64), np.zeros(X.nnz, np.float32)
        for b in range(4):
            part = slice(starts[b], starts[b + 1])
            of_bucket = ends[bounds[b] : bounds[b + 1]]
            twin.scatter_entries(
                columns[part], lines[part], data[:0] if not with_data else values[part], first, of_bucket, indices, out
            )
        return [*got, ends, indices, out]

    got = run(kernels)
    for a, b in zip(got, run(reference), strict=True):
        np.testing.assert_array_equal(a, b)
    for by_lines, by_buckets in zip(got[-6:-3], got[-3:], strict=True):
        np.testing.assert_array_equal(by_lines, by_buckets)


def test_a_spill_lies_within_the_work_folder(tmp_path: Path) -> None:
    group = Group(tmp_path / "a", {})
    X = random_matrix(500, 30, 0.2, 1)
    seen: list[str] = []

    class Watched(SparseMatrix):
        def _fill(self, *arguments: Any) -> Any:
            seen.extend(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("segments"))
            return super()._fill(*arguments)

    write(tmp_path / "rows", X)
    transpose(Watched(tmp_path / "rows"), column_counts(X), group.create_group("b"), 4000)
    assert set(seen) == {"a/b/spill/segments"}
