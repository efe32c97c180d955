"""Warm start: the state that a first search and solve begin from, made of a model's weights; or another setting's state.

A label of the data is one of the model's by its name, where both have names of labels, else by its id. A label that the
model does not have, or had no rows of, or whose rows are many more or fewer now, begins from nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.linear.weights import SURE, LinearWeights, Unit
from xmc_stream.methods.contract import Step
from xmc_stream.methods.start import matched_labels, said_of
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.kernels.active import start_sets
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.solver import added_sizes, start_sizes, warm_sizes
from xmc_stream.ppdsparse.state import (
    BIAS,
    DONE,
    FRESH,
    INSIDE,
    OPEN,
    ROOM,
    STATUS,
    UnitState,
    UnitStateWriter,
    new_unit_state,
    next_search,
    set_known,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import new_pack
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import LABEL_COUNTS
from xmc_stream.store.nodes import understood


def weights_of_terms(model: LinearWeights) -> dict[str, float]:
    """lam, tau, C and positive_weight that a model was trained with, those that its method has; the last is 1 where it is
    not said."""
    with understood(model.path / "zarr.json"):
        params = model.attributes["params"]
        terms = {name: params.get(name) for name in ("lam", "tau", "C")}
        if terms["C"] is None:
            terms["C"] = model.attributes.get("C")  # which its training chose
        terms["positive_weight"] = model.attributes.get("positive_weight", 1.0)
        return {name: float(value) for name, value in terms.items() if value is not None}


_ROWS = MIB // 16  # of active sets that are written at a time
_CHANGED = 0.25  # of a label's rows: where more have come or gone, its weights are a bad start


@dataclass(frozen=True)
class MatchJob:
    """Of each label of the data, the label of the model that it is, -1 for one that begins from nothing."""

    data: str
    model: str
    out: str

    @property
    def key(self) -> str:
        """There is one."""
        return "match"

    def run(self) -> Receipt:
        """Match and write; the receipt counts labels. Raises InputError where names cannot be told apart, or none agrees."""
        dataset, model = Dataset(self.data), LinearWeights(self.model)
        found = matched_labels(model, dataset)
        used = found[found >= 0]
        bias = np.concatenate([model.unit_array(unit) for unit in model.units])
        counts = dataset.label_counts()
        untaught = ~np.isfinite(bias) | (bias >= SURE)
        if (model.path / LABEL_COUNTS).exists():  # models of earlier versions have none
            before = model.label_counts(0, model.n_labels)[used]
            untaught[used[np.abs(counts[found >= 0] - before) > _CHANGED * before]] = True
        kept = np.where(found >= 0, ~untaught[found], False)
        with new_pack(Path(self.out)) as pack:
            pack.write("labels", np.where(kept, found, -1))
        return said_of(model, dataset, found, kept)


def _runs(found: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of a match whose labels are neighbours in the model too, in the same order, or all begin from nothing."""
    breaks = np.where(found[1:] < 0, found[:-1] >= 0, found[1:] != found[:-1] + 1)
    ends = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(found)]
    yield from itertools.pairwise(ends)


@dataclass(frozen=True)
class StartJob:
    """A unit's state before round 0: weights of the model, the positives for active sets.

    Their alpha is set when round 0 gathers their rows. A class without positives keeps nothing. One that the model does
    not have gets the rows of a cold start, and a score of -1 everywhere: so the search finds none to add.
    match: what a `MatchJob` left.
    """

    problem: Problem
    model: str
    unit: Unit
    match: str
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"start/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt has the sizes that the search is planned from."""
        drop_tiles()
        dataset, model = Dataset(self.problem.data), LinearWeights(self.model)
        n_samples, n_features = dataset.n_samples, dataset.n_features
        first, last = self.unit
        Y = dataset.Y_columns()
        counts = np.diff(Y.ends(first, last))
        learned = (counts > 0) & (counts < n_samples)
        found = np.where(
            learned, read_small(Path(self.match), "labels", dataset.n_labels, np.int64, slice(*self.unit)), -1
        )
        drawn = np.where(learned & (found < 0), start_sizes(counts, n_samples), 0)
        drawn[counts + drawn > 2 * _ROWS] = 0  # these are not read at once: the next search brings negatives
        with new_unit_state(Path(self.out), last - first, n_samples, n_features) as writer:
            writer.statistics[:, BIAS] = np.where(learned, -1.0, 0.0)
            writer.statistics[:, FRESH] = learned & (found < 0)
            writer.statistics[:, INSIDE] = np.inf  # unknown: no class is done
            heaps = np.where(found >= 0, warm_sizes(counts, self.problem.parameters.added, n_samples), 0)
            writer.statistics[:, ROOM] = heaps
            self._write_sets(writer, Y, counts, drawn)
            n_bytes = self._write_weights(writer, model, found)
            set_known(writer.statistics, counts, n_samples)
        return {
            **next_search(Path(self.out), self.unit, dataset, self.problem.parameters),
            "bytes_read": Y.bytes_read + n_bytes,
        }

    def _write_sets(
        self, writer: UnitStateWriter, Y: SparseMatrix, counts: NDArray[np.int64], drawn: NDArray[np.int64]
    ) -> None:
        """The positives, and so many negatives, some classes at a time."""
        first, n_samples = self.unit.first, Y.shape[0]
        low, ends = 0, np.concatenate([[0], np.cumsum(counts + drawn)])
        while low < len(counts):
            high = max(low + 1, int(np.searchsorted(ends, ends[low] + _ROWS, side="right")) - 1)
            if high == low + 1 and not drawn[low]:  # it may be large
                writer.active.append(counts[low:high], np.zeros(0, np.int32), np.zeros(0))
                for rows in Y.index_windows(first + low, first + high, _ROWS):
                    writer.active.append(counts[:0], rows, np.zeros(len(rows)))
            else:
                positives, ptr = Y.block(first + low, first + high), np.zeros(high - low + 1, np.int64)
                rows = np.empty(int(ends[high] - ends[low]), np.int64)
                start_sets(
                    positives.indptr, positives.indices, drawn[low:high], first + low, n_samples, self.problem.seed, ptr, rows
                )  # fmt: skip
                writer.active.append(np.diff(ptr), rows, np.zeros(len(rows)))
            low = high

    def _write_weights(self, writer: UnitStateWriter, model: LinearWeights, found: NDArray[np.int64]) -> int:
        """The model's weights and biases of the labels found; returns bytes read."""
        n_bytes, opened = 0, None
        for low, high in _runs(found):
            if found[low] < 0:
                writer.weights.append(np.zeros(high - low, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
                continue
            old = int(found[low])
            for unit, begin, end in model.parts(old, old + high - low):
                if unit != opened:
                    opened, bias, weights = unit, model.unit_array(unit), model.unit_weights(unit)
                at = low + unit.first + begin - old
                writer.statistics[at : at + end - begin, BIAS] = bias[begin:end]
                before = weights.bytes_read
                for w in weights.blocks(max(4 * MIB, 16 * weights.shape[0]), begin, end):
                    writer.weights.append(np.diff(w.indptr), w.indices, w.values)
                n_bytes += weights.bytes_read - before
        return n_bytes


def last_solve(state: Path) -> Path:
    """The folder of the last round, of the state that a run left. Raises StoreError where there is none."""
    rounds = [int(folder.name.removeprefix("solve-")) for folder in state.glob("solve-*")]
    if not rounds:
        raise StoreError(f"{state} has no round to go on from: train the model that it is of again")
    return state / f"solve-{max(rounds)}"


@dataclass(frozen=True)
class CarryJob:
    """A unit's state for round 0: that of another run on the same rows, with all classes open.

    alpha stays: it is feasible for every lam and tau, and for the squared hinge for every C.
    """

    problem: Problem
    unit: Unit
    previous: str
    out: str

    @property
    def key(self) -> str:
        """The unit, under the name of the solve that this is instead of."""
        return f"solve/0/{self.unit.name}"

    def run(self) -> Receipt:
        """Copy; the receipt has the sizes that the search is planned from."""
        drop_tiles()
        dataset, (first, last) = Dataset(self.problem.data), self.unit
        shape = dataset.n_samples, dataset.n_features
        state = UnitState(Path(self.previous), last - first, *shape)
        p = self.problem.parameters
        with new_unit_state(Path(self.out), last - first, *shape) as writer:
            writer.statistics[:] = state.statistics
            writer.statistics[state.statistics[:, STATUS] == DONE, STATUS] = OPEN
            open_ = writer.statistics[:, STATUS] == OPEN
            writer.statistics[open_, INSIDE] = np.inf  # unknown: no class is done
            heaps = added_sizes(np.diff(state.active.ends(0, last - first)), p.added, shape[0], p.growth_after(0))
            writer.statistics[:, ROOM] = np.where(open_, heaps, 0)
            writer.copy(state, 0, last - first)
        n_bytes = state.active.bytes_read + state.weights.bytes_read
        return {**next_search(Path(self.out), self.unit, dataset, p), "bytes_read": n_bytes}


_TERMS = ("lam", "tau", "C")
_APART = ("guide", "implied", "prune", "weight_type")  # the labels' own weights do not depend on these until a run ends
_LEAST = 1e-6  # of a weight, where ratios are compared: 0 has none


def path_of(settings: Sequence[PPDSparseParameters]) -> list[Step]:
    """A tree of warm starts among settings that differ in lam, tau, C and _APART alone; others begin by themselves.

    C grows along it, and lam and tau fall, as w then need not shrink (see `PPDSparseParameters.warm`). A setting begins
    from the nearest one before it that has it so.
    """

    def place(i: int) -> tuple[float, ...]:
        lam, tau, C = (_value(settings[i], name) for name in _TERMS)
        return C, -lam, -tau, settings[i].prune or 0.0

    order = sorted(range(len(settings)), key=place)
    steps: list[Step] = []
    for i in order:
        mine = settings[i]
        starts = [step.setting for step in steps if _goes_on(settings[step.setting], mine)]
        start = min(starts, key=lambda j: _distance(settings[j], mine), default=None)
        steps.append(Step(i, start))
    return steps


def _goes_on(start: PPDSparseParameters, setting: PPDSparseParameters) -> bool:
    """Whether a setting takes less from the weights of another: they differ in numbers alone, and w does not shrink."""
    before, now = ({k: v for k, v in asdict(p).items() if k not in (*_TERMS, *_APART)} for p in (start, setting))
    (lam, tau, C), (lam_now, tau_now, C_now) = ([_value(p, name) for name in _TERMS] for p in (start, setting))
    grows = lam_now * C <= lam * C_now and tau_now * C <= tau * C_now
    takes = setting.loss == "squared_hinge" and setting.common_rounds is not None
    return before == now and takes and grows and (start.prune or 0.0) <= (setting.prune or 0.0)


def _distance(start: PPDSparseParameters, setting: PPDSparseParameters) -> float:
    ratios = (max(_value(setting, name), _LEAST) / max(_value(start, name), _LEAST) for name in _TERMS)
    return sum(abs(math.log(ratio)) for ratio in ratios)


def _value(p: PPDSparseParameters, name: str) -> float:
    """lam, tau or C; a C that is not given is 1 at least."""
    value = getattr(p, name)
    return 1.0 if value is None else float(value)
