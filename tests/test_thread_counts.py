"""More threads read no more: bytes and passes of every method, and the model, are those of one thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.methods import TRAINED

import xmc_stream as xs
from xmc_stream.factors.rowblocks import let_go
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Task
from xmc_stream.models import Execution
from xmc_stream.runtime.plan import jobs_worth
from xmc_stream.store.predictions import Predictions
from xmc_stream.training.plan import plan_training
from xmc_stream.training.train import train

N, D, K = 6000, 400, 60  # several blocks of rows, of runs and of chunks of predictions
LIMIT = "6GB"  # the plan of 16 threads; what is held is little
MANY = 16
SHARES = 1.02  # ends of ranges that two jobs look up

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "leml": [
        {"rank": 100, "alternations": 2},
        {"rank": 100, "alternations": 1, "loss": "logistic", "newton": 1, "cg": 2},
        {"rank": 100, "alternations": 1, "loss": "squared_hinge", "newton": 1, "cg": 2},
        {"rank": 100, "alternations": 1, "loss": "squared_hinge", "newton": 1, "cg": 2, "observed": "given"},
    ],
    "cplst": [{"rank": 50, "iterations": 2, "cg": 5}],
    "pdsparse": [{"max_passes": 2}],
    "memoir": [{"steps": 20}, {"variant": "lsh", "rank": 100, "steps": 20}],
    "tree": [{"max_leaf": 4, "root": 4, "branching": 2, "C": 1.0}],
    "group-lasso": [
        {"loss": loss, "algorithm": algorithm, "max_passes": 3}
        for loss in ("multitask", "label-ranking")
        for algorithm in ("bcd-ls", "bcd-cst", "fista", "sparsa", "fobos")
    ],
}
# shares of a unit read the rows that each of them needs
SHARED_OUT = ("ppdsparse", "dismec")
TRAININGS = [(name, values) for name in TRAINED if name not in SHARED_OUT for values in OPTIONS.get(name, [{}])]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    X = sp.random(N, D, 0.05, format="csr", dtype=np.float32, random_state=1)
    scores = np.asarray(X @ rng.normal(size=(D, K)))
    Y = sp.csr_matrix((scores > np.quantile(scores, 0.97, axis=0)).astype(np.float32))
    path = tmp_path_factory.mktemp("counts") / "data.xmc"
    known = sp.random(N, K, 0.3, format="csr", dtype=np.float32, random_state=2)
    xs.convert(X, path, labels=Y, columns=True, memory_limit=LIMIT).with_observed(known)
    return path


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], xs.Model]:
    """What a method learned, once."""
    folder = tmp_path_factory.mktemp("models")

    def of(name: str) -> xs.Model:
        if not (folder / name).exists():
            asked = registry.parameters(name, OPTIONS.get(name, [{}])[0])
            train(Task(xs.open_dataset(data), asked, 0), folder / name, Execution(LIMIT, 2))
        return xs.load_model(folder / name)

    return of


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """large: nothing is so little work that it is not shared out."""
    if request.param == "large":
        monkeypatch.setattr("xmc_stream.lowrank.plan._SMALL", 0)
        monkeypatch.setattr("xmc_stream.grouplasso.plan._SMALL", 0)
        monkeypatch.setattr("xmc_stream.runtime.plan._BEGINNING", 0)
    let_go()
    return str(request.param)


def words(of: Any) -> str:
    return " ".join([of[0], *(f"{name}={value}" for name, value in of[1].items())])


# little work is shared out, or not, by one plan for all losses and algorithms of a method
SIZED = [("large", of) for of in TRAININGS]
SIZED += [("small", (name, OPTIONS[name][0])) for name in ("leml", "cplst", "memoir", "group-lasso")]


@pytest.mark.parametrize(
    ("size", "of"), SIZED, ids=lambda one: one if isinstance(one, str) else words(one), indirect=["size"]
)
def test_more_threads_read_no_more_and_learn_the_same(of: Any, size: str, data: Path, tmp_path: Path) -> None:
    name, values = of
    dataset, reports, digests = xs.open_dataset(data), {}, set()
    counts = (1, 2, MANY) if values == OPTIONS.get(name, [{}])[0] else (1, MANY)
    for threads in counts:
        let_go()
        execution = Execution(LIMIT, threads)
        model, report = train(Task(dataset, registry.parameters(name, values), 0), tmp_path / str(threads), execution)
        reports[threads] = report
        digests.add(model.digest())
        jobs = [json.loads(line) for line in (model.path / "events.jsonl").read_text().splitlines()]
        if size == "large" and threads == MANY and name == "leml" and not values.get("loss"):
            assert len([job for job in jobs if job.get("job", "").startswith("w/1/")]) > 1  # it is shared out
    assert len(digests) == 1
    for threads in counts[1:]:
        assert reports[threads]["passes"] <= (1 + 1e-6) * reports[1]["passes"]  # columns of LEML's end by themselves
        assert reports[threads]["bytes_read"] <= SHARES * reports[1]["bytes_read"]


# of each kind of model: how it predicts is no matter of the method
@pytest.mark.parametrize("name", ["ppdsparse", "leml", "group-lasso", "tree"])
def test_more_threads_read_no_more_in_predictions_and_evaluations(
    name: str, size: str, data: Path, model: Callable[[str], xs.Model], tmp_path: Path
) -> None:
    dataset, learned, answers = xs.open_dataset(data), model(name), []
    read = {}
    for threads in (1, MANY):
        said = xs.predict(learned, dataset, tmp_path / f"p{threads}", memory_limit=LIMIT, threads=threads)
        read[threads] = said["bytes_read"]
        labels, scores = Predictions(tmp_path / f"p{threads}").rows(0, N)
        metrics = xs.evaluate(learned, dataset, memory_limit=LIMIT, threads=threads)
        answers.append((labels.tobytes(), scores.tobytes(), json.dumps(metrics)))
    assert answers[0] == answers[1]
    assert read[MANY] <= SHARES * read[1]


def test_the_plan_says_which_methods_use_one_thread(data: Path) -> None:
    for name, threads in (("pdsparse", 1), ("leml", 4), ("group-lasso", 1)):
        values = {"loss": "multitask"} if name == "group-lasso" else {}
        plan = plan_training(xs.open_dataset(data), registry.parameters(name, values), 0, Execution(LIMIT, 4))
        assert plan["threads"] == threads, name


def test_there_are_as_many_jobs_as_there_is_work_for() -> None:
    assert jobs_worth(16, 1e12, 1e6) == 16
    assert jobs_worth(16, 100.0, 0.0) == 1
    for work in (1e7, 1e8, 1e9):
        for again in (1e5, 1e6, 1e7):
            jobs = jobs_worth(64, work, again)
            assert jobs == 1 or work / jobs >= 8 * again
