"""Reading 1-D zarr arrays: the chunk files themselves where they are plain, through zarr where they are not.

`read` fills private buffers by pread; `map` puts all chunk files of an array behind one contiguous address range.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec

from xmc_stream.errors import StoreError
from xmc_stream.store.nodes import PlainArray, plain_array

_PROT_NONE, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0, 0x02, 0x10, 0x20, 0x4000
_CHECKSUM_BYTES = 4
_OPEN_FILES = 64  # of one array
_STAGING = 1 << 18  # bytes that a sweep reads at a time
# A hole smaller than this is cheaper read over than jumped: see benchmarks/read_paths.py.
_HOLE = 1 << 13


class ChunkedArray:
    """A 1-D array of a store, read by ranges.

    bytes_read counts what `read` returned, `opened` the chunk numbers it touched. Raises StoreError when a chunk is
    missing or not of its full size (checked at once, as behind a map a short file kills the process).
    """

    def __init__(self, array: zarr.Array[Any] | PlainArray) -> None:
        self._array: Any = array
        self.dtype = array.dtype
        self.path: Path | None
        if isinstance(array, PlainArray):
            self.size, self.chunk, self.path = array.size, array.chunk, array.path
        else:
            self.size, self.chunk, self.path = int(array.shape[0]), int(array.chunks[0]), _local_path(array)
        self.bytes_read = 0
        self._files: dict[int, int] = {}
        self._cached: tuple[int, NDArray[Any]] | None = None
        self._staging: NDArray[np.uint8] | None = None
        if self.path is not None:  # elsewhere other writers may leave out chunks of zeros
            self._check_sizes()
            weakref.finalize(self, _close_all, self._files)

    @property
    def n_chunks(self) -> int:
        """Chunks that hold the array's items."""
        return -(-self.size // self.chunk)

    def chunk_file(self, k: int) -> Path:
        """The file of chunk k of a plain local array."""
        if self.path is None:
            raise StoreError(f"{self._array.store_path} is compressed or not local: it has no plain chunk files")
        return self.path / "c" / str(k)

    def _check_sizes(self) -> None:
        expected = self.chunk * self.dtype.itemsize + _CHECKSUM_BYTES
        for k in range(self.n_chunks):
            file = self.chunk_file(k)
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                raise StoreError(f"{file} is missing: the store is damaged; convert or train it again") from None
            if size != expected:
                raise StoreError(f"{file} has {size} bytes instead of {expected}: the store is damaged; make it again")

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Items [start, stop) in a private array, or in `out[: stop - start]`."""
        n = stop - start
        out = np.empty(n, self.dtype) if out is None else out[:n]
        self.bytes_read += n * self.dtype.itemsize
        position = start
        while position < stop:
            k, offset = divmod(position, self.chunk)
            take = min(stop - position, self.chunk - offset)
            part = out[position - start : position - start + take]
            if self.path is None:
                part[:] = self._through_zarr(k)[offset : offset + take]
            else:
                self._pread(k, offset * self.dtype.itemsize, part)
            position += take
        return out

    def read_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Items [first, first + count) of each range (ascending, apart), one after another, into private memory.

        One sweep over the chunks; small holes between ranges are read over.
        """
        some = counts > 0  # an empty range may begin where no chunk is
        firsts, counts = firsts[some], counts[some]
        places = np.concatenate([[0], np.cumsum(counts)])
        self.bytes_read += int(places[-1]) * self.dtype.itemsize
        r = 0
        while r < len(firsts):
            k = int(firsts[r]) // self.chunk
            inside = int(np.searchsorted(firsts, (k + 1) * self.chunk))  # ranges that begin in the chunk
            stop = inside - int(firsts[inside - 1] + counts[inside - 1] > (k + 1) * self.chunk)
            if stop > r:
                self._sweep(k, firsts[r:stop] - k * self.chunk, counts[r:stop], out[places[r] : places[stop]])
            if stop < inside:  # the last one goes on in the next chunk
                first, count = int(firsts[stop]), int(counts[stop])
                self.bytes_read -= count * self.dtype.itemsize
                self.read(first, first + count, out[places[stop] :])
            r = inside

    def _sweep(self, k: int, starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        from xmc_stream.kernels.csr import pread_ranges

        if self.path is None:
            chunk = self._through_zarr(k)
            np.concatenate([chunk[a : a + n] for a, n in zip(starts, counts, strict=True)], out=out)
            return
        itemsize = self.dtype.itemsize
        if self._staging is None:
            self._staging = np.empty(_STAGING, np.uint8)
        if not pread_ranges(
            self._open(k), starts, counts, itemsize, _HOLE // itemsize, self._staging, out.view(np.uint8)
        ):
            raise StoreError(f"{self.chunk_file(k)} ends early or cannot be read: the store is damaged; make it again")

    def _open(self, k: int) -> int:
        fd = self._files.get(k)
        if fd is None:
            while len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            try:
                fd = self._files[k] = os.open(self.chunk_file(k), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except FileNotFoundError:
                raise StoreError(f"{self.chunk_file(k)} is gone: the store is damaged; make it again") from None
        return fd

    def _pread(self, k: int, offset: int, out: NDArray[Any]) -> None:
        fd = self._open(k)
        view = memoryview(out).cast("B")  # type: ignore[arg-type]
        while view.nbytes:
            n = os.preadv(fd, [view], offset)
            if n == 0:
                raise StoreError(f"{self.chunk_file(k)} ends early: the store is damaged; make it again")
            view, offset = view[n:], offset + n

    def _through_zarr(self, k: int) -> NDArray[Any]:
        if self._cached is None or self._cached[0] != k:
            self._cached = None  # one chunk at a time is the bound
            try:
                values = np.asarray(self._array[k * self.chunk : min((k + 1) * self.chunk, self.size)])
            except ValueError as error:
                raise StoreError(
                    f"{self._array.store_path}: chunk {k} cannot be read ({error}); make it again"
                ) from None
            self._cached = (k, values)
        return self._cached[1]

    def verify_chunk(self, k: int) -> None:
        """Compare chunk k with its checksum. Raises StoreError naming the file."""
        crc = 0
        with open(self.chunk_file(k), "rb") as file:
            left = self.chunk * self.dtype.itemsize
            while left:
                piece = file.read(min(left, 1 << 20))
                if not piece:
                    raise StoreError(f"{file.name} ends early: the store is damaged; make it again")
                crc = google_crc32c.extend(crc, piece)
                left -= len(piece)
            stored = int.from_bytes(file.read(_CHECKSUM_BYTES), "little")
        if crc != stored:
            raise StoreError(f"{self.chunk_file(k)} fails its checksum: the store is damaged; make it again")

    def map(self) -> NDArray[Any]:
        """The whole array behind one read-only address range; nothing is read until it is touched.

        Elsewhere than on Linux, and for arrays that are not plain local files, the array is read instead.
        """
        page = mmap.PAGESIZE
        chunk_bytes = self.chunk * self.dtype.itemsize
        if self.path is None or not sys.platform.startswith("linux") or chunk_bytes % page or not self.size:
            values = self.read(0, self.size)
            values.flags.writeable = False
            return values
        total = self.n_chunks * chunk_bytes
        libc = _libc()
        reserve = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        base = libc.mmap(None, total, _PROT_NONE, reserve, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise StoreError(
                f"{self.path}: no address range of {total} bytes to map it; raise the limit on virtual memory"
            )
        for k in range(self.n_chunks):
            fd = os.open(self.chunk_file(k), os.O_RDONLY)
            try:
                got = libc.mmap(base + k * chunk_bytes, chunk_bytes, mmap.PROT_READ, _MAP_PRIVATE | _MAP_FIXED, fd, 0)
            finally:
                os.close(fd)
            if got != base + k * chunk_bytes:
                libc.munmap(base, total)
                raise StoreError(f"{self.chunk_file(k)} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        owner = (ctypes.c_char * total).from_address(base)
        weakref.finalize(owner, libc.munmap, base, total)
        values = np.frombuffer(memoryview(owner), self.dtype, self.size)
        values.flags.writeable = False
        return values


def open_array(path: Path) -> ChunkedArray:
    """The array in a folder. Raises StoreError where there is none."""
    try:
        return ChunkedArray(plain_array(path) or zarr.open_array(path, mode="r"))
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise StoreError(f"{path} is not an array ({error}): the store is damaged; make it again") from None


def read_small(group: Path, name: str) -> NDArray[Any]:
    """A whole array that is known to be small, compared with its checksums. Raises StoreError where it is damaged."""
    array = open_array(group / name)
    if array.path is not None:
        for k in range(array.n_chunks):
            array.verify_chunk(k)
    return array.read(0, array.size)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _close_all(files: dict[int, int]) -> None:
    for fd in files.values():
        os.close(fd)


def _local_path(array: zarr.Array[Any]) -> Path | None:
    """The folder of a local array whose chunk files are its plain values and a checksum, else None."""
    metadata = array.metadata
    if metadata.zarr_format != 3 or not isinstance(array.store, zarr.storage.LocalStore):
        return None
    codecs = [codec for codec in metadata.codecs if not isinstance(codec, Crc32cCodec)]
    plain = len(codecs) == 1 and isinstance(codecs[0], BytesCodec) and len(metadata.codecs) == 2
    if not plain or array.dtype.byteorder == ">" or metadata.chunk_key_encoding.name != "default":
        return None
    return Path(array.store.root) / array.path
