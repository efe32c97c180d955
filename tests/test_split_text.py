"""Features and labels in a text each: what comes back, how the labels are found, what is wrong in which file."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.conversions import TEXT, X, Y, dense, opened, refused, write
from helpers.parsing import lines_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import parse as twin

from xmc_stream.convert import convert, convert_report
from xmc_stream.convert.lines import files as text_module
from xmc_stream.convert.lines.parser import Parser
from xmc_stream.errors import InputError, MemoryLimitError

FEATURES = b"5 4\n3:0.5 0:-2\n 1:3\n\n \n0:1 1:2 2:2 3:0\n"
LABELS = b"5 3\n2:1 0:1\n1:0\n1:1.0 2:0.0\n\n 2:-3e-2 \n"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The two files of TEXT."""
    return write(tmp_path / "trn_X_Xf.txt", FEATURES), write(tmp_path / "trn_X_Y.txt", LABELS)


def test_two_texts_come_back_from_the_store(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    dataset, figures = convert_report(pair[0], tmp_path / "d.xmc", labels=pair[1])
    got_x, got_y = dense(dataset)
    assert (got_x == X).all()
    assert (got_y == Y).all()
    assert dataset.X_rows().nnz == 7  # the stored zero of X is kept
    assert dataset.Y_rows().nnz == 4  # those of Y are not
    assert dataset.attributes["source"] == "trn_X_Xf.txt"
    assert dataset.attributes["source_labels"] == "trn_X_Y.txt"
    assert dataset.attributes["source_format"] == "XMLRepo text"
    assert figures["bytes_in"] == len(FEATURES) + len(LABELS)
    assert dataset.fingerprint == convert(write(tmp_path / "a.txt", TEXT), tmp_path / "one.xmc").fingerprint


@pytest.mark.slow
def test_the_labels_beside_the_features_are_taken_and_named(
    tmp_path: Path, pair: tuple[Path, Path], commands: Callable[..., Any]
) -> None:
    commands("convert", pair[0], tmp_path / "d.xmc")
    assert commands("info", tmp_path / "d.xmc")["source_labels"] == "trn_X_Y.txt"
    pair[1].unlink()
    message = commands("convert", pair[0], tmp_path / "e.xmc", fails=True)
    assert f"{pair[0]} holds features alone, and there is no trn_X_Y.txt beside it" in message
    assert "--labels" in message
    for suffix, pack in ((".xz", lzma.compress), (".bz2", bz2.compress), (".gz", gzip.compress)):
        write(tmp_path / f"trn_X_Y.txt{suffix}", pack(LABELS))
        assert (
            convert(pair[0], tmp_path / "d.xmc", overwrite=True).attributes["source_labels"] == f"trn_X_Y.txt{suffix}"
        )
    packed = write(tmp_path / "trn_X_Xf.txt.xz", lzma.compress(FEATURES))  # the same suffix goes first, whatever it is
    dataset = convert(packed, tmp_path / "d.xmc", overwrite=True)
    assert dataset.attributes["source_labels"] == "trn_X_Y.txt.xz"
    assert dataset.attributes["source_format"] == "XMLRepo text, xz"
    assert (dense(dataset)[1] == Y).all()
    write(tmp_path / "trn_X_Y.txt.old", LABELS)
    old = write(tmp_path / "trn_X_Xf.txt.old", gzip.compress(FEATURES))
    dataset = convert(old, tmp_path / "d.xmc", overwrite=True)
    assert dataset.attributes["source_labels"] == "trn_X_Y.txt.old"
    assert dataset.attributes["source_format"] == "XMLRepo text, gzip"


def test_the_header_decides_and_not_the_name(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = write(tmp_path / "features", FEATURES)
    message = refused(tmp_path / "d.xmc", other)
    assert message.startswith(f"{other}:1: ")
    assert "features alone" in message
    assert "labels" in message
    write(pair[0], TEXT)
    dataset = convert(pair[0], tmp_path / "d.xmc")
    assert "source_labels" not in dataset.attributes
    assert (dense(dataset)[1] == Y).all()
    assert "holds its labels itself" in refused(tmp_path / "e.xmc", pair[0], labels=pair[1])
    assert "labels must be paths of files here, not ndarray" in refused(
        tmp_path / "e.xmc", other, labels=np.zeros((5, 3))
    )
    assert "missing cannot be read (No such file" in refused(tmp_path / "e.xmc", other, labels=tmp_path / "missing")


def test_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lists = [np.flatnonzero(rng.random(40) < rng.choice([0.02, 0.5])) for _ in range(600)]
    features = "\n".join(["600 50", *(" ".join(f"{j}:{i}.{j}" for j in range(i % 50)) for i in range(600))])
    labels = "\n".join(["600 40", *(" ".join(f"{j}:{(i + j) % 5}" for j in row) for i, row in enumerate(lists)), ""])
    one = ["600 50 40"]
    for i, row in enumerate(lists):
        kept = ",".join(str(j) for j in row if (i + j) % 5)
        one.append(kept + " " + " ".join(f"{j}:{i}.{j}" for j in range(i % 50)))
    whole = convert(write(tmp_path / "a.txt", "\n".join(one).encode()), tmp_path / "whole.xmc")
    x, y = write(tmp_path / "x", features.encode()), write(tmp_path / "y", bz2.compress(labels.encode()))
    for piece in (1, 64, 1000, 2**20):
        monkeypatch.setattr(text_module, "_WINDOW", piece)
        assert convert(x, tmp_path / "d.xmc", labels=y, overwrite=True).fingerprint == whole.fingerprint
    assert dense(whole)[1].sum() == sum((i + j) % 5 != 0 for i, row in enumerate(lists) for j in row)


def test_like_fixes_both_sizes(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    train = convert(pair[0], tmp_path / "train.xmc", normalize="l2")
    x = write(tmp_path / "tst_X_Xf.txt", b"2 9\n3:5\n\n")
    y = write(tmp_path / "tst_X_Y.txt", b"2 9\n\n2:1\n")
    test = convert(x, tmp_path / "test.xmc", like=train)
    assert (test.n_features, test.n_labels) == (4, 3)
    assert dense(test)[0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    write(y, b"2 9\n2:1\n0:1 3:1\n")
    message = refused(tmp_path / "x.xmc", x, like=train)
    assert message.startswith(f"{y}:3: label id 3 is not below K = 3, which comes from like ")
    write(x, b"2 9\n2:1\n4:1\n")
    message = refused(tmp_path / "x.xmc", x, like=train)
    assert message.startswith(f"{x}:3: feature id 4 is not below D = 4, which comes from like ")


@pytest.mark.parametrize(
    ("features", "labels"), [(b"0 3\n", b"0 2"), (b"0 0\r\n", b"0 0\n"), (b"3 0\n\n\n\n", b"3 0\n\n \n\r\n")]
)
def test_texts_without_rows_or_entries(tmp_path: Path, features: bytes, labels: bytes) -> None:
    dataset = convert(write(tmp_path / "x", features), tmp_path / "d.xmc", labels=write(tmp_path / "y", labels))
    got_x, got_y = dense(dataset)
    assert got_x.shape == tuple(map(int, features.split()[:2]))
    assert got_y.shape == tuple(map(int, labels.split()[:2]))
    assert not got_x.any()
    assert not got_y.any()


GOOD_X, GOOD_Y = b"2 5\n0:1\n1:1\n", b"2 5\n0:1\n1:1\n"


@pytest.mark.parametrize(
    ("features", "labels", "file", "line", "what"),
    [
        (b"", GOOD_Y, "x", 1, "empty"),
        (
            GOOD_X,
            b"",
            "y",
            1,
            "the first line must be the header 'N K' (numbers of rows, labels), but the file is empty",
        ),
        (b"0:1\n1:1\n", GOOD_Y, "x", 1, "without a header 'N D' this is libsvm text, which holds its labels itself"),
        (b"0\n0:1\n1:1\n", GOOD_Y, "x", 1, "without a header 'N D' this is libsvm text"),
        (GOOD_X, b"0:1\n1:1\n", "y", 1, "header 'N K' (numbers of rows, labels), not '0:1'"),
        (GOOD_X, b"2 5 5\n0:1\n1:1\n", "y", 1, "header 'N K' (numbers of rows, labels), not '2 5 5'"),
        (GOOD_X, b"2\n0:1\n1:1\n", "y", 1, "not '2'"),
        (GOOD_X, b"2 -5\n0:1\n1:1\n", "y", 1, "not '2 -5'"),
        (GOOD_X, b"3 5\n0:1\n1:1\n1:1\n", "x", 1, "the header promises 2 rows and that of {y} 3: features and labels"),
        (GOOD_X, b"2 5\n0:1\n", "y", 2, "promises 2 rows and 1 follow"),
        (GOOD_X, b"2 5\n0:1\n1:1\n\n", "y", 1, "promises 2 rows and 3 follow"),
        (b"2 5\n0:1\n", GOOD_Y, "x", 2, "promises 2 rows and 1 follow"),
        (b"2 5\n0:1\n1:1\n1:1\n1:1", GOOD_Y, "x", 1, "promises 2 rows and 4 follow"),
        (b"2 5\n0:1\n5:1\n", GOOD_Y, "x", 3, "feature id 5 is not below D = 5, which comes from the header"),
        (GOOD_X, b"2 5\n0:1\n5:1\n", "y", 3, "label id 5 is not below K = 5, which comes from the header"),
        (GOOD_X, b"2 5\n0:1\n%s:1\n" % (b"9" * 30), "y", 3, "label id " + "9" * 30),
        (b"2 5\n0:1\n-1:1\n", GOOD_Y, "x", 3, "feature id in '-1:1' is negative"),
        (GOOD_X, b"2 5\n0:1\n1:1 -1:1\n", "y", 3, "label id in '-1:1' is negative"),
        (b"2 5\n0:1\n1:1 1:2\n", GOOD_Y, "x", 3, "feature 1 stands twice in the row: add up the values"),
        (GOOD_X, b"2 5\n0:1\n1:1 2:1 1:0\n", "y", 3, "label 1 stands twice in the row: leave one of them out"),
        (b"2 5\n0:1\n1:nan\n", GOOD_Y, "x", 3, "value 'nan' of feature 1 is not a finite decimal number"),
        (GOOD_X, b"2 5\n0:1\n3:nan\n", "y", 3, "value 'nan' of label 3 is not a finite decimal number"),
        (GOOD_X, b"2 5\n0:1\n3:-inf\n", "y", 3, "'-inf'"),
        (GOOD_X, b"2 5\n0:1\n3:1e39\n", "y", 3, "value '1e39' of label 3 is too large for float32"),
        (GOOD_X, b"2 5\n0:1\n3:\n", "y", 3, "value '' of label 3"),
        (GOOD_X, b"2 5\n0:1\n3:true\n", "y", 3, "value 'true' of label 3"),
        (b"2 5\n0:1\n1 2:1\n", GOOD_Y, "x", 3, "'1' is not a feature id:value: blanks separate features"),
        (b"2 5\n0,1 0:1\n1:1\n", GOOD_Y, "x", 2, "'0,1' is not a feature id:value"),
        (GOOD_X, b"2 5\n0:1\n1,2\n", "y", 3, "'1,2' is not a label id:value: blanks separate labels"),
        (GOOD_X, b"2 5\n0:1\n1:1,2:1\n", "y", 3, "value '1,2:1' of label 1"),
        (GOOD_X, b"2 5\n0:1\n1:1 2\n", "y", 3, "'2' is not a label id:value"),
        (GOOD_X, b"2 5\n0:1\n,\n", "y", 3, "',' is not a label id:value"),
        (GOOD_X, b"2 5\n0:1\n-\n", "y", 3, "'-' is not a label id:value"),
        (GOOD_X, b"2 5\n0:1\n1:1\x00\n", "y", 3, "NUL"),
        (b"2 5\n0:1\n\x00\n", GOOD_Y, "x", 3, "NUL"),
        (GOOD_X, b"2 5\n0:1\r1:1\n", "y", 2, r"'\r1:1'"),
        (GOOD_X, b"2 5\r\n0:1\r\n1:x\r\n", "y", 3, "value 'x' of label 1"),
    ],
)
def test_bad_text_names_the_right_file_and_line(
    tmp_path: Path, features: bytes, labels: bytes, file: str, line: int, what: str
) -> None:
    x, y = write(tmp_path / "x", features), write(tmp_path / "y", labels)
    message = refused(tmp_path / "d.xmc", x, labels=y)
    assert message.startswith(f"{tmp_path / file}:{line}: ")
    assert what.format(y=y) in message
    assert len(message) < 300 + len(str(tmp_path))


@given(st.lists(st.sampled_from(b"0123:,.-e \t\n\r\x00\xffx"), max_size=40).map(bytes))
@settings(deadline=None, max_examples=400)
def test_any_bytes_of_one_kind_are_rows_without_labels_or_an_error_of_the_same_line(text: bytes) -> None:
    expected, line = [], 0
    try:
        expected = twin.parse(text, 10, 0)
    except twin.BadLineError as error:
        line = error.line
    parser = Parser("a.txt", 10, None, first_line=1, noun="label")
    blocks = parser.blocks(lines_of(text))
    if line:
        with pytest.raises(
            InputError, match=rf"^a\.txt:{line}: (label|value|there is a (NUL|carriage)|'.*' is not a label id:value)"
        ):
            list(blocks)
    else:
        rows = []
        for x_indptr, x_indices, x_data, y_indptr, y_indices in blocks:
            assert not y_indptr.any()
            assert len(y_indices) == 0
            for low, high in itertools.pairwise(x_indptr):
                rows.append(([], list(zip(x_indices[low:high], x_data[low:high].copy(), strict=True))))
        assert rows == expected


def test_an_error_far_behind_in_either_file_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_WINDOW", 5000)
    good = b"20000 9\n" + b"1:1 2:1 3:1\n" * 20_000
    bad = b"20000 9\n" + b"1:1\n" * 15_000 + b"1:1 9:1\n" + b"1:1\n" * 4_999
    for x, y, name in ((good, bad, "y: label id 9"), (bad, good, "x: feature id 9")):
        file, what = name.split(": ")
        message = refused(tmp_path / "d.xmc", write(tmp_path / "x", x), labels=write(tmp_path / "y", y))
        assert message.startswith(f"{tmp_path / file}:15002: {what}")


@pytest.mark.parametrize("file", ["x", "y"])
def test_a_line_longer_than_memory_allows_is_refused(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "_WINDOW", 2**10)
    for name in ("x", "y"):
        write(tmp_path / name, b"3 9\n1:1\n" + b"1:1" + b" " * (10**7 * (name == file)) + b"\n1:1\n")
    text = opened([tmp_path / "x"], tmp_path / "y")
    assert text.fit(2 * 10**7) < 10**7
    bad = text.parts()["xy".index(file)]
    with pytest.raises(MemoryLimitError, match=rf"^[^:]+{file}:3: the line is longer than"):
        list(bad.blocks({}))
    assert convert(tmp_path / "x", tmp_path / "d.xmc", labels=tmp_path / "y", memory_limit="4GB").n_samples == 3


@pytest.mark.slow
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_two_pipes_are_read_like_files(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    contents = {tmp_path / "x": pack(FEATURES), tmp_path / "y": pack(LABELS)}
    for pipe in contents:
        os.mkfifo(pipe)
    for pipe, content in contents.items():
        threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()
    dataset, figures = convert_report(tmp_path / "x", tmp_path / "d.xmc", labels=tmp_path / "y")
    assert (dense(dataset)[0] == X).all()
    assert (dense(dataset)[1] == Y).all()
    assert figures["bytes_in"] == len(FEATURES) + len(LABELS)


def test_files_are_closed_when_the_second_cannot_be_read(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for labels in (b"", b"2 5 5\n", b"4 5\n"):
        with pytest.raises(InputError):
            opened([write(tmp_path / "x", GOOD_X)], write(tmp_path / "y", labels))
    assert len(os.listdir("/proc/self/fd")) == before
