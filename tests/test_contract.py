"""A method that the package has never seen: registered, it does all that the others do, and nothing is edited for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nearest_centroid as toy
import numpy as np
import pytest
from helpers.forked import Forked

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Task
from xmc_stream.methods.parameters import Choice, Flag, Number, Parameters, Whole, parameter
from xmc_stream.models import Execution
from xmc_stream.training.plan import plan_training
from xmc_stream.training.train import train

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy method, for a test."""
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(toy.CentroidMethod())


def started(*arguments: Any) -> Forked:
    """A command in a process of its own, which has not seen the method before."""
    return Forked(toy.command, *map(str, arguments))


def said(*arguments: Any) -> str:
    with started(*arguments) as command:
        assert command.wait() == 0, command.stderr
        return command.stdout


def said_wrong(*arguments: Any) -> str:
    with started(*arguments) as command:
        assert command.wait() == 1
        return command.stderr.strip()


def told(*arguments: Any) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return figures


def test_it_trains_predicts_and_evaluates(small: Path, tmp_path: Path) -> None:
    data = xs.open_dataset(small)
    model, report = train(Task(data, toy.CentroidParameters(), 0), tmp_path / "m", Execution("2GB", 2))
    W, bias = toy.centroids(small)
    np.testing.assert_allclose(model.to_scipy().toarray(), W, atol=1e-6)
    np.testing.assert_allclose(model.bias(), bias, atol=1e-5)
    assert report["solver"] == "centroid"
    assert report["bytes_gathered"] == report["bytes_read"] > 0
    labels, _ = model.predict_topk(data, 1)
    assert xs.evaluate(tmp_path / "m", data, ks=(1,))["P@1"] > 30
    assert labels.shape == (data.n_samples, 1)
    assert xs.verify(tmp_path / "m")["sound"]
    assert xs.load_model(tmp_path / "m").digest() == model.digest()
    again, figures = train(Task(data, toy.CentroidParameters(), 0), tmp_path / "m", Execution("2GB", 2))
    assert figures["resumed"]
    assert again.digest() == model.digest()


def test_it_is_killed_and_goes_on_to_the_same_model(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = xs.load_model(told("train", small, tmp_path / "whole", "--solver", "centroid")["model"]).digest()
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    words = ("train", small, tmp_path / "m", "--solver=centroid")
    with monkeypatch.context() as patch:
        patch.setenv(toy.SLOW, "1")
        command = started(*words, "--threads=1", "--memory-limit=600MB")
    with command:
        command.wait_until(lambda: ledger.exists() and "finalise/0" in ledger.read_text(errors="replace"))
        command.kill()
    unfinished = told("info", tmp_path / "m")
    assert (unfinished["kind"], unfinished["solver"], unfinished["sweep"]) == ("unfinished model", "centroid", 1)
    (tmp_path / "m.partial" / "units" / "00000" / "bias" / "c" / "0").write_bytes(b"damaged")
    done = said(*words, "--memory-limit=2GB")
    assert "(resumed)" in done
    assert "weights of centroids" in done
    assert xs.load_model(tmp_path / "m").digest() == whole


def test_commands_know_it(small: Path, tmp_path: Path) -> None:
    page = said("train", "--help")
    assert "--set for centroid, nearest centroid" in page
    assert re.search(r"shrink=0 +Part of a centroid that is taken away\. \[float in \[0, 1\)\]", page)
    assert "half-centroid is centroid with shrink=0.5" in page
    figures = told("train", small, tmp_path / "m", "--solver", "half-centroid", "--memory-limit", "1GB")
    assert (figures["solver"], figures["params"]) == ("centroid", {"shrink": 0.5})
    assert told("plan", "train", small, "m", "--solver", "centroid", "--memory-limit", "1GB")["fits"]
    bad = said_wrong("plan", "train", small, "m", "--solver", "centroid", "--memory-limit", "50MB")
    assert bad.startswith("xmc-stream: train does not fit: ")
    bad = said_wrong("train", small, tmp_path / "n", "--solver", "centroid", "--set", "shrink=1")
    line = "The 'shrink' parameter of Centroid must be a float in [0, 1). Got 1 instead."
    assert bad == f"xmc-stream: {line}"
    bad = said_wrong("train", small, tmp_path / "n", "--solver", "centroids")
    assert (
        "there is no method 'centroids': there are ppdsparse, dismec, pdsparse, leml, cplst, group-lasso, memoir, tree, "
        "parabel, bonsai, xr-linear, centroid, half-centroid" in bad
    )


def test_a_warm_start_is_refused_by_a_method_that_takes_none(small: Path, trained: Path) -> None:
    task = xs.load_model(trained)
    with pytest.raises(InputError, match="centroid takes no warm start"):
        plan_training(xs.open_dataset(small), toy.CentroidParameters(), 0, Execution("2GB"), task)


def test_names_are_taken_once() -> None:
    with pytest.raises(InputError, match="there is a method 'centroid' already"):
        registry.register(toy.CentroidMethod())
    with pytest.raises(InputError, match="there is no method 'nothing': there are ppdsparse, dismec"):
        registry.method("nothing")


def test_a_parameter_is_declared_once() -> None:
    class Made(Parameters):
        solver, label, title = "made", "Made", "of a test"

    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Rich(Made):
        a: float = parameter(1.0, Number("A.", least=0.5, most=2.0, open_most=False))
        b: int | None = parameter(None, Whole("B.", least=2, none=True))
        c: str = parameter("x", Choice("C.", options=("x", "y")))
        d: bool = parameter(True, Flag("D."))
        e: float = parameter(0.0, Number("E.", unsaid=True))

    assert Rich(2).to_dict() == {"a": 2.0, "b": None, "c": "x", "d": True}
    assert Rich(e=1).to_dict()["e"] == 1.0
    wrong = {
        "a": (0.4, 2.1, True, "1", float("nan")),
        "b": (1, 2.0, True),
        "c": ("z", None),
        "d": (1, "true"),
        "e": (-1,),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InputError, match=f"The '{name}' parameter of Made must be"):
                Rich(**{name: value})
    with pytest.raises(InputError, match="Made has no parameter 'f': it has a, b, c, d, e"):
        Rich.of({"f": 1})


METHODS = {"ppdsparse", "pdsparse", "lowrank", "grouplasso", "memoir"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_folder_of_a_method_loads_no_other(name: str) -> None:
    folder = ROOT / "xmc_stream" / name
    modules = [f"xmc_stream.{name}.{file.stem}" for file in folder.glob("[!_]*.py")]
    code = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules}];"
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('xmc_stream.')}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"'(\w+)'", loaded)) & METHODS == {name}


def test_nothing_outside_asks_which_method_or_kind_it_has() -> None:
    asked = re.compile(r"isinstance\((self\.|task\.)?parameters|\.rank\b|isinstance\([^)]*(Linear|LowRank)")
    for file in (ROOT / "xmc_stream").rglob("*.py"):
        inside = file.relative_to(ROOT / "xmc_stream").parts[0] in {"methods", "models", "linear", "factors", *METHODS}
        assert inside or not asked.search(file.read_text()), file


def test_estimators_show_every_parameter() -> None:
    for kind in (xs.PPDSparse, xs.PDSparse, xs.LEML, xs.CPLST, xs.GroupLasso, xs.MEMOIR, xs.LabelTree):
        text = kind.__doc__ or ""
        for name in kind().get_params():
            assert f"\n{name} : " in text, (kind, name)


@pytest.mark.slow
def test_the_example_of_the_docs_runs(small: Path, tmp_path: Path) -> None:
    """The longest piece of code of docs/adding-a-method.md, in a module beside the commands, as the page says."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-method.md").read_text(), re.DOTALL)
    (tmp_path / "nearest_centroid.py").write_text(max(code, key=len))
    program = tmp_path / "with_centroid.py"
    program.write_text("import nearest_centroid\nfrom xmc_stream.cli import main\nmain()\n")

    def example(*words: Any) -> dict[str, Any]:
        command = [sys.executable, str(program), *map(str, words), "--json"]
        report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return report

    foreseen = example("plan", "train", small, tmp_path / "m", "--solver", "centroid", "--memory-limit", "1GB")
    report = example("train", small, tmp_path / "m", "--solver", "centroid", "--memory-limit", "1GB")
    assert foreseen["passes"] == report["passes"]
    W, bias = toy.centroids(small)
    model = xs.load_model(tmp_path / "m")
    np.testing.assert_allclose(model.to_scipy().toarray(), W, atol=1e-6)
    learned = xs.open_dataset(small).label_counts() > 0  # the others are never predicted
    np.testing.assert_allclose(model.bias(), np.where(learned, bias, -np.inf), atol=1e-5)
    assert example("verify", tmp_path / "m")["sound"]
