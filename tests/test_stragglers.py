"""Workers that are frozen or cut off in the middle of a run: their jobs run elsewhere too, and nothing is written twice."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Worker, cluster, link, pid_of
from helpers.commands import wait_until
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.runtime import cluster as of_cluster
from xmc_stream.runtime.engine import limit_of
from xmc_stream.runtime.events import read_events
from xmc_stream.store.chunks import open_array
from xmc_stream.store.encoding import ArrayWriter, new_pack, new_store
from xmc_stream.system.stop import wanted_while

SLOW: dict[str, Any] = {"loss": "hinge", "C": 1e3, "tol": 1e-5, "max_rounds": 2, "last_epochs": 300}


@contextmanager
def beside(model: Path, phase: str, act: Callable[[], None]) -> Iterator[None]:
    """Does something once the training of a model, in the block, has come to a phase."""

    def watch() -> None:
        log = model.with_name(model.name + ".partial") / "events.jsonl"
        wait_until(None, lambda: any(event["phase"] == phase for event in read_events(log)))
        act()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    watcher.join(60)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less of it, so that tests are short."""
    monkeypatch.setattr(of_cluster, "_LATE", 1.0)
    monkeypatch.setattr(of_cluster, "_SILENT", 3.0)


@pytest.fixture(scope="module")
def digest(small: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model that nothing disturbed."""
    model = tmp_path_factory.mktemp("here") / "m"
    return xs.PPDSparse(memory_limit="2GB", **SLOW).fit(small, model=model).model_.digest()


def check_model(model: Path, digest: str, said: list[logging.LogRecord]) -> None:
    """It is that one, some job was begun twice, and each of them counts once."""
    assert any("takes long: once more, on tcp://" in record.getMessage() for record in said)
    assert xs.load_model(model).digest() == digest
    jobs = Counter(event["job"] for event in read_events(model / "events.jsonl") if event["event"] == "job")
    assert set(jobs.values()) == {1}
    assert not [*model.rglob("*.partial")]


@pytest.mark.slow
def test_the_jobs_of_a_frozen_worker_run_elsewhere(
    small: Path, digest: str, tmp_path: Path, patience: None, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Long before dask, which waits five minutes, drops the worker. What begins then is told of it."""
    caplog.set_level(logging.INFO, "xmc_stream")
    model = tmp_path / "m"
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        pid = pid_of(tmp_path / "cluster", 1)
        with beside(model, "round 2: solve", lambda: os.kill(pid, signal.SIGSTOP)):
            xs.PPDSparse(scheduler=address, memory_limit="1GB", **SLOW).fit(small, model=model)
        monkeypatch.setattr(of_cluster, "_ANSWER", 1.0)
        with pytest.raises(
            xs.InputError, match=r"^worker tcp://\S+ has given no answer for 1 seconds: end it, or wait"
        ):
            limit_of("1GB", address)
        os.kill(pid, signal.SIGCONT)
        check_model(model, digest, caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize(("look", "late"), [(0.3, 10.0), (600.0, 0.1)])  # that for workers finds it, or for stragglers
def test_a_scheduler_that_gives_no_answer_ends_the_run(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: float, late: float
) -> None:
    for name, seconds in (("_LOOK", look), ("_LATE", late), ("_ALONE", 2.0)):
        monkeypatch.setattr(of_cluster, name, seconds)
    model = tmp_path / "m"
    with (
        cluster(tmp_path / "cluster") as (scheduler, address),
        beside(model, "round 2: solve", lambda: scheduler.send_signal(signal.SIGSTOP)),
        pytest.raises(xs.errors.JobError, match=r"has given no answer for a minute: look at its log, .* it goes on$"),
    ):
        xs.PPDSparse(scheduler=address, memory_limit="1GB", **{**SLOW, "last_epochs": 1500}).fit(small, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("ever", first([False, True]), ids=["for a while", "for ever"])
def test_a_worker_whose_link_is_cut(
    small: Path, digest: str, tmp_path: Path, patience: None, caplog: pytest.LogCaptureFixture, ever: bool
) -> None:
    caplog.set_level(logging.INFO, "xmc_stream")
    model = tmp_path / "m"
    with link() as cable:
        workers = [Worker(), Worker(before=cable.inside)]

        def cut() -> None:
            cable.set("down")
            if not ever:
                time.sleep(6)
                cable.set("up")

        with (
            cluster(tmp_path / "cluster", workers=workers, host=cable.here) as (_, address),
            beside(model, "round 2: solve", cut),
        ):
            xs.PPDSparse(scheduler=address, memory_limit="1GB", **SLOW).fit(small, model=model)
    check_model(model, digest, caplog.records)


def write(path: Path, copy: str, go_on: threading.Event, ready: threading.Event, values: Any) -> None:
    """A copy of a job that writes a store and a pack, and waits in the middle."""
    with (
        wanted_while(lambda: True, copy),
        new_store(path / "store", {}) as group,
        new_pack(path / "pack") as pack,
    ):
        array = ArrayWriter(group, "a", np.int64)
        array.append(values[:500])
        ready.set()
        assert go_on.wait(60)
        array.append(values[500:])
        array.close()
        pack.write("a", values)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_copies_of_a_job_do_not_meet(tmp_path: Path, first_to_end: int) -> None:
    values = np.arange(1000)
    errors: list[BaseException] = []

    def one(copy: str, go_on: threading.Event, ready: threading.Event) -> None:
        try:
            write(tmp_path, copy, go_on, ready, values)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    go_on, ready = ([threading.Event(), threading.Event()] for _ in range(2))
    copies = [threading.Thread(target=one, args=(f"copy{i}", go_on[i], ready[i]), daemon=True) for i in range(2)]
    for copy, is_ready in zip(copies, ready, strict=True):
        copy.start()
        assert is_ready.wait(60)
    for i in (first_to_end, 1 - first_to_end):
        go_on[i].set()
        copies[i].join(60)
        if i == first_to_end:
            number = (tmp_path / "store").stat().st_ino
        for store in ("store", "pack"):
            assert (open_array(tmp_path / store / "a").read(0, 1000) == values).all()
    assert not errors
    assert (tmp_path / "store").stat().st_ino == number  # whoever reads it is not disturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack", "store"]


def test_what_stood_there_before_is_replaced(tmp_path: Path) -> None:
    ready = go_on = threading.Event()
    for values in (np.arange(1000), np.arange(1000, 2000)):
        write(tmp_path, "copy", go_on, ready, values)
        assert (open_array(tmp_path / "store" / "a").read(0, 1000) == values).all()
