"""Training on rows that have most features: one model however it is cut, as by lists of entries; nothing compiles late."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.compiler import nothing_is_compiled
from helpers.executed import fit_cut

import xmc_stream as xs
from xmc_stream.linear.kernels.dcd import solve_classes
from xmc_stream.linear.kernels.scores import _unpack, score_fours
from xmc_stream.linear.kernels.topk import LEAD, _fold_fours, _fold_ordered, _lengths, _reach, _top_k
from xmc_stream.linear.tiles import TileRange, has_bounds
from xmc_stream.methods.contract import Task
from xmc_stream.methods.registry import method_of
from xmc_stream.ppdsparse import probe, solve
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.predictions import Predictions

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
    return str(fit_cut(xs.PPDSparse(threads=threads, **SETTINGS), data, path, cuts).model_.digest())


def test_the_cut_of_the_work_changes_nothing(dense: Dataset, tmp_path: Path) -> None:
    whole = digest(dense, tmp_path / "whole")
    assert digest(dense, tmp_path / "threads", 2) == whole
    # a class by itself, in pieces, by lists of entries
    assert digest(dense, tmp_path / "cut", cuts=Cuts(solve_rows=50, rows=70, classes=5)) == whole


def test_lists_of_entries_give_nearly_the_same(dense: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = xs.PPDSparse(**SETTINGS).fit(dense, model=tmp_path / "lines").report_
    for module in (solve, probe):
        monkeypatch.setattr(module, "has_dense_rows", lambda *_: False)
    entries = xs.PPDSparse(**SETTINGS).fit(dense, model=tmp_path / "entries").report_
    assert lines["objective"] == pytest.approx(entries["objective"], rel=1e-6)
    assert lines["nnz"] == pytest.approx(entries["nnz"], rel=0.01)


def test_nothing_is_compiled_after_the_warm_up(dense: Dataset, tmp_path: Path) -> None:
    parameters = PPDSparseParameters()
    method_of(parameters).warm_up(Task(dense, parameters, 0)).run()
    with nothing_is_compiled(solve_classes):
        digest(dense, tmp_path / "m")


def some(n: int, d: int, k: int, path: Path) -> Dataset:
    """n rows, d features of which a row has most, k labels of 5 rows each; the first two labels have half of the rows."""
    rng = np.random.default_rng(3)
    X = (rng.random((n, d)) * (rng.random((n, d)) < 0.9)).astype(np.float32)
    Y = np.zeros((n, k), np.bool_)
    Y[np.argsort(rng.random((n, k)), axis=0)[:5], np.arange(k)] = True
    Y[: n // 2, :2] = True
    return xs.convert(sp.csr_matrix(X), path, labels=sp.csr_matrix(Y), normalize="l2")


def test_nothing_is_compiled_after_the_warm_up_of_more_features_than_lines_have(tmp_path: Path) -> None:
    data, parameters = some(60, 4200, 3, tmp_path / "data.xmc"), PPDSparseParameters()
    method_of(parameters).warm_up(Task(data, parameters, 0)).run()
    with nothing_is_compiled(score_fours):
        digest(data, tmp_path / "m")


@pytest.mark.parametrize("guide", [None, 1.0])
def test_nothing_is_compiled_where_tiles_have_bounds(guide: float | None, tmp_path: Path) -> None:
    data = some(203, 30, LEAD + 60, tmp_path / "data.xmc")
    model = xs.PPDSparse(guide=guide, prune=0, **SETTINGS).fit(data, model=tmp_path / "m").model_
    (unit,) = model.tiles
    assert any(has_bounds(TileRange(*span), model.n_features) for span in unit)
    model.warm_up().run()
    with ExitStack() as stack:
        for kernel in (score_fours, _unpack, _lengths, _reach, _fold_ordered, _fold_fours, _top_k):
            stack.enter_context(nothing_is_compiled(kernel))
        labels, scores = model.predict_topk(data, 4, memory_limit="3GB", threads=1)
        xs.predict(model, data, tmp_path / "out", k=4, memory_limit="3GB")
    of_disk = Predictions(tmp_path / "out").rows(0, data.n_samples)
    assert labels.tolist() == of_disk[0].tolist()
    assert scores.tobytes() == of_disk[1].tobytes()
    block = data.X_rows().block(0, 3)
    three = sp.csr_matrix((block.values, block.indices, block.indptr), (3, data.n_features))
    assert labels[:3].tolist() == model.predict_topk(three, 4, memory_limit="3GB")[0].tolist()  # one by one
