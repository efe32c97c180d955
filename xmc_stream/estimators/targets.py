"""What a model predicts, as users write it: classes, lists of labels, indicator matrices; and as numbers of labels."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from xmc_stream.errors import InputError

_COLLECTIONS = (list, tuple, set, frozenset, np.ndarray)


class Target(ABC):
    """How y was given. classes: what stands behind each label, by its number.

    one: whether each row has one label; dense: whether what is predicted is an array (n x K).
    """

    one = dense = False

    def __init__(self, classes: NDArray[Any]) -> None:
        self._classes = classes

    @property
    def classes(self) -> NDArray[Any]:
        """(K,)."""
        return self._classes

    @abstractmethod
    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
        """Labels as y was given. labels: numbers, best first, row after row; counts: how many each row has."""

    @abstractmethod
    def matrix(self, y: Any) -> sp.csr_matrix:
        """A y like the one of fit as a matrix (n x K) of ones. Raises InputError where it is not like that one."""

    def write_names(self, path: Path) -> bool:
        """Write the classes as names of labels, one a line; False where the numbers are their names."""
        if np.array_equal(self.classes, np.arange(len(self.classes))):
            return False
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"title": str(name)}) + "\n" for name in self.classes.tolist())
        return True


class Classes(Target):
    """y (n,) with a class a row: numbers or strings."""

    one = True

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[Any]:
        """An array of classes."""
        return self.classes[labels]

    def matrix(self, y: Any) -> sp.csr_matrix:
        """A one for each row whose class is known."""
        y = np.asarray(y).ravel()
        rows = np.isin(y, self.classes)
        codes = np.searchsorted(self.classes, y[rows])
        return _ones(codes, np.concatenate([[0], np.cumsum(rows)]), len(self.classes))


class Lists(Target):
    """y of n collections of labels."""

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> list[list[Any]]:
        """Lists, best labels first."""
        named = iter(self.classes[labels].tolist())
        return [list(islice(named, n)) for n in counts.tolist()]

    def matrix(self, y: Any) -> sp.csr_matrix:
        """A one for each label that is known."""
        numbers = {label: i for i, label in enumerate(self.classes.tolist())}  # NumPy's numbers are found too
        rows = [np.array([numbers[label] for label in row if label in numbers], np.int64) for row in y]
        ends = np.cumsum([0, *map(len, rows)])
        return _ones(np.concatenate([*rows, np.zeros(0, np.int64)]), ends, len(self.classes))


class Indicator(Target):
    """y (n x K), dense or sparse: a label is a column, and positive where the value is not zero."""

    def __init__(self, n_labels: int, dtype: Any, dense: bool) -> None:
        self._n_labels, self._dtype, self.dense = n_labels, np.dtype(dtype), dense

    @property
    def classes(self) -> NDArray[np.int64]:
        """The columns."""
        return np.arange(self._n_labels)

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
        """A CSR matrix, or an array where y was one."""
        matrix = _ones(labels, np.concatenate([[0], np.cumsum(counts)]), self._n_labels).astype(self._dtype)
        matrix.sort_indices()
        return matrix.toarray() if self.dense else matrix

    def matrix(self, y: Any) -> sp.csr_matrix:
        """A one for each positive."""
        is_sparse: bool = sp.issparse(y)
        matrix: Any = sp.csr_matrix(y if is_sparse else np.asarray(y))
        if matrix.shape[1] != self._n_labels:
            raise InputError(f"y has {matrix.shape[1]} columns, and the model {self._n_labels} labels")
        return sp.csr_matrix(matrix != 0)

    def write_names(self, path: Path) -> bool:
        """Columns have no other names."""
        return False


def encoded(y: Any) -> tuple[sp.csr_matrix, Target]:
    """The labels as a sparse indicator matrix, and how they were given.

    Raises ValueError where y is none of what `Estimator.fit` takes.
    """
    is_sparse: bool = sp.issparse(y)
    if is_sparse:
        return sp.csr_matrix(y), Indicator(y.shape[1], y.dtype, False)
    if _of_collections(y) and not _indicates(y):
        return _lists(y)
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] > 1:
        kind = type_of_target(y, input_name="y")
        if kind != "multilabel-indicator":
            raise InputError(
                f"Unknown label type: y of {y.shape[1]} columns is {kind}: give a matrix of zeros and ones, a list of lists of "
                "labels, or one class a row"
            )
        return sp.csr_matrix(y), Indicator(y.shape[1], y.dtype, True)
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise InputError(f"y has 1 class, {classes[0]!r}: give rows of two classes or more")
    return _ones(codes, np.arange(len(codes) + 1), len(classes)), Classes(classes)


def _of_collections(y: Any) -> bool:
    """Whether y is a sequence of collections of labels."""
    if isinstance(y, str | bytes) or getattr(y, "ndim", 1) != 1 or not hasattr(y, "__len__"):
        return False
    if isinstance(y, np.ndarray) and y.dtype != object:
        return False
    return all(isinstance(row, _COLLECTIONS) for row in y) and len(y) > 0


def _indicates(y: Any) -> bool:
    """Whether lists are the rows of an indicator: as many zeros and ones in each, two or more."""
    rows = list(y)
    if (
        len({len(row) for row in rows}) != 1
        or len(rows[0]) < 2
        or any(isinstance(row, set | frozenset) for row in rows)
    ):
        return False
    return all(isinstance(value, Integral | np.bool_) and value in (0, 1) for row in rows for value in row)


def _lists(y: Any) -> tuple[sp.csr_matrix, Target]:
    """Of collections of labels."""
    binarizer = MultiLabelBinarizer(sparse_output=True)
    try:
        matrix = sp.csr_matrix(binarizer.fit_transform(y))
    except TypeError as error:  # of labels that have no order, or cannot be told apart
        raise InputError(f"labels in y must all be numbers, or all be strings ({error})") from None
    if not matrix.shape[1]:
        raise InputError("y has no label in any row: there is nothing to learn")
    return matrix, Lists(binarizer.classes_)


def _ones(indices: NDArray[Any], indptr: NDArray[Any], n_columns: int) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(indptr) - 1, n_columns))
