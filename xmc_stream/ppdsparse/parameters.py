"""Parameters of PPDSparse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xmc_stream.methods.parameters import GIVEN, Choice, ClassWeight, Flag, Number, Parameters, Whole, parameter

BALANCED, PROPENSITY = "balanced", "propensity"  # ways to weigh classes
LOSSES = ("squared_hinge", "hinge")  # their places are their numbers in `ppdsparse.kernels.search`
# LIBLINEAR's squared hinge, which DiSMEC uses at C = 1, has no half; without the l1 term it takes more rounds
DISMEC = {
    "lam": 0.0,
    "tau": 1.0,
    "C": 2.0,
    "rounds": 5,
    "max_rounds": 5,
    "guide": 0.0,
    "prune": 0.01,
    "positive_weight": 1.0,
}
# Without a cap on rounds a search is worth more work in between: see benchmarks/passes.py.
_MORE_EPOCHS = 5  # times `epochs`
_NEAR = 0.1  # short of violating, and added all the same
_GROWTH = 2  # times max(|A|, added) may be added
LARGE_MODEL = 100_000  # weights: a smaller one stays whole
# Classes whose gap is above FAR of their objective go on when the rounds of all are over, if that is WORTH it: together
# their gaps are more than this part of the objective. What they lack is rows, so searches bring more of them.
FAR, WORTH = 0.02, 0.03
_FAR_GROWTH = 4
# Where C is not given it is _HALF / spread, from 1 to _MOST_C: text spreads by nearly 1, few dense features by much less.
_HALF, _MOST_C = 0.5, 100.0
# There positives weigh as much more, up to this: with few features a class's few positives are not fitted else.
_MOST_WEIGHT = 2.0
_LEAST_GAIN = 0.25  # of tol; on held-out rows 0.5 costs up to 0.1 of P@k, and 0.25 nothing
# Kinds of searches. A narrow one scores with weights of 16 bits, an approximate one with some of these: what they find
# enters active sets and nothing else.
EXACT, NARROW, APPROXIMATE = "", "narrow", "approximate"
# Without a cap, epochs of a round double after so many rounds, so many times. Only then a class whose gap has not halved in as
# many rounds is left as it is: what is slow is a class of many rows alike, which each step moves a little.
PATIENCE, DOUBLINGS = 5, 6
ROUNDING = 1e-7  # of the objective: gaps that are not seen to halve any more


@dataclass(frozen=True)
class PPDSparseParameters(Parameters):
    """Parameters of PPDSparse: what they do stands beside each."""

    solver = "ppdsparse"
    label = "PPDSparse"
    title = "PPDSparse: a vector of weights for each class, with l1 and l2 terms"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dismec": DISMEC}
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {
        "ppdsparse": {"lam": (0.01, 0.1), "C": (0.5, 1.0, 2.0)},
        "dismec": {"C": (1.0, 2.0, 4.0, 8.0)},
    }

    lam: float = parameter(0.01, Number("Weight of the l1 term. Larger: fewer weights that are not 0."))
    tau: float = parameter(1.0, Number("Weight of the l2 term. Larger: smaller weights.", open_least=True))
    # C and positive_weight are numbers wherever something is solved: `ppdsparse.problem.settled` sees to it
    C: float = parameter(
        None,
        Number(
            "Weight of the loss. Larger: the training rows are fitted more closely. 2 here is 1 in LIBLINEAR, DiSMEC and "
            "the authors' program, whose squared hinge has no factor 1/2. none: 1, and more where the rows spread by less "
            "than half of a unit about their mean: 1 / (2 spread), 100 at most. The spread is the mean of ||x_i - m||^2, "
            "from 256 random pairs of rows.",
            open_least=True,
            none=True,
        ),
    )
    positive_weight: float = parameter(
        None,
        Number(
            "How many times C counts for the positive rows of a class, as LIBLINEAR's -w1 and scikit-learn's class_weight "
            "have it. Larger: fewer positives score low, and more negatives score high. none: 1, and more where the rows "
            "spread by less than half of a unit about their mean: 1 / (2 spread), 2 at most.",
            open_least=True,
            none=True,
            unsaid=True,
        ),
    )
    class_weight: str | None = parameter(
        None,
        ClassWeight(
            "What C and positive_weight are multiplied by for the positives of each label. balanced: N / (2 N_k), and "
            "N / (2 (N - N_k)) for its negatives, where N_k of the N rows have the label. propensity: the more, the likelier "
            "the label is to be missing where it is true (see docs/ppdsparse.md); PSP@k rises. given: the weights of "
            "--class-weight FILE; in Python a dict (label as in y: weight; others 1) or an array of one weight a label.",
            options=(BALANCED, PROPENSITY, GIVEN),
            none=True,
            unsaid=True,
        ),
    )
    loss: str = parameter(
        "squared_hinge",
        Choice("Loss of a score z: squared_hinge, 1/2 max(0, 1 - y z)^2, or hinge, max(0, 1 - y z).", options=LOSSES),
    )
    bias: bool = parameter(True, Flag("Whether each class has a bias. The l1 term leaves it out."))
    tol: float = parameter(
        0.01,
        Number(
            "A class is done when no row violates optimality by more: |dG/da_i| <= tol, G being the dual objective. Scores "
            "are float32, so 1e-5 is the least.",
            least=1e-5,
        ),
    )
    rounds: int = parameter(
        3, Whole("Rounds of every class: each solves it on its active set. A class that is done takes no more.")
    )
    max_rounds: int | None = parameter(
        6,
        Whole(
            "Rounds of a class, at most. After `rounds`, a class goes on only while its duality gap is above 2 % of its "
            "objective, and only while these gaps together are more than 3 % of the objective of all classes. none: no "
            "cap. A class then goes on until it is within tol, or rounding keeps it from its optimum; from round 35 on it "
            "ends where its gap has not halved in five rounds.",
            none=True,
        ),
    )
    epochs: int = parameter(
        2,
        Whole(
            "Passes over the active set in a round. Without a cap on rounds: five times as many, and twice as many again "
            "after every five rounds, six times."
        ),
    )
    last_epochs: int = parameter(
        6,
        Whole(
            "Passes over the active set in the last of `rounds`, and in each round after it; there C / (2 tau) times as "
            "many where that is more than one, C being the larger one of positives and negatives."
        ),
    )
    added: int = parameter(
        50,
        Whole(
            "A search may add max(|A|, added) rows that violate most to the active set A. After `rounds`: four times as "
            "many. Without a cap on rounds: twice as many."
        ),
    )
    # true or false wherever something is solved, see `ppdsparse.problem.settled`
    all_rows: bool | None = parameter(
        None,
        Flag(
            "Whether the first active set of a class is all rows. Classes are then solved 16 at a time, without a search. "
            "One such round, of epochs + last_epochs passes at most, stands for `rounds`; there are more passes where C is "
            "large, as in last_epochs, and fewer of a class of which one gains less than tol / 4 of all. Further rounds may "
            "follow as ever. true wants memory for all rows at once. none: true where first active sets would have a 25th of "
            "all rows or more and X is small (see docs/ppdsparse.md). false in a warm start.",
            none=True,
            unsaid=True,
        ),
    )
    guide: float | None = parameter(
        None,
        Number(
            "Weight w of what groups of labels say of a label that scores z: the score becomes 1 - (1 - z)^3, or "
            "1 + (z - 1) / 100 where z is above 1, less w mean_r min((1 - z_r)_+, 1.15)^3, with z_r the score of the label's "
            "group in clustering r of eight. 0: no groups, the score is z. none: 2 where 2,048 labels or more have training "
            "rows, else 0.",
            none=True,
            unsaid=True,
        ),
    )
    implied: float | None = parameter(
        None,
        Number(
            "Margin of implied labels: where all training rows of label j, five or more, have label l too, l scores at least "
            "what j does, less this. Larger: fewer labels are lifted; 1000: none. none: 0.1 where there are groups of labels "
            "(see guide), else no label is lifted.",
            open_least=True,
            none=True,
            unsaid=True,
        ),
    )
    prune: float | None = parameter(
        None,
        Number(
            "The finished model leaves out weights with |w_j| below this, but never the bias. Objective and gap are those "
            "of the weights before. 0: off. none: where there are 100,000 weights or more, those below 0.25 / (r sqrt(d)), r "
            "being the mean length of a row and d its mean number of values; below 0.35 / (r sqrt(d)) where 2,048 labels or "
            "more have training rows.",
            none=True,
            unsaid=True,
        ),
    )
    weight_type: str | None = parameter(
        None,
        Choice(
            "Type of the finished model's weights on disk. float16 halves their bytes and rounds each by at most 1/2048 of "
            "itself, so a score moves by at most sum_j |x_j w_j| / 2048. Objective and gap are those of the weights before. "
            "Weights below 6e-5 are rounded by up to 3e-8, and those below 3e-8 left out. A unit of 1,024 classes keeps "
            "float32 where weights beyond 65504, or many that small, would make that more than 1/2048 of sum |w|. none: "
            "float16 where there are 100,000 weights or more and prune is none too, else float32.",
            options=("float32", "float16"),
            none=True,
            unsaid=True,
        ),
    )
    cut: float = parameter(
        0.0,
        Number(
            "Searches between the first `rounds` rounds leave out a class's smallest weights, as many as have a norm of at "
            "most this share of ||w||. Larger: faster and less exact; try 0.2. The last search is exact. 0: off.",
            most=1.0,
            unsaid=True,
        ),
    )
    delta: float = parameter(
        0.0,
        Number(
            "Searches between the first `rounds` rounds score with ceil(2 ||w||_1^2 / delta^2) random draws from a class's "
            "weights instead of all of them. Larger: faster and less exact; try 2. The last search is exact. 0: off.",
            unsaid=True,
        ),
    )
    min_value: float = parameter(
        0.0,
        Number(
            "Searches between the first `rounds` rounds use only entries with |x_ij| above this. Larger: faster and less "
            "exact; try 0.1 for rows of length one. The last search is exact. 0: off.",
            unsaid=True,
        ),
    )

    @property
    def approximate(self) -> bool:
        """Whether searches between rounds may be approximate."""
        return self.cut > 0 or self.delta > 0 or self.min_value > 0

    def kind_of_search(self, round_: int) -> str:
        """EXACT or NARROW: before a round of every class a search only chooses rows; later ones say which classes are done."""
        return NARROW if self.common_rounds is not None and 0 < round_ < self.common_rounds else EXACT

    @property
    def loss_code(self) -> int:
        """The kernels' number of the loss."""
        return LOSSES.index(self.loss)

    @staticmethod
    def C_for(spread: float) -> float:
        """C where it is not given, by the mean squared distance of the rows from their mean.

        Scaling all rows by s and w by 1/s leaves the scores, and the loss then weighs s^2 times as much. So C = 1 / spread
        treats rows that spread little as rows of spread 1 with C = 1. Equal rows have nothing to learn from: 1.
        """
        return max(1.0, _HALF / max(spread, _HALF / _MOST_C)) if spread > 0 else 1.0

    @staticmethod
    def positive_weight_for(spread: float) -> float:
        """The weight of positives where it is not given, by the spread of the rows as in `C_for`."""
        return min(PPDSparseParameters.C_for(spread), _MOST_WEIGHT)

    def bounds(self, weight: float) -> tuple[float, float]:
        """Of a row whose loss counts C weight: h2 of its dual's loss term h2 a^2 / 2, and the upper bound of its a."""
        C = self.C * weight
        return (1.0 / C, math.inf) if self.loss == "squared_hinge" else (0.0, C)

    def epochs_of(self, round_: int) -> int:
        """Passes over the active set in a round (the first round is 0), at most: more after those of every class where C, of
        positives or of negatives, is large, as these classes are far from their optimum. Without a cap, see PATIENCE.
        """
        if self.common_rounds is None:
            return (_MORE_EPOCHS * self.epochs) << min(round_ // PATIENCE, DOUBLINGS)
        if self.all_rows and not round_:
            return self.epochs + self.last_epochs * self._longer
        if round_ >= self.common_rounds:
            return self.last_epochs * self._longer
        return self.last_epochs if round_ + 1 == self.common_rounds else self.epochs

    @property
    def _longer(self) -> int:
        """How many times as many passes there are where C is large: a coordinate step does little there."""
        return max(1, round(self.C * max(1.0, self.positive_weight) / (2 * self.tau)))

    def enough(self, round_: int) -> float:
        """A violation in the active set after a round that is as good as the largest one.

        Every class goes on after a round that is not the last of all, unless it is within tol.
        """
        goes_on = self.common_rounds is not None and round_ + 1 < self.common_rounds
        return self.tol if goes_on else math.inf

    @property
    def least_gain(self) -> float:
        """What an epoch on all rows gains of the dual objective at least, relative to what all did, or a class stands still.

        Without a cap on rounds only violations count. So they do with the hinge, which gains little far from the optimum.
        """
        return 0.0 if self.common_rounds is None or self.loss == "hinge" else _LEAST_GAIN * self.tol

    @property
    def common_rounds(self) -> int | None:
        """Rounds of every class, None for no cap: `rounds`, or max_rounds where these are fewer; one if it has all rows."""
        return None if self.max_rounds is None else 1 if self.all_rows else min(self.rounds, self.max_rounds)

    def growth_after(self, round_: int) -> int:
        """Times max(|A|, added) that the search after a round (the first is 0) may bring."""
        if self.common_rounds is None:
            return _GROWTH
        return 1 if round_ + 1 < self.common_rounds else _FAR_GROWTH

    def warm(self, new_labels: bool = False) -> PPDSparseParameters:
        """Those of a run that begins from a model's weights. new_labels: whether the model does not know some labels.

        One round follows the search with the model's weights, and new labels then take those of a cold run. For the hinge,
        whose alpha does not follow from the margins, all take two.
        """
        cold = replace(self, all_rows=False)
        common = cold.common_rounds
        if common is None:
            return cold
        if self.loss != "squared_hinge":
            return replace(cold, rounds=min(common, 2), epochs=2 * self.epochs)
        return WarmParameters(**{**asdict(cold), "rounds": common if new_labels else 1})

    def own_rounds(self, new: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Rounds after which a class may be done though it is not within tol. new: which classes a warm start did not know."""
        return np.full(len(new), self.common_rounds or 0)

    def warm_near(self, of_model: Mapping[str, float]) -> float:
        """How far short of -1 the score of a row may be that the search with a model's weights adds.

        of_model: the model's own lam, tau, C and positive_weight, those that it has. Where w has to shrink, as lam / C or
        tau / C has grown for positives or negatives, rows that the weights do not violate come to matter.
        """
        before = {**asdict(self), **of_model}
        shrinks = any(
            getattr(self, name) * before["C"] * weights[0] > before[name] * self.C * weights[1]
            for name in ("lam", "tau")
            for weights in ((1.0, 1.0), (before["positive_weight"], self.positive_weight))
        )
        return max(self.near, _NEAR / 2 if shrinks else -self.tol)

    def carried(self) -> PPDSparseParameters:
        """Those of a trial that goes on from the state of another run: its rounds stand for the first one.

        The second has the epochs of all rounds of a cold run: with fewer, rows of few dense features stay far behind. Where
        classes begin with all rows they begin anew, as one round from nothing takes less than a search and a round.
        """
        if self.all_rows:
            return replace(self, max_rounds=1)
        common = self.common_rounds or self.rounds
        return replace(self, rounds=2, max_rounds=2, last_epochs=(common - 1) * self.epochs + self.last_epochs)

    @property
    def near(self) -> float:
        """How far short of -1 the score of a row may be that an exact search adds."""
        return _NEAR if self.max_rounds is None else -self.tol

    def halves(self, large: bool) -> bool:
        """Whether the finished model has weights of 16 bits; large: it has as many weights as leave small ones out."""
        return self.weight_type == "float16" or (self.weight_type is None and self.prune is None and large)

    def violates(self, scores: NDArray[Any]) -> NDArray[np.bool_]:
        """Which scores of rows outside A violate by more than tol."""
        return np.asarray(scores > np.float32(self.tol - 1.0))


@dataclass(frozen=True)
class WarmParameters(PPDSparseParameters):
    """Those of a run that begins from a model's weights: the first round has the epochs of all, and ends what is known."""

    def kind_of_search(self, round_: int) -> str:
        """The first search only chooses rows; that behind the first round says which classes are done."""
        return NARROW if round_ == 0 else EXACT if round_ == 1 else super().kind_of_search(round_)

    def epochs_of(self, round_: int) -> int:
        """More in the first round."""
        return super().epochs_of(round_) if round_ else self.epochs + self.last_epochs

    def enough(self, round_: int) -> float:
        """The first round may be a class's last."""
        return super().enough(round_) if round_ else math.inf

    def own_rounds(self, new: NDArray[np.bool_]) -> NDArray[np.int64]:
        """One of what the model knew."""
        return np.where(new, super().own_rounds(new), 1)
