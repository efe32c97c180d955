"""Rankings and labels, drawn; every score of a model; metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.metrics import RankingMetrics

FULL = ("average_auc", "hamming_loss", "macro_F1", "macro_F1_present")


def pairs_csr(rows: Sequence[set[int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    indices = [label for row in rows for label in sorted(row)]
    return np.cumsum([0, *map(len, rows)]), np.array(indices, np.int32)


def every_score(model: xs.Model, dataset: xs.Dataset) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Every score, by ranking all labels, and Y; -1e6 stands for the -inf of labels without training rows."""
    labels, ranked = model.predict_topk(dataset, model.n_labels, memory_limit="4GB")
    scores = np.full(ranked.shape, -1e6, np.float32)
    rows, ranks = np.nonzero(labels >= 0)
    scores[rows, labels[rows, ranks]] = ranked[rows, ranks]
    block = dataset.Y_rows().block(0, dataset.n_samples)
    Y = np.zeros(scores.shape, np.bool_)
    Y[np.repeat(np.arange(block.n), np.diff(block.indptr)), block.indices] = True
    return scores, Y


def only(figures: dict[str, Any]) -> dict[str, float]:
    return {name: figures[name] for name in FULL}


Block = tuple[list[list[int]], list[set[int]]]


def arrays(predicted: list[list[int]], true: list[set[int]], width: int) -> tuple[Any, Any, Any]:
    """The arguments of update: labels, y_indptr, y_indices."""
    labels = np.array(predicted, dtype=np.int64).reshape(len(predicted), width)
    indptr = np.cumsum([0, *map(len, true)])
    indices = np.array([label for y in true for label in sorted(y)], dtype=np.int32)
    return labels, indptr, indices


def measured(predicted: list[list[int]], true: list[set[int]], width: int, ks: Any, inverse: Any) -> RankingMetrics:
    metrics = RankingMetrics(ks, inverse)
    metrics.update(*arrays(predicted, true, width))
    return metrics


@st.composite
def problems(draw: st.DrawFn) -> tuple[Block, int, list[int], list[float]]:
    """Rows of predictions padded with -1 and of true labels, their width, the ks, and 1/p with ties."""
    n_labels = draw(st.integers(1, 8))
    width = draw(st.integers(1, 6))
    label = st.integers(0, n_labels - 1)
    ranking = st.lists(label, unique=True, max_size=min(width, n_labels)).map(lambda r: r + [-1] * (width - len(r)))
    rows = draw(st.lists(st.tuples(ranking, st.sets(label)), max_size=9))
    ks = draw(st.lists(st.integers(1, width), min_size=1, unique=True))
    weight = st.one_of(st.sampled_from([1.0, 2.5]), st.floats(1.0, 100.0))
    inverse = draw(st.lists(weight, min_size=n_labels, max_size=n_labels))
    return ([r for r, _ in rows], [y for _, y in rows]), width, ks, inverse
