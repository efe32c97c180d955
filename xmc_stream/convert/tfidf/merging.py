"""Sorted runs of words into one, in levels of some runs at a time."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.pieces import work_folder
from xmc_stream.convert.tfidf.table import Terms, WordTable
from xmc_stream.convert.tfidf.vocabulary import (
    COLUMNS,
    WINDOW,
    WINDOW_BYTES,
    SortedRun,
    SortedRunWriter,
    look_up,
    read_items,
)
from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Phase, Receipt

MERGED = 24  # runs merged at a time, which bounds the open files and the memory
MERGE_BYTES = MERGED * (3 * WINDOW_BYTES + 160 * WINDOW) + 2**22

Maps = list[str]  # of a run: the files that lead from its words to their places in the end, one a level


@dataclass(frozen=True)
class Merge:
    """A job: runs into one, in `folder`. `map-I` there has, for each word of run I, its place among the merged ones."""

    key: str
    runs: tuple[SortedRun, ...]
    folder: str

    def run(self) -> Receipt:
        """Merge, window by window."""
        folder = Path(self.folder)
        with work_folder(folder) as work, ExitStack() as stack:
            writer = SortedRunWriter(work, stack)
            maps = [stack.enter_context(open(work / f"map-{i}", "wb")) for i in range(len(self.runs))]
            readers = [_Reader(run) for run in self.runs]
            while sum(reader.look() for reader in readers):
                _merge_windows(readers, writer, maps)
        return {"folder": str(folder), "n": writer.n}


def _merge_windows(readers: Sequence[_Reader], writer: SortedRunWriter, maps: Sequence[BinaryIO]) -> None:
    """Words up to the least of the windows' last ones are all at hand: sort and write these, and their places."""
    bound = min((reader.last() for reader in readers if reader.more), default=None)
    cut = [reader.take(bound) for reader in readers]
    table = WordTable(sum(len(ends) for (_, ends), _ in cut), sum(len(blob) for (blob, _), _ in cut))
    taken = [(table.numbers(terms, between=0), columns) for terms, columns in cut]
    order = table.order()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    sums = {name: np.zeros(len(order), np.int64) for name in COLUMNS}
    sums["firsts"][:] = np.iinfo(np.int64).max
    for file, (numbers, columns) in zip(maps, taken, strict=True):
        places = ranks[numbers]
        file.write((places + writer.n).data)
        sums["rows"][places] += columns["rows"]
        sums["times"][places] += columns["times"]
        sums["firsts"][places] = np.minimum(sums["firsts"][places], columns["firsts"])
    writer.append(table, order, **sums)


class _Reader:
    """The words of a run in a merge: after `look`, `n` are at hand, and whether there are `more` behind them."""

    def __init__(self, run: SortedRun) -> None:
        self._run = run
        self._start = 0

    def look(self) -> int:
        """Have as many words at hand as are read at a time; returns how many."""
        self._blob, self._ends = np.empty(0, np.uint8), np.zeros(1, np.int64)
        if self._start < self._run.n:
            self._blob, self._ends = self._run.block(self._start, self._run.n)
        self.n = len(self._ends) - 1
        self.more = self._start + self.n < self._run.n
        return self.n

    def _word(self, i: int) -> bytes:
        return self._blob[self._ends[i] : self._ends[i + 1]].tobytes()

    def last(self) -> bytes:
        """The last word at hand."""
        return self._word(self.n - 1)

    def take(self, bound: bytes | None) -> tuple[Terms, dict[str, NDArray[np.int64]]]:
        """Take the words up to `bound` off those at hand, with their columns."""
        n = self.n if bound is None else bisect_right(range(self.n), bound, key=self._word)
        columns = {name: self._run.column(name, self._start, self._start + n) for name in COLUMNS}
        self._start += n
        return (self._blob, self._ends[: n + 1]), columns


def merged(
    work: Path, kind: str, runs: Sequence[SortedRun]
) -> Generator[Phase, list[Receipt], tuple[SortedRun, list[Maps]]]:
    """All runs in one, and the maps of each."""
    maps: list[Maps] = [[] for _ in runs]
    current, members = list(runs), [[i] for i in range(len(runs))]  # members: of each of these, the runs in it
    level = 0
    while not level or len(current) > 1:
        jobs = []
        firsts = range(0, max(len(current), 1), MERGED)
        for first in firsts:
            name = f"{level}/{first // MERGED:04d}"
            folder = str(work / f"merged-{kind}" / name)
            jobs.append(Merge(f"merge/{kind}/{name}", tuple(current[first : first + MERGED]), folder))
            for place, group in enumerate(members[first : first + MERGED]):
                for i in group:
                    maps[i].append(f"{folder}/map-{place}")
        receipts = yield Phase(f"merge {kind}", jobs, twice=True)
        current = [SortedRun(**receipt) for receipt in receipts]
        members = [list(itertools.chain(*members[first : first + MERGED])) for first in firsts]
        level += 1
    return current[0], maps


def chosen(run: SortedRun, maps: Maps, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Id and weight by the number that a part gave: of its run, through the maps of the merges, to what was chosen."""
    places: NDArray[np.int64] = np.fromfile(maps[0], np.int64)
    if len(places) != run.n:
        raise StoreError(f"{maps[0]} is not of {run.n} words: convert again with " + flags.OVERWRITE)
    for path in maps[1:]:
        places = look_up(partial(read_items, Path(path)), places)
    numbers = run.column("ids", 0, run.n)
    ids, weights = np.empty(run.n, np.int64), np.ones(run.n)
    ids[numbers] = look_up(partial(read_items, folder / "ids"), places)
    if (folder / "weights").exists():
        weights[numbers] = look_up(partial(read_items, folder / "weights", dtype=np.float64), places)
    return ids, weights
