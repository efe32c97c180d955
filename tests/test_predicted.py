"""Predictions in files: `evaluate` reads what `predict` writes, and says what anything else is."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmc_stream as xs
from xmc_stream.convert.formats.predicted import naming_needs, open_predictions
from xmc_stream.errors import InputError
from xmc_stream.store.names import Names, new_names
from xmc_stream.store.predictions import CHUNK_ROWS

LABELS = np.array([[3, 1, 0], [2, -1, -1], [-1, -1, -1], [0, 2, 1]], np.int32)
LINES = "3:1.5 1:0.25 0:-1e-05\n2:-inf\n\n0:7 2:6.5 1:nan\n"


def read(path: Path) -> np.ndarray:
    """All labels of predictions, of the size that opening them told."""
    opened = open_predictions(path)
    blocks = [labels for _, labels, _ in opened.blocks()]
    assert [first for first, *_ in opened.blocks()] == list(range(0, opened.n_samples, CHUNK_ROWS))
    labels = np.concatenate([np.zeros((0, opened.k), np.int64), *blocks])
    assert labels.shape == (opened.n_samples, opened.k)
    return labels


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("n_rows", [4, CHUNK_ROWS, 2 * CHUNK_ROWS + 1])
def test_labels_of_arrays_in_blocks(tmp_path: Path, save: Callable[..., None], n_rows: int) -> None:
    labels = np.resize(LABELS, (n_rows, 3))
    save(tmp_path / "p.npz", scores=np.zeros((n_rows, 3)), labels=labels)
    assert np.array_equal(read(tmp_path / "p.npz"), labels)


@pytest.mark.parametrize("times", [1, CHUNK_ROWS // 4, CHUNK_ROWS // 4 + 1])
@pytest.mark.parametrize("form", ["lines", "with ids", "objects"])
def test_labels_of_lines_in_blocks(tmp_path: Path, times: int, form: str) -> None:
    lines = LINES
    if form == "with ids":
        lines = "".join(f"an id 7:{i} \\t\t{line}\n" for i, line in enumerate(LINES[:-1].split("\n")))
    if form == "objects":
        lines = "".join(json.dumps({"labels": [i for i in row if i >= 0]}) + "\n" for row in LABELS.tolist())
    (tmp_path / "p.txt").write_text(lines * times)
    assert np.array_equal(read(tmp_path / "p.txt"), np.tile(LABELS, (times, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("with_filter", [False, True])
def test_every_form_gives_the_figures_of_the_store(
    small: Path, trained: Path, tmp_path: Path, commands: Callable[..., Any], with_filter: bool
) -> None:
    model, test = xs.load_model(trained), xs.open_dataset(small.with_name("small-test.xmc"))
    pairs = tmp_path / "filter.txt"
    pairs.write_text("".join(f"{row} {label}\n" for row in range(100) for label in range(0, 1100, 3)))
    filtered = pairs if with_filter else None
    figures = []
    for name in ("store", "p.npz", "p.jsonl", "p.txt"):
        path = tmp_path / name
        xs.predict(model, test, path, 6, memory_limit="2GB", filter=filtered)
        figures.append(xs.evaluate(path, test, xs.open_dataset(small), memory_limit="2GB", filter=filtered))
    assert figures[1:] == figures[:1] * 3
    assert figures[0]["P@1"] > 0
    told = commands("evaluate", path, test.path, "--train", small, *(["--filter", pairs] if with_filter else []))
    assert told == figures[0]
    assert commands("plan", "evaluate", path, test.path)["fits"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("2 3 4\n", r"p:1: '2 3 4' is not a line of predictions"),
        ("1:0.5\n0,1 3:0.5\n", r"p:2: '0,1 3:0.5' is not a line of predictions"),
        ("1:0.52:0.5\n", "p:1: .* is not a line of predictions"),
        ("-1:0.5\n", "p:1: .* is not a line of predictions"),
        ("id\t1:0.5\tmore\t1:0.5\n", "p:1: .* is not a line of predictions"),
        ('{"labels": [1]}\n{"labels": [-1]}\n', r"p:2: .* is not a line of predictions, \{\"labels\""),
        ('{"labels": [1, "a"]}\n', "p:1: .* is not a line of predictions"),
        ('{"labels": [true]}\n', "p:1: .* is not a line of predictions"),
        ('{"labels": 3}\n', "p:1: .* is not a line of predictions"),
        ('{"scores": [3]}\n', "p:1: .* is not a line of predictions"),
        ('{"labels": ["a"]}\n', "p:1: labels are names here, and the dataset has ids alone: predict to a .npz"),
        ("1:0.5 " * 200_000 + "\n", "p:1: a line of more than 1 MB: predict fewer labels, or to a .npz file"),
    ],
)
def test_lines_that_are_no_predictions_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        open_predictions(tmp_path / "p")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"scores": np.zeros((3, 2))}, "no item named 'labels.npy'"),
        ({"labels": np.zeros(3, np.int64)}, r"shape \(3,\)"),
        ({"labels": np.zeros((3, 2))}, "type float64"),
        ({"labels": np.asfortranarray(np.zeros((3, 2), np.int64))}, "shape"),
        ({"labels": np.array([[{}]])}, "Python objects"),
    ],
)
def test_arrays_that_are_no_predictions_are_refused(tmp_path: Path, arrays: Any, message: str) -> None:
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(InputError, match=message) as caught:
        open_predictions(tmp_path / "p.npz")
    assert "p.npz does not hold the predictions of `xmc-stream predict`" in str(caught.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays_end_in_one_line(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "p.npz"
    save(path, labels=np.random.default_rng(0).integers(0, 1000, (500, 5)))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("labels.npy").compress_size // 2
    content[at] ^= 4
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"p\.npz does not hold the predictions"):
        read(path)
    path.write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"p\.npz does not hold the predictions"):
        read(path)


def test_rows_of_another_set_are_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(LINES)
    with pytest.raises(InputError, match=r"p\.txt has 4 rows and .*small\.xmc has 1500: they do not match"):
        xs.evaluate(tmp_path / "p.txt", xs.open_dataset(small), ks=(1,))


def test_names_of_labels_lead_to_their_ids(tmp_path: Path) -> None:
    called = [f"name {i * 7919 % 1000} é" for i in range(1000)]
    with new_names(tmp_path / "d" / "names" / "labels") as writer:
        writer.append([name.encode() for name in called])
    names = Names(tmp_path / "d" / "names" / "labels")
    rows = np.random.default_rng(0).integers(0, 1000, (CHUNK_ROWS + 5, 3))
    path = tmp_path / "p"
    path.write_text("".join(json.dumps({"labels": [called[i] for i in row]}) + "\n" for row in rows))
    opened = open_predictions(path, names)
    assert np.array_equal(np.concatenate([labels for _, labels, _ in opened.blocks()]), rows)
    assert naming_needs(opened)["names of labels"] >= 48 * 1000
    path.write_text('{"labels": []}\n{"labels": ["name 3 é", "name 3"]}\n')
    with pytest.raises(InputError, match=r"p: behind line 0: 'name 3' is the name of no label of .*/d: evaluate with"):
        list(open_predictions(path, names).blocks())
    with new_names(tmp_path / "e" / "names" / "labels") as writer:
        writer.append([b"a", b"b", b"a"])
    path.write_text('{"labels": ["b", "a"]}\n')
    with pytest.raises(InputError, match=r"'a' is the name of label 0 and of label 2: .* predict to a \.npz file"):
        list(open_predictions(path, Names(tmp_path / "e" / "names" / "labels")).blocks())
