"""Datasets that are made: rows are taken block by block, and a dataset gets its name when it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError, StoreError
from xmc_stream.store import transpose
from xmc_stream.store.dataset import FORMAT, VERSION, Dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter, index_dtype, new_store
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import Group
from xmc_stream.store.remote import local_path

_COPY_BYTES = 2**24  # labels or norms that are copied at a time


class DatasetWriter:
    """Takes the rows of a new dataset, block by block, whatever format they came in. folder: where it is made."""

    def __init__(self, group: Group, n_features: int, n_labels: int) -> None:
        self._group = group
        self.folder = group.path
        self.n_features = n_features
        self.n_labels = n_labels
        self.X = MatrixWriter(group.create_group("X/rows"), "csr_matrix", (None, n_features))
        self.Y = MatrixWriter(group.create_group("Y/rows"), "csr_matrix", (None, n_labels), data_dtype=None)
        self._statistics = group.create_group("statistics")
        self._norms = ArrayWriter(self._statistics, "row_norms", np.float32)
        self._feature_counts = np.zeros(n_features, np.int64)
        self._label_counts = np.zeros(n_labels, np.int64)

    def append(
        self,
        x_indptr: NDArray[np.int64],
        x_indices: NDArray[Any],
        x_data: NDArray[np.float32],
        y_indptr: NDArray[np.int64],
        y_indices: NDArray[Any],
    ) -> None:
        """Add rows: two CSR triples with as many rows each, indptr from 0; indices sorted, unique in a row, in range."""
        if len(x_indptr) != len(y_indptr):
            raise InputError(f"X has {len(x_indptr) - 1} rows and Y has {len(y_indptr) - 1}: they must have as many")
        self.append_X(x_indptr, x_indices, x_data)
        self.append_Y(y_indptr, y_indices)

    def append_X(self, indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32]) -> None:
        """Add rows of X alone: those of Y may come in other blocks."""
        from xmc_stream.kernels.csr import count_indices, row_norms

        self.X.append(np.diff(indptr), indices, data)
        norms = np.empty(len(indptr) - 1, np.float32)
        row_norms(indptr, data, norms)
        self._norms.append(norms)
        count_indices(indices, self._feature_counts)

    def append_Y(self, indptr: NDArray[np.int64], indices: NDArray[Any]) -> None:
        """Add rows of Y alone."""
        from xmc_stream.kernels.csr import count_indices

        self.Y.append(np.diff(indptr), indices)
        count_indices(indices, self._label_counts)

    def link(self, other: Dataset) -> None:
        """Add all rows of a dataset, X by hard links to its chunk files, so that it takes no disk twice.

        Raises StoreError where the last chunks of X, there or here, are not full.
        """
        self.X.link(other.X_rows())
        for block in other.Y_rows().blocks(_COPY_BYTES):
            self.Y.append(np.diff(block.indptr), block.indices)
        step = _COPY_BYTES // 4
        for start in range(0, other.n_samples, step):
            self._norms.append(other.row_norms(start, min(start + step, other.n_samples)))
        self._feature_counts += other.feature_counts()
        self._label_counts += other.label_counts()

    def finish(self, path: Path, max_bytes: int) -> dict[str, int]:
        """Write statistics and Y by columns (in buffers of max_bytes); returns the sizes for the attributes."""
        self.X.close()
        self.Y.close()
        self._norms.close()
        for name, counts in (("feature_counts", self._feature_counts), ("label_counts", self._label_counts)):
            writer = ArrayWriter(self._statistics, name, np.int64)
            writer.append(counts)
            writer.close()
        columns = self._group.create_group("Y/columns")
        transpose.transpose(SparseMatrix(path / "Y" / "rows"), self._label_counts, columns, max_bytes)
        return {
            "n_samples": self.X.lines,
            "n_features": self.n_features,
            "n_labels": self.n_labels,
            "nnz_features": self.X.nnz,
            "nnz_labels": self.Y.nnz,
        }


def load_kernels(n_samples: int, n_features: int, n_labels: int) -> None:
    """Compile or load what making such a dataset calls, so that the memory of it is there before a plan."""
    from xmc_stream.kernels.csr import count_indices, row_norms, scale_rows_l2

    ends, none = np.zeros(1, np.int64), np.empty(0, np.float32)
    for bound in (n_features, n_labels):
        count_indices(np.empty(0, index_dtype(bound)), ends)
    row_norms(ends, none, none)
    scale_rows_l2(ends, none)
    transpose.load_kernels(n_samples, index_dtype(n_labels))


def check_target(path: Path, overwrite: bool) -> None:
    """Raise InputError where a new dataset must not take this path: something is there, and not to be replaced."""
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists: give another name, or " + flags.OVERWRITE + " to replace it")
    if path.exists():
        try:
            Dataset(path)
        except StoreError:
            raise InputError(f"{path} exists and is not a dataset: give another name, or remove it yourself") from None


@contextmanager
def new_dataset(
    path: str | Path,
    n_features: int,
    n_labels: int,
    attributes: Mapping[str, Any],
    max_bytes: int = 2**26,
    overwrite: bool = False,
) -> Iterator[DatasetWriter]:
    """A dataset under construction; it gets its name when the block ends well, and leaves nothing when it does not.

    attributes: what was converted from what, and how; JSON values. max_bytes: of the transposition's buffers.
    Raises InputError where `path` exists and overwrite is not set.
    """
    path = local_path(path)
    check_target(path, overwrite)
    with new_store(path, {}) as group:
        writer = DatasetWriter(group, n_features, n_labels)
        yield writer
        sizes = writer.finish(group.path, max_bytes)
        group.update_attributes({"format": FORMAT, "version": VERSION, **sizes, **attributes})
        seal(group.path)
