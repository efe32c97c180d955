"""Runs of MEMOIR: the same model however they are cut, killed and shared out; limits; damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cuts import CutError, CutLedger
from helpers.damage import flip
from helpers.forked import forked_command

import xmc_stream as xs
from xmc_stream.errors import JobError, StoreError
from xmc_stream.memoir.learners import class_ranges
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.plan import ENTRIES
from xmc_stream.memoir.run import MEMOIRRun
from xmc_stream.memoir.steps import StepsJob
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Receipt, run_here
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes
from xmc_stream.system.memory import resident

LIMIT = "4GB"  # bounds the whole process of the tests


@pytest.fixture(scope="module")
def some_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 rows, 500 features, 60 labels, one or two a row."""
    rng = np.random.default_rng(0)
    n, d, k = 2000, 500, 60
    y = rng.integers(0, k, (n, 2))
    means = sp.random(k, d, 0.08, format="csr", random_state=1)
    X = sp.csr_matrix(means[y[:, 0]] + 0.5 * means[y[:, 1]] + sp.random(n, d, 0.02, random_state=2))
    Y = sp.csr_matrix(
        ((y[:, :1] == np.arange(k)) | ((y[:, 1:] == np.arange(k)) & (rng.random((n, 1)) < 0.5))).astype(np.float32)
    )
    path = tmp_path_factory.mktemp("memoir") / "data.xmc"
    xs.convert(X.astype(np.float32), path, labels=Y, normalize="l2", memory_limit=LIMIT)
    return path


def digest(data: Path, folder: Path, p: MEMOIRParameters, threads: list[int], budget: int = 2**30) -> str:
    """Train, with as many threads planned for until the first cut (after some jobs), then the next; the digest."""
    dataset, work, ledger = Dataset(data), folder / "model.partial", CutLedger()
    begin_model(work)
    for number, n in enumerate(threads):
        ledger.left = 2 if number + 1 < len(threads) else 0
        shutil.rmtree(work / "scratch", ignore_errors=True)
        try:
            result = run_here(MEMOIRRun(dataset, work, p, 0, MemoryPlan(2**40, budget, n), ledger).loop(), ledger)
        except CutError:
            continue
        kind = "low-rank" if p.variant == "lsh" else "linear"
        finish_model(
            work, folder / "model", {**model_attributes(dataset, "memoir", p.to_dict(), 0, result), KIND: kind}
        )
        return xs.load_model(folder / "model").digest()
    raise AssertionError("it was cut before the end")


RUNS = [
    MEMOIRParameters(variant="l2", batch=300, steps=24),
    MEMOIRParameters(variant="l1", oracle="sw-graph", gamma=1e-3, batch=300, steps=24, truncate=1e-3),
    MEMOIRParameters(variant="lsh", oracle="simple-lsh", rank=20, batch=300, steps=24),
    MEMOIRParameters(variant="lsh", oracle="exact", rank=20, batch=300, steps=24, held_out=0.0),
]


@pytest.mark.parametrize("p", RUNS, ids=lambda p: f"{p.variant}-{p.oracle}")
def test_the_model_is_the_same_for_any_threads_limit_and_interruption(
    p: MEMOIRParameters, some_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(some_rows, tmp_path / "whole", p, [1])
    assert digest(some_rows, tmp_path / "threads", p, [3], 2**28) == whole
    monkeypatch.setattr(portion, "SECONDS", 0.0)  # a job a step, within segments
    assert digest(some_rows, tmp_path / "cut", p, [3, 1, 2] * 40) == whole


@pytest.mark.parametrize("variant", ["l1", "lsh"])
def test_limits_and_reports(variant: str, some_rows: Path, tmp_path: Path) -> None:
    digests = set()
    for number, (limit, threads) in enumerate(((resident() + 500 * 10**6, 1), ("4GB", 2))):
        clf = xs.MEMOIR(variant=variant, rank=16, memory_limit=limit, threads=threads)
        clf.fit(some_rows, model=tmp_path / str(number))
        digests.add(clf.model_.digest())
        report = clf.report_
        assert report["steps"] == report["history"][-1]["steps"]
        assert report["held_out_macro_F1"] == max(entry["macro_F1"] for entry in report["history"]) > 50
        assert report["passes"] > 0
        assert report["bytes_gathered"] > 0
    assert len(digests) == 1


def words(variant: str) -> list[str]:
    settings = [f"variant={variant}", "rank=16", "batch=1500", "steps=60", "patience=20", "eta1=0.2"]
    return ["--solver", "memoir", *(part for name in settings for part in ("--set", name)), "--json"]


@pytest.fixture(scope="module", params=["l1", "lsh"])
def whole(
    request: pytest.FixtureRequest, some_rows: Path, tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]
) -> tuple[str, Path, dict[str, Any]]:
    """A variant, its model by a command in a process of its own, and what that said."""
    model = tmp_path_factory.mktemp("whole") / "m"
    told = cli("train", some_rows, model, *words(request.param), "--memory-limit", "512MB", "--threads", "1")
    return request.param, model, told


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_model(
    whole: tuple[str, Path, dict[str, Any]], some_rows: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    variant, model, told = whole
    options = words(variant)
    ledger = tmp_path / "killed.partial" / "ledger.jsonl"
    with forked_command("train", some_rows, tmp_path / "killed", *options, "--memory-limit", "600MB") as run:
        assert run.wait_until(lambda: ledger.exists() and '"steps/2/' in ledger.read_text())
    assert not (tmp_path / "killed").exists()
    resumed = commands("train", some_rows, tmp_path / "killed", *options, "--memory-limit", "1GB", "--threads", "1")
    assert resumed["resumed"]
    assert not told["resumed"]
    assert xs.load_model(tmp_path / "killed").digest() == xs.load_model(model).digest()


@pytest.mark.slow
def test_what_is_foreseen_comes_true(
    whole: tuple[str, Path, dict[str, Any]], some_rows: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    variant, _, done = whole
    foreseen = commands(
        "plan", "train", some_rows, tmp_path / "m", *words(variant), "--memory-limit", "512MB", "--threads", "1"
    )
    assert 0.5 < done["passes"] <= foreseen["passes"]
    # what a process counts as; unfilled buffers
    assert done["peak_rss"] <= foreseen["peak_rss"] <= min(done["peak_rss"] + 75e6, 512e6)


@pytest.mark.parametrize("damage", ["flipped", "gone"])
@pytest.mark.parametrize("kind", ["steps", "reduced-3"])
def test_damage_to_what_a_segment_left_is_made_good(
    kind: str, damage: str, some_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = {"variant": "lsh", "rank": 8, "batch": 300, "steps": 10, "memory_limit": LIMIT}
    whole = xs.MEMOIR(**p).fit(some_rows, model=tmp_path / "whole").model_.digest()
    run = StepsJob.run

    def third(job: StepsJob) -> Receipt:
        if job.number == 3 and job.data.path == str(some_rows):
            raise JobError("no more")
        return run(job)

    with monkeypatch.context() as broken:
        broken.setattr(StepsJob, "run", third)
        with pytest.raises(JobError, match="no more"):
            xs.MEMOIR(**p).fit(some_rows, model=tmp_path / "steps" / "m")  # a folder named as one of the state
    state = tmp_path / "steps" / "m.partial" / "state" / kind
    found = [path for path in state.glob("*" if kind == "steps" else "**/c/0") if path.is_file()]
    if damage == "flipped":
        flip(found[-1], 100)
    elif kind == "steps":
        for path in found:
            path.unlink()
    else:
        shutil.rmtree(state)
    again = xs.MEMOIR(**p).fit(some_rows, model=tmp_path / "steps" / "m")
    assert again.model_.digest() == whole
    events = read_events(tmp_path / "steps" / "m" / "events.jsonl")
    first = "steps/0/0" if kind == "steps" else "reduce/start"
    assert [event["job"] for event in events if event["event"] == "again"] == [first]


@pytest.mark.parametrize("solver", ["MEMOIR", "LEML"])
def test_factors_that_were_damaged_before_the_end_are_made_again_or_refused(
    solver: str, some_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "MEMOIR": {"variant": "lsh", "rank": 8, "batch": 300, "steps": 5},
        "LEML": {"rank": 4, "alternations": 1},
    }
    made = getattr(xs, solver)(memory_limit=LIMIT, **options[solver])
    whole = made.fit(some_rows, model=tmp_path / "whole").model_.digest()

    def no_more(*arguments: Any) -> None:
        raise JobError("no more")

    with monkeypatch.context() as broken:
        broken.setattr("xmc_stream.training.train.finish_model", no_more)
        with pytest.raises(JobError, match="no more"):
            made.fit(some_rows, model=tmp_path / "m")
    flip(tmp_path / "m.partial" / "factors" / "H" / "c" / "0", 100)
    if solver == "LEML":  # what they were made from is gone
        with pytest.raises(StoreError, match="the run cannot go on from it"):
            made.fit(some_rows, model=tmp_path / "m")
    else:
        assert made.fit(some_rows, model=tmp_path / "m").model_.digest() == whole


def test_rows_that_are_too_long_for_the_steps_are_named(tmp_path: Path) -> None:
    X = sp.csr_matrix(np.eye(4, dtype=np.float32) * np.float32(1e25))
    with pytest.raises(JobError, match=r"MEMOIR diverged by step .*normalize='l2'"):
        xs.MEMOIR(memory_limit=LIMIT, held_out=0.0, normalize=None).fit(X, sp.csr_matrix(np.eye(4)))


def test_a_model_is_written_in_portions(tmp_path: Path) -> None:
    ends = np.concatenate([[0], np.cumsum([0, ENTRIES, 3, ENTRIES - 3, 1, 0, 2 * ENTRIES, 5])])
    assert list(class_ranges(ends, 0, 8)) == [(0, 2), (2, 4), (4, 6), (6, 7), (7, 8)]
    assert list(class_ranges(ends, 3, 5)) == [(3, 5)]
    assert list(class_ranges(np.zeros(9001, np.int64), 0, 9000)) == [(0, 4096), (4096, 8192), (8192, 9000)]
