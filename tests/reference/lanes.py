"""One class of PPDSparse with all rows in its active set: every pass visits all rows, in an order that classes share."""

from __future__ import annotations

import numpy as np

from .dcd import Problem, Vector, weights
from .permutation import key_of, permutation


def descend(p: Problem, seed: int, round_: int, epochs: int, tol: float, least_gain: float = 0.0) -> Vector:
    """The a that passes lead to from 0: until one meets no violation above tol, or gains too little, or so many."""
    a = np.zeros(len(p.y))
    Z, h2, upper = p.extended, p.h2, p.upper
    curvature = np.sum(Z**2, axis=1) / p.tau + h2
    gained = 0.0
    for epoch in range(epochs):
        worst, gains = 0.0, 0.0
        for i in permutation(len(a), key_of(seed, 0, round_, epoch)):
            g = p.y[i] * float(Z[i] @ weights(p, a)) - 1.0 + h2[i] * a[i]
            after = min(max(a[i] - g / curvature[i], 0.0), upper[i]) if curvature[i] else upper[i]
            worst = max(worst, abs(g) if after != a[i] else 0.0)
            gains -= (after - a[i]) * (g + 0.5 * curvature[i] * (after - a[i]))
            a[i] = after
        gained += gains
        if worst <= tol or gains <= least_gain * gained:
            break
    return a
