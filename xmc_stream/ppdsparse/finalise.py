"""The last job of a unit: its weights and statistics into the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.linear.tiles import TileSizes
from xmc_stream.linear.weights import HALF_LEAST, Unit, half_holds, new_unit, tiles_of
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.problem import Found, Problem
from xmc_stream.ppdsparse.state import (
    BIAS,
    DUAL,
    EMPTY,
    INSIDE,
    KEPT,
    LOSS,
    OUTSIDE,
    STATUS,
    UnitState,
    update_statistics,
)
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset

_Weights = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]


@dataclass(frozen=True)
class FinaliseJob:
    """Write a unit of the model from its last state, and what the last search, an exact one, says of its classes.

    prune: below what a weight is left out; half: weights are stored in 16 bits, where that holds them. Objective and gap are
    those of the weights before.
    """

    problem: Problem
    prune: float
    half: bool
    round: int
    unit: Unit
    state: str
    found: Found
    out: str

    @property
    def key(self) -> str:
        """The unit."""
        return f"finalise/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt sums objective, gap and size."""
        drop_tiles()
        first, last = self.unit
        p, dataset = self.problem.parameters, Dataset(self.problem.data)
        n_samples, n_features = dataset.n_samples, dataset.n_features
        state = UnitState(Path(self.state), last - first, n_samples, n_features)
        statistics = state.statistics
        if self.found.files:  # else no class is open, its solve has seen all rows, or it is a trial and nobody asks
            of_classes = self.problem.weights.of_classes(dataset, first, last)
            searched = self.found.open(n_samples)
            update_statistics(statistics, searched, first, p, self.round, of_classes=of_classes)
        tiles = TileSizes(first, last, n_features)
        least = np.float32(self.prune)
        half = self.half and half_holds(values for *_, values in self._weights(state, least))
        if half:
            least = max(least, HALF_LEAST)
        with new_unit(Path(self.out), n_features, last - first, np.float16 if half else np.float32) as writer:
            for lengths, features, values in self._weights(state, least):
                writer.weights.append(lengths, features, values)
                tiles.add(lengths, features)
            writer.bias[:] = statistics[:, BIAS]
            objective = statistics[:, KEPT] + p.C * statistics[:, LOSS]
            gap = objective + statistics[:, DUAL]
            violation = np.maximum(statistics[:, INSIDE], statistics[:, OUTSIDE])
            figures = {"objective": objective, "duality_gap": gap, "violation": violation}
            writer.statistics = {name: values.astype(np.float32) for name, values in figures.items()}
        learned = statistics[:, STATUS] != EMPTY
        relative = gap[learned] / objective[learned]
        return {
            "nnz": writer.weights.nnz,
            "float16": writer.weights.nnz if half else 0,
            "tile_ranges": [astuple(span) for span in tiles.ranges],
            "learned": int(learned.sum()),
            "open": int((violation[learned] > p.tol).sum()),
            "objective": float(objective.sum()),
            "gap_worst": float(relative.max(initial=0.0)),
            "gap_sum": float(relative.sum()),
            "violation": float(violation[learned].max(initial=0.0)),
        }

    def _weights(self, state: UnitState, least: np.float32) -> Iterator[_Weights]:
        """Of some classes at a time, the weights of at least that size: how many each has, their features, values."""
        for block in state.weights.blocks(max(4 * MIB, 16 * state.weights.shape[0])):
            lengths, features, values = np.diff(block.indptr), block.indices, block.values
            if least > 0:
                kept = np.flatnonzero(np.abs(values) >= least)
                lengths = np.diff(np.searchsorted(kept, block.indptr))
                features, values = features[kept], values[kept]
            yield lengths, features, values


def figures_of(receipts: Sequence[Receipt], n_labels: int) -> dict[str, Any]:
    """What a model says of all its units. receipts: of their jobs."""
    learned = sum(receipt["learned"] for receipt in receipts)
    return {
        "nnz": sum(receipt["nnz"] for receipt in receipts),
        "tiles": tiles_of(receipts),
        "objective": math.fsum(receipt["objective"] for receipt in receipts),
        "duality_gap": max(receipt["gap_worst"] for receipt in receipts),
        "duality_gap_mean": math.fsum(receipt["gap_sum"] for receipt in receipts) / max(learned, 1),
        "violation": max(receipt["violation"] for receipt in receipts),
        "n_open": sum(receipt["open"] for receipt in receipts),
        "n_empty": n_labels - learned,
    }
