"""Rows as users have them: checked, sparse ones as CSR; and whether they are to be normalised."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from sklearn.utils import gen_batches
from sklearn.utils.extmath import row_norms
from sklearn.utils.validation import validate_data

from xmc_stream.convert.matrices.memory import as_csr, csr_bytes
from xmc_stream.errors import InputError
from xmc_stream.models.samples import of_length_one
from xmc_stream.store.dataset import Dataset
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit

log = logging.getLogger("xmc_stream")
_LOOKED_AT = 10_000  # rows of a dataset whose length is looked at
_WINDOW = 2**18  # values of X whose rows are measured at a time


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
    log.info("rows of X are divided by their l2 norms, in fit and in predict; normalize=None keeps them as they are")
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
    log.warning("%s, or say normalize=None if they are meant to be so; the defaults are for rows of length one", advice)
