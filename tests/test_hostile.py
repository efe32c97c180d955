"""Hostile input: a test for each quirk of real files, through whole conversions. What is decided is said."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import needs_compiler
from helpers.forked import run_forked
from helpers.tools import ROOT
from scipy import sparse

from xmc_stream.convert import convert, convert_report
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset, open_dataset

HEADER = b"3 9 4\n"
ROWS = b"0 1:1\n1 2:2\n2,3 3:3\n"
ONE_LINE = 5 * 10**7  # bytes


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Dataset]:
    """Converts a text of this content; options as those of `convert`."""

    def make(content: bytes, **options: Any) -> Dataset:
        (tmp_path / "a.txt").write_bytes(content)
        return convert(tmp_path / "a.txt", tmp_path / "d.xmc", memory_limit="2GB", **options)

    return make


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """The message, without the path in front, of a text that is not converted; nothing is left of it."""

    def refuse(content: bytes, **options: Any) -> str:
        path = tmp_path / "a.txt"
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            convert(path, tmp_path / "d.xmc", memory_limit="2GB", **options)
        assert [file for file in tmp_path.iterdir() if file.name.startswith("d.xmc")] == []
        message = str(caught.value)
        assert message.isprintable()  # hence one line
        assert message.startswith(str(path))
        return message.removeprefix(str(path))

    return refuse


def rows(dataset: Dataset) -> list[tuple[list[int], dict[int, float]]]:
    """Labels and features of each row."""
    x, y = (matrix.block(0, dataset.n_samples) for matrix in (dataset.X_rows(), dataset.Y_rows()))
    return [
        (
            y.indices[y.indptr[i] : y.indptr[i + 1]].tolist(),
            dict(
                zip(
                    x.indices[x.indptr[i] : x.indptr[i + 1]].tolist(),
                    x.values[x.indptr[i] : x.indptr[i + 1]].tolist(),
                    strict=True,
                )
            ),
        )
        for i in range(dataset.n_samples)
    ]


GOOD = [([0], {1: 1}), ([1], {2: 2}), ([2, 3], {3: 3})]


# --- headers


def test_missing_header_is_libsvm_text_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(ROWS)
    dataset, figures = convert_report(tmp_path / "a.txt", tmp_path / "d.xmc")
    assert figures["said"] == "libsvm text, 3 rows, feature ids from 1, label ids from 0"
    assert rows(dataset) == [(labels, {j - 1: v for j, v in pairs.items()}) for labels, pairs in GOOD]


def test_missing_header_where_one_is_asked_for(refused: Callable[..., str]) -> None:
    message = refused(ROWS, format="xmlrepo")
    assert message.startswith(":1: the first line must be the header 'N D K' ")
    assert message.endswith(", not '0 1:1'")


@pytest.mark.parametrize("header", [b"n d k\n", b"3 9 4 1\n", b"3 9 -4\n", b"3 9 4.0\n"])
def test_a_header_of_another_form(refused: Callable[..., str], header: bytes) -> None:
    assert refused(header + ROWS).startswith(":1: ")
    assert "header" in refused(header + ROWS, format="xmlrepo")


def test_a_header_of_two_numbers_is_one_of_features_alone(refused: Callable[..., str]) -> None:
    assert "features alone" in refused(b"3 9\n" + ROWS)


def test_a_header_that_promises_too_many_rows(refused: Callable[..., str]) -> None:
    assert refused(b"5 9 4\n" + ROWS).startswith(":4: the header promises 5 rows and 3 follow")


def test_a_header_that_promises_too_few_rows(refused: Callable[..., str]) -> None:
    assert refused(b"2 9 4\n" + ROWS).startswith(":1: the header promises 2 rows and 3 follow")


def test_a_blank_line_at_the_end_is_a_row_too_many(refused: Callable[..., str]) -> None:
    assert refused(HEADER + ROWS + b"\n").startswith(":1: the header promises 3 rows and 4 follow")


def test_a_header_that_promises_more_than_memory_holds(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"1 999999999999999 4\n0 1:1\n")
    with pytest.raises(MemoryError, match="999999999999999 features"):
        convert(tmp_path / "b", tmp_path / "d.xmc")
    assert refused(b"999999999999999 9 4\n" + ROWS).startswith(":4: the header promises 999999999999999 rows")


# --- ids


def test_a_feature_id_beyond_the_header(refused: Callable[..., str]) -> None:
    message = refused(HEADER + b"0 1:1\n1 9:2\n2 3:3\n")
    assert message == ":3: feature id 9 is not below D = 9, which comes from the header: ids count from 0"


def test_a_label_id_beyond_the_header(refused: Callable[..., str]) -> None:
    message = refused(HEADER + b"0 1:1\n4 8:2\n2 3:3\n")
    assert message == ":3: label id 4 is not below K = 4, which comes from the header: ids count from 0"


@pytest.mark.parametrize("id", [b"4294967297", b"18446744073709551617", b"9" * 400])
def test_ids_that_wrap_around_are_out_of_range(refused: Callable[..., str], id: bytes) -> None:
    assert refused(HEADER + b"0 1:1\n1 " + id + b":2\n2 3:3\n").startswith(f":3: feature id {id.decode()[:40]}")
    assert refused(HEADER + b"0 1:1\n" + id + b" 1:2\n2 3:3\n").startswith(f":3: label id {id.decode()[:40]}")


def test_negative_ids(refused: Callable[..., str]) -> None:
    assert refused(HEADER + b"0 1:1\n1 -8:2\n2 3:3\n") == ":3: feature id in '-8:2' is negative: ids count from 0"
    assert refused(HEADER + b"0 1:1\n-1 8:2\n2 3:3\n") == ":3: label id in '-1' is negative: ids count from 0"
    assert refused(b"+1 1:1\n-1 8:2\n").startswith(":2: label '-1' is negative: ")


def test_duplicate_ids_are_refused(refused: Callable[..., str]) -> None:
    message = refused(HEADER + b"0 1:1\n1 8:2 3:1 8:1\n2 3:3\n")
    assert message.startswith(":3: feature 8 stands twice in the row: ")
    assert "sum_duplicates=True" in message
    assert refused(HEADER + b"0 1:1\n1,2,1 8:2\n2 3:3\n").startswith(":3: label 1 stands twice in the row: ")


def test_duplicate_ids_are_added_up_where_that_is_asked(made: Callable[..., Dataset]) -> None:
    dataset = made(HEADER + b"0 1:1\n1,2,1 8:2 3:1 8:1\n2 3:3\n", sum_duplicates=True)
    assert rows(dataset)[1] == ([1, 2], {3: 1, 8: 3})
    assert dataset.attributes["summed_duplicates"] == 2


def test_unsorted_ids_are_sorted(made: Callable[..., Dataset]) -> None:
    dataset = made(HEADER + b"0 1:1\n3,1 8:2 0:1\n2 3:3\n")
    assert rows(dataset)[1] == ([1, 3], {0: 1, 8: 2})
    assert dataset.X_rows().block(1, 2).indices.tolist() == [0, 8]
    assert dataset.fingerprint == made(HEADER + b"0 1:1\n1,3 0:1 8:2\n2 3:3\n", overwrite=True).fingerprint


# --- values


@pytest.mark.parametrize(
    "value", ["nan", "NaN", "-nan", "inf", "-Infinity", "abc", "", "0x1", "1_0", "1,5", "--1", "1e"]
)
def test_values_that_are_no_finite_numbers(refused: Callable[..., str], value: str) -> None:
    message = refused(HEADER + b"0 1:1\n1 8:" + value.encode() + b" 0:1\n2 3:3\n")
    assert message == f":3: value {value!r} of feature 8 is not a finite decimal number: correct the line"


@pytest.mark.parametrize("value", ["1e999", "-1e39", "3.5e38"])
def test_values_too_large_for_float32(refused: Callable[..., str], value: str) -> None:
    message = refused(HEADER + b"0 1:1\n1 8:" + value.encode() + b" 0:1\n2 3:3\n")
    assert message == f":3: value {value!r} of feature 8 is too large for float32: correct the line"


def test_a_signalling_nan_in_a_matrix(tmp_path: Path) -> None:
    """Its bits make a cast warn."""
    X = np.ones((3, 4))
    X.view(np.uint64)[1, 2] = 0x7FF0000000000001
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(3))
    with pytest.raises(InputError, match=r"row 1 .* is not finite"):
        convert(tmp_path / "x.npy", tmp_path / "d.xmc", labels=tmp_path / "y.npy")


# --- lines


def test_an_empty_label_field_is_a_row_without_labels(made: Callable[..., Dataset]) -> None:
    assert rows(made(HEADER + b"0 1:1\n 8:2 0:1\n2 3:3\n"))[1] == ([], {0: 1, 8: 2})


def test_rows_without_features(made: Callable[..., Dataset]) -> None:
    assert rows(made(HEADER + b"0 1:1\n1\n2 3:3\n"))[1] == ([1], {})


def test_an_empty_line_is_a_row_of_xmlrepo_and_none_of_libsvm_text(made: Callable[..., Dataset]) -> None:
    assert rows(made(HEADER + b"0 1:1\n\n2 3:3\n"))[1] == ([], {})
    dataset = made(b"0 1:1\n\n2 3:3\n", overwrite=True)
    assert dataset.n_samples == 2
    assert dataset.attributes["blank_lines"] == 1


def test_spaces_after_commas(made: Callable[..., Dataset]) -> None:
    assert rows(made(HEADER + b"0 1:1\n1,  3 4:1\n2 3:3\n"))[1] == ([1, 3], {4: 1})


def test_a_space_before_a_comma(refused: Callable[..., str]) -> None:
    assert refused(HEADER + b"0 1:1\n1 ,2 4:1\n2 3:3\n").startswith(":3: ',2' is not a feature id:value")


def test_tabs(made: Callable[..., Dataset]) -> None:
    assert rows(made(b"3\t9 4\n0\t1:1\n1\t\t2:2\t\n2,\t3 3:3 \n")) == GOOD


def test_windows_lines(made: Callable[..., Dataset]) -> None:
    assert rows(made((HEADER + ROWS).replace(b"\n", b"\r\n"))) == GOOD


def test_lines_of_old_macintoshes(refused: Callable[..., str]) -> None:
    assert refused((HEADER + ROWS).replace(b"\n", b"\r")).startswith(":1: ")
    assert "carriage return" in refused(HEADER + ROWS.replace(b"\n", b"\r"))


def test_a_last_line_without_its_newline(made: Callable[..., Dataset]) -> None:
    assert rows(made((HEADER + ROWS)[:-1])) == GOOD


def test_comments_are_of_libsvm_text_alone(made: Callable[..., Dataset], refused: Callable[..., str]) -> None:
    assert refused(HEADER + b"0 1:1\n1 2:2 # c\n2 3:3\n").startswith(":3: '#' is not a feature id:value")
    dataset = made(b"# c\n0 1:1#c\n1 2:2 # 3:1\n2,3 3:3\n", base=0)
    assert rows(dataset) == GOOD
    assert dataset.attributes["blank_lines"] == 1


def test_an_utf8_byte_order_mark(made: Callable[..., Dataset]) -> None:
    assert rows(made(b"\xef\xbb\xbf" + HEADER + ROWS)) == GOOD


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("text", [HEADER + ROWS, ROWS, b'{"text":"a","labels":[]}\n'])
def test_utf16_and_utf32(refused: Callable[..., str], text: bytes, encoding: str) -> None:
    assert "UTF-16 or UTF-32" in refused(text.decode().encode(encoding))


def test_nul_bytes(refused: Callable[..., str]) -> None:
    assert refused(HEADER + b"0 1:1\n1 4:1\0\n2 3:3\n").startswith(":3: there is a NUL byte")
    assert refused(HEADER + ROWS + b"\0" * 4096).startswith(":5: there is a NUL byte")  # blocks that a crash left
    assert refused(b'{"text":"a","labels":[1]}\n{"text":"b\0","labels":[1]}\n').startswith(":2: there is a NUL byte")


def test_a_line_of_a_million_labels(made: Callable[..., Dataset]) -> None:
    dataset = made(b"1 9 1000000\n" + b",".join(b"%d" % i for i in reversed(range(10**6))) + b" 3:1\n")
    assert dataset.Y_rows().nnz == 10**6
    assert (dataset.label_counts() == 1).all()


CHILD = """
import sys
from xmc_stream.convert import convert
from xmc_stream.errors import XmcStreamError
try:
    print(convert(*sys.argv[1:3], memory_limit=sys.argv[3]).X_rows().nnz)
except XmcStreamError as error:
    print(error)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@needs_compiler
def test_a_line_of_50_megabytes(tmp_path: Path) -> None:
    """It fits a large limit; a small one ends in one line; either is kept."""
    path = tmp_path / "a.txt"
    n = ONE_LINE // 10
    with open(path, "wb") as file:
        file.write(b"2 %d 4\n0 1:1\n1" % n)
        for start in range(0, n, 10**6):
            file.write(b"".join(b" %07d:1" % j for j in range(start, min(start + 10**6, n))))
        file.write(b"\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for limit, most in (("350MB", 350), ("1500MB", 1500)):
        command = [sys.executable, "-c", CHILD, path, tmp_path / f"{limit}.xmc", limit]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        said, peak = done.stdout.splitlines()
        assert int(peak) * 1024 < most * 10**6
        if limit == "350MB":
            assert said.startswith(f"{path}:3: ")
            assert "memory_limit" in said
        else:
            assert said == str(n + 1)


# --- files


@pytest.mark.parametrize("cut", [5, 12, -1, -9])
def test_truncated_gzip(refused: Callable[..., str], cut: int) -> None:
    assert "end early" in refused(gzip.compress(HEADER + ROWS)[:cut])


def test_gzip_truncated_after_many_lines(refused: Callable[..., str]) -> None:
    lines = b"".join(b"%d %d:%d.%d\n" % (i % 4, i % 9, i, i * i) for i in range(100_000))
    message = refused(gzip.compress(b"100000 9 4\n" + lines)[:-1000])
    line = int(message.split(":")[1])
    assert 70_000 < line <= 100_001
    assert "end early" in message


def test_damaged_gzip(refused: Callable[..., str]) -> None:
    content = bytearray(gzip.compress(HEADER + ROWS))
    content[-6] ^= 1  # of its checksum
    assert "damaged" in refused(bytes(content))
    assert "damaged" in refused(gzip.compress(HEADER + ROWS) + b"abc")


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        convert(tmp_path / "folder", tmp_path / "d.xmc")
    with pytest.raises(InputError, match="is a folder"):
        convert(tmp_path / "folder", tmp_path / "d.xmc", format="xmlrepo")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check the name"):
        convert(tmp_path / "none", tmp_path / "d.xmc")


def test_what_exists_is_replaced_only_where_that_is_asked(tmp_path: Path, made: Callable[..., Dataset]) -> None:
    first = made(HEADER + ROWS).fingerprint
    with pytest.raises(InputError, match="overwrite=True"):
        made(HEADER + ROWS.replace(b":3", b":4"))
    assert open_dataset(tmp_path / "d.xmc").fingerprint == first
    with pytest.raises(InputError, match=":4: "):
        made(HEADER + ROWS.replace(b":3", b":x"), overwrite=True)
    assert open_dataset(tmp_path / "d.xmc").fingerprint == first  # what replaces it must be whole
    assert made(HEADER + ROWS.replace(b":3", b":4"), overwrite=True).fingerprint != first
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    with pytest.raises(InputError):
        convert(tmp_path / "a.txt", tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n\n", b"   ", gzip.compress(b"", mtime=0), b"\xef\xbb\xbf"])
def test_an_empty_file(refused: Callable[..., str], content: bytes) -> None:
    assert "the format is not recognised" in refused(content)


def zip_of_a_text() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.txt", HEADER + ROWS)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0", b"\xff\xd8\xff\xe0\0\x10JFIF\0", b"%PDF-1.7\n1 0 obj\n",
        zip_of_a_text(), pickle.dumps({"X": np.zeros(3)}), pickle.dumps(sparse.eye(3).tocsr()), b"\0" * 1000,
        b"\x7fELF\2\1\1", b"SQLite format 3\0", b"<!DOCTYPE html>\n<html>404</html>\n", b"id,price\n",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", np.random.default_rng(0).bytes(9999),
    ],
)  # fmt: skip
def test_other_files_given_by_mistake(refused: Callable[..., str], content: bytes) -> None:
    message = refused(content)
    assert "not recognised" in message or "not a sparse matrix" in message
    assert len(message) < 500


@pytest.mark.slow
def test_a_bad_line_of_a_large_file_is_one_line_too(tmp_path: Path, commands: Callable[..., Any]) -> None:
    """Parts of large files are read by several threads."""
    path = tmp_path / "a.txt"
    line = b"1,2 " + b" ".join(b"%d:0.5" % j for j in range(1000)) + b"\n"
    n = 35 * 10**6 // len(line)
    path.write_bytes(b"%d 1000 9\n" % n + line * (n - 1) + b"1,2 5:x\n")
    message = commands("convert", path, tmp_path / "d.xmc", "--threads", 2, fails=True)
    assert message.startswith(f"xmc-stream: {path}:{n + 1}: value 'x' of feature 5")
    assert list(tmp_path.iterdir()) == [path]


# --- what is left out


def test_bad_rows_are_left_out_counted_and_listed(tmp_path: Path, made: Callable[..., Dataset]) -> None:
    text = b"6 9 4\n0 1:1\n1 2:nan\n1 2:2\n9 1:1\n2,3 3:3\n1 -2:1\n"
    dataset = made(text, skip=True)
    assert rows(dataset) == GOOD
    assert dataset.attributes["skipped"] == 3
    listed = dataset.attributes["skipped_rows"]
    assert [row[:2] for row in listed] == [[str(tmp_path / "a.txt"), line] for line in (3, 5, 7)]
    for (_, _, reason), words in zip(listed, ("not a finite", "not below K", "negative"), strict=True):
        assert words in reason


def test_more_bad_rows_than_are_listed_are_counted(made: Callable[..., Dataset]) -> None:
    dataset = made(b"2501 9 4\n" + b"0 1:x\n" * 2500 + b"1 1:1\n", skip=True)
    assert (dataset.n_samples, dataset.attributes["skipped"]) == (1, 2500)
    assert len(dataset.attributes["skipped_rows"]) == 1000


def test_nothing_but_bad_rows(refused: Callable[..., str]) -> None:
    message = refused(b"2 9 4\n0 1:x\n0 1:y\n", skip=True)
    assert message.startswith(":2: value 'x' of feature 1 is not a finite decimal number")
    assert "no other row is sound" in message


@pytest.mark.slow
def test_the_command_says_what_it_left_out(tmp_path: Path, commands: Callable[..., Any]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"4 9 4\n0 1:1\n1 2:nan\n1 2:2\n2,3 3:3 3:1\n")
    line = commands("convert", path, tmp_path / "d.xmc", fails=True)
    assert line == f"xmc-stream: {path}:3: value 'nan' of feature 2 is not a finite decimal number: correct the line"
    said = run_forked("convert", path, tmp_path / "d.xmc", "--on-error=skip", "--duplicates=sum")
    assert "XMLRepo text, ids from 0, 3 rows" in said
    assert "1 bad rows left out" in said
    assert "1 values added to another" in said
    assert f"{path}:3: value 'nan'" in run_forked("info", tmp_path / "d.xmc")


def test_long_names_are_cut_in_messages(refused: Callable[..., str]) -> None:
    long = b"x" * 10_000
    for text in (
        b'{"text":"a","' + long + b'":1}\n',
        b'{"text":"a","labels":["' + long + b'","' + long + b'"]}\n',
        long + b"\n",
        HEADER + b"0 " + long + b":1\n1 1:1\n1 1:1\n",
    ):
        assert len(refused(text)) < 500


# --- two quirks of real files


def test_the_28_unlabeled_rows_of_eurlex_4k(made: Callable[..., Dataset]) -> None:
    """Rows of EURLex-4K's training file begin with a space where they have no labels: 28 of 15,539."""
    lines = [b"%s %d:0.5 %d:0.25" % (b"" if i % 20 == 7 else b"%d,%d" % (i % 9, 9), i % 50, 50) for i in range(560)]
    dataset = made(b"560 51 10\n" + b"\n".join(lines) + b"\n")
    got = rows(dataset)
    assert sum(not labels for labels, _ in got) == 28
    assert all(len(pairs) == 2 for _, pairs in got)
    assert got[7] == ([], {7: 0.5, 50: 0.25})
    assert dataset.label_counts().sum() == 2 * (560 - 28)


@pytest.mark.slow
def test_a_test_file_with_a_feature_id_above_the_training_headers_d(
    tmp_path: Path, commands: Callable[..., Any]
) -> None:
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"
    train.write_bytes(HEADER + ROWS)
    test.write_bytes(b"2 12 4\n1 8:1 0:2\n3 0:1 11:5\n")  # its own header knows the id
    commands("convert", train, tmp_path / "train.xmc")
    arguments = "convert", test, tmp_path / "test.xmc", "--like", tmp_path / "train.xmc"
    line = commands(*arguments, fails=True)
    assert line.startswith(f"xmc-stream: {test}:3: feature id 11 is not below D = 9, which comes from --like ")
    assert "--unseen=drop" in line
    assert not (tmp_path / "test.xmc").exists()
    commands(*arguments, "--unseen", "drop")
    dataset = open_dataset(tmp_path / "test.xmc")
    assert rows(dataset) == [([1], {0: 2, 8: 1}), ([3], {0: 1})]
    assert (dataset.n_features, dataset.attributes["dropped_features"]) == (9, 1)
    assert commands("info", tmp_path / "test.xmc")["dropped_features"] == 1


# --- bases of ids


@pytest.mark.parametrize("base", [0, 1])
def test_a_test_set_of_raw_text_counts_labels_as_its_training_set(tmp_path: Path, base: int) -> None:
    (tmp_path / "train.json").write_text('{"text":"red green","labels":[1]}\n{"text":"blue","labels":[2]}\n')
    (tmp_path / "test.json").write_text('{"text":"red","labels":[2]}\n')
    train = convert(tmp_path / "train.json", tmp_path / "train.xmc", base=base)
    test = convert(tmp_path / "test.json", tmp_path / "test.xmc", like=train)
    assert train.attributes["label_base"] == test.attributes["label_base"] == base
    assert rows(test)[0][0] == [2 - base]


# --- the table in docs/convert.md


def test_the_table_of_bad_input_is_true(tmp_path: Path) -> None:
    """Our column, against the files that benchmarks/hostile.py makes."""
    spec = importlib.util.spec_from_file_location("hostile", ROOT / "benchmarks" / "hostile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = {name: (text, options) for name, text, options in module.cases()}
    section = (ROOT / "docs" / "convert.md").read_text().split("## What programs do with bad input")[1]
    table = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(table) == 10
    for name, said in ((cell[0].strip(), cell[1].strip()) for cell in table):
        text, options = made[name]
        assert options == []
        (tmp_path / "a.txt").write_text(text)
        try:
            figures = convert_report(tmp_path / "a.txt", tmp_path / "d.xmc", overwrite=True)[1]
            assert figures["n_samples"] == 300
            outcome = "reads it as libsvm text" if figures["said"].startswith("libsvm") else "sorts them"
        except InputError as error:
            line = "301" if name == "wrong N" else "101"
            with_line = str(error).startswith(f"{tmp_path / 'a.txt'}:{line}: ")
            outcome = "error with line and reason" if with_line else "error"
        assert said.split(";")[0].split(",")[0] == outcome, name
