"""Dense arrays of numpy.savez, and classes that are texts: what goes in comes back, predictions name them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.conversions import dense, refused
from scipy import sparse

import xmc_stream as xs
from xmc_stream.convert.formats import npz
from xmc_stream.convert.matrices import arrays, sides
from xmc_stream.errors import InputError
from xmc_stream.models import Execution
from xmc_stream.models.samples import samples

N, D = 300, 7
CLASSES = np.array(["red", "blue é", "Zürich", "a"])


def features() -> Any:
    X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    X[3] = 0
    return X


def classes() -> Any:
    """Of each row; the first row has none."""
    found = CLASSES[np.random.default_rng(1).integers(0, 4, N)]
    found[0] = ""
    return found


def indicator(y: Any, names: list[str]) -> Any:
    return (y[:, None] == np.array(names)[None]).astype(int)


def converted(path: Path, name: str = "d.xmc", **options: Any) -> xs.Dataset:
    return xs.convert(path, path.parent / name, memory_limit="2GB", **options)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", ["ids", "matrix", "texts", "bytes", "file of its own"])
def test_features_and_labels_in_one_file(tmp_path: Path, save: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "PART", 500)
    X, y, path = features(), classes(), tmp_path / "xy.npz"
    names = sorted(CLASSES)
    Y = indicator(y, names)
    given = {
        "ids": np.random.default_rng(2).integers(0, 4, N), "matrix": Y, "texts": y,
        "bytes": np.char.encode(y, "utf-8"), "file of its own": y,
    }[kind]  # fmt: skip
    options = {}
    if kind == "file of its own":
        save(path, X)
        np.save(tmp_path / "y.npy", given)
        options["labels"] = tmp_path / "y.npy"
    else:
        save(path, X=X, y=given)
    dataset = converted(path, **options)
    assert (dense(dataset)[0] == X).all()
    assert (dense(dataset)[1] == (indicator(given, [0, 1, 2, 3]) if kind == "ids" else Y)).all()
    named = kind not in ("ids", "matrix")
    assert list(dataset.label_names() or ()) == (names if named else [])
    assert dataset.attributes.get("rows_without_class", 0) == named
    parts = npz.open_side(path).ranges()
    assert len(parts) == (1 if save is np.savez_compressed else N * D // 500 + 1)


def test_a_test_set_finds_its_classes_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", X=features(), y=classes())
    train = converted(tmp_path / "train.npz", "train.xmc")
    y = np.array(["red", "", "a", "new"])
    np.savez(tmp_path / "test.npz", X=np.ones((4, D)), y=y)
    message = refused(tmp_path / "no", tmp_path / "test.npz", like=train)
    assert "class 'new' in row 3 (from 0) is none of the labels of like" in message
    test = converted(tmp_path / "test.npz", "test.xmc", like=train, drop_unseen=True)
    names = list(train.label_names() or ())
    assert list(test.label_names() or ()) == names
    assert test.attributes["dropped_labels"] == 1
    assert [np.flatnonzero(row).tolist() for row in dense(test)[1]] == [
        [names.index("red")],
        [],
        [names.index("a")],
        [],
    ]
    np.savez(tmp_path / "ids.npz", X=features(), y=np.arange(N) % 4)
    plain = converted(tmp_path / "ids.npz", "ids.xmc")
    assert "has none to find them by" in refused(tmp_path / "no", tmp_path / "test.npz", like=plain)
    again = converted(tmp_path / "ids.npz", "again.xmc", like=train)
    assert list(again.label_names() or ()) == names  # the training set's, also of what has ids


def test_classes_of_several_files_are_those_of_all(tmp_path: Path) -> None:
    X, y = features(), classes()
    paths = [tmp_path / "1.npz", tmp_path / "2.npz"]
    np.savez(paths[0], X=X[:2], y=y[:2])
    np.savez(paths[1], X=X[2:], y=y[2:])
    dataset = xs.convert(paths, tmp_path / "both.xmc", memory_limit="2GB")
    assert (dense(dataset)[1] == indicator(y, sorted(CLASSES))).all()
    np.savez(paths[1], X=X[2:], y=np.zeros(N - 2, int))
    assert "classes as texts, and another file of labels has not" in refused(tmp_path / "no", paths)


def test_predictions_name_the_classes_and_can_be_evaluated(tmp_path: Path) -> None:
    y = np.arange(N) % 4
    X = np.eye(4, D, dtype=np.float32)[y] + 0.1 * features()
    np.savez(tmp_path / "train.npz", features=X, labels=CLASSES[y])
    train = converted(tmp_path / "train.npz", "train.xmc", normalize="l2")
    model = xs.PPDSparse(memory_limit="2GB", threads=1).fit(train, model=tmp_path / "m").model_
    np.savez(tmp_path / "new.npz", X)
    execution = Execution("2GB", threads=1)
    with samples(tmp_path / "new.npz", model, tmp_path, execution) as dataset:
        assert dataset.label_names() is None  # copies of names are of no use to rows that are predicted for
        xs.predict(model, dataset, tmp_path / "p.jsonl", 1, memory_limit="2GB", threads=1)
    told = [json.loads(line)["labels"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert told == [[name] for name in CLASSES[y]]
    assert xs.evaluate(tmp_path / "p.jsonl", train, ks=(1,), memory_limit="2GB", threads=1)["P@1"] == 100.0


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"a": np.ones((2, 2)), "b": np.ones((2, 2))}, {}, "it has the arrays a, b: call that of the features X"),
        ({"X": np.ones((2, 2)), "x": np.ones((2, 2))}, {}, "it has the arrays X, x"),
        ({"X": np.ones((2, 2)), "y": np.ones(2)}, {}, "in.npz: y holds float64 and not class ids"),
        (
            {"X": np.ones((2, 2)), "y": np.ones(3, int)},
            {},
            "has 2 rows and .* has 3: features and labels must have as many",
        ),
        ({"X": np.ones((2, 2), complex), "y": np.ones(2, int)}, {}, "they must be real numbers"),
        ({"X": np.ones((2, 2), object), "y": np.ones(2, int)}, {}, "never unpickled"),
        ({"X": np.ones(3), "y": np.ones(3, int)}, {}, r"in.npz: X has the shape \(3,\)"),
        ({"X": np.asfortranarray(np.ones((2, 2))), "y": np.ones(2, int)}, {}, "Fortran"),
        ({"X": np.ones((2, 2))}, {}, "holds features alone: name the file of its labels too"),
        ({"X": np.array([[1, np.nan]]), "y": np.ones(1, int)}, {}, "row 0 .from 0. is not finite"),
        ({}, {}, "it has the arrays .none."),
        ({"X": np.ones((1, 1)), "y": np.array(["x" * 5000])}, {}, "a class has from 1 to 4096 characters"),
        ({"X": np.ones((1, 1)), "y": np.array([b"\xff"])}, {}, "a class in rows from 0 on is not readable"),
        ({"X": np.ones((1, 1)), "y": np.array(["\ud800"])}, {}, "a class in rows from 0 on is not readable"),
    ],
)
def test_arrays_that_are_no_set_end_in_one_line(
    tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(InputError, match=message) as caught:
        converted(tmp_path / "in.npz", **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_too_many_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_MOST_CLASSES", 3)
    np.savez(tmp_path / "in.npz", X=features(), y=classes())
    assert "has more than 3 different classes: save ids of them instead" in refused(
        tmp_path / "no", tmp_path / "in.npz"
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("member", ["X", "y"])
def test_damage_is_found_by_the_checksum(tmp_path: Path, save: Any, member: str) -> None:
    path = tmp_path / "in.npz"
    for y in (classes(), np.arange(N) % 4):
        save(path, X=np.round(features()), y=y)
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            info = archive.getinfo(f"{member}.npy")
        content[info.header_offset + 200 + (info.compress_size - 200) // 2] ^= 1
        path.write_bytes(content)
        message = refused(tmp_path / "no", path)
        assert "in.npz" in message


def test_a_sparse_matrix_is_one_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_matrix(features()))
    assert "holds features alone" in refused(tmp_path / "no", tmp_path / "x.npz")
