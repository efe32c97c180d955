"""PPDSparse: one class at a time, by dual coordinate descent on an active set that a search over all rows extends.

Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. Per class, with y_i in {-1, +1} and a bias feature
x_i0 = 1 that the l1 term leaves alone,

    F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i loss(w.x_i, y_i)
    squared hinge  loss = 1/2 max(0, 1 - y z)^2        hinge  loss = max(0, 1 - y z)

This module covers the parameters and the inner problem. Rounds, files and memory are those of `jobs.ppdsparse`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.kernels.dcd import add_rows, descend, dual_terms, renumber, solve_classes, take_weights, violation
from xmc_stream.kernels.order import stream_order
from xmc_stream.kernels.permutation import key_of, visiting_order

LOSSES = ("squared_hinge", "hinge")
# LIBLINEAR's squared hinge, which DiSMEC uses at C = 1, has no half; without the l1 term it takes more rounds
DISMEC = {"lam": 0.0, "tau": 1.0, "C": 2.0, "rounds": 5, "max_rounds": 5, "prune": 0.01}
_OPTIONS = ("prune", "delta", "min_value")
ROW_BYTES = 80  # of an active row in a solve: its number, place, sign, alpha before and after, score, order, square
LARGE_BYTES = 4 << 20  # a class whose active rows take more, on average, is large
RUN_BYTES, RUN_BITS = 1 << 18, 9  # of a run of rows, on average, and rows at most (log2)
# Without a cap on rounds a search is worth more work in between: see benchmarks/passes.py.
_MORE_EPOCHS = 5  # times `epochs`
_NEAR = 0.1  # short of violating, and added all the same
_GROWTH = 2  # times max(|A|, added) may be added
# Classes whose gap is above FAR of their objective go on when the rounds of all are over, if that is WORTH it: together
# their gaps are more than this part of the objective. What they lack is rows, so searches bring more of them.
FAR, WORTH = 0.02, 0.005
_FAR_GROWTH = 4
# A warm start brings as many rows at once as a cold one does in its rounds, and solves them in one.
_WARM_GROWTH = 4
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


def start_sizes(n_positives: NDArray[np.int64], n_samples: int) -> NDArray[np.int64]:
    """Negatives drawn at first: min(10 n_pos, N / 10), one at least, as far as there are any; none without positives."""
    wanted = np.maximum(1, np.minimum(10 * n_positives, n_samples // 10))
    return np.where(n_positives > 0, np.minimum(wanted, n_samples - n_positives), 0)


def added_sizes(
    n_active: NDArray[np.int64], added: int, n_samples: int, growth: float | NDArray[np.float64] = 1
) -> NDArray[np.int64]:
    """Rows that a search may bring: growth max(|A|, added), as far as there are rows outside A."""
    wanted = (growth * np.maximum(n_active, added)).astype(np.int64)
    return np.asarray(np.minimum(wanted, n_samples - n_active))


def warm_sizes(n_positives: NDArray[np.int64], added: int, n_samples: int) -> NDArray[np.int64]:
    """Negatives that the search of a warm start may bring: what a cold start has after three rounds, about."""
    wanted = _WARM_GROWTH * np.maximum(start_sizes(n_positives, n_samples), added)
    return np.where(n_positives > 0, np.minimum(wanted, n_samples - n_positives), 0)


@dataclass(frozen=True)
class RowOrder:
    """Which classes are large, and the runs of rows that their visiting orders are made of: a matter of the data alone.

    A class of more than `large` active rows visits them in an order that all such classes share: the 2^run_bits rows of
    a run close together, so that rows can stream by (`kernels.stream`). A smaller one has an order of its own.
    """

    n_samples: int
    large: int
    run_bits: int

    @classmethod
    def of(cls, n_samples: int, nnz: int) -> RowOrder:
        """For n_samples rows with nnz entries together."""
        row_bytes = 8 * nnz // max(n_samples, 1)
        run_bits = max(0, (RUN_BYTES // max(row_bytes, 1)).bit_length() - 1)
        return cls(n_samples, LARGE_BYTES // (row_bytes + ROW_BYTES), min(run_bits, RUN_BITS))

    @property
    def n_runs(self) -> int:
        """Runs of all rows."""
        return -(-self.n_samples >> self.run_bits)


@dataclass
class ActiveSets:
    """Active sets of a run of classes, ragged: class c has the entries [ptr[c], ptr[c + 1]).

    rows int64, ascending in a class; sign int8 (+1 positive, -1 negative); alpha float64 >= 0.
    """

    first_label: int
    ptr: NDArray[np.int64]
    rows: NDArray[np.int64]
    sign: NDArray[np.int8]
    alpha: NDArray[np.float64]


class Scratch:
    """Work space of one thread, made once: feature numbers, v and weights, and one class of max_rows and max_nnz."""

    def __init__(self, n_features: int, max_rows: int, max_nnz: int) -> None:
        self.local_of = np.full(n_features, -1, np.int32)
        self.features = np.empty(n_features, np.int32)
        self.v = np.zeros(n_features)
        self.indptr = np.empty(max_rows + 1, np.int64)
        self.squares = np.empty(max_rows)
        self.order = np.empty(max_rows, np.int64)
        self.ascending = np.arange(max_rows)
        self.asleep = np.empty(max_rows, np.bool_)
        self.indices = np.empty(max_nnz, np.int32)
        self.data = np.empty(max_nnz, np.float32)
        max_weights = max(n_features, min(max_nnz, 1 << 20))
        self.w_features = np.empty(max_weights, np.int32)
        self.w_data = np.empty(max_weights, np.float32)


class CSRBlock(Protocol):
    """Rows in memory: indptr (n + 1,) from 0, indices, values float32."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[Any]: ...
    @property
    def values(self) -> NDArray[np.float32]: ...


Sink = Callable[[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]], None]
Gather = Callable[[NDArray[np.int64]], CSRBlock]


@dataclass(frozen=True)
class Solver:
    """The inner problem for given parameters: gives every class of some active sets its weights.

    seed: of the visiting orders, with class, round and epoch. order: what large classes are, and their visiting order.
    """

    parameters: PPDSparseParameters
    seed: int
    order: RowOrder

    def solve(
        self,
        sets: ActiveSets,
        at: NDArray[np.int64],
        block: CSRBlock,
        round_: int,
        scratch: Scratch,
        figures: NDArray[np.float64],
        sink: Sink,
    ) -> None:
        """Solve all classes, their active rows being rows `at` of the block; sets.alpha is moved on.

        figures (n, 4): per class the bias, G, lam ||w||_1 + (tau/2) ||w||^2 and the largest violation in the active
        set. sink takes weights: counts of some classes in turn, and their features (ascending) and values.
        """
        p = self.parameters
        n = len(sets.ptr) - 1
        counts = np.zeros(n, np.int64)
        done = 0
        while done < n:
            end, filled = solve_classes(
                done, sets.first_label, sets.ptr, at, sets.sign, sets.alpha,
                block.indptr, block.indices, block.values,
                sets.rows, self.order.n_samples, self.order.large, self.order.run_bits,
                self.seed, round_, p.epochs_of(round_), p.tol, p.lam, p.tau, p.h2, p.upper, p.bias,
                scratch.local_of, scratch.features, scratch.v, scratch.indptr, scratch.indices, scratch.data,
                scratch.squares, scratch.order, scratch.ascending, scratch.asleep,
                counts, scratch.w_features, scratch.w_data, figures,
            )  # fmt: skip
            sink(counts[done:end], scratch.w_features[:filled], scratch.w_data[:filled])
            done = end

    def solve_large(
        self,
        sets: ActiveSets,
        lengths: NDArray[np.int64],
        gather: Gather,
        max_nnz: int,
        round_: int,
        scratch: Scratch,
        figures: NDArray[np.float64],
        sink: Sink,
    ) -> None:
        """The same for one class of any size: rows are gathered as they are needed, at most max_nnz entries at a time.

        lengths: entries of each active row. gather: its block is renumbered in place. figures (4,). What does not fit at
        once is gathered anew in every epoch, a stretch of the visiting order after the other. Same arithmetic in the
        same order as `solve`, hence the same bits.
        """
        p = self.parameters
        n = len(sets.rows)
        held: tuple[NDArray[np.int64], CSRBlock, NDArray[np.float64]] | None = None
        n_local = 0
        asleep = np.zeros(n, np.bool_)

        def stretches(
            order: NDArray[np.int64],
        ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], CSRBlock, NDArray[np.float64]]]:
            """Runs of an order that fit: members as ordered, their places in the block, the block, squared norms."""
            nonlocal n_local, held
            ends = np.cumsum(lengths[order])
            begin = 0
            while begin < len(order):
                before = int(ends[begin - 1]) if begin else 0
                end = max(int(np.searchsorted(ends, before + max_nnz, side="right")), begin + 1)
                visit = order[begin:end]
                if held is None or len(held[0]) < n:  # what is held is not all of them
                    held = None
                    members = np.sort(visit)
                    block = gather(sets.rows[members])
                    squares = np.empty(len(members))
                    n_local = renumber(
                        block.indptr, block.indices, block.values, scratch.local_of, scratch.features, n_local,
                        1.0 if p.bias else 0.0, squares,
                    )  # fmt: skip
                    held = members, block, squares
                yield visit, np.searchsorted(held[0], visit), *held[1:]
                begin = end

        v0 = 0.0
        for visit, at, block, _ in stretches(np.flatnonzero(sets.alpha)):
            v0 = add_rows(
                at, block.indptr, block.indices, block.values, sets.sign[visit], sets.alpha[visit], scratch.v, v0
            )
        if not p.bias:
            v0 = 0.0
        bar = math.inf
        order = np.empty(n, np.int64)
        for epoch in range(p.epochs_of(round_)):
            if n > self.order.large:
                stream_order(
                    sets.rows, self.order.n_samples, self.order.run_bits, self.seed, round_, epoch, order
                )  # fmt: skip
            else:
                visiting_order(0, n, np.uint64(key_of(self.seed, sets.first_label, round_, epoch)), order)
            worst = 0.0
            for visit, at, block, squares in stretches(order[~asleep[order]]):
                v0, met = descend(
                    visit, at, block.indptr, block.indices, block.values, squares, sets.sign, sets.alpha, asleep, bar,
                    scratch.v, v0, p.lam, p.tau, p.h2, p.upper, p.bias,
                )  # fmt: skip
                worst = max(worst, met)
            bar = worst
            if worst <= p.tol:
                if not asleep.any():
                    break
                asleep[:] = False
                bar = math.inf
        inside = 0.0
        for visit, at, block, _ in stretches(np.arange(n)):
            found = violation(
                at, block.indptr, block.indices, block.values, sets.sign[visit], sets.alpha[visit], scratch.v, v0,
                p.lam, p.tau, p.h2, p.upper,
            )  # fmt: skip
            inside = max(inside, found)
        count, square, kept, bias = take_weights(
            n_local, scratch.features, scratch.local_of, scratch.v, v0, p.lam, p.tau, scratch.w_features, scratch.w_data
        )
        figures[:] = bias, 0.5 * p.tau * square + dual_terms(sets.alpha, p.h2, 0.0), kept, inside
        sink(np.array([count], np.int64), scratch.w_features[:count], scratch.w_data[:count])
