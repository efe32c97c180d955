"""One scale for the scores of rare and frequent labels: a few numbers, learned on rows that no model has seen.

With n_l the training rows of label l, L_l = ln(max(n_l, m) + 1), and s its raw score:

    z = (a_0 + a_1 L_l) s + b_0 + b_1 L_l,   the slope at least `least`
    score = z up to the cap c,  c + ln(n_l + 1) + (z - c) / 100 beyond it

z is the logit of how likely the label is right: a_0, a_1, b_0, b_1 fit sigmoid(z) to whether it is, over the best labels of
the rows, by Newton's steps. Where a label is as good as sure, the more frequent one comes first: c, or none, is what makes
P@1, P@3 and P@5 highest. Labels that are rarer than nearly all of these rows' best labels count as if they had m training
rows: nothing is known of them. The score rises with s for each label. A label without training rows comes after all others.

Two halves of the rows say whether it helps, each by what was learned on the other. No paper has it; benchmarks/README.md
compares it with other forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.calibration import BEYOND, CAP, SHIFT, SLOPE, TOP, UNSEEN

CANDIDATES = 20  # labels of a row that are ranked anew
_FITTED = 10  # of these, the best, whose truth the logit is fitted to
_KS = (1, 3, 5)
_CAPS = (4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0)  # or none
_LEAST = 0.1  # of the slope of a label of mean frequency: what the slope of any label is at least
_RARE = 0.01  # of the candidates: those of labels so rare say too little of their frequency
_NO_SLOPE = 1e-10  # of labels without training rows: what it makes of a score is lost in UNSEEN, -inf stays that
_RIDGE = 1.0
_MOST_STEPS = 100
_NOISE = 2.0  # standard errors that a gain must exceed
SHARPNESS = "sharpness"  # of what is learned: t of softmax(t z), where rows have one label
_LOG_SHARPNESS = (-3.0, 3.0)  # where ln t is looked for

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """slope: (a_0, a_1); least: slope; shift: (b_0, b_1); fewest: m; cap: c, None for none."""

    slope: tuple[float, float]
    least: float
    shift: tuple[float, float]
    fewest: int
    cap: float | None

    @classmethod
    def of(cls, model: Path, attributes: Mapping[str, Any]) -> Self | None:
        """The calibration that a model's attributes hold, if it is applied. Raises StoreError where they cannot be it."""
        about = attributes.get("calibration", {"applied": False})
        try:
            if not about["applied"]:
                return None
            (a, b), least, (c, d), cap = about["slope"], about["least"], about["shift"], about["cap"]
            numbers = [float(value) for value in (a, b, least, c, d, about["fewest"], 0.0 if cap is None else cap)]
            if not np.isfinite(numbers).all() or least <= 0 or about["fewest"] < 0:
                raise ValueError(f"{numbers}")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{model} is damaged: its calibration is not understood ({error!r}); calibrate again"
            ) from None
        return cls((a, b), least, (c, d), about["fewest"], cap)

    @classmethod
    def learned(cls, model: Path, attributes: Mapping[str, Any]) -> Self | None:
        """As `of`, also where it is not applied; None where none was learned."""
        about = attributes.get("calibration")
        return None if about is None else cls.of(model, {"calibration": {**about, "applied": True}})

    def logits(self, scores: NDArray[np.float32], counts: NDArray[Any], calibrated: bool) -> NDArray[np.float32]:
        """z of scores (n, K), in their place.

        counts: training rows of the labels; calibrated: whether the scores are what z became.
        """
        by = self.by(counts)
        if calibrated:
            high = scores > by[CAP]
            # a label that another one lifted may stand between cap and top
            scores[high] = np.maximum(by[CAP], by[CAP] + (scores - by[TOP]) / BEYOND)[high]
        else:
            scores *= by[SLOPE]
            scores += by[SHIFT]
        return scores

    def by(self, counts: NDArray[Any]) -> NDArray[np.float32]:
        """Slope, shift, cap and top (4, ...) of labels with so many training rows (...): see `kernels.calibration`."""
        logs = np.log(np.maximum(counts, self.fewest) + 1.0)
        cap = np.inf if self.cap is None else self.cap
        by = np.empty((4, *logs.shape), np.float32)
        seen = counts > 0
        by[SLOPE] = np.where(seen, np.maximum(self.slope[0] + self.slope[1] * logs, self.least), _NO_SLOPE)
        by[SHIFT] = np.where(seen, self.shift[0] + self.shift[1] * logs, UNSEEN)
        by[CAP], by[TOP] = cap, cap + np.log(counts + 1.0)
        return by


UNCHANGED = Calibration((1.0, 0.0), 1.0, (0.0, 0.0), 0, None)


@dataclass(frozen=True)
class Candidates:
    """The best labels of some rows by raw score, best first: their scores, training rows and truth (n x k each).

    Those without training rows come last, and none of them counts as right.
    """

    labels: NDArray[np.int64]
    scores: NDArray[np.float32]
    counts: NDArray[np.int64]
    true: NDArray[np.bool_]

    def rows(self, chosen: slice | NDArray[np.bool_]) -> Candidates:
        """Some of the rows."""
        return Candidates(self.labels[chosen], self.scores[chosen], self.counts[chosen], self.true[chosen])

    def calibrated(self, calibration: Calibration) -> NDArray[np.float32]:
        """Their calibrated scores, as the kernel has them."""
        slope, shift, cap, top = calibration.by(self.counts)
        z = slope * self.scores + shift
        with np.errstate(invalid="ignore"):  # without a cap
            return np.asarray(np.where(z > cap, top + BEYOND * (z - cap), z), np.float32)

    def precisions(self, scores: NDArray[np.float32]) -> dict[int, Floats]:
        """P@k of each row for each k, in per cent, ranked by such scores; ties go to the lower label."""
        order = np.lexsort((self.labels, -scores), axis=1)[:, : max(_KS)]
        hits = np.cumsum(np.take_along_axis(self.true, order, axis=1), axis=1).astype(np.float64)
        return {k: 100.0 / k * hits[:, k - 1] for k in _KS if k <= hits.shape[1]}


def calibrate(candidates: Candidates) -> dict[str, Any]:
    """What is stored with a model: the calibration, whether it is applied, and how much it helps, see `gain`."""
    halves = slice(0, None, 2), slice(1, None, 2)
    before = candidates.precisions(candidates.scores)
    after = {k: np.empty_like(values) for k, values in before.items()}
    for mine, other in (halves, halves[::-1]):
        part = candidates.rows(mine)
        for k, values in part.precisions(part.calibrated(fit(candidates.rows(other)))).items():
            after[k][mine] = values
    gains = np.mean([after[k] - before[k] for k in before], axis=0)
    gain, error = float(gains.mean()), float(gains.std(ddof=1) / len(gains) ** 0.5)
    metrics = {f"P@{k}": [round(float(p[k].mean()), 4) for p in (before, after)] for k in before}
    about = {"rows": len(gains), "gain": round(gain, 4), "standard_error": round(error, 4), **metrics}
    found = fit(candidates)
    if (sharpness := _sharpness(candidates, found)) is not None:
        about[SHARPNESS] = sharpness
    return {"applied": gain > _NOISE * error, **asdict(found), **about}


def fit(candidates: Candidates) -> Calibration:
    """The calibration that these rows call for."""
    scores, counts, true = (a[:, :_FITTED].ravel() for a in (candidates.scores, candidates.counts, candidates.true))
    used = counts > 0
    hit: NDArray[np.bool_] = true[used] > 0
    s, logs = scores[used].astype(np.float64), np.log(counts[used] + 1.0)
    mean, spread = float(logs.mean()), float(logs.std()) or 1.0
    centred = (logs - mean) / spread
    t = _newton((s, s * centred, np.ones_like(s), centred), hit)
    slope, shift = (
        (_rounded(base - rise * mean / spread), _rounded(rise / spread)) for base, rise in ((t[0], t[1]), (t[2], t[3]))
    )
    least = _rounded(max(_LEAST * t[0], 1e-6))  # scores that say nothing, or the contrary, still rise
    fewest = int(np.quantile(counts[used], _RARE, method="lower"))
    options = [Calibration(slope, least, shift, fewest, cap) for cap in (None, *_CAPS)]
    values = [np.mean([p.mean() for p in candidates.precisions(candidates.calibrated(o)).values()]) for o in options]
    return options[int(np.argmax(values))]


def _sharpness(candidates: Candidates, calibration: Calibration) -> float | None:
    """t of softmax(t z), where every row has one label: what makes the true ones among the rows' best most likely.

    None where a row has several.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    n_true = candidates.true.sum(axis=1)
    if n_true.max() > 1 or not n_true.any():
        return None
    some = candidates.rows(n_true == 1)
    by = calibration.by(some.counts)
    z = (by[SLOPE] * some.scores + by[SHIFT]).astype(np.float64)

    def loss(log_t: float) -> float:
        return -float(log_softmax(np.exp(log_t) * z, axis=1)[some.true].sum())

    return _rounded(float(np.exp(minimize_scalar(loss, bounds=_LOG_SHARPNESS, method="bounded").x)))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _newton(features: tuple[Floats, ...], true: NDArray[np.bool_]) -> Floats:
    """t that minimises  sum ln(1 + exp(-y t.f)) + 1/2 ||t||^2,  y = 1 where true, else -1; sums in a fixed order."""
    n = len(features)
    t = np.zeros(n)
    value = _loss(features, true, t)
    for _ in range(_MOST_STEPS):
        p = 1.0 / (1.0 + np.exp(-np.clip(_linear(features, t), -50.0, 50.0)))
        gradient = np.array([float(((p - true) * f).sum()) for f in features]) + _RIDGE * t
        curvature = p * (1.0 - p)
        hessian = _RIDGE * np.eye(n)
        for i in range(n):
            for j in range(i + 1):
                hessian[i, j] = hessian[j, i] = hessian[i, j] + float((curvature * features[i] * features[j]).sum())
        step = np.linalg.solve(hessian, gradient)
        square, length = float(gradient @ step), 1.0
        if square < 1e-12 * len(true):
            break
        while (lower := _loss(features, true, t - length * step)) > value - 1e-4 * length * square and length > 1e-9:
            length /= 2
        t, value = t - length * step, lower
    return t


def _linear(features: tuple[Floats, ...], t: Floats) -> Floats:
    total: Floats = t[0] * features[0]
    for weight, feature in zip(t[1:], features[1:], strict=True):
        total += weight * feature
    return total


def _loss(features: tuple[Floats, ...], true: NDArray[np.bool_], t: Floats) -> float:
    z = _linear(features, t)
    return float((np.logaddexp(0.0, z) - z * true).sum()) + 0.5 * _RIDGE * float((t * t).sum())
