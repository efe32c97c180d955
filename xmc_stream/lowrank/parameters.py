"""Parameters of LEML and CPLST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from xmc_stream.methods.parameters import Choice, Flag, Number, Parameters, Whole, parameter

LOSSES = ("squared", "logistic", "squared_hinge")
OBSERVED = ("full", "given")
CRITERIA = ("precision", "auc")
MOST_INPUTS = 2048  # features, and the bias, up to which CPLST takes the normal equations: X^T X has 33 MB then
_CHANCE = 1 / 16  # of what chance makes, lam: measured, see benchmarks/README.md
_OF_LOSS = {"squared": 1.0, "logistic": 2.0, "squared_hinge": 4.0}  # lam beside that of the squared loss, measured too


@dataclass(frozen=True)
class LEMLParameters(Parameters):
    """Parameters of LEML: what they do stands beside each."""

    solver = "leml"
    label = "LEML"
    title = "LEML: two factors of a low rank"
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {"leml": {"rank": (50, 100, 200)}}

    rank: int = parameter(100, Whole("Columns of W and H."))
    lam: float | None = parameter(
        None,
        Number(
            "Weight of the squared norms of W and H. Larger: smaller factors. none: found from the data, in one more pass "
            "over X and some over Y.",
            open_least=True,
            none=True,
        ),
    )
    loss: str = parameter(
        "squared",
        Choice(
            "Loss of a score: squared (targets 0 and 1), logistic or squared_hinge (targets -1 and 1).", options=LOSSES
        ),
    )
    observed: str = parameter(
        "full",
        Choice(
            "Which pairs of a row and a label count. full: all of them. given: those of the dataset's mask (`convert "
            "--observed`, `Dataset.with_observed`).",
            options=OBSERVED,
        ),
    )
    alternations: int = parameter(10, Whole("Alternations, at most. Each solves for W, then for H."))
    tol: float = parameter(
        1e-3, Number("Alternations end when one lowers the objective by no more than this share of it.", most=1.0)
    )
    newton: int = parameter(
        3, Whole("Steps of the trust-region Newton method in a solve of W or H, at most. The squared loss takes one.")
    )
    cg: int = parameter(
        20, Whole("Steps of conjugate gradients, at most: in a W step with the squared loss, else in a Newton step.")
    )
    cg_tol: float = parameter(
        0.1, Number("Conjugate gradients end when the residual is no more than this share of the gradient.", most=1.0)
    )
    held_out: float = parameter(
        0.1,
        Number(
            "Share of the rows that are not learned from: they tell when to stop, see `criterion` and `patience`. At most "
            "about 50,000 rows; with K > 335 labels 17 million / K, but not below 1,000. The best alternation is kept. 0: "
            "no rows are held out.",
            most=0.5,
            open_most=False,
        ),
    )
    patience: int = parameter(
        2, Whole("Training stops after so many alternations that are no better on the held-out rows.")
    )
    refit: bool = parameter(
        True, Flag("Whether the best alternation is done again in the end with all rows, from where it began.")
    )
    criterion: str = parameter(
        "precision",
        Choice(
            "What is measured on the held-out rows: precision (P@1 + P@3 + P@5) or auc (the average AUC of a row).",
            options=CRITERIA,
        ),
    )
    bias: bool = parameter(
        True, Flag("Whether each row has one more feature, which is 1. W then has a last row for it.")
    )

    def lam_for(self, scale: float) -> float:
        """lam: as given, or a sixteenth of what chance alone makes of the losses' slopes; 1 where that is nothing.

        scale: that of the squared loss, whose slopes without weights are M - Y (see `ScaleJob`). At the optimum
        X^T times the slopes has no singular value above lam, so what lam is measured by is how large noise makes them.
        """
        return self.lam if self.lam is not None else _CHANCE * _OF_LOSS[self.loss] * scale or 1.0

    direct: ClassVar[bool] = False  # whether W steps go by the normal equations

    def steps(self, n_features: int, n_labels: int) -> LEMLParameters:
        """Of its W steps: these."""
        return self

    @property
    def closed(self) -> bool:
        """Whether products over all pairs come down to products of r x r matrices: squared loss, full labels."""
        return self.loss == "squared" and self.observed == "full"

    @property
    def threshold(self) -> float:
        """The score above which a label is predicted: half way between the two targets."""
        return 0.5 if self.loss == "squared" else 0.0


@dataclass(frozen=True)
class DirectSteps(LEMLParameters):
    """W steps by the normal equations, of CPLST where there are few features."""

    direct: ClassVar[bool] = True


@dataclass(frozen=True)
class CPLSTParameters(Parameters):
    """Parameters of CPLST: what they do stands beside each."""

    solver = "cplst"
    label = "CPLST"
    title = "CPLST: the closed form of LEML's squared loss without lam"
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {"cplst": {"rank": (50, 100, 200)}}

    rank: int = parameter(
        100, Whole("Columns of W and H, as many as there are features (with the bias) or labels at most.")
    )
    iterations: int = parameter(100, Whole("Iterations of the subspace method, at most."))
    tol: float = parameter(
        1e-7, Number("Iterations end when one lowers the objective by no more than this share of it.", most=1.0)
    )
    oversampling: int = parameter(
        50, Whole("Columns beyond `rank` that the iterations carry: with more, fewer iterations.", least=0)
    )
    cg: int = parameter(
        100,
        Whole(
            "Steps of conjugate gradients in an iteration, at most. They are taken where X has 2,048 features or more; with "
            "fewer, X^T X is in memory and solved with."
        ),
    )
    cg_tol: float = parameter(
        1e-4, Number("Conjugate gradients end when the residual is no more than this share of the gradient.", most=1.0)
    )
    lam: float = parameter(
        1e-8,
        Number(
            "Weight of ||W||^2 in these problems. It keeps them well posed; the default is next to 0.", open_least=True
        ),
    )
    bias: bool = parameter(
        True, Flag("Whether each row has one more feature, which is 1. W then has a last row for it.")
    )

    def rank_for(self, n_features: int, n_labels: int) -> int:
        """Columns of W and H: Z has no rank above its rows, the bias among them, or its columns."""
        return min(self.rank, n_features + self.bias, n_labels)

    def steps(self, n_features: int, n_labels: int) -> LEMLParameters:
        """Its least-squares problems as W steps of LEML."""
        n_inputs = n_features + self.bias
        rank, direct = min(self.rank + self.oversampling, n_inputs, n_labels), n_inputs <= MOST_INPUTS
        return (DirectSteps if direct else LEMLParameters)(
            rank, self.lam, alternations=self.iterations, cg=1 if direct else self.cg, cg_tol=self.cg_tol, held_out=0.0,
            bias=self.bias,
        )  # fmt: skip

    @property
    def threshold(self) -> float:
        """The score above which a label is predicted: half way between the targets 0 and 1."""
        return 0.5
