"""Row-sparse models that no method has learned: of given weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.grouplasso.rows import ROWS, write_rows
from xmc_stream.store.model import KIND, begin_model, finish_model, model_attributes, write_label_counts
from xmc_stream.store.names import SELECTED, VOCABULARY
from xmc_stream.store.places import copy_folders


def finished(path: Path, dataset: xs.Dataset, blocks: Iterable[tuple[Any, Any]]) -> xs.Model:
    """A model of blocks of features and their rows, as a training would leave it."""
    work = path.with_name(path.name + ".partial")
    begin_model(work)
    stored = write_rows(work / ROWS, dataset.n_features, dataset.n_labels, blocks)
    made = {**stored, KIND: "row-sparse", "run": {}}
    taken = {name: dataset.attributes[name] for name in (SELECTED,) if name in dataset.attributes}
    copy_folders(dataset.path, work, VOCABULARY)
    write_label_counts(work, dataset)
    finish_model(work, path, {**model_attributes(dataset, "group-lasso", {}, 0, made), **taken})
    return xs.load_model(path)


def written(path: Path, dataset: xs.Dataset, W: Any, step: int = 7) -> xs.Model:
    """A model of W (D x K, dense), whose rows are given `step` at a time."""
    return finished(path, dataset, by_blocks(W, step))


def by_blocks(W: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """Blocks of so many features, and their rows."""
    for first in range(0, len(W), step):
        yield np.arange(first, min(first + step, len(W))), W[first : first + step]


def weights(d: int, k: int, n_selected: int, seed: int = 0) -> Any:
    """W (d x k) with so many rows that are not zero; of their weights a fifth is."""
    rng = np.random.default_rng(seed)
    W = np.zeros((d, k), np.float32)
    rows = rng.choice(d, n_selected, replace=False)
    W[rows] = rng.standard_normal((n_selected, k)) * (rng.random((n_selected, k)) < 0.8)
    W[rows, 0] = 1.0
    return W


def rows_and_labels(n: int, d: int, k: int, density: float = 0.1, seed: int = 0) -> tuple[Any, Any]:
    """X and Y by chance; some rows have no features, some no labels."""
    X = sp.random(n, d, density, format="csr", dtype=np.float32, random_state=seed)
    Y = sp.random(n, k, min(1.0, 3 / k), format="csr", dtype=np.float32, random_state=seed + 1)
    Y.data[:] = 1
    return X, Y
