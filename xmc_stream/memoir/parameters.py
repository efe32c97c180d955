"""Parameters of MEMOIR."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from xmc_stream.errors import InputError
from xmc_stream.methods.parameters import Choice, Flag, Number, Parameters, Whole, parameter

VARIANTS = ("l1", "l2", "lsh")
ORACLES = ("default", "exact", "sw-graph", "simple-lsh")
_DRAWS = 10.0  # times the copies
_BATCH = 1000  # draws of a step, at most
_MOST_SHRINKAGE = 0.1
_MANY_CLASSES = 8000  # from so many on, the approximate search of dense vectors is faster than the exact one


@dataclass(frozen=True)
class MEMOIRParameters(Parameters):
    """Parameters of MEMOIR: what they do stands beside each."""

    solver = "memoir"
    label = "MEMOIR"
    title = "MEMOIR: multi-class SVM whose best wrong class is found by an index"
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {
        "memoir": {"gamma": (0.005, 0.02, 0.08), "sampling": ("row", "class")}
    }

    variant: str = parameter(
        "l1",
        Choice(
            "l1: single weights become zero. l2: squared norm, W in a ball. lsh: as l2, in the coordinates of a truncated "
            "SVD of X.",
            options=VARIANTS,
        ),
    )
    oracle: str = parameter(
        "default",
        Choice(
            "What finds the best wrong class. exact: all are scored. sw-graph (for l1 and l2): a small-world graph. "
            "simple-lsh (for lsh): signs of projections. default: exact; simple-lsh for lsh with 8,000 classes or more.",
            options=ORACLES,
        ),
    )
    lam: float | None = parameter(
        None,
        Number("Weight of the penalty. none: 1 / N, N rows with one copy for each label.", open_least=True, none=True),
    )
    gamma: float = parameter(0.02, Number("Of l1: the penalty is gamma lam ||W||_1."))
    truncate: float = parameter(
        0.0,
        Number(
            "Of l1: after each step the smallest weights are left out, as long as the norm of what is left out stays below "
            "this share of that of W.",
            most=1.0,
        ),
    )
    batch: int | None = parameter(
        None,
        Whole(
            "Draws of a step. none: twice the classes, 1,000 at most.",
            none=True,
        ),
    )
    steps: int | None = parameter(
        None, Whole("Steps, at most. none: as many as draw each copy of a row 10 times on average.", none=True)
    )
    sampling: str = parameter(
        "row",
        Choice(
            "row: a step draws rows. class: it draws classes, and of each one of its rows, so that rare classes count as much "
            "as frequent ones.",
            options=("row", "class"),
        ),
    )
    eta0: float | None = parameter(
        None,
        Number(
            "The rate of step t is eta0 / (1 + eta1 t). none: batch, so that the first step moves a class by 1 a draw; for l2 "
            "and lsh a tenth of 1 / lam, at most.",
            open_least=True,
            none=True,
        ),
    )
    eta1: float = parameter(0.02, Number("How fast the rate falls."))
    schedule: str = parameter(
        "slow",
        Choice("slow: the rate above. pegasos: 1 / (lam t), which comes to the optimum.", options=("slow", "pegasos")),
    )
    update: str = parameter(
        "violators",
        Choice(
            "Whether a step moves W for rows with a margin below 1, or for all that it draws.",
            options=("violators", "all"),
        ),
    )
    mask: bool = parameter(
        True,
        Flag("Whether all labels of a row are kept out of its wrong classes. Else only the one that was drawn is."),
    )
    bias: bool = parameter(False, Flag("Whether each row has one more feature, which is 1."))
    cosine: bool = parameter(
        False,
        Flag("Whether the model predicts by the cosine: each class's weights are divided by their norm in the end."),
    )
    held_out: float = parameter(
        0.1,
        Number(
            "Share of the rows that are held out, 5,000 at most. Where rows have several labels, they also say which are "
            "predicted. 0: all steps are made, W of the last is the model, and which labels are predicted is learned from a "
            "fifth of the rows by another training, on the others.",
            most=1.0,
        ),
    )
    patience: int = parameter(
        4, Whole("The held-out rows are scored 20 times. Training stops when macro-F1 has not risen for so many times.")
    )
    rank: int = parameter(256, Whole("Of lsh: coordinates of the truncated SVD."))
    bits: int = parameter(256, Whole("Of simple-lsh: length of a code, in bits: 64, 128, 192 or 256.", least=64))
    candidates: int | None = parameter(
        None,
        Whole(
            "Classes that simple-lsh scores for a row, or that a search of sw-graph keeps. none: one in 256, 448 at least; "
            "of sw-graph 8.",
            none=True,
        ),
    )
    degree: int = parameter(8, Whole("Of sw-graph: neighbours that a class chooses; it has up to twice as many."))

    def _check_together(self) -> None:
        dense = self.variant == "lsh"
        if self.oracle == ("sw-graph" if dense else "simple-lsh"):
            raise InputError(
                f"The 'oracle' parameter of MEMOIR cannot be {self.oracle} with variant={self.variant}: sw-graph is for "
                "sparse weights (l1, l2), simple-lsh for lsh"
            )
        if self.bits not in (64, 128, 192, 256):
            raise InputError(f"The 'bits' parameter of MEMOIR must be 64, 128, 192 or 256. Got {self.bits} instead.")

    def resolved(self, n_classes: int, n_copies: int) -> MEMOIRParameters:
        """These, with a number in the place of each none that rules decide, and the name of the oracle."""
        batch = self.batch or min(2 * n_classes, _BATCH)
        steps = self.steps or max(1, math.ceil(_DRAWS * n_copies / batch))
        oracle = self.oracle
        if oracle == "default":
            oracle = "simple-lsh" if self.variant == "lsh" and n_classes >= _MANY_CLASSES else "exact"
        lam = self.lam or 1.0 / max(n_copies, 1)
        # a step of l2 and lsh first takes the share eta lam from W
        eta0 = self.eta0 or (float(batch) if self.variant == "l1" else min(float(batch), _MOST_SHRINKAGE / lam))
        return replace(self, batch=batch, steps=steps, oracle=oracle, lam=lam, eta0=eta0)

    # what follows is asked of those that are resolved

    @property
    def draws(self) -> int:
        """Draws of a step."""
        return cast(int, self.batch)

    @property
    def most_steps(self) -> int:
        """Steps, at most."""
        return cast(int, self.steps)

    @property
    def penalty(self) -> float:
        """lam."""
        return cast(float, self.lam)

    def rate(self, step: int) -> float:
        """eta of a step, from 0 on."""
        if self.schedule == "pegasos":
            return 1.0 / (self.penalty * (step + 1))
        return cast(float, self.eta0) / (1.0 + self.eta1 * step)
