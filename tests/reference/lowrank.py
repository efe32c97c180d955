"""LEML in plain NumPy, on dense matrices in float64: what the streaming solver must agree with."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def losses(loss: str, Y: Array, Z: Array) -> Array:
    """l(Y, Z) of each pair; Y holds 0 and 1."""
    a = 2.0 * Y - 1.0
    if loss == "squared":
        return 0.5 * (Y - Z) ** 2
    if loss == "logistic":
        return np.log1p(np.exp(-a * Z))
    return np.maximum(0.0, 1.0 - a * Z) ** 2


def objective(loss: str, X: Array, Y: Array, mask: Array, W: Array, H: Array, lam: float) -> float:
    """sum over the mask of the losses, and lam/2 (||W||^2 + ||H||^2)."""
    total = (losses(loss, Y, X @ W @ H.T) * mask).sum()
    return float(total + 0.5 * lam * ((W**2).sum() + (H**2).sum()))


def ridge(X: Array, Y: Array, lam: float) -> Array:
    """(X^T X + lam I)^-1 X^T Y."""
    return np.linalg.solve(X.T @ X + lam * np.eye(X.shape[1]), X.T @ Y)


def reduced_rank(X: Array, Y: Array, rank: int) -> Array:
    """The Z of a rank that minimises ||Y - X Z||_F, of least norm (Claim 1 of the paper): V S^-1 M_r, with X = U S V^T and
    M_r the best approximation of U^T Y of that rank."""
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    kept = s > 1e-10 * s[0]
    P, t, Qt = np.linalg.svd(U[:, kept].T @ Y, full_matrices=False)
    return Vt[kept].T @ ((P[:, :rank] * t[:rank]) @ Qt[:rank] / s[kept, None])


def trace_norm(X: Array, Y: Array, lam: float, steps: int = 20000) -> float:
    """The least value of 1/2 ||Y - X Z||_F^2 + lam ||Z||_tr, by accelerated proximal gradients."""
    step = 1.0 / np.linalg.norm(X, 2) ** 2
    Z = V = np.zeros((X.shape[1], Y.shape[1]))
    t = 1.0
    for _ in range(steps):
        U, s, Vt = np.linalg.svd(V - step * X.T @ (X @ V - Y), full_matrices=False)
        new = (U * np.maximum(s - step * lam, 0.0)) @ Vt
        t_new = 0.5 * (1 + np.sqrt(1 + 4 * t * t))
        V, Z, t = new + (t - 1) / t_new * (new - Z), new, t_new
    return float(0.5 * ((Y - X @ Z) ** 2).sum() + lam * np.linalg.svd(Z, compute_uv=False).sum())
