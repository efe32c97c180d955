"""Comparing stores with their checksums: a dataset and a model once a session, the state of a run that goes on.

And which jobs are to be done again where that state is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import even_ranges
from xmc_stream.store.chunks import ChunkedArray, open_array, plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import refuse_broken_seal, seal_damage, take_inventory
from xmc_stream.store.model import StoredModel
from xmc_stream.store.packs import pack_damage

_JOB_BYTES = 2**28
_APART = ("X/columns", "observed")  # made later than a dataset, and sealed apart

Piece = tuple[str, int, int]  # an array by its place in a store, its chunks [first, last)


@dataclass(frozen=True)
class SealJob:
    """The zarr.json files of a store, which have the checksums of all chunks, against its seal; one without a seal passes."""

    store: str

    @property
    def key(self) -> str:
        """The store."""
        return f"check/{Path(self.store).name}"

    def run(self) -> Receipt:
        """Check; raises StoreError where one was changed."""
        refuse_broken_seal(Path(self.store))
        return {"checked_bytes": 0}


@dataclass(frozen=True)
class CheckJob:
    """Some chunks of some arrays of a store."""

    store: str
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> str:
        """The first piece."""
        array, first, last = self.pieces[0]
        return f"check/{array}/{first}-{last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged, or another one's."""
        n_bytes = 0
        for name, first, last in self.pieces:
            array = open_array(Path(self.store) / name)
            for k in range(first, last):
                array.verify_chunk(k)
            n_bytes += (last - first) * array.chunk * array.dtype.itemsize
        return {"checked_bytes": n_bytes}


def check_jobs(dataset: Dataset, observed: bool = False) -> list[SealJob | CheckJob]:
    """Jobs for all chunks that training reads, of arrays whose chunk files are plain. observed: the mask is read too."""
    apart = _APART[: 1 if observed else 2]
    seals = [SealJob(str(dataset.path)), *([SealJob(str(dataset.path / "observed"))] if observed else [])]
    return [*seals, *_jobs_of(dataset.path, plain_arrays(dataset.path), apart)]


def _jobs_of(store: Path, arrays: Iterable[ChunkedArray], apart: Sequence[str] = ()) -> list[CheckJob]:
    """Jobs for all chunks of some arrays of a store, but those in folders that stand apart."""
    jobs: list[CheckJob] = []
    pieces: list[Piece] = []
    left = _JOB_BYTES
    for array in arrays:
        name = str(Path(array.name).relative_to(store))
        if name.startswith(tuple(f"{folder}/" for folder in apart)):
            continue
        n_bytes = array.chunk * array.dtype.itemsize
        for part in even_ranges(array.n_chunks, max(1, -(-array.n_chunks * n_bytes // _JOB_BYTES))):
            size = (part[1] - part[0]) * n_bytes
            if pieces and size > left:
                jobs.append(CheckJob(str(store), tuple(pieces)))
                pieces, left = [], _JOB_BYTES
            if size:
                pieces.append((name, *part))
                left -= size
    return jobs + ([CheckJob(str(store), tuple(pieces))] if pieces else [])


@dataclass(frozen=True)
class CheckModelJob:
    """Weights of units [first, last) of a model, and with the first what it has beside units; bias and figures are

    compared whenever they are read.
    """

    model: str
    first: int
    last: int

    @property
    def key(self) -> str:
        """The units."""
        return f"check/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged, or another one's."""
        model = StoredModel(self.model)
        n_bytes = 0 if self.first else model.verify_label_counts()
        if model.rank:
            return {"checked_bytes": n_bytes + sum(model.factor(name).verify() for name in ("W", "H"))}
        for unit in model.units[self.first : self.last]:
            for array in model.unit_weights(unit).arrays():
                if array.path is not None:
                    for k in range(array.n_chunks):
                        array.verify_chunk(k)
                    n_bytes += array.n_chunks * array.chunk * array.dtype.itemsize
        return {"checked_bytes": n_bytes}


def check_model_jobs(model: StoredModel) -> list[SealJob | CheckJob | CheckModelJob]:
    """Jobs for all weights of a model, its names and its vectorizer."""
    n = 1 if model.rank else len(model.units)
    parts = even_ranges(n, min(n, max(1, 12 * model.nnz // _JOB_BYTES)))
    words = (array for name in ("names", "vectorizer") for array in plain_arrays(model.path / name))
    weights = [CheckModelJob(str(model.path), a, b) for a, b in parts]
    return [SealJob(str(model.path)), *_jobs_of(model.path, words), *weights]


@dataclass(frozen=True)
class CheckStateJob:
    """All that one job of an earlier session left: a store, or a pack."""

    folder: str

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
        if pass_of(folder.parent.name) is not None:
            damage += seal_damage(folder)
        return {"folder": self.folder, "damage": damage[0] if damage else ""}


def check_state_jobs(work: Path) -> list[CheckStateJob]:
    """Jobs for what lies in the folder of an unfinished model: states, what searches found, units of the model."""
    folders = sorted([*work.glob("state/*/*"), *work.glob("units/*")])
    unfinished = {".partial", ".old"}
    return [CheckStateJob(str(f)) for f in folders if not unfinished & {f.suffix, f.parent.suffix}]


def pass_of(kind: str) -> tuple[int, int] | None:
    """Stage and pass of PD-Sparse that a folder of state has its name from, if so."""
    found = re.fullmatch(r"(?:dual|tables)-(\d+)-(\d+)", kind)
    return None if found is None else (int(found[1]), int(found[2]))


def legs_again(
    work: Path, damaged: Iterable[tuple[int, int]], keys: Iterable[str]
) -> tuple[tuple[int, int], list[str], list[Path]]:
    """Where some passes are damaged: stage and pass that PD-Sparse goes back to the beginning of, legs to undo, folders
    to remove.

    That is behind the last pass before all damage, of its stage, whose files are all there (some are gone: what none goes
    on from is not kept), or else the stage's beginning: it begins from nothing, or from a pass of an earlier one.
    keys: of all jobs that are done.
    """
    legs: dict[tuple[int, int], list[int]] = {}
    for key in keys:
        kind, *place = key.split("/")
        if kind == "pass":
            stage, number, first = map(int, place)
            legs.setdefault((stage, number), []).append(first)
    stage, number = min(damaged)
    while number and not _pass_is_there(work, stage, number - 1, legs.get((stage, number - 1), [])):
        number -= 1
    to = stage, number
    undone = [f"pass/{s}/{n}/{first}" for (s, n), firsts in legs.items() if (s, n) >= to for first in firsts]
    folders = [f for f in work.glob("state/*") if (of := pass_of(f.name)) is not None and of >= to]
    return to, undone, folders


def _pass_is_there(work: Path, stage: int, number: int, legs: Sequence[int]) -> bool:
    place = f"{stage}-{number}"
    needed = [work / "state" / f"dual-{place}" / f"{first:06d}" for first in legs]
    needed += [work / "state" / f"tables-{place}" / f"{first:06d}" for first in sorted(legs)[-1:]]
    return bool(legs) and all(folder.exists() for folder in needed)


def key_of_state(work: Path, folder: Path, warm_start: bool) -> str | None:
    """The job that made such a folder, if what it was made from is there to make it again."""
    kind, name = folder.parts[-2:]
    if kind == "units":
        return "finalise/" + "-".join(str(int(number)) for number in name.split("-"))
    if kind == "weights":
        return "weights"
    what, _, round_ = kind.partition("-")
    if what == "w":  # of LEML
        return f"w/{round_}" if name == "all" else f"w/{round_}/{name}"
    if what == "factors":
        return "start" if round_ == "0" else None
    if what == "search":
        plain = name.removeprefix("rough.")
        return f"search/{round_}/{'rough/' if plain != name else ''}{plain.replace('.', '/')}"
    if round_ == "-1":
        return f"start/{name}"
    before = work / "state" / f"solve-{int(round_) - 1}" / name
    return f"solve/{round_}/{name}" if before.exists() or (round_ == "0" and not warm_start) else None
