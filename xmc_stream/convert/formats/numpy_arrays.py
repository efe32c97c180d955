"""NumPy's .npy files: CSR triples, dense features (embeddings), class ids. Read in windows, cut into ranges of rows.

A triple is a folder with indptr.npy, indices.npy, data.npy and perhaps shape.npy, or files NAME.indptr.npy, ... of which
one is named; labels may lack the data. Of a dense matrix (N x D, C order) all that is not zero in float32 is an entry. A
array of integers of shape (N,) or (N, 1) holds the class of each row, from zero.
"""

from __future__ import annotations

import re
import tokenize
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from xmc_stream.convert.formats.string_classes import string_classes
from xmc_stream.convert.matrices.arrays import (
    ClassSide,
    CSRSide,
    DenseSide,
    Stream,
    check_file,
    check_real,
    csr_reader,
    reading,
)
from xmc_stream.convert.matrices.sides import Side
from xmc_stream.convert.messages import one_line
from xmc_stream.errors import InputError
from xmc_stream.system.files import regular

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

    @property
    def is_vector(self) -> bool:
        """Whether each row has one item: (N,) or (N, 1), which of labels are classes."""
        return len(self.shape) == 1 or self.shape[1:] == (1,)


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
            self._file = open(array.path, "rb", buffering=0, opener=regular)  # noqa: SIM115 (closed by __exit__)
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


def recognises(path: Path, head: bytes) -> bool:
    """An .npy file, or a folder with the arrays of a CSR matrix."""
    return head.startswith(_MAGIC) or (path.is_dir() and (path / "indptr.npy").is_file())


def open_side(path: Path, labels: bool = False) -> Side:
    """The matrix that one of the .npy files, or the folder, belongs to. labels: it may be class ids, or lack values."""
    name = _TRIPLE_NAME.fullmatch(path.name)
    if path.is_dir():
        return _triple(path, path, "", labels)
    if name and (path.parent / f"{name[1] or ''}indptr.npy").is_file():
        return _triple(path, path.parent, name[1] or "", labels)
    head, array = _array(path)
    if labels and head.is_vector:
        if head.dtype.kind in "US":
            return string_classes(str(path), "npy class names", (path,), array)
        check_classes(head, str(path))
        return ClassSide(str(path), "npy class ids", (path,), array)
    check_dense(head, str(path))
    return DenseSide(str(path), "dense npy", (path,), head.shape[0], head.shape[1], array)


def check_classes(head: Head, name: str) -> None:
    """Raises InputError for an array that is not of class ids."""
    if head.dtype.kind not in "iu":
        raise InputError(f"{name} holds {head.dtype} and not class ids: they must be integers from 0, or texts")


def check_dense(head: Head, name: str) -> None:
    """Raises InputError for an array that is not a matrix by rows."""
    if len(head.shape) != 2:
        raise InputError(
            f"{name} has the shape {head.shape}: features must be a matrix of two dimensions, labels that or class ids"
        )
    if head.fortran:
        raise InputError(f"{name} lies by columns (Fortran order): save numpy.ascontiguousarray of it")
    if head.shape[1] == 0:
        raise InputError(f"{name} has the shape {head.shape}, without columns: there is nothing to convert")
    check_real(head.dtype, name)


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
    with reading(path), open(path, "rb", opener=regular) as file:
        try:
            head = read_head(file, path.stat().st_size)
        except ValueError as error:
            raise InputError(
                f"{path} is not an .npy file that can be read ({one_line(error)}): save it again"
            ) from None
    return head, FileArray(str(path.absolute()), head.n_bytes, head.dtype, head.n_items)
