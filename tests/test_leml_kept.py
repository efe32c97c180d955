"""What LEML and CPLST keep on the way: a run that is stopped again and again comes to its end, and to the same model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.clusters import Worker, cluster
from helpers.cuts import CutError
from helpers.forked import Forked
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.errors import JobError
from xmc_stream.factors.factors import Begun
from xmc_stream.lowrank import parameters, plan, ridge
from xmc_stream.lowrank.cplst import CPLSTRun
from xmc_stream.lowrank.leml import LEMLRun
from xmc_stream.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Loop, Notes, Receipt, run_here
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model, finish_model, model_attributes

LIMIT = "4GB"  # bounds the whole process of the tests


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 rows: three blocks of rows; 300 labels; a mask."""
    rng = np.random.default_rng(0)
    n, d, k = 3000, 60, 300
    X = sp.random(n, d, 0.1, format="csr", dtype=np.float32, random_state=1)
    scores = np.asarray(X @ sp.random(d, k, 0.3, random_state=2).toarray() + 0.05 * rng.random((n, k)))
    Y = scores > np.quantile(scores, 0.99, axis=0)
    path = tmp_path_factory.mktemp("kept") / "data.xmc"
    dataset = xs.convert(X, path, labels=sp.csr_matrix(Y.astype(np.float32)), memory_limit=LIMIT)
    dataset.with_observed(sp.csr_matrix(rng.random((n, k)) < 0.05))
    return path


Params = LEMLParameters | CPLSTParameters
Cut = Callable[[Loop, Notes], Receipt]


def digest(data: Path, folder: Path, p: Params, cut: Cut | None = None, sessions: int = 1, threads: int = 2) -> str:
    """Train in sessions that each end by `cut` but the last, at most so many; the digest."""
    dataset, work, ledger = Dataset(data), folder / "m.partial", Notes()
    begin_model(work)
    of: type[LEMLRun | CPLSTRun] = CPLSTRun if isinstance(p, CPLSTParameters) else LEMLRun
    for _ in range(sessions):
        shutil.rmtree(work / "scratch", ignore_errors=True)
        loop = of(dataset, work, p, 0, MemoryPlan(2**40, 2**30, threads), ledger).loop()  # type: ignore[arg-type]
        try:
            result = (cut or run_here)(loop, ledger)
        except CutError:
            continue
        finish_model(work, folder / "m", model_attributes(dataset, p.solver, p.to_dict(), 0, result))
        shutil.rmtree(work / "state", ignore_errors=True)
        return xs.load_model(folder / "m").digest()
    raise AssertionError(f"it did not end in {sessions} sessions")


VARIANTS: dict[str, Params] = {
    "squared": LEMLParameters(rank=7, alternations=2, tol=0.0, cg_tol=0.0, cg=8),
    "given": LEMLParameters(rank=7, alternations=2, tol=0.0, observed="given"),
    "given-hinge": LEMLParameters(rank=7, alternations=1, observed="given", loss="squared_hinge", newton=2, cg=5),
    "logistic": LEMLParameters(rank=7, alternations=2, loss="logistic", newton=2, cg=5),
    "cplst": CPLSTParameters(rank=7, oversampling=3, iterations=2, cg=10),
    "cplst-direct": CPLSTParameters(rank=7, oversampling=3, iterations=2),
}


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in as many parts as there may be: with two threads by rows, with one by columns."""
    monkeypatch.setattr(ridge, "_LARGE", 1)
    monkeypatch.setattr(ridge, "_PART", 1)


CASES = [*((name, False) for name in VARIANTS), ("squared", True), ("cplst", True)]


@pytest.mark.parametrize("threads", first([2, 1]))
@pytest.mark.parametrize(("name", "parts"), CASES)
def test_a_run_that_is_stopped_again_and_again_ends_in_the_same_model(
    name: str, parts: bool, threads: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session ends when it has kept three times what a job, or a loop, has come to: the next one goes on there."""
    p = VARIANTS[name]
    if name == "cplst":
        monkeypatch.setattr(parameters, "MOST_INPUTS", 0)
    if parts:
        in_parts(monkeypatch)
    whole = digest(data, tmp_path / "whole", p, threads=threads)
    write, left, written = Begun._write, 0, 0

    def few(begun: Begun, state: Any) -> None:
        nonlocal left, written
        write(begun, state)
        left, written = left - 1, written + 1
        if left == 0:
            raise CutError

    def cut(loop: Loop, ledger: Notes) -> Receipt:
        nonlocal left
        left = 3
        return run_here(loop, ledger)

    monkeypatch.setattr(portion, "SECONDS", 0.0)
    monkeypatch.setattr(Begun, "_write", few)
    assert digest(data, tmp_path / "cut", p, cut, 200, threads) == whole
    assert written > 2 or name == "given"  # whose W steps take few products, and whose H steps are solved


def test_small_work_keeps_what_it_kept_before(data: Path, tmp_path: Path) -> None:
    """A line for each range of columns of a W step, and of labels of an H step over pairs, and one for each half-step."""
    for name, keys in (
        ("squared", ["scale", "start", "w/1/0-7", "h/1"]),
        ("logistic", ["scale", "start", "w/1", "labels/1/0-128", "labels/1/128-256", "labels/1/256-300", "h/1"]),
    ):
        lines: list[str] = []

        def listed(loop: Loop, ledger: Notes, lines: list[str] = lines) -> Receipt:
            result = run_here(loop, ledger)
            lines += ledger
            return result

        digest(data, tmp_path / name, VARIANTS[name], listed)
        assert lines[: len(keys)] == keys


COMMON: dict[str, Any] = {"rank": 7, "cg_tol": 0.0, "tol": 0.0, "alternations": 2, "memory_limit": "2GB"}
WAYS: dict[str, dict[str, Any]] = {
    "columns": {**COMMON, "threads": 1},
    "rows": {**COMMON, "threads": 2},
    "logistic": {**COMMON, "threads": 2, "loss": "logistic", "newton": 2, "cg": 5},
}


def killed(data: str, model: str, way: str) -> None:
    """Train, with sums in parts and little lost, in a process of its own."""
    ridge._LARGE = ridge._PART = 1
    portion.SECONDS = 0.0
    xs.LEML(**WAYS[way]).fit(data, model=model)


def number_in(pack: Path) -> int:
    """Steps that were taken when it was written."""
    return int(Begun(pack).read("steps")[0])


def damage(pack: Path) -> None:
    """Flip a bit."""
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.write_bytes(content)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What is fitted in a way, with sums in parts. Made once."""

    @cache
    def fitted(way: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            in_parts(patch)
            return xs.LEML(**WAYS[way]).fit(data, model=tmp_path_factory.mktemp(way) / "whole")

    return fitted


@pytest.fixture(scope="module")
def left(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What one that is killed in its second W step leaves. Made once."""

    @cache
    def work(way: str) -> Path:
        folder = tmp_path_factory.mktemp(way)
        with Forked(killed, str(data), str(folder / "m"), way) as run:
            assert run.wait_until(begun_in(folder / "m.partial", way).exists), run.stderr
        return folder / "m.partial"

    return work


def begun_in(work: Path, way: str) -> Path:
    return work / "state" / "w-2" / ("0-7.kept" if way == "columns" else "all.kept")


@pytest.mark.slow
@pytest.mark.parametrize("way", first(WAYS))
@pytest.mark.parametrize("damaged", [False, True])
def test_a_w_step_that_is_killed_goes_on_from_what_it_kept(
    way: str, damaged: bool, data: Path, undisturbed: Callable[[str], Any], left: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_parts(monkeypatch)
    whole = undisturbed(way)
    work = tmp_path / "m.partial"
    shutil.copytree(left(way), work)
    begun = begun_in(work, way)
    steps = number_in(begun)
    if damaged:
        for pack in (work / "state" / "w-2").iterdir():
            damage(pack)
    again = xs.LEML(**WAYS[way]).fit(data, model=tmp_path / "m")
    assert again.report_["resumed"]
    assert again.model_.digest() == whole.model_.digest()
    assert again.report_["history"] == whole.report_["history"]
    events = list(read_events(tmp_path / "m" / "events.jsonl"))
    last = max(number for number, event in enumerate(events) if event["event"] == "start")
    jobs = [event["job"] for event in events[last:] if event["event"] == "job"]
    assert not any(job.startswith(("w/1", "h/1", "a/1")) for job in jobs)
    if way == "rows":
        assert f"w/2/{steps + 1}/step-0" in jobs
        assert (f"w/2/{steps}/step-0" in jobs) == damaged
    assert any(event["event"] == "again" for event in events[last:]) == damaged


@pytest.mark.slow
@pytest.mark.parametrize("way", first(["rows", "logistic"]))
def test_a_run_that_is_stopped_on_two_workers_goes_on_there(
    way: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    few = {**WAYS[way], "alternations": 1, "cg": 5}
    here = xs.LEML(**few).fit(data, model=tmp_path / "here")
    monkeypatch.setattr(portion, "SECONDS", 0.0)
    monkeypatch.setattr(plan, "_SMALL", 0)  # each product is shared out
    write, calls = Begun._write, 0

    def third(begun: Begun, state: Any) -> None:
        nonlocal calls
        write(begun, state)
        calls += 1
        if calls == 3:
            raise JobError("no more")

    options = {name: value for name, value in few.items() if name != "threads"}
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        with monkeypatch.context() as broken:
            broken.setattr(Begun, "_write", third)
            with pytest.raises(JobError, match="no more"):
                xs.LEML(**options, scheduler=address).fit(data, model=tmp_path / "there")
        there = xs.LEML(**options, scheduler=address).fit(data, model=tmp_path / "there")
    assert there.report_["resumed"]
    assert there.model_.digest() == here.model_.digest()
