"""Rows of a level, brought side by side on disk: a shuffle. It is for an X that is larger than memory.

Jobs that solve a level read the rows of their parents, which are scattered over X. A disk is slow at that, and reads pages for
rows. So each job's rows are listed first (`ListJob`). Then X is read once, range by range of rows, and of each range the rows
that each job needs are written, job after job (`ShuffleJob`). A job reads its share of each range (`Shuffled`).
"""

from __future__ import annotations

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


def ranges_of_rows(X: SparseMatrix) -> list[tuple[int, int]]:
    """The rows of each job that writes rows side by side."""
    return even_ranges(X.n_lines, -(-X.nnz * X.entry_bytes // _RANGE_BYTES))


def range_bytes(X: SparseMatrix) -> int:
    """That a job holds of the range with most entries."""
    bounds = np.array([start for start, _ in ranges_of_rows(X)] + [X.n_lines])
    ends = np.empty(len(bounds), X.indptr.dtype)
    X.indptr.read_ranges(bounds, np.ones(len(bounds), np.int64), ends)
    return int(np.diff(ends).max(initial=0)) * X.entry_bytes + 64 * _PIECE


def list_path(work: str, tree: int, level: int, first: int) -> str:
    """The pack of the rows of the job that begins with a parent: `rows`, and where those of each range begin, `ends`."""
    return str(Path(work) / "state" / "list" / f"{tree}_{level}_{first}")


def shuffle_path(work: str, tree: int, level: int, start: int) -> str:
    """The pack of a range of rows.

    `indices` and `values` of the rows that the first job needs, then the second, ...; `lengths` of these rows; `firsts`, the
    first parents of the jobs; `ptr`, where the rows and the entries of each job begin.
    """
    return str(Path(work) / "state" / "shuffle" / f"{tree}_{level}_{start}")


@dataclass(frozen=True)
class ListJob:
    """Find the rows that solving the children of parents [first, last) needs."""

    of: Shared
    tree: int
    level: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """The first parent."""
        return f"list/{self.tree}/{self.level}/{self.first}"

    @property
    def out(self) -> str:
        """The pack that it leaves."""
        return list_path(self.of.work, self.tree, self.level, self.first)

    def run(self) -> Receipt:
        """As the job will."""
        dataset = self.of.dataset()
        Y, X = dataset.Y_columns(), dataset.X_rows()
        structure = self.of.structure(self.tree, dataset.n_labels)
        level, numbers = structure.levels[self.level], np.arange(self.first, self.last)
        before = beams_above(self.of.work, self.tree, self.level, dataset.n_samples)
        rows = union_of(list(parents_of(Y, structure, level, numbers, before, self.of.parameters.negatives)))
        starts = [start for start, _ in ranges_of_rows(X)]
        with new_pack(Path(self.out)) as pack:
            pack.write("rows", rows.astype(index_dtype(dataset.n_samples)))
            pack.write("ends", np.searchsorted(rows, [*starts, dataset.n_samples]))
        return {"rows": len(rows), "bytes_read": Y.bytes_read}


@dataclass(frozen=True)
class ShuffleJob:
    """Write the rows of a range side by side for each job. firsts: the first parents of all jobs of a level, ascending."""

    of: Shared
    tree: int
    level: int
    firsts: tuple[int, ...]
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
        x, ptr = X.gather(np.arange(start, stop)), np.zeros((len(self.firsts) + 1, 2), np.int64)
        lengths = np.diff(x.indptr)
        with new_pack(Path(self.out)) as pack:
            kinds = {"indices": x.indices.dtype, "values": x.values.dtype, "lengths": np.dtype(np.int32)}
            writers = {name: PackedArrayWriter(pack, name, kind) for name, kind in kinds.items()}
            for job, first in enumerate(self.firsts):
                stop_if_unwanted()
                at = _listed(list_path(self.of.work, self.tree, self.level, first), self.number) - start
                counts = lengths[at]
                writers["lengths"].append(counts.astype(np.int32))
                for low, high in fitting_ranges(counts, _PIECE):
                    places = _places(x.indptr[at[low:high]], counts[low:high])
                    writers["indices"].append(x.indices[places])
                    writers["values"].append(x.values[places])
                ptr[job + 1] = ptr[job] + (len(at), counts.sum())
            for writer in writers.values():
                writer.close()
            pack.write("firsts", np.array(self.firsts))
            pack.write("ptr", ptr.ravel())
        return {"bytes_read": X.bytes_read, "passes": (stop - start) / max(X.n_lines, 1)}


def _listed(path: str, number: int) -> NDArray[np.int64]:
    """The rows of a job in a range."""
    low, high = open_array(Path(path) / "ends").read(number, number + 2).tolist()
    return open_array(Path(path) / "rows").read(low, high).astype(np.int64)


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
