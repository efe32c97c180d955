"""Models of few rows of W: score_k = sum_j x_j w_jk over the selected features j."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.grouplasso.predict import (
    BLOCK_ROWS,
    MOST_CLASSES,
    ROW_BYTES,
    HeldRows,
    RowsTask,
    RowsWarmUp,
)
from xmc_stream.grouplasso.rows import ROWS, WINDOW, RowSparseWeights, write_rows
from xmc_stream.models.copies import refuse_model
from xmc_stream.models.kind import Checker, WeightArrays
from xmc_stream.models.model import Model, compare
from xmc_stream.runtime.check import array_jobs, checked_reading, common_model_jobs
from xmc_stream.runtime.job import Job, Phase, Receipt
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.chunks import plain_arrays
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import LOGS, SEAL
from xmc_stream.store.model import CHUNK_BYTES, COMPACTED, LABEL_COUNTS, begin_model, finish_model
from xmc_stream.store.names import SELECTED, n_converted, select_names, write_selection
from xmc_stream.store.places import target_path
from xmc_stream.store.remote import copy_file
from xmc_stream.system.memory import MemoryLimit

if TYPE_CHECKING:
    import scipy.sparse

    from xmc_stream.runtime.ledger import Ledger

_COMMAND = "compact"
# of the training: a compact model is not its outcome, and no training goes on from it
_LEFT_OUT = ("format", "version", "identity", LOGS, SEAL, SELECTED)


class RowSparseModel(RowSparseWeights, Model):
    """A model of few rows of W."""

    kind = "row-sparse"

    def _more(self) -> str:
        return f", {self.n_selected} features selected"

    def _hash_weights(self, update: Callable[[Any], None]) -> None:
        update(self.row_features().astype("<i8").data)
        for _, rows in self.all_rows():
            update(rows.astype("<f4").data)

    def selected_names(self) -> list[str] | None:
        """The names of the selected features, in the order of `selected_features`; None where features have no names."""
        names = self.feature_names()
        return None if names is None else names.take(self.row_features())

    def compact(
        self, path: str | Path, overwrite: bool = False, memory_limit: str | float | None = None, check: bool = True
    ) -> Model:
        """A model on disk that has the selected features alone: see `Model.compact`."""
        from xmc_stream.runtime.making import COMMAND, STORE, make, refuse_all

        if check:
            compare(self)

        def refuse(path: Path) -> None:
            refuse_model(path, self.path, overwrite)

        path = target_path(path)
        refuse_all([path], refuse, _COMMAND)
        needs = {
            "selected features": 5 * 8 * self.n_selected,
            "rows": 2 * 4 * max(WINDOW, self.n_labels),
            "writers": 2 * CHUNK_BYTES,
        }
        MemoryLimit.kept(memory_limit).check(needs, "compacting a model")

        def write(work: Path, ledger: Ledger) -> Receipt:
            _write_selected(self, work / "model", work / STORE)
            return {}

        make(path, {COMMAND: _COMMAND, "model": self.attributes.get(SEAL)}, write, refuse, anew=True)
        return RowSparseModel(path)

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """All weights that are not zero, in memory: scipy.sparse.csc_matrix (D x K, float32)."""
        import scipy.sparse

        with checked_reading(self.path):
            arrays = self.weight_arrays()
            data, indices, indptr = (
                np.concatenate([np.zeros(0, dtype), *windows])
                for windows, dtype in ((arrays.data, np.float32), (arrays.indices, np.int64), (arrays.indptr, np.int64))
            )
        return scipy.sparse.csc_matrix((data, indices, indptr), shape=self.shape)

    def warm_up(self, evaluate: bool = False) -> Job:
        """Predict, and evaluate, a few rows by a few rows of W."""
        return RowsWarmUp()

    def held_needs(self, room: int) -> dict[str, int]:
        """All rows of W."""
        return {
            "tiles": 4 * self.n_selected * self.n_labels,
            "classes": 16 * self.n_labels,
            "selected features": 10 * self.n_selected + 5 * MIB,
            "ranking": BLOCK_ROWS * (4 * min(MOST_CLASSES, self.n_labels) + ROW_BYTES),
        }

    def hold(self, room: int) -> HeldRows:
        """All rows of W."""
        return HeldRows(self)

    def ranking(
        self, dataset: Dataset, k: int, filtered: bool, evaluate: bool, once: Callable[[Job], Receipt]
    ) -> RowsTask:
        """What it takes is foreseen without a probe."""
        return RowsTask(self, dataset, k, filtered, evaluate)

    def check_jobs(self) -> Sequence[Job]:
        """Seal, names, rows of W."""
        return [*common_model_jobs(self), *array_jobs(self.path, plain_arrays(self.path / ROWS))]

    def verify(self, checker: Checker) -> Generator[Phase, list[Receipt], None]:
        """Features ascend, each has a row that is finite and not of zeros."""
        folder, nnz = self.path / ROWS, 0
        for name in ("features", "weights"):
            if not (folder / name).exists():
                checker.damage.append(f"{folder / name} is missing")
        if checker.whole(folder):
            features = self.row_features()
            for first, rows in self.all_rows():
                counts = np.count_nonzero(rows, axis=1)
                nnz += int(counts.sum())
                checker.damage += [
                    f"{folder}: the row of feature {features[first + i]} is all zeros"
                    for i in np.flatnonzero(counts == 0)
                ]
            checker.expect("the attribute nnz", self.attributes.get("nnz"), nnz)
        yield from checker.lines({})

    def weight_arrays(self) -> WeightArrays:
        """Weights that are not zero, by ranges of classes."""

        def ends() -> Iterator[NDArray[Any]]:
            before = np.zeros(1, np.int64)
            yield before
            for counts, _, _ in self._by_class():
                yield (before := before[-1:] + np.cumsum(counts))

        return WeightArrays(
            self.nnz,
            ends(),
            (features for _, features, _ in self._by_class()),
            (values for _, _, values in self._by_class()),
            (np.zeros(min(WINDOW, self.n_labels - k), np.float32) for k in range(0, self.n_labels, WINDOW)),
        )

    def _by_class(self) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Ranges of classes: weights of each class that are not zero, their features and values, class after class."""
        features = self.row_features()
        width = max(1, WINDOW // max(self.n_selected, 1))
        for low in range(0, self.n_labels, width):
            by_class = np.ascontiguousarray(self.rows(0, self.n_selected, low, min(low + width, self.n_labels)).T)
            classes, places = np.nonzero(by_class)
            yield np.bincount(classes, minlength=len(by_class)), features[places], by_class[classes, places]


def _write_selected(model: RowSparseWeights, work: Path, path: Path) -> None:
    begin_model(work)
    blocks = ((np.arange(first, first + len(rows)), rows) for first, rows in model.all_rows())
    write_rows(work / ROWS, model.n_selected, model.n_labels, blocks)
    select_names(model.path, work, model.row_features())
    if (model.path / LABEL_COUNTS).exists():
        shutil.copytree(model.path / LABEL_COUNTS, work / LABEL_COUNTS, copy_function=copy_file)
    kept = {name: value for name, value in model.attributes.items() if name not in _LEFT_OUT}
    attributes = {
        **kept,
        "n_features": model.n_selected,
        COMPACTED: {"of": model.path.name},
        **write_selection(work, model.selected_features(), n_converted(model.attributes)),
    }
    finish_model(work, path, attributes)
