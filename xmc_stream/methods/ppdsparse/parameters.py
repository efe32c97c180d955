"""Parameters of PPDSparse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError

LOSSES = ("squared_hinge", "hinge")
# LIBLINEAR's squared hinge, which DiSMEC uses at C = 1, has no half; without the l1 term it takes more rounds
DISMEC = {"lam": 0.0, "tau": 1.0, "C": 2.0, "rounds": 5, "max_rounds": 5, "prune": 0.01}
_OPTIONS = ("prune", "delta", "min_value")
# Without a cap on rounds a search is worth more work in between: see benchmarks/passes.py.
_MORE_EPOCHS = 5  # times `epochs`
_NEAR = 0.1  # short of violating, and added all the same
_GROWTH = 2  # times max(|A|, added) may be added
# Classes whose gap is above FAR of their objective go on when the rounds of all are over, if that is WORTH it: together
# their gaps are more than this part of the objective. What they lack is rows, so searches bring more of them.
FAR, WORTH = 0.02, 0.005
_FAR_GROWTH = 4
# Without a cap, a class whose gap has not halved in so many rounds is left as it is.
PATIENCE = 5


@dataclass(frozen=True)
class PPDSparseParameters:
    """Parameters of the model, validated once, stored beside it; nothing here depends on the machine.

    lam >= 0: l1 weight. tau > 0: l2 weight. C > 0: weight of the loss. loss: "squared_hinge" or "hinge". bias: whether
    there is a bias feature. tol: largest |dG/da_i| over all rows at which a class is done (at least 1e-5: scores are
    float32). rounds: solves of every class, unless it is done before. max_rounds: solves of a class at most, None for
    no cap: classes whose duality gap is still above 2 % of their objective go on so far, if that is worth it (their gaps
    are more than 0.5 % of the objective of all). epochs, last_epochs: passes over the active set in a round, and from
    the last of `rounds` on. added: a round may add max(|A|, added) violators, four times as many beyond `rounds`.
    Without a cap, which takes as many searches as the tolerance needs, a round does more, so that they are fewer: it
    adds up to twice as many rows, those within 0.1 of violating too, and passes up to 5 epochs times over the active
    set (until no active row violates); a class whose gap has not halved in five rounds is left as it is.

    Off at 0: prune: the finished model leaves out weights |w_j| < prune, the bias never. delta: between rounds a search
    scores with R = ceil(2 ||w||_1^2 / delta^2) random draws of a class's weights. min_value: it only sees entries
    |x_ij| > min_value. The search after the last round is exact.
    """

    solver: ClassVar[str] = "ppdsparse"

    lam: float = 0.01
    tau: float = 1.0
    C: float = 1.0
    loss: str = "squared_hinge"
    bias: bool = True
    tol: float = 0.01
    rounds: int = 3
    max_rounds: int | None = 6
    epochs: int = 2
    last_epochs: int = 6
    added: int = 50
    prune: float = 0.0
    delta: float = 0.0
    min_value: float = 0.0

    def __post_init__(self) -> None:
        _number(self, "lam", 0.0, "[0, inf)")
        _number(self, "tau", math.ulp(0.0), "(0, inf)")
        _number(self, "C", math.ulp(0.0), "(0, inf)")
        _number(self, "tol", 1e-5, "[1e-5, inf)")
        for name in _OPTIONS:
            _number(self, name, 0.0, "[0, inf)")
        for name in ("rounds", "epochs", "last_epochs", "added"):
            _whole(self, name)
        if self.max_rounds is not None:
            _whole(self, "max_rounds")
        if self.loss not in LOSSES:
            raise InputError(f"The 'loss' parameter of PPDSparse must be one of {LOSSES}. Got {self.loss!r} instead.")
        if not isinstance(self.bias, bool):
            raise InputError(f"The 'bias' parameter of PPDSparse must be true or false. Got {self.bias!r} instead.")

    @classmethod
    def of(cls, values: dict[str, Any]) -> PPDSparseParameters:
        """Parameters by name. Raises InputError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"PPDSparse has no parameter {name!r}: it has {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the options that are off, so that a model without them keeps its digest."""
        return {name: value for name, value in asdict(self).items() if value or name not in _OPTIONS}

    @property
    def approximate(self) -> bool:
        """Whether searches between rounds may be rough."""
        return self.delta > 0 or self.min_value > 0

    @property
    def loss_code(self) -> int:
        """The kernels' number of the loss."""
        return LOSSES.index(self.loss)

    @property
    def h2(self) -> float:
        """Second derivative of the dual's loss term h: h(a) = h2 a^2 / 2."""
        return 1.0 / self.C if self.loss == "squared_hinge" else 0.0

    @property
    def upper(self) -> float:
        """Upper bound of a dual variable."""
        return math.inf if self.loss == "squared_hinge" else self.C

    def start_slope(self, C: float) -> float:
        """A warm start's alpha_i for a margin that falls short of 1 by one, before it is bounded; C: of its model.

        Of the squared hinge it is the solution's, at the smaller C of both: at the larger one all alpha are too large
        at once where C has grown, and w with them, which takes many epochs to undo. The hinge's is C wherever the
        margin falls short, and anything in [0, C] where it is 1: a steep ramp, as many stand there and rounding throws
        them to either side.
        """
        return min(C, self.C) * (1.0 if self.loss == "squared_hinge" else 10.0)

    def epochs_of(self, round_: int) -> int:
        """Passes over the active set in a round (the first round is 0), at most."""
        if self.common_rounds is None:
            return _MORE_EPOCHS * self.epochs
        return self.last_epochs if round_ + 1 >= self.common_rounds else self.epochs

    @property
    def common_rounds(self) -> int | None:
        """Rounds of every class, None for no cap: `rounds`, or max_rounds where these are fewer."""
        return None if self.max_rounds is None else min(self.rounds, self.max_rounds)

    def growth_after(self, round_: int) -> int:
        """Times max(|A|, added) that the search after a round (the first is 0) may bring."""
        if self.common_rounds is None:
            return _GROWTH
        return 1 if round_ + 1 < self.common_rounds else _FAR_GROWTH

    def warm(self, of_model: Mapping[str, float], same_data: bool) -> PPDSparseParameters:
        """Those of a run that begins from a model's weights.

        of_model: the model's own lam, tau and C, those that it has. same_data: whether it learned from the same data.
        One round has the epochs of all rounds of a cold run. Two are taken where rows that the weights do not violate
        come to matter: where the data are others, where w has to shrink, as lam / C or tau / C has grown, and for the
        hinge, whose alpha does not follow from the margins.
        """
        common = self.common_rounds
        if common is None:
            return self
        before = {**asdict(self), **of_model}
        shrinks = any(getattr(self, name) * before["C"] > before[name] * self.C for name in ("lam", "tau"))
        if shrinks or not same_data or self.loss != "squared_hinge":
            return replace(self, rounds=min(common, 2), epochs=2 * self.epochs)
        return replace(self, rounds=1, last_epochs=(common - 1) * self.epochs + self.last_epochs)

    @property
    def near(self) -> float:
        """How far short of -1 the score of a row may be that an exact search adds."""
        return _NEAR if self.max_rounds is None else -self.tol

    def violates(self, scores: NDArray[Any]) -> NDArray[np.bool_]:
        """Which scores of rows outside A violate by more than tol."""
        return np.asarray(scores > np.float32(self.tol - 1.0))


def _number(parameters: PPDSparseParameters, name: str, least: float, interval: str) -> None:
    value = getattr(parameters, name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf
    if not good:
        raise InputError(f"The '{name}' parameter of PPDSparse must be a float in {interval}. Got {value!r} instead.")
    object.__setattr__(parameters, name, float(value))  # 2 and 2.0 are one parameter, with one digest


def _whole(parameters: PPDSparseParameters, name: str) -> None:
    value = getattr(parameters, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"The '{name}' parameter of PPDSparse must be an int in [1, inf). Got {value!r} instead.")
