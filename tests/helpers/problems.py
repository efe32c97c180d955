"""Small problems to be learned, and dense weights of what was learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.system.memory import resident

TIGHT = {"tol": 1e-5, "max_rounds": None, "epochs": 2000}


def problem(n: int = 60, d: int = 15, k: int = 4, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """A small problem whose classes overlap, as float32 rows of length one."""
    rng = np.random.default_rng(seed)
    X = sp.random(n, d, 0.4, format="csr", dtype=np.float32, random_state=seed)
    X = sp.csr_matrix(X / np.maximum(np.sqrt(X.multiply(X).sum(axis=1)), 1e-6), dtype=np.float32)
    scores = X @ rng.normal(size=(d, k)) + 0.3 * rng.normal(size=(n, k))
    return X, sp.csr_matrix((scores > np.quantile(scores, 0.7, axis=0)).astype(np.float32))


def dense_weights(model: xs.Model) -> tuple[np.ndarray, np.ndarray]:
    return model.to_scipy().toarray(), model.bias()


def rare_labels() -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Labels of 3 to 39 rows: so few that classes go on beyond the third round. Four have no row, and 21 has every row."""
    n, d, k = 1200, 60, 40
    rng = np.random.default_rng(0)
    X = sp.random(n, d, 0.2, format="csr", dtype=np.float32, random_state=0)
    Y = sp.lil_matrix((n, k), dtype=np.float32)
    for c in range(k):
        Y[rng.choice(n, 3 + 9 * (c % 5), replace=False), c] = 1
    Y[:, [0, 7, 8, 39]] = 0
    Y[:, 21] = 1
    return X, Y.tocsr()


LIMIT = "4GB"  # bounds the whole process of the tests


def tight(room: int = 500 * 10**6) -> int:
    """A memory limit, in bytes, that leaves `room` beside what this process of many tests holds already: up to 1 GB."""
    return resident() + room


def overlapping(n: int = 80, d: int = 15, k: int = 5, single: bool = False, seed: int = 0) -> tuple[Any, Any]:
    """Classes that overlap, rows of length one."""
    rng = np.random.default_rng(seed)
    X = sp.random(n, d, 0.5, format="csr", dtype=np.float32, random_state=seed)
    X = sp.csr_matrix(X / np.maximum(np.sqrt(X.multiply(X).sum(axis=1)), 1e-6), dtype=np.float32)
    scores = X @ rng.normal(size=(d, k)) + 0.3 * rng.normal(size=(n, k))
    Y = scores > np.quantile(scores, 0.7, axis=0)
    if single:
        Y = np.arange(k) == scores.argmax(axis=1)[:, None]
    return X, sp.csr_matrix(Y.astype(np.float32))
