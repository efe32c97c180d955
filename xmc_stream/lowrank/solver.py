"""LEML: low-rank empirical risk minimisation for many labels, some of them never observed.

Yu, Jain, Kar, Dhillon: Large-scale Multi-label Learning with Missing Labels, ICML 2014.

    min_{W, H}  sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2),   W: D x r, H: K x r

W and H are solved for in turn. This module covers the losses, conjugate gradients and the systems of
equations for H, on arrays in memory. The trust-region Newton method is in `lowrank.newton`, passes and files are
in `lowrank.leml`. Factors are float32; losses, products of vectors and systems of equations are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.lowrank.kernels.steps import add_column_dots, descend, turn

Array = NDArray[Any]
VECTORS = ("w", "residual", "direction")  # of conjugate gradients


def loss_values(loss: str, true: Array, scores: Array) -> Array:
    """l(a, b) of each pair. true: whether the label is one of the row's; scores: b."""
    if loss == "squared":
        return np.asarray(0.5 * np.square(scores - true))
    margin = np.where(true, scores, -scores)
    if loss == "logistic":
        return np.asarray(np.logaddexp(0.0, -margin))
    return np.asarray(np.square(np.maximum(1.0 - margin, 0.0)))


def loss_slopes(loss: str, true: Array, scores: Array) -> Array:
    """l'(a, b) in b of each pair, in the type of the scores."""
    if loss == "squared":
        return np.asarray(scores - true)
    sign = np.where(true, scores.dtype.type(1), scores.dtype.type(-1))
    if loss == "logistic":
        return np.asarray(-sign * _sigmoid(-sign * scores))
    return np.asarray(-2 * sign * np.maximum(1 - sign * scores, 0))


def loss_curvatures(loss: str, true: Array, scores: Array) -> Array:
    """l''(a, b) in b of each pair, in the type of the scores (squared hinge: of the generalised Hessian)."""
    if loss == "squared":
        return np.ones_like(scores)
    if loss == "logistic":
        s = _sigmoid(scores)
        return np.asarray(s * (1 - s))
    return np.asarray(np.where(np.where(true, scores, -scores) < 1, scores.dtype.type(2), scores.dtype.type(0)))


def _sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1, e) / (1 + e))


def column_dots(left: Array, right: Array) -> NDArray[np.float64]:
    """left[:, c] . right[:, c] of each column c, summed in float64, row after row."""
    out = np.zeros(left.shape[1])
    add_column_dots(left, right, out)
    return out


@dataclass(frozen=True)
class Progress:
    """How far conjugate gradients are in each column. square: ||residual_c||^2; enough: where a column ends."""

    square: NDArray[np.float64]
    enough: NDArray[np.float64]

    @classmethod
    def begin(cls, square: NDArray[np.float64], tol: float, dtype: Any) -> Progress:
        """A column ends where its residual is `tol` of what it is now, or the type's precision."""
        tol = max(tol, float(np.finfo(dtype).eps))  # beyond that lie denormal numbers, which are slow
        return cls(square, tol * tol * square)

    @property
    def going(self) -> NDArray[np.bool_]:
        """Columns that have not ended."""
        return (self.square > self.enough) & (self.square > 0)

    def alpha(self, curvature: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths of the steps. curvature: direction_c . Hessian_c direction_c."""
        some = self.going & (curvature > 0)
        return np.asarray(np.where(some, self.square / np.where(curvature > 0, curvature, 1.0), 0.0))

    def beta(self, after: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the next directions have of those before. after: ||residual_c||^2 behind the step."""
        return np.asarray(np.where(self.going, after / np.where(self.square > 0, self.square, 1.0), 0.0))

    def stepped(self, after: NDArray[np.float64]) -> Progress:
        """Behind the step."""
        return Progress(np.where(self.going, after, self.square), self.enough)


@dataclass
class Descent:
    """Conjugate gradients for Hessian_c w_c = b_c, each column c by itself, a step at a time.

    w, residual (b - Hessian w), direction: D x c. Each column takes its own steps, so it comes out the same whatever columns
    are beside it.
    """

    w: Array
    residual: Array
    direction: Array
    progress: Progress

    @classmethod
    def begin(cls, w: Array, residual: Array, tol: float) -> Descent:
        """From w."""
        direction = aligned_zeros(residual.shape, residual.dtype)
        direction[:] = residual
        return cls(w, residual, direction, Progress.begin(column_dots(residual, residual), tol, residual.dtype))

    @property
    def going(self) -> NDArray[np.bool_]:
        """Columns that have not ended."""
        return self.progress.going

    def step(self, image: Array) -> None:
        """A step of the columns that have not ended. image: Hessian direction. Overwrites w, residual and direction."""
        alpha = self.progress.alpha(column_dots(self.direction, image)).astype(self.w.dtype)
        after = np.zeros(len(alpha))
        descend(self.w, self.residual, self.direction, image, alpha, after)
        turn(self.direction, self.residual, self.progress.beta(after).astype(self.w.dtype))
        self.progress = self.progress.stepped(after)

    def state(self, width: int) -> dict[str, Array]:
        """What goes on from here, of so many first columns: lines may end in columns of zeros."""
        vectors = {name: getattr(self, name)[:, :width] for name in VECTORS}
        return vectors | {"square": self.progress.square, "enough": self.progress.enough}


def solve_gram(gram: NDArray[np.float64], right: NDArray[np.float64], lam: float) -> NDArray[np.float64]:
    """right (n x r) times (gram + lam I)^-1, by Cholesky; with lam 0 and a singular matrix by least squares."""
    import scipy.linalg

    matrix = gram + lam * np.eye(len(gram))
    try:
        return np.asarray(scipy.linalg.cho_solve(scipy.linalg.cho_factor(matrix), right.T).T)
    except np.linalg.LinAlgError:
        return np.asarray(scipy.linalg.lstsq(matrix, right.T)[0].T)
