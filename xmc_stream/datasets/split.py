"""A training and a validation set of one dataset: the same cut whatever the memory, and labels keep their shares."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import native_arguments, seed_of
from xmc_stream.datasets.listed import listed
from xmc_stream.errors import InputError, StoreError
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import COMMAND, STORE, make
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import remove
from xmc_stream.store.inventory import SEAL
from xmc_stream.store.matrix import Block, stream
from xmc_stream.store.names import ROW_IDS, WINDOW, WRITER_BYTES, Names, NamesWriter, copy_vocabulary, new_names
from xmc_stream.store.new_dataset import DatasetWriter, check_target, new_dataset
from xmc_stream.store.places import LOCK, remove_left, target_paths, work_folder
from xmc_stream.system.memory import MemoryLimit, peak_resident
from xmc_stream.system.progress import working

_BLOCK = 16 * MIB  # of X in a block of rows, where the limit allows
_MAX_TRANSPOSITION = 256 * MIB
_WRITERS = 8 * MIB  # buffers of the files that are being written
# attributes not handed on
_OWN = ("format", "version", "n_samples", "nnz_features", "nnz_labels", "metadata_sha256", "conversion", "appended")

Choose = Callable[[Block], NDArray[np.bool_]]


@native_arguments
def split(
    data: str | Path | Dataset,
    train: str | Path,
    valid: str | Path,
    *,
    fraction: float = 0.1,
    seed: int = 0,
    rows: str | Path | None = None,
    check: bool = True,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Split a dataset into one for training and one for validation, in one pass over it.

    Each row belongs to its rarest label. Of the rows of each label, and of those without labels, `fraction` goes to
    `valid`. They are evenly spaced, from a place that `seed` and the label give. No label loses its last positive in
    `train`: where many labels are rare, less than `fraction` is reached. Rows keep their order. Attributes, names and
    vectorizer of the dataset go to both, and the rows' own ids with their rows.

    Parameters
    ----------
    data : Dataset, str or Path
        The dataset to split, or its path.
    train : str or Path
        The folder of the new training set.
    valid : str or Path
        The folder of the new validation set.
    fraction : float in (0, 1), default 0.1
        The share of the rows that goes to `valid`.
    seed : int in [0, 2**63), default 0
        Another seed gives another split.
    rows : str, Path or None, default None
        A file with the numbers of the rows that go to `valid`, from zero, one a line. It takes the place of `fraction`
        and `seed`.
    check : bool, default True
        Compare the dataset with its checksums as it is read. False saves a little time, and damage may go unseen into
        both parts.
    memory_limit : str, int, float or None, default None
        Peak resident memory of the process, as "512MB" or in bytes. None: what it holds, and three quarters of what is
        free.
    overwrite : bool, default False
        Replace datasets at `train` and `valid`.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        train and valid (paths), n_train, n_valid, share (of the rows in `valid`), labels_in_valid, labels_in_data
        (labels with positives), seconds and peak_rss (bytes).

    Raises
    ------
    InputError
        An argument is out of range, two names are the same, something stands at one of them, or the file of rows is not
        understood.
    StoreError
        The dataset cannot be opened or is damaged, or the parts cannot be written.
    MemoryLimitError
        The memory limit cannot work.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "whole.xmc", labels=X)
    >>> report = xs.split(data, "part-train.xmc", "part-valid.xmc", fraction=0.2)
    >>> report["n_train"], report["n_valid"]
    (24, 6)
    """
    began = time.perf_counter()
    limit = MemoryLimit.kept(memory_limit)
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    train, valid = target_paths([train, valid])
    if not 0 < fraction < 1:
        raise InputError(f"fraction must be between 0 and 1. Got {fraction}.")
    seed = seed_of(seed, "split")
    places = {path.absolute() for path in (train, valid, dataset.path)}
    if len(places) < 3:
        raise InputError(f"{dataset.path} is split into two other datasets: give three different names")
    _load_kernels(dataset)
    budget = limit.budget()
    limit.check(lambda budget: split_needs(dataset, budget, rows is not None), "split", budget)
    sizes = _sizes(dataset, budget)
    provenance: dict[str, Any] = {"of": dataset.path.name, "fingerprint": dataset.fingerprint}
    if rows is None:
        provenance |= {"fraction": fraction, "seed": seed}
        choose = _by_labels(dataset, fraction, seed)
    else:
        provenance |= {"rows": Path(rows).name}
        chosen_rows = listed(Path(rows), dataset.n_samples, "row")

        def choose(y: Block) -> NDArray[np.bool_]:
            return chosen_rows[y.start : y.start + y.n]

    handed_on = {name: value for name, value in dataset.attributes.items() if name not in _OWN}
    shape, ids = (handed_on.pop("n_features"), handed_on.pop("n_labels")), dataset.row_ids()

    def write(work: Path, ledger: Ledger) -> Receipt:
        n_valid = 0
        with ExitStack() as opened:
            writers = []
            for path, part in ((train, "train"), (valid, "valid")):
                attributes = {**handed_on, "split": {**provenance, "part": part}}
                of_part = new_dataset(work_folder(path) / STORE, *shape, attributes, sizes.transposition)
                writers.append(opened.enter_context(of_part))
            bar.phase("splitting")
            ids_of = []
            for writer in writers:
                copy_vocabulary(dataset.path, writer.folder)
                if ids:
                    ids_of.append((ids, opened.enter_context(new_names(writer.folder / ROW_IDS))))
            matrices = dataset.X_rows(), dataset.Y_rows()
            for x, y in stream(matrices, (sizes.x, sizes.y), 0, dataset.n_samples):
                chosen = choose(y)
                for writer, kept in zip(writers, (~chosen, chosen), strict=True):
                    _append(writer, x, y, kept)
                for (names, ids_writer), kept in zip(ids_of, (~chosen, chosen), strict=False):
                    _append_ids(ids_writer, names, x.start, kept)
                n_valid += int(chosen.sum())
                bar.advance((x.start + x.n) / dataset.n_samples)
        return {"n_valid": n_valid}

    identity = {
        COMMAND: "split", "data": dataset.attributes.get(SEAL), "valid": str(valid.absolute()), **provenance,
        "rows": None if rows is None else hashlib.sha256(chosen_rows.data).hexdigest(),
    }  # fmt: skip
    with working("split", progress) as bar, checked_reading(dataset.path, check=check):
        done = make([train, valid], identity, write, lambda path: check_target(path, overwrite), anew=True)
    n_valid = done["n_valid"]
    return {
        "train": str(train),
        "valid": str(valid),
        "n_train": dataset.n_samples - n_valid,
        "n_valid": n_valid,
        "share": n_valid / max(dataset.n_samples, 1),
        "labels_in_valid": int((open_dataset(valid).label_counts() > 0).sum()),
        "labels_in_data": int((dataset.label_counts() > 0).sum()),
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": peak_resident(),
    }


class _Sizes(NamedTuple):
    """Bytes: of X and of Y in a block of rows, and of what puts labels by columns."""

    x: int
    y: int
    transposition: int


def _sizes(dataset: Dataset, budget: int) -> _Sizes:
    most = max(MIB, min(_BLOCK, budget // 32))
    x, y = dataset.X_rows().block_bytes(most), dataset.Y_rows().block_bytes(most // 4)
    return _Sizes(x, y, max(4 * MIB, min(_MAX_TRANSPOSITION, budget // 4)))


def split_needs(dataset: Dataset, budget: int, chosen: bool = False) -> dict[str, int]:
    """Bytes by component that a split takes where there is such a budget. chosen: whether rows are given by number."""
    sizes, n_labels = _sizes(dataset, budget), dataset.n_labels
    return {
        "blocks of rows": 4 * (sizes.x + sizes.y) + 8 * MIB,
        "writers": _WRITERS,
        # of each writer, and of what is chosen
        "counts": 2 * 8 * (dataset.n_features + n_labels) + (dataset.n_samples if chosen else 5 * 8 * n_labels),
        "ids of rows": 2 * WRITER_BYTES if dataset.row_ids() else 0,
        "labels by columns": sizes.transposition + 4 * 8 * n_labels,
    }


def split_once(
    dataset: Dataset,
    train: Path,
    valid: Path,
    fraction: float,
    seed: int,
    memory_limit: str | float | None,
    check: bool,
) -> bool:
    """Split a dataset, unless the two parts lie there already; returns whether it was done."""
    if all(_is_part(part, dataset, fraction, seed) for part in (train, valid)):
        return False
    for part in (train, valid):  # a kill may have come between their names
        remove(part)
        remove_left(work_folder(part) / LOCK)
    train.parent.mkdir(parents=True, exist_ok=True)
    split(dataset, train, valid, fraction=fraction, seed=seed, check=check, memory_limit=memory_limit)
    return True


def _is_part(part: Path, dataset: Dataset, fraction: float, seed: int) -> bool:
    try:
        made = open_dataset(part).attributes.get("split", {})
    except StoreError:
        return False
    wanted = {"fingerprint": dataset.fingerprint, "fraction": fraction, "seed": seed}
    return {name: made.get(name) for name in wanted} == wanted


def _load_kernels(dataset: Dataset) -> None:
    """What the run calls is loaded before it is planned."""
    from xmc_stream.datasets.kernels.split import choose_rows
    from xmc_stream.kernels.csr import count_indices, row_norms
    from xmc_stream.store import transpose
    from xmc_stream.store.encoding import index_dtype

    ends, none = np.zeros(1, np.int64), np.empty(0, np.float32)
    labels = np.empty(0, index_dtype(dataset.n_labels))
    for indices in (labels, np.empty(0, index_dtype(dataset.n_features))):
        count_indices(indices, ends)
    row_norms(ends, none, none)
    transpose.load_kernels(dataset.n_samples, index_dtype(dataset.n_labels))
    choose_rows(ends, labels, ends[:0], ends[:0], ends, ends, 0.1, 0, np.empty(0, np.bool_))


def _by_labels(dataset: Dataset, fraction: float, seed: int) -> Choose:
    """Chooses a share of the rows of every label."""
    from xmc_stream.datasets.kernels.split import choose_rows

    counts = dataset.label_counts()
    left = counts.copy()
    seen, taken = (np.zeros(len(counts) + 1, np.int64) for _ in range(2))

    def choose(y: Block) -> NDArray[np.bool_]:
        chosen = np.empty(y.n, np.bool_)
        choose_rows(y.indptr, y.indices, counts, left, seen, taken, fraction, seed, chosen)
        return chosen

    return choose


def _append(writer: DatasetWriter, x: Block, y: Block, kept: NDArray[np.bool_]) -> None:
    """Append the rows that are marked."""
    parts: list[NDArray[Any]] = []
    for block in (x, y):
        lengths = np.diff(block.indptr)
        entries = np.repeat(kept, lengths)
        parts += [np.concatenate([[0], np.cumsum(lengths[kept])]), block.indices[entries]]
        if block.data is not None:
            parts.append(block.data[entries])
    writer.append(*parts)


def _append_ids(writer: NamesWriter, ids: Names, start: int, kept: NDArray[np.bool_]) -> None:
    """Append the ids of the rows from `start` on that are marked."""
    for first in range(0, len(kept), WINDOW):
        marked = kept[first : first + WINDOW]
        names = ids.read_bytes(start + first, start + first + len(marked))
        writer.append([name for name, keep in zip(names, marked.tolist(), strict=True) if keep])


__all__ = ["split", "split_once"]
