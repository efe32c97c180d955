"""Workers that do not fit are refused by name before work begins; a run keeps to what its workers may have."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import scipy.sparse as sp
from helpers.clusters import Worker, cluster, pid_of
from helpers.commands import environment, wait_until
from helpers.forked import Forked, forked_commands, run_forked

import xmc_stream as xs
from xmc_stream.runtime import cluster as of_cluster
from xmc_stream.runtime.engine import limit_of
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.workers import About, environment_here, refuse_unfit

FINE = Worker()
_RO = ("-o", "remount,bind,ro")


def refused(data: Path, folder: Path, workers: Sequence[Worker]) -> str:
    """What a training says that one of these workers makes impossible; it leaves nothing."""
    out = folder / "out"
    out.mkdir()
    with cluster(folder / "cluster", workers=workers) as (_, address), pytest.raises(xs.InputError) as said:
        xs.PPDSparse(scheduler=address).fit(data, model=out / "m")
    assert list(out.iterdir()) == []
    return str(said.value)


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    here = Path(xs.__file__).parent
    shutil.copytree(here, tmp_path / "other" / "xmc_stream")
    with (tmp_path / "other" / "xmc_stream" / "metrics.py").open("a") as source:
        source.write("# changed\n")
    other = Worker(environment={"PYTHONPATH": str(tmp_path / "other")})
    told = refused(small, tmp_path, [FINE, other])
    assert told.startswith("worker worker-1 on ")
    assert "has xmc-stream sources " in told
    assert told.endswith("Install the same on both, and start the worker again")


def test_of_several_differences_the_processor_is_told_last() -> None:
    # llvmlite names the processor: another version of it may call the same one otherwise, and that is mended by installing
    def worker(name: str, **differs: str) -> About:
        return About(name, environment_here() | differs, "here", 1 << 33, 0, 0, 1024, (), (), ())

    other = worker("worker-2", processor="another", llvmlite="0.43.0")
    with pytest.raises(xs.InputError, match=r"^worker worker-2 on here has llvmlite 0\.43\.0, and this process "):
        refuse_unfit([worker("worker-0"), worker("worker-1"), other])


@pytest.mark.slow
def test_a_worker_with_another_processor_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    other = Worker(environment={"NUMBA_CPU_NAME": "generic"})
    told = refused(small, tmp_path, [FINE, other, FINE])
    assert told.startswith("worker worker-1 on ")
    assert " has a processor of type " in told
    assert " generic, and others have " in told


@pytest.mark.slow
def test_a_worker_with_too_little_memory_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    tight = Worker(options=("--no-nanny", "--memory-limit", "90MB"))
    told = refused(small, tmp_path, [FINE, tight])
    assert told.startswith("worker worker-1 on ")
    assert "is paused by dask from 72 MB on and holds " in told


@pytest.mark.slow
def test_a_worker_that_may_open_few_files_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    few = Worker(before=("sh", "-c", 'ulimit -n 200 && exec "$@"', "sh"))
    assert "may have 200 files open: start it where `ulimit -n` is 256 or more" in refused(small, tmp_path, [few])


@pytest.mark.slow
def test_a_worker_without_room_to_write_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        told = refused(small, disk, [FINE])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert re.match(
        rf"worker worker-0 on \S+ has \S+ [kM]B left on the disk of {disk}/out: make room, 64 MB at least$", told
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "why"), [("data", "cannot read "), ("out", "does not see what this process writes to ")]
)
def test_a_worker_that_does_not_see_a_folder_is_refused_by_name(
    small: Path, tmp_path: Path, hidden: str, why: str
) -> None:
    folder = small.parent if hidden == "data" else tmp_path / "out"
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine lets no process have mounts of its own")
    if hidden == "data":
        assert f"worker worker-1 on {os.uname().nodename} {why}{small}:" in refused(
            small, tmp_path, [FINE, Worker(before=hide)]
        )
        return
    (tmp_path / "out").mkdir()
    with cluster(tmp_path / "cluster", workers=[FINE, Worker(before=hide)]) as (_, address):
        with pytest.raises(xs.InputError, match=f"^worker worker-1 on .* {why}{folder}, or cannot write there"):
            xs.PPDSparse(scheduler=address).fit(small, model=folder / "m")
        assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_arrays_that_workers_do_not_see_are_refused_with_what_to_do(
    small: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, shared = tmp_path / "hidden", tmp_path / "shared"
    for folder in (hidden, shared):
        folder.mkdir()
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hidden}" && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine lets no process have mounts of its own")
    X = np.repeat(np.eye(3, dtype=np.float32), 10, axis=0)
    monkeypatch.setattr(tempfile, "tempdir", str(hidden))
    with cluster(tmp_path / "cluster", workers=[Worker(before=hide)]) as (_, address):
        clf = xs.PPDSparse(scheduler=address)
        for call, advice in (
            (lambda: clf.fit(X, X, model=shared / "m"), "convert X to a dataset in a folder"),
            (lambda: clf.fit(small), "give model=, in a folder"),
            (
                lambda: xs.load_model(trained).predict_topk(xs.open_dataset(small), scheduler=address),
                "predict to a file",
            ),
        ):
            with pytest.raises(xs.InputError) as told:
                call()
            assert re.fullmatch(
                rf"worker worker-0 on \S+ does not see what this process writes to {hidden}/\S+, or cannot write there: "
                rf"{advice}, or before Python starts set TMPDIR to a folder on a file system that all workers share, "
                "under one name",
                str(told.value),
            )
        assert list(shared.iterdir()) == []
        xs.convert(sp.csr_matrix(X), shared / "d.xmc", labels=sp.csr_matrix(X))  # as docs/cluster.md says
        by_folder = clf.fit(shared / "d.xmc", model=shared / "m").model_.digest()
        monkeypatch.setenv("TMPDIR", str(shared))
        with Forked(fit_arrays, address, X) as run:
            assert run.wait() == 0, run.stderr
            assert run.stdout.split() == [by_folder]


def fit_arrays(address: str, X: Any) -> None:
    """What a process does whose TMPDIR was set before it began."""
    tempfile.tempdir = None
    clf = xs.PPDSparse(scheduler=address).fit(X, X)
    clf.predict(X)
    assert Path(tempfile.gettempdir()) == Path(os.environ["TMPDIR"])
    print(clf.model_.digest())


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that nobody can write to, as long as the block lasts; permissions do not stop root."""
    if os.geteuid():
        folder.chmod(0o500)
    elif any(subprocess.run(["mount", *words, folder], check=False).returncode for words in (("--bind", folder), _RO)):
        pytest.skip("this machine lets nobody mount a folder read-only")
    try:
        yield
    finally:
        if os.geteuid():
            folder.chmod(0o700)
        else:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_model_in_a_folder_that_cannot_be_written_to_is_evaluated_and_predicts(
    small: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, data, here = (tmp_path / name for name in ("share", "data", "here"))
    here.mkdir()
    shutil.copytree(trained, share / "m")
    shutil.copytree(small.with_name("small-test.xmc"), data / "test.xmc")
    expected = xs.evaluate(share / "m", data / "test.xmc")
    monkeypatch.chdir(here)
    with cluster(tmp_path / "cluster") as (_, address), read_only(share):
        words = (share / "m", data / "test.xmc")
        assert xs.evaluate(*words, scheduler=address) == expected
        lines = run_forked("predict", *words, "-").splitlines()
        assert run_forked("predict", *words, "-", "--scheduler", address).splitlines() == lines
        (data / "test.txt").write_text("1 60 40\n0 1:1\n")
        with read_only(data):
            assert xs.evaluate(*words, scheduler=address) == expected  # in the current folder
            of_text = ("predict", share / "m", data / "test.txt", "-", "--scheduler", address)
            assert len(run_forked(*of_text).splitlines()) == 1
            monkeypatch.chdir(data)
            with pytest.raises(
                xs.InputError, match=f"^no temporary files .* to {share} or {data}: run this in a folder"
            ):
                xs.evaluate(*words, scheduler=address)
    assert [folder for place in (share, data, here) for folder in place.glob(".xmc_stream-*")] == []


@pytest.mark.slow
def test_the_limit_is_the_smaller_of_a_worker_s_and_the_one_given(small: Path, trained: Path, tmp_path: Path) -> None:
    workers = [Worker(options=("--no-nanny", "--memory-limit", "1GB")), Worker(options=("--memory-limit", "600MB"))]
    with cluster(tmp_path / "cluster", workers=workers) as (_, address):
        at_most = int(0.95 * 0.8 * 600e6)  # dask pauses a worker at 0.8 of what it may have
        assert limit_of("2GB", address).limit == at_most
        assert limit_of(None, address).limit == at_most
        assert limit_of("300MB", address).limit == 300_000_000
        clf = xs.PPDSparse(scheduler=address).fit(small, model=tmp_path / "m")
        said = (tmp_path / "cluster" / "log").read_text()
    assert clf.report_["memory_limit"] == at_most
    assert "restart" not in said.lower()
    assert "paus" not in said.lower()
    assert clf.model_.digest() == xs.load_model(trained).digest()


@pytest.mark.slow
def test_two_workers_of_a_host_share_what_is_free_there(tmp_path: Path) -> None:
    with cluster(tmp_path / "one", workers=[FINE]) as (_, address):
        alone = limit_of(None, address).limit
    with cluster(tmp_path / "two", workers=[FINE, FINE]) as (_, address):
        assert 0.3 * alone < limit_of(None, address).limit < 0.7 * alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "line"),
    [
        (4, r"no workers for a minute: start some .* it goes on$"),
        (1, r"^job solve/1/0: all workers that did it died \(1, the last one at tcp://127.0.0.1:\d+\): .* it goes on$"),
    ],
)
def test_a_run_that_lost_all_workers_ends_with_a_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, line: str
) -> None:
    """deaths: of workers that do a job, after which dask gives it to no other."""
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", str(deaths - 1))
    monkeypatch.setattr(of_cluster, "_LOOK", 0.3)
    monkeypatch.setattr(of_cluster, "_ALONE", 2.0)
    slow = {"loss": "hinge", "C": 1e3, "tol": 1e-5, "max_rounds": 2, "last_epochs": 1500}
    with cluster(tmp_path / "cluster") as (_, address), distributed.Client(address, set_as_default=False) as client:
        partial = tmp_path / "m.partial"

        def solving() -> bool:
            events = read_events(partial / "events.jsonl")
            return any(event["phase"] == "round 2: solve" for event in events) and any(client.processing().values())

        def kill() -> None:
            wait_until(None, solving)
            os.kill(pid_of(tmp_path / "cluster", 0), signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(xs.errors.JobError, match=line):
            xs.PPDSparse(scheduler=address, memory_limit="1GB", **slow).fit(small, model=tmp_path / "m")
        killer.join()


@pytest.mark.slow
def test_a_cluster_of_this_machine_by_one_command(small: Path, trained: Path, tmp_path: Path) -> None:
    tool = Path(__file__).parents[1] / "tools" / "start_cluster.py"
    words = [sys.executable, tool, "--workers", "2", "--memory-limit", "1GB", "--port", "0", "--dashboard", "none"]
    words += ["--logs", tmp_path / "logs"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            assert line.startswith("2 workers at tcp://127.0.0.1:")
            address = line.split()[3].rstrip(".")
            assert run.stdout.readline() == f"Their logs: {tmp_path / 'logs'}\n"
            there = xs.PPDSparse(scheduler=address).fit(small, model=tmp_path / "there")
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 0
        finally:
            run.terminate()
    assert there.model_.digest() == xs.load_model(trained).digest()
    logs = {of.name: of.read_text() for of in (tmp_path / "logs").iterdir()}  # they stay
    assert sorted(logs) == ["scheduler.log", "worker-1.log", "worker-2.log"]
    assert all("Start" in log for log in logs.values())
    in_json, in_words = forked_commands(["info", tmp_path / "there", "--json"], ["info", tmp_path / "there"])
    told = json.loads(in_json[1])["run"]
    assert len(told["workers"]) == 2
    assert sum(of["jobs"] for of in told["workers"]) == sum(of["jobs"] for of in told["phases"])
    assert min(of["peak_resident"] for of in told["workers"]) > 50e6
    assert re.search(r"\n  worker +jobs +seconds +read +resident\n", in_words[1])
