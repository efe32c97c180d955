"""`plan`: what it says before a run is what the run then does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.linear.tiles import TileRange
from xmc_stream.linear.weights import cut_units
from xmc_stream.models import Execution
from xmc_stream.ppdsparse.forecast import PPDSparseForecaster, _spread
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import (
    INTERVALS,
    SearchSize,
    class_blocks,
    held_rows,
    search_interval,
    search_needs,
    solve_plan,
)
from xmc_stream.ppdsparse.probe import ProbeJob
from xmc_stream.ppdsparse.problem import LossWeights, Problem
from xmc_stream.runtime.ledger import read_ledger
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.training.plan import plan_line, plan_lines, plan_training

Cli = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "threads"), first([("512MB", 1), ("1GB", 2)]))
def test_what_is_foreseen_of_training_and_prediction_comes_true(
    small: Path, cli: Cli, tmp_path: Path, limit: str, threads: int
) -> None:
    test, options = small.with_name("small-test.xmc"), ("--memory-limit", limit, "--threads", threads)
    foreseen = cli("plan", "train", small, tmp_path / "m", *options)
    done = cli("train", small, tmp_path / "m", *options)
    assert foreseen["fits"]
    assert foreseen["passes"] == done["passes"] == sum(foreseen["class_blocks"])
    assert foreseen["bytes_streamed"] == done["bytes_streamed"]
    assert foreseen["bytes_gathered"] == pytest.approx(done["bytes_gathered"], rel=0.3)
    assert done["bytes_streamed"] + done["bytes_gathered"] == done["bytes_read"]
    assert done["peak_rss"] <= foreseen["peak_rss"] <= 1.3 * done["peak_rss"]
    foreseen = cli("plan", "predict", tmp_path / "m", test, tmp_path / "p", *options)
    done = cli("predict", tmp_path / "m", test, tmp_path / "p", *options)
    assert foreseen["bytes_read"] == done["bytes_read"]
    assert done["peak_rss"] <= foreseen["peak_rss"] <= 1.3 * done["peak_rss"]
    assert not {path.name for path in tmp_path.iterdir()} - {"m", "p"}  # a plan leaves nothing


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_jobs_share_the_classes_of_a_search_where_rows_are_few(threads: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = scipy.sparse.random(400, 60, 0.2, "csr", np.float32, rng)
    Y = scipy.sparse.random(400, 4096, 12 / 4096, "csr", np.float32, rng, lambda n: np.ones(n, np.float32))
    data = xs.convert(X, tmp_path / "data.xmc", labels=Y)
    clf = xs.PPDSparse(threads=threads, memory_limit="2GB", all_rows=False)
    foreseen = clf.plan(data)
    model = clf.fit(data, model=tmp_path / "m").model_
    keys = read_ledger(tmp_path / "m" / "ledger.jsonl")[0]
    cuts = [receipt["keys"] for key, receipt in keys.items() if key.startswith("cut/")]
    assert cuts
    for jobs in cuts:
        classes, rows = zip(*(key.split("/")[-2:] for key in jobs), strict=True)
        ends = [tuple(map(int, of.split("-"))) for of in classes]
        if threads < 3:  # one of four units is more than a tenth beyond its share of three
            assert set(rows) == {"0-400"}
            assert [begin for begin, _ in ends] + [Y.shape[1]] == [0] + [end for _, end in ends]
            assert len(ends) == threads
        else:
            assert set(classes) == {f"0-{Y.shape[1]}"}
            assert len(set(rows)) == threads
    assert clf.report_["passes"] == foreseen["passes"] == len(cuts)
    assert clf.report_["bytes_streamed"] == foreseen["bytes_streamed"]
    alone = xs.PPDSparse(threads=1, memory_limit="2GB", all_rows=False).fit(data, model=tmp_path / "alone").model_
    assert model.digest() == alone.digest()


@pytest.mark.slow
def test_the_short_form_plans_training_and_other_commands_are_refused(small: Path, commands: Cli) -> None:
    long = commands("plan", "train", small, "model", "--set", "max_rounds=2", "--memory-limit", "1GB")
    short = commands("plan", small, "--set", "max_rounds=2", "--memory-limit", "1GB")
    assert short["passes"] == long["passes"] == 2
    assert "there is no plan for `info`" in commands("plan", "info", small, fails=True)
    assert "No such option" in commands("plan", "train", small, "model", "--nonsense", fails=True)


@pytest.mark.slow
def test_a_limit_that_cannot_work_is_answered_with_one_that_does(
    small: Path, cli: Cli, commands: Cli, tmp_path: Path
) -> None:
    refused = commands("plan", small, "--memory-limit", "150MB", "--threads", 1, fails=True)
    assert "needs" in refused
    (least,) = re.findall(r"set --memory-limit to (\d+)MB or more$", refused)
    enough = 10**6 * int(least) + 2_000_000  # processes differ by a few pages
    assert cli("train", small, tmp_path / "m", "--memory-limit", enough, "--threads", 1)["peak_rss"] <= enough


@pytest.mark.slow
def test_conversion_is_foreseen(tmp_path: Path, cli: Cli, commands: Cli) -> None:
    rng = np.random.default_rng(0)
    lines = [" ".join([f"{rng.integers(50)}", *(f"{j}:{rng.random():.4f}" for j in range(30))]) for _ in range(3000)]
    text = tmp_path / "train.txt"
    text.write_text("\n".join(["3000 30 50", *lines]) + "\n")

    words = (text, tmp_path / "out.xmc", "--memory-limit", "512MB")
    commands("plan", "convert", *words)  # compiles what was not, which takes memory of its own
    foreseen = commands("plan", "convert", *words)
    assert not (tmp_path / "out.xmc").exists()
    done = cli("convert", *words)
    assert (foreseen["n_samples"], foreseen["nnz_features"]) == (done["n_samples"], done["nnz_features"])
    assert foreseen["bytes_read"] == text.stat().st_size
    pages = 2_000_000  # processes differ by a few
    assert done["peak_rss"] - pages <= foreseen["peak_rss"] <= 1.4 * done["peak_rss"]


def test_a_plan_is_said_in_words(small: Path, tmp_path: Path) -> None:
    parameters = PPDSparseParameters(max_rounds=None)
    figures = xs.PPDSparse(max_rounds=None, memory_limit="2GB", threads=1).plan(small)
    assert not figures["rounds_known"]
    assert "1 pass over the data in each round" in plan_line(figures)
    assert any(line.startswith("least limit") for line in plan_lines(figures))
    refused = plan_training(Dataset(small), parameters, 0, Execution(10**8, 1))
    assert "--memory-limit" not in refused["why"]  # which `least_limit` says; the command puts them together
    nothing = scipy.sparse.csr_matrix((0, 3), dtype=np.float32)
    empty = xs.convert(nothing, tmp_path / "empty.xmc", labels=nothing)
    with pytest.raises(InputError, match="nothing to learn from"):
        plan_training(empty, parameters, 0, Execution("2GB", 1))


def sizes(n: int, tile: int) -> list[list[SearchSize]]:
    """Units of four pieces of two levels each."""
    units = []
    for u in range(n):
        five, twenty = held_rows(np.array([5])), held_rows(np.array([5, 5, 5, 5]))
        halves = [SearchSize(TileRange(u * 4 + h, u * 4 + h + 1, tile, 10), five, five) for h in (0, 1, 2, 3)]
        units.append([*halves, SearchSize(TileRange(u * 4, u * 4 + 4, 4 * tile, 40), twenty, twenty)])
    return units


@pytest.mark.parametrize("promised", [1, 2, 3, 5, 8])
def test_a_search_is_cut_into_the_blocks_that_were_promised(promised: int) -> None:
    plan = MemoryPlan(2**33, 1024 * MIB, 1)
    blocks = class_blocks(plan, sizes(8, 2 * MIB), 1000, 10**6, promised)
    assert len(blocks) == promised
    classes = [c for block in blocks for piece in block for c in range(piece.span.first, piece.span.last)]
    assert classes == list(range(32))
    natural = class_blocks(replace_budget(plan, 120 * MIB), sizes(8, 20 * MIB), 1000, 10**6)
    assert len(natural) > 5
    short = replace_budget(plan, 120 * MIB)
    assert class_blocks(short, sizes(8, 20 * MIB), 1000, 10**6, 2) == natural  # more than promised


def test_legs_are_as_long_as_the_budget_allows_before_classes_are_cut() -> None:
    """A thousand classes of which each wants 50,000 rows of ten million, and one that wants them all."""
    rooms = np.full(1000, 50_000)
    rooms[7] = 9_000_000
    sizes = [[SearchSize(TileRange(0, 1000, 50 * MIB, 10**6), held_rows(rooms), held_rows(rooms))]]
    intervals = []
    for budget in (200, 400, 950, 8000):
        plan = MemoryPlan(2**33, budget * MIB, 1)
        (pieces,) = class_blocks(plan, sizes, 50_000, 10**7)
        needs = search_needs(plan, pieces, 50_000, 10**7)
        assert sum(needs.values()) <= plan.budget
        intervals.append(search_interval(plan, pieces, 50_000, 10**7))
    assert intervals == [INTERVALS[0], INTERVALS[1], INTERVALS[4], 2_500_000]  # the last are all rows of a job
    assert needs["rows found"] < 12 * (999 * 50_000 + 2_500_000) * 1.2
    with pytest.raises(MemoryLimitError, match="rows found 5"):
        class_blocks(replace_budget(plan, 100 * MIB), sizes, 50_000, 10**7)


def test_many_classes_that_want_little_are_not_cut_into_intervals() -> None:
    """An interval would need a table of where each class's rows begin in it, which is more than the rows themselves."""
    little = held_rows(np.full(1000, 50))
    sizes = [[SearchSize(TileRange(u * 1000, (u + 1) * 1000, MIB, 10**4), little, little)] for u in range(1000)]
    plan = MemoryPlan(2**33, 2600 * MIB, 1)
    (block,) = class_blocks(plan, sizes, 50_000, 10**7)
    assert search_interval(plan, block, 50_000, 10**7) == 2_500_000


def replace_budget(plan: MemoryPlan, budget: int) -> MemoryPlan:
    return MemoryPlan(plan.limit, budget, plan.threads, plan.processes, Cuts())


def test_a_sample_is_spread_over_all_classes_by_label_count() -> None:
    counts = np.array([0, 1, 4, 4, 9, 100, 400])
    values = _spread(counts, [1, 4, 4, 9, 100], [2, 7, 9, 20, 50])
    np.testing.assert_allclose(values, [0, 2, 8, 8, 20, 50, 100], rtol=0.01)
    assert (np.diff(_spread(np.arange(1, 50), [1, 50], [3, 90])) > 0).all()


def test_the_sizes_foreseen_are_those_that_come(small: Path) -> None:
    """Forecast against the first round as the solve jobs report it."""
    dataset, parameters = Dataset(small), PPDSparseParameters(C=1.0, positive_weight=1.0)
    plan = MemoryPlan(2**31, 512 * MIB, 1)
    _, solve = solve_plan(dataset, plan, parameters, False, cut_units(dataset))
    job = ProbeJob(Problem(str(small), parameters, 0, plan, LossWeights(None, 0)), solve)
    probe = job.run()
    assert job.run()["weights"] == probe["weights"]  # what cuts a run is no matter of time
    forecaster = PPDSparseForecaster(dataset, parameters, probe)
    learner = xs.PPDSparse(max_rounds=1, epochs=2, last_epochs=2, prune=0, memory_limit="2GB", threads=1).fit(dataset)
    model = learner.model_
    weights = np.concatenate([np.diff(model.classes(a, b).indptr) for a, b in ((0, 1024), (1024, 1100))])
    assert forecaster.weights.sum() == pytest.approx(weights.sum(), rel=0.1)
    with pytest.raises(MemoryLimitError):
        forecaster.forecast(MemoryPlan(10**8, 10 * MIB, 1))


def test_streams_are_foreseen_at_their_own_rate(small: Path) -> None:
    dataset, parameters = Dataset(small), PPDSparseParameters(C=1.0, positive_weight=1.0)
    plan = MemoryPlan(2**31, 512 * MIB, 1)
    _, solve = solve_plan(dataset, plan, parameters, False, cut_units(dataset))
    probe = ProbeJob(Problem(str(small), parameters, 0, plan, LossWeights(None, 0)), solve).run()
    assert probe["gather"] > 0
    assert probe["stream"] > 0

    def seconds(**rates: float) -> dict[str, float]:
        told = PPDSparseForecaster(dataset, parameters, {**probe, **rates}).forecast(plan)["phase_seconds"]
        return {name: float(of) for name, of in told.items()}

    far = seconds(gather=1.0, stream=1e-9)  # rows far apart on a slow disk: a batch has more of them, which lie nearer
    assert far == seconds(gather=8e-9, stream=1e-9)
    near, slow = seconds(gather=1e-9, stream=1e-9), seconds(gather=1e-9, stream=1e-6)
    assert near["search/1"] == far["search/1"] < slow["search/1"]
    assert near["solve/1"] < far["solve/1"]


@pytest.mark.parametrize("case", ["no positives", "no values", "all positive", "one positive"])
def test_odd_sets_are_planned_and_trained(case: str) -> None:
    X = scipy.sparse.random(50, 20, 0.3, format="csr", dtype=np.float32, random_state=0)
    Y = {
        "no positives": scipy.sparse.csr_matrix((50, 5)),
        "no values": scipy.sparse.csr_matrix(np.eye(50, 4)),
        "all positive": scipy.sparse.csr_matrix(np.ones((50, 3))),
        "one positive": scipy.sparse.csr_matrix((np.ones(1), ([3], [2])), shape=(50, 5)),
    }[case]
    if case == "no values":
        X = scipy.sparse.csr_matrix((50, 20), dtype=np.float32)
    learner = xs.PPDSparse(memory_limit="2GB", threads=1).fit(X, Y)
    assert learner.report_["passes"] == (0 if case in ("no positives", "all positive") else 3)
    assert (learner.report_["nnz"] > 0) == (case == "one positive")


def test_more_workers_take_less_time_up_to_one_a_unit(small: Path, trained: Path, commands: Callable[..., Any]) -> None:
    told = commands("plan", "--workers", 2, "train", small, "x", "--memory-limit", "1GB", "--threads", 1)
    times = {int(n): seconds for n, seconds in told["seconds_by_workers"].items()}
    assert list(times) == [1, 2, 4, 8]
    assert times[2] == told["seconds"]
    assert times[1] >= times[2] >= times[4] >= times[8] > 0  # two units: solves gain nothing beyond two
    ranking = commands("plan", "--workers", 3, "predict", trained, small, "p", "--threads", 1)["seconds_by_workers"]
    assert list(ranking) == ["1", "3", "6", "12"]
    assert "seconds_by_workers" not in commands("plan", "train", small, "x")
    said = commands("plan", "--workers", 2, "convert", small, "x", fails=True)
    assert said.endswith("without --scheduler")
