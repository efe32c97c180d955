"""info: figures against NumPy, without a pass over the data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.forked import run_forked

from xmc_stream.datasets import info
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    X = sp.random(300, 40, 0.1, "csr", np.float32, 0)
    Y = sp.random(300, 250, 0.01, "csr", random_state=1)
    skipped = [["a.txt", i, "no"] for i in range(12)]
    with new_dataset(
        tmp_path / "d.xmc", 40, 250, {"source": "a.txt", "skipped": 12, "skipped_rows": skipped}
    ) as writer:
        writer.append(X.indptr, X.indices, X.data, Y.indptr, Y.indices)
    return Dataset(tmp_path / "d.xmc")


def matrices(dataset: Dataset) -> tuple[Any, Any]:
    n, x, y = dataset.n_samples, dataset.X_rows(), dataset.Y_rows()
    a, b = x.block(0, n), y.block(0, n)
    return sp.csr_array((a.values, a.indices, a.indptr), x.shape), sp.csr_array(
        (np.ones(len(b.indices)), b.indices, b.indptr), y.shape
    )


def test_figures_are_those_of_numpy(dataset: Dataset) -> None:
    figures = info.summarise(dataset)
    X, Y = matrices(dataset)
    features, labels, counts = np.diff(X.indptr), np.diff(Y.indptr), np.sort(Y.sum(0))
    for name, numbers in (("features_per_row", features), ("labels_per_row", labels), ("label_frequency", counts)):
        spread = figures[name]
        assert spread["mean"] == pytest.approx(numbers.mean())
        assert (spread["min"], spread["max"]) == (numbers.min(), numbers.max())
        assert spread["median"] == np.sort(numbers)[(len(numbers) - 1) // 2]
        assert (numbers <= spread["90%"]).mean() >= 0.9 - 1 / len(numbers)
    assert figures["rows_without_features"] == (features == 0).sum()
    assert figures["rows_without_labels"] == (labels == 0).sum()
    assert figures["density"] == X.nnz / (300 * 40)
    assert figures["head_labels"] == 2
    assert figures["head_share"] == counts[-2:].sum() / counts.sum()
    of = (figures["labels_without"], figures["labels_once"], figures["labels_up_to_5"])
    assert of == ((counts == 0).sum(), (counts == 1).sum(), (counts <= 5).sum())
    assert figures["mean_row_norm"] == pytest.approx(np.sqrt((X.toarray() ** 2).sum(1)).mean())
    parts = figures["bytes_by_part"]
    assert set(parts) == {"X/rows", "Y/rows", "Y/columns", "statistics"}
    assert 0 < figures["bytes_on_disk"] - sum(parts.values()) < 4000  # the descriptions of groups


def test_of_many_rows_some_are_looked_at(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = info.summarise(dataset)
    monkeypatch.setattr(info, "_ALL", 100)
    monkeypatch.setattr(info, "_WINDOWS", 5)
    monkeypatch.setattr(info, "_WINDOW", 20)
    figures = info.summarise(dataset)
    assert figures["rows_read"] == 100
    assert figures["features_per_row"]["mean"] == pytest.approx(everything["features_per_row"]["mean"], rel=0.2)
    assert figures["label_frequency"] == everything["label_frequency"]


def test_the_command_prints_all_of_it(dataset: Dataset, commands: Callable[..., Any]) -> None:
    told = commands("info", dataset.path)
    assert told["kind"] == "dataset"
    assert len(told["skipped_rows"]) == 12
    text = run_forked("info", dataset.path)
    for words in ("300", "a.txt:0: no", "and 2 more", "most frequent", "on disk", f"{told['nnz_labels']:,}"):
        assert words in text


def test_nothing_heavy_is_loaded(dataset: Dataset) -> None:
    code = (
        "import sys; from xmc_stream.cli import main\n"
        f"try: main(['info', {str(dataset.path)!r}, '--json'])\n"
        "except SystemExit: pass\n"
        "assert not {'numba', 'dask', 'distributed', 'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("n", "d", "k"), [(0, 3, 2), (4, 0, 0)])
def test_an_empty_set_has_figures_too(tmp_path: Path, n: int, d: int, k: int, commands: Callable[..., Any]) -> None:
    with new_dataset(tmp_path / "d.xmc", d, k, {}) as writer:
        none = np.zeros(n + 1, np.int64)
        writer.append(none, np.empty(0, np.int32), np.empty(0, np.float32), none, np.empty(0, np.int32))
    told = commands("info", tmp_path / "d.xmc")
    assert told["density"] == told["head_share"] == 0
    assert told["rows_without_labels"] == n
