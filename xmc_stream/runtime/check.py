"""Comparing stores with their checksums: before a run, the state of one that goes on, and what is read as it is read."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xmc_stream.runtime.job import Job, Receipt
from xmc_stream.runtime.plan import even_ranges, fitting_ranges
from xmc_stream.store.chunks import ChunkedArray, Comparing, compare_while_reading, open_array, plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import pack_damage
from xmc_stream.store.inventory import APART, refuse_broken_seal, seal_damage, take_inventory
from xmc_stream.store.model import LABEL_COUNTS, StoredModel
from xmc_stream.store.names import SELECTED

CHECKED_BYTES = 2**28  # by a job

ChunkRange = tuple[str, int, int]  # an array by its place in a store, its chunks [first, last)


@dataclass(frozen=True)
class CheckJob:
    """Some chunks of some arrays of a store. Without ranges: its zarr.json files, against its seal."""

    store: str
    ranges: tuple[ChunkRange, ...] = ()

    @property
    def key(self) -> str:
        """The first range, or the store."""
        if not self.ranges:
            return f"check/{Path(self.store).name}"
        array, first, last = self.ranges[0]
        return f"check/{array}/{first}-{last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged, or another one's."""
        n_bytes = 0
        if not self.ranges:
            refuse_broken_seal(Path(self.store))
        for name, first, last in self.ranges:
            array = open_array(Path(self.store) / name)
            for k in range(first, last):
                array.verify_chunk(k)
            n_bytes += (last - first) * array.chunk * array.dtype.itemsize
        return {"checked_bytes": n_bytes}


def check_jobs(dataset: Dataset, observed: bool = False) -> list[CheckJob]:
    """Jobs for all chunks that training reads, of arrays whose chunk files are plain. observed: the mask is read too."""
    apart = APART[: 1 if observed else 2]
    seals = [CheckJob(str(dataset.path)), *([CheckJob(str(dataset.path / "observed"))] if observed else [])]
    return [*seals, *array_jobs(dataset.path, plain_arrays(dataset.path), apart)]


def array_jobs(store: Path, arrays: Iterable[ChunkedArray], apart: Sequence[str] = ()) -> list[CheckJob]:
    """Jobs for all chunks of some arrays of a store, but those in folders that stand apart."""
    parts: list[ChunkRange] = []
    sizes: list[int] = []
    for array in arrays:
        name = str(Path(array.name).relative_to(store))
        if not array.n_chunks or name.startswith(tuple(f"{folder}/" for folder in apart)):
            continue
        n_bytes = array.chunk * array.dtype.itemsize
        for first, last in even_ranges(array.n_chunks, -(-array.n_chunks * n_bytes // CHECKED_BYTES)):
            parts.append((name, first, last))
            sizes.append((last - first) * n_bytes)
    return [CheckJob(str(store), tuple(parts[first:last])) for first, last in fitting_ranges(sizes, CHECKED_BYTES)]


@contextmanager
def checked_reading(*stores: Path, check: bool = True) -> Iterator[None]:
    """What is read of these stores in the block is compared with its checksums, once, as it is read; their seals before.

    It holds for this thread, and for jobs of an engine that runs in it. check: False for neither. Raises StoreError naming a
    file that is damaged.
    """
    if not check:
        yield
        return
    for store in stores:
        refuse_broken_seal(store)
    with compare_while_reading(Comparing(tuple(map(str, stores)), uuid.uuid4().hex)):
        yield


@dataclass(frozen=True)
class CheckedJob:
    """A job, which compares what it reads as the thread does that runs the engine."""

    job: Job
    what: Comparing

    @property
    def key(self) -> str:
        """The job's."""
        return self.job.key

    def run(self) -> Receipt:
        """Run it."""
        with compare_while_reading(self.what):
            return self.job.run()


def common_model_jobs(model: StoredModel) -> list[CheckJob]:
    """Jobs for what a model of any kind has: its seal, what its features and labels are, the counts of its labels."""
    known = ("names", "vectorizer", SELECTED, LABEL_COUNTS)
    arrays = (array for name in known for array in plain_arrays(model.path / name))
    return [CheckJob(str(model.path)), *array_jobs(model.path, arrays)]


@dataclass(frozen=True)
class CheckStateJob:
    """All that one job of an earlier session left: a store, sealed or not, or a pack."""

    folder: str
    sealed: bool

    @property
    def key(self) -> str:
        """Kind and name of the store."""
        return f"check/{'/'.join(Path(self.folder).parts[-2:])}"

    def run(self) -> Receipt:
        """Check; the receipt has the first damage, or nothing."""
        folder = Path(self.folder)
        if folder.is_file():
            return {"folder": self.folder, "damage": pack_damage(folder)}
        inventory = take_inventory(folder)
        damage = [*inventory.damage, *(line for array in inventory.arrays for line in array.check()[1])]
        if self.sealed:
            damage += seal_damage(folder)
        return {"folder": self.folder, "damage": damage[0] if damage else ""}


def check_state_jobs(work: Path, sealed: Callable[[Path], bool]) -> list[CheckStateJob]:
    """Jobs for what lies in the folder of an unfinished model: state, and parts of the model. sealed: whether one is."""
    parts = ("state/*/*", "units/*", "factors", "guide", "implied")
    folders = sorted(folder for part in parts for folder in work.glob(part))
    unfinished = {".partial", ".old"}
    done = [f for f in folders if not unfinished & {Path(part).suffix for part in f.relative_to(work).parts}]
    return [CheckStateJob(str(f), sealed(f)) for f in done]
