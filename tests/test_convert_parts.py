"""Parts of an input: wherever it is cut, in whatever files, on however many workers, it is the same dataset."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import zarr
from helpers.commands import environment
from helpers.conversions import BOM, INPUTS, TEXT, X, Y, cut_into, dense, files_of, lines_of, refused, write
from helpers.problems import tight
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.convert import conversion, convert, convert_report
from xmc_stream.convert.lines import files as text_module
from xmc_stream.convert.lines.files import Buffers, TextRange, ranges
from xmc_stream.store import new_dataset as assembly
from xmc_stream.store.dataset import open_dataset

rng = np.random.default_rng(5)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([b"", b"a", b"\r", b"1,2 3:4", b"x" * 30]), max_size=12),
    st.booleans(), st.booleans(), st.lists(st.integers(0, 200), max_size=6), st.integers(2, 40),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_every_line_belongs_to_the_range_in_which_it_begins(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], marked: bool, ends: bool, cuts: list[int], piece: int
) -> None:
    text = b"\n".join(lines) + b"\n" * ends
    path = write(tmp_path_factory.getbasetemp() / "ranges.txt", BOM * marked + text)
    size = path.stat().st_size
    bounds = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
    read = b""
    for start, stop in pairwise(bounds):
        with TextRange(path, start, stop).open(Buffers(piece, 10**6)) as file:
            here = b"".join(bytes(piece) for piece in file.windows())
            if here:
                at = len(read) + len(BOM) * (marked and bool(read))
                assert start <= at < stop
                assert file.first_line() == 1 + read.count(b"\n")
            read += here
    assert read == text + b"\n" * (not text.endswith(b"\n") and bool(text))  # the last line has one too


def test_a_range_finds_its_file_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), b"1\n2\n")
    Path("link").symlink_to("a")
    sent, standard_input = (pickle.dumps(TextRange(Path(name), 2, 4)) for name in ("link", "-"))
    monkeypatch.chdir("/")
    text = pickle.loads(sent)
    assert (text.path, text.name) == (tmp_path / "link", "link")
    assert text_module.place_of(text, 1) == "link:2"
    with text.open(Buffers()) as file:
        assert [piece.tobytes() for piece in file.windows()] == [b"2\n"]
    assert pickle.loads(standard_input).path == Path("-")


@pytest.mark.parametrize("name", INPUTS)
def test_any_cut_gives_the_same_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", INPUTS[name])
    whole = convert(path, tmp_path / "whole.xmc")
    expected = files_of(whole.path)
    size = path.stat().st_size
    for part in (size // 3 + 1, size // 20 + 1):
        cut_into(monkeypatch, part)
        dataset = convert(path, tmp_path / "d.xmc", overwrite=True)
        assert dataset.fingerprint == whole.fingerprint
        assert files_of(dataset.path) == expected
    if name == "windows":  # the same rows as with plain ends of lines
        assert whole.fingerprint == convert(write(tmp_path / "b", INPUTS["xmlrepo"]), tmp_path / "b.xmc").fingerprint


def test_lines_far_longer_than_a_part_and_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = b" ".join(b"%d:%d" % (j, j) for j in range(2000))
    path = write(tmp_path / "a", b"4 2000 1\n0 1:1\n0 " + long + b"\n0 2:1\n " + long + b"\n")
    whole = convert(path, tmp_path / "whole.xmc")
    assert whole.attributes["nnz_features"] == 4002
    cut_into(monkeypatch, 500)
    monkeypatch.setattr(text_module, "_WINDOW", 64)
    dataset = convert(path, tmp_path / "d.xmc")
    assert files_of(dataset.path) == files_of(whole.path)


@pytest.mark.parametrize("part", [40, 333, 10**6])
def test_an_error_names_its_line_whatever_the_part(tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, part)
    rows = lines_of(60)
    rows[47] = b"3 1:x"
    path = write(tmp_path / "a", BOM + b"\r\n".join([b"60 40 9", *rows, b""]))
    assert refused(tmp_path / "d.xmc", path).startswith(f"{path}:49: value 'x' of feature 1")
    write(path, b"\n".join([b"# made", *rows]))
    assert refused(tmp_path / "d.xmc", path).startswith(f"{path}:49: value 'x' of feature 1")
    write(path, b"\n".join([b"61 40 9", *lines_of(60), b""]))
    assert refused(tmp_path / "d.xmc", path).startswith(f"{path}:61: the header promises 61 rows and 60 follow")
    write(path, b"\n".join([b"59 40 9", *lines_of(60), b""]))
    assert refused(tmp_path / "d.xmc", path).startswith(f"{path}:1: the header promises 59 rows and 60 follow")


def test_threads_and_limits_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", INPUTS["libsvm"])
    whole = convert(path, tmp_path / "d.xmc", normalize="l2", columns=True)
    expected = files_of(whole.path)
    cut_into(monkeypatch, 300)
    monkeypatch.setattr(conversion, "_SMALL", 0)  # or so small a file is one thread's
    for threads, limit in ((1, tight()), (2, tight()), (2, "4GB")):
        convert(
            path, tmp_path / "d.xmc", normalize="l2", columns=True, overwrite=True, threads=threads, memory_limit=limit
        )
        assert files_of(tmp_path / "d.xmc") == expected


@pytest.mark.slow
def test_two_worker_processes_give_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: write(tmp_path / name, INPUTS[name]) for name in ("libsvm", "jsonl")}
    bad = write(tmp_path / "bad", INPUTS["xmlrepo"] + b"0 x\n")
    whole = {name: convert(path, tmp_path / f"{name}.xmc") for name, path in texts.items()}
    cut_into(monkeypatch, 700)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, memory_limit=0, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        for name, path in texts.items():
            dataset = convert(path, tmp_path / "d.xmc", scheduler=client, overwrite=True)
            assert files_of(dataset.path) == files_of(whole[name].path)
        message = refused(tmp_path / "f.xmc", bad, scheduler=client)
    assert message.startswith(f"{bad}:62: 'x' is not a feature id:value")


@pytest.mark.slow
def test_several_files_are_one_set(
    tmp_path: Path, commands: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = lines_of(60)
    whole = convert(write(tmp_path / "a", INPUTS["xmlrepo"]), tmp_path / "whole.xmc")
    cuts = [0, 20, 20, 60]
    paths = [
        write(tmp_path / f"part{i}", b"\n".join([b"%d 40 9" % (b - a), *rows[a:b], b""]))
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    write(paths[2], gzip.compress(paths[2].read_bytes()))
    cut_into(monkeypatch, 300)
    dataset, figures = convert_report(paths, tmp_path / "d.xmc")
    assert dataset.fingerprint == whole.fingerprint
    assert dataset.attributes["source"] == ["part0", "part1", "part2"]
    assert dataset.attributes["source_format"] == "XMLRepo text, gzip"
    assert figures["bytes_in"] == sum(path.stat().st_size for path in paths)
    assert commands("convert", *paths, tmp_path / "e.xmc")["n_samples"] == 60
    assert open_dataset(tmp_path / "e.xmc").fingerprint == whole.fingerprint
    other = write(tmp_path / "other", b"1 41 9\n0 1:1\n")
    message = refused(tmp_path / "f.xmc", [*paths, other])
    assert message.startswith(f"{other}:1: the header's sizes differ from those of {paths[0]}")
    write(other, b"1 40 9\n0 40:1\n")
    assert refused(tmp_path / "f.xmc", [*paths, other]).startswith(f"{other}:2: feature id 40 is not below D = 40")
    assert "missing cannot be read" in refused(tmp_path / "f.xmc", [*paths, tmp_path / "missing"])


def test_several_pairs_of_files_are_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, 8)
    x = [write(tmp_path / f"x{i}", text) for i, text in enumerate((b"2 4\n3:0.5 0:-2\n1:3\n", b"3 4\n\n\n0:1 1:2 2:2"))]
    y = [write(tmp_path / f"y{i}", text) for i, text in enumerate((b"2 3\n0:1 2:1\n\n", b"3 3\n1:1\n\n2:1\n"))]
    dataset = convert(x, tmp_path / "d.xmc", labels=y)
    assert (dense(dataset)[0] == X).all()
    assert (dense(dataset)[1] == Y).all()
    assert dataset.attributes["source_labels"] == ["y0", "y1"]
    assert "2 files of features and 1 of labels" in refused(tmp_path / "e.xmc", x, labels=y[:1])
    message = refused(tmp_path / "e.xmc", x, labels=y[::-1])
    assert message.startswith(f"{x[0]}:1: the header promises 2 rows and that of {y[1]} 3")


def test_a_test_set_with_a_header_takes_the_base_of_its_training_set(tmp_path: Path) -> None:
    train = convert(write(tmp_path / "a", b"1 1:1 4:1\n3 3:1\n"), tmp_path / "train.xmc")
    test = write(tmp_path / "t", b"2 9 9\n1 2:1\n3 4:5\n")
    dataset = convert(test, tmp_path / "t.xmc", like=train)
    assert dense(dataset)[0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 5]]
    assert dense(dataset)[1].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert "label id 3 is not below K = 3" in refused(tmp_path / "u.xmc", test, like=train, base=0)
    message = refused(tmp_path / "u.xmc", write(tmp_path / "u", b"1 4 3\n0 1:1\n"), like=train)
    assert message.startswith(f"{tmp_path / 'u'}:2: label id 0 is below 1: ids count from 1 here, as in like")
    again = convert(test, tmp_path / "v.xmc", like=dataset)  # a test set passes on what it took over
    assert again.fingerprint == dataset.fingerprint


def piped(content: bytes | Path, *arguments: Any) -> subprocess.CompletedProcess[bytes]:
    """The command `convert` with this on its standard input: a pipe, or a file."""
    command = [sys.executable, "-m", "xmc_stream.cli", "convert", *map(str, arguments), "--json"]
    options: dict[str, Any] = {"env": environment(), "capture_output": True, "timeout": 120}
    if isinstance(content, bytes):
        return subprocess.run(command, input=content, **options)
    with open(content, "rb") as file:
        return subprocess.run(command, stdin=file, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("xmlrepo", "file"), ("libsvm", "packed"), ("jsonl", "plain")])
def test_standard_input_is_read_once(tmp_path: Path, name: str, kind: str) -> None:
    path = write(tmp_path / "a", INPUTS[name])
    whole = convert(path, tmp_path / "whole.xmc")
    done = piped(
        {"file": path, "packed": gzip.compress(INPUTS[name]), "plain": INPUTS[name]}[kind], "-", tmp_path / "d"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_in"] == pytest.approx(len(INPUTS[name]), abs=len(BOM))
    assert open_dataset(tmp_path / "d").fingerprint == whole.fingerprint


@pytest.mark.slow
def test_what_is_wrong_in_standard_input_is_said(tmp_path: Path) -> None:
    for content, what in (
        (b"", b"standard input:1: the format is not recognised, it is empty"),
        (TEXT[:-3] + b"x\n", b"standard input:6: "),
        (b"\x93NUMPY\x01\x00" + bytes(200), b"standard input is npy in a pipe"),
    ):
        done = piped(content, "-", tmp_path / "d.xmc")
        assert done.returncode == 1
        assert done.stderr.startswith(b"xmc-stream: " + what), done.stderr
        assert done.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_offsets_beyond_an_int32(tmp_path: Path) -> None:
    """Entries are counted, and a text is read, beyond 2^31: sums of row lengths, and byte ranges of a file with a hole."""
    assembly.begin(tmp_path / "d")
    lengths = [2**31 - 1, 0, 3, 2**33, 1]
    windows = (np.array(part, np.int64) for part in (lengths[:2], lengths[2:]))
    figures = assembly.write_lengths(tmp_path / "d", "X", windows)
    assert (figures["n_rows"], figures["nnz"]) == (5, sum(lengths))
    indptr = zarr.open_array(tmp_path / "d" / "X" / "rows" / "indptr", mode="r")[:]
    assert indptr.tolist() == [0, *accumulate(lengths)]

    path, far = tmp_path / "far.txt", 2**32 + 17
    with open(path, "wb") as file:
        file.write(b"9 9 9\n0 1:1\n")
        file.seek(far)  # zeros between, which take no disk
        file.write(b"\n1 2:0.5\n2 3:4\n3 4:8")
    size = path.stat().st_size
    cut = far + 9  # where the second of the far lines begins
    last = b"2 3:4\n3 4:8\n"  # the last line has its end too
    for start, stop, expected in ((far + 1, cut, b"1 2:0.5\n"), (cut, size, last), (far + 2, size, last)):
        with TextRange(path, start, stop).open(Buffers()) as text:
            assert b"".join(piece.tobytes() for piece in text.windows()) == expected
    cuts = ranges(path, 6, size)
    assert (cuts[0].start, cuts[-1].stop) == (6, size)
    assert all(a.stop == b.start for a, b in pairwise(cuts))
