"""The group lasso in dense NumPy: losses, gradient, curvature and optimum conditions, straight from the formulas."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Dense = NDArray[np.float64]


def row_loss(loss: str, z: Dense, labels: NDArray[np.bool_]) -> float:
    """The loss of the scores of one row."""
    if loss == "multitask":
        return float((np.maximum(1 - np.where(labels, z, -z), 0) ** 2).sum())
    if not labels.any():
        return 0.0
    if loss == "logistic":
        most = z.max()
        return float(most + np.log(np.exp(z - most).sum()) - z[labels][0])
    return float(sum((np.maximum(1 - (z[y] - z[~labels]), 0) ** 2).sum() for y in np.flatnonzero(labels)))


def row_slope(loss: str, z: Dense, labels: NDArray[np.bool_]) -> Dense:
    """Its gradient by the scores."""
    out = np.zeros_like(z)
    if loss == "multitask":
        sign = np.where(labels, 1.0, -1.0)
        return np.asarray(-2 * sign * np.maximum(1 - sign * z, 0))
    if not labels.any():
        return out
    if loss == "logistic":
        e = np.exp(z - z.max())
        return np.asarray(e / e.sum() - labels)
    for y in np.flatnonzero(labels):
        m = np.where(labels, 0, np.maximum(1 - (z[y] - z), 0))
        out += 2 * m
        out[y] -= 2 * m.sum()
    return out


def row_curvature(loss: str, z: Dense, labels: NDArray[np.bool_]) -> Dense:
    """The diagonal of its second derivative, as equation 6 has it."""
    out = np.zeros_like(z)
    if loss == "multitask":
        return np.asarray(2.0 * (1 - np.where(labels, z, -z) > 0))
    if not labels.any():
        return out
    if loss == "logistic":
        e = np.exp(z - z.max())
        return np.asarray(e / e.sum() * (1 - e / e.sum()))
    for y in np.flatnonzero(labels):
        on = ~labels & (1 - (z[y] - z) > 0)
        out += 2.0 * on
        out[y] += 2.0 * on.sum()
    return out


def losses(loss: str, X: Dense, Y: NDArray[np.bool_], W: Dense) -> float:
    """(1/N) sum_i loss(W^T x_i)."""
    return sum(row_loss(loss, x @ W, y) for x, y in zip(X, Y, strict=True)) / len(X)


def gradient(loss: str, X: Dense, Y: NDArray[np.bool_], W: Dense) -> Dense:
    """Of `losses`, D x K."""
    return np.asarray(X.T @ np.array([row_slope(loss, x @ W, y) for x, y in zip(X, Y, strict=True)]) / len(X))


def curvature(loss: str, X: Dense, Y: NDArray[np.bool_], W: Dense) -> Dense:
    """h of each row of W, D x K."""
    h = np.array([row_curvature(loss, x @ W, y) for x, y in zip(X, Y, strict=True)])
    return np.asarray((X**2).T @ h / len(X))


def penalty(W: Dense, lam1: float, lam2: float, ridge: float = 0.0) -> float:
    """lam1 ||W||_1 + lam2 sum_j ||W_j|| + ridge/2 ||W||^2."""
    return float(lam1 * np.abs(W).sum() + lam2 * np.linalg.norm(W, axis=1).sum() + 0.5 * ridge * (W**2).sum())


def soft(v: Dense, t: float) -> Dense:
    """sign(v) max(|v| - t, 0)."""
    return np.asarray(np.sign(v) * np.maximum(np.abs(v) - t, 0))


def prox(v: Dense, lam1: float, lam2: float, ridge: float = 0.0) -> Dense:
    """argmin_w 1/2 ||w - v||^2 + P(w) for one row."""
    v = soft(v, lam1)
    norm = np.linalg.norm(v)
    return v * 0 if norm <= lam2 else np.asarray(v * (1 - lam2 / norm) / (1 + ridge))


def distance_from_optimal(g: Dense, W: Dense, lam1: float, lam2: float) -> float:
    """The largest distance of 0 from g_j and the subgradients of the penalty, over the rows of W."""
    worst = 0.0
    for slope, w in zip(g, W, strict=True):
        if not w.any():
            worst = max(worst, float(np.linalg.norm(soft(slope, lam1))) - lam2)
            continue
        smooth = slope + lam2 * w / np.linalg.norm(w)
        worst = max(worst, float(np.linalg.norm(np.where(w == 0, soft(smooth, lam1), smooth + lam1 * np.sign(w)))))
    return worst


def solve(loss: str, X: Dense, Y: NDArray[np.bool_], lam1: float, lam2: float, steps: int = 20_000) -> Dense:
    """The optimum, by steps along the gradient with momentum that begins anew where it does not help."""
    k = Y.shape[1]
    bound = {"multitask": 2.0, "logistic": 0.5}.get(loss, 2.0 * k) * np.linalg.norm(X, 2) ** 2 / len(X)
    W = V = np.zeros((X.shape[1], k))
    t = 1.0
    for _ in range(steps):
        at = V - gradient(loss, X, Y, V) / bound
        after = np.array([prox(row, lam1 / bound, lam2 / bound) for row in at])
        if ((V - after) * (after - W)).sum() > 0:
            t = 1.0
        moved = np.abs(after - W).max()
        t, before = (1 + np.sqrt(1 + 4 * t * t)) / 2, t
        V, W = after + (before - 1) / t * (after - W), after
        if moved < 1e-9:
            break
    return W
