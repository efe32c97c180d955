"""scipy.sparse matrices, in memory or in `.npz` files of scipy.sparse.save_npz.

A matrix is held in memory whole, as it is or as the file gives it, and is passed on in blocks of rows. What is not CSR
is made CSR first. A matrix that scipy would read wrongly or crash on (indices out of range) is refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.memory import format_size

if TYPE_CHECKING:
    from xmc_stream.convert import Like, Rows

_BLOCK = 2**18  # entries passed on at a time, and rows
_ENTRY_BYTES = 48  # of a block: index, value, and what checking them makes, in X and in Y
_ZIP_MAGIC = b"PK\x03\x04"
_FORMATS = ("csr", "csc", "coo", "bsr", "dia")  # that save_npz writes


def is_npz(path: Path) -> bool:
    """True for a zip file, whatever its name. Raises InputError where there is no file to read."""
    try:
        if not path.is_file():  # a pipe must not lose its first bytes
            return False
        with open(path, "rb") as file:
            return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the name") from None


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is, or can be, loaded as CSR.

    entries: at most; bytes_in: as it is given; load_bytes: what loading it adds to the process, at its peak.
    """

    name: str
    shape: tuple[int, int]
    entries: int
    bytes_in: int
    load_bytes: int
    load: Callable[[], Any]


class ScipyMatrices:
    """X (N x D) and Y (N x K). like: where D and K come from, whatever the shapes say.

    Raises InputError where the two are not sparse matrices with as many rows.
    """

    def __init__(self, x: _Matrix, y: _Matrix, attributes: dict[str, str], like: Like | None) -> None:
        if x.shape[0] != y.shape[0]:
            raise InputError(
                f"{x.name} has {x.shape[0]} rows and {y.name} has {y.shape[0]}: features and labels must have as many"
            )
        self._x, self._y, self._like = x, y, like
        self.attributes = attributes
        self.n_samples = x.shape[0]
        self.n_features = like.n_features if like else x.shape[1]
        self.n_labels = like.n_labels if like else y.shape[1]
        self.x_entries: int | None = x.entries
        self.y_entries: int | None = y.entries
        self.bytes_in = x.bytes_in + y.bytes_in
        self.held = {name: size for name, size in ((x.name, x.load_bytes), (y.name, y.load_bytes)) if size}
        self._rows_done = 0
        self._block = self._longest = _BLOCK

    @classmethod
    def of_matrices(cls, X: Any, Y: Any, like: Like | None) -> ScipyMatrices:
        """Matrices in memory."""
        attributes = {"source": "scipy matrices", "source_format": "scipy matrices"}
        return cls(_in_memory(X, "X"), _in_memory(Y, "Y"), attributes, like)

    @classmethod
    def of_files(cls, x: Path, y: Path, like: Like | None) -> ScipyMatrices:
        """Files of scipy.sparse.save_npz; their sizes are known, and they are loaded when the rows are asked for."""
        attributes = {"source": x.name, "source_labels": y.name, "source_format": "scipy npz"}
        return cls(_in_file(x), _in_file(y), attributes, like)

    def load_kernels(self) -> None:
        """Compile or load what sorts the rows, and import scipy."""
        import scipy.sparse  # noqa: F401

        from xmc_stream.kernels.parse import sort_rows
        from xmc_stream.store.encoding import index_dtype

        for n in (self.n_features, self.n_labels):
            sort_rows(np.zeros(1, np.int64), np.empty(0, index_dtype(n)), np.empty(0, np.float32))

    def fit(self, room: int) -> int:
        """Choose the size of a block for `room` bytes; returns what it takes at most."""
        self._longest = max(2**12, room // _ENTRY_BYTES)
        self._block = min(_BLOCK, self._longest, max(self._x.entries, self._y.entries, self.n_samples) + 1)
        return self._block * _ENTRY_BYTES

    def position(self) -> int:
        """Bytes of the input, in proportion to the rows."""
        return self.bytes_in * self._rows_done // max(self.n_samples, 1)

    def close(self) -> None:
        """Let the matrices go."""
        self._x = self._y = cast(Any, None)

    def blocks(self) -> Iterator[Rows]:
        """All rows, block by block. Raises InputError naming the row (from 0)."""
        X, Y = self._x.load(), self._y.load()
        start = 0
        while start < self.n_samples:
            stop = self._cut(X, Y, start)
            x_indptr, x_indices, values = self._slice(X, self._x.name, start, stop, self.n_features, "features D")
            with np.errstate(over="ignore"):
                x_data = values.astype(np.float32)
            finite = np.isfinite(x_data)
            if not finite.all():
                at = int(np.argmin(finite))
                row = start + int(np.searchsorted(x_indptr, at, side="right")) - 1
                raise InputError(f"{self._x.name}: value {values[at]} in row {row} (from 0) is not finite in float32")
            self._sort(x_indptr, x_indices, x_data, self._x.name, start)
            y_indptr, y_indices, values = self._slice(Y, self._y.name, start, stop, self.n_labels, "labels K")
            if np.isnan(values).any():
                row = start + int(np.searchsorted(y_indptr, int(np.argmax(np.isnan(values))), side="right")) - 1
                raise InputError(f"{self._y.name}: a label in row {row} (from 0) is NaN: labels are zero or not")
            positive = (values != 0).astype(np.float32)
            self._sort(y_indptr, y_indices, positive, self._y.name, start)
            y_indptr, y_indices = positives(y_indptr, y_indices, positive)
            self._rows_done = stop
            yield x_indptr, x_indices, x_data, y_indptr, y_indices
            start = stop

    def _cut(self, X: Any, Y: Any, start: int) -> int:
        """The row where a block from `start` on ends: within the planned entries, or after one row if it is longer."""
        end = min(start + self._block, self.n_samples)
        for matrix, name in ((X, self._x.name), (Y, self._y.name)):
            indptr = matrix.indptr[start : end + 1]
            n = int(np.searchsorted(indptr, int(indptr[0]) + self._block, side="right")) - 1
            if n == 0 and int(indptr[1]) - int(indptr[0]) > self._longest:
                need = format_size((int(indptr[1]) - int(indptr[0])) * _ENTRY_BYTES)
                raise MemoryLimitError(f"{name}: row {start} (from 0) takes {need}: raise --memory-limit")
            end = min(end, start + max(n, 1))
        return end

    def _slice(
        self, matrix: Any, name: str, start: int, stop: int, bound: int, what: str
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
        """Rows [start, stop): indptr from 0, a copy of the indices, a view of the values."""
        from xmc_stream.store.encoding import index_dtype

        indptr = matrix.indptr[start : stop + 1].astype(np.int64)
        first, last = int(indptr[0]), int(indptr[-1])
        indptr -= first
        indices = matrix.indices[first:last]
        if len(indices) and int(indices.max()) >= bound:
            at = int(np.argmax(indices >= bound))
            row = start + int(np.searchsorted(indptr, at, side="right")) - 1
            origin = f", which comes from --like {self._like.name}" if self._like else ""
            raise InputError(
                f"{name}: index {indices[at]} in row {row} (from 0) is not below the number of {what} = {bound}{origin}"
            )
        return indptr, indices.astype(index_dtype(bound)), matrix.data[first:last]

    @staticmethod
    def _sort(
        indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[np.float32], name: str, start: int
    ) -> None:
        from xmc_stream.kernels.parse import sort_rows

        row = sort_rows(indptr, indices, data)
        if row >= 0:
            raise InputError(
                f"{name}: row {start + row} (from 0) has an index twice: call its sum_duplicates(), or remove one"
            )


def positives(
    indptr: NDArray[np.int64], indices: NDArray[Any], positive: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The entries of Y that are not stored zeros. positive (nnz,): one or zero for each, of any type."""
    if positive.all():
        return indptr, indices
    before = np.zeros(len(positive) + 1, np.int64)
    np.cumsum(positive, out=before[1:])
    return before[indptr], indices[positive != 0]


def _in_memory(matrix: Any, name: str) -> _Matrix:
    from scipy import sparse

    is_sparse: bool = sparse.issparse(matrix)
    if not is_sparse or matrix.ndim != 2:
        kind = type(matrix).__name__
        raise InputError(f"{name} must be a two-dimensional sparse matrix of scipy, got {kind}: wrap it in csr_array")
    _check_kind(matrix.dtype, name)
    entries = int(matrix.nnz)
    if matrix.format in ("bsr", "dia"):  # their nnz leaves out what they store besides
        entries = max(entries, matrix.data.size)
    n_rows, n_columns = (int(n) for n in matrix.shape)
    bytes_in = entries * (matrix.dtype.itemsize + 4) + 8 * (n_rows + 1)
    load_bytes = 0 if matrix.format == "csr" else _csr_bytes(entries, matrix.dtype, n_rows)
    return _Matrix(name, (n_rows, n_columns), entries, bytes_in, load_bytes, lambda: _as_csr(matrix, name))


def _in_file(path: Path) -> _Matrix:
    """What a .npz holds, by its directory and the heads of its arrays; nothing large is read."""
    name = str(path)
    with _reading(path):
        sizes = {}
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as file:
                    sizes[member.filename.removesuffix(".npy")] = _npy_head(cast(BinaryIO, file), member.file_size)
        arrays = {name: shape for name, (shape, _) in sizes.items()}
        if not {"format", "shape", "data"} <= set(arrays) or arrays["format"] != () or arrays["shape"] != (2,):
            raise ValueError(f"it has the arrays {', '.join(sorted(arrays)) or '(none)'}")
        if sizes["format"][1].itemsize + sizes["shape"][1].itemsize > 64:
            raise ValueError(f"format of type {sizes['format'][1]}, shape of type {sizes['shape'][1]}")
        with np.load(path, allow_pickle=False) as file:
            kind = file["format"].item()
            kind = kind.decode("ascii") if isinstance(kind, bytes) else str(kind)
            n_rows, n_columns = (int(n) for n in file["shape"])
        if kind not in _FORMATS or min(n_rows, n_columns) < 0:
            raise ValueError(f"format {kind!r}, shape {n_rows} x {n_columns}")
    entries, dtype = int(np.prod(arrays["data"], dtype=object)), sizes["data"][1]
    _check_kind(dtype, name)
    held = sum(int(np.prod(shape, dtype=object)) * dtype.itemsize for shape, dtype in sizes.values())
    # scipy may turn indices of int64 into int32 when it puts the arrays together
    held += sum(4 * int(np.prod(shape, dtype=object)) for array, (shape, _) in sizes.items() if array != "data")
    if kind != "csr":
        held += _csr_bytes(entries, dtype, n_rows)
    return _Matrix(name, (n_rows, n_columns), entries, path.stat().st_size, held, lambda: _load(path))


def _npy_head(file: BinaryIO, n_bytes: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array in a .npz. Raises ValueError where its data would not fit into n_bytes."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject or int(np.prod(shape, dtype=object)) * dtype.itemsize > n_bytes:
        raise ValueError(f"an array of shape {shape} and type {dtype} in {n_bytes} bytes")
    return shape, dtype


def _load(path: Path) -> Any:
    from scipy import sparse

    with _reading(path):
        matrix = sparse.load_npz(path)
    return _as_csr(matrix, str(path))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Put errors of reading a .npz into words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the name") from None
    except (ValueError, LookupError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is not a sparse matrix of scipy.sparse.save_npz ({why}): save it again") from None


def _check_kind(dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind not in "biuf":
        raise InputError(f"{name} has values of type {dtype}: they must be real numbers")


def _csr_bytes(entries: int, dtype: np.dtype[Any], n_rows: int) -> int:
    """What making CSR of another format takes: the result, and the indices once more in its integers."""
    return entries * (2 * 8 + dtype.itemsize) + 8 * (n_rows + 1)


def _as_csr(matrix: Any, name: str) -> Any:
    """The matrix as CSR, checked so that no index leads out of it. Its own arrays where it is CSR."""
    if matrix.format in ("csr", "csc", "bsr"):
        _check_compressed(matrix, name)
    if matrix.format == "coo":
        for axis, indices in enumerate((matrix.row, matrix.col)):
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < matrix.shape[axis]:
                raise InputError(f"{name}: an index is outside of its shape {matrix.shape}: make the matrix again")
        csr = matrix.tocsr()
        if csr.nnz != matrix.nnz:  # scipy has added them up without a word
            raise InputError(f"{name} has an entry twice: call its sum_duplicates(), or remove one")
        return csr
    return matrix if matrix.format == "csr" else matrix.tocsr()


def _check_compressed(matrix: Any, name: str) -> None:
    """Refuse arrays that contradict the shape: scipy takes them as they come."""
    blocked = matrix.blocksize if matrix.format == "bsr" else (1, 1)
    lines, bound = (size // step for size, step in zip(matrix.shape, blocked, strict=True))
    if matrix.format == "csc":
        lines, bound = bound, lines
    indptr, indices = matrix.indptr, matrix.indices
    good = len(indptr) == lines + 1 and int(indptr[0]) == 0
    for start in range(0, lines, _BLOCK):
        window = indptr[start : start + _BLOCK + 1]
        good = good and bool((window[1:] >= window[:-1]).all())
    nnz = int(indptr[-1]) if good else 0
    good = good and nnz <= min(len(indices), len(matrix.data))
    if good and nnz:
        good = int(indices[:nnz].min()) >= 0 and int(indices[:nnz].max()) < bound
    if not good:
        raise InputError(f"{name}: its arrays do not fit its shape {matrix.shape}: make the matrix again")
