"""Parameters of PD-Sparse."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from xmc_stream.errors import InputError


@dataclass(frozen=True)
class PDSparseParameters:
    """Parameters of the model, validated once, stored beside it; nothing here depends on the machine.

    lam >= 0: l1 weight; several (a tuple): each is tried, and the best on the held-out rows is kept. C > 0: weight of the
    loss. parts: the labels are split into so many, and a search looks at one, drawn at random. rate: a search samples
    one of so many values of a row; 1: all; 0: the rate that the paper's analysis gives. most: labels that a search may
    come to bring in; it begins with the labels of a row on average. held_out: share of the rows (about 50,000 at most) that
    are not learned from and tell when to stop: once their precision (P@1, or the mean of P@1, P@3 and P@5 where rows have
    more than one label on average) has not risen for `patience` passes; the best pass is kept. Without them passes end
    where no step was larger than tol. max_passes: at most. refit: in the end learn from the held-out rows too, in two
    passes over these and one over all (more of a small set). post_solve: without the l1 term, solve again for the weights
    that are not 0.
    """

    solver: ClassVar[str] = "pdsparse"

    lam: float | tuple[float, ...] = 0.01
    C: float = 1.0
    parts: int = 1
    rate: int = 1
    most: int = 100
    held_out: float = 0.1
    patience: int = 3
    max_passes: int = 50
    tol: float = 1e-3
    refit: bool = True
    post_solve: bool = False

    def __post_init__(self) -> None:
        several = isinstance(self.lam, (tuple, list))
        lams = tuple(_number("lam", value, 0.0, "[0, inf)") for value in (self.lam if several else (self.lam,)))  # type: ignore[union-attr]
        if not lams:
            raise InputError(
                "The 'lam' parameter of PDSparse must be a float in [0, inf), or several. Got none instead."
            )
        object.__setattr__(self, "lam", lams if several else lams[0])
        object.__setattr__(self, "C", _number("C", self.C, math.ulp(0.0), "(0, inf)"))
        object.__setattr__(self, "tol", _number("tol", self.tol, 0.0, "[0, inf)"))
        object.__setattr__(self, "held_out", _number("held_out", self.held_out, 0.0, "[0, 0.5]", 0.5))
        for name, least in (("parts", 1), ("rate", 0), ("most", 1), ("patience", 1), ("max_passes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"The '{name}' parameter of PDSparse must be an int in [{least}, inf). Got {value!r} instead."
                )
        for name in ("refit", "post_solve"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(
                    f"The '{name}' parameter of PDSparse must be true or false. Got {getattr(self, name)!r} instead."
                )
        if several and not self.held_out:
            raise InputError("Several values of 'lam' are compared on held-out rows: set held_out above 0.")

    @classmethod
    def of(cls, values: dict[str, Any]) -> PDSparseParameters:
        """Parameters by name. Raises InputError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"PDSparse has no parameter {name!r}: it has {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @property
    def lams(self) -> tuple[float, ...]:
        """The values of lam to try."""
        return self.lam if isinstance(self.lam, tuple) else (self.lam,)

    def rate_for(self, n_features: int, n_labels: int, n_samples: int, nnz: int) -> int:
        """One of how many values of a row a search samples, on such data (section 4.4)."""
        if self.rate:
            return self.rate
        bound = 5.0 * n_features * n_labels / (max(nnz, 1) * self.C * max(math.log(max(n_labels, 2)), 1.0))
        return max(1, math.ceil(min(bound, nnz / (5.0 * max(n_samples, 1)))))


def _number(name: str, value: Any, least: float, interval: str, most: float = math.inf) -> float:
    good = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most and value < math.inf
    )
    if not good:
        raise InputError(f"The '{name}' parameter of PDSparse must be a float in {interval}. Got {value!r} instead.")
    return float(value)
