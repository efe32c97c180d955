"""Classes whose first active set is all rows: one model however the work is cut, near its optimum, and where it is done."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import nothing_is_compiled
from helpers.conversions import dense
from helpers.cuts import CutError, CutLedger
from helpers.executed import fit_cut
from helpers.forked import run_forked
from helpers.problems import LIMIT, dense_weights, rare_labels

import xmc_stream as xs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.linear.kernels.lanecd import descend_lanes
from xmc_stream.linear.tiles import tile_bytes
from xmc_stream.linear.weights import cut_units
from xmc_stream.methods.contract import Task
from xmc_stream.methods.registry import method_of
from xmc_stream.ppdsparse import problem as problems
from xmc_stream.ppdsparse import solve
from xmc_stream.ppdsparse.method import PPDSparseWarmUp
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import WRITER_BYTES, solve_plan
from xmc_stream.ppdsparse.problem import settled, takes_all_rows
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.search import SearchJob
from xmc_stream.ppdsparse.solve import SolveJob
from xmc_stream.ppdsparse.solver import all_rows_bytes
from xmc_stream.ppdsparse.state import OPEN, STATUS, UnitState
from xmc_stream.runtime.job import Loop, Notes, run_here
from xmc_stream.runtime.plan import MIB, Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model

UNCUT = 40  # a run has fewer receipts
FIGURES = ("objective", "duality_gap", "violation", "n_open", "n_empty", "rounds", "nnz")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    X, Y = rare_labels()
    return xs.convert(X, tmp_path_factory.mktemp("rows") / "d.xmc", labels=Y, normalize="l2")


def fitted(data: Any, model: Path, cuts: Cuts | None = None, fit: dict[str, Any] | None = None, **change: Any) -> Any:
    options = {"all_rows": True, "memory_limit": LIMIT, **change}
    return fit_cut(xs.PPDSparse(**options), data, model, cuts, **(fit or {}))


def told(clf: Any) -> tuple[str, list[Any]]:
    return clf.model_.digest(), [clf.report_[name] for name in FIGURES]


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, {}),
        ({"loss": "hinge", "bias": False, "lam": 0.05}, {}),
        ({"class_weight": "balanced", "positive_weight": 2.0}, {"sample_weight": np.linspace(0, 2, 1200)}),
        ({"C": 8.0, "max_rounds": 3, "last_epochs": 1}, {}),
    ],
    ids=["default", "hinge", "weights", "goes on"],
)
def test_the_cut_of_the_work_changes_nothing(
    data: xs.Dataset, tmp_path: Path, change: dict[str, Any], fit: dict[str, Any]
) -> None:
    whole = told(fitted(data, tmp_path / "whole", fit=fit, **change))
    assert told(fitted(data, tmp_path / "threads", fit=fit, threads=2, **change)) == whole
    for shares in (2, 3):
        cuts = Cuts(shares=shares, classes=7, rows=300)
        assert told(fitted(data, tmp_path / f"{shares}", cuts, fit, **change)) == whole
    assert (whole[1][FIGURES.index("rounds")] > 1) == (bool(fit) or "max_rounds" in change)


@pytest.mark.parametrize("loss", ["squared_hinge", "hinge"])
def test_it_comes_nearer_to_the_optimum_that_rounds_come_to(data: xs.Dataset, tmp_path: Path, loss: str) -> None:
    at_once = fitted(data, tmp_path / "at once", loss=loss, last_epochs=200, tol=1e-3).report_
    rounds = fitted(data, tmp_path / "rounds", loss=loss, all_rows=False, max_rounds=None, tol=1e-4, epochs=200).report_
    assert (at_once["rounds"], at_once["passes"], at_once["bytes_streamed"]) == (1, 1, 0)
    assert at_once["objective"] == pytest.approx(rounds["objective"], rel=1e-3)
    assert at_once["duality_gap"] < 1e-2
    few = fitted(data, tmp_path / "few", loss=loss, max_rounds=1).report_
    assert at_once["objective"] <= few["objective"]


@pytest.mark.parametrize(
    ("change", "more"),
    [({}, 1.0), ({"positive_weight": 3.0, "C": 2.0}, 3.0), ({"C": 8.0, "max_rounds": 1, "last_epochs": 1}, 1.0)],
    ids=["default", "positives", "far from the optimum"],
)
def test_figures_are_those_of_the_weights_though_nothing_is_checked(
    data: xs.Dataset, tmp_path: Path, change: dict[str, Any], more: float
) -> None:
    clf = fitted(data, tmp_path / "m", prune=0.0, weight_type="float32", **change)
    (X, Y), (weights, bias), C = dense(data), dense_weights(clf.model_), clf.report_["C"]
    learned = np.isfinite(bias) & (bias < 1e6)
    Y, w = Y[:, learned], np.vstack([weights, bias]).astype(np.float64)[:, learned]
    short = np.maximum(0.0, 1.0 - np.where(Y, 1.0, -1.0) * (X @ w[:-1] + w[-1]))
    objective = clf.lam * np.abs(w[:-1]).sum() + 0.5 * clf.tau * (w**2).sum()
    objective += 0.5 * C * np.sum(np.where(Y, more, 1.0) * short**2)
    assert (clf.report_["rounds"], clf.report_["bytes_streamed"]) == (1, 0)
    assert clf.report_["objective"] == pytest.approx(objective, rel=1e-6)
    assert clf.report_["violation"] > 0
    assert (clf.report_["duality_gap_mean"] > 0.03) == ("max_rounds" in change)


def test_classes_far_from_their_optimum_go_on_if_they_may(data: xs.Dataset, tmp_path: Path) -> None:
    change = {"C": 8.0, "last_epochs": 1}
    one, more = (fitted(data, tmp_path / f"{rounds}", max_rounds=rounds, **change).report_ for rounds in (1, 4))
    assert (one["rounds"], one["passes"]) == (1, 1)
    assert more["rounds"] > 1
    assert more["passes"] >= more["rounds"]  # the first, and a search before each other one
    assert more["objective"] < one["objective"]
    assert more["duality_gap_mean"] < one["duality_gap_mean"]


def test_labels_of_no_row_and_of_every_row_are_known(data: xs.Dataset, tmp_path: Path) -> None:
    clf = fitted(data, tmp_path / "m")
    bias = clf.model_.bias()
    assert np.isneginf(bias[[0, 7, 8, 39]]).all()
    assert bias[21] == 1e6
    assert np.isfinite(np.delete(bias, [0, 7, 8, 39])).all()
    assert clf.model_.to_scipy()[:, [0, 7, 8, 21, 39]].nnz == 0
    assert clf.report_["n_empty"] == 5


@pytest.mark.parametrize(
    ("change", "left"),
    [
        *(({}, left) for left in range(1, 6)),
        *(({"C": 8.0, "max_rounds": 3, "last_epochs": 1}, left) for left in range(3, 13)),
    ],
)
def test_a_run_that_was_cut_goes_on_to_the_same_model(
    data: xs.Dataset, tmp_path: Path, change: dict[str, Any], left: int
) -> None:
    p, plan = PPDSparseParameters(all_rows=True, **change), MemoryPlan(2**33, 1024 * MIB, 2, cuts=Cuts(shares=2))

    def run(work: Path, ledger: Any) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(
            json.dumps(run_here(PPDSparseRun(data, work, p, 0, plan, ledger).loop(), ledger))
        )
        return told

    begin_model(tmp_path / "whole")
    whole = run(tmp_path / "whole", Notes())
    begin_model(tmp_path / "cut")
    ledger = CutLedger()
    ledger.left = left
    with pytest.raises(CutError):
        run(tmp_path / "cut", ledger)
    assert run(tmp_path / "cut", ledger) == whole
    for unit in (tmp_path / "whole" / "units").iterdir():
        again = tmp_path / "cut" / "units" / unit.name
        if unit.is_file():
            assert unit.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("left", [UNCUT, 6, 7, 9])
def test_rounds_after_it_say_what_kernels_they_need_also_when_resumed(
    data: xs.Dataset, tmp_path: Path, left: int
) -> None:
    p, plan = PPDSparseParameters(all_rows=True, C=8.0, max_rounds=3, last_epochs=1), MemoryPlan(2**33, 2**30, 1)
    begin_model(tmp_path / "m")
    ledger, kernels = CutLedger(), PPDSparseWarmUp()
    ledger.left = left

    def loads_of_phases() -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def watched(loop: Loop) -> Loop:
            receipts: Any = None
            while True:
                try:
                    phase = loop.send(receipts)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                seen[phase.name] = phase.loads
                receipts = yield phase

        run_here(watched(PPDSparseRun(data, tmp_path / "m", p, 0, plan, ledger, kernels=kernels).loop()), ledger)
        return seen

    if left < UNCUT:
        with pytest.raises(CutError):
            loads_of_phases()
    seen = loads_of_phases()
    assert "check" not in seen or list(seen)[-2] == "check"
    later = {name for name in seen if name.startswith(("round 2", "round 3"))}
    assert "round 3: solve" in later
    assert all(seen[name] is kernels for name in later)
    assert all(seen[name] is None for name in ("round 1: solve", "finalise") if name in seen)


@pytest.mark.parametrize("shares", [1, 3])
def test_the_next_search_is_planned_for_the_classes_that_go_on(data: xs.Dataset, tmp_path: Path, shares: int) -> None:
    p = PPDSparseParameters(all_rows=True, max_rounds=None, epochs=1, tol=0.2, C=1.0, positive_weight=1.0)
    begin_model(tmp_path / "m")
    notes, plan = Notes(), MemoryPlan(2**33, 2**30, 1, cuts=Cuts(shares=shares))
    loop = PPDSparseRun(data, tmp_path / "m", p, 0, plan, notes).loop()
    phase = next(loop)
    while "search" not in phase.name:
        for job in phase.jobs:
            notes.add(job.key, job.run())
        phase = loop.send([notes[job.key] for job in phase.jobs])
    (job,) = phase.jobs
    assert isinstance(job, SearchJob)
    state = UnitState(tmp_path / "m/state/solve-0/0", data.n_labels, data.n_samples, data.n_features)
    open_ = state.statistics[:, STATUS] == OPEN
    assert 0 < open_.sum() < data.n_labels - 5
    counts = np.zeros(data.n_features, np.int64)
    for label in np.flatnonzero(open_).tolist():
        counts[state.weights.block(label, label + 1).indices] += 1
    (span,) = job.spans
    assert span.tile_bytes == tile_bytes(counts, int(open_.sum()), data.n_features)


def test_others_begin_from_such_a_model(data: xs.Dataset, tmp_path: Path) -> None:
    fitted(data, tmp_path / "first")
    change = {"C": 1.5, "fit": {"warm_start": tmp_path / "first"}}
    warm = fitted(data, tmp_path / "warm", all_rows=None, **change)
    assert warm.report_["rounds"] == 1
    assert warm.report_["duality_gap_mean"] < 0.02
    # a warm start has active sets of its own
    assert told(fitted(data, tmp_path / "said", all_rows=True, **change))[1] == told(warm)[1]


def test_settings_are_tried_anew_and_as_well(data: xs.Dataset, tmp_path: Path) -> None:
    grid = {"C": [0.5, 1.0, 2.0]}
    begun, by_rounds = (
        xs.tune(
            data, grid=grid, fixed={"all_rows": said}, out=tmp_path / f"{said}.json", held_out=0.3, memory_limit=LIMIT
        )
        for said in (True, False)
    )
    assert [one["passes"] for one in begun["settings"]] == [1, 1, 1]
    for a, b in zip(begun["settings"], by_rounds["settings"], strict=True):
        assert a["figures"]["P@5"] == pytest.approx(b["figures"]["P@5"], abs=0.5)  # of 100


# ----------------------------------------------------------------------------------------------------------------------
# where it is done


def sized(path: Path, n: int, k: int, share: float, d: int = 500, nnz: int = 5) -> Dataset:
    rng = np.random.default_rng(0)
    X = sp.random(n, d, nnz / d, format="csr", dtype=np.float32, random_state=0)
    return xs.convert(
        X, path, labels=sp.csr_matrix((rng.random((n, k)) < share).astype(np.float32)), memory_limit=LIMIT
    )


def test_it_is_done_where_first_active_sets_are_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = PPDSparseParameters()
    often, rarely = sized(tmp_path / "often.xmc", 3000, 60, 0.01), sized(tmp_path / "rarely.xmc", 3000, 60, 0.001)
    assert takes_all_rows(p, often)
    assert settled(p, often).all_rows is True
    assert not takes_all_rows(p, rarely)  # eleven rows of a thousand
    assert settled(p, rarely).all_rows is False
    assert not takes_all_rows(p, sized(tmp_path / "few.xmc", 1000, 60, 0.01))  # done at once either way
    assert not takes_all_rows(p, sized(tmp_path / "dense.xmc", 3000, 60, 0.01, d=8, nnz=7))
    assert not takes_all_rows(replace(p, max_rounds=None), often)  # float32 does not see as far
    assert not takes_all_rows(replace(p, cut=0.2), often)  # there would be no search to be cut
    assert takes_all_rows(replace(p, all_rows=True), rarely)
    assert not takes_all_rows(replace(p, all_rows=False), often)
    monkeypatch.setattr(problems, "_MOST_BYTES", all_rows_bytes(often) - 1)
    assert not takes_all_rows(p, often)


def test_how_many_rounds_and_epochs_such_runs_have(data: xs.Dataset) -> None:
    p = settled(PPDSparseParameters(all_rows=True), data)
    assert p.common_rounds == 1
    assert [p.epochs_of(round_) for round_ in range(3)] == [8, 6, 6]
    assert replace(p, C=8.0).epochs_of(0) == 2 + 4 * 6
    assert replace(p, max_rounds=None).common_rounds is None
    assert p.warm().all_rows is p.warm(new_labels=True).all_rows is False
    assert p.warm(new_labels=True).common_rounds == 3
    anew = p.carried()  # a trial
    assert (anew.all_rows, anew.max_rounds, anew.common_rounds, anew.epochs_of(0)) == (True, 1, 1, 8)
    assert replace(p, all_rows=False).carried().last_epochs == 10


def test_the_parameter_is_true_false_or_none() -> None:
    assert PPDSparseParameters().to_dict() == PPDSparseParameters(all_rows=None).to_dict()
    assert PPDSparseParameters(all_rows=True).to_dict()["all_rows"] is True
    with pytest.raises(InputError, match=r"'all_rows' parameter of PPDSparse must be true, false or none\."):
        PPDSparseParameters(all_rows=1)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# memory, plans, kernels


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """For all rows and sixteen classes at once it takes 60 MB."""
    rng = np.random.default_rng(0)
    n, d, k = 30_000, 40_000, 48
    X = sp.random(n, d, 60 / d, format="csr", dtype=np.float32, random_state=rng)
    Y = sp.csr_matrix((rng.random((n, k)) < 0.01).astype(np.float32))
    return xs.convert(X, tmp_path_factory.mktemp("wide") / "d.xmc", labels=Y, normalize="l2", memory_limit=LIMIT)


@pytest.mark.parametrize("shape", ["many features", "many rows", "text"])
def test_a_job_holds_what_was_planned(tmp_path: Path, wide: Dataset, shape: str) -> None:
    """Also where all weights, or all rows, are kept."""
    data, change = wide, {}
    if shape != "text":
        rng = np.random.default_rng(1)
        n, d = (3_000, 60_000) if shape == "many features" else (60_000, 300)
        X = sp.random(n, d, 20 / d, format="csr", dtype=np.float32, random_state=rng)
        Y = sp.csr_matrix((rng.random((n, 48)) < 0.02).astype(np.float32))
        data = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="l2", memory_limit=LIMIT)
        change = {"lam": 0.0 if shape == "many features" else 1000.0}
    begin_model(tmp_path / "m")
    p = PPDSparseParameters(C=1.0, positive_weight=1.0, **change)
    assert takes_all_rows(p, data)
    loop = PPDSparseRun(data, tmp_path / "m", p, 0, MemoryPlan(2**33, 2**30, 1), Notes()).loop()
    (job,) = next(loop).jobs
    assert isinstance(job, SolveJob)
    job.run()  # loaded and imported what it needs
    tracemalloc.start()
    job.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all_rows_bytes(data) / 2 < peak <= all_rows_bytes(data) + WRITER_BYTES + 4 * MIB


def test_it_is_planned_for_one_job_at_a_time_where_memory_has_room_for_one(wide: Dataset) -> None:
    p, units = settled(PPDSparseParameters(), wide), cut_units(wide)
    need = all_rows_bytes(wide) + WRITER_BYTES + 4 * MIB

    def planned(budget: int, threads: int) -> tuple[int, int]:
        opened = Dataset(wide.path)  # of one that was asked before the answer is kept
        shares, sizes = solve_plan(opened, MemoryPlan(2**33, budget, threads), p, False, units)
        return len(shares), sizes.beside

    assert planned(2**31, 2) == (2, 2)
    assert planned(2 * need - 1, 2)[1] == 1
    with pytest.raises(MemoryLimitError, match="solving on all rows on 1 threads"):
        planned(need - 1, 1)


@pytest.mark.parametrize("beside", [1, 2])
def test_jobs_that_are_planned_one_at_a_time_wait_for_each_other(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    begin_model(tmp_path / "m")
    p = PPDSparseParameters(all_rows=True)
    plan = MemoryPlan(2**33, 2**30, 2, cuts=Cuts(shares=4))
    jobs = next(PPDSparseRun(data, tmp_path / "m", p, 0, plan, Notes()).loop()).jobs
    under_way, most, lock = 0, 0, threading.Lock()

    class Slow:
        def __init__(self, job: SolveJob) -> None:
            pass

        def run(self) -> dict[str, Any]:
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
            time.sleep(0.05)
            with lock:
                under_way -= 1
            return {}

    monkeypatch.setattr(solve, "_ShareSolve", Slow)
    with ThreadPoolExecutor(2) as pool:
        for job in jobs:
            assert isinstance(job, SolveJob)
            pool.submit(replace(job, sizes=replace(job.sizes, beside=beside)).run)
    assert most == beside


def test_a_search_after_it_takes_the_passes_that_its_plan_says(tmp_path: Path) -> None:
    """Of weights and active sets after all epochs, though the plan does fewer."""
    rng = np.random.default_rng(2)
    n, d, k = 4_000, 12_000, 1_100
    X = sp.random(n, d, 60 / d, format="csr", dtype=np.float32, random_state=rng)
    Y = sp.csr_matrix((rng.random((n, k)) < 0.01).astype(np.float32))
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y, normalize="l2", memory_limit=LIMIT)
    # without a cap on rounds a search is sure to follow
    p = PPDSparseParameters(all_rows=True, C=1.0, positive_weight=1.0, guide=0.0, max_rounds=None, tol=1e-5)
    plan = MemoryPlan(2**33, 90 * MIB, 1)
    foreseen = method_of(p).forecaster(Task(data, p, 0), plan, lambda job: job.run()).forecast(plan)
    begin_model(tmp_path / "m")
    notes = Notes()
    loop = PPDSparseRun(data, tmp_path / "m", p, 0, plan, notes, blocks=tuple(foreseen["class_blocks"])).loop()
    loop.send([job.run() for job in next(loop).jobs])
    cut = notes.get("cut/1")
    assert cut is not None
    assert 1 < cut["class_blocks"] == foreseen["class_blocks"][0]


def test_labels_without_rows_change_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    X = sp.random(3_000, 40, 0.2, format="csr", dtype=np.float32, random_state=rng)
    Y = sp.csr_matrix((rng.random((3_000, 50)) < 0.02).astype(np.float32))
    at = np.sort(rng.permutation(5_000)[:50])
    spread = sp.csr_matrix((Y.data, at[Y.indices], Y.indptr), (3_000, 5_000))
    dense, sparse = (
        xs.PPDSparse(memory_limit=LIMIT).fit(
            xs.convert(X, tmp_path / f"{name}.xmc", labels=labels, normalize="l2", memory_limit=LIMIT),
            model=tmp_path / name,
        )
        for name, labels in (("dense", Y), ("sparse", spread))
    )
    assert dense.report_["rounds"] == sparse.report_["rounds"] == 1
    assert (sparse.model_.to_scipy()[:, at] != dense.model_.to_scipy()).nnz == 0
    assert np.array_equal(sparse.model_.bias()[at], dense.model_.bias())


def test_a_limit_is_kept_and_foreseen(wide: Dataset, tmp_path: Path) -> None:
    options = ["--threads", "2", "--memory-limit", "400MB", "--json"]
    plan = json.loads(run_forked("plan", "train", str(wide.path), "m.model", *options))
    assert plan["passes"] == 2  # one of each job
    assert plan["bytes_streamed"] == 0
    figures = json.loads(run_forked("train", str(wide.path), str(tmp_path / "m.model"), *options))
    assert figures["passes"] == 2
    assert figures["peak_rss"] <= plan["peak_rss"] <= 400_000_000


def test_nothing_is_compiled_after_the_warm_up(wide: Dataset, tmp_path: Path) -> None:
    method_of(PPDSparseParameters()).warm_up(Task(wide, PPDSparseParameters(), 0)).run()
    with nothing_is_compiled(descend_lanes):
        xs.PPDSparse(memory_limit=LIMIT).fit(wide, model=tmp_path / "m")
