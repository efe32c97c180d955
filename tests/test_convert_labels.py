"""Labels of matrices: a column of classes is one class a row; what would be read wrongly is refused, in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:anndata"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
X = np.eye(4, 3)
IDS = np.array([2, 0, 2, 1])


def npy(folder: Path, Y: Any) -> dict[str, Any]:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return {"source": folder / "x.npy", "labels": folder / "y.npy"}


def npz(folder: Path, Y: Any) -> dict[str, Any]:
    np.savez(folder / "y.npz", y=Y)
    return {**npy(folder, Y), "labels": folder / "y.npz"}


def both(folder: Path, Y: Any) -> dict[str, Any]:
    np.savez_compressed(folder / "both.npz", X=X, y=Y)
    return {"source": folder / "both.npz"}


def h5ad(folder: Path, Y: Any) -> dict[str, Any]:
    anndata.AnnData(sp.csr_matrix(X), obsm={"y": Y}).write_h5ad(folder / "both.h5ad")
    return {"source": folder / "both.h5ad", "label_key": "y"}


def zarr(folder: Path, Y: Any) -> dict[str, Any]:
    anndata.AnnData(sp.csr_matrix(X), obsm={"y": Y}).write_zarr(folder / "both.zarr")
    return {"source": folder / "both.zarr", "label_key": "y"}


def sparse_npz(folder: Path, Y: Any) -> dict[str, Any]:
    sp.save_npz(folder / "y.npz", sp.csr_array(Y))
    return {**npy(folder, Y), "labels": folder / "y.npz"}


def sparse_h5ad(folder: Path, Y: Any) -> dict[str, Any]:
    return h5ad(folder, sp.csr_matrix(Y))


def triple(folder: Path, Y: Any) -> dict[str, Any]:
    csr = sp.csr_array(Y)
    for name in ("indptr", "indices", "data", "shape"):
        np.save(folder / f"y.{name}.npy", np.asarray(getattr(csr, name)))
    return {**npy(folder, Y), "labels": folder / "y.indptr.npy"}


def in_memory(folder: Path, Y: Any) -> dict[str, Any]:
    return {"source": sp.csr_array(X), "labels": sp.csc_array(Y)}


def text(folder: Path, Y: Any) -> dict[str, Any]:
    rows = (" ".join(f"{k}:{value}" for k, value in enumerate(row) if value) for row in Y.tolist())
    (folder / "y.txt").write_text("\n".join((f"{Y.shape[0]} {Y.shape[1]}", *rows, "")))
    return {**npy(folder, Y), "labels": folder / "y.txt"}


DENSE = (npy, npz, both, h5ad, zarr)
SPARSE = (sparse_npz, sparse_h5ad, triple, in_memory)
Written = Callable[[Path, Any], dict[str, Any]]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("written", DENSE)
def test_a_column_of_classes_is_one_class_a_row(tmp_path: Path, written: Written, names: bool, order: Any) -> None:
    column = np.array(np.array(["a", "b", "c"])[IDS, None] if names else IDS[:, None], order=order)
    if names and written in (h5ad, zarr):
        pytest.skip("obsm has no texts")
    data = xs.convert(target=tmp_path / "d.xmc", **written(tmp_path, column))
    block = data.Y_rows().block(0, 4)
    assert (data.n_labels, block.indptr.tolist(), block.indices.tolist()) == (3, [0, 1, 2, 3, 4], IDS.tolist())
    assert not names or data.label_names().read(0, 3) == ["a", "b", "c"]  # type: ignore[union-attr]


@pytest.mark.parametrize("written", [*DENSE, *SPARSE, text])
def test_minus_one_is_no_positive(tmp_path: Path, written: Written) -> None:
    Y = np.array([[1, 0], [0, 1], [-1, 1], [1, -1]])
    with pytest.raises(InputError, match=r"y\.txt:4: " if written is text else r" row 2 ") as caught:
        xs.convert(target=tmp_path / "d.xmc", **written(tmp_path, Y))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("d.xmc*"))


@pytest.mark.parametrize("written", [*DENSE, *SPARSE])
@pytest.mark.parametrize("Y", [IDS[:, None].astype(float), IDS[:, None]], ids=["floats", "ints"])
def test_a_column_of_numbers_is_never_one_label(tmp_path: Path, written: Written, Y: Any) -> None:
    if written in DENSE and Y.dtype.kind == "i":
        pytest.skip("classes")
    with pytest.raises(InputError, match=r"class ids") as caught:
        xs.convert(target=tmp_path / "d.xmc", **written(tmp_path, Y))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("d.xmc*"))
