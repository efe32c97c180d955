"""Runs of the group lasso: the same model however they are cut, killed and shared out; limits; damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.cuts import CutError, CutLedger
from helpers.damage import flip
from helpers.forked import forked_command
from helpers.problems import tight
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.datasets.info import describe_unfinished
from xmc_stream.errors import JobError, MemoryLimitError
from xmc_stream.grouplasso import descent, firstorder
from xmc_stream.grouplasso.descent import SegmentJob
from xmc_stream.grouplasso.firstorder import StepsJob
from xmc_stream.grouplasso.parameters import GroupLassoParameters
from xmc_stream.grouplasso.plan import DescentPlan, GradientPlan, plan_descent, plan_gradient
from xmc_stream.grouplasso.run import GroupLassoRun
from xmc_stream.runtime.events import read_events
from xmc_stream.runtime.job import Receipt, run_here
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes

LIMIT = "4GB"  # bounds the whole process of the tests
RUN = "xmc_stream.grouplasso.run"


@pytest.fixture(scope="module")
def some_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 rows, 400 features of which one is in every row, 20 labels, one a row."""
    rng = np.random.default_rng(0)
    n, d, k = 1500, 400, 20
    X = sp.random(n, d, 0.05, format="lil", dtype=np.float32, random_state=1)
    X[:, 3] = rng.random((n, 1)) + 0.1
    scores = np.asarray(X @ sp.random(d, k, 0.3, random_state=2).toarray() + 0.02 * rng.random((n, k)))
    Y = sp.csr_matrix((np.arange(k) == scores.argmax(axis=1)[:, None]).astype(np.float32))
    path = tmp_path_factory.mktemp("group-lasso") / "data.xmc"
    xs.convert(sp.csr_matrix(X), path, labels=Y, normalize="l2", memory_limit=LIMIT)
    return path


def digest(data: Path, folder: Path, p: GroupLassoParameters, threads: list[int], budget: int = 2**30) -> str:
    """Train, with as many threads planned for until the first cut (after some jobs), then the next; the digest."""
    dataset, work, ledger = Dataset(data), folder / "model.partial", CutLedger()
    begin_model(work)
    for number, n in enumerate(threads):
        ledger.left = 2 if number + 1 < len(threads) else 0
        shutil.rmtree(work / "scratch", ignore_errors=True)
        run = GroupLassoRun(dataset, work, p, 0, MemoryPlan(2**40, budget, n), ledger)
        try:
            result = run_here(run.loop(), ledger)
        except CutError:
            continue
        assert number >= min(2, len(threads) - 1)  # cut at least twice, where it is to be
        attributes = {**model_attributes(dataset, "group-lasso", p.to_dict(), 0, result), KIND: "row-sparse"}
        finish_model(work, folder / "model", attributes)
        return xs.load_model(folder / "model").digest()
    raise AssertionError("it was cut before the end")


DESCENTS = [
    GroupLassoParameters(lam=(0.01, 0.003), tol=1e-2, max_passes=3, debias=100.0),
    GroupLassoParameters(lam=0.003, loss="logistic", max_passes=8),
    GroupLassoParameters(lam=0.003, loss="multitask", mix=0.3, max_passes=8),
    GroupLassoParameters(lam=0.003, loss="label-ranking", algorithm="bcd-cst", max_passes=8),
]
SIZES = [DescentPlan(700, 0, False), DescentPlan(700, 600, False)]  # beside all in memory


@pytest.mark.parametrize("p", first(DESCENTS, 2), ids=lambda p: f"{p.loss}-{p.algorithm}")
def test_a_descent_is_the_same_in_memory_and_in_files_and_for_any_interruption(
    p: GroupLassoParameters, some_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With columns that are read in pieces, the array in a window, and a segment for part of a sweep."""
    monkeypatch.setattr(descent, "SEGMENT_WORK", 80 * 45_000)
    whole = digest(some_rows, tmp_path / "whole", p, [1])
    assert digest(some_rows, tmp_path / "cut", p, [2, 1] * 40) == whole
    for number, sizes in enumerate(SIZES):
        monkeypatch.setattr(f"{RUN}.plan_descent", lambda *_, sizes=sizes: sizes)
        assert digest(some_rows, tmp_path / str(number), p, [1]) == whole


STEPS = [
    GroupLassoParameters(lam=0.003, algorithm=algorithm, line_search=search, loss=loss, max_passes=12)
    for algorithm, search, loss in (
        ("fista", True, "multiclass"),
        ("fista", False, "logistic"),
        ("sparsa", True, "label-ranking"),
        ("fobos", True, "multitask"),
    )
]


@pytest.mark.parametrize("p", first(STEPS, 2), ids=lambda p: f"{p.loss}-{p.algorithm}")
def test_steps_along_the_gradient_are_the_same_for_any_cut_and_any_interruption(
    p: GroupLassoParameters, some_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one job, or as phases of jobs; the array in memory, or by windows."""
    monkeypatch.setattr(firstorder, "STEPS_WORK", 3 * 32 * 31_000 * 2)
    monkeypatch.setattr("xmc_stream.grouplasso.plan._RUN_BYTES", 1 << 13)  # several runs of rows and features
    whole = digest(some_rows, tmp_path / "whole", p, [1])
    assert digest(some_rows, tmp_path / "cut", p, [3, 1, 2] * 20) == whole
    monkeypatch.setattr("xmc_stream.grouplasso.plan._SMALL", 0)
    assert digest(some_rows, tmp_path / "apart", p, [3]) == whole

    def narrow(plan: MemoryPlan, dataset: Dataset) -> Any:
        rows = tuple((a, min(a + 512, dataset.n_samples)) for a in range(0, dataset.n_samples, 512))
        features = tuple((a, min(a + 64, dataset.n_features)) for a in range(0, dataset.n_features, 64))
        return GradientPlan(1600, 128, 7, rows, features, 3)

    monkeypatch.setattr(f"{RUN}.plan_gradient", narrow)
    assert digest(some_rows, tmp_path / "narrow", p, [2] * 30) == whole


def test_one_thread_and_two_under_two_limits_give_one_model(some_rows: Path, tmp_path: Path) -> None:
    digests = set()
    for number, (limit, threads) in enumerate(((tight(), 1), ("4GB", 2))):
        clf = xs.GroupLasso(lam=0.003, memory_limit=limit, threads=threads).fit(some_rows, model=tmp_path / str(number))
        digests.add(clf.model_.digest())
        assert clf.report_["n_selected"] == len(clf.model_.selected_features())
        assert clf.report_["peak_rss"] < 4e9
    assert len(digests) == 1


@pytest.mark.parametrize("algorithm", ["bcd-ls", "fobos"])
def test_info_tells_how_a_training_went(
    algorithm: str, some_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = xs.GroupLasso(lam=0.003, algorithm=algorithm, max_passes=5, memory_limit=LIMIT).fit(
        some_rows, model=tmp_path / "m"
    )
    main(["info", str(tmp_path / "m")], standalone_mode=False)
    said = capsys.readouterr().out
    for done in fitted.report_["history"]:
        assert f"stage 0: passes {done['passes']:.6g}, objective {done['objective']:.6g}, violation " in said
        assert f"n_selected {done['n_selected']:,}" in said


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", first(["bcd-ls", "fista"]))
def test_a_killed_training_goes_on_to_the_same_model(
    algorithm: str, some_rows: Path, tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any]
) -> None:
    settings = ["lam=[0.02,0.005,0.002]", f"algorithm={algorithm}", "tol=1e-3"]
    options = ["--solver", "group-lasso", *(part for name in settings for part in ("--set", name)), "--json"]
    whole = cli("train", some_rows, tmp_path / "whole", *options, "--memory-limit", "600MB")
    ledger = tmp_path / "killed.partial" / "ledger.jsonl"
    with forked_command("train", some_rows, tmp_path / "killed", *options, "--memory-limit", "600MB") as run:
        assert run.wait_until(lambda: ledger.exists() and '"segment/1/0"' in ledger.read_text())
    assert not (tmp_path / "killed").exists()
    resumed = commands("train", some_rows, tmp_path / "killed", *options, "--memory-limit", "1GB", "--threads", "1")
    assert resumed["resumed"]
    assert not whole["resumed"]
    assert xs.load_model(tmp_path / "killed").digest() == xs.load_model(tmp_path / "whole").digest()
    assert whole["peak_rss"] < 600e6


CUT: dict[str, dict[str, Any]] = {"descent": {}, "fista": {"algorithm": "fista"}, "debias": {"debias": 100.0}}


@pytest.fixture(scope="module")
def cut_runs(
    some_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[xs.GroupLasso, str, Path]]:
    """A setting's estimator, the digest of its model, and the folder of a run that is cut in its last stage. Made once."""

    @cache
    def made(name: str) -> tuple[xs.GroupLasso, str, Path]:
        folder = tmp_path_factory.mktemp(name)
        clf = xs.GroupLasso(lam=(0.02, 0.01, 0.005), memory_limit=LIMIT, max_passes=20, **CUT[name])
        whole = clf.fit(some_rows, model=folder / "whole").model_.digest()
        last = 3 if name == "debias" else 2
        with pytest.MonkeyPatch.context() as broken:
            for kind in (SegmentJob, StepsJob):
                broken.setattr(kind, "run", cut_in(last, str(some_rows), kind.run))
            with pytest.raises(JobError, match="no more"):
                clf.fit(some_rows, model=folder / "m")
        unfinished = describe_unfinished(folder / "m.partial")
        assert unfinished["segment"] == 1
        assert ("debias" if name == "debias" else "lam 0.005") in unfinished["phase"]
        return clf, whole, folder / "m.partial"

    return made


@pytest.mark.parametrize(
    ("name", "damage"), [("descent", "flipped"), ("descent", "gone"), ("fista", "flipped"), ("debias", "flipped")]
)
def test_damage_to_what_a_segment_left_is_made_good(
    name: str, damage: str, cut_runs: Callable[[str], tuple[xs.GroupLasso, str, Path]], some_rows: Path, tmp_path: Path
) -> None:
    """What the stage before the last one left is damaged."""
    clf, whole, begun = cut_runs(name)
    shutil.copytree(begun, tmp_path / "m.partial")
    before = 2 if name == "debias" else 1
    (pack,) = (tmp_path / "m.partial" / "state" / f"stage-{before}").iterdir()
    if damage == "flipped":
        flip(pack, 100)
    else:
        pack.unlink()
    again = clf.fit(some_rows, model=tmp_path / "m")
    assert again.model_.digest() == whole
    events = read_events(tmp_path / "m" / "events.jsonl")
    assert [event["job"] for event in events if event["event"] == "again"] == [f"segment/{before}/0"]


def cut_in(stage: int, path: str, run: Callable[[Any], Receipt]) -> Callable[[Any], Receipt]:
    """A job's run that fails in a stage of a training on one dataset."""

    def cut(job: Any) -> Receipt:
        if job.stage.number == stage and job.data.path == path:
            raise JobError("no more")
        return run(job)

    return cut


def test_a_limit_that_cannot_work_is_refused(some_rows: Path) -> None:
    dataset, p = Dataset(some_rows), GroupLassoParameters()
    with pytest.raises(MemoryLimitError, match="the group lasso needs"):
        plan_descent(MemoryPlan(2**24, 8 * MIB, 1), dataset, p)
    with pytest.raises(MemoryLimitError, match="steps along the gradient on 2 threads needs"):
        plan_gradient(MemoryPlan(2**24, 8 * MIB, 2), dataset)
    tight = plan_descent(MemoryPlan(2**40, 26 * MIB, 1), dataset, p)
    assert plan_descent(MemoryPlan(2**40, 2**30, 1), dataset, p) == DescentPlan(dataset.X_rows().nnz, 0, True)
    assert tight.entries <= dataset.X_rows().nnz


@pytest.mark.slow
def test_an_array_larger_than_the_limit_is_kept_in_a_file(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """N x K: 80,000 x 512 values, 164 MB; the limit leaves less. The objective is that of a run in memory."""
    rng = np.random.default_rng(0)
    n, d, k = 80_000, 300, 500
    indices = rng.integers(0, d // 2, (n, 2)) + np.array([0, d // 2])
    X = sp.csr_matrix((np.full(2 * n, 0.7, np.float32), indices.ravel(), np.arange(0, 2 * n + 1, 2)), shape=(n, d))
    y = (indices[:, 0] * 7 + indices[:, 1]) % k
    Y = sp.csr_matrix((np.ones(n, np.float32), y, np.arange(n + 1)), shape=(n, k))
    xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)
    options = ["--solver", "group-lasso", "--set", "lam=0.05", "--set", "max_passes=1", "--set", "tol=0.5", "--json"]
    narrow = cli("train", tmp_path / "d.xmc", tmp_path / "narrow", *options, "--memory-limit", "300MB")
    assert narrow["peak_rss"] < 300e6
    wide = cli("train", tmp_path / "d.xmc", tmp_path / "wide", *options, "--memory-limit", "2GB")
    assert wide["peak_rss"] > 300e6
    assert narrow["objective"] == wide["objective"]
    assert xs.load_model(tmp_path / "narrow").digest() == xs.load_model(tmp_path / "wide").digest()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["bcd-ls", "fista"])
def test_what_is_foreseen_comes_true(
    algorithm: str, some_rows: Path, tmp_path: Path, cli: Callable[..., Any], commands: Callable[..., Any]
) -> None:
    options = [
        "--solver",
        "group-lasso",
        "--set",
        f"algorithm={algorithm}",
        "--memory-limit",
        "512MB",
        "--threads",
        "1",
    ]
    foreseen = commands("plan", "train", some_rows, tmp_path / "m", *options)
    done = cli("train", some_rows, tmp_path / "m", *options)
    assert done["passes"] <= foreseen["passes"] + 2
    assert done["peak_rss"] <= foreseen["peak_rss"] <= done["peak_rss"] + 56e6  # buffers that so few rows do not fill
