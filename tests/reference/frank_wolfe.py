"""PD-Sparse's problem in dense NumPy: objectives, and a step on one sample by the projection's twin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.simplex import project

Dense = NDArray[np.float64]


def weights(X: Dense, A: Dense, lam: float) -> Dense:
    """soft(X^T A, lam): (D, K)."""
    V = X.T @ A
    return np.asarray(np.sign(V) * np.maximum(np.abs(V) - lam, 0))


def dual(X: Dense, Y: NDArray[np.bool_], A: Dense, lam: float) -> float:
    """1/2 sum_k ||w_k||^2 + sum of a over negatives."""
    return float(0.5 * (weights(X, A, lam) ** 2).sum() + A[~Y].sum())


def losses(Z: Dense, Y: NDArray[np.bool_]) -> Dense:
    """max over pairs of (1 + z_n - z_p)_+ of each sample; 0 without positives, or negatives."""
    n = np.where(Y, -np.inf, Z).max(axis=1)
    p = np.where(Y, Z, np.inf).min(axis=1)
    some = Y.any(axis=1) & ~Y.all(axis=1)
    return np.where(some, np.maximum(1 + np.where(some, n, 0) - np.where(some, p, 0), 0), 0)


def primal(X: Dense, Y: NDArray[np.bool_], W: Dense, lam: float, C: float) -> float:
    """sum_k (1/2 ||w_k||^2 + lam ||w_k||_1) + C sum_i L."""
    return float(0.5 * (W**2).sum() + lam * np.abs(W).sum() + C * losses(X @ W, Y).sum())


def gap(X: Dense, Y: NDArray[np.bool_], A: Dense, lam: float, C: float) -> Dense:
    """C L(z_i) + e_i.a_i + a_i.z_i of each sample, which sum to primal + dual; none is below 0 where a is feasible."""
    Z = X @ weights(X, A, lam)
    return np.asarray(C * losses(Z, Y) + np.where(Y, 0, A).sum(axis=1) + (A * Z).sum(axis=1))


def step(X: Dense, Y: NDArray[np.bool_], A: Dense, i: int, active: NDArray[np.int64], lam: float, C: float) -> Dense:
    """Row i of A after the fully corrective step on some labels."""
    z, square = weights(X, A, lam).T @ X[i], X[i] @ X[i]
    pos, neg = active[Y[i, active]], active[~Y[i, active]]
    if not len(neg):
        return np.zeros_like(A[i])
    p, q = project((z[neg] + 1) / square - A[i, neg], A[i, pos] - z[pos] / square, C)
    row = A[i].copy()
    row[neg], row[pos] = -p, q
    return row
