"""AnnData: what anndata writes comes back, classes and features keep their names, a test set is matched by them."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.anndata_files import annotated
from helpers.forked import Forked
from scipy import sparse

from xmc_stream.convert import convert
from xmc_stream.convert.formats import anndata as format_module
from xmc_stream.convert.matrices import sides
from xmc_stream.convert.options import ConvertOptions
from xmc_stream.errors import InputError
from xmc_stream.store.names import open_names

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:anndata"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
N, D = 60, 9


@pytest.fixture(scope="module")
def ad() -> Any:
    """The library that writes what is read here."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("anndata")


def matrices() -> tuple[Any, Any, Any]:
    """X, a 0/1 matrix of labels, and a class a row."""
    rng = np.random.default_rng(4)
    X = sparse.csr_matrix(np.where(rng.random((N, D)) < 0.4, rng.normal(size=(N, D)), 0).astype(np.float32))
    return X, sparse.csr_matrix((rng.random((N, 5)) < 0.3).astype(np.int8)), rng.integers(0, 4, N)


def write(data: Any, path: Path) -> Path:
    """A .h5ad, or a zarr folder; strings stay strings."""
    if path.suffix == ".h5ad":
        data.write_h5ad(path, convert_strings_to_categoricals=False)
    else:
        data.write_zarr(path, convert_strings_to_categoricals=False)
    return path


def stored(dataset: Any) -> tuple[Any, Any]:
    """X and Y, dense."""
    n = dataset.n_samples
    a, b = dataset.X_rows().block(0, n), dataset.Y_rows().block(0, n)
    X = sparse.csr_array((a.values, a.indices, a.indptr), shape=(n, dataset.n_features))
    Y = sparse.csr_array((np.ones(len(b.indices)), b.indices, b.indptr), shape=(n, dataset.n_labels))
    return X.toarray(), Y.toarray()


def names(dataset: Any, kind: str) -> list[str]:
    found = open_names(dataset.path, kind)
    assert found is not None
    return list(found)


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_names_of_obs_are_ids_of_rows(tmp_path: Path, ad: Any, suffix: str) -> None:
    X, _, y = matrices()
    paths = [
        write(annotated(ad, X[:20], y[:20]), tmp_path / f"a{suffix}"),
        write(annotated(ad, X, y), tmp_path / f"b{suffix}"),
    ]
    dataset = convert(paths, tmp_path / "d.xmc", label_key="kind", memory_limit="2GB")
    assert list(dataset.row_ids() or ()) == [f"cell {i}" for i in (*range(20), *range(N))]


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csc_matrix, lambda X: X.toarray()])
@pytest.mark.parametrize("layer", [None, "raw"])
def test_matrices_of_every_encoding_come_back(
    tmp_path: Path, ad: Any, suffix: str, make: Any, layer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in ((format_module, "WINDOW", 7), (format_module, "STRINGS", 4), (sides, "PART", 20)):
        monkeypatch.setattr(module, name, value)
    X, Y, y = matrices()
    data = annotated(ad, X if layer else make(X), y, obsm={"tags": make(Y)}, layers={"raw": make(2 * X)})
    path = write(data, tmp_path / f"a{suffix}")
    dataset = convert(path, tmp_path / "d.xmc", label_key="tags", layer=layer)
    got_x, got_y = stored(dataset)
    assert (got_x == (2 if layer else 1) * X.toarray()).all()
    assert (got_y == Y.toarray()).all()
    assert names(dataset, "features") == [f"gene {j}" for j in range(D)]
    assert open_names(dataset.path, "labels") is None
    assert dataset.attributes["source"] == path.name
    assert dataset.attributes.get("layer") == layer


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
@pytest.mark.parametrize(
    ("key", "classes"),
    [
        ("kind", ["red", "green", "blue", "ash tree"]),
        ("word", ["ash tree", "blue", "green", "red"]),
        ("obs/number", ["-1", "4", "30", "200"]),
    ],
)
def test_columns_are_classes_with_names(tmp_path: Path, ad: Any, suffix: str, key: str, classes: list[str]) -> None:
    X, _, y = matrices()
    path = write(annotated(ad, X, y), tmp_path / f"a{suffix}")
    dataset = convert(path, tmp_path / "d.xmc", label_key=key)
    assert names(dataset, "labels") == classes
    expected = np.array(["30", "4", "200", "-1"] if "number" in key else ["red", "green", "blue", "ash tree"])
    assert [classes[i] for i in stored(dataset)[1].argmax(1)] == expected[y].tolist()
    assert (stored(dataset)[1].sum(1) == 1).all()
    # a test set with fewer classes, in another order, and other columns
    order = np.random.default_rng(1).permutation(D)
    test = annotated(ad, X[:20], y[:20])[:, order].copy()
    test = test[y[:20] != 2].copy()
    again = convert(write(test, tmp_path / f"t{suffix}"), tmp_path / "t.xmc", label_key=key, like=dataset)
    keep = np.flatnonzero(y[:20] != 2)
    assert (stored(again)[0] == stored(dataset)[0][keep]).all()
    assert (stored(again)[1] == stored(dataset)[1][keep]).all()
    assert names(again, "labels") == classes
    assert names(again, "features") == names(dataset, "features")


def test_unseen_names_are_refused_or_dropped(tmp_path: Path, ad: Any) -> None:
    X, _, y = matrices()
    train = convert(
        write(annotated(ad, X[y != 3], y[y != 3]), tmp_path / "a.h5ad"), tmp_path / "d.xmc", label_key="word"
    )
    path = write(annotated(ad, X, y), tmp_path / "b.h5ad")
    row = int(np.argmax(y == 3))
    with pytest.raises(InputError, match=rf"class 'ash tree' in row {row} \(from 0\) is none of the labels of like"):
        convert(path, tmp_path / "t.xmc", label_key="word", like=train)
    test = convert(path, tmp_path / "t.xmc", label_key="word", like=train, drop_unseen=True)
    assert test.attributes["dropped_labels"] == (y == 3).sum()
    assert stored(test)[1].sum() == (y != 3).sum()
    moved = write(annotated(ad, X, y, first=2), tmp_path / "c.h5ad")
    with pytest.raises(InputError, match="is not below the number of features D = 9"):
        convert(moved, tmp_path / "u.xmc", label_key="kind", like=train, drop_unseen=False)
    test = convert(moved, tmp_path / "u.xmc", label_key="kind", like=train, drop_unseen=True)
    assert (stored(test)[0][:, 2:] == X.toarray()[:, :-2]).all()
    assert test.attributes["dropped_features"] == X[:, -2:].nnz


def test_missing_classes_are_rows_without_labels(tmp_path: Path, ad: Any) -> None:
    import pandas as pd

    X, _, y = matrices()
    data = annotated(ad, X, y)
    data.obs["kind"] = data.obs["kind"].cat.remove_categories("green")
    data.obs["count"] = pd.array([None if i == 2 else int(i) for i in y], dtype="Int64")
    path = write(data, tmp_path / "a.h5ad")
    for key, gone in (("kind", 1), ("count", 2)):
        dataset = convert(path, tmp_path / "d.xmc", label_key=key, overwrite=True)
        assert dataset.attributes["rows_without_class"] == (y == gone).sum()
        assert (stored(dataset)[1].sum(1) == (y != gone)).all()
        assert dataset.n_labels == 3


@pytest.mark.slow
def test_labels_from_another_file_and_several_files(tmp_path: Path, ad: Any) -> None:
    X, _, y = matrices()
    paths = [
        write(annotated(ad, X[part], y[part]), tmp_path / f"{part.start}.h5ad") for part in (slice(0, 25), slice(25, N))
    ]
    np.save(tmp_path / "y.npy", y)
    both = convert(paths, tmp_path / "d.xmc", label_key="kind")
    assert (stored(both)[0] == X.toarray()).all()
    assert (stored(both)[1] == np.eye(4)[y]).all()
    whole = write(annotated(ad, X, y), tmp_path / "a.h5ad")
    beside = convert(whole, tmp_path / "e.xmc", labels=tmp_path / "y.npy")
    assert beside.fingerprint == both.fingerprint
    other = write(annotated(ad, X, y, first=1), tmp_path / "o.h5ad")
    with pytest.raises(InputError, match="other names in var"):
        convert([whole, other], tmp_path / "f.xmc", label_key="kind")


@pytest.mark.slow
def test_what_is_wrong_ends_in_one_line(tmp_path: Path, ad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    X, Y, y = matrices()
    data = annotated(ad, X, y, obsm={"tags": Y, "kind": Y})
    path = write(data, tmp_path / "a.h5ad")

    def message(path: Path = path, **options: Any) -> str:
        with pytest.raises(InputError) as caught:
            convert(path, tmp_path / "d.xmc", **options)
        assert not (tmp_path / "d.xmc").exists()
        said = str(caught.value)
        assert said.isprintable()
        assert str(path) in said
        return said

    def changed(change: Any) -> Path:
        copy = tmp_path / "b.h5ad"
        copy.write_bytes(path.read_bytes())
        with h5py.File(copy, "r+") as file:
            change(file)
        return copy

    def put(key: str, at: int, value: Any) -> Any:
        def change(file: Any) -> None:
            file[key][at] = value

        return change

    def remove(key: str) -> Any:
        def change(file: Any) -> None:
            del file[key]

        return change

    assert (
        "names no labels: name the place of the labels by label_key (obs/kind, obs/number, obs/word, obsm/kind"
        in message()
    )
    assert "has no nothing" in message(label_key="nothing")
    assert "has obs/kind and obsm/kind" in message(label_key="kind")
    assert "has no layers/x" in message(label_key="word", layer="x")
    assert "fit its shape" in message(changed(put("X/indices", 3, 99)), label_key="word")
    assert "fit its shape" in message(changed(put("X/indptr", 3, 10**6)), label_key="word")
    assert "value nan in row 0" in message(changed(put("X/data", 0, np.nan)), label_key="word")
    assert "code without category" in message(changed(put("obs/kind/codes", 5, 77)), label_key="obs/kind")
    assert "cannot be read" in message(changed(remove("X/indptr")), label_key="word")
    assert "cannot be read" in message(changed(remove("var")), label_key="word")
    monkeypatch.setattr(format_module, "_MOST_VALUES", 3)
    assert "make it a categorical" in message(label_key="word")
    cut = tmp_path / "cut.h5ad"
    cut.write_bytes(path.read_bytes()[:5000])
    assert "cannot be read" in message(cut, label_key="word")
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    np.save(tmp_path / "y.npy", np.zeros(3, int))
    assert "is npy: layer and label_key are of AnnData" in message(
        tmp_path / "x.npy", labels=tmp_path / "y.npy", label_key="word"
    )
    plain = convert(tmp_path / "x.npy", tmp_path / "p.xmc", labels=tmp_path / "y.npy")
    assert "has none to find them by" in message(label_key="word", like=plain)


def test_damaged_files_end_in_one_line_or_a_dataset(tmp_path: Path, ad: Any) -> None:
    X, _, y = matrices()
    content = write(annotated(ad, X, y), tmp_path / "a.h5ad").read_bytes()
    path = tmp_path / "b.h5ad"
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        changed = bytearray(content)
        for _ in range(rng.choice([1, 3, 20])):
            changed[rng.randrange(rng.choice([3000, len(changed)]))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            source = format_module.open_source([path], ConvertOptions(label_key="kind"), None)
            source.fit(10**8)
            for part in source.parts():
                for _ in part.blocks({}):
                    pass
        except InputError as error:
            refused += 1
            message = str(error)
            if not message.isprintable():
                raise
    assert 0 < refused < 60


@pytest.mark.slow
def test_reading_does_not_load_anndata(tmp_path: Path, ad: Any) -> None:
    X, _, y = matrices()
    path = write(annotated(ad, X, y), tmp_path / "a.h5ad")
    code = (
        "import sys; from xmc_stream.convert import convert; "
        f"convert({str(path)!r}, {str(tmp_path / 'd.xmc')!r}, label_key='kind'); print('anndata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def _convert_a_forged(path: str, target: str) -> None:
    from xmc_stream.system.memory import peak_resident

    before = peak_resident()
    try:
        convert(path, target, label_key="kind", memory_limit="1GB")
    except InputError as error:
        print(peak_resident() - before, error)


@pytest.mark.slow
@pytest.mark.parametrize("forged", ["var/_index", "obs/_index", "obs/kind", "encoding-type"])
def test_a_string_is_no_longer_than_memory_allows(tmp_path: Path, forged: str) -> None:
    """HDF5 takes as much as the file says that a string has."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        file["X"] = np.eye(20, 6, dtype=np.float32)
        file["X"].attrs["encoding-type"] = "array" + "!" * (forged == "encoding-type")
        for group, names in (("obs", [f"cell {i}" for i in range(20)]), ("var", [f"gene {i}" for i in range(6)])):
            file.create_group(group).attrs["_index"] = "_index"
            file[group]["_index"] = np.array(names, object)
        file["obs/kind"] = np.array([f"kind {i % 3}" for i in range(20)], object)
    first = {"var/_index": b"gene 0", "obs/_index": b"cell 0", "obs/kind": b"kind 0", "encoding-type": b"array!"}[
        forged
    ]
    content = bytearray(path.read_bytes())
    forgeries = 0
    for heap in (found.start() for found in re.finditer(b"GCOL", bytes(content))):
        for found in list(re.finditer(re.escape(struct.pack("<IQ", len(first), heap)), bytes(content))):
            number = struct.unpack_from("<I", content, found.end())[0]
            at, size = heap + 16, struct.unpack_from("<Q", content, heap + 8)[0]
            while at < heap + size and struct.unpack_from("<H", content, at)[0] not in (0, number):
                at += 16 + -(-struct.unpack_from("<Q", content, at + 8)[0] // 8) * 8
            if content[at + 16 : at + 16 + len(first)] == first:
                struct.pack_into("<I", content, found.start(), 3_600_000_000)
                forgeries += 1
    assert forgeries
    path.write_bytes(content)
    with Forked(_convert_a_forged, str(path), str(tmp_path / "d.xmc")) as run:
        assert run.wait() == 0, run.stderr
        more, _, said = run.stdout.partition(" ")
    assert str(path) in said
    assert int(more) < 2**28
