"""What steps leave on disk: W, class by class; within a segment also what the next ones go on from bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.kernels.blocks import CSR
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.packing import PackedArrayWriter, new_pack

CLASSES, ENTRIES = 4096, 1 << 18  # written or read at a time, at most; a class at least


def class_ranges(ends: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Classes start .. stop - 1 in ranges of few entries. ends (K + 1,): where the entries of each begin, and the last end."""
    while start < stop:
        last = int(np.searchsorted(ends, ends[start] + ENTRIES, side="right")) - 1
        last = min(max(last, start + 1), start + CLASSES, stop)
        yield start, last
        start = last


Beside = Mapping[str, NDArray[Any]]  # arrays by name, with W


def state_path(work: Path, number: int, first: int) -> Path:
    """What steps of segment `number` leave, from step `first` on."""
    return work / "state" / "steps" / f"{number:06d}-{first:09d}"


def write_vectors(path: Path, parts: Iterable[Mapping[str, NDArray[Any]]], beside: Beside) -> None:
    """Leave vectors durably. parts: arrays by name, some classes at a time: `read_sparse` and `read_dense` say which."""
    with new_pack(path) as pack:
        writers: dict[str, PackedArrayWriter] = {}
        for part in parts:
            for name, values in part.items():
                if name not in writers:
                    writers[name] = PackedArrayWriter(pack, name, values.dtype)
                writers[name].append(values.reshape(-1))
        for writer in writers.values():
            writer.close()
        for name, values in beside.items():
            line = values.reshape(-1)
            pack.write(f"beside/{name}", line.view(np.uint8) if line.dtype == np.bool_ else line)


def read_beside(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Arrays that were left with W, each as one line."""
    arrays = {name: open_array(path / "beside" / name) for name in names}
    return {name: array.read(0, array.size) for name, array in arrays.items()}


def read_sparse(
    path: Path, n_classes: int, n_features: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, CSR]]:
    """The vectors of classes start .. stop - 1, some at a time, from the first named on: counts, ascending features, values.

    Raises StoreError where they cannot be those of so many classes and features.
    """
    counts = read_small(path, "counts", n_classes, np.int64)
    features, values = open_array(path / "features"), open_array(path / "values")
    ends = np.concatenate([[0], np.cumsum(counts)])
    bounded = not len(counts) or 0 <= counts.min() <= counts.max() <= n_features
    if not bounded or features.size != ends[-1] or values.size != ends[-1]:
        raise _damaged(path)
    stop = n_classes if stop is None else stop
    for first, last in class_ranges(ends, start, stop):
        some = ends[first : last + 1]
        block = CSR(some - some[0], features.read(some[0], some[-1]), values.read(some[0], some[-1]))
        whole = block.indices.dtype == np.int32 and block.values.dtype == np.float32
        steps = np.diff(block.indices)
        inside = np.delete(steps, block.indptr[1:-1][(block.indptr[1:-1] > 0) & (block.indptr[1:-1] <= len(steps))] - 1)
        if not whole or (len(block.indices) and not 0 <= block.indices.min() <= block.indices.max() < n_features):
            raise _damaged(path)
        if (inside <= 0).any() or not np.isfinite(block.values).all():
            raise _damaged(path)
        yield first, block


def read_dense(path: Path, n_classes: int, rank: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Some lines (values) at a time, from the first named on. Raises StoreError for what cannot be."""
    values = open_array(path / "values")
    if values.size != n_classes * rank or values.dtype != np.float32:
        raise _damaged(path)
    for first in range(0, n_classes, CLASSES):
        last = min(first + CLASSES, n_classes)
        lines = values.read(first * rank, last * rank)
        if not np.isfinite(lines).all():
            raise _damaged(path)
        yield first, lines.reshape(-1, rank)


def _damaged(path: Path) -> StoreError:
    return StoreError(f"{path} has what it cannot have: remove the unfinished run and begin anew")
