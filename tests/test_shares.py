"""Units that are solved in shares: the same model, statistics and searches, however they are cut, joined and resumed."""

from __future__ import annotations

import shutil
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.damage import flip
from helpers.executed import fit_cut
from helpers.problems import LIMIT, problem, rare_labels
from hypothesis import given, settings
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.errors import MemoryLimitError
from xmc_stream.kernels.instructions import LANES
from xmc_stream.linear.weights import Unit, cut_units
from xmc_stream.ppdsparse import plan as cutting
from xmc_stream.ppdsparse import solver
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.plan import SolvePlan, cut_shares, solve_plan
from xmc_stream.ppdsparse.problem import Share
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.ppdsparse.state import JoinSharesJob
from xmc_stream.runtime import plan as plan_of_runs
from xmc_stream.runtime.events import read_events, summarise_events
from xmc_stream.runtime.ledger import read_ledger
from xmc_stream.runtime.plan import Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset

FIGURES = (
    "bytes_streamed",
    "objective",
    "duality_gap",
    "duality_gap_mean",
    "violation",
    "n_open",
    "n_empty",
    "rounds",
    "nnz",
    "passes",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> xs.Dataset:
    """Classes of few rows, which go on beyond the third round, among them such without rows and one of every row."""
    X, Y = rare_labels()
    return xs.convert(X, tmp_path_factory.mktemp("shares") / "d.xmc", labels=Y, normalize="l2")


def fitted(data: Any, model: Path, shares: int, **change: Any) -> tuple[str, list[Any]]:
    """Digest and figures; shares: that all units are solved in together."""
    options = {"C": 4.0, "threads": 2, "memory_limit": LIMIT, **change}
    start = options.pop("warm_start", None)
    clf = fit_cut(xs.PPDSparse(**options), data, model, Cuts(shares=shares), start)
    told = [*FIGURES, *(name for name in ("search_work", "search_work_exact") if name in clf.report_)]
    return clf.model_.digest(), [clf.report_[name] for name in told]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"loss": "hinge", "max_rounds": None},
        {"cut": 0.3, "delta": 2.0, "min_value": 0.05, "rounds": 4},
        {"class_weight": "balanced", "max_rounds": 3},
    ],
    ids=["default", "no cap", "approximate", "weights"],
)
def test_shares_change_nothing(data: xs.Dataset, tmp_path: Path, change: dict[str, Any]) -> None:
    whole = fitted(data, tmp_path / "whole", 1, **change)
    for shares in (3, 40):
        assert fitted(data, tmp_path / f"{shares}", shares, **change) == whole
    keys = list(read_ledger(tmp_path / "40" / "ledger.jsonl")[0])
    assert sum(key.startswith("solve/0/0.") for key in keys) > 20
    assert "solve/0/0" in keys


def test_a_warm_start_is_solved_in_shares(data: xs.Dataset, tmp_path: Path) -> None:
    fitted(data, tmp_path / "first", 1)
    start = {"warm_start": tmp_path / "first", "C": 2.0}
    assert fitted(data, tmp_path / "shares", 4, **start) == fitted(data, tmp_path / "whole", 1, **start)


def test_large_classes_are_solved_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share streams X by itself."""
    monkeypatch.setattr(solver, "LARGE_BYTES", 90 * (8 * 16 + solver.ROW_BYTES))
    monkeypatch.setattr(solver, "STRIP_BYTES", 2000)
    X, Y = problem(n=900, d=40, k=6)
    large = xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)

    def digest(name: str, cuts: Cuts) -> str:
        clf = xs.PPDSparse(memory_limit=LIMIT, threads=2, epochs=3, class_weight="propensity")
        fit_cut(clf, large, tmp_path / name, cuts, sample_weight=np.linspace(0, 2, 900))
        assert (clf.report_["solve_passes"] > 0) == (cuts.solve_rows > 0)
        return clf.model_.digest()

    whole = digest("held", Cuts(shares=1))
    assert digest("shares", Cuts(shares=3)) == whole
    assert digest("streamed", Cuts(shares=3, solve_rows=60)) == whole


def test_shares_that_stream_have_a_process_for_themselves(data: xs.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_LEAST", 1)
    monkeypatch.setattr(cutting, "_HELD", 10**9)  # no job holds X
    parameters = PPDSparseParameters(C=1.0, positive_weight=1.0)

    def planned(threads: int, processes: int) -> tuple[int, SolvePlan]:
        plan = MemoryPlan(2**34, 2**33, threads, processes)
        opened = Dataset(data.path)  # of one that was asked before the answer is kept
        shares, sizes = solve_plan(opened, plan, parameters, False, cut_units(opened))
        return len(shares), sizes

    assert planned(4, 1)[0] == 8
    monkeypatch.setattr(solver, "LARGE_BYTES", 9 * (8 * 12 + solver.ROW_BYTES))
    (n_alone, alone), (n_there, there) = planned(4, 1), planned(4, 3)
    assert (n_alone, n_there) == (1, 3)
    assert alone == there  # all threads and all memory of a process
    assert there.room is not None
    assert (there.room.threads, there.beside) == (4, 1)


def test_states_of_shares_that_a_session_left_go(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next session solves whole units."""
    model, states = tmp_path / "m", tmp_path / "m.partial" / "state" / "solve-1"

    def ends(*_: Any) -> Any:
        raise MemoryLimitError("ends here")

    for shares, of, what in ((4, JoinSharesJob, "run"), (1, PPDSparseRun, "_drop_before")):
        with monkeypatch.context() as patch:
            goes_on = getattr(of, what)
            patch.setattr(of, what, lambda *of: (ends if 1 in (of[-1], getattr(of[0], "round", 0)) else goes_on)(*of))  # noqa: B023
            with pytest.raises(MemoryLimitError, match="ends here"):
                fitted(data, model, shares)
        left = sorted(path.name for path in states.iterdir())
        assert left == ["0"] if shares == 1 else len(left) == 4


def test_a_run_that_ends_between_shares_and_joins_goes_on_with_other_shares(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted(data, tmp_path / "whole", 1)
    model, joined = tmp_path / "m", JoinSharesJob.run

    def broken(job: JoinSharesJob) -> Any:
        if job.round == 1:
            raise MemoryLimitError("no room to join")
        return joined(job)

    def of_round(where: Path) -> list[str]:
        return [key for key in read_ledger(where / "ledger.jsonl")[0] if key.startswith("solve/1/0.")]

    monkeypatch.setattr(JoinSharesJob, "run", broken)
    with pytest.raises(MemoryLimitError, match="no room to join"):
        fitted(data, model, 5)
    monkeypatch.setattr(JoinSharesJob, "run", joined)
    done = of_round(tmp_path / "m.partial")
    assert len(done) >= 4
    for after in (5, 3, 1):  # the same shares, others, none
        shutil.copytree(tmp_path / "m.partial", tmp_path / f"{after}.partial")
        assert fitted(data, tmp_path / f"{after}", after) == whole
        again = of_round(tmp_path / f"{after}")
        assert again[: len(done)] == done
        assert (len(again) > len(done)) == (after == 3)


@pytest.mark.parametrize("what", ["unit", "share"])
def test_damaged_states_of_units_and_shares_are_made_again(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    whole, model = fitted(data, tmp_path / "whole", 1), tmp_path / "m"
    goes_on = {"unit": PPDSparseRun._drop_before, "share": JoinSharesJob.run}

    def ends(of: Any, round_: int = -1) -> Any:
        """In round 1, before what it was made from is removed, and before its shares are joined."""
        if (of.round if what == "share" else round_) == 1:
            raise MemoryLimitError("ends here")
        return goes_on["share"](of) if what == "share" else goes_on["unit"](of, round_)

    with monkeypatch.context() as patch:
        patch.setattr(
            JoinSharesJob if what == "share" else PPDSparseRun, "run" if what == "share" else "_drop_before", ends
        )
        with pytest.raises(MemoryLimitError, match="ends here"):
            fitted(data, model, 2)
    states = sorted((tmp_path / "m.partial" / "state" / "solve-1").iterdir())
    assert [path.name for path in states] == (
        ["0"] if what == "unit" else [f"0.{share}" for share in ("0-21", "21-40")]
    )
    flip(states[0])
    assert fitted(data, model, 2) == whole
    events = list(read_events(model / "events.jsonl"))
    begin = max(number for number, event in enumerate(events) if event["event"] == "again")
    assert events[begin]["job"] == f"solve/1/{states[0].name}"
    *later, last = [event["job"] for event in events[begin:] if event.get("job", "").startswith("solve/1/")][1:]
    assert set(later) == ({"solve/1/0.0-21", "solve/1/0.21-40"} if what == "unit" else {"solve/1/0.0-21"})
    assert last == "solve/1/0"


def test_threads_share_the_solves_of_one_unit(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "_LEAST", 1)
    digest, _ = fitted(data, tmp_path / "one", 0, threads=1)
    assert fitted(data, tmp_path / "two", 0, threads=2)[0] == digest
    told = {
        name: {phase["phase"]: phase["jobs"] for phase in summarise_events(tmp_path / name / "events.jsonl")["phases"]}
        for name in ("one", "two")
    }
    assert told["one"]["round 1: solve"] == 1
    assert told["two"]["round 1: solve"] == 4
    assert "round 1: join" not in told["one"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_shares_hold_every_class_once(counts: list[int], threads: int, processes: int, shares: int) -> None:
    n = 320

    class Set:
        """What a cut asks of a dataset."""

        n_samples = n

        def X_rows(self) -> Any:
            return type("X", (), {"nnz": 40 * n})

        def label_counts(self) -> np.ndarray:
            return np.array(counts)

    plan = MemoryPlan(2**30, 2**30, threads, processes, Cuts(shares=shares))
    cut, beside = cut_shares([Unit(0, len(counts))], Set(), plan, PPDSparseParameters())  # type: ignore[arg-type]
    assert [share.first for share in cut] == [0, *(share.last for share in cut[:-1])]
    assert cut[-1].last == len(counts)
    assert beside == threads
    assert all(share.first < share.last for share in cut)
    rows = counts + solver.start_sizes(np.array(counts), n)
    if shares > 1 and rows.sum() >= shares:
        assert len(cut) <= shares
        assert max(rows[share.first : share.last].sum() for share in cut) <= rows.sum() / shares + rows.max()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3), st.booleans(),
    st.integers(10**6, 10**10),
)  # fmt: skip
def test_no_share_takes_longer_than_a_stop_may_lose_unless_it_cannot_be_cut(
    counts: list[int], threads: int, processes: int, all_rows: bool, nnz: int
) -> None:
    n = 320
    dataset = SimpleNamespace(
        n_samples=n, X_rows=lambda: SimpleNamespace(nnz=nnz), label_counts=lambda: np.array(counts)
    )
    plan, p = (
        MemoryPlan(2**45, 2**45, threads, processes),
        PPDSparseParameters(C=1.0, positive_weight=1.0, all_rows=all_rows),
    )
    cut, _ = cut_shares([Unit(0, len(counts))], dataset, plan, p)  # type: ignore[arg-type]
    entries = np.array(counts) + solver.start_sizes(np.array(counts), n) if not all_rows else np.full(len(counts), n)
    entries = entries * (nnz / n) * (np.array(counts) > 0) * (np.array(counts) < n if all_rows else 1)
    most = 10.0 / (threads * processes)
    of_pass = 8 * 6e-10 if all_rows else 6 * 6e-9  # seconds of an entry
    for share in cut:
        mine = entries[share.first : share.last]
        together = LANES if all_rows else 1
        if of_pass * mine.sum() > 1.5 * most and mine.sum() > 1 << 22:
            assert np.count_nonzero(mine) <= together or mine.max() > 0.2 * mine.sum() > 0


@pytest.mark.parametrize("all_rows", [False, True])
def test_long_jobs_are_cut_into_many_and_change_nothing(
    data: xs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_rows: bool
) -> None:
    whole = fitted(data, tmp_path / "whole", 1, threads=1, all_rows=all_rows)
    monkeypatch.setattr(cutting, "_LEAST", 1)
    monkeypatch.setattr(plan_of_runs, "SECONDS", 1e-5)
    digest, figures = fitted(data, tmp_path / "many", 0, threads=1, all_rows=all_rows)
    same = [name not in ("bytes_streamed", "passes") for name in FIGURES]
    assert digest == whole[0]
    assert list(compress(figures, same)) == list(compress(whole[1], same))
    keys = list(read_ledger(tmp_path / "many" / "ledger.jsonl")[0])
    assert sum(key.startswith("solve/0/0.") for key in keys) > (1 if all_rows else 10)
    assert all_rows or sum(key.startswith("search/1/") for key in keys) > 1
    assert "solve/0/0" in keys


def test_where_memory_is_for_one_job_one_does_it_all(data: xs.Dataset) -> None:
    units = cut_units(data)

    def shares(budget: int) -> list[Share]:
        plan = MemoryPlan(2**34, budget, 4, cuts=Cuts(shares=4))
        return solve_plan(data, plan, PPDSparseParameters(), False, units)[0]

    assert len(shares(2**33)) > 1
    assert shares(100 * 2**20) == [Share(*unit, unit) for unit in units]
