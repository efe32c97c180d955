"""A run that is killed goes on to the identical model, whatever the limit and the threads it goes on with."""

from __future__ import annotations

import json
import random
import resource
import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import forked_command
from helpers.trainings import kill_when, train, words

import xmc_stream as xs
from xmc_stream.errors import ResumeError, StoreError
from xmc_stream.runtime.ledger import Ledger


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Digest and figures of the run that nobody killed."""
    path = tmp_path_factory.mktemp("whole") / "m"
    figures = train(small, path)
    return xs.load_model(path).digest(), figures


@pytest.mark.slow
@pytest.mark.parametrize("ready", ["solve/0/0", "cut/1", "search/1/", "search/2/", "solve/2/"])
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


@pytest.mark.slow
def test_killed_while_units_are_finalised(small: Path, tmp_path: Path, whole: tuple[str, dict[str, Any]]) -> None:
    """The kill comes when the first unit is written and no line of the ledger names it yet, or the second is not."""
    model = tmp_path / "m"
    unit = model.with_name("m.partial") / "units" / "00000"
    with forked_command(*words(small, model, "1GB", 1)) as run:
        run.wait_until(lambda: unit.exists() or unit.with_name("00000.partial").exists())
        run.kill()
    assert not model.exists()
    figures = train(small, model, limit="600MB", threads=2)
    assert figures["resumed"]
    assert xs.load_model(model).digest() == whole[0]


@pytest.mark.slow
def test_killed_twice_and_continued_under_other_limits(
    small: Path, tmp_path: Path, whole: tuple[str, dict[str, Any]]
) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "solve/0/0", 0.01, limit="4GB", threads=2)
    assert kill_when(small, model, "solve/1/0", 0.0, limit="600MB", threads=1)
    train(small, model, limit="1GB", threads=2)
    assert xs.load_model(model).digest() == whole[0]


@pytest.mark.slow
def test_finished_jobs_are_not_done_again(small: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "search/2/", 0.0)
    events = model.with_name("m.partial") / "events.jsonl"
    before = [json.loads(line)["job"] for line in events.read_text().splitlines()]
    train(small, model)
    after = [json.loads(line)["job"] for line in (model / "events.jsonl").read_text().splitlines()]
    assert any(job.startswith("solve/1/") for job in before)
    assert not [job for job in after[len(before) :] if job.startswith(("solve/0/", "solve/1/", "search/1/"))]


@pytest.mark.slow
def test_other_seed_parameters_data_or_format_are_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m"
    assert kill_when(small, model, "solve/0/0", 0.0)
    with pytest.raises(ResumeError, match="seed"):
        xs.PPDSparse(epochs=20, last_epochs=40, seed=5).fit(small, model=model)
    with pytest.raises(ResumeError, match="params"):
        xs.PPDSparse(epochs=20, last_epochs=40, lam=0.5).fit(small, model=model)
    with pytest.raises(ResumeError, match="data"):
        xs.PPDSparse(epochs=20, last_epochs=40).fit(small.with_name("small-test.xmc"), model=model)
    monkeypatch.setattr("xmc_stream.training.train.RUN_FORMAT", 10**6)
    with pytest.raises(ResumeError, match=r"format \d+, not 1000000: another version .* begin anew by overwrite=True"):
        xs.PPDSparse(epochs=20, last_epochs=40).fit(small, model=model)


IDENTITY = {"seed": 0, "environment": {"numpy": "1"}}


@pytest.mark.slow
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
    with pytest.raises(ResumeError, match="force=True"):
        Ledger(path, other)
    with Ledger(path, other, force=True):
        pass


def test_a_renewed_ledger_that_cannot_be_written_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, IDENTITY) as ledger:
        ledger.add("long", {"text": "x" * 1000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path, {**IDENTITY, "seed": 1}, renew=True) as ledger:
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                ledger.add("longer", {"text": "x" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == whole
