"""Warm start: the state that a first search and solve begin from, made of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import MIB
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.methods.ppdsparse.plan import SolvePlan
from xmc_stream.methods.ppdsparse.solve import search_sizes, search_tiles, set_known
from xmc_stream.methods.ppdsparse.solver import warm_sizes
from xmc_stream.methods.ppdsparse.state import BIAS, INSIDE, ROOM, new_unit_state
from xmc_stream.methods.weights import Given
from xmc_stream.models.cache import drop_tiles
from xmc_stream.models.linear.weights import LinearWeights, Unit
from xmc_stream.store.dataset import Dataset
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


def learned_from(model: LinearWeights, dataset: Dataset, class_weight: str | None, given: Given | None) -> bool:
    """Whether a model was trained on a dataset, its rows and classes weighed alike."""
    with understood(model.path / "zarr.json"):
        of_model = model.attributes["params"].get("class_weight"), model.attributes.get("identity", {}).get("weights")
        alike = of_model == (class_weight, None if given is None else given.identity)
        return bool(alike and model.attributes["data"]["fingerprint"] == dataset.fingerprint)


@dataclass(frozen=True)
class StartJob:
    """A unit's state before round 0: weights of the model, the positives for active sets.

    Their alpha is set when round 0 gathers their rows. A class without positives keeps nothing.
    """

    data: str
    model: str
    parameters: PPDSparseParameters
    unit: Unit
    out: str
    sizes: SolvePlan

    @property
    def key(self) -> str:
        """The unit."""
        return f"start/{self.unit.name}"

    def run(self) -> Receipt:
        """Write; the receipt has the sizes that the search is planned from."""
        drop_tiles()
        dataset, model = Dataset(self.data), LinearWeights(self.model)
        n_samples, n_features = dataset.n_samples, dataset.n_features
        first, last = self.unit
        Y, n_bytes = dataset.Y_columns(), 0
        counts = np.diff(Y.ends(first, last))
        tiles = search_tiles(self.unit, n_features)
        learned = (counts > 0) & (counts < n_samples)
        tiles.in_tiles[:] = learned
        with new_unit_state(Path(self.out), last - first, n_samples, n_features) as writer:
            biases = [model.unit_array(unit)[low:high] for unit, low, high in model.parts(first, last)]
            writer.statistics[:, BIAS] = np.concatenate(biases)
            writer.statistics[:, INSIDE] = np.inf  # unknown: no class is done
            writer.statistics[:, ROOM] = heaps = warm_sizes(counts, self.parameters.added, n_samples)
            set_known(writer.statistics, counts, n_samples)
            nothing = np.zeros(0, np.int64)
            writer.active.append(counts, nothing, np.zeros(0))
            for rows in Y.index_windows(first, last, MIB // 16):
                writer.active.append(nothing, rows, np.zeros(len(rows)))
            for unit, low, high in model.parts(first, last):
                weights = model.unit_weights(unit)
                for w in weights.blocks(max(4 * MIB, 16 * n_features), low, high):
                    at = unit.first + w.start - first
                    lengths = np.diff(w.indptr)
                    taken = learned[at : at + w.n]
                    kept = np.repeat(taken, lengths)
                    writer.weights.append(lengths * taken, w.indices[kept], w.values[kept])
                    tiles.add(lengths * taken, w.indices[kept])
                n_bytes += weights.bytes_read
        return {
            "tile_ranges": search_sizes(tiles.ranges, first, heaps, counts),
            "bytes_read": Y.bytes_read + n_bytes,
        }
