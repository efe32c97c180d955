"""NumPy's .npy files: CSR triples, dense features (embeddings), class ids. Read in windows, cut into ranges of rows.

A triple is a folder with indptr.npy, indices.npy, data.npy and perhaps shape.npy, or files NAME.indptr.npy, ... of which
one is named; labels may lack the data. Of a dense matrix (N x D, C order) all that is not zero in float32 is an entry. A
one-dimensional array of integers holds the class of each row, from zero.
"""

from __future__ import annotations

import re
import tokenize
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from xmc_stream.convert.matrices.sides import PART, Matrices, Raw, Side, Size, row_ranges
from xmc_stream.convert.source import Like, Options
from xmc_stream.errors import InputError

NAME = "npy"

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 2**14
_TRIPLE = ("indptr", "indices", "data", "shape")
_TRIPLE_NAME = re.compile(r"(.*\.)?(?:indptr|indices|data|shape)\.npy")
_WINDOW = 2**18  # items read at a time where nothing else says how many


@dataclass(frozen=True)
class Head:
    """What an .npy header says. n_bytes: of the header; n_items: of the array."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    n_bytes: int
    crc: int

    @property
    def n_items(self) -> int:
        """Of all dimensions together, exactly."""
        return int(np.prod(self.shape, dtype=object))


def read_head(file: IO[bytes], n_bytes: int) -> Head:
    """The header of an array in a file of n_bytes. Raises ValueError where it is none, or promises more than is there."""
    begin = file.read(12)
    version = tuple(begin[6:8])
    if not begin.startswith(_MAGIC) or version not in ((1, 0), (2, 0)):
        raise ValueError("no .npy header of version 1 or 2")
    length, before = (int.from_bytes(begin[8:10], "little"), 10) if version == (1, 0) else (_u4(begin), 12)
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    content = begin + file.read(before + length - len(begin))
    if len(content) < before + length:
        raise ValueError("it ends within the header")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2 are understood too
            shape, fortran, dtype = read(_Bytes(content[8:]))  # type: ignore[arg-type]
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"a header that is not understood, {error}") from None
    head = Head(shape, fortran, dtype, len(content), zlib.crc32(content))
    if dtype.hasobject:
        raise ValueError("Python objects, which are never unpickled")
    if any(size < 0 for size in shape) or head.n_items * dtype.itemsize > n_bytes - head.n_bytes:
        raise ValueError(f"an array of shape {shape} and type {dtype} in {n_bytes} bytes")
    return head


def _u4(begin: bytes) -> int:
    return int.from_bytes(begin[8:12], "little")


class _Bytes:
    """Bytes as a file, no more of which is read than there is."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, n: int) -> bytes:
        """The next n bytes."""
        content, self._content = self._content[:n], self._content[n:]
        return content


class Stream(Protocol):
    """Items of an array, one after another."""

    def __enter__(self) -> Stream: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def take(self, n: int) -> NDArray[Any]:
        """The next n items, a fresh array. Raises InputError where the file gives less."""

    def finish(self) -> list[int]:
        """Read what is left; returns checksum and size in bytes of all that was read, or nothing."""


class Array(Protocol):
    """A one-dimensional array on disk: picklable."""

    @property
    def n_items(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def stream(self, start: int, stop: int) -> Stream:
        """Items [start, stop)."""


@dataclass(frozen=True)
class FileArray:
    """Raw items in a file, from byte `offset` on. summed: a checksum of them is made."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    n_items: int
    summed: bool = False

    def stream(self, start: int, stop: int) -> Stream:
        """Items [start, stop)."""
        return _FileStream(self, start, stop)


class _FileStream:
    def __init__(self, array: FileArray, start: int, stop: int) -> None:
        self._array, self._left = array, stop - start
        self._crc = self._n_bytes = 0
        with reading(array.path):
            self._file = open(array.path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self._file.seek(array.offset + start * array.dtype.itemsize)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def take(self, n: int) -> NDArray[Any]:
        items = np.empty(n, self._array.dtype)
        view = memoryview(items.view(np.uint8))  # type: ignore[arg-type]
        with reading(self._array.path):
            while view.nbytes:
                done = self._file.readinto(view)
                if not done:
                    raise InputError(f"{self._array.path} ends early: it was changed meanwhile, convert again")
                view = view[done:]
        if self._array.summed:
            self._crc = zlib.crc32(memoryview(items.view(np.uint8)), self._crc)  # type: ignore[arg-type]
            self._n_bytes += items.nbytes
        self._left -= n
        return items

    def finish(self) -> list[int]:
        if not self._array.summed:
            return []
        while self._left > 0:
            self.take(min(self._left, _WINDOW))
        return [self._crc, self._n_bytes]


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Put errors of reading a file into words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the name") from None


def words(said: object) -> str:
    """What a library or a file says, as part of a line."""
    text = " ".join(str(said).split())[:200]
    return text if text.isprintable() else ascii(text)


def check_file(path: Path, folders: bool = False) -> None:
    """Raises InputError for what is there and is no file, or folder where that may be."""
    if path.exists() and not (path.is_file() or (folders and path.is_dir())):
        raise InputError(f"{path} is not a file: arrays are read at several places at once, not from pipes or folders")


@dataclass(frozen=True)
class CSRReader:
    """A compressed sparse matrix of three arrays, by rows. data: None for ones."""

    name: str
    n_rows: int
    indptr: Array
    indices: Array
    data: Array | None

    def blocks(self, start: int, stop: int, size: Size, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop). The part with the last row reads all arrays to their ends, for their checksums."""
        last = stop == self.n_rows
        # the item that two ranges share belongs to the first of them
        first = 0 if start == 0 else self._item(start)
        with ExitStack() as opened:
            ends = opened.enter_context(self.indptr.stream(start + 1 if start else 0, stop + 1))
            if start == 0:
                self._check(ends.take(1), 0, 0, 0)
            entries = [
                opened.enter_context(array.stream(first, array.n_items if last else self._item(stop)))
                for array in (self.indices, self.data)
                if array is not None
            ]
            yield from self._blocks(ends, entries, start, stop, first, size)
            sums = [stream.finish() for stream in (ends, *entries)]
            if sums[0]:
                notes["checksums"] = sums

    def _blocks(
        self, ends: Stream, entries: Sequence[Stream], start: int, stop: int, first: int, size: Size
    ) -> Iterator[Raw]:
        at = np.empty(0, np.int64)  # where rows end that are not yet passed on
        while start < stop:
            n = min(size.block, stop - start) - len(at)
            if n > 0:
                more = self._check(ends.take(n), start + len(at), int(at[-1]) if len(at) else first)
                at = np.concatenate([at, more])
            n = max(1, int(np.searchsorted(at, first + size.block, side="right")))
            end = int(at[n - 1])
            if n == 1:
                size.check(end - first, self.name, start)
            indptr = np.zeros(n + 1, np.int64)
            np.subtract(at[:n], first, out=indptr[1:])
            taken = [stream.take(end - first) for stream in entries]
            yield indptr, taken[0], taken[1] if len(taken) == 2 else None
            del taken
            at, first, start = at[n:].copy(), end, start + n

    def _item(self, row: int) -> int:
        """Where a row begins."""
        with self.indptr.stream(row, row + 1) as stream:
            return int(self._check(stream.take(1), row, 0)[0])

    def _check(self, ends: NDArray[Any], row: int, low: int, most: int | None = None) -> NDArray[np.int64]:
        """Items of indptr, which must ascend from `low` to `most`, the number of entries if it is not given."""
        if most is None:
            most = min(array.n_items for array in (self.indices, self.data) if array is not None)
        good = (ends >= low) & (ends <= most)
        good[1:] &= ends[1:] >= ends[:-1]
        if not good.all():
            at = int(np.argmin(good))
            raise InputError(
                f"{self.name}: indptr leads from row {row + at} (from 0) to entry {ends[at]}, and they must ascend "
                f"from {low} to {most} at most: its arrays do not fit its shape, make the matrix again"
            )
        return ends.astype(np.int64)


@dataclass(frozen=True)
class CSRSide:
    """A CSR matrix in arrays on disk. divisible: whether they can be read from anywhere. n_columns: None if unknown."""

    name: str
    kind: str
    files: Sequence[Path]
    n_columns: int | None
    arrays: CSRReader
    divisible: bool = True
    load_bytes: int = 0

    @property
    def n_rows(self) -> int:
        """N."""
        return self.arrays.n_rows

    @property
    def entries(self) -> int:
        """At most."""
        return self.arrays.indices.n_items

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART entries, if they are spread evenly."""
        return row_ranges(self.n_rows, max(self.entries, self.n_rows) // PART + 1 if self.divisible else 1)

    def reader(self) -> CSRReader:
        """Reads its rows."""
        return self.arrays

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: .npy files have no checksums."""


def csr_reader(name: str, indptr: Array, indices: Array, data: Array | None, n_rows: int | None) -> CSRReader:
    """The reader of a matrix whose arrays have types that can be one. Raises ValueError where they have not."""
    for array, what in ((indptr, "indptr"), (indices, "indices")):
        if array.dtype.kind not in "iu":
            raise ValueError(f"{what} of type {array.dtype}")
    if indptr.n_items < 1 or (n_rows is not None and indptr.n_items != n_rows + 1):
        raise ValueError(f"{indptr.n_items} items of indptr for {n_rows} rows")
    if data is not None:
        if data.n_items != indices.n_items:
            raise ValueError(f"{indices.n_items} indices and {data.n_items} values")
        check_real(data.dtype, name)
    return CSRReader(name, indptr.n_items - 1, indptr, indices, data)


def check_real(dtype: np.dtype[Any], name: str) -> None:
    """Raises InputError for values that are not real numbers."""
    if dtype.kind not in "biuf":
        raise InputError(f"{name} has values of type {dtype}: they must be real numbers")


@dataclass(frozen=True)
class DenseSide:
    """A dense matrix of real numbers in C order, and its reader."""

    name: str
    kind: str
    files: Sequence[Path]
    n_rows: int
    n_columns: int
    array: Array
    load_bytes: int = 0

    @property
    def entries(self) -> int:
        """At most: all."""
        return self.n_rows * self.n_columns

    def ranges(self) -> list[tuple[int, int]]:
        """Of about PART entries."""
        return row_ranges(self.n_rows, max(self.entries, self.n_rows) // PART + 1)

    def reader(self) -> DenseSide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: Size, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop) without their zeros, of either sign, and values that are zero in float32."""
        size.check(2 * self.n_columns, self.name, start)  # finding what is not zero takes as much again
        step = max(1, min(size.block, size.block // 2 // max(self.n_columns, 1)))
        with self.array.stream(start * self.n_columns, stop * self.n_columns) as stream:
            for row in range(start, stop, step):
                n = min(step, stop - row)
                block = stream.take(n * self.n_columns).reshape(n, self.n_columns)
                with np.errstate(over="ignore", invalid="ignore"):
                    there = block.astype(np.float32) != 0
                indptr = np.zeros(n + 1, np.int64)
                np.cumsum(np.count_nonzero(there, axis=1), out=indptr[1:])
                indices = np.nonzero(there)[1]
                yield indptr, indices, block[there]


@dataclass(frozen=True)
class ClassSide:
    """The class of each row, and its reader."""

    name: str
    kind: str
    files: Sequence[Path]
    array: Array
    n_columns: int | None = None
    load_bytes: int = 0

    @property
    def n_rows(self) -> int:
        """N."""
        return self.array.n_items

    @property
    def entries(self) -> int:
        """One a row."""
        return self.array.n_items

    def ranges(self) -> list[tuple[int, int]]:
        """Of PART rows."""
        return row_ranges(self.n_rows, self.n_rows // PART + 1)

    def reader(self) -> ClassSide:
        """It reads its rows."""
        return self

    def settle(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def blocks(self, start: int, stop: int, size: Size, notes: dict[str, Any]) -> Iterator[Raw]:
        """Rows [start, stop), each with one entry."""
        with self.array.stream(start, stop) as stream:
            for row in range(start, stop, size.block):
                n = min(size.block, stop - row)
                yield np.arange(n + 1), stream.take(n), None


def recognises(path: Path, head: bytes) -> bool:
    """An .npy file, or a folder with the arrays of a CSR matrix."""
    return head.startswith(_MAGIC) or (path.is_dir() and (path / "indptr.npy").is_file())


def open_source(paths: Sequence[Path], options: Options, like: Like | None) -> Matrices:
    """Features in .npy files and labels in any files of matrices. Raises InputError."""
    from xmc_stream.convert.formats.labels import label_sides

    x = [open_side(path) for path in paths]
    return Matrices(x, label_sides(x, paths, options), options, like)


def open_side(path: Path, labels: bool = False) -> Side:
    """The matrix that one of the .npy files, or the folder, belongs to. labels: it may be class ids, or lack values."""
    name = _TRIPLE_NAME.fullmatch(path.name)
    if path.is_dir():
        return _triple(path, path, "", labels)
    if name and (path.parent / f"{name[1] or ''}indptr.npy").is_file():
        return _triple(path, path.parent, name[1] or "", labels)
    head, array = _array(path)
    if len(head.shape) == 1 and labels:
        if head.dtype.kind not in "iu":
            raise InputError(f"{path} holds {head.dtype} and not class ids: they must be integers from 0")
        return ClassSide(str(path), "npy class ids", (path,), array)
    if len(head.shape) != 2:
        raise InputError(
            f"{path} has the shape {head.shape}: features must be a matrix of two dimensions, labels that or class ids"
        )
    if head.fortran:
        raise InputError(f"{path} lies by columns (Fortran order): save numpy.ascontiguousarray of it")
    if head.shape[1] == 0:
        raise InputError(f"{path} has the shape {head.shape}, without columns: there is nothing to convert")
    check_real(head.dtype, str(path))
    return DenseSide(str(path), "dense npy", (path,), *head.shape, array)


def _triple(path: Path, folder: Path, prefix: str, labels: bool) -> Side:
    files = {key: folder / f"{prefix}{key}.npy" for key in _TRIPLE}
    present = {key: file for key, file in files.items() if file.exists() or key in ("indptr", "indices")}
    if "data" not in present and not labels:
        raise InputError(f"{files['data']} does not exist: features need values, labels alone may be without")
    arrays = {}
    for key, file in present.items():
        head, arrays[key] = _array(file)
        if len(head.shape) != 1:
            raise InputError(f"{file} has the shape {head.shape}: arrays of a CSR matrix have one dimension")
    shape: tuple[int | None, int | None] = (None, None)
    if "shape" in arrays:
        if arrays["shape"].n_items != 2 or arrays["shape"].dtype.kind not in "iu":
            raise InputError(f"{files['shape']} must hold two integers, the numbers of rows and columns")
        with arrays["shape"].stream(0, 2) as stream:
            n_rows, n_columns = (int(size) for size in stream.take(2))
        if n_columns < 0:
            raise InputError(f"{files['shape']} says {n_rows} x {n_columns}: correct it")
        shape = n_rows, n_columns
    try:
        reader = csr_reader(str(path), arrays["indptr"], arrays["indices"], arrays.get("data"), shape[0])
    except ValueError as error:
        raise InputError(f"{path} is not a CSR matrix ({error}): save it again") from None
    return CSRSide(str(path), "npy CSR triple", tuple(present.values()), shape[1], reader)


def _array(path: Path) -> tuple[Head, FileArray]:
    """An .npy file: its header and where its items are."""
    check_file(path)
    with reading(path), open(path, "rb") as file:
        try:
            head = read_head(file, path.stat().st_size)
        except ValueError as error:
            raise InputError(f"{path} is not an .npy file that can be read ({words(error)}): save it again") from None
    return head, FileArray(str(path.absolute()), head.n_bytes, head.dtype, head.n_items)
