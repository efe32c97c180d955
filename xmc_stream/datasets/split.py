"""A training and a validation set of one dataset: the same cut whatever the memory, and labels keep their shares."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.arguments import native_arguments, seed_of
from xmc_stream.datasets.passes import block_bytes, listed
from xmc_stream.errors import InputError, StoreError
from xmc_stream.runtime.check import checked_reading
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.making import COMMAND, STORE, make
from xmc_stream.runtime.plan import MIB
from xmc_stream.store.dataset import SIZES, Dataset, as_dataset, open_dataset
from xmc_stream.store.inventory import SEAL
from xmc_stream.store.matrix import Block, stream
from xmc_stream.store.names import ROW_IDS, VOCABULARY, WINDOW, WRITER_BYTES, Names, NamesWriter, new_names
from xmc_stream.store.new_dataset import DatasetWriter, check_target, load_kernels, new_dataset
from xmc_stream.store.places import LOCK, copy_folders, remove, remove_left, target_paths, work_folder
from xmc_stream.system.memory import MemoryLimit, peak_resident
from xmc_stream.system.progress import current, working

_BLOCKS = 32  # one in so many bytes is for X in a block of rows
_MAX_TRANSPOSITION = 256 * MIB
_WRITERS = 8 * MIB  # buffers of the files that are being written
_OWN = ("format", "version", *SIZES, "metadata_sha256", "conversion", "appended")  # attributes not handed on


Choose = Callable[[Block], NDArray[np.bool_]]  # which rows of a block of Y, which come in order, go to the second part


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
    limit, dataset, paths = MemoryLimit.kept(memory_limit), as_dataset(data), target_paths([train, valid])
    if not 0 < fraction < 1:
        raise InputError(f"fraction must be between 0 and 1. Got {fraction}.")
    seed = seed_of(seed, "split")
    if len({path.absolute() for path in (*paths, dataset.path)}) < 3:
        raise InputError(f"{dataset.path} is split into two other datasets: give three different names")
    _load_kernels(dataset)
    budget = limit.budget()
    limit.check(lambda budget: split_needs(dataset, budget, rows is not None), "split", budget)
    of = {"of": dataset.path.name, "fingerprint": dataset.fingerprint}
    if rows is None:
        cut = _Cut(_by_labels(dataset, fraction, seed), {**of, "fraction": fraction, "seed": seed})
    else:
        chosen = listed(Path(rows), dataset.n_samples, "row")
        hashed = hashlib.sha256(chosen.data).hexdigest()
        cut = _Cut(lambda y: chosen[y.start : y.start + y.n], {**of, "rows": Path(rows).name}, hashed)
    identity = {
        COMMAND: "split", "data": dataset.attributes.get(SEAL), "valid": str(paths[1].absolute()), **cut.provenance,
        "rows": cut.rows,
    }  # fmt: skip
    with working("split", progress), checked_reading(dataset.path, check=check):
        done = make(
            paths,
            identity,
            lambda work, ledger: _write(dataset, paths, cut, budget),
            lambda path: check_target(path, overwrite),
            anew=True,
        )
    n_valid = done["n_valid"]
    return {
        "train": str(paths[0]),
        "valid": str(paths[1]),
        "n_train": dataset.n_samples - n_valid,
        "n_valid": n_valid,
        "share": n_valid / max(dataset.n_samples, 1),
        "labels_in_valid": int((open_dataset(paths[1]).label_counts() > 0).sum()),
        "labels_in_data": int((dataset.label_counts() > 0).sum()),
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": peak_resident(),
    }


@dataclass(frozen=True)
class _Cut:
    """Which rows go to the second part.

    provenance: attributes that say it. rows: a hash of the rows, where
    they were given by number.
    """

    choose: Choose
    provenance: dict[str, Any]
    rows: str | None = None


def _write(dataset: Dataset, paths: Sequence[Path], cut: _Cut, budget: int) -> Receipt:
    """Write both parts into their work folders; the receipt has the rows of the second one."""
    matrices, ids, n_valid, bar = (dataset.X_rows(), dataset.Y_rows()), dataset.row_ids(), 0, current()
    handed_on = {name: value for name, value in dataset.attributes.items() if name not in _OWN}
    bar.phase("splitting")
    with ExitStack() as opened:
        writers = []
        for path, part in zip(paths, ("train", "valid"), strict=True):
            attributes = {**handed_on, "split": {**cut.provenance, "part": part}}
            store, size = work_folder(path) / STORE, (dataset.n_features, dataset.n_labels)
            writers.append(opened.enter_context(new_dataset(store, *size, attributes, _transposition(budget))))
            copy_folders(dataset.path, writers[-1].folder, VOCABULARY)
        ids_writers = [opened.enter_context(new_names(writer.folder / ROW_IDS)) for writer in writers if ids]
        for x, y in stream(matrices, block_bytes(budget // _BLOCKS, *matrices), 0, dataset.n_samples):
            chosen = cut.choose(y)
            for i, kept in enumerate((~chosen, chosen)):
                _append(writers[i], x, y, kept)
                if ids:
                    _append_ids(ids_writers[i], ids, x.start, kept)
            n_valid += int(chosen.sum())
            bar.advance((x.start + x.n) / dataset.n_samples)
    return {"n_valid": n_valid}


def _transposition(budget: int) -> int:
    """Bytes of what puts labels by columns."""
    return max(4 * MIB, min(_MAX_TRANSPOSITION, budget // 4))


def split_needs(dataset: Dataset, budget: int, chosen: bool = False) -> dict[str, int]:
    """Bytes by component that a split takes where there is such a budget. chosen: whether rows are given by number."""
    n_labels, blocks = dataset.n_labels, block_bytes(budget // _BLOCKS, dataset.X_rows(), dataset.Y_rows())
    return {
        "blocks of rows": 4 * sum(blocks) + 8 * MIB,
        "writers": _WRITERS,
        # of each writer, and of what is chosen
        "counts": 2 * 8 * (dataset.n_features + n_labels) + (dataset.n_samples if chosen else 5 * 8 * n_labels),
        "ids of rows": 2 * WRITER_BYTES if dataset.row_ids() else 0,
        "labels by columns": _transposition(budget) + 4 * 8 * n_labels,
    }


def split_once(
    dataset: Dataset, folder: Path, fraction: float, seed: int, memory_limit: str | int | None, check: bool
) -> tuple[Dataset, Dataset]:
    """Split a dataset, unless its two parts lie in a folder already; returns them, the smaller one last.

    Where it is split, a `model` in the folder is removed: it is of other parts.
    """
    wanted = {"fingerprint": dataset.fingerprint, "fraction": fraction, "seed": seed}.items()
    parts = folder / "train.xmc", folder / "held.xmc"
    with suppress(StoreError):
        train, held = map(open_dataset, parts)
        if all(wanted <= part.attributes.get("split", {}).items() for part in (train, held)):
            return train, held
    for part in parts:  # a kill may have come between their names
        remove(part)
        remove_left(work_folder(part) / LOCK)
    remove(folder / "model")
    remove(folder / "model.partial")
    folder.mkdir(parents=True, exist_ok=True)
    split(dataset, *parts, fraction=fraction, seed=seed, check=check, memory_limit=memory_limit)
    return open_dataset(parts[0]), open_dataset(parts[1])


def _load_kernels(dataset: Dataset) -> None:
    """What the run calls is loaded before it is planned."""
    from xmc_stream.datasets.kernels.split import choose_rows
    from xmc_stream.store.encoding import index_dtype

    load_kernels(dataset.n_samples, dataset.n_features, dataset.n_labels)
    ends, labels = np.zeros(1, np.int64), np.empty(0, index_dtype(dataset.n_labels))
    choose_rows(ends, labels, ends[:0], ends[:0], ends, ends, 0.1, 0, np.empty(0, np.bool_))


def _by_labels(dataset: Dataset, fraction: float, seed: int) -> Choose:
    """A share of the rows of every label."""
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
