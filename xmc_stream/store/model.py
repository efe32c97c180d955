"""A trained model on disk, of whatever kind: attributes, names, label counts, calibration, digest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import NARROW_BOUND, ArrayWriter
from xmc_stream.store.inventory import LOGS, change_sealed, is_of_format, log_hashes, seal
from xmc_stream.store.names import SELECTED, NamedStore
from xmc_stream.store.nodes import Group, attributes_of, whole_of
from xmc_stream.store.places import fsync_tree, make_folder, publish, remove_unfinished
from xmc_stream.store.remote import as_path

FORMAT = "xmc_stream model"
VERSION = 3  # of a model with weights by class whose indices, or weights, take two bytes
_WIDE_UNITS, _PLAIN = 2, 1  # with wide units; with none of these
UNIT = 1024  # classes in a unit, but for the last one of a model and wide ones
KIND = "kind_of_model"  # the attribute that says which; models of earlier versions have none
LABEL_COUNTS = "label_counts"  # where a model has how many training rows each label had
HALVES = "float16_weights"  # the attribute of a model that may have weights of two bytes: how many have
COMPACTED = "compacted"  # the attribute of a model that has the selected features of another one alone: of which
DECISION = "decision"  # the attribute that says which labels of a row are predicted, see `models.decisions`
CALIBRATION = "calibration"  # the attribute that says how scores are calibrated, see `models.calibration`
FRACTION = "fraction"  # in it: the share of the rows that a training held out for it
_KINDS: dict[str, type] = {
    "solver": str, "params": dict, "seed": int, "data": dict, "identity": dict, "run": dict, "history": list, LOGS: dict,
    CALIBRATION: dict, DECISION: dict,
}  # fmt: skip
CHUNK_BYTES = 4 * 2**20  # of a model's arrays: smaller than a dataset's, as every thread writes a unit of its own


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
    version = _WIDE_UNITS if "units" in attributes else _PLAIN
    if "tiles" in attributes and (attributes["n_features"] <= NARROW_BOUND or attributes.get(HALVES)):
        version = VERSION
    known = {"format": FORMAT, "version": version, **attributes, LOGS: log_hashes(work)}
    for folder in (work, work / "units"):
        remove_unfinished(folder)  # what jobs left that were killed
    Group(work, known)
    seal(work)
    publish(work, path, apart=("units",))


def is_model(path: Path) -> bool:
    """Whether a folder says it is a model."""
    return is_of_format(path, FORMAT)


class StoredModel(NamedStore):
    """An opened model, of any kind: what it says of itself. What it scores by belongs to its kind, see `models.kind`.

    n_features D, n_labels K. attributes: where they were read before. Raises StoreError where there is no model, or one of
    a newer version.
    """

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        self.path = as_path(path)
        partial = self.path.with_name(self.path.name + ".partial").exists()
        hint = "its training is not finished: run the train command again" if partial else "train it first"
        other = "not a model of xmc_stream: give the folder that train wrote"
        if attributes is not None:
            self.attributes = attributes
        self._open(path, FORMAT, VERSION, f"is not a model: {hint}", other)
        self.path = self.path.absolute()  # a worker has a folder of its own
        self.n_features, self.n_labels, self.nnz = (
            whole_of(self.path, self.attributes, name) for name in ("n_features", "n_labels", "nnz")
        )
        for name, kind in _KINDS.items():
            if not isinstance(self.attributes.get(name, kind()), kind):
                raise StoreError(
                    f"{self.path / 'zarr.json'}: the attribute {name} is no {kind.__name__}: it is damaged"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """D and K."""
        return self.n_features, self.n_labels

    @property
    def has_label_counts(self) -> bool:
        """Whether it knows the training rows of labels, as all but models of early versions do."""
        return (self.path / LABEL_COUNTS).exists()

    def label_counts(self, first: int, last: int) -> NDArray[np.int64]:
        """Training rows of some labels.

        Parameters
        ----------
        first, last : int
            The labels, from `first` up to, but without, `last`.

        Returns
        -------
        int64 array (last - first,)

        Raises
        ------
        StoreError
            The model does not have them, or they are damaged.
        """
        if not self.has_label_counts:
            raise StoreError(f"{self.path} has no {LABEL_COUNTS}: an older xmc_stream wrote it; train it again")
        return read_small(self.path, LABEL_COUNTS, self.n_labels, np.int64, slice(first, last))

    @property
    def calibrated(self) -> bool:
        """Whether scores are calibrated."""
        about = self.attributes.get(CALIBRATION)
        return isinstance(about, dict) and bool(about.get("applied"))

    def set_calibration(self, about: Mapping[str, Any] | None) -> None:
        """Keep with the model how scores are calibrated, or drop it. It is one step: see `inventory.change_sealed`.

        Parameters
        ----------
        about : mapping or None
            What `calibrate` learned. None: drop the calibration.

        Raises
        ------
        StoreError
            The model is damaged, or cannot be written.
        """
        kept = {name: value for name, value in attributes_of(self.path).items() if name != CALIBRATION}
        change_sealed(self.path, kept if about is None else {**kept, CALIBRATION: dict(about)})
        self.attributes = attributes_of(self.path)

    def made_of(self) -> dict[str, Any]:
        """What a digest begins with: how the model was made.

        Returns
        -------
        dict
            Parameters, seed, warm start, shape and calibration, as far as the model has them.
        """
        keys = ("solver", "params", "seed", "n_features", "n_labels", "warm_start", SELECTED)
        made = {key: self.attributes[key] for key in keys if key in self.attributes}
        if self.calibrated:
            about = self.attributes[CALIBRATION]
            made[CALIBRATION] = {key: about.get(key) for key in ("slope", "least", "shift", "fewest", "cap")}
        return made
