"""Where X is larger than memory, the rows of each job of a level are brought side by side on disk. No model changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import needs_compiler
from helpers.problems import LIMIT
from helpers.trees import array, run_tree, stored, topics

import xmc_stream as xs
from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.tree import plan, shuffle
from xmc_stream.tree.forecast import TreeForecaster
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.plan import stored_bytes
from xmc_stream.tree.run import made_from
from xmc_stream.tree.shuffle import ListJob, Shuffled, ShuffleJob, ranges_of_rows
from xmc_stream.tree.solve import SolveJob
from xmc_stream.tree.streaming import StreamJob

pytestmark = needs_compiler

TREE: dict[str, Any] = {"max_leaf": 3, "root": 4, "branching": 2, "beam": 2, "C": 2}  # levels of 4, 8 and 16 nodes


@pytest.fixture
def data(tmp_path: Path) -> xs.Dataset:
    return stored(tmp_path, *topics())


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any X is too large; ranges have few rows, jobs few parents, and some parents many rows."""
    monkeypatch.setattr(plan, "_CACHED", 0.0)
    monkeypatch.setattr(shuffle, "_RANGE_BYTES", 5000)
    monkeypatch.setattr(shuffle, "_PIECE", 100)
    monkeypatch.setattr(plan, "JOB_ENTRIES", 2000)
    monkeypatch.setattr(plan, "LARGE", 1700)


@pytest.mark.parametrize("trees", [1, 2])
def test_the_model_is_the_same_and_nothing_is_left(
    trees: int, data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in ("JOB_ENTRIES", "LARGE"):  # which are of the model
        monkeypatch.setattr(plan, name, {"JOB_ENTRIES": 2000, "LARGE": 1700}[name])
    learner = xs.LabelTree(**TREE, n_trees=trees, memory_limit=LIMIT)
    direct = learner.fit(data, model=tmp_path / "direct").model_.digest()
    request.getfixturevalue("shuffled")
    run = run_tree(data, tmp_path / "run", TreeParameters(**TREE, n_trees=trees))
    assert len(ranges_of_rows(data.X_rows())) > 3
    for kind in (SolveJob, StreamJob):
        assert {job.shuffled for job in run.of(kind) if job.level} == {True}
        assert not any(job.shuffled for job in run.of(kind) if not job.level)
    assert learner.fit(data, model=tmp_path / "moved").model_.digest() == direct
    assert not [*(tmp_path / "moved").rglob("state")]


@pytest.mark.usefixtures("shuffled")
def test_the_rows_of_every_job_are_those_of_x(data: xs.Dataset, tmp_path: Path) -> None:
    run = run_tree(data, tmp_path, TreeParameters(**TREE))
    X, jobs, of = data.X_rows(), run.of(ListJob), run.of(ShuffleJob)
    assert {job.level for job in jobs} == {job.level for job in of} == {1, 2, 3}
    assert sum(len(set(job.firsts)) for job in of if not job.number) == len(jobs)
    for job in jobs:
        rows = array(job.out, "rows").astype(np.int64)
        found = Shuffled(job.of, data, job.tree, job.level, job.first, rows)
        for some in (rows, rows[::3], rows[len(rows) // 2 :], rows[:0]):
            got, want = found.gather(some), X.gather(some)
            for name in ("indptr", "indices", "data"):
                assert getattr(got, name).tobytes() == getattr(want, name).tobytes()
            assert found.lengths(some)[1].tolist() == X.lengths(some)[1].tolist()
    read = sum(job.of.dataset().X_rows().nnz for job in of if not job.number)
    assert read == 3 * X.nnz  # one pass a level


@pytest.mark.usefixtures("shuffled")
def test_what_is_no_pack_of_these_rows_is_refused(data: xs.Dataset, tmp_path: Path) -> None:
    job = run_tree(data, tmp_path, TreeParameters(**TREE)).of(ListJob)[0]
    rows = array(job.out, "rows").astype(np.int64)
    with pytest.raises(StoreError, match="other rows"):
        Shuffled(job.of, data, job.tree, job.level, job.first, rows[:-1])


@pytest.mark.usefixtures("shuffled")
def test_a_run_goes_on_with_what_lies_side_by_side(data: xs.Dataset, tmp_path: Path) -> None:
    whole = run_tree(data, tmp_path / "whole", TreeParameters(**TREE))
    notes, calls, run = Notes(), 0, ShuffleJob.run

    def stops(job: ShuffleJob) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return run(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffleJob, "run", stops)
        with pytest.raises(KeyboardInterrupt):
            run_tree(data, tmp_path / "part", TreeParameters(**TREE), notes=notes)
    again = run_tree(data, tmp_path / "part", TreeParameters(**TREE), notes=notes)
    outs = {job.key: job.out for job in whole.of(SolveJob)}
    some = again.of(SolveJob)
    assert len(some) > 5
    for job in some:
        assert array(job.out, "values").tobytes() == array(outs[job.key], "values").tobytes()


def test_a_unit_that_is_made_again_has_its_rows_brought_together_again() -> None:
    done = ["solve/0/1/0-2", "list/0/1/0", "list/0/1/2", "shuffle/0/1/0", "list/0/2/0", "shuffle/0/2/0", "beam/0/1/0"]
    assert made_from("finalise/0-1-0", done) == ["solve/0/1/0-2", "list/0/1/0", "list/0/1/2", "shuffle/0/1/0"]


@pytest.mark.usefixtures("shuffled")
def test_a_unit_that_is_damaged_behind_its_level(tmp_path: Path) -> None:
    """Its rows, which are gone, are brought together again."""
    data = stored(tmp_path, *topics(labels=1))  # no decision is learned
    learner = xs.LabelTree(**TREE, memory_limit=LIMIT)
    want = learner.fit(data, model=tmp_path / "whole").model_.digest()
    run, calls = ShuffleJob.run, 0

    def stops(job: ShuffleJob) -> Any:
        nonlocal calls
        calls += job.level == 2
        if calls == 2:
            raise StoreError("no more")
        return run(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffleJob, "run", stops)
        with pytest.raises(StoreError, match="no more"):
            learner.fit(data, model=tmp_path / "m")
    work = tmp_path / "m.partial"
    file = max(
        (path for path in (work / "units" / "0-1-0").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    file.write_bytes(b"\0" * file.stat().st_size)
    assert learner.fit(data, model=tmp_path / "m").model_.digest() == want


def test_the_plan_says_what_it_costs(data: xs.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    from xmc_stream.methods.contract import Task

    forecaster, size = TreeForecaster(Task(data, TreeParameters(**TREE), 0)), stored_bytes(data.X_rows())
    budget = MemoryPlan(2**40, 2**30, 1)
    direct = forecaster.forecast(budget)
    assert not plan.plan_tree(budget, data, TreeParameters(**TREE), forecaster._shape).shuffles
    monkeypatch.setattr(plan, "_CACHED", 0.0)
    assert plan.plan_tree(budget, data, TreeParameters(**TREE), forecaster._shape).shuffles
    moved = forecaster.forecast(budget)
    assert moved["bytes_read"] == pytest.approx(direct["bytes_read"] + 3 * size, rel=1e-3)
    assert moved["disk_bytes"] > direct["disk_bytes"] + size
    assert moved["seconds"] >= direct["seconds"]
