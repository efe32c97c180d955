"""Random matrices through every format and compression, and back by export: the same bits."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.matrices import matrices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.datasets.export import export
from xmc_stream.store.dataset import Dataset

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd.compress,
}  # fmt: skip
quick = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows(matrix: Any, n_lines: int) -> tuple[list[int], list[int], list[int]]:
    """indptr, indices, and the bits of the values of a stored or scipy matrix."""
    m = matrix.block(0, n_lines) if hasattr(matrix, "block") else matrix
    values = m.values if hasattr(m, "values") else m.data
    bits = np.asarray(values, np.float32).view(np.uint32)
    return m.indptr.tolist(), m.indices.tolist(), bits.tolist()


def same(dataset: Dataset, X: Any, Y: Any, zeros: bool = True) -> None:
    """zeros: whether stored zeros of X are kept."""
    assert (dataset.n_samples, dataset.n_features, dataset.n_labels) == (*X.shape, Y.shape[1])
    if not zeros:
        X = X.copy()
        X.eliminate_zeros()
    assert rows(dataset.X_rows(), dataset.n_samples) == rows(X, X.shape[0])
    y = dataset.Y_rows().block(0, dataset.n_samples)
    assert (y.indptr.tolist(), y.indices.tolist()) == (Y.indptr.tolist(), Y.indices.tolist())


def lines(X: Any, Y: Any, x_base: int = 0, y_base: int = 0) -> bytes:
    """Rows of text."""
    text = []
    for i in range(X.shape[0]):
        x = slice(X.indptr[i], X.indptr[i + 1])
        labels = ",".join(str(k + y_base) for k in Y.indices[Y.indptr[i] : Y.indptr[i + 1]])
        pairs = (f" {j + x_base}:{float(v)!r}" for j, v in zip(X.indices[x], X.data[x], strict=True))
        text.append(labels + "".join(pairs))
    return "".join(line + "\n" for line in text).encode()


@quick
@given(matrices(), st.sampled_from(sorted(PACK)), st.booleans())
def test_xmlrepo_text_in_one_file(tmp_path: Path, xy: Any, pack: str, newline: bool) -> None:
    X, Y = xy
    text = b"%d %d %d\n" % (*X.shape, Y.shape[1]) + lines(X, Y)
    last_is_empty = not (X.indptr[-1] - X.indptr[-2] or Y.indptr[-1] - Y.indptr[-2])
    if newline and not last_is_empty:
        text = text[:-1]
    (tmp_path / "a").write_bytes(PACK[pack](text))
    dataset = xs.convert(tmp_path / "a", tmp_path / "d.xmc", overwrite=True)
    same(dataset, X, Y)
    assert dataset.attributes["source_format"] == "XMLRepo text" + (f", {pack}" if pack else "")


@quick
@given(matrices(), st.sampled_from(sorted(PACK)))
def test_xmlrepo_text_in_two_files(tmp_path: Path, xy: Any, pack: str) -> None:
    X, Y = xy
    none = sp.csr_matrix((X.shape[0], 1))
    for name, m in (("a_X_Xf.txt", X), ("a_X_Y.txt", Y)):
        (tmp_path / name).write_bytes(PACK[pack](b"%d %d\n" % m.shape + lines(m, none)))
    same(xs.convert(tmp_path / "a_X_Xf.txt", tmp_path / "d.xmc", overwrite=True), X, Y)


@quick
@given(matrices(), st.sampled_from(sorted(PACK)), st.sampled_from([0, 1]), st.sampled_from([0, 1]))
def test_libsvm_text(tmp_path: Path, xy: Any, pack: str, x_base: int, y_base: int) -> None:
    """The base is told where an id 0 or 1 is there, else it is given; rows without anything are no rows."""
    X, Y = xy
    kept = np.flatnonzero(np.diff(X.indptr) + np.diff(Y.indptr))
    X, Y = X[kept], Y[kept]
    if not len(kept):
        return
    if y_base == 0 and Y.nnz and Y.indices.min() > 0:
        y_base = 1  # 0 cannot be told where no row has it
        Y = sp.csr_matrix((Y.data, Y.indices - 1, Y.indptr), (Y.shape[0], Y.shape[1] - 1))
    elif y_base == 1 and Y.nnz and Y.indices.min() > 0:
        Y = sp.csr_matrix((Y.data, Y.indices - Y.indices.min(), Y.indptr), Y.shape)
    (tmp_path / "a").write_bytes(PACK[pack](lines(X, Y, x_base, y_base)))
    sizes = {"n_features": X.shape[1], "n_labels": Y.shape[1]}
    options: dict[str, Any] = {"base": x_base, "format": "libsvm", "overwrite": True, **sizes}
    same(xs.convert(tmp_path / "a", tmp_path / "d.xmc", **options), X, Y)


@quick
@given(matrices(), st.sampled_from(["csr", "csc", "coo"]), st.sampled_from(["csr", "csc", "coo"]), st.booleans())
def test_scipy_files(tmp_path: Path, xy: Any, x_kind: str, y_kind: str, packed: bool) -> None:
    X, Y = xy
    sp.save_npz(tmp_path / "x.npz", X.asformat(x_kind), compressed=packed)
    sp.save_npz(tmp_path / "y.npz", Y.asformat(y_kind), compressed=packed)
    same(xs.convert(tmp_path / "x.npz", tmp_path / "d.xmc", labels=tmp_path / "y.npz", overwrite=True), X, Y)
    same(xs.convert(X.asformat(x_kind), tmp_path / "e.xmc", labels=Y.asformat(y_kind), overwrite=True), X, Y)


@quick
@given(matrices(), st.sampled_from([np.int32, np.int64, np.uint16]))
def test_numpy_triples(tmp_path: Path, xy: Any, index: Any) -> None:
    for name, m in zip("xy", xy, strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        for part, array in (("indptr", m.indptr), ("indices", m.indices.astype(index)), ("data", m.data),
                            ("shape", np.array(m.shape))):  # fmt: skip
            np.save(tmp_path / name / f"{part}.npy", array)
    same(xs.convert(tmp_path / "x", tmp_path / "d.xmc", labels=tmp_path / "y", overwrite=True), *xy)


@quick
@given(matrices(), st.sampled_from([np.float32, np.float64]))
def test_dense_numpy_arrays(tmp_path: Path, xy: Any, dtype: Any) -> None:
    X, Y = xy
    assume(Y.shape[1] > 1)  # else it is a class a row
    np.save(tmp_path / "x.npy", X.toarray().astype(dtype))
    np.save(tmp_path / "y.npy", Y.toarray().astype(np.int8))
    converted = xs.convert(tmp_path / "x.npy", tmp_path / "d.xmc", labels=tmp_path / "y.npy", overwrite=True)
    same(converted, X, Y, zeros=False)


@quick
@given(xy=matrices())
@pytest.mark.filterwarnings("ignore")
def test_anndata(tmp_path: Path, xy: Any) -> None:
    ad = pytest.importorskip("anndata")
    X, Y = xy
    ad.AnnData(X, obsm={"labels": Y}).write_h5ad(tmp_path / "a.h5ad")
    same(xs.convert(tmp_path / "a.h5ad", tmp_path / "d.xmc", label_key="obsm/labels", overwrite=True), X, Y)


@quick
@given(matrices(), st.sampled_from(sorted(PACK)))
def test_ids_of_labels_in_objects(tmp_path: Path, xy: Any, pack: str) -> None:
    _, Y = xy
    labels = [Y.indices[Y.indptr[i] : Y.indptr[i + 1]].tolist() for i in range(Y.shape[0])]
    text = "".join(json.dumps({"text": f"row word{i}", "labels": row}) + "\n" for i, row in enumerate(labels))
    (tmp_path / "a").write_bytes(PACK[pack](text.encode()))
    dataset = xs.convert(tmp_path / "a", tmp_path / "d.xmc", n_labels=Y.shape[1], overwrite=True)
    y = dataset.Y_rows().block(0, Y.shape[0])
    assert (y.indptr.tolist(), y.indices.tolist()) == (Y.indptr.tolist(), Y.indices.tolist())
    assert dataset.n_features == Y.shape[0] + 1


@quick
@given(matrices(), st.sampled_from(["d.txt", "d.txt.gz", "d.svm", "d.npz"]), st.sampled_from([0, 1]))
def test_export_and_back(tmp_path: Path, xy: Any, name: str, base: int) -> None:
    X, Y = xy
    dataset = xs.convert(X, tmp_path / "d.xmc", labels=Y, overwrite=True)
    format = {".svm": "libsvm", ".npz": "npz"}.get(Path(name).suffix, "xmlrepo")
    export(dataset, tmp_path / name, format=format, base=base if format == "libsvm" else None, overwrite=True)
    options: dict[str, Any] = {"overwrite": True}
    if format == "libsvm":
        if not (np.diff(X.indptr) + np.diff(Y.indptr)).all() or (Y.nnz and Y.indices.min() > 0):
            return  # what such text cannot say
        options |= {"base": base, "n_features": X.shape[1], "n_labels": Y.shape[1], "format": "libsvm"}
    if format == "npz":
        options["labels"] = tmp_path / "d-labels.npz"
    assert xs.convert(tmp_path / name, tmp_path / "back.xmc", **options).fingerprint == dataset.fingerprint


@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_ids_beyond_32_bits(tmp_path: Path, kind: str) -> None:
    """In Y they would need counts of as many labels: the plan refuses those. Ids of int64 that are small are read."""
    data = np.array([1, 2, 3], np.float32)
    X = sp.csr_matrix((data, np.array([4, 0, 2], np.int64), np.array([0, 1, 3], np.int64)), (2, 5))
    Y = sp.csr_matrix((data, np.array([1, 0, 1], np.int64), np.array([0, 2, 3], np.int64)), (2, 2**40))
    with pytest.raises(MemoryError, match="1099511627776 labels"):
        xs.convert(X.asformat(kind), tmp_path / "d.xmc", labels=Y, memory_limit="2GB")
    Y = sp.csr_matrix((data, Y.indices, Y.indptr), (2, 2))
    same(xs.convert(X.asformat(kind), tmp_path / "d.xmc", labels=Y), X.sorted_indices(), Y.sorted_indices())
