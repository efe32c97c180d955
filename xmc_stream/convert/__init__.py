"""Conversion of what people have (text files, scipy matrices) into a dataset on disk, in bounded memory.

One file a format, and two for text and its compression. A format gives blocks of rows; what happens to them is here:
the memory plan, normalisation, the writer, the figures. Reading the formats is not here, nor is anything that depends
on how a dataset lies on disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xmc_stream.convert.plan import plan_memory
from xmc_stream.errors import InputError, StoreError, XmcStreamError
from xmc_stream.memory import MemoryLimit, peak_resident, return_freed_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from xmc_stream.store.dataset import Dataset, DatasetWriter

    # X and Y of some rows: x_indptr, x_indices, x_data, y_indptr, y_indices; indptr from 0, indices sorted and unique
    Rows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32], NDArray[np.int64], NDArray[Any]]

_NORMALIZE = ("none", "l2")


@dataclass(frozen=True)
class Like:
    """What a test set takes over from its training set. name: as the user wrote it, for messages."""

    name: str
    n_features: int
    n_labels: int
    normalize: str


class Source(Protocol):
    """An opened input. x_entries, y_entries: at most, None if unknown; held: bytes it keeps till the end, by name."""

    n_samples: int
    n_features: int
    n_labels: int
    x_entries: int | None
    y_entries: int | None
    attributes: dict[str, str]
    held: dict[str, int]

    @property
    def bytes_in(self) -> int:
        """Bytes of the input; of a pipe, what was read of it so far."""

    def load_kernels(self) -> None:
        """Compile or load what `blocks` calls, so that the memory of it is there before the plan."""

    def fit(self, room: int) -> int:
        """Choose the size of a block's buffers for `room` bytes; returns what they take, more if it must."""

    def blocks(self) -> Iterator[Rows]:
        """All rows, block by block; a block is gone when the next one comes, and may be written to."""

    def position(self) -> int:
        """How many of bytes_in are behind the last block."""

    def close(self) -> None:
        """Close what is open."""


def convert(
    source: Any,
    target: str | Path,
    *,
    like: str | Path | Dataset | None = None,
    normalize: str | None = None,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    labels: Any = None,
    progress: bool = False,
) -> Dataset:
    """Convert XMLRepo text, scipy .npz files or scipy matrices into a dataset at `target`, and open it.

    source: path of a text (plain, gzip, bzip2, xz or zstd) with the header "N D K", or of the features alone with the
    header "N D", ids from 0; path of a .npz of scipy.sparse.save_npz with X (N x D); or a scipy sparse matrix X.
    labels: for all but the first, Y (N x K) of the same kind; for NAME_X_Xf.txt by default NAME_X_Y.txt beside it. A
    value other than zero is a positive, zeros are dropped (in X they are kept). like: a training set that fixes D and
    K, and normalize where that is None. normalize: "l2" divides each row by its norm. memory_limit: "512MB" or bytes;
    by default three quarters of what is free. progress: a bar on a terminal's stderr, if it takes over two seconds.
    Raises InputError naming file and line, MemoryLimitError, or StoreError where `target` cannot be written; then
    nothing is left that opens.
    """
    return convert_report(
        source,
        target,
        like=like,
        normalize=normalize,
        memory_limit=memory_limit,
        overwrite=overwrite,
        labels=labels,
        progress=progress,
    )[0]


def convert_report(
    source: Any,
    target: str | Path,
    *,
    like: str | Path | Dataset | None = None,
    normalize: str | None = None,
    memory_limit: str | float | None = None,
    overwrite: bool = False,
    labels: Any = None,
    progress: bool = False,
) -> tuple[Dataset, dict[str, Any]]:
    """As `convert`, with the figures of the run: sizes, bytes_in, bytes_on_disk, seconds, peak_rss (bytes)."""
    from xmc_stream.store.dataset import new_dataset, open_dataset
    from xmc_stream.store.encoding import folder_bytes

    begin = time.perf_counter()
    return_freed_memory()
    limit = MemoryLimit.of(memory_limit)
    if normalize not in (None, *_NORMALIZE):
        raise InputError(f"normalize must be one of {', '.join(_NORMALIZE)}, got {normalize!r}")
    target = Path(target)
    train = None if like is None else taken_over(like)
    opened = open_source(source, labels, train)
    try:
        scaling = (train.normalize if train else "none") if normalize is None else normalize
        attributes = {**opened.attributes, "normalize": scaling}
        if train:
            attributes["like"] = Path(train.name).name
        load_kernels(opened)
        plan = plan_memory(opened, limit.budget(), opened.x_entries, opened.y_entries)
        limit.check(plan.needs, "convert", plan.budget)
        try:
            with new_dataset(
                target, opened.n_features, opened.n_labels, attributes, max_bytes=plan.max_bytes, overwrite=overwrite
            ) as writer:
                _write(opened, writer, scaling, progress)
        except OSError as error:
            if isinstance(error, XmcStreamError):
                raise
            raise StoreError(
                f"{target} cannot be written ({error.strerror or error}): make room there or name another place"
            ) from None
        bytes_in = opened.bytes_in
    finally:
        opened.close()
    dataset = open_dataset(target)
    return dataset, {
        "dataset": str(target),
        "n_samples": dataset.n_samples,
        "n_features": dataset.n_features,
        "n_labels": dataset.n_labels,
        "nnz_features": int(dataset.attributes["nnz_features"]),
        "nnz_labels": int(dataset.attributes["nnz_labels"]),
        "bytes_in": bytes_in,
        "bytes_on_disk": folder_bytes(target),
        "seconds": time.perf_counter() - begin,
        "peak_rss": peak_resident(),
    }


def taken_over(like: str | Path | Dataset) -> Like:
    """The sizes and the normalisation of a training set, given by path or opened."""
    from xmc_stream.store.dataset import Dataset, open_dataset

    train = like if isinstance(like, Dataset) else open_dataset(like)
    normalize = train.attributes.get("normalize", "none")
    if normalize not in _NORMALIZE:
        raise InputError(f"{train.path} is normalised by {normalize!r}, unknown here: set normalize yourself")
    return Like(str(train.path), train.n_features, train.n_labels, normalize)


def open_source(source: Any, labels: Any, like: Like | None) -> Source:
    """The source by what it is: a path to a zip file holds a scipy matrix, any other path is text."""
    from xmc_stream.convert.scipy_matrices import ScipyMatrices, is_npz

    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if is_npz(path):
            if not isinstance(labels, str | os.PathLike):
                raise InputError(f"{path} is a .npz of features: name the .npz of its labels too (labels=, --labels)")
            return ScipyMatrices.of_files(path, Path(labels), like)
        if not isinstance(labels, str | os.PathLike | None):
            raise InputError(f"{path} is a text: give its labels as the path of a text, not {type(labels).__name__}")
        from xmc_stream.convert.xmlrepo import XMLRepoText

        return XMLRepoText(path, None if labels is None else Path(labels), like)
    if labels is None:
        raise InputError("features were given as a matrix and labels were not: give Y as labels=")
    return ScipyMatrices.of_matrices(source, labels, like)


def load_kernels(source: Source) -> None:
    """Load all compiled code of the run: some 70 MB that must be there before the plan counts what is left."""
    import numpy as np

    from xmc_stream.kernels.csr import count_indices, row_norms, scale_rows_l2
    from xmc_stream.store import transpose
    from xmc_stream.store.encoding import index_dtype

    ends, none = np.zeros(1, np.int64), np.empty(0, np.float32)
    x_indices = np.empty(0, index_dtype(source.n_features))
    y_indices = np.empty(0, index_dtype(source.n_labels))
    count_indices(x_indices, ends)
    count_indices(y_indices, ends)
    row_norms(ends, none, none)
    scale_rows_l2(ends, none)
    transpose.load_kernels(source.n_samples, y_indices.dtype)
    source.load_kernels()


def _write(source: Source, writer: DatasetWriter, scaling: str, progress: bool) -> None:
    """Pass all blocks to the writer; on return the buffers of the blocks are free."""
    from tqdm import tqdm

    from xmc_stream.kernels.csr import scale_rows_l2

    bar = tqdm(
        total=source.bytes_in or None,
        desc="convert",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        delay=2,
        disable=None if progress else True,
    )
    with bar:
        for x_indptr, x_indices, x_data, y_indptr, y_indices in source.blocks():
            if scaling == "l2":
                scale_rows_l2(x_indptr, x_data)
            writer.append(x_indptr, x_indices, x_data, y_indptr, y_indices)
            bar.update(source.position() - bar.n)


__all__ = ["Like", "Rows", "Source", "convert", "convert_report"]
