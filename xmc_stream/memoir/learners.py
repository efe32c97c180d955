"""W, its oracle and the rows they take: over the features (l2, l1), or over the coordinates of a truncated SVD (lsh).

Steps leave W on disk, class by class; within a segment also what the next ones go on from bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import spoilt_state
from xmc_stream.factors.factors import Panels
from xmc_stream.kernels.blocks import CSR, Labels
from xmc_stream.memoir.draws import Drawn
from xmc_stream.memoir.parameters import MEMOIRParameters
from xmc_stream.memoir.plan import ENTRIES, StepsPlan
from xmc_stream.memoir.solver import Found, Weights
from xmc_stream.mips.exact import DenseExact, Exact
from xmc_stream.mips.kernels.classvectors import RankedRows
from xmc_stream.mips.lsh import SimpleLSH
from xmc_stream.mips.oracle import Index, Oracle
from xmc_stream.mips.smallworld import SmallWorld
from xmc_stream.mips.vectors import ClassVectors, DenseVectors, chosen_rows, ranked
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import PackedArrayWriter, new_pack

_CLASSES = 4096  # written or read at a time, at most: with ENTRIES entries at most; a class at least

Beside = Mapping[str, NDArray[Any]]  # arrays by name, with W


class Learner(ABC):
    """W at work. learned (K,): whether a class has rows that are learned from: others are no answers of the oracle."""

    def __init__(self, p: MEMOIRParameters, learned: NDArray[np.bool_], vectors: Any) -> None:
        self._p, self._learned, self.vectors = p, learned, vectors
        self.weights = Weights(vectors)
        self._oracle: Oracle | None = None

    @abstractmethod
    def rows(self, numbers: NDArray[np.int64]) -> Any:
        """Some rows, ascending, read and as W takes them; on any thread, one at a time."""

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Of rows, so far."""

    @abstractmethod
    def _made(self, index: Index | None = None) -> Oracle:
        """The oracle, over the vectors as they are. index: that it had, None to make it anew."""

    @abstractmethod
    def _exact(self, by_norm: bool = False) -> Oracle:
        """The oracle that scores all classes."""

    def predict(self, rows: Any, n: int) -> NDArray[np.int64]:
        """The class of the largest score for each of n rows, of those that have rows; of classes that are zero, a drawn one."""
        oracle, none = self._exact(by_norm=self._p.cosine), Labels(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
        oracle.barred = ~self._learned
        return oracle.query(rows, none).classes.astype(np.int64)

    @abstractmethod
    def load(self, path: Path) -> None:
        """Take the vectors from a state."""

    @abstractmethod
    def store(self, path: Path, beside: Beside) -> None:
        """Leave the vectors, and what goes with them."""

    def pause(self, path: Path) -> list[str]:
        """Leave all that steps depend on; returns names of what `resume` needs of the oracle's index."""
        index = self.oracle.index()
        self.store(path, {"scale": np.array([self.weights.scale]), "squares": self.vectors.squares, **index})
        return list(index)

    def resume(self, path: Path, names: Sequence[str]) -> None:
        """Go on from there: the next step is the same bit for bit as if it had followed in this process."""
        self.load(path)
        beside = read_beside(path, ("scale", "squares", *names))
        self.weights.scale = float(beside["scale"][0])
        self.vectors.squares[:] = beside["squares"]  # sparse ones are kept by differences
        self._take_oracle(self._made({name: beside[name] for name in names}))

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Weights that are not 0."""

    @property
    def oracle(self) -> Oracle:
        """Made when it is first asked for."""
        return self._oracle or self._take_oracle(self._made())

    def _take_oracle(self, oracle: Oracle) -> Oracle:
        oracle.barred = ~self._learned
        self._oracle = oracle
        return oracle

    def find(self, drawn: Drawn, step: int) -> Found:
        """Own scores, and the best other classes."""
        rows, lines, labels = drawn.rows, drawn.places, drawn.labels
        own = self.vectors.dots(labels.astype(np.int32), lines.astype(np.int32), rows)
        if self._p.mask:  # the same for all draws of a row
            answers = self.oracle.query(rows, Labels(drawn.own.indptr, drawn.own.indices), step)
            return Found(labels, own, answers.classes[lines].astype(np.int64), answers.scores[lines])
        excluded = Labels(np.arange(len(labels) + 1), labels.astype(np.int32))
        answers = self.oracle.query(self._taken(rows, lines), excluded, step)
        return Found(labels, own, answers.classes.astype(np.int64), answers.scores)

    @abstractmethod
    def _taken(self, rows: Any, lines: NDArray[np.int64]) -> Any:
        """Some of the rows, also more than once."""

    def refresh(self, classes: NDArray[np.int64]) -> None:
        """Tell the oracle which classes were moved."""
        if len(classes):
            self.oracle.refresh(classes)


class SparseLearner(Learner):
    """Over the features, and one more that is 1, if there is a bias."""

    def __init__(
        self, dataset: Dataset, p: MEMOIRParameters, learned: NDArray[np.bool_], seed: int, sizes: StepsPlan
    ) -> None:
        self._X, self._d, self._seed, self._threads = dataset.X_rows(), dataset.n_features, seed, sizes.threads
        super().__init__(p, learned, ClassVectors(dataset.n_labels, self._d + p.bias, sizes.vectors))

    def rows(self, numbers: NDArray[np.int64]) -> RankedRows:
        block = self._X.gather(numbers)
        if not self._p.bias:
            return ranked(CSR(block.indptr, block.indices, block.values))
        n = len(block.indptr) - 1
        indptr = block.indptr + np.arange(n + 1)
        indices, values = np.full(indptr[-1], self._d, np.int32), np.ones(indptr[-1], np.float32)
        inside = np.ones(len(indices), np.bool_)
        inside[indptr[1:] - 1] = False
        indices[inside], values[inside] = block.indices, block.values
        return ranked(CSR(indptr, indices, values))

    @property
    def bytes_read(self) -> int:
        return self._X.bytes_read

    def _taken(self, rows: RankedRows, lines: NDArray[np.int64]) -> RankedRows:
        return chosen_rows(rows, lines)

    def _made(self, index: Index | None = None) -> Oracle:
        p = self._p
        if p.oracle == "exact":
            return self._exact()
        more = {} if p.candidates is None else {"ef": p.candidates}
        return SmallWorld(self.vectors, self._seed, self._threads, links=p.degree, index=index, **more)

    def _exact(self, by_norm: bool = False) -> Oracle:
        return Exact(self.vectors, self._seed, self._threads, by_norm=by_norm)

    def load(self, path: Path) -> None:
        for first, some in read_sparse(path, self.vectors.n_classes, self._d + self._p.bias):
            self.vectors.put(np.arange(first, first + len(some.indptr) - 1), ranked(some))

    def store(self, path: Path, beside: Beside) -> None:
        k = self.vectors.n_classes
        ends = np.concatenate([[0], np.cumsum(self.vectors.n_entries, dtype=np.int64)])
        some = (self.vectors.export(np.arange(*classes)) for classes in class_ranges(ends, 0, k))
        parts = ({"counts": np.diff(x.indptr), "features": x.indices, "values": x.values} for x in some)
        write_vectors(path, parts, beside)

    @property
    def nnz(self) -> int:
        return int(self.vectors.n_entries.sum(dtype=np.int64))


class DenseLearner(Learner):
    """Over the coordinates of a truncated SVD, which lie on disk."""

    def __init__(
        self, dataset: Dataset, p: MEMOIRParameters, learned: NDArray[np.bool_], coordinates: Panels, seed: int,
        sizes: StepsPlan,
    ) -> None:  # fmt: skip
        super().__init__(p, learned, DenseVectors(dataset.n_labels, coordinates.columns, sizes.vectors))
        self._coordinates, self._seed, self._threads, self._n_read = coordinates, seed, sizes.threads, 0

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        self._n_read += len(numbers)
        return self._coordinates.gather(numbers)

    @property
    def bytes_read(self) -> int:
        return 4 * self._coordinates.columns * self._n_read

    def _taken(self, rows: NDArray[np.float32], lines: NDArray[np.int64]) -> NDArray[np.float32]:
        return rows[lines]

    def _made(self, index: Index | None = None) -> Oracle:
        p = self._p
        if p.oracle == "exact":
            return self._exact()
        return SimpleLSH(self.vectors, self._seed, self._threads, bits=p.bits, candidates=p.candidates, index=index)

    def _exact(self, by_norm: bool = False) -> Oracle:
        return DenseExact(self.vectors, self._seed, self._threads, by_norm=by_norm)

    def load(self, path: Path) -> None:
        for first, lines in read_dense(path, self.vectors.n_classes, self.vectors.n_features):
            self.vectors.put(np.arange(first, first + len(lines)), lines)

    def store(self, path: Path, beside: Beside) -> None:
        k = self.vectors.n_classes
        write_vectors(
            path, ({"values": self.vectors.values[low : low + _CLASSES]} for low in range(0, k, _CLASSES)), beside
        )

    @property
    def nnz(self) -> int:
        return int(np.count_nonzero(self.vectors.values))


def learner_of(
    dataset: Dataset, p: MEMOIRParameters, coordinates: Panels | None, learned: NDArray[np.bool_], seed: int,
    sizes: StepsPlan,
) -> Learner:  # fmt: skip
    """W = 0 of a variant."""
    if coordinates is not None:
        return DenseLearner(dataset, p, learned, coordinates, seed, sizes)
    return SparseLearner(dataset, p, learned, seed, sizes)


def class_ranges(ends: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Classes start .. stop - 1 in ranges of few entries. ends (K + 1,): where the entries of each begin, and the last end."""
    while start < stop:
        last = int(np.searchsorted(ends, ends[start] + ENTRIES, side="right")) - 1
        last = min(max(last, start + 1), start + _CLASSES, stop)
        yield start, last
        start = last


def state_path(work: Path, number: int, first: int) -> Path:
    """What steps of segment `number` leave, from step `first` on."""
    return work / "state" / "steps" / f"{number:06d}-{first:09d}"


def write_vectors(path: Path, parts: Iterable[Mapping[str, NDArray[Any]]], beside: Beside) -> None:
    """Leave vectors durably. parts: arrays by name, some classes at a time: `read_sparse` and `read_dense` say which."""
    with new_pack(path) as pack:
        writers: dict[str, PackedArrayWriter] = {}
        for part in parts:
            for name, values in part.items():
                if name not in writers:
                    writers[name] = PackedArrayWriter(pack, name, values.dtype)
                writers[name].append(values.reshape(-1))
        for writer in writers.values():
            writer.close()
        for name, values in beside.items():
            line = values.reshape(-1)
            pack.write(f"beside/{name}", line.view(np.uint8) if line.dtype == np.bool_ else line)


def read_beside(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Arrays that were left with W, each as one line."""
    arrays = {name: open_array(path / "beside" / name) for name in names}
    return {name: array.read(0, array.size) for name, array in arrays.items()}


def read_sparse(
    path: Path, n_classes: int, n_features: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, CSR]]:
    """The vectors of classes start .. stop - 1, some at a time, from the first named on: counts, ascending features, values.

    Raises StoreError where they cannot be those of so many classes and features.
    """
    counts = read_small(path, "counts", n_classes, np.int64)
    features, values = open_array(path / "features"), open_array(path / "values")
    ends = np.concatenate([[0], np.cumsum(counts)])
    bounded = not len(counts) or 0 <= counts.min() <= counts.max() <= n_features
    if not bounded or features.size != ends[-1] or values.size != ends[-1]:
        raise spoilt_state(path)
    stop = n_classes if stop is None else stop
    for first, last in class_ranges(ends, start, stop):
        some = ends[first : last + 1]
        block = CSR(some - some[0], features.read(some[0], some[-1]), values.read(some[0], some[-1]))
        whole = block.indices.dtype == np.int32 and block.values.dtype == np.float32
        steps = np.diff(block.indices)
        inside = np.delete(steps, block.indptr[1:-1][(block.indptr[1:-1] > 0) & (block.indptr[1:-1] <= len(steps))] - 1)
        if not whole or (len(block.indices) and not 0 <= block.indices.min() <= block.indices.max() < n_features):
            raise spoilt_state(path)
        if (inside <= 0).any() or not np.isfinite(block.values).all():
            raise spoilt_state(path)
        yield first, block


def read_dense(path: Path, n_classes: int, rank: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Some lines (values) at a time, from the first named on. Raises StoreError for what cannot be."""
    values = open_array(path / "values")
    if values.size != n_classes * rank or values.dtype != np.float32:
        raise spoilt_state(path)
    for first in range(0, n_classes, _CLASSES):
        last = min(first + _CLASSES, n_classes)
        lines = values.read(first * rank, last * rank)
        if not np.isfinite(lines).all():
            raise spoilt_state(path)
        yield first, lines.reshape(-1, rank)
