"""A dataset of some features of another one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.datasets.passes import block_bytes, listed
from xmc_stream.errors import InputError
from xmc_stream.kernels.csr import count_indices, keep_selected, row_norms
from xmc_stream.models.model import Model, compare
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.ledger import Ledger, Receipt
from xmc_stream.runtime.making import COMMAND, STORE, make
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import FORMAT, VERSION, Dataset, as_dataset, open_dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter, index_dtype
from xmc_stream.store.inventory import SEAL, seal
from xmc_stream.store.matrix import stream
from xmc_stream.store.names import (
    ROW_IDS,
    SELECTED,
    WINDOW,
    n_converted,
    read_selection,
    select_names,
    write_selection,
)
from xmc_stream.store.new_dataset import check_target, load_kernels
from xmc_stream.store.nodes import Group
from xmc_stream.store.places import copy_folders, target_path
from xmc_stream.store.remote import link_or_copy
from xmc_stream.system.memory import MemoryLimit
from xmc_stream.system.progress import current, working

_BLOCKS = 16  # one in so many bytes is for X in a block of rows
_WRITERS = 8 * MIB  # buffers of the files that are being written
_SHARED = ("Y", "observed", "statistics/label_counts", ROW_IDS)  # by hard links where there can be some
_OWN = ("format", "version", "n_features", "nnz_features", SEAL, SELECTED, "conversion")  # attributes not handed on


@native_arguments
def select_features(
    data: str | Path | Dataset,
    out: str | Path,
    features: Model | str | Path | Any,
    *,
    check: bool = True,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Dataset:
    """Make a dataset that has some features of another one as its only columns, in one pass over X.

    The entries of these features are copied. Labels, a mask of known pairs and label names are shared with the dataset by
    hard links, or copied where the file system has none. Rows keep their number, their order and their values.

    Parameters
    ----------
    data : Dataset, str or Path
        The dataset, or its path.
    out : str or Path
        The folder of the new dataset.
    features : Model, int array, str or Path
        A row-sparse model, whose selected features are taken; ids of features from zero, in any order; or a file of them,
        one a line. They are ids in the data as they were converted, also where `data` has selected features alone.
        Columns are in ascending order of the ids. `data` need not be what the model was trained on, but must have had as
        many features when it was converted, and the same names where both have names.
    check : bool, default True
        Compare the model with its checksums first, and the dataset as it is read. False saves a little time, and damage
        may go unseen into the new dataset.
    memory_limit : str, int, float or None, default None
        Peak resident memory of the process, as "512MB" or in bytes. None: what it holds, and three quarters of what is
        free.
    overwrite : bool, default False
        Replace a dataset at `out`.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    Dataset
        The new dataset, opened.

    Raises
    ------
    InputError
        A feature is not one of the data or named twice; the model is of a kind that selects none, or learned from data of
        other features; or something stands at `out`.
    StoreError
        The dataset or the model are damaged, or `out` cannot be written.
    MemoryLimitError
        The memory limit cannot work.

    See Also
    --------
    Model.compact : a model of the selected features alone.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "all.xmc", labels=X)
    >>> some = xs.select_features(data, "some.xmc", [0, 2])
    >>> some.n_features, some.feature_counts().tolist()
    (2, [10, 10])
    """
    limit, out, dataset = MemoryLimit.kept(memory_limit), target_path(out), as_dataset(data)
    if out.absolute() == dataset.path.absolute():
        raise InputError(f"{out} is the dataset itself: give another name")
    _load_kernels(dataset)
    budget, X = limit.budget(), dataset.X_rows()

    def needs(budget: int) -> dict[str, int]:
        (block,) = block_bytes(budget // _BLOCKS, X)
        return {
            "features": 8 * 8 * dataset.n_features,
            "writers": _WRITERS,
            "blocks of rows": 2 * block + 8 * MIB,
        }

    limit.check(needs, "selecting features", budget)
    if check and isinstance(features, Model):
        compare(features)
    ids = _ids(features, dataset)
    columns = _columns(ids, dataset)

    def write(work: Path, ledger: Ledger) -> Receipt:
        group = Group(work / STORE, {})
        nnz = _write_features(dataset, columns, group, budget)
        copy_folders(dataset.path, group.path, _SHARED, link_or_copy, check)
        select_names(dataset.path, group.path, columns)
        kept = {name: value for name, value in dataset.attributes.items() if name not in _OWN}
        group.update_attributes(
            {
                "format": FORMAT, "version": VERSION, **kept, "n_features": len(columns), "nnz_features": nnz,
                "selection": {"of": dataset.path.name, "fingerprint": dataset.fingerprint},
                **write_selection(group.path, ids, n_converted(dataset.attributes)),
            }
        )  # fmt: skip
        seal(group.path)
        return {}

    identity = {
        COMMAND: "select-features",
        "data": dataset.attributes.get(SEAL),
        "features": hashlib.sha256(ids.data).hexdigest(),
    }
    with working("select-features", progress), checked_reading(dataset.path, check=check):
        make(out, identity, write, lambda path: check_target(path, overwrite), anew=True)
    return open_dataset(out)


def _ids(features: Any, dataset: Dataset) -> NDArray[np.int64]:
    """Ascending ids in the data as they were converted."""
    if isinstance(features, Model):
        ids = features.selected_features()
        _refuse_other_features(features, ids, dataset)
        return ids
    n = n_converted(dataset.attributes)
    if isinstance(features, str | Path):
        return np.flatnonzero(listed(Path(features), n, "feature"))
    ids = np.asarray(features)
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or not ids.size):
        raise InputError(f"features must be a row of whole numbers, or a row-sparse model. Got {features!r:.100}.")
    ids = np.sort(ids).astype(np.int64)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < n and (np.diff(ids) > 0).all()):
        raise InputError(f"features of {dataset.path} are numbers from 0 to {n - 1}, each once. Got {features!r:.100}.")
    return ids


def _refuse_other_features(model: Model, ids: NDArray[np.int64], dataset: Dataset) -> None:
    """Raise InputError where the ids that a model selects are other features in the data, as far as can be told.

    The data may have any rows: those of training are as good as those of a test set. But they must have had as many features
    when they were converted, and where both have names, each selected feature must have one name.
    """
    of_data, of_model = n_converted(dataset.attributes), n_converted(model.attributes)
    if of_data != of_model:
        raise InputError(
            f"{dataset.path} was converted with {of_data} features and the data that {model.path} learned from with "
            f"{of_model}: convert the data again with " + flags.LIKE + " and the training set"
        )
    names, of_model_names = dataset.feature_names(), model.feature_names()
    if names is None or of_model_names is None:
        return
    columns, of_model_columns = _columns(ids, dataset), _columns(ids, model)
    for start in range(0, len(ids), WINDOW):
        some = slice(start, start + WINDOW)
        pairs = zip(names.take(columns[some]), of_model_names.take(of_model_columns[some]), strict=True)
        for i, (name, other) in enumerate(pairs, start):
            if name != other:
                raise InputError(
                    f"feature {ids[i]} is {name!r:.50} in {dataset.path} and {other!r:.50} in {model.path}: convert the data "
                    "again with " + flags.LIKE + " and the training set"
                )


def _columns(ids: NDArray[np.int64], store: Dataset | Model) -> NDArray[np.int64]:
    """The columns of a dataset, or of a model, that have these ids."""
    selection = read_selection(store.path, store.attributes, store.n_features)
    if selection is None:
        return ids
    columns = np.searchsorted(selection, ids)
    missing = np.append(selection, -1)[columns] != ids
    if missing.any():
        raise InputError(
            f"{store.path} has selected features alone, without feature {ids[missing][0]}: select them from the dataset that "
            "it was made from"
        )
    return columns


def _load_kernels(dataset: Dataset) -> None:
    """Load what the run calls: it is there before the plan."""
    load_kernels(0, dataset.n_features, 0)
    ends, none = np.zeros(1, np.int64), np.empty(0, index_dtype(dataset.n_features))
    keep_selected(ends, none, np.empty(0, np.float32), ends[:0], ends)


def _write_features(dataset: Dataset, columns: NDArray[np.int64], group: Group, budget: int) -> int:
    """Write some columns of X, row by row, with the norms of what is left and the counts; returns how many entries."""
    writer = MatrixWriter(group.create_group("X/rows"), "csr_matrix", (dataset.n_samples, len(columns)))
    statistics = group.create_group("statistics")
    norms = ArrayWriter(statistics, "row_norms", np.float32)
    counts = ArrayWriter(statistics, "feature_counts", np.int64)
    totals, bar, X = np.zeros(len(columns), np.int64), current(), dataset.X_rows()
    bar.phase("writing the selected features")
    for (x,) in stream((X,), block_bytes(budget // _BLOCKS, X), 0, dataset.n_samples):
        ends, lengths = np.empty(x.n + 1, np.int64), np.empty(x.n, np.float32)
        keep_selected(x.indptr, x.indices, x.values, columns, ends)
        places, kept = x.indices[: ends[-1]], x.values[: ends[-1]]
        writer.append(np.diff(ends), places, kept)
        count_indices(places, totals)
        row_norms(ends, kept, lengths)
        norms.append(lengths)
        bar.advance((x.start + x.n) / dataset.n_samples)
    counts.append(totals)
    for array in (writer, norms, counts):
        array.close()
    return writer.nnz
