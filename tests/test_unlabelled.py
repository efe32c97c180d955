"""Rows to predict for have no labels, or labels that count for nothing: every format is read all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.anndata_files import annotated
from helpers.conversions import cut_into
from scipy import sparse

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.models import Execution
from xmc_stream.models.samples import samples

N, D, K = 200, 30, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    """A model of libsvm text whose ids count from 1."""
    folder = tmp_path_factory.mktemp("unlabelled")
    X = features(0)
    y = np.asarray(X @ np.random.default_rng(9).normal(size=(D, K))).argmax(axis=1)
    text = "".join(f"{label + 1} {line}\n" for label, line in zip(y, lines(X, 1), strict=True))
    (folder / "train.txt").write_text(text)
    train = xs.convert(folder / "train.txt", folder / "train.xmc", memory_limit="2GB")
    assert (train.n_features, train.n_labels, train.attributes["base"]) == (D, K, 1)
    return xs.PPDSparse(memory_limit="2GB").fit(train, model=folder / "m").model_


def features(seed: int) -> Any:
    """X (N x D), of which the first row has every feature and the second none."""
    X = sparse.random_array((N, D), density=0.3, random_state=seed, dtype=np.float32).toarray()
    X[0], X[1] = 1, 0
    return sparse.csr_matrix(X)


def lines(X: Any, base: int) -> list[str]:
    """`f:v f:v ...` of each row."""
    rows = (X[i] for i in range(X.shape[0]))
    return [" ".join(f"{j + base}:{float(v)!r}" for j, v in zip(row.indices, row.data, strict=True)) for row in rows]


def text(X: Any, base: int, label: str, header: str = "") -> str:
    return header + "".join(f"{label} {line}\n" for line in lines(X, base))


def as_file(form: str, X: Any, folder: Path) -> Path:
    """X in a file, without labels or with some that the model does not have."""
    triple = {"indptr": X.indptr, "indices": X.indices, "data": X.data, "shape": np.array(X.shape)}
    path = folder / {"Xf": "t_X_Xf.txt", "npy": "x.npy", "triple": "x"}.get(form, form)
    if form == "Xf":
        path.write_text(text(X, 1, "", f"{N} {D}\n"))
    elif form == "own labels":
        path.write_text(text(X, 1, "70,3", f"{N} {D} 90\n"))
    elif form == "libsvm":
        path.write_text(text(X[[*range(1), *range(2, N)]], 1, ""))  # where a blank line is no row
    elif form == "libsvm of label 0":
        path.write_text(text(X, 1, "0"))
    elif form == "libsvm of label 999":
        path.write_text(text(X, 1, "999"))
    elif form == "npy":
        np.save(path, X.toarray())
    elif form == "triple":
        path.mkdir()
        for name, array in triple.items():
            np.save(path / f"{name}.npy", array)
    else:
        sparse.save_npz(path.with_suffix(".npz"), X.asformat(form))
        path = path.with_suffix(".npz")
    return path


FORMS = ("Xf own-labels libsvm libsvm-of-label-0 libsvm-of-label-999 npy triple csr csc coo").split()


@pytest.mark.parametrize(
    ("form", "part"),
    [
        *((form.replace("-", " "), None) for form in FORMS),
        ("Xf", 500),
        ("own labels", 500),
        ("libsvm of label 999", 500),
    ],
)
def test_predictions_are_those_of_the_matrix(
    model: xs.Model, tmp_path: Path, form: str, part: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part is not None:
        cut_into(monkeypatch, part)
    X = features(1)
    path = as_file(form, X, tmp_path)
    expected = model.predict_topk(X if form != "libsvm" else X[[*range(1), *range(2, N)]], 3, memory_limit="2GB")
    with samples(path, model, tmp_path, Execution("2GB")) as dataset:
        assert dataset.n_labels == K
        assert dataset.attributes["nnz_labels"] == dataset.Y_rows().nnz == 0
        got = model.predict_topk(dataset, 3, memory_limit="2GB")
    assert np.array_equal(got[0], expected[0])
    assert np.array_equal(got[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["npy", "csr", "Xf"])
def test_the_command_takes_features_alone(
    model: xs.Model, tmp_path: Path, form: str, commands: Callable[..., Any]
) -> None:
    X = features(2)
    path = as_file(form, X, tmp_path)
    told = commands("predict", model.path, path, tmp_path / "p.npz", "-k", 2)
    assert told["n_samples"] == N
    with np.load(tmp_path / "p.npz") as file:
        assert np.array_equal(file["labels"], model.predict_topk(X, 2)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([path.name, "p.npz"])


def test_features_that_the_model_does_not_have_are_refused_all_the_same(model: xs.Model, tmp_path: Path) -> None:
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_matrix(np.ones((3, D + 1), np.float32)))
    (tmp_path / "x.txt").write_text(f"1 {D + 1}:1\n")
    for name in ("x.npz", "x.txt"):
        with pytest.raises(InputError, match="like"), samples(tmp_path / name, model, tmp_path, Execution("2GB")):
            pass


def test_cells_without_a_column_of_labels(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ad = pytest.importorskip("anndata")
        X = features(3)
        y = np.asarray(X @ np.random.default_rng(9).normal(size=(D, 4))).argmax(axis=1)
        annotated(ad, X, y).write_h5ad(tmp_path / "train.h5ad")
        bare = annotated(ad, X, y)
        bare.obs = bare.obs[[]]
        bare.write_h5ad(tmp_path / "bare.h5ad")
        bare.write_zarr(tmp_path / "bare.zarr")
    train = xs.convert(tmp_path / "train.h5ad", tmp_path / "train.xmc", label_key="kind", memory_limit="2GB")
    model = xs.PPDSparse(memory_limit="2GB").fit(train, model=tmp_path / "m").model_
    for name in ("bare.h5ad", "bare.zarr", "train.h5ad"):
        with samples(tmp_path / name, model, tmp_path, Execution("2GB")) as dataset:
            assert dataset.Y_rows().nnz == 0
            got = model.predict_topk(dataset, 3, memory_limit="2GB")
        assert np.array_equal(got[1], model.predict_topk(train, 3, memory_limit="2GB")[1])


def test_labels_that_are_named_and_left_out_are_refused(tmp_path: Path) -> None:
    path = as_file("npy", features(4), tmp_path)
    with pytest.raises(InputError, match="labels are named, and are to be left out"):
        xs.convert(path, tmp_path / "d.xmc", labels=path, unlabelled=True)
    dataset = xs.convert(path, tmp_path / "d.xmc", unlabelled=True)
    assert (dataset.n_samples, dataset.n_labels) == (N, 0)
