"""A dataset put together from arrays that are written apart from each other, beside each other if one likes.

The steps on a folder: `begin`; for each side `write_lengths`, `write_indices`, and for X `write_values`; `finish_rows`
of both; `make_columns`; `finish`. Each may be done again after a kill; what it wrote before is replaced. What jobs make
lies beside the dataset until it is whole (`work_of`), so two copies of a job do not meet, and none leaves anything in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import FORMAT, VERSION
from xmc_stream.store.encoding import ArrayWriter, finish_matrix, index_dtype, new_folder
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import Group
from xmc_stream.store.transpose import transpose
from xmc_stream.system.stop import work_name

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


def finish_rows(path: Path, side: Side, n_rows: int, bound: int, nnz: int, hashes: list[str]) -> None:
    """Make the arrays of a side a matrix. hashes: of indptr, indices and, for X, values."""
    finish_matrix(path / side / "rows", "csr_matrix", (n_rows, bound), nnz, hashes)


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
