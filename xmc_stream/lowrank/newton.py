"""Trust-region Newton steps, each found by conjugate gradients."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.lowrank.solver import Array, column_dots

_SHRINK, _CUT, _GROW = 0.25, 0.5, 4.0  # of the trust radius; these and what follows as Lin, Weng, Keerthi 2008 have it
_POOR, _FAIR, _GOOD = 1e-4, 0.25, 0.75  # actual over predicted decrease
_LANES = 16  # sums of a long dot product


class Problem(Protocol):
    """Independent problems, one a line of an array, for `trust_region`. Methods are generators: they may wait for others.

    `gradient` is asked at the point that `value` was last asked at, or at one that mixes its lines with earlier ones;
    `hessian` is the product at the point that `gradient` was last asked at.
    """

    def value(self, w: Array) -> Generator[Any, Any, NDArray[np.float64]]:
        """The objective of each line."""
        ...

    def gradient(self, w: Array) -> Generator[Any, Any, Array]:
        """Its gradient."""
        ...

    def hessian(self, s: Array) -> Generator[Any, Any, Array]:
        """The product of each line's Hessian with that of s."""
        ...


def _dots(left: Array, right: Array) -> NDArray[np.float64]:
    """left[i] . right[i] of each line i, in float64."""
    if len(left) > 1:
        return np.asarray(np.einsum("ij,ij->i", left, right, dtype=np.float64))
    whole = left.shape[1] - left.shape[1] % _LANES  # of one long line: sums beside each other
    sums = column_dots(left[0, :whole].reshape(-1, _LANES), right[0, :whole].reshape(-1, _LANES))
    rest = column_dots(left[0, whole:, None], right[0, whole:, None])
    return np.array([sums.sum() + rest[0]])


def trust_region(
    problem: Problem, w: Array, newton: int, cg: int, cg_tol: float, quadratic: bool = False
) -> Generator[Any, Any, tuple[Array, NDArray[np.float64], int]]:
    """Minimise by trust-region Newton steps (Lin, Weng, Keerthi 2008), each found by conjugate gradients.

    w (problems x dimensions): where to begin. newton, cg: steps, at most; cg_tol: see `LEMLParameters`. quadratic: one
    step without a bound. Returns w, the objectives, and the products with Hessians that were taken. No objective rises.
    """
    f = yield from problem.value(w)
    g = yield from problem.gradient(w)
    norm = np.sqrt(_dots(g, g))
    first_norm, radius = norm, np.full(len(w), np.inf) if quadratic else norm.copy()
    products = 0
    for step in range(1 if quadratic else newton):
        going = norm > 1e-6 * np.maximum(first_norm, 1e-30)
        if not going.any():
            break
        s, residual, n = yield from _bounded_cg(problem, g, radius, going, cg, cg_tol)
        products += n
        slope, length = _dots(g, s), np.sqrt(_dots(s, s))
        predicted = -0.5 * (slope - _dots(s, residual))
        candidate = w + s
        f_new = yield from problem.value(candidate)
        actual = f - f_new
        if step == 0 and not quadratic:
            radius = np.minimum(radius, length)
        taken = going & (predicted > 0) & (actual > (0.0 if quadratic else _POOR * predicted))
        if not quadratic:
            radius = _new_radius(radius, length, slope, actual, predicted, going)
        if taken.any():
            w = candidate if taken.all() else np.where(taken[:, None], candidate, w)
            f = np.where(taken, f_new, f)
            if step + 1 < (1 if quadratic else newton):
                g = yield from problem.gradient(w)
                norm = np.sqrt(_dots(g, g))
        elif (radius[going] < 1e-12 * np.sqrt(_dots(w, w))[going]).all():
            break
    return w, f, products


def _new_radius(
    radius: Array, length: Array, slope: Array, actual: Array, predicted: Array, going: NDArray[np.bool_]
) -> Array:
    """The trust radius after a step, by how well it was foreseen."""
    bend = -actual - slope  # f(w + s) - f(w) - g.s
    scale = np.where(bend <= 0, _GROW, np.maximum(_SHRINK, -0.5 * slope / np.where(bend > 0, bend, 1.0)))
    ratio = np.where(predicted > 0, actual / np.where(predicted > 0, predicted, 1.0), -1.0)
    poor = np.minimum(np.maximum(scale, _SHRINK) * length, _CUT * radius)
    fair = np.maximum(_SHRINK * radius, np.minimum(scale * length, _CUT * radius))
    good = np.maximum(_SHRINK * radius, np.minimum(scale * length, _GROW * radius))
    best = np.maximum(radius, np.minimum(scale * length, _GROW * radius))
    chosen = np.select([ratio < _POOR, ratio < _FAIR, ratio < _GOOD], [poor, fair, good], best)
    return np.where(going, chosen, radius)


def _bounded_cg(
    problem: Problem, g: Array, radius: NDArray[np.float64], going: NDArray[np.bool_], most: int, tol: float
) -> Generator[Any, Any, tuple[Array, Array, int]]:
    """Conjugate gradients for Hessian s = -g until the residual is tol of g, or s leaves the trust region (Steihaug).

    Returns s, the residual -g - Hessian s, and the products taken.
    """
    s, residual = np.zeros_like(g), -g
    direction = residual.copy()
    square = _dots(residual, residual)
    enough, going = tol * tol * square, going & (square > 0)
    for step in range(most):
        going = going & (square > enough)
        if not going.any():
            return s, residual, step
        image = yield from problem.hessian(direction)
        curvature = _dots(direction, image)
        alpha = np.where(going & (curvature > 0), square / np.where(curvature > 0, curvature, 1.0), 0.0)
        sd, dd, ss = _dots(s, direction), _dots(direction, direction), _dots(s, s)
        left = np.where(np.isfinite(radius), radius * radius, np.inf) - ss
        out = going & ((ss + 2 * alpha * sd + alpha * alpha * dd > radius * radius) | (curvature <= 0))
        with np.errstate(invalid="ignore"):
            root = np.sqrt(np.maximum(sd * sd + dd * np.where(np.isfinite(left), np.maximum(left, 0.0), 0.0), 0.0))
        edge = np.where(
            sd >= 0, np.maximum(left, 0.0) / np.maximum(sd + root, 1e-300), (root - sd) / np.where(dd > 0, dd, 1.0)
        )
        alpha = np.where(out, edge, alpha)
        factors = alpha.astype(g.dtype)[:, None]
        s += factors * direction
        image *= factors
        residual -= image
        after = _dots(residual, residual)
        going = going & ~out
        beta = np.where(going, after / np.where(square > 0, square, 1.0), 0.0).astype(g.dtype)[:, None]
        direction *= beta
        direction += residual
        square = np.where(going, after, square)
    return s, residual, most


def run_alone(steps: Generator[Any, Any, Any]) -> Any:
    """What a generator returns that waits for nobody."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
