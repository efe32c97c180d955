"""The jobs that make a dataset of several: labels are matched, arrays are put one behind the other, names too.

The first dataset of a job's `sets` is the one that grows. Its full chunk files are shared by hard links.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.dataset import Dataset, write_observed
from xmc_stream.store.encoding import ArrayWriter, index_dtype, new_pack
from xmc_stream.store.matrix import Block
from xmc_stream.store.names import WINDOW, NamedIds, Names, new_names
from xmc_stream.store.new_dataset import new_array, work_of
from xmc_stream.store.places import new_folder

BLOCK = 2**22  # bytes of labels that are renumbered at a time
BLOCK_BYTES = 12 * BLOCK  # which with their rows, their order and what sorts them take so many
_ENDS = 2**17  # lines whose ends are read at a time
_MAPS = "maps"


@dataclass(frozen=True)
class _Job:
    """What is made of `sets`, paths, under a name in the folder `store`."""

    store: str
    sets: tuple[str, ...]
    name: str

    @property
    def key(self) -> str:
        """What it makes."""
        return f"join/{self.name}"


def _written(writer: ArrayWriter) -> Receipt:
    """The receipt of an array that is whole."""
    return {"sha256": writer.close(), "linked": writer.linked, "copied": writer.copied}


@dataclass(frozen=True)
class MatchJob(_Job):
    """The labels of each set by their names: those that no set before had get the next numbers.

    In its folder, for each set but the first: the array maps/NUMBER, which label of the grown set each of its labels is, and
    the store names-NUMBER, the names that it adds.
    """

    def run(self) -> Receipt:
        """Match; the receipt has n_labels and how many each set added. Raises InputError for a name that stands twice."""
        known: list[tuple[NamedIds, int]] = []  # names, and the number of the first of them
        n_labels, added = 0, []
        with new_folder(Path(self.store) / self.name) as out, new_pack(out / _MAPS) as pack:
            for number, path in enumerate(self.sets):
                dataset = Dataset(path)
                names = dataset.label_names()
                before = n_labels
                for array in names.arrays() if names is not None else ():
                    array.verify()
                if names is None:  # it has no positives
                    ids = np.zeros(dataset.n_labels, np.int64)
                elif not number:
                    ids, n_labels = np.arange(len(names)), len(names)
                    known.append((_unique(names, dataset), 0))
                else:
                    _unique(names, dataset)
                    own = out / f"names-{number}"
                    ids, n_labels = _matched(names, own, known, n_labels)
                    known.append((NamedIds(Names(own)), before))
                if number:
                    pack.write(str(number), ids)
                    added.append(n_labels - before)
        return {"n_labels": n_labels, "added": added}


def _unique(names: Names, dataset: Dataset) -> NamedIds:
    """Names of labels that are all different."""
    ids = NamedIds(names)
    if (twice := ids.repeated()) is not None:
        first, second = twice
        raise InputError(
            f"labels {first} and {second} of {dataset.path} have one name, {names.read(first, first + 1)[0]!r:.50}: labels are "
            "matched by their names: convert it again with names that differ"
        )
    return ids


def _matched(
    names: Names, own: Path, known: list[tuple[NamedIds, int]], n_labels: int
) -> tuple[NDArray[np.int64], int]:
    """Numbers of the labels that have these names, and how many labels there are then; what is new is written to `own`."""
    ids = np.empty(len(names), np.int64)
    with new_names(own) as writer:
        for start in range(0, len(names), WINDOW):
            window = names.read(start, min(start + WINDOW, len(names)))
            found = ids[start : start + len(window)]
            found[:] = -1
            for of_set, first in known:
                there = of_set.find(window)
                found[there >= 0] = there[there >= 0] + first
            fresh = np.flatnonzero(found < 0)
            found[fresh] = n_labels + np.arange(len(fresh))
            n_labels += len(fresh)
            writer.append([window[i].encode() for i in fresh])
    return ids, n_labels


def _renumbered(blocks: Iterator[Block], ids: NDArray[np.int64] | None) -> Iterator[Block]:
    """Rows with other numbers for their labels, in ascending order in each."""
    for block in blocks:
        if ids is None:
            yield block
            continue
        found = ids[block.indices]
        rows = np.repeat(np.arange(block.n), np.diff(block.indptr))
        if len(found) and ((found[1:] < found[:-1]) & (rows[1:] == rows[:-1])).any():
            found = found[np.lexsort((found, rows))]
        yield Block(block.start, block.indptr, found, None)


@dataclass(frozen=True)
class ArrayJob(_Job):
    """An array of each set, one behind the other, as they are; ends of rows go on where those of the set before end."""

    dtype: str

    def run(self) -> Receipt:
        """Join."""
        ends, nnz, bytes_read = self.name.endswith("indptr"), 0, 0
        with new_array(Path(self.store), self.name, self.dtype, durable=True) as writer:
            for number, path in enumerate(self.sets):
                array = open_array(Path(path) / self.name)
                if ends and number:
                    array.verify()
                    for start in range(1, array.size, _ENDS):
                        writer.append(array.read(start, min(start + _ENDS, array.size)) + nnz)
                else:
                    writer.extend(array)
                nnz += int(array.read(array.size - 1, array.size)[0]) if ends else 0
                bytes_read += array.bytes_read
            return {**_written(writer), "bytes_read": bytes_read}


@dataclass(frozen=True)
class _OfLabels(_Job):
    """match: the folder that a `MatchJob` made, "" where labels keep their numbers."""

    match: str
    n_labels: int

    def datasets(self) -> Iterator[tuple[Dataset, NDArray[np.int64] | None]]:
        """Each set, and which label of the grown set each of its labels is, None where its number stays."""
        for number, path in enumerate(self.sets):
            dataset = Dataset(path)
            if not self.match or not number:
                yield dataset, None
            else:
                yield dataset, read_small(Path(self.match) / _MAPS, str(number), dataset.n_labels, np.int64)


@dataclass(frozen=True)
class LabelsJob(_OfLabels):
    """The labels of all rows."""

    def run(self) -> Receipt:
        """Join."""
        with new_array(Path(self.store), self.name, index_dtype(self.n_labels), durable=True) as writer:
            for dataset, ids in self.datasets():
                rows = dataset.Y_rows()
                if ids is None:
                    writer.extend(rows.indices)
                else:
                    rows.indices.verify()
                    for block in _renumbered(rows.blocks(BLOCK), ids):
                        writer.append(block.indices)
            return _written(writer)


@dataclass(frozen=True)
class CountsJob(_OfLabels):
    """How often each feature, and each label, occurs in all sets."""

    def run(self) -> Receipt:
        """Add up."""
        labels = np.zeros(self.n_labels, np.int64)
        features = np.zeros(Dataset(self.sets[0]).n_features, np.int64)
        with ExitStack() as stack:  # both from the beginning, see `Weigh`
            writers = [
                stack.enter_context(new_array(Path(self.store), f"{self.name}/{name}", np.int64, durable=True))
                for name in ("feature_counts", "label_counts")
            ]
            for dataset, ids in self.datasets():
                labels[slice(dataset.n_labels) if ids is None else ids] += dataset.label_counts()
                features += dataset.feature_counts()
            for writer, counts in zip(writers, (features, labels), strict=True):
                writer.append(counts)
                writer.close()
        return {}


@dataclass(frozen=True)
class NamesJob(_Job):
    """Names, one behind the other. sets: their paths."""

    def run(self) -> Receipt:
        """Join."""
        store = Path(self.store)
        with new_names(store / self.name, work_of(store, self.name)) as writer:
            for path in self.sets:
                writer.extend(Names(Path(path)))
        return {name: sum(getattr(array, name) for array in writer.arrays) for name in ("linked", "copied")}


@dataclass(frozen=True)
class ObservedJob(_OfLabels):
    """The masks of known pairs, one below the other, beside the labels of a dataset that is finished but for its name.

    max_bytes: of the buffers that make columns.
    """

    max_bytes: int

    def run(self) -> Receipt:
        """Write."""

        def blocks() -> Iterator[Block]:
            for dataset, ids in self.datasets():
                rows = dataset.observed_rows()
                for array in rows.arrays():
                    array.verify()
                yield from _renumbered(rows.blocks(BLOCK), ids)

        dtype, store = index_dtype(self.n_labels), Path(self.store)
        of_one_type = (Block(b.start, b.indptr, b.indices.astype(dtype, copy=False), None) for b in blocks())
        write_observed(Dataset(store), of_one_type, self.max_bytes, work_of(store, self.name))
        return {}
