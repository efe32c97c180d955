"""A run that is killed goes on to the identical model, whatever the limit and the threads it goes on with."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import xmc_stream as xs
from xmc_stream.engine.ledger import Ledger
from xmc_stream.errors import ResumeError, StoreError

# enough rounds and epochs to be caught in; seconds of work
SETTINGS = ["--set", "epochs=20", "--set", "last_epochs=40"]


def command(data: Path, model: Path, limit: str, threads: int, more: Sequence[Any] = ()) -> list[str]:
    arguments = [data, model, "--memory-limit", limit, "--threads", threads, *SETTINGS, *more, "--json"]
    return [sys.executable, "-m", "xmc_stream.cli", "train", *map(str, arguments)]


def train(data: Path, model: Path, limit: str = "1GB", threads: int = 2, more: Sequence[Any] = ()) -> dict[str, Any]:
    done = subprocess.run(command(data, model, limit, threads, more), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def kill_when(
    data: Path,
    model: Path,
    ready: str,
    delay: float,
    limit: str = "1GB",
    threads: int = 2,
    more: Sequence[Any] = (),
) -> bool:
    """Start training and kill it once `ready` stands in the ledger and `delay` seconds more; False if it ended first."""
    ledger = model.with_name(model.name + ".partial") / "ledger.jsonl"
    with subprocess.Popen(
        command(data, model, limit, threads, more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        while run.poll() is None and not (ledger.exists() and ready in ledger.read_text(errors="replace")):
            time.sleep(0.002)
        time.sleep(delay)
        if run.poll() is not None:
            return False
        run.send_signal(signal.SIGKILL)
        run.wait()
    return not model.exists()


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Digest and figures of the run that nobody killed."""
    path = tmp_path_factory.mktemp("whole") / "m"
    figures = train(small, path)
    return xs.load_model(path).digest(), figures


@pytest.mark.parametrize("ready", ["check/", "solve/0/0", "cut/1", "search/1/", "search/2/", "solve/2/"])
def test_killed_at_any_stage_ends_with_the_same_model(
    small: Path, tmp_path: Path, whole: tuple[str, dict[str, Any]], ready: str
) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, ready, random.Random(ready).random() * 0.05)
    figures = train(small, model, limit="600MB", threads=1)
    assert figures["resumed"]
    assert xs.load_model(model).digest() == whole[0]
    assert figures["objective"] == pytest.approx(whole[1]["objective"], rel=1e-12)
    assert not model.with_name("m.partial").exists()


def test_killed_while_units_are_finalised(small: Path, tmp_path: Path, whole: tuple[str, dict[str, Any]]) -> None:
    """The kill comes when the first unit is written and no line of the ledger names it yet, or the second is not."""
    model = tmp_path / "m"
    unit = model.with_name("m.partial") / "units" / "00000"
    with subprocess.Popen(command(small, model, "1GB", 1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        while run.poll() is None and not unit.exists() and not unit.with_name("00000.partial").exists():
            time.sleep(0.0005)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert not model.exists()
    figures = train(small, model, limit="600MB", threads=2)
    assert figures["resumed"]
    assert xs.load_model(model).digest() == whole[0]


def test_killed_twice_and_continued_under_other_limits(
    small: Path, tmp_path: Path, whole: tuple[str, dict[str, Any]]
) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "solve/0/0", 0.01, limit="4GB", threads=2)
    assert kill_when(small, model, "solve/1/0", 0.0, limit="600MB", threads=1)
    train(small, model, limit="1GB", threads=2)
    assert xs.load_model(model).digest() == whole[0]


def test_finished_jobs_are_not_done_again(small: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "search/2/", 0.0)
    events = model.with_name("m.partial") / "events.jsonl"
    before = [json.loads(line)["job"] for line in events.read_text().splitlines()]
    train(small, model)
    after = [json.loads(line)["job"] for line in (model / "events.jsonl").read_text().splitlines()]
    assert any(job.startswith("solve/1/") for job in before)
    assert not [job for job in after[len(before) :] if job.startswith(("solve/0/", "solve/1/", "search/1/"))]


def test_other_seed_parameters_or_data_are_refused(small: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "solve/0/0", 0.0)
    with pytest.raises(ResumeError, match="seed"):
        xs.PPDSparse(epochs=20, last_epochs=40, seed=5).fit(small, model=model)
    with pytest.raises(ResumeError, match="params"):
        xs.PPDSparse(epochs=20, last_epochs=40, lam=0.5).fit(small, model=model)
    with pytest.raises(ResumeError, match="data"):
        xs.PPDSparse(epochs=20, last_epochs=40).fit(small.with_name("small-test.xmc"), model=model)


IDENTITY = {"seed": 0, "environment": {"numpy": "1"}}


def test_ledger_drops_a_line_cut_short_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, IDENTITY) as ledger:
        ledger.add("a", {"n": 1})
        ledger.add("b", {"n": 2})
        assert not ledger.resumed
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        with Ledger(path, IDENTITY) as ledger:
            assert ledger.resumed
            assert ledger.get("a") == {"n": 1}
            assert ledger.get("b") is None
            ledger.add("b", {"n": 2})
    assert path.read_bytes() == whole
    damaged = bytearray(whole)
    damaged[whole.index(b'"a"') + 1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"ledger.jsonl:2"):
        Ledger(path, IDENTITY)


def test_jobs_undone_in_the_ledger_are_undone_in_the_next_session(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, IDENTITY) as ledger:
        for key in ("a", "b", "c"):
            ledger.add(key, {"n": 1})
        ledger.undo(["a", "b"])
        assert [key for key, _ in ledger.items()] == ["c"]
        ledger.add("b", {"n": 2})
    with Ledger(path, IDENTITY) as ledger:
        assert dict(ledger.items()) == {"b": {"n": 2}, "c": {"n": 1}}
        assert ledger.get("a") is None


def test_ledger_lines_carry_their_checksum(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, IDENTITY) as ledger:
        ledger.add("a", {"n": 1})
    for line in path.read_bytes().splitlines():
        text, _, crc = line.rpartition(b"\t")
        assert int(crc, 16) == zlib.crc32(text)


def test_ledger_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", IDENTITY), pytest.raises(ResumeError, match="another run"):
        Ledger(tmp_path / "ledger.jsonl", IDENTITY)


def test_another_environment_is_refused_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, IDENTITY):
        pass
    other = {**IDENTITY, "environment": {"numpy": "2"}}
    with pytest.raises(ResumeError, match="--force"):
        Ledger(path, other)
    with Ledger(path, other, force=True):
        pass
