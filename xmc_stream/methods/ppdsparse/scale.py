"""What C is where it is not given: by how far the rows spread about their mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.store.dataset import Dataset

_PAIRS = 256  # of rows that are compared: the mean is then within some per cent


def settled(parameters: PPDSparseParameters, dataset: Dataset) -> PPDSparseParameters:
    """The parameters with C as a number."""
    if parameters.C is not None:
        return parameters
    return replace(parameters, C=PPDSparseParameters.C_for(spread(dataset)))


def spread(dataset: Dataset) -> float:
    """The mean of ||x_i - m||^2, m being the mean of all rows, from random pairs of rows: half of ||x_i - x_j||^2 each.

    The pairs are the same in every run. Two rows are in memory at a time. inf where there are no two rows.
    """
    X, n = dataset.X_rows(), dataset.n_samples
    if n < 2:
        return float("inf")
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(_PAIRS):
        i = int(rng.integers(n))
        j = int(rng.integers(n - 1))
        pair = X.gather(np.sort(np.array([i, j + (j >= i)])))
        values = np.ones(len(pair.indices)) if pair.data is None else pair.data.astype(np.float64)
        end = int(pair.indptr[1])
        _, a, b = np.intersect1d(pair.indices[:end], pair.indices[end:], assume_unique=True, return_indices=True)
        total += 0.5 * float(values @ values) - float(values[a] @ values[end + b])
    return max(0.0, total / _PAIRS)
