"""Which classes are one unit: 1,024, or more where few of them have positives, as a job and its files cost much the same.

This is a matter of the data alone, so that every session of a run, under whatever limit, cuts the classes alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from xmc_stream.linear.weights import Unit, plain_units, starts_of, units_from
from xmc_stream.runtime.job import Ledger, Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import UNIT

WIDEST = 32  # times UNIT: classes of a unit; a job has numbers of each in memory
_LEARNED = UNIT // 2  # classes of a wide unit that have positives
_POSITIVES = 1 << 14  # that they have together: well under a second of work, so that threads share it evenly
_NOTE = "units"  # in a ledger, where a unit is wide


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
