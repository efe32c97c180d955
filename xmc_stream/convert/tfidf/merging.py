"""Sorted runs of words into one order: range by range of the words, beside each other, in levels of some runs at a time."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.pieces import work_folder
from xmc_stream.convert.tfidf.table import Terms, WordTable
from xmc_stream.convert.tfidf.vocabulary import COLUMNS, WINDOW, WINDOW_BYTES, SortedRun, SortedRunWriter, look_up
from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Phase, Receipt

MERGED = 24  # runs merged at a time, which bounds the open files and the memory
MERGE_BYTES = MERGED * (3 * WINDOW_BYTES + 160 * WINDOW) + 2**22
_RANGE = 2**20  # words of all runs in a range

# of a run, range by range: how many merged words come before, and the files that lead to a place, one a level
Maps = list[tuple[int, list[str]]]


def range_bounds(runs: Sequence[SortedRun]) -> list[bytes]:
    """Words that cut runs into ranges which are merged apart: one for some _RANGE words of all runs, an even number.

    They follow from the words alone, and part the words of the longest run evenly.
    """
    n = 2 * (sum(run.n for run in runs) // (2 * _RANGE))
    if n < 2:
        return []
    longest = max(runs, key=lambda run: run.n)
    return sorted({longest.word(longest.n * i // n) for i in range(1, n)} - {longest.word(0)})


@dataclass(frozen=True)
class Merge:
    """A job: runs into one, in `folder`; of their words those from `low` on, and before `high` if that is not None.

    `map-I` in the folder has, for each of these words of run I, its place among the merged ones.
    """

    key: str
    runs: tuple[SortedRun, ...]
    folder: str
    low: bytes = b""
    high: bytes | None = None

    def run(self) -> Receipt:
        """Merge, window by window."""
        folder = Path(self.folder)
        with work_folder(folder) as work, ExitStack() as stack:
            writer = SortedRunWriter(work, stack)
            maps = [stack.enter_context(open(work / f"map-{i}", "wb")) for i in range(len(self.runs))]
            readers = [_Reader(run, self.low, self.high) for run in self.runs]
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

    def __init__(self, run: SortedRun, low: bytes, high: bytes | None) -> None:
        self._run = run
        self._start = run.place(low) if low else 0
        self._stop = run.n if high is None else run.place(high)

    def look(self) -> int:
        """Have as many words at hand as are read at a time; returns how many."""
        self._blob, self._ends = np.empty(0, np.uint8), np.zeros(1, np.int64)
        if self._start < self._stop:
            self._blob, self._ends = self._run.block(self._start, self._stop)
        self.n = len(self._ends) - 1
        self.more = self._start + self.n < self._stop
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
) -> Generator[Phase, list[Receipt], tuple[tuple[SortedRun, ...], list[Maps]]]:
    """All runs in one order, cut into ranges of words; of each run, its maps."""
    bounds = range_bounds(runs)
    ranges = list(zip([b"", *bounds], [*bounds, None], strict=True))
    current = [tuple(runs)] * len(ranges)
    paths: list[list[list[str]]] = [[[] for _ in ranges] for _ in runs]
    members = [[i] for i in range(len(runs))]  # of each of what is merged next: the runs in it
    level = 0
    while not level or len(members) > 1:
        groups = range(0, max(len(members), 1), MERGED)
        jobs = []
        for r, (low, high) in enumerate(ranges):
            for first in groups:
                name = f"{level}/{r:04d}-{first // MERGED:04d}"
                folder = str(work / f"merged-{kind}" / name)
                limits = (b"", None) if level else (low, high)
                jobs.append(Merge(f"merge/{kind}/{name}", current[r][first : first + MERGED], folder, *limits))
                for place, group in enumerate(members[first : first + MERGED]):
                    for i in group:
                        paths[i][r].append(f"{folder}/map-{place}")
        receipts = yield Phase(f"merge {kind}", jobs, twice=True)
        made = [SortedRun(**receipt) for receipt in receipts]
        current = [tuple(made[r * len(groups) : (r + 1) * len(groups)]) for r in range(len(ranges))]
        members = [[i for group in members[first : first + MERGED] for i in group] for first in groups]
        level += 1
    whole = tuple(of[0] for of in current)
    before = [0, *itertools.accumulate(run.n for run in whole)][: len(ranges)]
    return whole, [list(zip(before, of_run, strict=True)) for of_run in paths]


def chosen(run: SortedRun, maps: Maps, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Id and weight by the number that a part gave: of its run, through the maps of the merges, to what was chosen."""
    places = np.concatenate([before + _followed(paths) for before, paths in maps])
    if len(places) != run.n:
        raise StoreError(
            f"{maps[0][1][0]} and the maps of its other ranges are not of {run.n} words: convert again with "
            + flags.OVERWRITE
        )
    numbers = run.column("ids", 0, run.n)
    ids, weights = np.empty(run.n, np.int64), np.ones(run.n)
    ids[numbers] = look_up(folder / "ids", places)
    if (folder / "weights").exists():
        weights[numbers] = look_up(folder / "weights", places, np.float64)
    return ids, weights


def _followed(paths: Sequence[str]) -> NDArray[np.int64]:
    """The places of a range's words of a run, through the maps of all levels."""
    places: NDArray[np.int64] = np.fromfile(paths[0], np.int64)
    for path in paths[1:]:
        places = look_up(Path(path), places)
    return places
