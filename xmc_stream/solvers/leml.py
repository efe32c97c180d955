"""LEML: low-rank empirical risk minimisation for many labels, some of them never observed.

Yu, Jain, Kar, Dhillon: Large-scale Multi-label Learning with Missing Labels, ICML 2014.

    min_{W, H}  sum_{(i,k) in Omega} loss(Y_ik, x_i^T W h_k) + lam/2 (||W||_F^2 + ||H||_F^2),   W: D x r, H: K x r

W and H are solved for in turn. This module covers the parameters, the losses, conjugate gradients and the trust-region
Newton method on arrays in memory; rows, passes and files are those of `jobs.leml`. Factors are float32; losses, products of
vectors and systems of equations as large as the rank are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.kernels.lines import aligned_zeros
from xmc_stream.kernels.lowrank import add_column_dots, descend, turn

LOSSES = ("squared", "logistic", "squared_hinge")
OBSERVED = ("full", "given")
CRITERIA = ("precision", "auc")
_CHANCE = 1 / 16  # of what chance makes, lam: measured, see benchmarks/README.md
_OF_LOSS = {"squared": 1.0, "logistic": 2.0, "squared_hinge": 4.0}  # lam beside that of the squared loss, measured too
_SHRINK, _CUT, _GROW = 0.25, 0.5, 4.0  # of the trust radius; these and what follows as Lin, Weng, Keerthi 2008 have it
_LANES = 16  # sums of a long dot product
_POOR, _FAIR, _GOOD = 1e-4, 0.25, 0.75  # actual over predicted decrease

Array = NDArray[Any]


@dataclass(frozen=True)
class LEMLParameters:
    """Parameters of the model, validated once, stored beside it; nothing here depends on the machine.

    rank >= 1: columns of W and H. lam > 0: weight of the squared norms; None: what `lam_for` makes of the data. loss:
    "squared" (targets 0 and 1), "logistic" or "squared_hinge" (-1 and 1). observed: "full", every pair of a row and a label
    counts, or "given", those of the dataset's mask do (`Dataset.with_observed`). alternations: solves of W and H, at most.
    tol: they end when one lowers the objective by no more than this part of it. newton: steps of the trust-region method in
    a half-step, at most; cg: of conjugate gradients in one of these (or in a half-step with the squared loss); cg_tol:
    residual, as a part of the gradient, at which they end before. held_out: share of the rows that are not learned from and
    tell when to stop (about 50,000 at most; with more than 335 labels 17 million over their number, but 1,000 rows): once what
    `criterion` names, "precision" (P@1 + P@3 + P@5) or "auc" (the average AUC of a row), has not risen for `patience`
    alternations; the best alternation is kept. refit: it is then done again, from where it began, with all rows. bias: each
    row has one more feature, which is 1; W has a last row for it.
    """

    solver: ClassVar[str] = "leml"

    rank: int = 100
    lam: float | None = None
    loss: str = "squared"
    observed: str = "full"
    alternations: int = 10
    tol: float = 1e-3
    newton: int = 3
    cg: int = 20
    cg_tol: float = 0.1
    held_out: float = 0.1
    patience: int = 2
    refit: bool = True
    criterion: str = "precision"
    bias: bool = True

    def __post_init__(self) -> None:
        for name, interval, least, most in (
            ("lam", "(0, inf)", math.ulp(0.0), math.inf), ("tol", "[0, 1)", 0.0, 1.0), ("cg_tol", "[0, 1)", 0.0, 1.0),
            ("held_out", "[0, 0.5]", 0.0, 0.5),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "lam" and value is None:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and least <= value <= most and value < math.inf) or (most == 1.0 and value == 1.0):
                raise InputError(
                    f"The '{name}' parameter of LEML must be a float in {interval}. Got {value!r} instead."
                )
            object.__setattr__(self, name, float(value))
        for name in ("rank", "alternations", "newton", "cg", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"The '{name}' parameter of LEML must be an int in [1, inf). Got {value!r} instead.")
        for name in ("refit", "bias"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(
                    f"The '{name}' parameter of LEML must be true or false. Got {getattr(self, name)!r} instead."
                )
        for name, choices in (("loss", LOSSES), ("observed", OBSERVED), ("criterion", CRITERIA)):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"The '{name}' parameter of LEML must be one of {', '.join(choices)}. "
                    f"Got {getattr(self, name)!r} instead."
                )

    @classmethod
    def of(cls, values: dict[str, Any]) -> LEMLParameters:
        """Parameters by name. Raises InputError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"LEML has no parameter {name!r}: it has {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lam_for(self, scale: float) -> float:
        """lam: as given, or a sixteenth of what chance alone makes of the losses' slopes; 1 where that is nothing.

        scale: that of the squared loss, whose slopes without weights are M - Y (see `jobs.lowrank_scale`). At the optimum
        X^T times the slopes has no singular value above lam, so what lam is measured by is how large noise makes them.
        """
        return self.lam if self.lam is not None else _CHANCE * _OF_LOSS[self.loss] * scale or 1.0

    @property
    def closed(self) -> bool:
        """Whether products over all pairs come down to products of r x r matrices: squared loss, full labels."""
        return self.loss == "squared" and self.observed == "full"

    @property
    def threshold(self) -> float:
        """The score above which a label is predicted: half way between the two targets."""
        return 0.5 if self.loss == "squared" else 0.0


@dataclass(frozen=True)
class CPLSTParameters:
    """Parameters of CPLST (Chen, Lin 2012), which is LEML's squared loss with lam = 0 (Claim 1), for all pairs.

    rank: columns of W and H. iterations: of the subspace. oversampling: further columns while it is sought. cg, cg_tol:
    conjugate gradient steps of each least-squares problem, at most, and the residual at which they end. lam: a weight of
    ||W||^2 that keeps these problems well posed, next to nothing by default. bias: as LEML's.
    """

    solver: ClassVar[str] = "cplst"

    rank: int = 100
    iterations: int = 4
    oversampling: int = 10
    cg: int = 100
    cg_tol: float = 1e-4
    lam: float = 1e-6
    bias: bool = True

    def __post_init__(self) -> None:
        try:
            LEMLParameters(
                self.rank, self.lam, cg=self.cg, cg_tol=self.cg_tol, alternations=self.iterations, bias=self.bias
            )
        except InputError as error:
            raise InputError(str(error).replace("of LEML", "of CPLST").replace("alternations", "iterations")) from None
        if not isinstance(self.oversampling, int) or isinstance(self.oversampling, bool) or self.oversampling < 0:
            raise InputError(
                f"The 'oversampling' parameter of CPLST must be an int in [0, inf). Got {self.oversampling!r} instead."
            )

    @classmethod
    def of(cls, values: dict[str, Any]) -> CPLSTParameters:
        """Parameters by name. Raises InputError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"CPLST has no parameter {name!r}: it has {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def steps(self, n_features: int, n_labels: int) -> LEMLParameters:
        """Its least-squares problems as W steps of LEML. Raises InputError for a rank above D or K."""
        if self.rank > min(n_features, n_labels):
            raise InputError(
                f"The 'rank' parameter of CPLST must be at most {min(n_features, n_labels)}, the lesser of the data's "
                f"features and labels. Got {self.rank} instead."
            )
        rank = min(self.rank + self.oversampling, n_features, n_labels)
        return LEMLParameters(rank, self.lam, cg=self.cg, cg_tol=self.cg_tol, held_out=0.0, bias=self.bias)

    @property
    def threshold(self) -> float:
        """The score above which a label is predicted: half way between the targets 0 and 1."""
        return 0.5


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


def solve_columns(w: Array, residual: Array, product: Callable[[Array], Array], most: int, tol: float) -> int:
    """Solve Hessian_c w_c = b_c for each column c by conjugate gradients, all columns at a time; returns the steps taken.

    w (D x c): where to begin, becomes the solution; residual: b - Hessian w there, is overwritten; product: of the Hessians
    with D x c. Each column takes its own steps, so it comes out the same whatever columns are beside it; it ends after
    `most`, or where its residual is `tol` of what it was, or the type's precision.
    """
    square = column_dots(residual, residual)
    tol = max(tol, float(np.finfo(residual.dtype).eps))  # beyond that lie denormal numbers, which are slow
    enough = tol * tol * square
    direction = aligned_zeros(residual.shape, residual.dtype)
    direction[:] = residual
    for step in range(most):
        going = (square > enough) & (square > 0)
        if not going.any():
            return step
        image = product(direction)
        curvature = column_dots(direction, image)
        alpha = np.where(going & (curvature > 0), square / np.where(curvature > 0, curvature, 1.0), 0.0)
        alpha = alpha.astype(w.dtype)
        after = np.empty_like(square)
        descend(w, residual, direction, image, alpha, after)
        beta = np.where(going, after / np.where(square > 0, square, 1.0), 0.0)
        turn(direction, residual, beta.astype(w.dtype))
        square = np.where(going, after, square)
    return most


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


def first_labels(first: int, last: int, rank: int, seed: int) -> NDArray[np.float32]:
    """Rows [first, last) of the H that a run begins from: normal, of variance 1 / rank, drawn by seed and unit.

    first: a multiple of 1,024, last at most 1,024 more.
    """
    rng = np.random.default_rng([seed, 0x1E31, first])
    return (rng.standard_normal((last - first, rank), np.float32) / np.float32(math.sqrt(rank))).astype(np.float32)


def solve_gram(gram: NDArray[np.float64], right: NDArray[np.float64], lam: float) -> NDArray[np.float64]:
    """right (n x r) times (gram + lam I)^-1, by Cholesky; with lam 0 and a singular matrix by least squares."""
    import scipy.linalg

    matrix = gram + lam * np.eye(len(gram))
    try:
        return np.asarray(scipy.linalg.cho_solve(scipy.linalg.cho_factor(matrix), right.T).T)
    except np.linalg.LinAlgError:
        return np.asarray(scipy.linalg.lstsq(matrix, right.T)[0].T)
