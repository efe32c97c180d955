"""Very many labels: memory that grows with them is planned, and Python does nothing for each of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xmc_stream.errors import MemoryLimitError
from xmc_stream.methods.contract import Task
from xmc_stream.models.runs import read_counts, write_counts
from xmc_stream.ppdsparse.method import PPDSparseMethod
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.run import PPDSparseRun
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.runtime.plan import Cuts, MemoryPlan
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import begin_model
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.store.predictions import begin_predictions, finish_predictions, write_predictions

N, K, TOP = 2_000, 3_000_000, 5
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured by /proc/self/status")


@pytest.fixture(scope="module")
def millions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Predictions and data of three million labels, five of them in each row; the first predicted is right."""
    folder = tmp_path_factory.mktemp("millions")
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, K // TOP, (N, TOP)) + np.arange(TOP) * (K // TOP), axis=1)
    with new_dataset(folder / "d.xmc", 10, K, {}) as data:
        rows = np.arange(N + 1, dtype=np.int64)
        data.append(rows, np.zeros(N, np.int32), np.ones(N, np.float32), TOP * rows, labels.ravel().astype(np.int32))
    predicted = np.concatenate([labels[:, :1], (labels[:, 1:] + 1) % K], axis=1)
    work = begin_predictions(folder / "p", N, K, TOP)
    write_predictions(work, 0, predicted, np.zeros((N, TOP), np.float32))
    finish_predictions(work, folder / "p", {}, False)
    return folder / "p", folder / "d.xmc"


CHILD = """
import json, sys
import xmc_stream as xs
from xmc_stream.system.memory import peak_resident
predictions, data, limit = sys.argv[1:]
data = xs.open_dataset(data)
figures = xs.evaluate(predictions, data, data, memory_limit=limit)
print(json.dumps([figures, peak_resident()]))
"""


@pytest.mark.slow
@on_linux
def test_propensities_of_three_million_labels_are_planned(millions: tuple[Path, Path], cli: Callable[..., Any]) -> None:
    command = [sys.executable, "-c", CHILD, *map(str, millions), "450MB"]
    figures, peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert figures["P@1"] == 100
    assert peak <= 450 * 10**6
    line = cli("evaluate", *millions, "--train", millions[1], "--memory-limit", "200MB", fails=True)
    assert "propensities of 3000000 labels" in line


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 2)), max_size=20), st.data())
def test_counts_of_labels_come_back_in_any_ranges(tmp_path_factory: Any, some: list[Any], data: st.DataObject) -> None:
    n_labels = data.draw(st.integers(max([label for label, _ in some], default=0) + 1, 150_000))
    counts = np.zeros((3, n_labels), np.int32)
    for label, kind in some:
        counts[kind, label] += 1
    path: Path = tmp_path_factory.mktemp("counts") / "counts"
    write_counts(path, counts)
    bounds = sorted({0, n_labels, *data.draw(st.lists(st.integers(0, n_labels), max_size=5))})
    total = np.ones((3, n_labels), np.int64)
    for low, high in itertools.pairwise(bounds):
        read_counts(path, low, total[:, low:high])
    assert (total == counts + 1).all()


def calls_of_a_solve(data: Path, work: Path, rounds: int) -> int:
    """How many Python functions are called to train on the data, in one unit."""
    dataset, notes = Dataset(data), Notes()
    begin_model(work)
    parameters = PPDSparseParameters(max_rounds=rounds, tol=0.1, all_rows=False)
    plan = MemoryPlan(2**40, 2**30, 1, cuts=Cuts())
    loop = PPDSparseRun(dataset, work, parameters, 0, plan, notes).loop()
    n_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run_here(loop, notes)
    finally:
        sys.setprofile(None)
    return n_calls


def one_unit(path: Path, n_labels: int) -> Path:
    """Data of so many labels, of which some are done sooner than others and some have no samples."""
    rng = np.random.default_rng(n_labels)
    n, d = 2048, 64
    with new_dataset(path, d, n_labels, {}) as data:
        x: NDArray[Any] = rng.random((n, d)) < 0.1
        x[:, 0] = True
        y = rng.integers(0, n_labels - n_labels // 8, n).astype(np.int32)
        values = rng.random(int(x.sum()), np.float32)
        ends = np.concatenate([[0], np.cumsum(x.sum(axis=1))])
        data.append(ends, np.nonzero(x)[1].astype(np.int32), values, np.arange(n + 1, dtype=np.int64), y)
    return path


def test_python_does_nothing_for_each_class(tmp_path: Path) -> None:
    calls = []
    for n_labels in (120, 120, 960):  # the first time loads what is loaded once
        data = one_unit(tmp_path / f"{len(calls)}.xmc", n_labels)
        calls.append(calls_of_a_solve(data, tmp_path / f"{len(calls)}.model", 3))
    assert calls[2] < 1.2 * calls[1], calls  # some work goes by runs of 128 classes


def test_a_training_whose_labels_cannot_be_planned_is_refused(millions: tuple[Path, Path]) -> None:
    dataset = Dataset(millions[1])
    plan = MemoryPlan(10**9, 400 * 10**6, 1)
    with pytest.raises(MemoryLimitError, match="sizes of 3000000 classes"):
        PPDSparseMethod().forecaster(Task(dataset, PPDSparseParameters(), 0), plan, lambda job: job.run())
    assert dataset.most_positives() == dataset.label_counts().max()
