"""Matrices in memory as a dataset in one pass: the dataset that a conversion makes, each byte written once, in small memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.convert.matrices import sides
from xmc_stream.convert.matrices.memory import stored
from xmc_stream.errors import InputError, StoreError
from xmc_stream.store.encoding import folder_bytes

LIMIT = "2GB"
N, D, K = 300, 20, 7


@pytest.fixture
def matrices() -> tuple[Any, Any]:
    """X with stored zeros, an empty row and unsorted rows; Y with rows of any number of labels."""
    rng = np.random.default_rng(0)
    X = sp.random(N, D, 0.4, format="csr", random_state=rng)
    X.data[::5] = 0
    X.indices, X.data = X.indices[::-1].copy(), X.data[::-1].copy()
    X.indptr = X.nnz - X.indptr[::-1]
    return X, sp.random(N, K, 0.3, format="csr", random_state=rng)


@pytest.mark.parametrize("normalize", ["none", "l2"])
@pytest.mark.parametrize("kind", ["csr", "csc", "array", "columns"])
@pytest.mark.parametrize("block", [2**18, 64, 1])
def test_it_is_the_dataset_of_a_conversion(
    matrices: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, normalize: str, kind: str, block: int
) -> None:
    X, Y = matrices
    given = {"csr": X, "csc": X.tocsc(), "array": X.toarray(), "columns": np.asfortranarray(X.toarray())}[kind]
    options: dict[str, Any] = {"labels": Y, "normalize": normalize, "memory_limit": LIMIT}
    converted = xs.convert(given, tmp_path / "converted.xmc", **options)
    monkeypatch.setattr(sides, "BLOCK", block)
    made = stored(given, Y, tmp_path / "made.xmc", LIMIT, normalize)
    assert made.fingerprint == converted.fingerprint
    arrays = [dataset.arrays_digest() for dataset in (made, converted)]
    assert arrays[0] == arrays[1]
    assert not xs.verify(made.path)["damage"]


def test_names_of_labels_are_kept(matrices: tuple[Any, Any], tmp_path: Path) -> None:
    names = ["a", "", "b\nc", "ß", "7", " ", '{"title": "x"}']
    made = stored(*matrices, tmp_path / "d.xmc", LIMIT, names=[name.encode() for name in names])
    assert list(made.label_names() or ()) == names
    assert stored(*matrices, tmp_path / "e.xmc", LIMIT).label_names() is None


@pytest.mark.parametrize("dense", [False, True])
def test_each_byte_is_written_once_and_blocks_are_all_that_is_held(tmp_path: Path, dense: bool) -> None:
    rng = np.random.default_rng(0)
    X: Any = rng.random((40_000, 100), np.float32)
    X, Y = X if dense else sp.csr_matrix(X), sp.csr_matrix(np.eye(5, dtype=np.float32)[rng.integers(0, 5, 40_000)])
    stored(X[:10], Y[:10], tmp_path / "first.xmc", LIMIT)  # what is loaded once does not count
    tracemalloc.start()
    before = _written()
    made = stored(X, Y, tmp_path / "d.xmc", LIMIT)
    written, peak = _written() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert folder_bytes(made.path) <= written < 1.001 * folder_bytes(made.path) + 10_000
    assert peak < 12 * 10**6  # X has 16 MB, and as CSR 32 MB


def _written() -> int:
    """Bytes that this process has written so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


@pytest.mark.parametrize("kind", [np.array, sp.csr_matrix])
def test_bad_values_are_named_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrices: tuple[Any, Any], kind: Any
) -> None:
    monkeypatch.setattr(sides, "BLOCK", 64)
    X = matrices[0].toarray()
    X[250, 3] = 1e39
    with pytest.raises(InputError, match=r"^X: value 1e\+39 in row 250 .* not finite in float32"):
        stored(kind(X), matrices[1], tmp_path / "d.xmc", LIMIT)
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_an_error_says_so(tmp_path: Path, matrices: tuple[Any, Any]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/.*Not a directory: mend that and try again"):
        stored(*matrices, tmp_path / "file" / "d.xmc", LIMIT)
