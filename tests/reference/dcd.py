"""One class of PPDSparse, dense and in float64: both objectives, dual coordinate descent, and FISTA.

    F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + sum_i C_i loss(w.x_i, y_i)
    G(a) = (tau/2) ||w(a)||^2 - sum_i a_i + sum_i h(a_i),   w(a) = soft(sum_i a_i y_i x_i, lam) / tau

C_i is times_i C for y_i = -1 and times_i positive_weight C for y_i = +1; a row whose C_i is 0 has a_i = 0. The bias is one more
feature that is 1 everywhere, is not in the l1 term, and comes last in w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .permutation import key_of, permutation

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """X (n, D) float64, y (n,) of -1 and +1; loss: "squared_hinge" or "hinge"."""

    X: NDArray[np.float64]
    y: Vector
    lam: float
    tau: float
    C: float
    loss: str
    bias: bool
    positive_weight: float = 1.0
    times: Vector | float = 1.0

    @property
    def weights(self) -> Vector:
        """C_i of each row."""
        return self.times * self.C * np.where(self.y > 0, self.positive_weight, 1.0)

    @property
    def extended(self) -> NDArray[np.float64]:
        """X with the bias feature, if there is one."""
        return np.column_stack([self.X, np.ones(len(self.X))]) if self.bias else self.X

    @property
    def l1(self) -> Vector:
        """What the l1 term counts each feature with."""
        return np.array([self.lam] * self.X.shape[1] + [0.0] * self.bias)

    @property
    def h2(self) -> Vector:
        """Of each row: h(a) = h2 a^2 / 2."""
        if self.loss != "squared_hinge":
            return np.zeros(len(self.y))
        return np.where(self.weights > 0, 1.0 / np.where(self.weights > 0, self.weights, 1.0), 0.0)

    @property
    def upper(self) -> Vector:
        """Largest a_i of each row."""
        return np.where(self.weights > 0, math.inf, 0.0) if self.loss == "squared_hinge" else self.weights


def soft(v: Vector, t: Vector) -> Vector:
    return np.sign(v) * np.maximum(np.abs(v) - t, 0.0)


def weights(p: Problem, a: Vector) -> Vector:
    """w(a)."""
    return soft(p.extended.T @ (a * p.y), p.l1) / p.tau


def regulariser(p: Problem, w: Vector) -> float:
    return float(p.l1 @ np.abs(w) + p.tau / 2 * w @ w)


def primal(p: Problem, w: Vector) -> float:
    """F(w)."""
    hinge = np.maximum(0.0, 1.0 - p.y * (p.extended @ w))
    return regulariser(p, w) + float(p.weights @ (hinge**2 / 2 if p.loss == "squared_hinge" else hinge))


def dual(p: Problem, a: Vector) -> float:
    """G(a)."""
    w = weights(p, a)
    return float(p.tau / 2 * w @ w - np.sum(a) + p.h2 / 2 @ a**2)


def gap(p: Problem, a: Vector) -> float:
    """F(w(a)) + G(a)."""
    return primal(p, weights(p, a)) + dual(p, a)


def gradient(p: Problem, a: Vector) -> Vector:
    """dG/da."""
    return p.y * (p.extended @ weights(p, a)) - 1.0 + p.h2 * a


def violation(p: Problem, a: Vector) -> float:
    """The largest |dG/da_i| of which a step that stays within [0, upper_i] can make use."""
    g = gradient(p, a)
    g[(a <= 0.0) & (g > 0.0)] = 0.0
    g[(a >= p.upper) & ((g < 0.0) | (p.upper <= 0.0))] = 0.0
    return float(np.max(np.abs(g), initial=0.0))


def descend(p: Problem, a: Vector, seed: int, label: int, round_: int, epochs: int, tol: float) -> Vector:
    """The a that `epochs` passes lead to, each in its keyed order.

    A coordinate at 0 whose gradient is above the largest violation of the pass before is left alone from then on. When
    nothing met in a pass violates by more than tol: the end, or another pass over all if some were left alone.
    """
    a = a.copy()
    Z = p.extended
    curvature = np.sum(Z**2, axis=1) / p.tau + p.h2
    asleep: set[int] = set()
    h2, upper = p.h2, p.upper
    bar = math.inf
    for epoch in range(epochs):
        worst = 0.0
        for i in permutation(len(a), key_of(seed, label, round_, epoch)):
            if i in asleep:
                continue
            g = p.y[i] * float(Z[i] @ weights(p, a)) - 1.0 + h2[i] * a[i]
            if a[i] == 0.0 and g > bar:
                asleep.add(i)
            if (a[i] == 0.0 and g >= 0.0) or (a[i] == upper[i] and g <= 0.0):
                continue
            worst = max(worst, abs(g))
            # a row of nothing at all: G is linear in its a_i, and falls
            a[i] = min(max(a[i] - g / curvature[i], 0.0), upper[i]) if curvature[i] else upper[i]
        bar = worst
        if worst <= tol:
            if not asleep:
                break
            asleep, bar = set(), math.inf
    return a


def fista(p: Problem, steps: int = 200_000) -> Vector:
    """The minimiser of F for the squared hinge, by accelerated proximal gradient steps of a constant length."""
    assert p.loss == "squared_hinge"
    Z = p.extended
    L = p.tau + p.weights.max() * np.linalg.norm(Z, 2) ** 2
    momentum = (math.sqrt(L) - math.sqrt(p.tau)) / (math.sqrt(L) + math.sqrt(p.tau))
    w = u = np.zeros(Z.shape[1])
    for _ in range(steps):
        slope = p.tau * u - Z.T @ (p.weights * p.y * np.maximum(0.0, 1.0 - p.y * (Z @ u)))
        w, before = soft(u - slope / L, p.l1 / L), w
        u = w + momentum * (w - before)
        if np.linalg.norm(w - before) <= 1e-14 * max(1.0, np.linalg.norm(w)):
            return w
    raise AssertionError("FISTA has not come to rest")
