"""A trained linear model on disk: sparse weights in units of classes by absolute id, mapped when opened."""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from xmc_stream.errors import InputError, StoreError
from xmc_stream.models.lowrank.factors import Factor
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter, fsync_tree, make_folder, new_store, publish
from xmc_stream.store.inventory import LOGS, change_sealed, log_hashes, seal
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.names import Names, open_names
from xmc_stream.store.nodes import Group, attributes_of, read_json, understood, whole_of

FORMAT = "xmc_stream model"
VERSION = 2
_PLAIN = 1  # the version of a model whose units all have UNIT classes
UNIT = 1024  # classes in a unit, but for the last one of a model and wide ones
FACTORS = "factors"  # where a low-rank model has W (D x r) and H (K x r), in place of units
LABEL_COUNTS = "label_counts"  # where a model has how many training rows each label had
CALIBRATION = "calibration"  # the attribute that says how scores are calibrated, see `solvers.calibration`
_KINDS: dict[str, type] = {
    "solver": str, "params": dict, "seed": int, "data": dict, "identity": dict, "run": dict, "history": list, LOGS: dict,
    CALIBRATION: dict,
}  # fmt: skip
CHUNK_BYTES = 4 * 2**20  # of a model's arrays: smaller than a dataset's, as every thread writes a unit of its own


class Unit(NamedTuple):
    """Classes [first, last) that are solved, kept and written as one; first is a multiple of UNIT.

    A wide one has several times UNIT classes, few of them with positives: see `jobs.units`.
    """

    first: int
    last: int

    @property
    def numbers(self) -> range:
        """Which runs of UNIT classes it has."""
        return range(self.first // UNIT, -(-self.last // UNIT))

    @property
    def name(self) -> str:
        """In keys of jobs and names of folders: "5", of a wide one "5-36"."""
        return "-".join(str(number) for number in sorted({self.numbers[0], self.numbers[-1]}))


def units_from(starts: Sequence[int], n_labels: int) -> list[Unit]:
    """Units that begin at some classes, ascending from 0."""
    return [Unit(*bounds) for bounds in itertools.pairwise([*starts, n_labels])]


def plain_units(n_labels: int) -> list[Unit]:
    """All classes in units of UNIT."""
    return units_from(range(0, n_labels, UNIT), n_labels)


def starts_of(units: Sequence[Unit]) -> dict[str, list[int]]:
    """For the attributes of a model, or a ledger: where the units begin, if any is wide."""
    wide = any(len(unit.numbers) > 1 for unit in units)
    return {"units": [unit.first for unit in units]} if wide else {}


def unit_of(units: Sequence[Unit], label: int) -> Unit:
    """The unit, of units in ascending order, that has a class."""
    return units[bisect_right(units, label, key=lambda unit: unit.first) - 1]


def unit_path(model: Path, unit: Unit) -> Path:
    """Where a unit of a model lies."""
    return model / "units" / "-".join(f"{int(number):05d}" for number in unit.name.split("-"))


@dataclass
class UnitWriter:
    """weights: D x classes (csc), by class; bias (classes,); figures: named float64 arrays (classes,), for reports."""

    weights: MatrixWriter
    bias: NDArray[np.float32]
    figures: dict[str, NDArray[np.float64]]


@contextmanager
def new_unit(path: Path, n_features: int, n_classes: int) -> Iterator[UnitWriter]:
    """A unit of a model under construction, under its name when the block ends well."""
    with new_store(path, {}) as group:
        shape = (n_features, n_classes)
        weights = MatrixWriter(group.create_group("weights"), "csc_matrix", shape, np.float32, CHUNK_BYTES)
        writer = UnitWriter(weights, np.zeros(n_classes, np.float32), {})
        yield writer
        weights.close()
        arrays: dict[str, NDArray[Any]] = {"bias": writer.bias, **writer.figures}
        for name, values in arrays.items():
            array = ArrayWriter(group, name, values.dtype)
            array.append(values)
            array.close()


def model_attributes(
    dataset: Dataset, solver: str, params: Mapping[str, Any], seed: int, result: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """What a model says of itself: how it was made, its sizes, and how well the problem was solved."""
    return {
        "solver": solver,
        "params": dict(params),
        "seed": seed,
        "n_features": dataset.n_features,
        "n_labels": dataset.n_labels,
        "data": {"fingerprint": dataset.fingerprint, **{k: dataset.attributes.get(k) for k in ("source", "normalize")}},
        **result,
    }


def begin_model(path: Path) -> None:
    """Make the folder in which a run builds its model, if it does not exist; nothing opens it as a model."""
    make_folder(path / "units")


def write_label_counts(work: Path, dataset: Dataset) -> None:
    """Put the training rows of each label into a model under construction."""
    array = ArrayWriter(Group(work), LABEL_COUNTS, np.int64, CHUNK_BYTES)
    for start in range(0, dataset.n_labels, CHUNK_BYTES // 8):
        array.append(dataset.label_counts(start, min(start + CHUNK_BYTES // 8, dataset.n_labels)))
    array.close()
    fsync_tree(work / LABEL_COUNTS)


def finish_model(work: Path, path: Path, attributes: Mapping[str, Any]) -> None:
    """Write the attributes that make the folder a model, and give it its name."""
    version = VERSION if "units" in attributes else _PLAIN
    known = {"format": FORMAT, "version": version, **attributes, LOGS: log_hashes(work)}
    zarr.open_group(work, mode="a", attributes=known)
    seal(work)
    publish(work, path, apart=("units",))


def is_model(path: Path) -> bool:
    """Whether a folder says it is a model; read without zarr, so that any other folder is told apart cheaply."""
    try:
        attributes = read_json(path / "zarr.json")["attributes"]
    except (OSError, KeyError, TypeError):
        return False
    return isinstance(attributes, dict) and attributes.get("format") == FORMAT


class StoredModel:
    """An opened model: attributes at once, weights when asked for.

    n_features D, n_labels K. units: of its weights; a low-rank one has none. Raises StoreError where there is no model,
    or one of a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.attributes: dict[str, Any] = attributes_of(self.path)
        except (FileNotFoundError, ValueError, zarr.errors.GroupNotFoundError):
            partial = self.path.with_name(self.path.name + ".partial")
            hint = "its training is not finished: run the train command again" if partial.exists() else "train it first"
            raise StoreError(f"{path} is not a model: {hint}") from None
        if self.attributes.get("format") != FORMAT:
            raise StoreError(f"{path} is a zarr group but not a model of xmc_stream: give the folder that train wrote")
        if (version := whole_of(self.path, self.attributes, "version", 1)) > VERSION:
            raise StoreError(f"{path} was written by a newer xmc_stream (format {version}): update")
        self.n_features, self.n_labels, self.nnz = (
            whole_of(self.path, self.attributes, name) for name in ("n_features", "n_labels", "nnz")
        )
        self._rank = whole_of(self.path, {"rank": 0, **self.attributes}, "rank")
        for name, kind in _KINDS.items():
            if not isinstance(self.attributes.get(name, kind()), kind):
                raise StoreError(
                    f"{self.path / 'zarr.json'}: the attribute {name} is no {kind.__name__}: it is damaged"
                )
        self.units = [] if self.rank else plain_units(self.n_labels)
        if "units" in self.attributes:
            self.units = self._wide_units(self.attributes["units"])

    def _wide_units(self, starts: Any) -> list[Unit]:
        whole = isinstance(starts, list) and all(type(start) is int and start % UNIT == 0 for start in starts)
        if not whole or starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise([*starts, self.n_labels])):
            raise StoreError(
                f"{self.path} does not say which classes its units have: the store is damaged; train again"
            )
        return units_from(starts, self.n_labels)

    @property
    def shape(self) -> tuple[int, int]:
        """(D, K)."""
        return self.n_features, self.n_labels

    def feature_names(self) -> Names | None:
        """What the features are called, where that is known."""
        return open_names(self.path, "features")

    def label_names(self) -> Names | None:
        """What the labels are called, where that is known."""
        return open_names(self.path, "labels")

    def unit_of(self, label: int) -> Unit:
        """The unit that has a class."""
        return unit_of(self.units, label)

    def unit_weights(self, unit: Unit) -> SparseMatrix:
        """Weights of a unit (D x classes, csc)."""
        weights = SparseMatrix(unit_path(self.path, unit) / "weights")
        return weights.expect((self.n_features, unit.last - unit.first), "csc_matrix", np.float32)

    def unit_array(self, unit: Unit, name: str = "bias") -> NDArray[Any]:
        """The bias, or another array with an entry for each class of a unit."""
        dtype = np.float32 if name == "bias" else np.float64
        return read_small(unit_path(self.path, unit), name, unit.last - unit.first, dtype)

    @property
    def tiles(self) -> list[list[tuple[int, int, int, int]]]:
        """Of each unit of a model that has weights by class, runs of classes: first, last, bytes of their tile, weights.

        Together they hold every class. Raises StoreError where they do not.
        """
        if self.rank:
            raise InputError(f"{self.path} is a low-rank model, which has no weights by class to begin from")
        runs: list[list[tuple[int, int, int, int]]] = []
        with understood(self.path / "zarr.json"):
            plain = plain_units(self.n_labels)
            for unit, (of_unit, (low, end)) in enumerate(zip(self.attributes["tiles"], plain, strict=True)):
                runs.append([(first, last, size, weights) for first, last, size, weights in of_unit])
                done = low
                for first, last, size, weights in sorted(runs[-1]):
                    whole = all(type(number) is int for number in (first, last, size, weights))
                    if not (whole and low <= first < last <= end and first <= done and size >= 0 <= weights):
                        raise ValueError(f"tiles of unit {unit}: {(first, last, size, weights)}")
                    done = max(done, last)
                if done != end:
                    raise ValueError(f"tiles of unit {unit} end with class {done}")
        return runs

    def parts(self, first: int, last: int) -> Iterator[tuple[Unit, int, int]]:
        """The units that have classes [first, last), and which of theirs these are, counted from their first."""
        while first < last:
            unit = self.unit_of(first)
            end = min(last, unit.last)
            yield unit, first - unit.first, end - unit.first
            first = end

    @property
    def rank(self) -> int:
        """Columns of W and H of a low-rank model, whose scores are x W H^T; 0 of one that has weights by class."""
        return self._rank

    @property
    def threshold(self) -> float:
        """The score above which a label is predicted: even odds, where scores are calibrated."""
        with understood(self.path / "zarr.json"):
            return 0.0 if self.calibrated else float(self.attributes.get("threshold", 0.0))

    @property
    def bias_row(self) -> bool:
        """Whether a low-rank model's W has a last row for the bias."""
        with understood(self.path / "zarr.json"):
            return bool(self.attributes["params"]["bias"])

    def label_counts(self, first: int, last: int) -> NDArray[np.int64]:
        """Training rows of labels [first, last). Raises StoreError where the model does not have them."""
        path = self.path / LABEL_COUNTS
        if not path.exists():
            raise StoreError(f"{self.path} has no {LABEL_COUNTS}: an older xmc_stream wrote it; train it again")
        array = open_array(path)
        if array.size != self.n_labels or array.dtype != np.int64:
            raise StoreError(f"{path} is not a number for each of {self.n_labels} labels: it is damaged; train again")
        return array.read(first, last)

    def verify_label_counts(self) -> int:
        """Compare them with their checksums, where the model has them; returns their bytes."""
        if not (self.path / LABEL_COUNTS).exists():
            return 0
        array = open_array(self.path / LABEL_COUNTS)
        for k in range(array.n_chunks):
            array.verify_chunk(k)
        return array.size * array.dtype.itemsize

    @property
    def calibrated(self) -> bool:
        """Whether scores are calibrated."""
        about = self.attributes.get(CALIBRATION)
        return isinstance(about, dict) and bool(about.get("applied"))

    def set_calibration(self, about: Mapping[str, Any] | None) -> None:
        """Keep how scores are calibrated with the model, or drop it; in one step, see `inventory.change_sealed`."""
        kept = {name: value for name, value in attributes_of(self.path).items() if name != CALIBRATION}
        change_sealed(self.path, kept if about is None else {**kept, CALIBRATION: dict(about)})
        self.attributes = attributes_of(self.path)

    def factor(self, name: str) -> Factor:
        """W (D x r) or H (K x r) of a low-rank model."""
        n = self.n_features + self.bias_row if name == "W" else self.n_labels
        return Factor(str(self.path / FACTORS / name), self.rank, n)

    def classes(self, first: int, last: int) -> Block:
        """Weights of classes [first, last) of one unit, behind a memory map."""
        unit = self.unit_of(first)
        return self.unit_weights(unit).mapped(first - unit.first, last - unit.first, first)

    def digest(self) -> str:
        """What "the same model" means: a hash of parameters, seed, start, shape, weights in class order, calibration."""
        keys = ("solver", "params", "seed", "n_features", "n_labels", "warm_start")
        made = {key: self.attributes[key] for key in keys if key in self.attributes}
        if self.calibrated:
            about = self.attributes[CALIBRATION]
            made[CALIBRATION] = {key: about.get(key) for key in ("slope", "least", "shift", "fewest", "cap")}
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode())
        if self.calibrated:
            digest.update(self.label_counts(0, self.n_labels).astype("<i8").data)
        if self.rank:
            for factor in (self.factor("W"), self.factor("H")):
                for start in range(0, factor.n, UNIT):
                    digest.update(factor.read(start, min(start + UNIT, factor.n)).data)
            return digest.hexdigest()
        for unit in self.units:
            matrix, bias = self.unit_weights(unit), self.unit_array(unit)
            for low in range(0, matrix.n_lines, UNIT):  # whatever the units are
                high = min(low + UNIT, matrix.n_lines)
                digest.update(np.diff(matrix.ends(low, high)).astype("<i8").data)
                digest.update(bias[low:high].astype("<f4").data)
                for block in matrix.blocks(max(1 << 24, 16 * self.n_features), low, high):  # a class always fits
                    digest.update(block.indices.astype("<i8").data)
                    digest.update(block.values.data)
        return digest.hexdigest()
