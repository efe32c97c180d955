"""Warm start: the state that a first search and solve begin from, made of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import MIB, SolvePlan
from xmc_stream.jobs.solve import search_sizes, set_empty
from xmc_stream.jobs.tiles import TileSizes, drop_tiles
from xmc_stream.solvers.ppdsparse import PPDSparseParameters, warm_sizes
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import StoredModel, unit_range
from xmc_stream.store.state import BIAS, INSIDE, ROOM, new_unit_state


@dataclass(frozen=True)
class StartJob:
    """A unit's state before round 0: weights of the model, the positives for active sets.

    Their alpha is set when round 0 gathers their rows. A class without positives keeps nothing.
    """

    data: str
    model: str
    parameters: PPDSparseParameters
    unit: int
    out: str
    sizes: SolvePlan

    @property
    def key(self) -> str:
        """The unit."""
        return f"start/{self.unit}"

    def run(self) -> Receipt:
        """Write; the receipt has the sizes that the search is planned from."""
        drop_tiles()
        dataset, model = Dataset(self.data), StoredModel(self.model)
        n_samples, n_features = dataset.n_samples, dataset.n_features
        first, last = unit_range(self.unit, dataset.n_labels)
        Y, weights = dataset.Y_columns(), model.unit_weights(self.unit)
        counts = np.diff(Y.indptr.read(first, last + 1))
        tiles = TileSizes(first, last, n_features)
        tiles.in_tiles[:] = counts > 0
        with new_unit_state(Path(self.out), last - first, n_samples, n_features) as writer:
            writer.figures[:, BIAS] = model.unit_array(self.unit)
            writer.figures[:, INSIDE] = np.inf  # unknown: no class is done
            writer.figures[:, ROOM] = heaps = warm_sizes(counts, self.parameters.added, n_samples)
            set_empty(writer.figures, counts == 0)
            ends, nothing = Y.indptr.read(first, last + 1), np.zeros(0, np.int64)
            writer.active.append(np.diff(ends), nothing, np.zeros(0))
            for begin in range(int(ends[0]), int(ends[-1]), MIB // 16):
                rows = Y.indices.read(begin, min(begin + MIB // 16, int(ends[-1])))
                writer.active.append(nothing, rows, np.zeros(len(rows)))
            for w in weights.blocks(max(4 * MIB, 16 * n_features)):
                lengths = np.diff(w.indptr)
                learned = counts[w.start : w.start + w.n] > 0
                kept = np.repeat(learned, lengths)
                writer.weights.append(lengths * learned, w.indices[kept], w.values[kept])
                tiles.add(lengths * learned, w.indices[kept])
        return {
            "unit": self.unit,
            "runs": search_sizes(tiles, first, heaps, counts),
            "bytes_read": Y.bytes_read + weights.bytes_read,
        }
