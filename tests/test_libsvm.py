"""libsvm text: scikit-learn as oracle, bases and sizes decided over the whole input, hostile files."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.conversions import dense, refused, write
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from xmc_stream.convert import convert, convert_report
from xmc_stream.convert.formats.libsvm import recognises
from xmc_stream.convert.lines import files as text_module

SMALL_PARTS = 64  # bytes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files into many parts."""
    monkeypatch.setattr(text_module, "_PART", SMALL_PARTS)


def dumped(rng: np.random.Generator, n_rows: int, several: bool, zero_based: bool) -> bytes:
    """Random rows as scikit-learn writes them; class 0, and feature 0, occur."""
    X = rng.normal(size=(n_rows, 30)) * (rng.random((n_rows, 30)) < 0.2)
    X[0, 0] = X[0, 29] = 1.5
    if several:
        y: Any = rng.random((n_rows, 7)) < 0.3
        y[0] = True
    else:
        y = rng.integers(0, 7, n_rows)
        y[:2] = 0, 6
    file = io.BytesIO()
    dump_svmlight_file(X, y.astype(int), file, zero_based=zero_based, multilabel=several)
    return file.getvalue()


@pytest.mark.parametrize("zero_based", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_rows_are_those_that_scikit_learn_reads(
    tmp_path: Path, several: bool, zero_based: bool, small_parts: None
) -> None:
    text = dumped(np.random.default_rng(1), 40, several, zero_based)
    dataset, figures = convert_report(write(tmp_path / "a.svm", text), tmp_path / "d.xmc")
    X, y = load_svmlight_file(io.BytesIO(text), dtype=np.float32, multilabel=several, zero_based=zero_based)
    Y = np.zeros((40, 7))
    for i, labels in enumerate(y):
        Y[i, np.array(labels, int)] = 1
    got_x, got_y = dense(dataset)
    assert (got_x == X.toarray()).all()
    assert (got_y == Y).all()
    assert (dataset.attributes["base"], dataset.attributes["label_base"]) == (1 - zero_based, 0)
    assert figures["said"] == f"libsvm text, 40 rows, feature ids from {1 - zero_based}, label ids from 0"
    assert figures["bytes_in"] == len(text)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_one_set_in_any_number_of_files_and_parts(
    tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dumped(np.random.default_rng(2), 60, True, True)
    whole = convert(write(tmp_path / "a", text), tmp_path / "whole.xmc")
    monkeypatch.setattr(text_module, "_PART", SMALL_PARTS)
    lines = text.splitlines(keepends=True)
    paths = [
        write(tmp_path / name, pack(b"".join(part)))
        for name, part in (("b", lines[:1]), ("c", lines[1:40]), ("d", lines[40:]))
    ]
    several = convert(paths, tmp_path / "several.xmc")
    assert several.fingerprint == whole.fingerprint
    assert several.attributes["source"] == ["b", "c", "d"]


@pytest.mark.slow
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    text = dumped(np.random.default_rng(3), 30, False, False)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,), daemon=True)
    writer.start()
    dataset = convert(tmp_path / "pipe", tmp_path / "d.xmc")
    writer.join(60)
    assert dataset.fingerprint == convert(write(tmp_path / "a", text), tmp_path / "e.xmc").fingerprint


@pytest.mark.parametrize(
    ("text", "options", "bases", "sizes"),
    [
        (b"1 1:1 5:2\n3 2:1\n", {}, (1, 1), (5, 3)),
        (b"1 0:1 5:2\n3 2:1\n", {}, (0, 1), (6, 3)),
        (b"1 1:1 5:2\n0 2:1\n", {}, (1, 0), (5, 2)),
        (b"1 1:1 5:2\n3 2:1\n", {"base": 0}, (0, 1), (6, 3)),
        (b"1 1:1 5:2\n3 2:1\n", {"base": 1}, (1, 1), (5, 3)),
        (b"1 1:1 5:2\n3 2:1\n", {"n_features": 9, "n_labels": 4}, (1, 1), (9, 4)),
        (b"1 1:1 5:2\n3 2:1\n", {"n_features": 5, "n_labels": 3}, (1, 1), (5, 3)),
        (b"0 0:1 5:2\n3 2:1\n", {"n_features": 6, "n_labels": 4}, (0, 0), (6, 4)),
        (b"1:1\n2:1\n", {"n_labels": 4}, (1, 0), (2, 4)),
        (b"1\n2\n", {"n_features": 4, "format": "libsvm"}, (0, 1), (4, 2)),
    ],
)
def test_bases_and_sizes(
    tmp_path: Path, text: bytes, options: dict[str, Any], bases: tuple[int, int], sizes: tuple[int, int]
) -> None:
    dataset = convert(write(tmp_path / "a", text), tmp_path / "d.xmc", **options)
    assert (dataset.attributes["base"], dataset.attributes["label_base"]) == bases
    assert (dataset.n_features, dataset.n_labels) == sizes
    X, Y = dense(dataset)
    assert X.shape == (2, sizes[0])
    assert Y.shape == (2, sizes[1])


def test_a_zero_far_behind_decides(tmp_path: Path, small_parts: None) -> None:
    text = b"1 1:1 2:1\n" * 100
    one = convert(write(tmp_path / "a", text), tmp_path / "a.xmc")
    zero = convert(write(tmp_path / "b", text + b"0 0:1\n"), tmp_path / "b.xmc")
    assert (one.n_features, one.n_labels, zero.n_features, zero.n_labels) == (2, 1, 3, 2)
    assert (dense(zero)[0][:100, 1:] == dense(one)[0]).all()


def test_a_test_set_takes_the_bases_of_its_training_set(tmp_path: Path) -> None:
    zero = convert(write(tmp_path / "a", b"0 0:1 3:1\n2 2:1\n"), tmp_path / "zero.xmc")
    one = convert(write(tmp_path / "b", b"1 1:1 4:1\n3 3:1\n"), tmp_path / "one.xmc")
    assert zero.fingerprint == one.fingerprint
    test = write(tmp_path / "t", b"1 2:1\n2 1:5\n")  # alone it would count from one
    of_zero, of_one = (convert(test, tmp_path / f"t-{d.path.name}", like=d) for d in (zero, one))
    assert dense(of_zero)[0].tolist() == [[0, 0, 1, 0], [0, 5, 0, 0]]
    assert dense(of_one)[0].tolist() == [[0, 1, 0, 0], [5, 0, 0, 0]]
    assert dense(of_zero)[1].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert dense(of_one)[1].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert (of_one.attributes["base"], of_one.attributes["label_base"]) == (1, 1)

    last = write(tmp_path / "u", b"1 2:1\n3 4:5\n")
    assert convert(last, tmp_path / "u.xmc", like=one).n_features == 4
    message = refused(tmp_path / "v.xmc", last, like=zero)
    assert message.startswith(f"{last}:2: label id 3 is not below K = 3, which comes from like ")
    message = refused(tmp_path / "v.xmc", write(tmp_path / "w", b"1 2:1\n2 0:5\n"), like=one)
    assert f"{tmp_path / 'w'}:2: feature id 0 is below 1: ids count from 1 here, as in like" in message


def test_unseen_ids_are_dropped_where_that_is_asked(tmp_path: Path) -> None:
    train = convert(write(tmp_path / "a", b"1 1:1 4:1\n3 3:1\n"), tmp_path / "train.xmc")
    test = write(tmp_path / "t", b"1,4 2:1 5:1 6:1\n9 4:1\n")
    assert "feature id 5 is above D = 4" in refused(tmp_path / "d.xmc", write(tmp_path / "b", b"1 5:1\n"), like=train)
    dataset = convert(test, tmp_path / "d.xmc", like=train, drop_unseen=True)
    assert dense(dataset)[0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert dense(dataset)[1].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert (dataset.attributes["dropped_features"], dataset.attributes["dropped_labels"]) == (2, 2)


def test_skipped_rows_are_counted_and_listed_with_file_and_line(tmp_path: Path, small_parts: None) -> None:
    good = b"# of many lines\n\n" + b"1 1:1 2:1\n" * 50
    a = write(tmp_path / "a", good + b"x\n" + good + b"1 3:nan\n")
    b = write(tmp_path / "b", good + b"1 2:1 2:3\n1 2:1")
    message = refused(tmp_path / "d.xmc", [a, b])
    assert message.startswith(f"{a}:53: 'x' is not a list of label ids")
    dataset = convert([a, b], tmp_path / "d.xmc", skip=True)
    assert dataset.n_samples == 151
    assert dataset.attributes["skipped"] == 3
    listed = dataset.attributes["skipped_rows"]
    assert [row[:2] for row in listed] == [[str(a), 53], [str(a), 106], [str(b), 53]]
    assert "not a finite decimal number" in listed[1][2]
    assert dataset.attributes["blank_lines"] == 6
    summed = convert([a, b], tmp_path / "e.xmc", skip=True, sum_duplicates=True)
    assert (summed.n_samples, summed.attributes["summed_duplicates"]) == (152, 1)
    assert dense(summed)[0][-2].tolist() == [0, 4]


def test_nothing_is_said_of_what_did_not_occur(tmp_path: Path) -> None:
    dataset = convert(write(tmp_path / "a", b"1 1:1\n"), tmp_path / "d.xmc", skip=True, sum_duplicates=True)
    counts = {"skipped", "skipped_rows", "dropped_features", "dropped_labels", "summed_duplicates", "blank_lines"}
    assert not counts & set(dataset.attributes)


def test_order_marks_windows_lines_and_a_last_line_without_its_end(tmp_path: Path) -> None:
    plain = convert(write(tmp_path / "a", b"1 1:1\n2 2:1\n"), tmp_path / "a.xmc")
    odd = convert(write(tmp_path / "b", b"\xef\xbb\xbf1 1:1\r\n2 2:1"), tmp_path / "b.xmc")
    assert odd.fingerprint == plain.fingerprint
    message = refused(tmp_path / "c.xmc", write(tmp_path / "c", "1 1:1\n".encode("utf-16")))
    assert message.startswith(f"{tmp_path / 'c'}:1: this is UTF-16 or UTF-32")
    assert "UTF-16" in refused(tmp_path / "c.xmc", tmp_path / "c", format="libsvm")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (b"-1 1:1\n+1 2:1\n", {}, ":1: label '-1' is negative"),
        (b"1 qid:1 1:1\n", {}, ":1: 'qid:1' is a query"),
        (b"0.25 1:1\n", {}, ":1: label '0.25' is not a whole number"),
        (b"\n# x\n1 1:1\n0.25 1:1\n", {}, ":4: label '0.25'"),
        (b" 1:1\n", {}, "no row has a label: say how many labels there are by n_labels"),
        (b"1\n", {"format": "libsvm"}, "no row has a feature: say how many features there are by n_features"),
        (b"# 1 1:1\n", {"format": "libsvm"}, ": no line is a row"),
        (b"x\n1 1:1\n", {}, ":1: the format is not recognised"),
        (b"1 1:1\n", {"labels": "b"}, "holds its labels itself"),
        (b"0 0:1 3:1\n", {"n_features": 3}, "feature id 3 is one too large for n_features 3"),
        (b"0 4:1\n", {"n_features": 3}, ":1: feature id 4 is above D = 3, as was given"),
        (b"0 0:1\n3 1:1\n", {"n_labels": 3}, "label id 3 is one too large for n_labels 3"),
        (b"1 0:1\n", {"base": 1}, ":1: feature id 0 is below 1: ids count from 1 here; use base=0"),
        (b"1 2147483647:1\n", {}, ":1: feature id 2147483647 is 2^31 or more: .* by n_features"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, text: bytes, options: dict[str, Any], said: str
) -> None:
    assert said.split(".*")[-1] in refused(tmp_path / "d.xmc", write(tmp_path / "a", text), **options)


def test_sizes_that_contradict_the_training_set_are_refused(tmp_path: Path) -> None:
    train = convert(write(tmp_path / "a", b"1 1:1\n"), tmp_path / "train.xmc")
    assert "n_features is 7 and like has 1" in refused(tmp_path / "d.xmc", tmp_path / "a", like=train, n_features=7)


@pytest.mark.parametrize(
    ("head", "known"),
    [
        (b"1 1:2\n", True), (b"1,2 1:2", True), (b"1, 2 1:2", True), (b" 1:2\n", True), (b"+1 1:2\r\n", True),
        (b"-1.5e0 1:2", True), (b"1 qid:2 1:2", True), (b"# x\n\n1 # y\n1 1:2\n", True), (b"1\n2\n1 1:.5\n", True),
        (b"1" + b" 1:2" * 2**15, True), (b"1 1:nan", True),
        (b"", False), (b"\n", False), (b"5 4 3\n1 1:2\n", False), (b"1\n2\n", False), (b"a 1:2\n", False),
        (b"1 1:2 x\n", False), (b"a,b\n1,2\n", False), (b'{"1":2}', False), (b"\x93NUMPY\1\0", False), (b"12:30 x", False),
        (b"PK\3\4", False), (b"1,2,3\n4,5,6\n", False),
    ],
)  # fmt: skip
def test_what_is_recognised(head: bytes, known: bool) -> None:
    assert recognises(head[: 2**16]) == known


def test_the_command_says_what_it_decided(tmp_path: Path, commands: Callable[..., Any]) -> None:
    path = write(tmp_path / "a", b"# x\n1 1:1\n2 1:1 1:2\n3 3:1 1:x\n")
    figures = commands("convert", path, tmp_path / "d.xmc", "--duplicates", "sum", "--on-error", "skip", "--zero-based")
    assert figures["said"] == "libsvm text, 2 rows, feature ids from 0, label ids from 1"
    assert (figures["n_features"], figures["n_labels"]) == (2, 2)
    assert commands("info", tmp_path / "d.xmc")["skipped"] == 1
    message = commands("convert", path, tmp_path / "e.xmc", fails=True)
    assert message.startswith(f"xmc-stream: {path}:3: feature 1 stands twice in the row")
