"""Datasets that are made: of rows that come block by block, or of arrays that several jobs write apart from each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError, StoreError
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import FORMAT, VERSION, Dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter, index_dtype, new_store
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import Group
from xmc_stream.store.places import new_folder
from xmc_stream.store.remote import local_path
from xmc_stream.store.transpose import transpose
from xmc_stream.system.stop import work_name


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
        transpose(SparseMatrix(path / "Y" / "rows"), self._label_counts, columns, max_bytes)
        return {
            "n_samples": self.X.lines,
            "n_features": self.n_features,
            "n_labels": self.n_labels,
            "nnz_features": self.X.nnz,
            "nnz_labels": self.Y.nnz,
        }


def load_kernels(n_samples: int, n_features: int, n_labels: int) -> None:
    """Compile or load what making such a dataset calls, so that the memory of it is there before a plan."""
    from xmc_stream.kernels.csr import (
        count_indices,
        row_norms,
        scale_rows_l2,
        scatter_entries,
        scatter_lines,
        sort_by_bucket,
    )

    ends, none = np.zeros(1, np.int64), np.empty(0, np.float32)
    for bound in (n_features, n_labels):
        count_indices(np.empty(0, index_dtype(bound)), ends)
    row_norms(ends, none, none)
    scale_rows_l2(ends, none)
    columns, lines, short = (
        np.empty(0, index_dtype(n_labels)),
        np.empty(0, index_dtype(n_samples)),
        np.empty(0, np.uint16),
    )
    scatter_lines(ends, columns, none, 0, ends, lines, none)
    sort_by_bucket(ends, columns, none, np.zeros(1, np.int32), ends, np.zeros(1, np.int64), short, short, none)
    scatter_entries(short, short, none, 0, ends, lines, none)


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
        finish(group.path, {**writer.finish(group.path, max_bytes), **attributes})


# A dataset put together from arrays that are written apart from each other, beside each other if one likes. The steps on a
# folder: `begin`; for each side `write_lengths`, `write_indices`, and for X `write_values`; `finish_matrix` of both;
# `make_columns`; `finish`. Each may be done again after a kill; what it wrote before is replaced. What jobs make lies beside
# the dataset until it is whole (`work_of`), so two copies of a job do not meet, and none leaves anything in it.

Side = Literal["X", "Y"]
_COUNTS = {"X": "feature_counts", "Y": "label_counts"}


def begin(path: Path) -> None:
    """The groups of a dataset, where they are not there yet."""
    for name in ("", "X", "X/rows", "Y", "Y/rows", "statistics"):
        if not (path / name / "zarr.json").exists():
            Group(path / name, {})


def work_of(path: Path, name: str) -> Path:
    """Where this copy of a job makes what will be `name` in the dataset: beside that."""
    return work_name(path.with_name(f"{path.name}-{name.replace('/', '-')}"))


@contextmanager
def new_array(path: Path, name: str, dtype: DTypeLike, durable: bool = False) -> Iterator[ArrayWriter]:
    """An array of the dataset, there when the block ends well, in which the writer is closed. durable: then."""
    with new_folder(path / name, work_of(path, name), durable) as work:
        yield ArrayWriter(Group(work.parent), work.name, dtype)


def write_lengths(path: Path, side: Side, lengths: Iterable[NDArray[np.int64]]) -> dict[str, Any]:
    """indptr, from the entries of each row, in windows. Returns sha256, n_rows, nnz."""
    n_rows = nnz = 0
    with new_array(path, f"{side}/rows/indptr", np.int64) as writer:
        writer.append(np.zeros(1, np.int64))
        for window in lengths:
            ends = np.cumsum(window, dtype=np.int64)
            ends += nnz
            writer.append(ends)
            n_rows += len(window)
            nnz = int(ends[-1]) if len(ends) else nnz
        return {"sha256": writer.close(), "n_rows": n_rows, "nnz": nnz}


def write_indices(path: Path, side: Side, windows: Iterable[NDArray[Any]], base: int, bound: int) -> dict[str, Any]:
    """indices less `base`, which must lie in [0, bound), and how often each occurs. Returns sha256."""
    from xmc_stream.kernels.csr import count_indices

    dtype = index_dtype(bound)
    with (
        new_array(path, f"{side}/rows/indices", dtype) as writer,
        new_array(path, f"statistics/{_COUNTS[side]}", np.int64) as statistics,
    ):
        counts = np.zeros(bound, np.int64)
        for window in windows:
            if base:
                window -= window.dtype.type(base)
            if len(window) and not 0 <= int(window.min()) <= int(window.max()) < bound:
                kind = "feature" if side == "X" else "label"
                worst = int(window.min()) if int(window.min()) < 0 else int(window.max())
                raise InputError(
                    f"{kind} id {worst + base} is not in {base} ... {bound - 1 + base}, where ids begin with {base}: "
                    "say " + flags.ZERO_BASED + " or " + flags.ONE_BASED + ", or correct the sizes"
                )
            indices = window.astype(dtype, copy=False)
            count_indices(indices, counts)
            writer.append(indices)
        statistics.append(counts)
        statistics.close()
        return {"sha256": writer.close()}


def write_values(
    path: Path, blocks: Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]], normalize: str
) -> dict[str, Any]:
    """The values of X and the norms of its rows. blocks: indptr from 0 and values, which may be changed; normalize: l2
    divides each row by its norm. Returns sha256."""
    from xmc_stream.kernels.csr import row_norms, scale_rows_l2

    with (
        new_array(path, "X/rows/data", np.float32) as writer,
        new_array(path, "statistics/row_norms", np.float32) as norms,
    ):
        for indptr, data in blocks:
            if normalize == "l2":
                scale_rows_l2(indptr, data)
            writer.append(data)
            norm = np.empty(len(indptr) - 1, np.float32)
            row_norms(indptr, data, norm)
            norms.append(norm)
        norms.close()
        return {"sha256": writer.close()}


def make_columns(path: Path, side: Side, max_bytes: int) -> None:
    """Write a side by columns, in buffers of max_bytes."""
    rows = SparseMatrix(path / side / "rows")
    counts = read_small(path / "statistics", _COUNTS[side], rows.bound, np.int64)
    name = f"{side}/columns"
    with new_folder(path / name, work_of(path, name), durable=False) as columns:
        transpose(rows, counts, Group(columns, {}), max_bytes)
        if side == "X":  # may be made later, and is sealed apart
            seal(columns)


def finish(path: Path, attributes: Mapping[str, Any]) -> None:
    """Make the folder a dataset. attributes: its sizes, and what was converted from what."""
    Group(path).update_attributes({"format": FORMAT, "version": VERSION, **attributes})
    seal(path)
