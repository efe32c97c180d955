"""Stores of several matrices: made whole or not at all, opened or refused in one line, the same whatever their making."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.datasets.append import append
from xmc_stream.errors import InputError, StoreError
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.weights import Unit, new_unit, plain_units, starts_of, unit_path
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import ArrayWriter, new_matrix, new_store
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import begin_model, finish_model
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.store.predictions import (
    CHUNK_ROWS,
    Predictions,
    begin_predictions,
    finish_predictions,
    write_predictions,
)

N, D, K = 300, 70, 40
ATTRIBUTES = {"source": "train.txt", "normalisation": "l2"}


def random_matrix(n: int, m: int, density: float, seed: int) -> Any:
    """CSR, canonical, float32, with some empty rows and columns."""
    matrix = sp.random(n, m, density, "csr", np.float32, np.random.default_rng(seed))
    matrix.data -= np.float32(0.5)
    matrix.sum_duplicates()
    return matrix


@pytest.fixture(scope="module")
def X() -> Any:
    return random_matrix(N, D, 0.05, 0)


@pytest.fixture(scope="module")
def Y() -> Any:
    return random_matrix(N, K, 0.04, 1)


def make(path: Path, X: Any, Y: Any, step: int = 100, **options: Any) -> Dataset:
    """Write X and Y by `step` rows at a time, and open."""
    with new_dataset(path, X.shape[1], Y.shape[1], ATTRIBUTES, **options) as writer:
        for start in range(0, X.shape[0], step):
            x, y = X[start : start + step], Y[start : start + step]
            writer.append(x.indptr.astype(np.int64), x.indices, x.data, y.indptr.astype(np.int64), y.indices)
    return open_dataset(path)


def loaded(matrix: SparseMatrix) -> Any:
    """A stored matrix in scipy's form."""
    block = matrix.block(0, matrix.n_lines)
    data = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    kind = sp.csr_matrix if matrix.encoding == "csr_matrix" else sp.csc_matrix
    return kind((data, block.indices, block.indptr), shape=matrix.shape)


def equal(got: Any, expected: Any) -> None:
    """The same matrix in the same format, with the indices of a line ascending."""
    assert (got.format, got.shape, got.dtype) == (expected.format, expected.shape, expected.dtype)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def ones(matrix: Any) -> Any:
    matrix = matrix.copy()
    matrix.data[:] = 1
    return matrix


def files(path: Path) -> dict[str, bytes]:
    """Every file under a folder, by its name in it."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def one_line(error: pytest.ExceptionInfo[Exception], *mentions: object) -> None:
    """The message is one line and names what it must."""
    assert str(error.value).isprintable()
    for each in mentions:
        assert str(each) in str(error.value)


def test_a_dataset_gives_back_its_matrices_sizes_attributes_and_statistics(tmp_path: Path, X: Any, Y: Any) -> None:
    dataset = make(tmp_path / "d.xmc", X, Y)
    assert (dataset.n_samples, dataset.n_features, dataset.n_labels) == (N, D, K)
    attributes = {"format": "xmc_stream dataset", "version": 1, "nnz_features": X.nnz, "nnz_labels": Y.nnz}
    for key, value in {**ATTRIBUTES, **attributes, "n_samples": N, "n_features": D, "n_labels": K}.items():
        assert dataset.attributes[key] == value
    equal(loaded(dataset.X_rows()), X)
    equal(loaded(dataset.Y_rows()), ones(Y))
    equal(loaded(dataset.Y_columns()), ones(Y).tocsc())
    assert dataset.Y_rows().data is dataset.Y_columns().data is None
    assert not (tmp_path / "d.xmc" / "X" / "columns").exists()
    np.testing.assert_array_equal(dataset.feature_counts(), np.bincount(X.indices, minlength=D))
    np.testing.assert_array_equal(dataset.label_counts(), np.bincount(Y.indices, minlength=K))
    norms = zarr.open_group(dataset.path, mode="r")["statistics/row_norms"][:]
    np.testing.assert_allclose(norms, sp.linalg.norm(X.astype(np.float64), axis=1), rtol=1e-7)


def test_anndata_reads_both_matrices_by_rows_as_scipy_has_them(tmp_path: Path, X: Any, Y: Any) -> None:
    from anndata.io import read_elem, sparse_dataset

    make(tmp_path / "d.xmc", X, Y)
    for name, expected in (("X", X), ("Y", ones(Y))):
        group = zarr.open_group(tmp_path / "d.xmc" / name / "rows", mode="r")
        equal(read_elem(group), expected)
        equal(sparse_dataset(group)[50:200], expected[50:200])


def test_X_by_columns_is_made_when_first_asked_for_and_then_kept(tmp_path: Path, X: Any, Y: Any) -> None:
    dataset = make(tmp_path / "d.xmc", X, Y)
    equal(loaded(dataset.X_columns()), X.tocsc())
    kept = tmp_path / "d.xmc" / "X" / "columns" / "zarr.json"
    before = kept.stat().st_mtime_ns
    equal(loaded(open_dataset(dataset.path).X_columns()), X.tocsc())
    assert kept.stat().st_mtime_ns == before


def test_rows_whose_chunks_are_not_full_are_copied_as_values(tmp_path: Path, X: Any, Y: Any) -> None:
    small = make(tmp_path / "a.xmc", X, Y)
    grown = append(small, small, tmp_path / "b.xmc")
    equal(loaded(grown.X_rows()), sp.vstack([X, X]).tocsr())


@settings(max_examples=4, deadline=None)
@given(step=st.integers(1, N), seed=st.integers(0, 9))
def test_a_fingerprint_is_of_the_data_whatever_the_appends_and_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, step: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("fingerprint")
    X, Y = random_matrix(N, 300, 0.5, seed), random_matrix(N, K, 0.04, seed)
    dataset = make(folder / "a.xmc", X, Y, step)
    expected = make(folder / "b.xmc", X, Y, N).fingerprint
    assert dataset.fingerprint == expected
    with new_matrix(dataset.path / "X" / "rows", "csr_matrix", X.shape, chunk_bytes=2**16) as writer:
        writer.append(np.diff(X.indptr), X.indices, X.data)
    assert dataset.X_rows().indices.n_chunks == 3
    assert dataset.fingerprint == expected


def test_a_fingerprint_changes_with_any_change_of_the_data(tmp_path: Path, X: Any, Y: Any) -> None:
    value, label, row = X.copy(), Y.tolil(), sp.csr_matrix((1, D), dtype=np.float32)
    value.data[7] = np.nextafter(value.data[7], np.float32(9))
    label[3, 5] = 0 if label[3, 5] else 1
    wider = sp.hstack([X, sp.csr_matrix((N, 1), dtype=np.float32)], "csr")
    longer = sp.vstack([X, row], "csr"), sp.vstack([Y, sp.csr_matrix((1, K), dtype=np.float32)], "csr")
    variants = [(X, Y), (value, Y), (X, label.tocsr()), (wider, Y), longer, (X[::-1], Y)]
    made = [make(tmp_path / f"{i}.xmc", *both).fingerprint for i, both in enumerate(variants)]
    assert len(set(made)) == len(variants)


def test_X_and_Y_of_different_lengths_are_refused_and_leave_nothing(tmp_path: Path, X: Any, Y: Any) -> None:
    with pytest.raises(InputError, match="X has 300 rows and Y has 299"):
        make(tmp_path / "d.xmc", X, Y[:-1], step=N)
    assert list(tmp_path.iterdir()) == []


def test_opening_what_is_not_a_dataset_is_refused_in_one_line(tmp_path: Path, X: Any, Y: Any) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("1 0:1\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")
    zarr.create_group(tmp_path / "group")
    for name in ("nothing", "folder", "file", "group"):
        with pytest.raises(StoreError) as caught:
            open_dataset(tmp_path / name)
        one_line(caught, tmp_path / name, "not a dataset", "convert")
    with pytest.raises(StoreError) as caught:
        open_dataset(tmp_path / "broken")
    one_line(caught, tmp_path / "broken" / "zarr.json", "damaged")


def test_a_dataset_of_a_newer_version_is_refused_in_one_line(tmp_path: Path, X: Any, Y: Any) -> None:
    dataset = make(tmp_path / "d.xmc", X, Y)
    zarr.open_group(dataset.path).update_attributes({"version": 2})
    with pytest.raises(StoreError) as caught:
        open_dataset(dataset.path)
    one_line(caught, dataset.path, "newer", "format 2")


def test_an_existing_dataset_is_replaced_only_with_overwrite(tmp_path: Path, X: Any, Y: Any) -> None:
    path = make(tmp_path / "d.xmc", X, Y).path
    before = files(path)
    with pytest.raises(InputError) as caught:
        make(path, X[:10], Y[:10])
    one_line(caught, path, "overwrite=True")
    assert files(path) == before
    assert make(path, X[:10], Y[:10], overwrite=True).n_samples == 10
    assert [p.name for p in tmp_path.iterdir()] == ["d.xmc"]


@pytest.mark.parametrize("what", ["folder", "file", "group"])
def test_overwrite_never_replaces_what_is_not_a_dataset(tmp_path: Path, X: Any, Y: Any, what: str) -> None:
    path = tmp_path / "precious"
    if what == "file":
        path.write_text("thesis")
    elif what == "folder":
        path.mkdir()
        (path / "thesis").write_text("text")
    else:
        zarr.create_group(path)
    before = files(tmp_path)
    with pytest.raises(InputError) as caught:
        make(path, X, Y, overwrite=True)
    one_line(caught, path)
    assert files(tmp_path) == before


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
@pytest.mark.parametrize("name", ["feature_counts", "label_counts"])
def test_damaged_counts_are_named_and_never_used(tmp_path: Path, X: Any, Y: Any, name: str, how: str) -> None:
    path = make(tmp_path / "d.xmc", X, Y).path
    chunk = path / "statistics" / name / "c" / "0"
    content = chunk.read_bytes()
    if how == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes(content[:100] if how == "short" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(StoreError) as caught:
        getattr(open_dataset(path), name)()
    one_line(caught, path)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_store_whose_making_fails_leaves_nothing_and_what_was_there_as_it_was(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(path: Path) -> None:
        with new_store(path, {"a": 1}) as group:
            ArrayWriter(group, "values", np.float64).append(np.zeros(10))
            raise error

    with pytest.raises(error):
        fail(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    with new_store(tmp_path / "old", {"a": 2}):
        pass
    before = files(tmp_path)
    with pytest.raises(error):
        fail(tmp_path / "old")
    assert files(tmp_path) == before


def test_publishing_over_a_store_puts_all_of_the_new_one_in_its_place(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with new_store(tmp_path / "s", {"name": name}) as group:
            writer = ArrayWriter(group, name, np.int64)
            writer.append(np.arange(3))
            writer.close()
            if name == "second":  # what a process that was killed as it replaced a store may leave
                zarr.create_group(tmp_path / "s.replaced" / "store")
                (tmp_path / "s.replaced" / "ledger").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    group = zarr.open_group(tmp_path / "s", mode="r")
    assert (dict(group.attrs), list(group.array_keys())) == ({"name": "second"}, ["second"])


KILLED = """
import os, signal, sys
import numpy as np
from xmc_stream.store.new_dataset import new_dataset
with new_dataset(sys.argv[1], 5, 3, {}) as writer:
    writer.append(np.array([0, 1]), np.array([4], np.int32), np.ones(1, np.float32), np.array([0, 0]), np.empty(0, np.int32))
    writer.X.close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_what_a_killed_process_leaves_opens_nowhere_and_is_replaced(tmp_path: Path, X: Any, Y: Any) -> None:
    path = tmp_path / "d.xmc"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["d.xmc.partial"]
    for name in (path, tmp_path / "d.xmc.partial"):
        with pytest.raises(StoreError):
            open_dataset(name)
    equal(loaded(make(path, X, Y).X_rows()), X)
    assert [p.name for p in tmp_path.iterdir()] == ["d.xmc"]


def test_predictions_give_back_the_rows_written_in_any_order(tmp_path: Path) -> None:
    n, k = 2 * CHUNK_ROWS + 10, 3
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(-1, 900, (n, k)), rng.standard_normal((n, k)).astype(np.float32)
    path = tmp_path / "p.zarr"
    work = begin_predictions(path, n, 900, k)
    for start in (2 * CHUNK_ROWS, 0, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        write_predictions(work, start, labels[rows], scores[rows])
    with pytest.raises(StoreError, match="holds no predictions"):
        Predictions(path)
    finish_predictions(work, path, {"model": "m"}, overwrite=False)
    predictions = Predictions(path)
    assert (predictions.n_samples, predictions.k, predictions.attributes["model"]) == (n, k, "m")
    got = predictions.rows(4000, 8200)
    np.testing.assert_array_equal(got[0], labels[4000:8200])
    np.testing.assert_array_equal(got[1], scores[4000:8200])
    assert got[1].dtype == np.float32
    blocks = list(predictions.blocks())
    np.testing.assert_array_equal([start for start, _, _ in blocks], np.cumsum([0, *(len(b[1]) for b in blocks[:-1])]))
    np.testing.assert_array_equal(np.concatenate([block[1] for block in blocks]), labels)
    np.testing.assert_array_equal(np.concatenate([block[2] for block in blocks]), scores)


def some_predictions(path: Path, value: int = 1, overwrite: bool = False) -> Predictions:
    work = begin_predictions(path, 5, 9, 2)
    write_predictions(work, 0, np.full((5, 2), value), np.ones((5, 2), np.float32))
    finish_predictions(work, path, {}, overwrite)
    return Predictions(path)


def test_existing_predictions_are_replaced_only_with_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "p.zarr"
    some_predictions(path)
    with pytest.raises(InputError, match="overwrite=True"):
        some_predictions(path, 2)
    assert (Predictions(path).rows(0, 5)[0] == 1).all()
    assert (some_predictions(path, 2, overwrite=True).rows(0, 5)[0] == 2).all()


def test_overwrite_never_replaces_what_holds_no_predictions(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("text")
    with pytest.raises(InputError):
        some_predictions(tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "thesis").read_text() == "text"


@pytest.mark.parametrize("name", ["labels", "scores"])
def test_predictions_with_a_missing_chunk_are_refused(tmp_path: Path, name: str) -> None:
    some_predictions(tmp_path / "p.zarr")
    (tmp_path / "p.zarr" / name / "c" / "0" / "0").unlink()
    with pytest.raises(StoreError, match=name):
        Predictions(tmp_path / "p.zarr").rows(0, 5)


CLASSES = 1024 + 76  # two units
MODEL = {"solver": "ppdsparse", "params": {"lam": 0.01}, "seed": 3, "n_features": D, "n_labels": CLASSES, "nnz": 1}


@pytest.fixture(scope="module")
def W() -> Any:
    return random_matrix(CLASSES, D, 0.2, 2).T


def make_model(
    path: Path, W: Any, bias: Any, attributes: dict[str, Any] | None = None, units: list[Unit] | None = None
) -> LinearModel:
    work = path.with_name(path.name + ".partial")
    begin_model(work)
    units = units or plain_units(W.shape[1])
    for unit in units:
        first, last = unit
        part = W[:, first:last]
        with new_unit(unit_path(work, unit), W.shape[0], last - first) as writer:
            writer.weights.append(np.diff(part.indptr), part.indices, part.data)
            writer.bias[:] = bias[first:last]
            writer.statistics["loss"] = np.arange(first, last) / 3
    sizes = {"n_features": W.shape[0], "n_labels": W.shape[1], **starts_of(units)}
    finish_model(work, path, {**MODEL, **sizes, **(attributes or {})})
    return LinearModel(path)


@pytest.fixture(scope="module")
def bias() -> Any:
    return np.linspace(-1, 1, CLASSES, dtype=np.float32)


def test_a_model_gives_back_the_weights_bias_and_figures_of_its_units(tmp_path: Path, W: Any, bias: Any) -> None:
    model = make_model(tmp_path / "m", W, bias)
    assert (model.n_features, model.n_labels) == W.shape
    assert {key: model.attributes[key] for key in MODEL} == MODEL
    assert model.units == [(0, 1024), (1024, CLASSES)]
    for unit in model.units:
        first, last = unit
        equal(loaded(model.unit_weights(unit)), W[:, first:last])
        np.testing.assert_array_equal(model.unit_array(unit), bias[first:last])
        np.testing.assert_array_equal(model.unit_array(unit, "loss"), np.arange(first, last) / 3)
    for first, last in ((0, 1024), (1000, 1001), (1024, CLASSES), (1030, 1090)):
        block = model.classes(first, last)
        assert (block.start, block.n) == (first, last - first)
        equal(sp.csc_matrix((block.values, block.indices, block.indptr), (D, block.n)), W[:, first:last])
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_digest_is_of_weights_and_parameters_and_not_of_layout_or_ledger(tmp_path: Path, W: Any, bias: Any) -> None:
    wide = sp.csc_matrix(random_matrix(CLASSES, 50, 0.5, 4).T)
    expected = make_model(tmp_path / "a", wide, bias).digest()
    model = make_model(tmp_path / "b", wide, bias, {"seconds": 9, "identity": {"of": "other"}, "duality_gap": 0.5})
    part = wide[:, :1024]
    with new_matrix(
        unit_path(model.path, model.units[0]) / "weights", "csc_matrix", part.shape, chunk_bytes=2**16
    ) as writer:
        writer.append(np.diff(part.indptr), part.indices, part.data)
    (model.path / "ledger.jsonl").write_text("another run\n")
    seal(model.path)
    assert model.unit_weights(model.units[0]).indices.n_chunks == 2
    assert LinearModel(model.path).digest() == expected


def test_a_digest_changes_with_one_bit_of_a_weight_and_with_each_thing_it_is_of(
    tmp_path: Path, W: Any, bias: Any
) -> None:
    def changed(change: Callable[[Any, Any], None]) -> str:
        weights, biases = W[:, :60].copy(), bias[:60].copy()
        change(weights, biases)
        return make_model(tmp_path / "m", weights, biases).digest()

    def nothing(weights: Any, biases: Any) -> None:
        pass

    def weight(weights: Any, biases: Any) -> None:
        weights.data.view(np.uint32)[-1] ^= 1

    def index(weights: Any, biases: Any) -> None:
        free = sorted(set(range(D)) - set(weights[:, -1].indices))
        last = weights.indices[weights.indptr[-2] :]
        last[:] = np.sort(np.append(last[1:], free[0]))

    def one_bias(weights: Any, biases: Any) -> None:
        biases.view(np.uint32)[30] ^= 1

    W = sp.csc_matrix(W[:, :60])
    W.indices[W.indptr[4] : W.indptr[6]] = np.arange(W.indptr[6] - W.indptr[4])  # those of two classes ascend together

    def moved(weights: Any, biases: Any) -> None:
        weights.indptr[5] += 1  # an entry goes from a class to the one before

    digests = [changed(each) for each in (nothing, weight, index, one_bias, moved)]
    assert changed(nothing) == digests[0]
    for change in ({"params": {"lam": 0.02}}, {"seed": 4}, {"solver": "dismec"}):
        zarr.open_group(tmp_path / "m").update_attributes(change)
        seal(tmp_path / "m")
        digests.append(LinearModel(tmp_path / "m").digest())
    assert len(set(digests)) == len(digests)


def test_a_digest_is_taken_of_classes_of_any_length(tmp_path: Path) -> None:
    W = sp.csc_matrix(np.ones((2_200_000, 1), np.float32))
    assert len(make_model(tmp_path / "m", W, np.zeros(1)).digest()) == 64


def test_a_missing_bias_is_refused_and_not_taken_for_zeros(tmp_path: Path, W: Any, bias: Any) -> None:
    model = make_model(tmp_path / "m", W, bias)
    os.unlink(unit_path(model.path, model.units[1]) / "bias" / "c" / "0")
    with pytest.raises(StoreError, match="bias"):
        LinearModel(model.path).unit_array(model.units[1])


def test_an_unfinished_or_foreign_or_newer_model_is_refused_in_one_line(tmp_path: Path, W: Any, bias: Any) -> None:
    begin_model(tmp_path / "begun.partial")
    zarr.create_group(tmp_path / "group")
    zarr.open_group(make_model(tmp_path / "newer", W, bias).path).update_attributes({"version": 4})
    reasons = {"begun": "not finished", "nothing": "train", "group": "not a model", "newer": "newer"}
    for name, reason in reasons.items():
        with pytest.raises(StoreError) as caught:
            LinearModel(tmp_path / name)
        one_line(caught, tmp_path / name, reason)
    with pytest.raises(StoreError):
        LinearModel(tmp_path / "begun.partial")
