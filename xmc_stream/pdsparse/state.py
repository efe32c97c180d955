"""What a pass of PD-Sparse leaves on disk, segment by segment: the dual variables of the rows it visited, and the tables of v.

Scratch of one run: written whole, and sealed, or not at all. A segment is some groups of strips of rows, in turn
(`kernels.order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, ArrayWriter, MatrixWriter, new_store
from xmc_stream.store.inventory import BLANK, SEAL, fill_seal
from xmc_stream.store.matrix import SparseMatrix

SEGMENT_BYTES = 12 * SCRATCH_CHUNK_BYTES  # six arrays: a chunk and its checksummed copy each
_ROWS = 1 << 12  # compared at a time
_TABLES = {"counts": np.int32, "labels": np.int32, "values": np.float64}


@dataclass
class DualRows:
    """Active labels of rows in memory, ragged: row r has labels[begin[r] : begin[r] + size[r]], positives first, and a."""

    begin: NDArray[np.int64]
    size: NDArray[np.int64]
    labels: NDArray[np.int32]
    a: NDArray[np.float64]


def begin_with(rows: DualRows, indptr: NDArray[np.int64], labels: NDArray[np.int32]) -> bool:
    """Whether the labels of each row begin with those that are its own: labels[indptr[r] : indptr[r + 1]]."""
    counts = np.diff(indptr)
    if (rows.size < counts).any():
        return False
    for low in range(0, len(counts), _ROWS):
        high = min(low + _ROWS, len(counts))
        mine = slice(int(indptr[low]), int(indptr[high]))
        at = np.arange(mine.start, mine.stop) + np.repeat(rows.begin[low:high] - indptr[low:high], counts[low:high])
        if (rows.labels[at] != labels[mine]).any():
            return False
    return True


class SegmentWriter:
    """active: rows x K (csr), values a; the labels of a row in their own order. The rows are those of strips, in turn."""

    def __init__(self, active: MatrixWriter) -> None:
        self.active = active
        self.strips: list[NDArray[np.int64]] = []


@contextmanager
def new_segment(path: Path, n_labels: int) -> Iterator[SegmentWriter]:
    """The dual variables of a segment's rows, under their name when the block ends well."""
    with new_store(path, {SEAL: BLANK}) as group:
        matrix = MatrixWriter(
            group.create_group("active"), "csr_matrix", (None, n_labels), np.float64, SCRATCH_CHUNK_BYTES
        )
        writer = SegmentWriter(matrix)
        yield writer
        matrix.close()
        strips = ArrayWriter(group, "strips", np.int64, SCRATCH_CHUNK_BYTES)
        strips.append(np.concatenate(writer.strips))
        strips.close()
        fill_seal(group.path)


class PassState:
    """The dual variables that the segments of a pass left."""

    def __init__(self, segments: Sequence[Path], n_samples: int, n_labels: int, strip_bits: int) -> None:
        # a row's labels stand in an order of their own
        self._active = [
            SparseMatrix(segment / "active", ordered=False, finite=True).expect(
                (None, n_labels), "csr_matrix", np.float64
            )
            for segment in segments
        ]
        n_strips = -(-n_samples >> strip_bits)
        self._segment = np.full(n_strips, -1, np.int32)
        self._line = np.zeros(n_strips, np.int64)
        for number, (segment, active) in enumerate(zip(segments, self._active, strict=True)):
            n = open_array(segment / "strips").size
            if n > n_strips:
                raise _damaged(segment / "strips")
            strips = read_small(segment, "strips", n, np.int64)
            known = ((strips >= 0) & (strips < n_strips)).all() and (self._segment[strips] < 0).all()
            sizes = np.minimum((strips + 1) << strip_bits, n_samples) - (strips << strip_bits) if known else strips
            if not known or len(np.unique(strips)) != len(strips) or sizes.sum() != active.n_lines:
                raise _damaged(segment / "strips")
            self._segment[strips], self._line[strips] = number, np.cumsum(sizes) - sizes
        if (self._segment < 0).any():
            raise _damaged(segments[-1] / "strips")

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return sum(matrix.bytes_read for matrix in self._active)

    def read(self, strips: NDArray[np.int64], sizes: NDArray[np.int64]) -> DualRows:
        """Of the rows of some strips with so many rows, strip after strip."""
        firsts = np.cumsum(sizes) - sizes
        begin, size = (np.empty(int(sizes.sum()), np.int64) for _ in range(2))
        labels: list[NDArray[np.int32]] = []
        a: list[NDArray[np.float64]] = []
        filled = 0
        for number, matrix in enumerate(self._active):
            mine = np.flatnonzero(self._segment[strips] == number)
            mine = mine[np.argsort(self._line[strips[mine]])]
            if not len(mine):
                continue
            lines = np.concatenate([np.arange(sizes[j]) + self._line[strips[j]] for j in mine])
            rows = np.concatenate([np.arange(sizes[j]) + firsts[j] for j in mine])
            block = matrix.gather(lines)
            begin[rows], size[rows] = block.indptr[:-1] + filled, np.diff(block.indptr)
            labels.append(block.indices.astype(np.int32, copy=False))
            a.append(block.values)
            filled += len(block.indices)
        return DualRows(begin, size, np.concatenate(labels), np.concatenate(a))


class TablesWriter:
    """counts (D,): labels of each feature; then all labels and values of v, by feature, in no order within one."""

    def __init__(self, arrays: dict[str, ArrayWriter]) -> None:
        self._arrays = arrays

    def append(self, counts: NDArray[np.int32], labels: NDArray[np.int32], values: NDArray[np.float64]) -> None:
        """The next features."""
        self._arrays["counts"].append(counts)
        self._arrays["labels"].append(labels)
        self._arrays["values"].append(values)


@contextmanager
def new_tables(path: Path) -> Iterator[TablesWriter]:
    """v of all features and labels, under its name when the block ends well."""
    with new_store(path, {SEAL: BLANK}) as group:
        arrays = {name: ArrayWriter(group, name, dtype, SCRATCH_CHUNK_BYTES) for name, dtype in _TABLES.items()}
        yield TablesWriter(arrays)
        for array in arrays.values():
            array.close()
        fill_seal(group.path)


def _damaged(path: Path) -> StoreError:
    return StoreError(f"{path} has what it cannot have: remove the unfinished run and begin anew")


def stored_tables(
    path: Path, n_features: int, n_labels: int, most: int
) -> Iterator[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Ranges of features with about so many labels together: the first feature, counts, labels, values.

    Raises StoreError where they are not those of so many features and labels.
    """
    counts = read_small(path, "counts", n_features, np.int32)
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    labels, values = open_array(path / "labels"), open_array(path / "values")
    bounded = not len(counts) or 0 <= counts.min() <= counts.max() <= n_labels
    if not bounded or labels.size != ends[-1] or values.size != ends[-1]:
        raise _damaged(path)
    if labels.dtype != np.int32 or values.dtype != np.float64:
        raise _damaged(path)
    first = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + most, side="right")) - 1)
        low, high = int(ends[first]), int(ends[last])
        some, v = labels.read(low, high), values.read(low, high)
        if len(some) and not (0 <= some.min() <= some.max() < n_labels and np.isfinite(v).all()):
            raise _damaged(path)
        yield first, counts[first:last], some, v
        first = last
