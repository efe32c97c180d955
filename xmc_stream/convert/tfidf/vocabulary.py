"""The vocabulary: sorted words of the parts, on disk, merged in levels and chosen from; in windows, whatever their number.

A sorted run is a folder of plain files: `bytes` and `ends` (the words in UTF-8, sorted, hence by code point), and `counts`,
four numbers of each word as in `convert.kernels.words`: ROWS that it occurs in, TIMES that it occurs, and the FIRST line it
occurs in. That of a part also has `ids`, its numbers there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.convert.kernels.words import FIRST, PADDING, ROWS, TIMES
from xmc_stream.convert.labels import held_by
from xmc_stream.convert.options import TextOptions
from xmc_stream.convert.pieces import work_folder
from xmc_stream.convert.tfidf.table import Terms, WordTable
from xmc_stream.convert.tfidf.vectorizer import df_bounds, idf_weights
from xmc_stream.errors import InputError, StoreError
from xmc_stream.runtime.job import Phase, Receipt
from xmc_stream.store.names import WRITER_BYTES, NamedIds, Names, ascend, new_names, new_vectorizer, open_vectorizer

WINDOW = 2**13  # words read at a time
WINDOW_BYTES = 2**19  # of which at most so many bytes, or one word
CHOICE_BYTES = 2 * WRITER_BYTES + 2**23
LINE_BITS = 40  # bits of a line's number in `firsts`, the number of its part above them
MERGED = 24  # runs merged at a time, which bounds the open files and the memory
MERGE_BYTES = MERGED * (3 * WINDOW_BYTES + 160 * WINDOW) + 2**22

Maps = list[str]  # of a run: the files that lead from its words to their places in the end, one a level


@dataclass(frozen=True)
class SortedRun:
    """Sorted words on disk. folder: absolute path; n: how many."""

    folder: str
    n: int

    def counts(self, start: int, stop: int) -> NDArray[np.int64]:
        """The numbers of words [start, stop), in four columns."""
        return read_items(Path(self.folder) / "counts", 4 * start, 4 * stop).reshape(-1, 4)

    def block(self, start: int, stop: int) -> Terms:
        """Words from `start` on, as many before `stop` as are read at a time: bytes (and PADDING), where each begins and the
        last ends."""
        ends = read_items(Path(self.folder) / "ends", max(start - 1, 0), min(start + WINDOW, stop))
        ends = ends if start else np.concatenate([np.zeros(1, np.int64), ends])
        ends = ends[: 1 + max(1, int(np.searchsorted(ends[1:], ends[0] + WINDOW_BYTES, side="right")))]
        blob = read_items(Path(self.folder) / "bytes", int(ends[0]), int(ends[-1]), np.uint8)
        return np.concatenate([blob, np.zeros(PADDING, np.uint8)]), ends - ends[0]

    def windows(self) -> Iterator[tuple[list[bytes], NDArray[np.int64]]]:
        """The words in turn, some at a time, and their counts."""
        start = 0
        while start < self.n:
            blob, ends = self.block(start, self.n)
            words, stop = blob.tobytes(), start + len(ends) - 1
            yield [words[a:b] for a, b in itertools.pairwise(ends.tolist())], self.counts(start, stop)
            start = stop


class SortedRunWriter:
    """Appends words to a folder under construction."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._files: dict[str, BinaryIO] = {
            name: stack.enter_context(open(folder / name, "wb"))  # noqa: SIM115 (closed by the stack)
            for name in ("bytes", "ends", "counts")
        }
        self._end = 0
        self.n = 0

    def append(self, table: WordTable, order: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Add the words of a table, in an order, and their counts."""
        for start in range(0, len(order), WINDOW):
            words, lengths = table.gather(order[start : start + WINDOW])
            self._files["bytes"].write(words.data)
            ends = self._end + np.cumsum(lengths)
            self._files["ends"].write(ends.data)
            self._end = int(ends[-1])
        self._files["counts"].write(counts.data)
        self.n += len(order)


def write_sorted_run(folder: Path, table: WordTable, part: int) -> SortedRun:
    """The words of a table of a part as a run in a new folder."""
    folder.mkdir()
    order = table.order()
    counts = table.words.counts[order]
    counts[:, FIRST] |= part << LINE_BITS
    order.tofile(folder / "ids")
    with ExitStack() as stack:
        SortedRunWriter(folder, stack).append(table, order, counts)
    return SortedRun(str(folder), len(order))


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
    taken = [(table.numbers(terms, between=0), counts) for terms, counts in cut]
    order = table.order()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    sums = np.zeros((len(order), 4), np.int64)
    sums[:, FIRST] = np.iinfo(np.int64).max
    for file, (numbers, counts) in zip(maps, taken, strict=True):
        places = ranks[numbers]
        file.write((places + writer.n).data)
        sums[places, :FIRST] += counts[:, :FIRST]
        sums[places, FIRST] = np.minimum(sums[places, FIRST], counts[:, FIRST])
    writer.append(table, order, sums)


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

    def take(self, bound: bytes | None) -> tuple[Terms, NDArray[np.int64]]:
        """Take the words up to `bound` off those at hand, with their counts."""
        n = self.n if bound is None else bisect_right(range(self.n), bound, key=self._word)
        counts = self._run.counts(self._start, self._start + n)
        self._start += n
        return (self._blob, self._ends[: n + 1]), counts


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
    numbers = read_items(Path(run.folder) / "ids", 0, run.n)
    ids, weights = np.empty(run.n, np.int64), np.ones(run.n)
    ids[numbers] = look_up(partial(read_items, folder / "ids"), places)
    if (folder / "weights").exists():
        weights[numbers] = look_up(partial(read_items, folder / "weights", dtype=np.float64), places)
    return ids, weights


@dataclass(frozen=True)
class ChooseFeatures:
    """A job: which words are features, their names and idf.

    In `folder`: `ids` (of each merged word, -1 for those left out), `weights` (idf of each), and the stores `names` and
    `vectorizer`. like: the store whose first `n_like` features these are, "" for none.
    """

    key: str
    words: SortedRun
    n_rows: int
    text: TextOptions
    folder: str
    like: str
    n_like: int = 0

    def run(self) -> Receipt:
        """Choose; the receipt has n, and of words without an id unknown_words (different) and unknown (times)."""
        folder = Path(self.folder)
        n = lost = times = 0
        with work_folder(folder) as work, ExitStack() as stack:
            ids_file, weights_file = (stack.enter_context(open(work / name, "wb")) for name in ("ids", "weights"))
            opened = open_vectorizer(Path(self.like)) if self.like else None
            chosen: _Joined | _Filtered
            if self.like:
                chosen = _Joined(Path(self.like) / "names" / "features", self.n_like)
            else:
                chosen = _Filtered(self.words, *df_bounds(self.text, self.n_rows), self.text.max_features)
            names = stack.enter_context(new_names(work / "names"))
            idf = stack.enter_context(new_vectorizer(work / "vectorizer", self.text.attributes()))
            if opened:  # kept with what is made from it too, so that it can be a training set itself
                known = Names(Path(self.like) / "names" / "features")
                for start in range(0, self.n_like, WINDOW):
                    idf.append(opened[1].read(start, min(start + WINDOW, self.n_like)))
                for window in known.windows():
                    names.append(window[: self.n_like - names.n])
            for terms, counts in self.words.windows():
                ids = chosen.ids(terms, counts)
                kept = ids >= 0
                weights = np.zeros(len(terms))
                if opened:
                    weights[kept] = look_up(opened[1].read, ids[kept])
                else:
                    weights[kept] = idf_weights(self.text, counts[kept, ROWS], self.n_rows)
                    names.append([term for term, keep in zip(terms, kept.tolist(), strict=True) if keep])
                    idf.append(weights[kept])
                ids_file.write(ids.tobytes())
                weights_file.write(weights.tobytes())
                lost, times = lost + int((~kept).sum()), times + int(counts[~kept, TIMES].sum())
            n = names.n
        return {"n": n, "unknown_words": lost, "unknown": times}


@dataclass(frozen=True)
class ChooseLabels:
    """A job: the ids of label names. In `folder`: `ids` of each merged name, -1 for unknown ones, and the store `names`.

    like: the store whose labels these are, "" for none.
    """

    key: str
    words: SortedRun
    folder: str
    like: str

    def run(self) -> Receipt:
        """Choose; the receipt has n, of unknown labels how many times, the first (part and line) and its name; and what
        the names hold: the counts of `held_by`."""
        folder = Path(self.folder)
        unknown, first, name, held = 0, np.iinfo(np.int64).max, "", held_by([], np.zeros(0, np.int64))
        with (
            work_folder(folder) as work,
            open(work / "ids", "wb") as ids_file,
            new_names(work / "names") as names,
        ):
            joined: _Joined | _Found | None = None
            if self.like:
                known = Names(Path(self.like) / "names" / "labels")
                if self.words.n:
                    joined = _Joined(known.path) if ascend(known) else _Found(known)
                for window in known.windows():
                    names.append(window)
            for terms, counts in self.words.windows():
                held += held_by(terms, counts[:, ROWS])
                if joined:
                    ids = joined.ids(terms, counts)
                else:
                    ids = np.arange(names.n, names.n + len(terms), dtype=np.int64)
                    names.append(terms)
                ids_file.write(ids.tobytes())
                lost = np.flatnonzero(ids < 0)
                if len(lost):
                    unknown += int(counts[lost, ROWS].sum())
                    at = int(lost[np.argmin(counts[lost, FIRST])])
                    if counts[at, FIRST] < first:
                        first, name = int(counts[at, FIRST]), terms[at].decode()
        return {"n": names.n, "unknown": unknown, "first": int(first), "name": name, "held": held.tolist()}


class _Filtered:
    """Ids of the words between two numbers of rows, the most frequent ones if there is a bound on how many."""

    def __init__(self, words: SortedRun, low: float, high: float, most: int | None) -> None:
        self._low, self._high = low, high
        self._n = 0
        # times that a word must occur; of those that occur just so often, how many
        self._least, self._ties = (0, 0) if most is None else self._threshold(words, most)

    def _fits(self, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray((counts[:, ROWS] >= self._low) & (counts[:, ROWS] <= self._high))

    def _threshold(self, words: SortedRun, most: int) -> tuple[int, int]:
        """The `most`-th largest number of times, and how many of that number are kept; (0, 0) where all words are."""
        often: Counter[int] = (
            Counter()
        )  # words that occur so often: few numbers, as these add up to the words of all texts
        for start in range(0, words.n, 2**18):
            counts = words.counts(start, min(start + 2**18, words.n))
            often.update(counts[self._fits(counts), TIMES].tolist())
        for times in sorted(often, reverse=True):
            if often[times] >= most:
                return times, most
            most -= often[times]
        return 0, 0

    def ids(self, terms: list[bytes], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the next words, -1 for those left out; ties go to the words that sort first."""
        kept, times = self._fits(counts), counts[:, TIMES]
        if self._least:
            tied = kept & (times == self._least)
            allowed = tied & (np.cumsum(tied) <= self._ties)
            self._ties -= int(allowed.sum())
            kept = (kept & (times > self._least)) | allowed
        ids = np.full(len(terms), -1, np.int64)
        n = int(kept.sum())
        ids[kept] = np.arange(self._n, self._n + n)
        self._n += n
        return ids


class _Found:
    """Ids of words in stored names of any order, which are in memory."""

    def __init__(self, names: Names) -> None:
        self._path, self._ids = names.path, NamedIds(names)

    def ids(self, terms: list[bytes], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the next words, -1 for those without a name. Raises InputError for a name that stands twice."""
        try:
            return self._ids.find([term.decode() for term in terms])
        except LookupError as error:
            raise InputError(f"{self._path}: {error}: make the names unique first") from None


class _Joined:
    """Ids of words in stored names, both sorted. n: of the names, the first ones that are looked at; None for all."""

    def __init__(self, path: Path, n: int | None = None) -> None:
        names = itertools.islice((name for window in Names(path).windows() for name in window), n)
        self._names = enumerate(names)
        self._id: int
        self._name: bytes | None
        self._id, self._name = next(self._names, (0, None))

    def ids(self, terms: list[bytes], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the next words, -1 for those without a name."""
        ids = []
        for term in terms:
            while self._name is not None and self._name < term:
                self._id, self._name = next(self._names, (0, None))
            ids.append(self._id if self._name == term else -1)
        return np.array(ids, np.int64)


def look_up(read: Callable[[int, int], NDArray[Any]], places: NDArray[np.int64]) -> NDArray[Any]:
    """Entries at ascending places, in windows. read: entries [start, stop)."""
    out = [read(0, 0)]
    start = 0
    while start < len(places):
        low = int(places[start])
        stop = int(np.searchsorted(places, low + 2**16))
        out.append(read(low, int(places[stop - 1]) + 1)[places[start:stop] - low])
        start = stop
    return np.concatenate(out)


def read_items(path: Path, start: int, stop: int, dtype: Any = np.int64) -> NDArray[Any]:
    """Items [start, stop) of a plain file."""
    itemsize = np.dtype(dtype).itemsize
    values = np.fromfile(path, dtype, stop - start, offset=start * itemsize)
    if len(values) != stop - start:
        raise StoreError(f"{path} ends early: convert again with " + flags.OVERWRITE)
    return values
