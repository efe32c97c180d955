"""Weights of a model in units of classes by absolute id, as they lie on disk, and which classes are one unit.

A unit has 1,024 classes, or more where few of them have positives, as a job and its files cost much the same. This is a
matter of the data alone, so that every session of a run, under whatever limit, cuts the classes alike.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Ledger, Receipt
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import MatrixWriter, cut_evenly, new_store, write_arrays
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.model import CHUNK_BYTES, UNIT, StoredModel
from xmc_stream.store.nodes import Group, understood

HALF_ROUNDS = 2.0**-11  # of a weight: by what float16 rounds it at most
HALF_LEAST = np.nextafter(np.float32(2.0**-25), np.float32(1.0))  # the least weight that float16 does not round to 0
SURE = 1e6  # the bias of a class that every training row is positive for
WIDEST = 32  # times UNIT: classes of a unit; a job has numbers of each in memory
_LEARNED = UNIT // 2  # classes of a wide unit that have positives
_POSITIVES = 1 << 14  # that they have together: well under a second of work, so that threads share it evenly
_NOTE = "units"  # in a ledger, where a unit is wide


class Unit(NamedTuple):
    """Classes [first, last) that are solved, kept and written as one; first is a multiple of UNIT.

    A wide one has several times UNIT classes, few of them with positives: see `cut_units`.
    """

    first: int
    last: int

    @property
    def numbers(self) -> range:
        """Which ranges of UNIT classes it has."""
        return range(self.first // UNIT, -(-self.last // UNIT))

    @property
    def name(self) -> str:
        """In keys of jobs and names of folders: "5", of a wide one "5-36"."""
        return "-".join(str(number) for number in sorted({self.numbers[0], self.numbers[-1]}))


def units_from(starts: Sequence[int], n_labels: int) -> list[Unit]:
    """Units that begin at some classes, ascending from 0."""
    return [Unit(*bounds) for bounds in itertools.pairwise([*starts, n_labels])]


def plain_units(n_labels: int) -> list[Unit]:
    """All classes in units of UNIT."""
    return units_from(range(0, n_labels, UNIT), n_labels)


def starts_of(units: Sequence[Unit]) -> dict[str, list[int]]:
    """For the attributes of a model, or a ledger: where the units begin, if any is wide."""
    wide = any(len(unit.numbers) > 1 for unit in units)
    return {"units": [unit.first for unit in units]} if wide else {}


def cut_units(dataset: Dataset) -> list[Unit]:
    """All classes in units: neighbours go together while few of their classes have positives, and few each."""
    learned, positives = dataset.positives_of_ranges(UNIT)
    starts: list[int] = []
    room = n_learned = n_positives = 0  # of the last unit
    for number, (mine, sum_of_mine) in enumerate(zip(learned.tolist(), positives.tolist(), strict=True)):
        n_learned, n_positives, room = n_learned + mine, n_positives + sum_of_mine, room - 1
        if room < 0 or n_learned > _LEARNED or n_positives > _POSITIVES:
            starts.append(number * UNIT)
            room, n_learned, n_positives = WIDEST - 1, mine, sum_of_mine
    return units_from(starts, dataset.n_labels)


def tiles_of(receipts: Iterable[Receipt]) -> list[list[Any]]:
    """For a model's attributes: the ranges of tiles that its units' receipts name, those of each UNIT classes by themselves."""
    ranges = (span for receipt in receipts for span in receipt["tile_ranges"])
    return [list(some) for _, some in itertools.groupby(ranges, lambda span: span[0] // UNIT)]


def units_of_run(dataset: Dataset, ledger: Ledger, kinds: Sequence[str]) -> list[Unit]:
    """The units of a run: those it has begun with, which are noted in its ledger where one is wide.

    kinds: the beginnings of the keys of its jobs that have a unit, as "solve/0". A run that has done one of them without
    a note goes on in plain units.
    """
    note = ledger.get(_NOTE)
    if note is not None:
        return units_from(note["units"], dataset.n_labels)
    units, plain = cut_units(dataset), plain_units(dataset.n_labels)
    if units == plain or any(ledger.get(f"{kind}/{unit.name}") for unit in plain for kind in kinds):
        return plain
    ledger.add(_NOTE, starts_of(units))
    return units


def unit_of(units: Sequence[Unit], label: int) -> Unit:
    """The unit, of units in ascending order, that has a class."""
    return units[bisect_right(units, label, key=lambda unit: unit.first) - 1]


def unit_path(model: Path, unit: Unit) -> Path:
    """Where a unit of a model lies."""
    return model / "units" / "-".join(f"{int(number):05d}" for number in unit.name.split("-"))


def finalise_key(name: str) -> str:
    """The key of the job that wrote a unit of a model, from the unit's folder."""
    return "finalise/" + "-".join(str(int(number)) for number in name.split("-"))


@dataclass
class UnitWriter:
    """weights: D x classes (csc), by class; bias (classes,); statistics: other arrays by name."""

    weights: MatrixWriter
    bias: NDArray[np.float32]
    statistics: dict[str, NDArray[Any]]


@contextmanager
def new_unit(path: Path, n_features: int, n_classes: int, dtype: DTypeLike = np.float32) -> Iterator[UnitWriter]:
    """A unit of a model under construction, under its name when the block ends well. dtype: of weights on disk."""
    with new_store(path, {}) as group:
        shape = (n_features, n_classes)
        weights = MatrixWriter(group.create_group("weights"), "csc_matrix", shape, dtype, CHUNK_BYTES, narrow=True)
        writer = UnitWriter(weights, np.zeros(n_classes, np.float32), {})
        yield writer
        weights.close()
        for name in ("indices", "data"):
            cut_evenly(Group(group.path / "weights"), name)
        write_arrays(group, {"bias": writer.bias, **writer.statistics})


def half_holds(values: Iterable[NDArray[np.float32]]) -> bool:
    """Whether rounding weights to float16 changes them by at most HALF_ROUNDS of the sum of |w|.

    It always does where they lie between 6.1e-5 and 65504.
    """
    lost = total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite
        for some in values:
            total += float(np.abs(some).sum(dtype=np.float64))
            lost += float(np.abs(some - some.astype(np.float16)).sum(dtype=np.float64))
    return lost <= HALF_ROUNDS * total


def hash_classes(
    update: Callable[[Any], None], weights: SparseMatrix, bias: NDArray[np.float32], low: int, high: int
) -> None:
    """Hash the weights of columns [low, high) of a matrix (D x classes, csc), and their bias."""
    update(np.diff(weights.ends(low, high)).astype("<i8").data)
    update(bias[low:high].astype("<f4").data)
    for block in weights.blocks(max(1 << 24, 16 * weights.shape[0]), low, high):  # a class always fits
        update(block.indices.astype("<i8").data)
        update(block.values.data)


class LinearWeights(StoredModel):
    """A model that has weights for each class, by units."""

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(path, attributes)
        starts = self.attributes.get("units", list(range(0, self.n_labels, UNIT)))  # said where some are wide
        whole = isinstance(starts, list) and all(type(start) is int and start % UNIT == 0 for start in starts)
        if not whole or starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise([*starts, self.n_labels])):
            raise StoreError(
                f"{self.path} does not say which classes its units have: the store is damaged; train again"
            )
        self.units = units_from(starts, self.n_labels)

    def unit_weights(self, unit: Unit) -> SparseMatrix:
        """Weights of a unit (D x classes, csc)."""
        weights = SparseMatrix(unit_path(self.path, unit) / "weights")
        return weights.expect((self.n_features, unit.last - unit.first), "csc_matrix", np.float32)

    def unit_array(self, unit: Unit, name: str = "bias") -> NDArray[Any]:
        """The bias, or another array with an entry for each class of a unit, which has the type it was written in."""
        folder = unit_path(self.path, unit)
        dtype = np.float32 if name == "bias" else open_array(folder / name).dtype
        return read_small(folder, name, unit.last - unit.first, dtype)

    @property
    def tiles(self) -> list[list[tuple[int, int, int, int]]]:
        """Of each UNIT classes, ranges of classes: first, last, bytes of their tile, weights.

        Together they hold every class. Raises StoreError where they do not.
        """
        spans: list[list[tuple[int, int, int, int]]] = []
        with understood(self.path / "zarr.json"):
            plain = plain_units(self.n_labels)
            for unit, (of_unit, (low, end)) in enumerate(zip(self.attributes["tiles"], plain, strict=True)):
                spans.append([(first, last, size, weights) for first, last, size, weights in of_unit])
                done = low
                for first, last, size, weights in sorted(spans[-1]):
                    whole = all(type(number) is int for number in (first, last, size, weights))
                    if not (whole and low <= first < last <= end and first <= done and size >= 0 <= weights):
                        raise ValueError(f"tiles of unit {unit}: {(first, last, size, weights)}")
                    done = max(done, last)
                if done != end:
                    raise ValueError(f"tiles of unit {unit} end with class {done}")
        return spans

    def parts(self, first: int, last: int) -> Iterator[tuple[Unit, int, int]]:
        """The units that have classes [first, last), and which of theirs these are, counted from their first."""
        while first < last:
            unit = unit_of(self.units, first)
            end = min(last, unit.last)
            yield unit, first - unit.first, end - unit.first
            first = end

    def classes(self, first: int, last: int) -> Block:
        """Weights of classes [first, last) of one unit."""
        unit = unit_of(self.units, first)
        return replace(self.unit_weights(unit).block(first - unit.first, last - unit.first), start=first)
