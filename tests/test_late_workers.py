"""Workers that join, leave, die and are retired in the middle of a run: who fits gets jobs, and the model is the same."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import pytest
from helpers.clusters import Worker, cluster, pid_of
from helpers.commands import start, wait_until
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.errors import JobError
from xmc_stream.runtime import cluster as of_cluster
from xmc_stream.runtime.engine import Engine
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Failed, Loop, Notes, Phase, Receipt
from xmc_stream.runtime.workers import Terms, environment_here, misfit
from xmc_stream.system.memory import MemoryLimit

SLOW: dict[str, Any] = {"loss": "hinge", "C": 1e3, "tol": 1e-5, "max_rounds": 2, "last_epochs": 600}


@pytest.fixture(autouse=True)
def jobs_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and workers, processes of their own, find them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(xs.__file__).parents[1]), str(Path(__file__).parent)]))


@dataclass(frozen=True)
class Wait:
    """A job that only takes time."""

    key: str
    seconds: float

    def run(self) -> Receipt:
        time.sleep(self.seconds)
        return {"process": os.getpid()}


@contextmanager
def joined(folder: Path, address: str, threads: int = 1, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker of a scheduler."""
    command = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        address,
        "--nthreads",
        str(threads),
        "--name",
        folder.name,
    ]
    options = ["--no-nanny", "--no-dashboard", "--memory-limit", "0"]
    folder.mkdir()
    told = {**os.environ, **environment}
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=folder, env=told)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def others_sources(folder: Path) -> str:
    """Where this library lies with other sources."""
    shutil.copytree(Path(xs.__file__).parent, folder / "xmc_stream", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "xmc_stream" / "metrics.py").open("a") as source:
        source.write("# changed\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])


def waits(n: int, seconds: float) -> Loop:
    receipts = yield Phase("wait", [Wait(f"wait/{i}", seconds) for i in range(n)], twice=True)
    return {"processes": [receipt["process"] for receipt in receipts]}


@pytest.mark.slow
def test_a_worker_that_joins_gets_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_cluster, "_LOOK", 0.3)
    with (
        cluster(tmp_path / "cluster", workers=[Worker()]) as (_, address),
        Engine(MemoryLimit(10**9), 1, address) as engine,
        joined(tmp_path / "late", address) as late,
        distributed.Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        processes = engine.run(waits(60, 0.05), Notes())["processes"]
    assert 20 <= processes.count(late.pid) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("why", ["has xmc-stream sources", "has a processor of type", "has 2 threads, and the memory"])
def test_a_worker_that_joins_and_does_not_fit_is_named_and_gets_no_jobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    environment = {
        "has xmc-stream sources": {"PYTHONPATH": others_sources(tmp_path / "other")},
        "has a processor of type": {"NUMBA_CPU_NAME": "generic"},
    }.get(why, {})
    caplog.set_level(logging.WARNING, logger="xmc_stream")
    with (
        cluster(tmp_path / "cluster", workers=[Worker()]) as (_, address),
        Engine(MemoryLimit(10**9), 1, address) as engine,
        joined(tmp_path / "late", address, 2 if "threads" in why else 1, **environment) as late,
        distributed.Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        processes = engine.run(waits(30, 0.05), Notes())["processes"]
        assert len(processes) == 30
        assert late.pid not in processes
        os.kill(pid_of(tmp_path / "cluster", 0), signal.SIGKILL)
        with pytest.raises(JobError, match=f"^no worker is left that can go on: worker late on .* {why}"):
            engine.run(waits(2, 0.05), Notes())
    [said] = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert said.startswith("worker late on ")
    assert why in said
    assert said.endswith("; it gets no jobs of this run")


def test_a_worker_that_joins_is_asked_for_its_memory_and_for_the_run_s_folder(tmp_path: Path) -> None:
    limit, unseen = MemoryLimit(10**9), tmp_path / "unseen" / "m.partial" / "events.jsonl"
    terms = Terms("#memory", limit, 2, environment_here())
    assert misfit(terms, "small", 2, 10**9).endswith("of each worker: start it with a larger --memory-limit")
    assert not misfit(terms, "large", 2, 2 * 10**9)
    assert not misfit(terms, "free", 1, 0)
    there = Terms(f"{tmp_path / 'm.partial' / 'events.jsonl'}#there", limit, 2, environment_here())
    assert not misfit(there, "near", 2, 0)
    said = misfit(Terms(f"{unseen}#unseen", limit, 2, environment_here()), "far", 2, 0)
    assert f" does not see {tmp_path / 'unseen'}: " in said


@pytest.mark.slow
def test_workers_that_are_killed_retired_and_added_do_not_change_the_model(tmp_path: Path) -> None:
    data = tmp_path / "d.xmc"  # whose classes take a while each
    sizes = {"n_samples": 4000, "n_features": 800, "n_labels": 1100, "features_per_sample": 30}
    load_tool("make_synthetic").make_synthetic(data, **sizes, seed=3)
    here = xs.PPDSparse(memory_limit="2GB", **SLOW).fit(data, model=tmp_path / "here")
    log = tmp_path / "m.partial" / "events.jsonl"

    def begun(phase: str) -> Callable[[], bool]:
        return lambda: any(event["phase"] == phase for event in read_events(log))

    with (
        cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address),
        distributed.Client(address, set_as_default=False) as client,
        ExitStack() as added,
    ):

        def disturb() -> None:
            wait_until(None, begun("round 1: solve"))
            os.kill(pid_of(tmp_path / "cluster", 0), signal.SIGKILL)
            late = []
            for n in range(3):  # each takes the place of one that goes
                old = set(client.nthreads())
                late.append(added.enter_context(joined(tmp_path / f"late-{n}", address)))
                wait_until(None, lambda old=old: bool(set(client.nthreads()) - old))
                if n == 1:
                    client.retire_workers(sorted(old)[:1])
                elif n == 2:
                    late[1].kill()

        disturber = threading.Thread(target=disturb, daemon=True)
        disturber.start()
        there = xs.PPDSparse(scheduler=address, memory_limit="1GB", **SLOW).fit(data, model=tmp_path / "m")
        disturber.join(60)
        assert not disturber.is_alive()
    assert there.model_.digest() == here.model_.digest()
    assert len({event["process"] for event in read_events(log.parent.with_name("m") / "events.jsonl")}) > 2


@pytest.mark.slow
def test_a_scheduler_that_freezes_before_an_outcome_is_fetched_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cluster, "_LOOK", 0.5)
    monkeypatch.setattr(of_cluster, "_ALONE", 3.0)
    with cluster(tmp_path / "cluster", workers=[Worker()]) as (scheduler, address):
        at = of_cluster.Cluster(address, "#1", lambda: True, MemoryLimit(10**9))
        try:
            task = at.submit(Wait("wait/1", 0.5), False)
            at.next_ended()
            scheduler.send_signal(signal.SIGSTOP)
            with pytest.raises(JobError, match=r"has given no answer for a minute: .* it goes on$"):
                assert isinstance(at.outcome(task.job, task), Failed)
        finally:
            scheduler.send_signal(signal.SIGCONT)
            at.close()


@pytest.mark.slow
def test_a_run_does_not_go_on_with_workers_of_another_processor(small: Path, tmp_path: Path) -> None:
    settings = [word for name, value in SLOW.items() for word in ("--set", f"{name}={value}")]
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    with (
        cluster(tmp_path / "first", workers=[Worker(environment={"NUMBA_CPU_NAME": "generic"})]) as (_, address),
        start("train", small, tmp_path / "m", "--memory-limit", "1GB", "--scheduler", address, *settings) as run,
    ):
        wait_until(run, lambda: ledger.exists() and "start" in ledger.read_text())
        run.kill()
    assert not (tmp_path / "m").exists()
    with cluster(tmp_path / "second") as (_, address), pytest.raises(xs.errors.ResumeError, match="processor"):
        xs.PPDSparse(scheduler=address, **SLOW).fit(small, model=tmp_path / "m")
