"""Training on rows that have most features: one model however it is cut, as by lists of entries; nothing compiles late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import nothing_is_compiled

import xmc_stream as xs
from xmc_stream.jobs.plan import Cuts
from xmc_stream.kernels.densedcd import solve_dense_classes
from xmc_stream.methods.contract import Task
from xmc_stream.methods.ppdsparse import large_classes, probe, solve
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.methods.registry import method_of
from xmc_stream.store.dataset import Dataset

SETTINGS: dict[str, Any] = {"lam": 0.01, "C": 1.0, "tol": 0.01, "max_rounds": 4, "memory_limit": "3GB"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """600 rows, 41 features of which a row has four fifths, 12 labels."""
    rng = np.random.default_rng(7)
    n, d, k = 600, 41, 12
    X = (rng.standard_normal((n, d)) * (rng.random((n, d)) < 0.8)).astype(np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    Y = X @ rng.standard_normal((d, k)) > 1.2
    return xs.convert(sp.csr_matrix(X), tmp_path_factory.mktemp("dense") / "data.xmc", labels=sp.csr_matrix(Y))


def digest(data: Dataset, path: Path, threads: int = 1, cuts: Cuts | None = None) -> str:
    return str(xs.PPDSparse(threads=threads, **SETTINGS).fit(data, model=path, cuts=cuts).model_.digest())


def test_the_cut_of_the_work_changes_nothing(dense: Dataset, tmp_path: Path) -> None:
    whole = digest(dense, tmp_path / "whole")
    assert digest(dense, tmp_path / "threads", 2) == whole
    # a class by itself, in pieces, by lists of entries
    assert digest(dense, tmp_path / "cut", cuts=Cuts(solve_rows=50, rows=70, classes=5)) == whole


def test_lists_of_entries_give_nearly_the_same(dense: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = xs.PPDSparse(**SETTINGS).fit(dense, model=tmp_path / "lines").report_
    for module in (solve, probe, large_classes):
        monkeypatch.setattr(module, "has_dense_rows", lambda *_: False)
    entries = xs.PPDSparse(**SETTINGS).fit(dense, model=tmp_path / "entries").report_
    assert lines["objective"] == pytest.approx(entries["objective"], rel=1e-6)
    assert lines["nnz"] == pytest.approx(entries["nnz"], rel=0.01)


def test_nothing_is_compiled_after_the_warm_up(dense: Dataset, tmp_path: Path) -> None:
    parameters = PPDSparseParameters()
    method_of(parameters).warm_up(Task(dense, parameters, 0)).run()
    with nothing_is_compiled(solve_dense_classes):
        digest(dense, tmp_path / "m")
