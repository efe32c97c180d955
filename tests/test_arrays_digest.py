"""The hash of a store's arrays alone: which stores have the same one, and which do not."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import xmc_stream as xs
from xmc_stream.errors import StoreError
from xmc_stream.store.inventory import arrays_digest, seal
from xmc_stream.store.model import StoredModel
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.store.predictions import Predictions


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a model of it and predictions."""
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    Y = np.eye(7, dtype=np.float32)[rng.integers(0, 7, 90)]
    X = sp.csr_matrix(np.hstack([Y, (rng.random((90, 20)) < 0.2) * rng.random((90, 20))]).astype(np.float32))
    xs.convert(X, folder / "dataset", labels=sp.csr_matrix(Y), normalize="l2", memory_limit="2GB")
    clf = xs.PPDSparse(max_rounds=1, memory_limit="2GB").fit(folder / "dataset", model=folder / "model")
    xs.predict(clf.model_, xs.open_dataset(folder / "dataset"), folder / "predictions", k=3, memory_limit="2GB")
    return folder


OPENED: dict[str, Callable[[Path], Any]] = {
    "dataset": xs.Dataset,
    "model": StoredModel,
    "predictions": Predictions,
}


def values(store: Path, group: Any) -> dict[str, np.ndarray]:
    """All arrays by name; ones that have no files as zarr fills them in."""
    names = [file.parent.relative_to(store) for file in sorted(store.rglob("zarr.json"))]
    found = {str(name): group[str(name)] for name in names if str(name) != "."}
    return {name: np.asarray(array[...]) for name, array in found.items() if isinstance(array, zarr.Array)}


def rewritten(source: Path, target: Path, change: Callable[[dict[str, np.ndarray]], Any] = lambda arrays: None) -> str:
    """The hash of a copy with other chunks, compressed, and with other attributes. change: what else is done to its arrays."""
    shutil.copytree(source, target)
    arrays = values(source, zarr.open_group(source, mode="r"))
    change(arrays)
    group = zarr.open_group(target, mode="r+")
    group.update_attributes({"note": "of another version"})
    for name in values(source, group):
        shutil.rmtree(target / name)
    for name, array in arrays.items():
        chunks = tuple(max(1, n // 3) for n in array.shape)
        written = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, attributes={"note": 1})
        written[...] = array
    seal(target)
    digest: str = OPENED[source.name](target).arrays_digest()
    return digest


@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_a_copy_with_other_chunks_codecs_and_attributes_has_the_same(kind: str, stores: Path, tmp_path: Path) -> None:
    before = OPENED[kind](stores / kind).arrays_digest()
    assert rewritten(stores / kind, tmp_path / "copy") == before
    written = [
        zarr.open_array(tmp_path / "copy" / name) for name in values(stores / kind, zarr.open_group(stores / kind))
    ]
    assert any(array.nchunks > 2 and array.compressors for array in written)


def flipped(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name].view(np.uint8)[-1] ^= 1


def retyped(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = arrays[name].astype(np.int64 if arrays[name].dtype.kind in "iu" else np.float64)


def reread(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = arrays[name].view(np.uint32)


def renamed(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[f"{name}_"] = arrays.pop(name)


def exchanged(arrays: dict[str, np.ndarray], name: str) -> None:
    other = next(o for o in arrays if o != name and arrays[o].shape == arrays[name].shape)
    arrays[name], arrays[other] = arrays[other], arrays[name]


@pytest.mark.parametrize("change", [flipped, retyped, reread, renamed, exchanged])
@pytest.mark.parametrize(("kind", "name"), [("dataset", "X/rows/indices"), ("model", "units/00000/bias")])
def test_another_value_type_or_name_gives_another(
    kind: str, name: str, change: Any, stores: Path, tmp_path: Path
) -> None:
    before = OPENED[kind](stores / kind).arrays_digest()
    assert rewritten(stores / kind, tmp_path / "copy", lambda arrays: change(arrays, name)) != before


def test_another_shape_of_the_same_values_gives_another(stores: Path, tmp_path: Path) -> None:
    digests = []
    for shape in ((90, 3), (30, 9)):
        group = zarr.create_group(tmp_path / f"{shape}")
        for name in ("labels", "scores"):
            array = group.create_array(name, shape=shape, dtype="f4", chunks=shape)
            array[...] = np.arange(270, dtype=np.float32).reshape(shape)
        seal(tmp_path / f"{shape}")
        digests.append(arrays_digest(tmp_path / f"{shape}"))
    assert digests[0] != digests[1]


def test_info_gives_it_for_every_kind_of_store(stores: Path, commands: Callable[..., Any]) -> None:
    for kind, opened in OPENED.items():
        told = commands("info", stores / kind, "--digest")
        assert told["arrays_digest"] == opened(stores / kind).arrays_digest()
        assert "arrays_digest" not in commands("info", stores / kind)
    assert commands("info", stores / "model", "--digest")["digest"] == xs.load_model(stores / "model").digest()


def test_X_by_columns_changes_nothing_and_a_mask_does(stores: Path, tmp_path: Path) -> None:
    xs.copy(stores / "dataset", tmp_path / "copy")
    dataset = xs.open_dataset(tmp_path / "copy")
    before = dataset.arrays_digest()
    dataset.X_columns()
    assert dataset.arrays_digest() == before
    dataset.with_observed(sp.csr_matrix(np.ones((90, 7))))
    assert dataset.arrays_digest() != before
    about = dataset.path / "observed" / "rows" / "zarr.json"
    about.write_bytes(about.read_bytes() + b" ")
    with pytest.raises(StoreError, match="observed"):
        dataset.arrays_digest()


def test_two_models_that_differ_in_what_they_say_alone_have_the_same(stores: Path, tmp_path: Path) -> None:
    """`digest` tells them apart: how a model was made is part of what it is."""
    clf = xs.PPDSparse(max_rounds=1, memory_limit="3GB", threads=1, min_value=1e-30)
    clf.fit(stores / "dataset", model=tmp_path / "model")
    one, other = xs.load_model(stores / "model"), clf.model_
    assert one.attributes != other.attributes
    assert one.digest() != other.digest()
    assert one.arrays_digest() == other.arrays_digest()


def test_what_is_damaged_has_none(stores: Path, tmp_path: Path) -> None:
    for kind, name in (("dataset", "X/rows/data"), ("model", "units/00000/bias"), ("predictions", "scores")):
        store = tmp_path / kind
        shutil.copytree(stores / kind, store)
        opened = OPENED[kind](store)
        [file] = [path for path in (store / name / "c").rglob("*") if path.is_file()]
        content = bytearray(file.read_bytes())
        content[3] ^= 1
        file.write_bytes(content)
        with pytest.raises(StoreError, match=name):
            opened.arrays_digest()
        shutil.copyfile(stores / kind / name / file.relative_to(store / name), file)
        assert opened.arrays_digest() == OPENED[kind](stores / kind).arrays_digest()
        (store / name / "zarr.json").write_bytes((store / name / "zarr.json").read_bytes() + b" ")
        with pytest.raises(StoreError, match=r"zarr\.json"):
            opened.arrays_digest()


@pytest.mark.parametrize("name", ["Y/rows/data", "statistics/row_norms", "X/rows/more"])
def test_an_array_that_says_it_is_longer_than_its_files_is_refused_at_once(
    name: str, stores: Path, tmp_path: Path
) -> None:
    shutil.copytree(stores / "dataset", tmp_path / "copy")
    file = tmp_path / "copy" / name / "zarr.json"
    if name == "X/rows/more":
        zarr.open_group(tmp_path / "copy").create_array(name, shape=(3, 3), dtype="f4", chunks=(3, 3))
    about = json.loads(file.read_bytes())
    about["shape"] = [2**50, *about["shape"][1:]]
    about["attributes"].clear()
    file.write_text(json.dumps(about))
    seal(tmp_path / "copy")
    with pytest.raises(StoreError, match=name):
        xs.Dataset(tmp_path / "copy").arrays_digest()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """A dataset whose arrays are of many blocks, 32 MB of indptr and 16 MB of ones that have no files among them."""
    path, n = tmp_path_factory.mktemp("long") / "dataset", 4_000_000
    with new_dataset(path, 1, 1, {}) as writer:
        ends, ones = np.arange(n + 1), np.zeros(n, np.int32)
        writer.append(ends, ones, np.ones(n, np.float32), ends, ones)
    return xs.open_dataset(path)


def by_hand(store: Path) -> str:
    """The hash of all arrays, each as a whole."""
    digest = hashlib.sha256()
    for name, array in sorted(values(store, zarr.open_group(store, mode="r")).items()):
        about = [name, str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
        digest.update(json.dumps(about).encode() + b"\n")
    return digest.hexdigest()


def test_it_is_a_hash_of_names_types_shapes_and_values(stores: Path, long: xs.Dataset) -> None:
    for kind, opened in OPENED.items():
        assert opened(stores / kind).arrays_digest() == by_hand(stores / kind)
    assert long.arrays_digest() == by_hand(long.path)


def test_no_array_is_in_memory_as_a_whole(long: xs.Dataset) -> None:
    tracemalloc.start()
    try:
        long.arrays_digest()
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()
