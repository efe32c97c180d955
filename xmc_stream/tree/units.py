"""Units of the model are written, from what the jobs left that solved their parents (`Solution`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import open_array
from xmc_stream.tree.guide import LEVEL
from xmc_stream.tree.guide import UNIT as GUIDE_UNIT
from xmc_stream.tree.kernels.records import Weights
from xmc_stream.tree.nodes import Source, Unit, write_unit
from xmc_stream.tree.shared import Shared

READ_WEIGHTS = 1 << 18  # that are read at a time


@dataclass(frozen=True)
class UnitJob:
    """Write a unit of the model. parts: what was left of its parents, in order: one pack of several, or several packs of one.

    most: weights that are put into records at a time.
    """

    of: Shared
    unit: Unit
    parts: tuple[tuple[str, ...], ...]
    most: int

    @property
    def key(self) -> str:
        """The unit."""
        return self.unit.key

    def run(self) -> Receipt:
        """Read, pack, write."""
        dataset, unit = self.of.dataset(), self.unit
        level = LEVEL
        if unit != GUIDE_UNIT:
            level = self.of.structure(unit.tree, dataset.n_labels).levels[unit.level]
        parts = [[_Part(pack) for pack in packs] for packs in self.parts]
        bias = np.concatenate([part.bias for of_parents in parts for part in of_parents])
        parents = itertools.chain.from_iterable(map(_parents, parts))
        made = write_unit(unit.path(self.of.model), unit, level, dataset.n_features, bias, parents, self.most)
        return {
            **made,
            "name": unit.name,
            "gaps": [gap for of_parents in parts for part in of_parents for gap in part.gaps],
        }


class _Part:
    """What a job left that solved some parents, see `Solution`."""

    def __init__(self, path: str) -> None:
        self._arrays = [open_array(Path(path) / name) for name in ("features", "children", "values")]
        counts, bias, gaps = (open_array(Path(path) / name) for name in ("counts", "bias", "gaps"))
        self._ends = np.concatenate([[0], np.cumsum(counts.read(0, counts.size))]).tolist()
        self.bias, self.gaps = bias.read(0, bias.size), gaps.read(0, gaps.size).tolist()

    @property
    def n(self) -> int:
        """Weights."""
        return int(self._ends[-1])

    def parents(self) -> Iterator[Source]:
        """In order."""
        for low, high in itertools.pairwise(self._ends):
            yield Source(high - low, partial(self.windows, low, high))

    def windows(self, low: int, high: int) -> Iterator[Weights]:
        """Weights [low, high)."""
        for begin in range(low, high, READ_WEIGHTS):
            yield Weights(*(array.read(begin, min(begin + READ_WEIGHTS, high)) for array in self._arrays))


def _parents(parts: Sequence[_Part]) -> Iterator[Source]:
    """Those of one pack; or the one parent whose children several have."""
    if len(parts) == 1:
        return parts[0].parents()
    windows = lambda: (some for part in parts for some in part.windows(0, part.n))  # noqa: E731
    return iter([Source(sum(part.n for part in parts), windows)])
