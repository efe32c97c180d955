"""Parameters of the group lasso."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from xmc_stream.methods.parameters import Choice, Flag, Number, Parameters, Whole, parameter

LOSSES = ("multiclass", "multitask", "logistic", "label-ranking")  # `kernels.margins` knows them by their places
SOLVERS = ("bcd-ls", "bcd-cst", "fista", "sparsa", "fobos")


@dataclass(frozen=True)
class GroupLassoParameters(Parameters):
    """Parameters of the group lasso: what they do stands beside each."""

    solver = "group-lasso"
    label = "GroupLasso"
    title = "Group lasso: features that all classes share"
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {"group-lasso": {"lam": (3e-3, 1e-3, 3e-4, 1e-4)}}

    lam: float | tuple[float, ...] = parameter(
        1e-3,
        Number(
            "Weight of the penalty. Larger: fewer features. Of several, as [0.01,0.003,0.001], the largest is solved first, "
            "each next one begins from the solution before it, and the smallest one's is the model.",
            several=True,
        ),
    )
    loss: str = parameter(
        "multiclass",
        Choice(
            "Loss. multiclass (squared hinge) and logistic (multinomial) need rows of one label; multitask (squared hinge of "
            "each class against all others) and label-ranking (squared hinge of pairs of labels) take rows of several. Of "
            "label-ranking, which labels are predicted is learned from a fifth of the rows by another training, on the others.",
            options=LOSSES,
        ),
    )
    mix: float = parameter(
        0.0,
        Number(
            "Share of the l1 norm in the penalty. 0: whole rows of W become zero. Above 0: single weights do too (sparse "
            "group lasso). 1: single weights alone.",
            most=1.0,
            open_most=False,
        ),
    )
    algorithm: str = parameter(
        "bcd-ls",
        Choice(
            "bcd-ls: block coordinate descent, cyclic, with line search. bcd-cst: features drawn at random, with a constant "
            "step. fista, sparsa, fobos: steps along the whole gradient.",
            options=SOLVERS,
        ),
    )
    line_search: bool = parameter(
        True, Flag("Whether fista searches for its step; else it takes the constant that always works.")
    )
    shrink: bool = parameter(
        True,
        Flag(
            "Whether block coordinate descent visits, between sweeps over all features, those alone that are in the model or "
            "may come in. It ends with a sweep over all in any case."
        ),
    )
    extrapolate: bool = parameter(
        True,
        Flag(
            "Whether bcd-ls, with shrink, goes where its last sweeps were going, if that lowers the objective. Up to half a "
            "million weights of active features."
        ),
    )
    tol: float = parameter(
        1e-3,
        Number(
            "Training stops when the violation of the optimality conditions (equation 9) over a sweep is no more than this "
            "share of that over the first.",
            most=1.0,
        ),
    )
    max_passes: int = parameter(200, Whole("Passes over X, at most, for each value of lam. The sweep under way ends."))
    eta: float | None = parameter(
        None,
        Number(
            "First step of fobos, which falls with the square root of their number. none: the constant that always works, "
            "times four.",
            open_least=True,
            none=True,
        ),
    )
    debias: float | None = parameter(
        None,
        Number(
            "Solve again in the end for the selected features, without the penalty: for the sum of the losses (not their "
            "mean) and this weight of half the squared norm. With loss=logistic, 1 is scikit-learn's C=1. none: off.",
            none=True,
        ),
    )

    @property
    def lams(self) -> tuple[float, ...]:
        """The values of lam, from the largest to the smallest."""
        return tuple(sorted(set(self.lam), reverse=True)) if isinstance(self.lam, tuple) else (self.lam,)

    @property
    def descends(self) -> bool:
        """Whether the algorithm is block coordinate descent."""
        return self.algorithm.startswith("bcd")

    @property
    def draws(self) -> bool:
        """Whether features are drawn, and the step is constant."""
        return self.algorithm == "bcd-cst"

    @property
    def extrapolates(self) -> bool:
        """Whether W of some sweeps is kept."""
        return self.extrapolate and self.shrink and self.algorithm == "bcd-ls"

    @property
    def one_label(self) -> bool:
        """Whether a row may have one label at most."""
        return self.loss in ("multiclass", "logistic")
