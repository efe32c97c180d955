"""LEML's W step by rows: the equations it solves, the bits of the step by columns, interruptions, workers, plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.clusters import Worker, cluster
from helpers.cuts import CutError
from helpers.forked import Forked

import xmc_stream as xs
from xmc_stream.factors import rowblocks
from xmc_stream.factors.factors import Factor, Panels, new_factors
from xmc_stream.factors.products import Learned
from xmc_stream.factors.rowblocks import LARGE_ROW_BYTES, ROW_BYTES, Holding, lines_of, range_bits
from xmc_stream.lowrank import parameters, plan, ridge
from xmc_stream.lowrank.cplst import CPLSTRun
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.lowrank.plan import LowRankPlan, lowrank_needs, plan_lowrank
from xmc_stream.lowrank.ridge import PartJob, RidgeJob, Ridges, row_parts, solve_ridges
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Ledger, Notes, Phase, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model, finish_model, model_attributes

N, D, K, RANK = 700, 40, 30, 7
PARTS = ((0, 100), (100, 101), (101, 350), (350, N))
CUTS = ((0, 2), (2, 3), (3, RANK))
PRODUCTS = ((0, 3), (3, RANK))  # of jobs by rows
LIMIT = "4GB"  # bounds the whole process of the tests


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows without features, some without labels."""
    rng = np.random.default_rng(0)
    X = sp.random(N, D, 0.1, format="csr", dtype=np.float32, random_state=1)
    scores = np.asarray(X @ rng.normal(size=(D, K)))
    Y = sp.csr_matrix((scores > np.quantile(scores, 0.95, axis=0)).astype(np.float32))
    path = tmp_path_factory.mktemp("rows") / "data.xmc"
    xs.convert(X, path, labels=Y, memory_limit=LIMIT)
    return path


def matrices(path: Path, bias: bool) -> tuple[Any, Any]:
    """X, with a column of ones for the bias, and Y, dense."""
    out = []
    for matrix in (Dataset(path).X_rows(), Dataset(path).Y_rows()):
        block = matrix.block(0, matrix.n_lines)
        values = np.ones(len(block.indices)) if block.data is None else block.data.astype(np.float64)
        out.append(sp.csr_matrix((values, block.indices, block.indptr), shape=matrix.shape).toarray())
    return np.hstack([out[0], np.ones((len(out[0]), 1))]) if bias else out[0], out[1]


def factor(folder: Path, lines: Any) -> Factor:
    with new_factors(folder, {"F": lines.shape[1]}) as writers:
        writers["F"].append(np.ascontiguousarray(lines, np.float32).ravel())
    return Factor(str(folder / "F"), lines.shape[1], len(lines))


@pytest.fixture
def problem(data: Path, tmp_path: Path) -> tuple[Ridges, Any, Any, Any]:
    """Ridge regressions that begin from a W, with rows held out; X and Y of the rows that count, H."""
    rng = np.random.default_rng(2)
    learned = Learned(str(data), 0, 0.2, True)
    H, W = rng.normal(size=(K, RANK)).astype(np.float32), rng.normal(size=(D + 1, RANK)).astype(np.float32)
    h, w = factor(tmp_path / "h", H), factor(tmp_path / "w", W)
    X, Y = matrices(data, True)
    held_out = learned.kept_out(0, N)
    assert held_out is not None
    assert 50 < held_out.sum() < 250
    X[held_out] = 0
    values = tuple(np.linspace(0.5, 2.0, RANK).tolist())
    return Ridges(learned, 0.3, (0, RANK), values, h, w, PARTS), X, Y, (H, W)


def jobs_of(ridges: Ridges, folder: Path, col_ranges: Any = CUTS, cg: int = 200, kept: int = 0) -> list[RidgeJob]:
    ridges = replace(ridges, holding=Holding(str(folder), kept, kept))
    sizes = LowRankPlan(col_ranges, (), (), False, ridges.parts, ())
    return sizes.ridges(ridges, "w/1", LEMLParameters(rank=RANK, cg=cg, cg_tol=1e-7), folder)


def w_of(ridges: Ridges, folder: Path, products: Any, **how: Any) -> Any:
    jobs = jobs_of(ridges, folder, **how)
    receipts = run_here(solve_ridges(jobs, products, Phase("W", ()), Notes(), folder / "scratch"), Notes())
    assert not (folder / "scratch" / "ridges").exists()
    assert len(receipts) == len(jobs)
    return np.hstack([job.found.read(0, D + 1) for job in jobs])


def test_the_w_step_by_rows_solves_the_ridge_regressions(problem: Any, tmp_path: Path) -> None:
    ridges, X, Y, (H, _) = problem
    w = w_of(ridges, tmp_path, PRODUCTS)
    for c, v in enumerate(ridges.values):
        exact = np.linalg.solve(v * X.T @ X + 0.3 * np.eye(D + 1), X.T @ Y @ H[:, c])
        np.testing.assert_allclose(w[:, c], exact, rtol=2e-4, atol=2e-4 * np.abs(exact).max())


@pytest.mark.parametrize("number", [0, 1])
def test_the_sums_of_the_parts_are_the_product(problem: Any, tmp_path: Path, number: int) -> None:
    """The first one is X^T (Y H - X W v) - lam W, the others X^T (X S v) + lam S, all from the rows that count."""
    ridges, X, Y, (H, W) = problem
    S = np.random.default_rng(3).normal(size=W.shape).astype(np.float32)
    source = Panels(str(tmp_path / "s"), D + 1, CUTS)
    for a, b in CUTS:
        source.write((a, b), 0, S[:, a:b])
    total, passes = np.zeros(W.shape), 0.0
    for part in range(len(PARTS)):
        out = Panels(str(tmp_path / f"out-{part}"), D + 1, CUTS)
        for cols in PRODUCTS:
            mine = replace(ridges, cols=cols, values=ridges.values[slice(*cols)])
            passes += PartJob(mine, "w/1", number, part, source if number else None, out).run()["passes"]
        total += out.read(0, D + 1)
    assert passes == pytest.approx(1.0)
    v = np.array(ridges.values)
    want = X.T @ (X @ S * v) + 0.3 * S if number else X.T @ (Y @ H - X @ W * v) - 0.3 * W
    np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("cg", [1, 4, 200])
@pytest.mark.parametrize("from_zero", [True, False])
def test_both_ways_give_the_same_bits(problem: Any, tmp_path: Path, cg: int, from_zero: bool) -> None:
    ridges = problem[0]
    if from_zero:
        ridges = replace(ridges, before=None)
    by_columns = w_of(ridges, tmp_path / "columns", (), col_ranges=((0, RANK),), cg=cg)
    for name, products, how in (
        ("rows", PRODUCTS, {}), ("wide", ((0, RANK),), {"col_ranges": ((0, 4), (4, RANK))}), ("memory", (), {"kept": 2**30}),
    ):  # fmt: skip
        w = w_of(ridges, tmp_path / name, products, cg=cg, **how)
        np.testing.assert_array_equal(w.view(np.int32), by_columns.view(np.int32), err_msg=name)
    whole = w_of(replace(ridges, parts=((0, N),)), tmp_path / "whole", (), cg=cg)
    np.testing.assert_allclose(by_columns, whole, rtol=1e-3, atol=1e-3 * np.abs(whole).max())


@pytest.mark.parametrize("products", [(), PRODUCTS])
def test_ranges_of_features_and_sizes_of_row_blocks_change_no_bit(
    problem: Any, tmp_path: Path, products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ridges = problem[0]
    by_rows = w_of(ridges, tmp_path / "rows", products, cg=4)
    monkeypatch.setattr(rowblocks, "_RANGE_BITS", 3)
    assert range_bits(D) == 3
    for lines, kept in ((64, 0), (701, 0), (64, 2**30)):
        monkeypatch.setattr(rowblocks, "_LINE_BYTES", ROW_BYTES // lines)
        folder = tmp_path / f"{lines}-{kept}"
        w = w_of(ridges, folder, products, cg=4, kept=kept)
        np.testing.assert_array_equal(w.view(np.int32), by_rows.view(np.int32))


def test_places_of_entries_have_room_for_all_rows_of_a_block() -> None:
    assert [range_bits(n) for n in (1, 2**15, 2**15 + 1, 370_000, 2**22, 2**22 + 1, 2**30)] == [
        0,
        0,
        14,
        14,
        15,
        15,
        18,
    ]
    assert range_bits(2**62) + (lines_of(LARGE_ROW_BYTES) - 1).bit_length() <= 32


def digest(path: Path, folder: Path, method: str, change: Callable[[LowRankPlan], LowRankPlan], cuts: list[int]) -> str:
    """Train; the session number i ends after so many phases (`cuts`), the last one when it is done."""
    dataset, work, ledger = Dataset(path), folder / "m.partial", Notes()
    begin_model(work)
    for phases in [*cuts, math.inf]:
        run = of_method(method, dataset, work, ledger)
        run._sizes = change(run._sizes)
        loop = run.loop()
        try:
            result = run_here(stopped(loop, phases), ledger)
        except CutError:
            continue
        p = run.parameters
        finish_model(work, folder / "m", model_attributes(dataset, method, p.to_dict(), 0, result))
    return xs.load_model(folder / "m").digest()


def of_method(method: str, dataset: Dataset, work: Path, ledger: Ledger) -> LEMLRun | CPLSTRun:
    plan = MemoryPlan(2**40, 2**30, 2)
    if method == "leml":
        return LEMLRun(dataset, work, LEMLParameters(rank=RANK, alternations=3, tol=0.0), 0, plan, ledger)
    return CPLSTRun(dataset, work, CPLSTParameters(rank=RANK, oversampling=3, iterations=2, cg=10), 0, plan, ledger)


def stopped(loop: Any, phases: float) -> Any:
    """A loop that raises CutError in the place of its phase of that number."""
    receipts = None
    while True:
        try:
            phase = loop.send(receipts)
        except StopIteration as end:
            return end.value
        if phases == 0:
            raise CutError
        phases -= 1
        receipts = yield phase


@pytest.mark.parametrize("method", ["leml", "cplst"])
def test_a_run_by_rows_gives_the_model_of_one_by_columns_whatever_ends_it(
    method: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "MOST_INPUTS", 0)  # else CPLST takes no steps of conjugate gradients

    def by_columns(sizes: LowRankPlan) -> LowRankPlan:
        return replace(sizes, parts=PARTS, products=(), held=(0, 0))

    def by_rows(sizes: LowRankPlan) -> LowRankPlan:
        rank = sizes.col_ranges[-1][1]
        return replace(sizes, col_ranges=((0, 4), (4, rank)), parts=PARTS, products=((0, rank),))

    whole = digest(data, tmp_path / "columns", method, by_columns, [])
    assert digest(data, tmp_path / "rows", method, by_rows, []) == whole
    assert digest(data, tmp_path / "cut", method, by_rows, [3, 5, 8, 2, 12]) == whole


def test_parts_follow_from_the_data_and_ways_from_the_plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, p = Dataset(data), LEMLParameters(rank=RANK)
    assert row_parts(dataset) == ((0, N),)
    for threads in (1, 2, 5):
        assert plan_lowrank(MemoryPlan(2**40, 2**30, threads), dataset, p).products == ()
    monkeypatch.setattr(ridge, "_LARGE", 1)
    monkeypatch.setattr(ridge, "_PART", 15)  # 2,800 entries of 40 features
    parts = row_parts(dataset)
    assert parts == ((0, 175), (175, 350), (350, 525), (525, N))
    for threads, processes, products in ((1, 1, ()), (2, 1, ((0, 7),)), (1, 4, ((0, 7),)), (6, 1, ((0, 7),))):
        sizes = plan_lowrank(MemoryPlan(2**40, 2**30, threads, processes), dataset, p)
        assert (sizes.parts, sizes.products) == (parts, products)
    wide = LEMLParameters(rank=100)
    for kept, products in ((1, ((0, 64), (64, 100))), (2**40, ((0, 100),))):  # X stays in memory, or is read anew
        with monkeypatch.context() as patch:
            patch.setattr(plan, "held_bytes", lambda _, kept=kept: kept)
            assert plan_lowrank(MemoryPlan(2**40, 2**32, 6), dataset, wide).products == products
    given = LEMLParameters(rank=RANK, loss="logistic")
    assert plan_lowrank(MemoryPlan(2**40, 2**30, 2), dataset, given).products == ()


def test_a_limit_that_holds_no_whole_factor_leaves_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Y = sp.csr_matrix((np.ones(N), (np.arange(N), np.arange(N))), shape=(N, 200_000), dtype=np.float32)
    X = sp.random(N, D, 0.1, format="csr", dtype=np.float32, random_state=1)
    dataset = xs.convert(X, tmp_path / "data.xmc", labels=Y, memory_limit=LIMIT)
    monkeypatch.setattr(plan, "row_parts", lambda _: PARTS)
    p = LEMLParameters(rank=50, lam=1.0)
    by_rows, by_columns = (
        sum(lowrank_needs(MemoryPlan(2**40, 0, 2), dataset, p, 50, wide).values()) for wide in (50, 0)
    )
    assert by_rows > by_columns + 40 * MIB
    for budget, products in ((by_rows, ((0, 50),)), (by_rows - 1, ()), (by_columns, ())):
        sizes = plan_lowrank(MemoryPlan(2**40, budget, 2), dataset, p)
        assert (sizes.col_ranges, sizes.products) == (((0, 50),), products)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in as many parts as there may be, whatever the data."""
    monkeypatch.setattr(ridge, "_LARGE", 1)
    monkeypatch.setattr(ridge, "_PART", 1)


OPTIONS: dict[str, Any] = {"rank": RANK, "cg_tol": 0.0, "tol": 0.0, "alternations": 2, "memory_limit": "2GB"}


def killed(data: str, model: str) -> None:
    """Train with sums in parts, in a process of its own."""
    ridge._LARGE = ridge._PART = 1
    xs.LEML(**OPTIONS, threads=2).fit(data, model=model)


@pytest.mark.slow
@pytest.mark.usefixtures("in_parts")
def test_a_training_by_rows_that_is_killed_goes_on_to_the_same_model(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "killed.partial" / "events.jsonl"
    with Forked(killed, str(data), str(tmp_path / "killed")) as run:
        assert run.wait_until(lambda: log.exists() and '"w/2/5/' in log.read_text()), run.stderr
    assert (tmp_path / "killed.partial" / "scratch" / "ridges").exists()
    assert not (tmp_path / "killed").exists()
    again = xs.LEML(**OPTIONS, threads=2).fit(data, model=tmp_path / "killed")
    whole = xs.LEML(**OPTIONS, threads=1).fit(data, model=tmp_path / "whole")
    assert again.report_["resumed"]
    assert again.model_.digest() == whole.model_.digest()
    assert again.report_["history"] == whole.report_["history"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_parts")
def test_two_workers_share_the_rows_and_give_the_same_model(data: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "cg": 2}
    here = xs.LEML(**options, threads=1).fit(data, model=tmp_path / "here")
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        there = xs.LEML(**options, scheduler=address).fit(data, model=tmp_path / "there")
    assert there.model_.digest() == here.model_.digest()
    jobs = {
        name: [
            event for event in read_events(tmp_path / name / "events.jsonl") if event.get("job", "").startswith("w/")
        ]
        for name in ("here", "there")
    }
    parts = [job for job in jobs["there"] if job["job"].startswith("w/2/1/")]
    assert len([job for job in parts if "step" not in job["job"]]) == len(row_parts(Dataset(data))) == 8
    assert len({job["process"] for job in parts}) == 2
    homes: dict[str, set[str]] = {}
    for job in jobs["there"]:
        if job["job"].count("/") == 3 and "step" not in job["job"]:
            homes.setdefault(job["job"].rpartition("/")[2], set()).add(job["process"])
    assert len(homes) == 8
    assert all(len(processes) == 1 for processes in homes.values())  # where the part stayed in memory
    assert here.report_["passes"] == pytest.approx(there.report_["passes"])
    assert here.report_["history"] == there.report_["history"]
