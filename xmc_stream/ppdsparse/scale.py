"""What C, the weight of positives, `all_rows` and `prune` are where they are not given: never a matter of memory or threads."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from xmc_stream.ppdsparse.groups import has_many_labels
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.solver import all_rows_bytes, has_dense_rows, start_sizes
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset

_PAIRS = 256  # of rows that are compared: the mean is then within some per cent
# where a class begins with all rows
_LEAST_PAIRS = 1 << 17  # pairs of a row and a class: with fewer, a training is little but its start
_ACTIVE_SHARE = (
    25  # the first active sets have one in so many of these pairs, or more; they grow to several times as many
)
_MOST_BYTES = 128 * MIB  # of what a job holds
_MOST_LABELS = 1 << 17  # more of them have fewer rows than that
_ENTRIES = 1 << 17  # of rows that are in memory at a time, beyond those of a pair


def takes_all_rows(parameters: PPDSparseParameters, dataset: Dataset) -> bool:
    """What `all_rows` says; where it says nothing, whether data and parameters are such that it pays."""
    if parameters.all_rows is not None:
        return parameters.all_rows
    n = dataset.n_samples
    if (
        parameters.max_rounds is None
        or parameters.approximate
        or dataset.n_labels > _MOST_LABELS
        or all_rows_bytes(dataset) > _MOST_BYTES
    ):
        return False
    counts = dataset.label_counts()
    counts = counts[(counts > 0) & (counts < n)]
    pairs, started = n * len(counts), int((counts + start_sizes(counts, n)).sum())
    return (
        pairs >= _LEAST_PAIRS
        and started * _ACTIVE_SHARE >= pairs
        and not has_dense_rows(n, dataset.n_features, dataset.X_rows().nnz)
    )


def settled(parameters: PPDSparseParameters, dataset: Dataset) -> PPDSparseParameters:
    """The parameters with C and the weight of positives as numbers, and with what `all_rows` is."""
    p = replace(parameters, all_rows=takes_all_rows(parameters, dataset))
    if p.C is not None and p.positive_weight is not None:
        return p
    of_rows = spread(dataset)
    return replace(
        p,
        C=p.C_for(of_rows) if p.C is None else p.C,
        positive_weight=p.positive_weight_for(of_rows) if p.positive_weight is None else p.positive_weight,
    )


def least_weight(parameters: PPDSparseParameters, dataset: Dataset) -> float:
    """Below what a weight is left out of a large model."""
    return parameters.least_weight(
        dataset.X_rows().nnz / dataset.n_samples, _mean_norm(dataset), has_many_labels(dataset)
    )


def _mean_norm(dataset: Dataset) -> float:
    """Of the rows."""
    n, step = dataset.n_samples, MIB // 4
    norms = (dataset.row_norms(start, min(start + step, n)) for start in range(0, n, step))
    return sum(float(some.sum(dtype=np.float64)) for some in norms) / n


def spread(dataset: Dataset) -> float:
    """The mean of ||x_i - m||^2, m being the mean of all rows, from random pairs of rows: half of ||x_i - x_j||^2 each.

    The pairs are the same in every run. So many of them are in memory at a time as have a megabyte of entries, one at least.
    inf where there are no two rows. The forecast of a training and the training ask for it, so it is kept.
    """
    return _spread(dataset.path, dataset.fingerprint)


@lru_cache(maxsize=8)
def _spread(path: Path, fingerprint: str) -> float:
    """Of the dataset at a path while it has this fingerprint."""
    dataset = Dataset(path)
    X, n = dataset.X_rows(), dataset.n_samples
    if n < 2:
        return float("inf")
    rng = np.random.default_rng(0)
    pairs = np.empty((_PAIRS, 2), np.int64)
    for q in range(_PAIRS):
        i, j = int(rng.integers(n)), int(rng.integers(n - 1))
        j += j >= i
        pairs[q] = min(i, j), max(i, j)
    rows, at = np.unique(pairs, return_inverse=True)
    at = at.reshape(pairs.shape)
    firsts, counts = X.lengths(rows)
    group = np.cumsum(counts[at].sum(axis=1)) // _ENTRIES  # pairs that are read together
    total = 0.0
    for mine in np.split(at, np.flatnonzero(np.diff(group)) + 1):
        some = np.flatnonzero(np.bincount(mine.ravel()))  # np.unique would import numpy.ma: 0.01 s of a start
        read = X.gather(rows[some], lengths=(firsts[some], counts[some]))
        for first, second in np.searchsorted(some, mine):
            left, right = (slice(*read.indptr[r : r + 2]) for r in (first, second))
            x, y = (np.ones(of.stop - of.start) if read.data is None else read.data[of] for of in (left, right))
            values = np.concatenate([x, y]).astype(np.float64)
            x, y = values[: len(x)], values[len(x) :]
            low, high = (np.searchsorted(read.indices[right], read.indices[left], side) for side in ("left", "right"))
            both = low < high  # features of x that y has too
            # no BLAS: its sums depend on the number of threads
            total += 0.5 * float(np.square(values).sum()) - float((x[both] * y[low[both]]).sum())
    return max(0.0, total / _PAIRS)
