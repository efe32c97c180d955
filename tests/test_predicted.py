"""Predictions in files: `evaluate` reads what `predict` writes, and says what anything else is."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmc_stream as xs
from xmc_stream.convert.formats.predicted import open_predictions
from xmc_stream.errors import InputError
from xmc_stream.models.prediction import FILES
from xmc_stream.store.names import Names, new_names
from xmc_stream.store.predictions import CHUNK_ROWS, begin_predictions, finish_predictions, write_predictions

Rows = Sequence[Sequence[tuple[int, float]]]

LABELS = np.array([[3, 1, 0], [2, -1, -1], [-1, -1, -1], [0, 2, 1]], np.int32)
LINES = "3:1.5 1:0.25 0:-1e-05\n2:-inf\n\n0:7 2:6.5 1:-3\n"


def read(path: Path) -> np.ndarray:
    """All labels of predictions, of the size that opening them told."""
    opened = open_predictions(path, 1000)
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
        ('{"labels": [1, 2], "scores": [3]}\n', "p:1: .* is not a line of predictions"),
        ('{"labels": [1], "scores": ["3"]}\n', "p:1: .* is not a line of predictions"),
        ('{"labels": [1]}\n{"labels": ["a"]}\n', "p:2: .* as some lines have names and some ids"),
        ("1:a\n", "p:1: '1:a' is not a line of predictions"),
        ("1:0.5\t0:0.25\t2:0\nrow 1\t1:0.5\t0:2\n", "p:2: a tab stands behind a row's id in line 2, .* in line 1"),
        ('{"labels": ["a"]}\n', "p:1: labels are names here, and the dataset has ids alone: predict to a .npz"),
        ("1:0.5 " * 200_000 + "\n", "p:1: a line of more than 1 MB: predict fewer labels, or to a .npz file"),
    ],
)
def test_lines_that_are_no_predictions_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        open_predictions(tmp_path / "p", 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"scores": np.zeros((3, 2))}, "no item named 'labels.npy'"),
        ({"labels": np.zeros(3, np.int64)}, r"shape \(3,\)"),
        ({"labels": np.zeros((3, 2))}, "type float64"),
        ({"labels": np.asfortranarray(np.zeros((3, 2), np.int64))}, "shape"),
        ({"labels": np.array([[{}]])}, "Python objects"),
        ({"labels": np.zeros((3, 2), np.int64), "scores": np.zeros((3, 1))}, "scores have the shape"),
        (
            {"labels": np.zeros((3, 2), np.int64), "scores": np.full((3, 2), "a")},
            "scores have the shape .* and type <U1",
        ),
    ],
)
def test_arrays_that_are_no_predictions_are_refused(tmp_path: Path, arrays: Any, message: str) -> None:
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(InputError, match=message) as caught:
        open_predictions(tmp_path / "p.npz", 4)
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
    first = np.random.default_rng(0).integers(0, 1000, (CHUNK_ROWS + 5, 1))
    rows = (first + np.array([0, 700, 400])) % 1000
    path = tmp_path / "p"
    path.write_text("".join(json.dumps({"labels": [called[i] for i in row]}) + "\n" for row in rows))
    opened = open_predictions(path, 1000, names)
    assert np.array_equal(np.concatenate([labels for _, labels, _ in opened.blocks()]), rows)
    assert opened.needs["names of labels"] >= 48 * 1000
    path.write_text('{"labels": []}\n{"labels": ["name 3 é", "name 3"]}\n')
    with pytest.raises(InputError, match=r"p: behind line 0: 'name 3' is the name of no label of .*/d: evaluate with"):
        list(open_predictions(path, 1000, names).blocks())
    with new_names(tmp_path / "e" / "names" / "labels") as writer:
        writer.append([b"a", b"b", b"a"])
    path.write_text('{"labels": ["b", "a"]}\n')
    with pytest.raises(InputError, match=r"'a' is the name of label 0 and of label 2: .* predict to a \.npz file"):
        list(open_predictions(path, 3, Names(tmp_path / "e" / "names" / "labels")).blocks())


# Predictions of another program: five rows, not by falling score; ties keep their order.
ROWS = [
    [(3, 0.5), (1, 2.5), (0, 1.0)],
    [(2, -4.0), (0, -1.0)],
    [],
    [(4, 1e-8), (0, 0.0), (2, 1e-8)],
    [(1, 7.0), (3, float("inf")), (2, float("-inf"))],
]
RANKED = np.array([[1, 0, 3], [0, 2, -1], [-1, -1, -1], [4, 2, 0], [3, 1, 2]])
NAMES = ["zero", "one", "two", "three", "four"]


def lines_of(rows: Rows, between: str, ids: Sequence[str] = ()) -> str:
    before = [f"{one}\t" for one in ids] or [""] * len(rows)
    pairs = (between.join(f"{label}:{score!r}" for label, score in row) for row in rows)
    return "".join(f"{one}{row}\n" for one, row in zip(before, pairs, strict=True))


def objects_of(rows: Rows, named: bool, scored: bool = True) -> str:
    lines = []
    for row in rows:
        one: dict[str, Any] = {"labels": [NAMES[label] if named else label for label, _ in row]}
        lines.append(one | ({"scores": [score for _, score in row]} if scored else {}))
    return "".join(json.dumps(one) + "\n" for one in lines)


def arrays_of(rows: Rows) -> dict[str, Any]:
    """Rows that have fewer than three labels are filled up with -1 at the front."""
    filled = [[*[(-1, float("nan"))] * (3 - len(row)), *row] for row in rows]
    labels, scores = ([[pair[of] for pair in row] for row in filled] for of in (0, 1))
    return {"labels": np.array(labels, np.int64).reshape(-1, 3), "scores": np.array(scores).reshape(-1, 3)}


def store_of(rows: Rows, path: Path) -> None:
    arrays = arrays_of(rows)
    work = begin_predictions(path, len(rows), 5, 3)
    write_predictions(work, 0, arrays["labels"], arrays["scores"].astype(np.float32))
    finish_predictions(work, path, {}, False)


FORMS: dict[str, tuple[str, Callable[[Rows, Path], Any]]] = {
    "blanks": (".txt", lambda rows, path: path.write_text(lines_of(rows, " "))),
    "tabs": (".txt", lambda rows, path: path.write_text(lines_of(rows, "\t"))),
    "ids and blanks": (
        ".txt",
        lambda rows, path: path.write_text(lines_of(rows, " ", [f"1:{i}" for i in range(len(rows))])),
    ),
    "ids and tabs": (
        ".txt",
        lambda rows, path: path.write_text(lines_of(rows, "\t", [f"a {i}" for i in range(len(rows))])),
    ),
    "ids in objects": (".jsonl", lambda rows, path: path.write_text(objects_of(rows, False))),
    "names in objects": (".jsonl", lambda rows, path: path.write_text(objects_of(rows, True))),
    "arrays": (".npz", lambda rows, path: np.savez(path, **arrays_of(rows))),
    "small arrays": (".npz", lambda rows, path: np.savez_compressed(path, **arrays_of(rows))),
    "store": ("", lambda rows, path: store_of(rows, path)),
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Five rows of text, each with the label that ROWS score highest; label names are ids in their order."""
    folder = tmp_path_factory.mktemp("truth")
    best = [1, 0, 4, 4, 3]
    rows = [{"text": f"row {i} words", "labels": [label]} for i, label in enumerate(best)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "names").write_text("\n".join(NAMES))
    return xs.convert(folder / "d.jsonl", folder / "d.xmc", label_names=folder / "names", memory_limit="2GB")


def write_as(form: str, rows: Rows, folder: Path) -> Path:
    suffix, write = FORMS[form]
    path = folder / f"p{suffix}"
    write(rows, path)
    return path


def test_every_kind_of_file_is_tried() -> None:
    assert {suffix for suffix, _ in FORMS.values()} == {*FILES, ""}


@pytest.mark.parametrize("form", FORMS)
def test_predictions_of_other_programs_are_ranked_by_score(form: str, truth: xs.Dataset, tmp_path: Path) -> None:
    path = write_as(form, ROWS, tmp_path)
    found = [labels for _, labels, _ in open_predictions(path, 5, truth.label_names()).blocks()]
    assert np.array_equal(np.concatenate(found), RANKED)
    figures = xs.evaluate(path, truth, ks=(1, 2), memory_limit="2GB", threads=1)
    assert (figures["P@1"], figures["R@2"]) == (80.0, 80.0)


def test_a_pair_before_a_tab_and_one_behind_it_may_be_an_id_and_are_refused(tmp_path: Path) -> None:
    """As `predict -k 1` writes rows whose ids look like pairs, and others two pairs: one more pair tells which."""
    (tmp_path / "p.txt").write_text("0:0.25\t1:0.5\n" * 5)
    with pytest.raises(InputError, match=r"p\.txt:1: one pair before a tab"):
        open_predictions(tmp_path / "p.txt", 5)
    for more, wanted in (("0:0.25 1:0.5\t2:0.1\n", [1, 0, -1]), ("0:0.25\t1:0.5 2:0.75\n", [1, -1])):
        (tmp_path / "p.txt").write_text("0:0.25\t1:0.5\n" * 4 + more)
        ((_, labels, _),) = open_predictions(tmp_path / "p.txt", 5).blocks()
        assert labels[0].tolist() == wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ([(3, 0.5), (99, 0.25)], "label 99 is none of the 5 labels"),
        ([(3, 0.5), (1, 0.25), (3, 0.125)], "label 3 stands twice"),
        ([(3, 0.5), (1, float("nan"))], "label 1 has nan for a score"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    form: str, row: list[tuple[int, float]], fact: str, truth: xs.Dataset, tmp_path: Path
) -> None:
    if form.startswith("names") and "99" in fact:
        pytest.skip("there is no name of it")
    path = write_as(form, [*ROWS[:3], row, ROWS[4]], tmp_path)
    where = f"{path}:4: " if path.suffix in (".txt", ".jsonl") else rf"{path}: row 3 \(from 0\): "
    with pytest.raises(InputError, match=f"^{where}{fact}") as caught:
        xs.evaluate(path, truth, ks=(1,), memory_limit="2GB", threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["ids in objects", "arrays"])
def test_predictions_without_scores_keep_their_order(form: str, truth: xs.Dataset, tmp_path: Path) -> None:
    if form == "arrays":
        path = tmp_path / "p.npz"
        np.savez(path, labels=arrays_of(ROWS)["labels"])
    else:
        path = tmp_path / "p.jsonl"
        path.write_text(objects_of(ROWS, False, scored=False))
    ((_, labels, _),) = open_predictions(path, 5, truth.label_names()).blocks()
    assert [[label for label in row if label >= 0] for row in labels.tolist()] == [[i for i, _ in row] for row in ROWS]


@pytest.mark.parametrize("name", ["p.csv", "p.TSV", "p.parquet", "p.json", "p.npy", "p.jsonl.gz", "p.h5ad"])
def test_files_of_other_kinds_are_refused_before_any_work(
    name: str, trained: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    """Before the rows are read, of which there are none."""
    with pytest.raises(InputError, match=r"\.npz, \.txt, \.jsonl"):
        xs.predict(trained, tmp_path / "nothing.txt", tmp_path / name)
    said = commands("predict", trained, tmp_path / "nothing.txt", tmp_path / name, fails=True)
    assert all(ending in said for ending in (name, *FILES))
    assert list(tmp_path.iterdir()) == []


def test_endings_of_files_are_known_in_capitals(small: Path, trained: Path, tmp_path: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    figures = []
    for name in ("p.NPZ", "p.Txt", "p.JSONL"):
        xs.predict(trained, test, tmp_path / name, 3, memory_limit="2GB")
        assert (tmp_path / name).is_file()
        figures.append(xs.evaluate(tmp_path / name, test, ks=(1, 3), memory_limit="2GB"))
    assert figures == figures[:1] * 3
