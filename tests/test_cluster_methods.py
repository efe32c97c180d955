"""Every method on two processes of dask workers, whose folders are not this one's: what comes out is that of a run here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Worker, cluster
from helpers.methods import TRAINED
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.methods.registry import declared
from xmc_stream.runtime.events import read_events

# small parameters; of some methods several ways that are different work
TRAININGS: list[tuple[str, dict[str, Any]]] = [
    ("ppdsparse", {"max_rounds": 3}),
    ("dismec", {}),
    ("pdsparse", {"max_passes": 2}),
    ("leml", {"rank": 4, "alternations": 2}),
    ("leml", {"rank": 4, "alternations": 1, "loss": "logistic"}),
    ("cplst", {"rank": 4}),
    ("memoir", {"steps": 400}),
    ("memoir", {"steps": 400, "variant": "lsh", "rank": 4}),
    ("group-lasso", {"max_passes": 3, "loss": "multitask"}),
    ("group-lasso", {"max_passes": 3, "loss": "multitask", "algorithm": "fista"}),
    ("tree", {"max_leaf": 8, "root": 2, "branching": 2, "n_trees": 2}),
    ("parabel", {"max_leaf": 8, "n_trees": 1}),
]
# of each kind of model; how its predictions, figures and checks come about is no matter of the method
FIRST_OF_KIND = [TRAININGS[number] for number in (0, 3, 8, 10)]
CLASSES = {
    "ppdsparse": xs.PPDSparse, "dismec": xs.PPDSparse, "pdsparse": xs.PDSparse, "leml": xs.LEML, "cplst": xs.CPLST,
    "memoir": xs.MEMOIR, "group-lasso": xs.GroupLasso, "tree": xs.LabelTree,
    "parabel": xs.LabelTree,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.xmc and train-test.xmc."""
    folder = tmp_path_factory.mktemp("data")
    load_tool("make_synthetic").make_synthetic(
        folder / "train.xmc",
        n_samples=400,
        n_features=150,
        n_labels=30,
        features_per_sample=15,
        n_test_samples=100,
        seed=2,
    )
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("cluster"), workers=[Worker(), Worker()]) as (_, address):
        yield address


def test_all_methods_are_here() -> None:
    assert {*dict(TRAININGS)} == {*TRAINED, "parabel"}
    assert {name for name, _ in TRAININGS} == CLASSES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"), TRAININGS, ids=[" ".join([n, *map(str, p.values())]) for n, p in TRAININGS]
)
def test_a_method(
    data: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parameters: dict[str, Any]
) -> None:
    monkeypatch.chdir(data)  # paths are those of this process, and no worker's
    presets = declared(name).presets.get(name, {})
    said: dict[str, list[Any]] = {}
    for where, how in (
        ("here", {"memory_limit": "3GB", "threads": 2}), ("there", {"memory_limit": "2GB", "scheduler": address}),
    ):  # fmt: skip
        model, predictions = Path(f"{tmp_path.name}-{where}"), Path(f"{tmp_path.name}-{where}.zarr")
        clf = CLASSES[name](seed=1, **{**presets, **parameters}, **how).fit("train.xmc", model=model)
        said[where] = [clf.model_.digest()]
        if (name, parameters) not in FIRST_OF_KIND:
            continue
        xs.predict(model, "train-test.xmc", predictions, k=5, **how)
        said[where] += [xs.evaluate(one, "train-test.xmc", "train.xmc", **how) for one in (model, predictions)]
        assert all(xs.verify(one, **how)["sound"] for one in (model, predictions, "train.xmc"))
        said[where] += [rows.tolist() for rows in clf.predict_topk(xs.open_dataset("train-test.xmc"), k=3)]
    assert said["there"] == said["here"]
    events = list(read_events(model / "events.jsonl"))
    workers = {event["process"] for event in events if event["event"] == "job"}
    assert workers
    assert not workers & {event["process"] for event in events if event["event"] == "start"}


@pytest.mark.slow
def test_the_command_line(
    data: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Any
) -> None:
    monkeypatch.chdir(data)
    told = {}
    for where, how in (("here", []), ("there", ["--scheduler", address])):
        model, predictions = f"{tmp_path.name}-{where}", f"{tmp_path.name}-{where}.zarr"
        trained = commands("train", "train.xmc", model, "--memory-limit", "1GB", *how)
        commands("predict", model, "train-test.xmc", predictions, "--memory-limit", "1GB", *how)
        figures = commands("evaluate", predictions, "train-test.xmc", "--train", "train.xmc", *how)
        assert commands("verify", predictions, *how)["sound"]
        told[where] = trained["nnz"], commands("info", model, "--digest")["digest"], figures
    assert told["there"] == told["here"]
    assert np.isfinite(told["there"][2]["P@1"])
