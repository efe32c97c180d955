"""Conversions by two worker processes, each in a folder of its own, give the datasets of runs in this process."""

from __future__ import annotations

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
from xmc_stream.convert.options import TextOptions
from xmc_stream.memory import resident


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("cluster"), workers=[Worker(), Worker()]) as (_, address):
        yield address


def inputs(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Sources and options of each kind of input."""
    records = documents(300)
    write_jsonl(folder / "in.jsonl", records)
    cells = [
        '"{}",{}\n'.format(str(record["content"]).replace('"', '""'), ";".join(record["labels"])) for record in records
    ]
    (folder / "in.csv").write_text("text,labels\n" + "".join(cells), encoding="utf-8")
    (folder / "in.svm").write_bytes(b"\n".join([*lines_of(300, 1), b""]))
    (folder / "in.txt").write_bytes(b"\n".join([b"300 40 9", *lines_of(300), b""]))
    rng = np.random.default_rng(0)
    for name, width in (("x", 30), ("y", 7)):
        matrix = scipy.sparse.random(300, width, 0.2, "csr", np.float32, rng)
        scipy.sparse.save_npz(folder / f"{name}.npz", matrix, compressed=False)
    return {
        "jsonl": (folder / "in.jsonl", {}),
        "hashed": (folder / "in.jsonl", {"text": TextOptions(hash_features=2**10, ngrams=(1, 2))}),
        "characters": (folder / "in.jsonl", {"text": TextOptions(analyzer="char_wb", ngrams=(2, 3))}),
        "csv": (folder / "in.csv", {"text": TextOptions(label_delimiter=";", ngrams=(1, 2))}),
        "libsvm": (folder / "in.svm", {}),
        "xmlrepo": (folder / "in.txt", {"normalize": "l2", "columns": True}),
        "npz": (folder / "x.npz", {"labels": folder / "y.npz"}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "hashed", "characters", "csv", "libsvm", "xmlrepo", "npz"])
def test_two_workers_give_the_dataset_of_this_process(
    kind: str, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(monkeypatch, 20_000)  # the client cuts: several parts for each worker
    source, options = inputs(tmp_path)[kind]
    here = xs.convert(source, tmp_path / "here.xmc", memory_limit="2GB", threads=1, **options)
    there = xs.convert(source, tmp_path / "there.xmc", memory_limit="2GB", scheduler=workers, **options)
    assert there.fingerprint == here.fingerprint
    for names in ("feature_names", "label_names"):
        ours, theirs = getattr(here, names)(), getattr(there, names)()
        assert (None if ours is None else list(ours)) == (None if theirs is None else list(theirs))


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "room"), [(2, 300 * 10**6), (3, 10**9)])
def test_neither_threads_nor_limits_show_in_raw_text(
    threads: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmc_stream.convert import run

    cut_into(monkeypatch, 20_000)
    monkeypatch.setattr(run, "_SMALL", 0)  # as many threads as are asked for
    for kind in ("jsonl", "csv"):
        source, options = inputs(tmp_path)[kind]
        here = xs.convert(source, tmp_path / f"{kind}-one.xmc", memory_limit="2GB", threads=1, **options)
        limit = resident() + room
        other = xs.convert(source, tmp_path / f"{kind}.xmc", memory_limit=limit, threads=threads, **options)
        assert other.fingerprint == here.fingerprint
