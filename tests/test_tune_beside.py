"""Settings that `tune` trains beside each other: what comes out, memory, errors, kills."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.clusters import Worker, cluster
from helpers.commands import cli_command, environment, wait_until
from helpers.forked import forked_command
from helpers.soak import first
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.errors import StoreError
from xmc_stream.pdsparse.memory import pass_needs
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.runtime.events import read_events
from xmc_stream.system.memory import MemoryLimit, return_freed_memory
from xmc_stream.system.progress import Progress
from xmc_stream.training import trials

GRID = {"lam": [0.01, 0.03, 0.1]}
FIXED = {"C": 0.3, "max_passes": 2}
WORDS = ("--solver", "pdsparse", "--grid", "lam=0.01,0.03,0.1", "--set", "C=0.3", "--set", "max_passes=2")
APART = ("seconds", "model_bytes", "bytes_streamed")


def told(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name not in APART} for one in report["settings"]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a training takes half a second, and of so many labels that it has tables."""
    path = tmp_path_factory.mktemp("beside") / "data.xmc"
    return load_tool("make_synthetic").make_synthetic(
        path, n_samples=1500, n_features=1000, n_labels=1100, features_per_sample=40, seed=2
    )


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings one after another; digests of trainings of their own, by name of the model."""
    folder = tmp_path_factory.mktemp("alone")
    report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, memory_limit="2GB", threads=1)
    xs.split(data, folder / "part.xmc", folder / "held.xmc")
    digests = {}
    for number, one in enumerate(report["settings"]):
        clf = xs.PDSparse(**one["parameters"], **FIXED, memory_limit="2GB", threads=1)
        digests[f"{number}.model"] = clf.fit(folder / "part.xmc", model=folder / str(number)).model_.digest()
    return report, digests


@dataclass
class Seen:
    """Trainings of a tuning: digests, processes that ran their jobs, when each ran; `before` may raise what one ends with."""

    before: Callable[[str], None] = lambda name: None
    digests: dict[str, str] = field(default_factory=dict)
    processes: set[str] = field(default_factory=set)
    times: list[tuple[float, float]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    @property
    def at_once(self) -> int:
        """Trainings under way at a time, at most."""
        return max(sum(begin <= at < end for begin, end in self.times) for at, _ in self.times)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, train = Seen(), trials.train

    def watched(task: Any, path: Path, execution: Any, **named: Any) -> Any:
        if path.exists():  # it is compared now
            return train(task, path, execution, **named)
        found.begun.append(path.name)
        found.before(path.name)
        began = time.monotonic()
        model, report = train(task, path, execution, **named)
        found.times.append((began, time.monotonic()))
        found.digests[path.name] = model.digest()
        found.processes |= {event["process"] for event in read_events(path / "events.jsonl") if event["event"] == "job"}
        found.parts.append(1 if execution.part is None else execution.part.of)
        return model, report

    monkeypatch.setattr(trials, "train", watched)
    return found


# ---- what comes out


def test_they_are_those_of_trainings_of_their_own(
    data: Path, alone: tuple[dict[str, Any], dict[str, str]], seen: Seen
) -> None:
    report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, memory_limit="2GB", threads=2)
    assert (told(report), report["best"], report["set"]) == (told(alone[0]), alone[0]["best"], alone[0]["set"])
    assert seen.digests == alone[1]
    assert (seen.at_once, seen.parts) == (2, [2] * 3)
    assert report["peak_rss"] <= report["memory_limit"]
    assert all(one["seconds"] > 0.05 for one in report["settings"])


@pytest.mark.slow
def test_on_two_workers_they_are_the_same(
    data: Path, alone: tuple[dict[str, Any], dict[str, str]], seen: Seen, tmp_path: Path
) -> None:
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        options = {"memory_limit": "2GB", "scheduler": address, "work": tmp_path / "work"}
        report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, **options)
    assert (told(report), report["best"]) == (told(alone[0]), alone[0]["best"])
    assert seen.digests == alone[1]
    assert (seen.at_once, seen.parts) == (2, [1] * 3)  # a worker of one thread has one at a time
    assert len(seen.processes) == 2


@pytest.mark.slow
def test_a_worker_of_two_threads_has_two_at_a_time(
    data: Path, alone: tuple[dict[str, Any], dict[str, str]], seen: Seen, tmp_path: Path
) -> None:
    two = Worker(options=(*Worker().options, "--nthreads", "2"))
    with cluster(tmp_path / "cluster", workers=[two]) as (_, address):
        options = {"memory_limit": "2GB", "scheduler": address, "work": tmp_path / "work"}
        report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, **options)
    assert told(report) == told(alone[0])
    assert (seen.at_once, seen.parts) == (2, [2] * 3)


@pytest.mark.slow
def test_memoir_s_settings_are_the_same_beside_each_other(small: Path, seen: Seen) -> None:
    reports = [
        xs.tune(small, "memoir", {"gamma": [0.02, 0.08]}, fixed={"steps": 10}, memory_limit="2GB", threads=threads)
        for threads in (1, 2)
    ]
    assert told(reports[0]) == told(reports[1])
    assert seen.parts == [1, 1, 2, 2]


def test_methods_whose_jobs_run_beside_each_other_train_in_turn(small: Path, seen: Seen) -> None:
    xs.tune(small, "dismec", {"C": [1.0, 2.0]}, memory_limit="2GB", threads=2)
    assert (seen.at_once, seen.parts) == (1, [1, 1])


# ---- memory


def limit_for(data: Path, trainings: int, tables: int) -> int:
    """What leaves so many trainings what they need at least, and so many bytes for tables of all."""
    dataset = xs.open_dataset(data)
    needs = sum(pass_needs(dataset, PDSparseParameters()).values())
    held = trainings * needs + tables - MemoryLimit(0).budget()  # what the process counts as, and the fixed reserve
    return held * 32 // 31  # the reserve that grows


def test_settings_go_one_after_another_where_no_two_fit(data: Path, seen: Seen) -> None:
    xs.PDSparse(**FIXED, memory_limit="2GB", threads=1).fit(data)  # kernels are loaded
    limit = limit_for(data, 1, 2**25)
    report = xs.tune(data, "pdsparse", {"lam": [0.3, 1.0]}, fixed={"max_passes": 1}, memory_limit=limit, threads=2)
    assert (seen.at_once, seen.parts) == (1, [1, 1])
    assert len(report["settings"]) == 2


def forget_peak() -> None:
    """The largest resident size of this process is counted anew: tests before may have held more than the limit of this one."""
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_setting_whose_tables_outgrow_its_part_is_trained_by_itself(
    data: Path,
    alone: tuple[dict[str, Any], dict[str, str]],
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
    foreseen: bool,
) -> None:
    """Those of lam=0.01 take 16 MB, of lam=0.1 8 MB. Where that is not foreseen, it ends, and goes on after the others."""
    if not foreseen:
        monkeypatch.setattr("xmc_stream.pdsparse.method.MOST_FORESEEN", 0)
    limit = limit_for(data, 2, 20 * 10**6)
    forget_peak()
    report = xs.tune(data, "pdsparse", {"lam": [0.01, 0.1]}, fixed=FIXED, memory_limit=limit, threads=2)
    assert told(report) == [told(alone[0])[number] for number in (0, 2)]
    assert [seen.digests[f"{number}.model"] for number in (0, 1)] == [alone[1][f"{number}.model"] for number in (0, 2)]
    assert seen.parts == ([1, 1] if foreseen else [2, 1])
    assert seen.begun[2:] == ([] if foreseen else ["0.model"])  # once more
    assert report["peak_rss"] <= limit


# ---- errors, interrupts, kills


def test_an_error_in_a_setting_ends_the_others_and_the_same_call_goes_on(
    data: Path, alone: tuple[dict[str, Any], dict[str, str]], seen: Seen, tmp_path: Path
) -> None:
    out = tmp_path / "t.json"
    other = tmp_path / "t.json.partial" / "0.model.partial" / "ledger.jsonl"

    def before(name: str) -> None:
        if name == "1.model":
            wait_until(None, lambda: other.exists() and '"pass/' in other.read_text())
            raise StoreError("the disk is full")

    seen.before = before
    with pytest.raises(StoreError, match="the disk is full"):
        xs.tune(data, "pdsparse", GRID, fixed=FIXED, out=out, memory_limit="2GB", threads=2)
    assert not any(thread.name.startswith("xmc-stream-setting") for thread in threading.enumerate())
    assert "2.model" not in seen.digests
    seen.before = lambda name: None
    report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, out=out, memory_limit="2GB", threads=2)
    assert told(report) == told(alone[0])
    assert seen.digests == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("ready", first(["0.model.partial/state/dual-0-1", "1.model", 'ledger.jsonl: "setting/0"']))
def test_killed_at_any_point_it_goes_on(
    data: Path, alone: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, seen: Seen, ready: str
) -> None:
    out, (file, _, word) = tmp_path / "t.json", ready.partition(": ")
    at = tmp_path / "t.json.partial" / file
    with forked_command("tune", data, out, *WORDS, "--memory-limit", "2GB", "--threads", 2) as run:
        assert run.wait_until(lambda: at.exists() and (not word or word in at.read_text(errors="replace")))
        run.kill()
    trained = {path.name for path in at.parent.glob("*.model")} if not word else {f"{n}.model" for n in range(3)}
    report = xs.tune(data, "pdsparse", GRID, fixed=FIXED, out=out, memory_limit="2GB", threads=2)
    assert told(report) == told(alone[0])
    assert seen.digests == {name: digest for name, digest in alone[1].items() if name not in trained}


@pytest.mark.slow
def test_an_interrupt_ends_all_settings_within_seconds(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    long = [word.replace("max_passes=2", "max_passes=2000") for word in WORDS] + ["--set", "tol=1e-9"]
    words = cli_command("tune", data, out, *long, "--memory-limit", "2GB", "--threads", 2)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as run:
        ledgers = [tmp_path / "t.json.partial" / f"{number}.model.partial" / "ledger.jsonl" for number in (0, 1)]
        wait_until(run, lambda: all(one.exists() and '"pass/' in one.read_text() for one in ledgers))
        run.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, said = run.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert run.returncode == 130
    assert "Traceback" not in said
    for one in ledgers:
        last = [event["event"] for event in read_events(one.parent / "events.jsonl")][-1]
        assert last == "interrupted"


# ---- what one sees


def test_what_threads_do_beside_each_other_adds_up() -> None:
    outer = Progress("tune")
    with outer.part(0.0, 0.5):
        outer.phase("training 2 settings beside each other")

        def work(number: int) -> None:
            with outer.beside(0.5, f"setting {number} of 2, ") as mine:
                mine.phase("passes", (0.0, 1.0))
                for done in range(11):
                    mine.advance(done / 10)

        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outer.share == pytest.approx(0.5)
    assert outer.words in ("setting 1 of 2, passes", "setting 2 of 2, passes")
