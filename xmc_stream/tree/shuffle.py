"""Rows of a level, brought side by side on disk: a shuffle. It is for an X that is larger than memory.

Jobs that solve a level read the rows of their parents, which are scattered over X. A disk is slow at that, and reads pages for
rows. So each job's rows are listed first (`ListJob`). Then X is read once, range by range of rows, and of each range the rows
that each job needs are written, job after job (`ShuffleJob`). A job reads its share of each range (`Shuffled`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import even_ranges, fitting_ranges
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedArrayWriter, index_dtype, new_pack
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.system.stop import stop_if_unwanted
from xmc_stream.tree.beams import beams_above
from xmc_stream.tree.parents import parents_of, union_of
from xmc_stream.tree.shared import Shared

_RANGE_BYTES = 1 << 26  # of X, in a range of rows, on average: by the data alone
_PIECE = 1 << 18  # entries that are put side by side at a time
_ROW_BYTES, _PIECE_BYTES = 72, 64  # of a row of a range, beside its entries; of an entry that is put side by side


def ranges_of_rows(X: SparseMatrix) -> list[tuple[int, int]]:
    """The rows of each job that writes rows side by side."""
    return even_ranges(X.n_lines, -(-X.nnz * X.entry_bytes // _RANGE_BYTES))


def range_bytes(X: SparseMatrix) -> int:
    """That a job holds of the range with most entries."""
    bounds = np.array([start for start, _ in ranges_of_rows(X)] + [X.n_lines])
    ends = np.empty(len(bounds), X.indptr.dtype)
    X.indptr.read_ranges(bounds, np.ones(len(bounds), np.int64), ends)
    return int((np.diff(ends) * X.entry_bytes + _ROW_BYTES * np.diff(bounds)).max(initial=0)) + _PIECE_BYTES * _PIECE


# the first parents of the jobs of a level, ascending: those of each list beside each other
Lists = tuple[tuple[int, ...], ...]


def lists_of(firsts: Sequence[int], at_most: int = 64) -> Lists:
    """Jobs in lists, each found by a job: so many at most, or 16 to a list."""
    return tuple(tuple(firsts[low:high]) for low, high in even_ranges(len(firsts), max(at_most, -(-len(firsts) // 16))))


def list_path(work: str, tree: int, level: int, first: int) -> str:
    """The pack of a list, by its first parent: `rows` of each job, and where those of each range begin, and end, `ends`."""
    return str(Path(work) / "state" / "list" / f"{tree}_{level}_{first}")


def shuffle_path(work: str, tree: int, level: int, start: int) -> str:
    """The pack of a range of rows.

    `indices` and `values` of the rows that the first job needs, then the second, ...; `lengths` of these rows; `firsts`, the
    first parents of the jobs; `ptr`, where the rows and the entries of each job begin.
    """
    return str(Path(work) / "state" / "shuffle" / f"{tree}_{level}_{start}")


@dataclass(frozen=True)
class ListJob:
    """Find the rows that some jobs need. spans: the parents [first, last) of each job."""

    of: Shared
    tree: int
    level: int
    spans: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """The first parent."""
        return f"list/{self.tree}/{self.level}/{self.spans[0][0]}"

    @property
    def out(self) -> str:
        """The pack that it leaves."""
        return list_path(self.of.work, self.tree, self.level, self.spans[0][0])

    def run(self) -> Receipt:
        """As the jobs will."""
        dataset, p = self.of.dataset(), self.of.parameters
        Y, structure = dataset.Y_columns(), self.of.structure(self.tree, dataset.n_labels)
        level, before = (
            structure.levels[self.level],
            beams_above(self.of.work, self.tree, self.level, dataset.n_samples),
        )
        bounds = [*(start for start, _ in ranges_of_rows(dataset.X_rows())), dataset.n_samples]
        listed, ends = 0, list[NDArray[np.int64]]()
        with new_pack(Path(self.out)) as pack:
            writer = PackedArrayWriter(pack, "rows", index_dtype(dataset.n_samples))
            for first, last in self.spans:
                rows = union_of([*parents_of(Y, structure, level, np.arange(first, last), before, p.negatives)])
                writer.append(rows.astype(index_dtype(dataset.n_samples)))
                ends.append(listed + np.searchsorted(rows, bounds))
                listed += len(rows)
            writer.close()
            pack.write("ends", np.concatenate(ends))
        return {"rows": listed, "bytes_read": Y.bytes_read}


def _ends(path: Path, firsts: tuple[int, ...]) -> NDArray[np.int64]:
    """Of each job of a list (jobs, ranges + 1)."""
    array = open_array(path / "ends")
    return array.read(0, array.size).reshape(len(firsts), -1)


@dataclass(frozen=True)
class ShuffleJob:
    """Write the rows of a range, by its number, side by side for each job."""

    of: Shared
    tree: int
    level: int
    lists: Lists
    number: int

    @property
    def key(self) -> str:
        """The first row."""
        return f"shuffle/{self.tree}/{self.level}/{self._rows()[0]}"

    @property
    def out(self) -> str:
        """The pack that it leaves."""
        return shuffle_path(self.of.work, self.tree, self.level, self._rows()[0])

    def _rows(self) -> tuple[int, int]:
        return ranges_of_rows(self.of.dataset().X_rows())[self.number]

    def run(self) -> Receipt:
        """Read the range, then write."""
        X, (start, stop) = self.of.dataset().X_rows(), self._rows()
        x, ptr = X.gather(np.arange(start, stop)), [np.zeros(2, np.int64)]
        lengths = np.diff(x.indptr)
        with new_pack(Path(self.out)) as pack:
            kinds = {"indices": x.indices.dtype, "values": x.values.dtype, "lengths": np.dtype(np.int32)}
            writers = {name: PackedArrayWriter(pack, name, kind) for name, kind in kinds.items()}
            for rows in self._rows_of_jobs():
                stop_if_unwanted()
                at = rows - start
                counts = lengths[at]
                writers["lengths"].append(counts.astype(np.int32))
                for low, high in fitting_ranges(counts, _PIECE):
                    places = _places(x.indptr[at[low:high]], counts[low:high])
                    writers["indices"].append(x.indices[places])
                    writers["values"].append(x.values[places])
                ptr.append(ptr[-1] + (len(at), counts.sum()))
            for writer in writers.values():
                writer.close()
            pack.write("firsts", np.concatenate(self.lists))
            pack.write("ptr", np.concatenate(ptr))
        return {"bytes_read": X.bytes_read, "passes": (stop - start) / max(X.n_lines, 1)}

    def _rows_of_jobs(self) -> Iterator[NDArray[np.int64]]:
        """The rows that each job needs of the range."""
        for firsts in self.lists:
            path = Path(list_path(self.of.work, self.tree, self.level, firsts[0]))
            begins, ends = _ends(path, firsts)[:, self.number : self.number + 2].T
            array, counts = open_array(path / "rows"), ends - begins
            rows = np.empty(int(counts.sum()), array.dtype)
            array.read_ranges(begins, counts, rows)
            yield from np.split(rows.astype(np.int64), np.cumsum(counts)[:-1])


def _places(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the entries of some rows, one after another."""
    ends = np.cumsum(counts)
    places: NDArray[np.int64] = np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])
    return places


class Shuffled:
    """The rows of a job, from what `ShuffleJob` left, read as a `SparseMatrix` reads them. first: its first parent."""

    def __init__(
        self, of: Shared, dataset: Dataset, tree: int, level: int, first: int, rows: NDArray[np.int64]
    ) -> None:
        X = dataset.X_rows()
        ranges = ranges_of_rows(X)
        self._packs = [Path(shuffle_path(of.work, tree, level, start)) for start, _ in ranges]
        self._rows, self.shape, self.bytes_read = rows, X.shape, 0
        self._ends = np.searchsorted(rows, [*(start for start, _ in ranges), X.n_lines])
        self._begins, self._counts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for pack, low, high in zip(self._packs, self._ends[:-1], self._ends[1:], strict=True):
            firsts, ptr = (open_array(pack / name) for name in ("firsts", "ptr"))
            job = int(np.searchsorted(firsts.read(0, firsts.size), first))
            begin, entry, end, _ = ptr.read(2 * job, 2 * job + 4).tolist()
            if end - begin != high - low:
                raise StoreError(f"{pack} has other rows than its jobs need: it is damaged; run the same command again")
            self._counts[low:high] = open_array(pack / "lengths").read(begin, end)
            self._begins[low:high] = entry + np.cumsum(self._counts[low:high]) - self._counts[low:high]

    def lengths(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where some of the rows (ascending) begin in their pack, and their numbers of entries."""
        at = np.searchsorted(self._rows, lines)
        return self._begins[at], self._counts[at]

    def gather(self, lines: NDArray[np.int64]) -> Block:
        """Some of the rows, ascending."""
        at = np.searchsorted(self._rows, lines)
        begins, counts = self._begins[at], self._counts[at]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        indices, values = np.empty(int(indptr[-1]), np.int32), np.empty(int(indptr[-1]), np.float32)
        edges = np.searchsorted(at, self._ends)
        for pack, low, high in zip(self._packs, edges[:-1], edges[1:], strict=True):
            mine = slice(int(indptr[low]), int(indptr[high]))
            for name, out in (("indices", indices), ("values", values)) if low < high else ():
                array = open_array(pack / name)
                array.read_ranges(begins[low:high], counts[low:high], out[mine])
                self.bytes_read += array.bytes_read
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.shape[1]:
            raise StoreError(f"{self._packs[0].parent} has features that X has not: it is damaged; train again")
        return Block(0, indptr, indices, values)


def shuffled_of(of: Shared, dataset: Dataset, level: int, lists: Lists, parent: int) -> Shuffled:
    """Of the first tree, the rows of the job that a parent belongs to."""
    firsts = lists[bisect_right(lists, parent, key=lambda firsts: firsts[0]) - 1]
    job, path = bisect_right(firsts, parent) - 1, Path(list_path(of.work, 0, level, firsts[0]))
    ends = _ends(path, firsts)[job]
    rows = open_array(path / "rows").read(int(ends[0]), int(ends[-1])).astype(np.int64)
    return Shuffled(of, dataset, 0, level, firsts[job], rows)
