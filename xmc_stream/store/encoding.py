"""How arrays and sparse matrices lie on disk, and the writers that put them there.

A 1-D array is chunked, uncompressed and crc32c-checked: chunk k is the file `c/k`, raw little-endian values and four
bytes of checksum, which stands in the array's zarr.json too: a chunk file of another array is told from its own. Chunks
hold 32 MiB, 4 MiB in a model: a multiple of every page size in use. An array that is no larger has one chunk of its own size.
A sparse matrix is a group in anndata's encoding 0.1.0.

Packs are groups and arrays in one file, for what a run keeps between its jobs. In folders of its own an array takes two files
and two folders, and each of them an fsync of some milliseconds; a pack takes one. It is read as a folder is: `nodes`
describes what lies at PACK/active/indices as if PACK were a folder. Chunks of 256 KiB (an array that has one only: of its
size) stand in the order in which they were full, each with its crc32c behind it, at multiples of eight. Behind the last one
stands the index, a JSON object: of each member what its zarr.json would say, of an array also where its chunks begin
(`places`). Then, little-endian, the length of the index (8 bytes) and the crc32c of index and length (4 bytes).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.chunks import ChunkedArray, open_array
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import CHECKSUM_BYTES, LENGTH_BYTES, Group, Index, PlainArray, checksum, read_index
from xmc_stream.store.places import fsync_folder, naming, new_folder, remove
from xmc_stream.store.remote import link_or_copy, local_path, size_of
from xmc_stream.system.files import outlives_process
from xmc_stream.system.stop import stop_if_unwanted, work_name

CHUNK_BYTES = 32 * 2**20  # of an array in a dataset or model
SCRATCH_CHUNK_BYTES = 2**20  # of an array that only one run reads: small, as a writer's buffer is one chunk
NARROW_BOUND = 1 << 16  # indices below it fit into two bytes
_EVEN = 64 * 2**10  # of which chunks of other sizes are multiples: of every page size in use
_WRITE = 2**18  # bytes written at a time
PACK_CHUNK_BYTES = 2**18  # held of each array of a pack
_STEP = 8  # chunks of a pack begin at multiples of it: of all sizes of items
_BEHIND = CHECKSUM_BYTES + _STEP  # bytes behind a chunk, at most

Attributes = Mapping[str, Any]
Encoding = Literal["csr_matrix", "csc_matrix"]
Shape = tuple[Any, Any]  # of a matrix that is written: the number of its lines may be None


def index_dtype(bound: int) -> np.dtype[np.signedinteger[Any]]:
    """int32 where indices below `bound` fit, else int64."""
    return np.dtype(np.int32 if bound <= np.iinfo(np.int32).max else np.int64)


_PIECE = 1 << 15  # items that a copy moves at a time
COPY_BYTES = 2**20  # of an array that is read to be put behind another one: held beside a piece as large


class ArrayWriter:
    """Appends to a new 1-D zarr array of unknown length; chunk files are written as values come, nothing is held.

    What has the name is replaced. close hashes the logical values (little-endian) by sha256, whatever the chunks.
    linked, copied: bytes of chunk files of other arrays that `extend` shares with them, or copied as it could not.
    """

    def __init__(self, group: Group, name: str, dtype: DTypeLike, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._chunk_bytes = chunk_bytes // self.dtype.itemsize * self.dtype.itemsize
        self._folder = group.path / name
        try:
            self._folder.mkdir()
        except FileExistsError:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        (self._folder / "c").mkdir()
        self._file: BinaryIO | None = None
        self._open: list[BinaryIO] = []
        weakref.finalize(self, _close, self._open)
        self._filled = 0  # bytes in the last chunk
        self._chunks = 0
        self._crc = 0
        self._crcs: list[str] = []  # of the chunks, in eight digits each
        self._hash = hashlib.sha256()
        self.linked = self.copied = 0

    def append(self, values: NDArray[Any]) -> None:
        """Add values (any number) of a kind that the array's type holds."""
        stop_if_unwanted()
        view = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8)
        self._hash.update(view.data)
        while len(view):
            if self._file is None:
                self._file = open(self._folder / "c" / str(self._chunks), "wb", _WRITE)  # noqa: SIM115 (see _end_chunk)
                self._open[:] = [self._file]
                self._chunks, self._filled, self._crc = self._chunks + 1, 0, 0
            n = min(len(view), self._chunk_bytes - self._filled)
            self._put(view[:n])
            view = view[n:]
            if self._filled == self._chunk_bytes:
                self._end_chunk()

    def extend(self, source: ChunkedArray, start: int = 0) -> None:
        """Add the values of a stored array from `start` on, of chunks that are compared with their checksums first.

        Full chunk files are shared by hard links where they fit what is here; they are copied where the file system has
        no hard links to them. All else is written as values. Raises StoreError naming a chunk that is damaged.
        """
        values = np.empty(COPY_BYTES // source.dtype.itemsize, source.dtype)
        for k in range(start // source.chunk, source.n_chunks):
            first, stop = max(start, k * source.chunk), min((k + 1) * source.chunk, source.size)
            whole = stop - first == source.chunk and self._takes_chunks_of(source)
            if source.path is not None:
                source.verify_chunk(k)
            if whole:
                linked = link_or_copy(source.chunk_file(k), self._folder / "c" / str(self._chunks))
                self.linked += source.chunk_bytes * linked
                self.copied += source.chunk_bytes * (not linked)
                self._crcs.append(source.stored_crc(k))
                self._chunks, self._filled = self._chunks + 1, self._chunk_bytes
            for low in range(first, stop, len(values)):
                piece = source.read(low, min(low + len(values), stop), values)
                if whole:
                    self._hash.update(piece.data)
                else:
                    self.append(piece)

    def _takes_chunks_of(self, source: ChunkedArray) -> bool:
        """Whether full chunk files of a stored array can be next here: of one size, type and order of bytes."""
        of_mine = source.chunk * self.dtype.itemsize == source.chunk_bytes == self._chunk_bytes  # widened ones are not
        return source.path is not None and source.dtype == self.dtype and of_mine and self._file is None

    def _put(self, view: NDArray[np.uint8]) -> None:
        if self._file is not None:
            self._file.write(view.data)
        self._crc = google_crc32c.extend(self._crc, view)
        self._filled += len(view)

    def _end_chunk(self) -> None:
        if self._file is not None:
            self._file.write(self._crc.to_bytes(CHECKSUM_BYTES, "little"))
            self._crcs.append(f"{self._crc:08x}")
            # the disk begins to write: who publishes waits less
            if self._filled == CHUNK_BYTES and hasattr(os, "posix_fadvise"):
                self._file.flush()
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._file.close()
            self._file = None

    def close(self) -> str:
        """End the last chunk, one of several padded with zeros; returns the sha256 of all values, in hexadecimal."""
        size = max(0, self._chunks - 1) * self._chunk_bytes + self._filled
        chunk = self._chunk_bytes if self._chunks > 1 else max(self._filled, self.dtype.itemsize)
        if self._file is not None:
            zeros = np.zeros(_WRITE, np.uint8)
            while self._filled < chunk:
                self._put(zeros[: chunk - self._filled])
            self._end_chunk()
        itemsize = self.dtype.itemsize
        crcs = "".join(self._crcs)
        PlainArray(self._folder, self.dtype, size // itemsize, chunk // itemsize, 0.0, crcs=crcs).write()
        return self._hash.hexdigest()


def write_arrays(group: Group, arrays: Mapping[str, NDArray[Any]], chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write arrays that are in memory, by name."""
    for name, values in arrays.items():
        writer = ArrayWriter(group, name, values.dtype, chunk_bytes)
        writer.append(values)
        writer.close()


def _close(files: list[BinaryIO]) -> None:
    for file in files:
        with suppress(OSError):  # of a disk that is full: an array that was abandoned is no loss
            file.close()


def cut_evenly(group: Group, name: str) -> None:
    """Write a finished array again in as many chunks that are smaller, if more than a ninth of its bytes is padding."""
    array = open_array(group.path / name)
    n_bytes, n = array.size * array.dtype.itemsize, array.n_chunks
    if n < 2 or n * array.chunk_bytes - n_bytes <= n_bytes // 8:
        return
    writer = ArrayWriter(group, f"{name}.again", array.dtype, -(-n_bytes // (n * _EVEN)) * _EVEN)
    for start in range(0, array.size, _PIECE):
        writer.append(array.read(start, min(start + _PIECE, array.size)))
    writer.close()
    shutil.rmtree(group.path / name)
    (group.path / f"{name}.again").rename(group.path / name)


class LineWriter:
    """Appends the rows of a new CSR matrix, or the columns of a CSC matrix (called lines here), to its arrays.

    name: of the matrix, for messages. shape: the number of lines may be None, as it is not known before the end. lines,
    nnz: so far.
    """

    def __init__(self, name: object, encoding: Encoding, shape: Shape) -> None:
        self._name, self._encoding = name, encoding
        self._n_lines, self._bound = shape if encoding == "csr_matrix" else shape[::-1]
        self.lines = self.nnz = 0

    def _begin(self, arrays: Sequence[Any]) -> None:
        """arrays: indptr, indices and, if not every value is one, data."""
        self._indptr, self._indices, *self._data = arrays
        self._indptr.append(np.zeros(1, np.int64))

    def _end(self) -> tuple[int, int]:
        """The shape, when all lines are there."""
        if self._n_lines not in (None, self.lines):
            raise StoreError(f"{self._name}: {self.lines} lines were written where {self._n_lines} were promised")
        return (self.lines, self._bound) if self._encoding == "csr_matrix" else (self._bound, self.lines)

    def append(self, lengths: NDArray[Any], indices: NDArray[Any], data: NDArray[Any] | None = None) -> None:
        """Add lines: lengths (n,), and the indices (sorted, unique in a line) and values of all of them in turn.

        The indices and values of a long line may follow in pieces, with no lengths.
        """
        ends = self.nnz + np.cumsum(lengths, dtype=np.int64)
        self._indptr.append(ends)
        self._indices.append(indices)
        if data is not None:
            for values in self._data:
                values.append(data)
        self.lines += len(lengths)
        self.nnz += len(indices)

    def copy(self, source: SparseMatrix, start: int, stop: int) -> None:
        """Add lines [start, stop) of a stored matrix, in pieces of a few hundred kilobytes, however long a line is."""
        for line in range(start, stop, _PIECE):
            ends = source.ends(line, min(line + _PIECE, stop))
            self._indptr.append(ends[1:] - ends[0] + self.nnz)
            self.lines += len(ends) - 1
            self.nnz += int(ends[-1] - ends[0])
        for indices, data in source.windows(start, stop, _PIECE):
            self._indices.append(indices)
            if data is not None:
                for values in self._data:
                    values.append(data)


class MatrixWriter(LineWriter):
    """Appends the lines of a new matrix of a group.

    shape: the number of lines may be None where it is not known before the end. data_dtype None: every value is one
    and costs no bytes. narrow: indices take two bytes on disk where they fit. fingerprint (after close) hashes shape and
    values.
    """

    def __init__(
        self,
        group: Group,
        encoding: Encoding,
        shape: Shape,
        data_dtype: DTypeLike | None = np.float32,
        chunk_bytes: int = CHUNK_BYTES,
        narrow: bool = False,
    ) -> None:
        super().__init__(group.path, encoding, shape)
        self._folder, self._chunk_bytes, bound = group.path, chunk_bytes, self._bound
        stored = np.dtype(np.uint16) if narrow and bound <= NARROW_BOUND else index_dtype(bound)
        kinds = {"indptr": np.int64, "indices": stored, "data": data_dtype}
        self._arrays = [ArrayWriter(group, name, kind, chunk_bytes) for name, kind in kinds.items() if kind is not None]
        self.fingerprint = ""
        self._begin(self._arrays)

    def close(self) -> None:
        """Write what is buffered and the attributes that make the group a matrix."""
        shape, hashes = self._end(), [array.close() for array in self._arrays]
        self.fingerprint = finish_matrix(self._folder, self._encoding, shape, self.nnz, hashes, self._chunk_bytes)


def finish_matrix(
    folder: Path,
    encoding: Encoding,
    shape: tuple[int, int],
    nnz: int,
    hashes: list[str],
    chunk_bytes: int = CHUNK_BYTES,
) -> str:
    """Make a group whose arrays are written a matrix; returns its fingerprint, which hashes shape and values.

    hashes: of indptr, indices and data; the last is left out where every value is one.
    """
    if len(hashes) == 2:
        # readers see ones: the fill value of chunks that do not exist; a run that was killed may have come to here
        shutil.rmtree(folder / "data", ignore_errors=True)
        PlainArray(folder / "data", np.dtype("<f4"), nnz, chunk_bytes // 4, 1.0, crcs="").write()
    fingerprint = fingerprint_of(encoding, shape, hashes)
    Group(folder).update_attributes(
        {"encoding-type": encoding, "encoding-version": "0.1.0", "shape": list(shape), "fingerprint": fingerprint}
    )
    return fingerprint


def fingerprint_of(encoding: str, shape: tuple[int, int], hashes: list[str]) -> str:
    """What "the same matrix" means: a hash of shape and values, these by the sha256 of indptr, indices and data."""
    return hashlib.sha256(repr((encoding, shape, hashes)).encode()).hexdigest()


def folder_bytes(path: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(size_of(file) for file in path.rglob("*") if not file.is_dir())


@contextmanager
def new_store(path: Path, attributes: Attributes, work: Path | None = None) -> Iterator[Group]:
    """A new group, a `new_folder`."""
    local_path(path)  # no URL
    with new_folder(path, work) as folder:
        yield Group(folder, attributes)


@contextmanager
def new_matrix(
    path: Path,
    encoding: Encoding,
    shape: tuple[int, int],
    data_dtype: DTypeLike | None = np.float32,
    attributes: Attributes | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[MatrixWriter]:
    """A matrix in a store of its own, renamed to `path` when the block ends well."""
    with new_store(path, attributes or {}) as group:
        writer = MatrixWriter(group, encoding, shape, data_dtype, chunk_bytes)
        yield writer
        writer.close()


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
        self._chunk = np.empty(PACK_CHUNK_BYTES + _BEHIND, np.uint8)
        self._filled = 0
        self._places: list[int] = []

    def append(self, values: NDArray[Any]) -> None:
        """Add values (any number) of a kind that the array's type holds."""
        stop_if_unwanted()
        view = np.ascontiguousarray(values, dtype=self._dtype).view(np.uint8)
        while len(view):
            if self._filled == PACK_CHUNK_BYTES:
                self._places.append(self._pack.put(self._chunk, PACK_CHUNK_BYTES))
                self._filled = 0
            n = min(len(view), PACK_CHUNK_BYTES - self._filled)
            self._chunk[self._filled : self._filled + n] = view[:n]
            self._filled, view = self._filled + n, view[n:]

    def close(self) -> None:
        """Write the last chunk, one of several padded with zeros."""
        itemsize = self._dtype.itemsize
        n_bytes = PACK_CHUNK_BYTES * len(self._places) + self._filled
        chunk_bytes = self._filled
        if self._places:
            self._chunk[self._filled : PACK_CHUNK_BYTES] = 0
            chunk_bytes = PACK_CHUNK_BYTES
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
