"""The rows of W (D x K) that are not zero, as they lie on disk, their writer and their reader.

A store has two arrays: `features` (n_selected,), int64, ascending, and `weights` (n_selected * K,), float32, the rows of
these features one after another. In a model it is the folder ROWS.

A method writes it in one job, from whatever it keeps W in, some features at a time:

    with new_rows(work / ROWS, n_features, n_labels) as writer:
        for first in range(0, n_features, 1000):
            features = np.arange(first, min(first + 1000, n_features))
            writer.append(features, W[features])            # rows of zeros are left out
    return {"nnz": writer.nnz, "n_selected": writer.n_selected}

Features ascend over all calls. Those without a row of their own need not be named. The folder has its name when the block
ends well, and is durable then. `nnz` and `n_selected` are attributes of the model: the loop of the method returns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, open_array, read_small
from xmc_stream.store.encoding import ArrayWriter, new_store
from xmc_stream.store.model import CHUNK_BYTES, StoredModel
from xmc_stream.store.names import read_selection
from xmc_stream.store.nodes import whole_of

ROWS = "units/rows"  # where a model has them: with what is checked when a training goes on
WINDOW = 1 << 19  # weights that are read at a time where all are
_GATHERED = 1 << 14  # rows: of more, where each begins would take too much memory


class RowsWriter:
    """Takes rows of W in the order of their features. n_selected: rows that are not zero; nnz: weights that are not."""

    def __init__(self, features: ArrayWriter, weights: ArrayWriter, n_features: int, n_labels: int) -> None:
        self._features, self._weights = features, weights
        self._shape = n_features, n_labels
        self._next = 0
        self.n_selected = 0
        self.nnz = 0

    def append(self, features: NDArray[Any], rows: NDArray[Any]) -> None:
        """Add the rows (n x K) of n features, which ascend and come after all earlier ones; those of zeros are left out."""
        n_features, n_labels = self._shape
        ordered = not len(features) or (
            features[0] >= self._next and features[-1] < n_features and bool((np.diff(features) > 0).all())
        )
        if not ordered or rows.shape != (len(features), n_labels):
            raise ValueError(f"rows of shape {rows.shape} from feature {features[:1]} on, after {self._next - 1}")
        counts = np.count_nonzero(rows, axis=1)
        chosen = np.flatnonzero(counts)
        self._features.append(features[chosen])
        kept = rows if len(chosen) == len(rows) else rows[chosen]
        self._weights.append(kept.astype(np.float32, copy=False).reshape(-1))
        self.n_selected += len(chosen)
        self.nnz += int(counts.sum())
        self._next = int(features[-1]) + 1 if len(features) else self._next


@contextmanager
def new_rows(path: Path, n_features: int, n_labels: int) -> Iterator[RowsWriter]:
    """Rows under construction, under their name when the block ends well."""
    with new_store(path, {"shape": [n_features, n_labels]}) as group:
        features = ArrayWriter(group, "features", np.int64, CHUNK_BYTES)
        weights = ArrayWriter(group, "weights", np.float32, CHUNK_BYTES)
        yield RowsWriter(features, weights, n_features, n_labels)
        features.close()
        weights.close()


@dataclass(frozen=True)
class Rows:
    """Rows of W in a store. n: as many as there must be."""

    path: str
    n: int
    n_features: int
    n_labels: int

    def features(self) -> NDArray[np.int64]:
        """The selected features, ascending."""
        features = read_small(Path(self.path), "features", self.n, np.int64)
        if self.n and not (features[0] >= 0 and features[-1] < self.n_features and (np.diff(features) > 0).all()):
            raise StoreError(
                f"{self.path}/features has no {self.n} features in ascending order: it is damaged; train again"
            )
        return features

    def _weights(self) -> ChunkedArray:
        array = open_array(Path(self.path) / "weights")
        if array.size != self.n * self.n_labels or array.dtype != np.float32:
            raise StoreError(
                f"{array.name} has {array.size} values of {array.dtype}, not {self.n} rows of {self.n_labels}: the store is "
                "damaged; make it again"
            )
        return array

    def block(self, first: int, last: int, low: int = 0, high: int | None = None) -> NDArray[np.float32]:
        """Classes [low, high), by default all, of rows [first, last) of those that are stored."""
        high = self.n_labels if high is None else high
        array, width = self._weights(), high - low
        out = np.empty((last - first, width), np.float32)
        for at in range(first, last, _GATHERED):
            to = min(at + _GATHERED, last)
            part = out[at - first : to - first].reshape(-1)
            if width == self.n_labels:
                array.read(at * width, to * width, part)
            else:
                starts = np.arange(at, to, dtype=np.int64) * self.n_labels + low
                array.read_ranges(starts, np.full(to - at, width), part)
            if not np.isfinite(part).all():
                raise StoreError(
                    f"{array.name} has values that are not finite: its training diverged, or it is damaged"
                )
        return out

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All rows that are stored, some at a time: the first one's number, and these rows."""
        height = max(1, WINDOW // max(self.n_labels, 1))
        for first in range(0, self.n, height):
            yield first, self.block(first, min(first + height, self.n))


class RowSparseWeights(StoredModel):
    """A model of few rows of W, whose scores are sum_j x_j w_j over the selected features. n_selected: how many these are."""

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(path, attributes)
        self.n_selected = whole_of(self.path, self.attributes, "n_selected")

    @property
    def rows(self) -> Rows:
        """The rows of W that are stored."""
        return Rows(str(self.path / ROWS), self.n_selected, self.n_features, self.n_labels)

    def selected_features(self) -> NDArray[np.int64]:
        """Ascending ids in the data as they were converted, also where the model has selected features alone."""
        features = self.rows.features()
        selection = read_selection(self.path, self.attributes, self.n_features)
        return features if selection is None else selection[features]
