"""A hash of the arrays of a store alone: what two stores have in common that say different things of themselves.

Each array counts by its name, type, shape and values. Attributes, chunks, codecs and files do not count, nor what a run wrote
down. So a store can be compared with one that another version of the library made.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, described
from xmc_stream.store.comparing import Comparing, compare_while_reading
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.inventory import files_of_store, refuse_broken_seal
from xmc_stream.store.nodes import ZARR_ERRORS, PlainArray, not_understood, read_json, understood
from xmc_stream.system.progress import current

_BLOCK = 1 << 20  # bytes of an array that are in memory at a time
_DENSEST = 1 << 16  # times smaller than its values is an array on disk at most, where others compressed it
_AGAIN = "X/columns/"  # X once more, made when a method asks for it: no reason for another hash


class StoredArrays:
    """What a dataset, a model and predictions are alike in: a folder of arrays."""

    path: Path

    def arrays_digest(self) -> str:
        """A hash of the arrays alone: of the name, type, shape and values of each.

        Attributes, chunks and compression do not enter. So it tells whether two versions of the library wrote the same
        arrays, also where they say different things about them. All arrays of the store are read, except X by columns.

        Returns
        -------
        str
            A SHA-256 hash, in hexadecimal digits.

        Raises
        ------
        StoreError
            The store is damaged: what is read is compared with its checksums.
        """
        return arrays_digest(self.path)


def arrays_digest(path: Path) -> str:
    """See `StoredArrays.arrays_digest`."""
    with compare_while_reading(Comparing((str(path),), uuid.uuid4().hex)):
        for store in (path, path / "observed"):  # a mask has a seal of its own
            if store == path or store.exists():
                refuse_broken_seal(store)
        arrays = {name: described(path / name) for name in _names(path)}
        for name, array in arrays.items():
            _refuse_what_is_not_there(path / name, array)
        bar, done = current(), 0
        whole = max(1, sum(_size(array) for array in arrays.values()))
        bar.phase("hashing the arrays")
        digest = hashlib.sha256()
        for name, array in arrays.items():
            values = hashlib.sha256()
            for block in _blocks(path / name, array):
                values.update(block.data)
                done += block.nbytes
                bar.advance(done / whole)
            about = [name, array.dtype.name, list(_shape(array)), values.hexdigest()]
            digest.update(json.dumps(about).encode() + b"\n")
    return digest.hexdigest()


def _names(path: Path) -> Iterator[str]:
    """The arrays of a store by their places in it, in one order."""
    for name in sorted(files_of_store(path)):
        folder, _, file = name.rpartition("/")
        if file == "zarr.json" and not name.startswith(_AGAIN):
            with understood(path / name):
                is_array = read_json(path / name)["node_type"] == "array"
            if is_array:
                yield folder


def _shape(array: Any) -> tuple[int, ...]:
    return (array.size,) if isinstance(array, PlainArray) else tuple(array.shape)


def _size(array: Any) -> int:
    return math.prod(_shape(array)) * int(array.dtype.itemsize)


def _is_ones(path: Path, array: Any) -> bool:
    """Whether it is the values of a matrix of ones, which have no files."""
    plain = isinstance(array, PlainArray) and path.name == "data"
    return plain and array.fill_value == 1 and array.nchunks_initialized == 0


def _refuse_what_is_not_there(path: Path, array: Any) -> None:
    """Raise StoreError for an array that says it is longer than its files can be: without end, it would take for ever."""
    if _is_ones(path, array):
        indices = described(path.with_name("indices"))
        if _shape(indices) == _shape(array):
            _refuse_what_is_not_there(path.with_name("indices"), indices)
            return
    elif isinstance(array, PlainArray):
        ChunkedArray(array).check_sizes()
        return
    elif _size(array) <= _DENSEST * (folder_bytes(path) + _DENSEST):
        return
    raise StoreError(f"{path} has fewer values than its zarr.json says: the store is damaged; make it again")


def _blocks(path: Path, array: Any) -> Iterator[NDArray[Any]]:
    """The values of an array in turn, little-endian; of one with several dimensions row by row."""
    stored = array.dtype.newbyteorder("<")
    if len(shape := _shape(array)) > 1:
        for start in range(0, shape[0], array.chunks[0]):  # zarr reads whole chunks anyway
            try:
                yield np.ascontiguousarray(array[start : start + array.chunks[0]], stored)
            except ZARR_ERRORS as error:
                raise not_understood(path, error) from None
        return
    items = _BLOCK // int(array.dtype.itemsize)
    if _is_ones(path, array):
        block = np.ones(min(items, array.size), stored)
        for start in range(0, array.size, items):
            yield block[: array.size - start]
        return
    reader = ChunkedArray(array)
    for start in range(0, reader.size, items):
        yield np.ascontiguousarray(reader.read(start, min(start + items, reader.size)), stored)
