"""Where X is larger than memory, the rows of each job of a level are brought side by side on disk. No model changes by it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import needs_compiler
from helpers.forked import Forked
from helpers.problems import LIMIT
from helpers.trees import array, run_tree, stored, topics

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.errors import StoreError
from xmc_stream.methods.contract import Task
from xmc_stream.runtime.job import Notes
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.encoding import new_pack
from xmc_stream.system.memory import format_size, peak_resident, resident
from xmc_stream.training.plan import plan_line
from xmc_stream.tree import plan, shuffle
from xmc_stream.tree.beams import beams_above
from xmc_stream.tree.choice import ChoiceJob
from xmc_stream.tree.forecast import TreeForecaster
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.parents import parents_of, union_of
from xmc_stream.tree.plan import stored_bytes
from xmc_stream.tree.run import made_from
from xmc_stream.tree.shared import Shared
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


@pytest.mark.parametrize(("trees", "C"), [(1, 2.0), (2, 2.0), (2, None)], ids=["one", "two", "C is chosen"])
def test_the_model_is_the_same_and_nothing_is_left(
    trees: int, C: float | None, data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    for name, value in (("JOB_ENTRIES", 2000), ("LARGE", 1700)):  # which are of the model
        monkeypatch.setattr(plan, name, value)
    chosen = {**TREE, "n_trees": trees, "C": C}
    learner = xs.LabelTree(**chosen, memory_limit=LIMIT)
    direct = learner.fit(data, model=tmp_path / "direct").model_.digest()
    request.getfixturevalue("shuffled")
    run = run_tree(data, tmp_path / "run", TreeParameters(**chosen))
    assert len(ranges_of_rows(data.X_rows())) > 3
    for kind in (SolveJob, StreamJob):
        assert {job.shuffled for job in run.of(kind) if job.level} == {True}
        assert not any(job.shuffled for job in run.of(kind) if not job.level)
    assert all(job.lists for job in run.of(ChoiceJob))
    assert bool(run.of(ChoiceJob)) == (C is None)
    assert learner.fit(data, model=tmp_path / "moved").model_.digest() == direct
    assert not [*(tmp_path / "moved").rglob("state")]


@pytest.mark.usefixtures("shuffled")
@pytest.mark.parametrize("at_most", [64, 2])
def test_the_rows_of_every_job_are_those_of_x(
    at_most: int, data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = partial(shuffle.lists_of, at_most=at_most)
    monkeypatch.setattr("xmc_stream.tree.run.lists_of", together)
    run = run_tree(data, tmp_path, TreeParameters(**TREE))
    X, of, spans = data.X_rows(), run.of(ShuffleJob), {}
    for job in run.of(ListJob):
        spans |= {(job.level, first): (job, last) for first, last in job.spans}
    assert {level for level, _ in spans} == {1, 2, 3}
    structure = run.structure()
    for (number, first), (job, last) in spans.items():
        (lists,) = {other.lists for other in of if other.level == number}
        assert lists == together([parent for level, parent in spans if level == number])
        level, before = structure.levels[number], beams_above(str(run.work), 0, number, data.n_samples)
        parents = [*parents_of(data.Y_columns(), structure, level, np.arange(first, last), before, run.p.negatives)]
        rows = union_of(parents)
        for parent in (first, last - 1):
            found = shuffle.shuffled_of(job.of, data, number, lists, parent)
            for some in (rows, rows[::3], rows[len(rows) // 2 :], rows[:0]):
                got, want = found.gather(some), X.gather(some)
                for name in ("indptr", "indices", "data"):
                    assert getattr(got, name).tobytes() == getattr(want, name).tobytes()
                assert found.lengths(some)[1].tolist() == X.lengths(some)[1].tolist()
    assert [job.number for job in of] == 3 * [*range(len(ranges_of_rows(X)))]  # one pass a level


@pytest.mark.usefixtures("shuffled")
def test_what_is_no_pack_of_these_rows_is_refused(data: xs.Dataset, tmp_path: Path) -> None:
    job = run_tree(data, tmp_path, TreeParameters(**TREE)).of(ListJob)[0]
    rows = array(job.out, "rows").astype(np.int64)
    with pytest.raises(StoreError, match="other rows"):
        Shuffled(job.of, data, job.tree, job.level, job.spans[0][0], rows[:-1])


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


def _train(*words: str) -> None:
    """A command, for which X is too large."""
    plan._CACHED, shuffle._RANGE_BYTES, plan.LARGE = 0.0, 1 << 16, 1 << 14
    main(list(words))


@pytest.mark.slow
@pytest.mark.parametrize("ready", ['"list/0/1', '"shuffle/0/1', '"solve/0/1', '"shuffle/0/2'])
def test_a_killed_training_goes_on_to_the_same_model(ready: str, small: Path, tmp_path: Path) -> None:
    words = ["train", small, tmp_path / "m", "--solver", "tree", "--threads", 2, "--memory-limit", "1GB"]
    for name, value in (("max_leaf", 10), ("root", 4), ("branching", 4), ("C", 1)):
        words += ["--set", f"{name}={value}"]
    words = [str(word) for word in words]
    with Forked(_train, *words[:2], str(tmp_path / "whole"), *words[3:]) as run:
        assert run.wait() == 0, run.stderr
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    with Forked(_train, *words) as run:
        assert run.wait_until(lambda: ledger.exists() and ready in ledger.read_text(errors="replace"))
        run.kill()
    with Forked(_train, *words) as run:
        assert run.wait() == 0, run.stderr
    assert xs.load_model(tmp_path / "m").digest() == xs.load_model(tmp_path / "whole").digest()
    assert not (tmp_path / "m.partial").exists()


def _moved(data: str, work: str) -> None:
    """Prints what a job adds to the peak of this process, and what was planned."""
    job = ShuffleJob(Shared(data, work, TreeParameters(), 0), 0, 1, ((0,), (1,)), 0)
    X = job.of.dataset().X_rows()
    X.gather(np.arange(9))  # its kernel is loaded
    before = resident()
    job.run()
    print(json.dumps([peak_resident() - before, shuffle.range_bytes(X)]))


def test_the_memory_of_a_job_is_planned(tmp_path: Path) -> None:
    n = 200_000
    X = sp.csr_matrix((np.ones(20 * n, np.float32), np.tile(np.arange(20), n), np.arange(0, 20 * n + 1, 20)), (n, 20))
    data = xs.convert(X, tmp_path / "d.xmc", labels=X[:, :2], memory_limit=LIMIT)
    for first in (0, 1):  # each job needs all rows
        with new_pack(Path(shuffle.list_path(str(tmp_path), 0, 1, first))) as pack:
            pack.write("rows", np.arange(n))
            pack.write("ends", np.array([0, n]))
    with Forked(_moved, str(data.path), str(tmp_path)) as run:
        assert run.wait() == 0, run.stderr
        taken, planned = json.loads(run.stdout)
    assert data.X_rows().nnz * 8 < taken <= planned


def test_the_plan_says_what_it_costs(data: xs.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
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
    said = plan_line({**moved, "peak_rss": 1, "memory_limit": 2})
    assert said.endswith(f"{format_size(moved['disk_bytes'])} of disk)")


@pytest.mark.parametrize("wanted", [1 << 50, 1 << 10])
def test_a_training_warns_of_a_disk_that_has_less_room(
    wanted: int, data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TreeForecaster, "_disk", lambda *_: wanted)
    xs.LabelTree(**TREE, memory_limit=LIMIT).fit(data, model=tmp_path / "m")
    said = [record.getMessage() for record in caplog.records if "of the disk of" in record.getMessage()]
    assert bool(said) == (wanted == 1 << 50)
    assert all(line.startswith(f"note: the run may take about {format_size(wanted)} more") for line in said)
