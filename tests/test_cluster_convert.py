"""Conversions by two worker processes, each in a folder of its own, give the datasets of runs in this process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from helpers.clusters import Worker, cluster
from helpers.conversions import cut_into, lines_of
from helpers.text_files import documents, write_jsonl

import xmc_stream as xs
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.options import TextOptions
from xmc_stream.errors import InputError
from xmc_stream.system.memory import resident


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("cluster"), workers=[Worker(), Worker()]) as (_, address):
        yield address


# kinds of input, and the format of each
KINDS = {
    "jsonl": "jsonl", "hashed": "jsonl", "characters": "jsonl", "beside": "jsonl", "csv": "csv", "parquet": "parquet",
    "libsvm": "libsvm", "names": "libsvm", "xmlrepo": "xmlrepo", "apart": "xmlrepo", "npz": "npz", "by columns": "npz",
    "npy": "npy", "anndata": "anndata",
}  # fmt: skip


def inputs(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Sources and options of each kind of input that needs no other library."""
    records = documents(300)
    write_jsonl(folder / "in.jsonl", records)
    cells = [
        '"{}",{}\n'.format(str(record["content"]).replace('"', '""'), ";".join(record["labels"])) for record in records
    ]
    (folder / "in.csv").write_text("text,labels\n" + "".join(cells), encoding="utf-8")
    (folder / "in.svm").write_bytes(b"\n".join([*lines_of(300, 1), b""]))
    (folder / "in.txt").write_bytes(b"\n".join([b"300 40 9", *lines_of(300), b""]))
    (folder / "in_X_Xf.txt").write_bytes(b"\n".join([b"300 40", *(b"%d:1" % (i % 40) for i in range(300)), b""]))
    (folder / "in_X_Y.txt").write_bytes(b"\n".join([b"300 9", *(b"%d:1" % (i % 9) for i in range(300)), b""]))
    for what, n in (("feature", 40), ("label", 9)):
        (folder / f"{what}s").write_text("".join(f"{what} {i}\n" for i in range(n)))
    (folder / "pairs").write_text("0 1\n2 0\n")
    rng = np.random.default_rng(0)
    for name, width in (("x", 30), ("y", 7)):
        matrix = scipy.sparse.random(300, width, 0.2, "csr", np.float32, rng)
        scipy.sparse.save_npz(folder / f"{name}.npz", matrix, compressed=False)
    scipy.sparse.save_npz(folder / "csc.npz", matrix.tocsc())
    np.save(folder / "x.npy", matrix.toarray())
    np.save(folder / "y.npy", np.arange(300) % 5)
    names = {"label_names": folder / "labels", "feature_names": folder / "features", "observed": folder / "pairs"}
    return {
        "jsonl": (folder / "in.jsonl", {}),
        "hashed": (folder / "in.jsonl", {"text": TextOptions(hash_features=2**10, ngrams=(1, 2))}),
        "characters": (folder / "in.jsonl", {"text": TextOptions(analyzer="char_wb", ngrams=(2, 3))}),
        "beside": (folder / "in.jsonl", {"beside": [folder / "x.npy", folder / "csc.npz"]}),
        "csv": (folder / "in.csv", {"text": TextOptions(label_delimiter=";", ngrams=(1, 2))}),
        "libsvm": (folder / "in.svm", {}),
        "names": ([folder / "in.svm", folder / "in.svm"], names),
        "xmlrepo": (folder / "in.txt", {"normalize": "l2", "columns": True}),
        "apart": (folder / "in_X_Xf.txt", {}),
        "npz": (folder / "x.npz", {"labels": folder / "y.npz"}),
        "by columns": (folder / "csc.npz", {"labels": folder / "in_X_Y.txt"}),
        "npy": (folder / "x.npy", {"labels": folder / "y.npy"}),
    }


def input_of(kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Source and options of one kind. Skips the test where the library that writes it is not at hand."""
    if kind == "parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            pytest.skip("Parquet needs pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(documents(300)), folder / "in.parquet", row_group_size=100)
        return folder / "in.parquet", {}
    if kind == "anndata":
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "in.h5ad", "w") as file:
            write_columns(file, scipy.sparse.random(300, 30, 0.2, "csc", np.float32, np.random.default_rng(0)))
        return folder / "in.h5ad", {"label_key": "kind"}
    return inputs(folder)[kind]


def write_columns(file: Any, X: Any) -> None:
    """AnnData with features by columns, and a class a row."""
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csc_matrix", "encoding-version": "0.1.0", "shape": X.shape})
    for name in ("data", "indices", "indptr"):
        group[name] = getattr(X, name)
    for name, n in (("obs", X.shape[0]), ("var", X.shape[1])):
        frame = file.create_group(name)
        frame.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
        frame["_index"] = [f"{name} {i}" for i in range(n)]
        frame["_index"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    file["obs/kind"] = [f"class {i % 4}" for i in range(X.shape[0])]
    file["obs/kind"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


def test_all_formats_are_here() -> None:
    assert {*KINDS.values()} == {*FORMATS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_give_the_dataset_of_this_process(
    kind: str, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # paths are those of this process, and no worker's
    cut_into(monkeypatch, 20_000)  # the client cuts: several parts for each worker
    source, options = input_of(kind, Path())
    here = xs.convert(source, "here.xmc", memory_limit="2GB", threads=1, **options)
    there = xs.convert(source, "there.xmc", memory_limit="2GB", scheduler=workers, **options)
    assert there.fingerprint == here.fingerprint
    for names in ("feature_names", "label_names"):
        ours, theirs = getattr(here, names)(), getattr(there, names)()
        assert (None if ours is None else list(ours)) == (None if theirs is None else list(theirs))


@pytest.mark.slow
def test_messages_of_workers_name_files_as_they_were_given(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cut_into(monkeypatch, 20_000)
    Path("bad.svm").write_bytes(b"\n".join([*lines_of(300, 1), b"x", b""]))
    with pytest.raises(InputError, match=r"^bad\.svm:301: 'x' is not a list of label ids"):
        xs.convert("bad.svm", "bad.xmc", memory_limit="2GB", scheduler=workers)
    left_out = xs.convert("bad.svm", "bad.xmc", memory_limit="2GB", scheduler=workers, skip=True)
    assert [row[:2] for row in left_out.attributes["skipped_rows"]] == [["bad.svm", 301]]
    assert sorted(path.name for path in Path().iterdir()) == ["bad.svm", "bad.xmc"]


@pytest.mark.slow
def test_commands_that_take_files(workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Any) -> None:
    monkeypatch.chdir(tmp_path)
    inputs(Path())
    xs.convert("in.jsonl", "train.xmc", memory_limit="2GB")
    xs.PPDSparse(memory_limit="2GB").fit("train.xmc", model="raw.model")
    how = ("--memory-limit", "2GB", "--scheduler", workers)
    commands("convert", "in.jsonl", "there.xmc", "--like", "train.xmc", "--new-labels", *how)
    commands("append", "train.xmc", "there.xmc", "there-grown.xmc", *how)
    commands("predict", "raw.model", "in.jsonl", "there.npz", "--filter", "pairs", *how)
    figures = commands("evaluate", "raw.model", "there.xmc", "--filter", "pairs", *how)
    here = xs.convert("in.jsonl", "here.xmc", like="train.xmc", new_labels=True, memory_limit="2GB")
    grown = xs.append("train.xmc", here, "here-grown.xmc", memory_limit="2GB")
    xs.predict("raw.model", "in.jsonl", "here.npz", filter="pairs", memory_limit="2GB")
    assert xs.open_dataset("there.xmc").fingerprint == here.fingerprint
    assert xs.open_dataset("there-grown.xmc").fingerprint == grown.fingerprint
    assert (np.load("there.npz")["labels"] == np.load("here.npz")["labels"]).all()
    assert figures == xs.evaluate("raw.model", "here.xmc", filter="pairs", memory_limit="2GB")


@pytest.mark.slow
def test_a_worker_that_does_not_see_a_file_beside_the_input_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hidden}" && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine lets no process have mounts of its own")
    hidden.mkdir()
    inputs(hidden)
    for name in ("x.npz", "in.jsonl", "in.svm"):
        shutil.copy(hidden / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    train = xs.convert("in.jsonl", hidden / "train.xmc", memory_limit="2GB")
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker(before=hide)]) as (_, address):
        for source, option, given in (
            ("x.npz", "labels", "hidden/y.npz"), ("in.jsonl", "beside", ["hidden/x.npy"]),
            ("in.svm", "label_names", Path("hidden/labels")), ("in.svm", "feature_names", "hidden/features"),
            ("in.jsonl", "like", "hidden/train.xmc"), ("in.jsonl", "like", train),
        ):  # fmt: skip
            options: dict[str, Any] = {option: given, "scheduler": address}
            with pytest.raises(
                InputError, match=rf"^worker worker-1 on \S+ cannot read {hidden}/\S+: put it on a file"
            ):
                xs.convert(source, "there.xmc", memory_limit="2GB", **options)
    assert not [*tmp_path.glob("there*")]


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "room"), [(2, 300 * 10**6), (3, 10**9)])
def test_neither_threads_nor_limits_show_in_raw_text(
    threads: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmc_stream.convert import conversion

    cut_into(monkeypatch, 20_000)
    monkeypatch.setattr(conversion, "_SMALL", 0)  # as many threads as are asked for
    for kind in ("jsonl", "csv"):
        source, options = inputs(tmp_path)[kind]
        here = xs.convert(source, tmp_path / f"{kind}-one.xmc", memory_limit="2GB", threads=1, **options)
        limit = resident() + room
        other = xs.convert(source, tmp_path / f"{kind}.xmc", memory_limit=limit, threads=threads, **options)
        assert other.fingerprint == here.fingerprint
