"""The rows of W (D x K) that are not zero, as they lie on disk, what writes them, and a model that reads them.

A store has two arrays: `features` (n_selected,), int64, ascending, and `weights` (n_selected * K,), float32, the rows of
these features one after another. In a model it is the folder ROWS.

A method writes it in one job, from whatever it keeps W in, some features at a time:

    every = (np.arange(first, min(first + 1000, n_features)) for first in range(0, n_features, 1000))
    return write_rows(work / ROWS, n_features, n_labels, ((features, W[features]) for features in every))

What it returns, `nnz` and `n_selected`, are attributes of the model: the loop of the method returns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.runtime.job import Receipt
from xmc_stream.store.chunks import ChunkedArray, open_array, read_small
from xmc_stream.store.encoding import ArrayWriter, new_store
from xmc_stream.store.model import CHUNK_BYTES, StoredModel
from xmc_stream.store.names import read_selection
from xmc_stream.store.nodes import whole_of

ROWS = "units/rows"  # where a model has them: with what is checked when a training goes on
WINDOW = 1 << 19  # weights that are read at a time where all are
_GATHERED = 1 << 14  # rows: of more, where each begins would take too much memory


def write_rows(
    path: Path, n_features: int, n_labels: int, blocks: Iterable[tuple[NDArray[Any], NDArray[Any]]]
) -> Receipt:
    """Store rows of W: blocks of n >= 1 features and their rows (n x K). Rows of zeros are left out.

    Features ascend over all blocks. Durable, and under its name, when all is written. Returns n_selected, the rows that are
    stored, and nnz, weights that are not 0.
    """
    before, n_selected, nnz = -1, 0, 0
    with new_store(path, {"shape": [n_features, n_labels]}) as group:
        stored = ArrayWriter(group, "features", np.int64, CHUNK_BYTES)
        weights = ArrayWriter(group, "weights", np.float32, CHUNK_BYTES)
        for features, rows in blocks:
            ascending = (np.diff(features, prepend=before) > 0).all() and features[-1] < n_features
            if not ascending or rows.shape != (len(features), n_labels):
                raise ValueError(f"rows of shape {rows.shape} from feature {features[:1]} on, after {before}")
            counts = np.count_nonzero(rows, axis=1)
            chosen = np.flatnonzero(counts)
            stored.append(features[chosen])
            kept = rows if len(chosen) == len(rows) else rows[chosen]
            weights.append(kept.astype(np.float32, copy=False).reshape(-1))
            before, n_selected, nnz = int(features[-1]), n_selected + len(chosen), nnz + int(counts.sum())
        stored.close()
        weights.close()
    return {"nnz": nnz, "n_selected": n_selected}


class RowSparseWeights(StoredModel):
    """A model of few rows of W, whose scores are sum_j x_j w_j over the selected features. n_selected: how many these are."""

    def __init__(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(path, attributes)
        self.n_selected = whole_of(self.path, self.attributes, "n_selected")

    def row_features(self) -> NDArray[np.int64]:
        """The features that the rows are of, ascending."""
        path, n = self.path / ROWS, self.n_selected
        features = read_small(path, "features", n, np.int64)
        if n and not (features[0] >= 0 and features[-1] < self.n_features and (np.diff(features) > 0).all()):
            raise StoreError(f"{path}/features has no {n} features in ascending order: it is damaged; train again")
        return features

    def selected_features(self) -> NDArray[np.int64]:
        """Ascending ids in the data as they were converted, also where the model has selected features alone."""
        features = self.row_features()
        selection = read_selection(self.path, self.attributes, self.n_features)
        return features if selection is None else selection[features]

    def _weights(self) -> ChunkedArray:
        array = open_array(self.path / ROWS / "weights")
        if array.size != self.n_selected * self.n_labels or array.dtype != np.float32:
            raise StoreError(
                f"{array.name} has {array.size} values of {array.dtype}, not {self.n_selected} rows of {self.n_labels}: the "
                "store is damaged; make it again"
            )
        return array

    def rows(self, first: int, last: int, low: int = 0, high: int | None = None) -> NDArray[np.float32]:
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

    def all_rows(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All rows that are stored, some at a time: the first one's number, and these rows."""
        height = max(1, WINDOW // max(self.n_labels, 1))
        for first in range(0, self.n_selected, height):
            yield first, self.rows(first, min(first + height, self.n_selected))
