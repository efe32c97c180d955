"""A dask scheduler that is killed under a command: one line says so, and the same command goes on with the next one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import dask
import pytest
from helpers.clusters import cluster
from helpers.commands import said_at_last
from helpers.forked import Forked, forked_command
from helpers.soak import first
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.errors import XmcStreamError
from xmc_stream.runtime.engine import Engine
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Loop, Notes, Phase, Receipt
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.system.memory import MemoryLimit

# a client tries for so long to reach a scheduler that is gone; by default for 30 seconds
SOON = {"distributed.comm.timeouts.connect": "3s"}
SETTINGS = {"loss": "hinge", "C": 1e3, "tol": 1e-5, "max_rounds": 2, "last_epochs": 1500}


def soon(*words: Any) -> Forked:
    """A command that soon sees that a scheduler is gone."""
    return Forked(_soon, [str(word) for word in words])


def _soon(words: list[str]) -> None:
    dask.config.set(SOON)
    main(words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set whose classes take a while each."""
    path = tmp_path_factory.mktemp("scheduler") / "d.xmc"
    load_tool("make_synthetic").make_synthetic(
        path, n_samples=4000, n_features=800, n_labels=1100, features_per_sample=30, seed=3
    )
    return path


@pytest.mark.slow
def test_training_goes_on_with_the_next_scheduler(data: Path, tmp_path: Path) -> None:
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    events = tmp_path / "m.partial" / "events.jsonl"
    with cluster(tmp_path / "first") as (scheduler, address):
        command = ("train", data, tmp_path / "m", "--memory-limit", "1GB", "--scheduler", address, *settings)
        with soon(*command) as run:
            assert run.wait_until(lambda: any(event["phase"] == "round 1: solve" for event in read_events(events)))
            scheduler.kill()
            assert run.wait(60) == 1
            [said] = said_at_last(run.stderr)
    again = "start it again, with workers, and give the same command, it goes on"
    assert said == f"xmc-stream: the dask scheduler at {address} is gone: {again}"
    done = [event for event in read_events(events) if event["event"] == "job"]
    with cluster(tmp_path / "second", int(address.rpartition(":")[2])) as (_, second), forked_command(*command) as run:
        assert second == address
        assert run.wait(300) == 0
    keys = [event["job"] for event in read_events(tmp_path / "m" / "events.jsonl") if event["event"] == "job"]
    assert len(done) < len(keys)
    solved = [key for key in keys if key.startswith("solve/")]
    assert len(solved) == len(set(solved))
    here = xs.PPDSparse(memory_limit="3GB", **SETTINGS).fit(data, model=tmp_path / "here")
    assert xs.load_model(tmp_path / "m").digest() == here.model_.digest()


class Ends:
    """A job that may end a process."""

    def __init__(self, key: str, end: tuple[int, int] | None = None) -> None:
        self.key, self.end = key, end

    def run(self) -> Receipt:
        if self.end:
            os.kill(*self.end)
            time.sleep(1)
        return {}


def engine(address: str, folder: str, when: str, book: str, end: tuple[int, int]) -> None:
    """Two phases, in a process of its own, while the scheduler dies; what is said."""
    dask.config.set(SOON)

    def loop() -> Loop:
        yield Phase("first", [Ends("first")])
        if when == "in between":
            os.kill(*end)
        yield Phase("second", [Ends("second", end if when == "in a job" else None), Ends("third")])
        return {}

    try:
        with Engine(MemoryLimit.of("3GB"), 1, address) as running:
            if when == "at the beginning":
                os.kill(*end)
                time.sleep(0.5)
            running.warm(Ends("warm"))
            if book == "ledger":
                with Ledger(Path(folder) / "work" / "ledger", {}) as ledger:
                    running.run(loop(), ledger)
            else:
                running.run(loop(), Notes())
        print("nothing happened")
    except XmcStreamError as error:
        print(type(error).__name__, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "book", "number"),
    first(
        [
            ("in a job", "ledger", signal.SIGKILL), ("at the beginning", "notes", signal.SIGKILL),
            ("in between", "ledger", signal.SIGKILL), ("in a job", "notes", signal.SIGTERM),
        ],
        2,
    ),
)  # fmt: skip
def test_one_line_whenever_it_dies(tmp_path: Path, when: str, book: str, number: signal.Signals) -> None:
    with (
        cluster(tmp_path / "cluster") as (scheduler, address),
        Forked(engine, address, str(tmp_path), when, book, (scheduler.pid, int(number))) as run,
    ):
        assert run.wait(120) == 0, run.stderr
        out, said = run.stdout, run.stderr
    goes_on = ", it goes on" if book == "ledger" else ""
    advice = f"start it again, with workers, and give the same command{goes_on}"
    assert out == f"JobError the dask scheduler at {address} is gone: {advice}\n", said
    assert said == ""


@pytest.mark.slow
def test_predictions_that_were_begun_are_gone(data: Path, tmp_path: Path) -> None:
    xs.PPDSparse(memory_limit="3GB", max_rounds=1).fit(data, model=tmp_path / "m")
    command = ("predict", tmp_path / "m", data, tmp_path / "p.npz", "-k", 1000)
    with cluster(tmp_path / "cluster") as (scheduler, address), soon(*command, "--scheduler", address) as run:
        assert run.wait_until((tmp_path / "p.npz.partial" / "predictions.partial").exists)
        scheduler.kill()
        assert run.wait(60) == 1
        [said] = said_at_last(run.stderr)
    advice = "start it again, with workers, and give the same command"
    assert said == f"xmc-stream: the dask scheduler at {address} is gone: {advice}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster", "m"]
