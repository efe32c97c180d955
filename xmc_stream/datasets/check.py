"""Jobs that check a store: files against their checksums, and the lines of a matrix against what must hold of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.plan import MIB, even_ranges
from xmc_stream.store.chunks import ChunkedArray, open_array
from xmc_stream.store.inventory import ArrayFiles
from xmc_stream.store.matrix import SparseMatrix

MOST = 100  # lines of damage that a job reports
JOB_BYTES = 16 * MIB  # that a job of either kind holds at most
_WINDOW = 1 << 16  # lines whose ends are read at a time
_PIECE = 1 << 19  # entries read at a time
_LINES_JOB = 1 << 24  # entries of a job, about
_FILES_JOB = 1 << 28  # bytes of a job, about, unless one array is larger


@dataclass(frozen=True)
class FilesJob:
    """All chunk files of some arrays. The receipt has the sha256 of each array's values, by folder."""

    arrays: tuple[ArrayFiles, ...]

    @property
    def key(self) -> str:
        """The first array."""
        return f"files/{self.arrays[0].folder}"

    def run(self) -> Receipt:
        """Read and compare."""
        hashes, damage = {}, []
        for array in self.arrays:
            hashes[array.folder], lines = array.check()
            damage += lines
        n_bytes = sum(array.file_bytes for array in self.arrays)
        return {"hashes": hashes, "damage": damage[:MOST], "n_damage": len(damage), "bytes_read": n_bytes}


def files_jobs(arrays: Sequence[ArrayFiles]) -> list[FilesJob]:
    """Jobs for all arrays, the largest first: an array is hashed from its beginning to its end, in one job."""
    ordered = sorted(arrays, key=lambda array: (-array.n_bytes, array.folder))
    ends = itertools.accumulate(array.file_bytes for array in ordered)
    groups = itertools.groupby(zip(ends, ordered, strict=True), lambda pair: pair[0] // _FILES_JOB)
    return [FilesJob(tuple(array for _, array in group)) for _, group in groups]


@dataclass(frozen=True)
class LinesJob:
    """Lines [first, last) of a matrix whose files are whole.

    norms, counts: folders of arrays that must hold the norm, or the number of entries, of each line; "" for none.
    key_: of the hashes; the receipt has their sums, unless the lines cannot be told apart.
    """

    matrix: str
    first: int
    last: int
    hash_key: int
    norms: str = ""
    counts: str = ""

    @property
    def key(self) -> str:
        """The lines."""
        return f"lines/{self.matrix}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Read and check, by windows of lines and pieces of entries."""
        matrix = SparseMatrix(self.matrix)
        damage: list[str] = []
        sums = np.zeros(2, np.uint64)
        for low in range(self.first, self.last, _WINDOW):
            high = min(low + _WINDOW, self.last)
            fault = self._window(matrix, low, high, sums, damage)
            if fault:
                return {"damage": [*damage, fault][:MOST], "sums": None, "bytes_read": matrix.bytes_read}
        return {"damage": damage[:MOST], "sums": sums.tolist(), "bytes_read": matrix.bytes_read}

    def _window(
        self, matrix: SparseMatrix, low: int, high: int, sums: NDArray[np.uint64], damage: list[str]
    ) -> str | None:
        """Check lines [low, high); returns what is wrong with their ends, as then nothing else can be checked."""
        from xmc_stream.datasets.kernels.check import DISORDER, N_STATE, NOT_FINITE, OUTSIDE, check_entries

        line = "row" if matrix.encoding == "csr_matrix" else "column"
        window = matrix.indptr.read(low, high + 1)
        lengths, last = np.diff(window), matrix.nnz if high == matrix.n_lines else None
        if (lengths < 0).any() or window[0] < 0 or window[-1] > matrix.nnz or (low == 0 and window[0] != 0):
            return f"{matrix.path}/indptr does not ascend from 0 to {matrix.nnz} in {line}s {low} to {high - 1}"
        if last is not None and window[-1] != last:
            return f"{matrix.path}/indptr ends with {window[-1]}, and there are {last} indices"
        state = np.full(N_STATE, -1, np.int64)
        squares = np.zeros(high - low)
        bound = matrix.shape[1] if line == "row" else matrix.shape[0]
        for begin in range(int(window[0]), int(window[-1]), _PIECE):
            end = min(begin + _PIECE, int(window[-1]))
            indices = matrix.indices.read(begin, end)
            values = np.empty(0, np.float32) if matrix.data is None else matrix.data.read(begin, end)
            check_entries(
                window[1:], begin, low, indices, values, values.view(np.uint32), bound, line == "column",
                np.uint64(self.hash_key), state, sums, squares,
            )  # fmt: skip
        for at, what in (
            (DISORDER, "has indices that do not ascend, or one twice"),
            (OUTSIDE, f"has an index that is not below {bound}"),
            (NOT_FINITE, "has a value that is not finite"),
        ):
            if state[at] >= 0:
                damage.append(f"{matrix.path}: {line} {state[at]} {what}")
        if self.norms:
            with np.errstate(over="ignore"):
                _compare(self.norms, low, np.sqrt(squares).astype(np.float32), f"norm of {line}", damage)
        if self.counts:
            _compare(self.counts, low, lengths, f"number of entries of {line}", damage)
        return None


def _compare(folder: str, start: int, true: NDArray[np.generic], what: str, damage: list[str]) -> None:
    stored = open_array(Path(folder)).read(start, start + len(true))
    wrong = np.flatnonzero(stored != true)
    if len(wrong):
        i = int(wrong[0])
        damage.append(f"{folder}: the {what} {start + i} is {stored[i]}, not {true[i]} (and {len(wrong) - 1} more)")


def lines_jobs(matrix: SparseMatrix, hash_key: int, norms: str = "", counts: str = "") -> list[LinesJob]:
    """Jobs for all lines of a matrix."""
    parts = even_ranges(matrix.n_lines, max(1, matrix.nnz // _LINES_JOB, matrix.n_lines // _LINES_JOB))
    return [LinesJob(str(matrix.path), a, b, hash_key, norms, counts) for a, b in parts if b > a]


def index_counts_sum(folder: Path, hash_key: int) -> int:
    """What the sums of hashes of indices alone must be, from how often each occurs."""
    from xmc_stream.datasets.kernels.check import sum_of_counts

    total = first = 0
    for window in windows(open_array(folder)):
        total += int(sum_of_counts(first, window, np.uint64(hash_key)))
        first += len(window)
    return total % 2**64


def windows(array: ChunkedArray) -> Iterator[NDArray[Any]]:
    """All items in turn, so many at a time that they are few."""
    for start in range(0, array.size, _PIECE):
        yield array.read(start, min(start + _PIECE, array.size))
