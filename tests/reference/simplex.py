"""The bi-simplex projection by a quadratic program, solved to high accuracy."""

from __future__ import annotations

import numpy as np
import scipy.optimize as so
from numpy.typing import NDArray


def project(
    b: NDArray[np.float64], c: NDArray[np.float64], most: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """p, q of the least ||p - b||^2 + ||q - c||^2 with p, q >= 0, sum p = sum q <= most, by bisection over t."""

    def simplex(x: NDArray[np.float64], t: float) -> tuple[NDArray[np.float64], float]:
        """The nearest point with sum t, and the threshold, by bisection."""
        low, high = x.min() - t - 1.0, x.max()
        mu = so.brentq(lambda mu: np.maximum(x - mu, 0).sum() - t, low, high, xtol=1e-15, rtol=1e-15)
        return np.maximum(x - mu, 0), mu

    def slope(t: float) -> float:
        return -(simplex(b, t)[1] + simplex(c, t)[1])

    if b.max() + c.max() <= 0:
        t = 0.0
    elif slope(most) <= 0:
        t = most
    else:
        t = so.brentq(slope, 0.0, most, xtol=1e-15, rtol=1e-15)
    return (np.zeros_like(b), np.zeros_like(c)) if t == 0 else (simplex(b, t)[0], simplex(c, t)[0])


def quadratic_program(
    b: NDArray[np.float64], c: NDArray[np.float64], most: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same from a general solver."""
    both, m = np.concatenate([b, c]), len(b)
    balance = np.concatenate([np.ones(m), -np.ones(len(c))])
    result = so.minimize(
        lambda x: ((x - both) ** 2).sum(), np.zeros(len(both)), jac=lambda x: 2 * (x - both), method="SLSQP",
        bounds=[(0, None)] * len(both), options={"ftol": 1e-15, "maxiter": 1000},
        constraints=[
            {"type": "eq", "fun": lambda x: balance @ x, "jac": lambda x: balance},
            {"type": "ineq", "fun": lambda x: most - x[:m].sum(), "jac": lambda x: -(balance > 0).astype(float)},
        ],
    )  # fmt: skip
    return result.x[:m], result.x[m:]
