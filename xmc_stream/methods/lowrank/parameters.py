"""Parameters of LEML and CPLST."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from xmc_stream.errors import InputError

LOSSES = ("squared", "logistic", "squared_hinge")
OBSERVED = ("full", "given")
CRITERIA = ("precision", "auc")
_CHANCE = 1 / 16  # of what chance makes, lam: measured, see benchmarks/README.md
_OF_LOSS = {"squared": 1.0, "logistic": 2.0, "squared_hinge": 4.0}  # lam beside that of the squared loss, measured too


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
