"""What a segment leaves on disk: the rows of W that are not zero, which features are active, and how far the stage is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import StoreError, spoilt_state
from xmc_stream.grouplasso.arrays import Matrix
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.encoding import PackedArrayWriter, new_pack

ROW_BYTES = 1 << 20  # of W written or read at a time
ACTIVE, LISTED = np.uint8(1), np.uint8(2)  # bits of a feature's flags: see `Progress`


@dataclass
class Progress:
    """How far a stage of block coordinate descent is.

    sweep: its number in the stage; full: whether it is over all features; else inner: which one since the last full one,
    and inner_first: the violation of the first of these. at: features of its order that were visited; sum, largest: the
    violation so far. first: what it is measured by, that of the stage's first sweep or of the first stage's, the larger
    (-1: not known). entries: visited in the stage.
    """

    sweep: int = 0
    full: bool = True
    inner: int = 0
    inner_first: float = 0.0
    at: int = 0
    sum: float = 0.0
    largest: float = 0.0
    first: float = -1.0
    entries: int = 0
    done: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


def state_path(work: Path, stage: int, number: int) -> Path:
    """What a segment of a stage leaves."""
    return work / "state" / f"stage-{stage}" / f"{number:06d}"


Part = tuple[Matrix, NDArray[np.int64]]  # a D x K matrix, and its rows that are not zero
Swept = tuple[NDArray[np.int64], NDArray[np.float32]]  # of `Extrapolation.stored`


def write_state(
    path: Path, parts: Mapping[str, Part], n_labels: int, flags: NDArray[np.uint8], progress: Mapping[str, Any],
    swept: Swept | None = None,
) -> None:  # fmt: skip
    """Leave W, and what goes with it, durably. parts: by name; that of W is "w". swept: of sweeps that are extrapolated."""
    with new_pack(path) as pack:
        for name, (matrix, features) in parts.items():
            step = max(1, ROW_BYTES // (4 * matrix.width))
            pack.write(f"{name}/features", features)
            rows = PackedArrayWriter(pack, f"{name}/rows", np.float32)
            for low in range(0, len(features), step):
                rows.append(matrix.take(features[low : low + step])[:, :n_labels].reshape(-1))
            rows.close()
        if swept is not None:
            pack.write("swept/features", swept[0])
            pack.write("swept/rows", swept[1].reshape(-1))
        pack.write("flags", flags)
        pack.write("progress", np.frombuffer(json.dumps(dict(progress)).encode(), np.uint8))


class State:
    """What a segment left: one of its matrices. Raises StoreError where it is not of so many features and labels."""

    def __init__(self, path: Path, n_features: int, n_labels: int, part: str = "w") -> None:
        self._path, self._n_labels = path, n_labels
        n = open_array(path / part / "features").size
        self.features = read_small(path / part, "features", n, np.int64)
        self._rows = open_array(path / part / "rows")
        bounded = not n or (self.features[0] >= 0 and self.features[-1] < n_features)
        sound = bounded and bool((np.diff(self.features) > 0).all())
        if not sound or self._rows.size != n * n_labels or self._rows.dtype != np.float32:
            raise spoilt_state(path)
        self.flags = read_small(path, "flags", n_features, np.uint8)

    def progress(self) -> dict[str, Any]:
        """As it was given."""
        text = open_array(self._path / "progress")
        said: dict[str, Any] = json.loads(text.read(0, text.size).tobytes())
        return said

    def swept(self, width: int) -> Swept:
        """As it was given."""
        features, rows = (open_array(self._path / "swept" / name) for name in ("features", "rows"))
        return features.read(0, features.size), rows.read(0, rows.size).reshape(-1, width)

    def rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Features, and their rows (n x K), some at a time."""
        step = max(1, ROW_BYTES // (4 * self._n_labels))
        for low in range(0, len(self.features), step):
            features = self.features[low : low + step]
            values = self._rows.read(low * self._n_labels, (low + len(features)) * self._n_labels)
            if not np.isfinite(values).all():
                raise StoreError(
                    f"{self._path} has weights that are not finite: train anew with "
                    + flags.OVERWRITE
                    + ", from X whose values are "
                    "not so large"
                )
            yield features, values.reshape(-1, self._n_labels)

    def fill(self, weights: Matrix) -> None:
        """Put the rows into a matrix of zeros."""
        for features, rows in self.rows():
            wide = np.zeros((len(features), weights.width), np.float32)
            wide[:, : self._n_labels] = rows
            weights.put(features, wide)
