"""A method that the package has never seen: registered, it does all that the others do, and nothing is edited for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nearest_centroid as toy
import numpy as np
import pytest

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.methods import registry
from xmc_stream.methods.parameters import Choice, Flag, Number, Parameters, Whole, parameter
from xmc_stream.models import Execution
from xmc_stream.planning import plan_training
from xmc_stream.training import train

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy method, for a test."""
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(toy.CentroidMethod())


def run(*arguments: Any, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own that knows the method too."""
    command = [sys.executable, str(ROOT / "tests" / "nearest_centroid.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env={**os.environ, **more})


def told(*arguments: Any) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return figures


def test_it_trains_predicts_and_evaluates(small: Path, tmp_path: Path) -> None:
    data = xs.open_dataset(small)
    model, report = train(data, tmp_path / "m", toy.CentroidParameters(), 0, Execution("2GB", 2))
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
    again, figures = train(data, tmp_path / "m", toy.CentroidParameters(), 0, Execution("2GB", 2))
    assert figures["resumed"]
    assert again.digest() == model.digest()


def test_it_is_killed_and_goes_on_to_the_same_model(small: Path, tmp_path: Path) -> None:
    whole = xs.load_model(told("train", small, tmp_path / "whole", "--solver", "centroid")["model"]).digest()
    ledger = tmp_path / "m.partial" / "ledger.jsonl"
    command = [
        sys.executable,
        ROOT / "tests" / "nearest_centroid.py",
        "train",
        small,
        tmp_path / "m",
        "--solver=centroid",
    ]
    command += ["--threads=1", "--memory-limit=600MB"]
    with subprocess.Popen(
        [*map(str, command)], stderr=subprocess.DEVNULL, env={**os.environ, toy.SLOW: "1"}
    ) as process:
        while process.poll() is None and not (ledger.exists() and "finalise/0" in ledger.read_text(errors="replace")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    unfinished = told("info", tmp_path / "m")
    assert (unfinished["kind"], unfinished["solver"], unfinished["sweep"]) == ("unfinished model", "centroid", 1)
    (tmp_path / "m.partial" / "units" / "00000" / "bias" / "c" / "0").write_bytes(b"damaged")
    done = run("train", small, tmp_path / "m", "--solver=centroid", "--memory-limit=2GB")
    assert "(resumed)" in done.stdout
    assert "weights of centroids" in done.stdout
    assert xs.load_model(tmp_path / "m").digest() == whole


def test_commands_know_it(small: Path, tmp_path: Path) -> None:
    page = run("train", "--help").stdout
    assert "--set for centroid, nearest centroid" in page
    assert re.search(r"shrink=0 +Part of a centroid that is taken away\. \[float in \[0, 1\)\]", page)
    assert "half-centroid is centroid with shrink=0.5" in page
    figures = told("train", small, tmp_path / "m", "--solver", "half-centroid", "--memory-limit", "1GB")
    assert (figures["solver"], figures["params"]) == ("centroid", {"shrink": 0.5})
    assert told("plan", "train", small, "m", "--solver", "centroid", "--memory-limit", "1GB")["fits"]
    assert not told("plan", "train", small, "m", "--solver", "centroid", "--memory-limit", "100MB")["fits"]
    bad = run("train", small, tmp_path / "n", "--solver", "centroid", "--set", "shrink=1", check=False)
    line = "The 'shrink' parameter of Centroid must be a float in [0, 1). Got 1 instead."
    assert (bad.returncode, bad.stderr.strip()) == (1, f"xmc-stream: {line}")
    bad = run("train", small, tmp_path / "n", "--solver", "centroids", check=False)
    assert (
        "'centroids' is not one of ppdsparse, dismec, pdsparse, leml, cplst, group-lasso, centroid, half-centroid"
        in bad.stderr
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


@pytest.mark.parametrize("name", ["ppdsparse", "pdsparse", "lowrank", "grouplasso"])
def test_the_folder_of_a_method_loads_no_other(name: str) -> None:
    folder = ROOT / "xmc_stream" / "methods" / name
    modules = [f"xmc_stream.methods.{name}.{file.stem}" for file in folder.glob("[!_]*.py")]
    code = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules}];"
        "print(sorted({m.split('.')[2] for m in sys.modules if m.startswith('xmc_stream.methods.')}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"'(\w+)'", loaded)) & {"ppdsparse", "pdsparse", "lowrank", "grouplasso"} == {name}


def test_nothing_outside_asks_which_method_or_kind_it_has() -> None:
    asked = re.compile(r"isinstance\((self\.|task\.)?parameters|\.rank\b|isinstance\([^)]*(Linear|LowRank)")
    for file in (ROOT / "xmc_stream").rglob("*.py"):
        inside = file.relative_to(ROOT / "xmc_stream").parts[0] in ("methods", "models")
        assert inside or not asked.search(file.read_text()), file


def test_estimators_show_every_parameter() -> None:
    for kind in (xs.PPDSparse, xs.PDSparse, xs.LEML, xs.CPLST, xs.GroupLasso):
        text = kind.__doc__ or ""
        for name in kind().get_params():
            assert f"\n{name} : " in text, (kind, name)
