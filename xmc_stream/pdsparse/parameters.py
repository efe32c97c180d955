"""Parameters of PD-Sparse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from xmc_stream.errors import InputError
from xmc_stream.methods.parameters import Flag, Number, Parameters, Whole, parameter


@dataclass(frozen=True)
class PDSparseParameters(Parameters):
    """Parameters of PD-Sparse: what they do stands beside each."""

    solver = "pdsparse"
    label = "PDSparse"
    title = "PD-Sparse: max-margin learning of all classes at once"
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {
        "pdsparse": {"lam": (0.001, 0.01, 0.1), "C": (0.3, 1.0, 3.0)}
    }

    lam: float | tuple[float, ...] = parameter(
        0.01,
        Number(
            "Weight of the l1 term. Larger: fewer weights that are not 0. Of several, as [0.01,0.1,1], the one that does "
            "best on the held-out rows is kept.",
            several=True,
        ),
    )
    C: float = parameter(
        1.0, Number("Weight of the loss. Larger: the training rows are fitted more closely.", open_least=True)
    )
    parts: int = parameter(
        1, Whole("The labels are split into so many parts. A search looks at one part, drawn at random.")
    )
    rate: int = parameter(
        1,
        Whole(
            "A search samples one in so many values of a row, large ones more often. 1: it takes all of them. 0: the rate of "
            "the paper's section 4.4.",
            least=0,
        ),
    )
    most: int = parameter(
        100,
        Whole(
            "Labels that a search may bring in, at most. The number begins with the labels of a row on average, and doubles "
            "after a pass whose searches took more than twice the work of its steps."
        ),
    )
    held_out: float = parameter(
        0.1,
        Number(
            "Share of the rows (about 50,000 at most) that are not learned from: their precision tells when to stop, see "
            "`patience`. It is P@1, or the mean of P@1, P@3 and P@5 where rows have more than one label on average. The "
            "pass with the best precision is kept. Where rows have several labels, they also say which are predicted. 0: no "
            "rows are held out, and that is learned from a fifth of the rows by another training, on the others.",
            most=0.5,
            open_most=False,
        ),
    )
    patience: int = parameter(
        3, Whole("Training stops after so many passes without a better precision on the held-out rows.")
    )
    max_passes: int = parameter(50, Whole("Passes over the rows, at most."))
    tol: float = parameter(
        1e-3, Number("Without held-out rows, passes end when no dual variable changed by more in a pass.")
    )
    refit: bool = parameter(
        True,
        Flag(
            "Whether to learn from the held-out rows too in the end: in two passes over these, then in one over all rows "
            "(in several where the set is small)."
        ),
    )
    post_solve: bool = parameter(
        False,
        Flag(
            "Whether to solve again in the end, without the l1 term, for the weights that are not 0 (section 4.3). With "
            "held-out rows and without `refit`, the result is kept only where it does better on these rows."
        ),
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
