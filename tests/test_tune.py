"""Tuning: figures of settings on held-out rows, what settings have from each other, resuming, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nearest_centroid as toy
import pytest
from helpers.forked import forked_command
from helpers.problems import tight
from helpers.soak import first
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.errors import InputError, ResumeError, StoreError
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Step
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.start import path_of

LIMIT: dict[str, Any] = {"memory_limit": "2GB", "threads": 2}
GRID = {"lam": [0.01, 0.1], "C": [0.5, 1.0]}
KEYS = (
    "solver metric fixed seed held_out n_train n_held_out settings best parameters set model seconds peak_rss memory_limit "
    "resumed"
)
OF_A_SETTING = "parameters figures nnz model_bytes seconds passes bytes_streamed bytes_gathered start"


def told(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings without seconds, sizes on disk (of which the log is a part) and bytes read where ranges of rows meet."""
    apart = ("seconds", "model_bytes", "bytes_streamed")
    return [{name: value for name, value in one.items() if name not in apart} for one in report["settings"]]


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learnable set: 1,500 x 400, 60 labels, one of each row."""
    sizes = {"n_samples": 1500, "n_features": 400, "n_labels": 60, "features_per_sample": 30, "labels_per_sample": 1}
    return Path(
        load_tool("make_synthetic").make_synthetic(tmp_path_factory.mktemp("little") / "d.xmc", **sizes, seed=1)
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results of `whole` are kept."""
    return tmp_path_factory.mktemp("whole") / "t.json"


@pytest.fixture(scope="module")
def whole(little: Path, kept: Path) -> dict[str, Any]:
    """A tuning that nobody killed."""
    return xs.tune(little, grid=GRID, out=kept, **LIMIT)


# ---- the order of settings


def test_settings_begin_from_the_nearest_one_whose_weights_need_not_shrink() -> None:
    grid = [PPDSparseParameters(lam=lam, C=C, positive_weight=1) for lam in (0.01, 0.1, 0.03) for C in (1, 2, 4)]
    steps = path_of(grid)
    assert sorted(step.setting for step in steps) == list(range(9))
    assert steps[0] == Step(3)  # the largest lam and the smallest C
    for i, step in enumerate(steps[1:], 1):
        assert step.start is not None
        assert step.start in [before.setting for before in steps[:i]]
        mine, start = grid[step.setting], grid[step.start]
        assert mine.warm_near({"lam": start.lam, "C": start.C}) < 0  # w need not shrink
        assert start.C in (mine.C, mine.C / 2)
        assert (start.lam, mine.lam) in [(0.1, 0.1), (0.1, 0.03), (0.03, 0.01), (0.03, 0.03), (0.01, 0.01)]


def test_settings_that_differ_in_more_than_numbers_begin_by_themselves() -> None:
    one_thing = {"loss": "hinge", "bias": False, "rounds": 2, "added": 10, "max_rounds": None, "positive_weight": 2}
    for other in ({name: value} for name, value in one_thing.items()):
        assert [step.start for step in path_of([PPDSparseParameters(), PPDSparseParameters(**other)])] == [None, None]
    hinges = [PPDSparseParameters(C=C, loss="hinge") for C in (1.0, 2.0)]
    assert [step.start for step in path_of(hinges)] == [None, None]
    pruned = [PPDSparseParameters(prune=0.1), PPDSparseParameters(), PPDSparseParameters(lam=0.0)]
    assert path_of(pruned) == [Step(1), Step(0, 1), Step(2, 1)]


# ---- what is found


def test_a_setting_that_begins_by_itself_has_the_figures_of_its_training(
    little: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    assert set(KEYS.split()) <= set(whole)
    assert all(set(one) == set(OF_A_SETTING.split()) for one in whole["settings"])
    assert [one["parameters"] for one in whole["settings"]] == [
        {"lam": a, "C": b} for a in GRID["lam"] for b in GRID["C"]
    ]
    assert [one["start"] for one in whole["settings"]] == [2, 0, None, 2]
    xs.split(little, tmp_path / "part.xmc", tmp_path / "held.xmc")
    part, held = xs.open_dataset(tmp_path / "part.xmc"), xs.open_dataset(tmp_path / "held.xmc")
    assert (whole["n_train"], whole["n_held_out"]) == (part.n_samples, held.n_samples)
    clf = xs.PPDSparse(lam=0.1, C=0.5, memory_limit="2GB").fit(part, model=tmp_path / "m")
    figures = xs.evaluate(tmp_path / "m", held, part)
    first = whole["settings"][2]
    assert first["figures"] == {name: value for name, value in figures.items() if name != "n_samples"}
    assert (first["nnz"], first["passes"]) == (clf.report_["nnz"], clf.report_["passes"])
    for one in whole["settings"]:
        assert one["passes"] == (1 if one["start"] is not None else clf.report_["passes"])


def test_the_best_is_chosen_by_the_metric_and_kept_results_answer_for_another(
    little: Path, whole: dict[str, Any], kept: Path, tmp_path: Path
) -> None:
    settings = whole["settings"]
    best = max(range(4), key=lambda i: (settings[i]["figures"]["P@1"], -settings[i]["nnz"]))
    assert (whole["best"], whole["parameters"]) == (best, settings[best]["parameters"])
    assert whole["set"].startswith("--solver ppdsparse --set lam=0.")
    out = tmp_path / "t.json"
    assert [path.name for path in kept.parent.iterdir()] == ["t.json"]
    shutil.copy(kept, out)
    for metric, pick in (("hamming_loss", min), ("PSP@3", max), ("macro_F1", max)):
        again = xs.tune(little, grid=GRID, out=out, metric=metric, **LIMIT)
        assert again["resumed"]
        assert again["settings"] == settings
        values = [one["figures"][metric] for one in settings]
        assert values[again["best"]] == pick(values)
    with pytest.raises(ResumeError, match=r"t\.json holds a run with"):
        xs.tune(little, grid={"C": [1.0]}, out=out, **LIMIT)
    with pytest.raises(ResumeError, match="ks"):  # no figure of that k was kept
        xs.tune(little, grid=GRID, out=out, metric="P@2", **LIMIT)
    out.write_text("{}")
    with pytest.raises(InputError, match="is not what `tune` writes"):
        xs.tune(little, grid=GRID, out=out, **LIMIT)


def test_the_final_model_is_that_of_its_own_training(
    little: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    arguments = ("tune", little, "--grid", "C=0.5,1", "--set", "lam=0.1", "--metric", "PSP@3", "--held-out", "0.2")
    report = commands(*arguments, tmp_path / "t.json", "--model", tmp_path / "m", "--memory-limit", "2GB")
    words = report["set"].split()
    commands("train", little, tmp_path / "alone", *words, "--memory-limit", "2GB")
    assert xs.load_model(tmp_path / "m").digest() == xs.load_model(tmp_path / "alone").digest()
    assert report["fixed"] == {"lam": 0.1}
    assert report["model"] == str(tmp_path / "m")
    assert json.loads((tmp_path / "t.json").read_text())["best"] == report["best"]


def test_any_limit_and_number_of_threads_gives_the_same_figures(little: Path, whole: dict[str, Any]) -> None:
    other = xs.tune(little, grid=GRID, memory_limit=tight(), threads=1)
    assert told(other) == told(whole)


def test_any_method_is_tuned_by_its_contract(little: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(toy.CentroidMethod())
    report = xs.tune(little, "centroid", {"shrink": [0.0, 0.5]}, **LIMIT)
    assert [one["start"] for one in report["settings"]] == [None, None]
    assert report["settings"][0]["figures"]["P@1"] > 10
    with pytest.raises(InputError, match="there is nothing to choose"):
        xs.tune(little, "centroid", **LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "grid", "fixed"),
    [
        ("pdsparse", {"lam": [0.01, 1.0]}, {"max_passes": 2}),
        ("leml", {"rank": [5, 20]}, {"alternations": 2}),
        ("memoir", {"gamma": [0.02, 0.08]}, {"steps": 40}),
        ("group-lasso", {"lam": [0.01, 0.001]}, {"loss": "multitask", "max_passes": 5}),
        ("tree", {"C": [0.01, 4.0]}, {"max_leaf": 8}),
    ],
)
def test_the_library_s_other_methods(little: Path, solver: str, grid: dict[str, Any], fixed: dict[str, Any]) -> None:
    report = xs.tune(little, solver, grid, fixed=fixed, **LIMIT)
    assert report["settings"][0]["figures"] != report["settings"][1]["figures"]
    assert report["fixed"] == fixed


def test_default_grids_are_settings_of_their_methods() -> None:
    for name in registry.names():
        grid = registry.declared(name).grids[name]
        for parameter, values in grid.items():
            for value in values:
                registry.parameters(name, {parameter: value})


def test_the_worked_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(xs.__file__).parent.parent / "docs" / "tuning.md").read_text()
    block = next(part for part in re.findall(r"(?:^    .*\n|^\n)+", page, re.MULTILINE) if "import numpy" in part)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block), names)
    report = names["report"]
    assert f"best by P@1: {report['set']}" in page
    assert report["settings"][report["best"]]["figures"]["P@1"] > 60
    assert report["model_report"]["params"]["C"] == report["parameters"]["C"]


# ---- equality and cost, on real data


@pytest.mark.slow
@pytest.mark.parametrize(("all_rows", "Cs"), [(False, [0.5, 1.0, 2.0]), (True, [1.0])])
@pytest.mark.parametrize("name", first(["bibtex", "rcv1_topics"]))
def test_settings_of_a_path_are_as_good_as_trainings_of_their_own(
    real: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str, all_rows: bool, Cs: list[float]
) -> None:
    data, _ = real(name)
    grid, options = {"lam": [0.01, 0.1], "C": Cs}, {"memory_limit": "2GB", "threads": 1}
    report = xs.tune(data, grid=grid, fixed={"all_rows": all_rows}, held_out=0.3, **options)
    xs.split(data, tmp_path / "part.xmc", tmp_path / "held.xmc", fraction=0.3)
    part, held = xs.open_dataset(tmp_path / "part.xmc"), xs.open_dataset(tmp_path / "held.xmc")
    passes = gathered = 0
    for one in report["settings"]:
        clf = xs.PPDSparse(**one["parameters"], all_rows=all_rows, **options).fit(
            part, model=tmp_path / "m", overwrite=True
        )
        figures = xs.evaluate(tmp_path / "m", held, part)
        for key in ("P@1", "P@3", "P@5"):  # trainings of other seeds differ by more
            assert one["figures"][key] == pytest.approx(figures[key], abs=0.8), (one["parameters"], key)
        passes, gathered = passes + clf.report_["passes"], gathered + clf.report_["bytes_gathered"]
    tried = sum(one["passes"] for one in report["settings"])
    assert tried == passes if all_rows else tried < 0.5 * passes  # one each
    assert all_rows or sum(one["bytes_gathered"] for one in report["settings"]) < 0.9 * gathered


# ---- resuming


@pytest.mark.slow
@pytest.mark.parametrize(
    "ready", first(["2.model.partial/ledger.jsonl", "setting/2", "held.xmc/zarr.json", "setting/0"], 2)
)
def test_killed_at_any_point_it_goes_on(
    little: Path, whole: dict[str, Any], tmp_path: Path, commands: Callable[..., Any], ready: str
) -> None:
    out = tmp_path / "t.json"
    work = tmp_path / "t.json.partial"
    arguments = ("tune", little, out, "--grid", "lam=0.01,0.1", "--grid", "C=0.5,1", "--memory-limit", "2GB")

    def reached() -> bool:
        ledger = work / "ledger.jsonl"
        return (work / ready).exists() or (ledger.exists() and f'"{ready}"' in ledger.read_text(errors="replace"))

    with forked_command(*map(str, arguments)) as run:
        run.wait_until(reached)
        assert run.poll() is None
        run.kill()
    assert not out.exists()
    done = (work / "ledger.jsonl").read_text().count('"setting/')
    began = time.time()
    report = commands(*arguments)
    assert told(report) == told(whole)
    assert report["resumed"] == (done > 0)
    assert report["seconds"] <= time.time() - began
    assert not work.exists()


def test_finished_settings_are_not_trained_again(little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xmc_stream.training import trials

    trained: list[str] = []

    def stops(rows: Any, path: Path, *rest: Any, **named: Any) -> Any:
        if len(trained) == 1:
            raise StoreError("the disk is full")
        trained.append(path.name)
        return train(rows, path, *rest, **named)

    train = trials.train
    out = tmp_path / "t.json"
    with monkeypatch.context() as patched:
        patched.setattr(trials, "train", stops)
        with pytest.raises(StoreError):
            xs.tune(little, grid={"C": [1.0, 0.5]}, out=out, **LIMIT)
    assert trained == ["1.model"]
    with monkeypatch.context() as patched:
        patched.setattr(
            trials,
            "train",
            lambda _, path, *rest, **named: (trained.append(path.name), train(_, path, *rest, **named))[1],
        )
        report = xs.tune(little, grid={"C": [1.0, 0.5]}, out=out, **LIMIT)
    assert trained == ["1.model", "0.model"]
    assert report["resumed"]


# ---- what is refused, before any work


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"grid": {"gamma": [1.0]}}, "PPDSparse has no parameter 'gamma'"),
        ({"grid": {"C": [1.0, 0.0]}}, r"The 'C' parameter of PPDSparse must be"),
        ({"grid": {"C": ["one"]}}, r"The 'C' parameter of PPDSparse must be"),
        ({"grid": {"C": []}}, "must be a list of values"),
        ({"grid": {}}, "nothing to choose"),
        ({"fixed": {"C": 1.0}, "grid": {"C": [1.0]}}, "in the grid"),
        ({"solver": "perceptron"}, "there is no method 'perceptron'"),
        ({"metric": "accuracy"}, "there is no metric 'accuracy'"),
        ({"metric": "P@0"}, "there is no metric 'P@0'"),
        ({"metric": "P@2000"}, "asks for more labels"),
        ({"held_out": 0.01}, "15 rows of"),
        ({"held_out": 1.5}, "between 0 and 1"),
        ({"seed": -1}, "'seed'.* must be"),
        ({"solver": "leml", "grid": {"observed": ["given"]}}, "observed"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    little: Path, tmp_path: Path, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        xs.tune(little, **{"grid": GRID, "out": tmp_path / "t.json", **arguments})
    assert not list(tmp_path.iterdir())


def test_the_command_s_own_words_are_checked(little: Path, commands: Callable[..., Any]) -> None:
    assert "write it as name=value,value" in commands("tune", little, "--grid", "lam", fails=True)
    assert "given twice" in commands("tune", little, "--grid", "lam=1", "--grid", "lam=2", fails=True)
