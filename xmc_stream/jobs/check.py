"""Comparing stores with their checksums: a dataset and a model once a session, the state of a run that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmc_stream.jobs.job import Receipt
from xmc_stream.jobs.plan import even_ranges
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import take_inventory
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.model import StoredModel, n_units

_CHUNKS_PER_JOB = 32
_MODEL_JOB_BYTES = 2**27


@dataclass(frozen=True)
class CheckJob:
    """Chunks [first, last) of one array of a matrix."""

    matrix: str
    array: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Matrix, array and chunks; the matrix by its place in the dataset."""
        return f"check/{'/'.join(Path(self.matrix).parts[-2:])}/{self.array}/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged."""
        array = SparseMatrix(self.matrix).arrays()[self.array]
        for k in range(self.first, self.last):
            array.verify_chunk(k)
        return {"checked_bytes": (self.last - self.first) * array.chunk * array.dtype.itemsize}


def check_jobs(dataset: Dataset) -> list[CheckJob]:
    """Jobs for all chunks that training reads, of stores whose chunk files are plain."""
    jobs = []
    for matrix in (dataset.X_rows(), dataset.Y_rows(), dataset.Y_columns()):
        for number, array in enumerate(matrix.arrays()):
            if array.path is not None and array.n_chunks:
                parts = -(-array.n_chunks // _CHUNKS_PER_JOB)
                jobs += [CheckJob(str(matrix.path), number, a, b) for a, b in even_ranges(array.n_chunks, parts)]
    return jobs


@dataclass(frozen=True)
class CheckModelJob:
    """Weights of units [first, last) of a model; bias and figures are compared whenever they are read."""

    model: str
    first: int
    last: int

    @property
    def key(self) -> str:
        """The units."""
        return f"check/{self.first}-{self.last}"

    def run(self) -> Receipt:
        """Check; raises StoreError naming a chunk that is damaged."""
        model, n_bytes = StoredModel(self.model), 0
        if model.rank:
            return {"checked_bytes": sum(model.factor(name).verify() for name in ("W", "H"))}
        for unit in range(self.first, self.last):
            for array in model.unit_weights(unit).arrays():
                if array.path is not None:
                    for k in range(array.n_chunks):
                        array.verify_chunk(k)
                    n_bytes += array.n_chunks * array.chunk * array.dtype.itemsize
        return {"checked_bytes": n_bytes}


def check_model_jobs(model: StoredModel) -> list[CheckModelJob]:
    """Jobs for all weights of a model."""
    n = 1 if model.rank else n_units(model.n_labels)
    parts = min(n, max(1, 12 * int(model.attributes["nnz"]) // _MODEL_JOB_BYTES))
    return [CheckModelJob(str(model.path), a, b) for a, b in even_ranges(n, parts)]


@dataclass(frozen=True)
class CheckStateJob:
    """All files of one store that a job of an earlier session left."""

    folder: str

    @property
    def key(self) -> str:
        """Kind and name of the store."""
        return f"check/{'/'.join(Path(self.folder).parts[-2:])}"

    def run(self) -> Receipt:
        """Check; the receipt has the first damage, or nothing."""
        inventory = take_inventory(Path(self.folder))
        damage = [*inventory.damage, *(line for array in inventory.arrays for line in array.check()[1])]
        return {"folder": self.folder, "damage": damage[0] if damage else ""}


def check_state_jobs(work: Path) -> list[CheckStateJob]:
    """Jobs for what lies in the folder of an unfinished model: states, what searches found, units of the model."""
    folders = sorted([*work.glob("state/*/*"), *work.glob("units/*")])
    return [CheckStateJob(str(folder)) for folder in folders if folder.suffix not in (".partial", ".old")]


def key_of_state(work: Path, folder: Path, warm_start: bool) -> str | None:
    """The job that made such a folder, if what it was made from is there to make it again."""
    kind, name = folder.parts[-2:]
    if kind == "units":
        return f"finalise/{int(name)}"
    if kind == "weights":
        return "weights"
    what, _, round_ = kind.partition("-")
    if what == "w":  # of LEML
        return f"w/{round_}" if name == "all" else f"w/{round_}/{name}"
    if what == "factors":
        return "start" if round_ == "0" else None
    if what in ("dual", "tables"):
        return None  # of a pass of PD-Sparse: what it was made from went on since
    if what == "search":
        plain = name.removeprefix("rough.")
        return f"search/{round_}/{'rough/' if plain != name else ''}{plain.replace('.', '/')}"
    if round_ == "-1":
        return f"start/{name}"
    before = work / "state" / f"solve-{int(round_) - 1}" / name
    return f"solve/{round_}/{name}" if before.exists() or (round_ == "0" and not warm_start) else None
