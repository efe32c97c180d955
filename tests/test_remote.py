"""Stores behind URLs: a real S3 server on this machine, whose answers are counted, late and wrong at times."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Worker, cluster
from helpers.commands import environment
from helpers.forked import forked_command, forked_commands, run_forked

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from helpers.s3 import BUCKET, S3, SECRET, aws, nobody, s3_server, upload

import xmc_stream as xs
from xmc_stream.runtime import cluster as of_cluster
from xmc_stream.store.remote import as_path, open_file, size_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as s3:
        yield s3


@pytest.fixture
def s3(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, its counts at zero, and an empty cache."""
    monkeypatch.setenv("XMC_STREAM_CACHE", str(tmp_path / "cache"))
    server.reset()
    return server


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> xs.Model:
    """What is learned from the set on the disk."""
    return xs.PPDSparse(memory_limit="4GB").fit(small, model=tmp_path_factory.mktemp("trained") / "m").model_


@pytest.fixture(scope="module")
def url(server: S3, small: Path) -> str:
    return upload(small, "small.xmc")


@pytest.fixture(scope="module")
def model_url(server: S3, trained: xs.Model) -> str:
    return upload(trained.path, "small.model")


def holding(folder: Path, text: str) -> list[Path]:
    """Files below a folder that have a text in them, or in their name."""
    return [
        file
        for file in folder.rglob("*")
        if text in str(file) or (file.is_file() and text.encode() in file.read_bytes())
    ]


def fetched(cache: Path) -> dict[str, int]:
    """Sizes of the chunks that are in a cache."""
    return {str(file): file.stat().st_size for file in cache.glob("*/*/**/c/*") if file.exists()}


def test_a_dataset_behind_a_url_trains_to_the_same_model_and_each_chunk_is_fetched_once(
    s3: S3, url: str, trained: xs.Model, tmp_path: Path
) -> None:
    model = xs.PPDSparse(memory_limit="4GB", threads=2).fit(url, model=tmp_path / "m").model_
    assert model.digest() == trained.digest()
    assert s3.chunks()
    assert set(s3.chunks().values()) == {1}
    again = xs.PPDSparse(memory_limit="4GB", seed=1).fit(url, model=tmp_path / "other").model_
    assert again.digest() != trained.digest()
    assert set(s3.chunks().values()) == {1}
    assert holding(tmp_path, SECRET) == []


def test_failing_and_late_answers_change_nothing_but_the_time(
    s3: S3, url: str, trained: xs.Model, tmp_path: Path
) -> None:
    s3.delay, s3.fails_every = 0.02, 10
    model = xs.PPDSparse(memory_limit="4GB").fit(url, model=tmp_path / "m").model_
    assert s3.failed > 2
    assert model.digest() == trained.digest()


def test_a_cache_smaller_than_the_data_serves_them_all(
    s3: S3, url: str, small: Path, trained: xs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [file.stat().st_size for file in small.rglob("c/*")]
    bound = max(sizes) + 1000
    assert sum(sizes) > 2 * bound
    monkeypatch.setenv("XMC_STREAM_CACHE_SIZE", str(bound))
    model = xs.PPDSparse(memory_limit="4GB", threads=2).fit(url, model=tmp_path / "m").model_
    assert model.digest() == trained.digest()
    assert max(s3.chunks().values()) > 1
    # files that are fetched beside each other may be more than the bound; one after another they are not
    monkeypatch.setenv("XMC_STREAM_CACHE", str(tmp_path / "second"))
    for _ in range(2):
        for file in sorted(as_path(url).rglob("c/*")):
            os.close(open_file(file))
    kept = fetched(tmp_path / "second")
    assert 0 < sum(kept.values()) <= bound


def test_files_that_come_and_go_while_they_are_opened_are_never_missing(
    s3: S3, url: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XMC_STREAM_CACHE_SIZE", "1")  # each file drives out the others
    files = sorted(as_path(url).rglob("c/*"))[:2]
    sizes = [(small / file.relative_to(as_path(url))).stat().st_size for file in files]

    def look(k: int) -> None:
        for of in range(300):
            file, size = files[(k + of) % 2], sizes[(k + of) % 2]
            assert size_of(file) == size
            if k < 2:
                os.close(open_file(file))

    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(look, range(6)):
            pass


@pytest.mark.slow
def test_two_workers_of_a_host_fetch_each_chunk_once(s3: S3, url: str, trained: xs.Model, tmp_path: Path) -> None:
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        model = xs.PPDSparse(scheduler=address).fit(url, model=tmp_path / "m").model_
    assert model.digest() == trained.digest()
    assert set(s3.chunks().values()) == {1}
    assert holding(tmp_path, SECRET) == []


@pytest.mark.slow
def test_a_worker_that_cannot_reach_the_server_is_refused_by_name(
    s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        of_cluster, "_ANSWER", 100.0
    )  # its client tries several times, eleven seconds of a quiet machine
    with (
        nobody() as closed,
        cluster(tmp_path / "cluster", workers=[Worker(), Worker(environment=aws(closed))]) as (_, address),
        pytest.raises(xs.InputError) as said,
    ):
        xs.PPDSparse(scheduler=address).fit(url, model=tmp_path / "m")
    assert str(said.value).startswith("worker worker-1 on ")
    assert f" says: {url}/zarr.json cannot be reached" in str(said.value)
    assert not list(tmp_path.glob("m*"))


@pytest.mark.slow
def test_a_model_behind_a_url_predicts_and_is_begun_from(
    s3: S3, url: str, model_url: str, small: Path, trained: xs.Model, tmp_path: Path
) -> None:
    model = model_url
    test = small.with_name("small-test.xmc")
    xs.predict(trained.path, test, tmp_path / "local.npz")
    xs.predict(model, test, tmp_path / "remote.npz")
    local, remote = (np.load(tmp_path / f"{name}.npz") for name in ("local", "remote"))
    for name in ("labels", "scores"):
        np.testing.assert_array_equal(local[name], remote[name])
    assert set(s3.chunks().values()) == {1}
    assert xs.load_model(model).digest() == trained.digest()
    assert xs.verify(model)["damage"] == []
    begun = [
        xs.PPDSparse(memory_limit="4GB", C=2.0).fit(small, model=tmp_path / f"{n}.model", warm_start=start).model_
        for n, start in enumerate((trained.path, model))
    ]
    assert begun[0].digest() == begun[1].digest()


@pytest.mark.slow
def test_workers_with_a_cache_of_their_own_evaluate_a_model_behind_a_url(
    s3: S3, url: str, model_url: str, small: Path, trained: xs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{tmp_path / "cache"}" && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine lets no process have mounts of its own")
    monkeypatch.chdir(tmp_path)
    with cluster(tmp_path / "cluster", workers=[Worker(before=hide)]) as (_, address):
        assert xs.evaluate(model_url, url, scheduler=address) == xs.evaluate(trained.path, small)
        lines = run_forked("predict", model_url, url, "-", "--scheduler", address).splitlines()
    assert len(lines) == xs.open_dataset(small).n_samples
    assert not list(tmp_path.rglob(".xmc_stream-*"))


@pytest.mark.slow
def test_commands_read_urls_and_name_them(s3: S3, url: str, model_url: str, small: Path, trained: xs.Model) -> None:
    ends = forked_commands(
        ["info", url, "--digest", "--json"], ["info", model_url, "--digest", "--json"], ["info", url],
        *(["evaluate", of, small, "-k", 1, "--json"] for of in (model_url, trained.path)),
    )  # fmt: skip
    assert [code for code, *_ in ends] == [0] * 5, ends
    assert "xmc_stream-urls" not in str(ends)
    of_data, of_model, line, *figures = (out for _, out, _ in ends)
    told = json.loads(of_data)
    assert (told["kind"], told["digest"]) == ("dataset", xs.open_dataset(small).fingerprint)
    assert told["bytes_on_disk"] == sum(file.stat().st_size for file in small.rglob("*") if file.is_file())
    assert json.loads(of_model)["digest"] == trained.digest()
    assert line.startswith(f"{url}: dataset")
    assert len({json.loads(one)["P@1"] for one in figures}) == 1


def refused(*commands: Sequence[Any]) -> list[str]:
    """The line that each command ends with, without a secret in it. They run in one process."""
    lines = []
    for code, out, said in forked_commands(*commands):
        assert (code, out) == (1, ""), said
        assert SECRET not in said
        lines += said.splitlines()
    assert len(lines) == len(commands), lines
    return lines


@pytest.mark.slow
def test_what_cannot_be_read_ends_in_a_line_without_a_secret(
    s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobody() as closed, monkeypatch.context() as patch:
        for name, value in aws(closed).items():
            patch.setenv(name, value)
        assert f"{url} cannot be reached (" in refused(["train", url, tmp_path / "m"])[0]
    other, none = refused(["info", "s3://none/x.xmc"], ["info", f"s3://{BUCKET}/none"])
    assert "s3://none/x.xmc is no dataset and no model" in other
    assert f"s3://{BUCKET}/none is no dataset and no model" in none
    s3.denies = True
    monkeypatch.setenv("AWS_SESSION_TOKEN", "aTokenOfSession")
    [line] = refused(["info", url])
    assert f"{url} may not be read or written (PermissionError" in line
    assert "AWS_ACCESS_KEY_ID" in line
    assert "aTokenOfSession" not in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("s3://me:pass@bucket/x.xmc", "has a user or a password in it"),
        ("s3://bucket/x.xmc?X-Amz-Signature=1", "is not the URL of a store"),
        ("s3://bucket/../x.xmc", "is not the URL of a store"),
        ("nothing://bucket/x.xmc", "no library of fsspec opens nothing://"),
        (Path("s3://bucket/x.xmc"), "give URLs as a str"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused(name: str | Path, said: str) -> None:
    with pytest.raises(xs.InputError, match=re.escape(said)) as told:
        xs.open_dataset(name)
    assert "pass@" not in str(told.value)


def test_what_is_written_goes_to_a_folder(
    s3: S3, url: str, model_url: str, small: Path, trained: xs.Model, tmp_path: Path
) -> None:
    there = f"s3://{BUCKET}/new"
    for write in (
        lambda: xs.PPDSparse().fit(small, model=there),
        lambda: xs.predict(trained, small, there),
        lambda: xs.convert(tmp_path / "x.txt", there),
        lambda: xs.split(small, there, tmp_path / "valid.xmc"),
        lambda: xs.export(small, there),
        lambda: xs.select_features(small, there, tmp_path / "f.txt"),
        lambda: xs.tune(small, model=there),
        lambda: xs.calibrate(model_url, url, check=False),
    ):
        with pytest.raises(xs.InputError, match=f"s3://{BUCKET}/.* is a URL, and here a file or folder is needed"):
            write()


def test_a_store_that_was_written_again_is_read_anew(s3: S3, small: Path, tmp_path: Path) -> None:
    url = upload(small, "changing.xmc")
    before = xs.open_dataset(url)
    assert before.label_counts().sum() == before.attributes["nnz_labels"]
    other = upload(small.with_name("small-test.xmc"), "changing.xmc")
    assert other == url
    after = xs.open_dataset(url)
    assert after.fingerprint == xs.open_dataset(small.with_name("small-test.xmc")).fingerprint
    with pytest.raises(xs.StoreError, match=f"{url} was changed while it was read: give the same command again"):
        before.X_rows()


def test_what_is_damaged_behind_a_url_is_told(s3: S3, small: Path, tmp_path: Path) -> None:
    import fsspec

    shutil.copytree(small, tmp_path / "spoilt")
    chunk = next((tmp_path / "spoilt" / "X" / "rows" / "data").glob("c/0"))
    content = bytearray(chunk.read_bytes())
    content[100] ^= 4
    chunk.write_bytes(content)
    url, name = upload(tmp_path / "spoilt", "spoilt.xmc"), "X/rows/data/c/0"
    assert xs.verify(url)["damage"][0].endswith(f"{name} fails its checksum")
    with pytest.raises(xs.StoreError, match=f"{url}/{name} fails its checksum"):
        xs.PPDSparse().fit(url, model=tmp_path / "m")
    fs = fsspec.filesystem("s3")
    fs.pipe_file(f"{url}/{name}", bytes(content[:-1]))
    with pytest.raises(xs.StoreError, match=f"{url}/{name} has {len(content) - 1} bytes instead of {len(content)}"):
        xs.open_dataset(url)
    fs.rm_file(f"{BUCKET}/spoilt.xmc/{name}")
    with pytest.raises(xs.StoreError, match=f"{url}/{name} is missing"):
        xs.open_dataset(url)


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_copy_to_a_url_and_back_is_the_same_store(s3: S3, small: Path, trained: xs.Model, tmp_path: Path) -> None:
    for name, store in (("copied.xmc", small), ("copied.model", trained.path)):
        url = f"s3://{BUCKET}/{name}"
        there = xs.copy(store, url)
        assert there["copied_files"] == there["n_files"] == len(files(store))
        assert xs.copy(store, url)["copied_files"] == 0
        xs.copy(url, tmp_path / name)
        assert files(tmp_path / name) == files(store)
    assert fetched(tmp_path / "cache") == {}  # what is copied has no place there
    with pytest.raises(xs.InputError, match="exists, and is another store"):
        xs.copy(small, url)
    xs.copy(small, url, overwrite=True)
    assert xs.open_dataset(url).fingerprint == xs.open_dataset(small).fingerprint
    with pytest.raises(xs.InputError, match="exists, and is another store"):
        xs.copy(url, tmp_path / "copied.model")


def test_a_damaged_store_is_not_copied(s3: S3, small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "spoilt")
    chunk = tmp_path / "spoilt" / "Y" / "rows" / "indices" / "c" / "0"
    content = bytearray(chunk.read_bytes())
    content[3] ^= 1
    chunk.write_bytes(content)
    url = f"s3://{BUCKET}/never.xmc"
    with pytest.raises(xs.StoreError, match="Y/rows/indices/c/0 fails its checksum"):
        xs.copy(tmp_path / "spoilt", url)
    with pytest.raises(xs.StoreError, match="a copy that is not finished"):
        xs.open_dataset(url)


@pytest.mark.slow
@pytest.mark.parametrize("to_url", [True, False])
def test_a_copy_that_was_killed_goes_on(s3: S3, url: str, small: Path, tmp_path: Path, to_url: bool) -> None:
    source, target = (small, f"s3://{BUCKET}/killed.xmc") if to_url else (url, tmp_path / "killed.xmc")
    s3.delay = 0.1
    there = tmp_path / "killed.xmc.partial" / "store" / "Y" / "rows" / "zarr.json"
    with forked_command("copy", source, target) as run:
        begun = (lambda: s3.put["/bucket/killed.xmc/Y/rows/zarr.json"] > 0) if to_url else there.exists
        assert run.wait_until(begun), run.stderr
        run.kill()
    s3.delay = 0.0
    if to_url:
        with pytest.raises(xs.StoreError, match="a copy that is not finished"):
            xs.open_dataset(str(target))
    else:
        assert not Path(target).exists()
    report = xs.copy(source, target)
    assert 0 < report["copied_files"] < report["n_files"]
    assert xs.verify(target)["damage"] == []
    assert xs.open_dataset(target).fingerprint == xs.open_dataset(small).fingerprint


def test_any_file_system_of_fsspec_will_do(s3: S3, small: Path) -> None:
    xs.copy(small, "memory://somewhere/small.xmc")
    data = xs.open_dataset("memory://somewhere/small.xmc")
    assert data.fingerprint == xs.open_dataset(small).fingerprint
    assert xs.open_dataset(f"file://{small}").path == small


def test_nothing_of_fsspec_is_loaded_for_stores_on_disk(small: Path) -> None:
    program = f"import sys, xmc_stream as xs; xs.open_dataset({str(small)!r}).X_rows(); print('fsspec' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout == "False\n"
