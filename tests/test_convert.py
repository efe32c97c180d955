"""Conversion: what goes in comes back from the store, what is wrong ends in one line, memory keeps the limit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import environment
from helpers.compiler import needs_compiler
from helpers.conversions import TEXT, X, Y, dense, opened, refused, write
from scipy import sparse

from xmc_stream.convert import convert, convert_report
from xmc_stream.convert.lines import files as text_module
from xmc_stream.convert.lines.parser import Parser
from xmc_stream.errors import InputError, MemoryLimitError, StoreError
from xmc_stream.store.dataset import open_dataset


@pytest.mark.parametrize("packed", [False, True])
def test_text_comes_back_from_the_store(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path / "any.name", gzip.compress(TEXT) if packed else TEXT)
    dataset, figures = convert_report(path, tmp_path / "d.xmc")
    got_x, got_y = dense(dataset)
    assert (got_x == X).all()
    assert (got_y == Y).all()
    assert dataset.X_rows().nnz == 7  # the stored zero is kept
    assert dataset.attributes["source"] == "any.name"
    assert dataset.attributes["source_format"] == ("XMLRepo text, gzip" if packed else "XMLRepo text")
    assert dataset.attributes["normalize"] == "none"
    on_disk = sum(file.stat().st_size for file in (tmp_path / "d.xmc").rglob("*") if file.is_file())
    assert list(figures) == [
        "dataset", "n_samples", "n_features", "n_labels", "nnz_features", "nnz_labels", "bytes_in", "bytes_on_disk",
        "seconds", "peak_rss", "said", "resumed",
    ]  # fmt: skip
    assert json.loads(json.dumps(figures)) == figures
    assert list(figures.values())[:8] == [
        str(tmp_path / "d.xmc"), 5, 4, 3, 7, 4, path.stat().st_size, on_disk
    ]  # fmt: skip
    assert 0 < figures["seconds"] < 600
    assert figures["peak_rss"] > 10**7


def test_pieces_and_lines_longer_than_a_piece_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{i % 7} " + " ".join(f"{j}:{i}.{j}" for j in range(i % 50)) for i in range(500)]
    path = write(tmp_path / "a.txt", "\n".join(["500 50 7", *lines]).encode())  # the last line lacks its newline
    whole = convert(path, tmp_path / "whole.xmc")
    for piece in (1, 64, 1000):
        monkeypatch.setattr(text_module, "_WINDOW", piece)
        assert convert(path, tmp_path / "d.xmc", overwrite=True).fingerprint == whole.fingerprint
    zipped = write(tmp_path / "a.gz", gzip.compress(path.read_bytes()[:999]) + gzip.compress(path.read_bytes()[999:]))
    assert convert(zipped, tmp_path / "d.xmc", overwrite=True).fingerprint == whole.fingerprint


def test_a_line_longer_than_memory_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", b"3 9 9\n1 1:1\n" + b"1 1:1" + b" " * 10**7 + b"\n1 1:1\n")
    monkeypatch.setattr(text_module, "_WINDOW", 2**10)
    text = opened([path])
    assert text.fit(2 * 10**7) < 10**7
    [part] = text.parts()
    with pytest.raises(MemoryLimitError, match=r"^[^:]+a\.txt:3: the line is longer than 2\.\d+ MB"):
        list(part.blocks({}))
    assert convert(path, tmp_path / "d.xmc", memory_limit="4GB").n_samples == 3


@pytest.mark.parametrize("text", [b"0 3 2\n", b"0 3 2", b"0 0 0\n", b"2 0 0\n\n\n", b"2 3 2\r\n\r\n\r\n"])
def test_datasets_without_rows_or_entries(tmp_path: Path, text: bytes) -> None:
    dataset = convert(write(tmp_path / "a.txt", text), tmp_path / "d.xmc")
    n, d, k = map(int, text.split()[:3])
    got_x, got_y = dense(dataset)
    assert got_x.shape == (n, d)
    assert got_y.shape == (n, k)
    assert not got_x.any()
    assert not got_y.any()


def test_like_fixes_sizes_and_normalisation(tmp_path: Path) -> None:
    train = convert(write(tmp_path / "train.txt", TEXT), tmp_path / "train.xmc", normalize="l2")
    small = write(tmp_path / "test.txt", b"1 2 1\n0 3:5\n")  # its header is about itself
    test = convert(small, tmp_path / "test.xmc", like=tmp_path / "train.xmc")
    assert (test.n_features, test.n_labels) == (4, 3)
    assert dense(test)[0].tolist() == [[0, 0, 0, 1]]
    assert test.attributes["normalize"] == "l2"
    assert test.attributes["like"] == "train.xmc"
    plain = convert(small, tmp_path / "plain.xmc", like=train, normalize="none")
    assert plain.attributes["normalize"] == "none"
    assert dense(plain)[0].tolist() == [[0, 0, 0, 5]]
    message = refused(tmp_path / "x.xmc", write(tmp_path / "far.txt", b"2 9 9\n0 1:1\n3 1:1\n"), like=train)
    assert message.startswith(f"{tmp_path / 'far.txt'}:3: label id 3 is not below K = 3, which comes from like ")
    assert "train.xmc" in message
    message = refused(tmp_path / "x.xmc", sparse.csr_array(np.eye(5, 9)), labels=sparse.csr_array(Y), like=train)
    assert "row 4 (from 0) is not below the number of features D = 4, which comes from like" in message


def test_normalize_l2_divides_rows_by_their_norms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dense_x = rng.normal(size=(200, 30)) * (rng.random((200, 30)) < 0.2)
    dense_x[7] = 0
    exact = dense_x.astype(np.float32).astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    lines = [" " + " ".join(f"{j}:{row[j]:.9g}" for j in np.flatnonzero(row)) for row in dense_x.astype(np.float32)]
    path = write(tmp_path / "a.txt", "\n".join(["200 30 1", *lines, ""]).encode())
    expected = (exact / np.where(norms == 0, 1, norms)).astype(np.float32)
    matrices = {"labels": sparse.csr_array((200, 1))}
    for source, options in ((path, {}), (sparse.csr_array(dense_x), matrices)):
        dataset = convert(source, tmp_path / "d.xmc", normalize="l2", overwrite=True, **options)
        np.testing.assert_array_max_ulp(dense(dataset)[0], expected, 1)
        assert dataset.attributes["normalize"] == "l2"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (b"", 1, "empty"),
        (b"\n", 1, "no header"),
        (b"x,1 0:1 2:2\n", 1, "it begins with 'x,1 0:1 2:2', no header"),
        (b"0,1 0:1 2:2 \n0 x\n", 2, "'x' is not a feature id:value"),  # no header: libsvm
        (b"2 3\n", 1, "header"),
        (b"2 3 4 5\n", 1, "header"),
        (b"2 3 -4\n", 1, "header"),
        (b"2 3 four\n", 1, "header"),
        (b"2 3 99999999999999999999\n", 1, "header"),
        (b"x" * 10**6, 1, "header"),
        (b"\x00\xff\x00" * 100, 1, "header"),
        (b"2 5 5\n0 1:1\n", 2, "promises 2 rows and 1 follow"),
        (b"2 5 5\n0 1:1\n1 1:1\n\n\n0 1:1", 1, "promises 2 rows and 5 follow"),
        (b"2 5 5\n0 1:1\n1 2:abc\n", 3, "value 'abc' of feature 2 is not a finite decimal number"),
        (b"2 5 5\n0 1:1\n1 2:\n", 3, "value '' of feature 2"),
        (b"2 5 5\n0 1:nan\n1 2:1\n", 2, "'nan'"),
        (b"2 5 5\n0 1:1\n1 2:-inf\n", 3, "'-inf'"),
        (b"2 5 5\n0 1:1\n1 2:0x1p3\n", 3, "'0x1p3'"),
        (b"2 5 5\n0 1:1\n1 2:1_0\n", 3, "'1_0'"),
        (b"2 5 5\n0 1:1\n1 2:1e39\n", 3, "too large for float32"),
        (b"2 5 5\n0 1:1\n1 2:3.40282356779733661637539395458142568447\n", 0, ""),
        (b"2 5 5\n0 1:1\n1 2:340282356779733661637539395458142568448\n", 3, "too large for float32"),
        (b"2 5 5\n0 1:1\n1 5:1\n", 3, "feature id 5 is not below D = 5, which comes from the header"),
        (b"2 5 5\n0 1:1\n5 1:1\n", 3, "label id 5 is not below K = 5"),
        (b"2 5 5\n0 1:1\n1 %s:1\n" % (b"9" * 30), 3, "feature id " + "9" * 30),
        (b"2 5 5\n0 1:1\n1 -2:1\n", 3, "feature id in '-2:1' is negative"),
        (b"2 5 5\n0 1:1\n-1 2:1\n", 3, "label id in '-1' is negative"),
        (b"2 5 5\n0 1:1\n1 2:1 2:1\n", 3, "feature 2 stands twice"),
        (b"2 5 5\n0 1:1\n1 3:1 2:1 3:2\n", 3, "feature 3 stands twice"),
        (b"2 5 5\n0 1:1\n1,2,1 2:1\n", 3, "label 1 stands twice"),
        (b"2 5 5\n0 1:1\n1, 2:1\n", 3, "'2:1' is not a list of label ids"),
        (b"2 5 5\n0 1:1\n1,\n", 3, "ends in a comma"),
        (b"2 5 5\n0 1:1\n,1 2:1\n", 3, "',1' is not a list of label ids"),
        (b"2 5 5\n0 1:1\n1.0 2:1\n", 3, "'1.0'"),
        (b"2 5 5\n0 1:1\n1 2 2:1\n", 3, "'2' is not a feature id:value"),
        (b"2 5 5\n0 1:1\n1 2:1 # comment\n", 3, "'#'"),
        (b"2 5 5\n0 1:1\n1 2:1 3\n", 3, "'3'"),
        (b"2 5 5\n0 1:1\n1 2 :1\n", 3, "'2'"),
        (b"2 5 5\n0 1:1\r1 2:1\n", 2, r"'\r1'"),
        (b"2 5 5\n0 1:1\n1 2:1\x00\n", 3, "NUL"),
        (b"2 5 5\n0 1:1\n\x00\x00\n", 3, "NUL"),
        ("2 5 5\n0 1:1\n\u0661 2:1\n".encode(), 3, "'\u0661'"),
        ("2 5 5\n0 1:1\n1 2:\u2028x\n".encode(), 3, r"'\u2028x'"),
        (b"2 5 5\n0 1:1\n1 2:" + b"1" * 999 + b"x" * 10**5, 3, "value '111"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_text_ends_in_one_line_with_file_and_line(
    tmp_path: Path, text: bytes, line: int, what: str, packed: bool
) -> None:
    path = write(tmp_path / "bad.txt", gzip.compress(text) if packed else text)
    if not line:
        assert convert(path, tmp_path / "d.xmc").n_samples == 2
        return
    message = refused(tmp_path / "d.xmc", path)
    assert message.startswith(f"{path}:{line}: ")
    assert what in message
    assert len(message) < 300 + len(str(path))


def test_damaged_gzip_names_the_line_reached(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = b"5000 100 9\n" + b"".join(b"%d %d:%.6f\n" % (i % 9, i % 100, v) for i, v in enumerate(rng.random(5000)))
    packed = gzip.compress(text)
    cut = write(tmp_path / "cut.gz", packed[: len(packed) // 2])
    message = refused(tmp_path / "d.xmc", cut)
    line = int(message.removeprefix(f"{cut}:").split(":")[0])
    assert 1000 < line < 4000
    assert "gzip data end early" in message
    for name, content in {
        "bits": packed[:9000] + bytes(1000) + packed[10000:],
        "checksum": packed[:-8] + bytes(8),
        "behind": packed + b"garbage",
        "head": packed[:2] + b"\x07" + packed[3:],
    }.items():
        message = refused(tmp_path / "d.xmc", write(tmp_path / name, content))
        assert message.startswith(f"{tmp_path / name}:")
        assert "gzip data are damaged" in message
    assert ":1: the gzip data end early" in refused(tmp_path / "d.xmc", write(tmp_path / "short", packed[:5]))


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "a.txt", TEXT)
    assert "missing.txt cannot be read (No such file" in refused(tmp_path / "d.xmc", tmp_path / "missing.txt")
    for names in ("label_names", "feature_names"):
        line = refused(tmp_path / "d.xmc", good, **{names: tmp_path / "words.txt"})
        assert line == f"{tmp_path / 'words.txt'} cannot be read (No such file or directory): check the name"
    assert f"{tmp_path} is a folder" in refused(tmp_path / "d.xmc", tmp_path)
    assert f"{tmp_path} is a folder" in refused(tmp_path / "d.xmc", tmp_path, format="libsvm")
    assert "format 'text' is not known: it is one of npz," in refused(tmp_path / "d.xmc", good, format="text")
    if os.geteuid():
        good.chmod(0)
        assert "a.txt cannot be read (Permission denied)" in refused(tmp_path / "d.xmc", good)
        good.chmod(0o600)
    assert "is not a dataset" in refused(tmp_path / "d.xmc", good, like=tmp_path / "missing.xmc", kind=StoreError)
    assert "normalize must be one of none, l2" in refused(tmp_path / "d.xmc", good, normalize="l1")
    assert "labels" in refused(tmp_path / "d.xmc", good, labels=good)
    with pytest.raises(InputError, match="is a file, not a folder"):
        convert(good, good / "d.xmc")


def test_an_existing_dataset_is_replaced_only_when_told_and_when_all_is_well(tmp_path: Path) -> None:
    target = tmp_path / "d.xmc"
    first = convert(write(tmp_path / "a.txt", TEXT), target).fingerprint
    assert "exists" in refused(target, write(tmp_path / "other.txt", TEXT))
    assert "exists" in refused(target, tmp_path / "a.txt", normalize="l2")
    refused(target, write(tmp_path / "bad.txt", b"1 1 1\n0 5:1\n"), overwrite=True)
    assert open_dataset(target).fingerprint == first
    assert convert(write(tmp_path / "b.txt", b"1 4 3\n0 3:1\n"), target, overwrite=True).n_samples == 1
    assert open_dataset(target).n_samples == 1


def test_what_a_link_leads_to_is_never_replaced(tmp_path: Path) -> None:
    there, link = tmp_path / "there.xmc", tmp_path / "d.xmc"
    first = convert(write(tmp_path / "a.txt", TEXT), there).fingerprint
    link.symlink_to(there)
    assert convert(write(tmp_path / "b.txt", b"1 4 3\n0 3:1\n"), link, overwrite=True).n_samples == 1
    assert not link.is_symlink()
    assert open_dataset(there).fingerprint == first
    assert dense(open_dataset(there))[0].any()


def test_sizes_of_a_header_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"1 100000000000000 5\n0 1:1\n")
    message = refused(tmp_path / "d.xmc", path, kind=MemoryLimitError)
    assert "counts of 100000000000000 features" in message


@pytest.mark.slow
def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    code = f"from xmc_stream.convert import convert_report as c; print(c('/dev/stdin', {str(tmp_path / 'd.xmc')!r})[1])"
    for content in (TEXT, gzip.compress(TEXT)):
        done = subprocess.run([sys.executable, "-c", code], input=content, env=environment(), capture_output=True)
        assert done.returncode == 0, done.stderr
        assert b"'bytes_in': %d" % len(TEXT) in done.stdout
        assert (dense(open_dataset(tmp_path / "d.xmc"))[0] == X).all()
        code = code.replace("d.xmc'", "d.xmc', overwrite=True")


def test_progress_is_quiet_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert(write(tmp_path / "a.txt", TEXT), tmp_path / "d.xmc", progress=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, xmc_stream.convert; print([m for m in ('numba', 'dask', 'zarr', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


CHILD = """
import sys
from xmc_stream.convert import convert
convert(sys.argv[1], sys.argv[2], memory_limit="512MB")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@needs_compiler
def test_memory_keeps_the_limit_and_does_not_grow_with_the_file(tmp_path: Path) -> None:
    # long rows of one-digit values; 60 MB of them are two parts, so that every thread has one
    block = b"".join(
        b"%d " % (i % 7) + b" ".join(b"%d:%d" % (j, j % 10) for j in range(500)) + b"\n" for i in range(99)
    )

    def peak(times: int) -> int:
        path = tmp_path / "a.txt"
        with open(path, "wb") as file:
            file.write(b"%d 500 7\n" % (99 * times))
            for _ in range(times):
                file.write(block)
        done = subprocess.run(
            [sys.executable, "-c", CHILD, path, tmp_path / f"{times}.xmc"], env=environment(), capture_output=True
        )
        assert done.returncode == 0, done.stderr
        path.unlink()
        return int(done.stdout) * 1024

    peak(1)  # whatever is not compiled yet
    times = 60 * 10**6 // len(block)
    small, large = peak(times), peak(2 * times)
    assert small < 512 * 10**6
    assert large < small + 15 * 10**6
    assert open_dataset(tmp_path / f"{2 * times}.xmc").X_rows().nnz == 500 * 99 * 2 * times


DATA = os.environ.get("XMC_STREAM_DATA")


@pytest.mark.skipif(DATA is None, reason="XMC_STREAM_DATA does not name the folder of public data sets")
@pytest.mark.parametrize(
    ("name", "sizes", "nnz", "positives", "unlabelled"),
    [
        ("bibtex/train", (4880, 1836, 159), 334250, 2.38, 0),
        ("bibtex/test", (2515, 1836, 159), 173496, 2.444, 0),
        ("delicious/train", (12920, 500, 983), 239549, 19.047, 10),
        ("delicious/test", (3185, 500, 983), 55065, 18.91, 4),
    ],
)
def test_public_data_sets_have_the_counts_of_their_descriptions(
    tmp_path: Path, name: str, sizes: tuple[int, int, int], nnz: int, positives: float, unlabelled: int
) -> None:
    path = Path(str(DATA)) / f"{name}.txt.gz"
    dataset, figures = convert_report(path, tmp_path / "d.xmc")
    assert (dataset.n_samples, dataset.n_features, dataset.n_labels) == sizes
    assert figures["nnz_features"] == nnz
    assert round(figures["nnz_labels"] / sizes[0], 3) == pytest.approx(positives, abs=0.005)
    lengths = np.diff(dataset.Y_rows().indptr.read(0, sizes[0] + 1))
    assert np.count_nonzero(lengths == 0) == unlabelled
    with gzip.open(path) as file:  # the first rows again, read in another way
        file.readline()
        block = dataset.X_rows().block(0, 100)
        for i in range(100):
            features = [token.split(b":") for token in file.readline().split() if b":" in token]
            row = slice(block.indptr[i], block.indptr[i + 1])
            assert block.indices[row].tolist() == [int(j) for j, _ in features]
            assert block.values[row].tolist() == [np.float32(v) for _, v in features]


def test_parser_counts_lines_across_texts() -> None:
    parser = Parser("a.txt", 5, 5)
    for _ in range(3):
        text = np.frombuffer(bytearray(b"1 1:1\n\n"), np.uint8)
        assert sum(len(x_indptr) - 1 for x_indptr, *_ in parser.blocks(text)) == 2
    with pytest.raises(InputError, match=r"^a\.txt:9: "):
        list(parser.blocks(np.frombuffer(bytearray(b"1 1:1\n1 1\n"), np.uint8)))
