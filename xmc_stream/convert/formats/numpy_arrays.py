"""NumPy's .npy files: CSR triples, dense features (embeddings), class ids. Read in windows, cut into ranges of rows.

A triple is a folder with indptr.npy, indices.npy, data.npy and perhaps shape.npy, or files NAME.indptr.npy, ... of which
one is named; labels may lack the data. Of a dense matrix (N x D, C order) all that is not zero in float32 is an entry. A
array of integers of shape (N,) or (N, 1) holds the class of each row, from zero.
"""

from __future__ import annotations

import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from xmc_stream.convert.lines.files import reading
from xmc_stream.convert.matrices.arrays import (
    Array,
    Take,
    check_file,
    classes,
    csr_side,
    dense,
    string_classes,
)
from xmc_stream.convert.matrices.sides import Side
from xmc_stream.convert.messages import one_line
from xmc_stream.errors import InputError
from xmc_stream.system.files import regular

_LONGEST_HEADER = 2**14
_TRIPLE = ("indptr", "indices", "data", "shape")
_TRIPLE_NAME = re.compile(r"(.*\.)?(?:indptr|indices|data|shape)\.npy")


@dataclass(frozen=True)
class Head:
    """What an .npy header says. n_bytes: of the header."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    n_bytes: int

    @property
    def n_items(self) -> int:
        """Of all dimensions together, exactly."""
        return int(np.prod(self.shape, dtype=object))


def read_head(file: IO[bytes], n_bytes: int) -> Head:
    """The header of an array in a file of n_bytes. Raises ValueError where it is none, or promises more than is there."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError("no .npy header of version 1 or 2")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2 are understood too
            shape, fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"a header that is not understood, {error}") from None
    head = Head(shape, fortran, dtype, file.tell())
    if dtype.hasobject:
        raise ValueError("Python objects, which are never unpickled")
    if any(size < 0 for size in shape) or head.n_items * dtype.itemsize > n_bytes - head.n_bytes:
        raise ValueError(f"an array of shape {shape} and type {dtype} in {n_bytes} bytes")
    return head


def file_array(path: Path, offset: int, head: Head) -> Array:
    """Raw items in a file, from byte `offset` on."""
    return Array(head.n_items, head.dtype, partial(_items, str(path.absolute()), offset, head.dtype))


@contextmanager
def _items(path: str, offset: int, dtype: np.dtype[Any], start: int, stop: int) -> Iterator[Take]:
    with reading(path):
        file = open(path, "rb", buffering=0, opener=regular)  # noqa: SIM115 (closed below)

    def take(n: int) -> NDArray[Any]:
        items = np.empty(n, dtype)
        view = memoryview(items.view(np.uint8))  # type: ignore[arg-type]
        with reading(path):
            while view.nbytes:
                done = file.readinto(view)
                if not done:
                    raise InputError(f"{path} ends early: it was changed meanwhile, convert again")
                view = view[done:]
        return items

    with file:
        file.seek(offset + start * dtype.itemsize)
        yield take


def open_side(path: Path, labels: bool = False) -> Side:
    """The matrix that one of the .npy files, or the folder, belongs to. labels: it may be class ids, or lack values."""
    name = _TRIPLE_NAME.fullmatch(path.name)
    if path.is_dir():
        return _triple(path, path, "", labels)
    if name and (path.parent / f"{name[1] or ''}indptr.npy").is_file():
        return _triple(path, path.parent, name[1] or "", labels)
    head, array = _array(path)
    return side_of(str(path), ("dense npy", "npy class names", "npy class ids"), path, head, array, labels)


def side_of(name: str, kinds: Sequence[str], path: Path, head: Head, array: Array, labels: bool, **more: Any) -> Side:
    """One array as a matrix, or as the class of each row. kinds: what each is called: a matrix, names, ids."""
    if labels and (len(head.shape) == 1 or head.shape[1:] == (1,)):
        if head.dtype.kind in "US":
            return string_classes(str(path), kinds[1], (path,), array, more.get("check"))
        if head.dtype.kind not in "iu":
            raise InputError(f"{name} holds {head.dtype} and not class ids: they must be integers from 0, or texts")
        return classes(str(path), kinds[2], (path,), array, **more)
    if len(head.shape) != 2:
        raise InputError(
            f"{name} has the shape {head.shape}: features must be a matrix of two dimensions, labels that or class ids"
        )
    if head.fortran:
        raise InputError(f"{name} lies by columns (Fortran order): save numpy.ascontiguousarray of it")
    n_rows, n_columns = head.shape
    if n_columns == 0:
        raise InputError(f"{name} has the shape {head.shape}, without columns: there is nothing to convert")
    return dense(str(path), kinds[0], (path,), n_rows, n_columns, array, **more)


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
        with arrays["shape"].stream(0, 2) as take:
            n_rows, n_columns = (int(size) for size in take(2))
        if n_columns < 0:
            raise InputError(f"{files['shape']} says {n_rows} x {n_columns}: correct it")
        shape = n_rows, n_columns
    try:
        return csr_side(
            str(path), "npy CSR triple", tuple(present.values()), shape, arrays["indptr"], arrays["indices"],
            arrays.get("data"), divisible=True,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"{path} is not a CSR matrix ({error}): save it again") from None


def _array(path: Path) -> tuple[Head, Array]:
    """An .npy file: its header and where its items are."""
    check_file(path)
    with reading(path), open(path, "rb", opener=regular) as file:
        try:
            head = read_head(file, path.stat().st_size)
        except ValueError as error:
            raise InputError(
                f"{path} is not an .npy file that can be read ({one_line(error)}): save it again"
            ) from None
    return head, file_array(path, head.n_bytes, head)
