"""A dataset on disk: features and labels of N samples, converted once, read by every command."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, StoreError
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.encoding import Encoding, MatrixWriter, new_store
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import Block, SparseMatrix
from xmc_stream.store.names import NamedStore, Names, open_row_ids
from xmc_stream.store.nodes import Group, from_here, understood, whole_of
from xmc_stream.store.places import claimed, naming, publish
from xmc_stream.store.remote import as_path, is_mirrored
from xmc_stream.store.transpose import transpose

FORMAT = "xmc_stream dataset"
VERSION = 1
SIZES = ("n_samples", "n_features", "n_labels", "nnz_features", "nnz_labels")  # attributes
_COUNTS = 2**16  # counts that are looked through at a time
_ENCODINGS: dict[str, Encoding] = {"rows": "csr_matrix", "columns": "csc_matrix"}


class Dataset(NamedStore):
    """An opened dataset: X (N x D, float32) and Y (N x K, zeros and ones), sparse, on disk.

    Opening reads the attributes only. A matrix is opened when a method returns it, and its files are read when rows or
    columns of it are. `convert` makes a dataset. `open_dataset` opens one and looks at the sizes of its files too.

    Parameters
    ----------
    path : str or Path
        The folder of the dataset, or its URL, as s3://bucket/train.xmc.

    Attributes
    ----------
    path : Path
        The folder of the dataset; of one behind a URL, the folder of what is fetched.
    n_samples, n_features, n_labels : int
        N, D and K.
    attributes : dict
        What the conversion says of the dataset, as `xmc-stream info` shows it. `nnz_features` and `nnz_labels` are the
        stored values of X and Y.

    Raises
    ------
    StoreError
        There is no dataset, it is damaged, or a newer xmc_stream wrote it.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> data = xs.convert(X, "dataset.xmc", labels=X)
    >>> data
    Dataset('dataset.xmc': 30 x 3, 3 labels)
    >>> data.X_rows().shape
    (30, 3)
    >>> data.label_counts().tolist(), data.feature_counts().tolist()
    ([10, 10, 10], [10, 10, 10])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        missing = f"is not a dataset: make one with `xmc-stream convert INPUT {path}`"
        self._open(path, FORMAT, VERSION, missing, "not a dataset of xmc_stream: convert its matrices first")
        self.path = self.path.absolute()  # a worker has a folder of its own
        sizes = [whole_of(self.path, self.attributes, name) for name in SIZES]
        self.n_samples, self.n_features, self.n_labels = sizes[:3]
        with understood(self.path / "zarr.json"):  # what is shown of rows that were left out
            for _file, _line, _reason in self.attributes.get("skipped_rows", ()):
                pass

    def __repr__(self) -> str:
        return f"Dataset({from_here(self.path)!r}: {self.n_samples} x {self.n_features}, {self.n_labels} labels)"

    @property
    def fingerprint(self) -> str:
        """A SHA-256 hash of X and Y, however their files are cut: what "the same data" means."""
        both = [matrix.fingerprint for matrix in (self.X_rows(), self.Y_rows())]
        return hashlib.sha256("".join(both).encode()).hexdigest()

    def X_rows(self) -> SparseMatrix:
        """X by rows.

        Returns
        -------
        SparseMatrix (N x D, CSR of float32)

        Raises
        ------
        StoreError
            The matrix is missing or damaged.
        """
        return self._X("rows")

    def _X(self, by: str) -> SparseMatrix:
        matrix = SparseMatrix(self.path / "X" / by, finite=True)
        return matrix.expect((self.n_samples, self.n_features), _ENCODINGS[by], np.float32)

    def _labels(self, folder: Path, by: str) -> SparseMatrix:
        return SparseMatrix(folder / by).expect((self.n_samples, self.n_labels), _ENCODINGS[by], None)

    def Y_rows(self) -> SparseMatrix:
        """Y by rows: the labels of each sample.

        Returns
        -------
        SparseMatrix (N x K, CSR of ones)

        Raises
        ------
        StoreError
            The matrix is missing or damaged.
        """
        return self._labels(self.path / "Y", "rows")

    def Y_columns(self) -> SparseMatrix:
        """Y by columns: the positives of each label.

        Returns
        -------
        SparseMatrix (N x K, CSC of ones)

        Raises
        ------
        StoreError
            The matrix is missing or damaged.
        """
        return self._labels(self.path / "Y", "columns")

    def observed_rows(self) -> SparseMatrix:
        """The pairs whose labels are known, by rows.

        Returns
        -------
        SparseMatrix (N x K, CSR of ones)

        Raises
        ------
        InputError
            The dataset has no mask of known pairs.
        StoreError
            The mask is damaged.
        """
        return self._labels(self._observed(), "rows")

    def observed_columns(self) -> SparseMatrix:
        """The pairs whose labels are known, by columns.

        Returns
        -------
        SparseMatrix (N x K, CSC of ones)

        Raises
        ------
        InputError
            The dataset has no mask of known pairs.
        StoreError
            The mask is damaged.
        """
        return self._labels(self._observed(), "columns")

    def with_observed(self, mask: Any, overwrite: bool = False) -> Dataset:
        """Store which labels of which rows are known, beside Y. The others are unknown.

        `LEML(observed="given")` learns from the known pairs alone. A positive of Y outside the mask is not learned
        from.

        Parameters
        ----------
        mask : scipy sparse matrix (N x K)
            Each stored entry is a known pair, whatever its value.
        overwrite : bool, default False
            Replace a mask that is there.

        Returns
        -------
        Dataset
            This dataset.

        Raises
        ------
        InputError
            The mask has another type or shape, or there is a mask already.
        StoreError
            The mask cannot be written.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
        >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
        >>> known = sp.csr_matrix(np.ones((30, 3)))
        >>> data = xs.convert(X, "masked.xmc", labels=X).with_observed(known)
        >>> data.observed_rows().nnz
        90
        """
        shape = self.n_samples, self.n_labels
        if not hasattr(mask, "tocsr") or mask.shape != shape:
            got = f"a matrix of shape {mask.shape}" if hasattr(mask, "tocsr") else type(mask).__name__
            raise InputError(f"the mask of {self.path} must be a scipy sparse matrix of shape {shape}. Got {got}.")
        rows = mask.tocsr(copy=True)
        rows.sum_duplicates()
        self.refuse_second_mask(overwrite)
        write_observed(self, [Block(0, rows.indptr.astype(np.int64), rows.indices, None)])
        return self

    def refuse_second_mask(self, overwrite: bool) -> None:
        """Do nothing where a mask of known pairs may be stored.

        Parameters
        ----------
        overwrite : bool
            Whether a mask that is there may be replaced.

        Raises
        ------
        InputError
            There is a mask, and it must not be replaced.
        """
        if (self.path / "observed").exists() and not overwrite:
            raise InputError(f"{self.path} has a mask of observed entries already: overwrite it, or copy the dataset")

    def _observed(self) -> Path:
        path = self.path / "observed"
        if not path.exists():
            raise InputError(
                f"{self.path} has no mask of observed entries: make one with `convert --observed FILE` or "
                "Dataset.with_observed, or train with observed=full"
            )
        return path

    @native_arguments
    def X_columns(self, max_bytes: int = 2**28) -> SparseMatrix:
        """X by columns. It is made and stored when first asked for.

        Parameters
        ----------
        max_bytes : int, default 2**28
            Bytes of the buffers that making it takes.

        Returns
        -------
        SparseMatrix (N x D, CSC of float32)

        Raises
        ------
        StoreError
            X is damaged, or the matrix cannot be written.
        """
        path = self.path / "X" / "columns"
        if not path.exists():
            if is_mirrored(path):
                raise StoreError(
                    f"{self.path} has no X by columns, and none can be made there: convert with "
                    + flags.COLUMNS
                    + ", and copy it again"
                )
            with claimed(path) as work, naming(path):
                if not path.exists():  # nor has another process made it since
                    transpose(self.X_rows(), self.feature_counts(), Group(work / "columns", {}), max_bytes)
                    seal(work / "columns")
                    publish(work / "columns", path)
        return self._X("columns")

    def feature_counts(self) -> NDArray[np.int64]:
        """Stored values of each feature.

        Returns
        -------
        int64 array (D,)

        Raises
        ------
        StoreError
            The counts are missing, or cannot be right.
        """
        counts = read_small(self.path / "statistics", "feature_counts", self.n_features, np.int64)
        if len(counts) and not 0 <= counts.min() <= counts.max() <= self.n_samples:
            raise self._miscounted("feature_counts")
        return counts

    @native_arguments
    def row_norms(self, start: int, stop: int) -> NDArray[np.float32]:
        """l2 norms of some rows of X.

        Parameters
        ----------
        start, stop : int
            The rows, from `start` up to, but without, `stop`.

        Returns
        -------
        float32 array (stop - start,)

        Raises
        ------
        StoreError
            The norms are missing or damaged.
        """
        norms = open_array(self.path / "statistics/row_norms").read(start, stop)
        return norms.astype(np.float32, copy=False)

    @native_arguments
    def label_counts(self, first: int = 0, last: int | None = None) -> NDArray[np.int64]:
        """Positives of each label, or of some labels.

        Parameters
        ----------
        first : int, default 0
            The first label.
        last : int or None, default None
            The label behind the last one. None: K.

        Returns
        -------
        int64 array (last - first,)

        Raises
        ------
        StoreError
            The counts are missing, or are not those of Y.
        """
        last = self.n_labels if last is None else last
        counts = read_small(self.path / "statistics", "label_counts", self.n_labels, np.int64, slice(first, last))
        for low, of_columns in self._positives(first, last):
            if (counts[low - first : low - first + len(of_columns)] != of_columns).any():
                raise self._miscounted("label_counts")
        return counts

    def _positives(
        self, first: int = 0, last: int | None = None, step: int = _COUNTS
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Windows of the positives of each label, as Y by columns has them: the first label, and how many each has."""
        Y, last = self.Y_columns(), self.n_labels if last is None else last
        for low in range(first, last, step):
            yield low, np.diff(Y.ends(low, min(low + step, last)))

    def _miscounted(self, name: str) -> StoreError:
        return StoreError(
            f"{self.path / 'statistics' / name} has counts that cannot be: the store is damaged; make it again"
        )

    @cached_property
    def one_label(self) -> bool:
        """Whether every row has one label. It is looked up once: that reads a number a row."""
        Y = self.Y_rows()
        parts = range(0, Y.n_lines, _COUNTS)
        return Y.nnz == Y.n_lines and all((np.diff(Y.ends(n, min(n + _COUNTS, Y.n_lines))) == 1).all() for n in parts)

    def most_positives(self) -> int:
        """Positives of the label that has most. It takes little memory, however many labels there are.

        Returns
        -------
        int
            0 where there are no labels.
        """
        return max((int(counts.max()) for _, counts in self._positives()), default=0)

    @native_arguments
    def positives_of_ranges(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels with positives, and positives, of each n consecutive labels. The last range may be shorter.

        Parameters
        ----------
        n : int
            Labels of a run, from 1 on.

        Returns
        -------
        learned : int64 array (ceil(K / n),)
            How many labels of each range have positives.
        positives : int64 array (ceil(K / n),)
            How many positives they have together.
        """
        learned, positives = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for _, some in self._positives(step=max(1, _COUNTS // n) * n):
            starts = np.arange(0, len(some), n)
            learned.append(np.add.reduceat(some > 0, starts, dtype=np.int64))
            positives.append(np.add.reduceat(some, starts))
        return np.concatenate(learned), np.concatenate(positives)

    def row_ids(self) -> Names | None:
        """The rows' own ids, as the input had them.

        Returns
        -------
        Names or None
            `names.read(start, stop)` gives those of a range of rows; None where the rows have no ids.

        Raises
        ------
        StoreError
            The ids are damaged, or not as many as there are rows.
        """
        return open_row_ids(self.path, self.n_samples)


def open_dataset(path: str | Path) -> Dataset:
    """Open a converted dataset, and look at the sizes of its files.

    Files of X by columns are not looked at: it may not be there.

    Parameters
    ----------
    path : str or Path
        The folder of the dataset, or its URL, as s3://bucket/train.xmc.

    Returns
    -------
    Dataset

    Raises
    ------
    StoreError
        There is no dataset, a newer xmc_stream wrote it, or a file is missing or not of its full size.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))  # row i has label i // 10
    >>> _ = xs.convert(X, "opened.xmc", labels=X)
    >>> xs.open_dataset("opened.xmc").n_samples
    30
    """
    dataset = Dataset(path)
    for matrix in (dataset.X_rows(), dataset.Y_rows(), dataset.Y_columns()):
        matrix.check_sizes()
    return dataset


def as_dataset(data: Dataset | str | Path) -> Dataset:
    """The dataset, opened where it is given by its path. Raises StoreError where there is none."""
    return data if isinstance(data, Dataset) else open_dataset(data)


def write_observed(dataset: Dataset, rows: Iterable[Block], max_bytes: int = 2**26, work: Path | None = None) -> None:
    """Store the pairs whose labels are known beside Y, by rows and by columns; a mask that is there is replaced.

    rows: blocks of all rows, labels sorted and unique in each. max_bytes: of the transposition's buffers. work: as of
    `new_folder`.
    """
    from xmc_stream.kernels.csr import count_indices

    path, counts = dataset.path / "observed", np.zeros(dataset.n_labels, np.int64)
    with ExitStack() as held:
        folder = held.enter_context(claimed(path)) / "observed" if work is None else work
        group = held.enter_context(new_store(path, {}, folder))
        shape = dataset.n_samples, dataset.n_labels
        writer = MatrixWriter(group.create_group("rows"), "csr_matrix", shape, data_dtype=None)
        for block in rows:
            writer.append(np.diff(block.indptr), block.indices)
            count_indices(block.indices, counts)
        writer.close()
        transpose(SparseMatrix(group.path / "rows"), counts, group.create_group("columns"), max_bytes)
        seal(group.path)


__all__ = ["Dataset", "open_dataset"]
