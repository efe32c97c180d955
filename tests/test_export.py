"""export: what is written is read back as the same data, by this library and by others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.matrices import finite, matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

import xmc_stream as xs
from xmc_stream.datasets.export import export
from xmc_stream.datasets.kernels.format import VALUE_BYTES, write_integer, write_value
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset


def store(path: Path, X: Any, Y: Any) -> Dataset:
    with new_dataset(path, X.shape[1], Y.shape[1], {"source": "made up"}, overwrite=True) as writer:
        writer.append(X.indptr.astype(np.int64), X.indices, X.data, Y.indptr.astype(np.int64), Y.indices)
    return Dataset(path)


@settings(max_examples=12, deadline=None)
@given(matrices(), st.sampled_from(["d.txt", "d.txt.gz"]))
def test_what_is_exported_converts_to_the_same_data(
    tmp_path_factory: pytest.TempPathFactory, xy: tuple[Any, Any], name: str
) -> None:
    folder = tmp_path_factory.mktemp("round")
    dataset = store(folder / "d.xmc", *xy)
    export(dataset, folder / name)
    back = xs.convert(folder / name, folder / "back.xmc")
    assert back.fingerprint == dataset.fingerprint
    export(dataset, folder / "d.npz")
    for matrix, file in zip(xy, ("d.npz", "d-labels.npz"), strict=True):
        read = sp.load_npz(folder / file)
        assert read.shape == matrix.shape
        for part in ("indptr", "indices", "data"):
            assert getattr(read, part).tobytes() == getattr(matrix, part).astype(getattr(read, part).dtype).tobytes()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["d.xmc", "back.xmc", name, "d.npz", "d-labels.npz"]
    )


def test_scipy_reads_the_matrices(tmp_path: Path) -> None:
    X = sp.random(40, 30, 0.2, "csr", np.float32, 0)
    Y = sp.random(40, 7, 0.3, "csr", random_state=1)
    dataset = store(tmp_path / "d.xmc", X, Y)
    figures = export(dataset, tmp_path / "x.npz", labels=tmp_path / "y.npz")
    back = xs.convert(tmp_path / "x.npz", tmp_path / "back.xmc", labels=tmp_path / "y.npz")
    assert back.fingerprint == dataset.fingerprint
    x, y = sp.load_npz(tmp_path / "x.npz"), sp.load_npz(tmp_path / "y.npz")
    assert (x != X).nnz == 0
    assert (y != (Y != 0)).nnz == 0
    assert x.format == y.format == "csr"
    assert figures["bytes_out"] == sum((tmp_path / name).stat().st_size for name in ("x.npz", "y.npz"))


@pytest.mark.parametrize("base", [0, 1])
def test_scikit_learn_reads_the_libsvm_text(tmp_path: Path, base: int) -> None:
    X = sp.random(50, 20, 0.3, "csr", np.float32, 0)
    Y = sp.random(50, 6, 0.5, "csr", random_state=1)
    export(store(tmp_path / "d.xmc", X, Y), tmp_path / "d.svm", format="libsvm", base=base)
    x, y = load_svmlight_file(
        str(tmp_path / "d.svm"), n_features=20, dtype=np.float32, multilabel=True, zero_based=base == 0
    )
    assert (x != X).nnz == 0
    assert [list(map(int, row)) for row in y] == [(row.indices + base).tolist() for row in Y]


def test_libsvm_text_converts_to_the_same_data(tmp_path: Path) -> None:
    X = sp.random(50, 20, 0.5, "csr", np.float32, 0)
    Y = sp.random(50, 6, 0.5, "csr", random_state=1)
    X.data[:2] = 0  # and one sample without labels
    Y.data[:] = 1
    Y = sp.csr_matrix(sp.diags((np.arange(50) != 3).astype(np.float64)) @ Y)
    Y.sum_duplicates()  # sorts
    dataset = store(tmp_path / "d.xmc", X, Y)
    assert export(dataset, tmp_path / "d.svm.gz", format="libsvm")["blank_lines"] == 0
    back = xs.convert(tmp_path / "d.svm.gz", tmp_path / "back.xmc", n_features=20, n_labels=6)
    assert back.fingerprint == dataset.fingerprint


@pytest.mark.slow
def test_a_model_comes_out_as_a_matrix_and_a_bias(trained: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    commands("export", trained, tmp_path / "w.npz")
    model = xs.load_model(trained)
    weights = sp.load_npz(tmp_path / "w.npz")
    assert weights.format == "csc"
    assert (weights != model.to_scipy()).nnz == 0
    with np.load(tmp_path / "w.npz") as file:
        assert np.array_equal(file["bias"], model.bias())
    with pytest.raises(InputError, match="npz"):
        export(trained, tmp_path / "w.txt")


def test_the_command(small: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    told = commands("export", small, tmp_path / "a.txt.gz", "--memory-limit", "512MB")
    assert told["peak_rss"] < 512e6
    assert told["n_samples"] == 1500
    export(small, tmp_path / "b.txt.gz")
    assert (tmp_path / "a.txt.gz").read_bytes() == (tmp_path / "b.txt.gz").read_bytes()
    assert "--overwrite" in commands("export", small, tmp_path / "a.txt.gz", fails=True)
    export(small, tmp_path / "a.txt.gz", overwrite=True)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="exists"):
        export(small, tmp_path / "folder.txt", overwrite=True)


def test_what_cannot_be_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="libsvm"):
        export(small, tmp_path / "a.txt", base=1)
    with pytest.raises(InputError, match="format"):
        export(small, tmp_path / "a.txt", format="csv")
    with pytest.raises(InputError, match="npz"):
        export(small, tmp_path / "a.npz", format="libsvm")
    with pytest.raises(InputError, match="labels"):
        export(small, tmp_path / "a.txt", labels=tmp_path / "y.txt")
    with pytest.raises(MemoryLimitError, match="memory_limit"):
        export(small, tmp_path / "a.txt", memory_limit="60MB")
    assert list(tmp_path.iterdir()) == []


def written(value: np.float32) -> str:
    out = np.zeros(VALUE_BYTES + 1, np.uint8)
    out[-1] = 7
    n = write_value(value, out, 0)
    assert out[-1] == 7
    return out[:n].tobytes().decode()


@settings(max_examples=1000, deadline=None)
@given(finite)
def test_a_value_reads_back_and_is_as_short_as_it_can_be(number: float) -> None:
    value = np.float32(number)
    text = written(value)
    for read in (np.float32(float(text)), np.float32(text)):  # by way of a double, and at once
        assert read.tobytes() == value.tobytes()
    digits = text.lstrip("-").partition("e")[0].replace(".", "").strip("0") or "0"
    shortest = np.format_float_scientific(value, unique=True).lstrip("-").partition("e")[0].replace(".", "").strip("0")
    # a decimal that lies just between two floats is not trusted to be read as the one meant
    assert len(digits) == len(shortest or "0") or abs(float(value)) > 2**24


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-0.0, "-0"), (1, "1"), (10, "10"), (0.1, "0.1"), (-2.5, "-2.5"), (1e9, "1000000000"), (1e10, "1e+10"),
     (1e-5, "0.00001"), (1.5e-6, "1.5e-6"), (999999.94, "999999.94"), (16777216, "16777216"), (1e-45, "1e-45"),
     (3.4028235e38, "3.4028235e+38"), (1.17549435e-38, "1.1754944e-38")],
)  # fmt: skip
def test_values_as_people_write_them(value: float, text: str) -> None:
    assert written(np.float32(value)) == text


@given(st.integers(0, 2**63 - 1))
def test_integers(number: int) -> None:
    out = np.zeros(20, np.uint8)
    assert out[: write_integer(number, out, 0)].tobytes().decode() == str(number)
