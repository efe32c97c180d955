"""Parameters of PD-Sparse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xmc_stream.errors import InputError
from xmc_stream.methods.parameters import Flag, Number, Parameters, Whole, parameter


@dataclass(frozen=True)
class PDSparseParameters(Parameters):
    """Parameters of PD-Sparse: what they do stands beside each."""

    solver = "pdsparse"
    label = "PDSparse"
    title = "PD-Sparse: max-margin learning of all classes at once"

    lam: float | tuple[float, ...] = parameter(
        0.01,
        Number(
            "Weight of the l1 term. Of several, as [0.01,0.1,1], the one that is best on the held-out rows is kept.",
            several=True,
        ),
    )
    C: float = parameter(1.0, Number("Weight of the loss.", open_least=True))
    parts: int = parameter(
        1, Whole("The labels are split into so many parts, and a search looks at one, drawn at random.")
    )
    rate: int = parameter(
        1, Whole("A search samples one of so many values of a row. 0: as many as the paper's analysis says.", least=0)
    )
    most: int = parameter(
        100, Whole("Labels that a search may come to bring in; it begins with as many as a row has on average.")
    )
    held_out: float = parameter(
        0.1,
        Number(
            "Share of the rows (about 50,000 at most) that are not learned from and tell when to stop: once their precision "
            "(P@1, or the mean of P@1, P@3 and P@5 where rows have more than one label on average) has not risen for "
            "`patience` passes. The best pass is kept.",
            most=0.5,
            open_most=False,
        ),
    )
    patience: int = parameter(3, Whole("Passes without a better precision on the held-out rows, after which it stops."))
    max_passes: int = parameter(50, Whole("Passes over the rows, at most."))
    tol: float = parameter(1e-3, Number("Without held-out rows: passes end where no step was larger."))
    refit: bool = parameter(
        True,
        Flag(
            "Whether to learn from the held-out rows too in the end: in two passes over these and one over all, more of a "
            "small set."
        ),
    )
    post_solve: bool = parameter(
        False, Flag("Whether to solve again in the end, without the l1 term, for the weights that are not 0.")
    )

    def _check_together(self) -> None:
        if isinstance(self.lam, tuple) and not self.held_out:
            raise InputError("Several values of 'lam' are compared on held-out rows: set held_out above 0.")

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
