"""X and y as users have them.

Rows are checked, sparse ones as CSR, and whether they are to be normalised is found out. y is classes, lists of labels, or an
indicator matrix: `encoded` reads it as a matrix of ones, and a `Target` knows what the labels are called, so that what is
predicted is as y was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from itertools import chain, islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.utils import column_or_1d, gen_batches
from sklearn.utils.extmath import row_norms
from sklearn.utils.validation import validate_data

from xmc_stream.convert.matrices.memory import as_csr, csr_bytes
from xmc_stream.errors import InputError
from xmc_stream.models.samples import of_length_one
from xmc_stream.store.dataset import Dataset
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit
from xmc_stream.system.progress import LOG

_LOOKED_AT = 10_000  # rows of a dataset whose length is looked at
_WINDOW = 2**18  # values of X whose rows are measured at a time
_KINDS = {**dict.fromkeys("biuf", "numbers"), **dict.fromkeys("UO", "strings"), "M": "dates"}
_UNKNOWN = "Unknown label type"  # as scikit-learn begins such a message
_ALIKE = "labels in y must all be numbers, or all be strings"


def checked(estimator: Any, X: Any, reset: bool) -> Any:
    """An array or a frame as an array of numbers, a matrix as a CSR matrix without duplicates; reset: of `validate_data`.

    Raises ValueError, as scikit-learn's estimators do, for what is no matrix of finite real numbers, and MemoryLimitError
    where there is no room for a CSR matrix beside the other one.
    """
    limit = estimator.memory_limit
    is_sparse: bool = sp.issparse(X)
    if is_sparse and X.ndim == 2:
        if X.format != "csr":
            _check_room(limit, csr_bytes(int(X.nnz), X.dtype, X.shape[0]))
        X = as_csr(X, "X")  # scipy itself would crash on some that contradict their shape
    given = X
    try:
        X = validate_data(estimator, given, accept_sparse="csr", dtype="numeric", reset=reset)
        if X.dtype.kind == "O":  # frames of polars come through
            X = X.astype(np.float64)
    except ValueError:
        if (text := _a_text(given)) is None:
            raise
        raise InputError(
            f"X has {text[:40]!r} in the place of a number: texts are a list, a series or an array of one dimension of "
            "str, as X['column']; numbers are a matrix of their own"
        ) from None
    if not isinstance(X, np.ndarray) and not X.has_canonical_format:  # a frame of sparse columns is sparse by now
        _check_room(limit, csr_bytes(int(X.nnz), X.dtype, X.shape[0]))
        X = X.copy()
        X.sum_duplicates()
    return X


def _check_room(memory_limit: str | int | None, n_bytes: int) -> None:
    if n_bytes > FEW_BYTES:  # asking the system what is free takes longer than to make a small one
        MemoryLimit.of(memory_limit).check({"X as a CSR matrix": n_bytes}, "taking X")


def _a_text(X: Any) -> Any:
    """A text in the place of a number, in the first row of what is no matrix of numbers."""
    if hasattr(X, "tocsr") or not hasattr(X, "__len__") or not len(X):
        return None
    row = np.asarray(X[:1], object).ravel().tolist()
    return next((value for value in row if isinstance(value, str | bytes)), None)


def is_on_disk(X: Any) -> bool:
    """Whether it is a dataset, or a path."""
    return isinstance(X, Dataset | str | Path)


def of_matrix(X: Any, normalize: str | None) -> Literal["none", "l2"]:
    """How a conversion is to normalise the rows of a CSR matrix or an array: "l2" or "none"."""
    if normalize != "auto":
        return "l2" if normalize else "none"
    step = max(1, _WINDOW * X.shape[0] // max(X.size, 1))
    windows = (X[rows].astype(np.float64, copy=False) for rows in gen_batches(X.shape[0], step))
    if all(of_length_one(row_norms(window)).all() for window in windows):
        return "none"
    LOG.info("rows of X are divided by their l2 norms, in fit and in predict; normalize=None keeps them as they are")
    return "l2"


def check_dataset(dataset: Dataset, normalize: str | None) -> None:
    """Say that a dataset is not normalised, where that was not asked for. Raises InputError where "l2" was."""
    if normalize is None or dataset.attributes.get("normalize") == "l2":
        return
    if of_length_one(dataset.row_norms(0, min(dataset.n_samples, _LOOKED_AT))).all():
        return
    advice = f"rows of {dataset.path} do not have length one: convert them with normalize='l2'"
    if normalize == "l2":
        raise InputError(f"{advice}, a dataset on disk is not changed")
    LOG.warning("%s, or say normalize=None if they are meant to be so; the defaults are for rows of length one", advice)


class Target(ABC):
    """How y was given. classes: what stands behind each label, by its number; words: its form, for messages.

    one: whether each row has one label; dense: whether what is predicted is an array (n x K).
    """

    one = dense = False
    words: ClassVar[str]

    def __init__(self, classes: NDArray[Any]) -> None:
        self._classes = classes

    @property
    def classes(self) -> NDArray[Any]:
        """(K,)."""
        return self._classes

    @abstractmethod
    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
        """Labels as y was given. labels: numbers, best first, row after row; counts: how many each row has."""

    def matrix(self, y: Any) -> sp.csr_matrix:
        """A y like the one of fit as a matrix (n x K) of ones. Raises InputError where it is not like that one.

        One that is known counts, whatever it stands there for; others are left out.
        """
        ones, other = _read(y, isinstance(self, Lists))
        if type(other) is not type(self):
            raise InputError(f"y of fit was {self.words}, and this one is not: give it as fit had it")
        return self._matched(ones, other)

    def _matched(self, ones: sp.csr_matrix, other: Target) -> sp.csr_matrix:
        """Ones of other classes as ones of these. Raises InputError for classes that can be none of these."""
        if not len(other.classes):
            return _ones(np.empty(0, np.int64), np.zeros(ones.shape[0], np.int64), len(self.classes))
        mine, others = (_KINDS[target.classes.dtype.kind] for target in (self, other))
        if mine != others:
            raise InputError(f"labels in y are {others}, and those of fit were {mine}: give them as fit had them")
        numbers = np.searchsorted(self.classes, other.classes).clip(max=len(self.classes) - 1)
        known = self.classes[numbers] == other.classes
        ones = ones[:, known]
        return sp.csr_matrix((ones.data, numbers[known][ones.indices], ones.indptr), (ones.shape[0], len(self.classes)))

    def names(self) -> list[bytes]:
        """The classes as names of labels, in UTF-8; none where the numbers are their names."""
        if np.array_equal(self.classes, np.arange(len(self.classes))):
            return []
        names = list(map(str, self.classes.tolist()))
        try:
            return [name.encode() for name in names]
        except UnicodeEncodeError as error:
            raise InputError(f"the label {error.object!r:.40} in y is no text in UTF-8: correct it") from None


class Classes(Target):
    """y (n,) with a class a row: numbers or strings."""

    one = True
    words = "one class a row"

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[Any]:
        """An array of classes."""
        return self.classes[labels]


class Lists(Target):
    """y of n collections of labels."""

    words = "lists of labels"

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> list[list[Any]]:
        """Lists, best labels first."""
        named = iter(self.classes[labels].tolist())
        return [list(islice(named, n)) for n in counts.tolist()]


class Indicator(Target):
    """y (n x K), dense or sparse: a label is a column. signed: negatives are -1, and not 0."""

    words = "an indicator matrix"

    def __init__(self, n_labels: int, dtype: Any, dense: bool, signed: bool = False) -> None:
        self._n_labels, self._dtype, self.dense, self._signed = n_labels, np.dtype(dtype), dense, signed

    @property
    def classes(self) -> NDArray[np.int64]:
        """The columns."""
        return np.arange(self._n_labels)

    def given(self, labels: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
        """A CSR matrix, or an array where y was one."""
        matrix = _ones(labels, counts, self._n_labels).astype(self._dtype)
        matrix.sort_indices()
        if not self.dense:
            return matrix
        array = matrix.toarray()
        return np.where(array == 0, self._dtype.type(-1), array) if self._signed else array

    def _matched(self, ones: sp.csr_matrix, other: Target) -> sp.csr_matrix:
        if ones.shape[1] != self._n_labels:
            raise InputError(f"y has {ones.shape[1]} columns, and the model {self._n_labels} labels")
        return ones


def encoded(y: Any) -> tuple[sp.csr_matrix, Target]:
    """The labels as a sparse indicator matrix, and how they were given.

    Raises InputError where y is none of what `Estimator.fit` takes.
    """
    ones, target = _read(y)
    if target.one and len(target.classes) < 2:
        raise InputError(f"y has 1 class, {target.classes[0]!r}: give rows of two classes or more")
    if not len(target.classes):
        raise InputError("y has no label in any row: there is nothing to learn")
    return ones, target


def _read(y: Any, lists: bool | None = None) -> tuple[sp.csr_matrix, Target]:
    """y as a matrix (n x K) of ones, and how it was given. lists: whether lists of numbers are of labels; None: find out."""
    y = taken(y)
    if isinstance(y, list):
        array = None if lists else _array(y)
        if array is None or (lists is None and not _indicates(array)):
            classes = _labels(y)
            numbers = {label: i for i, label in enumerate(classes.tolist())}
            rows = [
                sorted({numbers[label] for label in row}) for row in y
            ]  # one that stands twice in a row counts once
            indices = np.array(list(chain(*rows)), np.int64)
            return _ones(indices, np.array(list(map(len, rows))), len(classes)), Lists(classes)
        y = array
    is_sparse: bool = sp.issparse(y)
    if is_sparse or (y.ndim == 2 and y.shape[1] > 1):
        ones = sp.csr_matrix(_positive(y), dtype=np.float32)
        return ones, Indicator(y.shape[1], y.dtype, dense=not is_sparse, signed=not is_sparse and _is_signed(y))
    classes, codes = np.unique(
        column_or_1d(y, warn=lists is None), return_inverse=True
    )  # as scikit-learn says of (n, 1)
    return _ones(codes, np.ones(len(codes), np.int64), len(classes)), Classes(classes)


def taken(y: Any) -> Any:
    """y as a CSR matrix, as a list of collections of labels, or as an array of numbers, strings or dates (n,) or (n x K).

    Raises InputError for all else, and where a label is missing: None, NaN, NA of pandas.
    """
    is_sparse: bool = sp.issparse(y)
    if is_sparse:
        return _canonical(y)
    masked = np.ma.is_masked(y)
    if masked or isinstance(y, str | bytes | dict | Set):
        raise InputError(
            f"y is a {'masked array' if masked else type(y).__name__}: give the labels of all rows, in their order"
        )
    listed = isinstance(y, list | tuple)  # of which NumPy would make 1 and "a" both strings
    array = np.fromiter(y, object, len(y)) if listed else np.asarray(y)
    if array.dtype.kind in "OT":  # T: NumPy's strings of any length
        items = array.astype(object).ravel().tolist()
        items = [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
        if array.ndim and array.size == len(array) and any(map(_is_collection, set(map(type, items)))):
            return _rows(items)
        array = _plain(items).reshape(array.shape)
        if listed and array.dtype.kind == "O":
            array = array.astype(str)
    if array.ndim not in (1, 2) or 0 in array.shape or array.dtype.kind not in _KINDS:
        raise InputError(
            f"{_UNKNOWN}: y has the shape {array.shape} and the type {array.dtype}: give numbers or strings, one class a row, "
            "a list of lists of labels, or a matrix of zeros and ones"
        )
    _refuse_unfit(array)
    return array


def _canonical(y: Any) -> sp.csr_matrix:
    """A sparse y as CSR, with each entry once."""
    if y.ndim != 2 or y.dtype.kind not in "biuf":
        raise InputError(f"{_UNKNOWN}: y is sparse, of shape {y.shape} and type {y.dtype}: give an indicator (n x K)")
    matrix = sp.csr_matrix(as_csr(y, "y"))
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    if not np.isfinite(matrix.data).all():
        raise InputError("y contains NaN or infinity: correct it, a value other than zero is a positive")
    return matrix


def _is_signed(y: NDArray[Any]) -> bool:
    """Whether an array is of -1 and 1, with a -1 in it."""
    return y.dtype.kind in "if" and bool((y < 0).any() and (np.abs(y) == 1).all())


def _positive(y: Any) -> Any:
    """Where an indicator has a positive. Raises InputError where it is none: it would be read wrongly.

    That is what is not zero in a sparse one, as counts, and in an array of zeros and another number; 1 in one of -1 and 1.
    """
    is_sparse: bool = sp.issparse(y)
    if is_sparse:
        if (y.data < 0).any():
            raise InputError("y is sparse and has values below zero: negatives are left out there, give y > 0")
        if y.shape[1] == 1 and (y.data > 1).any():
            raise InputError("y is a sparse column of numbers: give one class a row as an array (n,)")
        return y != 0
    if y.dtype.kind in "biuf":
        if _is_signed(y):
            return y > 0
        most = y.max()
        if most >= 0 and ((y == 0) | (y == most)).all():
            return y != 0
    raise InputError(
        f"{_UNKNOWN}: y of {y.shape[1]} columns is no indicator: give a matrix of zeros and ones, or of -1 and 1, a list of "
        "lists of labels, or one class a row"
    )


def _is_collection(kind: type) -> bool:
    """Whether such an object may hold the labels of a row."""
    return issubclass(kind, Sequence | Set) and not issubclass(kind, str | bytes)


def _rows(rows: list[Any]) -> list[Any]:
    """Collections of labels. Raises InputError for a row that is none."""
    for i, row in enumerate(rows):
        if not _is_collection(type(row)):
            raise InputError(
                f"row {i} (from 0) of y is {row!r:.40}, and others are collections of labels: give [] for none"
            )
    return rows


def _labels(rows: list[Any]) -> NDArray[Any]:
    """All labels of some collections, sorted. Raises InputError for what cannot be one."""
    try:
        labels = _plain(list(set(chain.from_iterable(rows))))
    except TypeError:
        raise InputError(f"{_ALIKE}: there are collections in collections") from None
    _refuse_unfit(labels)
    return np.sort(labels)


def _plain(items: list[Any]) -> NDArray[Any]:
    """Values as an array of flags, numbers or strings. Raises InputError where they are not all of one kind."""
    kinds = set(map(type, items))
    for kind, dtype in ((str, object), (bool, bool), (Integral, np.int64), (Real, np.float64)):
        if all(issubclass(each, kind) or (kind is not str and each is np.bool_) for each in kinds):
            try:
                return np.array(items, dtype)
            except OverflowError:
                raise InputError("y has whole numbers of more than 64 bits: give strings in their place") from None
    if missing := [item for item in items if _is_missing(item)]:
        raise InputError(f"y has {missing[0]!r} in the place of a label: leave such rows or labels out")
    raise InputError(f"{_ALIKE}: there are {', '.join(sorted(each.__name__ for each in kinds))}")


def _is_missing(item: Any) -> bool:
    try:
        return item is None or bool(item != item)  # NaN and NaT
    except (TypeError, ValueError):  # NA of pandas has no truth value, an array has several
        return np.ndim(item) == 0


def _refuse_unfit(labels: NDArray[Any]) -> None:
    """Raise InputError for numbers and dates that cannot be labels."""
    if labels.dtype.kind in "fM" and not np.isfinite(labels).all():
        raise InputError("y contains NaN or infinity in the place of a label: leave such rows or labels out")
    if labels.dtype.kind == "f" and (fractions := labels[labels % 1 != 0]).size:
        raise InputError(f"{_UNKNOWN}: y has {fractions[0]}, and labels are whole numbers or strings")


def _array(rows: list[Any]) -> NDArray[Any] | None:
    """Collections of as many numbers, two or more and in an order, as an array (n x K); None for others."""
    if len(set(map(len, rows))) > 1 or len(rows[0]) < 2 or any(isinstance(row, Set) for row in rows):
        return None
    try:
        array = _plain(list(chain.from_iterable(rows)))
    except InputError:
        return None
    return None if array.dtype.kind == "O" else array.reshape(len(rows), -1)


def _indicates(array: NDArray[Any]) -> bool:
    """Whether lists of these numbers are an indicator, not lists of labels: of 0 and 1 alone, or of -1 and 1."""
    return _is_signed(array) or bool(((array == 0) | (array == 1)).all())


def _ones(indices: NDArray[Any], counts: NDArray[Any], n_columns: int) -> sp.csr_matrix:
    """Ones in these columns, row after row. counts: how many each row has."""
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(counts), n_columns))
