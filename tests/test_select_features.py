"""Datasets of selected features, and compact models that predict on them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.damage import damage, flip
from helpers.problems import tight
from helpers.row_sparse import rows_and_labels, weights, written
from helpers.spoiling import note_crcs, seal_again, values_of, write_chunk

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError, StoreError
from xmc_stream.store.matrix import stream_bytes
from xmc_stream.store.new_dataset import new_dataset

N, D, K, SELECTED = 2500, 300, 70, 41
LIMIT = "4GB"  # bounds the whole process of the tests
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FEATURES = [f"word {j} ä" for j in range(D)]
LABELS = [f"label {k}" for k in range(K)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    X, Y = rows_and_labels(N, D, K)
    folder = tmp_path_factory.mktemp("rows")
    for name, names in (("features", FEATURES), ("labels", LABELS)):
        (folder / name).write_text("".join(f"{text}\n" for text in names))
    named = {"feature_names": folder / "features", "label_names": folder / "labels"}
    data = xs.convert(X, folder / "d.xmc", labels=Y, normalize="none", memory_limit=LIMIT, **named)
    return data.with_observed(Y)


@pytest.fixture(scope="module")
def model(data: xs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    return written(tmp_path_factory.mktemp("rows") / "m", data, weights(D, K, SELECTED))


@pytest.fixture(scope="module")
def compact(model: xs.Model, tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    return model.compact(tmp_path_factory.mktemp("rows") / "c", memory_limit=LIMIT)


@pytest.fixture(scope="module")
def some(data: xs.Dataset, model: xs.Model, tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    return xs.select_features(data, tmp_path_factory.mktemp("rows") / "some.xmc", model, memory_limit=LIMIT)


def matrix(data: xs.Dataset, labels: bool = False) -> Any:
    M = data.Y_rows() if labels else data.X_rows()
    block = M.block(0, M.n_lines)
    values = np.ones(len(block.indices), np.float32) if block.data is None else block.data
    return sp.csr_matrix((values, block.indices, block.indptr), shape=M.shape)


def inodes(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_ino for file in folder.rglob("*") if file.is_file()}


# ---- datasets


def test_a_dataset_of_some_features(data: xs.Dataset, some: xs.Dataset, model: xs.Model) -> None:
    chosen = model.selected_features()
    assert (some.n_samples, some.n_features, some.n_labels) == (N, SELECTED, K)
    X = matrix(data)[:, chosen]
    assert (matrix(some) != X).nnz == 0
    assert some.attributes["nnz_features"] == X.nnz
    np.testing.assert_array_equal(some.feature_counts(), X.getnnz(axis=0))
    np.testing.assert_allclose(some.row_norms(0, N), np.sqrt(X.multiply(X).sum(axis=1)).A1, rtol=1e-6)
    np.testing.assert_array_equal(some.label_counts(), data.label_counts())
    assert list(some.feature_names() or ()) == [FEATURES[j] for j in chosen]
    assert list(some.label_names() or ()) == LABELS
    columns = some.X_columns().block(0, SELECTED)
    assert (sp.csc_matrix((columns.values, columns.indices, columns.indptr), shape=X.shape) != X).nnz == 0
    assert damage(some.path) == []
    assert some.fingerprint != data.fingerprint


def test_labels_and_mask_are_shared_and_survive_what_happens_to_the_other(
    data: xs.Dataset, model: xs.Model, tmp_path: Path
) -> None:
    shutil.copytree(data.path, tmp_path / "all.xmc")
    whole = xs.open_dataset(tmp_path / "all.xmc")
    some = xs.select_features(whole, tmp_path / "some.xmc", model, memory_limit=LIMIT)
    for name in ("Y", "observed"):
        assert inodes(some.path / name) == inodes(whole.path / name)
    before = matrix(whole, labels=True)
    some.with_observed(sp.csr_matrix((N, K)), overwrite=True)
    assert whole.observed_rows().nnz
    assert damage(whole.path) == damage(some.path) == []
    shutil.rmtree(whole.path)
    assert (matrix(some, labels=True) != before).nnz == 0
    assert damage(some.path) == []


def test_without_hard_links_files_are_copied(data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    some = xs.select_features(data, tmp_path / "some.xmc", [1], memory_limit=LIMIT)
    assert not set(inodes(some.path).values()) & set(inodes(data.path).values())
    assert damage(some.path) == []


def test_ids_come_in_any_order_and_from_a_file(data: xs.Dataset, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("299\n0\n\n17\n")
    for number, features in enumerate(([17, 299, 0], np.array([0, 17, 299], np.uint16), tmp_path / "ids.txt")):
        some = xs.select_features(data.path, tmp_path / f"{number}.xmc", features, memory_limit=LIMIT)
        assert (matrix(some) != matrix(data)[:, [0, 17, 299]]).nnz == 0
    again = xs.select_features(some, tmp_path / "again.xmc", [299, 17], memory_limit=LIMIT)
    assert (matrix(again) != matrix(data)[:, [17, 299]]).nnz == 0
    assert again.attributes["selected_features"]["of"] == D
    assert list(again.feature_names() or ()) == [FEATURES[17], FEATURES[299]]
    none = xs.select_features(data, tmp_path / "none.xmc", [], memory_limit=LIMIT)
    assert (none.n_features, none.X_rows().nnz, damage(none.path)) == (0, 0, [])


def test_features_that_are_none_are_refused_and_nothing_is_left(data: xs.Dataset, tmp_path: Path) -> None:
    (tmp_path / "twice").write_text("3\n3\n")
    (tmp_path / "words").write_text("3\nx\n")
    two = xs.select_features(data, tmp_path / "two.xmc", [3, 5], memory_limit=LIMIT)
    for source, features, said in (
        (data, [0, D], "from 0 to 299"), (data, [-1], "from 0 to 299"), (data, [4, 4], "each once"),
        (data, [0.5], "whole numbers"), (data, [[1]], "whole numbers"), (data, tmp_path / "twice", "listed twice"),
        (data, tmp_path / "words", "no feature number"), (data, tmp_path / "gone", "cannot be read"),
        (two, [4], "without feature 4"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            xs.select_features(source, tmp_path / "out.xmc", features, memory_limit=LIMIT)
    with pytest.raises(InputError, match="exists"):
        xs.select_features(data, two.path, [1], memory_limit=LIMIT)
    with pytest.raises(InputError, match="the dataset itself"):
        xs.select_features(two, two.path, [3], memory_limit=LIMIT, overwrite=True)
    with pytest.raises(MemoryLimitError, match="selecting features"):
        xs.select_features(data, tmp_path / "out.xmc", [1], memory_limit="20MB")
    assert {path.name for path in tmp_path.iterdir()} == {"twice", "words", "two.xmc"}
    assert xs.select_features(data, two.path, [1], memory_limit=LIMIT, overwrite=True).n_features == 1


def test_a_model_selects_from_any_rows_of_the_same_features_only(model: xs.Model, tmp_path: Path) -> None:
    X, Y = rows_and_labels(50, D + 1, K, seed=7)
    moved = tmp_path / "moved"
    moved.write_text("".join(f"{text}\n" for text in [*FEATURES[1:], FEATURES[0]]))

    def converted(name: str, X: Any, **options: Any) -> xs.Dataset:
        return xs.convert(X, tmp_path / name, labels=Y, normalize="none", memory_limit=LIMIT, **options)

    test = converted("test.xmc", X[:, :D], like=model)
    nameless = converted("nameless.xmc", X[:, :D])
    for number, data in enumerate((test, nameless)):
        some = xs.select_features(data, tmp_path / f"{number}.xmc", model, memory_limit=LIMIT)
        assert (matrix(some) != X[:, :D][:, model.selected_features()]).nnz == 0
    wide = converted("wide.xmc", X)
    part_of_wide = xs.select_features(wide, tmp_path / "part.xmc", np.arange(D), memory_limit=LIMIT)
    others = converted("others.xmc", X[:, :D], feature_names=moved)
    narrow = converted("narrow.xmc", X[:, : D - 1])  # has every feature that the model selects
    assert model.selected_features()[-1] < D - 1
    first = model.selected_features()[0]
    for data, said in (
        (wide, f"with {D + 1} features and .* with {D}: convert"), (part_of_wide, f"with {D + 1} features"),
        (narrow, f"with {D - 1} features"), (others, f"feature {first} is 'word {first + 1} ä' in .* and 'word {first} ä'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            xs.select_features(data, tmp_path / "out.xmc", model, memory_limit=LIMIT)
        assert not (tmp_path / "out.xmc").exists()


def test_damaged_data_leave_nothing(data: xs.Dataset, tmp_path: Path) -> None:
    shutil.copytree(data.path, tmp_path / "d.xmc")
    file = tmp_path / "d.xmc/X/rows/indices/c/0"
    values = values_of(file)
    values[3] = D
    write_chunk(file, values)
    seal_again(tmp_path / "d.xmc")
    with pytest.raises(StoreError, match="X/rows"):
        xs.select_features(tmp_path / "d.xmc", tmp_path / "out.xmc", [1], memory_limit=LIMIT)
    assert {path.name for path in tmp_path.iterdir()} == {"d.xmc"}


def test_ids_that_cannot_be_are_damage(some: xs.Dataset, compact: xs.Model, data: xs.Dataset, tmp_path: Path) -> None:
    for store in (some, compact):
        path = tmp_path / store.path.name
        shutil.copytree(store.path, path)
        flip(path / "selected_features/c/0", 8)
        assert any("selected_features/c/0 fails its checksum" in line for line in damage(path))
        values = values_of(store.path / "selected_features/c/0")
        values[1] = values[0]
        (path / "selected_features/c/0").unlink()
        write_chunk(path / "selected_features/c/0", values)
        note_crcs(path / "selected_features")
        seal_again(path)
        assert any("ascending order" in line for line in damage(path))
    with pytest.raises(StoreError, match="ascending order"):
        xs.load_model(tmp_path / "c").selected_features()
    with pytest.raises(StoreError, match="ascending order"):
        xs.select_features(tmp_path / "some.xmc", tmp_path / "out.xmc", [1], memory_limit=LIMIT)
    about = json.loads((tmp_path / "c/zarr.json").read_bytes())
    about["attributes"]["selected_features"] = 5
    (tmp_path / "c/zarr.json").write_text(json.dumps(about))
    seal_again(tmp_path / "c")
    assert damage(tmp_path / "c")
    with pytest.raises(StoreError, match="not understood"):
        xs.load_model(tmp_path / "c").predict_topk(data, 1, memory_limit=LIMIT)


# ---- compact models


def test_a_compact_model_predicts_the_same_bits(
    data: xs.Dataset, some: xs.Dataset, model: xs.Model, compact: xs.Model
) -> None:
    for how in ({"memory_limit": LIMIT, "threads": 2}, {"memory_limit": tight(), "threads": 1}):
        whole, small = model.predict_topk(data, 5, **how), compact.predict_topk(some, 5, **how)
        for one, other in zip(whole, small, strict=True):
            np.testing.assert_array_equal(one, other)
        assert xs.evaluate(compact.path, some, **how) == xs.evaluate(model.path, data, **how)
    chosen = model.selected_features()
    np.testing.assert_array_equal(compact.selected_features(), chosen)
    assert compact.shape == (SELECTED, K)
    assert compact.selected_names() == model.selected_names() == [FEATURES[j] for j in chosen]
    np.testing.assert_array_equal(compact.to_scipy().toarray(), model.to_scipy().toarray()[chosen])
    assert list(compact.label_names() or ()) == LABELS
    assert damage(compact.path) == []
    assert compact.digest() != model.digest()
    assert pickle.loads(pickle.dumps(compact)).digest() == compact.digest()


def test_prediction_reads_the_selected_columns_only(
    data: xs.Dataset, some: xs.Dataset, model: xs.Model, compact: xs.Model, tmp_path: Path
) -> None:
    whole = xs.predict(model, data, tmp_path / "p", 5, memory_limit=LIMIT)
    small = xs.predict(compact, some, tmp_path / "q", 5, memory_limit=LIMIT)
    assert small["bytes_read"] == stream_bytes([some.X_rows()], [(0, N)])
    entries = data.feature_counts()[model.selected_features()].sum()
    ends = stream_bytes([some.X_rows()], [(0, N)]) - 8 * entries
    assert whole["bytes_read"] == ends + 8 * data.X_rows().nnz
    assert small["bytes_read"] < 0.3 * whole["bytes_read"]


def test_what_does_not_belong_together_is_refused_with_what_to_do(
    data: xs.Dataset, some: xs.Dataset, model: xs.Model, compact: xs.Model, tmp_path: Path
) -> None:
    others = xs.select_features(data, tmp_path / "others.xmc", np.arange(SELECTED), memory_limit=LIMIT)
    for one, dataset, said in (
        (compact, data, "select them by `xmc-stream select-features"),
        (compact, others, "has others: select them by"),
        (model, some, "give the dataset that it was made from"),
    ):
        with pytest.raises(InputError, match=said):
            one.predict_topk(dataset, 1, memory_limit=LIMIT)
        with pytest.raises(InputError, match=said):
            xs.evaluate(one.path, dataset, memory_limit=LIMIT)
    X = matrix(data)
    with pytest.raises(InputError, match="with 41 features"):
        compact.predict_topk(X, 1, memory_limit=LIMIT)
    np.testing.assert_array_equal(
        compact.predict_topk(X[:, compact.selected_features()], 3, memory_limit=LIMIT)[0],
        model.predict_topk(X, 3, memory_limit=LIMIT)[0],
    )
    for like in (compact, some):
        with pytest.raises(InputError, match="then select them by"):
            xs.convert(X, tmp_path / "x.xmc", labels=matrix(data, labels=True), like=like, memory_limit=LIMIT)


def test_a_compact_model_is_made_of_any_row_sparse_model_only(
    model: xs.Model, compact: xs.Model, trained: Path, tmp_path: Path
) -> None:
    again = compact.compact(tmp_path / "again", memory_limit=LIMIT)
    assert again.digest() == compact.digest()
    with pytest.raises(InputError, match="exists"):
        model.compact(tmp_path / "again", memory_limit=LIMIT)
    assert model.compact(tmp_path / "again", overwrite=True, memory_limit=LIMIT).digest() == compact.digest()
    with pytest.raises(InputError, match="the model itself"):
        model.compact(model.path, overwrite=True, memory_limit=LIMIT)
    with pytest.raises(MemoryLimitError, match="compacting"):
        model.compact(tmp_path / "other", memory_limit="20MB")
    linear = xs.load_model(trained)
    for refused in (linear.selected_features, linear.selected_names, lambda: linear.compact(tmp_path / "other")):
        with pytest.raises(InputError, match="linear model, which selects no features"):
            refused()
    assert {path.name for path in tmp_path.iterdir()} == {"again"}


def test_a_compact_model_does_not_take_the_place_of_an_unfinished_training(
    small: Path, model: xs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    out, work = tmp_path / "m", tmp_path / "m.partial"
    monkeypatch.setattr(
        "xmc_stream.training.train.write_label_counts", interrupted
    )  # of a training that is all but finished
    with pytest.raises(KeyboardInterrupt):
        xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(small, model=out)
    before = inodes(work)
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"m\.partial is a training that is not finished: finish it by"):
            model.compact(out, overwrite=overwrite, memory_limit=LIMIT)
    assert inodes(work) == before
    shutil.rmtree(work)
    (work / "units").mkdir(parents=True)  # what a killed `compact` leaves
    assert model.compact(out, memory_limit=LIMIT).n_features == SELECTED
    assert not work.exists()


def test_training_on_selected_features_remembers_them(data: xs.Dataset, some: xs.Dataset, tmp_path: Path) -> None:
    xs.split(some, tmp_path / "train.xmc", tmp_path / "valid.xmc", memory_limit=LIMIT)
    train, valid = (xs.open_dataset(tmp_path / f"{name}.xmc") for name in ("train", "valid"))
    assert damage(train.path) == damage(valid.path) == []
    linear = xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(train, model=tmp_path / "m").model_
    labels, _ = linear.predict_topk(valid, 1, memory_limit=LIMIT)
    assert labels.shape == (valid.n_samples, 1)
    with pytest.raises(InputError, match=r"has 300: select them as those of its training set were selected$"):
        linear.predict_topk(data, 1, memory_limit=LIMIT)
    assert damage(linear.path) == []
    # a model of some of them selects among all
    W = np.zeros((SELECTED, K), np.float32)
    W[[2, 9]] = 1
    few = written(tmp_path / "few", some, W)
    ids = xs.load_model(few.path).selected_features()
    assert len(ids) == 2
    small = few.compact(tmp_path / "small", memory_limit=LIMIT)
    np.testing.assert_array_equal(small.selected_features(), ids)
    for number, source in enumerate((data, some)):
        two = xs.select_features(source, tmp_path / f"two-{number}.xmc", few, memory_limit=LIMIT)
        for one, other in zip(
            small.predict_topk(two, 2, memory_limit=LIMIT), few.predict_topk(some, 2, memory_limit=LIMIT), strict=True
        ):
            np.testing.assert_array_equal(one, other)


# ---- commands, memory


def test_commands(data: xs.Dataset, model: xs.Model, commands: Callable[..., Any], tmp_path: Path) -> None:
    small, some = tmp_path / "c", tmp_path / "some.xmc"
    assert commands("compact", model.path, small)["n_features"] == SELECTED
    said = commands("select-features", data.path, some, "--model", model.path, "--memory-limit", LIMIT)
    assert (said["n_features"], said["of"], said["n_samples"]) == (SELECTED, D, N)
    about = commands("info", small, "--digest")
    assert (about["kind"], about["n_selected"], about["nnz"]) == ("model", SELECTED, model.nnz)
    assert about["digest"] == xs.load_model(small).digest()
    assert about["selected_features"]["of"] == commands("info", some)["selected_features"]["of"] == D
    whole = commands("predict", model.path, data.path, tmp_path / "p.txt")
    assert commands("predict", small, some, tmp_path / "q.txt")["bytes_read"] < whole["bytes_read"]
    assert (tmp_path / "p.txt").read_text() == (tmp_path / "q.txt").read_text()
    assert "select-features" in commands("predict", small, data.path, tmp_path / "r.txt", fails=True)
    (tmp_path / "ids").write_text("5\n")
    assert "either --model" in commands("select-features", data.path, tmp_path / "x.xmc", fails=True)
    both = ("--model", model.path, "--features", tmp_path / "ids")
    assert "either --model" in commands("select-features", data.path, tmp_path / "x.xmc", *both, fails=True)
    assert "exists" in commands("select-features", data.path, some, "--features", tmp_path / "ids", fails=True)
    done = commands("select-features", data.path, some, "--features", tmp_path / "ids", "--overwrite")
    assert done["n_features"] == 1


CHILD = """
import json, sys
import numpy as np
import xmc_stream as xs
from xmc_stream.system.memory import peak_resident
some = xs.select_features(*sys.argv[1:3], np.arange(0, 4000, 3), memory_limit=sys.argv[3])
print(json.dumps([some.fingerprint, peak_resident()]))
"""


@pytest.mark.slow
@on_linux
def test_data_beyond_the_limit_are_selected_from_within_it(tmp_path: Path) -> None:
    n, per_row, d, limit = 130_000, 300, 4000, 300 * 10**6
    with new_dataset(tmp_path / "d.xmc", d, 3, {}) as writer:  # 312 MB of X
        rng, rows = np.random.default_rng(0), 5000
        x = np.arange(per_row) * 13 + rng.integers(0, 13, (rows, per_row))
        ends = np.arange(rows + 1, dtype=np.int64)
        for _ in range(0, n, rows):
            values = rng.random(rows * per_row, np.float32)
            writer.append(per_row * ends, x.ravel().astype(np.int32), values, ends, np.zeros(rows, np.int32))
    data = xs.open_dataset(tmp_path / "d.xmc")
    assert data.X_rows().nnz * 8 > limit
    command = [sys.executable, "-c", CHILD, str(data.path), str(tmp_path / "some.xmc"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fingerprint, peak = json.loads(done.stdout)
    assert peak <= limit
    whole = xs.select_features(data, tmp_path / "whole.xmc", np.arange(0, 4000, 3), memory_limit=LIMIT)
    assert fingerprint == whole.fingerprint
