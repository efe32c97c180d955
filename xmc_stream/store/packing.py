"""Packs: groups and arrays in one file, for what a run keeps between its jobs.

In folders of its own an array takes two files and two folders, and each of them an fsync of some milliseconds; a pack
takes one. It is read as a folder is: `nodes` describes what lies at PACK/active/indices as if PACK were a folder.

Chunks of 256 KiB (an array that has one only: of its size) stand in the order in which they were full, each with its
crc32c behind it, at multiples of eight. Behind the last one stands the index, a JSON object: of each member what its
zarr.json would say, of an array also where its chunks begin (`places`). Then, little-endian, the length of the index
(8 bytes) and the crc32c of index and length (4 bytes). `nodes` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.encoding import Encoding, LineWriter, Shape, index_dtype
from xmc_stream.store.nodes import CHECKSUM_BYTES, LENGTH_BYTES, Index, checksum, read_index
from xmc_stream.store.places import fsync_folder, naming, remove
from xmc_stream.system.files import outlives_process
from xmc_stream.system.stop import stop_if_unwanted, work_name

CHUNK_BYTES = 2**18  # held of each array
_STEP = 8  # chunks begin at multiples of it: of all sizes of items
_BEHIND = CHECKSUM_BYTES + _STEP  # bytes behind a chunk, at most


class PackWriter:
    """A pack under construction, in a file that is open for writing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self.index: Index = {}

    def put(self, buffer: NDArray[np.uint8], n: int) -> int:
        """Write the chunk that is the first n bytes of a buffer, whose next `_BEHIND` are free; returns where it begins.

        Checksum and filling go behind it, so that all is one write: each takes the interpreter's lock once more.
        """
        place, end = self._at, -(-(n + CHECKSUM_BYTES) // _STEP) * _STEP
        crc = google_crc32c.extend(0, buffer[:n])
        buffer[n:end] = np.frombuffer(crc.to_bytes(CHECKSUM_BYTES, "little").ljust(end - n, b"\0"), np.uint8)
        self._file.write(buffer[:end].data)
        self._at = place + end
        return place

    def group(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Describe a group."""
        self.index[name] = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}

    def write(self, name: str, values: NDArray[Any]) -> None:
        """A whole array."""
        writer = PackedArrayWriter(self, name, values.dtype)
        writer.append(values)
        writer.close()

    def close(self) -> None:
        """Write the index."""
        text = json.dumps(self.index).encode()
        text += len(text).to_bytes(LENGTH_BYTES, "little")
        self._file.write(text + google_crc32c.value(text).to_bytes(CHECKSUM_BYTES, "little"))
        self._file.flush()


class PackedArrayWriter:
    """Appends to a new 1-D array of unknown length in a pack. A chunk is held until it is full."""

    def __init__(self, pack: PackWriter, name: str, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._pack, self._name = pack, name
        self._chunk = np.empty(CHUNK_BYTES + _BEHIND, np.uint8)
        self._filled = 0
        self._places: list[int] = []

    def append(self, values: NDArray[Any]) -> None:
        """Add values (any number) of a kind that the array's type holds."""
        stop_if_unwanted()
        view = np.ascontiguousarray(values, dtype=self._dtype).view(np.uint8)
        while len(view):
            if self._filled == CHUNK_BYTES:
                self._places.append(self._pack.put(self._chunk, CHUNK_BYTES))
                self._filled = 0
            n = min(len(view), CHUNK_BYTES - self._filled)
            self._chunk[self._filled : self._filled + n] = view[:n]
            self._filled, view = self._filled + n, view[n:]

    def close(self) -> None:
        """Write the last chunk, one of several padded with zeros."""
        itemsize = self._dtype.itemsize
        n_bytes = CHUNK_BYTES * len(self._places) + self._filled
        chunk_bytes = self._filled
        if self._places:
            self._chunk[self._filled : CHUNK_BYTES] = 0
            chunk_bytes = CHUNK_BYTES
        if n_bytes:
            self._places.append(self._pack.put(self._chunk, chunk_bytes))
        self._pack.index[self._name] = {
            "zarr_format": 3,
            "node_type": "array",
            "data_type": self._dtype.name,
            "shape": [n_bytes // itemsize],
            "chunk": max(chunk_bytes // itemsize, 1),
            "places": self._places,
        }
        self._chunk = self._chunk[:0]


class PackedMatrixWriter(LineWriter):
    """Appends the lines of a new matrix in a pack: see `LineWriter`."""

    def __init__(
        self, pack: PackWriter, name: str, encoding: Encoding, shape: Shape, data_dtype: DTypeLike
    ) -> None:  # fmt: skip
        super().__init__(name, encoding, shape)
        kinds: dict[str, DTypeLike] = {"indptr": np.int64, "indices": index_dtype(self._bound), "data": data_dtype}
        self._arrays = [PackedArrayWriter(pack, f"{name}/{array}", kind) for array, kind in kinds.items()]
        self._pack = pack
        self._begin(self._arrays)

    def close(self) -> None:
        """Write what is held, and what makes it a matrix."""
        shape = list(self._end())
        for array in self._arrays:
            array.close()
        about = {"encoding-type": self._encoding, "encoding-version": "0.1.0", "shape": shape}
        self._pack.group(str(self._name), about)


@contextmanager
def new_pack(path: Path, durable: bool = True) -> Iterator[PackWriter]:
    """A new pack under a work name, renamed to `path` when the block ends well, else removed; what had the name is replaced.

    A killed process leaves `NAME.partial`, which nobody reads and the next writer of that name replaces (a killed worker
    `NAME.COPY.partial`). durable: the file before it has its name, and its name when the block has ended; not in a folder that
    goes with this process.
    """
    work, durable = work_name(path), durable and outlives_process(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (work, path):  # of a run that an earlier release began
        if folder.is_dir():
            remove(folder)
    try:
        with naming(path):
            with open(work, "wb") as file:
                pack = PackWriter(file)
                yield pack
                stop_if_unwanted()
                pack.close()
                if durable:
                    os.fsync(file.fileno())
            work.replace(path)
            if durable:
                fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            work.unlink()
        raise


def pack_damage(pack: Path) -> str:
    """What is first found to be damaged in a pack, or nothing: its index, or a chunk."""
    try:
        index = read_index(pack)
        with open(pack, "rb", buffering=0) as file:
            for about in index.values():
                for place in about.get("places", ()):
                    file.seek(place)
                    if not checksum(file, about["chunk"] * np.dtype(about["data_type"]).itemsize):
                        return f"{pack} fails its checksum"
    except StoreError:
        return f"{pack} fails its checksum"
    except OSError as error:
        return f"{pack} cannot be read ({error.strerror})"
    return ""
