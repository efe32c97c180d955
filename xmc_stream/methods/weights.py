"""What comes with the data and not with the parameters: weights of samples and of labels, a tree of the labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError
from xmc_stream.linear.kernels.dcd import ONCE
from xmc_stream.methods.parameters import GIVEN
from xmc_stream.store.chunks import open_array
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedArrayWriter, new_pack
from xmc_stream.system.files import regular

SAMPLES, LABELS = "samples", "labels"
_STEP = 1 << 16  # weights that are looked at at a time


@dataclass(frozen=True)
class Given:
    """Weights of the samples (N,) and of the labels' positives (K,), or None; arrays, which may be maps of files.

    A sample's weight is 0 or more and not 0 for all; a label's is above 0. tree: arrays by name, as the method that takes a
    tree has them.
    """

    samples: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    tree: Mapping[str, NDArray[np.int64]] | None = None

    def __post_init__(self) -> None:
        for name, values in self._arrays:
            if values.ndim != 1 or values.dtype.kind not in "biuf":
                raise InputError(
                    f"weights of {name} are an array of shape {values.shape} and type {values.dtype}: give a vector of "
                    "numbers"
                )
            least = min((float(part.min()) for part in _parts(values)), default=1.0)
            if not all(np.isfinite(part).all() for part in _parts(values)):
                raise InputError(f"weights of {name} have NaN or infinity: give finite numbers")
            if least < 0.0 or (name == LABELS and least == 0.0):
                raise InputError(
                    f"weights of {name} must be {'0 or more' if name == SAMPLES else 'above 0'}: one is {least:g}"
                )
        if self.samples is not None and not self.mean > 0.0:
            raise InputError("weights of samples are all zero: there is nothing to learn from")

    @property
    def _arrays(self) -> list[tuple[str, NDArray[Any]]]:
        return [
            (name, values) for name, values in ((SAMPLES, self.samples), (LABELS, self.labels)) if values is not None
        ]

    @cached_property
    def mean(self) -> float:
        """Of the samples' weights, 0 where they have none."""
        if self.samples is None or not len(self.samples):
            return 0.0
        return sum(float(part.sum()) for part in _parts(self.samples)) / len(self.samples)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Digests, by what they are of: what must be the same for a run to go on."""
        digests = {}
        for name, values in self._arrays:
            digest = hashlib.sha256()
            for part in _parts(values):
                digest.update(part.data)
            digests[name] = digest.hexdigest()
        if self.tree is None:
            return {"weights": digests}
        of_tree = hashlib.sha256()
        for name, values in sorted(self.tree.items()):
            of_tree.update(f"{name} {len(values)}".encode())
            of_tree.update(np.ascontiguousarray(values, "<i8").data)
        return {"weights": digests or None, "tree": of_tree.hexdigest()}

    @property
    def of_labels(self) -> Given | None:
        """What holds of a part of the samples too."""
        return None if self.labels is None and self.tree is None else Given(None, self.labels, self.tree)

    @property
    def weighs(self) -> bool:
        """Whether there are weights."""
        return bool(self._arrays)

    def check(self, dataset: Dataset) -> None:
        """Raise InputError where there are not as many as the dataset has samples and labels."""
        sizes = {SAMPLES: dataset.n_samples, LABELS: dataset.n_labels}
        for name, values in self._arrays:
            if len(values) != sizes[name]:
                raise InputError(
                    f"there are {len(values)} weights of {name}, and {dataset.path} has {sizes[name]} {name}: give one for each"
                )

    def write(self, path: Path) -> None:
        """Keep it with a run: a pack with float64 arrays `samples` and `labels`, and those of the tree.

        What had the name is replaced.
        """
        with new_pack(path) as pack:
            for name, values in self._arrays:
                writer = PackedArrayWriter(pack, name, np.float64)
                for part in _parts(values):
                    writer.append(part)
                writer.close()
            for name, values in (self.tree or {}).items():
                pack.write(name, values)


def check_given(given: Given | None, dataset: Dataset, class_weight: str | None) -> None:
    """Raise InputError where the parameter `class_weight` and what was given do not go together, or not with the dataset."""
    if given is not None:
        given.check(dataset)
    labels = given is not None and given.labels is not None
    if class_weight == GIVEN and not labels:
        raise InputError(
            "class_weight is 'given', and no weights of labels are: give them (" + flags.CLASS_WEIGHT + " FILE.npy)"
        )
    if labels and class_weight != GIVEN:
        raise InputError(f"weights of labels are given, and class_weight is {class_weight!r}: leave out one")


def refuse_tree(given: Given | None, name: str) -> None:
    """Raise InputError where a tree is given, for a method that takes none. name: its own."""
    if given is not None and given.tree is not None:
        raise InputError(f"{name} takes no tree of labels: leave it out, or use tree")


class RowWeights:
    """Reads the weights of samples, as a run keeps them; for one thread at a time.

    path: of the pack, None where samples have no weights.
    """

    def __init__(self, path: Path | None) -> None:
        self._array = None if path is None else open_array(path / SAMPLES)

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of some rows (ascending, unique): `Times.rows`."""
        if self._array is None:
            return ONCE.rows
        out = np.empty(len(rows))
        self._array.read_ranges(rows.astype(np.int64, copy=False), np.ones(len(rows), np.int64), out)
        return out

    def of_range(self, start: int, stop: int) -> NDArray[np.float64]:
        """Of the rows in [start, stop), likewise."""
        return ONCE.rows if self._array is None else self._array.read(start, stop)


def read_weights(path: str | Path) -> NDArray[Any]:
    """The vector of numbers in a .npy file, as a map. Raises InputError for any other file."""
    try:
        os.close(regular(path))
        values: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else "it is no .npy file of numbers"
        raise InputError(f"{path}: weights cannot be read ({said}): write them by numpy.save") from None
    if not isinstance(values, np.ndarray):
        raise InputError(f"{path} has several arrays: give weights as a .npy file, which has one")
    return values


def _parts(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """A few at a time. What a map has shown stays in memory, so a file is read past its map."""
    for low in range(0, len(values), _STEP):
        part = values[low : low + _STEP]
        if isinstance(values, np.memmap) and values.filename is not None:
            at = values.offset + low * values.itemsize
            part = np.fromfile(values.filename, values.dtype, count=len(part), offset=at)
        yield np.ascontiguousarray(part, np.float64)
