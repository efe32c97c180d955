"""LEML: low-rank empirical risk minimisation for many labels, some of them never observed.

Yu, Jain, Kar, Dhillon: Large-scale Multi-label Learning with Missing Labels, ICML 2014.

    min_{W, H}  sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2),   W: D x r, H: K x r

W and H are solved for in turn. This module covers the losses, the pairs over which they are taken, conjugate gradients, the
systems of equations for H and the trust-region Newton method, on arrays in memory. Passes and files are in `lowrank.leml`.
Factors are float32; losses, products of vectors and systems of equations are float64.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.factors.factors import Begun
from xmc_stream.factors.rowblocks import Array
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.products import add_transposed, multiply
from xmc_stream.lowrank.kernels.steps import add_column_dots, are_true, descend, pair_dots, turn
from xmc_stream.store.matrix import Block

LOSS_UNIT = 2.0**-32  # losses are summed as whole numbers of it, in any order
_LANES = 16  # sums of a long dot product
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


def loss_units(values: Array) -> int:
    """The sum of losses, each rounded to whole units."""
    return int(np.rint(values / LOSS_UNIT).astype(np.int64).sum())


@dataclass(frozen=True)
class AllPairs:
    """All pairs of some rows and labels. true (n x k). held_out: which rows do not count; None where all do."""

    true: NDArray[np.bool_]
    held_out: NDArray[np.bool_] | None

    def dots(self, left: Array, right: Array) -> Array:
        """left_i . right_k of each pair."""
        return np.asarray(left @ right.T)

    def by_row(self, weights: Array, right: Array) -> Array:
        """sum_k weights_ik right_k."""
        return np.asarray(weights @ right)

    def add_by_label(self, weights: Array, left: Array, out: Array) -> None:
        """out_k += sum_i weights_ik left_i."""
        out += weights.T @ left

    def label_sums(self, values: Array, n: int) -> Array:
        """Sums of values over the rows, of n labels."""
        return np.asarray(values.sum(axis=0))

    def loss_units(self, values: Array) -> int:
        """The sum of values, in units; the block is the same under every plan, so it is rounded as a whole."""
        return loss_units(values.sum(keepdims=True))


@dataclass(frozen=True)
class GivenPairs:
    """Given pairs of some rows and labels: a csr pattern, and true of each entry. held_out: which entries do not count."""

    indptr: NDArray[np.int64]
    labels: Array
    true: NDArray[np.bool_]
    held_out: NDArray[np.bool_] | None

    def dots(self, left: Array, right: Array) -> Array:
        """left_i . right_k of each pair."""
        out = np.empty(len(self.labels), left.dtype)
        pair_dots(self.indptr, self.labels, left, right, out)
        return out

    def by_row(self, weights: Array, right: Array) -> Array:
        """sum_k weights_ik right_k."""
        out = np.empty((len(self.indptr) - 1, right.shape[1]), right.dtype)
        multiply(self.indptr, self.labels, weights, right, out)
        return out

    def add_by_label(self, weights: Array, left: Array, out: Array) -> None:
        """out_k += sum_i weights_ik left_i."""
        add_transposed(self.indptr, self.labels, weights, left, out)

    def label_sums(self, values: Array, n: int) -> Array:
        """Sums of values over the rows, of n labels."""
        return np.bincount(self.labels, values, n)

    def loss_units(self, values: Array) -> int:
        """The sum of values, in units, each rounded by itself: a plan may cut rows into other blocks."""
        return loss_units(values)


Pairs = AllPairs | GivenPairs


def counted(pairs: Pairs, values: Array) -> Array:
    """Values of pairs, with 0 for those of rows that are held out."""
    if pairs.held_out is not None:
        values[pairs.held_out] = 0
    return values


def given_pairs(
    indptr: NDArray[np.int64], labels: Array, true: NDArray[np.bool_], held_out: NDArray[np.bool_] | None
) -> GivenPairs:
    """The given pairs of some rows. held_out: rows."""
    return GivenPairs(indptr, labels, true, None if held_out is None else np.repeat(held_out, np.diff(indptr)))


def positives_of(mask: Block, y: Block) -> NDArray[np.bool_]:
    """Which pairs of a mask are positives."""
    true = np.empty(len(mask.indices), np.bool_)
    are_true(mask.indptr, mask.indices, y.indptr, y.indices, true)
    return true


def dense_labels(y: Block, first: int, last: int) -> NDArray[np.bool_]:
    """Which of the labels [first, last) each row of a block has."""
    rows = np.repeat(np.arange(y.n), np.diff(y.indptr))
    mine = (y.indices >= first) & (y.indices < last)
    out = np.zeros((y.n, last - first), np.bool_)
    out[rows[mine], y.indices[mine] - first] = True
    return out


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


_SHRINK, _CUT, _GROW = 0.25, 0.5, 4.0  # of the trust radius; these and what follows as Lin, Weng, Keerthi 2008 have it
_POOR, _FAIR, _GOOD = 1e-4, 0.25, 0.75  # actual over predicted decrease


def _nothing() -> Array:
    return np.empty(0)


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


@dataclass
class Newton:
    """Where the method is. w, f, g: point, objectives, gradients; norm, first: of the gradients, now and at the beginning;

    radius: of the trust regions; steps: taken; products: with Hessians. Of the conjugate gradients of the next step: s,
    residual -g - Hessian s, direction; square of the residual's length; enough: where it ends; going: which go on; inner: steps
    taken, -1 before they begin.
    """

    w: Array
    f: Array
    g: Array
    norm: Array
    first: Array
    radius: Array
    steps: int = 0
    products: int = 0
    s: Array = field(default_factory=_nothing)
    residual: Array = field(default_factory=_nothing)
    direction: Array = field(default_factory=_nothing)
    square: Array = field(default_factory=_nothing)
    enough: Array = field(default_factory=_nothing)
    going: Array = field(default_factory=_nothing)
    inner: int = -1

    def begin(self, going: NDArray[np.bool_], tol: float) -> None:
        """Conjugate gradients for the next step, from s = 0."""
        self.s, self.residual = np.zeros_like(self.g), -self.g
        self.direction = self.residual.copy()
        self.square = _dots(self.residual, self.residual)
        self.enough, self.going, self.inner = tol * tol * self.square, going & (self.square > 0), 0

    def end(self) -> None:
        """The step is taken, or not."""
        self.s, self.residual, self.direction, self.inner = _nothing(), _nothing(), _nothing(), -1
        self.steps += 1

    def state(self) -> dict[str, Array]:
        """What goes on from here."""
        arrays = {of.name: np.atleast_1d(getattr(self, of.name)) for of in fields(self)}
        return {**arrays, "going": arrays["going"].astype(np.uint8)}

    @classmethod
    def read(cls, begun: Begun) -> Newton:
        """What was kept."""
        found = {of.name: begun.read(of.name) for of in fields(cls)}
        n = len(found["f"])
        lines = {name: found[name].reshape(n, -1) for name in ("w", "g", "s", "residual", "direction")}
        numbers: dict[str, Any] = {name: int(found[name][0]) for name in ("steps", "products", "inner")}
        return cls(**{**found, **lines, **numbers, "going": found["going"].astype(np.bool_)})


def _dots(left: Array, right: Array) -> NDArray[np.float64]:
    """left[i] . right[i] of each line i, in float64."""
    if len(left) > 1:
        return np.asarray(np.einsum("ij,ij->i", left, right, dtype=np.float64))
    whole = left.shape[1] - left.shape[1] % _LANES  # of one long line: sums beside each other
    sums = column_dots(left[0, :whole].reshape(-1, _LANES), right[0, :whole].reshape(-1, _LANES))
    rest = column_dots(left[0, whole:, None], right[0, whole:, None])
    return np.array([sums.sum() + rest[0]])


def trust_region(
    problem: Problem,
    w: Array,
    newton: int,
    cg: int,
    cg_tol: float,
    quadratic: bool = False,
    begun: Begun | None = None,
) -> Generator[Any, Any, tuple[Array, NDArray[np.float64], int]]:
    """Minimise by trust-region Newton steps (Lin, Weng, Keerthi 2008), each found by conjugate gradients.

    w (problems x dimensions): where to begin. newton, cg: steps, at most; cg_tol: see `LEMLParameters`. quadratic: one
    step without a bound. begun: keeps where the method is, and has what to go on from. Returns w, the
    objectives, and the products with Hessians that were taken. No objective rises.
    """
    most = 1 if quadratic else newton
    at = Newton.read(begun) if begun is not None and begun.found else None
    w = w if at is None else at.w
    f = yield from problem.value(w)
    g = yield from problem.gradient(w)
    if at is None:
        norm = np.sqrt(_dots(g, g))
        at = Newton(w, f, g, norm, norm, np.full(len(w), np.inf) if quadratic else norm.copy())
    while at.steps < most:
        going = at.norm > 1e-6 * np.maximum(at.first, 1e-30)
        if not going.any():
            break
        if at.inner < 0:
            at.begin(going, cg_tol)
        yield from _bounded_cg(problem, at, cg, begun)
        slope, length = _dots(at.g, at.s), np.sqrt(_dots(at.s, at.s))
        predicted = -0.5 * (slope - _dots(at.s, at.residual))
        candidate = at.w + at.s
        f_new = yield from problem.value(candidate)
        actual = at.f - f_new
        if at.steps == 0:
            at.radius = np.minimum(at.radius, length)
        taken = going & (predicted > 0) & (actual > (0.0 if quadratic else _POOR * predicted))
        at.radius = _new_radius(at.radius, length, slope, actual, predicted, going)
        at.end()
        if taken.any():
            at.w = candidate if taken.all() else np.where(taken[:, None], candidate, at.w)
            at.f = np.where(taken, f_new, at.f)
            if at.steps < most:
                at.g = yield from problem.gradient(at.w)
                at.norm = np.sqrt(_dots(at.g, at.g))
        elif (at.radius[going] < 1e-12 * np.sqrt(_dots(at.w, at.w))[going]).all():
            break
    return at.w, at.f, at.products


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


def _bounded_cg(problem: Problem, at: Newton, most: int, begun: Begun | None) -> Generator[Any, Any, None]:
    """Conjugate gradients for Hessian s = -g until the residual is small enough, or s leaves the trust region (Steihaug)."""
    radius = at.radius
    while at.inner < most:
        going = at.going & (at.square > at.enough)
        if not going.any():
            return
        image = yield from problem.hessian(at.direction)
        curvature = _dots(at.direction, image)
        alpha = np.where(going & (curvature > 0), at.square / np.where(curvature > 0, curvature, 1.0), 0.0)
        sd, dd, ss = _dots(at.s, at.direction), _dots(at.direction, at.direction), _dots(at.s, at.s)
        left = radius * radius - ss
        out = going & ((ss + 2 * alpha * sd + alpha * alpha * dd > radius * radius) | (curvature <= 0))
        with np.errstate(invalid="ignore"):
            root = np.sqrt(np.maximum(sd * sd + dd * np.where(np.isfinite(left), np.maximum(left, 0.0), 0.0), 0.0))
        edge = np.where(
            sd >= 0, np.maximum(left, 0.0) / np.maximum(sd + root, 1e-300), (root - sd) / np.where(dd > 0, dd, 1.0)
        )
        alpha = np.where(out, edge, alpha)
        factors = alpha.astype(at.g.dtype)[:, None]
        at.s += factors * at.direction
        image *= factors
        at.residual -= image
        after = _dots(at.residual, at.residual)
        at.going = going & ~out
        beta = np.where(at.going, after / np.where(at.square > 0, at.square, 1.0), 0.0).astype(at.g.dtype)[:, None]
        at.direction *= beta
        at.direction += at.residual
        at.square = np.where(at.going, after, at.square)
        at.inner += 1
        at.products += 1
        if begun is not None:
            begun.keep(at.state())


def run_alone(steps: Generator[Any, Any, Any]) -> Any:
    """What a generator returns that waits for nobody."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
