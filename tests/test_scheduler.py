"""A dask scheduler that is killed under a command: one line says so, and the same command goes on with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.clusters import cluster
from helpers.commands import said_at_last, start, wait_until
from helpers.soak import first
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.runtime.events import read_events

# a client tries for so long to reach a scheduler that is gone; by default for 30 seconds
SOON = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "3s"}
SETTINGS = {"loss": "hinge", "C": 1e3, "tol": 1e-5, "max_rounds": 2, "last_epochs": 1500}


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
        with start(*command) as run:
            wait_until(run, lambda: any(event["phase"] == "round 1: solve" for event in read_events(events)))
            scheduler.kill()
            assert run.wait(60) == 1
            assert run.stderr is not None
            [said] = said_at_last(run.stderr.read())
    again = "start it again, with workers, and give the same command, it goes on"
    assert said == f"xmc-stream: the dask scheduler at {address} is gone: {again}"
    done = [event for event in read_events(events) if event["event"] == "job"]
    with cluster(tmp_path / "second", int(address.rpartition(":")[2])) as (_, second), start(*command) as run:
        assert second == address
        assert run.wait(300) == 0
    keys = [event["job"] for event in read_events(tmp_path / "m" / "events.jsonl") if event["event"] == "job"]
    assert len(done) < len(keys)
    solved = [key for key in keys if key.startswith("solve/")]
    assert len(solved) == len(set(solved))
    here = xs.PPDSparse(memory_limit="3GB", **SETTINGS).fit(data, model=tmp_path / "here")
    assert xs.load_model(tmp_path / "m").digest() == here.model_.digest()


ENGINE = """
import os, signal, sys, time
from pathlib import Path
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.engine import Engine
from xmc_stream.errors import XmcStreamError
from xmc_stream.runtime.job import Notes, Phase
from xmc_stream.system.memory import MemoryLimit

class Job:
    def __init__(self, key, end=0):
        self.key, self.end = key, end
    def run(self):
        if self.end:
            os.kill(*self.end)
            time.sleep(1)
        return {}

def loop():
    yield Phase("first", [Job("first")])
    if when == "in between":
        os.kill(*end)
    yield Phase("second", [Job("second", end if when == "in a job" else 0), Job("third")])
    return {}

address, folder, when, book, pid, number = sys.argv[1:]
end = int(pid), int(number)
try:
    with Engine(MemoryLimit.of("3GB"), 1, address) as engine:
        if when == "at the beginning":
            os.kill(*end)
            time.sleep(0.5)
        engine.warm(Job("warm"))
        if book == "ledger":
            with Ledger(Path(folder) / "work" / "ledger", {}) as ledger:
                engine.run(loop(), ledger)
        else:
            engine.run(loop(), Notes())
    print("nothing happened")
except XmcStreamError as error:
    print(type(error).__name__, error)
"""


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
    with cluster(tmp_path / "cluster") as (scheduler, address):
        arguments = [address, tmp_path, when, book, str(scheduler.pid), str(int(number))]
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **SOON}
        )  # fmt: skip
    goes_on = ", it goes on" if book == "ledger" else ""
    advice = f"start it again, with workers, and give the same command{goes_on}"
    assert done.stdout == f"JobError the dask scheduler at {address} is gone: {advice}\n", done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_predictions_that_were_begun_are_gone(data: Path, tmp_path: Path) -> None:
    xs.PPDSparse(memory_limit="3GB", max_rounds=1).fit(data, model=tmp_path / "m")
    command = ("predict", tmp_path / "m", data, tmp_path / "p.npz", "-k", 1000)
    with (
        cluster(tmp_path / "cluster") as (scheduler, address),
        start(*command, "--scheduler", address, env={**os.environ, **SOON}) as run,
    ):
        wait_until(run, (tmp_path / "p.npz.partial" / "predictions.partial").exists)
        scheduler.kill()
        assert run.wait(60) == 1
        assert run.stderr is not None
        [said] = said_at_last(run.stderr.read())
    advice = "start it again, with workers, and give the same command"
    assert said == f"xmc-stream: the dask scheduler at {address} is gone: {advice}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster", "m"]
