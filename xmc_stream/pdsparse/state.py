"""What a pass of PD-Sparse leaves on disk, segment by segment: the dual variables of the rows it visited, and the tables of v.

Scratch of one run: written whole, and sealed, or not at all. A segment is some groups of strips of rows, in turn
(`kernels.order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import MemoryLimitError, spoilt_state
from xmc_stream.pdsparse.kernels.frank_wolfe import ActiveLabels
from xmc_stream.pdsparse.kernels.tables import Tables, enter, list_entries
from xmc_stream.runtime.plan import fitting_ranges
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.encoding import SCRATCH_CHUNK_BYTES, ArrayWriter, MatrixWriter, new_store
from xmc_stream.store.inventory import BLANK, SEAL, fill_seal
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.memory import format_size

SEGMENT_BYTES = 12 * SCRATCH_CHUNK_BYTES  # six arrays: a chunk and its checksummed copy each
ENTRIES = 1 << 18  # of tables written or read at a time
_TABLES = {"counts": np.int32, "labels": np.int32, "values": np.float64}


def begin_with(rows: ActiveLabels, indptr: NDArray[np.int64], labels: NDArray[np.int32]) -> bool:
    """Whether the labels of each row begin with those that are its own: labels[indptr[r] : indptr[r + 1]]."""
    counts = np.diff(indptr)
    if (rows.size < counts).any():
        return False
    at = np.arange(len(labels)) + np.repeat(rows.begin - indptr[:-1], counts)
    return bool((rows.labels[at] == labels).all())


@contextmanager
def new_segment(path: Path, n_labels: int) -> Iterator[tuple[MatrixWriter, ArrayWriter]]:
    """The dual variables of a segment's rows, under their name when the block ends well.

    Gives what writes active: rows x K (csr), values a, the labels of a row in their own order; and what writes the strips
    whose rows these are, in turn.
    """
    with new_store(path, {SEAL: BLANK}) as group:
        active = MatrixWriter(
            group.create_group("active"), "csr_matrix", (None, n_labels), np.float64, SCRATCH_CHUNK_BYTES
        )
        strips = ArrayWriter(group, "strips", np.int64, SCRATCH_CHUNK_BYTES)
        yield active, strips
        active.close()
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
                raise spoilt_state(segment / "strips")
            strips = read_small(segment, "strips", n, np.int64)
            known = ((strips >= 0) & (strips < n_strips)).all() and (self._segment[strips] < 0).all()
            sizes = np.minimum((strips + 1) << strip_bits, n_samples) - (strips << strip_bits) if known else strips
            if not known or len(np.unique(strips)) != len(strips) or sizes.sum() != active.n_lines:
                raise spoilt_state(segment / "strips")
            self._segment[strips], self._line[strips] = number, np.cumsum(sizes) - sizes
        if (self._segment < 0).any():
            raise spoilt_state(segments[-1] / "strips")

    @property
    def bytes_read(self) -> int:
        """Bytes of the ranges read so far."""
        return sum(matrix.bytes_read for matrix in self._active)

    def read(self, strips: NDArray[np.int64], sizes: NDArray[np.int64]) -> ActiveLabels:
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
        return ActiveLabels(begin, size, np.concatenate(labels), np.concatenate(a))


def write_tables(path: Path, tables: Tables, n_features: int) -> None:
    """Leave v on disk: counts (D,), the labels of each feature; then all labels and values, by feature, in no order in it."""
    per_feature = np.full(n_features, tables.n_labels, np.int64)
    if not tables.dense:
        per_feature = tables.v.n.reshape(n_features, -1).sum(axis=1, dtype=np.int64)
    with new_store(path, {SEAL: BLANK}) as group:
        arrays = [ArrayWriter(group, name, dtype, SCRATCH_CHUNK_BYTES) for name, dtype in _TABLES.items()]
        for first, last in fitting_ranges(per_feature, ENTRIES):
            room = int(per_feature[first:last].sum())
            counts, labels, values = np.empty(last - first, np.int32), np.empty(room, np.int32), np.empty(room)
            n = list_entries(first, last, tables, counts, labels, values)
            parts: tuple[NDArray[Any], ...] = counts, labels[:n], values[:n]
            for array, some in zip(arrays, parts, strict=True):
                array.append(some)
        for array in arrays:
            array.close()
        fill_seal(group.path)


def read_tables(path: Path, tables: Tables, n_features: int, above: float | None = None) -> None:
    """Take v from disk, or its entries |v| > above. Raises MemoryLimitError where they do not fit."""
    for first, counts, labels, values in stored_tables(path, n_features, tables.n_labels, ENTRIES):
        if above is not None:
            kept = np.abs(values) > above
            counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(counts)])])
            counts, labels, values = counts.astype(np.int32), labels[kept], values[kept]
        if not enter(first, tables, counts, labels, values):
            raise MemoryLimitError(
                f"{path}: these tables take more than the {format_size(tables.most_bytes)} that the memory limit leaves "
                "them: go on with a larger " + flags.MEMORY_LIMIT
            )


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
    known = labels.dtype == np.int32 and values.dtype == np.float64
    if not (bounded and known and labels.size == values.size == ends[-1]):
        raise spoilt_state(path)
    for first, last in fitting_ranges(counts, most):
        low, high = int(ends[first]), int(ends[last])
        some, v = labels.read(low, high), values.read(low, high)
        if len(some) and not (0 <= some.min() <= some.max() < n_labels and np.isfinite(v).all()):
            raise spoilt_state(path)
        yield first, counts[first:last], some, v
