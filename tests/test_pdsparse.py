"""PD-Sparse end to end: the optimum, the same model however the work is cut and resumed, limits, what is kept."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cuts import CutError, CutLedger
from helpers.damage import flip
from helpers.forked import forked_command
from helpers.problems import LIMIT, overlapping
from reference import frank_wolfe as twin
from sklearn.base import clone

import xmc_stream as xs
from xmc_stream.datasets.verify import verify
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.kernels.permutation import held_out
from xmc_stream.pdsparse.jobs import SegmentJob
from xmc_stream.pdsparse.kernels.tables import bytes_used
from xmc_stream.pdsparse.memory import Data, PassPlan, TablesOf, plan_pass
from xmc_stream.pdsparse.method import segments_again
from xmc_stream.pdsparse.parameters import PDSparseParameters
from xmc_stream.pdsparse.run import PDSparseRun
from xmc_stream.pdsparse.solver import n_groups
from xmc_stream.pdsparse.state import stored_tables
from xmc_stream.runtime import plan as portion
from xmc_stream.runtime.check import CheckStateJob
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Notes, Receipt, run_here
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model, finish_model, model_attributes
from xmc_stream.training.train import RUN_FORMAT


@pytest.mark.parametrize("single", [False, True])
def test_objective_and_gap_are_those_of_the_weights(single: bool) -> None:
    X, Y = overlapping(single=single)
    clf = xs.PDSparse(lam=0.05, held_out=0.0, tol=1e-9, max_passes=60, memory_limit=LIMIT).fit(X, Y)
    W = clf.model_.to_scipy().toarray().astype(np.float64)
    primal = twin.primal(X.toarray(), Y.toarray() > 0, W, 0.05, 1.0)
    assert clf.report_["objective"] == pytest.approx(primal, rel=1e-5)
    assert -1e-6 <= clf.report_["duality_gap"] < 0.1
    duals = [done["dual"] for done in clf.report_["history"]]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(duals))
    assert duals[-1] == pytest.approx(-primal, rel=3e-2)
    learned = np.asarray(Y.sum(axis=0)).ravel() > 0
    assert np.array_equal(clf.model_.bias(), np.where(learned, 0.0, -np.inf))  # none is never predicted


@pytest.mark.slow
def test_a_refit_learns_from_the_rows_held_out_as_from_the_others() -> None:
    """On a small set it comes as near to the optimum as a run that holds no rows out; what it held out counts in full."""
    X, Y = overlapping(n=400)
    fits = {
        held: xs.PDSparse(lam=0.1, held_out=held, max_passes=25, tol=0.0, memory_limit=LIMIT).fit(X, Y).report_
        for held in (0.0, 0.3)
    }
    assert fits[0.3]["n_held_out"] > 80
    assert fits[0.3]["n_learned"] == fits[0.0]["n_learned"] > 300
    assert fits[0.3]["history"][-1]["dual"] == pytest.approx(fits[0.0]["history"][-1]["dual"], rel=5e-3)
    assert fits[0.3]["duality_gap"] < 0.05


@pytest.mark.parametrize(("n", "d", "k", "parts", "density", "lam"), [
    (300, 8, 4, 1, 0.8, 0.2), (300, 30, 40, 3, 0.3, 3.0), (400, 200, 1100, 1, 0.03, 0.2),
])  # fmt: skip
def test_figures_of_held_out_rows_are_those_of_evaluate(
    n: int, d: int, k: int, parts: int, density: float, lam: float, tmp_path: Path
) -> None:
    """With the same weights on the same rows: labels that score 0 or less are ranked too, ties go to the lower one."""
    rng = np.random.default_rng(k)
    X = sp.random(n, d, density, format="csr", dtype=np.float32, random_state=k)
    scores = X @ sp.random(d, k, 0.2, random_state=1) + 0.05 * rng.random((n, k))
    Y = sp.csr_matrix(np.asarray(scores) >= np.sort(np.asarray(scores), axis=1)[:, [-3]], dtype=np.float32)
    clf = xs.PDSparse(lam=lam, held_out=0.4, refit=False, parts=parts, max_passes=2, memory_limit=LIMIT).fit(X, Y)
    held = np.empty(n, np.bool_)
    held_out(np.arange(n), 0, 0.4, held)
    held &= (Y.sum(axis=1).A1 > 0) & (k > Y.sum(axis=1).A1)
    assert clf.report_["n_held_out"] == held.sum()
    rows = xs.convert(X[held], tmp_path / "held.xmc", labels=Y[held])
    ks = [at for at in (1, 3, 5) if at <= k]
    figures = xs.evaluate(clf.model_.path, rows, ks=ks)
    for at in ks:
        assert clf.report_[f"held_out_P@{at}"] == pytest.approx(figures[f"P@{at}"], abs=1e-4)
    scored = (X[held] @ clf.model_.to_scipy()).toarray()
    assert ((scored > 0).sum(axis=1) < max(ks)).any()  # else the test says nothing


N = 33_000


@pytest.fixture(scope="module")
def several_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups of rows; 30 labels, some rows without any."""
    rng = np.random.default_rng(0)
    n, d, k = N, 60, 30
    X = sp.random(n, d, 0.1, format="csr", dtype=np.float32, random_state=1)
    scores = X @ sp.random(d, k, 0.3, random_state=2) + 0.05 * rng.random((n, k))
    Y = np.asarray(scores) > np.quantile(np.asarray(scores), 0.96, axis=0)
    path = tmp_path_factory.mktemp("pdsparse") / "data.xmc"
    xs.convert(X, path, labels=sp.csr_matrix(Y.astype(np.float32)), memory_limit=LIMIT)
    assert n_groups(n, X.nnz) == 3
    return path


PARAMETERS = PDSparseParameters(lam=0.3, max_passes=3, post_solve=True)


def digest(data: Path, folder: Path, budgets: list[int], parameters: PDSparseParameters = PARAMETERS) -> str:
    """Train, with a budget until the first cut (after each job in turn but the last), then the next; the model's digest."""
    dataset, work = Dataset(data), folder / "model.partial"
    begin_model(work)
    ledger = CutLedger()
    for number, budget in enumerate(budgets):
        ledger.left = 2 if number + 1 < len(budgets) else 0
        try:
            run = PDSparseRun(dataset, work, parameters, 0, MemoryPlan(2**40, budget, 1), ledger)
            result = run_here(run.loop(), ledger)
        except CutError:
            continue
        finish_model(work, folder / "model", model_attributes(dataset, "pdsparse", parameters.to_dict(), 0, result))
        return xs.load_model(folder / "model").digest()
    raise AssertionError("it was cut before the end")


WIDE = 2**30


@pytest.fixture(scope="module")
def at_once(several_groups: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a training that is not cut, with much memory."""
    return digest(several_groups, tmp_path_factory.mktemp("whole"), [WIDE])


@pytest.mark.slow
def test_the_model_is_the_same_for_any_limit_and_any_interruption(
    several_groups: Path, at_once: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, kinds = 80 * MIB, []

    def planned(plan: MemoryPlan, *about: Any) -> PassPlan:
        there = replace(plan_pass(plan, *about), dense=plan.budget > narrow, tables=32 * MIB)
        kinds.append(there.dense)
        return there

    assert plan_pass(MemoryPlan(2**40, WIDE, 1), Dataset(several_groups), PARAMETERS).dense
    monkeypatch.setattr("xmc_stream.pdsparse.run.plan_pass", planned)
    # passes, looks and the objective in pieces of a group, cut after every second one, with tables where there were vectors
    monkeypatch.setattr(portion, "SECONDS", 0.0)
    assert digest(several_groups, tmp_path / "cut", [narrow, WIDE] * 40) == at_once
    assert len(kinds) > 8
    assert {*kinds} == {True, False}


@pytest.mark.slow
def test_tables_and_short_stretches_give_the_same_model(
    several_groups: Path, at_once: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmc_stream.pdsparse.run.plan_pass", lambda *_: PassPlan(700, 32 * MIB, 32 * MIB))
    assert digest(several_groups, tmp_path / "tables", [WIDE]) == at_once


def test_full_tables_are_packed_before_they_are_too_full(
    several_groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack = SegmentJob._pack
    monkeypatch.setattr(SegmentJob, "_pack", lambda *of: packed.append(1) or pack(*of))

    def segment(tables: int) -> tuple[int, list[Any]]:
        """Bytes that its tables take, those of regions left too, and its v."""
        monkeypatch.setattr(portion, "SECONDS", 0.0)  # a group
        folder = tmp_path / str(tables)
        dataset = Dataset(several_groups)
        data = Data(str(several_groups), str(folder), PARAMETERS, 0, PassPlan(100_000, 32 * MIB, tables))
        job = SegmentJob(data, 0, 0, 0, 3, 2, (), TablesOf("", 0.3, 1))
        job.run()
        stored = [
            sorted(zip(labels.tolist(), values.tolist(), strict=True))
            for _, _, labels, values in stored_tables(job.folder("tables"), dataset.n_features, dataset.n_labels, 1)
        ]
        assert [path.name for path in (folder / "state").glob("packed*/*")] == []
        return bytes_used(data.held.stepper.tables), stored

    used, stored = segment(32 * MIB)
    assert not packed
    assert segment(used - 1000)[1] == stored
    assert packed


def test_rows_that_cannot_be_learned_from_are_counted_and_histories_tell(several_groups: Path, tmp_path: Path) -> None:
    clf = xs.PDSparse(lam=(0.3, 30.0), max_passes=4, memory_limit=LIMIT).fit(several_groups, model=tmp_path / "m")
    r = clf.report_
    n_labels = np.diff(Dataset(several_groups).Y_rows().indptr.read(0, N + 1))
    skipped = int((n_labels == 0).sum())
    assert 0 < skipped == r["n_skipped"]
    assert r["n_learned"] == N - skipped  # by the pass over all rows
    assert r["n_held_out"] == pytest.approx(0.1 * (N - skipped), rel=0.1)
    assert r["lam"] == 0.3
    stages = [done["stage"] for done in r["history"]]
    assert stages[-1] == "all rows, pass"
    assert {"lam 0.3, pass", "lam 30, pass"} <= set(stages)
    first = next(done["nnz"] for done in r["history"] if done["lam"] == 0.3)
    assert first > next(done["nnz"] for done in r["history"] if done["lam"] == 30.0)
    assert not list(tmp_path.glob("m/state*"))


@pytest.mark.slow
def test_a_post_solve_keeps_the_support(several_groups: Path, tmp_path: Path) -> None:
    plain, again = (
        xs.PDSparse(lam=0.3, max_passes=2, post_solve=post, memory_limit=LIMIT).fit(several_groups, model=tmp_path / str(post))
        for post in (False, True)
    )  # fmt: skip
    before, after = plain.model_.to_scipy().toarray(), again.model_.to_scipy().toarray()
    assert not ((after != 0) & (before == 0)).any()
    assert np.abs(after).sum() > np.abs(before).sum()  # nothing pulls towards 0 any more
    post = [done for done in again.report_["history"] if done["stage"].startswith("post")]
    assert all(b["dual"] <= a["dual"] + 1e-6 for a, b in itertools.pairwise(post))


@pytest.mark.slow
def test_approximate_searches_come_to_the_same_objective() -> None:
    X, Y = overlapping(n=60, d=12, k=8, seed=5)
    clf = xs.PDSparse(lam=0.05, held_out=0.0, tol=0.0, max_passes=30, memory_limit=LIMIT)
    exact = clf.fit(X, Y).report_["objective"]
    for options in ({"parts": 3}, {"rate": 3}, {"parts": 2, "rate": 0}):
        found = clone(clf).set_params(**options).fit(X, Y).report_
        assert found["objective"] == pytest.approx(exact, rel=5e-2), options
        assert found["duality_gap"] < 0.1, options


def test_tables_that_outgrow_the_limit_name_lam_and_C(several_groups: Path, tmp_path: Path) -> None:
    data = Data(str(several_groups), str(tmp_path), PARAMETERS, 0, PassPlan(100_000, 32 * MIB, 10_000))
    with pytest.raises(MemoryLimitError, match=r"in pass 1.*larger lam.*smaller C"):
        SegmentJob(data, 0, 0, 0, 3, 2, (), TablesOf("", 0.3, 1)).run()
    data = Data(str(several_groups), str(tmp_path), PARAMETERS, 0, PassPlan(100_000, 10_000, 32 * MIB))
    with pytest.raises(MemoryLimitError, match="active labels, whose dual variables take"):
        SegmentJob(data, 0, 0, 0, 3, 2, (), TablesOf("", 0.3, 1)).run()
    with pytest.raises(MemoryLimitError, match="PD-Sparse needs"):
        PDSparseRun(Dataset(several_groups), tmp_path, PARAMETERS, 0, MemoryPlan(2**24, 2**24, 1), Notes())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lam": -1}, "'lam' parameter of PDSparse must be a float in"),
        ({"lam": ()}, "or several. Got \\(\\)"),
        ({"lam": (0.1, 1.0), "held_out": 0}, "compared on held-out rows"),
        ({"C": 0}, "'C' parameter"),
        ({"held_out": 0.9}, r"\[0, 0.5\]"),
        ({"parts": 0}, "'parts' parameter"),
        ({"rate": -1}, "'rate' parameter"),
        ({"post_solve": 1}, "true or false"),
        ({"lamda": 1}, "has no parameter 'lamda'"),
    ],
)
def test_parameters_are_checked(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PDSparseParameters.of(values)


def test_the_rate_is_the_papers() -> None:
    p = PDSparseParameters(rate=0)
    assert p.rate_for(1000, 100, 50, 50_000) == min(-(-5 * 1000 * 100 // int(50_000 * np.log(100))), 200)
    assert p.rate_for(10, 100, 50, 50_000) == 1
    assert PDSparseParameters(rate=7).rate_for(10, 10, 10, 10) == 7


def kill_in(data: Path, model: Path, ready: str, options: Sequence[str]) -> Path:
    """Train in a child process and kill it when its part of the ledger has `ready`; returns the run's folder."""
    work = model.with_name(model.name + ".partial")
    ledger = work / "ledger.jsonl"
    before = ledger.stat().st_size if ledger.exists() else 0
    with forked_command("train", data, model, *options) as run:
        run.wait_until(lambda: ledger.exists() and ready in ledger.read_text()[before:])
    assert not model.exists()
    assert ready in ledger.read_text()[before:]
    return work


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_model(
    several_groups: Path, tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any]
) -> None:
    options = ["--solver", "pdsparse", "--set", "lam=0.3", "--set", "max_passes=3", "--memory-limit", "600MB", "--json"]
    whole = cli("train", several_groups, tmp_path / "whole", *options)
    kill_in(several_groups, tmp_path / "killed", "pass/0/0", options)
    options[options.index("600MB")] = "1GB"
    resumed = commands("train", several_groups, tmp_path / "killed", *options)
    assert resumed["resumed"]
    assert not whole["resumed"]
    assert xs.load_model(tmp_path / "killed").digest() == xs.load_model(tmp_path / "whole").digest()
    assert whole["peak_rss"] < 600e6
    figures = commands("plan", "train", several_groups, "x", *options)
    assert figures["fits"]
    assert figures["peak_rss"] <= 10**9


TWO = {"lam": (0.3, 0.1), "max_passes": 3, "post_solve": True}
SETTINGS = [word for name, value in TWO.items() for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def two(several_groups: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """With two lam and a post-solve: the digest of the model, and the folder of a run that was killed in the second lam."""
    folder = tmp_path_factory.mktemp("two")
    whole = xs.PDSparse(**TWO, memory_limit=LIMIT).fit(several_groups, model=folder / "whole").model_.digest()
    command = ["--solver", "pdsparse", "--memory-limit", "1GB", *SETTINGS]
    return whole, kill_in(several_groups, folder / "m", "pass/1/2/", command)


@pytest.mark.slow
def test_damage_of_any_file_that_a_leg_left_is_found(two: tuple[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for kind, arrays in (
        ("dual", {"active/data", "active/indices", "active/indptr", "strips"}), ("tables", {"counts", "labels", "values"}),
    ):  # fmt: skip
        left = sorted(folder for folder in two[1].glob(f"state/{kind}-*-*/*") if not folder.suffix)[0]
        folder = tmp_path / left.parent.name / left.name
        shutil.copytree(left, folder)
        assert CheckStateJob(str(folder), sealed=True).run()["damage"] == ""
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        assert {str(file.relative_to(folder).parent) for file in files} >= {f"{array}/c" for array in arrays} | set(
            arrays
        )
        for file in files:
            content = file.read_bytes()
            for at in rng.integers(len(content), size=8):
                flip(file, at)
                assert str(folder) in CheckStateJob(str(folder), sealed=True).run()["damage"], (file, at)
                file.write_bytes(content)
            os.truncate(file, len(content) - 1)
            assert str(folder) in CheckStateJob(str(folder), sealed=True).run()["damage"], file
            file.unlink()
            assert str(folder) in CheckStateJob(str(folder), sealed=True).run()["damage"], file
            file.write_bytes(content)


@pytest.mark.slow
def test_damaged_passes_are_made_again(
    two: tuple[str, Path], several_groups: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, killed = two
    kinds = sorted(folder.name for folder in killed.glob("state/*-*-*") if not folder.suffix)
    tried = {
        "dual-0-2",
        "tables-0-2",
        "tables-1-1",
        "dual-1-2",
    }  # of either lam; of the pass that was cut, and before it
    assert tried <= {*kinds}
    for kind in sorted(tried):
        work = tmp_path / f"{kind}.partial"
        shutil.copytree(killed, work)
        chunks = sorted((work / "state" / kind).glob("*/*/**/c/0" if kind.startswith("dual") else "*/*/c/0"))
        chunk = [path for path in chunks if path.stat().st_size > 1][-1]  # where a pass was cut, an array may be empty
        flip(chunk, 1)
        before = len(list(read_events(work / "events.jsonl")))
        with caplog.at_level(logging.INFO, logger="xmc_stream"):
            clf = xs.PDSparse(**TWO, memory_limit=LIMIT).fit(several_groups, model=tmp_path / kind)
        assert clf.model_.digest() == whole, kind
        events = list(read_events(tmp_path / kind / "events.jsonl"))[before:]
        [again] = [event["job"] for event in events if event["event"] == "again"]
        damaged, to = (tuple(map(int, name.split(by)[1:])) for name, by in ((kind, "-"), (again, "/")))
        assert to[0] == damaged[0]
        assert to[1] <= damaged[1]
        assert f"note: {chunk} fails its checksum: {again} and what came from it is made again" in caplog.text
        caplog.clear()
        first = next(event["job"] for event in events if event["job"].startswith("pass/") and event["event"] == "job")
        assert first == f"{again}/0"
        assert verify(tmp_path / kind)["sound"]


class CutAtWeights(Ledger):
    """Ends the run when the weights are written by class."""

    def add(self, key: str, receipt: Receipt) -> None:
        super().add(key, receipt)
        if key == "weights":
            raise CutError


@pytest.mark.parametrize("damaged", [("weights",), ("weights", "tables-2-0"), ("dual-2-0",)])
def test_damaged_weights_are_made_again_from_tables_that_are_made_again(
    several_groups: Path, tmp_path: Path, damaged: tuple[str, ...]
) -> None:
    dataset, parameters = Dataset(several_groups), PDSparseParameters(lam=0.3, max_passes=2)
    clf = xs.PDSparse(lam=0.3, max_passes=2, memory_limit=LIMIT)
    whole = clf.fit(several_groups, model=tmp_path / "whole").model_.digest()
    work = tmp_path / "m.partial"
    begin_model(work)
    identity = {**xs.load_model(tmp_path / "whole").attributes["identity"], "format": RUN_FORMAT}
    with CutAtWeights(work / "ledger.jsonl", identity) as ledger, pytest.raises(CutError):
        run_here(PDSparseRun(dataset, work, parameters, 0, MemoryPlan(2**40, 2**30, 1), ledger).loop(), ledger)
    for kind in damaged:
        flip(sorted((work / "state" / kind).glob("*/**/c/0"))[0])
    assert clf.fit(several_groups, model=tmp_path / "m").model_.digest() == whole
    events = list(read_events(tmp_path / "m" / "events.jsonl"))
    again = [event["job"] for event in events if event["event"] == "again"]
    assert again == ["weights" if kind == "weights" else "pass/2/0" for kind in damaged]
    # the losses, and the weights where they are whole, were taken from what is made again to the same bits
    jobs = {event["job"].partition("/")[0] for event in events if event["event"] == "job"} - {"check"}
    expected = {"finalise"} | ({"weights"} & set(damaged)) | ({"pass"} if "pass/2/0" in again else set())
    assert jobs == expected


def test_where_it_goes_back_to(tmp_path: Path) -> None:
    """Behind the last pass whose files are all there, of the stage of the first damage."""
    for kind in ("dual-0-2/0", "dual-0-2/1", "tables-0-2/1", "dual-1-0/0", "tables-1-0/0", "dual-1-2/0", "tables-1-2/0",
                 "dual-1-3/0"):  # fmt: skip
        name, first = kind.split("/")
        (tmp_path / "state" / name / f"{int(first):06d}").mkdir(parents=True)
    keys = ["identity", "check/X/0", "pass/0/0/0", "pass/0/1/0", "pass/0/2/0", "pass/0/2/1", "pass/1/0/0", "pass/1/1/0",
            "pass/1/2/0", "pass/1/3/0"]  # fmt: skip

    def back(*damaged: tuple[int, int]) -> tuple[tuple[int, int], list[str], list[str]]:
        to, segments, folders = segments_again(tmp_path, damaged, keys)
        return to, segments, sorted(folder.name for folder in folders)

    assert back((1, 3)) == ((1, 3), ["pass/1/3/0"], ["dual-1-3"])
    later = ["dual-1-2", "dual-1-3", "tables-1-2"]
    assert back((1, 2)) == ((1, 1), ["pass/1/1/0", "pass/1/2/0", "pass/1/3/0"], later)
    assert back((1, 3), (1, 2)) == back((1, 2))
    assert back((1, 0)) == ((1, 0), keys[6:], sorted([*later, "dual-1-0", "tables-1-0"]))
    everything = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert back((1, 3), (0, 2)) == ((0, 0), keys[2:], everything)
    shutil.rmtree(tmp_path / "state" / "tables-1-2")
    assert back((1, 3)) == ((1, 1), keys[7:], ["dual-1-2", "dual-1-3"])


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_makes_passes_again_goes_on(
    two: tuple[str, Path], several_groups: Path, tmp_path: Path
) -> None:
    whole, killed = two
    work = tmp_path / "m.partial"
    shutil.copytree(killed, work)
    flip(sorted(work.glob("state/tables-0-*/*/values/c/0"))[0], 1)
    kill_in(several_groups, tmp_path / "m", '"pass/0/1/', ["--solver", "pdsparse", "--memory-limit", "1GB", *SETTINGS])
    assert '"pass/0/0/0","receipt":null' in (work / "ledger.jsonl").read_text()
    assert xs.PDSparse(**TWO, memory_limit=LIMIT).fit(several_groups, model=tmp_path / "m").model_.digest() == whole


@pytest.mark.slow
def test_half_of_a_folder_that_was_being_removed_is_passed_over(
    two: tuple[str, Path], several_groups: Path, tmp_path: Path
) -> None:
    whole, killed = two
    shutil.copytree(killed, tmp_path / "m.partial")
    kind = sorted(tmp_path.glob("m.partial/state/dual-*"))[0]
    half = kind.with_name("dual-0-9.old") / "000000"
    shutil.copytree(kind / "000000", half)
    (half / "strips" / "c" / "0").unlink()
    fitted = xs.PDSparse(**TWO, memory_limit=LIMIT).fit(several_groups, model=tmp_path / "m")
    assert fitted.model_.digest() == whole
    assert "again" not in {event["event"] for event in read_events(tmp_path / "m" / "events.jsonl")}


@pytest.mark.slow
def test_accuracy_on_real_data(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train, test = real("rcv1_multiclass_sub")
    clf = xs.PDSparse(memory_limit=LIMIT).fit(train, model=tmp_path / "m")
    assert xs.evaluate(clf.model_.path, xs.open_dataset(test), ks=(1,))["P@1"] >= 89.2
