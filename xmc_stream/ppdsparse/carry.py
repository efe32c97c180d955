"""A trial that goes on where the run of other parameters ended: with its active sets, alpha and weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.errors import StoreError
from xmc_stream.linear.weights import Unit
from xmc_stream.models.cache import drop_tiles
from xmc_stream.ppdsparse.problem import Problem
from xmc_stream.ppdsparse.sizes import search_sizes, search_tiles
from xmc_stream.ppdsparse.solver import added_sizes
from xmc_stream.ppdsparse.state import DONE, INSIDE, OPEN, ROOM, STATUS, UnitState, new_unit_state
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset


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
        n, n_samples, n_features = last - first, dataset.n_samples, dataset.n_features
        state = UnitState(Path(self.previous), n, n_samples, n_features)
        p, tiles = self.problem.parameters, search_tiles(self.unit, n_features)
        with new_unit_state(Path(self.out), n, n_samples, n_features) as writer:
            writer.statistics[:] = state.statistics
            writer.statistics[state.statistics[:, STATUS] == DONE, STATUS] = OPEN
            open_ = writer.statistics[:, STATUS] == OPEN
            tiles.in_tiles[:] = open_
            writer.statistics[open_, INSIDE] = np.inf  # unknown: no class is done
            sizes = np.where(open_, np.diff(state.active.ends(0, n)), 0)
            heaps = np.where(open_, added_sizes(sizes, p.added, n_samples, p.growth_after(0)), 0)
            writer.statistics[:, ROOM] = heaps
            writer.active.copy(state.active, 0, n)
            for w in state.weights.blocks(max(4 * MIB, 16 * n_features), 0, n):
                writer.weights.append(np.diff(w.indptr), w.indices, w.values)
                tiles.add(np.diff(w.indptr), w.indices)
        return {
            "open": int(open_.sum()),
            "tile_ranges": search_sizes(tiles.ranges, first, heaps, sizes),
            "inside": np.inf,
            "bytes_read": state.bytes_read,
        }
